/* SPDX-License-Identifier: MIT
 *
 * Tokens of byte-packed caches (FMLA_KV_FP8_656, FMLA_KV_FP8_584, FMLA_KV_FP8_576), for tools that make
 * caches.
 */
#ifndef FMLA_SUPPORT_TOKENS_H
#define FMLA_SUPPORT_TOKENS_H

#include <stdint.h>

enum { TOKENS_WIDTH = 576 /* values, at most */, TOKENS_BYTES = 656 /* of a page of one token, at most */ };

/* Quantises a token's values, 576 or 512, into a slot of a page. `of_cache`: scale of an FMLA_KV_FP8_576
 * cache. */
void tokens_store(int32_t format, void *page, int64_t page_size, int64_t slot, const float *values,
                  float of_cache);

/* Replaces a query of bf16 values by its quantised values, as FP8 products over a cache of this format use
 * them. */
void tokens_quantise_query(int32_t format, float values[TOKENS_WIDTH]);

/* Copies the token of a one-token page into a slot of another page. */
void tokens_copy(int32_t format, void *page, int64_t page_size, int64_t slot, const void *one);

#endif

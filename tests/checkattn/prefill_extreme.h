/* SPDX-License-Identifier: MIT
 *
 * Inputs of sparse prefill whose scores are not of ordinary size, one kind beside the other: rows of NaN and of -inf, among
 * others and by whole tiles of 64 heads; rows of +inf, and of one +inf among -inf; scores from -6e37 on, in powers of two, alone or with ordinary ones; a largest score
 * that comes last; lists whose first blocks name no key, or only keys of score -inf. No finite score is so large that fp32 does not
 * hold it, and where one is -inf the values of the key are finite.
 */
#ifndef CHECKATTN_PREFILL_EXTREME_H
#define CHECKATTN_PREFILL_EXTREME_H

#include "prefill_case.h"

/* Puts the keys of a list into the order of its class. */
void prefill_extreme_list(const struct prefill_case *p, int64_t class, int64_t key_head);

/* Makes a drawn key, or query, the one of its slot, or row. */
void prefill_extreme_key(const struct prefill_case *p, uint8_t *token, int64_t slot);
void prefill_extreme_query(struct prefill_case *p, uint8_t *row, int64_t token, int64_t head);

#endif

/* SPDX-License-Identifier: MIT
 *
 * What a bare stream reads in the place of a call of dense decode: the keys that the call counts, once each, request
 * after request through its block table. That are the bytes of the cache in call_work; Q, which is read too, and out are
 * not among them.
 */
#ifndef FLASHMLA_TOOL_BENCH_STREAM_H
#define FLASHMLA_TOOL_BENCH_STREAM_H

#include "call.h"

#include "gpu_stream.h"

/* A vector is one key of one head: [pages, page_size, h_kv] of the contiguous cache, in its order. */
uint32_t bench_stream_vector_bytes(const struct call *call);
int64_t bench_stream_vectors(const struct call *call);

/* Can a stream copy such vectors? It moves 16 bytes at a time; a key of FP8_584 is no multiple of that. */
bool bench_stream_can(const struct call *call);

/* The chunks, each within a page and of at most `most` vectors, in the order in which requests hold them; how many there
 * are. With NULL they are only counted. Of the last page of a request the keys that are there. Tensors lie in host
 * memory; vectors of the cache are fewer than 2^32. */
int64_t bench_stream_chunks(const struct call *call, uint32_t most, struct gpu_stream_chunk *chunks);

/* Makes the list of a call and copies it to the device; `cache` is kv_cache there. gpu_free(list->chunks) frees it. */
bool bench_stream_open(struct gpu_stream_list *list, const struct gpu_stream *stream, const struct call *call,
                       const void *cache, struct fault *fault);

#endif

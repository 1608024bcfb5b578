/* SPDX-License-Identifier: MIT
 *
 * The vectors that a bare stream reads in place of a dense decode call: the keys that the call counts,
 * once each, request after request through its block table. These are the cache bytes in call_work,
 * without Q, which is also read, and out.
 */
#ifndef FLASHMLA_TOOL_BENCH_STREAM_H
#define FLASHMLA_TOOL_BENCH_STREAM_H

#include "call.h"

#include "gpu_stream.h"

/* A vector is one key of one head; vectors are numbered in the order of the contiguous cache, [pages,
 * page_size, h_kv]. */
uint32_t bench_stream_vector_bytes(const struct call *call);
int64_t bench_stream_vectors(const struct call *call);

/* Returns true if the stream can copy such vectors: it copies multiples of 16 bytes, and a key of FP8_584
 * is not one. */
bool bench_stream_can(const struct call *call);

/* Writes the chunks, each within a page and of at most `most` vectors, in the order of requests and their
 * pages, and returns their number. With NULL it only counts. The last page of a request contributes only
 * its used keys. Tensors are in host memory; the cache has fewer than 2^32 vectors. */
int64_t bench_stream_chunks(const struct call *call, uint32_t most, struct gpu_stream_chunk *chunks);

/* Makes the list of a call and copies it to the device; `cache` is kv_cache there. Free list->chunks with
 * gpu_free. */
bool bench_stream_open(struct gpu_stream_list *list, const struct gpu_stream *stream, const struct call *call,
                       const void *cache, struct reason *reason);

#endif

/* SPDX-License-Identifier: MIT */
#include "bench_stream.h"

#include "policy.h"

#include <stdlib.h>

uint32_t bench_stream_vector_bytes(const struct call *call)
{
    const fmla_tensor *cache = call_tensor(call, "kv_cache");
    return (uint32_t)cache->shape[3] * (uint32_t)element_bytes(cache->dtype);
}

bool bench_stream_can(const struct call *call)
{
    return bench_stream_vector_bytes(call) % 16 == 0;
}

int64_t bench_stream_vectors(const struct call *call)
{
    return (int64_t)call_work(call).keys * call_size(call, DIM_h_kv);
}

int64_t bench_stream_chunks(const struct call *call, uint32_t most, struct gpu_stream_chunk *chunks)
{
    const fmla_tensor *blocks = call_tensor(call, "block_table");
    const int64_t page_size = call_size(call, DIM_page_size), h_kv = call_size(call, DIM_h_kv);
    const int64_t max_pages = blocks ? blocks->shape[1] : 1, b = call_size(call, DIM_b);
    const int32_t *table = blocks ? blocks->data : NULL;
    int64_t count = 0;
    for (int64_t r = 0; r < b; r++) {
        const int64_t length = call_length(call, r);
        for (int64_t i = 0; i * page_size < length; i++) {
            const int64_t left = length - i * page_size, keys = left < page_size ? left : page_size;
            const int64_t page = table ? table[r * max_pages + i] : r;
            for (int64_t v = 0; v < keys * h_kv; v += most, count++) {
                const int64_t rest = keys * h_kv - v;
                if (chunks)
                    chunks[count] =
                        (struct gpu_stream_chunk){.first = (uint32_t)(page * page_size * h_kv + v),
                                                  .count = rest < most ? (uint32_t)rest : most};
            }
        }
    }
    return count;
}

bool bench_stream_open(struct gpu_stream_list *list, const struct gpu_stream *stream, const struct call *call,
                       const void *cache, struct reason *reason)
{
    const int64_t *shape = call_tensor(call, "kv_cache")->shape;
    if (shape[0] * shape[1] * shape[2] > UINT32_MAX)
        return reason_set(reason, "the cache has more than 2^32 vectors: use --no-stream");
    const uint32_t bytes = bench_stream_vector_bytes(call);
    const uint32_t most = gpu_stream_most(stream, bytes, bench_stream_vectors(call));
    const int64_t count = bench_stream_chunks(call, most, NULL);
    struct gpu_stream_chunk *chunks = malloc((size_t)(count + 1) * sizeof *chunks);
    if (!chunks) return reason_set(reason, "no memory for the list of what a stream reads");
    bench_stream_chunks(call, most, chunks);
    const bool good = gpu_stream_list_open(list, cache, bytes, chunks, count, reason);
    free(chunks);
    return good;
}

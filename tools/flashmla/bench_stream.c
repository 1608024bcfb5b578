/* SPDX-License-Identifier: MIT */
#include "bench_stream.h"

#include "call.h"

#include <stdlib.h>

uint32_t bench_stream_vector_bytes(const fmla_dense_decode_args *args)
{
    return (uint32_t)args->kv_cache->shape[3] * args->kv_cache->dtype.bits / 8;
}

int64_t bench_stream_vectors(const fmla_dense_decode_args *args)
{
    return call_work(args).keys * args->kv_cache->shape[2];
}

int64_t bench_stream_chunks(const fmla_dense_decode_args *args, uint32_t most,
                            struct gpu_stream_chunk *chunks)
{
    const int64_t page_size = args->kv_cache->shape[1], h_kv = args->kv_cache->shape[2];
    const int64_t max_pages = args->block_table ? args->block_table->shape[1] : 1;
    const int32_t *table = args->block_table ? args->block_table->data : NULL;
    int64_t count = 0;
    for (int64_t r = 0; r < args->q->shape[0]; r++) {
        const int64_t length = call_length(args, r);
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

bool bench_stream_open(struct gpu_stream_list *list, const struct gpu_stream *stream,
                       const fmla_dense_decode_args *args, const void *cache, struct fault *fault)
{
    const int64_t *shape = args->kv_cache->shape;
    if (shape[0] * shape[1] * shape[2] > UINT32_MAX)
        return fault_set(fault, "a cache of more than 2^32 vectors: use --no-stream");
    const uint32_t bytes = bench_stream_vector_bytes(args);
    const uint32_t most = gpu_stream_most(stream, bytes, bench_stream_vectors(args));
    const int64_t count = bench_stream_chunks(args, most, NULL);
    struct gpu_stream_chunk *chunks = malloc((size_t)(count + 1) * sizeof *chunks);
    if (!chunks) return fault_set(fault, "no memory for the list of what a stream reads");
    bench_stream_chunks(args, most, chunks);
    const bool good = gpu_stream_list_open(list, cache, bytes, chunks, count, fault);
    free(chunks);
    return good;
}

/* SPDX-License-Identifier: MIT */
#include "kernels.h"

#include "cuda.h"

#include <string.h>

struct cuda_kernel cuda_kernel_plan = {.image = "any/decode_plan", .name = "decode_plan"};
struct cuda_kernel cuda_kernel_merge = {.image = "any/merge", .name = "merge"};
struct cuda_kernel cuda_kernel_join[2][2][3] = {
    {
        [ELEMENT_BF16] =
            {
                {.image = "any/join_splits", .name = "join_splits_bf16"},
                {.image = "any/join_splits", .name = "join_splits_bf16_halves"},
                {.image = "any/join_splits", .name = "join_splits_bf16_quarters"},
            },
        [ELEMENT_FP16] =
            {
                {.image = "any/join_splits", .name = "join_splits_fp16"},
                {.image = "any/join_splits", .name = "join_splits_fp16_halves"},
                {.image = "any/join_splits", .name = "join_splits_fp16_quarters"},
            },
    },
    {
        [ELEMENT_BF16] =
            {
                {.image = "sm90/sparse_decode/join_half_rows", .name = "join_half_rows_bf16"},
                {.image = "sm90/sparse_decode/join_half_rows", .name = "join_half_rows_bf16_halves"},
                {.image = "sm90/sparse_decode/join_half_rows", .name = "join_half_rows_bf16_quarters"},
            },
        [ELEMENT_FP16] =
            {
                {.image = "sm90/sparse_decode/join_half_rows", .name = "join_half_rows_fp16"},
                {.image = "sm90/sparse_decode/join_half_rows", .name = "join_half_rows_fp16_halves"},
                {.image = "sm90/sparse_decode/join_half_rows", .name = "join_half_rows_fp16_quarters"},
            },
    },
};
struct cuda_kernel cuda_kernel_dense_decode[2][DENSE_DECODE_SHAPE_COUNT] = {
#define SHAPE(rows, keys, warps, stages, q)                                                                  \
    {.image = "sm80/dense_decode/dense_decode_bf16", .name = "sm80_dense_decode_bf16_" #rows "x" #keys},
    [ELEMENT_BF16] = {DENSE_DECODE_SHAPES(SHAPE)},
#undef SHAPE
#define SHAPE(rows, keys, warps, stages, q)                                                                  \
    {.image = "sm80/dense_decode/dense_decode_fp16", .name = "sm80_dense_decode_fp16_" #rows "x" #keys},
    [ELEMENT_FP16] = {DENSE_DECODE_SHAPES(SHAPE)},
#undef SHAPE
};
#define SM90(type, size)                                                                                     \
    {                                                                                                        \
        {.image = "sm90/dense_decode/dense_decode_" #type, .name = "sm90_dense_decode_" #type "_" #size},    \
        {                                                                                                    \
            .image = "sm90/dense_decode/dense_decode_" #type,                                                \
            .name = "sm90_dense_decode_" #type "_" #size "_shared"                                           \
        }                                                                                                    \
    }
struct cuda_kernel cuda_kernel_dense_decode_sm90[2][2][2] = {
    [ELEMENT_BF16] = {SM90(bf16, 512), SM90(bf16, 576)},
    [ELEMENT_FP16] = {SM90(fp16, 512), SM90(fp16, 576)},
};
#undef SM90
#define CACHE(operation, format)                                                                             \
    {                                                                                                        \
        [ELEMENT_BF16] = {.image = "any/" #operation, .name = #operation "_" #format "_bf16"},               \
        [ELEMENT_FP16] = {.image = "any/" #operation, .name = #operation "_" #format "_fp16"},               \
        [ELEMENT_F32] = {.image = "any/" #operation, .name = #operation "_" #format "_fp32"},                \
    }
#define CACHES(operation)                                                                                    \
    [KV_BF16] = CACHE(operation, bf16), [KV_FP16] = CACHE(operation, fp16),                                  \
    [KV_FP8_656] = CACHE(operation, fp8_656), [KV_FP8_584] = CACHE(operation, fp8_584),                      \
    [KV_FP8_576] = CACHE(operation, fp8_576)
_Static_assert(CACHE_FORMATS == (int)KV_FORMATS && CACHE_ELEMENTS == (int)ELEMENT_F32 + 1,
               "a kernel for each");
struct cuda_kernel cuda_kernel_cache_append[CACHE_FORMATS][CACHE_ELEMENTS] = {CACHES(cache_append)};
struct cuda_kernel cuda_kernel_cache_gather[CACHE_FORMATS][CACHE_ELEMENTS] = {CACHES(cache_gather)};
#undef CACHES
#undef CACHE

#define SPARSE(kind)                                                                                         \
    {                                                                                                        \
        .image = "any/sparse_decode", .name = "sparse_decode_" kind                                          \
    }
struct cuda_kernel cuda_kernel_sparse_decode[2][KV_FORMATS] = {
    [ELEMENT_BF16] = {[KV_BF16] = SPARSE("bf16"),
                      [KV_FP8_656] = SPARSE("fp8_656_bf16"),
                      [KV_FP8_584] = SPARSE("fp8_584_bf16")},
    [ELEMENT_FP16] = {[KV_FP16] = SPARSE("fp16"),
                      [KV_FP8_656] = SPARSE("fp8_656_fp16"),
                      [KV_FP8_584] = SPARSE("fp8_584_fp16")},
};
#undef SPARSE
struct cuda_kernel cuda_kernel_sparse_prefill[KV_FORMATS] = {
    [KV_BF16] = {.image = "any/sparse_prefill", .name = "sparse_prefill_bf16"},
    [KV_FP8_656] = {.image = "any/sparse_prefill", .name = "sparse_prefill_fp8_656"},
    [KV_FP8_584] = {.image = "any/sparse_prefill", .name = "sparse_prefill_fp8_584"},
};
struct cuda_kernel cuda_kernel_sparse_prefill_sm90[2][2] = {
    {{.image = "sm90/sparse_prefill/sparse_prefill_bf16", .name = "sm90_sparse_prefill_bf16_512"},
     {.image = "sm90/sparse_prefill/sparse_prefill_bf16", .name = "sm90_sparse_prefill_bf16_576"}},
    {{.image = "sm90/sparse_prefill/sparse_prefill_bf16", .name = "sm90_sparse_prefill_bf16_512_pieces"},
     {.image = "sm90/sparse_prefill/sparse_prefill_bf16", .name = "sm90_sparse_prefill_bf16_576_pieces"}},
};
struct cuda_kernel cuda_kernel_sparse_prefill_join = {.image = "sm90/sparse_prefill/join_pieces",
                                                      .name = "sm90_sparse_prefill_join"};
struct cuda_kernel cuda_kernel_sparse_prefill_sm90_fp8[2] = {
    {.image = "sm90/sparse_prefill/sparse_prefill_fp8", .name = "sm90_sparse_prefill_fp8_656"},
    {.image = "sm90/sparse_prefill/sparse_prefill_fp8", .name = "sm90_sparse_prefill_fp8_584"},
};
struct cuda_kernel cuda_kernel_sparse_decode_sm90[2][2] = {
    {{.image = "sm90/sparse_decode/sparse_decode_bf16", .name = "sm90_sparse_decode_bf16_fp8_656"},
     {.image = "sm90/sparse_decode/sparse_decode_bf16", .name = "sm90_sparse_decode_bf16_fp8_584"}},
    {{.image = "sm90/sparse_decode/small/sparse_decode_bf16",
      .name = "sm90_sparse_decode_small_bf16_fp8_656"},
     {.image = "sm90/sparse_decode/small/sparse_decode_bf16",
      .name = "sm90_sparse_decode_small_bf16_fp8_584"}},
};
#define SPARSE_ROWS(type, width)                                                                             \
    {                                                                                                        \
        .image = "sm90/sparse_decode/bf16/sparse_decode_" #type,                                             \
        .name = "sm90_sparse_decode_" #type "_" #width                                                       \
    }
struct cuda_kernel cuda_kernel_sparse_decode_sm90_rows[2][2] = {
    [ELEMENT_BF16] = {SPARSE_ROWS(bf16, 512), SPARSE_ROWS(bf16, 576)},
    [ELEMENT_FP16] = {SPARSE_ROWS(fp16, 512), SPARSE_ROWS(fp16, 576)},
};
#undef SPARSE_ROWS

struct result_params cuda_result_params(const struct result_rules *rules)
{
    return (struct result_params){
        .attn_sink = rules->attn_sink, .lse_of_empty = rules->lse_of_empty, .lse_factor = rules->lse_factor};
}

struct sparse_cache_params cuda_sparse_cache_params(const struct sparse_cache *cache)
{
    const int64_t slots = cache->pages * cache->page_size, most = (int64_t)1 << 31; /* indices are int32 */
    struct sparse_cache_params params = {
        .data = cache->data,
        .page_bytes = cache->page_bytes,
        .slot_bytes = cache->slot_bytes,
        .indices = cache->indices,
        .slots = (uint32_t)(slots < most ? slots : most),
        .page_size = (int32_t)cache->page_size,
        .page_divisor = divisor_of((uint32_t)(cache->page_size ? cache->page_size : 1)),
    };
    memcpy(params.indices_stride, cache->indices_stride, sizeof params.indices_stride);
    return params;
}

bool cuda_rows_aligned(const void *data, const int64_t *shape, const int64_t *stride, int dims,
                       int64_t element_bytes, int64_t bytes)
{
    if ((uintptr_t)data % (uintptr_t)bytes) return false;
    for (int i = 0; i < dims; i++)
        if (shape[i] > 1 && stride[i] % (bytes / element_bytes)) return false;
    return true;
}

fmla_status cuda_prepare(int32_t id)
{
    static const char op[] = "prepare";
    struct cuda_scope scope;
    fmla_status status = cuda_enter(op, "device", id, &scope);
    if (status) return status;
    status = cuda_load(op, &scope, &cuda_kernel_plan, 0);
    if (!status) status = cuda_load(op, &scope, &cuda_kernel_merge, 0);
    for (int i = 0; i < CACHE_FORMATS * CACHE_ELEMENTS; i++) {
        const int format = i / CACHE_ELEMENTS, element = i % CACHE_ELEMENTS;
        if (!status) status = cuda_load(op, &scope, &cuda_kernel_cache_append[format][element], 0);
        if (!status) status = cuda_load(op, &scope, &cuda_kernel_cache_gather[format][element], 0);
    }
    for (int e = 0; e < 2; e++) {
        for (int i = 0; i < 3 && !status; i++) status = cuda_load(op, &scope, &cuda_kernel_join[0][e][i], 0);
        for (int i = 0; i < DENSE_DECODE_SHAPE_COUNT; i++) {
            const struct dense_decode_shape *shape = &dense_decode_shapes[i];
            const int32_t stages = dense_decode_stages(shape, scope.device->shared_bytes);
            if (!status && stages)
                status = cuda_load(op, &scope, &cuda_kernel_dense_decode[e][i],
                                   dense_decode_shared_bytes(shape, stages));
        }
        const bool hopper = scope.device->capability == 90 &&
                            cuda_build_has(&cuda_build, cuda_kernel_dense_decode_sm90[e][0][0].image);
        for (int i = 0; i < 4 && hopper && !status; i++)
            status = cuda_load(op, &scope, &cuda_kernel_dense_decode_sm90[e][i / 2][i % 2],
                               SM90_DENSE_DECODE_SHARED_BYTES);
        for (int f = 0; f < KV_FORMATS && !status; f++)
            if (cuda_kernel_sparse_decode[e][f].name)
                status = cuda_load(op, &scope, &cuda_kernel_sparse_decode[e][f], 0);
    }
    for (int f = 0; f < KV_FORMATS && !status; f++)
        if (cuda_kernel_sparse_prefill[f].name)
            status = cuda_load(op, &scope, &cuda_kernel_sparse_prefill[f], 0);
    const bool hopper = scope.device->capability == 90 &&
                        cuda_build_has(&cuda_build, cuda_kernel_sparse_decode_sm90[0][0].image);
    for (int i = 0; i < 4 && hopper && !status; i++)
        status = cuda_load(op, &scope, &cuda_kernel_sparse_decode_sm90[i / 2][i % 2],
                           i / 2 ? SM90_SPARSE_DECODE_SMALL_SHARED_BYTES : SM90_SPARSE_DECODE_SHARED_BYTES);
    for (int i = 0; i < 6 && hopper && !status; i++)
        status = cuda_load(op, &scope, &cuda_kernel_join[1][i / 3][i % 3], 0);
    for (int i = 0; i < 4 && hopper && !status; i++)
        status = cuda_load(op, &scope, &cuda_kernel_sparse_decode_sm90_rows[i / 2][i % 2],
                           SM90_SPARSE_DECODE_SHARED_BYTES);
    for (int i = 0; i < 6 && hopper && !status; i++)
        status = cuda_load(op, &scope,
                           i < 4 ? &cuda_kernel_sparse_prefill_sm90[i / 2][i % 2]
                                 : &cuda_kernel_sparse_prefill_sm90_fp8[i - 4],
                           SM90_SPARSE_PREFILL_SHARED_BYTES);
    if (hopper && !status) status = cuda_load(op, &scope, &cuda_kernel_sparse_prefill_join, 0);
    cuda_leave(&scope);
    return status;
}

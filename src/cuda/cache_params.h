/* SPDX-License-Identifier: MIT
 *
 * What the cache kernels are given (params.h has the others'). Strides of vectors are in elements, of the cache in bytes.
 */
#ifndef FMLA_CUDA_CACHE_PARAMS_H
#define FMLA_CUDA_CACHE_PARAMS_H

#include "params.h"

#include "../kvformat.h"

struct cache_params {
    const int64_t *slots;
    const void *latent, *rope; /* append; rope NULL: latent has all values */
    void *out;                 /* gather */
    uint8_t *cache;
    int64_t tokens;
    int64_t page_size, slots_of_cache;
    int64_t latent_stride, rope_stride, out_stride;
    int64_t page_stride, slot_stride;
    int32_t d_qk, latent_width;
    struct divisor page_divisor; /* page_size, where slots_of_cache is below 2^31 */
    int32_t few_slots;           /* … and it is */
    int32_t aligned;             /* vectors and cache may be read and written 16 bytes at a time */
    float cache_scale;           /* gather; append: prescaled, */
    float prescale, inverse;     /* as fast_quotient of num_fast.h has them */
    /* Of convert: where tokens come from. Values are those of its layout, in 64 bits where it has no groups. */
    const int64_t *source_slots;
    const uint8_t *source;
    int64_t source_page_size, source_slots_of_cache, source_page_stride, source_slot_stride;
    struct kv_layout source_layout;
    struct divisor source_page_divisor;
    int32_t few_source_slots, source_group_shift;
    float source_scale;
    /* Of the fused append: */
    const void *norm_weight; /* NULL: no norm */
    const void *positions;
    const float *rope_table;
    int64_t table_rows, table_stride;
    double norm_eps;       /* of fp32 */
    int32_t turns, halves; /* RoPE, of pairs that are halves; without it the four above are not looked at */
    int32_t wide_positions;
    int32_t many; /* more tokens than warps run at a time (FUSED_BLOCKS) */
};

/* A warp a token. FUSED_BLOCKS blocks of the fused append run on an SM at a time, as its registers allow, and no more are
 * launched, so that each reads its weights once. Where there are more tokens than these blocks have warps, a warp takes several at a time, MANY_LANES lanes each. */
enum { CACHE_WARPS = 4, FUSED_BLOCKS = 4, MANY_LANES = 16 };

#endif

/* SPDX-License-Identifier: MIT
 *
 * Parameters of the cache kernels (params.h has the others). Strides of vectors are in elements, strides of
 * the cache in bytes.
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
    struct divisor page_divisor; /* of page_size, if slots_of_cache < 2^31 */
    int32_t few_slots;           /* slots_of_cache < 2^31 */
    int32_t aligned;             /* vectors and cache allow 16-byte accesses */
    int32_t format;              /* of the cache, enum kv_format; read by kernels that serve every format */
    float cache_scale;           /* gather: the scale; append: the scale · prescale */
    float prescale, inverse;     /* as in fast_quotient of num_fast.h */
    /* Convert only: the source cache. Values are those of its layout, in 64 bits where it has no groups. */
    const int64_t *source_slots;
    const uint8_t *source;
    int64_t source_page_size, source_slots_of_cache, source_page_stride, source_slot_stride;
    struct kv_layout source_layout;
    struct divisor source_page_divisor;
    int32_t few_source_slots, source_group_shift;
    float source_scale;
    /* Fused append only: */
    const void *norm_weight; /* NULL: no norm */
    const void *positions;
    const float *rope_table;
    int64_t table_rows, table_stride;
    double norm_eps;         /* an fp32 value */
    int32_t rotates, halves; /* apply RoPE; its pairs are halves. !rotates: positions, rope_table unused */
    int32_t wide_positions;
    int32_t many; /* more tokens than warps that run at a time (FUSED_BLOCKS) */
};

/* A warp takes a token. FUSED_BLOCKS CTAs of the fused append fit on an SM, limited by registers, and no more
 * are launched, so that each reads its weights once. If there are more tokens than these CTAs have warps, a
 * warp takes several tokens at a time, with MANY_LANES lanes each. */
enum { CACHE_WARPS = 4, FUSED_BLOCKS = 4, MANY_LANES = 16 };

#endif

/* SPDX-License-Identifier: MIT
 *
 * The variants of Hopper's kernels and of dense MHA: what tells kernels of one schedule, element and format
 * apart. Each is an enumerator of the same name in the table (kernels.def), the launch and, where a list makes
 * the kernels too, the .cu file. C and CUDA.
 */
#ifndef FMLA_CUDA_VARIANTS_H
#define FMLA_CUDA_VARIANTS_H

#include <stdint.h>

/* clang-format off */
/* Dense decode: X(variant, d_qk, whether several tiles of rows read the same keys, whether CTAs join the parts
 * of split requests themselves: `together` in the variant's name, which is part of the kernel's). */
#define SM90_DENSE_DECODE_VARIANTS(X) \
    X(576, 576, false, false) \
    X(576_shared, 576, true, false) \
    X(512, 512, false, false) \
    X(512_shared, 512, true, false) \
    X(576_together, 576, false, true) \
    X(576_shared_together, 576, true, true) \
    X(512_together, 512, false, true) \
    X(512_shared_together, 512, true, true)

/* Dense decode over bytes: X(argument, variant, rows of a tile, whether CTAs join the parts). The list has these
 * for one format, or for one kind of products: of codes, or of keys that are converted; `argument` says which. */
#define SM90_DENSE_DECODE_FP8_VARIANTS(X, argument) \
    X(argument, 64, 64, false) \
    X(argument, 32, 32, false) \
    X(argument, 16, 16, false) \
    X(argument, 64_together, 64, true) \
    X(argument, 32_together, 32, true) \
    X(argument, 16_together, 16, true)
/* clang-format on */

#define SM90_ENUMERATOR(variant, ...) SM90_DENSE_DECODE_##variant,
enum sm90_dense_decode_variant { SM90_DENSE_DECODE_VARIANTS(SM90_ENUMERATOR) };
#undef SM90_ENUMERATOR
#define SM90_ENUMERATOR(products, variant, ...) SM90_DENSE_DECODE_##products##_##variant,
enum sm90_dense_decode_fp8_variant {
    SM90_DENSE_DECODE_FP8_VARIANTS(SM90_ENUMERATOR, CODES)
        SM90_DENSE_DECODE_FP8_VARIANTS(SM90_ENUMERATOR, CONVERTED)
};
#undef SM90_ENUMERATOR

/* Sparse decode, large and small tiles. ROWS: over caches of the queries' type, by d_qk. BYTES: over one format
 * of bytes, or that and FP4; JOIN_IN_KERNEL: CTAs join the parts of split requests themselves. */
enum sm90_sparse_decode_variant {
    SM90_SPARSE_DECODE_ROWS_512,
    SM90_SPARSE_DECODE_ROWS_576,
    SM90_SPARSE_DECODE_BYTES,
    SM90_SPARSE_DECODE_BYTES_JOIN_IN_KERNEL,
    SM90_SPARSE_DECODE_FP4,
    SM90_SPARSE_DECODE_FP4_JOIN_IN_KERNEL
};

/* Sparse prefill. ROWS: over bf16 keys, by d_qk; SPLITS: the last tiles are split. BYTES: over pages of bytes;
 * JOIN_IN_KERNEL: lists are split, and CTAs join the parts themselves. */
enum sm90_sparse_prefill_variant {
    SM90_SPARSE_PREFILL_ROWS_512,
    SM90_SPARSE_PREFILL_ROWS_576,
    SM90_SPARSE_PREFILL_ROWS_512_SPLITS,
    SM90_SPARSE_PREFILL_ROWS_576_SPLITS,
    SM90_SPARSE_PREFILL_BYTES,
    SM90_SPARSE_PREFILL_BYTES_JOIN_IN_KERNEL
};

/* Dense MHA and its gradients on tensor cores, by d_qk. The tile shapes of cuda-sm80 have lists of their own. */
enum mha_size { MHA_64, MHA_96, MHA_128, MHA_192, MHA_256 };

static inline enum mha_size mha_size_of(int64_t d_qk)
{
    switch (d_qk) {
    case 64: return MHA_64;
    case 96: return MHA_96;
    case 128: return MHA_128;
    case 192: return MHA_192;
    default: return MHA_256;
    }
}

/* Returns d_v of the size. */
static inline int64_t mha_values_of(int64_t d_qk)
{
    return d_qk <= 96 ? 64 : d_qk == 256 ? 256 : 128;
}

#define MHA_SIZES_TAKEN "takes d_qk/d_v of 256/256, 192/128, 128/128, 96/64 and 64/64"

#endif

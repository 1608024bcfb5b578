/* SPDX-License-Identifier: MIT
 *
 * The images of tests with the fake driver, in place of the library's: each is its own name.
 */
#include "cuda/images.h"

#define IMAGE(name)                                                                                          \
    {                                                                                                        \
        name, (const unsigned char *)(name), (const unsigned char *)(name) + sizeof(name)                    \
    }

static const struct cuda_image images[] = {
    IMAGE("any/cache_append"),
    IMAGE("any/cache_gather"),
    IMAGE("any/decode_plan"),
    IMAGE("any/join_splits"),
    IMAGE("any/merge"),
    IMAGE("any/sparse_decode"),
    IMAGE("any/sparse_prefill"),
    IMAGE("sm80/dense_decode/dense_decode_bf16"),
    IMAGE("sm80/dense_decode/dense_decode_fp16"),
#if !defined(FAKE_WITHOUT_SM90) /* as where 9.0 was not among the GPUs of a build */
    IMAGE("sm90/dense_decode/dense_decode_bf16"),
    IMAGE("sm90/dense_decode/dense_decode_fp16"),
    IMAGE("sm90/sparse_decode/bf16/sparse_decode_bf16"),
    IMAGE("sm90/sparse_decode/bf16/sparse_decode_fp16"),
    IMAGE("sm90/sparse_decode/join_half_rows"),
    IMAGE("sm90/sparse_decode/sparse_decode_bf16"),
    IMAGE("sm90/sparse_decode/small/sparse_decode_bf16"),
    IMAGE("sm90/sparse_prefill/join_pieces"),
    IMAGE("sm90/sparse_prefill/sparse_prefill_bf16"),
    IMAGE("sm90/sparse_prefill/sparse_prefill_fp8"),
#endif
};

static void *loaded[sizeof images / sizeof *images];

const struct cuda_build cuda_build = {
    .toolkit = 13000,
    .driver = 13000,
#if defined(FAKE_WITHOUT_SM90)
    .targets = "80",
#else
    .targets = "80 90a",
#endif
    .ptx = 80,
    .count = sizeof images / sizeof *images,
    .images = images,
    .loaded = loaded,
};

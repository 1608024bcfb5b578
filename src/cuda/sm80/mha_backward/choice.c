/* SPDX-License-Identifier: MIT */
#include "choice.h"

#include "../../variants.h"
#include "shape.h"

struct backward_tiles sm80_mha_backward_tiles(const struct backward_problem *p)
{
    return (struct backward_tiles){MHA_BACKWARD_ROWS, MHA_BACKWARD_KEYS, MHA_BACKWARD_COUNTERS(p->d_qk),
                                   (int32_t)(p->h_q / p->h_kv), 0};
}

int32_t sm80_mha_backward_keys(const struct backward_problem *p, int32_t sms, int32_t shared_bytes)
{
    /* A tile of twice the keys takes 1.4 times as long: it pays where there are more blocks than SMs. */
    const int64_t blocks = backward_key_blocks(p, sm80_mha_backward_tiles(p)) * p->h_kv;
    const bool fits =
        p->d_qk == 192 && MHA_BACKWARD_BYTES(192, 128, MHA_BACKWARD_WIDE, MHA_BACKWARD_ROWS) <= shared_bytes;
    /* The wide kernel has P in fp16 until dS (device/backward_rows.cuh). */
    const bool in_fp16 = p->dlse && p->rules.attn_sink;
    return fits && !in_fp16 && blocks > sms ? MHA_BACKWARD_WIDE : MHA_BACKWARD_KEYS;
}

const char *sm80_mha_backward_refuses(const struct backward_problem *p, const char **argument)
{
    const struct {
        const char *name;
        const struct token_view *view;
        bool of_keys;
    } tensors[] = {{"q", &p->q, false},       {"k", &p->k, true},      {"v", &p->v, true},
                   {"dout", &p->dout, false}, {"out", &p->out, false}, {"dq", &p->dq, false},
                   {"dk", &p->dk, true},      {"dv", &p->dv, true}};
    const struct backward_tiles tiles = sm80_mha_backward_tiles(p);
    *argument = "v";
    if (p->d_v != mha_values_of(p->d_qk)) return MHA_SIZES_TAKEN;
    *argument = "q";
    if (backward_row_tiles(p, tiles) > INT32_MAX / p->h_q) return "takes fewer than 2^31 tiles of rows";
    *argument = "k";
    if (backward_key_blocks(p, tiles) > INT32_MAX / p->h_kv) return "takes fewer than 2^31 blocks of keys";
    if (!p->b) return NULL;
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) {
        *argument = tensors[i].name;
        if (!backward_rows_aligned(p, tensors[i].view, tensors[i].of_keys))
            return "takes a tensor whose base and strides are multiples of 16 bytes";
    }
    *argument = "softmax_scale";
    if (!(p->scale >= 1e-30f)) return "takes a scale of at least 1e-30";
    return NULL;
}

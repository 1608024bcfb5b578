/* SPDX-License-Identifier: MIT
 *
 * A long prefill in chunks. For each chunk, one call of fmla_mha_forward attends to all earlier keys, another to the chunk's
 * own keys with a causal mask, and fmla_merge joins both. The program compares the result with one call over the whole prefill.
 */
#include <flashmla/flashmla.h>

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENS = 96, CHUNK = 32, HEADS = 2, D = 64 };
static const fmla_device cpu = {FMLA_DEVICE_CPU, 0};
static const fmla_dtype bf16 = {FMLA_TYPE_BFLOAT, 16, 1}, f32 = {FMLA_TYPE_FLOAT, 32, 1};
static uint16_t q[TOKENS][HEADS][D], k[TOKENS][HEADS][D], v[TOKENS][HEADS][D];
static uint16_t whole[TOKENS][HEADS][D], merged[TOKENS][HEADS][D], parts[2][CHUNK][HEADS][D];
static float whole_lse[HEADS][TOKENS], merged_lse[HEADS][CHUNK], parts_lse[2][HEADS][CHUNK];

static float value_of(uint16_t bits)
{
    const uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static void larger(double *worst, double difference)
{
    if (!(fabs(difference) <= *worst)) *worst = fabs(difference);
}

static void draw(uint16_t *values, int count, uint32_t seed)
{
    for (int i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        const float value = (float)(seed >> 8) / 8388608.0f - 1.0f; /* in [-1, 1) */
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        values[i] = (uint16_t)(bits >> 16);
    }
}

/* Attention of `queries` tokens of q from `first` on over `keys` keys from `first_key` on. A causal mask is aligned to the last
 * token and the last key. */
static void attend(int64_t first, int64_t queries, int64_t first_key, int64_t keys, int causal, void *out,
                   float *lse)
{
    const int64_t of_q[] = {1, queries, HEADS, D}, of_k[] = {1, keys, HEADS, D},
                  of_lse[] = {1, HEADS, queries};
    const fmla_tensor q_ = {q[first], cpu, 4, bf16, of_q, NULL, 0},
                      k_ = {k[first_key], cpu, 4, bf16, of_k, NULL, 0},
                      v_ = {v[first_key], cpu, 4, bf16, of_k, NULL, 0},
                      out_ = {out, cpu, 4, bf16, of_q, NULL, 0}, lse_ = {lse, cpu, 3, f32, of_lse, NULL, 0};
    fmla_mha_forward_args args = FMLA_INIT(fmla_mha_forward_args);
    size_t alignment;
    args.q = &q_, args.k = &k_, args.v = &v_, args.out = &out_, args.lse = &lse_, args.causal = causal;
    args.lse_empty = FMLA_LSE_EMPTY_NEGATIVE_INFINITY; /* as fmla_merge takes it */
    fmla_status status = fmla_mha_forward_workspace_size(&args, &args.workspace_size, &alignment);
    args.workspace = aligned_alloc(alignment, (args.workspace_size + alignment - 1) / alignment * alignment);
    if (!status) status = args.workspace ? fmla_mha_forward(&args) : FMLA_DEVICE_ERROR;
    free(args.workspace);
    if (!status) return;
    fprintf(stderr, "%s\n", fmla_last_error());
    exit(1);
}

int main(void)
{
    const int64_t of_parts[] = {2, 1, CHUNK, HEADS, D}, of_parts_lse[] = {2, 1, HEADS, CHUNK};
    double worst = 0.0;
    draw(&q[0][0][0], TOKENS * HEADS * D, 1), draw(&k[0][0][0], TOKENS * HEADS * D, 2);
    draw(&v[0][0][0], TOKENS * HEADS * D, 3);
    attend(0, TOKENS, 0, TOKENS, 1, whole, &whole_lse[0][0]);
    for (int64_t first = 0; first < TOKENS; first += CHUNK) {
        attend(first, CHUNK, 0, first, 0, parts[0],
               &parts_lse[0][0][0]); /* the first chunk has no earlier keys */
        attend(first, CHUNK, first, CHUNK, 1, parts[1], &parts_lse[1][0][0]);
        const fmla_tensor in = {parts, cpu, 5, bf16, of_parts, NULL, 0},
                          lses = {parts_lse, cpu, 4, f32, of_parts_lse, NULL, 0},
                          out = {merged[first], cpu, 4, bf16, of_parts + 1, NULL, 0},
                          lse = {merged_lse, cpu, 3, f32, of_parts_lse + 1, NULL, 0};
        fmla_merge_args args = FMLA_INIT(fmla_merge_args);
        args.out_parts = &in, args.lse_parts = &lses, args.out = &out, args.lse = &lse;
        if (fmla_merge(&args) != FMLA_OK) {
            fprintf(stderr, "%s\n", fmla_last_error());
            return 1;
        }
        for (int64_t h = 0; h < HEADS; h++)
            for (int64_t t = 0; t < CHUNK; t++)
                larger(&worst, (double)merged_lse[h][t] - (double)whole_lse[h][first + t]);
    }
    double worst_out = 0.0;
    for (int i = 0; i < TOKENS * HEADS * D; i++)
        larger(&worst_out, (double)value_of((&merged[0][0][0])[i]) - (double)value_of((&whole[0][0][0])[i]));
    printf("%d tokens in chunks of %d against one call: out differs by %.1e at most, lse by %.1e\n", TOKENS,
           CHUNK, worst_out, worst);
    return worst_out > 1e-2 || worst > 1e-5;
}

/* SPDX-License-Identifier: MIT
 *
 * One decode step over a paged cache, as an inference engine runs it: one plan, then one call for each layer of a model.
 *
 * Three requests of different lengths share a cache of 64-slot pages. The plan is made once from the lengths and serves
 * every layer; the workspace size is queried once. The cache holds 1.0 everywhere, so every output must be 1.0 for any
 * queries, which the program checks.
 */
#include <flashmla/flashmla.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum {
    B = 3,
    S_Q = 1,
    H_Q = 16,
    H_KV = 1,
    D_QK = 576,
    D_V = 512,
    PAGE = 64,
    MAX_PAGES = 8,
    PAGES = B * MAX_PAGES
};
enum { LAYERS = 4, BF16_ONE = 0x3f80 };

static const fmla_device cpu = {FMLA_DEVICE_CPU, 0};
static const fmla_dtype bf16 = {FMLA_TYPE_BFLOAT, 16, 1}, i32 = {FMLA_TYPE_INT, 32, 1},
                        f32 = {FMLA_TYPE_FLOAT, 32, 1};

static void check(fmla_status status)
{
    if (status == FMLA_OK) return;
    fprintf(stderr, "%s: %s\n", fmla_status_name(status), fmla_last_error());
    exit(1);
}

int main(void)
{
    static uint16_t q[B][S_Q][H_Q][D_QK], cache[PAGES][PAGE][H_KV][D_QK], out[B][S_Q][H_Q][D_V];
    static float lse[B][H_Q][S_Q];
    static int32_t table[B][MAX_PAGES];
    static int32_t lengths[B] = {17, 500, 128};

    for (int64_t i = 0; i < (int64_t)(sizeof cache / 2); i++) ((uint16_t *)cache)[i] = BF16_ONE;
    for (int64_t i = 0; i < (int64_t)(sizeof q / 2); i++) ((uint16_t *)q)[i] = (uint16_t)(BF16_ONE - i % 64);
    for (int r = 0; r < B; r++)
        for (int i = 0; i < MAX_PAGES; i++) table[r][i] = i * B + r; /* pages may lie in any order */

    const int64_t q_shape[] = {B, S_Q, H_Q, D_QK}, cache_shape[] = {PAGES, PAGE, H_KV, D_QK};
    const int64_t out_shape[] = {B, S_Q, H_Q, D_V}, lse_shape[] = {B, H_Q, S_Q};
    const int64_t table_shape[] = {B, MAX_PAGES}, lengths_shape[] = {B};
    const fmla_tensor q_tensor = {q, cpu, 4, bf16, q_shape, NULL, 0};
    const fmla_tensor cache_tensor = {cache, cpu, 4, bf16, cache_shape, NULL, 0};
    const fmla_tensor out_tensor = {out, cpu, 4, bf16, out_shape, NULL, 0};
    const fmla_tensor lse_tensor = {lse, cpu, 3, f32, lse_shape, NULL, 0};
    const fmla_tensor table_tensor = {table, cpu, 2, i32, table_shape, NULL, 0};
    const fmla_tensor lengths_tensor = {lengths, cpu, 1, i32, lengths_shape, NULL, 0};

    /* Make the plan once a step, for all layers. */
    fmla_decode_plan_args plan = FMLA_INIT(fmla_decode_plan_args);
    plan.seqlens = &lengths_tensor;
    plan.s_q = S_Q, plan.h_q = H_Q, plan.h_kv = H_KV;
    check(fmla_decode_plan_size(&plan, &plan.plan_size));
    plan.plan = malloc(plan.plan_size);
    check(fmla_decode_plan(&plan));

    fmla_dense_decode_args args = FMLA_INIT(fmla_dense_decode_args);
    args.q = &q_tensor, args.kv_cache = &cache_tensor, args.block_table = &table_tensor;
    args.seqlens = &lengths_tensor, args.out = &out_tensor, args.lse = &lse_tensor;
    args.plan = plan.plan, args.plan_size = plan.plan_size;
    args.causal = 1;
    size_t alignment;
    check(fmla_dense_decode_workspace_size(&args, &args.workspace_size, &alignment));
    args.workspace = aligned_alloc(alignment, (args.workspace_size + alignment - 1) / alignment * alignment);

    for (int layer = 0; layer < LAYERS; layer++) check(fmla_dense_decode(&args));

    int wrong = 0;
    for (int64_t i = 0; i < (int64_t)(sizeof out / 2); i++) wrong += ((uint16_t *)out)[i] != BF16_ONE;
    for (int r = 0; r < B; r++)
        printf("request %d: %d keys, lse of head 0 = %.4f\n", r, lengths[r], (double)lse[r][0][0]);
    printf("%s\n", wrong ? "wrong" : "every output is 1, as it must be");
    free(plan.plan), free(args.workspace);
    return wrong != 0;
}

/* SPDX-License-Identifier: MIT
 *
 * One workspace for batches of all sizes: the program asks once for the bound of all calls, as an engine would at start.
 *
 * Up to 8 requests decode over lists of up to 256 keys each. A smaller batch may take more workspace than a larger one (on some
 * GPUs it has more splits), so the size for the largest batch is not enough. The cache holds 1.0 everywhere, so every output
 * must be 1.0 for any queries, which the program checks.
 */
#include <flashmla/flashmla.h>

#include <stdio.h>
#include <stdlib.h>

enum {
    MOST_B = 8,
    H_Q = 16,
    D_QK = 576,
    D_V = 512,
    PAGES = 8,
    PAGE = 64,
    MOST_TOPK = 256,
    BF16_ONE = 0x3f80
};

static void check(fmla_status status)
{
    if (status == FMLA_OK) return;
    fprintf(stderr, "%s: %s\n", fmla_status_name(status), fmla_last_error());
    exit(1);
}

/* All tensors of a batch. They are views of memory that holds the largest batch. */
struct batch {
    int64_t q_shape[4], cache_shape[4], indices_shape[3], out_shape[4];
    fmla_tensor q, cache, indices, out;
    fmla_sparse_decode_args args;
};

static uint16_t q[MOST_B * H_Q * D_QK], cache[PAGES * PAGE * D_QK], out[MOST_B * H_Q * D_V];
static int32_t indices[MOST_B * MOST_TOPK];

static void set(struct batch *batch, int64_t b, int64_t topk)
{
    static const fmla_device cpu = {FMLA_DEVICE_CPU, 0};
    static const fmla_dtype bf16 = {FMLA_TYPE_BFLOAT, 16, 1}, i32 = {FMLA_TYPE_INT, 32, 1};
    *batch = (struct batch){.q_shape = {b, 1, H_Q, D_QK},
                            .cache_shape = {PAGES, PAGE, 1, D_QK},
                            .indices_shape = {b, 1, topk},
                            .out_shape = {b, 1, H_Q, D_V},
                            .args = FMLA_INIT(fmla_sparse_decode_args)};
    batch->q = (fmla_tensor){q, cpu, 4, bf16, batch->q_shape, NULL, 0};
    batch->cache = (fmla_tensor){cache, cpu, 4, bf16, batch->cache_shape, NULL, 0};
    batch->indices = (fmla_tensor){indices, cpu, 3, i32, batch->indices_shape, NULL, 0};
    batch->out = (fmla_tensor){out, cpu, 4, bf16, batch->out_shape, NULL, 0};
    batch->args.q = &batch->q, batch->args.kv_cache = &batch->cache;
    batch->args.indices = &batch->indices, batch->args.out = &batch->out;
}

int main(void)
{
    for (size_t i = 0; i < sizeof q / sizeof *q; i++) q[i] = (uint16_t)(BF16_ONE - i % 64);
    for (size_t i = 0; i < sizeof cache / sizeof *cache; i++) cache[i] = BF16_ONE;
    for (int i = 0; i < MOST_B * MOST_TOPK; i++) indices[i] = i * 7 % (PAGES * PAGE);

    struct batch batch;
    size_t bytes, alignment;
    set(&batch, MOST_B, MOST_TOPK);
    check(fmla_sparse_decode_workspace_bound(&batch.args, &bytes, &alignment));
    void *workspace = aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    if (!workspace) return 1;
    printf("%zu bytes for up to %d requests of up to %d keys\n", bytes, MOST_B, MOST_TOPK);

    int64_t wrong = 0;
    for (int64_t b = 1; b <= MOST_B; b++)
        for (int64_t topk = MOST_TOPK; topk > 0; topk -= 100) {
            set(&batch, b, topk);
            batch.args.workspace = workspace, batch.args.workspace_size = bytes;
            check(fmla_sparse_decode(&batch.args));
            for (int64_t i = 0; i < b * H_Q * D_V; i++) wrong += out[i] != BF16_ONE, out[i] = 0;
        }
    printf("%s\n", wrong ? "wrong" : "every output is 1, as it must be");
    free(workspace);
    return wrong != 0;
}

/* SPDX-License-Identifier: MIT
 *
 * A program outside the repository, as link.sh builds it: only header and library. One request with one
 * key, whose softmax is 1: the output is that key's first d_v values for every query.
 */
#include <flashmla/flashmla.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HEADS = 2, D_QK = 576, D_V = 512, PAGE = 64 };

static uint16_t q[HEADS * D_QK], kv[PAGE * D_QK], out[HEADS * D_V];
static float lse[HEADS];
static int32_t table[1] = {0}, lengths[1] = {1};

static fmla_tensor tensor(void *data, uint8_t code, uint8_t bits, int32_t ndim, const int64_t *shape)
{
    const fmla_tensor t = {data, {FMLA_DEVICE_CPU, 0}, ndim, {code, bits, 1}, shape, NULL, 0};
    return t;
}

static int failed(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, fmla_last_error());
    return 1;
}

int main(void)
{
    if (fmla_version() != FMLA_VERSION) return failed("header and library differ in version");

    for (int i = 0; i < HEADS * D_QK; i++) q[i] = 0x3f80;                     /* 1 in bf16 */
    for (int i = 0; i < D_QK; i++) kv[i] = (uint16_t)(0x3c00 + 3 * (i % 64)); /* small numbers */

    const fmla_tensor tq = tensor(q, FMLA_TYPE_BFLOAT, 16, 4, (const int64_t[]){1, 1, HEADS, D_QK});
    const fmla_tensor tkv = tensor(kv, FMLA_TYPE_BFLOAT, 16, 4, (const int64_t[]){1, PAGE, 1, D_QK});
    const fmla_tensor ttable = tensor(table, FMLA_TYPE_INT, 32, 2, (const int64_t[]){1, 1});
    const fmla_tensor tlengths = tensor(lengths, FMLA_TYPE_INT, 32, 1, (const int64_t[]){1});
    const fmla_tensor tout = tensor(out, FMLA_TYPE_BFLOAT, 16, 4, (const int64_t[]){1, 1, HEADS, D_V});
    const fmla_tensor tlse = tensor(lse, FMLA_TYPE_FLOAT, 32, 3, (const int64_t[]){1, HEADS, 1});

    fmla_dense_decode_args args = FMLA_INIT(fmla_dense_decode_args);
    args.q = &tq;
    args.kv_cache = &tkv;
    args.block_table = &ttable;
    args.seqlens = &tlengths;
    args.out = &tout;
    args.lse = &tlse;
    size_t bytes, alignment;
    if (fmla_dense_decode_workspace_size(&args, &bytes, &alignment)) return failed("workspace_size");
    args.workspace_size = (bytes + alignment - 1) / alignment * alignment;
    args.workspace = args.workspace_size ? aligned_alloc(alignment, args.workspace_size) : NULL;
    if (args.workspace_size && !args.workspace) return 1;
    const fmla_status status = fmla_dense_decode(&args);
    free(args.workspace);
    if (status) return failed("dense_decode");

    for (int h = 0; h < HEADS; h++)
        if (memcmp(out + h * D_V, kv, D_V * sizeof *out)) {
            fprintf(stderr, "head %d: the output is not the only key's value\n", h);
            return 1;
        }
    printf("flashmla %s: %d heads as expected\n", fmla_version_string(), HEADS);
    return 0;
}

/* SPDX-License-Identifier: MIT */
#include "gpu_products.h"

#include "ptx_text.h"

#include <string.h>

enum {
    TOKENS = GPU_PRODUCT_TOKENS,
    PART = GPU_PRODUCT_PART,
    THREADS = 128,   /* 2 × 2 warps */
    TILE = 128,      /* rows of weights per CTA */
    WARP = 64,       /* tokens and rows per warp */
    STEP = 32,       /* columns: four lanes load 16 bytes each of a row */
    UNROLLED = 32,   /* steps in the loop body */
    LOADS = WARP / 8 /* of inputs and of weights, per step */
};

/* Each word is a hash of its index. */
static const char ptx_draw[] =
    ".visible .entry draw(.param .u64 to, .param .u32 words)\n"
    "{\n"
    ".reg .pred p;\n.reg .b32 i, n, step, h, x;\n.reg .b64 at, s;\n"
    "mov.u32 i, %tid.x; mov.u32 step, %ntid.x; mov.u32 n, %ctaid.x; mad.lo.u32 i, n, step, i;\n"
    "mov.u32 n, %nctaid.x; mul.lo.u32 step, step, n; ld.param.u32 n, [words];\n"
    "loop:\n"
    "setp.ge.u32 p, i, n;\n@p ret;\n"
    "ld.param.u64 at, [to]; mul.wide.u32 s, i, 4; add.u64 at, at, s;\n"
    "mul.lo.u32 h, i, 2654435761; shr.u32 x, h, 15; xor.b32 h, h, x; mul.lo.u32 h, h, 2246822519;\n"
    "shr.u32 x, h, 13; xor.b32 x, h, x; and.b32 x, x, 0x80ff80ff; or.b32 x, x, 0x3d003d00;\n"
    "st.global.u32 [at], x;\n"
    "add.u32 i, i, step;\n"
    "bra loop;\n"
    "}\n";

/* Lane (g, t) loads columns 8 t to 8 t + 7 of rows g, g + 8, … of both factors. mma assigns them to other
 * columns, the same in both factors, so the sum is unchanged. */
static void add_step(FILE *text, const struct gpu_product *product, int step)
{
    for (int factor = 0; factor < 2; factor++)
        for (int i = 0; i < LOADS; i++) {
            const char *name = factor ? "b" : "a";
            fprintf(text, "ld.global.v4.b32 "), ptx_list(text, name, 4 * i, 4);
            fprintf(text, ", [%s+%d];\n", name, 2 * (8 * i * product->columns + step * STEP));
        }
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < WARP / 16; i++)
            for (int j = 0; j < WARP / 8; j++) {
                const int a = 8 * i + 2 * half, b = 4 * j + 2 * half, c = 4 * (WARP / 8 * i + j);
                fprintf(text, "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 ");
                ptx_list(text, "c", c, 4);
                fprintf(text, ", {a%d, a%d, a%d, a%d}, {b%d, b%d}, ", a, a + 4, a + 1, a + 5, b, b + 1);
                ptx_list(text, "c", c, 4), fprintf(text, ";\n");
            }
}

static void write_kernel(FILE *text, const void *of)
{
    const struct gpu_product *product = of;
    const int columns = product->columns, rows = product->rows, parts = columns / PART;
    fprintf(text, ".version 8.0\n.target sm_80\n.address_size 64\n%s", ptx_draw);
    fprintf(text,
            ".visible .entry product(.param .u64 inputs, .param .u64 weights, .param .u64 results) .maxntid "
            "%d\n{\n",
            THREADS);
    fprintf(text, ".reg .pred p;\n.reg .b32 i, n, g, t, below, beside, part, tile, a<%d>, b<%d>;\n",
            4 * LOADS, 4 * LOADS);
    fprintf(text, ".reg .b64 a, b, to, s;\n.reg .f32 c<%d>;\n", WARP * WARP / 32);
    fprintf(text, "mov.u32 i, %%tid.x; and.b32 t, i, 3; shr.u32 g, i, 2; and.b32 g, g, 7;\n"
                  "shr.u32 below, i, 5; shr.u32 beside, below, 1; and.b32 below, below, 1;\n");
    fprintf(text, "mov.u32 i, %%ctaid.x; rem.u32 part, i, %d; div.u32 tile, i, %d;\n", parts, parts);
    fprintf(text, "ld.param.u64 a, [inputs]; ld.param.u64 b, [weights]; ld.param.u64 to, [results];\n");
    fprintf(text, "mad.lo.u32 i, below, %d, g; mul.wide.u32 s, i, %d; add.u64 a, a, s;\n", WARP, 2 * columns);
    fprintf(text, "mul.wide.u32 s, part, %d; add.u64 a, a, s; add.u64 b, b, s;\n", 2 * PART);
    fprintf(text, "mul.wide.u32 s, t, 16; add.u64 a, a, s; add.u64 b, b, s;\n");
    fprintf(text, "mul.lo.u32 i, tile, %d; mad.lo.u32 i, beside, %d, i;\n", TILE, WARP);
    fprintf(text, "add.u32 n, i, g; mul.wide.u32 s, n, %d; add.u64 b, b, s;\n", 2 * columns);
    fprintf(text, "mad.lo.u32 i, t, 2, i; mul.wide.u32 s, i, 4; add.u64 to, to, s;\n");
    fprintf(text, "mad.lo.u32 i, part, %d, g; mad.lo.u32 i, below, %d, i;\n", TOKENS, WARP);
    fprintf(text, "mul.wide.u32 s, i, %d; add.u64 to, to, s;\n", 4 * rows);
    for (int i = 0; i < WARP * WARP / 32; i++) fprintf(text, "mov.f32 c%d, 0f00000000;\n", i);
    fprintf(text, "mov.u32 n, %d;\nloop:\n", PART / STEP / UNROLLED);
    for (int step = 0; step < UNROLLED; step++) add_step(text, product, step);
    fprintf(text, "add.u64 a, a, %d; add.u64 b, b, %d;\n", 2 * STEP * UNROLLED, 2 * STEP * UNROLLED);
    fprintf(text, "sub.u32 n, n, 1; setp.ne.u32 p, n, 0;\n@p bra loop;\n");
    for (int i = 0; i < WARP / 8; i++) /* groups of eight tokens */
        for (int j = 0; j < WARP / 8; j++) {
            const int c = 4 * (WARP / 8 * (i / 2) + j) + 2 * (i % 2);
            fprintf(text, "st.global.v2.f32 [to+%d], {c%d, c%d};\n", 4 * (8 * i * rows + 8 * j), c, c + 1);
        }
    fprintf(text, "ret;\n}\n");
}

size_t gpu_product_inputs_bytes(const struct gpu_product *product)
{
    return (size_t)2 * TOKENS * (size_t)product->columns;
}

size_t gpu_product_weights_bytes(const struct gpu_product *product)
{
    return (size_t)2 * (size_t)product->rows * (size_t)product->columns;
}

size_t gpu_product_results_bytes(const struct gpu_product *product)
{
    return (size_t)4 * (size_t)(product->columns / PART) * TOKENS * (size_t)product->rows;
}

static bool draw(void *kernel, void *memory, size_t bytes, struct reason *reason)
{
    uint32_t words = (uint32_t)(bytes / 4);
    void *parameters[] = {&memory, &words};
    return gpu_launch(kernel, 1024, 256, 0, NULL, parameters, reason);
}

static bool open_product(struct gpu_product *product, struct reason *reason)
{
    void *drawing = NULL;
    return ptx_open(&product->module, write_kernel, product, reason) &&
           gpu_kernel(&product->kernel, product->module, "product", reason) &&
           gpu_kernel(&drawing, product->module, "draw", reason) &&
           gpu_alloc(&product->inputs, gpu_product_inputs_bytes(product), reason) &&
           gpu_alloc(&product->weights, gpu_product_weights_bytes(product), reason) &&
           gpu_alloc(&product->results, gpu_product_results_bytes(product), reason) &&
           draw(drawing, product->inputs, gpu_product_inputs_bytes(product), reason) &&
           draw(drawing, product->weights, gpu_product_weights_bytes(product), reason) &&
           gpu_stream_wait(NULL, reason);
}

bool gpu_products_open(struct gpu_products *products, struct reason *reason)
{
    memset(products, 0, sizeof *products);
    products->of[0].columns = products->of[1].rows = 2 * PART;
    products->of[0].rows = products->of[1].columns = 4 * PART;
    for (int i = 0; i < GPU_PRODUCTS; i++)
        if (!open_product(&products->of[i], reason)) return false;
    return true;
}

void gpu_products_close(struct gpu_products *products)
{
    for (int i = 0; i < GPU_PRODUCTS; i++) {
        struct gpu_product *product = &products->of[i];
        gpu_free(product->inputs), gpu_free(product->weights), gpu_free(product->results);
        gpu_module_close(product->module);
    }
    memset(products, 0, sizeof *products);
}

bool gpu_products_send(const struct gpu_products *products, void *stream, struct reason *reason)
{
    for (int i = 0; i < GPU_PRODUCTS; i++) {
        const struct gpu_product *product = &products->of[i];
        const void *inputs = product->inputs, *weights = product->weights;
        void *results = product->results, *parameters[] = {&inputs, &weights, &results};
        const unsigned blocks = (unsigned)(product->rows / TILE * (product->columns / PART));
        if (!gpu_launch(product->kernel, blocks, THREADS, 0, stream, parameters, reason)) return false;
    }
    return true;
}

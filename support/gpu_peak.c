/* SPDX-License-Identifier: MIT */
#include "gpu_peak.h"

#include "ptx_text.h"

#include <string.h>

enum { READ_THREADS = 512, READ_BLOCKS_PER_SM = 4, MATRIX_THREADS = 256 };

/* Each thread has eight loads of 16 bytes in flight. `count` counts such loads, a multiple of 8 · threads
 * of the grid. */
static const char ptx_read[] =
    ".version 8.0\n"
    ".target sm_80\n"
    ".address_size 64\n"
    ".visible .entry nothing() { ret; }\n"
    ".visible .entry read_all(.param .u64 from, .param .u64 count, .param .u64 sink)\n"
    "{\n"
    ".reg .pred p;\n"
    ".reg .b32 a, b, c, d, s, tid, ntid, cta, ncta;\n"
    ".reg .b64 at, i, n, step, bytes, to;\n"
    "ld.param.u64 at, [from];\n"
    "ld.param.u64 n, [count];\n"
    "ld.param.u64 to, [sink];\n"
    "mov.u32 tid, %tid.x; mov.u32 ntid, %ntid.x; mov.u32 cta, %ctaid.x; mov.u32 ncta, %nctaid.x;\n"
    "mad.lo.u32 tid, cta, ntid, tid;\n"
    "mul.lo.u32 ntid, ntid, ncta;\n"
    "cvt.u64.u32 i, tid; cvt.u64.u32 step, ntid;\n"
    "shl.b64 bytes, step, 4;\n"
    "mov.u32 s, 0;\n"
    "shl.b64 i, i, 4; add.u64 at, at, i; shr.u64 i, i, 4;\n"
    "loop:\n"
    "{\n"
    ".reg .b32 r<32>;\n"
    "ld.global.v4.u32 {r0, r1, r2, r3}, [at]; add.u64 at, at, bytes;\n"
    "ld.global.v4.u32 {r4, r5, r6, r7}, [at]; add.u64 at, at, bytes;\n"
    "ld.global.v4.u32 {r8, r9, r10, r11}, [at]; add.u64 at, at, bytes;\n"
    "ld.global.v4.u32 {r12, r13, r14, r15}, [at]; add.u64 at, at, bytes;\n"
    "ld.global.v4.u32 {r16, r17, r18, r19}, [at]; add.u64 at, at, bytes;\n"
    "ld.global.v4.u32 {r20, r21, r22, r23}, [at]; add.u64 at, at, bytes;\n"
    "ld.global.v4.u32 {r24, r25, r26, r27}, [at]; add.u64 at, at, bytes;\n"
    "ld.global.v4.u32 {r28, r29, r30, r31}, [at]; add.u64 at, at, bytes;\n"
    "or.b32 a, r0, r1; or.b32 b, r2, r3; or.b32 c, r4, r5; or.b32 d, r6, r7;\n"
    "or.b32 s, s, a; or.b32 s, s, b; or.b32 s, s, c; or.b32 s, s, d;\n"
    "or.b32 a, r8, r9; or.b32 b, r10, r11; or.b32 c, r12, r13; or.b32 d, r14, r15;\n"
    "or.b32 s, s, a; or.b32 s, s, b; or.b32 s, s, c; or.b32 s, s, d;\n"
    "or.b32 a, r16, r17; or.b32 b, r18, r19; or.b32 c, r20, r21; or.b32 d, r22, r23;\n"
    "or.b32 s, s, a; or.b32 s, s, b; or.b32 s, s, c; or.b32 s, s, d;\n"
    "or.b32 a, r24, r25; or.b32 b, r26, r27; or.b32 c, r28, r29; or.b32 d, r30, r31;\n"
    "or.b32 s, s, a; or.b32 s, s, b; or.b32 s, s, c; or.b32 s, s, d;\n"
    "}\n"
    "shl.b64 bytes, step, 3; add.u64 i, i, bytes; shl.b64 bytes, step, 4;\n"
    "setp.lt.u64 p, i, n;\n"
    "@p bra loop;\n"
    "setp.ne.u32 p, s, 0;\n" /* never true: keeps the loads alive */
    "@p st.global.u32 [to], s;\n"
    "ret;\n"
    "}\n";

/* ---- Matrix units: a loop over products of what stands in registers or shared memory ---------- */

/* Random values of ±(2^-5 … 2^-3): zeros take less power and would let the units run faster than with real
 * data. */
static const char ptx_draw[] = "mul.lo.u32 h, h, 1664525; add.u32 h, h, 1013904223;\n"
                               "shr.u32 x, h, 8; and.b32 x, x, 0x80ff80ff; or.b32 x, x, 0x3d003d00;\n";

static const char ptx_head[] = ".version 8.0\n"
                               ".target %s\n"
                               ".address_size 64\n"
                               "%s"
                               ".visible .entry matrix(.param .u32 rounds, .param .u64 sink) .maxntid %d\n"
                               "{\n"
                               ".reg .pred p, q;\n"
                               ".reg .b32 n, h, x, tid, at;\n"
                               ".reg .b64 to;\n";

/* Uses the sums, which keeps the products alive. */
static void add_tail(FILE *text, int sums)
{
    fprintf(text, "ld.param.u64 to, [sink];\nmov.f32 sum, 0f00000000;\n");
    for (int i = 0; i < sums; i++) fprintf(text, "add.f32 sum, sum, c%d;\n", i);
    fprintf(text, "setp.eq.f32 q, sum, 0f7f000000;\n@q st.global.f32 [to], sum;\nret;\n}\n");
}

enum { MMA_SUMS = 12 /* independent products per warp */, WGMMA_STEPS = 4 /* of 16, in a 128-byte line */ };

static void ptx_mma(FILE *text, const void *unused)
{
    (void)unused;
    fprintf(text, ptx_head, "sm_80", "", MATRIX_THREADS);
    fprintf(text, ".reg .b32 a<4>, b<%d>;\n.reg .f32 c<%d>, sum;\n", 2 * MMA_SUMS, 4 * MMA_SUMS);
    fprintf(text, "mov.u32 h, %%tid.x;\nld.param.u32 n, [rounds];\n");
    for (int i = 0; i < 4; i++) fprintf(text, "%smov.b32 a%d, x;\n", ptx_draw, i);
    for (int i = 0; i < 2 * MMA_SUMS; i++) fprintf(text, "%smov.b32 b%d, x;\n", ptx_draw, i);
    for (int i = 0; i < 4 * MMA_SUMS; i++) fprintf(text, "mov.f32 c%d, 0f00000000;\n", i);
    fprintf(text, "loop:\n");
    for (int i = 0; i < MMA_SUMS; i++) {
        fprintf(text, "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 ");
        ptx_list(text, "c", 4 * i, 4), fprintf(text, ", ");
        ptx_list(text, "a", 0, 4), fprintf(text, ", ");
        ptx_list(text, "b", 2 * i, 2), fprintf(text, ", ");
        ptx_list(text, "c", 4 * i, 4), fprintf(text, ";\n");
    }
    fprintf(text, "sub.u32 n, n, 1;\nsetp.ne.u32 p, n, 0;\n@p bra loop;\n");
    add_tail(text, 4 * MMA_SUMS);
}

/* Two warpgroups, each with 64 × 256 sums, over 128-byte swizzled lines: A 8 KiB per warpgroup, B 32 KiB. */
static void ptx_wgmma(FILE *text, const void *unused)
{
    enum { SUMS = 128, SHARED = 49152, B_AT = 16384 };
    (void)unused;
    fprintf(text, ptx_head, "sm_90a", ".shared .align 1024 .b8 tiles[49152];\n", MATRIX_THREADS);
    fprintf(text, ".reg .f32 c<%d>, sum;\n.reg .b64 a<%d>, b<%d>;\n", SUMS, WGMMA_STEPS, WGMMA_STEPS);
    fprintf(text, "mov.u32 h, %%tid.x;\nmov.u32 tid, %%tid.x;\nld.param.u32 n, [rounds];\n");
    fprintf(text, "mov.u32 at, tiles;\nshl.b32 x, tid, 2;\nadd.u32 at, at, x;\nmov.u32 tid, 0;\nfill:\n%s",
            ptx_draw);
    fprintf(text, "st.shared.u32 [at], x;\nadd.u32 at, at, %d;\nadd.u32 tid, tid, %d;\n", 4 * MATRIX_THREADS,
            4 * MATRIX_THREADS);
    fprintf(text, "setp.lt.u32 p, tid, %d;\n@p bra fill;\nfence.proxy.async;\nbar.sync 0;\n", SHARED);
    /* Descriptors: address / 16, stride 1024 / 16 between groups of eight lines, 128-byte swizzle. */
    fprintf(text, "mov.u32 tid, %%tid.x;\nshr.u32 tid, tid, 7;\nshl.b32 tid, tid, 13;\n");
    fprintf(text, "mov.u32 at, tiles;\nadd.u32 tid, tid, at;\nadd.u32 at, at, %d;\n", B_AT);
    fprintf(text, "shr.u32 tid, tid, 4;\nshr.u32 at, at, 4;\ncvt.u64.u32 a0, tid;\ncvt.u64.u32 b0, at;\n");
    fprintf(text, "or.b64 a0, a0, 0x4000004000010000;\nor.b64 b0, b0, 0x4000004000010000;\n");
    for (int i = 1; i < WGMMA_STEPS; i++)
        fprintf(text, "add.u64 a%d, a0, %d;\nadd.u64 b%d, b0, %d;\n", i, 2 * i, i, 2 * i);
    for (int i = 0; i < SUMS; i++) fprintf(text, "mov.f32 c%d, 0f00000000;\n", i);
    fprintf(text, "setp.ne.u32 q, n, 0;\nloop:\nwgmma.fence.sync.aligned;\n");
    for (int i = 0; i < WGMMA_STEPS; i++) {
        fprintf(text, "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 ");
        ptx_list(text, "c", 0, SUMS), fprintf(text, ", a%d, b%d, q, 1, 1, 0, 0;\n", i, i);
    }
    fprintf(text, "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n");
    fprintf(text, "sub.u32 n, n, 1;\nsetp.ne.u32 p, n, 0;\n@p bra loop;\n");
    add_tail(text, SUMS);
}

/* Returns the FLOP of one CTA in one round. */
static double matrix_flop(const struct gpu_peak *peak)
{
    enum { WGMMA_GROUPS = MATRIX_THREADS / 128, MMA_WARPS = MATRIX_THREADS / 32 };
    return peak->wgmma ? 2.0 * 64 * 256 * 16 * WGMMA_STEPS * WGMMA_GROUPS
                       : 2.0 * 16 * 8 * 16 * MMA_SUMS * MMA_WARPS;
}

/* ---- Running them --------------------------------------------------------------------------- */

static unsigned read_blocks(const struct gpu_peak *peak)
{
    return (unsigned)peak->gpu.multiprocessors * READ_BLOCKS_PER_SM;
}

/* Rounds bytes up to a multiple of what all threads read at once. */
static size_t whole_rounds(const struct gpu_peak *peak, size_t bytes)
{
    const size_t round = (size_t)read_blocks(peak) * READ_THREADS * 8 * 16;
    return (bytes + round - 1) / round * round;
}

bool gpu_peak_open(struct gpu_peak *peak, int32_t id, struct reason *reason)
{
    if (!gpu_describe(id, &peak->gpu, reason)) return false;
    peak->wgmma = peak->gpu.major == 9;
    peak->bytes = whole_rounds(peak, 4 * peak->gpu.cache > 512000000 ? 4 * peak->gpu.cache : 512000000);
    return gpu_module_open(&peak->module, ptx_read, reason) &&
           gpu_kernel(&peak->read, peak->module, "read_all", reason) &&
           gpu_kernel(&peak->nothing, peak->module, "nothing", reason) &&
           ptx_open(&peak->module_of_matrix, peak->wgmma ? ptx_wgmma : ptx_mma, NULL, reason) &&
           gpu_kernel(&peak->matrix, peak->module_of_matrix, "matrix", reason) &&
           gpu_alloc(&peak->memory, peak->bytes, reason) && gpu_alloc(&peak->sink, 256, reason) &&
           gpu_fill(peak->memory, 0, peak->bytes, reason);
}

void gpu_peak_close(struct gpu_peak *peak)
{
    gpu_free(peak->memory), gpu_free(peak->sink);
    gpu_module_close(peak->module), gpu_module_close(peak->module_of_matrix);
    memset(peak, 0, sizeof *peak);
}

bool gpu_peak_flush(const struct gpu_peak *peak, void *stream, struct reason *reason)
{
    const void *from = peak->memory, *sink = peak->sink;
    uint64_t count = peak->bytes / 16;
    void *parameters[] = {&from, &count, &sink};
    return gpu_launch(peak->read, read_blocks(peak), READ_THREADS, 0, stream, parameters, reason);
}

bool gpu_peak_nothing(const struct gpu_peak *peak, void *stream, struct reason *reason)
{
    void *parameters[] = {NULL};
    return gpu_launch(peak->nothing, 1, 32, 0, stream, parameters, reason);
}

bool gpu_peak_bandwidth(const struct gpu_peak *peak, double *bandwidth, struct reason *reason)
{
    /* Read so much that start and end of the kernel are negligible. */
    const size_t most = (size_t)1 << 32, part = peak->gpu.memory / 8;
    const size_t bytes = whole_rounds(peak, part < most ? part : most);
    void *memory = NULL;
    const void *sink = peak->sink;
    uint64_t count = bytes / 16;
    void *parameters[] = {&memory, &count, &sink};
    const struct gpu_load load = {peak->read, read_blocks(peak), READ_THREADS, parameters};
    double seconds = 0.0;
    const bool good = gpu_alloc(&memory, bytes, reason) && gpu_fill(memory, 0, bytes, reason) &&
                      gpu_best_time(&load, &seconds, reason);
    gpu_free(memory);
    *bandwidth = good ? (double)bytes / seconds : 0.0;
    return good;
}

bool gpu_peak_flops(const struct gpu_peak *peak, double *flops, struct reason *reason)
{
    enum { SHORT = 2000 };
    const void *sink = peak->sink;
    uint32_t rounds = SHORT;
    void *parameters[] = {&rounds, &sink};
    const struct gpu_load load = {peak->matrix, (unsigned)peak->gpu.multiprocessors, MATRIX_THREADS,
                                  parameters};
    double seconds;
    if (!gpu_best_time(&load, &seconds, reason)) return false;
    rounds = (uint32_t)(SHORT * (20e-3 / seconds)) + 1; /* 20 ms: clocks have settled */
    if (!gpu_best_time(&load, &seconds, reason)) return false;
    *flops = (double)rounds * matrix_flop(peak) * (double)peak->gpu.multiprocessors / seconds;
    return true;
}

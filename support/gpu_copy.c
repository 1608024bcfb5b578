/* SPDX-License-Identifier: MIT */
#include "gpu_copy.h"

enum { THREADS = 256, VECTORS = 4 /* of 16 bytes, per thread */ };

/* A CTA copies THREADS · VECTORS · 16 bytes and issues all loads first. */
static const char ptx_copy[] = ".version 8.0\n"
                               ".target sm_80\n"
                               ".address_size 64\n"
                               ".visible .entry copy(.param .u64 to, .param .u64 from)\n"
                               "{\n"
                               ".reg .b32 tid, cta, r<16>;\n"
                               ".reg .b64 at, out, i;\n"
                               "ld.param.u64 at, [from];\n"
                               "ld.param.u64 out, [to];\n"
                               "mov.u32 tid, %tid.x; mov.u32 cta, %ctaid.x;\n"
                               "shl.b32 tid, tid, 4;\n"
                               "mul.wide.u32 i, cta, 16384;\n"
                               "add.u64 at, at, i; add.u64 out, out, i;\n"
                               "cvt.u64.u32 i, tid;\n"
                               "add.u64 at, at, i; add.u64 out, out, i;\n"
                               "ld.global.v4.u32 {r0, r1, r2, r3}, [at];\n"
                               "ld.global.v4.u32 {r4, r5, r6, r7}, [at+4096];\n"
                               "ld.global.v4.u32 {r8, r9, r10, r11}, [at+8192];\n"
                               "ld.global.v4.u32 {r12, r13, r14, r15}, [at+12288];\n"
                               "st.global.v4.u32 [out], {r0, r1, r2, r3};\n"
                               "st.global.v4.u32 [out+4096], {r4, r5, r6, r7};\n"
                               "st.global.v4.u32 [out+8192], {r8, r9, r10, r11};\n"
                               "st.global.v4.u32 [out+12288], {r12, r13, r14, r15};\n"
                               "ret;\n"
                               "}\n";

bool gpu_copy_bandwidth(const struct gpu_description *gpu, double *bandwidth, struct reason *reason)
{
    const size_t most = (size_t)1 << 31, part = gpu->memory / 16 / 16384 * 16384;
    const size_t bytes = part < most ? part : most;
    void *module = NULL, *from = NULL, *to = NULL;
    void *parameters[] = {&to, &from};
    double seconds = 1.0;
    struct gpu_load load = {.blocks = (unsigned)(bytes / ((size_t)THREADS * VECTORS * 16)),
                            .threads = THREADS,
                            .parameters = parameters};
    const bool good = gpu_module_open(&module, ptx_copy, reason) &&
                      gpu_kernel(&load.kernel, module, "copy", reason) && gpu_alloc(&from, bytes, reason) &&
                      gpu_alloc(&to, bytes, reason) && gpu_fill(from, 0x5a, bytes, reason) &&
                      gpu_fill(to, 0, bytes, reason) && gpu_best_time(&load, &seconds, reason);
    gpu_free(from), gpu_free(to);
    gpu_module_close(module);
    *bandwidth = good ? 2.0 * (double)bytes / seconds : 0.0;
    return good;
}

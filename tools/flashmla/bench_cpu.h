/* SPDX-License-Identifier: MIT
 *
 * What this machine's processor and memory can do at best, measured for a benchmark.
 */
#ifndef FLASHMLA_TOOL_BENCH_CPU_H
#define FLASHMLA_TOOL_BENCH_CPU_H

#include "fault.h"
#include "peak.h"

struct bench_cpu {
    char cpu[128];
    int threads;
    double flops[PEAK_UNITS], bandwidth; /* on `threads` threads */
    struct peak_memory memory;
};

/* Measures, and prints what it found. */
bool bench_cpu_measure(struct bench_cpu *cpu, bool warm, struct fault *fault);

/* The instructions that do the work of a kernel. */
enum peak_unit bench_cpu_unit(const char *kernel);

#endif

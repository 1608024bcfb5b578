/* SPDX-License-Identifier: MIT */
#include "bench_time.h"
#include "machine.h"

#include "flashmla/flashmla.h"

#include <stdio.h>
#include <string.h>

bool bench_cpu_measure(struct bench_cpu *machine, bool arithmetic, const char *kernel, bool warm,
                       struct reason *reason)
{
    machine->threads = (int)fmla_num_threads();
    machine_cpu_name(machine->cpu, sizeof machine->cpu);
    printf("flashmla %s, %s, %d threads\n", fmla_version_string(),
           *machine->cpu ? machine->cpu : "unknown CPU", machine->threads);
    for (int unit = 0; arithmetic && unit < PEAK_UNITS; unit++) {
        if (!peak_unit_available((enum peak_unit)unit)) continue;
        if (kernel && peak_unit_of(kernel) != (enum peak_unit)unit) continue;
        const double one = peak_flops((enum peak_unit)unit, 1);
        machine->flops[unit] =
            machine->threads == 1 ? one : peak_flops((enum peak_unit)unit, machine->threads);
        printf("peak   %-27s %8.3f TFLOP/s on 1 thread, %8.3f on %d\n", peak_unit_name((enum peak_unit)unit),
               1e-12 * one, 1e-12 * machine->flops[unit], machine->threads);
    }
    if (!peak_memory_open(&machine->memory, machine->threads))
        return reason_set(reason, "no memory for %zu bytes to measure the read bandwidth",
                          machine->memory.bytes);
    const double one = peak_bandwidth(&machine->memory, 1);
    machine->bandwidth = machine->threads == 1 ? one : peak_bandwidth(&machine->memory, machine->threads);
    printf("memory %-27s %8.1f GB/s    on 1 thread, %8.1f on %d\n", "read", 1e-9 * one,
           1e-9 * machine->bandwidth, machine->threads);
    if (warm)
        puts("caches warm: not emptied between runs");
    else
        printf("caches emptied between runs by reading %zu MiB (last level: %zu MiB)\n",
               machine->memory.bytes >> 20, machine->memory.cache_bytes >> 20);
    return true;
}

/* SPDX-License-Identifier: MIT
 *
 * The rates of CPU kernels. A rate that the machine cannot reach says that the FLOP are counted wrongly, or
 * that the kernel leaves out work; it fails.
 */
#include "case.h"
#include "peak.h"
#include "timing.h"

#include <stdio.h>

/* Above what all threads reach with the kernel's instructions, each as fast as one alone: what noise and a
 * clock that changes can explain. */
static const double SLACK = 1.5;

/* Returns the FLOP of the keys that the rows see: two products a key, of gradients five. */
static double flop_of(const struct test_case *c, bool keys_twice)
{
    const bool gradients = c->op->of == OP_MHA_BACKWARD;
    const double of_key = 2.0 * (double)(gradients ? 3 * c->d_qk + 2 * c->d_v : c->d_qk + c->d_v);
    double keys = 0.0;
    for (int64_t r = 0; r < c->b; r++)
        for (int64_t j = 0; j < c->s_q; j++)
            for (int64_t h = 0; h < c->h_q; h++) {
                const double seen = (double)c->op->maker->seen(c, r, j, h);
                keys += keys_twice ? seen * seen : seen;
            }
    return of_key * keys;
}

/* Returns the most FLOP/s of the instructions on the library's threads. */
static double most_flops(enum peak_unit unit)
{
    static double of_one[PEAK_UNITS];
    if (of_one[unit] == 0.0) of_one[unit] = peak_flops(unit, 1);
    return SLACK * fmla_num_threads() * of_one[unit];
}

int time_cases(const struct subject *op, const struct run *run)
{
    const bool told = run->fault == FAULT_NONE || run->verbose;
    int impossible = 0;
    for (int i = 0; op->timed[i]; i++) {
        int64_t v[GRID_AXES];
        case_values(op, op->timed[i], v);
        struct test_case *c = case_make(op, run, NULL, v, run->seed);
        double best = 1e30;
        for (int repeat = 0; repeat < 3; repeat++) {
            const double start = timing_now();
            if (call_on_host(op, &c->args, 0)) break;
            best = fmin(best, timing_now() - start);
        }
        const double rate = flop_of(c, run->fault == FAULT_COUNT) / best,
                     most = most_flops(peak_unit_of(run->kernel));
        if (told)
            printf("  time: %s %s %s: %.1f us, %.3f TFLOP/s\n", run->kernel, op->name, op->timed[i],
                   best * 1e6, rate * 1e-12);
        if (told && rate > most)
            printf("FAILED %s %s: %.3f TFLOP/s are more than this machine can do, %.3f\n", op->name,
                   run->kernel, rate * 1e-12, most * 1e-12);
        impossible += rate > most;
        case_free(c);
    }
    return impossible;
}

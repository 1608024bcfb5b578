/* SPDX-License-Identifier: MIT */
#define _GNU_SOURCE /* sched_getaffinity */
#include "bench_warn.h"

#include <inttypes.h>
#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* ---- Other work ------------------------------------------------------------------------------- */

/* Half a processor: now and then something runs on every machine. */
static const double SPARE = 0.5;

/* Returns the threads that run or want to, this one among them: /proc/loadavg has three averages, and then
 * running/all. */
static int running_now(void)
{
    char line[128] = "";
    FILE *file = fopen("/proc/loadavg", "r");
    const char *at = file ? fgets(line, sizeof line, file) : NULL;
    for (int field = 0; at && field < 3; field++) at = strchr(at, ' '), at += at != NULL;
    if (file) fclose(file);
    return at ? (int)strtol(at, NULL, 10) : 0;
}

struct bench_load bench_load_now(int threads)
{
    enum { LOOKS = 20 };
    struct bench_load load = {.processors = (int)sysconf(_SC_NPROCESSORS_ONLN), .threads = threads};
    cpu_set_t allowed;
    load.allowed = sched_getaffinity(0, sizeof allowed, &allowed) ? threads : CPU_COUNT(&allowed);
    for (int i = 0; i < LOOKS; i++) {
        const int others = running_now() - 1;
        load.others += others > 0 ? (double)others / LOOKS : 0.0;
        nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
    }
    return load;
}

bool bench_is_busy(const struct bench_load *load, char *text)
{
    if (load->threads > load->allowed)
        snprintf(text, BENCH_WARNING,
                 "bench takes %d threads, and this process may use %d processors: times will be too long; "
                 "use --threads %d",
                 load->threads, load->allowed, load->allowed);
    else if (load->others + load->threads > load->processors + SPARE)
        snprintf(
            text, BENCH_WARNING,
            "the machine is busy: bench takes %d thread%s, others run %.1f, and there are %d processors: "
            "times will be too long; measure on an idle machine%s",
            load->threads, load->threads > 1 ? "s" : "", load->others, load->processors,
            load->threads > 1 ? ", or use fewer --threads" : "");
    else
        return false;
    return true;
}

/* ---- Rows that cannot be ----------------------------------------------------------------------- */

void bench_beaten_add(struct bench_beaten *beaten, const char *kernel, enum bench_between between,
                      double seconds, double memory, double arithmetic)
{
    static const double measured = 0.97; /* peaks vary by some percent between tries */
    const double needed = between == BENCH_HOST      ? 0.0
                          : between == BENCH_NOTHING ? arithmetic
                                                     : fmax(memory, arithmetic);
    if (seconds >= measured * needed || beaten->rows++) return;
    snprintf(beaten->kernel, sizeof beaten->kernel, "%s", kernel);
    beaten->seconds = seconds, beaten->needed = needed;
}

bool bench_beaten_says(const struct bench_beaten *beaten, int64_t timed, char *text)
{
    if (!beaten->rows) return false;
    snprintf(text, BENCH_WARNING,
             "%" PRId64 " of %" PRId64 " rows took less time than they need at the measured peaks, first %s "
             "with %.1f us of %.1f: other work disturbed the peaks, or the row's work is counted wrongly; "
             "measure again",
             beaten->rows, timed, beaten->kernel, 1e6 * beaten->seconds, 1e6 * beaten->needed);
    return true;
}

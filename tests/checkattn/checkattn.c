/* SPDX-License-Identifier: MIT
 *
 * checkattn: tests every kernel that the library lists for this machine, forced through the real dispatch,
 * against the oracle; then times it. Fails if a result is wrong, a pair of values of a grid was missed,
 * nothing was tested, or a listed kernel was not reached. --faults plants defects and fails if one is not
 * detected.
 */
#include "case.h"
#include "device.h"
#include "record.h"
#include "timing.h"

#include <getopt.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- The operations ------------------------------------------------------------------------- */

/* Returns the check of a planner, which has no cases; for the CPU see tests/unit/test_plan.c. NULL: not a
 * planner. */
static void (*plan_check_of(const char *name))(const struct run *run, struct tally *tally)
{
    return !strcmp(name, descriptors[OP_DECODE_PLAN].name)   ? check_device_plan
           : !strcmp(name, descriptors[OP_SPARSE_PLAN].name) ? check_sparse_plan
                                                             : NULL;
}

static struct subject *operation_of(const char *name)
{
    for (int i = 0; i < OPERATIONS; i++)
        if (subjects[i] && !strcmp(descriptors[i].name, name)) return subjects[i];
    return NULL;
}

/* Options of the command line. */
struct asked {
    struct run like;
    const char *operation, *kernel; /* NULL: all */
    fmla_device device;             /* type 0: all */
    bool timed, here;
    int tally_fd; /* -1: print for people */
    struct record record;
};

/* Reports the results of a kernel; returns false if it failed. */
static bool tell(const struct asked *asked, const char *operation, const struct run *run,
                 const struct tally *tally)
{
    const bool partial = run->most_cases > 0 || run->only_case > 0 || run->parts > 0;
    /* One case may be an empty batch; a whole grid may not. */
    bool passed = tally->cases > 0 && (partial || tally->rows > 0) && tally->failed == 0 &&
                  (partial || tally->covered == tally->pairs);
    char covered[80];
    if (run->parts)
        snprintf(covered, sizeof covered, "part %lld of %lld", (long long)run->part, (long long)run->parts);
    else
        snprintf(covered, sizeof covered, "%lld of %lld pairs of values", (long long)tally->covered,
                 (long long)tally->pairs);
    printf("%s %s %s: %lld cases, %lld rows against the oracle, %s, %lld failures, %.1f s\n",
           !passed   ? "FAILED"
           : partial ? "partial"
                     : "ok",
           operation, run->kernel, (long long)tally->cases, (long long)tally->rows, covered,
           (long long)tally->failed, tally->seconds);
    printf("  largest cosine difference of a case: out %.1e, lse %.1e\n", tally->cosine_out,
           tally->cosine_lse);
    if (tally->refused)
        printf("  refused, by its name, and left to another kernel: %lld cases\n", (long long)tally->refused);
    if (asked->timed && operation_of(operation) && !on_gpu(run))
        passed &= !time_cases(operation_of(operation), run);
    fflush(stdout);
    if (asked->tally_fd >= 0) child_tell(asked->tally_fd, tally);
    return passed;
}

/* Checks kernels of one operation in this process, those with the same grid together. Returns the number
 * that failed. */
static int check_here(const struct asked *asked, fmla_device device, const fmla_capability *rows, int count)
{
    struct subject *operation = operation_of(rows[0].operation);
    struct suite suite = {.op = operation, .kernels = count};
    int failed = 0;
    for (int i = 0; i < count; i++) {
        struct run *run = &suite.run[i];
        *run = asked->like;
        run->kernel = rows[i].kernel, run->types = rows[i].types, run->products = rows[i].products;
        run->device = device;
    }
    const double start = timing_now();
    if (on_gpu(&suite.run[0])) device_open(suite.run[0].device);
    if (operation)
        suite_check(&suite);
    else
        plan_check_of(rows[0].operation)(&suite.run[0], &suite.tally[0]);
    if (count == 1) suite.tally[0].seconds = timing_now() - start;
    for (int i = 0; i < count; i++) failed += !tell(asked, rows[0].operation, &suite.run[i], &suite.tally[i]);
    return failed;
}

/* Checks one GPU kernel in its own process, so that a crash does not affect others. */
static bool check_apart(struct asked *asked, fmla_device device, const fmla_capability *row)
{
    struct tally told;
    char why[160] = "";
    const bool passed = child_run(&asked->like, row->operation, row->kernel, device, &told, why, sizeof why);
    if (*why) printf("FAILED %s %s: %s\n", row->operation, row->kernel, why);
    if (asked->record.count < RECORDED)
        asked->record.row[asked->record.count++] =
            (struct record_row){row->operation, row->kernel, told, passed};
    return passed;
}

/* Returns true if the row's kernel is to be checked. *failed counts kernels that have no check. */
static bool is_asked(const struct asked *asked, bool gpu, const fmla_capability *row, int *failed)
{
    const bool plan = plan_check_of(row->operation) != NULL;
    if (!row->kernel || (row->forced_only && !*row->part_of)) return false; /* the oracle */
    if (!operation_of(row->operation) && !plan) {
        printf("FAILED %s %s: there is no check of this operation\n", row->operation, row->kernel);
        ++*failed;
        return false;
    }
    if ((plan && !gpu) || (asked->operation && strcmp(asked->operation, row->operation) != 0) ||
        (asked->kernel && strcmp(asked->kernel, row->kernel) != 0))
        return false;
    if (!row->available)
        printf("- %s %s: not on this machine: %s\n", row->operation, row->kernel, row->reason);
    return row->available;
}

/* Checks every listed kernel of a device. *reached counts those that ran; returns the number that failed.
 * CPU kernels with the same types share a grid. */
static int check_kernels(struct asked *asked, fmla_device device, int *reached)
{
    int failed = 0, count = 0;
    const bool gpu = device.device_type == FMLA_DEVICE_CUDA;
    fmla_capability rows[RECORDED], row = FMLA_INIT(fmla_capability);
    for (int64_t i = 0; fmla_capabilities(device, i, &row) == FMLA_OK; i++)
        if (is_asked(asked, gpu, &row, &failed) && count < RECORDED) rows[count++] = row;
    *reached += count;
    while (count) { /* take the first kernel and those that share its grid off the list */
        fmla_capability group[SUITE_KERNELS] = {rows[0]};
        int together = 1, left = 0;
        for (int i = 1; i < count; i++)
            if (!gpu && together < SUITE_KERNELS && !strcmp(rows[i].operation, group[0].operation) &&
                rows[i].types == group[0].types && rows[i].products == group[0].products)
                group[together++] = rows[i];
            else
                rows[left++] = rows[i];
        count = left;
        fflush(stdout);
        failed += gpu && !asked->here ? !check_apart(asked, device, &group[0])
                                      : check_here(asked, device, group, together);
    }
    return failed;
}

/* The GPU's rows come last: they start processes, before which the driver must not be loaded. */
static int check_all(struct asked *asked)
{
    const fmla_device cpu = {FMLA_DEVICE_CPU, 0};
    const fmla_device gpu = {FMLA_DEVICE_CUDA, asked->device.id};
    struct reason reason;
    int failed = 0, reached = 0;
    if (asked->device.device_type != FMLA_DEVICE_CUDA) failed += check_kernels(asked, cpu, &reached);
    if (asked->device.device_type != FMLA_DEVICE_CPU) {
        if (gpu_describe(gpu.id, &asked->record.gpu, &reason)) {
            if (asked->tally_fd < 0)
                printf("cuda:%d: %s, driver %s\n", gpu.id, asked->record.gpu.name, asked->record.gpu.driver);
            const int before = reached;
            failed += check_kernels(asked, gpu, &reached);
            if (reached == before) printf("- cuda:%d: none of its kernels was tested\n", gpu.id);
        } else {
            printf("- cuda:%d: no GPU kernel is tested: %s\n", gpu.id, reason.text);
            failed += asked->device.device_type == FMLA_DEVICE_CUDA;
        }
    }
    if (!reached) {
        fprintf(stderr, "checkattn: nothing was tested\n");
        return failed + 1;
    }
    return failed;
}

/* Chooses the kernel to plant defects into: the CPU kernel that exists everywhere, or the GPU's first. */
static bool kernel_for_faults(fmla_device device, const char *operation, struct run *run)
{
    fmla_capability row = FMLA_INIT(fmla_capability);
    run->device = device, run->kernel = "cpu-generic", run->types = FMLA_TAKES_BF16 | FMLA_TAKES_FP16;
    if (device.device_type == FMLA_DEVICE_CPU) return true;
    for (int64_t i = 0; fmla_capabilities(device, i, &row) == FMLA_OK; i++) {
        if (!row.available || strcmp(row.operation, operation) != 0) continue;
        run->kernel = row.kernel, run->types = row.types, run->products = row.products;
        return true;
    }
    fprintf(stderr, "checkattn: there is no kernel of %s on that device\n", operation);
    return false;
}

/* Every planted defect must be detected, and the same cases without a defect must pass (check_all covers
 * that). */
static int check_faults(const struct asked *asked, bool verbose)
{
    const fmla_device device = asked->device;
    const bool gpu = device.device_type == FMLA_DEVICE_CUDA;
    int unseen = 0, planted = 0;
    if (gpu) device_open(device);
    for (int i = 0; i < OPERATIONS; i++)
        for (int fault = FAULT_NONE + 1; fault < FAULTS; fault++) {
            const struct subject *op = subjects[i];
            if (!op) continue;
            const uint64_t faults =
                op->faults | (gpu ? 0 : op->cpu_faults | (op->timed[0] ? FAULT(COUNT) : 0));
            if (!(faults >> fault & 1)) continue;
            if (asked->operation && strcmp(asked->operation, descriptors[i].name) != 0) continue;
            planted++;
            struct suite suite = {.op = subjects[i], .kernels = 1};
            suite.run[0] =
                (struct run){.seed = asked->like.seed, .fault = (enum defect)fault, .verbose = verbose};
            const struct tally *tally = &suite.tally[0];
            if (!kernel_for_faults(device, descriptors[i].name, &suite.run[0])) return unseen + 1;
            suite_check(&suite);
            const bool seen = tally->planted && tally->failed > 0;
            printf("%s fault %s: %s: %s\n", seen ? "ok" : "FAILED", descriptors[i].name, fault_names[fault],
                   seen             ? "seen"
                   : tally->planted ? "planted, and not seen"
                                    : "found no place to be planted");
            unseen += !seen;
        }
    if (!planted) fprintf(stderr, "checkattn: no defect was planted\n");
    return planted ? unseen : unseen + 1;
}

/* Reads K/N, with K in [1, N]. */
static bool read_part(char *text, struct run *like)
{
    char *slash = strchr(text, '/');
    if (!slash) return false;
    *slash = '\0';
    return read_number(slash + 1, 1, INT32_MAX, &like->parts) &&
           read_number(text, 1, like->parts, &like->part);
}

static int usage(FILE *to, int status)
{
    fputs(
        "usage: checkattn [--seed N] [--op OPERATION] [--kernel NAME] [--device cpu|cuda:N] [--no-time]\n"
        "                 [--threads own] [--cases N] [--case N] [--part K/N] [--json FILE] [--here]\n"
        "       checkattn --faults [--op NAME] [--seed N] [--device cpu|cuda:N] [--verbose]\n"
        "Compares every kernel of this machine with the oracle. --faults: planted defects must go red.\n"
        "--threads own: every loop on three threads, however short, for tools that look for races.\n"
        "--cases N: at most N cases a kernel; that is no full test, and says so. --case N: that one of the\n"
        "grid alone. --part K/N, with --device cpu: every N-th case from the K-th on, so that N processes "
        "check\n"
        "all of them. --json FILE: what was tested on the GPU, with the hashes of its kernels' machine code\n"
        "(kernels.sha256 beside this program). --here: no process of its own for each GPU kernel, for\n"
        "debuggers and compute-sanitizer.\n"
        "Exit: 0 all passed, 1 something failed, 2 wrong usage, 3 the GPU failed.\n",
        to);
    return status;
}

int main(int argc, char **argv)
{
    static const struct option options[] = {
        {"seed", required_argument, NULL, 's'},
        {"op", required_argument, NULL, 'o'},
        {"kernel", required_argument, NULL, 'k'},
        {"no-time", no_argument, NULL, 'n'},
        {"faults", no_argument, NULL, 'f'},
        {"verbose", no_argument, NULL, 'v'},
        {"help", no_argument, NULL, 'h'},
        {"threads", required_argument, NULL, 't'},
        {"cases", required_argument, NULL, 'c'},
        {"device", required_argument, NULL, 'd'},
        {"json", required_argument, NULL, 'j'},
        {"case", required_argument, NULL, 'C'},
        {"part", required_argument, NULL, 'p'},
        {"here", no_argument, NULL, 'H'},
        {"tally", required_argument, NULL, 'T'}, /* in a child: the pipe to its parent */
        {NULL, 0, NULL, 0}};
    struct asked asked = {.like = {.seed = 1}, .timed = true, .tally_fd = -1};
    const char *json = NULL;
    bool faults = false, verbose = false;
    uint64_t cases = 0, only = 0, tally = 0;
    for (int option; (option = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        bool good = true;
        switch (option) {
        case 's': good = read_number(optarg, 0, UINT64_MAX, &asked.like.seed); break;
        case 'c': good = read_number(optarg, 1, INT64_MAX, &cases); break;
        case 'C': good = read_number(optarg, 1, INT64_MAX, &only); break;
        case 'p': good = read_part(optarg, &asked.like); break;
        case 'T': good = read_number(optarg, 3, INT32_MAX, &tally); break;
        case 't': good = asked.like.own_threads = !strcmp(optarg, "own"); break;
        case 'd': good = read_device(optarg, &asked.device); break;
        case 'o': asked.operation = optarg; break;
        case 'k': asked.kernel = optarg; break;
        case 'j': json = optarg; break;
        case 'H': asked.here = true; break;
        case 'n': asked.timed = false; break;
        case 'f': faults = true; break;
        case 'v': verbose = true; break;
        case 'h': return usage(stdout, 0);
        default: good = false;
        }
        if (!good) return usage(stderr, 2);
    }
    asked.like.most_cases = (int64_t)cases, asked.like.only_case = (int64_t)only;
    if (tally) asked.tally_fd = (int)tally;
    if (optind < argc || (asked.like.only_case && json) ||
        (asked.like.parts && (json || asked.device.device_type != FMLA_DEVICE_CPU)) ||
        (faults && (asked.like.most_cases || asked.like.only_case || asked.like.parts ||
                    asked.like.own_threads || json)) ||
        (json && asked.here))
        return usage(stderr, 2);
    if (asked.like.own_threads) {
        asked.timed = false;
        fmla_set_parallel_for(pthread_for, NULL, PTHREAD_WORKERS);
    }
#ifdef M_MMAP_MAX                                               /* glibc */
    mallopt(M_MMAP_MAX, 0), mallopt(M_TRIM_THRESHOLD, 1 << 30); /* keep the pages of freed cases */
#endif
    if (asked.tally_fd >= 0) return check_all(&asked) ? 1 : 0;
    printf("checkattn: flashmla %s, seed %llu, %d threads\n", fmla_version_string(),
           (unsigned long long)asked.like.seed, fmla_num_threads());
    if (!asked.device.device_type && faults) asked.device.device_type = FMLA_DEVICE_CPU;
    int failed = faults ? check_faults(&asked, verbose) : check_all(&asked);
    asked.record.complete = !asked.like.most_cases && !asked.operation && !asked.kernel;
    if (json) failed += !record_write(&asked.record, asked.like.seed, argv[0], json);
    printf("checkattn: %s\n", failed ? "FAILED"
                              : asked.like.most_cases || asked.like.only_case || asked.like.parts
                                  ? "passed in part; not every pair of values was asked for"
                                  : "all passed");
    return failed ? 1 : 0;
}

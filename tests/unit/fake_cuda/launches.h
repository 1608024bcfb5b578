/* SPDX-License-Identifier: MIT
 *
 * The launches recorded by a fake GPU: kernels, grids and parameters.
 */
#ifndef FMLA_FAKE_LAUNCHES_H
#define FMLA_FAKE_LAUNCHES_H

#include "calls.h"

#include "cuda/cache_params.h"

/* Returns the n-th launch counted back from the last, which is 0. */
static inline const struct fake_launch *launched(int from_last)
{
    return &fake->launch[fake->launches - 1 - from_last];
}

/* A launch's parameters, as such a struct. */
#define PARAMS(params, launch) (*(const struct params *)(const void *)(launch)->parameters)

/* Returns the launch's attribute, or NULL. */
static inline const struct cu_launch_attribute *attribute_of(const struct fake_launch *launch, unsigned id)
{
    for (unsigned i = 0; i < launch->config.num_attributes; i++)
        if (launch->attributes[i].id == id) return &launch->attributes[i];
    return NULL;
}

/* Returns true if the launch's CTAs join their own partial results, which requires that all are resident
 * at once. */
static inline bool joins_in_kernel(const struct fake_launch *launch)
{
    const struct cu_launch_attribute *cooperative = attribute_of(launch, CU_LAUNCH_COOPERATIVE);
    const bool named = strstr(launch->kernel, "_together") != NULL;
    CHECK(named == (cooperative && cooperative->value.cooperative == 1), "%s", launch->kernel);
    return named;
}

/* Returns true if the launch has clusters: of two CTAs, in Hopper's gradients at 256/256. */
static inline bool has_clusters(const struct fake_launch *launch)
{
    const bool named = !strncmp(launch->kernel, "sm90_mha_backward_", 18) &&
                       strstr(launch->kernel, "16_256") && !strstr(launch->kernel, "_prepare_") &&
                       !strstr(launch->kernel, "_finish_");
    CHECK(named == (attribute_of(launch, CU_LAUNCH_CLUSTER) != NULL), "%s", launch->kernel);
    return named;
}

static inline bool divides(struct divisor divisor, int64_t by)
{
    const struct divisor right = divisor_of((uint32_t)by);
    return by <= INT32_MAX && divisor.multiplier == right.multiplier && divisor.shift == right.shift;
}

/* Returns the offset in bytes from the beginning of a region. */
static inline int64_t offset(const void *at, int k)
{
    return (const char *)at - region(k);
}

/* Three pairs of CHECK_ALL: CTAs, threads, and bytes of shared memory. */
#define GRID(launch, blocks, threads, bytes)                                                                 \
    {(launch)->config.grid_x, blocks}, {(launch)->config.block_x, threads},                                  \
    {                                                                                                        \
        (launch)->config.shared_bytes, bytes                                                                 \
    }

/* ---- Which kernel runs --------------------------------------------------------------------------------- */

static inline const char *kernel_of(enum operation operation, const void *args)
{
    struct answer answer = {.name = ""};
    CHECK_OK(described_ask(operation, ASK_KERNEL, args, &answer));
    return answer.name;
}

/* Checks that a kernel leaves a call to `other`; if the kernel is named, the call names the argument and gives
 * the reason. argument NULL: the kernel takes the call. */
static inline void check_left(const char *label, enum operation operation, void *args, const char *kernel,
                              const char *other, const char *argument, const char *words)
{
    const char **const named = option_at(operation, args, "kernel"), *const runs = argument ? other : kernel;
    size_t bytes;
    *named = NULL;
    CHECK(!strcmp(kernel_of(operation, args), runs), "%s: %s", label, kernel_of(operation, args));
    CHECK(run_call(operation, args, &bytes) == FMLA_OK, "%s: %s", label, fmla_last_error());
    *named = kernel;
    if (argument)
        check_rejected(label, described_run(operation, args), FMLA_UNSUPPORTED, descriptors[operation].name,
                       argument, words);
    else
        CHECK(!strcmp(kernel_of(operation, args), kernel), "%s: %s", label, kernel_of(operation, args));
}

/* ---- What is launched ----------------------------------------------------------------------------------- */

#define STREAM ((void *)(region(7) + 64)) /* of calls whose kernels are checked */

/* Returns whether a kernel overlaps with the preceding launch: all of Hopper's but the first of dense MHA's, unless it
 * has parts, and the join of any dense MHA. */
static inline bool overlaps(const struct fake_launch *launch)
{
    const char *const kernel = launch->kernel;
    if (!strncmp(kernel, "sm90_mha_forward_", 17) && !strstr(kernel, "_join_"))
        return PARAMS(mha_forward_sm90_params, launch).part_rows;
    if (strstr(kernel, "_mha_forward_")) return strstr(kernel, "_join_") && fake->capability >= 90;
    return !strncmp(kernel, "sm90", 4) && !strstr(kernel, "_mha_backward_prepare_");
}

/* Checks the launches since `before` by name. Hopper's kernels and the joins after them overlap with the
 * preceding launch. */
__attribute__((format(printf, 2, 3))) static inline void check_kernels(int before, const char *format, ...)
{
    char came[512] = "", names[512];
    va_list values;
    va_start(values, format);
    vsnprintf(names, sizeof names, format, values);
    va_end(values);
    unsigned overlapping = 0;
    for (int i = before; i < fake->launches; i++) {
        const struct fake_launch *launch = &fake->launch[i];
        snprintf(came + strlen(came), sizeof came - strlen(came), "%s%s", *came ? "|" : "", launch->kernel);
        if (strncmp(launch->kernel, "join", 4) != 0) overlapping = overlaps(launch);
        const struct cu_launch_attribute *overlap = attribute_of(launch, CU_LAUNCH_OVERLAP);
        CHECK(launch->config.stream == STREAM &&
                  launch->config.num_attributes ==
                      overlapping + joins_in_kernel(launch) + has_clusters(launch),
              "launch %d: %u attributes", i, launch->config.num_attributes);
        if (overlapping) CHECK(overlap && overlap->value.overlap == 1, "launch %d does not overlap", i);
    }
    CHECK(!strcmp(came, names), "launched %s, expected %s", came, names);
}

/* Runs a call of an operation on STREAM and checks its launches by name, given as a format and values. */
#define RUNS(op, call, ...)                                                                                  \
    do {                                                                                                     \
        const int runs_before = fake->launches;                                                              \
        (call)->args.stream = STREAM;                                                                        \
        CHECK_OK(op##_run(call));                                                                            \
        check_kernels(runs_before, __VA_ARGS__);                                                             \
    } while (0)

#endif

/* SPDX-License-Identifier: MIT
 *
 * The public functions for threads and devices, and the common part of the operations' public functions.
 */
#include "api.h"

#include "threads.h"

#include <string.h>

enum { MAX_WORKERS = 4096 };

/* ---- Threads -------------------------------------------------------------------------------- */

fmla_status fmla_set_parallel_for(fmla_parallel_for run, void *pool, int32_t workers)
{
    if (run) TRY(check_range("set_parallel_for", "workers", workers, 1, MAX_WORKERS));
    threads_set_loop(run, pool, workers);
    return FMLA_OK;
}

fmla_status fmla_set_num_threads(int32_t n)
{
    TRY(check_range("set_num_threads", "n", n, 0, MAX_WORKERS));
    threads_set_count(n);
    return FMLA_OK;
}

int32_t fmla_num_threads(void)
{
    return threads_now().workers;
}

/* ---- Errors --------------------------------------------------------------------------------- */

fmla_status fmla_last_error_describe(fmla_error *error)
{
    static const size_t sizes[] = {sizeof(fmla_error), 0};
    fmla_error parts;
    TRY(check_struct("last_error_describe", "error", error, &parts, sizeof parts, sizes));
    error_parts(&parts);
    memcpy(error, &parts, parts.struct_size < sizeof parts ? parts.struct_size : sizeof parts);
    return FMLA_OK;
}

/* ---- Devices and kernels -------------------------------------------------------------------- */

fmla_status fmla_capabilities(fmla_device device, int64_t index, fmla_capability *capability)
{
    static const size_t sizes[] = {sizeof(fmla_capability), 0};
    fmla_capability row;
    TRY(check_struct("capabilities", "capability", capability, &row, sizeof row, sizes));
    TRY(check_device_argument("capabilities", "device", &device));
    if (index < 0 || !dispatch_capability(device, index, &row)) {
        int64_t rows = 0;
        while (dispatch_capability(device, rows, &row)) rows++;
        return fail(FMLA_INVALID_ARGUMENT, "capabilities: index: is %lld, must be in [0, %lld)",
                    (long long)index, (long long)rows);
    }
    memcpy(capability, &row, row.struct_size < sizeof row ? row.struct_size : sizeof row);
    return FMLA_OK;
}

fmla_status fmla_prepare(fmla_device device)
{
    TRY(check_device_argument("prepare", "device", &device));
    char name[32];
    const char *reason = dispatch_device_reason(device);
    if (!*reason) return dispatch_prepare(device);
    return fail(FMLA_UNSUPPORTED, "prepare: device: is %s, and no kernel of this build runs there: %s",
                device_name(device, name), reason);
}

fmla_status fmla_device_describe(fmla_device device, fmla_device_info *info)
{
    static const size_t sizes[] = {sizeof(fmla_device_info), 0};
    fmla_device_info full;
    TRY(check_struct("device_describe", "info", info, &full, sizeof full, sizes));
    TRY(check_device_argument("device_describe", "device", &device));
    dispatch_describe(device, &full);
    memcpy(info, &full, full.struct_size < sizeof full ? full.struct_size : sizeof full);
    return FMLA_OK;
}

/* ---- The common part of operations ----------------------------------------------------------- */

fmla_status taken_size(const struct taken *taken, size_t *bytes, size_t *alignment)
{
    struct prepared prepared;
    TRY(dispatch_decide(taken->kernel, taken->problem, &prepared));
    if (bytes) *bytes = prepared.bytes;
    if (alignment) *alignment = prepared.alignment;
    return FMLA_OK;
}

fmla_status taken_kernel(const struct taken *taken, const char **name)
{
    TRY(taken_size(taken, NULL, NULL));
    TRY(check_answer(taken->operation, "name", (const void *)name));
    *name = taken->kernel->name;
    return FMLA_OK;
}

fmla_status taken_run(const struct taken *taken)
{
    struct prepared prepared;
    TRY(dispatch_decide(taken->kernel, taken->problem, &prepared));
    TRY(check_buffer(taken->operation, "workspace", taken->workspace, taken->workspace_size, prepared.bytes,
                     prepared.alignment));
    *taken->workspace_of_problem = taken->workspace;
    return taken->kernel->driver->run(taken->kernel->driver, taken->problem, &prepared);
}

/* SPDX-License-Identifier: MIT */
#include "kernels.h"

#include "flashmla/flashmla.h"

#include <stdio.h>
#include <string.h>

bool kernel_exists(const char *operation, const char *name, struct fault *fault)
{
    /* The rows of GPU 0 are there without a GPU, too. */
    static const fmla_device devices[] = {{FMLA_DEVICE_CPU, 0}, {FMLA_DEVICE_CUDA, 0}};
    char names[400] = "";
    if (!name) return true;
    for (size_t d = 0; d < sizeof devices / sizeof *devices; d++) {
        fmla_capability row = FMLA_INIT(fmla_capability);
        for (int64_t i = 0; fmla_capabilities(devices[d], i, &row) == FMLA_OK; i++) {
            if (!row.kernel || strcmp(row.operation, operation) != 0) continue;
            if (!strcmp(row.kernel, name)) return true;
            const size_t used = strlen(names);
            snprintf(names + used, sizeof names - used, "%s%s", used ? ", " : "", row.kernel);
        }
    }
    return fault_set(fault, "--kernel: '%.100s' must be a kernel of %s: %s", name, operation, names);
}

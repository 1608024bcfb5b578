/* SPDX-License-Identifier: MIT */
#ifndef FLASHMLA_TOOL_RUN_JSON_H
#define FLASHMLA_TOOL_RUN_JSON_H

#include "check.h"

#include "outfile.h"

#include "flashmla/flashmla.h"

/* What `run` tells of a call, in its report and in its line of JSON. */
struct run_told {
    const char *operation, *kernel;
    fmla_device device;
    const fmla_tensor *q;
    size_t workspace;
    int64_t runs;
    double seconds; /* median */
    double flop, bytes;
    bool checked; /* with `check` */
    struct check_result check;
};

/* The line; the file stays open. */
bool run_json(struct outfile *file, const struct run_told *told, struct fault *fault);

#endif

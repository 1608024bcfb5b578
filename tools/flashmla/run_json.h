/* SPDX-License-Identifier: MIT */
#ifndef FLASHMLA_TOOL_RUN_JSON_H
#define FLASHMLA_TOOL_RUN_JSON_H

#include "check.h"

#include "outfile.h"

/* What `run` tells of a call, in its report and in its line of JSON. */
struct run_told {
    const struct call *call; /* where it runs */
    const char *kernel;
    size_t workspace;
    int64_t runs;
    double seconds; /* median */
    struct work work;
    bool checked; /* with `check` */
    struct check_result check;
};

/* The line; the file stays open. */
bool run_json(struct outfile *file, const struct run_told *told, struct fault *fault);

#endif

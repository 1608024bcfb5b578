/* SPDX-License-Identifier: MIT */
#include "run_json.h"

#include "json_line.h"

#include "json_memory.h"

#include <stdio.h>

static json_t *shape_of(const fmla_tensor *tensor)
{
    json_t *shape = json_array();
    for (int32_t i = 0; i < tensor->ndim; i++)
        json_array_append_new(shape, json_integer((json_int_t)tensor->shape[i]));
    return shape;
}

bool run_json(struct outfile *file, const struct run_told *told, struct fault *fault)
{
    const struct call *call = told->call;
    const fmla_tensor *first = &call->tensor[0];
    char device[16] = "cpu";
    if (device_is_gpu(call->device)) snprintf(device, sizeof device, "cuda:%d", call->device.id);
    json_memory_watch();
    json_t *line =
        json_pack("{s:s, s:s, s:s, s:o, s:s, s:I, s:I, s:f, s:f, s:f, s:s}", "op", descriptors[call->op].name,
                  "kernel", told->kernel, "device", device, "q", shape_of(first), "dtype",
                  first->dtype.code == FMLA_TYPE_BFLOAT ? "bf16" : "fp16", "workspace",
                  (json_int_t)told->workspace, "runs", (json_int_t)told->runs, "us", 1e6 * told->seconds,
                  "tflops", 1e-12 * told->work.flop / told->seconds, "gbs",
                  1e-9 * told->work.bytes / told->seconds, "version", fmla_version_string());
    const struct check_result *check = &told->check;
    if (told->checked)
        json_object_set_new(line, "check",
                            json_pack("{s:b, s:I, s:I, s:f, s:f}", "passed", check->passed, "rows",
                                      (json_int_t)check->rows, "all_rows", (json_int_t)check->all_rows,
                                      "worst_out", check->of[0].worst_abs, "worst_lse",
                                      check->of[1].worst_abs));
    return json_line(file, line, fault);
}

/* SPDX-License-Identifier: MIT
 *
 * Rows of merge.
 */
#include "bench_session.h"
#include "gpu_call.h"

#include "elements.h"
#include "gpu.h"

#include <stdlib.h>
#include <string.h>

static fmla_status call_merge(const void *args)
{
    return fmla_merge(args);
}

/* The library has no question for it: what is forced, or the first that runs here. */
static const char *merge_kernel(const struct session *s)
{
    if (s->options->kernel) return s->options->kernel;
    fmla_capability row = FMLA_INIT(fmla_capability);
    for (int64_t i = 0; fmla_capabilities(s->device, i, &row) == FMLA_OK; i++)
        if (!strcmp(row.operation, "merge") && row.available && !row.forced_only) return row.kernel;
    return "none";
}

/* The call on copies of its tensors. */
static bool bench_merge_on_gpu(struct session *s, const fmla_merge_args *host, const size_t bytes[3],
                               struct bench_row *row, struct fault *fault)
{
    fmla_merge_args args = *host;
    const fmla_tensor *from[3] = {host->out_parts, host->lse_parts, host->out};
    const fmla_tensor **to[3] = {&args.out_parts, &args.lse_parts, &args.out};
    fmla_tensor tensors[3];
    fmla_status status = FMLA_OK;
    struct fault why;
    bool good = gpu_stream_open(&args.stream, &why);
    for (int i = 0; i < 3; i++) {
        tensors[i] = *from[i], *to[i] = &tensors[i];
        tensors[i].device = s->device, tensors[i].data = NULL;
        good = good && gpu_alloc(&tensors[i].data, bytes[i], &why) &&
               gpu_upload(tensors[i].data, from[i]->data, bytes[i], &why);
    }
    struct bench_timed timed = {.call = call_merge, .args = &args, .stream = args.stream};
    double median;
    good = good && bench_time_on_gpu(s, &timed, 1, row, &median, &status, &why);
    for (int i = 0; i < 3; i++) gpu_free(tensors[i].data);
    gpu_stream_close(args.stream);
    if (good) return bench_finish_row(s, row, fault);
    if (status == FMLA_UNSUPPORTED) return bench_pass_over(s, row, why.text);
    return fault_set(fault, "%s", why.text);
}

bool bench_merge(struct session *s, const struct batch_shape *shape, int64_t parts, struct fault *fault)
{
    const int64_t rows = shape->b * shape->s_q * shape->h_q, values = rows * BATCH_D_V;
    const int64_t parts_shape[] = {parts, shape->b, shape->s_q, shape->h_q, BATCH_D_V};
    const int64_t lse_shape[] = {parts, shape->b, shape->h_q, shape->s_q};
    const double bytes = 4.0 * (double)parts * (double)(values + rows) + 2.0 * (double)values;
    struct bench_row row = {.shape = shape, .parts = parts, .kernel = merge_kernel(s)};
    if (bench_too_large(s, bytes)) return bench_pass_over(s, &row, "too large for this machine's memory");
    const fmla_device cpu = {FMLA_DEVICE_CPU, 0};
    const fmla_dtype fp32 = dtype_of(FMLA_TYPE_FLOAT, 32);
    const fmla_dtype type = dtype_of(shape->fp16 ? FMLA_TYPE_FLOAT : FMLA_TYPE_BFLOAT, 16);
    fmla_tensor out_parts = {malloc((size_t)(parts * values) * 4 + 1), cpu, 5, fp32, parts_shape, NULL, 0};
    fmla_tensor lse_parts = {malloc((size_t)(parts * rows) * 4 + 1), cpu, 4, fp32, lse_shape, NULL, 0};
    fmla_tensor out = {malloc((size_t)values * 2 + 1), cpu, 4, type, parts_shape + 1, NULL, 0};
    bool good;
    if (out_parts.data && lse_parts.data && out.data) {
        struct random_state random = {2025};
        batch_fill(out_parts.data, fp32, parts * values, BATCH_D_V, &random);
        batch_fill(lse_parts.data, fp32, parts * rows, BATCH_D_V, &random);
        fmla_merge_args args = FMLA_INIT(fmla_merge_args);
        args.out_parts = &out_parts, args.lse_parts = &lse_parts, args.out = &out;
        args.kernel = s->options->kernel;
        row.flop = 2.0 * (double)parts * (double)values, row.bytes = bytes;
        if (device_is_gpu(s->device)) {
            const size_t sizes[3] = {(size_t)(parts * values) * 4, (size_t)(parts * rows) * 4,
                                     (size_t)values * 2};
            good = bench_merge_on_gpu(s, &args, sizes, &row, fault);
        } else {
            struct bench_timed timed = {.call = call_merge, .args = &args};
            const fmla_status status = bench_time_calls(s, &timed, 1, &row);
            good = status ? bench_library_fault(s, &row, status, fault) : bench_finish_row(s, &row, fault);
        }
    } else {
        good = bench_pass_over(s, &row, "no memory for its tensors");
    }
    free(out_parts.data), free(lse_parts.data), free(out.data);
    return good;
}

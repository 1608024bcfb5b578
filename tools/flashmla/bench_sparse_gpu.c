/* SPDX-License-Identifier: MIT
 *
 * A row of sparse decode on a GPU: the batch copied there, a plan made there, both timed.
 */
#include "bench_session.h"

#include "gpu.h"

#include <string.h>

enum { TENSORS = 10 };

/* A call on copies of its tensors, which lie without gaps. Zero-initialised. */
struct copied {
    fmla_sparse_decode_args args;
    fmla_tensor tensor[TENSORS];
    void *plan;
};

static bool refused(fmla_status *status, fmla_status from, struct fault *fault)
{
    *status = from;
    return from != FMLA_OK && !fault_set(fault, "%s", fmla_last_error());
}

static bool copy(struct copied *c, fmla_device device, const fmla_sparse_decode_args *host,
                 struct fault *fault)
{
    fmla_sparse_decode_args *args = &c->args;
    *args = *host;
    const fmla_tensor **all[TENSORS] = {&args->q,
                                        &args->kv_cache,
                                        &args->indices,
                                        &args->topk_length,
                                        &args->attn_sink,
                                        &args->extra_kv_cache,
                                        &args->extra_indices,
                                        &args->extra_topk_length,
                                        &args->out,
                                        &args->lse};
    for (int i = 0; i < TENSORS; i++) {
        const fmla_tensor *from = *all[i];
        if (!from) continue;
        size_t bytes = from->dtype.bits / 8;
        for (int d = 0; d < from->ndim; d++) bytes *= (size_t)from->shape[d];
        c->tensor[i] = *from, *all[i] = &c->tensor[i];
        c->tensor[i].device = device, c->tensor[i].data = NULL;
        if (!gpu_alloc(&c->tensor[i].data, bytes, fault) ||
            !gpu_upload(c->tensor[i].data, from->data, bytes, fault))
            return false;
    }
    return gpu_stream_open(&args->stream, fault);
}

static fmla_decode_plan_args plan_args(const struct copied *c)
{
    const fmla_sparse_decode_args *args = &c->args;
    fmla_decode_plan_args plan = FMLA_INIT(fmla_decode_plan_args);
    plan.sparse = 1, plan.target = args->q->device, plan.stream = args->stream;
    plan.b = args->q->shape[0], plan.s_q = args->q->shape[1], plan.h_q = args->q->shape[2];
    plan.topk = args->indices->shape[2], plan.topk_length = args->topk_length;
    plan.extra_topk = args->extra_indices ? args->extra_indices->shape[2] : 0;
    plan.extra_topk_length = args->extra_topk_length;
    plan.num_partitions = args->num_partitions;
    plan.plan = c->plan, plan.plan_size = args->plan_size;
    return plan;
}

static fmla_status call_plan(const void *copied)
{
    const fmla_decode_plan_args plan = plan_args(copied);
    return fmla_decode_plan(&plan);
}

static fmla_status call_sparse(const void *args)
{
    return fmla_sparse_decode(args);
}

/* Plan and workspace, as large as the library says. */
static bool make_room(struct copied *c, fmla_status *status, struct fault *fault)
{
    const fmla_decode_plan_args plan = plan_args(c);
    size_t bytes = 0;
    if (refused(status, fmla_decode_plan_size(&plan, &bytes), fault) || !gpu_alloc(&c->plan, bytes, fault))
        return false;
    c->args.plan = c->plan, c->args.plan_size = bytes;
    if (refused(status, call_plan(c), fault) || !gpu_stream_wait(c->args.stream, fault) ||
        refused(status, fmla_sparse_decode_workspace_size(&c->args, &bytes, NULL), fault))
        return false;
    c->args.workspace_size = bytes;
    return gpu_alloc(&c->args.workspace, bytes, fault);
}

bool bench_sparse_on_gpu(struct session *s, const fmla_sparse_decode_args *host, struct bench_row *row,
                         struct fault *fault)
{
    struct copied c = {0};
    struct fault why = {""};
    fmla_status status = FMLA_OK;
    double median;
    bool good = copy(&c, s->device, host, &why) && make_room(&c, &status, &why);
    struct bench_timed plan = {.call = call_plan, .args = &c, .stream = c.args.stream},
                       timed = {.call = call_sparse, .args = &c.args, .stream = c.args.stream};
    good = good && !refused(&status, fmla_sparse_decode_kernel(&c.args, &row->kernel), &why) &&
           bench_time_on_gpu(s, &plan, 1, row, &row->plan, &status, &why) &&
           bench_time_on_gpu(s, &timed, 1, row, &median, &status, &why);
    for (int i = 0; i < TENSORS; i++) gpu_free(c.tensor[i].data);
    gpu_free(c.plan), gpu_free(c.args.workspace);
    gpu_stream_close(c.args.stream);
    if (good) return bench_finish_row(s, row, fault);
    if (status == FMLA_UNSUPPORTED) return bench_pass_over(s, row, why.text);
    return fault_set(fault, "%s", why.text);
}

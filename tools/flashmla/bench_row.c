/* SPDX-License-Identifier: MIT */
#include "bench_report.h"

#include "bench_stream.h"

#include "gpu.h"

#include <math.h>
#include <stdlib.h>
#include <unistd.h>

/* The calls of a row: the timed one and, if wanted, the fixed-length batch beside it; in host memory, and
 * on the GPU if they run there. */
enum { TIMED, EVEN, CALLS };
struct calls {
    struct call host[CALLS], gpu[CALLS];
    const struct call *runs[CALLS]; /* NULL: none */
    struct gpu_stream_list list;
};

/* Makes a batch with as many keys as in this shape, spread evenly. */
static bool make_even(struct call *even, const struct call *call, const struct shape *shape,
                      struct reason *reason)
{
    struct shape same = *shape;
    int32_t *lengths = malloc((size_t)(shape->b + 1) * sizeof *lengths);
    if (!lengths) return reason_set(reason, "no memory for the lengths");
    make_fixed_lengths(call_tensor(call, "seqlens")->data, shape->b, lengths);
    same.varlen = false, same.lengths = lengths;
    const bool made = make_call(even, &same, reason);
    free(lengths);
    return made;
}

static bool open_calls(struct bench_session *s, struct calls *calls, const struct bench_row *row,
                       fmla_status *status, struct reason *reason)
{
    const fmla_device device = s->timer.device;
    for (int i = 0; i < CALLS; i++) {
        struct call *host = &calls->host[i], *gpu = &calls->gpu[i];
        if (i == EVEN && !(s->fixed && row->shape->varlen)) continue;
        *(const char **)call_option(host, "kernel") = s->timer.kernel;
        if (device_is_gpu(device)) {
            if (!call_to_gpu(gpu, device, host, status, reason) || !call_plan_open(gpu, status, reason) ||
                (row->shape->no_forward && !make_forward(gpu, status, reason)))
                return false;
            calls->runs[i] = gpu;
        } else {
            if (!call_workspace(host, status, reason)) {
                if (!*status) *status = FMLA_UNSUPPORTED; /* another row may fit */
                return false;
            }
            calls->runs[i] = host;
        }
    }
    return true;
}

static bool time_calls(struct bench_session *s, struct calls *calls, struct bench_row *row,
                       fmla_status *status, struct reason *reason)
{
    const struct call *call = calls->runs[TIMED];
    struct bench_timed plan = {.call = call, .plan = true}, timed[BENCH_TIMED] = {{.call = call}};
    int count = 1, bare_at = 0, even_at = 0;
    if (s->stream && bench_stream_can(call)) bare_at = count++;
    if (calls->runs[EVEN]) even_at = count++;
    if (bare_at) timed[bare_at] = (struct bench_timed){.call = call, .bare = &calls->list};
    if (even_at) timed[even_at].call = calls->runs[EVEN];
    if (bare_at && !bench_stream_open(&calls->list, &s->timer.gpu.bare, &calls->host[TIMED],
                                      call_tensor(call, "kv_cache")->data, reason))
        return false;
    if (call->plan && !bench_time(&s->timer, &plan, 1, status, reason)) return false;
    if (!bench_time(&s->timer, timed, count, status, reason)) return false;
    row->timed = timed[0], row->plan = plan.median;
    if (bare_at) row->stream = timed[bare_at].median;
    if (even_at) row->fixed = timed[even_at].median;
    return true;
}

static bool run_row(struct bench_session *s, struct calls *calls, struct bench_row *row, fmla_status *status,
                    struct reason *reason)
{
    if (!open_calls(s, calls, row, status, reason) ||
        call_refused(status, call_kernel(calls->runs[TIMED], &row->kernel), reason) ||
        !time_calls(s, calls, row, status, reason))
        return false;
    const bool copies = bench_only_copies(row->shape->op);
    const double memory = row->work.bytes / (copies ? s->timer.copy : bench_bandwidth(&s->timer)),
                 arithmetic = copies ? 0.0 : row->work.flop / bench_peak(&s->timer, row->kernel);
    row->floor = fmax(memory, arithmetic);
    bench_beaten_add(&s->beaten, row->kernel, s->timer.between, row->timed.median, memory, arithmetic);
    return true;
}

static bool make_calls(const struct bench_session *s, struct calls *calls, const struct shape *shape,
                       struct reason *reason)
{
    struct call *call = &calls->host[TIMED];
    return make_call(call, shape, reason) &&
           (!s->fixed || !shape->varlen || make_even(&calls->host[EVEN], call, shape, reason));
}

static bool too_large(const struct bench_session *s, double bytes)
{
    if (device_is_gpu(s->timer.device) && bytes > 0.8 * (double)s->timer.gpu.peak.gpu.memory) return true;
    const double all = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
    return all > 0.0 && bytes > 0.5 * all;
}

bool bench_row(struct bench_session *s, const struct shape *shape, struct reason *reason)
{
    static struct calls calls; /* too large for the stack */
    struct bench_row row = {.shape = shape};
    struct reason why = {""};
    fmla_status status = FMLA_UNSUPPORTED;
    bool good = false;
    calls = (struct calls){0};
    if (too_large(s, shape_bytes(shape) * (s->fixed && shape->varlen ? 2.0 : 1.0))) {
        reason_set(&why, "too large for this machine's memory");
    } else if (make_calls(s, &calls, shape, &why)) {
        row.work = call_work(&calls.host[TIMED]), status = FMLA_OK;
        good = run_row(s, &calls, &row, &status, &why);
    }
    if (calls.list.chunks) gpu_free(calls.list.chunks);
    for (int i = 0; i < CALLS; i++) call_close(&calls.gpu[i]), call_close(&calls.host[i]);
    progress_wipe(&s->timer.progress);
    if (good) {
        bench_report_row(&s->timer, &row);
        s->timed++;
        return !s->json || bench_report_json(&s->timer, &row, s->json, reason);
    }
    if (status != FMLA_UNSUPPORTED) return reason_set(reason, "%s", why.text);
    bench_report_skipped(&row, why.text);
    if (!*s->passed_over.text) s->passed_over = why;
    return true;
}

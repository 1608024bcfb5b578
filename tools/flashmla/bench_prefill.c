/* SPDX-License-Identifier: MIT
 *
 * Rows of sparse prefill.
 */
#include "bench_session.h"
#include "gpu_call.h"
#include "gpu_prefill.h"
#include "prefill_batch.h"

#include <stdlib.h>
#include <string.h>

/* ---- Grids ----------------------------------------------------------------------------------- */

enum { MOST = 4, PRODUCTS = 5 };

/* Lists end with 0. page_size 0: keys without pages, of which d_qk may be chosen; bytes have that of their format. */
struct product {
    int64_t s_q, s_kv[MOST], topk[MOST], h_q[MOST], d_qk[MOST], page_size;
    int32_t format;
};

/* peers: the shapes on which the kernels of others were measured, and two more over bytes. */
static const struct grid {
    const char *name;
    struct product products[PRODUCTS];
} grids[] = {
    {"cpu",
     {{64, {16384}, {2048}, {16, 128}, {576, 512}, 0, FMLA_KV_BF16},
      {64, {16384}, {2048}, {16, 128}, {576}, 64, FMLA_KV_FP8_656},
      {64, {16384}, {2048}, {16, 128}, {512}, 64, FMLA_KV_FP8_584}}},
    {"peers",
     {{4096, {8192, 32768, 131072}, {2048}, {128}, {576}, 0, FMLA_KV_BF16},
      {4096, {32768}, {512}, {64}, {512}, 0, FMLA_KV_BF16},
      {4096, {32768}, {1024}, {128}, {512}, 0, FMLA_KV_BF16},
      {4096, {32768}, {2048}, {128}, {576}, 64, FMLA_KV_FP8_656},
      {4096, {32768}, {2048}, {128}, {512}, 64, FMLA_KV_FP8_584}}},
    {"quick",
     {{8, {1024}, {64, 256}, {16}, {576}, 0, FMLA_KV_BF16},
      {8, {1024}, {256}, {16}, {576}, 64, FMLA_KV_FP8_656}}},
};
enum { GRIDS = sizeof grids / sizeof *grids };

static struct option_counts list_of(const int64_t *items, const struct option_counts *chosen)
{
    struct option_counts list = {(int64_t *)items, 0}; /* read only */
    if (chosen->count) return *chosen;
    while (list.count < MOST && items[list.count]) list.count++;
    return list;
}

/* Appends the row; false without memory. */
static bool append(struct bench_row **rows, int64_t *count, const struct prefill_shape *shape)
{
    struct bench_row *grown = realloc(*rows, (size_t)(*count + 1) * sizeof **rows);
    if (!grown) return false;
    *rows = grown;
    struct prefill_shape *prefill = malloc(sizeof *prefill);
    struct batch_shape *batch = calloc(1, sizeof *batch);
    if (!prefill || !batch) {
        free(prefill), free(batch);
        return false;
    }
    *prefill = *shape;
    batch->s_q = shape->s_q, batch->s_k = shape->s_kv, batch->h_q = shape->h_q, batch->h_kv = shape->h_kv;
    batch->d_qk = shape->d_qk, batch->page_size = shape->page_size;
    grown[(*count)++] = (struct bench_row){.shape = batch, .prefill = prefill};
    return true;
}

static bool append_product(struct bench_row **rows, int64_t *count, const struct product *p,
                           const struct bench_axes *chosen, const struct option_counts *topks)
{
    enum { H_Q, S_Q, TOPK, S_KV, D_QK, H_KV, PAGE, LISTS };
    static const struct option_counts none = {NULL, 0};
    const struct option_counts *axis = chosen->axis;
    const int64_t tokens[MOST] = {p->s_q}, pages[MOST] = {p->page_size}, one[MOST] = {1};
    const bool flat = !p->page_size;
    const struct option_counts lists[LISTS] = {[H_Q] = list_of(p->h_q, &axis[AXIS_HEADS]),
                                               [S_Q] = list_of(tokens, &axis[AXIS_QUERY_TOKENS]),
                                               [TOPK] = list_of(p->topk, topks),
                                               [S_KV] = list_of(p->s_kv, &axis[AXIS_SEQ_LEN]),
                                               [D_QK] = list_of(p->d_qk, flat ? &axis[AXIS_D_QK] : &none),
                                               [H_KV] = list_of(one, flat ? &axis[AXIS_KV_HEADS] : &none),
                                               [PAGE] = flat ? (struct option_counts){(int64_t *)pages, 1}
                                                             : list_of(pages, &axis[AXIS_PAGE_SIZE])};
    int64_t all = 1;
    for (int l = 0; l < LISTS; l++)
        if (__builtin_mul_overflow(all, lists[l].count, &all)) return false;
    for (int64_t i = 0; i < all; i++) {
        int64_t rest = i, v[LISTS];
        for (int l = 0; l < LISTS; l++) v[l] = lists[l].items[rest % lists[l].count], rest /= lists[l].count;
        const struct prefill_shape shape = {.s_q = v[S_Q],
                                            .s_kv = v[S_KV],
                                            .topk = v[TOPK],
                                            .h_q = v[H_Q],
                                            .d_qk = v[D_QK],
                                            .h_kv = v[H_KV],
                                            .page_size = v[PAGE],
                                            .format = p->format};
        if (!append(rows, count, &shape)) return false;
    }
    return true;
}

struct bench_row *bench_prefill_grid(const char *name, const struct bench_axes *chosen,
                                     const struct option_counts *topk, int64_t *count)
{
    const struct grid *grid = NULL;
    for (int i = 0; i < GRIDS; i++)
        if (!strcmp(grids[i].name, name)) grid = &grids[i];
    *count = grid ? 0 : -1;
    struct bench_row *rows = NULL;
    for (int i = 0; grid && i < PRODUCTS && grid->products[i].s_q; i++)
        if (!append_product(&rows, count, &grid->products[i], chosen, topk)) {
            bench_free_rows(rows, *count);
            *count = 0;
            return NULL;
        }
    return rows;
}

/* ---- A row ----------------------------------------------------------------------------------- */

static fmla_status call_prefill(const void *args)
{
    return fmla_sparse_prefill(args);
}

static bool on_gpu(struct session *s, const fmla_sparse_prefill_args *args, struct bench_row *row,
                   struct fault *fault)
{
    struct gpu_prefill call = {0};
    struct fault why = {""};
    fmla_status status = FMLA_OK;
    double median;
    bool good = gpu_prefill_open(&call, s->device, args, &status, &why);
    struct bench_timed timed = {.call = call_prefill, .args = &call.args, .stream = call.args.stream};
    if (good) fmla_sparse_prefill_kernel(&call.args, &row->kernel);
    good = good && bench_time_on_gpu(s, &timed, 1, row, &median, &status, &why);
    gpu_prefill_close(&call);
    if (good) return bench_finish_row(s, row, fault);
    if (status == FMLA_UNSUPPORTED) return bench_pass_over(s, row, why.text);
    return fault_set(fault, "%s", why.text);
}

static bool on_cpu(struct session *s, fmla_sparse_prefill_args *args, struct bench_row *row,
                   struct fault *fault)
{
    struct bench_timed timed = {.call = call_prefill, .args = args};
    fmla_status status = fmla_sparse_prefill_kernel(args, &row->kernel);
    if (!status) status = prefill_call_workspace(args);
    if (!status && !args->workspace) return bench_pass_over(s, row, "no memory for its workspace");
    if (!status) status = bench_time_calls(s, &timed, 1, row);
    return status ? bench_library_fault(s, row, status, fault) : bench_finish_row(s, row, fault);
}

bool bench_prefill(struct session *s, struct bench_row *row, struct fault *fault)
{
    if (bench_too_large(s, prefill_batch_bytes(row->prefill)))
        return bench_pass_over(s, row, "too large for this machine's memory");
    struct prefill_batch batch;
    struct fault why = {""};
    bool good;
    if (prefill_batch_make(&batch, row->prefill, &why)) {
        const struct prefill_work work = prefill_work(&batch.args);
        row->flop = work.flop, row->bytes = work.bytes;
        batch.args.kernel = s->options->kernel;
        good = device_is_gpu(s->device) ? on_gpu(s, &batch.args, row, fault)
                                        : on_cpu(s, &batch.args, row, fault);
    } else {
        good = bench_pass_over(s, row, why.text);
    }
    prefill_batch_free(&batch);
    return good;
}

/* SPDX-License-Identifier: MIT
 *
 * Rows of sparse decode.
 */
#include "bench_session.h"
#include "gpu_call.h"
#include "gpu_sparse.h"
#include "sparse_batch.h"

#include <stdlib.h>
#include <string.h>

/* ---- Grids ----------------------------------------------------------------------------------- */

enum { MOST = 8, PRODUCTS = 5 };

/* Lists end with 0. `extra`: a second cache of as many keys. extra_varlen: its lists count from 0 to all of their entries. */
struct product {
    int64_t b[MOST], s_q[MOST], h_q[MOST], s_k, topk[MOST], page_size, extra_topk, extra_page_size;
    bool extra_varlen;
    int32_t format;
};

/* peers: the shapes on which the kernels of others were measured. */
static const struct grid {
    const char *name;
    struct product products[PRODUCTS];
} grids[] = {
    {"cpu",
     {{.b = {1, 8},
       .s_q = {1},
       .h_q = {16, 128},
       .s_k = 16384,
       .topk = {2048},
       .page_size = 64,
       .format = FMLA_KV_BF16},
      {.b = {1, 8},
       .s_q = {1},
       .h_q = {16, 128},
       .s_k = 16384,
       .topk = {2048},
       .page_size = 64,
       .format = FMLA_KV_FP8_656},
      {.b = {1, 8},
       .s_q = {1},
       .h_q = {16, 128},
       .s_k = 16384,
       .topk = {128},
       .page_size = 256,
       .extra_topk = 1024,
       .extra_page_size = 64,
       .format = FMLA_KV_FP8_584}}},
    {"peers",
     {{.b = {1, 2, 16, 64, 128},
       .s_q = {1, 2},
       .h_q = {64, 128},
       .s_k = 32768,
       .topk = {2048},
       .page_size = 64,
       .format = FMLA_KV_FP8_656},
      {.b = {2, 64, 128},
       .s_q = {2},
       .h_q = {64},
       .s_k = 16384,
       .topk = {128},
       .page_size = 256,
       .extra_topk = 512,
       .extra_page_size = 64,
       .format = FMLA_KV_FP8_584},
      {.b = {2, 64, 128},
       .s_q = {2},
       .h_q = {128},
       .s_k = 16384,
       .topk = {128},
       .page_size = 256,
       .extra_topk = 1024,
       .extra_page_size = 64,
       .format = FMLA_KV_FP8_584},
      {.b = {2, 64, 128},
       .s_q = {2},
       .h_q = {128},
       .s_k = 16384,
       .topk = {128},
       .page_size = 256,
       .extra_topk = 1024,
       .extra_page_size = 2,
       .extra_varlen = true,
       .format = FMLA_KV_FP8_584},
      {.b = {148},
       .s_q = {2},
       .h_q = {128},
       .s_k = 32768,
       .topk = {16384},
       .page_size = 64,
       .format = FMLA_KV_FP8_656}}},
    {"quick",
     {{.b = {1},
       .s_q = {1},
       .h_q = {16},
       .s_k = 1024,
       .topk = {64, 256},
       .page_size = 64,
       .format = FMLA_KV_FP8_656}}},
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
static bool append(struct bench_row **rows, int64_t *count, const struct sparse_shape *shape)
{
    struct bench_row *grown = realloc(*rows, (size_t)(*count + 1) * sizeof **rows);
    if (!grown) return false;
    *rows = grown;
    struct sparse_shape *sparse = malloc(sizeof *sparse);
    struct batch_shape *batch = calloc(1, sizeof *batch);
    if (!sparse || !batch) {
        free(sparse), free(batch);
        return false;
    }
    *sparse = *shape;
    batch->b = shape->b, batch->s_q = shape->s_q, batch->h_q = shape->h_q, batch->h_kv = 1,
    batch->d_qk = shape->d_qk;
    batch->s_k = shape->cache[0].s_k, batch->page_size = shape->cache[0].page_size;
    grown[(*count)++] = (struct bench_row){.shape = batch, .sparse = sparse};
    return true;
}

static bool append_product(struct bench_row **rows, int64_t *count, const struct product *p,
                           const struct bench_axes *chosen, const struct option_counts *topks)
{
    const struct option_counts *axis = chosen->axis;
    const struct option_counts b = list_of(p->b, &axis[AXIS_BATCH]), h_q = list_of(p->h_q, &axis[AXIS_HEADS]);
    const struct option_counts s_q = list_of(p->s_q, &axis[AXIS_QUERY_TOKENS]),
                               topk = list_of(p->topk, topks);
    const int64_t keys[MOST] = {p->s_k}, pages[MOST] = {p->page_size};
    const struct option_counts s_k = list_of(keys, &axis[AXIS_SEQ_LEN]),
                               page = list_of(pages, &axis[AXIS_PAGE_SIZE]);
    const int64_t all = b.count * h_q.count * s_q.count * topk.count * s_k.count * page.count;
    for (int64_t i = 0; i < all; i++) {
        int64_t rest = i;
        struct sparse_shape shape = {.format = p->format, .d_qk = p->format == FMLA_KV_FP8_584 ? 512 : 576};
        shape.b = b.items[rest % b.count], rest /= b.count;
        shape.h_q = h_q.items[rest % h_q.count], rest /= h_q.count;
        shape.s_q = s_q.items[rest % s_q.count], rest /= s_q.count;
        shape.cache[0].topk = topk.items[rest % topk.count], rest /= topk.count;
        shape.cache[0].s_k = s_k.items[rest % s_k.count], rest /= s_k.count;
        shape.cache[0].page_size = page.items[rest % page.count];
        if (p->extra_topk)
            shape.cache[1] =
                (struct sparse_cache_shape){shape.cache[0].s_k, p->extra_topk, p->extra_page_size},
            shape.extra_varlen = p->extra_varlen;
        if (!append(rows, count, &shape)) return false;
    }
    return true;
}

struct bench_row *bench_sparse_grid(const char *name, const struct bench_axes *chosen,
                                    const struct option_counts *topk, int64_t *count)
{
    const struct grid *grid = NULL;
    for (int i = 0; i < GRIDS; i++)
        if (!strcmp(grids[i].name, name)) grid = &grids[i];
    *count = grid ? 0 : -1;
    struct bench_row *rows = NULL;
    for (int i = 0; grid && i < PRODUCTS && grid->products[i].b[0]; i++)
        if (!append_product(&rows, count, &grid->products[i], chosen, topk)) {
            bench_free_rows(rows, *count);
            *count = 0;
            return NULL;
        }
    return rows;
}

void bench_free_rows(struct bench_row *rows, int64_t count)
{
    for (int64_t i = 0; rows && i < count; i++)
        free((void *)rows[i].shape), free((void *)rows[i].sparse), free((void *)rows[i].prefill);
    free(rows);
}

/* ---- A row ----------------------------------------------------------------------------------- */

static fmla_status call_sparse(const void *args)
{
    return fmla_sparse_decode(args);
}

static fmla_status call_plan(const void *call)
{
    return gpu_sparse_plan(call);
}

static bool on_gpu(struct session *s, const fmla_sparse_decode_args *args, struct bench_row *row,
                   struct fault *fault)
{
    struct gpu_sparse call = {0};
    struct fault why = {""};
    fmla_status status = FMLA_OK;
    double median;
    bool good =
        gpu_sparse_open(&call, s->device, args, &status, &why) && gpu_sparse_plan_open(&call, &status, &why);
    struct bench_timed plan = {.call = call_plan, .args = &call, .stream = call.args.stream},
                       timed = {.call = call_sparse, .args = &call.args, .stream = call.args.stream};
    if (good) fmla_sparse_decode_kernel(&call.args, &row->kernel);
    good = good && bench_time_on_gpu(s, &plan, 1, row, &row->plan, &status, &why) &&
           bench_time_on_gpu(s, &timed, 1, row, &median, &status, &why);
    gpu_sparse_close(&call);
    if (good) return bench_finish_row(s, row, fault);
    if (status == FMLA_UNSUPPORTED) return bench_pass_over(s, row, why.text);
    return fault_set(fault, "%s", why.text);
}

bool bench_sparse(struct session *s, struct bench_row *row, struct fault *fault)
{
    if (bench_too_large(s, sparse_batch_bytes(row->sparse)))
        return bench_pass_over(s, row, "too large for this machine's memory");
    struct sparse_batch batch;
    struct fault why = {""};
    bool good;
    if (sparse_batch_make(&batch, row->sparse, &why)) {
        const struct sparse_work work = sparse_work(&batch.args);
        fmla_sparse_decode_args *args = &batch.args;
        struct bench_timed timed = {.call = call_sparse, .args = args};
        row->flop = work.flop, row->bytes = work.bytes;
        args->kernel = s->options->kernel;
        if (device_is_gpu(s->device)) {
            good = on_gpu(s, args, row, fault);
            sparse_batch_free(&batch);
            return good;
        }
        fmla_status status = fmla_sparse_decode_kernel(args, &row->kernel);
        if (!status) status = sparse_call_workspace(args);
        if (!status && !args->workspace)
            good = bench_pass_over(s, row, "no memory for its workspace");
        else if (status || (status = bench_time_calls(s, &timed, 1, row)))
            good = bench_library_fault(s, row, status, fault);
        else
            good = bench_finish_row(s, row, fault);
    } else {
        good = bench_pass_over(s, row, why.text);
    }
    sparse_batch_free(&batch);
    return good;
}

/* SPDX-License-Identifier: MIT
 *
 * Attention on the CPU: the driver, which divides a call into work items and places their results. The
 * microkernels do the arithmetic.
 *
 * Work is cut twice. The rows of a request are cut into row tiles: by set, then into tile_rows rows. The keys
 * are split, by the split plan or into even splits, of equal length but for the last:
 *
 *   batch-invariant   splits of INVARIANT_SPLIT_KEYS keys
 *   sparse prefill    the whole list, since rows are enough as a rule; shorter splits where the row tiles are
 *                     too few to keep all threads busy
 *   MHA               all keys; splits of at least 4096 where the request itself has few row tiles
 *                     (mha.c), so that its bits do not depend on its batch
 *
 * A work item is a partition of the plan (or one even split of one request) for one row tile. A split that is
 * a whole request is written straight to `out`. Any other split writes a part to the workspace: its fp32 rows,
 * their largest scores and their lse relative to these. A second pass joins the parts of a request in split
 * order. In MHA, where there are enough row tiles for all threads, a work item takes all splits of its tile, one
 * after the other, and joins them as the second pass would.
 *
 * With FP8 products, a pass before all others stores, for every query, the bf16 values of its FP8 codes. The
 * scale of an FP8_576 cache multiplies scores and results, so the microkernels convert its codes exactly.
 *
 * Workspace:  plan, if made inside the call | out of the parts | lse of the parts | largest scores of the
 *             parts | MHA: spans of requests, the first part row of each | quantised queries | one scratch per
 *             worker: the rows of a tile, in MHA those of a split too, then the scratch of the microkernel
 */
#include "attention.h"

#include "cost.h"
#include "result.h"

#include <string.h>

/* Keys of a split in batch-invariant mode: short enough that one long request keeps several threads busy,
 * long enough that the partial results (h_q · d_v fp32 per split) stay small beside the keys read. */
enum { INVARIANT_SPLIT_KEYS = 2048 };

/* ---- The work of a call, and its workspace -------------------------------------------------- */

enum { TILES_A_WORKER = 4 }; /* the fewest that leave workers idle for only a short time */

/* Returns the rows of a tile. The plan and invariant splits use PLAN_ROW_TILE. Otherwise a tile is as large
 * as the kernel takes, so that keys are gathered, converted and interleaved once for all its rows; in MHA,
 * which has many tiles per head, it is as large as leaves work for all workers. */
static int32_t tile_rows_of(const struct attention_problem *p, const struct cpu_attention *attention,
                            int64_t sets, int64_t set_rows, int32_t workers)
{
    if (p->splitting == SPLIT_BY_PLAN || p->splitting == SPLIT_BATCH_INVARIANT || !set_rows)
        return PLAN_ROW_TILE;
    int32_t most = attention->most_rows;
    if (p->splitting == SPLIT_BY_LENGTHS) {
        most = attention->most_rows_of_heads;
        for (; most > PLAN_ROW_TILE; most /= 2) {
            const int64_t tiles = (set_rows + most - 1) / most;
            if ((double)p->b * (double)sets * (double)tiles >= TILES_A_WORKER * (double)workers) break;
        }
    }
    return set_rows > most - PLAN_ROW_TILE
               ? most
               : (int32_t)(set_rows + PLAN_ROW_TILE - 1) / PLAN_ROW_TILE * PLAN_ROW_TILE;
}

/* With at least this many rows in a set, the next keys of a list arrive in time if their prefetches are
 * spread over the values of a block. */
enum { SPREADING_ROWS = 32 };

static struct cpu_call call_of(const struct attention_problem *p, const struct cpu_attention *attention,
                               int32_t workers)
{
    const bool listed = p->keys[0].kind == KEYS_LISTED;
    const int64_t tokens = listed ? 1 : p->s_q, set_rows = tokens * (p->h_q / p->h_kv);
    const int64_t sets = (listed ? p->s_q : 1) * p->h_kv;
    return (struct cpu_call){
        .problem = p,
        .layouts = {kv_layout_of(p->keys[0].format, (int32_t)p->d_qk),
                    kv_layout_of(p->keys[1].format, (int32_t)p->d_qk)},
        .next_keys = listed ? cpu_listed_keys : cpu_paged_keys,
        .tokens_of_set = tokens,
        .sets = sets,
        .set_rows = set_rows,
        .tile_rows = tile_rows_of(p, attention, sets, set_rows, workers),
        .value_bytes = p->keys[0].values_apart ? (int32_t)(p->d_v * (int64_t)sizeof(uint16_t)) : 0,
        .keys_at_once = listed && p->splitting != SPLIT_EVENLY &&
                        (set_rows < SPREADING_ROWS || p->keys[1].kind != KEYS_NONE),
    };
}

/* The parts of a prefill hold fewer than 14 row tiles per worker, for any number of tokens. */
int64_t cpu_even_splits(int64_t tiles, int64_t workers, int64_t most)
{
    int64_t best = 1, best_tiles = 0, best_rounds = 1;
    if (!tiles || tiles / workers >= 7) return 1;
    for (int64_t splits = 1; splits <= most; splits++) {
        const int64_t items = tiles * splits, rounds = (items + workers - 1) / workers;
        if (items * best_rounds > best_tiles * rounds)
            best = splits, best_tiles = items, best_rounds = rounds;
        if (8 * items >= 7 * rounds * workers) break;
    }
    return best;
}

/* Returns the keys of a split; 0 where requests are split by the plan, or each by its own lengths. */
static int64_t split_keys_of(const struct attention_problem *p, const struct work *w)
{
    if (p->splitting == SPLIT_BATCH_INVARIANT) return INVARIANT_SPLIT_KEYS;
    if (p->splitting == SPLIT_BY_PLAN || p->splitting == SPLIT_BY_LENGTHS) return 0;
    const int64_t blocks = (p->capacity + PLAN_BLOCK - 1) / PLAN_BLOCK;
    const int64_t splits = cpu_even_splits(p->b * w->row_tiles, w->pool.workers, blocks);
    const int64_t blocks_of_split = (blocks + splits - 1) / splits;
    return (blocks_of_split ? blocks_of_split : 1) * PLAN_BLOCK;
}

static int64_t even_splits_of(const struct work *w, int64_t length)
{
    return length > w->split_keys ? (length + w->split_keys - 1) / w->split_keys : 1;
}

/* Returns the floats of a tile's rows: out, lse and the largest score. */
static size_t tile_floats(const struct cpu_call *call)
{
    return (size_t)call->tile_rows * ((size_t)call->problem->d_v + 2);
}

/* Returns whether the workspace must suffice for any call up to these sizes, with the default number of
 * partitions. */
static bool is_bound(const struct attention_problem *p)
{
    return p->bound && p->splitting != SPLIT_BATCH_INVARIANT && p->splitting != SPLIT_BY_LENGTHS &&
           !p->num_partitions;
}

/* Lays out the workspace; FMLA_UNSUPPORTED where its size does not fit into memory. */
fmla_status cpu_attention_prepare(const struct kernel_driver *driver, union problem problem,
                                  struct prepared *prepared)
{
    const struct attention_problem *p = problem.attention;
    struct work *w = DECISION(struct work, prepared);
    memset(w, 0, sizeof *w);
    w->attention = (const struct cpu_attention *)driver;
    w->pool = threads_now();
    w->call = call_of(p, w->attention, w->pool.workers);
    w->row_tiles = w->call.sets * tiles_of(w, w->call.set_rows);
    w->split_keys = split_keys_of(p, w);
    size_t at = 0;
    if (is_bound(p)) {
        if (p->splitting == SPLIT_BY_PLAN) at += cpu_line_up(plan_bytes(p->b, w->pool.workers));
    } else if (w->split_keys) {
        w->even_splits = even_splits_of(w, p->capacity);
        if (w->even_splits > 1 && __builtin_mul_overflow(p->b, w->even_splits, &w->parts)) goto too_large;
    } else if (p->splitting != SPLIT_BY_LENGTHS) {
        const struct plan_header *given = p->plan;
        w->num_partitions = given ? given->num_partitions
                            : p->num_partitions
                                ? p->num_partitions
                                : plan_even_partitions(w->pool.workers, 1, p->s_q * p->h_q, w->call.sets);
        if (!given && !p->plan_in_tables) at += cpu_line_up(plan_bytes(p->b, w->num_partitions));
        if (w->num_partitions > 1) w->parts = 2 * (int64_t)w->num_partitions;
    }
    w->part_out_offset = at;
    int64_t rows = 0, floats, bytes;
    const bool bound = is_bound(p), mha = p->splitting == SPLIT_BY_LENGTHS;
    if (bound) rows = cpu_most_slot_rows(&w->call, w->attention->most_rows, w->pool.workers);
    if (mha) rows = w->part_rows = cpu_mha_part_rows(p, w->pool.workers);
    if ((!bound && !mha && __builtin_mul_overflow(w->parts, p->h_q * p->s_q, &rows)) ||
        __builtin_mul_overflow(rows, p->d_v + 2, &floats) ||
        __builtin_mul_overflow(floats, (int64_t)sizeof(float), &bytes) || bytes > INT64_MAX / 4)
        goto too_large;
    at += cpu_line_up((size_t)rows * (size_t)p->d_v * sizeof(float));
    w->part_lse_offset = at;
    at += cpu_line_up((size_t)rows * sizeof(float));
    w->part_max_offset = at;
    at += cpu_line_up((size_t)rows * sizeof(float));
    w->spans_offset = at;
    if (mha) at += cpu_line_up((size_t)(p->b + 1) * sizeof(struct cpu_span));
    w->first_rows_offset = at;
    if (rows && mha) at += cpu_line_up((size_t)p->b * sizeof *w->first_rows);
    w->queries_offset = at;
    if (p->products == FMLA_PRODUCTS_FP8) {
        if (__builtin_mul_overflow(p->b * p->s_q, p->h_q * p->d_qk * (int64_t)sizeof(uint16_t), &bytes) ||
            bytes > INT64_MAX / 4)
            goto too_large;
        at += cpu_line_up((size_t)bytes);
    }
    w->scratch_offset = at;
    w->attend_offset =
        cpu_line_up(tile_floats(&w->call) * sizeof(float)) * (mha && cpu_mha_most_splits(p) > 1 ? 2 : 1);
    w->scratch_bytes = w->attend_offset + w->attention->scratch_bytes(&w->call);
    prepared->bytes = at + w->scratch_bytes * (size_t)w->pool.workers, prepared->alignment = CACHE_LINE;
    return FMLA_OK;
too_large:
    return fail(FMLA_UNSUPPORTED,
                "%s: q: the partial results of %lld requests of up to %lld keys exceed the address space",
                operation_name(p->operation), (long long)p->b, (long long)p->capacity);
}

/* ---- One split: a range of keys of a request, for one row tile ------------------------------ */

enum { DIRECT = -1 }; /* in place of a part: the split is the whole request */

/* Returns the index, among the rows of all parts, of row `row` of a request in part `part`. The rows of a
 * request are ordered by set. */
static int64_t part_row(const struct work *w, int64_t part, int64_t row)
{
    return part * w->call.problem->h_q * w->call.problem->s_q + row;
}

/* Writes a finished row to the caller's tensors. lse is relative to max. */
static void write_row(const struct work *w, int64_t request, struct cpu_row to, const float *values,
                      float relative_lse, float max)
{
    const struct attention_problem *p = w->call.problem;
    const struct result_rules *rules = &p->rules;
    const float lse = base_of(max) + relative_lse;
    const int64_t at = request * p->out_stride[0] + to.token * p->out_stride[1] + to.head * p->out_stride[2];
    w->attention->round((uint16_t *)p->out + at, values,
                        w->value_scale * result_sink_factor(rules, to.head, lse), p->d_v, p->element);
    if (p->lse)
        p->lse[request * p->lse_stride[0] + to.head * p->lse_stride[1] + to.token] = result_lse(rules, lse);
    if (p->max_logits)
        p->max_logits[request * p->max_stride[0] + to.head * p->max_stride[1] + to.token] =
            max * rules->lse_factor;
}

void cpu_write_rows(const struct work *w, const struct cpu_tile *tile, const float *values,
                    const float *relative_lse, const float *max)
{
    const struct attention_problem *p = w->call.problem;
    const int64_t group = p->h_q / p->h_kv;
    struct cpu_row to = cpu_row_of(&w->call, tile->set, tile->first_row);
    const int64_t end_head = to.head - tile->first_row % group + group;
    to.token += tile->first_token;
    for (int32_t i = 0; i < tile->rows; i++) {
        write_row(w, tile->request, to, values + i * p->d_v, relative_lse[i], max[i]);
        if (++to.head == end_head) to.head -= group, to.token++;
    }
}

static void run_split(const struct work *w, int64_t request, int64_t row_tile, int64_t begin, int64_t end,
                      int64_t part, int32_t worker)
{
    const struct attention_problem *p = w->call.problem;
    const struct span span = {.tokens = p->s_q, .keys = attention_length(p, request)};
    struct cpu_tile tile = tile_of(w, request, &span, w->call.set_rows, row_tile);
    tile.begin_key = begin, tile.end_key = end;
    char *scratch = scratch_of(w, worker);
    if (part == DIRECT)
        place_in(&tile, (float *)(void *)scratch);
    else
        place_in_parts(w, &tile, part_row(w, part, tile.set * w->call.set_rows + tile.first_row));
    w->attention->attend(&tile, scratch + w->attend_offset);
    if (part == DIRECT) cpu_write_rows(w, &tile, tile.out, tile.lse, tile.max);
}

/* Joins `count` parts of a request, first, second, second + step, …, for one row tile. Weights are computed
 * from the maxima and the relative lse: an absolute lse of 2^24 or more cannot represent how many keys have
 * the largest score. */
static void join_slots(const struct work *w, int64_t request, int64_t row_tile, int64_t count, int64_t first,
                       int64_t second, int64_t step, int32_t worker)
{
    const struct attention_problem *p = w->call.problem;
    const struct tile_rows t = tile_rows(w, w->call.set_rows, row_tile);
    float *sum = (float *)(void *)scratch_of(w, worker);
    for (int64_t i = t.first_row; i < t.first_row + t.rows; i++) {
        const int64_t row = t.set * w->call.set_rows + i;
        float max = -INFINITY, total = 0.0f;
        for (int64_t s = 0; s < count; s++)
            max = fmaxf(max, w->part_max[part_row(w, s ? second + (s - 1) * step : first, row)]);
        memset(sum, 0, (size_t)p->d_v * sizeof(float));
        for (int64_t s = 0; s < count; s++) {
            const int64_t at = part_row(w, s ? second + (s - 1) * step : first, row);
            if (isinf(w->part_lse[at])) continue;
            const float weight = expf(base_of(w->part_max[at]) - base_of(max) + w->part_lse[at]);
            const float *part = w->part_out + at * p->d_v;
            for (int64_t d = 0; d < p->d_v; d++) sum[d] += weight * part[d];
            total += weight;
        }
        if (total != 0.0f)
            for (int64_t d = 0; d < p->d_v; d++) sum[d] /= total;
        write_row(w, request, cpu_row_of(&w->call, t.set, i), sum, logf(total), max);
    }
}

/* ---- By the plan ---------------------------------------------------------------------------- */

/* The plan gives only the boundaries between splits. The end of a request is read from the current lengths,
 * so a plan for other lengths still covers every key once. Request numbers and blocks are clamped, so a
 * damaged plan cannot cause accesses out of bounds. Partition p uses part 2p for its first request, and part
 * 2p + 1 for its last if that is another. */

/* Returns whether the last request of partition p continues in the next one. */
static bool goes_on(const struct work *w, int64_t p)
{
    if (p + 1 >= w->num_partitions) return false;
    const struct plan_partition *row = &w->partitions[p], *next = &w->partitions[p + 1];
    return next->begin_request == row->end_request && next->begin_split > 0 &&
           row->end_request >= row->begin_request;
}

static void run_partition(void *data, int64_t index, int32_t worker)
{
    const struct work *w = data;
    const struct attention_problem *p = w->call.problem;
    const int64_t partition = index / w->row_tiles, row_tile = index % w->row_tiles;
    const struct plan_partition *row = &w->partitions[partition];
    const bool cut = goes_on(w, partition);
    const int64_t first = cpu_clamp(row->begin_request, 0, p->b);
    const int64_t last = cpu_clamp(row->end_request, -1, p->b - 1);
    for (int64_t r = first; r <= last; r++) {
        const int64_t length = attention_length(p, r);
        /* Decided by the previous partition, so that exactly the parts that the second pass joins are
         * written. */
        const bool continued = r == row->begin_request && partition > 0 && goes_on(w, partition - 1);
        const bool to_be_continued = r == row->end_request && cut;
        const int64_t begin = continued ? cpu_clamp((int64_t)row->begin_block * PLAN_BLOCK, 0, length) : 0;
        const int64_t end =
            to_be_continued ? cpu_clamp((int64_t)row->end_block * PLAN_BLOCK, begin, length) : length;
        const int64_t part = !continued && !to_be_continued ? DIRECT : 2 * partition + (r == first ? 0 : 1);
        run_split(w, r, row_tile, begin, end, part, worker);
    }
}

/* Joins the splits of the request whose first split is in this partition, if there is one. */
static void join_partition(void *data, int64_t index, int32_t worker)
{
    const struct work *w = data;
    const int64_t partition = index / w->row_tiles, row_tile = index % w->row_tiles;
    const struct plan_partition *row = &w->partitions[partition];
    const int64_t request = row->end_request;
    const bool begins_here = request > row->begin_request || !partition || !goes_on(w, partition - 1);
    if (!begins_here || !goes_on(w, partition) || request < 0 || request >= w->call.problem->b) return;
    int64_t end = partition + 1; /* the partition of the last split */
    while (w->partitions[end].end_request == request && goes_on(w, end)) end++;
    const int64_t first =
        2 * partition + (request == cpu_clamp(row->begin_request, 0, w->call.problem->b) ? 0 : 1);
    join_slots(w, request, row_tile, end - partition + 1, first, 2 * (partition + 1), 2, worker);
}

/* ---- Even splits --------------------------------------------------------------------------- */

static void run_even_split(void *data, int64_t index, int32_t worker)
{
    const struct work *w = data;
    const int64_t row_tile = index % w->row_tiles;
    const int64_t split = index / w->row_tiles % w->even_splits,
                  request = index / w->row_tiles / w->even_splits;
    const int64_t length = attention_length(w->call.problem, request), splits = even_splits_of(w, length);
    if (split >= splits) return;
    const int64_t begin = split * w->split_keys;
    const int64_t end = split + 1 < splits ? begin + w->split_keys : length;
    run_split(w, request, row_tile, begin, end, splits == 1 ? DIRECT : request * w->even_splits + split,
              worker);
}

static void join_even_splits(void *data, int64_t index, int32_t worker)
{
    const struct work *w = data;
    const int64_t row_tile = index % w->row_tiles, request = index / w->row_tiles;
    const int64_t splits = even_splits_of(w, attention_length(w->call.problem, request)),
                  first = request * w->even_splits;
    if (splits > 1) join_slots(w, request, row_tile, splits, first, first + 1, 1, worker);
}

/* ---- Queries of FP8 products ---------------------------------------------------------------- */

struct quantised {
    const struct attention_problem *problem;
    uint16_t *to; /* [b][s_q][h_q][d_qk] */
};

/* Quantises the heads of a token. */
static void quantise_token(void *data, int64_t index, int32_t worker)
{
    const struct quantised *q = data;
    const struct attention_problem *p = q->problem;
    (void)worker;
    for (int64_t head = 0; head < p->h_q; head++)
        attention_quantise(p, index / p->s_q, index % p->s_q, head,
                           q->to + (index * p->h_q + head) * p->d_qk);
}

/* Writes the quantised queries to the workspace as bf16; returns the problem with these as its queries. */
static struct attention_problem quantise(const struct work *w, const struct attention_problem *p)
{
    struct quantised q = {p, (uint16_t *)(void *)((char *)p->workspace + w->queries_offset)};
    struct attention_problem made = *p;
    const int64_t tokens = p->b * p->s_q;
    threads_run(&w->pool, tokens,
                cost_of_moving(2.0 * sizeof(uint16_t) * (double)(tokens * p->h_q) * (double)p->d_qk),
                quantise_token, &q);
    made.q = q.to, made.q_codes = NULL;
    made.q_stride[2] = p->d_qk, made.q_stride[1] = p->h_q * p->d_qk;
    made.q_stride[0] = p->s_q * made.q_stride[1];
    return made;
}

/* ---- The call ------------------------------------------------------------------------------- */

/* Returns the cost of all requests. */
static double cost_of_splits(const struct work *w)
{
    const struct attention_problem *p = w->call.problem;
    double cost = 0;
    for (int64_t r = 0; r < p->b; r++)
        cost += cost_of_attention((double)p->s_q * (double)p->h_q, (double)attention_length(p, r), p->d_qk,
                                  p->d_v);
    return cost;
}

fmla_status cpu_attention_run(const struct kernel_driver *driver, union problem problem,
                              const struct prepared *prepared)
{
    const struct attention_problem *p = problem.attention;
    struct attention_problem quantised, scaled;
    struct work w = *DECIDED(struct work, prepared);
    (void)driver;
    const fmla_status status = cpu_check_pages(p);
    if (status || !p->b) return status;
    if (p->products == FMLA_PRODUCTS_FP8) quantised = quantise(&w, p), w.call.problem = p = &quantised;
    w.value_scale = 1.0f;
    if (p->kv_scale) {
        scaled = *p, w.value_scale = *p->kv_scale, scaled.scale *= w.value_scale;
        w.call.problem = p = &scaled;
    }
    w.workspace = p->workspace;
    w.part_out = (float *)(void *)(w.workspace + w.part_out_offset);
    w.part_lse = (float *)(void *)(w.workspace + w.part_lse_offset);
    w.part_max = (float *)(void *)(w.workspace + w.part_max_offset);
    if (p->splitting == SPLIT_BY_LENGTHS) {
        cpu_mha_run(&w);
        return FMLA_OK;
    }
    const int64_t rows_of_parts = w.parts * p->h_q * p->s_q; /* used or not */
    const double cost = cost_of_splits(&w),
                 cost_of_joins = cost_of_moving((double)rows_of_parts * (double)p->d_v * sizeof(float));

    if (w.split_keys) {
        threads_run(&w.pool, p->b * w.even_splits * w.row_tiles, cost, run_even_split, &w);
        if (w.parts) threads_run(&w.pool, p->b * w.row_tiles, cost_of_joins, join_even_splits, &w);
        return FMLA_OK;
    }
    if (p->plan_in_tables) {
        w.partitions = p->partitions;
    } else if (p->plan) {
        w.partitions = plan_partitions(p->plan);
    } else {
        const struct plan_tables plan = plan_tables_of(w.workspace, w.num_partitions);
        plan_build(plan, p->b, attention_lists(p), (struct plan_costs){0, 0});
        w.partitions = plan.partitions;
    }
    threads_run(&w.pool, w.num_partitions * w.row_tiles, cost, run_partition, &w);
    if (w.parts) threads_run(&w.pool, w.num_partitions * w.row_tiles, cost_of_joins, join_partition, &w);
    return FMLA_OK;
}

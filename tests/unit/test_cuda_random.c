/* SPDX-License-Identifier: MIT
 *
 * Random shapes of every operation on fake GPUs of many sizes, with every kernel that can be forced: the
 * workspace query matches the launch, no kernel takes more, all addresses that kernels may write are inside
 * the workspace, and grids are in range. A case that ends in a signal prints its shape first.
 *
 * test_cuda_random [SHAPES [SEED [FIRST]]]    of each operation and GPU; FIRST draws a case again that a
 * failure names
 */
#include "fake_cuda/passed.h"

#include "cuda/mha_splits.h"
#include "cuda/sm80/mha_forward/shape.h"
#include "cuda/sm90/sparse_decode/choice.h"

#include <signal.h>

static struct machine {
    int sms, capability, shared_bytes;
} machine;
static uint64_t seed = 1, number;
static int64_t refused_calls, calls;

/* The current random case; one operation at a time. */
static enum operation operation;
static union {
#define OPERATION(op, OP) struct op##_call op;
#include "operations.def"
} call;
static struct held *const held = call.merge.held; /* the same for every operation */
static void *const args = &call.merge.args;

static char shape_words[512]; /* for the signal handler */
static int shape_length;
static const char *forced; /* NULL: dispatch chooses */

#define HOLDS(condition)                                                                                     \
    CHECK(condition, "%s, %s: %s", shape_words, forced ? forced : "as chosen", fmla_last_error())

static struct passed passed; /* the call, as its kernels are passed of it */

static void make(const struct shape *s)
{
    shape_length = snprintf(shape_words, sizeof shape_words,
                            "\ncase %" PRIu64 " of seed %" PRIu64 ", %d SMs of %d.%d: ", number, seed,
                            machine.sms, machine.capability / 10, machine.capability % 10);
    shape_length +=
        shape_in_words(operation, s, shape_words + shape_length, sizeof shape_words - (size_t)shape_length);
    make_call(operation, args, held, s, gpu_number(0));
    passed = (struct passed){operation, args, held, shape_words};
    put_number(operation, args, "log_base", number & 1 ? FMLA_LOG_BASE_2 : FMLA_LOG_NATURAL);
    put_number(operation, args, "lse_empty", number >> 1 & 1);
    float *const scale = option_at(operation, args, "softmax_scale");
    if (scale) *scale = number >> 2 & 1 ? 0.25f : 0.0f;
}

static void *option(const char *name)
{
    return option_at(operation, args, name);
}

static void died(int signal_number)
{
    (void)signal_number;
    const size_t most = sizeof shape_words - 1, length = shape_length > 0 ? (size_t)shape_length : 0;
    const ssize_t written = write(STDERR_FILENO, shape_words, length < most ? length : most);
    _exit(written > 0 ? 98 : 97);
}

/* ---- What kernels are passed --------------------------------------------------------------------- */

static char *const workspace = (char *)(UINT64_C(1) << 60);

static bool inside(const void *begin, int64_t size, int64_t needed, const void *end)
{
    int64_t bytes;
    return (const char *)begin >= workspace && !__builtin_mul_overflow(size, needed, &bytes) &&
           bytes <= (const char *)end - (const char *)begin;
}

static int64_t ceil_div(int64_t a, int64_t b)
{
    return a / b + (a % b != 0);
}

static const struct fake_launch *launch_named(const char *begins)
{
    for (int i = 0; i < fake->launches; i++)
        if (!strncmp(fake->launch[i].kernel, begins, strlen(begins))) return &fake->launch[i];
    return NULL;
}

/* Checks a call that may be split: plan, parts and join; the decode launch has one CTA per worker and
 * tile. `end`: end of their part of the workspace. */
static void judge_split(const struct split_params *split, int64_t b, int64_t rows, int64_t capacity,
                        int64_t tiles, const struct fake_launch *decode, bool in_turns, const void *whole,
                        bool in_tables, const char *end)
{
    const bool planned = split->partitions != NULL;
    const int64_t workers = planned ? split->num_partitions : b * split->split_lanes;
    const int64_t blocks = workers * tiles;
    HOLDS(tiles >= 1 && tiles <= INT32_MAX && workers >= 1);
    HOLDS(decode->config.grid_x == (in_turns && blocks > INT32_MAX ? INT32_MAX : blocks));
    int64_t parts = planned && split->num_partitions > 1 ? 2 * (int64_t)split->num_partitions : 0;
    if (!planned) {
        const int64_t splits = capacity > split->split_keys ? ceil_div(capacity, split->split_keys) : 1;
        HOLDS(split->split_keys > 0 && split->split_keys % PLAN_BLOCK == 0 && split->even_splits == splits);
        HOLDS(split->split_lanes >= 1 && split->split_lanes <= split->even_splits);
        if (splits > 1) parts = b * splits;
    }
    const struct fake_launch *const join = launch_named("join"), *const planner = launch_named("decode_plan");
    HOLDS(!join == (!parts || joins_in_kernel(decode)) && !split->part_out == !parts &&
          !split->part_ends == !parts);
    if (parts) {
        HOLDS(inside(split->part_out, parts * rows, 512 * (int64_t)sizeof(float), split->part_ends));
        HOLDS(inside(split->part_ends, parts * rows, sizeof(struct part_end), end));
    }
    HOLDS(!planner == (!planned || whole || in_tables));
    if (whole) HOLDS(!planned || (const void *)split->header == whole);
    if (planned && !in_tables)
        HOLDS((const void *)split->partitions == (const void *)(split->header + 1) &&
              split->num_splits == (const int32_t *)(split->partitions + split->num_partitions));
    if (planned && in_tables)
        HOLDS(!split->header && (const char *)split->partitions == passed_at(&passed, "partitions", 0) &&
              (const char *)split->num_splits == passed_at(&passed, "num_splits", 0));
    if (!planner) return;
    const struct plan_params plan = PARAMS(plan_params, planner);
    HOLDS(plan.b == b && plan.header == split->header && plan.partitions == split->partitions &&
          plan.num_splits == split->num_splits && plan.num_partitions == split->num_partitions &&
          plan.planned == plan.num_partitions);
    HOLDS(divides(plan.partitions_divisor, split->num_partitions));
    HOLDS((char *)plan.header == workspace &&
          inside(plan.num_splits, b + 1, sizeof(int32_t), parts ? (const char *)split->part_out : end));
}

/* Checks what the join of the parts is passed: dense decode has lengths, sparse decode lists. */
static void judge_join(const struct split_params *split, const struct output_params *output, int64_t b,
                       int64_t s_q, int64_t h_q, int64_t group, const int32_t *seqlens,
                       const struct plan_topk *topk)
{
    const struct fake_launch *const launch = launch_named("join");
    if (!launch) return;
    const struct join_params join = PARAMS(join_params, launch);
    HOLDS(join.b == b && join.s_q == s_q && join.h_q == h_q && join.group == group &&
          join.rows == s_q * group);
    HOLDS(divides(join.group_divisor, group) && !memcmp(&join.split, split, sizeof *split) &&
          !memcmp(&join.output, output, sizeof *output));
    HOLDS(join.seqlens == seqlens && (!topk || !memcmp(&join.topk, topk, sizeof *topk)));
}

/* Returns the tile rows of a portable kernel, whose name ends with its shape. */
static int64_t rows_of_shape(const struct fake_launch *launch)
{
    int64_t rows = 0;
    sscanf(strrchr(launch->kernel, '_'), "_%" SCNd64, &rows);
    return rows ? rows : 1;
}

static void judge_sparse(size_t bytes)
{
    const struct sparse_decode_call *c = &call.sparse_decode;
    const int64_t b = c->q.shape[0], s_q = c->q.shape[1], h_q = c->q.shape[2];
    const fmla_sparse_decode_args *a = &c->args;
    const int64_t topk = c->indices.shape[2], extra = a->extra_indices ? c->extra_indices.shape[2] : 0;
    const struct fake_launch *decode = launch_named("sm90_sparse_decode");
    const bool hopper = decode != NULL;
    const bool few = hopper && strstr(decode->kernel, "small");
    if (!hopper) decode = launch_named("sm80_sparse_decode");
    const bool of_heads = decode != NULL; /* tiles of one token; else of rows of any tokens */
    if (!decode) decode = launch_named("sparse_decode");
    HOLDS(!decode == !b && (decode || (!fake->launches && !fake->tensors)));
    if (!decode) return;
    const struct sparse_decode_params p = PARAMS(sparse_decode_params, decode);
    const int64_t heads = !hopper ? rows_of_shape(decode)
                          : few   ? SM90_SPARSE_DECODE_SMALL_HEADS
                                  : SM90_SPARSE_DECODE_HEADS;
    const int64_t tiles = of_heads ? s_q * ceil_div(h_q, heads) : ceil_div(s_q * h_q, SPARSE_WARPS);
    HOLDS(p.b == b && p.s_q == s_q && p.h_q == h_q && p.tiles == tiles);
    HOLDS(p.tiles_of_token == (of_heads ? tiles / s_q : 0) && divides(p.heads_divisor, h_q));
    HOLDS(divides(p.tiles_divisor, tiles) && (!of_heads || divides(p.token_divisor, tiles / s_q)));
    HOLDS(divides(p.splits_divisor, p.split.even_splits) && p.split.parts_in_halves == hopper &&
          !p.split.ready_flags);
    const enum kv_format format = passed_format(&passed, "kv_format", &c->q);
    check_passed(&passed, "q", p.q, 0, p.q_stride, 3), check_passed_output(&passed, &p.output);
    check_passed_scale(&passed, p.scale, p.scale_log2, p.d_qk);
    check_passed_cache(&passed, &p.cache[0], "kv_cache", "indices", 0, 0, format);
    if (a->extra_kv_cache)
        check_passed_cache(&passed, &p.cache[1], "extra_kv_cache", "extra_indices", 0, 0,
                           a->extra_kv_format ? passed_format(&passed, "extra_kv_format", &c->q) : format);
    check_passed(&passed, "topk_length", p.topk.length, 0, NULL, 0);
    check_passed(&passed, "extra_topk_length", p.topk.extra_length, 0, NULL, 0);
    HOLDS(p.d_qk == c->q.shape[3] && p.topk.topk == topk && p.topk.extra_topk == extra);
    const char *end = workspace + bytes;
    if (joins_in_kernel(decode)) {
        const struct sparse_decode_sm90_params params = PARAMS(sparse_decode_sm90_params, decode);
        HOLDS(inside(params.cta_group_barriers, b * tiles, sizeof(uint64_t), end) && params.ticket);
        HOLDS(p.split.even_splits > 1 && p.split.even_splits <= MOST_PARTS_JOINED_IN_KERNEL &&
              p.split.split_lanes == p.split.even_splits);
        HOLDS(decode->config.grid_x <= (unsigned)((few ? 2 : 1) * machine.sms));
        end = (const char *)params.cta_group_barriers;
    }
    judge_join(&p.split, &p.output, b, s_q, h_q, h_q, NULL, &p.topk);
    judge_split(&p.split, b, s_q * h_q, plan_topk_length(topk, extra, extra), tiles, decode, false,
                a->batch_invariant ? NULL : a->plan, a->partitions && !a->batch_invariant, end);
}

static void judge_dense(size_t bytes)
{
    const struct dense_decode_call *c = &call.dense_decode;
    const int64_t b = c->q.shape[0], s_q = c->q.shape[1], h_q = c->q.shape[2], h_kv = c->kv_cache.shape[2];
    const fmla_dense_decode_args *a = &c->args;
    const int64_t rows = s_q * (h_q / h_kv);
    const struct fake_launch *decode = launch_named("sm90_dense_decode");
    const bool hopper = decode != NULL;
    if (!hopper) decode = launch_named("sm80_dense_decode");
    HOLDS(!decode == !b && (decode || (!fake->launches && !fake->tensors)));
    if (!decode) return;
    const struct dense_decode_sm90_params params =
        PARAMS(dense_decode_sm90_params, decode); /* which begin with the portable kernel's */
    const struct dense_decode_params *const p = &params.call;
    const int64_t rows_of_tile = hopper ? 64 : rows_of_shape(decode);
    const int64_t tiles_of_head = ceil_div(rows, rows_of_tile), tiles = h_kv * tiles_of_head;
    HOLDS(p->b == b && p->s_q == s_q && p->h_q == h_q && p->h_kv == h_kv && p->rows == rows);
    HOLDS(divides(p->group_divisor, h_q / h_kv) && divides(p->page_divisor, c->kv_cache.shape[1]));
    check_passed(&passed, "q", p->q, 0, p->q_stride, 3),
        check_passed(&passed, "kv_cache", p->kv, 0, p->kv_stride, 3);
    check_passed(&passed, "block_table", p->block_table, 0, &p->block_table_stride, 1);
    check_passed(&passed, "seqlens", p->seqlens, 0, NULL, 0), check_passed_output(&passed, &p->output);
    check_passed_scale(&passed, p->scale_log2 / 1.442695041f, p->scale_log2, p->d_qk);
    const int64_t capacity =
        draw_clamp(c->kv_cache.shape[1] * (a->block_table ? c->block_table.shape[1] : 1), 0, INT32_MAX);
    HOLDS(p->capacity == capacity && p->group == h_q / h_kv);
    HOLDS(p->d_qk == c->q.shape[3] && p->page_size == c->kv_cache.shape[1] && p->causal == a->causal);
    HOLDS(p->vectors_aligned ==
          (passed_aligned(&passed, "q", 16) && passed_aligned(&passed, "kv_cache", 16)));
    if (hopper)
        HOLDS(params.tiles_of_head == tiles_of_head && divides(params.tiles_divisor, tiles) &&
              divides(params.tiles_of_head_divisor, tiles_of_head));
    const char *end = workspace + bytes;
    if (joins_in_kernel(decode)) {
        HOLDS(inside(params.cta_group_barriers, b * tiles, sizeof(uint64_t), end) && params.ticket &&
              !p->split.partitions);
        HOLDS(decode->config.grid_x == params.workers * tiles && params.workers * tiles <= machine.sms);
        HOLDS(params.of_request == params.workers / b && params.of_request >= 2);
        HOLDS(inside(p->split.part_out, params.workers * s_q * h_q, 512 * (int64_t)sizeof(float),
                     p->split.part_ends));
        HOLDS(inside(p->split.part_ends, params.workers * s_q * h_q, sizeof(struct part_end),
                     (const char *)params.cta_group_barriers));
        return;
    }
    HOLDS(!p->split.ready_flags == !(hopper && p->split.partitions && p->split.num_partitions > 1));
    if (p->split.ready_flags) {
        const int64_t ready_tiles = h_kv * ceil_div(rows, ROWS_OF_READY_TILE);
        HOLDS(p->split.tiles == ready_tiles && p->split.tiles_of_head == ready_tiles / h_kv);
        HOLDS(inside(p->split.ready_flags, ready_tiles * p->split.num_partitions, READY_FLAGS_OF_TILE * 4,
                     end));
        end = (const char *)p->split.ready_flags;
    }
    judge_join(&p->split, &p->output, b, s_q, h_q, p->group, p->seqlens, NULL);
    judge_split(&p->split, b, s_q * h_q, capacity, tiles, decode, !hopper,
                a->batch_invariant ? NULL : a->plan, a->partitions && !a->batch_invariant, end);
}

/* Checks one launch of the bf16 kernel, and the join of its splits if tiles are split. */
static void judge_splits(const struct fake_launch *launch, const struct fake_launch *next, size_t bytes)
{
    const struct sparse_prefill_sm90_params p = PARAMS(sparse_prefill_sm90_params, launch);
    const int64_t tiles = (int64_t)p.call.s_q * p.call.tiles, split = tiles - p.splits.whole;
    HOLDS(passed_of(&p.queries)->base == p.call.q && passed_of(&p.results)->base == p.call.out);
    HOLDS(p.splits.of_tile >= 1 && p.splits.of_tile <= MOST_PREFILL_SPLITS && split >= 0 &&
          p.splits.whole >= 0);
    HOLDS(p.items == p.splits.whole + split * p.splits.of_tile &&
          divides(p.splits.divisor, p.splits.of_tile));
    HOLDS((int64_t)launch->config.grid_x == (p.items < machine.sms ? p.items : machine.sms));
    const bool joined = next && !strcmp(next->kernel, "sm90_sparse_prefill_join");
    HOLDS(joined == (p.splits.of_tile > 1) && joined == (strstr(launch->kernel, "splits") != NULL));
    if (!joined) return;
    HOLDS(inside(p.splits.parts, p.items - p.splits.whole, PREFILL_PART_BYTES, workspace + bytes));
    HOLDS(!memcmp(&p, next->parameters, sizeof p) && next->config.block_x == 32 * PREFILL_JOIN_WARPS);
    HOLDS(next->config.grid_x == split * 64 / PREFILL_JOIN_WARPS);
}

/* Checks one launch over pages of bytes: persistent CTAs, or one per split of a token's list. */
static void judge_pages(const struct fake_launch *launch, int64_t tiles, size_t bytes)
{
    const struct sparse_prefill_fp8_params p = PARAMS(sparse_prefill_fp8_params, launch);
    const struct sparse_decode_params *const decode = &p.decode.call;
    const struct split_params *const split = &decode->split;
    HOLDS(decode->tiles == tiles && divides(decode->tiles_divisor, tiles));
    if (!joins_in_kernel(launch)) {
        const int64_t workers = split->num_partitions;
        HOLDS(workers >= 1 && workers <= decode->b && !split->part_out);
        HOLDS(launch->config.grid_x == workers * tiles);
        return;
    }
    const int64_t blocks = decode->b * split->even_splits * tiles,
                  rows = decode->b * split->even_splits * decode->h_q;
    HOLDS(split->even_splits > 1 && split->even_splits <= MOST_PARTS_JOINED_IN_KERNEL &&
          blocks <= machine.sms);
    HOLDS(launch->config.grid_x == blocks && divides(decode->splits_divisor, split->even_splits));
    HOLDS(inside(split->part_out, rows, 512 * sizeof(float), workspace + bytes));
    HOLDS(inside(split->part_ends, rows, sizeof(struct part_end), workspace + bytes));
    HOLDS(inside(p.decode.cta_group_barriers, decode->b * tiles, sizeof(uint64_t), workspace + bytes));
}

static void judge_prefill(size_t bytes)
{
    const struct sparse_prefill_call *c = &call.sparse_prefill;
    const int64_t s_q = c->q.shape[0], h_q = c->q.shape[1], h_kv = c->indices.shape[1];
    int64_t tokens = 0; /* of all key heads */
    for (int i = 0; i < fake->launches; i++) {
        const struct fake_launch *const launch = &fake->launch[i];
        if (!strcmp(launch->kernel, "sm90_sparse_prefill_join")) continue;
        if (!strncmp(launch->kernel, "sm90_sparse_prefill_fp", 22)) {
            const struct sparse_prefill_fp8_params p = PARAMS(sparse_prefill_fp8_params, launch);
            judge_pages(launch, ceil_div(h_q, 64), bytes);
            check_passed_of_decode(&passed, c, &p.decode.call, p.max_logits, p.max_stride, tokens, 0);
            tokens += p.decode.call.b;
            continue;
        }
        if (!strncmp(launch->kernel, "sm80_sparse_decode", 18)) { /* a token is one of its requests */
            const struct sparse_sm80_params p = PARAMS(sparse_sm80_params, launch);
            const struct sparse_decode_params d = p.call;
            check_passed_of_decode(&passed, c, &d, p.max_logits, p.max_stride, tokens % s_q, tokens / s_q);
            HOLDS(d.s_q == 1 && d.h_q == h_q / h_kv && d.tiles == ceil_div(d.h_q, rows_of_shape(launch)));
            HOLDS(launch->config.grid_x == (int64_t)d.b * d.tiles && divides(d.tiles_divisor, d.tiles));
            tokens += d.b;
            continue;
        }
        const struct sparse_prefill_params p = PARAMS(sparse_prefill_params, launch);
        const bool hopper = !strncmp(launch->kernel, "sm90", 4);
        check_passed_of_prefill(&passed, c, &p, tokens % s_q, tokens / s_q);
        HOLDS(p.s_q >= 1 && p.h_q == h_q / h_kv && p.tiles == ceil_div(p.h_q, hopper ? 64 : SPARSE_WARPS));
        HOLDS((int64_t)p.s_q * p.tiles <= INT32_MAX && divides(p.tiles_divisor, p.tiles));
        HOLDS(hopper ||
              !strcmp(strrchr(launch->kernel, '_'), c->kv.tensor.dtype.bits == 8 ? "_bytes" : "_bf16"));
        if (hopper)
            judge_splits(launch, i + 1 < fake->launches ? launch + 1 : NULL, bytes);
        else
            HOLDS(launch->config.grid_x == (int64_t)p.s_q * p.tiles);
        tokens += p.s_q;
    }
    HOLDS(tokens == s_q * h_kv);
}

/* Tests that there is room for the parts, and that Hopper's join gets what the kernel gets. */
static void judge_mha_splits(const struct mha_forward_sm90_params *p, int64_t rows, size_t bytes)
{
    const int64_t part_rows = p->part_rows, d_v = p->call.d_v;
    const char *const end = workspace + bytes;
    const struct fake_launch *const join = &fake->launch[1];
    const struct mha_forward_sm90_params joined = PARAMS(mha_forward_sm90_params, join);
    HOLDS(!memcmp(&joined, p, sizeof joined) && !strncmp(join->kernel, "sm90_mha_forward_join_", 22));
    HOLDS(part_rows > 0 && part_rows <= rows * MHA_MOST_SPLITS && p->most_splits >= 2);
    HOLDS((char *)p->part_out == workspace + 256 &&
          inside(p->part_ends, part_rows, sizeof(struct part_end), end) &&
          (char *)p->part_ends >= (char *)(p->part_out + part_rows * d_v));
    const int32_t wanted = *(const int32_t *)option("num_splits");
    const int64_t all = rows * wanted < MHA_MOST_PART_ROWS ? rows * wanted : MHA_MOST_PART_ROWS;
    HOLDS(!wanted || (p->splits == wanted && part_rows == all));
    HOLDS((p->splits == 0) + (p->blocks_of_split == 0) >= 1 && p->sms == fake->sms);
    HOLDS(wanted || *(const int32_t *)option("batch_dependent") == (p->blocks_of_split > 0));
    HOLDS(join->config.grid_x >= 1 && join->config.grid_x <= 4 * (unsigned)fake->sms);
}

/* The same of the portable kernel, which computes the splits of ragged requests alone. */
static void judge_portable_splits(const struct mha_forward_sm80_params *p, int64_t rows, size_t bytes)
{
    const struct fake_launch *const join = &fake->launch[1];
    const struct mha_forward_sm80_params joined = PARAMS(mha_forward_sm80_params, join);
    const bool hopper = machine.capability == 90;
    HOLDS(!memcmp(&joined, p, sizeof joined) && !strncmp(join->kernel, "sm80_mha_forward_join_", 22));
    HOLDS(p->most_splits >= 2 && p->part_rows <= rows * p->most_splits &&
          (!p->splits || p->splits == p->most_splits));
    HOLDS((char *)p->part_out == workspace + (hopper ? 256 : 0) && p->slots % fake->sms == 0 &&
          (char *)p->part_ends >= (char *)(p->part_out + (int64_t)p->part_rows * p->call.d_v) &&
          inside(p->part_ends, p->part_rows, sizeof(struct part_end), workspace + bytes));
    HOLDS(p->call.starts_q || p->most_splits * rows <= p->part_rows);
    HOLDS(p->call.starts_q || p->call.used_q || p->call.used_k || p->splits);
    HOLDS(p->block_keys % 16 == 0 && divides(p->block_divisor, p->block_keys));
    HOLDS(join->config.grid_x >= 1 && join->config.grid_x <= 4 * (unsigned)fake->sms);
}

static void judge_mha(size_t bytes)
{
    const struct mha_forward_call *c = &call.mha_forward;
    const bool flat = c->q.tensor.ndim == 3;
    const int64_t tokens = flat ? c->q.shape[0] : c->q.shape[0] * c->q.shape[1];
    const int64_t h_q = c->q.shape[2 - flat], h_kv = c->k.shape[2 - flat],
                  b = flat ? c->cu_seqlens_q.shape[0] - 1 : c->q.shape[0];
    if (!b || !tokens) {
        HOLDS(!fake->launches);
        return;
    }
    const struct fake_launch *const launch = &fake->launch[0];
    const bool hopper = !strncmp(launch->kernel, "sm90", 4), few = strstr(launch->kernel, "_few"),
               with = few || strstr(launch->kernel, "_splits");
    const bool portable = !strncmp(launch->kernel, "sm80", 4), padding = c->args.seqused_q,
               splits = hopper ? PARAMS(mha_forward_sm90_params, launch).part_rows : with;
    HOLDS(fake->launches == 1 + splits + padding && (with || !splits));
    HOLDS(!padding || !strcmp(fake->launch[1 + splits].kernel, "mha_padding"));
    /* The kernel with splits is taken to clear padding, too, and at 128/128 for its order or a sink. */
    HOLDS(splits || !with || padding || c->q.shape[3 - flat] == 128);
    const struct mha_forward_params all =
        PARAMS(mha_forward_params, launch); /* with which all others begin */
    check_passed_of_mha(&passed, c, &all, b, h_q, h_kv);
    if (portable) {
        const struct mha_forward_sm80_params p = PARAMS(mha_forward_sm80_params, launch);
        HOLDS(p.heads_of_tile == 1 || p.heads_of_tile == h_q / h_kv);
        HOLDS(p.tile_tokens == MHA_SM80_ROWS / p.heads_of_tile && divides(p.heads_divisor, p.heads_of_tile));
        HOLDS(p.units * p.heads_of_tile == h_q && p.units_of_key_head * p.heads_of_tile == h_q / h_kv);
        HOLDS(p.cached_keys > 0 && (int64_t)launch->config.grid_x * MHA_SM80_ROWS >= tokens * h_q);
        if (splits)
            judge_portable_splits(&p, tokens * h_q, bytes);
        else
            HOLDS(p.splits == 1 && !p.part_out);
        return;
    }
    if (strncmp(launch->kernel, "sm90", 4) != 0) {
        HOLDS(launch->config.grid_x == ceil_div(tokens * h_q, MHA_WARPS));
        return;
    }
    const struct mha_forward_sm90_params p = PARAMS(mha_forward_sm90_params, launch);
    const int64_t rows = few ? MHA_SM90_FEW_ROWS : MHA_SM90_ROWS(p.call.d_qk),
                  slots = fake->sms * (few ? MHA_SM90_FEW_CTAS : 1);
    HOLDS(p.few_rows == few && (!few || (splits && p.call.d_qk <= 192)));
    check_passed_map(&passed, &p.q, "q", true), check_passed_map(&passed, &p.k, "k", false);
    check_passed_map(&passed, &p.v, "v", false);
    HOLDS(p.heads_of_tile == 1 || p.heads_of_tile == h_q / h_kv);
    if (splits)
        judge_mha_splits(&p, tokens * h_q, bytes);
    else
        HOLDS(bytes == 256 && p.splits == 1 && !p.part_out);
    HOLDS(p.tile_tokens == rows / p.heads_of_tile && p.tile_rows == p.tile_tokens * p.heads_of_tile);
    HOLDS(divides(p.heads_divisor, p.heads_of_tile) && p.units * p.heads_of_tile == h_q);
    HOLDS(p.units_of_key_head * p.heads_of_tile == h_q / h_kv && p.cached_keys > 0);
    HOLDS(launch->config.grid_x >= 1 && launch->config.grid_x <= slots &&
          (p.tile_counters || launch->config.grid_x * rows * p.tile_tokens >= tokens));
    HOLDS(!p.tile_counters ||
          ((void *)p.tile_counters == workspace && p.ticket && launch->config.grid_x == slots));
}

/* ---- Operations with a workspace ---------------------------------------------------------------- */

static fmla_status run_in(size_t bytes)
{
    *(size_t *)option("workspace_size") = bytes;
    fake->launches = fake->tensors = 0;
    return described_run(operation, args);
}

/* Tests a kernel: query and call agree, and the queried bytes are what is needed, the same number as for
 * other kernels, if one answered. */
static void try_kernel(const char *kernel, size_t *answered)
{
    struct answer answer = {0};
    forced = *(const char **)option("kernel") = kernel;
    const fmla_status status = described_ask(operation, ASK_BYTES, args, &answer);
    calls++;
    if (status) {
        HOLDS(status == FMLA_UNSUPPORTED);
        HOLDS(run_in(SIZE_MAX) == status && !fake->launches);
        refused_calls++;
        return;
    }
    HOLDS(answer.alignment == 256 && (!*answered || answer.bytes == *answered));
    *answered = answer.bytes;
    HOLDS(run_in(answer.bytes) == FMLA_OK);
    if (operation == OP_SPARSE_DECODE) judge_sparse(answer.bytes);
    if (operation == OP_DENSE_DECODE) judge_dense(answer.bytes);
    if (operation == OP_SPARSE_PREFILL) judge_prefill(answer.bytes);
    if (operation == OP_MHA_FORWARD) judge_mha(answer.bytes);
    if (answer.bytes) HOLDS(run_in(answer.bytes - 1) == FMLA_BUFFER_TOO_SMALL && !fake->launches);
}

enum { MOST_KERNELS = 8 };
static char kernels[OPERATIONS][MOST_KERNELS][32]; /* every kernel in the device's table */

static void find_kernels(void)
{
    int count[OPERATIONS] = {0};
    fmla_capability row = FMLA_INIT(fmla_capability);
    for (int64_t i = 0; fmla_capabilities(gpu_number(0), i, &row) == FMLA_OK; i++)
        for (int op = 0; row.kernel && op < OPERATIONS; op++)
            if (!strcmp(row.operation, descriptors[op].name))
                snprintf(kernels[op][count[op]++], sizeof kernels[op][0], "%s", row.kernel);
}

/* Tests the kernel that dispatch chooses, and each by name. */
static void try_kernels(const struct shape *s)
{
    size_t answered = 0;
    make(s);
    *(void **)option("workspace") = workspace;
    try_kernel(NULL, &answered);
    for (int k = 0; *kernels[operation][k]; k++) try_kernel(kernels[operation][k], &answered);
    forced = *(const char **)option("kernel") = NULL;
    size_t *const plan_size = option("plan_size");
    if (!plan_size || !*plan_size || s->of.batch_invariant) return;
    --*plan_size;
    const fmla_status status = run_in(SIZE_MAX);
    HOLDS(status == FMLA_BUFFER_TOO_SMALL || status == FMLA_UNSUPPORTED);
}

/* Tests shapes in which Hopper's two sparse decode kernels differ in the number of requests they begin at
 * once: more requests than parts for their splits. */
static void sparse_fixed(void)
{
    static const struct {
        int sms;
        int64_t b, s_q, h_q;
    } all[] = {{132, 33, 2, 128}, {132, 33, 4, 64},  {132, 13, 5, 128}, {132, 11, 6, 128},
               {132, 9, 7, 128},  {114, 57, 1, 128}, {78, 39, 1, 128}};
    operation = OP_SPARSE_DECODE;
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        for (int64_t topk = 0; topk <= 65 && all[i].sms == machine.sms; topk++) {
            const struct shape s = {.of = {.b = all[i].b,
                                           .s_q = all[i].s_q,
                                           .h_q = all[i].h_q,
                                           .topk = topk,
                                           .page_size = 64,
                                           .format = FMLA_KV_FP8_656}};
            try_kernels(&s);
        }
}

/* ---- Operations without ------------------------------------------------------------------------- */

/* Checks that a plan has exactly the queried bytes, or its tables the queried rows. */
static void plan_drawn(void)
{
    struct shape s = {0};
    struct answer answer[QUESTIONS];
    const bool tables = draw_one_in(3);
    const int64_t b = s.of.b = draw_size(INT32_MAX - 65537) - draw_one_in(8);
    draw_heads(&s.of);
    s.of.h_kv = draw_one_in(2) ? 1 : s.of.h_q;
    s.of.topk = draw_size(INT32_MAX) - draw_one_in(2),
    s.of.extra_topk = draw_size(INT32_MAX) - draw_one_in(2);
    s.of.num_partitions = draw_one_in(2) ? 0 : (int32_t)draw_size(65536);
    s.of.has = draw_bits_of(HAS_LENGTHS);
    make(&s);
    put_number(operation, args, "num_workers", draw_one_in(2) ? 0 : (int32_t)draw_size(65536));
    *(fmla_device *)option("target") = gpu_number(0);
    if (option("capacity")) *(int64_t *)option("capacity") = draw_one_in(2) ? 0 : draw_size(INT64_MAX);
    calls++;
    for (int question = 0; question < QUESTIONS; question++)
        HOLDS(described_ask(operation, question, args, &answer[question]) == FMLA_OK);
    const int32_t partitions = answer[ASK_KERNEL].count[0];
    HOLDS(partitions >= 1 && partitions <= 65536);
    if (tables) {
        give_tables(operation, args, held, partitions, b);
    } else {
        *(void **)option("plan") = workspace, *(size_t *)option("plan_size") = answer[ASK_BYTES].bytes;
    }
    fake->launches = 0;
    HOLDS(described_run(operation, args) == FMLA_OK && fake->launches == 1);
    const struct plan_params p = PARAMS(plan_params, &fake->launch[0]);
    HOLDS(fake->launch[0].config.grid_x == 1 && p.b == b && p.num_partitions == partitions);
    HOLDS(p.planned >= 1 && p.planned <= partitions && divides(p.partitions_divisor, p.planned));
    const int64_t *const capacity = option("capacity");
    HOLDS(!capacity || p.capacity == (*capacity ? *capacity : INT32_MAX));
    HOLDS((const char *)p.seqlens == passed_at(&passed, "seqlens", 0) &&
          (const char *)p.topk.length == passed_at(&passed, "topk_length", 0));
    if (tables)
        HOLDS(!p.header && (char *)p.partitions == region(REGION_OF_TABLES) &&
              (char *)p.num_splits == region(REGION_OF_SPLITS));
    if (tables) return;
    HOLDS((char *)p.header == workspace &&
          (char *)(p.num_splits + b + 1) == workspace + answer[ASK_BYTES].bytes);
    --*(size_t *)option("plan_size"), fake->launches = 0;
    HOLDS(described_run(operation, args) == FMLA_BUFFER_TOO_SMALL && !fake->launches);
}

static int64_t size_or_none(int64_t most)
{
    return draw_one_in(8) ? 0 : draw_size(most);
}

/* Draws a type that the operation's first tensor allows. */
static fmla_dtype draw_type(void)
{
    const fmla_dtype types[] = {bf16, fp16, f32};
    const unsigned allowed = described_tensor(operation, 0)->allowed & ALLOW_FLOATS;
    int64_t drawn = draw_below(3);
    while (allowed && !(allowed >> drawn & 1)) drawn = draw_below(3);
    return types[drawn];
}

/* Checks for one launch, unless there is nothing to do, with this number of CTAs; 0: any number. */
static void judge_one(bool some, int64_t blocks)
{
    forced = *(const char **)option("kernel") = draw_one_in(2) ? "cuda" : NULL;
    calls++, fake->launches = 0;
    HOLDS(described_run(operation, args) == FMLA_OK && fake->launches == some);
    if (some && blocks) HOLDS(fake->launch[0].config.grid_x == (blocks < INT32_MAX ? blocks : INT32_MAX));
}

static void merge_drawn(void)
{
    struct shape s = {.of = {.type = draw_type(), .has = draw_bits_of(HAS_LSE | HAS_LAST)},
                      .odd = draw_one_in(8)};
    struct layout *const l = &s.of;
    l->s_q = size_or_none(1 << 12), l->h_q = size_or_none(1 << 16), l->d_v = size_or_none(1 << 12);
    l->n = draw_fit(size_or_none(1 << 12), (double)(l->s_q * l->h_q * (l->d_v + 1)) * 4.0 + 1.0);
    l->b =
        draw_fit(size_or_none(INT32_MAX), (double)((l->n + 1) * l->s_q * l->h_q * (l->d_v + 1)) * 4.0 + 1.0);
    const int64_t part = l->n && !(l->has & HAS_LAST) && draw_one_in(2) ? 1 + draw_below(l->n) : 0;
    l->n_out = part ? 1 : l->n;
    make(&s);
    call.merge.args.part = part;
    call.merge.out.tensor.dtype = draw_type(), call.merge.out.tensor.byte_offset &= ~UINT64_C(3);
    const int64_t rows = l->b * l->s_q * l->h_q;
    const bool some = rows && (l->d_v || l->has & HAS_LSE), last = l->has & HAS_LAST;
    judge_one(some, rows);
    if (!some) return;
    const struct merge_params p = PARAMS(merge_params, launched(0));
    check_passed(&passed, "out_parts", p.out_parts, 0, p.out_parts_stride, 4);
    check_passed(&passed, "lse_parts", p.lse_parts, 0, p.lse_parts_stride, 3);
    check_passed(&passed, "out_last", p.out_last, 0, p.out_last_stride, 3);
    check_passed(&passed, "lse_last", p.lse_last, 0, p.lse_last_stride, 2);
    check_passed(&passed, "out", p.out, 0, p.out_stride, 3),
        check_passed(&passed, "lse", p.lse, 0, p.lse_stride, 2);
    check_passed_rules(&passed, &p.rules, 0);
    HOLDS(p.vectors_aligned ==
          (passed_aligned(&passed, "out_parts", 16) && passed_aligned(&passed, "out", 16) &&
           (!last || passed_aligned(&passed, "out_last", 16))));
    HOLDS(p.last == (last ? l->n : -1) && p.out_first == (part ? part - 1 : 0) &&
          p.out_count == l->n_out + last);
    HOLDS(p.n == l->n + last && p.b == l->b && p.s_q == l->s_q && p.h_q == l->h_q && p.d_v == l->d_v);
    HOLDS(launched(0)->config.block_x == MERGE_THREADS && !strcmp(launched(0)->kernel, "merge"));
}

/* Returns a format that the operation takes, if it takes formats. */
static int32_t draw_format(void)
{
    const struct member *const named = described_kind(operation, MEMBER_FORMAT);
    const int64_t low = named ? named->low : 1, high = named ? named->high : KV_FORMATS;
    return (int32_t)(low + draw_below(high - low + 1));
}

/* Draws calls of the cache operations and of others without a workspace: of rows of tokens, or of queries. */
static void rows_drawn(void)
{
    struct shape s = {.of = {.type = draw_type(), .format = draw_format(), .has = HAS_TABLE},
                      .odd = draw_one_in(8)};
    struct layout *const l = &s.of;
    l->d_qk = cache_formats[l->format].d_qk;
    for (int64_t other = -1; other && l->d_qk && other != l->d_qk;
         other = cache_formats[l->extra_format].d_qk)
        l->extra_format = draw_format();
    if (!l->d_qk) l->d_qk = draw_one_in(2) ? 576 : draw_size(4096);
    l->width = l->d_qk, l->pages = size_or_none(1 << 20), l->page_size = draw_size(1 << 16);
    l->tokens = draw_fit(size_or_none(INT64_C(1) << 40), (double)l->d_qk * 8.0);
    l->b = size_or_none(1 << 10), l->h_q = draw_size(1 << 10), l->h_kv = draw_size(16),
    l->max_pages = draw_size(1 << 10);
    described_fit(operation, l);
    make(&s);
    /* There is something to write if the first result has elements. */
    const struct member *result = described_tensor(operation, 0);
    for (int which = 0; !(result->allowed & IS_OUTPUT); which++) result = described_tensor(operation, which);
    const int64_t rows = result->dimensions[0] == DIM_b ? l->b : l->tokens;
    judge_one(rows > 0, operation_is_of_caches(operation) ? ceil_div(l->tokens, CACHE_WARPS) : 0);
    if (l->tokens > 0 && operation != OP_CACHE_CONVERT && operation_is_of_caches(operation))
        check_passed_of_tokens(&passed);
}

/* ---- All of it ---------------------------------------------------------------------------------- */

static void draw_case(void)
{
    if (described_member(operation, "workspace")) {
        const struct shape s = draw_shape(operation, machine.sms);
        try_kernels(&s);
    } else if (described_is_plan(operation)) {
        plan_drawn();
    } else if (operation == OP_MERGE) {
        merge_drawn();
    } else {
        rows_drawn();
    }
    forced = NULL;
}

static void on_machine(int64_t shapes, uint64_t first)
{
    fake_open();
    fake->sms = machine.sms, fake->capability = machine.capability, fake->shared_bytes = machine.shared_bytes;
    signal(SIGFPE, died), signal(SIGSEGV, died), signal(SIGABRT, died);
    find_kernels();
    sparse_fixed();
    for (operation = 0; operation < OPERATIONS; operation++) {
        if (!*kernels[operation][0]) continue; /* test_cuda_others.c covers that */
        refused_calls = calls = 0;
        for (number = first; number < first + (uint64_t)shapes; number++) {
            draw_from(seed, number * 16 + operation);
            draw_case();
        }
        /* Hopper's kernels are refused on other GPUs, shapes beyond countable sizes everywhere. */
        if (shapes >= 1000)
            CHECK(calls - refused_calls >= shapes / 2, "%s: %" PRId64 " of %" PRId64 " calls refused",
                  shape_words, refused_calls, calls);
    }
}

int main(int argc, char **argv)
{
    static const struct machine machines[] = {{2, 90, 232448},   {66, 90, 232448},  {78, 90, 232448},
                                              {114, 90, 232448}, {132, 90, 232448}, {148, 90, 232448},
                                              {2, 120, 101376},  {66, 80, 166912},  {78, 86, 101376},
                                              {114, 89, 101376}, {132, 80, 166912}, {148, 100, 232448}};
    enum { MACHINES = sizeof machines / sizeof machines[0] };
    int64_t numbers[] = {2000, 1, 0};
    const int mine = fake_numbers(argc, argv, numbers, 3);
    seed = (uint64_t)numbers[1];
    if (mine >= 0) {
        machine = machines[mine % MACHINES];
        on_machine(numbers[0], (uint64_t)numbers[2]);
        return check_failures != 0;
    }
    return fake_machines(argv, MACHINES, "test_cuda_random");
}

/* SPDX-License-Identifier: MIT
 *
 * Dense decode: its grid, its faults, and cases beside the grid.
 */
#include "decode_case.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- The grid --------------------------------------------------------------------------------- */

/* FP8 products take bf16 queries or codes, with the two formats that are 576 wide; codes as queries work
 * with only one of these. */
static bool products_possible(const int64_t *v)
{
    const int64_t cache = v[A_CACHE];
    if (v[A_PRODUCTS] <= OF_BF16) return true;
    if (v[A_DTYPE] > 0 || v[A_DQK] == 512 || (cache >= 0 && cache != CACHE_656 && cache != CACHE_576))
        return false;
    return v[A_PRODUCTS] != OF_CODES || (cache != CACHE_656 && v[A_CODES] != S_CODES_BEYOND);
}

/* Byte formats have one key head and define d_qk; codes apply only to them, and values beyond fp16 need
 * groups with scales of their own. Every case refused here has a pair of values that is refused:
 * otherwise the grid would wait for pairs without a case. */
static bool possible(const int64_t *v)
{
    const int64_t h_q = v[A_HQ], h_kv = v[A_HKV], cache = v[A_CACHE], codes = v[A_CODES];
    if (h_q > 0 && h_kv > 0 && h_q % h_kv) return false;
    if (!products_possible(v)) return false;
    if (cache <= CACHE_OF_Q && codes <= S_CODES_WRITTEN && v[A_PRODUCTS] <= OF_BF16) return true;
    if (cache == CACHE_OF_Q || h_kv > 1) return false;
    if (cache == CACHE_576 && codes == S_CODES_BEYOND) return false;
    return cache < 0 || v[A_DQK] < 0 || v[A_DQK] == (cache == CACHE_584 ? 512 : 576);
}

/* An empty batch or cache computes nothing, batch-invariant mode reads no plan, and NaN ends need rows
 * that may not see them. */
static bool counts(const int64_t *v, int i, int j)
{
    const bool plan = i == A_PLAN || j == A_PLAN || i == A_PARTITIONS || j == A_PARTITIONS;
    const bool inputs = i == A_INPUTS || j == A_INPUTS;
    const bool some_unseen = v[A_CAUSAL] && v[A_SQ] > 1;
    if (!v[A_B] && i != A_B) return false;
    if (!v[A_SK] && i != A_SK && j != A_SK) return false;
    if (plan && v[A_INVARIANT] && i != A_INVARIANT && j != A_INVARIANT) return false;
    return !inputs || v[A_INPUTS] != INPUTS_NAN_ENDS || some_unseen || i == A_SQ || i == A_CAUSAL;
}

/* Rows computed together: on a CPU as in the generic kernel, on a GPU the largest tile. */
static int64_t tile;

static double cost(const int64_t *v)
{
    const int64_t rows = v[A_SQ] * v[A_HQ] / v[A_HKV];
    const int64_t tiles = (rows + tile - 1) / tile;
    return (double)tile * (double)(v[A_B] * v[A_HKV] * tiles * v[A_SK]);
}

/* The oracle is slower than a GPU, several times more so over bytes, and a GPU is slow where it computes
 * row by row to keep NaN from the products. Cases with many keys of bytes therefore cost more. */
static double cost_on_gpu(const int64_t *v)
{
    enum { ORACLE_OF_A_KEY = 4096, BY_ROWS = 64 };
    const bool by_rows = v[A_INPUTS] == INPUTS_NAN_ENDS && v[A_CAUSAL] && v[A_SQ] > 1;
    if (v[A_CACHE] <= CACHE_OF_Q) return cost(v);
    return (by_rows ? BY_ROWS : 1) * cost(v) + ORACLE_OF_A_KEY * (double)v[A_SK];
}

/* On a CPU the rows also cost time if there are few or no keys, as does the workspace: two slots per
 * partition. */
static double cost_on_cpu(const int64_t *v)
{
    return cost(v) + case_cost_of_rows(v[A_B], v[A_SQ] * v[A_HQ], v[A_INVARIANT] ? 0 : 2 * v[A_PARTITIONS]);
}

/* Returns the host bytes of a GPU case: cache, queries and results, table. */
static double host_bytes(const int64_t *v)
{
    const double b = (double)v[A_B], s_k = (double)v[A_SK];
    const double page = (double)v[A_PAGE], row = 2.0 * (double)(v[A_DQK] + 2 * D_V);
    const double rows = b * (double)(v[A_SQ] * v[A_HQ]);
    const double shared = b * s_k < 8192 ? b * s_k : 8192, alone = b * s_k > 65536 ? s_k : b * s_k;
    const double slots = page > 0 ? shared + b * page : alone;
    const double table = page > 0 ? 4.0 * b * (s_k / page + 3.0) : 0.0;
    return 2.0 * slots * (double)(v[A_HKV] * v[A_DQK]) + rows * row + table;
}

/* Returns the bytes of a batch-invariant call's partial results: one per split of 2048 keys that the table
 * has room for. */
static double device_bytes(const int64_t *v)
{
    const double rows = (double)(v[A_B] * v[A_SQ] * v[A_HQ]);
    const double splits = (double)v[A_SK] / 2048.0 + 1.0;
    return v[A_INVARIANT] ? rows * splits * 4.0 * (D_V + 1) : 0.0;
}

/* The kernel of the current grid. */
static const char *grid_kernel;

/* Returns true for Hopper's byte-cache kernel, which takes FP8_656 and FP8_576. */
static bool is_of_bytes(const char *kernel)
{
    return !strcmp(kernel, "cuda-sm90-fp8");
}

/* Returns true if that kernel takes the case: blocks of 64 keys, and bf16 queries, or codes in tiles that
 * are boxes. */
static bool is_taken_of_bytes(const int64_t *v)
{
    if (v[A_DTYPE] > 0 || v[A_HKV] > 1 || v[A_DQK] == 512) return false;
    if (v[A_CACHE] >= 0 && v[A_CACHE] != CACHE_656 && v[A_CACHE] != CACHE_576) return false;
    if (!v[A_B]) return true;
    if (v[A_LAYOUT] == LAYOUT_ODD || (v[A_PAGE] > 0 && v[A_PAGE] % 64)) return false;
    const bool boxes = v[A_SQ] <= 1 || v[A_HQ] < 0 || v[A_LAYOUT] < 0 || v[A_HQ] == 1 ||
                       v[A_LAYOUT] == LAYOUT_CONTIGUOUS || v[A_HQ] % 64 == 0 || 64 % v[A_HQ] == 0;
    return boxes || v[A_PRODUCTS] != OF_CODES;
}

/* Returns true if the kernel takes the case; values not chosen yet are -1. CPU kernels take all cases; the
 * GPU's portable kernel takes bytes with bf16 queries; Hopper's takes no bytes: it needs a cache that TMA
 * can load in blocks of 64 keys, and tiles of 64 rows that are boxes of the queries. This repeats the
 * library's rule in terms of the case; the library must agree. */
static bool is_taken(const char *kernel, const int64_t *v)
{
    const bool hopper = !strcmp(kernel, "cuda-sm90"), portable = !strcmp(kernel, "cuda-sm80");
    const bool bytes = v[A_CACHE] > CACHE_OF_Q || v[A_CODES] > S_CODES_WRITTEN || v[A_PRODUCTS] > OF_BF16;
    if (is_of_bytes(kernel)) return is_taken_of_bytes(v);
    if (bytes && (hopper || (portable && v[A_DTYPE] > 0))) return false;
    if (!hopper || !v[A_B]) return true;
    if (v[A_LAYOUT] == LAYOUT_ODD || (v[A_PAGE] > 0 && v[A_PAGE] % 64)) return false;
    if (v[A_SQ] <= 1 || v[A_HQ] < 0 || v[A_HKV] < 1 || v[A_LAYOUT] < 0) return true;
    const int64_t group = v[A_HQ] / v[A_HKV];
    const bool rows_follow = v[A_HKV] == 1 && (v[A_HQ] == 1 || v[A_LAYOUT] == LAYOUT_CONTIGUOUS);
    return rows_follow || group % 64 == 0 || 64 % group == 0;
}

static bool leaves(const struct test_case *c, bool *must)
{
    *must = true;
    return !is_taken(c->run->kernel, c->v);
}

static bool gpu_possible(const int64_t *v)
{
    bool whole = true;
    for (int i = 0; i < AXES; i++) whole &= v[i] >= 0;
    if (!possible(v) || !is_taken(grid_kernel, v)) return false;
    return !whole || (host_bytes(v) <= 0x1p30 && device_bytes(v) <= 0x1p34 && cost(v) <= 5e10);
}

static void take_values(struct axis *axis, int64_t first, int64_t last)
{
    axis->count = 0;
    for (int64_t value = first; value <= last; value++) axis->values[axis->count++] = value;
}

/* Only caches and products that the kernel supports are in its grid; a CPU omits the last values of
 * `b` and `s_k`. */
static void choose(struct subject *op, const struct run *run)
{
    op->axis[A_B].count = on_gpu(run) ? 7 : 6;
    op->axis[A_SK].count = on_gpu(run) ? 9 : 8;
    const bool bytes = strcmp(run->kernel, "cuda-sm90") != 0, of_bytes = is_of_bytes(run->kernel);
    take_values(&op->axis[A_CACHE], CACHE_OF_Q, bytes ? CACHE_576 : CACHE_OF_Q);
    if (of_bytes)
        op->axis[A_CACHE].count = 2, op->axis[A_CACHE].values[0] = CACHE_656,
        op->axis[A_CACHE].values[1] = CACHE_576;
    take_values(&op->axis[A_CODES], S_CODES_WRITTEN, bytes ? S_CODES_NAN : S_CODES_WRITTEN);
    take_values(&op->axis[A_PRODUCTS], OF_BF16, bytes ? OF_CODES : OF_BF16);
    grid_kernel = run->kernel;
    op->grid.possible = on_gpu(run) ? gpu_possible : possible;
    op->grid.cost = on_gpu(run) ? cost_on_gpu : cost_on_cpu;
    tile = on_gpu(run) ? 64 : 16;
    op->grid.dear = on_gpu(run) ? 5e8 : 2e5;
}

/* ---- Faults ----------------------------------------------------------------------------------- */

static bool plant_before(struct test_case *c, enum defect fault, struct patch *patch)
{
    const struct decode_case *d = (const struct decode_case *)c;
    for (int64_t r = 0; fault == FAULT_WRONG_SCALE && r < c->b; r++) {
        int32_t slot = d->length[r] ? (int32_t)decode_slot(d, r, 0) : -1;
        if (sparse_pool_plant(&d->pool, fault, &slot, 0, 1, NULL, patch)) return true;
    }
    if (fault != FAULT_SWAPPED_PAGE || !d->paged || c->page_size < 16) return false;
    for (int64_t r = 0; r < c->b; r++) {
        if (d->length[r] < 2 * c->page_size) continue;
        /* Use a page of another request: swapping pages of one request would not change the result. */
        int32_t *entry = guarded_at(&c->tensor[DENSE(block_table)], r, 0, 0, 0);
        const int32_t other = (int32_t)((*entry + 1) % c->pages);
        return plant(patch, entry, &other, sizeof other);
    }
    return false;
}

#define OF_576 "cache fp8_576, products fp8, "

/* Cases that suit every fault: pages, empty requests, gaps, causal. An lse is small if a key is alone. */
static void fault_cases(struct suite *suite)
{
    const struct run *run = &suite->run[0];
    for (uint64_t i = 0; i < 8; i++)
        suite_case(suite, run->seed + i, false,
                   "b 6, s_q 3, h_q 8, page_size %d, causal 1, layout padded, batch_invariant %d, %s%s",
                   strcmp(run->kernel, "cuda-sm90") && !is_of_bytes(run->kernel) ? 16 : 64,
                   run->fault == FAULT_BATCH, is_of_bytes(run->kernel) ? OF_576 : "",
                   run->fault == FAULT_LSE_CANCELLED ? "s_k 1, inputs steep"
                   : run->fault == FAULT_WRONG_SCALE ? "s_k 20, lengths varied, cache fp8_656, codes scales"
                                                     : "s_k 140, lengths varied");
}

/* ---- Cases beside the grid -------------------------------------------------------------------- */

/* On a GPU a cache past 2^32 elements needs real memory: check_large_cache. */
static bool has(const struct run *run, const int64_t *v)
{
    return !on_gpu(run) || (v[A_LAYOUT] != LAYOUT_FAR && (v[A_CACHE] == CACHE_OF_Q || v[A_PRODUCTS]));
}

#define SMALL                                                                                                \
    "b 3, s_q 3, s_k 70, h_q 6, page_size 16, causal 1, lengths varied, sink finite, layout odd, dtype "     \
    "bf16, "

#define FOREIGN                                                                                              \
    "b 9, s_q 2, s_k 700, h_q 16, page_size 64, causal 1, lengths varied, plan given, num_partitions 13"

/* A plan made with other partitions than the call names: the host cannot detect that, and the results are
 * correct. */
static void check_foreign_plan(const struct run *run, struct tally *tally)
{
    for (int32_t told = 1; told <= 7; told += 3) {
        int64_t v[AXES];
        case_values(&dense_decode, is_of_bytes(run->kernel) ? OF_576 FOREIGN : FOREIGN, v);
        struct test_case *c =
            case_make(&dense_decode, run, tally, v, run->seed * 7919 + 250 + (uint64_t)told);
        case_plan(c);
        case_to_device(c, NULL);
        c->args.dense_decode.num_partitions = told;
        must(c, case_run(c, &c->args, 0xff));
        compare_whole(c);
        case_free(c);
    }
}

/* Returns the position of a page of the host's small cache in the device's large one: some just past 2^31
 * elements, the others at the end. */
static int64_t large_page(int64_t page, int64_t pages, int64_t page_elements)
{
    return page % 2 ? (INT64_C(1) << 31) / page_elements + 1 + page : pages - 1 - page;
}

static void check_large_cache(const struct run *run, struct tally *tally)
{
    static const int64_t elements = INT64_C(0x130000000);
    const size_t needed = (size_t)elements * sizeof(uint16_t);
    if (device_memory() < needed + needed / 4) {
        printf("  not on this GPU: a cache of %lld bytes\n", (long long)needed);
        return;
    }
    int64_t v[AXES];
    case_values(&dense_decode, "b 4, s_q 2, s_k 700, h_q 16, page_size 64, causal 1, inputs spiked", v);
    struct test_case *c = case_make(&dense_decode, run, tally, v, run->seed * 7919 + 400);
    const struct decode_case *d = (const struct decode_case *)c;
    struct guarded *table = &c->tensor[DENSE(block_table)];
    const int64_t page_elements = d->pool.strides[0], pages = elements / page_elements;
    const size_t page_bytes = (size_t)page_elements * sizeof(uint16_t);
    struct device_scratch cache;
    device_scratch_make(&cache, (size_t)pages * page_bytes, 0xff); /* NaN outside the pages */
    for (int64_t page = 0; page < c->pages; page++)
        device_scratch_write(&cache, (size_t)large_page(page, pages, page_elements) * page_bytes,
                             guarded_at(&c->tensor[DENSE(kv_cache)], page, 0, 0, 0), page_bytes);
    unsigned char *small = must_alloc(table->whole);
    memcpy(small, table->memory, table->whole);
    for (int64_t r = 0; r < c->b; r++)
        for (int64_t i = 0; i * c->page_size < d->length[r]; i++) {
            int32_t *entry = guarded_at(table, r, i, 0, 0);
            *entry = (int32_t)large_page(*entry, pages, page_elements);
        }
    case_to_device(c, NULL);
    struct device_args there;
    device_args_make(&there, c, &c->args);
    fmla_tensor large = *there.args.dense_decode.kv_cache;
    const int64_t shape[4] = {pages, c->page_size, c->h_kv, c->d_qk};
    large.data = cache.memory, large.shape = shape;
    there.args.dense_decode.kv_cache = &large;
    must(c, call_on_device(c, &there, &c->args, 0xff));
    memcpy(table->memory, small, table->whole); /* the oracle reads the small cache */
    compare_whole(c);
    if (!device_scratch_intact(&cache)) failed(c, "bytes behind the cache were written");
    device_scratch_free(&cache);
    free(small);
    case_free(c);
}

static void more_on_gpu(const struct run *run, struct tally *tally)
{
    check_foreign_plan(run, tally);
    if (!is_of_bytes(run->kernel)) check_large_cache(run, tally); /* which has 16-bit values */
}

#define FAR_BYTES                                                                                            \
    "b 2, s_q 2, s_k 200, h_q 4, page_size 64, causal 1, num_partitions 3, codes scales, layout far, "

struct subject dense_decode = {
    .of = OP_DENSE_DECODE,
    .maker = &decode_maker,
    .values = DENSE_AXES(AXIS_TEXT),
    .grid = {.counts = counts},
    .choose = choose,
    .has = has,
    .leaves = leaves,
    /* Cases that pairs do not cover: many splits of one request, a split among keys that only some rows
     * see, lengths above 2^16, more than two splits in batch-invariant mode, cache offsets of more than 32
     * bits, and scores of +inf or beyond fp32. */
    .special =
        {"b 1, s_q 3, s_k 4096, h_q 16, page_size 64, causal 1, plan given, num_partitions 78, inputs spiked",
         "b 2, s_q 64, s_k 140, h_q 3, page_size 16, causal 1, d_qk 512, num_partitions 3, inputs nan_ends",
         "b 1, s_q 2, s_k 70000, h_q 2, page_size 64, causal 1, num_partitions 3, inputs spiked",
         "b 2, s_k 9000, h_q 2, page_size 0, lengths varied, batch_invariant 1, inputs steep",
         "b 2, s_k 5000, h_q 16, page_size 64, batch_invariant 1",
         "b 2, s_q 2, s_k 200, h_q 4, h_kv 2, page_size 64, causal 1, num_partitions 3, layout far",
         "b 3, s_q 3, s_k 200, h_q 16, page_size 64, causal 1, num_partitions 5, inputs infinite, sink "
         "finite",
         "b 4, s_k 65, h_q 64, page_size 64, d_qk 512, lengths varied, inputs infinite",
         "b 6, s_q 2, s_k 140, h_q 16, page_size 64, causal 1, lengths varied, num_partitions 3, inputs "
         "beyond",
         FAR_BYTES "cache fp8_656", FAR_BYTES "cache fp8_584, d_qk 512", FAR_BYTES "cache fp8_576",
         "b 3, s_q 3, s_k 200, h_q 16, page_size 64, cache fp8_584, d_qk 512, causal 1, num_partitions 5, "
         "inputs infinite, sink finite",
         "b 3, s_q 3, s_k 200, h_q 16, page_size 64, cache fp8_656, products fp8, causal 1, num_partitions "
         "5, "
         "inputs infinite, sink finite",
         "b 2, s_k 9000, h_q 3, page_size 64, cache fp8_576, products codes, lengths varied, batch_invariant "
         "1",
         "b 4, s_q 2, s_k 700, h_q 16, page_size 64, cache fp8_576, products fp8, codes nan, lengths varied",
         "b 1, s_q 3, s_k 4096, h_q 16, page_size 64, cache fp8_576, products fp8, causal 1, plan given, "
         "num_partitions 78, inputs spiked"},
    /* Causal masking, head groups and strides against problems without them. */
    .by_oracle = {SMALL "cache q, h_kv 2", SMALL "cache fp8_656, codes scales",
                  SMALL "cache fp8_584, d_qk 512, codes scales", SMALL "cache fp8_576, codes scales",
                  SMALL "cache fp8_656, codes scales, products fp8",
                  SMALL "cache fp8_576, codes scales, products codes"},
    .faults = (FAULT(MERGE_BASE) - 1) | FAULT(BATCH),
    .cpu_faults = FAULT(WRONG_SCALE),
    .fault_cases = fault_cases,
    .plant_before = plant_before,
    .plant_after = plant_key,
    .gpu = {.bases = {"", "d_qk 512", "cache fp8_576, products fp8"},
            .graph = {"b 6, s_q 2, s_k 5000, h_q 16, page_size 64, causal 1, layout padded"}, /* most pages */
            .next = {"lengths varied", "lengths varied", "lengths varied"},
            .repeats = {"b 6, s_q 2, s_k 4096, h_q 16, page_size 64, causal 1, lengths varied",
                        "b 128, s_k 1000, h_q 128, page_size 64",
                        "b 7, s_q 3, s_k 9000, h_q 11, page_size 61, layout odd, batch_invariant 1"},
            .positions = {"b 128, s_q 2, s_k 5000, h_q 16, page_size 64, causal 1, lengths varied",
                          "b 128, s_q 1, s_k 5000, h_q 128, page_size 64, causal 1, lengths varied"},
            .busy = "b 16, s_q 2, s_k 4096, h_q 64, page_size 64, causal 1, lengths varied, plan given",
            .foreign = "b 9, s_q 2, s_k 1500, h_q 64, page_size 64, causal 1, lengths varied, plan given, "
                       "num_partitions 13",
            .more = more_on_gpu},
    .timed = {"b 1, h_q 16, s_k 4096, page_size 64", "b 1, h_q 128, s_k 4096, page_size 64",
              "b 32, h_q 16, s_k 512, page_size 64"},
};

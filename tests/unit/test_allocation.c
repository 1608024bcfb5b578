/* SPDX-License-Identifier: MIT
 *
 * No operation allocates. The test stands in for malloc and its relatives (glibc lets a program do so, and keeps its own
 * under other names) and counts while the library works; on the caller's loop: the library's own starts threads at
 * first. The first call of each kind is not counted: it sets up what a process sets up once.
 */
#include "arguments.h"

#include <errno.h>
#include <stdatomic.h>

static atomic_long allocations;

void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *old, size_t size);
void *__libc_memalign(size_t alignment, size_t size);

void *malloc(size_t size)
{
    atomic_fetch_add(&allocations, 1);
    return __libc_malloc(size);
}

void *calloc(size_t count, size_t size)
{
    atomic_fetch_add(&allocations, 1);
    return __libc_calloc(count, size);
}

void *realloc(void *old, size_t size)
{
    atomic_fetch_add(&allocations, 1);
    return __libc_realloc(old, size);
}

void *aligned_alloc(size_t alignment, size_t size)
{
    atomic_fetch_add(&allocations, 1);
    return __libc_memalign(alignment, size);
}

int posix_memalign(void **memory, size_t alignment, size_t size)
{
    atomic_fetch_add(&allocations, 1);
    *memory = __libc_memalign(alignment, size);
    return *memory ? 0 : ENOMEM;
}

static void in_order(void *pool, int64_t count, fmla_task task, void *task_data)
{
    (void)pool;
    for (int64_t i = 0; i < count; i++) task(task_data, i, (int32_t)(i % 3));
}

/* ---- Calls ---------------------------------------------------------------------------------- */

enum { B = 3, H_Q = 4, D_QK = 576, D_V = 512, KEYS = 200, WORKSPACE = 4 << 20, PLAN = 4096 };

static _Alignas(64) uint16_t q_data[B * H_Q * D_QK], kv_data[B * KEYS * D_QK], out_data[B * H_Q * D_V];
static _Alignas(64) char workspace[WORKSPACE], plan[PLAN];
static int32_t lengths[B] = {200, 0, 130};
static float parts_data[2 * B * H_Q * D_V], lse_parts_data[2 * B * H_Q], merged_data[B * H_Q * D_V];

static fmla_status make_plan(const char *kernel)
{
    (void)kernel;
    struct held seqlens;
    HELD(&seqlens, lengths, i32, 1, B);
    fmla_decode_plan_args args = FMLA_INIT(fmla_decode_plan_args);
    args.seqlens = &seqlens.tensor, args.s_q = 1, args.h_q = H_Q, args.h_kv = 1, args.num_partitions = 3;
    args.plan = plan;
    const fmla_status status = fmla_decode_plan_size(&args, &args.plan_size);
    return status ? status : fmla_decode_plan(&args);
}

static fmla_status decode_with(const char *kernel, int32_t invariant, const void *with, size_t size)
{
    struct held q, kv, seqlens, out;
    HELD(&q, q_data, bf16, 4, B, 1, H_Q, D_QK);
    HELD(&kv, kv_data, bf16, 4, B, KEYS, 1, D_QK);
    HELD(&seqlens, lengths, i32, 1, B);
    HELD(&out, out_data, bf16, 4, B, 1, H_Q, D_V);
    fmla_dense_decode_args args = FMLA_INIT(fmla_dense_decode_args);
    args.q = &q.tensor, args.kv_cache = &kv.tensor, args.seqlens = &seqlens.tensor, args.out = &out.tensor;
    args.kernel = kernel, args.batch_invariant = invariant;
    args.plan = with, args.plan_size = size;
    args.workspace = workspace, args.workspace_size = sizeof workspace;
    return fmla_dense_decode(&args);
}

static fmla_status decode(const char *kernel)
{
    return decode_with(kernel, 0, plan, sizeof plan);
}

static fmla_status decode_unplanned(const char *kernel)
{
    return decode_with(kernel, 0, NULL, 0);
}

static fmla_status decode_invariant(const char *kernel)
{
    return decode_with(kernel, 1, NULL, 0);
}

static fmla_status sparse_with(const char *kernel, int32_t invariant)
{
    enum { TOKEN = 656, TOPK = 130 };
    static int32_t indices_data[B * TOPK];
    struct held q, kv, indices, length, out;
    for (int32_t i = 0; i < B * TOPK; i++) indices_data[i] = i % 150;
    HELD(&q, q_data, bf16, 4, B, 1, H_Q, D_QK);
    HELD(&kv, kv_data, ((fmla_dtype){FMLA_TYPE_UINT, 8, 1}), 4, 2, 100, 1, TOKEN);
    HELD(&indices, indices_data, i32, 3, B, 1, TOPK);
    HELD(&length, lengths, i32, 1, B);
    HELD(&out, out_data, bf16, 4, B, 1, H_Q, D_V);
    fmla_sparse_decode_args args = FMLA_INIT(fmla_sparse_decode_args);
    args.q = &q.tensor, args.kv_cache = &kv.tensor, args.indices = &indices.tensor;
    args.topk_length = &length.tensor, args.out = &out.tensor;
    args.kv_format = FMLA_KV_FP8_656, args.kernel = kernel, args.batch_invariant = invariant;
    args.workspace = workspace, args.workspace_size = sizeof workspace;
    return fmla_sparse_decode(&args);
}

static fmla_status sparse(const char *kernel)
{
    return sparse_with(kernel, 0);
}

static fmla_status sparse_invariant(const char *kernel)
{
    return sparse_with(kernel, 1);
}

static fmla_status prefill(const char *kernel)
{
    enum { TOPK = 130 };
    static int32_t indices_data[B * TOPK];
    static float max_data[B * H_Q];
    struct held q, kv, indices, length, out, max_logits;
    for (int32_t i = 0; i < B * TOPK; i++) indices_data[i] = i % 150;
    HELD(&q, q_data, bf16, 3, B, H_Q, D_QK);
    HELD(&kv, kv_data, bf16, 3, KEYS, 1, D_QK);
    HELD(&indices, indices_data, i32, 3, B, 1, TOPK);
    HELD(&length, lengths, i32, 1, B);
    HELD(&out, out_data, bf16, 3, B, H_Q, D_V);
    HELD(&max_logits, max_data, f32, 2, B, H_Q);
    fmla_sparse_prefill_args args = FMLA_INIT(fmla_sparse_prefill_args);
    args.q = &q.tensor, args.kv = &kv.tensor, args.indices = &indices.tensor;
    args.topk_length = &length.tensor, args.out = &out.tensor, args.max_logits = &max_logits.tensor;
    args.kernel = kernel, args.workspace = workspace, args.workspace_size = sizeof workspace;
    return fmla_sparse_prefill(&args);
}

static fmla_status merge(const char *kernel)
{
    struct held parts, lse, out;
    HELD(&parts, parts_data, f32, 5, 2, B, 1, H_Q, D_V);
    HELD(&lse, lse_parts_data, f32, 4, 2, B, H_Q, 1);
    HELD(&out, merged_data, f32, 4, B, 1, H_Q, D_V);
    fmla_merge_args args = FMLA_INIT(fmla_merge_args);
    args.out_parts = &parts.tensor, args.lse_parts = &lse.tensor, args.out = &out.tensor;
    args.kernel = kernel;
    return fmla_merge(&args);
}

enum { TOKENS = 70 };
static float vectors_data[TOKENS * 512];
static uint8_t cache_data[2 * 64 * 584];
static int64_t slots_data[TOKENS];

static fmla_status cache(const char *kernel, int gather)
{
    static const fmla_dtype i64 = {FMLA_TYPE_INT, 64, 1}, u8 = {FMLA_TYPE_UINT, 8, 1};
    struct held vectors, pages, slots;
    HELD(&vectors, vectors_data, f32, 2, TOKENS, 512);
    HELD(&pages, cache_data, u8, 4, 2, 64, 1, 584);
    HELD(&slots, slots_data, i64, 1, TOKENS);
    fmla_cache_append_args append = FMLA_INIT(fmla_cache_append_args);
    fmla_cache_gather_args gathered = FMLA_INIT(fmla_cache_gather_args);
    append.latent = gathered.out = &vectors.tensor, append.kv_cache = gathered.kv_cache = &pages.tensor;
    append.slot_mapping = gathered.slots = &slots.tensor;
    append.kv_format = gathered.kv_format = FMLA_KV_FP8_584;
    append.kernel = gathered.kernel = kernel;
    return gather ? fmla_cache_gather(&gathered) : fmla_cache_append(&append);
}

static fmla_status cache_append(const char *kernel)
{
    return cache(kernel, 0);
}

static fmla_status cache_gather(const char *kernel)
{
    return cache(kernel, 1);
}

/* Being refused allocates no more than being served. */
static fmla_status be_refused(const char *kernel)
{
    return decode_with(kernel, 2, NULL, 0) == FMLA_INVALID_ARGUMENT && *fmla_last_error() ? FMLA_OK
                                                                                          : FMLA_DEVICE_ERROR;
}

static void count(const char *what, const char *kernel, fmla_status (*run)(const char *kernel))
{
    CHECK(run(kernel) == FMLA_OK, "%s %s: %s", what, kernel, fmla_last_error());
    const long before = atomic_load(&allocations);
    const fmla_status status = run(kernel);
    const long after = atomic_load(&allocations);
    CHECK(status == FMLA_OK, "%s %s: %s", what, kernel, fmla_last_error());
    CHECK(after == before, "%s %s: %ld allocations", what, kernel, after - before);
}

int main(void)
{
    const fmla_device cpu = {FMLA_DEVICE_CPU, 0};
    /* A counter that counts nothing would pass everything. */
    const long before = atomic_load(&allocations);
    char *volatile planted = malloc(1);
    free(planted);
    CHECK(atomic_load(&allocations) > before, "%s", "the counter does not see malloc");

    unsetenv("FLASHMLA_KERNEL");
    CHECK_OK(fmla_set_parallel_for(in_order, NULL, 3));
    fmla_capability row = FMLA_INIT(fmla_capability);
    for (int64_t i = 0; fmla_capabilities(cpu, i, &row) == FMLA_OK; i++) {
        if (!row.available) continue;
        if (!strcmp(row.operation, "decode_plan")) count("plan", row.kernel, make_plan);
        if (!strcmp(row.operation, "merge")) count("merge", row.kernel, merge);
        if (!strcmp(row.operation, "sparse_decode")) {
            count("sparse decode", row.kernel, sparse);
            count("batch-invariant sparse decode", row.kernel, sparse_invariant);
        }
        if (!strcmp(row.operation, "sparse_prefill")) count("sparse prefill", row.kernel, prefill);
        if (!strcmp(row.operation, "cache_append")) count("append", row.kernel, cache_append);
        if (!strcmp(row.operation, "cache_gather")) count("gather", row.kernel, cache_gather);
        if (strcmp(row.operation, "dense_decode") != 0) continue;
        count("decode", row.kernel, decode);
        count("decode without a plan", row.kernel, decode_unplanned);
        count("batch-invariant decode", row.kernel, decode_invariant);
        count("a refusal", row.kernel, be_refused);
    }
    return check_done("test_allocation");
}

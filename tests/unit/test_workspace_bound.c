/* SPDX-License-Identifier: MIT
 *
 * The …_workspace_bound functions, on fake GPUs and on the CPU with several numbers of threads: no call up to the sizes takes more
 * than they answer, they do not fall as sizes grow, and some call takes half of it.
 *
 *     test_workspace_bound [BOUNDS [SEED]]    of each operation, device and kernel
 */
#include "fake_cuda/drawn_calls.h"

enum { CALLS_OF_BOUND = 20 };

static struct machine {
    int sms, capability; /* sms 0: the CPU */
    int threads;
} machine;
static fmla_device device;
static const char *kernel;
static char words[256];
static int64_t accepted;
static bool refused; /* the last query */

#define WORDS(...) snprintf(words, sizeof words, __VA_ARGS__)
#define HOLDS(condition)                                                                                     \
    CHECK(condition, "%s; %d SMs of %d, %d threads, %s: %s", words, machine.sms, machine.capability,         \
          machine.threads, kernel ? kernel : "as chosen", fmla_last_error())

/* ---- Calls of a shape --------------------------------------------------------------------------------- */

static size_t answer(fmla_status status, size_t bytes)
{
    refused = status == FMLA_UNSUPPORTED; /* past what can be counted, or by a kernel that was named */
    HOLDS(status == FMLA_OK || refused);
    return status ? 0 : bytes;
}

/* What the bound or the size of a call of a shape is; queries look at no data. */
#define ASK(name, operation)                                                                                 \
    static size_t name(const struct name##_shape *s, bool bound)                                             \
    {                                                                                                        \
        static struct drawn_##name c;                                                                        \
        size_t bytes = 0, alignment = 0;                                                                     \
        name##_of_shape(&c, s, device);                                                                      \
        c.args.kernel = kernel;                                                                              \
        const fmla_status status = bound ? fmla_##operation##_workspace_bound(&c.args, &bytes, &alignment)   \
                                         : fmla_##operation##_workspace_size(&c.args, &bytes, &alignment);   \
        return answer(status, bytes);                                                                        \
    }
ASK(dense, dense_decode)
ASK(sparse, sparse_decode)
ASK(prefill, sparse_prefill)

/* A size of a call, by the bound's. */
static int64_t less(int64_t most, int64_t lowest)
{
    const int64_t some = draw_one_in(3)   ? most
                         : draw_one_in(3) ? most / (1 + draw_below(4)) - draw_below(3)
                                          : draw_size(most > 0 ? most : 1);
    return draw_clamp(some, lowest, most);
}

/* Calls up to a bound may have any plan, with the partitions that the bound names or those of the default for their sizes; on
 * the CPU a plan in host memory would be read. */
static void other_plan(struct drawn_options *o)
{
    const struct drawn_options drawn = draw_options();
    o->plan = drawn.plan == PLAN_WHOLE && device.device_type == FMLA_DEVICE_CPU ? PLAN_NONE : drawn.plan;
    o->odd = drawn.odd, o->lse = drawn.lse, o->sink = drawn.sink;
}

static void plan_of_bound(struct drawn_options *o)
{
    o->odd = false;
    o->plan = o->num_partitions && draw_one_in(2) ? PLAN_TABLES : PLAN_NONE; /* whose rows name as many */
}

/* By the header, what a size query answers then grows with every size. */
static bool all_grow(const struct drawn_options *o)
{
    return o->batch_invariant || o->num_partitions;
}

static int64_t workers(void)
{
    return machine.sms ? machine.sms : machine.threads;
}

static void dense_bounds(void)
{
    struct dense_shape most = draw_dense(workers());
    plan_of_bound(&most.options);
    most.table = true;
    most.b = draw_clamp(most.b, 0, 1 << 14), most.max_pages = draw_clamp(most.max_pages, 0, 1 << 14);
    most.h_q = most.h_kv * draw_clamp(most.h_q / most.h_kv, 1, 1 << 10);
    WORDS("dense_decode up to b %" PRId64 ", s_q %" PRId64 ", h_q %" PRId64 " of %" PRId64 ", %" PRId64
          " pages of %" PRId64 "%s, %d partitions",
          most.b, most.s_q, most.h_q, most.h_kv, most.max_pages, most.page_size,
          most.options.batch_invariant ? ", batch-invariant" : "", most.options.num_partitions);
    const size_t bound = dense(&most, true);
    if (refused) return;
    accepted++;
    const size_t size = dense(&most, false);
    for (int i = 0; i < CALLS_OF_BOUND; i++) {
        struct dense_shape some = most;
        some.b = less(most.b, 0), some.s_q = less(most.s_q, 1);
        some.h_q = most.h_kv * less(most.h_q / most.h_kv, 1);
        some.pages = less(most.pages, 0), some.max_pages = less(most.max_pages, 0);
        HOLDS(dense(&some, true) <= bound);
        if (all_grow(&most.options)) HOLDS(dense(&some, false) <= size);
        struct dense_shape fewer = some;
        fewer.s_q = most.s_q, fewer.h_q = most.h_q;
        HOLDS(dense(&fewer, false) <= size);
        other_plan(&some.options);
        HOLDS(dense(&some, false) <= bound);
    }
}

static void sparse_bounds(void)
{
    struct sparse_shape most = draw_sparse(workers());
    plan_of_bound(&most.options);
    if (kernel && !strcmp(kernel, "cuda-sm90-16")) most.format = FMLA_KV_FP8_656, most.wide = true;
    if (kernel && !strncmp(kernel, "cuda-sm90", 9)) most.fp16 = most.format == FMLA_KV_FP16;
    most.b = draw_clamp(most.b, 0, 1 << 14), most.h_q = draw_clamp(most.h_q, 1, 1 << 12);
    most.topk = draw_clamp(most.topk, 0, 1 << 20), most.extra_topk = draw_clamp(most.extra_topk, 0, 1 << 20);
    WORDS("sparse_decode up to b %" PRId64 ", s_q %" PRId64 ", h_q %" PRId64 ", topk %" PRId64 " + %" PRId64
          "%s, %d partitions",
          most.b, most.s_q, most.h_q, most.topk, most.extra_topk,
          most.options.batch_invariant ? ", batch-invariant" : "", most.options.num_partitions);
    const size_t bound = sparse(&most, true);
    if (refused) return;
    accepted++;
    const size_t size = sparse(&most, false);
    for (int i = 0; i < CALLS_OF_BOUND; i++) {
        struct sparse_shape some = most;
        some.b = less(most.b, 0), some.s_q = less(most.s_q, 1), some.h_q = less(most.h_q, 1);
        some.topk = less(most.topk, 0), some.extra_topk = less(most.extra_topk, 0);
        if (draw_one_in(4)) some.extra = some.extra_lengths = false, some.extra_topk = 0;
        HOLDS(sparse(&some, true) <= bound);
        if (all_grow(&most.options)) HOLDS(sparse(&some, false) <= size);
        struct sparse_shape fewer = some;
        fewer.s_q = most.s_q, fewer.h_q = most.h_q;
        if (machine.capability != 90) HOLDS(sparse(&fewer, false) <= size);
        some.lengths = draw_one_in(2), some.extra_lengths = some.extra && draw_one_in(2);
        other_plan(&some.options);
        if (some.options.odd && kernel && !strncmp(kernel, "cuda-sm90", 9)) some.options.odd = false;
        HOLDS(sparse(&some, false) <= bound);
        /* A plan for batches of any size, of b 0. */
        fmla_sparse_plan_args plan = FMLA_INIT(fmla_sparse_plan_args);
        plan.s_q = some.s_q, plan.h_q = some.h_q, plan.target = device;
        if (most.options.num_partitions || device.device_type == FMLA_DEVICE_CPU) continue;
        HOLDS(fmla_sparse_plan_partitions(&plan, &some.options.num_partitions) == FMLA_OK);
        HOLDS(sparse(&some, false) <= bound);
    }
}

static void prefill_bounds(void)
{
    struct prefill_shape most = draw_prefill(workers());
    most.options.odd = false;
    most.topk = draw_clamp(most.topk, 0, 1 << 16);
    WORDS("sparse_prefill up to s_q %" PRId64 ", h_q %" PRId64 " of %" PRId64 ", topk %" PRId64, most.s_q,
          most.h_q, most.h_kv, most.topk);
    const size_t bound = prefill(&most, true);
    if (refused) return;
    accepted++;
    for (int i = 0; i < CALLS_OF_BOUND; i++) {
        struct prefill_shape some = most;
        some.s_q = less(most.s_q, 0), some.topk = less(most.topk, 0);
        some.h_q = most.h_kv * less(most.h_q / most.h_kv, 1);
        HOLDS(prefill(&some, true) <= bound);
        some.lengths = draw_one_in(2), some.options.lse = draw_one_in(2);
        HOLDS(prefill(&some, false) <= bound);
    }
}

/* ---- Half of a bound is taken ------------------------------------------------------------------------- */

/* Sizes that may take the most: of heads where tiles end, of lists by the block, of requests and tokens all. */
static const int64_t heads[] = {1, 2, 8, 15, 16, 17, 32, 48, 64, 65, 80, 96, 112, 128, 192, 256, 320, 384};
static const int64_t blocks[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 16, 18, 20, 24, 32, 64, 96};
enum { HEADS = sizeof heads / sizeof heads[0], BLOCKS = sizeof blocks / sizeof blocks[0] };

static void check_tight(size_t bound, size_t taken)
{
    /* 4096: what is rounded up. */
    CHECK(taken <= bound && bound <= 2 * taken + 4096, "%s; %d SMs of %d, %d threads: %zu, taken %zu", words,
          machine.sms, machine.capability, machine.threads, bound, taken);
}

static void tight_dense(int64_t b, int64_t s_q, int64_t h_q, int64_t h_kv)
{
    struct dense_shape s = {
        .b = b, .h_kv = h_kv, .pages = 64, .page_size = 64, .max_pages = 64, .table = true, .wide = true};
    size_t taken = 0;
    WORDS("dense_decode up to b %" PRId64 ", s_q %" PRId64 ", h_q %" PRId64 " of %" PRId64, b, s_q, h_q,
          h_kv);
    for (s.s_q = 1; s.s_q <= s_q; s.s_q++)
        for (s.h_q = h_kv; s.h_q <= h_q; s.h_q += h_kv) {
            const size_t bytes = dense(&s, false);
            if (bytes > taken) taken = bytes;
        }
    s.s_q = s_q, s.h_q = h_q;
    check_tight(dense(&s, true), taken);
}

static void tight_sparse(int64_t b, int64_t s_q, int64_t h_q, int64_t topk)
{
    struct sparse_shape s = {.page_size = 64, .format = FMLA_KV_FP8_656, .wide = true};
    size_t taken = 0;
    WORDS("sparse_decode up to b %" PRId64 ", s_q %" PRId64 ", h_q %" PRId64 ", topk %" PRId64, b, s_q, h_q,
          topk);
    for (s.s_q = 1; s.s_q <= s_q; s.s_q++)
        for (int h = 0; h < HEADS && heads[h] <= h_q; h++)
            for (int k = 0; k < BLOCKS && blocks[k] * 64 <= topk; k++)
                for (s.b = machine.sms ? 0 : b; s.b <= b; s.b++) {
                    s.h_q = heads[h], s.topk = blocks[k] * 64;
                    const size_t bytes = sparse(&s, false);
                    if (bytes > taken) taken = bytes;
                }
    s.b = b, s.s_q = s_q, s.h_q = h_q, s.topk = topk;
    check_tight(sparse(&s, true), taken);
}

static void tight_prefill(int64_t s_q, int64_t h_q, int64_t topk)
{
    struct prefill_shape s = {.h_kv = 1, .page_size = 64, .format = FMLA_KV_BF16, .wide = true};
    size_t taken = 0;
    WORDS("sparse_prefill up to s_q %" PRId64 ", h_q %" PRId64 ", topk %" PRId64, s_q, h_q, topk);
    for (s.s_q = 0; s.s_q <= s_q; s.s_q++)
        for (int h = 0; h < HEADS && heads[h] <= h_q; h++)
            for (int k = 0; k < BLOCKS && blocks[k] * 64 <= topk; k++) {
                s.h_q = heads[h], s.topk = blocks[k] * 64;
                const size_t bytes = prefill(&s, false);
                if (bytes > taken) taken = bytes;
            }
    s.s_q = s_q, s.h_q = h_q, s.topk = topk;
    check_tight(prefill(&s, true), taken);
}

static void tight(void)
{
    static const int64_t dense_sizes[][4] = {{1, 1, 16, 1},  {8, 1, 128, 1},    {300, 2, 128, 1},
                                             {64, 4, 64, 1}, {20000, 1, 64, 1}, {8, 2, 128, 2},
                                             {8, 4, 384, 3}, {8, 13, 320, 1}};
    static const int64_t sparse_sizes[][4] = {{1, 1, 64, 2048},  {1, 1, 128, 2048}, {1, 2, 16, 64},
                                              {300, 1, 16, 640}, {300, 1, 64, 256}, {40, 3, 128, 1024},
                                              {80, 1, 128, 64},  {33, 2, 32, 192}};
    static const int64_t prefill_sizes[][3] = {{1, 128, 2048}, {1, 64, 64},     {16, 64, 128},
                                               {5, 320, 6144}, {120, 128, 640}, {300, 64, 2048}};
    for (size_t i = 0; i < sizeof dense_sizes / sizeof dense_sizes[0]; i++)
        tight_dense(dense_sizes[i][0], dense_sizes[i][1], dense_sizes[i][2], dense_sizes[i][3]);
    for (size_t i = 0; i < sizeof sparse_sizes / sizeof sparse_sizes[0]; i++)
        tight_sparse(sparse_sizes[i][0], sparse_sizes[i][1], sparse_sizes[i][2], sparse_sizes[i][3]);
    for (size_t i = 0; i < sizeof prefill_sizes / sizeof prefill_sizes[0]; i++)
        tight_prefill(prefill_sizes[i][0], prefill_sizes[i][1], prefill_sizes[i][2]);
}

/* They refuse what the size queries refuse, in the same words, and answer what they are asked for. */
static void refusals(void)
{
    static struct drawn_sparse c;
    struct sparse_shape s = {
        .b = 2, .s_q = 1, .h_q = 16, .topk = 64, .page_size = 64, .format = FMLA_KV_BF16};
    size_t bytes = 77, alignment = 0;
    check_rejected("NULL", fmla_dense_decode_workspace_bound(NULL, &bytes, &alignment), FMLA_INVALID_ARGUMENT,
                   "dense_decode", "args", "is NULL");
    check_rejected("NULL", fmla_sparse_decode_workspace_bound(NULL, &bytes, &alignment),
                   FMLA_INVALID_ARGUMENT, "sparse_decode", "args", "is NULL");
    check_rejected("NULL", fmla_sparse_prefill_workspace_bound(NULL, &bytes, &alignment),
                   FMLA_INVALID_ARGUMENT, "sparse_prefill", "args", "is NULL");
    sparse_of_shape(&c, &s, device);
    c.indices.shape[0] = 3;
    check_rejected("another b", fmla_sparse_decode_workspace_bound(&c.args, &bytes, &alignment),
                   FMLA_INVALID_ARGUMENT, "sparse_decode", "indices", "b|3|2");
    CHECK(bytes == 77 && alignment == 0, "%s", "a refusal answered something");
    sparse_of_shape(&c, &s, device);
    c.q.tensor.data = c.kv.tensor.data = c.indices.tensor.data = c.out.tensor.data = NULL;
    CHECK(fmla_sparse_decode_workspace_bound(&c.args, &bytes, NULL) == FMLA_OK &&
              fmla_sparse_decode_workspace_bound(&c.args, NULL, &alignment) == FMLA_OK,
          "%s", fmla_last_error());
    CHECK(bytes != 77 && alignment == (machine.sms ? 256 : 64), "%zu bytes at %zu", bytes, alignment);
}

/* ---- All of it ---------------------------------------------------------------------------------------- */

static void on_machine(int64_t bounds, uint64_t seed)
{
    static const char *const gpu[][6] = {{NULL, "cuda-sm80"}, {NULL, "cuda"}, {NULL, "cuda"}};
    static const char *const hopper[][6] = {{NULL, "cuda-sm90", "cuda-sm80"},
                                            {NULL, "cuda-sm90", "cuda-sm90-64", "cuda-sm90-16", "cuda"},
                                            {NULL, "cuda-sm90", "cuda"}};
    static const char *const on_cpu[][6] = {
        {NULL, "cpu-generic", "ref"}, {NULL, "cpu-generic", "ref"}, {NULL, "cpu-generic", "ref"}};
    static void (*const operations[])(void) = {dense_bounds, sparse_bounds, prefill_bounds};
    device = (fmla_device){machine.sms ? FMLA_DEVICE_CUDA : FMLA_DEVICE_CPU, 0};
    if (machine.sms) {
        fake_open();
        fake->sms = machine.sms, fake->capability = machine.capability;
    } else {
        CHECK_OK(fmla_set_num_threads(machine.threads));
    }
    refusals();
    tight();
    for (size_t i = 0; i < sizeof operations / sizeof operations[0]; i++) {
        const char *const *const kernels = !machine.sms               ? on_cpu[i]
                                           : machine.capability == 90 ? hopper[i]
                                                                      : gpu[i];
        for (int k = 0; !k || kernels[k]; k++) {
            accepted = 0;
            for (int64_t n = 0; n < bounds; n++) {
                kernel = kernels[k];
                draw_from(seed, (uint64_t)n * 16 + i);
                operations[i]();
            }
            HOLDS(accepted >= bounds / 4);
        }
        kernel = NULL;
    }
}

int main(int argc, char **argv)
{
    static const struct machine machines[] = {{132, 90, 0}, {2, 90, 0},  {78, 90, 0}, {148, 100, 0},
                                              {66, 80, 0},  {0, 0, 1},   {0, 0, 2},   {0, 0, 6},
                                              {0, 0, 30},   {0, 0, 128}, {0, 0, 97}};
    enum { MACHINES = sizeof machines / sizeof machines[0] };
    int64_t numbers[] = {300, 1};
    const int mine = fake_numbers(argc, argv, numbers, 2);
    if (mine >= 0) {
        machine = machines[mine % MACHINES];
        on_machine(numbers[0], (uint64_t)numbers[1]);
        return check_failures != 0;
    }
    for (int i = 0; i < MACHINES; i++) {
        const int status = fake_again(argv, "--machine", i);
        CHECK(!status, "%d SMs of %d, %d threads: ended with %x", machines[i].sms, machines[i].capability,
              machines[i].threads, (unsigned)status);
    }
    return check_done("test_workspace_bound");
}

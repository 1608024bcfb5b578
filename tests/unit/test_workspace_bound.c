/* SPDX-License-Identifier: MIT
 *
 * Tests the …_workspace_bound functions, on fake GPUs and on the CPU with several numbers of threads: no call
 * up to the sizes takes more than the bound, bounds do not fall as sizes grow, and some call takes half of
 * it. refusals.h tests their refusals with all other queries of an operation.
 *
 * test_workspace_bound [BOUNDS [SEED]]    of each operation, device and kernel
 */
#include "cuda/mha_splits.h"
#include "fake_cuda/drawn_calls.h"

enum { CALLS_OF_BOUND = 20 };

static struct machine {
    int sms, capability; /* sms 0: the CPU */
    int threads;
} machine;
static fmla_device device;
static enum operation operation;
static const char *kernel; /* NULL: any */
static char words[512];
static bool refused; /* the last query */

#define HOLDS(condition)                                                                                     \
    CHECK(condition, "up to %s; %d SMs of %d, %d threads, %s: %s", words, machine.sms, machine.capability,   \
          machine.threads, kernel ? kernel : "as chosen", fmla_last_error())

/* ---- Calls of a shape --------------------------------------------------------------------------------- */

/* Returns the bound, or the size of a call, for a shape; queries read no data. */
static size_t ask(const struct shape *s, bool bound)
{
    static struct held held[MAX_TENSORS];
    static _Alignas(16) char args[MOST_ARGS];
    struct answer answer = {0};
    make_call(operation, args, held, s, device);
    *(const char **)option_at(operation, args, "kernel") = kernel;
    const fmla_status status = described_ask(operation, bound ? ASK_BOUND : ASK_BYTES, args, &answer);
    refused = status == FMLA_UNSUPPORTED; /* beyond countable sizes, or refused by a named kernel */
    const bool oracle = kernel && !strcmp(kernel, "ref");
    const size_t alignment = machine.sms ? 256 : oracle ? 16 : 64;
    HOLDS(refused || (status == FMLA_OK && answer.alignment == alignment));
    return status ? 0 : answer.bytes;
}

/* Draws a size of a call up to the bound's. */
static int64_t less(int64_t most, int64_t lowest)
{
    const int64_t some = draw_one_in(3)   ? most
                         : draw_one_in(3) ? most / (1 + draw_below(4)) - draw_below(3)
                                          : draw_size(most > 0 ? most : 1);
    return draw_clamp(some, lowest, most);
}

/* Calls up to a bound may have any plan, with the partitions that the bound names or the default ones for
 * their sizes; on the CPU a plan in host memory would be read. */
static void other_plan(struct shape *s)
{
    struct shape drawn = {0};
    draw_options(&drawn);
    const bool read = drawn.plan == PLAN_WHOLE && device.device_type == FMLA_DEVICE_CPU;
    s->plan = read ? PLAN_NONE : drawn.plan, s->odd = drawn.odd;
    s->of.has = (s->of.has & ~(unsigned)(HAS_LSE | HAS_SINK)) | drawn.of.has;
}

static int64_t workers(void)
{
    return machine.sms ? machine.sms : machine.threads;
}

static int64_t key_heads(const struct layout *l)
{
    return operation == OP_SPARSE_DECODE ? 1 : l->h_kv;
}

/* Draws the sizes of a bound. */
static struct shape draw_most(void)
{
    struct shape most = draw_shape(operation, workers());
    struct layout *const l = &most.of;
    const bool hopper = kernel && !strncmp(kernel, "cuda-sm90", 9), sparse = operation == OP_SPARSE_DECODE;
    most.odd = false;
    const bool codes_alone = kernel && !strcmp(kernel, "cuda-sm90-fp8");
    if (operation == OP_DENSE_DECODE &&
        (draw_one_in(3) || codes_alone)) { /* FP8 products, whose queries take workspace */
        l->h_q = draw_clamp(l->h_q / l->h_kv, 1, 1 << 10), l->h_kv = 1;
        l->products = codes_alone && draw_one_in(2) ? FMLA_PRODUCTS_BF16 : FMLA_PRODUCTS_FP8,
        l->codes = l->products && draw_one_in(3), l->type = bf16, l->d_qk = 576;
        l->format = l->codes || draw_one_in(2) ? FMLA_KV_FP8_576 : FMLA_KV_FP8_656;
    }
    most.plan =
        l->num_partitions && draw_one_in(2) ? PLAN_TABLES : PLAN_NONE; /* whose rows give that number */
    l->has |= HAS_TABLE;
    if (sparse && hopper) {
        if (!strcmp(kernel, "cuda-sm90-16") && l->format < FMLA_KV_FP8_656)
            l->format = FMLA_KV_FP8_656, l->d_qk = 0, l->extra_format = 0;
        if (l->extra_format && l->extra_format < FMLA_KV_FP8_656) l->extra_format = 0; /* of other types */
        l->type = l->format == FMLA_KV_FP16 ? fp16 : bf16;
    }
    if (operation != OP_SPARSE_PREFILL) {
        const int64_t group = draw_clamp(l->h_q / key_heads(l), 1, sparse ? 1 << 12 : 1 << 10);
        l->h_q = group * key_heads(l), l->b = draw_clamp(l->b, 0, 1 << 14);
    }
    if (operation_is_mha(operation)) l->splits = l->b + 1;
    l->max_pages = draw_clamp(l->max_pages, 0, 1 << 14);
    l->topk = draw_clamp(l->topk, 0, sparse ? 1 << 20 : 1 << 16);
    l->extra_topk = draw_clamp(l->extra_topk, 0, 1 << 20);
    return most;
}

/* Checks sparse decode with a plan for batches of any size, of b 0. */
static void check_plan_of_any(const struct shape *most, struct shape some, size_t bound)
{
    fmla_sparse_plan_args plan = FMLA_INIT(fmla_sparse_plan_args);
    plan.s_q = some.of.s_q, plan.h_q = some.of.h_q, plan.target = device;
    if (most->of.num_partitions || device.device_type == FMLA_DEVICE_CPU) return;
    HOLDS(fmla_sparse_plan_partitions(&plan, &some.of.num_partitions) == FMLA_OK);
    HOLDS(ask(&some, false) <= bound);
}

/* Returns the most bytes of the sums of dK and dV over the query heads of key heads in a call with fewer key heads. */
static size_t most_sums(const struct layout *l)
{
    enum { KEYS_OF_BLOCK = 128, COUNTERS_OF_BLOCK = 16 };
    if (operation != OP_MHA_BACKWARD || machine.capability != 90 || !l->causal) return 0;
    const int64_t blocks = l->flat ? l->tokens_k / KEYS_OF_BLOCK + l->splits + 1 /* splits: b + 1 */
                                   : l->b * ((l->s_k + KEYS_OF_BLOCK - 1) / KEYS_OF_BLOCK);
    return (size_t)(blocks * (l->h_q / 2)) *
           (size_t)(4 * KEYS_OF_BLOCK * (l->d_qk + l->d_v) + 4 * COUNTERS_OF_BLOCK);
}

/* Returns the most bytes of the parts of dense MHA's splits where it chooses them; 0 elsewhere. */
static size_t most_parts(const struct layout *l)
{
    if (operation != OP_MHA_FORWARD || !machine.sms || l->num_splits) return 0;
    const int64_t rows = (l->flat ? l->tokens_q : l->b * l->s_q) * l->h_q,
                  of_sm = machine.capability == 90 ? 192 : 2 * 128, /* of one tile, of two */
        room = MHA_WAVES_OF_PARTS * workers() * of_sm,
                  all = rows * (l->batch_dependent ? MHA_MOST_SPLITS : MHA_MOST_INVARIANT_SPLITS);
    return (size_t)(l->batch_dependent && room < all ? room : all) * (size_t)(4 * l->d_v + 8);
}

/* Returns true if the bound was answered. */
static bool check_bound(void)
{
    static const enum dimension vary[] = {DIM_b,          DIM_pages, DIM_max_pages, DIM_topk,
                                          DIM_extra_topk, DIM_s_k,   DIM_tokens_q,  DIM_tokens_k};
    const struct shape most = draw_most();
    const bool prefill = operation == OP_SPARSE_PREFILL, sparse = operation == OP_SPARSE_DECODE,
               mha = operation_is_mha(operation);
    shape_in_words(operation, &most, words, sizeof words);
    const size_t bound = ask(&most, true);
    if (refused) return false;
    const size_t size = ask(&most, false), parts = most_parts(&most.of);
    const bool grows = mha && !parts; /* with the sizes that vary, as the header promises */
    if (mha)
        HOLDS(bound <= 2 * size + 4096 + parts + most_sums(&most.of)); /* smaller calls do not take more */
    for (int i = 0; i < CALLS_OF_BOUND; i++) {
        struct shape some = most;
        for (size_t k = 0; k < sizeof vary / sizeof vary[0]; k++)
            some.of.size[vary[k]] = less(most.of.size[vary[k]], 0);
        some.of.s_q = less(most.of.s_q, prefill || mha ? 0 : 1);
        if (mha) some.of.splits = some.of.b + 1;
        some.of.h_q = key_heads(&most.of) * less(most.of.h_q / key_heads(&most.of), 1);
        if (draw_one_in(4)) some.of.has &= ~(unsigned)(HAS_EXTRA | HAS_EXTRA_LENGTHS), some.of.extra_topk = 0;
        HOLDS(ask(&some, true) <= bound);
        /* The header promises that size queries then grow with every size. */
        if (grows || (!prefill && !mha && (most.of.batch_invariant || most.of.num_partitions)))
            HOLDS(ask(&some, false) <= size);
        struct shape fewer = some;
        fewer.of.s_q = most.of.s_q, fewer.of.h_q = most.of.h_q;
        if (!prefill && !parts && !(sparse && machine.capability == 90)) HOLDS(ask(&fewer, false) <= size);
        some.of.has ^=
            draw_bits_of(HAS_LENGTHS) | (some.of.has & HAS_EXTRA ? draw_bits_of(HAS_EXTRA_LENGTHS) : 0);
        other_plan(&some);
        if (prefill || some.of.products || (sparse && kernel && !strncmp(kernel, "cuda-sm90", 9)))
            some.odd = false;
        HOLDS(ask(&some, false) <= bound);
        if (sparse) check_plan_of_any(&most, some, bound);
    }
    return true;
}

/* ---- Half of a bound is taken ------------------------------------------------------------------------- */

/* Sizes that may take the most workspace: head counts at which tiles end (all in dense decode), list
 * lengths by blocks, all requests and tokens. */
static int64_t heads_of(int i, const struct layout *most)
{
    static const int64_t heads[] = {1,  2,  8,  15,  16,  17,  32,  48,  64,
                                    65, 80, 96, 112, 128, 192, 256, 320, 384};
    if (operation == OP_DENSE_DECODE) return (i + 1) * most->h_kv;
    return i < (int)(sizeof heads / sizeof heads[0]) ? heads[i] : INT64_MAX;
}

static void check_tight(struct layout most)
{
    static const int64_t blocks[] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9, 10,
                                     11, 12, 14, 16, 18, 20, 24, 32, 64, 96};
    enum { BLOCKS = sizeof blocks / sizeof blocks[0] };
    const bool sparse = operation == OP_SPARSE_DECODE;
    size_t taken = 0;
    struct shape s = {.of = most};
    s.of.page_size = 64, s.of.max_pages = s.of.pages = 64, s.of.has = HAS_TABLE;
    s.of.flat = operation == OP_SPARSE_PREFILL;
    s.of.format = sparse                           ? FMLA_KV_FP8_656
                  : operation == OP_SPARSE_PREFILL ? FMLA_KV_BF16
                  : most.products                  ? FMLA_KV_FP8_576
                                                   : 0;
    const struct shape all = s;
    shape_in_words(operation, &all, words, sizeof words);
    for (s.of.s_q = operation == OP_SPARSE_PREFILL ? 0 : 1; s.of.s_q <= most.s_q; s.of.s_q++)
        for (int i = 0; (s.of.h_q = heads_of(i, &most)) <= most.h_q; i++)
            for (int k = 0; k < BLOCKS && (s.of.topk = blocks[k] * 64) <= most.topk; k++)
                for (s.of.b = sparse && machine.sms ? 0 : most.b; s.of.b <= most.b; s.of.b++) {
                    const size_t bytes = ask(&s, false);
                    if (bytes > taken) taken = bytes;
                }
    const size_t bound = ask(&all, true);
    /* 4096: rounding. */
    CHECK(taken <= bound && bound <= 2 * taken + 4096, "up to %s; %d SMs of %d, %d threads: %zu, taken %zu",
          words, machine.sms, machine.capability, machine.threads, bound, taken);
}

static void tight(void)
{
    static const int64_t sizes[][5] = {
        /* b, s_q, h_q, h_kv, topk; b 0: prefill, topk 0: dense decode, < 0: with FP8 products */
        {1, 1, 16, 1, 0},     {8, 1, 128, 1, 0},    {300, 2, 128, 1, 0},   {64, 4, 64, 1, 0},
        {20000, 1, 64, 1, 0}, {8, 2, 128, 2, 0},    {8, 4, 384, 3, 0},     {8, 13, 320, 1, 0},
        {8, 1, 128, 1, -1},   {300, 2, 128, 1, -1}, {1, 1, 64, 1, 2048},   {1, 1, 128, 1, 2048},
        {1, 2, 16, 1, 64},    {300, 1, 16, 1, 640}, {300, 1, 64, 1, 256},  {40, 3, 128, 1, 1024},
        {80, 1, 128, 1, 64},  {33, 2, 32, 1, 192},  {0, 1, 128, 1, 2048},  {0, 1, 64, 1, 64},
        {0, 16, 64, 1, 128},  {0, 5, 320, 1, 6144}, {0, 120, 128, 1, 640}, {0, 300, 64, 1, 2048}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        const int64_t *const s = sizes[i];
        operation = !s[0] ? OP_SPARSE_PREFILL : s[4] > 0 ? OP_SPARSE_DECODE : OP_DENSE_DECODE;
        check_tight(SHAPE_OF(layout, .b = s[0], .s_q = s[1], .h_q = s[2], .h_kv = s[3],
                             .topk = s[4] > 0 ? s[4] : 0,
                             .products = s[4] < 0 ? FMLA_PRODUCTS_FP8 : FMLA_PRODUCTS_BF16));
    }
}

/* Bytes or alignment may be queried alone. */
static void one_answer(void)
{
    struct sparse_decode_call c;
    size_t bytes = 0, alignment = 0;
    const struct layout layout = SHAPE_OF(layout, .b = 2, .s_q = 1, .h_q = 16, .topk = 64, .page_size = 64);
    sparse_decode_make(&c, &layout, device);
    CHECK_OK(fmla_sparse_decode_workspace_bound(&c.args, &bytes, NULL));
    CHECK_OK(fmla_sparse_decode_workspace_bound(&c.args, NULL, &alignment));
    CHECK(bytes && alignment == (machine.sms ? 256 : 64), "%zu bytes at %zu", bytes, alignment);
}

/* ---- All of it ---------------------------------------------------------------------------------------- */

/* Returns true if the operation has a kernel for the device. test_cuda_others.c lists the operations
 * without one. */
static bool has_kernel(void)
{
    fmla_capability row = FMLA_INIT(fmla_capability);
    for (int64_t i = 0; fmla_capabilities(device, i, &row) == FMLA_OK; i++)
        if (row.kernel && !strcmp(row.operation, descriptors[operation].name)) return true;
    return false;
}

/* Checks every kernel, and dispatch's choice. */
static void check_bounds(int64_t bounds, uint64_t seed)
{
    fmla_capability row = FMLA_INIT(fmla_capability);
    for (int64_t i = -1; i < 0 || fmla_capabilities(device, i, &row) == FMLA_OK; i++) {
        int64_t accepted = 0;
        kernel = i < 0 ? NULL : row.kernel;
        if (i >= 0 && (!kernel || !row.available || strcmp(row.operation, descriptors[operation].name) != 0))
            continue;
        for (int64_t n = 0; n < bounds; n++) {
            draw_from(seed, (uint64_t)n * 16 + operation);
            accepted += check_bound();
        }
        HOLDS(accepted >= bounds / 4);
    }
    kernel = NULL;
}

static void on_machine(int64_t bounds, uint64_t seed)
{
    device = (fmla_device){machine.sms ? FMLA_DEVICE_CUDA : FMLA_DEVICE_CPU, 0};
    if (machine.sms) {
        fake_open();
        fake->sms = machine.sms, fake->capability = machine.capability;
    } else {
        CHECK_OK(fmla_set_num_threads(machine.threads));
    }
    one_answer();
    tight();
    for (operation = 0; operation < OPERATIONS; operation++)
        if (described_member(operation, "workspace") && has_kernel()) check_bounds(bounds, seed);
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
    return fake_machines(argv, MACHINES, "test_workspace_bound");
}

/* SPDX-License-Identifier: MIT
 *
 * Tests into how many splits the CPU cuts the keys of dense MHA, by the items of its loops, and that neither threads
 * nor other requests change the bits of a request that is split.
 */
#include "filled.h"

enum { LOOPS = 3, BYTES = 1 << 17 };

static const char *const names[] = {"cpu-avx512", "cpu-avx2", "cpu-generic"};

/* ---- Calls ------------------------------------------------------------------------------------ */

static int64_t items[LOOPS]; /* of the loops of a call */
static int loops;
static bool only_counts;

/* Runs the last item first, or none if only their number matters. */
static void loop(void *pool, int64_t count, fmla_task task, void *task_data)
{
    (void)pool;
    if (loops < LOOPS) items[loops] = count;
    loops++;
    for (int64_t i = only_counts ? 0 : count; i-- > 0;) task(task_data, i, 0);
}

struct sizes {
    int64_t b, s_q, s_k, h_q, h_kv;
    int32_t num_splits, workers;
};

/* Makes a call; `alone`: of request 0 only. Writes its result to `out`, the first request's first. */
static void run(const struct sizes *s, bool alone, bool causal, char out[BYTES])
{
    static struct held held[MAX_TENSORS];
    _Alignas(16) char args[512];
    const struct layout layout =
        DESIGNATED(.b = alone ? 1 : s->b, .s_q = s->s_q, .s_k = s->s_k, .h_q = s->h_q, .h_kv = s->h_kv,
                   .d_qk = 64, .d_v = 64, .causal = causal, .num_splits = s->num_splits, .type = bf16,
                   .has = HAS_LSE);
    named_make(OP_MHA_FORWARD, args, held, &layout, place_filled);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *kernel;
        *(const char **)option_at(OP_MHA_FORWARD, args, "kernel") = names[i];
        if (fmla_mha_forward_kernel((const fmla_mha_forward_args *)(void *)args, &kernel) == FMLA_OK) break;
    }
    loops = 0;
    fmla_set_parallel_for(loop, NULL, s->workers);
    CHECK(!run_in_room(OP_MHA_FORWARD, args), "%s", fmla_last_error());
    const struct held *const result = &held[TENSOR_mha_forward_out];
    memcpy(out, result->tensor.data, bytes_of(result) < BYTES ? bytes_of(result) : BYTES);
    for (int i = 0; described_tensor(OP_MHA_FORWARD, i); i++) free(held[i].tensor.data);
}

/* ---- Items -------------------------------------------------------------------------------------- */

static void test_items(void)
{
    static const struct {
        struct sizes s;
        int64_t items[LOOPS]; /* of a loop of tiles; or of splits, and of their joins */
    } all[] = {
        {{1, 64, 32768, 1, 1, 0, 2}, {8, 8}},       /* splits of 4096 keys */
        {{1, 64, 32768, 1, 1, 0, 30}, {8, 8}},      /* whatever the threads */
        {{1, 64, 32768, 1, 1, 0, 1}, {1}},          /* one thread takes them in turn */
        {{1, 64, 32768, 1, 1, 1, 2}, {1}},          /* none wanted */
        {{1, 64, 32768, 1, 1, 5, 2}, {5, 5}},       /* as many as wanted */
        {{1, 64, 300, 1, 1, 64, 2}, {5, 5}},        /* at most the blocks of keys */
        {{1, 64, 8191, 1, 1, 0, 2}, {1}},           /* too few keys */
        {{1, 256, 65536, 2, 1, 0, 2}, {128, 128}},  /* 16 splits of 8 tiles, which have 256 splits at most */
        {{1, 512, 65536, 1, 1, 0, 30}, {128, 128}}, /* the same */
        {{1, 4032, 8192, 1, 1, 0, 30}, {126, 126}}, /* 63 tiles */
        {{1, 4096, 8192, 1, 1, 0, 30}, {64}},       /* 64 tiles are enough */
        {{1, 960, 8192, 4, 4, 0, 2}, {16}},         /* 16 tiles of 256 rows are enough for two threads */
        {{15, 3, 8192, 1, 1, 0, 2}, {30, 30}},      /* each request by itself */
        {{16, 3, 8192, 1, 1, 0, 2}, {16}},          {{1, 1024, 1024, 4, 4, 0, 2}, {16}}, /* a square */
    };
    static char out[BYTES];
    only_counts = true;
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        run(&all[i].s, false, false, out);
        const int64_t *const wanted = all[i].items;
        CHECK(loops == (wanted[1] ? 2 : 1) && items[0] == wanted[0] && (!wanted[1] || items[1] == wanted[1]),
              "call %zu: %d loops, of %" PRId64 " and %" PRId64 " items", i, loops, items[0], items[1]);
    }
}

/* ---- Bits ----------------------------------------------------------------------------------------- */

static void test_bits(void)
{
    static const struct sizes all[] = {
        {3, 3, 8300, 4, 2, 0, 0}, {2, 130, 500, 2, 1, 7, 0}, {20, 2, 300, 3, 1, 2, 0}};
    static char one[BYTES], other[BYTES];
    only_counts = false;
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        for (int causal = 0; causal < 2; causal++) {
            struct sizes s = all[i];
            const size_t bytes = (size_t)(s.s_q * s.h_q * 64) * sizeof(uint16_t);
            s.workers = 1, run(&s, false, causal, one);
            for (s.workers = 1; s.workers < 200; s.workers = 5 * s.workers + 1) {
                run(&s, false, causal, other);
                CHECK(!memcmp(one, other, bytes * (size_t)s.b), "call %zu, %d workers: other bits", i,
                      s.workers);
                run(&s, true, causal, other);
                CHECK(!memcmp(one, other, bytes), "call %zu, %d workers: other bits alone", i, s.workers);
            }
        }
}

int main(void)
{
    unsetenv("FLASHMLA_KERNEL");
    test_items();
    test_bits();
    return check_done("test_mha_splits");
}

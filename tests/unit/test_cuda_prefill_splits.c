/* SPDX-License-Identifier: MIT
 *
 * Tests the host side of sparse prefill on Hopper: which tiles of a call are split by keys and, for FP8
 * pages, which lists, the parameters of the splits, and their workspace.
 */
#include "fake_cuda/launches.h"

#include "cuda/sm90/sparse_prefill/choice.h"

#include "random.h"

enum { SMS = 132 /* of the fake GPU, a Hopper */, TILE = 64, BLOCK = 64 };

/* Makes a call of one key head with lists of `topk` entries. */
static void call_of(struct sparse_prefill_call *c, int64_t s_q, int64_t h_q, int64_t topk)
{
    prefill_call(c, s_q, h_q, 1);
    c->indices.shape[2] = topk, c->indices.strides[1] = topk, c->indices.strides[0] = topk;
    c->args.workspace_size = SIZE_MAX / 2;
}

static void call_of_pages(struct sparse_prefill_call *c, int64_t s_q, int64_t h_q, int64_t topk)
{
    call_of(c, s_q, h_q, topk);
    c->args.kv_format = FMLA_KV_FP8_656;
    HELD(&c->kv, region(1), ((fmla_dtype){FMLA_TYPE_UINT, 8, 1}), 4, 9, 64, 1, 656);
    c->kv.tensor.device = c->q.tensor.device;
}

static size_t size_of(const struct sparse_prefill_call *c)
{
    size_t size = 77, alignment = 0;
    CHECK_OK(fmla_sparse_prefill_workspace_size(&c->args, &size, &alignment));
    CHECK(alignment && !(alignment & (alignment - 1)), "alignment is %zu", alignment);
    return size;
}

/* ---- Which tiles ------------------------------------------------------------------------------- */

static void check_splits(int64_t tiles, int64_t topk, int32_t sms)
{
    const struct prefill_splits splits = sm90_sparse_prefill_splits(tiles, topk, sms);
    const int64_t blocks = (topk + BLOCK - 1) / BLOCK, rest = tiles - splits.whole;
    if (splits.of_tile == 1) {
        CHECK_EQ(rest, 0);
        return;
    }
    const int64_t most = (blocks + splits.of_tile - 1) / splits.of_tile;
    CHECK(rest > 0 && rest < sms && splits.whole % sms == 0, "%lld tiles: %d are whole", (long long)tiles,
          splits.whole);
    CHECK(splits.of_tile <= MOST_PREFILL_SPLITS && rest * splits.of_tile <= sms, "%lld tiles in %d splits",
          (long long)rest, splits.of_tile);
    CHECK((splits.of_tile - 1) * most < blocks && blocks - most >= 3, "%lld blocks in %d splits",
          (long long)blocks, splits.of_tile);
    for (int64_t n = 0; n < rest * splits.of_tile; n++)
        CHECK_EQ((int64_t)((uint64_t)n * splits.divisor.multiplier >> splits.divisor.shift),
                 n / splits.of_tile);
}

static void which_tiles(void)
{
    static const struct {
        int64_t tiles, topk;
        int32_t whole, splits;
    } examples[] = {
        {1, 2048, 0, 32},  /* one block per split */
        {4, 2048, 0, 32},  /* the join's maximum */
        {16, 2048, 0, 8},  /* as many CTAs as SMs: 8 splits */
        {15, 2048, 0, 8},  /* not 8.8: splits of four blocks give 8 */
        {66, 2048, 0, 2},  /* two splits each */
        {67, 2048, 67, 1}, /* not enough SMs for all */
        {132, 2048, 132, 1},
        {140, 2048, 132, 16},
        {8 * 132 - 100, 2048, 7 * 132, 4},
        {8 * 132 + 4, 2048, 8 * 132 + 4, 1}, /* long */
        {1, 256, 0, 4},
        {1, 192, 1, 1}, /* two blocks saved */
        {4, 0, 4, 1},
        {0, 2048, 0, 1},
    };
    for (size_t i = 0; i < sizeof examples / sizeof *examples; i++) {
        const struct prefill_splits splits =
            sm90_sparse_prefill_splits(examples[i].tiles, examples[i].topk, SMS);
        CHECK_ALL({splits.whole, examples[i].whole}, {splits.of_tile, examples[i].splits});
    }
    struct random_state random = {1};
    for (int i = 0; i < 20000; i++)
        check_splits(random_between(&random, 0, 3000),
                     random_between(&random, 0, 1 << random_between(&random, 0, 20)),
                     (int32_t)random_between(&random, 1, 160));
}

/* ---- What is launched -------------------------------------------------------------------------- */

/* Tiles that are split, and their join, whose launch depends on that of the splits. */
static void launches(void)
{
    static const struct {
        int64_t s_q, h_q, topk, whole, splits;
    } cases[] = {
        {1, 64, 2048, 0, 32}, {3, 80, 4096, 0, 22}, {140, 64, 2048, 132, 16}, {70, 128, 300, 132, 5}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct sparse_prefill_call c;
        call_of(&c, cases[i].s_q, cases[i].h_q, cases[i].topk);
        const int64_t rest = cases[i].s_q * ((cases[i].h_q + TILE - 1) / TILE) - cases[i].whole;
        RUNS(sparse_prefill, &c, "sm90_sparse_prefill_bf16_576_splits|sm90_sparse_prefill_join%s", "");
        const struct prefill_splits splits = PARAMS(sparse_prefill_sm90_params, launched(1)).splits;
        CHECK_ALL({splits.whole, cases[i].whole}, {splits.of_tile, cases[i].splits},
                  {offset(splits.parts, REGION_OF_WORKSPACE), 0},
                  {c.bytes, rest * cases[i].splits * PREFILL_PART_BYTES});
    }
}

/* ---- Lists over FP8 pages ----------------------------------------------------------------------- */

static const struct fake_launch *launch_of_pages(struct sparse_prefill_call *c, const char *kernel)
{
    const int before = fake->launches;
    CHECK_OK(fmla_sparse_prefill(&c->args));
    CHECK_EQ(fake->launches, before + 1);
    CHECK(!strcmp(fake->launch[before].kernel, kernel), "%s", fake->launch[before].kernel);
    return &fake->launch[before];
}

/* Lists of few tokens are split, one split per SM, and the CTAs join the splits themselves; if the CTAs
 * cannot all be resident, lists stay whole. */
static void lists(void)
{
    static const char whole[] = "sm90_sparse_prefill_fp8_656",
                      split[] = "sm90_sparse_prefill_fp8_656_together";
    static const struct {
        int64_t tokens, heads, topk, keys, parts; /* keys: per split; 0: lists stay whole */
    } all[] = {{1, 128, 2048, 64, 32},   {16, 128, 2048, 512, 4}, {33, 64, 2048, 512, 4},
               {1, 64, 12800, 128, 100}, {1, 16, 256, 64, 4},     {64, 128, 2048, 0, 1},
               {67, 64, 2048, 0, 1},     {1, 64, 192, 0, 1}};
    uint64_t ticket = 0;
    for (int i = 0; i < (int)(sizeof all / sizeof all[0]); i++) {
        const int64_t tiles = (all[i].heads + TILE - 1) / TILE, parts = all[i].tokens * all[i].parts;
        struct sparse_prefill_call c;
        call_of_pages(&c, all[i].tokens, all[i].heads, all[i].topk);
        const struct fake_launch *const launch = launch_of_pages(&c, all[i].keys ? split : whole);
        const struct sparse_prefill_fp8_params p = PARAMS(sparse_prefill_fp8_params, launch);
        const struct sparse_decode_params *const call = &p.decode.call;
        CHECK_ALL({launch->config.grid_x, parts * tiles}, {call->b, all[i].tokens}, {call->s_q, 1},
                  {call->tiles, tiles}, {joins_in_kernel(launch), all[i].keys > 0});
        if (!all[i].keys) continue;
        CHECK_ALL({call->split.split_keys, all[i].keys}, {call->split.even_splits, all[i].parts});
        CHECK(p.decode.ticket != ticket, "%d: two launches have the same ticket", i);
        ticket = p.decode.ticket;
        fake->fails[CALL_cuLaunchKernelEx] = CU_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE,
        fake->once[CALL_cuLaunchKernelEx] = 1;
        launch_of_pages(&c, whole);
        CHECK_EQ(fake_depth(), 0);
    }
}

/* ---- How much workspace ------------------------------------------------------------------------- */

static void too_small(void)
{
    struct sparse_prefill_call c;
    call_of(&c, 1, 64, 2048);
    c.args.workspace_size = size_of(&c) - 1;
    check_rejected("a byte too few", fmla_sparse_prefill(&c.args), FMLA_BUFFER_TOO_SMALL, "sparse_prefill",
                   "workspace_size", "must be at least 2179072 bytes");
    c.args.workspace_size = size_of(&c), c.args.workspace = region(REGION_OF_WORKSPACE) + 16;
    check_rejected("not aligned", fmla_sparse_prefill(&c.args), FMLA_INVALID_ARGUMENT, "sparse_prefill",
                   "workspace", "aligned");
    CHECK_EQ(fake->launches, 0);
}

/* The workspace for calls of few tokens; another kernel does not use it. Nothing if no kernel would split. */
static void of_kernels(void)
{
    struct sparse_prefill_call c;
    call_of(&c, 1, 64, 2048);
    CHECK_EQ((int64_t)size_of(&c), 32 * (int64_t)PREFILL_PART_BYTES);
    c.args.kernel = "cuda";
    CHECK_OK(fmla_sparse_prefill(&c.args));
    CHECK_EQ(fake->launches, 1);
    call_of(&c, 0, 64, 2048);
    CHECK_EQ((int64_t)size_of(&c), 0);
    call_of_pages(&c, 1, 64, 192); /* too few to be split */
    CHECK_EQ((int64_t)size_of(&c), 0);
}

static void elsewhere(void)
{
    fake->capability = 100;
    struct sparse_prefill_call c;
    call_of(&c, 1, 64, 2048);
    c.args.workspace = NULL, c.args.workspace_size = 0;
    CHECK_EQ((int64_t)size_of(&c), 0);
    CHECK_OK(fmla_sparse_prefill(&c.args));
    CHECK_EQ(fake->launches, 1);
}

/* Tokens in two launches; the second, of one token, is split. */
static void many_tokens(void)
{
    struct sparse_prefill_call c;
    call_of(&c, INT32_MAX, 64, 2048);
    CHECK_OK(fmla_sparse_prefill(&c.args));
    const int64_t first = PARAMS(sparse_prefill_sm90_params, &fake->launch[0]).call.s_q;
    call_of(&c, first + 1, 64, 2048);
    const int before = fake->launches;
    CHECK_EQ((int64_t)size_of(&c), 32 * (int64_t)PREFILL_PART_BYTES);
    CHECK_OK(fmla_sparse_prefill(&c.args));
    CHECK_EQ(fake->launches, before + 3);
    const struct sparse_prefill_sm90_params all = PARAMS(sparse_prefill_sm90_params, &fake->launch[before]),
                                            last =
                                                PARAMS(sparse_prefill_sm90_params, &fake->launch[before + 1]);
    CHECK_ALL({all.call.s_q, first}, {all.splits.of_tile, 1}, {last.call.s_q, 1}, {last.splits.of_tile, 32},
              {last.items, 32}, {(const char *)last.call.out - region(5), first * 64 * 512 * 2});
}

int main(int argc, char **argv)
{
    return RUN_SCENARIOS(argc, argv, "test_cuda_prefill_splits", which_tiles, launches, lists, too_small,
                         of_kernels, elsewhere, many_tokens);
}

/* SPDX-License-Identifier: MIT
 *
 * Tests the host side of dense MHA on a GPU: the kernel chosen, Hopper's tiles of rows, the count of tiles in
 * the workspace, splits, the tile shapes of the portable kernels, and the launches of gradients without
 * requests. What kernels are passed of a call's tensors: test_cuda_random.c.
 */
#include "fake_cuda/launches.h"

#include "cuda/kernels.h"
#include "cuda/mha_splits.h"
#include "cuda/sm80/mha_backward/shape.h"
#include "cuda/sm80/mha_forward/shape.h"
#include "cuda/sm90/mha_forward/choice.h"

enum {
    B = 3,
    S_Q = 300,
    S_K = 500,
    H_Q = 8,
    H_KV = 2,
    D_QK = 192,
    D_V = 128,
    TOKENS_Q = 700,
    TOKENS_K = 900
};
enum { ROWS = MHA_SM90_ROWS(D_QK), KEYS = MHA_SM90_KEYS(D_QK) };

static void apart(struct mha_forward_call *c, int64_t s_q, int64_t h_q, int64_t h_kv)
{
    const struct layout layout = SHAPE_OF(layout, .b = B, .s_q = s_q, .s_k = S_K, .h_q = h_q, .h_kv = h_kv,
                                          .d_qk = D_QK, .d_v = D_V, .causal = 1, .has = HAS_LSE);
    mha_forward_make(c, &layout, gpu_number(0));
}

static void ragged_of(struct mha_forward_call *c, int64_t tokens)
{
    const struct layout layout =
        SHAPE_OF(layout, .flat = true, .b = B, .splits = B + 1, .tokens_q = tokens, .tokens_k = TOKENS_K,
                 .h_q = H_Q, .h_kv = H_KV, .d_qk = D_QK, .d_v = D_V, .has = HAS_LSE);
    mha_forward_make(c, &layout, gpu_number(0));
}

static void ragged(struct mha_forward_call *c)
{
    ragged_of(c, TOKENS_Q);
}

static struct mha_forward_sm90_params hopper(struct mha_forward_call *c)
{
    const int before = fake->launches;
    c->args.kernel = "cuda-sm90";
    CHECK_OK(mha_forward_run(c));
    CHECK_EQ(fake->launches - before, 1);
    CHECK(!strncmp(launched(0)->kernel, "sm90_mha_forward_", 17), "%s", launched(0)->kernel);
    return PARAMS(mha_forward_sm90_params, launched(0));
}

/* ---- Tiles ------------------------------------------------------------------------------------ */

/* Heads share a tile if a head has too few tokens for its own tiles. */
static void tiles(void)
{
    static const struct {
        int64_t s_q, h_q, h_kv, heads;
    } all[] = {{1, 128, 1, 128}, {1, 8, 2, 4},  {16, 8, 2, 4},  {S_Q, 8, 8, 1}, {128, 8, 2, 1},
               {32, 8, 2, 4},    {33, 8, 2, 4}, {300, 8, 2, 4}, {2, 400, 1, 1}, {1, 10, 2, 5}};
    for (int i = 0; i < (int)(sizeof all / sizeof *all); i++) {
        struct mha_forward_call c;
        apart(&c, all[i].s_q, all[i].h_q, all[i].h_kv);
        const struct mha_forward_sm90_params p = hopper(&c);
        const int64_t heads = all[i].heads, tokens = ROWS / heads;
        const int64_t count = B * ((all[i].s_q + tokens - 1) / tokens) * all[i].h_q / heads;
        CHECK_ALL({p.heads_of_tile, heads}, {passed_of(&p.q)->box[1], heads},
                  {passed_of(&p.q)->box[2], tokens}, {passed_of(&p.k)->box[1], KEYS},
                  {passed_of(&p.k)->box[2], 1}, {passed_of(&p.k)->box[3], D_QK / 64},
                  {passed_of(&p.v)->box[1], KEYS}, {passed_of(&p.v)->box[3], D_V / 64},
                  {launched(0)->config.grid_x, count < fake->sms ? count : fake->sms},
                  {p.tile_counters != NULL, count > fake->sms});
    }
}

/* Tiles of ragged requests, and so the bits of split ones, follow from what the caller says of one request, not from
 * the tokens of all; by the batch they follow from these too. Heads share tiles that are as many as without, unless all
 * requests are as long. */
static void tiles_of_ragged(void)
{
    static const struct {
        int32_t max_s_q, batch_dependent, tokens, heads;
    } all[] = {{128, 0, 128 * B, 4}, {129, 0, 700, 4},  {1024, 0, 700, 4},      {0, 0, 700, 4},
               {128, 1, 128 * B, 1}, {256, 1, 700, 4},  {256, 1, 128 * B, 4},   {256, 1, 256 * B, 1},
               {128, 1, 2 * B, 4},   {1024, 1, 700, 4}, {2048, 1, 1024 * B, 4}, {0, 1, 700, 4}};
    for (int i = 0; i < (int)(sizeof all / sizeof *all); i++) {
        struct mha_forward_call c;
        ragged_of(&c, all[i].tokens);
        c.args.max_s_q = all[i].max_s_q, c.args.batch_dependent = all[i].batch_dependent,
        c.args.num_splits = 1;
        CHECK(hopper(&c).heads_of_tile == all[i].heads, "row %d", i);
    }
}

/* Launches have distinct tickets; a call of few tiles counts none. */
static void tile_counters(void)
{
    struct mha_forward_call c;
    apart(&c, 4 * ROWS * fake->sms, H_Q, H_KV);
    const struct mha_forward_sm90_params first = hopper(&c), second = hopper(&c);
    CHECK((void *)first.tile_counters == region(REGION_OF_WORKSPACE) && first.ticket && second.ticket &&
              first.ticket != second.ticket,
          "%s", "tickets");
    CHECK_EQ(c.bytes, 256);
    apart(&c, 0, H_Q, H_KV);
    const int before = fake->launches;
    CHECK_OK(mha_forward_run(&c));
    CHECK_EQ(fake->launches, before);
}

/* Without keys rows are still written, and strides of the key tensor mean nothing. */
static void no_keys(void)
{
    struct mha_forward_call c;
    apart(&c, S_Q, H_Q, H_KV);
    c.k.shape[1] = c.v.shape[1] = 0;
    CHECK_EQ(hopper(&c).call.s_k, 0);
    ragged(&c);
    c.k.shape[0] = c.v.shape[0] = 0;
    CHECK_EQ(hopper(&c).call.tokens_k, 0);
}

/* ---- Splits ------------------------------------------------------------------------------------ */

/* The fake GPU has 132 SMs. */
static const struct split_case {
    int64_t b, s_q, s_k, h_q, h_kv;
    int32_t batch_dependent, num_splits;
    int64_t splits, part_rows; /* 1 and 0: not split */
} split_cases[] = {
    {1, 128, 65536, 16, 16, 0, 0, 8, 8 * 128 * 16},     /* 16 tiles: 128 of 132 SMs */
    {1, 512, 8192, 16, 16, 0, 0, 2, 2 * 512 * 16},      /* 64 tiles */
    {1, 16, 65536, 32, 4, 0, 0, 16, 16 * 16 * 32},      /* 4 tiles; 16 is the most of a request by itself */
    {1, 512, 65536, 32, 4, 0, 0, 1, 0},                 /* 128 tiles */
    {1, 128, 512, 16, 16, 0, 0, 1, 0},                  /* 4 blocks */
    {7, 128, 65536, 16, 16, 0, 0, 8, 7 * 8 * 128 * 16}, /* as alone */
    {1, 512, 65536, 32, 4, 0, 3, 3, 3 * 512 * 32},
    {1, 128, 65536, 16, 16, 0, 1, 1, 0},
    {7, 128, 65536, 16, 16, 1, 0, 1, 0}, /* 112 tiles */
};

static void make_split_case(struct mha_forward_call *c, const struct split_case *of, int64_t d_qk)
{
    const struct layout layout = SHAPE_OF(layout, .b = of->b, .s_q = of->s_q, .s_k = of->s_k, .h_q = of->h_q,
                                          .h_kv = of->h_kv, .d_qk = d_qk, .d_v = D_V, .has = HAS_LSE);
    mha_forward_make(c, &layout, gpu_number(0));
    c->args.batch_dependent = of->batch_dependent, c->args.num_splits = of->num_splits;
}

static void splits(void)
{
    for (int i = 0; i < (int)(sizeof split_cases / sizeof *split_cases); i++) {
        const struct split_case *const want = &split_cases[i];
        struct mha_forward_call c;
        make_split_case(&c, want, D_QK);
        const bool split = want->splits > 1;
        RUNS(mha_forward, &c, "sm90_mha_forward_bf16_192%s",
             split ? "_splits|sm90_mha_forward_join_bf16_192" : "");
        const struct mha_forward_sm90_params p = PARAMS(mha_forward_sm90_params, launched(split));
        CHECK_ALL({p.splits, want->splits}, {p.part_rows, want->part_rows}, {p.part_out != NULL, split},
                  {(int64_t)c.bytes, 256 + want->part_rows * (4 * D_V + 8)});
    }
}

/* By the batch all requests have splits of as many blocks: here 10 tiles in 26 splits each, for two CTAs an SM. Ragged requests are split
 * by themselves only if no request can have more tiles than there are SMs. */
static void splits_of_a_batch(void)
{
    struct mha_forward_call c;
    const struct layout layout = SHAPE_OF(layout, .b = 5, .s_q = 3, .s_k = 65536, .h_q = 8, .h_kv = 2,
                                          .d_qk = D_QK, .d_v = D_V, .has = HAS_LSE);
    mha_forward_make(&c, &layout, gpu_number(0));
    c.args.batch_dependent = 1;
    struct mha_forward_sm90_params p;
    RUNS(mha_forward, &c, "sm90_mha_forward_bf16_192_few|sm90_mha_forward_join_bf16_192");
    p = PARAMS(mha_forward_sm90_params, launched(1));
    CHECK_ALL({p.splits, 0}, {p.blocks_of_split, 40}, {p.most_splits, 26}, {p.part_rows, 26 * 5 * 3 * 8});
    static const struct {
        int64_t max_s_q;
        bool split;
    } all[] = {{0, false}, {100, true}, {1 << 20, false}};
    for (int i = 0; i < 3; i++) {
        ragged(&c);
        c.k.shape[0] = c.v.shape[0] = 65536;
        c.args.max_s_q = all[i].max_s_q;
        RUNS(mha_forward, &c, "sm90_mha_forward_bf16_192%s",
             all[i].split ? "_splits|sm90_mha_forward_join_bf16_192" : "");
        p = PARAMS(mha_forward_sm90_params, launched(all[i].split));
        CHECK_ALL({p.splits, !all[i].split}, {p.blocks_of_split, 0}, {p.sms, fake->sms});
    }
}

/* By the batch, calls of at most 64 rows of a key head take tiles of few rows, two CTAs an SM, where tiles of either kind
 * are split. */
static void few_rows(void)
{
    static const struct {
        struct split_case of;
        int64_t d_qk;
        const char *suffix;
    } all[] = {
        {{1, 64, 8192, 16, 16, 1, 0, 0, 0}, 192, "_few"},
        {{1, 65, 8192, 16, 16, 1, 0, 0, 0}, 192, "_splits"},
        {{1, 16, 8192, 8, 2, 1, 0, 0, 0}, 192, "_few"},
        {{1, 17, 8192, 8, 2, 1, 0, 0, 0}, 192, "_splits"},
        {{9, 1, 8192, 12, 1, 1, 0, 0, 0}, 64, "_few"},
        {{1, 1, 8192, 65, 1, 1, 0, 0, 0}, 64, "_splits"},
        {{4, 1, 8192, 16, 16, 1, 0, 0, 0}, 96, "_few"},
        {{2, 1, 8192, 32, 4, 1, 0, 0, 0}, 128, "_few"},
        {{1, 1, 8192, 16, 16, 1, 0, 0, 0}, 256, "_splits"},
        {{1, 16, 8192, 8, 2, 0, 0, 0, 0}, 192, "_splits"},
        {{1, 16, 8192, 8, 2, 1, 3, 0, 0}, 192, "_splits"},
        {{1, 16, 256, 8, 2, 1, 0, 0, 0}, 192, ""},
        {{1, 64, 8192, 8, 2, 1, 0, 0, 0}, 192, "_splits"},
        {{1, 1, 8192, 128, 1, 1, 0, 0, 0}, 128, "_splits"},
        {{1, 1, 8192, 128, 128, 1, 0, 0, 0}, 192, ""},
    };
    for (int i = 0; i < (int)(sizeof all / sizeof *all); i++) {
        const struct split_case *const of = &all[i].of;
        const int64_t d_qk = all[i].d_qk, d_v = d_qk == 192 ? 128 : d_qk == 96 ? 64 : d_qk;
        struct mha_forward_call c;
        const struct layout layout =
            SHAPE_OF(layout, .b = of->b, .s_q = of->s_q, .s_k = of->s_k, .h_q = of->h_q, .h_kv = of->h_kv,
                     .d_qk = d_qk, .d_v = d_v, .has = HAS_LSE);
        mha_forward_make(&c, &layout, gpu_number(0));
        c.args.batch_dependent = of->batch_dependent, c.args.num_splits = of->num_splits;
        char join[64] = "";
        const bool split = *all[i].suffix, few = !strcmp(all[i].suffix, "_few");
        if (split) snprintf(join, sizeof join, "|sm90_mha_forward_join_bf16_%d", (int)d_qk);
        RUNS(mha_forward, &c, "sm90_mha_forward_bf16_%d%s%s", (int)d_qk, all[i].suffix, join);
        const struct fake_launch *const launch = launched(split);
        const struct mha_forward_sm90_params p = PARAMS(mha_forward_sm90_params, launch);
        CHECK_EQ(p.few_rows, few);
        if (!few) continue;
        CHECK_ALL({p.tile_tokens, MHA_SM90_FEW_ROWS / p.heads_of_tile}, {p.part_rows > 0, 1},
                  {passed_of(&p.q)->box[2], p.tile_tokens},
                  {passed_of(&p.k)->box[1], MHA_SM90_FEW_KEYS(d_qk)},
                  {passed_of(&p.v)->box[1], MHA_SM90_FEW_KEYS(d_qk)},
                  {launch->config.grid_x <= 2 * (unsigned)fake->sms, 1},
                  {launch->config.block_x, MHA_SM90_FEW_THREADS}, {p.sms, fake->sms});
    }
}

/* At 128/128 calls with a causal mask or a sink, or with one tile of at most 96 blocks for most SMs, take the kernel with
 * splits without splits: nothing is joined. */
static void kernel_with_splits(void)
{
    static const struct {
        int64_t s_q, s_k, d_qk;
        bool sink, causal, with;
    } all[] = {
        {1024, 4096, 128, false, false, true},   /* 128 tiles of 32 blocks */
        {1024, 16384, 128, false, false, false}, /* of 128 blocks */
        {512, 4096, 128, false, false, false},   /* 64 tiles */
        {2048, 4096, 128, false, false, false},  /* 256 tiles */
        {2048, 4096, 128, true, false, true},    /* the same, with a sink */
        {2048, 4096, 128, false, true, true},    /* with a mask */
        {1024, 4096, 192, true, true, false},    /* elsewhere each kernel has all */
    };
    for (int i = 0; i < (int)(sizeof all / sizeof *all); i++) {
        struct mha_forward_call c;
        const struct layout layout = SHAPE_OF(
            layout, .b = 1, .s_q = all[i].s_q, .s_k = all[i].s_k, .h_q = 16, .h_kv = 16, .d_qk = all[i].d_qk,
            .d_v = 128, .causal = all[i].causal, .has = HAS_LSE | (all[i].sink ? HAS_SINK : 0));
        mha_forward_make(&c, &layout, gpu_number(0));
        c.args.num_splits = 1;
        RUNS(mha_forward, &c, "sm90_mha_forward_bf16_%d%s", (int)all[i].d_qk, all[i].with ? "_splits" : "");
        const struct mha_forward_sm90_params p = PARAMS(mha_forward_sm90_params, launched(0));
        CHECK_ALL({p.splits, 1}, {p.part_rows, 0}, {p.call.output.rules.attn_sink != NULL, all[i].sink});
    }
}

/* ---- Padding ----------------------------------------------------------------------------------- */

/* Results of padding are written by a launch after those of any kernel. Hopper's kernel with splits clears Q's. */
static void padding(void)
{
    static const char *const kernels[][2] = {{"cuda", "mha_forward_bf16"},
                                             {"cuda-sm80", "sm80_mha_forward_bf16_192"},
                                             {"cuda-sm90", "sm90_mha_forward_bf16_192"}};
    for (int i = 0; i < 6; i++) {
        struct mha_forward_call c;
        const bool flat = i % 2;
        (flat ? ragged(&c) : apart(&c, S_Q, H_Q, H_KV));
        c.args.kernel = kernels[i / 2][0];
        c.args.seqused_k = &c.seqused_k.tensor;
        RUNS(mha_forward, &c, "%s", kernels[i / 2][1]);
        c.args.seqused_q = &c.seqused_q.tensor;
        RUNS(mha_forward, &c, "%s%s|mha_padding", kernels[i / 2][1], i / 2 == 2 ? "_splits" : "");
        const struct mha_padding_params p = PARAMS(mha_padding_params, launched(0));
        CHECK_ALL({p.used == c.seqused_q.tensor.data, 1}, {p.starts != NULL, flat}, {p.b, B}, {p.heads, H_Q},
                  {flat ? p.tokens : p.extent, flat ? TOKENS_Q : S_Q}, {p.to[0].data == c.out.tensor.data, 1},
                  {p.width[0], D_V}, {p.to[1].data == NULL, 1}, {p.to[0].token, H_Q * D_V},
                  {p.to[0].head, D_V}, {p.aligned, 1}, {p.lse == c.lse.tensor.data, 1},
                  {p.lse_of_empty > 0.0f, 1}, GRID(launched(0), B * p.slices, 32 * MHA_WARPS, 0));
        CHECK(p.slices == (8 * fake->sms + B - 1) / B, "%d CTAs of a request", p.slices);
        c.out.tensor.byte_offset = 2, c.args.kernel = "cuda";
        RUNS(mha_forward, &c, "%s", "mha_forward_bf16|mha_padding");
        CHECK_EQ(PARAMS(mha_padding_params, launched(0)).aligned, 0);
    }
}

/* A CTA takes several requests where there are more than CTAs. */
static void padding_of_many_requests(void)
{
    for (int i = 0; i < 3; i++) {
        const int64_t ctas = 8 * fake->sms, b = i == 0 ? ctas : i == 1 ? ctas + 1 : 5 * ctas - 1;
        struct mha_forward_call c;
        const struct layout layout = SHAPE_OF(layout, .b = b, .s_q = 1, .s_k = 1, .h_q = 1, .h_kv = 1,
                                              .d_qk = D_QK, .d_v = D_V, .has = HAS_LSE | HAS_USED);
        mha_forward_make(&c, &layout, gpu_number(0));
        c.args.kernel = "cuda";
        RUNS(mha_forward, &c, "mha_forward_bf16|mha_padding");
        const struct mha_padding_params p = PARAMS(mha_padding_params, launched(0));
        CHECK_ALL({p.b, b}, {p.slices, 1},
                  {p.requests, i == 0   ? 1
                               : i == 1 ? 2
                                        : 5},
                  GRID(launched(0), (b + p.requests - 1) / p.requests, 32 * MHA_WARPS, 0));
    }
}

/* Lengths in use are not known to the host: each request is split by its own, in the kernel. */
static void splits_of_used_lengths(void)
{
    for (int of_q = 0; of_q < 2; of_q++) {
        struct mha_forward_call c;
        const struct layout layout = SHAPE_OF(layout, .b = 1, .s_q = 128, .s_k = 65536, .h_q = 16, .h_kv = 16,
                                              .d_qk = D_QK, .d_v = D_V, .has = HAS_LSE | HAS_USED);
        mha_forward_make(&c, &layout, gpu_number(0));
        if (of_q)
            c.args.seqused_k = NULL;
        else
            c.args.seqused_q = NULL;
        RUNS(mha_forward, &c, "sm90_mha_forward_bf16_192_splits|sm90_mha_forward_join_bf16_192%s",
             of_q ? "|mha_padding" : "");
        const struct mha_forward_sm90_params p = PARAMS(mha_forward_sm90_params, launched(1 + of_q));
        CHECK_ALL({p.splits, 0}, {p.blocks_of_split, 0}, {p.most_splits, 16}, {p.part_rows, 16 * 128 * 16});
    }
}

/* ---- Which kernel ------------------------------------------------------------------------------- */

static void check_hopper(const char *what, const struct mha_forward_call *c)
{
    const char *const kernel = kernel_of(OP_MHA_FORWARD, &c->args);
    CHECK(!strcmp(kernel, "cuda-sm90"), "%s: %s", what, kernel);
}

/* The kernel does not depend on how many requests, tokens or keys there are: a request alone has the bits that it
 * has in any batch. */
static void any_batch(void)
{
    static const int64_t tokens[] = {1, 16, 129}, heads[] = {8, 44, 88}, keys[] = {1, 128, 257, 513, 4096};
    struct mha_forward_call c;
    for (int i = 0; i < 3 * 3 * 5; i++) {
        apart(&c, tokens[i % 3], heads[i / 3 % 3], heads[i / 3 % 3]);
        c.k.shape[1] = c.v.shape[1] = keys[i / 9];
        check_hopper("a batch", &c);
        c.q.shape[0] = c.k.shape[0] = c.v.shape[0] = c.out.shape[0] = c.lse.shape[0] = 1;
        check_hopper("a request alone", &c);
    }
    ragged(&c);
    check_hopper("300 keys on average", &c);
    c.k.shape[0] = c.v.shape[0] = 128 * B;
    check_hopper("128 keys on average", &c);
}

/* What Hopper's kernel refuses another takes: the one with tensor cores or, if that refuses it too, the one
 * without. */
#define REFUSED_TO(other, argument, words, ...)                                                              \
    do {                                                                                                     \
        struct mha_forward_call c;                                                                           \
        apart(&c, S_Q, H_Q, H_KV);                                                                           \
        __VA_ARGS__;                                                                                         \
        check_left(#__VA_ARGS__, OP_MHA_FORWARD, &c.args, "cuda-sm90", other, argument, words);              \
        if (strcmp(other, "cuda") != 0) break;                                                               \
        CHECK(!strcmp(launched(0)->kernel, "mha_forward_bf16"), "%s", launched(0)->kernel);                  \
        CHECK_ALL(GRID(launched(0), B *S_Q *H_Q / MHA_WARPS, 32 * MHA_WARPS, 0));                            \
        check_left(#__VA_ARGS__, OP_MHA_FORWARD, &c.args, "cuda-sm80", other, argument, words);              \
    } while (0)
#define REFUSED(...) REFUSED_TO("cuda", __VA_ARGS__)

static void refused(void)
{
    struct mha_forward_call taken;
    apart(&taken, S_Q, H_Q, H_KV);
    check_hopper("as it is", &taken);
    REFUSED("q", "base and strides|16 bytes", c.q.tensor.byte_offset = 8);
    REFUSED("q", "base and strides|16 bytes", c.q.strides[1] = H_Q * D_QK + 4);
    REFUSED("k", "base and strides|16 bytes", c.k.strides[1] = H_KV * D_QK + 2);
    REFUSED_TO("cuda-sm80", "k", "base and strides|16 bytes", c.k.strides[0] = 0);
    REFUSED("v", "base and strides|16 bytes", c.v.tensor.byte_offset = 2);
    REFUSED_TO("cuda-sm80", "out", "base and strides|16 bytes", c.out.tensor.byte_offset = 8);
    REFUSED("softmax_scale", "at least 1e-30", c.args.softmax_scale = -0.1f);
    REFUSED("v", "takes d_qk/d_v of 256/256, 192/128, 128/128, 96/64 and 64/64",
            c.v.shape[3] = c.out.shape[3] = 64);
}

/* Strides between tokens count where requests have one each, too. */
static void out_of_single_tokens(void)
{
    struct mha_forward_call c;
    ragged(&c);
    c.args.max_s_q = c.args.num_splits = 1, c.out.strides[0] = H_Q * D_V + 1;
    RUNS(mha_forward, &c, "sm80_mha_forward_bf16_192");
    const struct mha_forward_sm80_params p = PARAMS(mha_forward_sm80_params, launched(0));
    CHECK_ALL({p.out_aligned, 0}, {p.call.output.pairs_aligned, 0});
}

/* ---- The portable kernel with tensor cores ------------------------------------------------------- */

static struct mha_forward_sm80_params portable(struct mha_forward_call *c, const char *kernel)
{
    c->args.kernel = "cuda-sm80";
    CHECK_OK(mha_forward_run(c));
    CHECK(!strcmp(launched(0)->kernel, kernel), "%s", launched(0)->kernel);
    return PARAMS(mha_forward_sm80_params, launched(0));
}

/* A CTA has a tile of 128 rows of a head, or of all heads of a key head if there are few tokens. */
static void tiles_of_sm80(void)
{
    enum { MANY = 1024 };
    struct mha_forward_call c;
    apart(&c, MANY, H_Q, H_KV);
    struct mha_forward_sm80_params p = portable(&c, "sm80_mha_forward_bf16_192");
    CHECK_ALL({p.heads_of_tile, 1}, {p.tile_tokens, 128}, {p.units, H_Q}, {p.units_of_key_head, H_Q / H_KV},
              {p.out_aligned, 1}, GRID(launched(0), B * MANY / 128 * H_Q, 128, MHA_SM80_BYTES(192, 128, 48)));
    c.out.tensor.byte_offset = 8;
    CHECK_EQ(portable(&c, "sm80_mha_forward_bf16_192").out_aligned, 0);
    apart(&c, 1, H_Q, H_KV);
    p = portable(&c, "sm80_mha_forward_bf16_192");
    CHECK_ALL({p.heads_of_tile, H_Q / H_KV}, {p.tile_tokens, 32}, {p.units, H_KV}, {p.units_of_key_head, 1});
    ragged(&c);
    portable(&c, "sm80_mha_forward_bf16_192");
    CHECK_EQ(launched(0)->config.grid_x, (TOKENS_Q / 32 + B) * H_KV);
}

/* As an A100: at 128/128 two CTAs share each of 108 SMs, at 192/128 an SM has one. */
static void be_a100(void)
{
    fake->capability = 80, fake->sms = 108, fake->shared_bytes = 163 * 1024;
}

static const struct portable_split_case {
    int64_t d_qk;
    struct split_case of;
} portable_split_cases[] = {
    {128, {1, 128, 65536, 16, 16, 0, 0, 13, 13 * 128 * 16}}, /* 16 tiles of 1366 blocks */
    {128, {1, 512, 8192, 16, 16, 0, 0, 3, 3 * 512 * 16}},    /* 64 tiles */
    {128, {1, 16, 65536, 32, 4, 0, 0, 16, 16 * 16 * 32}}, /* 4 tiles; 16 is the most of a request by itself */
    {128, {1, 16, 65536, 32, 4, 1, 0, 53, 53 * 16 * 32}},
    {128, {1, 1024, 65536, 32, 4, 0, 0, 1, 0}},                  /* 256 tiles */
    {128, {1, 128, 128, 16, 16, 0, 0, 1, 0}},                    /* 3 blocks */
    {128, {7, 128, 65536, 16, 16, 0, 0, 13, 7 * 13 * 128 * 16}}, /* as alone */
    {128, {7, 128, 65536, 16, 16, 1, 0, 3, 3 * 7 * 128 * 16}},
    {128, {1, 1024, 65536, 32, 4, 0, 5, 5, 5 * 1024 * 32}},
    {128, {1, 128, 65536, 16, 16, 0, 1, 1, 0}},
    {192, {1, 16, 65536, 32, 4, 1, 0, 27, 27 * 16 * 32}},
    {192, {7, 128, 65536, 16, 16, 1, 0, 1, 0}},
};

/* Requests of one shape: the host chooses; a CTA has a split, and a warp of the join a row. */
static void splits_of_sm80(void)
{
    be_a100();
    for (int i = 0; i < (int)(sizeof portable_split_cases / sizeof *portable_split_cases); i++) {
        const struct split_case *const want = &portable_split_cases[i].of;
        const int64_t d_qk = portable_split_cases[i].d_qk, rows = want->b * want->s_q * want->h_q;
        const bool split = want->splits > 1;
        struct mha_forward_call c;
        make_split_case(&c, want, d_qk);
        RUNS(mha_forward, &c, "sm80_mha_forward_bf16_%s%s", d_qk == 128 ? "128_middle" : "192_small",
             split ? "_splits|sm80_mha_forward_join_bf16_128" : "");
        const struct mha_forward_sm80_params p = PARAMS(mha_forward_sm80_params, launched(split));
        CHECK_ALL({p.splits, want->splits}, {p.part_rows, want->part_rows}, {p.part_out != NULL, split},
                  {launched(split)->config.grid_x, want->splits * (rows / MHA_SM80_ROWS)},
                  {(int64_t)c.bytes, want->part_rows * (4 * D_V + 8)});
        if (!split) continue;
        const int64_t warps = 4 * fake->sms * MHA_JOIN_WARPS;
        CHECK_ALL(GRID(launched(0), (rows < warps ? rows : warps) / MHA_JOIN_WARPS, 32 * MHA_JOIN_WARPS, 0),
                  {p.slots, d_qk == 128 ? 216 : 108}, {p.rows_alone, MHA_SM80_ROWS},
                  {p.block_keys, d_qk == 128 ? 48 : 32});
    }
}

/* Of lengths in use the host does not know the splits either: each request has room, and CTAs, for the most. */
static void used_splits_of_sm80(void)
{
    enum { ROWS_OF_CALL = 3 * 128 * 16 };
    static const int32_t cases[][5] = {{0, 0, 0, 0, 16}, {1, 0, 0, 152, 9}, {0, 5, 5, 0, 5}};
    be_a100();
    for (int i = 0; i < 3; i++) {
        struct mha_forward_call c;
        const struct layout layout = SHAPE_OF(layout, .b = 3, .s_q = 128, .s_k = 65536, .h_q = 16, .h_kv = 16,
                                              .d_qk = 128, .d_v = D_V, .has = HAS_LSE | HAS_USED);
        mha_forward_make(&c, &layout, gpu_number(0));
        c.args.batch_dependent = cases[i][0], c.args.num_splits = cases[i][1];
        RUNS(mha_forward, &c, "%s",
             "sm80_mha_forward_bf16_128_middle_splits|sm80_mha_forward_join_bf16_128|mha_padding");
        const struct mha_forward_sm80_params p = PARAMS(mha_forward_sm80_params, launched(2));
        CHECK_ALL({p.splits, cases[i][2]}, {p.blocks_of_split, cases[i][3]}, {p.most_splits, cases[i][4]},
                  {p.part_rows, cases[i][4] * ROWS_OF_CALL},
                  {launched(2)->config.grid_x, cases[i][4] * ROWS_OF_CALL / MHA_SM80_ROWS},
                  {p.call.used_q == c.seqused_q.tensor.data, 1},
                  {p.call.used_k == c.seqused_k.tensor.data, 1},
                  {(int64_t)c.bytes, cases[i][4] * ROWS_OF_CALL * (4 * D_V + 8)});
    }
}

/* A request of more than 2^24 rows of parts is not split, whatever the call asks for. */
static void too_many_parts_of_sm80(void)
{
    be_a100();
    for (int more = 0; more < 2; more++) {
        struct mha_forward_call c;
        const struct layout layout = SHAPE_OF(layout, .b = 1, .s_q = (1 << 18) + more, .s_k = 4096, .h_q = 1,
                                              .h_kv = 1, .d_qk = 128, .d_v = D_V);
        mha_forward_make(&c, &layout, gpu_number(0));
        c.args.num_splits = MHA_MOST_SPLITS;
        RUNS(mha_forward, &c, "sm80_mha_forward_bf16_128_middle%s",
             more ? "" : "_splits|sm80_mha_forward_join_bf16_128");
    }
}

/* On Hopper the portable kernel splits as Hopper's does, in the same workspace. */
static void splits_of_sm80_on_hopper(void)
{
    struct mha_forward_call c;
    for (int i = 0; i < (int)(sizeof split_cases / sizeof *split_cases); i++) {
        const struct split_case *const want = &split_cases[i];
        const struct layout layout =
            SHAPE_OF(layout, .b = want->b, .s_q = want->s_q, .s_k = want->s_k, .h_q = want->h_q,
                     .h_kv = want->h_kv, .d_qk = D_QK, .d_v = D_V, .has = HAS_LSE);
        mha_forward_make(&c, &layout, gpu_number(0));
        c.args.batch_dependent = want->batch_dependent, c.args.num_splits = want->num_splits;
        c.args.kernel = "cuda-sm80";
        const bool split = want->splits > 1;
        RUNS(mha_forward, &c, "sm80_mha_forward_bf16_192%s",
             split ? "_splits|sm80_mha_forward_join_bf16_128" : "");
        const struct mha_forward_sm80_params p = PARAMS(mha_forward_sm80_params, launched(split));
        CHECK_ALL({p.splits, want->splits}, {p.part_rows, want->part_rows},
                  {(int64_t)c.bytes, 256 + want->part_rows * (4 * D_V + 8)});
        if (split)
            CHECK_ALL({offset(p.part_out, REGION_OF_WORKSPACE), 256}, {p.slots, fake->sms},
                      {p.block_keys, KEYS}, {p.rows_alone, ROWS});
    }
    /* So it does where Hopper's takes the kernel for few rows. */
    const struct layout layout = SHAPE_OF(layout, .b = 1, .s_q = 16, .s_k = 8192, .h_q = 8, .h_kv = 2,
                                          .d_qk = D_QK, .d_v = D_V, .has = HAS_LSE);
    mha_forward_make(&c, &layout, gpu_number(0));
    c.args.batch_dependent = 1, c.args.kernel = "cuda-sm80";
    RUNS(mha_forward, &c, "%s", "sm80_mha_forward_bf16_192_splits|sm80_mha_forward_join_bf16_128");
    const struct mha_forward_sm80_params p = PARAMS(mha_forward_sm80_params, launched(1));
    CHECK_ALL({offset(p.part_out, REGION_OF_WORKSPACE), 256}, {p.slots, MHA_SM90_FEW_CTAS * fake->sms},
              {p.block_keys, MHA_SM90_FEW_KEYS(D_QK)}, {p.rows_alone, MHA_SM90_FEW_ROWS});
}

enum { MOST_RAGGED = 50 };

/* Draws lengths of which some are long; returns their sum, and the largest in `most`. */
static int64_t draw_lengths(int64_t b, int64_t longest, int64_t length[MOST_RAGGED], int64_t *most)
{
    int64_t sum = 0;
    *most = 0;
    for (int64_t r = 0; r < b; r++) {
        length[r] = draw_one_in(4) ? draw_below(longest + 1) : draw_below(longest / 50 + 2);
        sum += length[r];
        if (length[r] > *most) *most = length[r];
    }
    return sum;
}

/* Returns the splits of tiles that the kernel makes of these requests (sm80/mha_forward/scheduler.cuh). */
static int64_t items_of(const struct mha_forward_sm80_params *p, int64_t b, const int64_t *tokens,
                        const int64_t *keys)
{
    int64_t items = 0, part_rows = 0;
    for (int64_t r = 0; r < b; r++) {
        const int32_t blocks = (int32_t)((keys[r] + p->block_keys - 1) / p->block_keys),
                      by_length = p->blocks_of_split
                                      ? (blocks + p->blocks_of_split - 1) / p->blocks_of_split
                                      : mha_splits(mha_tiles_alone((int32_t)tokens[r], p->rows_alone,
                                                                   p->call.h_kv, p->call.group),
                                                   blocks, p->slots, p->most_splits, false);
        int64_t splits = draw_clamp(p->splits ? p->splits : by_length, 1, p->most_splits);
        if (splits > 1) part_rows += tokens[r] * p->call.h_q * splits;
        if (part_rows > p->part_rows) splits = 1;
        items += (tokens[r] + p->tile_tokens - 1) / p->tile_tokens * p->units * splits;
    }
    return items;
}

/* Draws how many of these lengths are in use; returns the largest number. */
static int64_t draw_used(int64_t b, int64_t length[MOST_RAGGED])
{
    int64_t most = 0;
    for (int64_t r = 0; r < b; r++) {
        if (!draw_one_in(3)) length[r] = draw_below(length[r] + 1);
        if (length[r] > most) most = length[r];
    }
    return most;
}

/* The grid has a CTA for each split of ragged requests, whose lengths, and those in use, the host does not know. */
static void items_of_ragged_requests(void)
{
    static const int64_t heads[][2] = {{16, 16}, {32, 4}, {8, 1}, {1, 1}};
    int split = 0, split_used = 0;
    be_a100();
    for (int i = 0; i < 1000; i++) {
        int64_t tokens[MOST_RAGGED], keys[MOST_RAGGED], max_s_q, max_s_k;
        draw_from(1, (uint64_t)i);
        const int64_t b = 1 + draw_below(MOST_RAGGED),
                      tokens_q = draw_lengths(b, draw_size(300), tokens, &max_s_q),
                      tokens_k = draw_lengths(b, draw_size(60000), keys, &max_s_k), *h = heads[draw_below(4)];
        const bool used = draw_one_in(3);
        if (used) max_s_q = draw_used(b, tokens), max_s_k = draw_used(b, keys);
        struct mha_forward_call c;
        const struct layout layout = SHAPE_OF(
            layout, .flat = true, .b = b, .splits = b + 1, .tokens_q = tokens_q, .tokens_k = tokens_k,
            .h_q = h[0], .h_kv = h[1], .d_qk = 128, .d_v = 128, .has = used ? HAS_USED : 0);
        mha_forward_make(&c, &layout, gpu_number(0));
        c.args.batch_dependent = i % 2, c.args.num_splits = draw_one_in(5) ? 1 + (int32_t)draw_below(64) : 0;
        c.args.max_s_q = max_s_q, c.args.max_s_k = max_s_k;
        fake->launches = 0;
        CHECK_OK(mha_forward_run(&c));
        if (!fake->launches || !strstr(fake->launch[0].kernel, "_splits")) continue;
        const struct mha_forward_sm80_params p = PARAMS(mha_forward_sm80_params, &fake->launch[0]);
        const int64_t items = items_of(&p, b, tokens, keys), grid = fake->launch[0].config.grid_x;
        CHECK(items <= grid, "call %d: %" PRId64 " splits of tiles, %" PRId64 " CTAs", i, items, grid);
        split++, split_used += used;
    }
    CHECK(split > 300 && split_used > 100, "%d calls are split, %d of lengths in use", split, split_used);
}

/* ---- Gradients ---------------------------------------------------------------------------------- */

static void backward_of(struct mha_backward_call *c, bool flat, int64_t b, int64_t s_k)
{
    const struct layout layout =
        SHAPE_OF(layout, .b = b, .s_q = S_Q, .s_k = s_k, .flat = flat, .splits = b + 1, .tokens_q = TOKENS_Q,
                 .tokens_k = TOKENS_K, .h_q = H_Q, .h_kv = H_KV, .d_qk = D_QK, .d_v = D_V,
                 .has = HAS_LSE | HAS_SINK | HAS_DLSE);
    mha_backward_make(c, &layout, gpu_number(0));
    c->args.attn_sink = c->args.dlse = c->args.d_attn_sink = NULL;
}

static void give_sink(struct mha_backward_call *c, bool with_dlse)
{
    c->args.attn_sink = &c->attn_sink.tensor, c->args.d_attn_sink = &c->d_attn_sink.tensor;
    if (with_dlse) c->args.dlse = &c->dlse.tensor;
}

static void backward(struct mha_backward_call *c, bool flat, int64_t b)
{
    backward_of(c, flat, b, S_K);
}

/* Tokens and keys outside all requests have gradient 0; without requests the portable kernels write it. */
static void no_request(void)
{
    struct mha_backward_call c;
    backward(&c, true, 0);
    RUNS(mha_backward, &c, "mha_backward_rows_bf16|mha_backward_keys_bf16");
    CHECK_ALL(GRID(launched(1), TOKENS_Q * H_Q / MHA_WARPS, 32 * MHA_WARPS, 0),
              GRID(launched(0), TOKENS_K * H_KV / MHA_WARPS, 32 * MHA_WARPS, 0));
    backward(&c, false, 0);
    RUNS(mha_backward, &c, "%s", "");
    give_sink(&c, false);
    RUNS(mha_backward, &c, "mha_backward_%s", "dsinks");
}

/* A CTA a head adds the parts of its sink's gradient: of tiles of rows, or of rows. Without that gradient nobody
 * leaves parts. */
static void gradients_of_sinks(void)
{
    struct mha_backward_call c;
    backward(&c, false, B);
    give_sink(&c, false), c.args.kernel = "cuda-sm80";
    RUNS(mha_backward, &c, "sm80_mha_backward_bf16_prepare_192|sm80_mha_backward_bf16_192|%s",
         "sm80_mha_backward_bf16_finish_192|mha_backward_dsinks");
    const struct mha_backward_params p = PARAMS(mha_backward_params, launched(0)),
                                     of_tiles = PARAMS(mha_backward_params, launched(3));
    CHECK_ALL(GRID(launched(0), H_Q, DSINK_THREADS, 0), {p.dsink_parts, B * ((S_Q + 63) / 64)},
              {p.of_dsink && p.of_dsink == of_tiles.of_dsink, 1},
              {(const char *)(p.of_dsink + H_Q * p.dsink_parts) <=
                   (const char *)c.args.workspace + c.args.workspace_size,
               1},
              {p.attn_sink == c.attn_sink.tensor.data, 1}, {p.d_attn_sink == c.d_attn_sink.tensor.data, 1},
              {!p.dlse, 1});
    c.args.d_attn_sink = NULL;
    RUNS(mha_backward, &c, "sm80_mha_backward_bf16_prepare_192|sm80_mha_backward_bf16_192|%s",
         "sm80_mha_backward_bf16_finish_192");
    CHECK(!PARAMS(mha_backward_params, launched(2)).of_dsink, "%s", "parts are left that nobody adds");
    give_sink(&c, true), c.args.kernel = "cuda";
    RUNS(mha_backward, &c, "%s", "mha_backward_rows_bf16|mha_backward_keys_bf16|mha_backward_dsinks");
    CHECK_EQ(PARAMS(mha_backward_params, launched(0)).dsink_parts, B * S_Q);
    CHECK(PARAMS(mha_backward_params, launched(0)).dlse == c.dlse.tensor.data, "%s",
          "dlse is another tensor");
}

/* Each side has a launch of its own. */
static void gradients_of_padding(void)
{
    for (int flat = 0; flat < 2; flat++) {
        struct mha_backward_call c;
        backward(&c, flat, B);
        c.args.kernel = "cuda-sm90";
        RUNS(mha_backward, &c, "%s",
             "sm90_mha_backward_prepare_bf16_192|sm90_mha_backward_bf16_192|sm90_mha_backward_finish_bf16_"
             "192");
        CHECK_EQ(PARAMS(mha_backward_sm90_params, launched(1)).clears, flat);
        c.args.seqused_k = &c.seqused_k.tensor;
        RUNS(
            mha_backward, &c, "%s",
            "sm90_mha_backward_prepare_bf16_192|sm90_mha_backward_bf16_192|sm90_mha_backward_finish_bf16_192|"
            "mha_padding");
        CHECK_EQ(PARAMS(mha_backward_sm90_params, launched(2)).clears, 1);
        const struct mha_padding_params p = PARAMS(mha_padding_params, launched(0));
        CHECK_ALL({p.used == c.seqused_k.tensor.data, 1}, {p.heads, H_KV},
                  {flat ? p.tokens : p.extent, flat ? TOKENS_K : S_K}, {p.to[0].data == c.dk.tensor.data, 1},
                  {p.to[1].data == c.dv.tensor.data, 1}, {p.width[0], D_QK}, {p.width[1], D_V},
                  {p.lse == NULL, 1}, {p.aligned, 1});
        c.args.seqused_q = &c.seqused_q.tensor, c.args.kernel = "cuda-sm80";
        RUNS(mha_backward, &c, "sm80_mha_backward_bf16_prepare_192|sm80_mha_backward_bf16_192|%s",
             "sm80_mha_backward_bf16_finish_192|mha_padding|mha_padding");
        const struct mha_padding_params of_q = PARAMS(mha_padding_params, launched(1));
        CHECK_ALL({of_q.used == c.seqused_q.tensor.data, 1}, {of_q.heads, H_Q},
                  {of_q.to[0].data == c.dq.tensor.data, 1}, {of_q.to[1].data == NULL, 1},
                  {of_q.width[0], D_QK});
    }
}

/* With a sink and dlse no kernel may keep P in fp16. */
static void sinks_with_dlse(void)
{
    for (int wide = 0; wide < 2; wide++) {
        struct mha_backward_call c;
        backward_of(&c, false, 1, (fake->sms / H_KV + 1) * MHA_BACKWARD_KEYS);
        give_sink(&c, !wide), c.args.kernel = "cuda-sm80";
        RUNS(mha_backward, &c, "sm80_mha_backward_bf16_prepare_192|sm80_mha_backward_bf16_%s|%s",
             wide ? "192_wide" : "192", "sm80_mha_backward_bf16_finish_192|mha_backward_dsinks");
        c.args.kernel = NULL;
        check_left("both", OP_MHA_BACKWARD, &c.args, "cuda-sm90", "cuda-sm80", wide ? NULL : "dlse",
                   "attn_sink with dlse only at d_qk/d_v of 128/128, 96/64 and 64/64");
    }
}

/* The portable tensor core kernel: one CTA per tile of rows, then one per block of keys of a key head. */
static void gradients(void)
{
    enum { TILE = MHA_BACKWARD_ROWS, BLOCK = MHA_BACKWARD_KEYS };
    for (int flat = 0; flat < 2; flat++) {
        const int64_t tiles = flat ? TOKENS_Q / TILE + B + 2 : B * ((S_Q + TILE - 1) / TILE),
                      blocks = flat ? TOKENS_K / BLOCK + B + 2 : B * ((S_K + BLOCK - 1) / BLOCK);
        struct mha_backward_call c;
        backward(&c, flat, B);
        c.args.kernel = "cuda-sm80";
        RUNS(mha_backward, &c, "sm80_mha_backward_bf16_prepare_192|sm80_mha_backward_bf16_%s",
             "192|sm80_mha_backward_bf16_finish_192");
        CHECK_ALL(GRID(launched(2), tiles * H_Q, MHA_BACKWARD_ROW_THREADS, 0),
                  GRID(launched(1), blocks * H_KV, MHA_BACKWARD_THREADS(BLOCK, 16),
                       MHA_BACKWARD_BYTES(D_QK, D_V, BLOCK, MHA_BACKWARD_ROWS)),
                  GRID(launched(0), tiles * H_Q, MHA_BACKWARD_ROW_THREADS, 0));
    }
}

/* At 192/128 a block has 128 keys where blocks of 64 are more than the SMs and shared memory suffices. */
static void wide_gradients(void)
{
    for (int more = 0; more < 2; more++) {
        const int64_t blocks = fake->sms / H_KV + more, keys = more ? MHA_BACKWARD_WIDE : MHA_BACKWARD_KEYS;
        struct mha_backward_call c;
        backward_of(&c, false, 1, blocks * MHA_BACKWARD_KEYS);
        c.args.kernel = "cuda-sm80";
        RUNS(mha_backward, &c, "sm80_mha_backward_bf16_prepare_192|sm80_mha_backward_bf16_%s|%s",
             more ? "192_wide" : "192", "sm80_mha_backward_bf16_finish_192");
        CHECK_ALL(GRID(launched(1), (blocks * MHA_BACKWARD_KEYS + keys - 1) / keys * H_KV,
                       MHA_BACKWARD_THREADS(keys, more ? 32 : 16),
                       MHA_BACKWARD_BYTES(D_QK, D_V, keys, MHA_BACKWARD_ROWS)));
    }
    _Static_assert(MHA_BACKWARD_BYTES(192, 128, MHA_BACKWARD_WIDE, MHA_BACKWARD_ROWS) <= 163 * 1024,
                   "8.0 has as much");
}

/* The kernel without tensor cores takes what tensor core kernels refuse. */
#define GRADIENTS_REFUSED(argument, words, ...)                                                              \
    do {                                                                                                     \
        struct mha_backward_call c;                                                                          \
        backward(&c, false, B);                                                                              \
        __VA_ARGS__;                                                                                         \
        check_left(#__VA_ARGS__, OP_MHA_BACKWARD, &c.args, "cuda-sm80", "cuda", argument, words);            \
    } while (0)

static void gradients_refused(void)
{
    GRADIENTS_REFUSED("q", "base and strides|16 bytes", c.q.tensor.byte_offset = 8);
    GRADIENTS_REFUSED("k", "base and strides|16 bytes", c.k.strides[1] = H_KV * D_QK + 2);
    GRADIENTS_REFUSED("dv", "base and strides|16 bytes", c.dv.tensor.byte_offset = 2);
    GRADIENTS_REFUSED("softmax_scale", "at least 1e-30", c.args.softmax_scale = -0.1f);
    GRADIENTS_REFUSED("v", "256/256, 192/128, 128/128, 96/64 and 64/64",
                      c.v.shape[3] = c.out.shape[3] = c.dout.shape[3] = c.dv.shape[3] = 64);
}

/* ---- The portable kernels' tile shapes ------------------------------------------------------------ */

/* The shapes of the lists, as kernels.def has them. */
struct tile_shape {
    const char *name;
    int64_t d_qk, threads, bytes;
};
static const struct tile_shape forward_shapes[] = {
#define SHAPE(d_qk, d_v, suffix, row_tiles, warps, keys, ...)                                                \
    {#d_qk #suffix, d_qk, 32 * (warps), MHA_SM80_BYTES(d_qk, d_v, keys)},
    MHA_SM80_SHAPES(SHAPE)
#undef SHAPE
};
static const struct tile_shape backward_shapes[] = {
#define SHAPE(kernel, d_qk, d_v, keys, warp_keys, rows, ...)                                                 \
    {#kernel, d_qk, MHA_BACKWARD_THREADS(keys, warp_keys), MHA_BACKWARD_BYTES(d_qk, d_v, keys, rows)},
    MHA_BACKWARD_SHAPES(SHAPE)
#undef SHAPE
};
enum {
    FORWARD_SHAPES = sizeof forward_shapes / sizeof *forward_shapes,
    BACKWARD_SHAPES = sizeof backward_shapes / sizeof *backward_shapes
};

/* Checks that the launch has this shape of the list, and the GPU the memory for it. */
static void check_shape(const struct fake_launch *launch, const char *kernel, const struct tile_shape *shapes,
                        int count, const char *name)
{
    int i = 0;
    while (i < count && strcmp(shapes[i].name, name) != 0) i++;
    char whole[64];
    snprintf(whole, sizeof whole, "%s%s", kernel, name);
    CHECK(i < count && !strcmp(launch->kernel, whole), "%s, not %s", launch->kernel, whole);
    if (i == count) return;
    CHECK_ALL({launch->config.block_x, shapes[i].threads}, {launch->config.shared_bytes, shapes[i].bytes},
              {shapes[i].bytes <= fake->shared_bytes, 1});
}

/* A size, and its shapes where a CTA has up to 99, 163 and 227 KiB of shared memory. */
static const struct {
    int64_t d_qk, d_v;
    const char *forward[3], *backward[3];
} sizes[] = {
    {64, 64, {"64_small", "64", "64"}, {"64", "64", "64"}},
    {96, 64, {"96_small", "96", "96"}, {"96", "96", "96"}},
    {128, 128, {"128_small", "128_middle", "128"}, {"128", "128", "128"}},
    {192, 128, {"192_small", "192_small", "192"}, {"192", "192", "192"}},
    {256, 256, {"256_small", "256", "256"}, {"256_small", "256", "256"}},
};
enum { SIZES = sizeof sizes / sizeof *sizes };

static void portable_shapes(int capability, int shared_bytes, int gpu)
{
    fake->capability = capability, fake->shared_bytes = shared_bytes;
    for (int i = 0; i < SIZES; i++) {
        const struct layout layout =
            SHAPE_OF(layout, .b = B, .s_q = S_Q, .s_k = S_K, .h_q = H_Q, .h_kv = H_KV, .d_qk = sizes[i].d_qk,
                     .d_v = sizes[i].d_v, .has = HAS_LSE);
        struct mha_forward_call forward;
        mha_forward_make(&forward, &layout, gpu_number(0));
        forward.args.kernel = "cuda-sm80", forward.args.num_splits = 1;
        CHECK_OK(mha_forward_run(&forward));
        check_shape(launched(0), "sm80_mha_forward_bf16_", forward_shapes, FORWARD_SHAPES,
                    sizes[i].forward[gpu]);
        forward.args.num_splits = 2;
        RUNS(mha_forward, &forward, "sm80_mha_forward_bf16_%s_splits|sm80_mha_forward_join_bf16_%d",
             sizes[i].forward[gpu], (int)sizes[i].d_v);
        CHECK_ALL({launched(1)->config.block_x, launched(2)->config.block_x},
                  {launched(1)->config.shared_bytes, launched(2)->config.shared_bytes});
        struct mha_backward_call c;
        mha_backward_make(&c, &layout, gpu_number(0));
        c.args.kernel = "cuda-sm80";
        const char *const shape = sizes[i].backward[gpu];
        const int d_qk = (int)sizes[i].d_qk;
        RUNS(mha_backward, &c,
             "sm80_mha_backward_bf16_prepare_%d|sm80_mha_backward_bf16_%s|sm80_mha_backward_bf16_finish_%d",
             d_qk, shape, d_qk);
        check_shape(launched(1), "sm80_mha_backward_bf16_", backward_shapes, BACKWARD_SHAPES, shape);
    }
}

static void shapes_of_99_kib(void)
{
    portable_shapes(89, 99 * 1024, 0);
}

static void shapes_of_163_kib(void)
{
    portable_shapes(80, 163 * 1024, 1);
}

static void shapes_of_227_kib(void)
{
    portable_shapes(90, 227 * 1024, 2);
}

/* Checks the TMA map of `rows` rows by d columns, which come to shared memory in lines of so many columns. */
static void check_lines(const struct tensor_map *map, int64_t d, int64_t columns, int64_t rows, int64_t ctas)
{
    const struct fake_tensor *const t = passed_of(map);
    CHECK_ALL({t->sizes[0], columns}, {t->sizes[3], d / columns}, {t->box[0], columns}, {t->box[1], rows},
              {t->box[3], d / columns / ctas},
              {t->swizzle, columns == 32 ? CU_TENSOR_SWIZZLE_64B : CU_TENSOR_SWIZZLE_128B});
    if (t->sizes[3] > 1) CHECK_EQ(t->strides[2], 2 * columns);
}

/* Hopper's gradients have a kernel of each size. K at 192 and Q and K at 96 have lines of 32 columns. */
static void gradients_of_hopper(void)
{
    for (int i = 0; i < SIZES; i++) {
        const int64_t d_qk = sizes[i].d_qk;
        const struct layout layout =
            SHAPE_OF(layout, .b = B, .s_q = S_Q, .s_k = S_K, .h_q = H_Q, .h_kv = H_KV, .d_qk = d_qk,
                     .d_v = sizes[i].d_v, .has = HAS_LSE);
        struct mha_backward_call c;
        mha_backward_make(&c, &layout, gpu_number(0));
        RUNS(mha_backward, &c,
             "sm90_mha_backward_prepare_bf16_%d|sm90_mha_backward_bf16_%d|sm90_mha_backward_finish_bf16_%d",
             (int)d_qk, (int)d_qk, (int)d_qk);
        const struct mha_backward_sm90_params p = PARAMS(mha_backward_sm90_params, launched(1));
        const int64_t ctas = MHA_BACKWARD_SM90_CTAS(d_qk), keys = MHA_BACKWARD_SM90_KEYS(d_qk) / ctas,
                      rows = MHA_BACKWARD_SM90_ROWS(d_qk), q_columns = d_qk == 96 ? 32 : 64,
                      d_v = sizes[i].d_v;
        check_lines(&p.q, d_qk, q_columns, rows, 1), check_lines(&p.dout, d_v, 64, rows, 1);
        check_lines(&p.k, d_qk, d_qk == 192 ? 32 : q_columns, keys, ctas),
            check_lines(&p.v, d_v, 64, keys, 1);
        CHECK_EQ(launched(1)->config.block_x, d_qk == 64 ? 512 : 384);
    }
}

/* Deterministic gradients without a causal mask take the key blocks of a head in groups, as many heads together as fill
 * the SMs with groups. */
struct group_case {
    int64_t s_q, s_k, h_kv, d_qk;
    int32_t deterministic, causal, group, heads; /* 0: not by groups */
};

static void check_groups(const struct group_case *of, int cases)
{
    for (int i = 0; i < cases; i++, of++) {
        const int64_t d_qk = of->d_qk, d_v = d_qk == 192 ? 128 : d_qk == 96 ? 64 : d_qk;
        const struct layout layout =
            SHAPE_OF(layout, .b = 1, .s_q = of->s_q, .s_k = of->s_k, .h_q = of->h_kv, .h_kv = of->h_kv,
                     .d_qk = d_qk, .d_v = d_v, .causal = of->causal, .has = HAS_LSE);
        struct mha_backward_call c;
        mha_backward_make(&c, &layout, gpu_number(0));
        c.args.deterministic = of->deterministic;
        CHECK_OK(mha_backward_run(&c));
        /* The last launch finishes dq. With groups the CTAs of one group are launched together, then the others. */
        const struct fake_launch *const together = launched(of->group == 1 ? 1 : 2), *const others =
                                                                                         launched(1);
        const struct mha_backward_sm90_params p = PARAMS(mha_backward_sm90_params, together);
        CHECK(p.blocks_of_group == of->group && (!of->heads || p.heads_of_set == of->heads) &&
                  p.heads_of_set >= 1 && p.heads_of_set <= p.call.h_kv,
              "case %d: groups of %d blocks, %d heads", i, p.blocks_of_group, p.heads_of_set);
        CHECK((attribute_of(together, CU_LAUNCH_COOPERATIVE) != NULL) == (of->group > 1), "case %d", i);
        CHECK(!p.joins, "case %d", i);
        if (of->group == 1) continue;
        const struct mha_backward_sm90_params q = PARAMS(mha_backward_sm90_params, others);
        CHECK(q.joins && q.blocks_of_group == of->group && !attribute_of(others, CU_LAUNCH_COOPERATIVE) &&
                  !strcmp(others->kernel, together->kernel),
              "case %d: %s", i, others->kernel);
        const int ctas = q.items < 132 ? q.items : 132;
        CHECK_EQ(together->config.grid_x, of->group);
        CHECK_EQ(others->config.grid_x, ctas - of->group);
    }
}

static void groups_of_hopper(void)
{
    static const struct group_case all[] = {
        {4096, 8192, 16, 64, 1, 0, 32, 4},     {4096, 2048, 16, 64, 1, 0, 32, 8},
        {4096, 8192, 6, 64, 1, 0, 64, 2},      {4096, 16384, 1, 96, 1, 0, 64, 1},
        {4096, 8192, 3, 128, 1, 0, 64, 2},     {4096, 128, 200, 128, 1, 0, 32, 132},
        {16384, 16384, 16, 64, 1, 0, 32, 4},   {16384, 16384, 16, 128, 1, 0, 64, 2}, /* 67 MB of four heads */
        {1 << 20, 16384, 16, 64, 1, 0, 64, 2}, {4096, 8192, 16, 192, 1, 0, 1, 0},
        {4096, 8192, 16, 256, 1, 0, 1, 0},     {4096, 8192, 16, 64, 1, 1, 1, 0},
        {4096, 8192, 16, 64, 0, 0, 1, 0},
    };
    check_groups(all, sizeof all / sizeof *all);
}

/* Work tiles that one group's CTAs can take need no others. */
static void groups_of_few_blocks(void)
{
    const struct layout layout = SHAPE_OF(layout, .b = 1, .s_q = 4096, .s_k = 1024, .h_q = 2, .h_kv = 2,
                                          .d_qk = 64, .d_v = 64, .has = HAS_LSE);
    struct mha_backward_call c;
    mha_backward_make(&c, &layout, gpu_number(0));
    c.args.deterministic = 1;
    CHECK_OK(mha_backward_run(&c));
    CHECK_EQ(fake->launches, 3);
    CHECK(attribute_of(launched(1), CU_LAUNCH_COOPERATIVE) != NULL, "not launched together");
    CHECK_EQ(launched(1)->config.grid_x, 16);
}

/* A group's blocks must all run at once: where the driver says that they cannot, or in a green context, a group is one
 * block. */
static void groups_without_room(void)
{
    static const struct group_case of_one_block[] = {{4096, 8192, 16, 64, 1, 0, 1, 3},
                                                     {4096, 8192, 6, 64, 1, 0, 1, 3}};
    for (int i = 0; i < 2; i++) {
        fake->fails[CALL_cuLaunchKernelEx] = CU_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE,
        fake->once[CALL_cuLaunchKernelEx] = 1;
        fake->passes[CALL_cuLaunchKernelEx] =
            fake->calls[CALL_cuLaunchKernelEx] + 1; /* what prepares the rows */
        check_groups(of_one_block + i, 1);
    }
}

static void groups_of_a_green_context(void)
{
    static const struct group_case of_one_block[] = {{4096, 8192, 16, 64, 1, 0, 1, 2},
                                                     {4096, 8192, 6, 64, 1, 0, 1, 2}};
    fake->context_sms = 66;
    check_groups(of_one_block, 2);
}

int main(int argc, char **argv)
{
    return RUN_SCENARIOS(
        argc, argv, "test_cuda_mha", tiles, tiles_of_ragged, tile_counters, no_keys, splits,
        splits_of_a_batch, few_rows, kernel_with_splits, any_batch, refused, out_of_single_tokens,
        tiles_of_sm80, splits_of_sm80, used_splits_of_sm80, too_many_parts_of_sm80, splits_of_sm80_on_hopper,
        items_of_ragged_requests, no_request, gradients, wide_gradients, gradients_refused, shapes_of_99_kib,
        shapes_of_163_kib, shapes_of_227_kib, gradients_of_hopper, groups_of_hopper, groups_of_few_blocks,
        groups_without_room, groups_of_a_green_context, gradients_of_sinks, sinks_with_dlse, padding,
        padding_of_many_requests, splits_of_used_lengths, gradients_of_padding);
}

/* SPDX-License-Identifier: MIT
 *
 * Sparse prefill on a GPU, the host's side: which kernel takes a call, what it is told of each key head, how TMA is told of the
 * queries and results, and how calls of more tokens than a launch can count are taken apart.
 */
#include "fake_cuda/launches.h"

#include "cuda/kernels.h"

#include <math.h>

enum {
    S_Q = 5,
    H_Q = 40,
    H_KV = 2,
    GROUP = H_Q / H_KV,
    TOPK = 70,
    TILES = (GROUP + SPARSE_WARPS - 1) / SPARSE_WARPS
};

/* A call by the kernel without tensor cores, which takes all. */
static void portable(struct drawn_prefill *c, int64_t s_q, int64_t h_q, int64_t h_kv)
{
    prefill_call(c, s_q, h_q, h_kv, 0);
    c->args.kernel = "cuda";
}

/* The launches of it. */
static int run(struct drawn_prefill *c)
{
    size_t size = 77, alignment = 0;
    const int before = fake->launches;
    CHECK_OK(fmla_sparse_prefill_workspace_size(&c->args, &size, &alignment));
    CHECK_EQ(size, 0);
    CHECK(alignment && !(alignment & (alignment - 1)), "alignment is %zu", alignment);
    CHECK_OK(fmla_sparse_prefill(&c->args));
    return fake->launches - before;
}

/* ---- What kernels are told -------------------------------------------------------------------- */

/* A launch a key head, over what is that head's. */
static void key_heads(void)
{
    struct drawn_prefill c;
    portable(&c, S_Q, H_Q, H_KV);
    c.args.softmax_scale = 0.25f, c.args.log_base = FMLA_LOG_BASE_2;
    c.args.lse_empty = FMLA_LSE_EMPTY_NEGATIVE_INFINITY;
    CHECK_EQ(run(&c), H_KV);
    for (int k = 0; k < H_KV; k++) {
        const struct fake_launch *launch = &fake->launch[k];
        const struct sparse_prefill_params p = sparse_prefill_params_of(launch);
        CHECK(!strcmp(launch->kernel, "sparse_prefill_bf16"), "%s", launch->kernel);
        CHECK_ALL({launch->config.grid_x, S_Q * TILES}, {launch->config.block_x, 32 * SPARSE_WARPS},
                  {launch->config.shared_bytes, 0}, {p.s_q, S_Q}, {p.h_q, GROUP}, {p.d_qk, 576},
                  {p.topk, TOPK}, {p.tiles, TILES});
        CHECK(divides(p.tiles_divisor, TILES) && divides(p.kv.page_divisor, 1), "%s", "divisors");
        CHECK(p.scale == 0.25f && fabsf(p.scale_log2 - 0.25f * 1.442695041f) < 1e-7f, "%f", (double)p.scale);
        CHECK_ALL({offset(p.q, 0), k * GROUP * 576 * 2}, {p.q_stride[0], H_Q * 576}, {p.q_stride[1], 576},
                  {offset(p.kv.data, 1), k * 576 * 2}, {p.kv.slots, 100}, {p.kv.page_size, 1},
                  {p.kv.page_bytes, H_KV * 576 * 2}, {offset(p.kv.indices, 2), k * TOPK * 4},
                  {p.kv.indices_stride[0], H_KV * TOPK}, {offset(p.topk_length, 3), 0},
                  {offset(p.rules.attn_sink, 4), k * GROUP * 4});
        CHECK(p.rules.lse_of_empty == -INFINITY && fabsf(p.rules.lse_factor - 1.442695041f) < 1e-7f, "%f",
              (double)p.rules.lse_factor);
        CHECK_ALL({offset(p.out, 5), k * GROUP * 512 * 2}, {p.out_stride[0], H_Q * 512},
                  {p.out_stride[1], 512}, {offset(p.max_logits, 6), k * GROUP * 4},
                  {offset(p.lse, 7), k * GROUP * 4}, {p.max_stride, H_Q}, {p.lse_stride, H_Q},
                  {p.pairs_aligned, 1});
    }
    /* What is left out. */
    portable(&c, S_Q, H_Q, H_KV);
    c.args.topk_length = c.args.attn_sink = c.args.max_logits = c.args.lse = NULL;
    CHECK_EQ(run(&c), H_KV);
    const struct sparse_prefill_params p = sparse_prefill_params_of(&fake->launch[fake->launches - 1]);
    CHECK(!p.topk_length && !p.rules.attn_sink && !p.max_logits && !p.lse, "%s", "optional tensors");
    /* Strides of 2 elements, and a head or a token that begins at an odd one. */
    static const struct {
        int64_t token, head;
        uint64_t offset;
        int aligned;
    } all[] = {
        {H_Q * 514, 514, 0, 1}, {H_Q * 513, 513, 0, 0}, {H_Q * 512 + 1, 512, 0, 0}, {H_Q * 512, 512, 2, 0}};
    for (int i = 0; i < 4; i++) {
        portable(&c, S_Q, H_Q, H_KV);
        c.out.strides[0] = all[i].token, c.out.strides[1] = all[i].head;
        c.out.tensor.byte_offset = all[i].offset;
        CHECK_EQ(run(&c), H_KV);
        CHECK_EQ(sparse_prefill_params_of(&fake->launch[fake->launches - 1]).pairs_aligned, all[i].aligned);
    }
}

static void formats(void)
{
    static const struct {
        int32_t format;
        int64_t token, slot_bytes, page_bytes;
        const char *kernel;
    } all[] = {{FMLA_KV_BF16, 576, 1152, 64 * 1152, "sparse_prefill_bf16"},
               {FMLA_KV_FP8_656, 656, 656, 64 * 656, "sparse_prefill_fp8_656"},
               {FMLA_KV_FP8_584, 584, 576, 64 * 584, "sparse_prefill_fp8_584"}};
    for (int i = 0; i < 3; i++) {
        struct drawn_prefill c;
        portable(&c, S_Q, 64, 1);
        const int64_t d_qk = all[i].format == FMLA_KV_FP8_584 ? 512 : 576;
        HELD(&c.q, region(0), bf16, 3, S_Q, 64, d_qk);
        HELD(&c.kv, region(1), all[i].format == FMLA_KV_BF16 ? bf16 : u8, 4, 9, 64, 1, all[i].token);
        c.q.tensor.device = c.kv.tensor.device = (fmla_device){FMLA_DEVICE_CUDA, 0};
        c.args.kv_format = all[i].format;
        CHECK_EQ(run(&c), 1);
        const struct fake_launch *launch = &fake->launch[i];
        const struct sparse_prefill_params p = sparse_prefill_params_of(launch);
        CHECK(!strcmp(launch->kernel, all[i].kernel), "%s", launch->kernel);
        CHECK_ALL({launch->config.grid_x, S_Q * 8}, {p.d_qk, d_qk}, {p.kv.slots, 9 * 64},
                  {p.kv.page_size, 64}, {p.kv.page_bytes, all[i].page_bytes},
                  {p.kv.slot_bytes, all[i].slot_bytes});
        CHECK(divides(p.kv.page_divisor, 64), "%s", "page size");
    }
}

/* ---- More than a launch, and less ------------------------------------------------------------- */

/* Blocks of threads of a launch are fewer than 2^31. */
static void many_tokens(void)
{
    enum { HEADS = 128, TILES_OF_TOKEN = HEADS / SPARSE_WARPS };
    struct drawn_prefill c;
    portable(&c, INT32_MAX, HEADS, 1);
    const int launches = run(&c);
    CHECK_EQ(launches, TILES_OF_TOKEN + 1);
    int64_t first = 0;
    for (int i = 0; i < launches; i++) {
        const struct sparse_prefill_params p = sparse_prefill_params_of(&fake->launch[i]);
        CHECK_EQ(fake->launch[i].config.grid_x, (int64_t)p.s_q * TILES_OF_TOKEN);
        CHECK(p.s_q > 0 && (int64_t)p.s_q * TILES_OF_TOKEN <= INT32_MAX, "%d tokens at once", p.s_q);
        CHECK_ALL({offset(p.q, 0), first * HEADS * 576 * 2}, {offset(p.kv.data, 1), 0},
                  {offset(p.kv.indices, 2), first * TOPK * 4}, {offset(p.topk_length, 3), first * 4},
                  {offset(p.rules.attn_sink, 4), 0}, {offset(p.out, 5), first * HEADS * 512 * 2},
                  {offset(p.max_logits, 6), first * HEADS * 4}, {offset(p.lse, 7), first * HEADS * 4});
        first += p.s_q;
    }
    CHECK_EQ(first, INT32_MAX);
}

static void nothing(void)
{
    struct drawn_prefill c;
    portable(&c, 0, H_Q, H_KV);
    c.q.tensor.data = c.indices.tensor.data = c.length.tensor.data = c.out.tensor.data = NULL;
    c.max_logits.tensor.data = c.lse.tensor.data = NULL;
    CHECK_EQ(run(&c), 0);
    /* No key, or no index: rows are written all the same. */
    portable(&c, S_Q, H_Q, H_KV);
    c.kv.shape[0] = 0, c.kv.tensor.data = NULL;
    CHECK_EQ(run(&c), H_KV);
    CHECK_EQ(sparse_prefill_params_of(&fake->launch[fake->launches - 1]).kv.slots, 0);
    portable(&c, S_Q, H_Q, H_KV);
    c.indices.shape[2] = 0, c.indices.tensor.data = NULL;
    CHECK_EQ(run(&c), H_KV);
    CHECK_EQ(sparse_prefill_params_of(&fake->launch[fake->launches - 1]).topk, 0);
}

/* A launch that fails is the last one. */
static void failing(void)
{
    struct drawn_prefill c;
    portable(&c, S_Q, H_Q, H_KV);
    fake->fails[CALL_cuLaunchKernelEx] = FAKE_LAUNCH_FAILED;
    const int before = fake->calls[CALL_cuLaunchKernelEx];
    CHECK_EQ(fmla_sparse_prefill(&c.args), FMLA_DEVICE_ERROR);
    CHECK_OK(strncmp(fmla_last_error(), "sparse_prefill: cuda:0: ", 24));
    CHECK_ALL({fake->calls[CALL_cuLaunchKernelEx] - before, 1}, {fake_depth(), 0});
}

/* By itself a call is some kernel's, and a GPU before Hopper has one too. */
static void chosen(void)
{
    fake->capability = 80;
    struct drawn_prefill c;
    prefill_call(&c, S_Q, H_Q, H_KV, 0);
    const char *kernel = NULL;
    CHECK(fmla_sparse_prefill_kernel(&c.args, &kernel) == FMLA_OK && !strcmp(kernel, "cuda"), "%s",
          fmla_last_error());
    CHECK_EQ(run(&c), H_KV);
}

/* ---- Hopper's ----------------------------------------------------------------------------------- */

static const char *kernel_of(const struct drawn_prefill *c)
{
    const char *kernel = "";
    CHECK_OK(fmla_sparse_prefill_kernel(&c->args, &kernel));
    return kernel;
}

/* What TMA was told: `columns` of `heads` heads of `tokens` tokens, from `at` bytes on, in boxes of a tile and 128 columns; strides
 * of elements. */
struct expected_map {
    int part;
    int64_t at, columns, heads, tokens;
    int64_t stride[2]; /* token, head */
};

static void check_map(const struct tensor_map *map, const struct expected_map *expected)
{
    const struct fake_tensor *t = told_of(map);
    const int64_t sizes[] = {64, expected->heads, expected->columns / 64, expected->tokens, 1};
    const int64_t box[] = {64, 64, 2, 1, 1};
    CHECK_ALL({t->type, CU_TENSOR_BFLOAT16}, {t->rank, 5}, {t->swizzle, CU_TENSOR_SWIZZLE_128B},
              {offset(t->base, expected->part), expected->at});
    for (int i = 0; i < 5; i++) {
        CHECK_ALL({t->sizes[i], sizes[i]}, {t->box[i], box[i]}, {t->steps[i], 1});
    }
    if (expected->heads > 1) CHECK_EQ(t->strides[0], 2 * expected->stride[1]);
    CHECK_EQ(t->strides[1], 64 * 2);
    if (expected->tokens > 1) CHECK_EQ(t->strides[2], 2 * expected->stride[0]);
}

/* A launch a key head: blocks of threads that stay, no more than there are SMs, and the head's queries and results in boxes. */
static void hopper(void)
{
    enum { HEADS = 80, TILES_OF_HEAD = 2, Q_HEAD = 584, OUT_HEAD = 520 };
    static const int64_t tokens[] = {1, S_Q, 1000}, q_token = 2 * HEADS * Q_HEAD + 8,
                         out_token = 2 * HEADS * OUT_HEAD + 16;
    fake->capability = 90, fake->sms = 132;
    for (int n = 0; n < 3; n++) {
        struct drawn_prefill c;
        prefill_call(&c, tokens[n], 2 * HEADS, H_KV, 0);
        c.q.strides[0] = q_token, c.q.strides[1] = Q_HEAD;
        c.out.strides[0] = out_token, c.out.strides[1] = OUT_HEAD;
        CHECK(!strcmp(kernel_of(&c), "cuda-sm90"), "%s", kernel_of(&c));
        const int64_t items = tokens[n] * TILES_OF_HEAD;
        CHECK_EQ(run(&c), H_KV);
        for (int k = 0; k < H_KV; k++) {
            const struct fake_launch *launch = &fake->launch[fake->launches - H_KV + k];
            const struct sparse_prefill_sm90_params p = sparse_prefill_sm90_params_of(launch);
            const struct expected_map queries = {0,         k * HEADS * Q_HEAD * 2, 576, HEADS,
                                                 tokens[n], {q_token, Q_HEAD}};
            const struct expected_map results = {5,         k * HEADS * OUT_HEAD * 2, 512, HEADS,
                                                 tokens[n], {out_token, OUT_HEAD}};
            CHECK(!strcmp(launch->kernel, "sm90_sparse_prefill_bf16_576"), "%s", launch->kernel);
            CHECK_ALL({launch->config.grid_x, items < 132 ? items : 132}, {launch->config.block_x, 384},
                      {launch->config.shared_bytes, 227 * 1024}, {p.items, items}, {p.call.h_q, HEADS},
                      {p.call.tiles, TILES_OF_HEAD});
            CHECK(divides(p.call.tiles_divisor, TILES_OF_HEAD), "%s", "tiles");
            CHECK_EQ(offset(p.call.kv.data, 1), k * 576 * 2);
            check_map(&p.queries, &queries);
            check_map(&p.results, &results);
        }
    }
}

/* Pages of a format: their size, and the bytes from one to the next and from a token to the next. */
struct pages {
    int32_t format;
    int64_t page_size, page_bytes, slot_bytes;
};

/* A call of one key head over 9 such pages; without a format, over flat keys. */
static void hopper_call(struct drawn_prefill *c, const struct pages *pages, int64_t d_qk)
{
    const bool fp8 = pages->format == FMLA_KV_FP8_656 || pages->format == FMLA_KV_FP8_584;
    const int64_t element = fp8 ? 1 : 2;
    const int64_t token = !fp8 ? d_qk : pages->format == FMLA_KV_FP8_656 ? 656 : 584;
    prefill_call(c, S_Q, H_Q, 1, 0);
    HELD(&c->q, region(0), bf16, 3, S_Q, H_Q, d_qk);
    if (pages->format) {
        HELD(&c->kv, region(1), fp8 ? u8 : bf16, 4, 9, pages->page_size, 1, token);
        c->kv.strides[0] = pages->page_bytes / element, c->kv.strides[1] = pages->slot_bytes / element;
    } else {
        HELD(&c->kv, region(1), bf16, 3, 100, 1, d_qk);
        c->kv.strides[0] = pages->page_bytes / element;
    }
    c->q.tensor.device = c->kv.tensor.device = (fmla_device){FMLA_DEVICE_CUDA, 0};
    c->args.kv_format = pages->format;
}

static void check_stays(const struct fake_launch *launch, const char *kernel, int64_t blocks)
{
    CHECK(!strcmp(launch->kernel, kernel), "%s, not %s", launch->kernel, kernel);
    CHECK_ALL({launch->config.grid_x, blocks}, {launch->config.block_x, 384},
              {launch->config.shared_bytes, 227 * 1024}, {launch->config.num_attributes, 1});
    CHECK(launch->attributes[0].id == CU_LAUNCH_OVERLAP && launch->attributes[0].value.overlap == 1,
          "attribute %u", launch->attributes[0].id);
}

static void check_keys(const struct sparse_cache_params *kv, const struct pages *pages, int64_t slot_bytes)
{
    CHECK_ALL({offset(kv->data, 1), 0}, {kv->slots, pages->format ? 9 * pages->page_size : 100},
              {kv->page_size, pages->page_size}, {kv->page_bytes, pages->page_bytes},
              {kv->slot_bytes, slot_bytes});
}

/* Keys of a format, and the kernel that takes them. */
struct hopper_format {
    struct pages pages;
    int64_t d_qk, slot_bytes;
    const char *kernel;
};

/* A call over such keys: chosen, and one launch of that kernel. */
static const struct fake_launch *launch_of(const struct hopper_format *format)
{
    struct drawn_prefill c;
    hopper_call(&c, &format->pages, format->d_qk);
    CHECK(!strcmp(kernel_of(&c), "cuda-sm90"), "%s: %s", format->kernel, kernel_of(&c));
    CHECK_EQ(run(&c), 1);
    const struct fake_launch *launch = &fake->launch[fake->launches - 1];
    check_stays(launch, format->kernel, S_Q);
    return launch;
}

/* Flat keys and pages of bf16, in both widths. */
static void hopper_bf16(void)
{
    static const struct hopper_format all[] = {
        {{0, 1, 1152, 0}, 576, 0, "sm90_sparse_prefill_bf16_576"},
        {{0, 1, 1024, 0}, 512, 0, "sm90_sparse_prefill_bf16_512"},
        {{FMLA_KV_BF16, 61, 61 * 1152, 1152}, 576, 1152, "sm90_sparse_prefill_bf16_576"},
        {{FMLA_KV_BF16, 64, 64 * 1024, 1024}, 512, 1024, "sm90_sparse_prefill_bf16_512"},
    };
    fake->capability = 90, fake->sms = 132;
    for (int i = 0; i < (int)(sizeof all / sizeof all[0]); i++) {
        const int64_t d_qk = all[i].d_qk;
        const struct fake_launch *launch = launch_of(&all[i]);
        const struct sparse_prefill_sm90_params p = sparse_prefill_sm90_params_of(launch);
        const struct expected_map queries = {0, 0, d_qk, H_Q, S_Q, {H_Q * d_qk, d_qk}};
        const struct expected_map results = {5, 0, 512, H_Q, S_Q, {H_Q * 512, 512}};
        CHECK_ALL({p.items, S_Q}, {p.call.d_qk, d_qk});
        check_keys(&p.call.kv, &all[i].pages, all[i].slot_bytes);
        check_map(&p.queries, &queries);
        check_map(&p.results, &results);
    }
}

/* FP8 pages go to sparse decode's kernel: a token is a request. Of FP8_584 a token is 576 bytes, its scales 8. */
static void hopper_fp8(void)
{
    static const struct hopper_format all[] = {
        {{FMLA_KV_FP8_656, 64, 64 * 656, 656}, 576, 656, "sm90_sparse_prefill_fp8_656"},
        {{FMLA_KV_FP8_656, 1, 656, 656}, 576, 0, "sm90_sparse_prefill_fp8_656"},
        {{FMLA_KV_FP8_656, 61, 61 * 672 + 16, 672}, 576, 672, "sm90_sparse_prefill_fp8_656"},
        {{FMLA_KV_FP8_584, 64, 64 * 584, 584}, 512, 576, "sm90_sparse_prefill_fp8_584"},
        {{FMLA_KV_FP8_584, 2, 2 * 584, 584}, 512, 576, "sm90_sparse_prefill_fp8_584"},
        {{FMLA_KV_FP8_584, 61, 61 * 584 + 8, 584}, 512, 576, "sm90_sparse_prefill_fp8_584"},
    };
    fake->capability = 90, fake->sms = 132;
    for (int i = 0; i < (int)(sizeof all / sizeof all[0]); i++) {
        const int64_t d_qk = all[i].d_qk;
        const struct fake_launch *launch = launch_of(&all[i]);
        const struct sparse_prefill_fp8_params p = sparse_prefill_fp8_params_of(launch);
        CHECK_ALL({p.call.b, S_Q}, {p.call.s_q, 1}, {p.call.h_q, H_Q}, {p.call.d_qk, d_qk},
                  {p.call.split.num_partitions, S_Q}, {p.call.topk.topk, TOPK}, {p.call.topk.extra_topk, 0},
                  {offset(p.call.q, 0), 0}, {p.call.q_stride[0], H_Q * d_qk}, {p.call.q_stride[2], d_qk},
                  {offset(p.call.output.out, 5), 0}, {p.call.output.out_stride[0], H_Q * 512},
                  {p.call.output.out_stride[2], 512}, {offset(p.call.cache[0].indices, 2), 0},
                  {p.call.cache[0].indices_stride[0], TOPK});
        check_keys(&p.call.cache[0], &all[i].pages, all[i].slot_bytes);
    }
}

/* Tiles of heads and tokens to blocks of threads that stay with a tile, no more than there are SMs unless a token has more
 * tiles; where results go. */
static void hopper_fp8_tiles(void)
{
    static const struct {
        int64_t tokens, heads, tiles, workers;
    } all[] = {{1, 1, 1, 1},       {5, 64, 1, 5},      {1000, 64, 1, 132},
               {1000, 128, 2, 66}, {1000, 192, 3, 44}, {3, 64 * 140, 140, 1}};
    fake->capability = 90, fake->sms = 132;
    for (int i = 0; i < (int)(sizeof all / sizeof all[0]); i++) {
        const int64_t heads = all[i].heads;
        struct drawn_prefill c;
        prefill_call(&c, all[i].tokens, heads, 1, 0);
        HELD(&c.kv, region(1), u8, 4, 9, 64, 1, 656);
        c.kv.tensor.device = (fmla_device){FMLA_DEVICE_CUDA, 0};
        c.args.kv_format = FMLA_KV_FP8_656;
        CHECK_EQ(run(&c), 1);
        const struct fake_launch *launch = &fake->launch[fake->launches - 1];
        const struct sparse_prefill_fp8_params p = sparse_prefill_fp8_params_of(launch);
        CHECK_ALL({launch->config.grid_x, all[i].workers * all[i].tiles},
                  {p.call.split.num_partitions, all[i].workers}, {p.call.b, all[i].tokens},
                  {p.call.tiles, all[i].tiles}, {p.call.tiles_of_token, all[i].tiles});
        CHECK(divides(p.call.tiles_divisor, (uint32_t)all[i].tiles), "%d: tiles", i);
        CHECK(divides(p.call.token_divisor, (uint32_t)all[i].tiles), "%d: tiles of a token", i);
        CHECK_ALL({p.call.h_q, heads}, {offset(p.call.topk.length, 3), 0},
                  {offset(p.call.output.rules.attn_sink, 4), 0}, {offset(p.max_logits, 6), 0},
                  {p.max_stride, heads}, {offset(p.call.output.lse, 7), 0},
                  {p.call.output.lse_stride[0], heads}, {p.call.output.lse_stride[1], 1});
    }
}

/* A call that Hopper's kernel does not take for the argument: not chosen, and if forced refused by its name. NULL: it is
 * taken. */
static void check_taken(struct drawn_prefill *c, const char *label, const char *argument, const char *words)
{
    char expected[160];
    c->args.kernel = NULL;
    CHECK(!strcmp(kernel_of(c), argument ? "cuda" : "cuda-sm90"), "%s: %s", label, kernel_of(c));
    c->args.kernel = "cuda-sm90";
    if (!argument) {
        CHECK(!strcmp(kernel_of(c), "cuda-sm90"), "%s: %s", label, kernel_of(c));
        return;
    }
    snprintf(expected, sizeof expected, "kernel cuda-sm90 takes|%s", words);
    check_rejected(label, fmla_sparse_prefill(&c->args), FMLA_UNSUPPORTED, "sparse_prefill", argument,
                   expected);
}

/* What it takes of queries, results, scales and lists is the same for keys of every format. */
static void hopper_refuses(void)
{
    static const struct pages formats[] = {
        {0, 1, 1152, 0}, {FMLA_KV_FP8_656, 64, 64 * 656, 656}, {FMLA_KV_FP8_584, 64, 64 * 584, 584}};
    static const int64_t far = INT64_C(1) << 39; /* 2^40 bytes */
    static const char *const arguments[] = {NULL,  "q",   "q",   "q",   "q",   "q",  NULL,
                                            "out", "out", "out", "out", "out", NULL, "softmax_scale"};
    enum { CASES = sizeof arguments / sizeof arguments[0] };
    fake->capability = 90;
    for (int n = 0; n < 3 * CASES; n++) {
        const int i = n % CASES;
        const struct pages *pages = &formats[n / CASES];
        const int64_t d_qk = pages->format == FMLA_KV_FP8_584 ? 512 : 576;
        struct drawn_prefill c;
        char label[32];
        snprintf(label, sizeof label, "format %d, case %d", pages->format, i);
        hopper_call(&c, pages, d_qk);
        switch (i) {
        case 1: c.q.tensor.byte_offset = 2; break;
        case 2: c.q.strides[1] = d_qk + 1, c.q.strides[0] = H_Q * (d_qk + 8); break;
        case 3: c.q.strides[0] = 0; break;
        case 4: c.q.strides[0] = far; break;
        case 5: c.q.strides[1] = far, c.q.strides[0] = d_qk; break;
        case 6: c.q.strides[0] = far - 8; break;
        case 7: c.out.tensor.byte_offset = 2; break;
        case 8: c.out.strides[0] += 2; break;
        case 9: c.out.strides[1] = 514, c.out.strides[0] = H_Q * 520; break;
        case 10: c.out.strides[0] = far; break;
        case 11: c.out.strides[1] = far, c.out.strides[0] = 512; break;
        case 12: c.out.strides[0] = far - 8; break;
        case 13: c.args.softmax_scale = -1.0f; break;
        default: break;
        }
        check_taken(&c, label, arguments[i],
                    i == 13  ? "a scale of at least 1e-30"
                    : i >= 7 ? "an output whose|multiples of 16 bytes|below 2^40"
                             : "queries whose|multiples of 16 bytes|below 2^40");
        c.args.kernel = NULL;
        CHECK_EQ(run(&c), 1);
        /* So long a list. */
        hopper_call(&c, pages, d_qk);
        HELD(&c.indices, region(2), i32, 3, S_Q, 1, INT32_MAX - 255 - i % 2);
        c.indices.tensor.device = (fmla_device){FMLA_DEVICE_CUDA, 0};
        check_taken(&c, label, i % 2 ? NULL : "indices", "fewer than 2^31 - 256 entries");
    }
}

/* Of keys each format wants its own. */
static void hopper_refuses_keys(void)
{
    static const struct {
        const char *label;
        struct pages pages;
        uint64_t offset;
        const char *words; /* NULL: taken */
    } all[] = {
        {"flat, base", {0, 1, 1152, 0}, 8, "keys whose base and strides"},
        {"flat, token", {0, 1, 1160, 0}, 0, "keys whose base and strides"},
        {"bf16, base", {FMLA_KV_BF16, 4, 4 * 1152, 1152}, 2, "keys whose base and strides"},
        {"bf16, page", {FMLA_KV_BF16, 4, 4 * 1152 + 8, 1152}, 0, "keys whose base and strides"},
        {"bf16, token", {FMLA_KV_BF16, 4, 4 * 1160, 1160}, 0, "keys whose base and strides"},
        {"fp8_656, base", {FMLA_KV_FP8_656, 4, 4 * 656, 656}, 8, "FP8_656 pages whose base and strides"},
        {"fp8_656, page", {FMLA_KV_FP8_656, 4, 4 * 656 + 4, 656}, 0, "FP8_656 pages whose base and strides"},
        {"fp8_656, token", {FMLA_KV_FP8_656, 4, 4 * 660, 660}, 0, "FP8_656 pages whose base and strides"},
        {"fp8_656, pages of a token",
         {FMLA_KV_FP8_656, 1, 664, 1},
         0,
         "FP8_656 pages whose base and strides"},
        {"fp8_656, a token's own stride", {FMLA_KV_FP8_656, 1, 672, 1}, 0, NULL},
        {"fp8_584, base", {FMLA_KV_FP8_584, 4, 4 * 584, 584}, 8, "FP8_584 pages whose base|even page_size"},
        {"fp8_584, page",
         {FMLA_KV_FP8_584, 4, 4 * 584 + 2, 584},
         0,
         "FP8_584 pages whose base|even page_size"},
        {"fp8_584, odd", {FMLA_KV_FP8_584, 61, 61 * 584, 584}, 0, "FP8_584 pages whose base|even page_size"},
        {"fp8_584, of a token", {FMLA_KV_FP8_584, 1, 584, 1}, 0, "FP8_584 pages whose base|even page_size"},
    };
    fake->capability = 90;
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        const int64_t d_qk = all[i].pages.format == FMLA_KV_FP8_584 ? 512 : 576;
        struct drawn_prefill c;
        hopper_call(&c, &all[i].pages, d_qk);
        c.kv.tensor.byte_offset = all[i].offset;
        check_taken(&c, all[i].label, all[i].words ? "kv" : NULL, all[i].words);
        c.args.kernel = NULL;
        CHECK_EQ(run(&c), 1);
    }
    struct drawn_prefill c;
    /* One page has no stride. */
    hopper_call(&c, &(struct pages){FMLA_KV_FP8_584, 61, 61 * 584, 584}, 512);
    c.kv.shape[0] = 1;
    check_taken(&c, "one page", NULL, NULL);
    /* Of a second key head the keys, too, begin at a multiple. */
    prefill_call(&c, S_Q, H_Q, H_KV, 0);
    c.kv.strides[1] = 580, c.kv.strides[0] = H_KV * 584;
    check_taken(&c, "key heads", "kv", "keys whose base and strides");
    /* Without a page there is nothing to be aligned. */
    hopper_call(&c, &(struct pages){FMLA_KV_FP8_656, 4, 4 * 656, 656}, 576);
    c.kv.shape[0] = 0, c.kv.tensor.byte_offset = 8;
    check_taken(&c, "no pages", NULL, NULL);
    CHECK_EQ(run(&c), 1);
    CHECK_EQ(sparse_prefill_fp8_params_of(&fake->launch[fake->launches - 1]).call.cache[0].slots, 0);
}

/* Tiles of a launch, with those that blocks of threads step over at the end, are counted in 32 bits. */
static void hopper_many_tokens(void)
{
    fake->capability = 90, fake->sms = 132;
    struct drawn_prefill c;
    prefill_call(&c, INT32_MAX, 128, 1, 0);
    const int launches = run(&c);
    CHECK_EQ(launches, 3);
    int64_t first = 0;
    for (int i = 0; i < launches; i++) {
        const struct sparse_prefill_sm90_params p = sparse_prefill_sm90_params_of(&fake->launch[i]);
        CHECK(p.items > 0 && p.items <= INT32_MAX - 132, "%d tiles at once", p.items);
        CHECK_ALL({p.items, 2 * (int64_t)p.call.s_q}, {offset(p.call.q, 0), first * 128 * 576 * 2},
                  {offset(p.call.kv.indices, 2), first * TOPK * 4},
                  {offset(p.call.out, 5), first * 128 * 512 * 2});
        const struct expected_map queries = {0,          first * 128 * 576 * 2, 576, 128,
                                             p.call.s_q, {128 * 576, 576}};
        const struct expected_map results = {5,          first * 128 * 512 * 2, 512, 128,
                                             p.call.s_q, {128 * 512, 512}};
        check_map(&p.queries, &queries);
        check_map(&p.results, &results);
        first += p.call.s_q;
    }
    CHECK_EQ(first, INT32_MAX);
}

int main(int argc, char **argv)
{
    return RUN_SCENARIOS(argc, argv, "test_cuda_prefill", key_heads, formats, many_tokens, nothing, failing,
                         chosen, hopper, hopper_bf16, hopper_fp8, hopper_fp8_tiles, hopper_refuses,
                         hopper_refuses_keys, hopper_many_tokens);
}

/* SPDX-License-Identifier: MIT
 *
 * Tests the host side of sparse prefill on a GPU: the kernel chosen, its launches, the TMA maps of queries and
 * results. What kernels are passed of a call's tensors, in each of several launches: test_cuda_random.c.
 */
#include "fake_cuda/launches.h"

#include "cuda/kernels.h"
#include "cuda/sm90/sparse_prefill/choice.h"

#include <math.h>

enum { S_Q = 5, H_Q = 40, H_KV = 2, GROUP = H_Q / H_KV, TOPK = 70 };
enum { TILES = (GROUP + SPARSE_WARPS - 1) / SPARSE_WARPS };

/* Makes a call for the kernel without tensor cores, which takes every call. */
static void portable(struct sparse_prefill_call *c, int64_t s_q, int64_t h_q, int64_t h_kv)
{
    prefill_call(c, s_q, h_q, h_kv);
    c->args.kernel = "cuda";
}

/* Runs it without a workspace and returns the number of launches. */
static int run(struct sparse_prefill_call *c)
{
    const int before = fake->launches;
    CHECK_OK(sparse_prefill_run(c));
    CHECK_EQ(c->bytes, 0);
    return fake->launches - before;
}

/* ---- What kernels are passed ------------------------------------------------------------------ */

/* One launch per key head; without keys too, because rows are still written. */
static void key_heads(void)
{
    for (int without = 0; without < 2; without++) {
        struct sparse_prefill_call c;
        portable(&c, S_Q, H_Q, H_KV);
        if (without) c.kv.shape[0] = 0, c.kv.tensor.data = NULL;
        CHECK_EQ(run(&c), H_KV);
        for (int k = 0; k < H_KV; k++) {
            const struct sparse_prefill_params p = PARAMS(sparse_prefill_params, launched(k));
            CHECK_ALL(GRID(launched(k), S_Q * TILES, 32 * SPARSE_WARPS, 0), {p.kv.slots, without ? 0 : 100});
        }
    }
}

/* Without a named kernel a call finds one, also on a GPU before Hopper. */
static void chosen(void)
{
    fake->capability = 80;
    struct sparse_prefill_call c;
    prefill_call(&c, S_Q, H_Q, H_KV);
    CHECK(!strcmp(kernel_of(OP_SPARSE_PREFILL, &c.args), "cuda-sm80"), "%s",
          kernel_of(OP_SPARSE_PREFILL, &c.args));
    CHECK_EQ(run(&c), H_KV);
    const struct sparse_decode_params p = PARAMS(sparse_decode_params, launched(0));
    CHECK(!strncmp(launched(0)->kernel, "sm80_sparse_decode_bf16_", 24), "%s", launched(0)->kernel);
    CHECK_ALL({p.split.even_splits, 1}, {!p.split.part_out, true});
}

/* ---- Hopper's ----------------------------------------------------------------------------------- */

/* Checks a TMA map: `columns` of `heads` heads of `tokens` tokens, from `at` bytes of a region on, in
 * boxes of a tile and 128 columns; strides in elements. */
static void check_map(const struct tensor_map *map, int region, int64_t at, int64_t columns, int64_t heads,
                      int64_t tokens, int64_t token_stride, int64_t head_stride)
{
    const struct fake_tensor *t = passed_of(map);
    const int64_t sizes[] = {64, heads, columns / 64, tokens, 1}, box[] = {64, 64, 2, 1, 1};
    CHECK_ALL({t->type, CU_TENSOR_BFLOAT16}, {t->rank, 5}, {t->swizzle, CU_TENSOR_SWIZZLE_128B},
              {offset(t->base, region), at});
    for (int i = 0; i < 5; i++) CHECK_ALL({t->sizes[i], sizes[i]}, {t->box[i], box[i]}, {t->steps[i], 1});
    if (heads > 1) CHECK_EQ(t->strides[0], 2 * head_stride);
    CHECK_EQ(t->strides[1], 64 * 2);
    if (tokens > 1) CHECK_EQ(t->strides[2], 2 * token_stride);
}

/* One launch per key head: persistent CTAs, no more than there are SMs, and the head's queries and results
 * in boxes. */
static void hopper(void)
{
    enum { HEADS = 80, TILES_OF_HEAD = 2, Q_HEAD = 584, OUT_HEAD = 520 };
    static const int64_t tokens[] = {1, S_Q, 1000}, q_token = 2 * HEADS * Q_HEAD + 8,
                         out_token = 2 * HEADS * OUT_HEAD + 16;
    for (int n = 0; n < 3; n++) {
        struct sparse_prefill_call c;
        prefill_call(&c, tokens[n], 2 * HEADS, H_KV);
        c.q.strides[0] = q_token, c.q.strides[1] = Q_HEAD;
        c.out.strides[0] = out_token, c.out.strides[1] = OUT_HEAD;
        CHECK(!strcmp(kernel_of(OP_SPARSE_PREFILL, &c.args), "cuda-sm90"), "%s",
              kernel_of(OP_SPARSE_PREFILL, &c.args));
        const int64_t items = tokens[n] * TILES_OF_HEAD;
        CHECK_EQ(run(&c), H_KV);
        for (int k = 0; k < H_KV; k++) {
            const struct fake_launch *launch = &fake->launch[fake->launches - H_KV + k];
            const struct sparse_prefill_sm90_params p = PARAMS(sparse_prefill_sm90_params, launch);
            CHECK(!strcmp(launch->kernel, "sm90_sparse_prefill_bf16_576"), "%s", launch->kernel);
            CHECK_ALL(GRID(launch, items < 132 ? items : 132, 384, 227 * 1024), {p.items, items});
            check_map(&p.queries, 0, k * HEADS * Q_HEAD * 2, 576, HEADS, tokens[n], q_token, Q_HEAD);
            check_map(&p.results, 5, k * HEADS * OUT_HEAD * 2, 512, HEADS, tokens[n], out_token, OUT_HEAD);
        }
    }
}

/* Pages of a format: their size, and the strides of pages and tokens in bytes. */
struct pages {
    int32_t format;
    int64_t page_size, page_bytes, slot_bytes;
};

/* Makes a call of one key head over 9 such pages; without a format, over flat keys. */
static void hopper_call(struct sparse_prefill_call *c, const struct pages *pages, int64_t d_qk)
{
    const int64_t element = pages->format == FMLA_KV_FP8_656 || pages->format == FMLA_KV_FP8_584 ? 1 : 2;
    const struct layout layout = SHAPE_OF(
        layout, .s_q = S_Q, .h_q = H_Q, .h_kv = 1, .topk = TOPK, .page_size = pages->page_size, .d_qk = d_qk,
        .format = pages->format, .flat = !pages->format, .has = HAS_LENGTHS | HAS_SINK | HAS_LSE);
    sparse_prefill_make(c, &layout, gpu_number(0));
    c->kv.strides[0] = pages->page_bytes / element;
    if (pages->format) c->kv.strides[1] = pages->slot_bytes / element;
}

static void check_stays(const struct fake_launch *launch, const char *kernel, int64_t blocks)
{
    CHECK(!strcmp(launch->kernel, kernel), "%s, not %s", launch->kernel, kernel);
    CHECK_ALL(GRID(launch, blocks, 384, 227 * 1024), {launch->config.num_attributes, 1});
    CHECK(launch->attributes[0].id == CU_LAUNCH_OVERLAP && launch->attributes[0].value.overlap == 1,
          "attribute %u", launch->attributes[0].id);
}

/* Keys of a format, and the kernel for them. */
struct hopper_format {
    struct pages pages;
    int64_t d_qk;
    const char *kernel;
};

/* Makes a call over such keys; it must be chosen, with one launch of that kernel. */
static const struct fake_launch *launch_of(const struct hopper_format *format)
{
    struct sparse_prefill_call c;
    hopper_call(&c, &format->pages, format->d_qk);
    CHECK(!strcmp(kernel_of(OP_SPARSE_PREFILL, &c.args), "cuda-sm90"), "%s: %s", format->kernel,
          kernel_of(OP_SPARSE_PREFILL, &c.args));
    CHECK_EQ(run(&c), 1);
    const struct fake_launch *launch = launched(0);
    check_stays(launch, format->kernel, S_Q);
    return launch;
}

/* Flat keys and pages of bf16, in both widths; FP8 pages use sparse decode's kernel. A token of FP8_584 is 576
 * bytes, its scales 8. */
static void hopper_formats(void)
{
    static const struct hopper_format all[] = {
        {{0, 1, 1152, 0}, 576, "sm90_sparse_prefill_bf16_576"},
        {{0, 1, 1024, 0}, 512, "sm90_sparse_prefill_bf16_512"},
        {{FMLA_KV_BF16, 61, 61 * 1152, 1152}, 576, "sm90_sparse_prefill_bf16_576"},
        {{FMLA_KV_BF16, 64, 64 * 1024, 1024}, 512, "sm90_sparse_prefill_bf16_512"},
        {{FMLA_KV_FP8_656, 64, 64 * 656, 656}, 576, "sm90_sparse_prefill_fp8_656"},
        {{FMLA_KV_FP8_656, 1, 656, 656}, 576, "sm90_sparse_prefill_fp8_656"},
        {{FMLA_KV_FP8_656, 61, 61 * 672 + 16, 672}, 576, "sm90_sparse_prefill_fp8_656"},
        {{FMLA_KV_FP8_584, 64, 64 * 584, 584}, 512, "sm90_sparse_prefill_fp8_584"},
        {{FMLA_KV_FP8_584, 2, 2 * 584, 584}, 512, "sm90_sparse_prefill_fp8_584"},
        {{FMLA_KV_FP8_584, 61, 61 * 584 + 8, 584}, 512, "sm90_sparse_prefill_fp8_584"},
    };
    for (int i = 0; i < (int)(sizeof all / sizeof all[0]); i++) {
        const struct fake_launch *launch = launch_of(&all[i]);
        if (all[i].pages.format > FMLA_KV_BF16) {
            CHECK_EQ(PARAMS(sparse_prefill_fp8_params, launch).decode.call.split.num_partitions, S_Q);
            continue;
        }
        const int64_t d_qk = all[i].d_qk;
        const struct sparse_prefill_sm90_params p = PARAMS(sparse_prefill_sm90_params, launch);
        check_map(&p.queries, 0, 0, d_qk, H_Q, S_Q, H_Q * d_qk, d_qk);
        check_map(&p.results, 5, 0, 512, H_Q, S_Q, H_Q * 512, 512);
    }
}

/* Persistent CTAs each stay with a tile of heads, no more CTAs than SMs unless a token has more tiles. */
static void hopper_fp8_tiles(void)
{
    static const struct {
        int64_t tokens, heads, tiles, workers;
    } all[] = {{1, 1, 1, 1},       {5, 64, 1, 5},      {1000, 64, 1, 132},
               {1000, 128, 2, 66}, {1000, 192, 3, 44}, {3, 64 * 140, 140, 1}};
    for (int i = 0; i < (int)(sizeof all / sizeof all[0]); i++) {
        const int64_t heads = all[i].heads;
        struct sparse_prefill_call c;
        prefill_call(&c, all[i].tokens, heads, 1);
        REGION(&c.kv, 1, u8, 4, 9, 64, 1, 656);
        c.args.kv_format = FMLA_KV_FP8_656;
        CHECK_EQ(run(&c), 1);
        const struct fake_launch *launch = launched(0);
        const struct sparse_prefill_fp8_params p = PARAMS(sparse_prefill_fp8_params, launch);
        CHECK_ALL({launch->config.grid_x, all[i].workers * all[i].tiles},
                  {p.decode.call.split.num_partitions, all[i].workers}, {p.decode.call.b, all[i].tokens},
                  {p.decode.call.tiles, all[i].tiles}, {p.decode.call.tiles_of_token, all[i].tiles});
        CHECK(divides(p.decode.call.tiles_divisor, (uint32_t)all[i].tiles), "%d: tiles", i);
        CHECK(divides(p.decode.call.token_divisor, (uint32_t)all[i].tiles), "%d: tiles of a token", i);
    }
}

/* Checks that Hopper's kernel refuses the call for the argument: it is not chosen, and if forced the error
 * names the argument. NULL: it takes the call. */
static void check_taken(struct sparse_prefill_call *c, const char *label, const char *argument,
                        const char *words)
{
    char expected[160];
    const char *const other =
        argument && !strcmp(argument, "indices") ? "cuda" : "cuda-sm80"; /* too long a list */
    snprintf(expected, sizeof expected, "kernel cuda-sm90 takes|%s", words ? words : "");
    check_left(label, OP_SPARSE_PREFILL, &c->args, "cuda-sm90", other, argument, expected);
}

/* Such a call is still one launch; a list that is too long, in every second case, is refused by itself. */
static void check_case(struct sparse_prefill_call *c, const struct pages *pages, int64_t d_qk,
                       const char *label, const char *argument, const char *words)
{
    static int lists;
    check_taken(c, label, argument, words);
    c->args.kernel = NULL;
    CHECK_EQ(run(c), 1);
    if (!d_qk) return;
    const int fits = lists++ % 2;
    hopper_call(c, pages, d_qk);
    REGION(&c->indices, 2, i32, 3, S_Q, 1, INT32_MAX - 255 - fits);
    check_taken(c, label, fits ? NULL : "indices", "fewer than 2^31 - 256 indices");
}

#define CASE(argument, words, ...)                                                                           \
    do {                                                                                                     \
        struct sparse_prefill_call c;                                                                        \
        hopper_call(&c, &formats[n], d_qk);                                                                  \
        __VA_ARGS__;                                                                                         \
        check_case(&c, &formats[n], d_qk, #__VA_ARGS__, argument, words);                                    \
    } while (0)

/* The accepted queries, results, scales and lists are the same for keys of every format. */
static void hopper_refuses(void)
{
    static const struct pages formats[] = {
        {0, 1, 1152, 0}, {FMLA_KV_FP8_656, 64, 64 * 656, 656}, {FMLA_KV_FP8_584, 64, 64 * 584, 584}};
    static const int64_t far = INT64_C(1) << 39; /* 2^40 bytes */
    static const char q[] = "queries whose|multiples of 16 bytes|below 2^40",
                      out[] = "an output whose|multiples of 16 bytes|below 2^40";
    for (int n = 0; n < 3; n++) {
        const int64_t d_qk = formats[n].format == FMLA_KV_FP8_584 ? 512 : 576;
        CASE(NULL, NULL, (void)0);
        CASE("q", q, c.q.tensor.byte_offset = 2);
        CASE("q", q, c.q.strides[1] = d_qk + 1, c.q.strides[0] = H_Q * (d_qk + 8));
        CASE("q", q, c.q.strides[0] = 0);
        CASE("q", q, c.q.strides[0] = far);
        CASE("q", q, c.q.strides[1] = far, c.q.strides[0] = d_qk);
        CASE(NULL, NULL, c.q.strides[0] = far - 8);
        CASE("out", out, c.out.tensor.byte_offset = 2);
        CASE("out", out, c.out.strides[0] += 2);
        CASE("out", out, c.out.strides[1] = 514, c.out.strides[0] = H_Q * 520);
        CASE("out", out, c.out.strides[0] = far);
        CASE("out", out, c.out.strides[1] = far, c.out.strides[0] = 512);
        CASE(NULL, NULL, c.out.strides[0] = far - 8);
        CASE("softmax_scale", "a scale of at least 1e-30", c.args.softmax_scale = -1.0f);
    }
}

static void check_pages(const char *label, struct pages pages, uint64_t offset, const char *words)
{
    struct sparse_prefill_call c;
    hopper_call(&c, &pages, pages.format == FMLA_KV_FP8_584 ? 512 : 576);
    c.kv.tensor.byte_offset = offset;
    check_case(&c, &pages, 0, label, words ? "kv" : NULL, words);
}

#define PAGES(...) ((struct pages){__VA_ARGS__})

/* Each format has its own requirements of keys. */
static void hopper_refuses_keys(void)
{
    enum { F16 = FMLA_KV_BF16, F656 = FMLA_KV_FP8_656, F584 = FMLA_KV_FP8_584 };
    static const char keys[] = "keys whose base and strides", f656[] = "FP8_656 pages whose base and strides",
                      f584[] = "FP8_584 pages whose base|even page_size";
    check_pages("flat, base", PAGES(0, 1, 1152, 0), 8, keys);
    check_pages("flat, token", PAGES(0, 1, 1160, 0), 0, keys);
    check_pages("bf16, base", PAGES(F16, 4, 4 * 1152, 1152), 2, keys);
    check_pages("bf16, page", PAGES(F16, 4, 4 * 1152 + 8, 1152), 0, keys);
    check_pages("bf16, token", PAGES(F16, 4, 4 * 1160, 1160), 0, keys);
    check_pages("fp8_656, base", PAGES(F656, 4, 4 * 656, 656), 8, f656);
    check_pages("fp8_656, page", PAGES(F656, 4, 4 * 656 + 4, 656), 0, f656);
    check_pages("fp8_656, token", PAGES(F656, 4, 4 * 660, 660), 0, f656);
    check_pages("fp8_656, pages of a token", PAGES(F656, 1, 664, 1), 0, f656);
    check_pages("fp8_656, a token's own stride", PAGES(F656, 1, 672, 1), 0, NULL);
    check_pages("fp8_584, base", PAGES(F584, 4, 4 * 584, 584), 8, f584);
    check_pages("fp8_584, page", PAGES(F584, 4, 4 * 584 + 2, 584), 0, f584);
    check_pages("fp8_584, odd", PAGES(F584, 61, 61 * 584, 584), 0, f584);
    check_pages("fp8_584, of a token", PAGES(F584, 1, 584, 1), 0, f584);
    struct sparse_prefill_call c;
    /* The stride of a single page is unused. */
    hopper_call(&c, &(struct pages){FMLA_KV_FP8_584, 61, 61 * 584, 584}, 512);
    c.kv.shape[0] = 1;
    check_taken(&c, "one page", NULL, NULL);
    /* The keys of a second key head must also begin at a multiple. */
    prefill_call(&c, S_Q, H_Q, H_KV);
    c.kv.strides[1] = 580, c.kv.strides[0] = H_KV * 584;
    check_taken(&c, "key heads", "kv", "keys whose base and strides");
    /* Without pages nothing must be aligned. */
    hopper_call(&c, &(struct pages){FMLA_KV_FP8_656, 4, 4 * 656, 656}, 576);
    c.kv.shape[0] = 0, c.kv.tensor.byte_offset = 8;
    check_taken(&c, "no pages", NULL, NULL);
    CHECK_EQ(run(&c), 1);
    CHECK_EQ(PARAMS(sparse_prefill_fp8_params, launched(0)).decode.call.cache[0].slots, 0);
}

/* The tiles of a launch, including those that CTAs step past at the end, are counted in 32 bits. */
static void hopper_many_tokens(void)
{
    struct sparse_prefill_call c;
    prefill_call(&c, INT32_MAX, 128, 1);
    CHECK_EQ(run(&c), 3);
    for (int i = 0; i < 3; i++) {
        const int32_t items = PARAMS(sparse_prefill_sm90_params, &fake->launch[i]).items;
        CHECK(items > 0 && items <= INT32_MAX - 132, "%d tiles at once", items);
    }
}

int main(int argc, char **argv)
{
    return RUN_SCENARIOS(argc, argv, "test_cuda_prefill", key_heads, chosen, hopper, hopper_formats,
                         hopper_fp8_tiles, hopper_refuses, hopper_refuses_keys, hopper_many_tokens);
}

/* SPDX-License-Identifier: MIT
 *
 * Sparse prefill on a GPU, the host's side: which kernel takes a call, what it is told of each key head, how TMA is told of the
 * queries, and how calls of more tokens than a launch can count are taken apart.
 */
#include "fake_cuda/calls.h"

#include "cuda/kernels.h"

#include <math.h>

static const fmla_dtype bytes = {FMLA_TYPE_UINT, 8, 1};

enum {
    S_Q = 5,
    H_Q = 40,
    H_KV = 2,
    GROUP = H_Q / H_KV,
    TOPK = 70,
    TILES = (GROUP + SPARSE_WARPS - 1) / SPARSE_WARPS
};

/* A call by the kernel without tensor cores, which takes all. */
static void portable(struct prefill_call *c, int64_t s_q, int64_t h_q, int64_t h_kv)
{
    prefill_call(c, s_q, h_q, h_kv, 0);
    c->args.kernel = "cuda";
}

/* The launches of it. */
static int run(struct prefill_call *c)
{
    size_t size = 77, alignment = 0;
    const int before = fake->launches;
    CHECK(fmla_sparse_prefill_workspace_size(&c->args, &size, &alignment) == FMLA_OK, "%s",
          fmla_last_error());
    CHECK_EQ(size, 0);
    CHECK(alignment && !(alignment & (alignment - 1)), "alignment is %zu", alignment);
    CHECK(fmla_sparse_prefill(&c->args) == FMLA_OK, "%s", fmla_last_error());
    return fake->launches - before;
}

static struct sparse_prefill_params params_of(const struct fake_launch *launch)
{
    struct sparse_prefill_params params;
    memcpy(&params, launch->parameters, sizeof params);
    return params;
}

static bool divides(struct divisor divisor, uint32_t by)
{
    return 1234567u * (uint64_t)divisor.multiplier >> divisor.shift == 1234567u / by;
}

static int64_t offset(const void *at, int part)
{
    return (const char *)at - memory[part];
}

/* ---- What kernels are told -------------------------------------------------------------------- */

/* A launch a key head, over what is that head's. */
static void key_heads(void)
{
    fake_open();
    struct prefill_call c;
    portable(&c, S_Q, H_Q, H_KV);
    c.args.softmax_scale = 0.25f, c.args.log_base = FMLA_LOG_BASE_2;
    c.args.lse_empty = FMLA_LSE_EMPTY_NEGATIVE_INFINITY;
    CHECK_EQ(run(&c), H_KV);
    for (int k = 0; k < H_KV; k++) {
        const struct fake_launch *launch = &fake->launch[k];
        const struct sparse_prefill_params p = params_of(launch);
        CHECK(!strcmp(launch->kernel, "sparse_prefill_bf16"), "%s", launch->kernel);
        CHECK_EQ(launch->config.grid_x, S_Q * TILES);
        CHECK_EQ(launch->config.block_x, 32 * SPARSE_WARPS);
        CHECK_EQ(launch->config.shared_bytes, 0);
        CHECK_EQ(p.s_q, S_Q);
        CHECK_EQ(p.h_q, GROUP);
        CHECK_EQ(p.d_qk, 576);
        CHECK_EQ(p.topk, TOPK);
        CHECK_EQ(p.tiles, TILES);
        CHECK(divides(p.tiles_divisor, TILES) && divides(p.kv.page_divisor, 1), "%s", "divisors");
        CHECK(p.scale == 0.25f && fabsf(p.scale_log2 - 0.25f * 1.442695041f) < 1e-7f, "%f", (double)p.scale);
        CHECK_EQ(offset(p.q, 0), k * GROUP * 576 * 2);
        CHECK_EQ(p.q_stride[0], H_Q * 576);
        CHECK_EQ(p.q_stride[1], 576);
        CHECK_EQ(offset(p.kv.data, 1), k * 576 * 2);
        CHECK_EQ(p.kv.slots, 100);
        CHECK_EQ(p.kv.page_size, 1);
        CHECK_EQ(p.kv.page_bytes, H_KV * 576 * 2);
        CHECK_EQ(offset(p.kv.indices, 2), k * TOPK * 4);
        CHECK_EQ(p.kv.indices_stride[0], H_KV * TOPK);
        CHECK_EQ(offset(p.topk_length, 3), 0);
        CHECK_EQ(offset(p.rules.attn_sink, 4), k * GROUP * 4);
        CHECK(p.rules.lse_of_empty == -INFINITY && fabsf(p.rules.lse_factor - 1.442695041f) < 1e-7f, "%f",
              (double)p.rules.lse_factor);
        CHECK_EQ(offset(p.out, 5), k * GROUP * 512 * 2);
        CHECK_EQ(p.out_stride[0], H_Q * 512);
        CHECK_EQ(p.out_stride[1], 512);
        CHECK_EQ(offset(p.max_logits, 6), k * GROUP * 4);
        CHECK_EQ(offset(p.lse, 7), k * GROUP * 4);
        CHECK_EQ(p.max_stride, H_Q);
        CHECK_EQ(p.lse_stride, H_Q);
        CHECK_EQ(p.pairs_aligned, 1);
    }
    /* What is left out. */
    portable(&c, S_Q, H_Q, H_KV);
    c.args.topk_length = c.args.attn_sink = c.args.max_logits = c.args.lse = NULL;
    CHECK_EQ(run(&c), H_KV);
    const struct sparse_prefill_params p = params_of(&fake->launch[fake->launches - 1]);
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
        CHECK_EQ(params_of(&fake->launch[fake->launches - 1]).pairs_aligned, all[i].aligned);
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
    fake_open();
    for (int i = 0; i < 3; i++) {
        struct prefill_call c;
        portable(&c, S_Q, 64, 1);
        const int64_t d_qk = all[i].format == FMLA_KV_FP8_584 ? 512 : 576;
        HELD(&c.q, memory[0], bf16, 3, S_Q, 64, d_qk);
        HELD(&c.kv, memory[1], all[i].format == FMLA_KV_BF16 ? bf16 : bytes, 4, 9, 64, 1, all[i].token);
        c.q.tensor.device = c.kv.tensor.device = (fmla_device){FMLA_DEVICE_CUDA, 0};
        c.args.kv_format = all[i].format;
        CHECK_EQ(run(&c), 1);
        const struct fake_launch *launch = &fake->launch[i];
        const struct sparse_prefill_params p = params_of(launch);
        CHECK(!strcmp(launch->kernel, all[i].kernel), "%s", launch->kernel);
        CHECK_EQ(launch->config.grid_x, S_Q * 8);
        CHECK_EQ(p.d_qk, d_qk);
        CHECK_EQ(p.kv.slots, 9 * 64);
        CHECK_EQ(p.kv.page_size, 64);
        CHECK_EQ(p.kv.page_bytes, all[i].page_bytes);
        CHECK_EQ(p.kv.slot_bytes, all[i].slot_bytes);
        CHECK(divides(p.kv.page_divisor, 64), "%s", "page size");
    }
}

/* ---- More than a launch, and less ------------------------------------------------------------- */

/* Blocks of threads of a launch are fewer than 2^31. */
static void many_tokens(void)
{
    enum { HEADS = 128, TILES_OF_TOKEN = HEADS / SPARSE_WARPS };
    fake_open();
    struct prefill_call c;
    portable(&c, INT32_MAX, HEADS, 1);
    const int launches = run(&c);
    CHECK_EQ(launches, TILES_OF_TOKEN + 1);
    int64_t first = 0;
    for (int i = 0; i < launches; i++) {
        const struct sparse_prefill_params p = params_of(&fake->launch[i]);
        CHECK_EQ(fake->launch[i].config.grid_x, (int64_t)p.s_q * TILES_OF_TOKEN);
        CHECK(p.s_q > 0 && (int64_t)p.s_q * TILES_OF_TOKEN <= INT32_MAX, "%d tokens at once", p.s_q);
        CHECK_EQ(offset(p.q, 0), first * HEADS * 576 * 2);
        CHECK_EQ(offset(p.kv.data, 1), 0);
        CHECK_EQ(offset(p.kv.indices, 2), first * TOPK * 4);
        CHECK_EQ(offset(p.topk_length, 3), first * 4);
        CHECK_EQ(offset(p.rules.attn_sink, 4), 0);
        CHECK_EQ(offset(p.out, 5), first * HEADS * 512 * 2);
        CHECK_EQ(offset(p.max_logits, 6), first * HEADS * 4);
        CHECK_EQ(offset(p.lse, 7), first * HEADS * 4);
        first += p.s_q;
    }
    CHECK_EQ(first, INT32_MAX);
}

static void nothing(void)
{
    fake_open();
    struct prefill_call c;
    portable(&c, 0, H_Q, H_KV);
    c.q.tensor.data = c.indices.tensor.data = c.length.tensor.data = c.out.tensor.data = NULL;
    c.max_logits.tensor.data = c.lse.tensor.data = NULL;
    CHECK_EQ(run(&c), 0);
    /* No key, or no index: rows are written all the same. */
    portable(&c, S_Q, H_Q, H_KV);
    c.kv.shape[0] = 0, c.kv.tensor.data = NULL;
    CHECK_EQ(run(&c), H_KV);
    CHECK_EQ(params_of(&fake->launch[fake->launches - 1]).kv.slots, 0);
    portable(&c, S_Q, H_Q, H_KV);
    c.indices.shape[2] = 0, c.indices.tensor.data = NULL;
    CHECK_EQ(run(&c), H_KV);
    CHECK_EQ(params_of(&fake->launch[fake->launches - 1]).topk, 0);
}

/* A launch that fails is the last one. */
static void failing(void)
{
    fake_open();
    struct prefill_call c;
    portable(&c, S_Q, H_Q, H_KV);
    fake->fails[CALL_cuLaunchKernelEx] = FAKE_LAUNCH_FAILED;
    const int before = fake->calls[CALL_cuLaunchKernelEx];
    CHECK_EQ(fmla_sparse_prefill(&c.args), FMLA_DEVICE_ERROR);
    CHECK(!strncmp(fmla_last_error(), "sparse_prefill: cuda:0: ", 24), "%s", fmla_last_error());
    CHECK_EQ(fake->calls[CALL_cuLaunchKernelEx] - before, 1);
    CHECK_EQ(fake_depth(), 0);
}

/* By itself a call is some kernel's, and a GPU before Hopper has one too. */
static void chosen(void)
{
    fake_open();
    fake->capability = 80;
    struct prefill_call c;
    prefill_call(&c, S_Q, H_Q, H_KV, 0);
    const char *kernel = NULL;
    CHECK(fmla_sparse_prefill_kernel(&c.args, &kernel) == FMLA_OK && !strcmp(kernel, "cuda"), "%s",
          fmla_last_error());
    CHECK_EQ(run(&c), H_KV);
}

/* ---- Hopper's ----------------------------------------------------------------------------------- */

static const char *kernel_of(const struct prefill_call *c)
{
    const char *kernel = "";
    CHECK(fmla_sparse_prefill_kernel(&c->args, &kernel) == FMLA_OK, "%s", fmla_last_error());
    return kernel;
}

static struct sparse_prefill_sm90_params sm90_params_of(const struct fake_launch *launch)
{
    struct sparse_prefill_sm90_params params;
    memcpy(&params, launch->parameters, sizeof params);
    return params;
}

/* A launch a key head: blocks of threads that stay, no more than there are SMs, and the head's queries in boxes. */
static void hopper(void)
{
    enum { TILES_OF_HEAD = 2 };
    static const int64_t tokens[] = {1, S_Q, 1000};
    fake_open();
    fake->capability = 90, fake->sms = 132;
    for (int n = 0; n < 3; n++) {
        struct prefill_call c;
        prefill_call(&c, tokens[n], 2 * 80, H_KV, 0);
        CHECK(!strcmp(kernel_of(&c), "cuda-sm90"), "%s", kernel_of(&c));
        const int64_t items = tokens[n] * TILES_OF_HEAD;
        CHECK_EQ(run(&c), H_KV);
        for (int k = 0; k < H_KV; k++) {
            const struct fake_launch *launch = &fake->launch[fake->launches - H_KV + k];
            const struct sparse_prefill_sm90_params p = sm90_params_of(launch);
            CHECK(!strcmp(launch->kernel, "sm90_sparse_prefill_bf16_576"), "%s", launch->kernel);
            CHECK_EQ(launch->config.grid_x, items < 132 ? items : 132);
            CHECK_EQ(launch->config.block_x, SM90_SPARSE_PREFILL_THREADS);
            CHECK_EQ(launch->config.shared_bytes, SM90_SPARSE_PREFILL_SHARED_BYTES);
            CHECK_EQ(p.items, items);
            CHECK_EQ(p.call.h_q, 80);
            CHECK_EQ(p.call.tiles, TILES_OF_HEAD);
            CHECK(divides(p.call.tiles_divisor, TILES_OF_HEAD), "%s", "tiles");
            CHECK_EQ(offset(p.call.kv.data, 1), k * 576 * 2);
            int map;
            memcpy(&map, &p.queries, sizeof map);
            const struct fake_tensor *t = &fake->tensor[map % FAKE_TENSORS];
            CHECK_EQ(offset(t->base, 0), k * 80 * 576 * 2);
            const uint64_t sizes[] = {64, 80, 9, (uint64_t)tokens[n], 1};
            const uint32_t box[] = {64, 64, 2, 1, 1};
            for (int i = 0; i < 5; i++) {
                CHECK_EQ(t->sizes[i], sizes[i]);
                CHECK_EQ(t->box[i], box[i]);
            }
            CHECK_EQ(t->strides[0], 576 * 2);
            CHECK_EQ(t->strides[1], 64 * 2);
            if (tokens[n] > 1) CHECK_EQ(t->strides[2], 160 * 576 * 2);
        }
    }
    /* The other width. */
    struct prefill_call c;
    prefill_call(&c, S_Q, 64, 1, 0);
    HELD(&c.q, memory[0], bf16, 3, S_Q, 64, 512);
    HELD(&c.kv, memory[1], bf16, 4, 9, 64, 1, 512);
    c.q.tensor.device = c.kv.tensor.device = (fmla_device){FMLA_DEVICE_CUDA, 0};
    CHECK_EQ(run(&c), 1);
    const struct fake_launch *launch = &fake->launch[fake->launches - 1];
    CHECK(!strcmp(launch->kernel, "sm90_sparse_prefill_bf16_512"), "%s", launch->kernel);
    CHECK_EQ(sm90_params_of(launch).call.kv.page_size, 64);
}

/* Calls with one thing that Hopper's kernel does not take: not chosen, and if forced refused by the argument's name. */
static void hopper_refuses(void)
{
    static const char *const arguments[] = {"",   "q",   "q",   "q",   "kv",           "kv",
                                            "kv", "out", "out", "out", "softmax_scale"};
    fake_open();
    fake->capability = 90;
    for (int i = 0; i < 11; i++) {
        struct prefill_call c;
        prefill_call(&c, S_Q, H_Q, H_KV, 0);
        switch (i) {
        case 1: c.q.tensor.byte_offset = 2; break;
        case 2: c.q.strides[1] = 577, c.q.strides[0] = H_Q * 577; break;
        case 3: c.q.strides[0] = 0; break;
        case 4: c.kv.tensor.byte_offset = 8; break;
        case 5: c.kv.strides[0] = H_KV * 576 + 4; break;
        case 6: c.kv.strides[1] = 580, c.kv.strides[0] = H_KV * 584; break;
        case 7: c.out.tensor.byte_offset = 2; break;
        case 8: c.out.strides[0] += 2; break;
        case 9: c.out.strides[1] = 514, c.out.strides[0] = H_Q * 520; break;
        case 10: c.args.softmax_scale = -1.0f; break;
        default: break;
        }
        CHECK(!strcmp(kernel_of(&c), i ? "cuda" : "cuda-sm90"), "%d: %s", i, kernel_of(&c));
        CHECK_EQ(run(&c), H_KV);
        c.args.kernel = "cuda-sm90";
        if (i)
            check_rejected(arguments[i], fmla_sparse_prefill(&c.args), FMLA_UNSUPPORTED, "sparse_prefill",
                           arguments[i], "kernel cuda-sm90 takes");
        else
            CHECK_EQ(run(&c), H_KV);
    }
    /* So long a list. */
    struct prefill_call longest;
    prefill_call(&longest, 1, 64, 1, 0);
    HELD(&longest.indices, memory[2], i32, 3, 1, 1, INT32_MAX - 256);
    longest.indices.tensor.device = (fmla_device){FMLA_DEVICE_CUDA, 0};
    CHECK(!strcmp(kernel_of(&longest), "cuda-sm90"), "%s", kernel_of(&longest));
    longest.indices.shape[2] = INT32_MAX - 255;
    CHECK(!strcmp(kernel_of(&longest), "cuda"), "%s", kernel_of(&longest));
    longest.args.kernel = "cuda-sm90";
    check_rejected("indices", fmla_sparse_prefill(&longest.args), FMLA_UNSUPPORTED, "sparse_prefill",
                   "indices", "kernel cuda-sm90 takes");
    /* Bytes are not its. */
    struct prefill_call c;
    prefill_call(&c, S_Q, 64, 1, 0);
    HELD(&c.kv, memory[1], bytes, 4, 9, 64, 1, 656);
    c.kv.tensor.device = (fmla_device){FMLA_DEVICE_CUDA, 0};
    c.args.kv_format = FMLA_KV_FP8_656;
    CHECK(!strcmp(kernel_of(&c), "cuda"), "%s", kernel_of(&c));
}

/* Tiles of a launch, with those that blocks of threads step over at the end, are counted in 32 bits. */
static void hopper_many_tokens(void)
{
    fake_open();
    fake->capability = 90, fake->sms = 132;
    struct prefill_call c;
    prefill_call(&c, INT32_MAX, 128, 1, 0);
    const int launches = run(&c);
    CHECK_EQ(launches, 3);
    int64_t first = 0;
    for (int i = 0; i < launches; i++) {
        const struct sparse_prefill_sm90_params p = sm90_params_of(&fake->launch[i]);
        CHECK(p.items > 0 && p.items <= INT32_MAX - 132, "%d tiles at once", p.items);
        CHECK_EQ(p.items, 2 * (int64_t)p.call.s_q);
        CHECK_EQ(offset(p.call.q, 0), first * 128 * 576 * 2);
        CHECK_EQ(offset(p.call.kv.indices, 2), first * TOPK * 4);
        CHECK_EQ(offset(p.call.out, 5), first * 128 * 512 * 2);
        first += p.call.s_q;
    }
    CHECK_EQ(first, INT32_MAX);
}

int main(int argc, char **argv)
{
    static const struct scenario scenarios[] = {
        {"key heads", key_heads},
        {"formats", formats},
        {"many tokens", many_tokens},
        {"nothing", nothing},
        {"failing", failing},
        {"chosen", chosen},
        {"hopper", hopper},
        {"hopper refuses", hopper_refuses},
        {"hopper, many tokens", hopper_many_tokens},
    };
    return run_scenarios("test_cuda_prefill", scenarios, sizeof scenarios / sizeof scenarios[0], argc, argv);
}

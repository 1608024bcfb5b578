/* SPDX-License-Identifier: MIT
 *
 * Sparse prefill on a GPU: a launch for every key head, and for no more tokens than its blocks of threads can be counted for.
 * No plan. Hopper's kernel over bf16 keys cuts the tiles of a short call's last round, where they are few, and a second launch
 * joins their pieces.
 */
#include "cuda.h"
#include "kernels.h"
#include "split.h"

static const char op[] = "sparse_prefill";
enum { D_V = 512 };

/* What a launch takes. */
struct part {
    int64_t key_head;
    int64_t first, tokens;
};

static int64_t group_of(const struct sparse_prefill_problem *p)
{
    return p->h_q / p->h_kv;
}

/* Tiles of `heads` heads of a token. */
static int64_t tiles_of(const struct sparse_prefill_problem *p, int heads)
{
    return (group_of(p) + heads - 1) / heads;
}

/* A part as kernels are told of it: tokens and heads count from its first. */
static struct sparse_prefill_params parameters(const struct sparse_prefill_problem *p,
                                               const struct part *part, int heads)
{
    const int64_t head = part->key_head * group_of(p), first = part->first;
    const int64_t out_shape[] = {part->tokens, group_of(p)};
    struct sparse_cache kv = p->kv;
    kv.data += part->key_head * p->kv_head_bytes;
    kv.indices += first * kv.indices_stride[0] + part->key_head * kv.indices_stride[1];
    struct sparse_prefill_params params = {
        .s_q = (int32_t)part->tokens,
        .h_q = (int32_t)group_of(p),
        .d_qk = (int32_t)p->d_qk,
        .topk = (int32_t)p->topk,
        .tiles = (int32_t)tiles_of(p, heads),
        .tiles_divisor = divisor_of((uint32_t)tiles_of(p, heads)),
        .scale = p->scale,
        .scale_log2 = cuda_scale_log2(p->scale),
        .q = p->q + first * p->q_stride[0] + head * p->q_stride[1],
        .q_stride = {p->q_stride[0], p->q_stride[1]},
        .kv = cuda_sparse_cache_params(&kv),
        .topk_length = p->topk_length ? p->topk_length + first : NULL,
        .out = p->out + first * p->out_stride[0] + head * p->out_stride[1],
        .out_stride = {p->out_stride[0], p->out_stride[1]},
        .max_logits = p->max_logits ? p->max_logits + first * p->max_stride + head : NULL,
        .lse = p->lse ? p->lse + first * p->lse_stride + head : NULL,
        .max_stride = p->max_stride,
        .lse_stride = p->lse_stride,
        .rules = cuda_result_params(&p->rules),
    };
    if (params.rules.attn_sink) params.rules.attn_sink += head;
    params.pairs_aligned = cuda_rows_aligned(params.out, out_shape, p->out_stride, 2, 2, 4);
    return params;
}

static fmla_status launch_portable(const struct cuda_scope *scope, const struct sparse_prefill_problem *p,
                                   const struct part *part)
{
    struct sparse_prefill_params params = parameters(p, part, SPARSE_WARPS);
    const struct cuda_launch launch = {
        .kernel = &cuda_kernel_sparse_prefill[p->format],
        .blocks = part->tokens * params.tiles,
        .threads = 32 * SPARSE_WARPS,
        .stream = p->stream,
    };
    return cuda_launch(op, scope, &launch, (void *[]){&params});
}

static struct prefill_cut cut_of(const struct cuda_device *device, const struct sparse_prefill_problem *p,
                                 int64_t tokens)
{
    return sm90_sparse_prefill_cut(tokens * tiles_of(p, SM90_SPARSE_PREFILL_HEADS), p->topk, device->sms);
}

/* All pieces of a launch: of its tiles that are not whole. */
static int64_t pieces_of(const struct sparse_prefill_problem *p, const struct prefill_cut *cut,
                         int64_t tokens)
{
    return (tokens * tiles_of(p, SM90_SPARSE_PREFILL_HEADS) - cut->whole) * cut->pieces;
}

static fmla_status join_sm90(const struct cuda_scope *scope, const struct sparse_prefill_problem *p,
                             struct sparse_prefill_sm90_params *params)
{
    const int64_t tiles = (params->items - params->cut.whole) / params->cut.pieces;
    const struct cuda_launch launch = {
        .kernel = &cuda_kernel_sparse_prefill_join,
        .blocks = tiles * SM90_SPARSE_PREFILL_HEADS / PREFILL_JOIN_WARPS,
        .threads = 32 * PREFILL_JOIN_WARPS,
        .flags = LAUNCH_OVERLAP,
        .stream = p->stream,
    };
    return cuda_launch(op, scope, &launch, (void *[]){params});
}

/* Blocks of threads stay, and take tiles, and then pieces, in turns. */
static fmla_status launch_sm90(const struct cuda_scope *scope, const struct sparse_prefill_problem *p,
                               const struct part *part)
{
    struct sparse_prefill_sm90_params params = {.call = parameters(p, part, SM90_SPARSE_PREFILL_HEADS)};
    const struct tensor_view queries =
        sm90_sparse_prefill_view(p, params.call.q, p->q_stride, part->tokens, group_of(p), p->d_qk);
    const struct tensor_view results =
        sm90_sparse_prefill_view(p, params.call.out, p->out_stride, part->tokens, group_of(p), D_V);
    fmla_status status = tensor_map_make(op, scope, "q", &queries, &params.queries);
    if (!status) status = tensor_map_make(op, scope, "out", &results, &params.results);
    if (status) return status;
    params.cut = cut_of(scope->device, p, part->tokens);
    params.cut.slots = p->workspace;
    const bool cut = params.cut.pieces > 1;
    params.items = params.cut.whole + (int32_t)pieces_of(p, &params.cut, part->tokens);
    const struct cuda_launch launch = {
        .kernel = &cuda_kernel_sparse_prefill_sm90[cut][p->d_qk == 576],
        .blocks = params.items < scope->device->sms ? params.items : scope->device->sms,
        .threads = SM90_SPARSE_PREFILL_THREADS,
        .shared_bytes = SM90_SPARSE_PREFILL_SHARED_BYTES,
        .flags = LAUNCH_OVERLAP,
        .stream = p->stream,
    };
    status = cuda_launch(op, scope, &launch, (void *[]){&params});
    return cut && !status ? join_sm90(scope, p, &params) : status;
}

/* FP8 pages: sparse decode's kernel, of as many requests as there are tokens. A block of threads stays with its tile of heads. */
static fmla_status launch_sm90_fp8(const struct cuda_scope *scope, const struct sparse_prefill_problem *p,
                                   const struct part *part)
{
    const struct sparse_prefill_params call = parameters(p, part, SM90_SPARSE_PREFILL_HEADS);
    const int32_t sms = scope->device->sms, at_once = sms > call.tiles ? sms / call.tiles : 1;
    const int32_t workers = call.s_q < at_once ? call.s_q : at_once;
    struct sparse_prefill_fp8_params params = {
        .call = {.b = call.s_q,
                 .s_q = 1,
                 .h_q = call.h_q,
                 .d_qk = call.d_qk,
                 .tiles = call.tiles,
                 .tiles_of_token = call.tiles,
                 .tiles_divisor = call.tiles_divisor,
                 .token_divisor = call.tiles_divisor,
                 .scale = call.scale,
                 .scale_log2 = call.scale_log2,
                 .q = call.q,
                 .q_stride = {call.q_stride[0], 0, call.q_stride[1]},
                 .cache = {call.kv},
                 .topk = {.topk = call.topk, .length = call.topk_length},
                 .split = {.num_partitions = workers},
                 .output = {.out = call.out,
                            .lse = call.lse,
                            .out_stride = {call.out_stride[0], 0, call.out_stride[1]},
                            .lse_stride = {call.lse_stride, 1},
                            .rules = call.rules}},
        .max_logits = call.max_logits,
        .max_stride = call.max_stride,
    };
    const struct cuda_launch launch = {
        .kernel = &cuda_kernel_sparse_prefill_sm90_fp8[p->format == KV_FP8_584],
        .blocks = (int64_t)workers * call.tiles,
        .threads = SM90_SPARSE_PREFILL_THREADS,
        .shared_bytes = SM90_SPARSE_PREFILL_SHARED_BYTES,
        .flags = LAUNCH_OVERLAP,
        .stream = p->stream,
    };
    return cuda_launch(op, scope, &launch, (void *[]){&params});
}

/* A launch's tokens, if there are so many: their tiles, of `heads` heads, are counted in 32 bits, as blocks of threads, or by such
 * that go from tile to tile, past the last. */
static int64_t most_tokens(const struct sparse_prefill_problem *p, int heads)
{
    enum { MOST_BLOCKS = 65536 /* that stay */ };
    return (INT32_MAX - MOST_BLOCKS) / tiles_of(p, heads);
}

/* As much for all kernels of the device; launches follow one another. */
fmla_status cuda_sparse_prefill_size(const struct kernel *kernel, const struct sparse_prefill_problem *p,
                                     size_t *bytes, size_t *alignment)
{
    (void)kernel;
    const struct cuda_device *device = cuda_device(p->device.id);
    const bool cuts = device->capability == 90 && p->format == KV_BF16 &&
                      cuda_build_has(&cuda_build, cuda_kernel_sparse_prefill_join.image);
    *alignment = CUDA_WORKSPACE_ALIGNMENT;
    if (cuts && p->bound) {
        const int64_t tiles =
            p->s_q * tiles_of(p, SM90_SPARSE_PREFILL_HEADS); /* of all parts, each of which has fewer */
        *bytes = (size_t)sm90_sparse_prefill_most_pieces(tiles, p->topk, device->sms) * PREFILL_SLOT_BYTES;
        return FMLA_OK;
    }
    const int64_t last = p->s_q % most_tokens(p, SM90_SPARSE_PREFILL_HEADS); /* the others are too many */
    const struct prefill_cut cut = cut_of(device, p, last);
    *bytes = cuts && cut.pieces > 1 ? (size_t)pieces_of(p, &cut, last) * PREFILL_SLOT_BYTES : 0;
    return FMLA_OK;
}

/* The call in parts of so few tokens. */
static fmla_status in_parts(const struct sparse_prefill_problem *p, int heads,
                            fmla_status (*launch)(const struct cuda_scope *scope,
                                                  const struct sparse_prefill_problem *p,
                                                  const struct part *part))
{
    const int64_t most = most_tokens(p, heads);
    struct cuda_scope scope;
    if (!p->s_q) return FMLA_OK;
    fmla_status status = cuda_enter(op, "q", p->device.id, &scope);
    if (status) return status;
    struct part part;
    for (part.key_head = 0; part.key_head < p->h_kv; part.key_head++)
        for (part.first = 0; part.first < p->s_q && !status; part.first += part.tokens) {
            const int64_t left = p->s_q - part.first;
            part.tokens = left < most ? left : most;
            status = launch(&scope, p, &part);
        }
    cuda_leave(&scope);
    return status;
}

fmla_status cuda_sparse_prefill(const struct kernel *kernel, const struct sparse_prefill_problem *p)
{
    (void)kernel;
    return in_parts(p, SPARSE_WARPS, launch_portable);
}

const char *cuda_sm90_sparse_prefill_refuses(const struct sparse_prefill_problem *p, const char **argument)
{
    return sm90_sparse_prefill_refuses(p, argument);
}

fmla_status cuda_sm90_sparse_prefill(const struct kernel *kernel, const struct sparse_prefill_problem *p)
{
    (void)kernel;
    return in_parts(p, SM90_SPARSE_PREFILL_HEADS, p->format == KV_BF16 ? launch_sm90 : launch_sm90_fp8);
}

/* SPDX-License-Identifier: MIT
 *
 * The portable dense MHA forward on tensor cores: which problems it takes, choice of the tile shape, and
 * launch. A CTA has one tile.
 */
#include "../../attention.h"
#include "shape.h"

enum { ALIGNMENT = 16 /* bytes per cp.async */ };
enum { CACHED_BYTES = 24 * 1000 * 1000 /* of L2, for the K and V of heads that are processed together */ };

/* Returns the heads per tile: all of a key head if requests have so few tokens that tiles of single heads
 * would be more. */
static int32_t heads_of_tile(const struct attention_problem *p)
{
    const int64_t group = p->h_q / p->h_kv, most = MHA_SM80_ROWS / group;
    if (group == 1 || !most) return 1;
    return cuda_ceil_div(p->s_q, most) < group * cuda_ceil_div(p->s_q, MHA_SM80_ROWS) ? (int32_t)group : 1;
}

/* Returns an upper bound of the number of tiles: the host does not know the lengths of ragged requests. */
static int64_t tiles_of(const struct attention_problem *p)
{
    const int64_t heads = heads_of_tile(p), tokens = MHA_SM80_ROWS / heads, units = p->h_q / heads;
    if (!p->ragged_q.starts) return p->b * cuda_ceil_div(p->s_q, tokens) * units;
    const int64_t begun = p->ragged_q.tokens < p->b ? p->ragged_q.tokens : p->b; /* non-empty requests */
    return (p->ragged_q.tokens / tokens + begun) * units;
}

static bool keys_aligned(const struct attention_problem *p, const struct key_view *view)
{
    const int64_t shape[] = {p->ragged_k.starts ? 1 : p->b, p->keys[0].page_size, p->h_kv};
    const int64_t bytes[] = {view->page_bytes, view->slot_bytes, view->head_bytes};
    return !p->keys[0].page_size || cuda_rows_aligned(view->data, shape, bytes, 3, 1, ALIGNMENT);
}

static const char *refuses(const struct attention_problem *p, const char **argument)
{
    const int64_t shape[] = {p->ragged_q.starts ? 1 : p->b, p->ragged_q.starts ? p->ragged_q.tokens : p->s_q,
                             p->h_q};
    *argument = "v";
    if (p->d_v != mha_values_of(p->d_qk)) return MHA_SIZES_TAKEN;
    *argument = "q";
    if (tiles_of(p) > INT32_MAX) return "takes fewer than 2^31 tiles of rows";
    if (!cuda_rows_aligned(p->q, shape, p->q_stride, 3, 2, ALIGNMENT))
        return "takes queries whose base and strides are multiples of 16 bytes";
    *argument = "k";
    if (!keys_aligned(p, &p->keys[0].k)) return "takes keys whose base and strides are multiples of 16 bytes";
    *argument = "v";
    if (!keys_aligned(p, &p->keys[0].v))
        return "takes values whose base and strides are multiples of 16 bytes";
    *argument = "softmax_scale";
    if (!(p->scale >= 1e-30f)) return "takes a scale of at least 1e-30";
    return NULL;
}

/* Returns the widest shape of which as many CTAs as it says fit an SM, including the memory that the system
 * reserves per CTA. Of a small one every GPU has room for one. */
static struct cuda_kernel *kernel_for(const struct attention_problem *p, int32_t shared_bytes)
{
    enum { OF_SYSTEM = 1024 };
#define SHAPE(d_qk, d_v, suffix, row_tiles, warps, keys, q, ctas) {d_qk, ctas, MHA_SM80_##d_qk##suffix},
    static const struct {
        int32_t d_qk, ctas;
        enum mha_sm80_shape shape;
    } shapes[] = {MHA_SM80_SHAPES(SHAPE)};
#undef SHAPE
    struct cuda_kernel *kernel = NULL;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        if (shapes[i].d_qk != p->d_qk) continue;
        kernel = cuda_kernel_of((struct cuda_key){
            .schedule = CUDA_SM80_MHA_FORWARD, .element = p->element, .variant = (int)shapes[i].shape});
        if (shapes[i].ctas * (kernel->dynamic_bytes + OF_SYSTEM) <= shared_bytes + OF_SYSTEM) break;
    }
    return kernel;
}

static fmla_status launch(const struct cuda_scope *scope, const struct attention_problem *p,
                          const struct cuda_work *w)
{
    const int64_t shape[] = {p->b, p->s_q, p->h_q};
    const int32_t heads = heads_of_tile(p);
    struct mha_forward_sm80_params params = {
        .call = cuda_mha_params(p),
        .heads_of_tile = heads,
        .tile_tokens = MHA_SM80_ROWS / heads,
        .heads_divisor = divisor_of((uint32_t)heads),
        .tokens_divisor = divisor_of((uint32_t)(MHA_SM80_ROWS / heads)),
        .units = (int32_t)(p->h_q / heads),
        .units_divisor = divisor_of((uint32_t)(p->h_q / heads)),
        .group_divisor = divisor_of((uint32_t)(p->h_q / p->h_kv)),
        .units_of_key_head = (int32_t)(p->h_q / p->h_kv / heads),
        .cached_keys = (int32_t)(CACHED_BYTES / (2 * (p->d_qk + p->d_v))),
        .out_aligned = cuda_rows_aligned(p->out, shape, p->out_stride, 3, 2, ALIGNMENT),
    };
    const struct cuda_launch launch = {
        .kernel = kernel_for(p, w->device->shared_bytes),
        .blocks = tiles_of(p),
        .stream = p->stream,
    };
    return launch.blocks ? cuda_launch(operation_name(p->operation), scope, &launch, (void *[]){&params})
                         : FMLA_OK;
}

const struct cuda_attention cuda_sm80_mha_forward = {
    .driver = CUDA_ATTENTION_DRIVER, .refuses = refuses, .prepare = cuda_mha_prepare, .launch = launch};

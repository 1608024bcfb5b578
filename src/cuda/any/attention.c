/* SPDX-License-Identifier: MIT
 *
 * The portable kernels of the sparse operations and of dense MHA, which process a row per warp: the problems
 * that they take, and their launches.
 */
#include "../attention.h"

/* ---- Sparse decode --------------------------------------------------------------------------- */

/* Returns the format in the kernel's key: the queries' type, or CUDA_BYTES for any formats. */
static enum kv_format format_of(const struct attention_problem *p)
{
    for (int i = 0; i < KEY_SOURCES; i++)
        if (p->keys[i].format != KV_BF16 && p->keys[i].format != KV_FP16) return CUDA_BYTES;
    return p->format;
}

static int64_t tiles_of(const struct attention_problem *p)
{
    return cuda_ceil_div(p->s_q * p->h_q, SPARSE_WARPS);
}

static const char *decode_refuses(const struct attention_problem *p, const char **argument)
{
    return cuda_sparse_refuses(p, tiles_of(p), argument);
}

static fmla_status decode_prepare(const struct attention_problem *p, struct cuda_work *w)
{
    w->launch.kernel = cuda_kernel_of((struct cuda_key){CUDA_SPARSE_DECODE, p->element, format_of(p), 0});
    return cuda_sparse_prepare(p, tiles_of(p), w);
}

static fmla_status decode_launch(const struct cuda_scope *scope, const struct attention_problem *p,
                                 const struct cuda_work *w)
{
    struct sparse_decode_params params = cuda_sparse_params(p, w, 0);
    const struct cuda_launch launch = {
        .kernel = w->launch.kernel, .blocks = cuda_blocks(p, w), .stream = p->stream};
    return cuda_launch(operation_name(p->operation), scope, &launch, (void *[]){&params});
}

const struct cuda_attention cuda_sparse_decode = {.driver = CUDA_ATTENTION_DRIVER,
                                                  .refuses = decode_refuses,
                                                  .prepare = decode_prepare,
                                                  .launch = decode_launch};

/* ---- Sparse prefill -------------------------------------------------------------------------- */

static fmla_status launch_part(const struct cuda_scope *scope, const struct attention_problem *p,
                               const struct token_range *range)
{
    struct sparse_prefill_params params = cuda_prefill_params(p, range, SPARSE_WARPS);
    const struct cuda_launch launch = {
        .kernel = cuda_kernel_of((struct cuda_key){CUDA_SPARSE_PREFILL, p->element, format_of(p), 0}),
        .blocks = range->tokens * params.tiles,
        .stream = p->stream,
    };
    return cuda_launch(operation_name(p->operation), scope, &launch, (void *[]){&params});
}

static fmla_status prefill_launch(const struct cuda_scope *scope, const struct attention_problem *p,
                                  const struct cuda_work *w)
{
    (void)w;
    return cuda_prefill_launch(scope, p, SPARSE_WARPS, launch_part);
}

const struct cuda_attention cuda_sparse_prefill = {
    .driver = CUDA_ATTENTION_DRIVER, .prepare = cuda_prefill_prepare, .launch = prefill_launch};

/* ---- Dense MHA ------------------------------------------------------------------------------- */

static int64_t mha_blocks(const struct attention_problem *p)
{
    return cuda_ceil_div((p->ragged_q.starts ? p->ragged_q.tokens : p->b * p->s_q) * p->h_q, MHA_WARPS);
}

static const char *mha_refuses(const struct attention_problem *p, const char **argument)
{
    *argument = "q";
    return mha_blocks(p) > INT32_MAX ? "takes fewer than 2^34 rows" : NULL;
}

static fmla_status mha_launch(const struct cuda_scope *scope, const struct attention_problem *p,
                              const struct cuda_work *w)
{
    struct mha_forward_params params = cuda_mha_params(p);
    const struct cuda_launch launch = {
        .kernel = cuda_kernel_of((struct cuda_key){CUDA_MHA_FORWARD, .element = p->element}),
        .blocks = mha_blocks(p),
        .stream = p->stream,
    };
    (void)w;
    return launch.blocks ? cuda_launch(operation_name(p->operation), scope, &launch, (void *[]){&params})
                         : FMLA_OK;
}

const struct cuda_attention cuda_mha_forward = {.driver = CUDA_ATTENTION_DRIVER,
                                                .refuses = mha_refuses,
                                                .prepare = cuda_mha_prepare,
                                                .launch = mha_launch};

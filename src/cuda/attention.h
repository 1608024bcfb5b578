/* SPDX-License-Identifier: MIT
 *
 * Declarations that the hosts of the attention kernels share. A call makes up to three launches on the
 * caller's stream: the planner, if a plan splits the call and the caller passes none; the kernel; the join,
 * if requests may be split. Portable dense decode with FP8 products launches the query quantisation before
 * its kernel. No call waits for the device or reads device memory.
 *
 * Workspace:  plan, if the call makes it | values of the parts | part_end of their rows | the kernel's own
 *
 * A call has two parts per partition of the plan, or one per even split of a request (params.h).
 */
#ifndef FMLA_CUDA_ATTENTION_H
#define FMLA_CUDA_ATTENTION_H

#include "cuda.h"
#include "kernels.h"
#include "mha_tiles.h"
#include "params.h"

enum { CUDA_WORKSPACE_ALIGNMENT = 256 /* the alignment of the driver's allocations */ };

static inline size_t cuda_line_up(size_t bytes)
{
    return (bytes + CUDA_WORKSPACE_ALIGNMENT - 1) / CUDA_WORKSPACE_ALIGNMENT * CUDA_WORKSPACE_ALIGNMENT;
}

/* How the parts of split requests become results: there are none, by a launch after the kernel, or the CTAs
 * that have a tile's parts join them before they end. */
enum join_by { JOIN_NONE, JOIN_BY_LAUNCH, JOIN_IN_KERNEL };

/* The kernel and what it is launched with. */
struct launch_work {
    struct cuda_kernel *kernel;   /* NULL: chosen at each launch */
    int32_t stages, shared_bytes; /* where the kernel's row leaves them open */
    unsigned flags;               /* LAUNCH_…, of the kernel and the join */
    int64_t tiles;                /* of a request: CTAs that take a partition together */
};

/* How requests are split: by a plan of num_partitions partitions, or into even splits of `keys` keys. */
struct split_work {
    int32_t num_partitions;
    int32_t keys;               /* 0: split by a plan */
    bool at_once;               /* one worker per split; else enough workers to keep the device busy */
    bool makes_plan;            /* the call launches the planner */
    int64_t even_splits, lanes; /* of a request; 0: split by a plan */
    int64_t parts;
    bool parts_in_halves;
    enum join_by join;
    size_t part_out_offset, part_ends_offset;
    size_t cta_group_barriers_offset; /* a word per SM; 0: no room */
};

/* Dense decode alone. */
struct dense_work {
    int32_t rows;        /* of a tile, over bytes on Hopper */
    int64_t ready_tiles; /* of a request, in the units of its ready flags; 0: none */
    size_t ready_flags_offset;
    size_t queries_offset; /* with FP8 products: [b][s_q][h_q][d_qk] bf16 values */
};

/* Decisions of `prepare`, made once per call. */
struct cuda_work {
    const struct cuda_device *device; /* input */
    bool ctas_must_not_wait;          /* input: for each other */
    struct launch_work launch;
    struct split_work split;
    struct dense_work dense;
    struct mha_tiling mha; /* dense MHA: what its splits are computed for */
    size_t bytes;          /* of the workspace */
};

/* ---- Requests that are split (split.c) --------------------------------------------------------- */

/* Places the parts at byte `at` of the workspace. `rows` is the number of rows of all parts together; < 0: it
 * does not fit 63 bits. */
fmla_status cuda_place_parts(const struct attention_problem *p, int64_t rows, size_t at,
                             struct cuda_work *work);

/* Lays out the workspace of a call with the splits and tiles that `work` says. */
fmla_status cuda_lay_out(const struct attention_problem *p, struct cuda_work *work);

/* Maxima over all calls up to some sizes that make their plans inside the call: partitions, and rows of all
 * parts together. */
struct cuda_most {
    int32_t partitions;
    int64_t part_rows;
};

/* Adds a call with `partitions` partitions and `rows` rows per request. */
void cuda_most_add(struct cuda_most *most, int32_t partitions, int64_t rows);

/* Lays out a workspace that serves all of them. Only `bytes` and the parts' offsets are set. */
fmla_status cuda_lay_out_most(const struct attention_problem *p, const struct cuda_most *most,
                              struct cuda_work *work);

/* Places the barriers of CTA groups at the end of the workspace. */
void cuda_place_cta_group_barriers(struct cuda_work *work);

/* Returns them, for a kernel that joins parts: one word per tile of a request. */
uint64_t *cuda_cta_group_barriers(const struct attention_problem *p, const struct cuda_work *work);

/* Returns the number of CTAs: tiles × workers. A worker is a partition, or a lane of the even splits of a
 * request. */
int64_t cuda_blocks(const struct attention_problem *p, const struct cuda_work *work);

/* Returns the kernel parameters for `work`. */
struct split_params cuda_split_params(const struct attention_problem *p, const struct cuda_work *work);

/* Launches the join if there are parts. The join itself waits for the data that it reads. */
fmla_status cuda_launch_join(const struct cuda_scope *scope, const struct attention_problem *p,
                             const struct cuda_work *work);

/* ---- Kernel parameters of a problem (attention.c) ------------------------------------------- */

/* Returns softmax_scale · log2(e), for exponentials of base 2, clamped to finite values, so that its product
 * with 0 is not NaN. */
float cuda_scale_log2(float scale);
struct result_params cuda_result_params(const struct result_rules *rules);

/* Returns whether every row of out begins at a multiple of `bytes`. */
bool cuda_out_aligned(const struct attention_problem *p, int64_t bytes);
struct output_params cuda_output_params(const struct attention_problem *p);
struct sparse_cache_params cuda_cache_params(const struct key_source *keys);

/* ---- One operation, all its kernels (dense.c, sparse.c, prefill.c, mha.c) ------------------- */

/* Returns whether the cache holds bytes instead of values of the queries' type. */
bool cuda_of_bytes(const struct attention_problem *p);

/* Launches the kernel that writes the queries of FP8 products as bf16 values to their room in the
 * workspace. */
fmla_status cuda_dense_quantise(const struct cuda_scope *scope, const struct attention_problem *p,
                                const struct cuda_work *work);

/* Returns the problem with these values as its queries. */
struct attention_problem cuda_dense_quantised(const struct attention_problem *p,
                                              const struct cuda_work *work);

/* `rows`: rows of a tile. */
fmla_status cuda_dense_prepare(const struct attention_problem *p, int64_t rows, struct cuda_work *work);
struct dense_decode_params cuda_dense_params(const struct attention_problem *p, const struct cuda_work *work);

/* `tiles`: tiles of a request. */
fmla_status cuda_sparse_prepare(const struct attention_problem *p, int64_t tiles, struct cuda_work *work);
/* Refuses counts that do not fit 32 bits: keys, and CTAs, with room for the lanes of batch-invariant mode. */
const char *cuda_sparse_refuses(const struct attention_problem *p, int64_t tiles, const char **argument);
/* `tiles_of_token`: 0 if a tile may hold rows of several tokens. */
struct sparse_decode_params cuda_sparse_params(const struct attention_problem *p,
                                               const struct cuda_work *work, int64_t tiles_of_token);

/* A launch of sparse prefill: `tokens` tokens from `first` on, and the heads that read one key head. */
struct token_range {
    int64_t key_head;
    int64_t first, tokens;
};

/* Returns the tiles of a token, with `heads` heads each. */
static inline int64_t cuda_prefill_tiles(const struct attention_problem *p, int heads)
{
    return cuda_ceil_div(p->h_q / p->h_kv, heads);
}

/* Returns the most tokens per launch. The number of CTAs must fit int32, and so must the tile index of
 * persistent CTAs, which steps past the last tile. */
static inline int64_t cuda_prefill_most_tokens(const struct attention_problem *p, int heads)
{
    enum { MOST_BLOCKS = 65536 /* persistent CTAs */ };
    return (INT32_MAX - MOST_BLOCKS) / cuda_prefill_tiles(p, heads);
}

/* Returns the kernel parameters of a range. Tokens and heads count from the range's first. */
struct sparse_prefill_params cuda_prefill_params(const struct attention_problem *p,
                                                 const struct token_range *range, int heads);

/* Launches the call in ranges of at most cuda_prefill_most_tokens tokens. */
fmla_status cuda_prefill_launch(const struct cuda_scope *scope, const struct attention_problem *p, int heads,
                                fmla_status (*launch)(const struct cuda_scope *scope,
                                                      const struct attention_problem *p,
                                                      const struct token_range *range));

/* Sets the maximum workspace of the device's kernels: Hopper's kernel for bf16 keys splits tiles, the one for
 * FP8 pages splits lists. */
fmla_status cuda_prefill_prepare(const struct attention_problem *p, struct cuda_work *work);

/* Splits the lists of calls with few tokens over FP8 pages, whose parts the kernel joins, and lays out the
 * workspace. `even_splits` is 0 if the lists are not split. */
fmla_status cuda_prefill_split_lists(const struct attention_problem *p, struct cuda_work *work);

/* Writes the results of padding, by a launch of its own where lengths in use are given. The first returns the parameters
 * of a side, tokens or keys, without results; the second completes and launches them. */
struct mha_padding_params cuda_mha_padding(const struct ragged *side, int64_t b, int64_t extent,
                                           int64_t heads);
fmla_status cuda_mha_write_padding(enum operation operation, const struct cuda_scope *scope,
                                   struct mha_padding_params *params, void *stream);
fmla_status cuda_mha_forward_padding(const struct cuda_scope *scope, const struct attention_problem *p);

struct mha_forward_params cuda_mha_params(const struct attention_problem *p);
fmla_status cuda_mha_prepare(const struct attention_problem *p, struct cuda_work *work);

#endif

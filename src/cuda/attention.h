/* SPDX-License-Identifier: MIT
 *
 * Attention on a GPU, as the hosts of its kernels share it. A call is up to three launches on the caller's stream: the
 * planner, if the call is cut by a plan and brings none | the kernel | the join, where requests may be cut. The portable dense
 * decode launches what quantises the queries of FP8 products before its kernel. Nothing here waits or reads device memory.
 *
 * Workspace:  plan, if made inside the call | out of the slots | lse of the slots | what the kernel adds
 * with two slots a partition of the plan, or one a chunk of a request (params.h).
 */
#ifndef FMLA_CUDA_ATTENTION_H
#define FMLA_CUDA_ATTENTION_H

#include "cuda.h"
#include "kernels.h"
#include "params.h"

enum { CUDA_WORKSPACE_ALIGNMENT = 256 /* what the driver's allocations have */ };

static inline size_t cuda_line_up(size_t bytes)
{
    return (bytes + CUDA_WORKSPACE_ALIGNMENT - 1) / CUDA_WORKSPACE_ALIGNMENT * CUDA_WORKSPACE_ALIGNMENT;
}

/* What is decided once a call. */
struct cuda_work {
    const struct cuda_device *device;
    struct cuda_kernel *kernel;   /* NULL: that is a question of each launch */
    int32_t stages, shared_bytes; /* of its launch, where its row leaves them open */
    unsigned flags;               /* LAUNCH_…, of the kernel and the join */
    bool slots_in_halves;
    int64_t tiles; /* of a request: blocks of threads that take a partition together */
    int32_t rows;  /* of a tile, where that is a question of each launch; else not read */
    /* How requests are cut: by a plan of so many partitions, or into chunks. */
    int32_t num_partitions;
    int32_t chunk_keys;          /* 0: by a plan */
    bool chunks_at_once;         /* a worker for each chunk; else as many as keep the device busy */
    bool makes_plan;             /* inside the call */
    int64_t chunks, chunk_lanes; /* of a request; 0: by a plan */
    int64_t slots;
    size_t slot_out_offset, slot_lse_offset;
    int64_t mark_tiles; /* of a request, as marks of dense decode count them; 0: no marks */
    size_t marks_offset;
    bool apart;             /* given: blocks of threads may not wait for each other */
    bool joins_itself;      /* the kernel joins the parts of requests that are cut */
    size_t meetings_offset; /* then: a word for each tile of a request; 0: no room */
    size_t queries_offset;  /* of dense decode with FP8 products: room for [b][s_q][h_q][d_qk] bf16 values */
    size_t bytes;           /* of the workspace */
};

/* A way of a GPU to compute attention: what a row of the table has as `inner`. */
struct cuda_attention {
    /* NULL if it takes the problem; else what it takes, and which argument differs. */
    const char *(*refuses)(const struct attention_problem *p, const char **argument);
    /* Decides and lays the workspace out; `work` has its device and is empty otherwise. All kernels of a device that may take a call
     * answer the same size, the most that one of them needs: a size query has no addresses, by which kernels refuse. */
    fmla_status (*prepare)(const struct attention_problem *p, struct cuda_work *work);
    fmla_status (*launch)(const struct cuda_scope *scope, const struct attention_problem *p,
                          const struct cuda_work *work);
    /* Is the next kernel of the table faster, as measured on an H200? NULL: it never is. */
    bool (*leaves)(const struct attention_problem *p, const struct cuda_device *device);
};

/* ---- Requests that are cut (split.c) --------------------------------------------------------- */

/* Places slots from byte `at` of the workspace on; `rows`: of all slots together, < 0 where they do not fit 63 bits. */
fmla_status cuda_place_slots(const struct attention_problem *p, int64_t rows, size_t at,
                             struct cuda_work *work);

/* The workspace of requests that are cut as `work` says, tiles included. */
fmla_status cuda_lay_out(const struct attention_problem *p, struct cuda_work *work);

/* The most that calls up to some sizes may have, by plans that are made inside them: partitions, and rows of all slots together. */
struct cuda_most {
    int32_t partitions;
    int64_t slot_rows;
};

/* Such a call has so many partitions, and requests of so many rows. */
void cuda_most_add(struct cuda_most *most, int32_t partitions, int64_t rows);

/* A workspace for all of them: its bytes, and no more than that. */
fmla_status cuda_lay_out_most(const struct attention_problem *p, const struct cuda_most *most,
                              struct cuda_work *work);

/* Blocks of threads: the tiles of workers, each of which takes pieces in turns: partitions, or lanes of the chunks of a request. */
int64_t cuda_blocks(const struct attention_problem *p, const struct cuda_work *work);

/* As kernels are told of it. */
struct split_params cuda_split_params(const struct attention_problem *p, const struct cuda_work *work);

/* Joins the slots, where there are any; the join waits itself for what it reads. */
fmla_status cuda_launch_join(const struct cuda_scope *scope, const struct attention_problem *p,
                             const struct cuda_work *work);

/* ---- What kernels are given of a problem (attention.c) ---------------------------------------- */

/* softmax_scale times log2 e, for exponentials of base 2; finite, so that nothing times it is NaN. */
float cuda_scale_log2(float scale);
struct result_params cuda_result_params(const struct result_rules *rules);
struct output_params cuda_output_params(const struct attention_problem *p);
struct sparse_cache_params cuda_cache_params(const struct key_source *keys);

/* ---- Of one operation, for all its kernels (dense.c, sparse.c, prefill.c, mha.c) --------------- */

/* Is the cache of bytes, in place of values of the queries' type? */
bool cuda_of_bytes(const struct attention_problem *p);

/* Launches what makes bf16 values of the queries of FP8 products, in the room for them in the workspace. */
fmla_status cuda_dense_quantise(const struct cuda_scope *scope, const struct attention_problem *p,
                                const struct cuda_work *work);

/* The problem with these values as its queries. */
struct attention_problem cuda_dense_quantised(const struct attention_problem *p,
                                              const struct cuda_work *work);

/* `rows` of a tile. */
fmla_status cuda_dense_prepare(const struct attention_problem *p, int64_t rows, struct cuda_work *work);
struct dense_decode_params cuda_dense_params(const struct attention_problem *p, const struct cuda_work *work);

/* The same, of so many tiles of a request. */
fmla_status cuda_sparse_prepare(const struct attention_problem *p, int64_t tiles, struct cuda_work *work);
/* Keys are counted in 32 bits, and so are blocks of threads, with room for the lanes of batch-invariant mode. */
const char *cuda_sparse_refuses(const struct attention_problem *p, int64_t tiles, const char **argument);
/* `tiles_of_token`: 0 where tiles are of rows of any token. */
struct sparse_decode_params cuda_sparse_params(const struct attention_problem *p,
                                               const struct cuda_work *work, int64_t tiles_of_token);

/* A launch of sparse prefill: tokens and heads that read the same key head. */
struct prefill_part {
    int64_t key_head;
    int64_t first, tokens;
};

/* Tiles of `heads` heads of a token. */
static inline int64_t cuda_prefill_tiles(const struct attention_problem *p, int heads)
{
    return cuda_ceil_div(p->h_q / p->h_kv, heads);
}

/* A launch's tokens, if there are so many: their tiles are counted in 32 bits, as blocks of threads, or by such that go from
 * tile to tile, past the last. */
static inline int64_t cuda_prefill_most_tokens(const struct attention_problem *p, int heads)
{
    enum { MOST_BLOCKS = 65536 /* that stay */ };
    return (INT32_MAX - MOST_BLOCKS) / cuda_prefill_tiles(p, heads);
}

/* A part as kernels are told of it: tokens and heads count from its first. */
struct sparse_prefill_params cuda_prefill_params(const struct attention_problem *p,
                                                 const struct prefill_part *part, int heads);

/* The call in parts of so few tokens. */
fmla_status cuda_prefill_launch(const struct cuda_scope *scope, const struct attention_problem *p, int heads,
                                fmla_status (*launch)(const struct cuda_scope *scope,
                                                      const struct attention_problem *p,
                                                      const struct prefill_part *part));

/* The workspace that some kernel of the device takes: Hopper's of bf16 keys cuts tiles, that of FP8 pages lists. */
fmla_status cuda_prefill_prepare(const struct attention_problem *p, struct cuda_work *work);

/* Cuts the lists of few tokens over FP8 pages into parts, which the kernel joins, and lays the workspace out; where they are not cut
 * there are no chunks. */
fmla_status cuda_prefill_cut_lists(const struct attention_problem *p, struct cuda_work *work);

struct mha_forward_params cuda_mha_params(const struct attention_problem *p);
fmla_status cuda_mha_prepare(const struct attention_problem *p, struct cuda_work *work);

#endif

/* SPDX-License-Identifier: MIT
 *
 * What kernels are given: plain structs that the host fills and CUDA code reads, passed by value at the launch.
 * Sizes that a kernel multiplies often are 32-bit, strides (in elements) are 64-bit.
 */
#ifndef FMLA_CUDA_PARAMS_H
#define FMLA_CUDA_PARAMS_H

#include "../plan.h"

#include <stdint.h>

/* Division of numbers in [0, 2^31) by a constant of the call: n · multiplier >> shift. */
struct divisor {
    uint32_t multiplier;
    uint32_t shift;
};

/* With 2^s ≥ d and m = ceil(2^(31 + s) / d), the error m·d - 2^(31 + s) is below d ≤ 2^s, so that for n < 2^31 it adds
 * less than 2^(31 + s) to n·m·d: not enough to reach the next quotient. 0, of what there is none, counts as 1. */
static inline struct divisor divisor_of(uint32_t d)
{
    if (d <= 1) return (struct divisor){1u << 31, 31};
    const uint32_t s = 32 - (uint32_t)__builtin_clz(d - 1); /* the least with 2^s ≥ d */
    const uint64_t power = (uint64_t)1 << (31 + s);
    return (struct divisor){(uint32_t)((power + d - 1) / d), 31 + s};
}

/* What becomes of `out` and `lse` (struct result_rules of problem.h). */
struct result_params {
    const float *attn_sink; /* [h_q] or NULL */
    float lse_of_empty;
    float lse_factor;
};

/* Where finished rows go. */
struct output_params {
    uint16_t *out;
    float *lse; /* NULL: not wanted */
    int64_t out_stride[3];
    int64_t lse_stride[2];
    struct result_params rules;
    int32_t pairs_aligned; /* two neighbouring elements of out may be stored as one word */
    int32_t gap;           /* gaps have names where calls are compared as bytes: so they are 0 */
};

/* How a call is cut into pieces (a range of keys of one request), and where pieces of cut requests are kept. */
struct split_params {
    const struct plan_header *header;        /* of a plan in one piece; NULL: the tables are by themselves */
    const struct plan_partition *partitions; /* NULL: in chunks of chunk_keys keys */
    const int32_t *num_splits;
    int32_t num_partitions; /* that there is room for */
    int32_t chunks;         /* most chunks of a request */
    int32_t chunk_lanes;    /* workers that take turns at the chunks of a request */
    int32_t chunk_keys;     /* a multiple of PLAN_BLOCK; of dense decode INVARIANT_CHUNK */
    /* [slots][h_q · s_q][d_v], rows ordered by key head, then as tiles are; columns as slot_position has them
     * (device/fragment.h) */
    float *slot_out;
    int32_t slots_in_halves; /* rows as device/half_rows.cuh has them */
    int32_t gap;
    float *slot_lse; /* [slots][h_q · s_q], natural, -inf where no key was seen */
    /* Hopper's kernel, by a plan: how far requests are that are cut once (second_part.cuh there); else NULL. */
    uint32_t *marks; /* [partitions][tiles][MARKS_OF_TILE] */
    int32_t tiles;   /* of ROWS_OF_MARK rows, of a request */
    int32_t tiles_of_head;
};

/* A mark; anything else: not yet. Each warp that has a share of a tile has a mark. */
enum { PART_STORED = 0x57ed, PART_JOINED = 0x301d, MARKS_OF_TILE = 8, ROWS_OF_MARK = 64 };

struct dense_decode_params {
    int32_t b, s_q, h_q, h_kv, group; /* group: h_q / h_kv */
    int32_t d_qk;
    int32_t rows; /* of a key head: s_q · group */
    int32_t page_size;
    struct divisor page_divisor;  /* page_size */
    struct divisor group_divisor; /* group */
    int32_t capacity;
    int32_t causal;
    int32_t vectors_aligned; /* q and the cache may be read 16 bytes at a time */
    int32_t stages;          /* of the ring of key blocks in shared memory */
    float scale_log2;        /* softmax_scale · log2(e) */
    int32_t gap;
    const uint16_t *q;
    const uint16_t *kv;
    const int32_t *block_table; /* NULL: page r belongs to request r */
    const int32_t *seqlens;
    int64_t q_stride[3];
    int64_t kv_stride[3];
    int64_t block_table_stride;
    struct split_params split;
    struct output_params output;
    /* A cache of bytes: its format (enum kv_format); kv_stride counts bytes; kv_scale: NULL where there is none, or it is 1. */
    int32_t kv_format;
    int32_t end_gap;
    const float *kv_scale;
};

/* Queries of FP8 products, to what their codes are worth. Rows are of 576 values or codes. */
struct quantise_params {
    const uint16_t *q;
    const uint8_t *codes; /* NULL: q has values */
    const float *scale;   /* of codes; NULL: 1 */
    int64_t q_stride[3];  /* request, token, head; of codes in bytes */
    uint16_t *to;         /* [rows][576] */
    int64_t rows;         /* of all requests */
    int32_t s_q, h_q;
    int32_t quantised;     /* of a row of values, from the first on: 512 or 576 */
    int32_t pairs_aligned; /* two neighbours may be read as one word */
};
enum { QUANTISE_WARPS = 8 /* a row each */ };

/* A tensor as TMA is told of it: what cuTensorMapEncodeTiled makes (tensor_map.h). */
struct tensor_map {
    unsigned char opaque[128];
} __attribute__((aligned(128)));

/* Dense decode on Hopper: boxes of 64 columns are brought in by TMA. */
struct dense_decode_sm90_params {
    struct dense_decode_params call;
    struct tensor_map keys;    /* boxes of 64 keys × 128 columns */
    struct tensor_map rope;    /* 64 keys × 64 columns */
    struct tensor_map queries; /* 64 rows × 128 columns */
    int32_t q_heads;       /* rows of a key head that the map takes for one token's: s_q · group, or group */
    int32_t tiles_of_head; /* of 64 rows */
    struct divisor tiles_of_head_divisor, tiles_divisor; /* … and of all key heads */
    int32_t request_step, page_step; /* 0 where all requests share the queries, or the cache: a stride of 0 */
    /* Where there is no plan, and the blocks of threads share the requests out and join what they made (one_piece.cuh). */
    uint64_t *meetings; /* [b][tiles] */
    uint64_t ticket;    /* of this launch */
    int32_t workers;    /* of a tile */
    int32_t of_request; /* workers / b */
};

/* The same over a cache of bytes: `keys` has boxes of 64 keys × 512 codes, and so have queries that are given as codes; `rope` of 64 keys
 * × their last 64 codes or values. */
struct dense_decode_fp8_params {
    struct dense_decode_sm90_params dense;
    struct tensor_map queries_end; /* rows × their last 64 codes */
    struct tensor_map scales;      /* of FP8_656: 64 keys × four */
    const float *q_scale;          /* of queries that are given; NULL: 1 */
    int32_t q_given;               /* as codes; else as bf16 */
};
enum { MOST_REQUESTS_TOGETHER = 32 /* that a warp shares out, a lane each */ };

/* A cache of sparse decode, and the keys that are named in it (struct key_source of problem.h). */
struct sparse_cache_params {
    const uint8_t *data;
    int64_t page_bytes, slot_bytes;
    const int32_t *indices;
    int64_t indices_stride[2]; /* request, token */
    uint32_t slots;            /* an index below this is a key: pages · page_size, 2^31 at most */
    int32_t page_size;
    struct divisor page_divisor;
    /* Scales of a slot of a page are at scale_base + slot · scale_step bytes of it, in their tokens or behind all of them. */
    int64_t scale_base, scale_step;
    int32_t format; /* enum kv_format */
    int32_t gap;
};

struct sparse_decode_params {
    int32_t b, s_q, h_q, d_qk;
    int32_t tiles;                               /* blocks of threads that take a worker's pieces together */
    int32_t tiles_of_token;                      /* Hopper's kernel: of heads */
    struct divisor tiles_divisor, token_divisor; /* tiles; tiles_of_token */
    struct divisor heads_divisor;                /* h_q */
    float scale, scale_log2;                     /* softmax_scale, and times log2(e) */
    const uint16_t *q;
    int64_t q_stride[3];
    struct sparse_cache_params cache[2];
    struct plan_topk topk;
    struct divisor chunks_divisor; /* split.chunks */
    struct split_params split;
    struct output_params output;
};

/* How tokens of a listed cache lie, as the portable kernel converts them (sm80/sparse_decode/listed_bytes.cuh). */
struct listed_layout {
    int32_t code_bytes;   /* of a token's first values; 0: it has none, but values alone */
    int32_t code_groups;  /* of 64 values: the first ones */
    int32_t values_at;    /* bytes from the token: the values of the other groups */
    int32_t scale_bytes;  /* of a token; 8, 16 or 32 */
    int32_t scale_kind;   /* enum kv_scale */
    int32_t scale_shift;  /* a scale is of 2^scale_shift values */
    int32_t scale_place;  /* of the scales in a key's lines of a stage: the group, times 128, and the byte */
    int32_t copied_bytes; /* at once: 16, 8 or 1, as the cache is aligned */
};

/* What formats a kernel over lists of bytes is for: f32 scales of 128 values, FP8_584, FP8_528 whether split or not, FP4 likewise; or
 * all of these, and values, side by side. */
enum listed_kind { LISTED_F32, LISTED_584, LISTED_528, LISTED_FP4, LISTED_ANY };
enum { LISTED_584_SCALES = 6 * 128 + 64, LISTED_SCALES = 7 * 128 }; /* scale_place */

/* The portable sparse decode, and sparse prefill. */
struct sparse_sm80_params {
    struct sparse_decode_params call;
    struct listed_layout layout[2]; /* of the caches; of no use where they are of the queries' type */
    int32_t stages;                 /* of the ring of key blocks in shared memory */
    int32_t vectors_aligned;        /* q, and caches of its type, may be read 16 bytes at a time */
    float *max_logits;              /* of prefill; NULL: not wanted */
    int64_t max_stride;             /* token */
};

/* Sparse prefill, of one key head and the query heads that read it. */
struct sparse_prefill_params {
    int32_t s_q, h_q, d_qk, topk;
    int32_t tiles; /* of heads, of a token */
    struct divisor tiles_divisor;
    float scale, scale_log2; /* softmax_scale, and times log2(e) */
    const uint16_t *q;
    int64_t q_stride[2];           /* token, head */
    struct sparse_cache_params kv; /* indices_stride: token, of no use; of a flat kv a page is a token */
    const int32_t *topk_length;    /* [s_q]; NULL: topk */
    uint16_t *out;
    int64_t out_stride[2];          /* token, head */
    float *max_logits, *lse;        /* NULL: not wanted */
    int64_t max_stride, lse_stride; /* token */
    struct result_params rules;
    int32_t pairs_aligned; /* two neighbouring elements of out may be stored as one word */
};

/* Which tiles of sparse prefill are cut by keys: those of a short call's last round, where at least two pieces of each find an SM. */
struct prefill_cut {
    int32_t whole;  /* tiles that are not, the first ones */
    int32_t pieces; /* of each of the others; 1: no tile is cut */
    struct divisor pieces_divisor;
    unsigned char *slots; /* a place for each piece (sm90/sparse_prefill/slot.cuh) */
};
enum { PREFILL_SLOT_BYTES = 64 * (512 * 2 + 8 * 4 + 16), MOST_PREFILL_PIECES = 32 };
enum { PREFILL_JOIN_WARPS = 4 /* a row each */ };

/* The same on Hopper: queries and results go by TMA. */
struct sparse_prefill_sm90_params {
    struct sparse_prefill_params call;
    struct tensor_map queries, results; /* 64 heads × 128 columns */
    int32_t items;                      /* whole tiles, then pieces of the others */
    struct prefill_cut cut;
};

/* Hopper's kernel over FP8 caches whose blocks of threads join the parts that they made (sm90/sparse_decode/join_share.cuh). */
struct sparse_decode_sm90_params {
    struct sparse_decode_params call; /* first: most of the kernel knows only this */
    uint64_t *meetings;               /* [b][tiles] */
    uint64_t ticket;                  /* of this launch */
};
/* The most parts of a tile that blocks of threads join: what 8 warps have memory for. The kernel of 16 heads has less. */
enum { MOST_PARTS_TOGETHER = 128, MOST_SMALL_PARTS_TOGETHER = 64 };

/* Over FP8 pages: a token is what a request is to sparse decode, whose kernel it is. split.num_partitions: workers. */
struct sparse_prefill_fp8_params {
    struct sparse_decode_sm90_params
        decode;         /* first: the kernel, which is told of its call, finds the rest behind it */
    float *max_logits;  /* NULL: not wanted */
    int64_t max_stride; /* token */
};

/* Dense MHA. The tokens of ragged requests lie one after the other, as if they were one request's. */
struct mha_forward_params {
    int32_t b, h_q, h_kv, group; /* group: h_q / h_kv */
    int32_t d_qk, d_v;
    int32_t s_q, s_k; /* of each request, where they are apart */
    /* [b + 1]: where ragged requests begin, as the caller says; NULL: they are apart. */
    const int32_t *starts_q, *starts_k;
    int32_t tokens_q, tokens_k; /* of all ragged requests */
    int32_t causal;
    float scale, scale_log2; /* softmax_scale, and times log2(e) */
    const uint16_t *q, *k, *v;
    int64_t q_stride[3], k_stride[3], v_stride[3]; /* request, token, head */
    struct output_params output;
};

/* Hopper's dense MHA takes tiles of rows, and TMA brings the operands in. */
struct mha_forward_sm90_params {
    struct mha_forward_params call;
    struct tensor_map q, k, v;
    int32_t heads_of_tile; /* that share a key head: 1, or all of them where requests have few tokens */
    int32_t tile_tokens, tile_rows;   /* tile_rows: tile_tokens · heads_of_tile */
    struct divisor heads_divisor;     /* heads_of_tile */
    int32_t units, units_of_key_head; /* h_q / heads_of_tile; group / heads_of_tile */
    int32_t cached_keys;              /* of a key head: so many stay in L2 */
    struct mha_turns *turns;          /* NULL: every block of threads has one tile at most */
    uint64_t ticket;                  /* of this launch */
};

/* The portable kernel with tensor cores: a tile of rows a block of threads (sm80/mha_forward/tiles.cuh). */
struct mha_forward_sm80_params {
    struct mha_forward_params call;
    int32_t heads_of_tile; /* that share a key head: 1, or all of them where requests have few tokens */
    int32_t tile_tokens;
    struct divisor heads_divisor;     /* heads_of_tile */
    int32_t units, units_of_key_head; /* h_q / heads_of_tile; group / heads_of_tile */
    int32_t cached_keys;              /* of a key head: so many stay in L2 */
    int32_t out_aligned;              /* rows of out begin at multiples of 16 bytes */
    struct divisor tokens_divisor, units_divisor, group_divisor; /* tile_tokens; units; call.group */
};

/* Which tiles have been taken (sm90/mha_forward/tiles.cuh). */
struct mha_turns {
    uint64_t ticket; /* the launch that this is of; anything else: not yet */
    uint32_t taken;  /* tiles, beside the first one of each block of threads */
    uint32_t ended;  /* blocks of threads */
};

/* The heads of tokens, or of keys; steps in elements. */
struct mha_vectors {
    uint16_t *data;
    int64_t request, token, head;
};

/* The gradients of dense MHA. The tokens of ragged requests lie one after the other, as if they were one request's. */
struct mha_backward_params {
    int32_t b, h_q, h_kv, group; /* group: h_q / h_kv */
    int32_t d_qk, d_v;
    int32_t s_q, s_k; /* of each request, where they are apart */
    /* [b + 1]: where ragged requests begin, as the caller says; NULL: they are apart. */
    const int32_t *starts_q, *starts_k;
    int32_t tokens_q, tokens_k; /* of all ragged requests */
    int32_t causal;
    float scale, scale_log2; /* softmax_scale, and times log2(e) */
    float lse_log2;          /* what makes lse one of base 2 */
    struct mha_vectors q, k, v, out, dout, dq, dk, dv;
    const float *lse;      /* infinite: the row sees no key */
    int64_t lse_stride[2]; /* request, head */
};

/* Hopper's: tiles of rows, and blocks of keys, are numbered so that each request has room for its own (device/backward_requests.cuh). */
struct mha_backward_sm90_params {
    struct mha_backward_params call;
    struct tensor_map q, k, v, dout;
    int32_t row_tiles, key_blocks;    /* of all requests, of one head */
    int32_t items;                    /* key_blocks · h_kv */
    struct divisor key_heads_divisor; /* h_kv */
    int32_t heads_of_set;             /* key heads whose items are taken together */
    float *rows;    /* [h_q][row_tiles][2][rows of a tile]: lse of base 2, inf where there is no key; delta */
    float *dq_sums; /* [h_q][row_tiles][a tile]: queries.cuh says in what order */
    uint32_t *taken; /* how many items are; in any order, beside the first one of each block of threads */
    /* Deterministic: blocks of keys add to a tile's dQ in an order that hangs on the sizes alone. */
    int32_t in_order;
    uint32_t *added; /* [h_q][row_tiles][makers]: how many blocks of keys have added (queries.cuh) */
};

/* The portable kernel's, with tensor cores: numbered likewise. */
struct mha_backward_sm80_params {
    struct mha_backward_params call;
    int32_t row_tiles, key_blocks; /* of all requests, of one head */
    int32_t heads_of_set;          /* key heads whose blocks of keys are taken together */
    float *rows;    /* [h_q][row_tiles][2][rows of a tile]: lse of base 2, inf where there is no key; delta */
    float *dq_sums; /* [h_q][row_tiles][a tile]: tiles.cuh says in what order */
    uint32_t *taken; /* deterministic: how many blocks of keys are */
    /* Deterministic: blocks of keys add to a tile's dQ in an order that hangs on the sizes alone. */
    int32_t in_order;
    uint32_t *added; /* [h_q][row_tiles]: how many blocks of keys have added */
};

/* Rows of its tiles and keys of a block, by d_qk; variants of its kernels; threads of a block. */
#define MHA_BACKWARD_SM90_ROWS(d_qk)    64
#define MHA_BACKWARD_SM90_KEYS(d_qk)    128
#define MHA_BACKWARD_SM90_SIZES(d_qk)   ((int)(d_qk) / 64 - 1)
#define MHA_BACKWARD_SM90_THREADS(d_qk) ((d_qk) == 64 ? 512 : 384)
enum {
    MHA_BACKWARD_PREPARE = 0,
    MHA_BACKWARD_FINISH = 3,
    MHA_BACKWARD_ROW_THREADS = 256,
    MHA_BACKWARD_CONSUMERS = 2
};

/* Rows of Hopper's tiles and keys of a block, by d_qk. */
#define MHA_SM90_ROWS(d_qk) ((d_qk) == 64 ? 192 : 128)
#define MHA_SM90_KEYS(d_qk) 128
enum { MHA_WARPS = 8 };

/* What the join of either decode reads. */
struct join_params {
    int32_t b, s_q, h_q;
    int32_t group, rows; /* heads and rows of a key head; of sparse decode h_q and s_q · h_q */
    struct divisor group_divisor;
    const int32_t *seqlens; /* NULL: sparse, by topk */
    int32_t capacity;
    struct plan_topk topk;
    struct split_params split;
    struct output_params output;
};

struct merge_params {
    int64_t n, b, s_q, h_q, d_v;
    const void *out_parts;
    const float *lse_parts;
    void *out;
    int64_t out_parts_stride[4], lse_parts_stride[3], out_stride[3], lse_stride[2];
    float *lse;
    struct result_params rules;
    int32_t part_element, out_element; /* enum element of problem.h */
    int32_t vectors_aligned;
};

struct plan_params {
    const int32_t *seqlens; /* NULL: sparse, by topk */
    int64_t b;
    int64_t capacity;
    struct plan_topk topk;
    struct plan_header *header; /* NULL: none is written */
    struct plan_partition *partitions;
    int32_t *num_splits;
    int32_t num_partitions;
    int32_t planned;                   /* how many of them the keys are shared among (plan.h) */
    struct divisor partitions_divisor; /* planned; set by the launch */
    struct plan_costs costs;
};

enum { INVARIANT_CHUNK = 2048 /* keys of a chunk in batch-invariant mode */ };

/* Of a request: more are joined by all warps of a block together. How many there are decides how they are added, not how
 * the join was launched: in batch-invariant mode that depends on the table's capacity. */
enum { MANY_PARTS = 8, MANY_PARTS_IN_HALVES = 16 };

/* Threads of a block; kernels and their launches read it here. */
enum { JOIN_WARPS = 8, MERGE_THREADS = 128, PLAN_THREADS = 1024, SPARSE_WARPS = 8 };

#endif

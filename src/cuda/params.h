/* SPDX-License-Identifier: MIT
 *
 * Kernel parameters: plain structs that the host fills and CUDA code reads, passed by value at the launch.
 * Sizes that a kernel multiplies often are 32-bit; strides (in elements) are 64-bit.
 */
#ifndef FMLA_CUDA_PARAMS_H
#define FMLA_CUDA_PARAMS_H

#include "../plan.h"

#include <stdint.h>

/* Division of n in [0, 2^31) by a constant of the call: n · multiplier >> shift. */
struct divisor {
    uint32_t multiplier;
    uint32_t shift;
};

/* With 2^s ≥ d and m = ceil(2^(31 + s) / d), the error m·d - 2^(31 + s) is below d ≤ 2^s. For n < 2^31 it
 * therefore adds less than 2^(31 + s) to n·m·d, too little to reach the next quotient. d = 0 is treated as
 * 1. */
static inline struct divisor divisor_of(uint32_t d)
{
    if (d <= 1) return (struct divisor){1u << 31, 31};
    const uint32_t s = 32 - (uint32_t)__builtin_clz(d - 1); /* the smallest with 2^s ≥ d */
    const uint64_t power = (uint64_t)1 << (31 + s);
    return (struct divisor){(uint32_t)((power + d - 1) / d), 31 + s};
}

/* How finished rows become `out` and `lse` (struct result_rules of problem.h). */
struct result_params {
    const float *attn_sink; /* [h_q] or NULL */
    float lse_of_empty;
    float lse_factor;
};

/* The destination of finished rows. */
struct output_params {
    uint16_t *out;
    float *lse; /* NULL: not wanted */
    int64_t out_stride[3];
    int64_t lse_stride[2];
    struct result_params rules;
    int32_t pairs_aligned; /* two neighbouring elements of out may be stored as one 32-bit word */
    int32_t gap;           /* named, hence 0, because calls are compared as bytes */
};

/* What the join needs of a split's row besides its values: `sum` is the sum of its weights relative to 2^max,
 * by which the values in the part have been divided. If it is 0, the row saw no key, and its values are
 * undefined. */
struct part_end {
    float max, sum;
} __attribute__((aligned(8)));

/* How a call is cut into splits (a range of keys of one request), and where the parts of split requests are
 * stored. */
struct split_params {
    const struct plan_header *header;        /* of a plan in one buffer; NULL: the tables are separate */
    const struct plan_partition *partitions; /* NULL: even splits of split_keys keys */
    const int32_t *num_splits;
    int32_t num_partitions; /* that there is room for */
    int32_t even_splits;    /* most splits of a request */
    int32_t split_lanes;    /* workers that take turns at the splits of a request */
    int32_t split_keys;     /* a multiple of PLAN_BLOCK; INVARIANT_SPLIT_KEYS in dense decode */
    /* [parts][h_q · s_q][d_v]; rows are ordered by key head, then as in tiles; columns in the order of
     * part_position (device/fragment.h). */
    float *part_out;
    int32_t parts_in_halves; /* rows have the format of device/half_rows.cuh */
    int32_t gap;
    struct part_end *part_ends; /* [parts][h_q · s_q] */
    /* Hopper's kernel with a plan: the progress of requests that are split once (second_part.cuh there); else
     * NULL. */
    uint32_t *ready_flags; /* [partitions][tiles][READY_FLAGS_OF_TILE] */
    int32_t tiles;         /* of ROWS_OF_READY_TILE rows, of a request */
    int32_t tiles_of_head;
};

/* The values of a ready flag; any other value means "not yet". A tile has a flag for each warp that stores a
 * range of its columns and rows. */
enum { PART_STORED = 0x57ed, PART_JOINED = 0x301d, READY_FLAGS_OF_TILE = 8, ROWS_OF_READY_TILE = 64 };

struct dense_decode_params {
    int32_t b, s_q, h_q, h_kv, group; /* group: h_q / h_kv */
    int32_t d_qk;
    int32_t rows; /* of a key head: s_q · group */
    int32_t page_size;
    struct divisor page_divisor;  /* page_size */
    struct divisor group_divisor; /* group */
    int32_t capacity;
    int32_t causal;
    int32_t vectors_aligned; /* q and the cache allow 16-byte accesses */
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
    /* A cache of bytes: kv_format is its format (enum kv_format); kv_stride is in bytes; kv_scale is NULL if
     * there is no scale or the scale is 1. */
    int32_t kv_format;
    int32_t end_gap;
    const float *kv_scale;
};

/* Converts the queries of FP8 products to the values of their codes. Rows have 576 values or codes. */
struct quantise_params {
    const uint16_t *q;
    const uint8_t *codes; /* NULL: q has values */
    const float *scale;   /* of codes; NULL: 1 */
    int64_t q_stride[3];  /* request, token, head; in bytes for codes */
    uint16_t *to;         /* [rows][576] */
    int64_t rows;         /* of all requests */
    int32_t s_q, h_q;
    int32_t quantised;     /* leading values of a row that are quantised: 512 or 576 */
    int32_t pairs_aligned; /* two neighbours may be loaded as one word */
};
enum { QUANTISE_WARPS = 8 /* one row each */ };

/* A TMA tensor map, made by cuTensorMapEncodeTiled (tensor_map.h). */
struct tensor_map {
    unsigned char opaque[128];
} __attribute__((aligned(128)));

/* Dense decode on Hopper: TMA loads keys and queries. */
struct dense_decode_sm90_params {
    struct dense_decode_params call;
    struct tensor_map keys;    /* boxes of 64 keys × 128 columns */
    struct tensor_map rope;    /* 64 keys × 64 columns */
    struct tensor_map queries; /* 64 rows × 128 columns */
    int32_t q_heads;       /* rows of a key head that the map treats as one token's: s_q · group, or group */
    int32_t tiles_of_head; /* of 64 rows */
    struct divisor tiles_of_head_divisor, tiles_divisor; /* … and of all key heads */
    int32_t request_step, page_step; /* 0 if all requests share the queries, or the cache (a stride of 0) */
    /* Without a plan, if the CTAs share the requests out and join their parts (sm90/latent/scheduler.cuh). */
    uint64_t *cta_group_barriers; /* [b][tiles] */
    uint64_t ticket;              /* of this launch */
    int32_t workers;              /* of a tile */
    int32_t of_request;           /* workers / b */
};

/* The same over a cache of bytes. Boxes of `keys`, and of queries given as codes, have 64 keys × 512 codes;
 * boxes of `rope` have 64 keys × their last 64 codes or values. */
struct dense_decode_fp8_params {
    struct dense_decode_sm90_params dense;
    struct tensor_map queries_end; /* rows × their last 64 codes */
    struct tensor_map scales;      /* FP8_656: 64 keys × four */
    const float *q_scale;          /* of queries given as codes; NULL: 1 */
    int32_t q_given;               /* queries are given as codes; else as bf16 */
};
enum { MOST_REQUESTS_JOINED_IN_KERNEL = 32 /* which a warp shares out, one per lane */ };

/* A cache of sparse decode, and its index lists (struct key_source of problem.h). */
struct sparse_cache_params {
    const uint8_t *data;
    int64_t page_bytes, slot_bytes;
    const int32_t *indices;
    int64_t indices_stride[2]; /* request, token */
    uint32_t slots;            /* an index below this names a key: pages · page_size, at most 2^31 */
    int32_t page_size;
    struct divisor page_divisor;
    /* The scales of a slot are at byte scale_base + slot · scale_step of its page: in its token, or behind
     * all tokens. */
    int64_t scale_base, scale_step;
    int32_t format; /* enum kv_format */
    int32_t gap;
};

struct sparse_decode_params {
    int32_t b, s_q, h_q, d_qk;
    int32_t tiles;                               /* CTAs that take a worker's splits together */
    int32_t tiles_of_token;                      /* Hopper's kernel: tiles of heads per token */
    struct divisor tiles_divisor, token_divisor; /* tiles; tiles_of_token */
    struct divisor heads_divisor;                /* h_q */
    float scale, scale_log2;                     /* softmax_scale; softmax_scale · log2(e) */
    const uint16_t *q;
    int64_t q_stride[3];
    struct sparse_cache_params cache[2];
    struct plan_topk topk;
    struct divisor splits_divisor; /* split.even_splits */
    struct split_params split;
    struct output_params output;
};

/* The token layout of a listed cache, for conversion by the portable kernel
 * (sm80/sparse_decode/byte_producer.cuh). */
struct listed_layout {
    int32_t code_bytes;   /* codes of a token, which come first; 0: none, values only */
    int32_t code_groups;  /* the leading groups of 64 values that have codes */
    int32_t values_at;    /* byte offset in the token: values of the other groups */
    int32_t scale_bytes;  /* per token: 8, 16 or 32 */
    int32_t scale_kind;   /* enum kv_scale */
    int32_t scale_shift;  /* a scale has 2^scale_shift values */
    int32_t scale_place;  /* place of the scales in a key's lines of a stage: group · 128 + byte */
    int32_t copied_bytes; /* per copy: 16, 8 or 1, by the alignment of the cache */
};

/* The formats of a kernel over lists of bytes: f32 scales of 128 values, FP8_584, FP8_528 (split or not), FP4
 * (split or not), or all of these and values mixed. */
enum listed_kind { LISTED_F32, LISTED_584, LISTED_528, LISTED_FP4, LISTED_ANY };
enum { LISTED_584_SCALES = 6 * 128 + 64, LISTED_SCALES = 7 * 128 }; /* scale_place */

/* Portable sparse decode and sparse prefill. */
struct sparse_sm80_params {
    struct sparse_decode_params call;
    struct listed_layout layout[2]; /* of the caches; unused if they have the queries' type */
    int32_t stages;                 /* of the ring of key blocks in shared memory */
    int32_t vectors_aligned;        /* q, and caches of its type, allow 16-byte accesses */
    float *max_logits;              /* prefill; NULL: not wanted */
    int64_t max_stride;             /* token */
};

/* Sparse prefill for one key head and the query heads that read it. */
struct sparse_prefill_params {
    int32_t s_q, h_q, d_qk, topk;
    int32_t tiles; /* tiles of heads, per token */
    struct divisor tiles_divisor;
    float scale, scale_log2; /* softmax_scale; softmax_scale · log2(e) */
    const uint16_t *q;
    int64_t q_stride[2];           /* token, head */
    struct sparse_cache_params kv; /* indices_stride: token, unused; a page of a flat kv is a token */
    const int32_t *topk_length;    /* [s_q]; NULL: topk */
    uint16_t *out;
    int64_t out_stride[2];          /* token, head */
    float *max_logits, *lse;        /* NULL: not wanted */
    int64_t max_stride, lse_stride; /* token */
    struct result_params rules;
    int32_t pairs_aligned; /* two neighbouring elements of out may be stored as one 32-bit word */
};

/* The tiles of sparse prefill that are split by keys: those of a short call's last wave, if there are SMs for
 * at least two splits of each. */
struct prefill_splits {
    int32_t whole;          /* tiles that are not split, the first ones */
    int32_t of_tile;        /* splits of each other tile; 1: no tile is split */
    struct divisor divisor; /* of_tile */
    unsigned char *parts;   /* one per split (sm90/sparse_prefill/layout.cuh) */
};
enum { PREFILL_PART_BYTES = 64 * (512 * 2 + 8 * 4 + 8), MOST_PREFILL_SPLITS = 32 };
enum { PREFILL_JOIN_WARPS = 4 /* one row each */ };

/* Sparse prefill on Hopper: TMA loads queries and stores results. */
struct sparse_prefill_sm90_params {
    struct sparse_prefill_params call;
    struct tensor_map queries, results; /* 64 heads × 128 columns */
    int32_t items;                      /* whole tiles, then splits of the others */
    struct prefill_splits splits;
};

/* Hopper's kernel over FP8 caches whose CTAs join their own parts (JoinRange in
 * sm90/sparse_decode/scheduler.cuh). */
struct sparse_decode_sm90_params {
    struct sparse_decode_params call; /* must be first: most of the kernel knows only this */
    uint64_t *cta_group_barriers;     /* [b][tiles] */
    uint64_t ticket;                  /* of this launch */
};
/* Most parts of a tile that CTAs join, limited by the shared memory for 8 warps. The kernel of 16 heads has
 * less. */
enum { MOST_PARTS_JOINED_IN_KERNEL = 128, MOST_SMALL_PARTS_JOINED_IN_KERNEL = 64 };

/* Sparse prefill over FP8 pages runs the sparse decode kernel with a token in place of a request.
 * split.num_partitions is the number of workers. */
struct sparse_prefill_fp8_params {
    struct sparse_decode_sm90_params decode; /* must be first: the kernel downcasts */
    float *max_logits;                       /* NULL: not wanted */
    int64_t max_stride;                      /* token */
};

/* Dense MHA. Tokens of ragged requests are stored one after the other, like those of a single request. */
struct mha_forward_params {
    int32_t b, h_q, h_kv, group; /* group: h_q / h_kv */
    int32_t d_qk, d_v;
    int32_t s_q, s_k; /* of each request, if not ragged */
    /* [b + 1]: the first token of each ragged request, as the caller gives it; NULL: not ragged. */
    const int32_t *starts_q, *starts_k;
    int32_t tokens_q, tokens_k;     /* of all ragged requests */
    const int32_t *used_q, *used_k; /* [b]: lengths in use (device/used.cuh); NULL: all are */
    int32_t causal;
    float scale, scale_log2; /* softmax_scale; softmax_scale · log2(e) */
    const uint16_t *q, *k, *v;
    int64_t q_stride[3], k_stride[3], v_stride[3]; /* request, token, head */
    struct output_params output;
};

/* Dense MHA on Hopper: tiles of rows, with operands loaded by TMA. */
struct mha_forward_sm90_params {
    struct mha_forward_params call;
    struct tensor_map q, k, v;
    int32_t heads_of_tile;          /* that share a key head: 1, or all of them if requests have few tokens */
    int32_t tile_tokens, tile_rows; /* tile_rows: tile_tokens · heads_of_tile */
    struct divisor heads_divisor, tokens_divisor, units_divisor; /* heads_of_tile, tile_tokens, units */
    int32_t units, units_of_key_head;    /* h_q / heads_of_tile; group / heads_of_tile */
    int32_t cached_keys;                 /* of a key head: the number that stays in L2 */
    int32_t cached_keys_of_all;          /* the number of each key head where all stay in L2 */
    struct tile_counters *tile_counters; /* NULL: every CTA has at most one tile */
    uint64_t ticket;                     /* of this launch */
    /* The keys of a request's tiles are cut into splits: `splits` of them; or if that is 0, as many as have
     * blocks_of_split key blocks each; or if that is 0 too, as many as mha_splits says for the request alone. */
    int32_t splits, blocks_of_split;
    int32_t most_splits, sms;
    int32_t part_rows; /* that there is room for; a request whose rows find none is not split */
    int32_t few_rows;  /* the kernel is that of few rows, with blocks of MHA_SM90_FEW_KEYS */
    /* The rows of splits: of a request all of its first split, then all of its second; in a split by tile. */
    float *part_out;            /* [part_rows][d_v], divided by the sums */
    struct part_end *part_ends; /* [part_rows] */
};

/* The portable tensor-core kernel: a CTA takes a tile of rows (sm80/mha_forward/scheduler.cuh). */
struct mha_forward_sm80_params {
    struct mha_forward_params call;
    int32_t heads_of_tile; /* that share a key head: 1, or all of them if requests have few tokens */
    int32_t tile_tokens;
    struct divisor heads_divisor;     /* heads_of_tile */
    int32_t units, units_of_key_head; /* h_q / heads_of_tile; group / heads_of_tile */
    int32_t cached_keys;              /* of a key head: the number that stays in L2 */
    int32_t out_aligned;              /* rows of out are 16-byte aligned */
    struct divisor tokens_divisor, units_divisor, group_divisor; /* tile_tokens; units; call.group */
    /* Splits of keys, as Hopper's kernel has them (above), but of requests of one shape `splits` is not 0; unused by
     * the kernels without splits. They are computed for tiles of rows_alone rows and blocks of block_keys keys. */
    int32_t splits, blocks_of_split, most_splits;
    int32_t slots; /* CTAs that run at the same time */
    int32_t part_rows, rows_alone, block_keys;
    struct divisor block_divisor; /* block_keys */
    int32_t gap;
    float *part_out;
    struct part_end *part_ends;
};

/* The tile scheduler's counters (sm90/mha_forward/scheduler.cuh). */
struct tile_counters {
    uint64_t ticket; /* the launch that the counters belong to; any other value: not set yet */
    uint32_t taken;  /* tiles taken, besides the first tile of each CTA */
    uint32_t ended;  /* CTAs that have ended */
};

/* A tensor of tokens or keys; strides in elements. */
struct mha_vectors {
    uint16_t *data;
    int64_t request, token, head;
};

/* The padding of one side of dense MHA, tokens or keys (any/mha_padding.cu). */
enum { MHA_PADDED = 2 };
struct mha_padding_params {
    int32_t b, slices;     /* slices: CTAs of `requests` */
    const int32_t *starts; /* as in mha_forward_params */
    const int32_t *used;
    int32_t extent; /* of each request, if not ragged */
    int32_t tokens; /* of all ragged requests */
    int32_t heads, aligned;
    struct mha_vectors to[MHA_PADDED]; /* data NULL: none */
    int32_t width[MHA_PADDED];
    float *lse;            /* NULL: none */
    int64_t lse_stride[2]; /* request, head */
    float lse_of_empty;
    int32_t requests; /* of a CTA, consecutive ones */
};

/* The gradients of dense MHA. Tokens of ragged requests are stored one after the other, like those of a
 * single request. */
struct mha_backward_params {
    int32_t b, h_q, h_kv, group; /* group: h_q / h_kv */
    int32_t d_qk, d_v;
    int32_t s_q, s_k; /* of each request, if not ragged */
    /* [b + 1]: the first token of each ragged request, as the caller gives it; NULL: not ragged. */
    const int32_t *starts_q, *starts_k;
    int32_t tokens_q, tokens_k;     /* of all ragged requests */
    const int32_t *used_q, *used_k; /* [b]: lengths in use (device/used.cuh); NULL: all are */
    int32_t causal;
    float scale, scale_log2; /* softmax_scale; softmax_scale · log2(e) */
    float lse_log2;          /* factor that converts lse to base 2 */
    struct mha_vectors q, k, v, out, dout, dq, dk, dv;
    const float *lse;              /* infinite: the row sees no key */
    int64_t lse_stride[2];         /* request, head */
    const float *attn_sink, *dlse; /* NULL: none */
    int64_t dlse_stride[2];        /* request, head */
    float dlse_natural;            /* factor that converts dlse to the natural logarithm's */
    int64_t dsink_parts;           /* of a head */
    float *of_dsink;               /* [h_q][dsink_parts]: parts of the sinks' gradients; NULL: not wanted */
    float *d_attn_sink;            /* [h_q] */
};

/* Hopper's gradients. Row tiles and key blocks are numbered so that each request has room for its own
 * (device/backward_requests.cuh). */
struct mha_backward_sm90_params {
    struct mha_backward_params call;
    struct tensor_map q, k, v, dout;
    int32_t row_tiles, key_blocks;                    /* of all requests, of one head */
    int32_t items;                                    /* key_blocks · h_q / work_heads */
    int32_t work_heads;                               /* query heads of an item: h_q / h_kv, or 1 */
    struct divisor key_heads_divisor, blocks_divisor; /* h_kv; key_blocks · h_kv */
    int32_t heads_of_set;                             /* key heads whose items are taken together */
    /* In order and without causal mask: key blocks of a head that begin at different tiles of rows (scheduler.cuh). */
    int32_t blocks_of_group;
    int32_t joins; /* the CTAs of the launch before this one, which may not have ended, take the same items */
    float *rows;   /* [h_q][row_tiles][2][rows of a tile]: lse (base 2; inf without keys), delta */
    float *dq_sums; /* [h_q][row_tiles][a tile], in the order given in dq.cuh */
    /* Where an item has one of several query heads: dK and dV of those that have been added (epilogue.cuh), and how many
     * they are, for each warp. */
    float *head_sums;      /* [key_blocks][h_kv][a block's keys][d_qk + d_v] */
    uint32_t *heads_added; /* [key_blocks][h_kv][warps of consumers] */
    int64_t head_counters; /* their number */
    uint32_t *taken;       /* items taken, in any order, besides the first item of each CTA */
    /* Deterministic: key blocks add to a tile's dQ in an order that depends only on the sizes and this number of work
     * tiles in progress; 0: in any order. */
    int32_t in_order;
    int32_t clears;  /* others' data, or padding, may follow a request's last token or key */
    uint32_t *added; /* [h_q][row_tiles][dq_producers]: key blocks that have added (dq.cuh) */
};

/* The portable tensor-core gradients, numbered in the same way. */
struct mha_backward_sm80_params {
    struct mha_backward_params call;
    int32_t row_tiles, key_blocks; /* of all requests, of one head */
    int32_t heads_of_set;          /* key heads whose key blocks are taken together */
    float *rows;     /* [h_q][row_tiles][2][rows of a tile]: lse (base 2; inf without keys), delta */
    float *dq_sums;  /* [h_q][row_tiles][a tile], in the order given in layout.cuh */
    uint32_t *taken; /* deterministic: key blocks taken */
    /* Deterministic: key blocks add to a tile's dQ in an order that depends only on the sizes. */
    int32_t in_order;
    uint32_t *added; /* [h_q][row_tiles][tiles of a row tile]: key blocks that have added */
};

/* Hopper's gradients, by d_qk: rows of a tile, keys of a block, CTAs that share it, parts of a tile's dQ, threads of
 * a CTA. */
#define MHA_BACKWARD_SM90_ROWS(d_qk)     64
#define MHA_BACKWARD_SM90_KEYS(d_qk)     128
#define MHA_BACKWARD_SM90_CTAS(d_qk)     ((d_qk) == 256 ? 2 : 1)
#define MHA_BACKWARD_SM90_DQ_PARTS(d_qk) ((d_qk) == 256 ? 4 : 2)
#define MHA_BACKWARD_SM90_THREADS(d_qk)  ((d_qk) == 64 ? 512 : 384)
/* Whether key blocks form groups in order; the others have no registers for it. */
#define MHA_BACKWARD_SM90_HAS_GROUPS(d_qk) ((d_qk) <= 128)
enum { MHA_BACKWARD_ROW_THREADS = 256, MHA_BACKWARD_CONSUMERS = 2, DSINK_THREADS = 256 };

/* Hopper's dense MHA, by d_qk: rows of a tile, keys of a block. */
#define MHA_SM90_ROWS(d_qk)    ((d_qk) <= 96 ? 192 : 128)
#define MHA_SM90_KEYS(d_qk)    ((d_qk) == 256 ? 80 : 128)
#define MHA_SM90_THREADS(d_qk) (2 * MHA_SM90_ROWS(d_qk) + 128)
/* The same of its kernels for few rows, of which MHA_SM90_FEW_CTAS share an SM. */
#define MHA_SM90_FEW_KEYS(d_qk) ((d_qk) == 64 ? 128 : (d_qk) == 192 ? 64 : 80)
enum {
    MHA_SM90_FEW_ROWS = 64,
    MHA_SM90_FEW_THREADS = 256,
    MHA_SM90_FEW_BYTES = 108 * 1024,
    MHA_SM90_FEW_CTAS = 2
};
enum { MHA_WARPS = 8, MHA_JOIN_WARPS = 4 };

/* Parameters of the join, for dense and sparse decode. */
struct join_params {
    int32_t b, s_q, h_q;
    int32_t group, rows; /* heads and rows of a key head; h_q and s_q · h_q in sparse decode */
    struct divisor group_divisor;
    const int32_t *seqlens; /* NULL: sparse, lengths from topk */
    int32_t capacity;
    struct plan_topk topk;
    struct split_params split;
    struct output_params output;
};

struct merge_params { /* as struct merge_problem of problem.h */
    int64_t n, b, s_q, h_q, d_v;
    int64_t out_first, out_count, last;
    const void *out_last;
    const float *lse_last;
    int64_t out_last_stride[3], lse_last_stride[2];
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
    const int32_t *seqlens; /* NULL: sparse, lengths from topk */
    int64_t b;
    int64_t capacity;
    struct plan_topk topk;
    struct plan_header *header; /* NULL: no header is written */
    struct plan_partition *partitions;
    int32_t *num_splits;
    int32_t num_partitions;
    int32_t planned;                   /* partitions that share the keys (plan.h) */
    struct divisor partitions_divisor; /* by planned; set by the launch */
    struct plan_costs costs;
};

enum { INVARIANT_SPLIT_KEYS = 2048 /* keys of a split in batch-invariant mode */ };

/* Parts of a request; if it has more, all warps of a CTA join a row together. The number of parts alone
 * decides the order of the additions, not the launch of the join, which in batch-invariant mode depends on
 * the table's capacity. */
enum { MANY_PARTS = 8, MANY_PARTS_IN_HALVES = 16 };

/* CTA sizes, used by kernels and their launches. */
enum { JOIN_WARPS = 8, MERGE_THREADS = 128, PLAN_THREADS = 1024, SPARSE_WARPS = 8 };

#endif

// What the host and the kernels of this experiment share: sizes, the call's parameters, one row of the split plan.
#pragma once
#include <cuda.h>
#include <stdint.h>

enum {
    D_QK = 576,       // latent 512 + rotary 64
    D_V = 512,        // V is the first 512 values of a K row
    PAGE = 64,        // keys of a page = keys of a block
    TILE_ROWS = 64,   // rows (query token, head) of a CTA
    PLAN_WORDS = 8
};

// A partition's row: requests begin..end (inclusive), first block of the first, end block of the last.
struct partition {
    int begin_request, end_request, begin_block, end_block, begin_split, first_is_split, last_is_split, pad;
};

struct decode_params {
    const partition *plan;   // [partitions]
    const int *num_splits;   // [b + 1], prefix sum of the parts of each request
    const int *seqlens;      // [b]
    const int *block_table;  // [b, max_pages]
    const void *q;           // bf16 [b, rows, 576]; the pair schedule reads the rope columns straight into registers
    int max_pages;
    int rows;                // s_q * h_q
    int tiles;               // ceil(rows / 64)
    int h_q, s_q, causal;
    float scale_log2;        // softmax_scale * log2(e), positive
    void *out;               // bf16 [b, rows, 512]
    float *lse;              // [b, h_q, s_q], natural logarithm
    float *part_out;         // [splits, rows, 512], each part normalised by its own sum
    uint32_t *trace;         // LAB_TRACE only
    float *part_lse;         // [splits, rows], base 2, -inf where the part sees no key
};

struct decode_maps {
    CUtensorMap k_pair;   // {64 columns, 64 tokens, 2 column groups} of the cache as [9][tokens][64]
    CUtensorMap k_rope;   // the same, one column group
    CUtensorMap q_pair;   // {64, 64 rows, 2, 1} of q as [b][9][rows][64]; rows past the end read as zero
    CUtensorMap q_rope;
};

/* SPDX-License-Identifier: MIT
 *
 * Definitions shared by the roles of Hopper's dense decode over FP8 caches: variants, shared memory,
 * barriers.
 */
#pragma once

#include "../../device/async_copy.cuh"
#include "../../device/element.cuh"
#include "../../device/latent.cuh"
#include "../../device/mbarrier.cuh"
#include "../../device/ring.cuh"
#include "../../device/shared.cuh"
#include "../../device/tma.cuh"
#include "../../device/warpgroup.cuh"
#include "../../device/wgmma.cuh"
#include "../../params.h"
#include "../latent/scheduler.cuh"

namespace dense_decode_fp8 {

using namespace latent;

enum {
    KEYS = PLAN_BLOCK /* of a block */,
    D_QK = 576,
    CODES_OF_LINE = LINE_BYTES /* columns of a line */,
    LINES = D_V / CODES_OF_LINE /* of a key; its end columns follow */,
    END_COLUMNS = D_QK - D_V,
    KEY_TILE_BYTES = KEYS * CODES_OF_LINE,
    END_BYTES = KEYS * END_COLUMNS,
    ROPE_BYTES = KEYS * LINE_BYTES /* bf16 values of FP8_656 */,
    SCALES_OF_KEY = LINES,
    SCALES_BYTES_OF_KEY = SCALES_OF_KEY * 4,
    SCALES_BYTES = KEYS * SCALES_BYTES_OF_KEY,
    SCALES_AT = LINES * KEY_TILE_BYTES + ROPE_BYTES /* offset in a block's keys */,
    HALF_LINE_BYTES = KEYS * 2 /* scales of one line, in fp16 */,
    HALF_SCALES_BYTES = SCALES_OF_KEY * HALF_LINE_BYTES
};
static_assert(KEYS == TILE_LINES, "");

/* Warpgroups. */
enum { PRODUCER, SCORES, VALUES, WARPGROUPS = VALUES + 2, THREADS = WARPGROUPS * WARPGROUP_THREADS };
enum { SOFTMAX_ROWS = 16 /* of a warp */, KEYS_WARP = 3 };

/* Named barriers: of the warpgroup with the scores, of those with the values, and of all three. */
enum { SCORES_BARRIER = 1, VALUES_BARRIER, QUERIES_BARRIER };

/* How scores are computed. CODES: products of codes (mode fp8). CONVERTED: products of fp16 values, with
 * keys converted on their way through registers. */
enum Products { CODES, CONVERTED };

enum Cache { OF_576, OF_656 };

/* A tile has 64, 32 or 16 rows. The products of values take as many; those of scores of codes take 64 in
 * any case. JOIN_IN_KERNEL: a CTA has one split (../latent/scheduler.cuh). */
template <int ROWS_, bool JOIN_IN_KERNEL_, Products PRODUCTS_, Cache CACHE_> struct Variant {
    static constexpr int ROWS = ROWS_, ROW_WARPS = ROWS / 16;
    static constexpr bool JOIN_IN_KERNEL = JOIN_IN_KERNEL_, OF_CODES = PRODUCTS_ == CODES,
                          SCALED = CACHE_ == OF_656; /* four scales a key, and the last columns in bf16 */
    /* Whether S^T is a sum over lines of codes, each times the key's scale (key_products.cuh). */
    static constexpr bool BY_LINES = OF_CODES && SCALED;
    /* Whether S^T is computed, not S: keys are the first factor. */
    static constexpr bool KEYS_FIRST = !OF_CODES || SCALED;
    static constexpr int Q_BYTES = ROWS * (BY_LINES   ? D_V + END_COLUMNS * (int)sizeof(uint16_t)
                                           : OF_CODES ? D_QK
                                                      : D_QK * (int)sizeof(uint16_t));
    static constexpr int KEYS_BYTES =
        LINES * KEY_TILE_BYTES + (SCALED ? ROPE_BYTES + SCALES_BYTES : END_BYTES);
    static constexpr int KV_STAGES =
        (KEYS_FIRST && ROWS == 64) || (!OF_CODES && SCALED && ROWS == 32) ? 3 : 4; /* of keys */
    /* P of FP8_656 lies where the block's last columns were, which are scored by then: one stage of P per
     * stage of keys. */
    static constexpr bool P_IN_KEYS = SCALED;
    static constexpr int P_STAGES = P_IN_KEYS ? KV_STAGES : KEYS_FIRST && ROWS == 64 ? 2 : 3; /* of weights */
    static constexpr int OUT_ROWS = !OF_CODES && ROWS == 64 ? 8 : 16; /* staged at a time */
    /* Whether softmax has all warps of warpgroup 0. The last warp that needs a stage then requests its
     * next keys. */
    static constexpr bool REFILLS = KEYS_FIRST && ROW_WARPS == 4;
    /* Whether the code that a call executes exceeds the 64 KB that a launch brings along: some loops are
     * then not unrolled. */
    static constexpr bool LONG = SCALED && JOIN_IN_KERNEL && (!OF_CODES || ROWS == 16);
    /* Registers per thread of each warpgroup. */
    static constexpr int FIRST_REGISTERS = !KEYS_FIRST ? 24
                                           : BY_LINES  ? 64
                                           : SCALED    ? 80
                                                       : 72,
                         SCORES_REGISTERS = !KEYS_FIRST ? 120
                                            : BY_LINES  ? 96
                                            : SCALED    ? 80
                                                        : 88,
                         VALUES_REGISTERS = !KEYS_FIRST ? 184 : 176;
    static_assert(FIRST_REGISTERS + SCORES_REGISTERS + 2 * VALUES_REGISTERS == 512, "what an SM has");
    static_assert(ROWS == 64 || ROWS == 32 || ROWS == 16, "");
};

/* Staged lines of 64 values of a row have a gap, so that words of rows 0, 2, 4, 6 are in different banks. */
enum { OUT_LINE_BYTES = LINE_BYTES + 16 };

/* A weighted mean of codes is at most 448, and that of 65536 codes that cancel each other is seldom below
 * 2^-17: times PART_UNIT it is a normal number of fp16 in a part, whatever the row. */
static constexpr float PART_UNIT = 64.0f;

/* Position of a block of keys in its page; page -1: no block. */
struct alignas(8) KeyBox {
    int key, page;
};

/* Position in the sequence of blocks of keys that have been requested (producer.cuh). */
struct alignas(16) KeyPosition {
    int index /* of two rounds of stages */,
        left /* blocks left in the split, this one included; 0 after the last split */;
    int key, page /* position of the block */;
    int page_behind, split;
    const int32_t *table; /* the entry after that of the block's page */
};

static constexpr uint32_t ALL_FIT = 0x01010101;

/* Flags of a block's weights, read as 8 bytes. */
struct alignas(8) BlockFlags {
    uint8_t moved[4]; /* whether references of 16 rows moved */
    uint32_t cleared; /* whether codes of the block's keys have been cleared */
};

/* Returns the offset of the score of a key and a row in S^T. The rows of a key are a line; a gap follows
 * each line, and one more every eight lines. So there are no bank conflicts when half a warp of the
 * scores' warpgroup stores (eight rows, of four keys), nor when half a warp of softmax loads (eight rows,
 * of keys eight apart). */
enum { SCORE_GAP_BYTES = 32 };
template <int ROWS> DEVICE constexpr uint32_t score_offset(int key, int row)
{
    return (uint32_t)(key * (ROWS * (int)sizeof(float) + SCORE_GAP_BYTES) + key / 8 * SCORE_GAP_BYTES +
                      row * (int)sizeof(float));
}

template <typename V> struct SharedOf {
    static constexpr int QUERY_TILE_BYTES = V::ROWS * LINE_BYTES;

    /* Four tiles of 64 lines of 128 codes; one of lines of 64 codes, or of 64 values, and scales. */
    unsigned char keys[V::KV_STAGES][V::KEYS_BYTES];
    unsigned char q[V::Q_BYTES]; /* codes likewise; or tiles of lines of 64 values */
    alignas(V::P_IN_KEYS ? 16 : 1024) unsigned char p[V::P_IN_KEYS ? 1 : V::P_STAGES]
                                                     [V::P_IN_KEYS ? 16 : V::ROWS * LINE_BYTES];
    __align__(16) unsigned char s[V::KEYS_FIRST ? score_offset<V::ROWS>(KEYS - 1, V::ROWS)
                                                : 16];     /* S^T of a block */
    unsigned char out[2][4][V::OUT_ROWS * OUT_LINE_BYTES]; /* [side][warp] of the warps with values */
    /* With a block's weights: */
    float factor[V::P_STAGES][V::ROWS]; /* rescales earlier sums, in rows of warps that have moved */
    float finish[V::P_STAGES][V::ROWS]; /* with the last block of a split: final factor of a row */
    float q_scales[2][V::ROWS];         /* [split % 2]: of queries converted here */
    BlockFlags flags[V::P_STAGES];
    /* FP8_656, with a stage's keys (convert.cuh): */
    __align__(16) uint32_t half_scales[V::KV_STAGES][V::SCALED ? HALF_SCALES_BYTES / 4 : 4];
    /* ALL_FIT: values and weights of the block are fp16, else bf16; a byte per warp. */
    uint32_t fits[V::KV_STAGES];
    KeyBox box[2][V::KV_STAGES]; /* [round % 2]: the block that a stage receives next */
    KeyPosition behind_boxes;
    uint32_t released[V::KV_STAGES]; /* count of releases by warps with values */
    uint64_t scales_full[V::KV_STAGES];
    uint64_t keys_full[V::KV_STAGES], keys_empty[V::KV_STAGES], q_full, q_empty, p_full[V::P_STAGES],
        p_empty[V::P_STAGES],
        done[V::P_STAGES], /* follows p_full; with the last block of a split `finish` is stored */
        s_full, s_empty;
    /* [warp] of scores, values and softmax: kept here until it is needed */
    Task task[16];
    SplitList list;
    OneSplit one;
};

/* Returns the address of a stage's weights: one line of 64 per row. */
template <typename V> DEVICE uint32_t weights_tile(uint32_t smem, int p_stage)
{
    using Shared = SharedOf<V>;
    static_assert(!V::P_IN_KEYS || (V::P_STAGES == V::KV_STAGES && V::ROWS * LINE_BYTES <= ROPE_BYTES), "");
    return V::P_IN_KEYS ? SHARED_AT(smem, keys) + (uint32_t)(p_stage * V::KEYS_BYTES + LINES * KEY_TILE_BYTES)
                        : SHARED_AT(smem, p) + (uint32_t)(p_stage * V::ROWS * LINE_BYTES);
}

/* Returns the work of split i of the list, or of the only split. */
template <typename V>
DEVICE WorkTile work_tile_of(const struct dense_decode_sm90_params &p, const SharedOf<V> &shared, int i,
                             const CtaCoord &cta)
{
    if constexpr (V::JOIN_IN_KERNEL)
        return WorkTile(p, shared.one, cta.kv_head, cta.tile * V::ROWS, V::ROWS);
    else
        return WorkTile(p, shared.list, i, cta.kv_head, cta.tile * V::ROWS, V::ROWS);
}

DEVICE int blocks_of(const Task &task)
{
    return (int)((unsigned)(task.split.end - task.split.begin + KEYS - 1) / KEYS);
}

/* Returns the number of keys from the first one that some row does not see to the end of the split's last
 * block, keys behind the split included. */
DEVICE int masked_keys(const WorkTile &work)
{
    const int begin = work.task.split.begin;
    return KEYS * work.blocks - (max(work.task.all_see, begin) - begin);
}

} // namespace dense_decode_fp8

/* SPDX-License-Identifier: MIT
 *
 * The tile of a CTA of portable latent attention: its sizes, its layout in shared memory, and the state of
 * its threads.
 *
 * Shared memory, in bytes:
 *      Q  ROWS × 1152, or none if in registers | P  ROWS × 128 |
 *      maxima  KEY_GROUPS × ROWS × 4 | factors  ROWS × 4 | padding to whole lines |
 *      ring  stages × KEYS × 1152 | data of Keys: of a list, flags of the named keys  stages × KEYS
 * Q, P and the ring are stored in lines of 128 bytes (64 columns of a row), swizzled: ldmatrix has no bank
 * conflicts. O takes the most registers: ROWS · 512 / (32 · WARPS) per thread.
 */
#pragma once

#include "../../device/element.cuh"
#include "../../device/fragment.h"
#include "../../device/kernel.cuh"
#include "../../device/latent.cuh"
#include "../../device/shared.cuh"
#include "../../device/splits.cuh"
#include "shape.h"

namespace latent {

/* Compute capability for which this code is compiled. */
#ifdef __CUDA_ARCH__
static constexpr int CODE = __CUDA_ARCH__ / 10;
#else
static constexpr int CODE = 90; /* the host's pass compiles no kernel */
#endif

template <typename Element_, int ROWS_, int KEYS_, int WARPS_, bool Q_IN_REGISTERS_> struct Tile {
    using Element = Element_;
    static constexpr int ROWS = ROWS_, KEYS = KEYS_, WARPS = WARPS_, THREADS = 32 * WARPS_;
    /* Where a warp has few columns of O, its fragments of Q also stay in registers, which frees shared
     * memory for one more stage. */
    static constexpr bool Q_IN_REGISTERS = Q_IN_REGISTERS_;

    /* Scores: warps are divided over row groups of 16, then over keys. With two column splits a pair of warps
     * computes the scores of two row groups together, each over half the columns (a fragment of K serves
     * twice the rows), and the warps exchange their halves. */
    static constexpr int ROW_GROUPS = ROWS / 16, KEY_GROUPS = WARPS / ROW_GROUPS,
                         COLUMN_SPLITS = ROWS == 64 ? 2 : 1;
    static constexpr int WARP_KEYS = KEYS / KEY_GROUPS, KEY_TILES = WARP_KEYS / 8;
    /* P·V: warps are divided over columns. */
    static constexpr int WARP_COLUMNS = D_V / WARPS, COLUMN_PAIRS = WARP_COLUMNS / 16;

    /* Eight threads copy a row or a key. */
    static constexpr int KEYS_AT_ONCE = THREADS / 8, PASSES = KEYS / KEYS_AT_ONCE;

    /* A group is 64 columns of all rows or keys. */
    static constexpr uint32_t Q_GROUP = ROWS * LINE_BYTES, KEY_GROUP = KEYS * LINE_BYTES;
    static constexpr uint32_t Q_BYTES = Q_IN_REGISTERS ? 0 : MAX_GROUPS * Q_GROUP,
                              P_BYTES = ROWS * LINE_BYTES, STAGE_BYTES = MAX_GROUPS * KEY_GROUP;

    static_assert(ROWS % 16 == 0 && WARPS % ROW_GROUPS == 0 && WARP_KEYS % 8 == 0 && KEYS <= 64, "");
    static_assert(KEY_TILES == 1 || KEY_TILES % 2 == 0, "");
    static_assert(WARP_COLUMNS % 16 == 0 && KEYS % KEYS_AT_ONCE == 0, "");
};

/* Attention of a tile of rows over the keys of a split. Each function is defined in the file of its role. */
template <typename Tile, typename Call, typename Keys> struct Attend : Tile {
    using Element = typename Tile::Element;
    using Tile::COLUMN_PAIRS;
    using Tile::COLUMN_SPLITS;
    using Tile::KEY_GROUP;
    using Tile::KEY_GROUPS;
    using Tile::KEY_TILES;
    using Tile::KEYS;
    using Tile::P_BYTES;
    using Tile::Q_BYTES;
    using Tile::Q_GROUP;
    using Tile::Q_IN_REGISTERS;
    using Tile::ROW_GROUPS;
    using Tile::ROWS;
    using Tile::STAGE_BYTES;
    using Tile::THREADS;
    using Tile::WARP_COLUMNS;
    using Tile::WARP_KEYS;
    using Tile::WARPS;
    using Operation = Call;
    static constexpr int GROUPS_OF_V = D_V / LINE_ELEMENTS;

    /* An mma waits for the previous one on the same accumulators: with few key tiles, several accumulators
     * alternate. */
    static constexpr int CHAINS = KEY_TILES == 1 ? 4 : KEY_TILES == 2 ? 2 : 1;

    static constexpr bool ENOUGH_REGISTERS = Keys::ENOUGH_REGISTERS;

    /* Maxima and factors, rounded up to whole lines. */
    static constexpr uint32_t SIDE_BYTES =
        ((KEY_GROUPS + 1) * ROWS * (uint32_t)sizeof(float) + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES;
    static constexpr uint32_t LEAST_BYTES =
        Q_BYTES + P_BYTES + SIDE_BYTES + Keys::LEAST_STAGES * STAGE_BYTES + Keys::BYTES_BEHIND_RING;

    struct QFragments {
        uint32_t a[Q_IN_REGISTERS ? 4 * MAX_GROUPS : 1][4]; /* of 16 columns each */
    };

    static_assert(PLAN_BLOCK % KEYS == 0 && INVARIANT_SPLIT_KEYS % KEYS == 0,
                  "a split begins at a block of keys");

    Call call;
    unsigned char *shared;
    uint32_t smem, p_at, ring_at, q_at; /* shared memory begins at smem */
    float *maxima, *factors;            /* [KEY_GROUPS][ROWS], [ROWS] */
    float *tops; /* [KEY_GROUPS][ROWS], in P: the largest scores of a split, if wanted */
    Keys keys;
    int warp, lane;

    template <typename Params>
    __device__ Attend(const Params &params, unsigned char *memory, const typename Call::Task &task)
        : call{params, task}, shared(memory), smem(shared_address(memory)), p_at(smem + Q_BYTES),
          ring_at(p_at + P_BYTES + SIDE_BYTES), keys(call, ring_at), warp((int)threadIdx.x / 32),
          lane((int)threadIdx.x % 32)
    {
        q_at = Q_IN_REGISTERS ? ring_at + (uint32_t)(keys.stages() - 1) * STAGE_BYTES
                              : smem; /* the stage that is filled last */
        maxima = (float *)(memory + Q_BYTES + P_BYTES);
        factors = maxima + KEY_GROUPS * ROWS;
        tops = (float *)(memory + Q_BYTES);
    }

    /* A step is the columns that one ldmatrix of K covers: 32 columns of 8 keys, or 16 of 16 keys. Fragments
     * are loaded STEPS_AHEAD steps before the products that read them. */
    static constexpr int STEP_COLUMNS = KEY_TILES == 1 ? 32 : 16, STEP_HALVES = STEP_COLUMNS / 16;
    static constexpr int STEPS = MAX_GROUPS * LINE_ELEMENTS / STEP_COLUMNS / COLUMN_SPLITS;
    static constexpr int STEPS_AHEAD = KEY_TILES == 1                            ? 3
                                       : Keys::LOADS_FAR_AHEAD && KEY_TILES == 4 ? 2
                                                                                 : 1,
                         BUFFERS = STEPS_AHEAD + 1;
    static constexpr int LAST_GROUP = STEPS / MAX_GROUPS * (MAX_GROUPS - 1); /* d_qk 512 ends before it */
    static constexpr int K_LOADS = KEY_TILES == 1 ? 1 : KEY_TILES / 2;
    static_assert(KEY_TILES == 1 || KEY_TILES % 2 == 0, "");

    struct RowState { /* of this warp's rows lane / 4 and lane / 4 + 8 */
        float reference[2];
        float sum[2]; /* over this thread's keys */
        float top[2]; /* this thread's largest scores, if wanted */
    };

    /* ---- scores.cuh ---- */

    DEVICE void load_q(uint32_t a[4], int row_group, int column) const;
    DEVICE void load_k(uint32_t b[K_LOADS][4], uint32_t stage_at, int column) const;
    template <typename Between>
    DEVICE void score(uint32_t stage_at, const QFragments &q, float s[KEY_TILES][4], Between between);
    DEVICE float4 *exchange_at(int of, int tile) const;
    DEVICE void exchange(const float lower[KEY_TILES][CHAINS][4], const float upper[KEY_TILES][CHAINS][4],
                         float s[KEY_TILES][4]);
    static DEVICE void pair_barrier(int pair);
    static DEVICE constexpr int step_column(int step);
    static DEVICE uint32_t column_at(uint32_t line, uint32_t group_bytes, int column);
    DEVICE uint32_t split_at(uint32_t line) const;

    /* ---- softmax.cuh ---- */

    DEVICE void scale(float s[KEY_TILES][4], int stage, int first_key);
    static DEVICE void largest(const float s[KEY_TILES][4], float most[2]);
    DEVICE void move_references(const float s[KEY_TILES][4], RowState &state);
    DEVICE void write_probabilities(const float s[KEY_TILES][4], const RowState &state, float sum[2]);
    DEVICE void softmax(const float s[KEY_TILES][4], RowState &state,
                        float o[ROW_GROUPS][2 * COLUMN_PAIRS][4], int free_stage);
    DEVICE void rescale(float o[ROW_GROUPS][2 * COLUMN_PAIRS][4]);

    /* ---- epilogue.cuh ---- */

    DEVICE void epilogue(const RowState &state, float o[ROW_GROUPS][2 * COLUMN_PAIRS][4]);

    /* ---- mainloop.cuh ---- */

    DEVICE void copy_q() const;
    template <typename Between>
    DEVICE void accumulate(uint32_t stage_at, float o[ROW_GROUPS][2 * COLUMN_PAIRS][4], Between between);
    __device__ bool poisoned(uint32_t stage_at, int from, int to) const;
    DEVICE void forget_addresses();
    DEVICE void run();
};

} // namespace latent

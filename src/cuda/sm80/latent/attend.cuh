/* SPDX-License-Identifier: MIT
 *
 * Latent attention on any NVIDIA GPU since Ampere, as in FlashAttention-2 (docs/flash-attention.md explains
 * it). Dense decode, sparse decode and sparse prefill share this kernel body.
 *
 * A CTA takes a tile of ROWS rows (a row is one query token of one query head) through the keys of a split,
 * KEYS at a time. V is the first 512 columns of K: a block of keys is read from global memory once, and both
 * products use the same shared memory.
 *
 *      memory ──cp.async──▶ ring of key blocks (shared)            Q (shared, for the whole split)
 *                             │                │                     │
 *                             │ rows of V      └── K ──▶ S = Q·Kᵀ ◀──┘ a warp: 16 rows × KEYS/KEY_GROUPS keys
 *                             │                          │ mask, exp2 relative to a reference
 *                             │                          ▼
 *                             │                    P (shared, 16 bit); seldom factors of O (shared)
 *                             ▼                          │
 *                   O = factor·O + P·V  ◀────────────────┘ a warp: all rows × 512/WARPS columns
 *
 * Timeline of a block of keys (| = barrier of the whole CTA):
 *      wait for its copies | copy a later block; S; P; a vote | P·V
 *      if a score exceeds its reference by more than 8:       | maxima | P again; factors | O · factors; P·V
 *
 * Two classes define an operation. `Call` defines the rows of a tile, where they are read and written,
 * and which keys a row does not see; `Keys` copies blocks of keys to the ring, overlapped with the products:
 *
 *                        Call (rows of a tile)                Keys
 *      dense decode      rows of a key head, over tokens      RingKeys of a block table; RawKeys of bytes
 *      sparse decode     heads of one token: a token's list   RingKeys of a list; ListedBytes of bytes,
 *      sparse prefill    is its own                           which converts beside P·V
 *
 * The reference that is subtracted before the exponential follows the row's maximum only when it falls behind
 * by more than 8 (in log2): P then stays below 2^8, which 16 bits hold as precisely as 1, and O is seldom
 * rescaled.
 *
 * Shared memory, in bytes:
 *      Q  ROWS × 1152, or none if in registers | P  ROWS × 128 |
 *      maxima  KEY_GROUPS × ROWS × 4 | factors  ROWS × 4 | padding to whole lines |
 *      ring  stages × KEYS × 1152 | data of Keys: of a list, flags of the named keys  stages × KEYS
 * Q, P and the ring are stored in lines of 128 bytes (64 columns of a row), swizzled: ldmatrix has no bank
 * conflicts. O takes the most registers: ROWS · 512 / (32 · WARPS) per thread.
 *
 * The limit on an H200 at 64 rows is the bandwidth of shared memory: an m16n8k16 of Q·Kᵀ reads 256 bytes (two
 * column splits), one of P·V 128, where mma.sync could take one every 1.6 clocks.
 */
#pragma once

#include "../../device/element.cuh"
#include "../../device/mma.cuh"
#include "../../device/quad.cuh"
#include "../../device/reference.cuh"
#include "../../device/result.cuh"
#include "../../device/shared.cuh"
#include "../../device/splits.cuh"
#include "ring.cuh"
#include "tile.cuh"

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
    uint32_t base, p_at, ring_at, q_at;
    float *maxima, *factors; /* [KEY_GROUPS][ROWS], [ROWS] */
    float *tops;             /* [KEY_GROUPS][ROWS], in P: the largest scores of a split, if wanted */
    Keys keys;
    int warp, lane;

    template <typename Params>
    __device__ Attend(const Params &params, unsigned char *memory, const typename Call::Task &task)
        : call{params, task}, shared(memory), base(shared_address(memory)), p_at(base + Q_BYTES),
          ring_at(p_at + P_BYTES + SIDE_BYTES), keys(call, ring_at), warp((int)threadIdx.x / 32),
          lane((int)threadIdx.x % 32)
    {
        q_at = Q_IN_REGISTERS ? ring_at + (uint32_t)(keys.stages() - 1) * STAGE_BYTES
                              : base; /* the stage that is filled last */
        maxima = (float *)(memory + Q_BYTES + P_BYTES);
        factors = maxima + KEY_GROUPS * ROWS;
        tops = (float *)(memory + Q_BYTES);
    }

    /* Copies Q; rows past the end of the tile become zeros. */
    DEVICE void copy_q() const
    {
        for (int pass = 0; pass < (ROWS + THREADS / 8 - 1) / (THREADS / 8); pass++) {
            const int row = (int)threadIdx.x / 8 + pass * (THREADS / 8), chunk = (int)threadIdx.x % 8;
            if (row >= ROWS) break;
            const bool valid = call.has_row(row);
            const uint16_t *from = call.q_row(valid ? row : 0) + chunk * CHUNK_ELEMENTS;
            const uint32_t to = q_at + swizzle_128((uint32_t)row, (uint32_t)chunk);
            if (!call.aligned()) {
                copy_row_unaligned(to, Q_GROUP, from, valid ? call.d_qk() : 0, call.d_qk());
                continue;
            }
#pragma unroll
            for (int g = 0; g < MAX_GROUPS; g++)
                if (g < MAX_GROUPS - 1 || call.d_qk() == MAX_GROUPS * LINE_ELEMENTS)
                    cp_async_16(to + (uint32_t)g * Q_GROUP, from + g * LINE_ELEMENTS, valid);
        }
    }

    /* ---- The two products ---------------------------------------------------------------------- */

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

    /* Returns the first column of a step for the first split; the second split has those 32 further on. */
    static DEVICE constexpr int step_column(int step)
    {
        return COLUMN_SPLITS == 1 ? step * STEP_COLUMNS : step / 2 * LINE_ELEMENTS + step % 2 * STEP_COLUMNS;
    }

    /* Returns the address of a column in lines of 128 bytes per 64 columns: the swizzle changes bits 5 and 6
     * alone. The group is added last, as a constant of the load. */
    static DEVICE uint32_t column_at(uint32_t line, uint32_t group_bytes, int column)
    {
        return (line ^ (uint32_t)(column % LINE_ELEMENTS * 2)) +
               (uint32_t)(column / LINE_ELEMENTS) * group_bytes;
    }

    /* Returns this warp's part of a line. */
    DEVICE uint32_t split_at(uint32_t line) const
    {
        return COLUMN_SPLITS == 1 ? line : line ^ (uint32_t)(warp % 2 * 64);
    }

    /* Loads 16 columns of 16 rows. */
    DEVICE void load_q(uint32_t a[4], int row_group, int column) const
    {
        const uint32_t line =
            q_at + swizzle_128((uint32_t)ldmatrix_tile_row(lane), (uint32_t)ldmatrix_tile_chunk(lane)) +
            (uint32_t)(16 * row_group) * LINE_BYTES;
        ldmatrix_x4(a, column_at(split_at(line), Q_GROUP, column));
    }

    /* Loads a step of this warp's keys: each pair of words of b holds the fragments of k 0-7 and k 8-15 (the
     * next pair is of the next 16 columns, or of the next 8 keys). */
    DEVICE void load_k(uint32_t b[K_LOADS][4], uint32_t stage_at, int column) const
    {
        const uint32_t row = KEY_TILES == 1 ? ldmatrix_row_of_8(lane) : ldmatrix_pair_row(lane);
        const uint32_t chunk = KEY_TILES == 1 ? ldmatrix_chunk_of_4(lane) : ldmatrix_pair_chunk(lane);
        const uint32_t line =
            stage_at + (uint32_t)(WARP_KEYS * (warp / ROW_GROUPS)) * LINE_BYTES + swizzle_128(row, chunk);
#pragma unroll
        for (int i = 0; i < K_LOADS; i++)
            ldmatrix_x4(b[i], column_at(split_at(line), KEY_GROUP, column) + (uint32_t)(16 * i) * LINE_BYTES);
    }

    /* Computes the scores. between(step) is called before the products of each step, for work that overlaps
     * with them. */
    template <typename Between>
    DEVICE void score(uint32_t stage_at, const QFragments &q, float s[KEY_TILES][4], Between between)
    {
        const int row_group = warp % ROW_GROUPS, first_group = row_group / COLUMN_SPLITS * COLUMN_SPLITS;
        const bool all_groups = call.d_qk() == MAX_GROUPS * LINE_ELEMENTS;
        uint32_t a[BUFFERS][COLUMN_SPLITS][STEP_HALVES][4], b[BUFFERS][K_LOADS][4];
        float sums[COLUMN_SPLITS][KEY_TILES][CHAINS][4] = {};
#pragma unroll
        for (int step = 0; step < STEPS + STEPS_AHEAD; step++) {
            if (step < STEPS && (step < LAST_GROUP || all_groups)) {
                const int column = step_column(step);
                if (!Q_IN_REGISTERS)
#pragma unroll
                    for (int m = 0; m < COLUMN_SPLITS; m++)
#pragma unroll
                        for (int half = 0; half < STEP_HALVES; half++)
                            load_q(a[step % BUFFERS][m][half], first_group + m, column + 16 * half);
                load_k(b[step % BUFFERS], stage_at, column);
            }
            const int done = step - STEPS_AHEAD;
            if (done < 0) continue;
            if (done == LAST_GROUP && !all_groups) break;
            between(done);
#pragma unroll
            for (int half = 0; half < STEP_HALVES; half++)
#pragma unroll
                for (int m = 0; m < COLUMN_SPLITS; m++)
#pragma unroll
                    for (int t = 0; t < KEY_TILES; t++) {
                        const uint32_t *fragment =
                            b[done % BUFFERS][t / 2] + 2 * (KEY_TILES == 1 ? half : t % 2);
                        mma_16816<Element>(sums[m][t][(STEP_HALVES * done + half) % CHAINS],
                                           Q_IN_REGISTERS ? q.a[STEP_HALVES * done + half]
                                                          : a[done % BUFFERS][m][half],
                                           fragment[0], fragment[1]);
                    }
        }
#pragma unroll
        for (int t = 0; t < KEY_TILES; t++)
#pragma unroll
            for (int e = 0; e < 4; e++)
#pragma unroll
                for (int m = 0; m < COLUMN_SPLITS; m++)
                    for (int c = 1; c < CHAINS; c++) sums[m][t][0][e] += sums[m][t][c][e];
        if (COLUMN_SPLITS == 1) {
#pragma unroll
            for (int i = 0; i < 4 * KEY_TILES; i++) s[i / 4][i % 4] = sums[0][i / 4][0][i % 4];
        } else {
            exchange(sums[0], sums[COLUMN_SPLITS - 1], s);
        }
    }

    /* Returns where this lane's float4 of an exchanged tile is: among the probabilities that the warp `of`
     * writes later. */
    DEVICE float4 *exchange_at(int of, int tile) const
    {
        const int row = 16 * (of % ROW_GROUPS) + lane % 16,
                  chunk = KEY_TILES * (of / ROW_GROUPS) + 2 * tile + lane / 16;
        return (float4 *)(shared + (p_at - base) + swizzle_128((uint32_t)row, (uint32_t)chunk));
    }

    /* Adds the halves of the two warps of a pair: each keeps its own row group and gives the other away. They
     * exchange through the space of P, which holds half of the tiles at a time: each warp reads where only it
     * will write probabilities, so that it need not wait for other warps. */
    DEVICE void exchange(const float lower[KEY_TILES][CHAINS][4], const float upper[KEY_TILES][CHAINS][4],
                         float s[KEY_TILES][4])
    {
        constexpr int TILES_AT_ONCE = KEY_TILES / 2;
        const bool is_upper = warp % 2;
        const int pair = warp / 2;
#pragma unroll
        for (int round = 0; round < 2; round++) {
            if (round) pair_barrier(pair);
#pragma unroll
            for (int i = 0; i < TILES_AT_ONCE; i++) {
                const int t = round * TILES_AT_ONCE + i;
                float4 values;
                values.x = is_upper ? lower[t][0][0] : upper[t][0][0],
                values.y = is_upper ? lower[t][0][1] : upper[t][0][1];
                values.z = is_upper ? lower[t][0][2] : upper[t][0][2],
                values.w = is_upper ? lower[t][0][3] : upper[t][0][3];
                *exchange_at(warp ^ 1, i) = values;
            }
            pair_barrier(pair);
#pragma unroll
            for (int i = 0; i < TILES_AT_ONCE; i++) {
                const int t = round * TILES_AT_ONCE + i;
                const float4 values = *exchange_at(warp, i);
                s[t][0] = (is_upper ? upper[t][0][0] : lower[t][0][0]) + values.x;
                s[t][1] = (is_upper ? upper[t][0][1] : lower[t][0][1]) + values.y;
                s[t][2] = (is_upper ? upper[t][0][2] : lower[t][0][2]) + values.z;
                s[t][3] = (is_upper ? upper[t][0][3] : lower[t][0][3]) + values.w;
            }
        }
        __syncwarp(); /* all lanes have read */
    }

    /* Synchronizes two neighbouring warps. Barrier 0 is __syncthreads. */
    static DEVICE void pair_barrier(int pair)
    {
        asm volatile("bar.sync %0, 64;" ::"r"(pair + 1) : "memory");
    }

    static constexpr int VALUE_STEPS = KEYS / 16 * COLUMN_PAIRS;

    /* O += P·V. between(step) is called before the products of each step. If it converts keys, the loop is
     * not fully unrolled: across iterations the compiler would load more ahead than there are registers
     * for. */
    template <typename Between>
    DEVICE void accumulate(uint32_t stage_at, float o[ROW_GROUPS][2 * COLUMN_PAIRS][4], Between between)
    {
        const uint32_t p_line =
            p_at + swizzle_128((uint32_t)ldmatrix_tile_row(lane), (uint32_t)ldmatrix_tile_chunk(lane));
        const uint32_t v_line =
            stage_at + swizzle_128((uint32_t)ldmatrix_tile_row(lane), (uint32_t)ldmatrix_tile_chunk(lane));
#pragma unroll(!Keys::CONVERTS_BESIDE_VALUES ? KEYS / 16 : Q_IN_REGISTERS ? 1 : 2)
        for (int k = 0; k < KEYS / 16; k++) {
            uint32_t a[ROW_GROUPS][4], b[COLUMN_PAIRS][4];
#pragma unroll
            for (int m = 0; m < ROW_GROUPS; m++)
                ldmatrix_x4(a[m],
                            (p_line ^ (uint32_t)(2 * k * CHUNK_BYTES)) + (uint32_t)(16 * m) * LINE_BYTES);
            const auto load = [&](int n) {
                const int column = WARP_COLUMNS * warp + 16 * n;
                const uint32_t group = (uint32_t)(column / LINE_ELEMENTS) * KEY_GROUP;
                ldmatrix_x4_trans(
                    b[n], (v_line ^ (uint32_t)(column % LINE_ELEMENTS / CHUNK_ELEMENTS * CHUNK_BYTES)) +
                              group + (uint32_t)(16 * k) * LINE_BYTES);
            };
            if (Keys::CONVERTS_BESIDE_VALUES)
#pragma unroll
                for (int n = 0; n < COLUMN_PAIRS; n++) load(n);
#pragma unroll
            for (int n = 0; n < COLUMN_PAIRS; n++) {
                if (!Keys::CONVERTS_BESIDE_VALUES) load(n);
                between(k * COLUMN_PAIRS + n);
#pragma unroll
                for (int m = 0; m < ROW_GROUPS; m++) {
                    mma_16816<Element>(o[m][2 * n], a[m], b[n][0], b[n][1]);
                    mma_16816<Element>(o[m][2 * n + 1], a[m], b[n][2], b[n][3]);
                }
            }
        }
    }

    /* ---- Keys that only some rows of the tile see ------------------------------------------------ */

    /* Returns whether V holds an infinity or a NaN in keys from … to - 1, which some row must not see: the
     * product with P = 0 would not hide it. */
    __device__ bool poisoned(uint32_t stage_at, int from, int to) const
    {
        bool found = false;
        for (int i = (int)threadIdx.x; i < (to - from) * GROUPS_OF_V * (LINE_BYTES / 4); i += THREADS) {
            const int word = i % (LINE_BYTES / 4), line = i / (LINE_BYTES / 4);
            const uint32_t at = stage_at - base + (uint32_t)(line % GROUPS_OF_V) * KEY_GROUP +
                                (uint32_t)(from + line / GROUPS_OF_V) * LINE_BYTES + (uint32_t)word * 4;
            found |= any_not_finite<Element>(*(const uint32_t *)(shared + at));
        }
        return __syncthreads_or(found);
    }

    /* ---- Softmax ------------------------------------------------------------------------------- */

    struct RowState { /* of this warp's rows lane / 4 and lane / 4 + 8 */
        float reference[2];
        float sum[2]; /* over this thread's keys */
        float top[2]; /* this thread's largest scores, if wanted */
    };

    /* Returns this thread's largest score of each row. */
    static DEVICE void largest(const float s[KEY_TILES][4], float most[2])
    {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            most[i] = -INFINITY;
#pragma unroll
            for (int t = 0; t < KEY_TILES; t++) most[i] = fmaxf(most[i], fmaxf(s[t][2 * i], s[t][2 * i + 1]));
        }
    }

    /* Finds the maximum of each row over the warps that share it; raises the references that have fallen
     * behind, and writes the factors by which O and the sums shrink. */
    DEVICE void move_references(const float s[KEY_TILES][4], RowState &state)
    {
        const int row = 16 * (warp % ROW_GROUPS) + lane / 4, key_group = warp / ROW_GROUPS;
        float most[2];
        largest(s, most);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            most[i] = quad_max(most[i]);
            if (KEY_GROUPS > 1 && lane % 4 == 0) maxima[key_group * ROWS + row + 8 * i] = most[i];
        }
        if (KEY_GROUPS > 1) __syncthreads();
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (KEY_GROUPS > 1)
#pragma unroll
                for (int g = 0; g < KEY_GROUPS; g++) most[i] = fmaxf(most[i], maxima[g * ROWS + row + 8 * i]);
            const bool behind = most[i] > state.reference[i] + REFERENCE_SLACK;
            const float factor = behind ? exp2_approx(state.reference[i] - most[i]) : 1.0f;
            if (behind) state.reference[i] = most[i];
            state.sum[i] *= factor;
            if (key_group == 0 && lane % 4 == 0) factors[row + 8 * i] = factor;
        }
    }

    /* Writes the probabilities of scores (scaled, base 2) to shared memory; returns the rows' sums. */
    DEVICE void write_probabilities(const float s[KEY_TILES][4], const RowState &state, float sum[2])
    {
        const int row = 16 * (warp % ROW_GROUPS) + lane / 4, key_group = warp / ROW_GROUPS;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float reference = state.reference[i] == -INFINITY ? 0.0f : state.reference[i];
            sum[i] = state.sum[i];
#pragma unroll
            for (int t = 0; t < KEY_TILES; t++) {
                const float low = exp2_approx(s[t][2 * i] - reference),
                            high = exp2_approx(s[t][2 * i + 1] - reference);
                sum[i] += low + high;
                const uint32_t at =
                    p_at - base +
                    swizzle_128((uint32_t)(row + 8 * i), (uint32_t)(WARP_KEYS / 8 * key_group + t)) +
                    (uint32_t)(lane % 4) * 4;
                *(uint32_t *)(shared + at) = Element::pack(low, high);
            }
        }
    }

    /* Turns scores into probabilities, and makes O relative to the same references. All threads vote on
     * whether a score exceeds its reference by more than the slack, in the barrier behind the probabilities.
     * Only then maxima are taken across threads, and the probabilities are written again. */
    DEVICE void softmax(const float s[KEY_TILES][4], RowState &state,
                        float o[ROW_GROUPS][2 * COLUMN_PAIRS][4], int free_stage)
    {
        float most[2], sum[2];
        largest(s, most);
        bool behind = false;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if constexpr (Call::WANTS_MAXIMA) state.top[i] = fmaxf(state.top[i], most[i]);
            behind |= most[i] > state.reference[i] + REFERENCE_SLACK;
        }
        write_probabilities(s, state, sum);
        keys.before_values(free_stage);
        if (__any_sync(~0u, __syncthreads_or(behind))) {
            move_references(s, state);
            write_probabilities(s, state, sum);
            __syncthreads(); /* P and the factors are complete */
            rescale(o);
        }
        for (int i = 0; i < 2; i++) state.sum[i] = sum[i];
    }

    DEVICE void rescale(float o[ROW_GROUPS][2 * COLUMN_PAIRS][4])
    {
        float factor[ROW_GROUPS][2];
#pragma unroll
        for (int m = 0; m < ROW_GROUPS; m++)
#pragma unroll
            for (int i = 0; i < 2; i++) factor[m][i] = factors[16 * m + 8 * i + lane / 4];
#pragma unroll
        for (int m = 0; m < ROW_GROUPS; m++)
#pragma unroll
            for (int n = 0; n < 2 * COLUMN_PAIRS; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) o[m][n][e] *= factor[m][e / 2];
    }

    /* ---- The end of a split -------------------------------------------------------------------- */

    /* Writes the rows to `out`, or to the split's slot. */
    DEVICE void finish(const RowState &state, float o[ROW_GROUPS][2 * COLUMN_PAIRS][4])
    {
        const int my_row = 16 * (warp % ROW_GROUPS) + lane / 4, key_group = warp / ROW_GROUPS;
        float *sums = maxima;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int at = key_group * ROWS + my_row + 8 * i;
            const float sum = quad_sum(state.sum[i]);
            if (lane % 4 == 0) sums[at] = sum;
            if constexpr (Call::WANTS_MAXIMA) {
                const float top = quad_max(state.top[i]);
                if (lane % 4 == 0) tops[at] = top;
            }
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = my_row + 8 * i;
            if (key_group || lane % 4 || !call.has_row(row)) continue;
            float sum = 0.0f;
            for (int g = 0; g < KEY_GROUPS; g++) sum += sums[g * ROWS + row];
            const bool empty = state.reference[i] == -INFINITY && sum == 0.0f;
            factors[row] = (empty ? 0.0f : 1.0f / sum) * call.finish_row(row, {state.reference[i], sum});
            if constexpr (Call::WANTS_MAXIMA) {
                float top = -INFINITY;
                for (int g = 0; g < KEY_GROUPS; g++) top = fmaxf(top, tops[g * ROWS + row]);
                call.store_maximum(row, top * LN_2);
            }
        }
        __syncthreads();
#pragma unroll
        for (int m = 0; m < ROW_GROUPS; m++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int row = 16 * m + 8 * i + lane / 4;
                if (!call.has_row(row)) continue;
                const float factor = factors[row];
                if (call.direct()) {
                    const int64_t at = call.out_at(row) + WARP_COLUMNS * warp + 2 * (lane % 4);
#pragma unroll
                    for (int n = 0; n < 2 * COLUMN_PAIRS; n++)
                        store_pair<Element>(call.output(), at + 8 * n, o[m][n][2 * i] * factor,
                                            o[m][n][2 * i + 1] * factor);
                } else {
                    float *to = call.slot_at(row) + WARP_COLUMNS * warp + slot_position_of_lane(lane);
#pragma unroll
                    for (int n = 0; n < 2 * COLUMN_PAIRS; n += 2)
                        *(float4 *)(to + 8 * n) =
                            make_float4(o[m][n][2 * i] * factor, o[m][n][2 * i + 1] * factor,
                                        o[m][n + 1][2 * i] * factor, o[m][n + 1][2 * i + 1] * factor);
                }
            }
    }

    /* ---- One split, for one tile ----------------------------------------------------------------- */

    DEVICE void run()
    {
        const bool some = call.begin() < call.end();

        copy_q();
        if (Q_IN_REGISTERS) cp_async_commit();
        keys.begin((unsigned)call.begin(), some);
        QFragments q;
        if (Q_IN_REGISTERS) {
            /* Waits for all cp.async groups but stages - 2: Q has arrived, and one block more than needed. */
            keys.wait_for_block();
            __syncthreads();
#pragma unroll
            for (int i = 0; i < 4 * MAX_GROUPS; i++) load_q(q.a[i], 0, 16 * i);
        }
        float o[ROW_GROUPS][2 * COLUMN_PAIRS][4] = {};
        RowState state = {{-INFINITY, -INFINITY}, {0.0f, 0.0f}, {-INFINITY, -INFINITY}};
        int stage = 0;
#pragma unroll 1
        for (unsigned key = (unsigned)call.begin(); some && key < (unsigned)call.end(); key += KEYS) {
            const uint32_t stage_at = ring_at + (uint32_t)stage * STAGE_BYTES;
            const int first_key = (int)key;
            const int free_stage = keys.stages() == 1 ? 0 : stage ? stage - 1 : keys.stages() - 1;
            const unsigned ahead = key + (unsigned)keys.blocks_ahead() * KEYS;
            keys.wait_for_block();
            __syncthreads(); /* all copies have arrived, and all warps are done with the previous block */
            keys.before_scores(stage, free_stage, key, ahead);

            float s[KEY_TILES][4];
            score(stage_at, q, s, [&](int step) { keys.beside_scores(step, free_stage, ahead); });
            cp_async_commit();
            scale(s, stage, first_key);
            forget_addresses();
            softmax(s, state, o, free_stage);
            if constexpr (Call::CAUSAL)
                if (call.hides(first_key, KEYS) && call.causal() &&
                    poisoned(stage_at, clamp_int(call.all_see() - first_key, 0, KEYS),
                             clamp_int(call.end() - first_key, 0, KEYS))) {
                    cp_async_wait<0>();
                    call.attend_by_rows(ROWS, warp, WARPS);
                    return;
                }
            accumulate(stage_at, o, [&](int step) { keys.beside_values(step, free_stage); });
            stage = stage + 1 == keys.stages() ? 0 : stage + 1;
        }
        cp_async_wait<0>();
        __syncthreads(); /* the factors of the last block have been read */
        finish(state, o);
    }

    /* Makes ptxas recompute the addresses that the scores were read from: it has no registers to keep them
     * beside many scores, or beside the state of a list. */
    DEVICE void forget_addresses()
    {
        if (Keys::LISTED || KEY_TILES == 4 || Q_IN_REGISTERS) asm volatile("" : "+r"(warp), "+r"(lane));
    }

    /* Scales the scores; scores of keys that a row does not see, or that no index names, become -inf. */
    DEVICE void scale(float s[KEY_TILES][4], int stage, int first_key)
    {
        const int row = 16 * (warp % ROW_GROUPS), key = WARP_KEYS * (warp / ROW_GROUPS);
        const float scale = call.scale_log2();
#pragma unroll
        for (int i = 0; i < 4 * KEY_TILES; i++) s[i / 4][i % 4] *= scale;
        if constexpr (Keys::LISTED) {
#pragma unroll
            for (int t = 0; t < KEY_TILES; t++) {
                const uint32_t named = keys.flags.pair(stage, key + 8 * t + mma_c_column(lane, 0));
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (!(named >> 8 * (e % 2) & 1)) s[t][e] = -INFINITY;
            }
        }
        if constexpr (Call::CAUSAL) {
            if (!call.hides(first_key, KEYS)) return;
#pragma unroll
            for (int t = 0; t < KEY_TILES; t++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (key + 8 * t + mma_c_column(lane, e) >=
                        call.visible_end(row + mma_c_row(lane, e)) - first_key)
                        s[t][e] = -INFINITY;
        }
    }
};

/* Kernel body: a CTA processes its tasks one after the other. */
template <typename Kernel, typename Params> DEVICE void attend(const Params &p)
{
    using Call = typename Kernel::Operation;
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ typename Call::Turn turn; /* in shared memory to save registers */
    __shared__ typename Call::Task task;
    if constexpr (Kernel::LEAST_BYTES > (uint32_t)LATENT_MOST_BYTES(CODE) || !Kernel::ENOUGH_REGISTERS) {
        __trap(); /* shape.c does not choose it here, so it need not be compiled */
    } else {
        Kernel kernel(p, memory, task);
        if (threadIdx.x == 0) Call::begin_turn(p, turn);
        while (__syncthreads_or(threadIdx.x == 0 && Call::next_task(p, Kernel::ROWS, turn, task))) {
            kernel.run();
            __syncthreads(); /* all warps are done with the task and with shared memory */
        }
    }
}

/* SPDX-License-Identifier: MIT
 *
 * Dense decode on any NVIDIA GPU since Ampere: FlashAttention-2's way (docs/flash-attention.md walks through it).
 *
 * A block of threads takes a tile of ROWS rows of one key head (a row is one query token of one query head) through the
 * keys of a piece, KEYS at a time. V is the first 512 columns of K: a block of keys is read from memory once, and used
 * by both products from the same shared memory.
 *
 *      memory ──cp.async──▶ ring of key blocks (shared)            Q (shared, for the whole piece)
 *                             │                │                     │
 *                             │ rows of V      └── K ──▶ S = Q·Kᵀ ◀──┘   each warp 16 rows × KEYS/KEY_GROUPS keys
 *                             │                          │ mask, maximum (across warps: shared), exp2
 *                             │                          ▼
 *                             │                    P (shared, 16 bit), factor of the old O (shared)
 *                             ▼                          │
 *                   O = factor·O + P·V  ◀────────────────┘       each warp all rows × 512/WARPS columns, in registers
 *
 * A block of keys, in time (| = barrier of the whole block of threads):
 *      wait for its copies | ask for a later block; S; maximum | P | P·V
 *
 * The reference that is subtracted before the exponential follows the row's maximum only when it falls behind by more
 * than 8 (in log2): P then stays below 2^8, which 16 bits hold as precisely as 1, and O is seldom rescaled.
 *
 * Shared memory: Q  ROWS × 1152 bytes | ring  stages × KEYS × 1152 | P  ROWS × 128 | maxima KEY_GROUPS × ROWS × 4 |
 * factors ROWS × 4. All of it in lines of 128 bytes (64 columns of a row), swizzled: ldmatrix meets no bank twice.
 * Registers a thread: O = ROWS · 512 / (32 · WARPS), the largest part.
 *
 * The limit on an H200 is shared memory's bandwidth: an m16n8k16 of Q·Kᵀ reads 384 bytes, one of P·V 128
 * (ROWS 64), where mma.sync could take one every 1.6 clocks.
 */
#pragma once

#include "../../device/async_copy.cuh"
#include "../../device/element.cuh"
#include "../../device/fragment.h"
#include "../../device/mma.cuh"
#include "../../device/pieces.cuh"
#include "../../device/result.cuh"
#include "shape.h"

static constexpr float REFERENCE_SLACK = 8.0f; /* log2 */

template <typename Element_, int ROWS_, int KEYS_, int WARPS_> struct DenseDecode {
    using Element = Element_;
    static constexpr int ROWS = ROWS_, KEYS = KEYS_, WARPS = WARPS_, THREADS = 32 * WARPS_;
    static constexpr int D_V = 512, GROUPS_OF_V = D_V / LINE_ELEMENTS;

    /* Q·Kᵀ: warps over row groups of 16, then over the keys. */
    static constexpr int ROW_GROUPS = ROWS / 16, KEY_GROUPS = WARPS / ROW_GROUPS;
    static constexpr int WARP_KEYS = KEYS / KEY_GROUPS, KEY_TILES = WARP_KEYS / 8;
    /* An mma waits for the one before it on the same sums: with one key tile, several sums take turns. */
    static constexpr int CHAINS = KEY_TILES == 1 ? 4 : KEY_TILES == 2 ? 2 : 1;
    /* P·V: warps over columns. */
    static constexpr int WARP_COLUMNS = D_V / WARPS, COLUMN_PAIRS = WARP_COLUMNS / 16;
    /* Copies: eight threads a row, KEYS_AT_ONCE rows at a time. */
    static constexpr int KEYS_AT_ONCE = THREADS / 8, PASSES = KEYS / KEYS_AT_ONCE;
    static constexpr int Q_PASSES = ROWS / KEYS_AT_ONCE;

    static constexpr uint32_t Q_GROUP = ROWS * LINE_BYTES, KEY_GROUP = KEYS * LINE_BYTES;
    static constexpr uint32_t Q_BYTES = MAX_GROUPS * Q_GROUP, STAGE_BYTES = MAX_GROUPS * KEY_GROUP;

    static_assert(ROWS % 16 == 0 && WARPS % ROW_GROUPS == 0 && WARP_KEYS % 8 == 0 && KEYS <= 64, "");
    static_assert(ROWS % KEYS_AT_ONCE == 0 && KEYS % KEYS_AT_ONCE == 0 && WARP_COLUMNS % 16 == 0, "");
    static_assert(PLAN_BLOCK % KEYS == 0 && INVARIANT_CHUNK % KEYS == 0, "a piece begins at a block of keys");

    const struct dense_decode_params &p;
    unsigned char *shared;
    uint32_t q_at, ring_at, p_at;
    float *maxima, *factors; /* [KEY_GROUPS][ROWS], [ROWS] */
    int warp, lane;

    /* The tile and the piece in hand. */
    int request, kv_head, first_row, length;

    __device__ DenseDecode(const struct dense_decode_params &params, unsigned char *memory)
        : p(params), shared(memory), warp((int)threadIdx.x / 32), lane((int)threadIdx.x % 32)
    {
        q_at = shared_address(memory);
        ring_at = q_at + Q_BYTES;
        p_at = ring_at + (uint32_t)p.stages * STAGE_BYTES;
        maxima = (float *)(memory + (p_at - q_at) + ROWS * LINE_BYTES);
        factors = maxima + KEY_GROUPS * ROWS;
    }

    /* ---- Copies -------------------------------------------------------------------------------- */

    /* 16 bytes, from wherever they are: past the registers if they are not aligned. */
    __device__ __forceinline__ void copy_chunk(uint32_t to, const uint16_t *from, bool valid)
    {
        if (p.vectors_aligned) {
            cp_async_16(to, valid ? from : p.q, valid);
            return;
        }
        uint32_t words[4] = {0, 0, 0, 0};
        if (valid)
            for (int i = 0; i < 4; i++) words[i] = from[2 * i] | (uint32_t)from[2 * i + 1] << 16;
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                     "r"(words[3])
                     : "memory");
    }

    /* Rows past the end of the key head are zeros. */
    __device__ __forceinline__ void copy_q()
    {
        for (int pass = 0; pass < Q_PASSES; pass++) {
            const int row = (int)threadIdx.x / 8 + pass * KEYS_AT_ONCE, chunk = (int)threadIdx.x % 8;
            const bool valid = first_row + row < p.rows;
            const RowPlace place = row_place(valid ? first_row + row : 0, kv_head, p.group);
            const uint16_t *from = p.q + request * p.q_stride[0] + place.token * p.q_stride[1] +
                                   place.head * p.q_stride[2] + chunk * CHUNK_ELEMENTS;
            const uint32_t to = q_at + swizzle_128((uint32_t)row, (uint32_t)chunk);
            for (int g = 0; g < p.d_qk / LINE_ELEMENTS; g++)
                copy_chunk(to + (uint32_t)g * Q_GROUP, from + g * LINE_ELEMENTS, valid);
        }
    }

    /* Where this thread's keys of a block are. Fetched a block ahead: a copy that waits for the table waits twice. */
    struct KeyPlaces {
        int page[PASSES];
    };

    __device__ __forceinline__ KeyPlaces find_keys(int first_key, int end)
    {
        KeyPlaces places;
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            const int key = first_key + (int)threadIdx.x / 8 + pass * KEYS_AT_ONCE;
            places.page[pass] = request;
            if (p.block_table && key < end)
                places.page[pass] = __ldg(p.block_table + request * p.block_table_stride +
                                          (unsigned)key / (unsigned)p.page_size);
        }
        return places;
    }

    /* Slots past the end of the piece are not read: what they hold must not reach a product, so zeros stand there. */
    __device__ __forceinline__ void copy_keys(uint32_t stage_at, int first_key, int end, const KeyPlaces &places)
    {
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            const int row = (int)threadIdx.x / 8 + pass * KEYS_AT_ONCE, chunk = (int)threadIdx.x % 8;
            const int key = first_key + row;
            const bool valid = key < end;
            const unsigned slot = p.block_table ? (unsigned)key % (unsigned)p.page_size : (unsigned)key;
            const uint16_t *from = p.kv + places.page[pass] * p.kv_stride[0] + slot * p.kv_stride[1] +
                                   kv_head * p.kv_stride[2] + chunk * CHUNK_ELEMENTS;
            const uint32_t to = stage_at + swizzle_128((uint32_t)row, (uint32_t)chunk);
#pragma unroll
            for (int g = 0; g < MAX_GROUPS; g++)
                if (g < MAX_GROUPS - 1 || p.d_qk == MAX_GROUPS * LINE_ELEMENTS)
                    copy_chunk(to + (uint32_t)g * KEY_GROUP, from + g * LINE_ELEMENTS, valid);
        }
    }

    /* Waits until the oldest block of the ring has arrived: stages - 1 are under way. */
    __device__ __forceinline__ void wait_for_block()
    {
        switch (p.stages) {
        case 2: cp_async_wait<0>(); break;
        case 3: cp_async_wait<1>(); break;
        case 4: cp_async_wait<2>(); break;
        case 5: cp_async_wait<3>(); break;
        default: cp_async_wait<4>(); break;
        }
    }

    /* ---- The two products ---------------------------------------------------------------------- */

    __device__ __forceinline__ void score(uint32_t stage_at, float s[KEY_TILES][4])
    {
        const int row_group = warp % ROW_GROUPS, key_group = warp / ROW_GROUPS;
        const uint32_t q_line = q_at + (uint32_t)(16 * row_group) * LINE_BYTES +
                                swizzle_128((uint32_t)ldmatrix_tile_row(lane), (uint32_t)ldmatrix_tile_chunk(lane));
        const uint32_t k_line = stage_at + (uint32_t)(WARP_KEYS * key_group) * LINE_BYTES +
                                swizzle_128((uint32_t)ldmatrix_row_of_8(lane), (uint32_t)ldmatrix_chunk_of_4(lane));
        float sums[KEY_TILES][CHAINS][4] = {};
        const int groups = p.d_qk / LINE_ELEMENTS;
#pragma unroll 1
        for (int g = 0; g < groups; g++) {
            const uint32_t q_group = q_line + (uint32_t)g * Q_GROUP, k_group = k_line + (uint32_t)g * KEY_GROUP;
#pragma unroll
            for (int half = 0; half < 2; half++) { /* 32 columns: 4 chunks, so the swizzle changes bit 6 */
                uint32_t a[2][4];
                ldmatrix_x4(a[0], q_group ^ (uint32_t)(64 * half));
                ldmatrix_x4(a[1], q_group ^ (uint32_t)(64 * half + 32));
#pragma unroll
                for (int t = 0; t < KEY_TILES; t++) {
                    uint32_t b[4];
                    ldmatrix_x4(b, (k_group + (uint32_t)(8 * t) * LINE_BYTES) ^ (uint32_t)(64 * half));
                    mma_16816<Element>(sums[t][2 * half % CHAINS], a[0], b[0], b[1]);
                    mma_16816<Element>(sums[t][(2 * half + 1) % CHAINS], a[1], b[2], b[3]);
                }
            }
        }
#pragma unroll
        for (int t = 0; t < KEY_TILES; t++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                s[t][e] = sums[t][0][e];
                for (int c = 1; c < CHAINS; c++) s[t][e] += sums[t][c][e];
            }
    }

    __device__ __forceinline__ void accumulate(uint32_t stage_at, float o[ROW_GROUPS][2 * COLUMN_PAIRS][4])
    {
        const uint32_t p_line =
            p_at + swizzle_128((uint32_t)ldmatrix_tile_row(lane), (uint32_t)ldmatrix_tile_chunk(lane));
        const uint32_t v_line =
            stage_at + swizzle_128((uint32_t)ldmatrix_tile_row(lane), (uint32_t)ldmatrix_tile_chunk(lane));
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) {
            uint32_t a[ROW_GROUPS][4];
#pragma unroll
            for (int m = 0; m < ROW_GROUPS; m++)
                ldmatrix_x4(a[m], (p_line + (uint32_t)(16 * m) * LINE_BYTES) ^ (uint32_t)(2 * k * CHUNK_BYTES));
#pragma unroll
            for (int n = 0; n < COLUMN_PAIRS; n++) {
                const int column = WARP_COLUMNS * warp + 16 * n;
                const uint32_t group = (uint32_t)(column / LINE_ELEMENTS) * KEY_GROUP;
                uint32_t b[4];
                ldmatrix_x4_trans(b, (v_line + group + (uint32_t)(16 * k) * LINE_BYTES) ^
                                         (uint32_t)(column % LINE_ELEMENTS / CHUNK_ELEMENTS * CHUNK_BYTES));
#pragma unroll
                for (int m = 0; m < ROW_GROUPS; m++) {
                    mma_16816<Element>(o[m][2 * n], a[m], b[0], b[1]);
                    mma_16816<Element>(o[m][2 * n + 1], a[m], b[2], b[3]);
                }
            }
        }
    }

    /* ---- Keys that only some rows of the tile see ------------------------------------------------ */

    /* The first key that a row of the tile does not see. */
    __device__ __forceinline__ int visible_end(int row) const
    {
        return p.causal ? min(length, length - p.s_q + (first_row + row) / p.group + 1) : length;
    }

    __device__ __forceinline__ uint16_t shared_element(uint32_t base, int row, int column) const
    {
        const uint32_t at = base - q_at + swizzle_128((uint32_t)row, (uint32_t)(column / CHUNK_ELEMENTS));
        return ((const uint16_t *)(shared + at))[column % CHUNK_ELEMENTS];
    }

    /* Does V hold an infinity or a NaN in a key that some row must not see? A product with P = 0 would not hide it. */
    __device__ bool poisoned(uint32_t stage_at, int from, int to) const
    {
        bool found = false;
        for (int i = (int)threadIdx.x; i < (to - from) * GROUPS_OF_V * (LINE_BYTES / 4); i += THREADS) {
            const int word = i % (LINE_BYTES / 4), line = i / (LINE_BYTES / 4);
            const uint32_t at = stage_at - q_at + (uint32_t)(line % GROUPS_OF_V) * KEY_GROUP +
                                (uint32_t)(from + line / GROUPS_OF_V) * LINE_BYTES + (uint32_t)word * 4;
            found |= any_not_finite<Element>(*(const uint32_t *)(shared + at));
        }
        return __syncthreads_or(found);
    }

    /* P V without the tensor cores, each row over the keys it sees and no other. Rare, and slow. */
    __device__ void accumulate_seen(uint32_t stage_at, int first_key, float o[ROW_GROUPS][2 * COLUMN_PAIRS][4]) const
    {
#pragma unroll
        for (int m = 0; m < ROW_GROUPS; m++)
#pragma unroll
            for (int n = 0; n < 2 * COLUMN_PAIRS; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int row = 16 * m + mma_c_row(lane, e);
                    const int column = WARP_COLUMNS * warp + 8 * n + mma_c_column(lane, e);
                    const uint32_t group = stage_at + (uint32_t)(column / LINE_ELEMENTS) * KEY_GROUP;
                    const int seen = clamp_int(visible_end(row) - first_key, 0, KEYS);
                    float sum = 0.0f;
#pragma unroll 1
                    for (int key = 0; key < seen; key++)
                        sum += Element::to_float(shared_element(p_at, row, key)) *
                               Element::to_float(shared_element(group, key, column % LINE_ELEMENTS));
                    o[m][n][e] += sum;
                }
    }

    /* ---- Softmax ------------------------------------------------------------------------------- */

    struct RowState { /* of this warp's rows lane / 4 and lane / 4 + 8 */
        float reference[2];
        float sum[2]; /* over this thread's keys */
    };

    /* The largest score of a row, over the warps that share it. */
    __device__ __forceinline__ void row_maxima(const float s[KEY_TILES][4], float most[2])
    {
        const int row = 16 * (warp % ROW_GROUPS) + lane / 4, key_group = warp / ROW_GROUPS;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            most[i] = -INFINITY;
#pragma unroll
            for (int t = 0; t < KEY_TILES; t++) most[i] = fmaxf(most[i], fmaxf(s[t][2 * i], s[t][2 * i + 1]));
            most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], 1));
            most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], 2));
            if (KEY_GROUPS > 1 && lane % 4 == 0) maxima[key_group * ROWS + row + 8 * i] = most[i];
        }
        if (KEY_GROUPS == 1) return;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int g = 0; g < KEY_GROUPS; g++) most[i] = fmaxf(most[i], maxima[g * ROWS + row + 8 * i]);
    }

    /* Scores (in log2, scaled) to probabilities, left in shared memory with what O is to be multiplied by. */
    __device__ __forceinline__ void softmax(const float s[KEY_TILES][4], RowState &state)
    {
        const int row = 16 * (warp % ROW_GROUPS) + lane / 4, key_group = warp / ROW_GROUPS;
        float most[2];
        row_maxima(s, most);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const bool behind = most[i] > state.reference[i] + REFERENCE_SLACK;
            const float factor = behind ? exp2_approx(state.reference[i] - most[i]) : 1.0f;
            if (behind) state.reference[i] = most[i];
            const float reference = state.reference[i] == -INFINITY ? 0.0f : state.reference[i];
            state.sum[i] *= factor;
            if (key_group == 0 && lane % 4 == 0) factors[row + 8 * i] = factor;
#pragma unroll
            for (int t = 0; t < KEY_TILES; t++) {
                const float low = exp2_approx(s[t][2 * i] - reference), high = exp2_approx(s[t][2 * i + 1] - reference);
                state.sum[i] += low + high;
                const uint32_t at = p_at - q_at +
                                    swizzle_128((uint32_t)(row + 8 * i), (uint32_t)(WARP_KEYS / 8 * key_group + t)) +
                                    (uint32_t)(lane % 4) * 4;
                *(uint32_t *)(shared + at) = Element::pack(low, high);
            }
        }
    }

    __device__ __forceinline__ void rescale(float o[ROW_GROUPS][2 * COLUMN_PAIRS][4])
    {
        float factor[ROW_GROUPS][2];
        bool changed = false;
#pragma unroll
        for (int m = 0; m < ROW_GROUPS; m++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                factor[m][i] = factors[16 * m + 8 * i + lane / 4];
                changed |= factor[m][i] != 1.0f;
            }
        if (!__any_sync(~0u, changed)) return;
#pragma unroll
        for (int m = 0; m < ROW_GROUPS; m++)
#pragma unroll
            for (int n = 0; n < 2 * COLUMN_PAIRS; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) o[m][n][e] *= factor[m][e / 2];
    }

    /* ---- The end of a piece -------------------------------------------------------------------- */

    /* Rows to `out`, or to the piece's slot. */
    __device__ __forceinline__ void finish(const Piece &piece, const RowState &state,
                                           float o[ROW_GROUPS][2 * COLUMN_PAIRS][4])
    {
        const int my_row = 16 * (warp % ROW_GROUPS) + lane / 4, key_group = warp / ROW_GROUPS;
        float *sums = maxima;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float sum = state.sum[i];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            if (lane % 4 == 0) sums[key_group * ROWS + my_row + 8 * i] = sum;
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = first_row + my_row + 8 * i;
            if (key_group || lane % 4 || row >= p.rows) continue;
            float sum = 0.0f;
            for (int g = 0; g < KEY_GROUPS; g++) sum += sums[g * ROWS + my_row + 8 * i];
            const bool empty = state.reference[i] == -INFINITY && sum == 0.0f;
            const float lse = empty ? -INFINITY : (state.reference[i] + log2f(sum)) * LN_2;
            const RowPlace place = row_place(row, kv_head, p.group);
            float factor = empty ? 0.0f : 1.0f / sum;
            if (piece.slot == DIRECT) {
                factor *= result_sink_factor(p.output.rules, place.head, lse);
                store_lse(p.output, piece.request, place, lse);
            } else {
                p.split.slot_lse[slot_row(piece.slot, row)] = lse;
            }
            factors[my_row + 8 * i] = factor;
        }
        __syncthreads();
#pragma unroll
        for (int m = 0; m < ROW_GROUPS; m++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int tile_row = 16 * m + 8 * i + lane / 4, row = first_row + tile_row;
                if (row >= p.rows) continue;
                const float factor = factors[tile_row];
                const int column = WARP_COLUMNS * warp + 2 * (lane % 4);
                if (piece.slot == DIRECT) {
                    const int64_t at =
                        out_offset(p.output, piece.request, row_place(row, kv_head, p.group)) + column;
#pragma unroll
                    for (int n = 0; n < 2 * COLUMN_PAIRS; n++)
                        store_pair<Element>(p.output, at + 8 * n, o[m][n][2 * i] * factor,
                                            o[m][n][2 * i + 1] * factor);
                } else {
                    float *to = p.split.slot_out + slot_row(piece.slot, row) * D_V + column;
#pragma unroll
                    for (int n = 0; n < 2 * COLUMN_PAIRS; n++)
                        *(float2 *)(to + 8 * n) =
                            make_float2(o[m][n][2 * i] * factor, o[m][n][2 * i + 1] * factor);
                }
            }
    }

    __device__ __forceinline__ int64_t slot_row(int64_t slot, int row) const
    {
        return slot * ((int64_t)p.h_q * p.s_q) + (int64_t)kv_head * p.rows + row;
    }

    /* ---- One piece, for one tile ----------------------------------------------------------------- */

    __device__ __forceinline__ void run(const Piece &piece, int tile, int tiles_of_head, int request_keys)
    {
        request = piece.request, length = request_keys;
        kv_head = tile / tiles_of_head, first_row = tile % tiles_of_head * ROWS;
        const int last_row = min(first_row + ROWS, p.rows) - 1 - first_row;
        const int end = min(piece.end, visible_end(last_row)); /* no row of the tile sees more */
        const int all_see = visible_end(0);                    /* every row sees the keys before */
        const int blocks = max((end - piece.begin + KEYS - 1) / KEYS, 0);

        __syncthreads(); /* the piece before is done with shared memory */
        copy_q();
        KeyPlaces places = find_keys(piece.begin, end);
        for (int i = 0; i < p.stages - 1; i++) {
            if (i < blocks) copy_keys(ring_at + (uint32_t)i * STAGE_BYTES, piece.begin + i * KEYS, end, places);
            cp_async_commit(); /* groups are counted: an empty one too */
            places = find_keys(piece.begin + (i + 1) * KEYS, end);
        }

        float o[ROW_GROUPS][2 * COLUMN_PAIRS][4] = {};
        RowState state = {{-INFINITY, -INFINITY}, {0.0f, 0.0f}};
        int stage = 0, free_stage = p.stages - 1;
#pragma unroll 1
        for (int i = 0; i < blocks; i++) {
            const uint32_t stage_at = ring_at + (uint32_t)stage * STAGE_BYTES;
            const int first_key = piece.begin + i * KEYS, ahead = first_key + (p.stages - 1) * KEYS;
            wait_for_block();
            __syncthreads(); /* everyone's copies are there, and everyone is done with the block before */
            if (ahead < end) copy_keys(ring_at + (uint32_t)free_stage * STAGE_BYTES, ahead, end, places);
            cp_async_commit();
            places = find_keys(ahead + KEYS, end);

            float s[KEY_TILES][4];
            score(stage_at, s);
            const bool masked = first_key + KEYS > min(all_see, end);
            scale(s, masked, first_key, end);
            softmax(s, state);
            __syncthreads(); /* P and the factors are there */
            rescale(o);
            if (masked && p.causal && poisoned(stage_at, clamp_int(all_see - first_key, 0, KEYS),
                                               clamp_int(end - first_key, 0, KEYS)))
                accumulate_seen(stage_at, first_key, o);
            else
                accumulate(stage_at, o);
            stage = stage + 1 == p.stages ? 0 : stage + 1;
            free_stage = free_stage + 1 == p.stages ? 0 : free_stage + 1;
        }
        cp_async_wait<0>();
        __syncthreads(); /* the factors of the last block have been read */
        finish(piece, state, o);
    }

    __device__ __forceinline__ void scale(float s[KEY_TILES][4], bool masked, int first_key, int end)
    {
#pragma unroll
        for (int t = 0; t < KEY_TILES; t++)
#pragma unroll
            for (int e = 0; e < 4; e++) s[t][e] *= p.scale_log2;
        if (!masked) return;
        const int row = 16 * (warp % ROW_GROUPS), key = first_key + WARP_KEYS * (warp / ROW_GROUPS);
#pragma unroll
        for (int t = 0; t < KEY_TILES; t++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (key + 8 * t + mma_c_column(lane, e) >= min(end, visible_end(row + mma_c_row(lane, e))))
                    s[t][e] = -INFINITY;
    }
};

/* Every block of threads takes items (a partition or a worker of a request, and a row tile) in turn. */
template <typename Kernel> __device__ __forceinline__ void dense_decode(const struct dense_decode_params &p)
{
    extern __shared__ __align__(128) unsigned char memory[];
    Kernel kernel(p, memory);
    const int tiles_of_head = (p.rows + Kernel::ROWS - 1) / Kernel::ROWS, tiles = p.h_kv * tiles_of_head;
    const int64_t workers = p.split.plan ? p.split.num_partitions : (int64_t)p.b * p.split.chunk_lanes;
    for (int64_t item = blockIdx.x; item < workers * tiles; item += gridDim.x) {
        const int tile = (int)(item % tiles);
        const int64_t worker = item / tiles;
        if (p.split.plan) {
            const Partition partition = partition_of(p.split, (int)worker, p.b);
            for (int request = partition.first; request <= partition.last; request++) {
                const int length = request_length(p, request);
                kernel.run(partition_piece(partition, request, length), tile, tiles_of_head, length);
            }
        } else {
            const int request = (int)(worker / p.split.chunk_lanes), lane = (int)(worker % p.split.chunk_lanes);
            const int length = request_length(p, request);
            for (int chunk = lane; chunk < chunks_of(length); chunk += p.split.chunk_lanes)
                kernel.run(chunk_piece(p.split, request, chunk, length), tile, tiles_of_head, length);
        }
    }
}

#define DENSE_DECODE_KERNEL(NAME, ELEMENT, ROWS, KEYS, WARPS)                                                          \
    extern "C" __global__ void __launch_bounds__(32 * (WARPS))                                                         \
        NAME(const __grid_constant__ struct dense_decode_params p)                                                     \
    {                                                                                                                  \
        dense_decode<DenseDecode<ELEMENT, ROWS, KEYS, WARPS>>(p);                                                      \
    }

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
 * Two classes define an operation. `Call` defines the rows of a tile, where they are read and written, and
 * which keys are visible to a row. `Keys` copies blocks of keys to the ring, overlapped with the products:
 *
 *                        Call (rows of a tile)                Keys
 *      dense decode      rows of a key head, over tokens      RingKeys of a block table; RawKeys of bytes
 *      sparse decode     heads of one token: a token's list   RingKeys of a list; ListedBytes of bytes,
 *      sparse prefill    is its own                           which converts beside P·V
 *
 * The limit on an H200 at 64 rows is the bandwidth of shared memory: an m16n8k16 of Q·Kᵀ reads 256 bytes (two
 * column splits), one of P·V 128, where mma.sync could take one every 1.6 clocks.
 */
#pragma once

#include "../../device/element.cuh"
#include "../../device/mma.cuh"
#include "epilogue.cuh"
#include "producer.cuh"
#include "scores.cuh"
#include "softmax.cuh"

namespace latent {

/* Copies Q; rows past the end of the tile become zeros. */
template <typename Tile, typename Call, typename Keys> DEVICE void Attend<Tile, Call, Keys>::copy_q() const
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

/* O += P·V. between(step) is called before the products of each step. If it converts keys, the loop is
 * not fully unrolled: across iterations the compiler would load more ahead than there are registers
 * for. */
template <typename Tile, typename Call, typename Keys>
template <typename Between>
DEVICE void Attend<Tile, Call, Keys>::accumulate(uint32_t stage_at, float o[ROW_GROUPS][2 * COLUMN_PAIRS][4],
                                                 Between between)
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
            ldmatrix_x4(a[m], (p_line ^ (uint32_t)(2 * k * CHUNK_BYTES)) + (uint32_t)(16 * m) * LINE_BYTES);
        const auto load = [&](int n) {
            const int column = WARP_COLUMNS * warp + 16 * n;
            const uint32_t group = (uint32_t)(column / LINE_ELEMENTS) * KEY_GROUP;
            ldmatrix_x4_trans(b[n],
                              (v_line ^ (uint32_t)(column % LINE_ELEMENTS / CHUNK_ELEMENTS * CHUNK_BYTES)) +
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

/* Returns whether V holds an infinity or a NaN in keys from … to - 1, which some row must not see: the
 * product with P = 0 would not hide it. */
template <typename Tile, typename Call, typename Keys>
__device__ bool Attend<Tile, Call, Keys>::poisoned(uint32_t stage_at, int from, int to) const
{
    bool found = false;
    for (int i = (int)threadIdx.x; i < (to - from) * GROUPS_OF_V * (LINE_BYTES / 4); i += THREADS) {
        const int word = i % (LINE_BYTES / 4), line = i / (LINE_BYTES / 4);
        const uint32_t at = stage_at - smem + (uint32_t)(line % GROUPS_OF_V) * KEY_GROUP +
                            (uint32_t)(from + line / GROUPS_OF_V) * LINE_BYTES + (uint32_t)word * 4;
        found |= any_not_finite<Element>(*(const uint32_t *)(shared + at));
    }
    return __syncthreads_or(found);
}

/* Makes ptxas recompute the addresses that the scores were read from: it has no registers to keep them
 * beside many scores, or beside the state of a list. */
template <typename Tile, typename Call, typename Keys>
DEVICE void Attend<Tile, Call, Keys>::forget_addresses()
{
    if (Keys::LISTED || KEY_TILES == 4 || Q_IN_REGISTERS) asm volatile("" : "+r"(warp), "+r"(lane));
}

template <typename Tile, typename Call, typename Keys> DEVICE void Attend<Tile, Call, Keys>::run()
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
            if (call.masks(first_key, KEYS) && call.causal() &&
                poisoned(stage_at, clamp_int(call.visible_to_all() - first_key, 0, KEYS),
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
    epilogue(state, o);
}

/* Kernel body: a CTA processes its tasks one after the other. */
template <typename Kernel, typename Params> DEVICE void kernel(const Params &p)
{
    using Call = typename Kernel::Operation;
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ typename Call::Cursor cursor; /* in shared memory to save registers */
    __shared__ typename Call::Task task;
    if constexpr (Kernel::LEAST_BYTES > (uint32_t)LATENT_MOST_BYTES(CODE) || !Kernel::ENOUGH_REGISTERS) {
        __trap(); /* shape.c does not choose it here, so it need not be compiled */
    } else {
        Kernel tile(p, memory, task);
        if (threadIdx.x == 0) cursor.begin(p);
        while (__syncthreads_or(threadIdx.x == 0 && cursor.advance(p, Kernel::ROWS, task))) {
            tile.run();
            __syncthreads(); /* all warps are done with the task and with shared memory */
        }
    }
}

} // namespace latent

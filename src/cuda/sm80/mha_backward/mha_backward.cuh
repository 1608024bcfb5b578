/* SPDX-License-Identifier: MIT
 *
 * Dense MHA backward on any NVIDIA GPU since Ampere, as in FlashAttention-2: a CTA has 64 keys of a key head, at
 * 192/128 mostly 128, holds their dK and dV in registers, and iterates over the tiles of 64 rows that see
 * them, of every query head of the key head.
 *
 *      memory ──cp.async──▶ K, V (shared, for all tiles)     Q, dO, lse, delta of a tile (shared)
 *
 *      Sᵀ = K Qᵀ       each warp WARP_KEYS keys × 32 rows       Pᵀ = 2^(Sᵀ - lse), to shared memory
 *      dPᵀ = V dOᵀ     the same                                 dSᵀ = Pᵀ (dPᵀ - delta), to shared memory
 *      dK += dSᵀ Q     each warp its keys × half the columns    dSᵀ of its own rows from registers, of its
 *                                                               neighbour's from shared memory
 *      dV += Pᵀ dO     the same                                 Pᵀ from shared memory; of its own rows from
 *                                                               registers with EARLY_DV
 *      dQ = dS K       each warp 32 rows × its columns          added to fp32 sums in global memory
 *
 * Keys are the rows of S and dP, so that the accumulators of P and dS have the layout of A. Two neighbouring
 * warps have the same keys: they wait only for each other; all warps synchronize only before dQ and before
 * the next tile.
 *
 * Timeline of a tile (| = barrier of the whole CTA, : of two warps):
 *      wait for its copies | S; P; dP; dS; dK of own rows : dV; dK of others | copy next tile; dQ; add it
 * Q and dO have one stage: the other CTAs of the SM hide the waits, and copies that are issued beside dQ do
 * not delay the products that begin a tile.
 *
 * There are three launches; rows.cuh has the kernels before and after. Deterministic: key blocks are taken in
 * order, and each waits at a tile until those before it have added.
 *
 * Summation order: dK and dV are summed in fp32 in the order of the tiles; dQ in the order in which CTAs
 * arrive or, if deterministic, in the order of the key blocks.
 */
#pragma once

#include "copies.cuh"
#include "products.cuh"

#include <stddef.h>

/* ---- The sums of dQ ------------------------------------------------------------------------------- */

/* Adds a warp's 16 × 8 sums to those in memory. */
DEVICE void add_sums(float *to, int lane, const float (&x)[4])
{
    if constexpr (ADDS_FOUR) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
        asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to + 4 * lane),
                     "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
                     : "memory");
#endif
    } else {
#pragma unroll
        for (int e = 0; e < 4; e++)
            asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to + 32 * e + lane), "f"(x[e])
                         : "memory");
    }
}

DEVICE uint32_t load_acquire(const uint32_t *from)
{
    uint32_t word;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
    return word;
}

DEVICE void store_release(uint32_t *to, uint32_t word)
{
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}

/* ---- A block of keys ------------------------------------------------------------------------------ */

/* A block of keys of a key head, and the tiles of rows that see it. It is kept in shared memory to save
 * registers. */
struct KeyBlock {
    int request;                 /* 0 where requests are ragged */
    int token, tokens, row_tile; /* of the request: first token, tokens, number of its first tile */
    int key, keys;               /* the first key of the block; keys of the request from it on */
    int shift;                   /* row i of the request sees its key t if t <= i + shift */
    int head, number;            /* the key head; the block's number within the request */
    int first_tile, end_tile;    /* tiles of the request that see the block */
    int start_tile; /* start of the walk; staggered, so that CTAs of a head add to different tiles */
};
static_assert(sizeof(KeyBlock) <= KEY_BLOCK_BYTES, "shared memory has room for it");

/* Returns the key block of item number `item`. Called by a whole warp. */
template <typename Tiles> DEVICE KeyBlock block_of_item(const mha_backward_sm80_params &p, int item)
{
    const int set_items = p.key_blocks * p.heads_of_set, set = item / set_items,
              within = item - set * set_items,
              heads = min(p.heads_of_set, p.call.h_kv - set * p.heads_of_set);
    int number = within / heads;
    KeyBlock b;
    b.head = set * p.heads_of_set + within - number * heads;
    if (p.in_order && p.call.causal) number = p.key_blocks - 1 - number;
    const Request r = find_request<false, Tiles::ROWS, Tiles::KEYS>(p.call, number);
    b.request = p.call.starts_q ? 0 : r.index;
    b.token = r.token, b.tokens = r.tokens, b.row_tile = r.row_tile;
    b.number = number - r.key_block;
    b.key = r.key + b.number * Tiles::KEYS, b.keys = r.keys - b.number * Tiles::KEYS;
    b.shift = p.call.causal ? r.keys - r.tokens : r.keys;
    b.end_tile = (r.tokens + Tiles::ROWS - 1) / Tiles::ROWS;
    b.first_tile = min(max(0, b.number * Tiles::KEYS - b.shift) / Tiles::ROWS, b.end_tile);
    const int tiles = b.end_tile - b.first_tile;
    b.start_tile = b.first_tile + (p.in_order || !tiles ? 0 : b.number % tiles);
    return b;
}

template <typename Element, typename Tiles> struct Backward : WarpProducts<Element, Tiles> {
    using Products = WarpProducts<Element, Tiles>;
    using Products::base, Products::KEY_TILES, Products::ROW_TILES, Products::ROW_STEPS;
    using typename Products::Lane, typename Products::Scores, typename Products::Words,
        typename Products::KeySums, typename Products::ValueSums, typename Products::QuerySums;

    const mha_backward_sm80_params &p;

    DEVICE Backward(const mha_backward_sm80_params &params, uint32_t shared) : Products(shared), p(params) {}

    DEVICE int of_block(uint32_t offset) const { return (int)load_shared_4(base + Tiles::BLOCK_AT + offset); }
#define OF_BLOCK(MEMBER)                                                                                     \
    DEVICE int MEMBER() const                                                                                \
    {                                                                                                        \
        return of_block(offsetof(KeyBlock, MEMBER));                                                         \
    }
    OF_BLOCK(request)
    OF_BLOCK(token)
    OF_BLOCK(tokens)
    OF_BLOCK(row_tile)
    OF_BLOCK(key)
    OF_BLOCK(keys)
    OF_BLOCK(shift)
    OF_BLOCK(head)
    OF_BLOCK(number)
    OF_BLOCK(first_tile)
    OF_BLOCK(end_tile)
    OF_BLOCK(start_tile)
#undef OF_BLOCK

    /* A query head, and the tile's number within the request. */
    struct Place {
        int head, tile;
    };
    DEVICE Place first_place() const
    {
        return {head() * p.call.group, start_tile()};
    }

    /* Returns the next tile: from start_tile to the last, then from first_tile to the one before start_tile,
     * then on the next head. */
    DEVICE Place place_after(const Place &at) const
    {
        Place next = {at.head, at.tile + 1};
        if (next.tile == end_tile()) next.tile = first_tile();
        if (next.tile == start_tile()) next.head++;
        return next;
    }

    DEVICE int64_t tile_index(const Place &at) const
    {
        return (int64_t)at.head * p.row_tiles + row_tile() + at.tile;
    }

    DEVICE const uint16_t *rows_of(const mha_vectors &of, const Place &at) const
    {
        return of.data + request() * of.request + (token() + at.tile * Tiles::ROWS) * of.token +
               at.head * of.head;
    }

    DEVICE void copy_q(const Place &at) const
    {
        copy_rows<Tiles::ROWS, Tiles::D_QK, Tiles::THREADS>(this->q(), rows_of(p.call.q, at), p.call.q.token,
                                                            tokens() - at.tile * Tiles::ROWS);
    }

    DEVICE void copy_dout(const Place &at) const
    {
        copy_rows<Tiles::ROWS, Tiles::D_V, Tiles::THREADS>(
            this->dout(), rows_of(p.call.dout, at), p.call.dout.token, tokens() - at.tile * Tiles::ROWS);
    }

    DEVICE void copy_numbers(const Place &at) const
    {
        const int thread = (int)fresh_thread();
        if (thread < (int)Tiles::NUMBERS_BYTES / 16)
            cp_async_16(this->numbers() + 16 * (uint32_t)thread,
                        p.rows + tile_index(at) * (MHA_BACKWARD_NUMBERS * Tiles::ROWS) + 4 * thread, true);
    }

    DEVICE void copy_rows_at(const Place &at) const
    {
        copy_q(at), copy_dout(at), copy_numbers(at);
    }

    DEVICE uint16_t *keys_of(const mha_vectors &of) const
    {
        return of.data + request() * of.request + key() * of.token + head() * of.head;
    }

    DEVICE void copy_keys() const
    {
        copy_rows<Tiles::KEYS, Tiles::D_QK, Tiles::THREADS>(base, keys_of(p.call.k), p.call.k.token, keys());
        copy_rows<Tiles::KEYS, Tiles::D_V, Tiles::THREADS>(base + Tiles::V_AT, keys_of(p.call.v),
                                                           p.call.v.token, keys());
    }

    /* ---- Rows that see no key, whatever their vectors hold ------------------------------------------ */

    /* Returns whether some row of the copied tile sees no key. Each thread tests the lse values that it has
     * copied itself. */
    DEVICE bool copied_empty_row() const
    {
        const int thread = (int)fresh_thread();
        if (thread >= Tiles::ROWS / 4) return false;
        const uint4 lse = load_shared_16(this->numbers() + 16 * (uint32_t)thread);
        const float most = fmaxf(fmaxf(__uint_as_float(lse.x), __uint_as_float(lse.y)),
                                 fmaxf(__uint_as_float(lse.z), __uint_as_float(lse.w)));
        return most == INFINITY;
    }

    /* Clears Q and dO of rows that see no key: 0 × NaN would be NaN. */
    __device__ __noinline__ static void clear_empty_rows(uint32_t numbers, uint32_t q, uint32_t dout)
    {
        constexpr int LINES = (Tiles::D_QK + Tiles::D_V) / LINE_ELEMENTS * Tiles::ROWS,
                      CHUNKS = LINE_BYTES / CHUNK_BYTES;
        for (int i = (int)threadIdx.x; i < LINES * CHUNKS; i += Tiles::THREADS) {
            const int line = i / CHUNKS, row = line % Tiles::ROWS,
                      of_q = Tiles::D_QK / LINE_ELEMENTS * Tiles::ROWS;
            if (__uint_as_float(load_shared_4(numbers + (uint32_t)number_at(row) * 4)) != INFINITY) continue;
            store_zero_16((line < of_q ? q + (uint32_t)line * LINE_BYTES
                                       : dout + (uint32_t)(line - of_q) * LINE_BYTES) +
                          (uint32_t)(i % CHUNKS) * CHUNK_BYTES);
        }
        __syncthreads();
    }

    /* ---- P and dS ------------------------------------------------------------------------------------ */

    /* Sets masked scores to -inf, and those of keys past the request's last one: these keys are zeros, but
     * their P might be infinite. Row i of the tile sees key t of the block if t + diagonal <= i. */
    DEVICE void mask(Scores &s, int diagonal, int left) const
    {
        const Lane l;
        const int key = l.key_group * Tiles::WARP_KEYS + l.lane / 4,
                  row = l.row_group * Tiles::WARP_ROWS + l.lane % 4 * 2;
#pragma unroll
        for (int m = 0; m < KEY_TILES; m++)
#pragma unroll
            for (int n = 0; n < ROW_TILES; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int t = key + 16 * m + e / 2 * 8, i = row + 8 * n + e % 2;
                    if (t + diagonal > i || t >= left) s[m][n][e] = -INFINITY;
                }
    }

    /* Computes P in place of S; lse includes the factor P_SCALE. */
    DEVICE void make_p(Scores &s, Words &w) const
    {
#pragma unroll
        for (int k = 0; k < ROW_STEPS; k++) {
            const float4 lse = this->row_numbers(0, k);
#pragma unroll
            for (int m = 0; m < KEY_TILES; m++)
#pragma unroll
                for (int r = 0; r < 4; r++) {
                    float *pair = &s[m][2 * k + r / 2][r % 2 * 2];
                    pair[0] = exp2_approx(fmaf(pair[0], p.call.scale_log2, -(r / 2 ? lse.z : lse.x)));
                    pair[1] = exp2_approx(fmaf(pair[1], p.call.scale_log2, -(r / 2 ? lse.w : lse.y)));
                    w[m][k][r] = Element::pack(pair[0], pair[1]);
                }
        }
    }

    /* With PARKS_P there are no registers for an fp32 P until dP is complete. It waits as fp16: where the lane
     * later stores dSᵀ, which nobody reads before; fp16 calls have stored it as Pᵀ. */
    DEVICE uint32_t parking() const
    {
        return base + (Element::IS_BF16 ? Tiles::DS_AT : Tiles::P_AT);
    }

    DEVICE void park_p(const Scores &s) const
    {
        const uint32_t parked = this->words_at(parking());
#pragma unroll
        for (int m = 0; m < KEY_TILES; m++)
#pragma unroll
            for (int k = 0; k < ROW_STEPS; k++)
#pragma unroll
                for (int r = 0; r < 4; r++) {
                    const float *pair = &s[m][2 * k + r / 2][r % 2 * 2];
                    store_shared_4(this->word_at(parked, m, k, r), Fp16::pack(pair[0], pair[1]));
                }
    }

    /* Computes dS from P in fp32, or parked fp16: keys of equal weight would share the same rounding error of
     * a bf16 P, which would remain in the sum dQ. */
    DEVICE void make_ds(const Scores &s, const Scores &dp, Words &w) const
    {
        constexpr float SCALE = DS_SCALE<Element>;
        const uint32_t parked = Tiles::PARKS_P ? this->words_at(parking()) : 0;
#pragma unroll
        for (int k = 0; k < ROW_STEPS; k++) {
            const float4 delta = this->row_numbers(1, k);
#pragma unroll
            for (int m = 0; m < KEY_TILES; m++)
#pragma unroll
                for (int r = 0; r < 4; r++) {
                    const float *pair = &s[m][2 * k + r / 2][r % 2 * 2],
                                *d = &dp[m][2 * k + r / 2][r % 2 * 2];
                    const uint32_t pair_of_p =
                        Tiles::PARKS_P ? load_shared_4(this->word_at(parked, m, k, r)) : 0;
                    const float low = Tiles::PARKS_P ? Fp16::to_float((uint16_t)pair_of_p) : pair[0],
                                high = Tiles::PARKS_P ? Fp16::to_float((uint16_t)(pair_of_p >> 16)) : pair[1];
                    w[m][k][r] = Element::pack(low * fmaf(d[0], SCALE, -(r / 2 ? delta.z : delta.x)),
                                               high * fmaf(d[1], SCALE, -(r / 2 ? delta.w : delta.y)));
                }
        }
    }

    /* ---- A tile ---------------------------------------------------------------------------------------- */

    /* Waits for the other warp of the same keys. Barrier 0 is __syncthreads. */
    DEVICE void pair_barrier() const
    {
        const Lane l;
        asm volatile("bar.sync %0, 64;" ::"r"(l.key_group + 1) : "memory");
    }

    /* Ends a basic block with a branch that is never taken. Otherwise ptxas would start the following
     * products among the preceding ones, for which there are no registers. */
    DEVICE void hold_products() const
    {
        if (p.call.b < 0) asm volatile("trap;");
    }

    /* Computes P and dS of a tile, and adds its contributions to dK and dV. */
    DEVICE void take_tile(KeySums &dk, ValueSums &dv, const Place &at) const
    {
        const uint32_t q = this->q(), dout = this->dout(), p_at = base + Tiles::P_AT,
                       ds_at = base + Tiles::DS_AT;
        const int diagonal = number() * Tiles::KEYS - shift() - at.tile * Tiles::ROWS, left = keys();
        Words w;
        {
            Scores s, dp;
            this->template scores<Tiles::D_QK>(s, base, q);
            if (diagonal + Tiles::KEYS > 1 || left < Tiles::KEYS) mask(s, diagonal, left);
            make_p(s, w);
            this->store_words(w, p_at);
            if (Tiles::PARKS_P && Element::IS_BF16) park_p(s);
            if (Tiles::EARLY_DV) this->add_rows(dv, w, dout, false);
            hold_products();
            this->template scores<Tiles::D_V>(dp, base + Tiles::V_AT, dout);
            make_ds(s, dp, w);
        }
        this->store_words(w, ds_at);
        hold_products();
        this->add_rows(dk, w, q, false);
        pair_barrier();
        if (!Tiles::EARLY_DV) {
            this->load_words(w, p_at, false);
            this->add_rows(dv, w, dout, false);
        }
        this->load_words(w, p_at, true);
        this->add_rows(dv, w, dout, true);
        this->load_words(w, ds_at, true);
        this->add_rows(dk, w, q, true);
    }

    /* Returns the number of key blocks that add to the tile before this one. */
    DEVICE int turn_of(const Place &at) const
    {
        if (!p.call.causal) return number();
        const int keys_of_request = number() * Tiles::KEYS + keys(),
                  seen = min((at.tile + 1) * Tiles::ROWS + shift(), keys_of_request);
        return (seen + Tiles::KEYS - 1) / Tiles::KEYS - 1 - number();
    }

    /* Computes this key block's dQ of the tile and adds it to the sums. */
    DEVICE void add_queries(const Place &at) const
    {
        const Lane l;
        QuerySums dq;
        this->queries(dq);
        constexpr int TILES_OF_ROW = Tiles::D_QK / 8, TILES_OF_LINE = LINE_ELEMENTS / 8;
        const int64_t index = tile_index(at);
        float *to =
            p.dq_sums + index * (Tiles::ROWS * Tiles::D_QK) +
            (l.row_group * Products::DQ_ROW_TILES * TILES_OF_ROW + l.key_group * 2 * Products::DQ_PAIRS) *
                SUMS_OF_TILE;
        const uint32_t turn = p.in_order ? (uint32_t)turn_of(at) : 0;
        if (p.in_order) {
            if (fresh_thread() == 0)
                while (load_acquire(p.added + index) != turn) __nanosleep(100);
            __syncthreads();
        }
#pragma unroll
        for (int m = 0; m < Products::DQ_ROW_TILES; m++)
#pragma unroll
            for (int i = 0; i < Products::DQ_TILES; i++)
                add_sums(to + (m * TILES_OF_ROW + i / (2 * Products::DQ_PAIRS) * TILES_OF_LINE +
                               i % (2 * Products::DQ_PAIRS)) *
                                  SUMS_OF_TILE,
                         l.lane, dq[m][i]);
        if (p.in_order) { /* after the barrier one release covers what all threads have added */
            __syncthreads();
            if (fresh_thread() == 0) store_release(p.added + index, turn + 1);
        }
    }

    /* ---- Results --------------------------------------------------------------------------------------- */

    /* Writes the warp's keys and its half of the columns, 32 of every 64. */
    template <int TILES>
    DEVICE void write_keys(const mha_vectors &of, float factor,
                           const float (&sums)[KEY_TILES][TILES][4]) const
    {
        const Lane l;
        const int key = l.key_group * Tiles::WARP_KEYS + l.lane / 4, left = keys();
        uint16_t *to = keys_of(of) + l.row_group * 32 + l.lane % 4 * 8;
#pragma unroll
        for (int m = 0; m < KEY_TILES; m++)
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int i = 0; i < TILES; i += 4) {
                    uint32_t words[4];
#pragma unroll
                    for (int j = 0; j < 4; j++)
                        words[j] = Element::pack(sums[m][i + j][2 * half] * factor,
                                                 sums[m][i + j][2 * half + 1] * factor);
                    const uint4 eight = quad_gather_eight(words);
                    const int at = key + 16 * m + 8 * half;
                    store_global_16(to + at * of.token + i / 4 * LINE_ELEMENTS, eight, at < left);
                }
    }

    /* Processes the key block that is described in shared memory. */
    DEVICE void run() const
    {
        KeySums dk = {};
        ValueSums dv = {};
        Place at = first_place();
        int left = (end_tile() - first_tile()) * p.call.group;
        if (left) {
            copy_keys(), copy_rows_at(at);
            cp_async_commit();
        }
        for (; left; left--) {
            cp_async_wait<0>();
            if (__syncthreads_or(copied_empty_row()))
                clear_empty_rows(this->numbers(), this->q(), this->dout());
            take_tile(dk, dv, at);
            __syncthreads();
            const Place next = place_after(at);
            if (left > 1) copy_rows_at(next);
            cp_async_commit();
            add_queries(at);
            at = next;
        }
        write_keys(p.call.dk, p.call.scale * DS_UNSCALE<Element>, dk);
        write_keys(p.call.dv, 1.0f / P_SCALE, dv);
    }
};

/* Returns the item number of this CTA. In order, a number is taken only after all smaller ones are being
 * processed. */
DEVICE int item_of_block(const mha_backward_sm80_params &p, uint32_t shared)
{
    if (!p.in_order) return (int)blockIdx.x;
    if (threadIdx.x == 0) store_shared_4(shared, atomicAdd(p.taken, 1));
    __syncthreads();
    const int number = (int)load_shared_4(shared);
    __syncthreads();
    return number;
}

template <typename Element, typename Tiles> DEVICE void backward_keys(const mha_backward_sm80_params &p)
{
    extern __shared__ __align__(1024) uint8_t shared[];
    const KeyBlock block = block_of_item<Tiles>(p, item_of_block(p, shared_address(shared)));
    if (block.keys <= 0) return; /* this number has no keys */
    if (threadIdx.x == 0) *(KeyBlock *)(shared + Tiles::BLOCK_AT) = block;
    __syncthreads();
    const Backward<Element, Tiles> backward(p, shared_address(shared));
    backward.run();
}

#define MHA_BACKWARD_OF_SHAPE(PREFIX, ELEMENT, name, d_qk, d_v, keys, warp_keys, early_dv, blocks)           \
    DEFINE_KERNEL(PREFIX##name, mha_backward_sm80_params, (MHA_BACKWARD_THREADS(keys, warp_keys), blocks),   \
                  backward_keys<ELEMENT, BackwardTiles<d_qk, d_v, keys, warp_keys, early_dv>>(p))

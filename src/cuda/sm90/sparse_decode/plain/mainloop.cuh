/* SPDX-License-Identifier: MIT
 *
 * Sparse decode over BF16 and FP16 caches on Hopper: keys are gathered straight to where the products read
 * them.
 *
 * A CTA takes a tile of 64 heads of one query token through the keys that the splits of its partition name,
 * 64 keys at a time:
 *
 *      who                    task                                                              registers
 *      warpgroup 0, scores    indices; S^T = K Qᵀ, softmax, P to shared memory                        152
 *      warpgroups 1, 2, sums  O of 256 columns each += P V; gather those columns of the block         176
 *                             after next (cp.async) once they are multiplied; Q of the next split
 *
 * Barriers: arrived[kv_stage][group], tiles of a block's keys have arrived; full, P is stored, and `address`
 * has the addresses of the keys of the block after next; empty, P has been multiplied; q_full, Q of a split
 * has arrived; sum_full, sum_empty: sums and references of a split. Q and the rope columns need no barrier
 * before they are overwritten: whoever sees P knows that the scores are done.
 */
#pragma once

#include "../../../device/half_rows.cuh"
#include "../../../device/quad.cuh"
#include "../queries.cuh"
#include "layout.cuh"
#include "scores.cuh"

namespace sparse_decode::plain {

/* ---- The end of a split ---------------------------------------------------------------------- */

/* Stores the sums `o` that Mainloop, which is derived from it, has made. */
template <typename R> struct Epilogue {
    using Shared = typename R::Shared;
    using Element = typename R::Element;
    enum { PARTS = 2 /* of a side's columns: multiplied, freed and requested one after the other */ };
    enum { PART_TILES = HALF_TILES / PARTS };
    using Sums = float[PARTS][64];

    const struct sparse_decode_params &p;
    Shared &shared;
    const uint32_t smem;

    DEVICE Epilogue(const struct sparse_decode_params &params, Shared &memory)
        : p(params), shared(memory), smem(shared_address(&memory))
    {
    }

    /* Takes 64 columns of one of the thread's two rows: two of every eight. */
    static DEVICE void take_row(float (&x)[16], const Sums &o, int tile, bool second)
    {
        const float *from = o[tile / PART_TILES] + tile % PART_TILES * (LINE_ELEMENTS / 2);
#pragma unroll
        for (int e = 0; e < 16; e++) {
            const int at = 4 * (e / 2) + e % 2;
            x[e] = second ? from[at + 2] : from[at];
        }
    }

    static DEVICE uint32_t pack(bool to_part, float low, float high)
    {
        if constexpr (IN_24_BITS<Element>)
            return to_part ? upper_halves_of(low, high) : Element::pack(low, high);
        else
            return to_part ? Fp16::pack(low, high) : Element::pack(low, high);
    }

    /* Stores the third bytes of 64 columns of a row if `stores`; `to`: of the lane's first. Those of columns c
     * and c + 32 pass through the quad together. */
    static DEVICE void store_third_bytes(const float (&x)[16], float factor, uint8_t *to, bool stores)
    {
        uint32_t words[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float *pair = x + 2 * e, *other = pair + 8;
            words[e] = __byte_perm(two_third_bytes_of(pair[0] * factor, pair[1] * factor),
                                   two_third_bytes_of(other[0] * factor, other[1] * factor), 0x5410);
        }
        const uint4 w = quad_gather_eight(words);
        store_global_16(to,
                        make_uint4(__byte_perm(w.x, w.y, 0x5410), __byte_perm(w.z, w.w, 0x5410),
                                   __byte_perm(w.x, w.y, 0x7632), __byte_perm(w.z, w.w, 0x7632)),
                        stores);
    }

    /* Stores a row to `out`, or, scaled or in 24 bits, to a part, from the side's first column on. One copy of
     * the code serves both, and both rows, since a call executes it once. `scales`, `bytes`: of a part's row,
     * which has one of them; NULL otherwise. `empty`: the row saw no key, and is 0 whatever weights of 0 made of
     * V. */
    static DEVICE void store_row(const Sums &o, uint16_t *to, bool to_part, float *scales, uint8_t *bytes,
                                 bool second, float factor, bool empty, bool valid)
    {
        float tile_scale = 0.0f; /* scale of the lane's tile of four */
#pragma unroll
        for (int tile = 0; tile < HALF_TILES; tile++) {
            float x[16], by = factor;
            take_row(x, o, tile, second);
            if (IN_24_BITS<Element>) {
                store_third_bytes(x, factor, bytes + tile * LINE_ELEMENTS, to_part & valid);
            } else if (__any_sync(~0u, to_part)) {
                const HalfScale scale(quad_magnitude(x) * factor);
                by *= scale.up;
                if (lane() % 4 == tile) tile_scale = scale.down;
            }
#pragma unroll
            for (int half = 0; half < 2; half++) {
                uint32_t words[4];
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const float *pair = x + 8 * half + 2 * e;
                    words[e] = empty ? 0u : pack(to_part, pair[0] * by, pair[1] * by);
                }
                const uint4 eight = quad_gather_eight(words);
                if (valid) *(uint4 *)(to + tile * LINE_ELEMENTS + 32 * half + 8 * (lane() % 4)) = eight;
            }
        }
        if (scales && valid) scales[lane() % 4] = tile_scale;
    }

    /* Stores row i; called by all lanes, also those past the last head. */
    DEVICE void end_row(const Sums &o, int i, float sum, float below) const
    {
        const CtaCoord cta(p);
        const int asked = cta.tile * HEADS + row() + 8 * i, head = min(asked, p.h_q - 1);
        const int column = side() * (D_V / 2), warp = (int)fresh_thread() / 32 - 4;
        const int request = shared.split[warp].request;
        const int64_t part = shared.split[warp].part;
        const bool valid = asked < p.h_q, stores_end = valid && side() == 0 && lane() % 4 == 0;
        float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
        const RowCoord coord = {cta.token, head};
        const bool direct = __any_sync(~0u, part == DIRECT);
        float *scales = NULL;
        uint8_t *bytes = NULL;
        uint16_t *to;
        if (direct) {
            const float lse = score_lse(-below, sum);
            if (stores_end) store_lse(p.output, request, coord, lse);
            to = p.output.out + out_offset(p.output, request, coord);
            factor *= result_sink_factor(p.output.rules, head, lse);
        } else {
            const int64_t part_row = part * ((int64_t)p.h_q * p.s_q) + (int64_t)cta.token * p.h_q + head;
            if (stores_end) p.split.part_ends[part_row] = {-below, sum};
            to = half_row(p.split, part_row);
            if constexpr (IN_24_BITS<Element>)
                bytes = third_bytes(p.split, part_row) + column + 16 * (lane() % 4);
            else
                scales = half_row_scales(p.split, part_row) + column / HALF_ROW_TILE;
        }
        store_row(o, to + column, !direct, scales, bytes, i == 1, factor, sum == 0.0f, valid);
    }

    DEVICE void end_split(const Sums &o, uint32_t parity)
    {
        mbarrier_wait(SHARED_AT(smem, sum_full), parity);
        float sum[2], below[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int head = row() + 8 * i;
            sum[i] = shared.sum[0][head] + shared.sum[1][head] + shared.sum[2][head] + shared.sum[3][head];
            below[i] = shared.below[head];
        }
        __syncwarp();
        if (lane() == 0) mbarrier_arrive(SHARED_AT(smem, sum_empty));
#pragma unroll 1
        for (int i = 0; i < 2; i++) end_row(o, i, i ? sum[1] : sum[0], i ? below[1] : below[0]);
        __syncwarp();
    }
};

/* ---- The main loop --------------------------------------------------------------------------- */

/* Of the warpgroups of the sums: O of 256 columns each += P V. They also gather: a warpgroup is the first to
 * know when its half of a block's columns is no longer needed, and requests that of the block after next. */
template <typename R> struct Mainloop : Epilogue<R> {
    using Base = Epilogue<R>;
    using typename Base::Element, typename Base::Shared;
    enum { ROWS_AT_ONCE = 16 /* rows that a warpgroup takes at a time, eight lanes each */ };

    using Base::Base, Base::p, Base::shared, Base::smem, Base::PARTS, Base::PART_TILES;
    typename Base::Sums o;

    /* ---- Gathering --------------------------------------------------------------------------------- */

    /* The thread's row of the first 16, and its chunk. */
    static DEVICE int line() { return (int)(fresh_thread() % WARPGROUP_THREADS / 8); }
    static DEVICE int chunk() { return (int)(fresh_thread() % 8); }

    DEVICE uint32_t tile_at(uint32_t kv_stage, int tile) const
    {
        return SHARED_AT(smem, keys) + kv_stage * (uint32_t)sizeof(shared.keys[0]) +
               (uint32_t)tile * TILE_BYTES;
    }

    DEVICE uint32_t arrived_at(uint32_t kv_stage, int group) const
    {
        return SHARED_AT(smem, arrived) + (kv_stage * R::GROUPS + (uint32_t)group) * 8;
    }

    DEVICE uint64_t address_of(uint32_t kv_stage, int key) const { return shared.address[kv_stage][key]; }

    static DEVICE void copy_chunk(uint32_t to, uint64_t token, int offset)
    {
        cp_async_16(to, (const uint8_t *)(token & ~NO_KEY) + offset, !(token & NO_KEY));
    }

    /* Gathers the columns that V does not have; each side takes half of the keys. */
    DEVICE void gather_rope(uint32_t kv_stage)
    {
        if constexpr (!R::HAS_ROPE) return;
        const int first = side() * (KEYS / 2) + line(),
                  from = R::ROPE_TILE * LINE_BYTES + CHUNK_BYTES * chunk();
        const uint32_t to = tile_at(kv_stage, R::ROPE_TILE) + swizzle_128((uint32_t)first, (uint32_t)chunk());
#pragma unroll
        for (int i = 0; i < KEYS / 2 / ROWS_AT_ONCE; i++)
            copy_chunk(to + (uint32_t)(i * ROWS_AT_ONCE * LINE_BYTES),
                       address_of(kv_stage, first + i * ROWS_AT_ONCE), from);
        cp_async_arrive(arrived_at(kv_stage, HALF_TILES));
    }

    /* Gathers a part of the side's columns. */
    DEVICE void gather_part(uint32_t kv_stage, int part)
    {
        enum { ROUNDS = KEYS / ROWS_AT_ONCE };
        const int first = side() * HALF_TILES + part * PART_TILES;
        const int from = first * LINE_BYTES + CHUNK_BYTES * chunk();
        const uint32_t to = tile_at(kv_stage, first) + swizzle_128((uint32_t)line(), (uint32_t)chunk());
        uint64_t token[ROUNDS];
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) token[i] = address_of(kv_stage, line() + i * ROWS_AT_ONCE) + from;
#pragma unroll
        for (int c = 0; c < PART_TILES; c++) {
#pragma unroll
            for (int i = 0; i < ROUNDS; i++)
                copy_chunk(to + (uint32_t)(c * TILE_BYTES + i * ROWS_AT_ONCE * LINE_BYTES), token[i],
                           c * LINE_BYTES);
            cp_async_arrive(arrived_at(kv_stage, part * PART_TILES + c));
        }
    }

    /* Requests the queries; called by both sides together. Rows past the last head are zeros. */
    DEVICE void load_queries(int request)
    {
        enum { HEADS_AT_ONCE = 2 * ROWS_AT_ONCE };
        const CtaCoord cta(p);
        const int first = side() * ROWS_AT_ONCE + line(), heads = p.h_q - cta.tile * HEADS;
        const uint16_t *tile = first_query(p, request, cta) + CHUNK_ELEMENTS * chunk();
        const uint32_t to = SHARED_AT(smem, q) + swizzle_128((uint32_t)first, (uint32_t)chunk());
#pragma unroll
        for (int i = 0; i < HEADS / HEADS_AT_ONCE; i++) {
            const int head = first + i * HEADS_AT_ONCE;
            const bool valid = head < heads;
            const uint16_t *from = tile + (valid ? head : 0) * p.q_stride[2];
#pragma unroll
            for (int c = 0; c < R::TILES; c++)
                cp_async_16(to + (uint32_t)(c * TILE_BYTES + i * HEADS_AT_ONCE * LINE_BYTES),
                            from + c * LINE_ELEMENTS, valid);
        }
        cp_async_arrive(SHARED_AT(smem, q_full));
    }

    /* ---- A block ------------------------------------------------------------------------------------ */

    /* Adds P·V of a block. `load`: further requests to issue while the products run. */
    template <typename Load> DEVICE void add_block(uint32_t count, bool first, const Load &load)
    {
        const uint32_t kv_stage = count & 1;
        mbarrier_wait(SHARED_AT(smem, full), count & 1);
        if (__any_sync(~0u, shared.block[0] & BLOCK_MOVED)) {
            const float factor[2] = {shared.factor[0][row()], shared.factor[0][row() + 8]};
#pragma unroll
            for (int i = 0; i < 128; i++) o[i / 64][i % 64] *= factor[i / 2 % 2];
        }
#pragma unroll
        for (int part = 0; part < PARTS; part++) hold(o[part]);
        wgmma_fence();
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            const uint32_t v = tile_at(kv_stage, side() * HALF_TILES + part * PART_TILES);
#pragma unroll
            for (int k = 0; k < KEYS / 16; k++)
                wgmma_128_columns<Element>(o[part], wgmma_lines(SHARED_AT(smem, p), k), wgmma_columns(v, k),
                                           k > 0 || !first);
            wgmma_commit();
        }
        gather_rope(kv_stage); /* the block's scores are done, and so are those with the split's queries */
        load();
        wgmma_wait<1>();
        barrier_sync(SIDE_BARRIER + side(), WARPGROUP_THREADS); /* no warp reads this part of V any longer */
        gather_part(kv_stage, 0);
        wgmma_wait<0>();
#pragma unroll
        for (int part = 0; part < PARTS; part++) hold(o[part]);
        __syncwarp();
        if (lane() == 0) mbarrier_arrive(SHARED_AT(smem, empty));
        barrier_sync(SIDE_BARRIER + side(), WARPGROUP_THREADS);
        gather_part(kv_stage, 1);
    }

    /* ---- All splits --------------------------------------------------------------------------------- */

    DEVICE int begin_split(int i)
    {
        int length;
        const Split now = list_split(p, shared.list, i, &length);
        const int warp = (int)fresh_thread() / 32 - 4;
        if (lane() == 0) shared.split[warp].part = now.part, shared.split[warp].request = now.request;
        __syncwarp();
        return blocks_of(now);
    }

    DEVICE int request_of(int i) const
    {
        return p.split.partitions ? i : shared.list.request;
    }

    /* Past the last block two more are gathered, of zeros: the scores' warps mark all their places with
     * NO_KEY. */
    DEVICE void run()
    {
        uint32_t count = 0, splits = 0;
#pragma unroll
        for (int i = 0; i < 128; i++) o[i / 64][i % 64] = 0.0f;
        load_queries(request_of(shared.list.first));
        barrier_sync(START_BARRIER, 3 * WARPGROUP_THREADS);
#pragma unroll 1
        for (uint32_t kv_stage = 0; kv_stage < KV_STAGES; kv_stage++)
            gather_rope(kv_stage), gather_part(kv_stage, 0), gather_part(kv_stage, 1);
        for (int i = shared.list.first; __any_sync(~0u, i <= shared.list.last); i += shared.list.step) {
            const bool more = shared.list.last - i >= shared.list.step;
            const int blocks = begin_split(i);
            for (int k = 0; __any_sync(~0u, k < blocks); k++, count++)
                add_block(count, k == 0, [&] {
                    if (__any_sync(~0u, more && k == blocks - 1))
                        load_queries(request_of(i + shared.list.step));
                });
            this->end_split(o, splits & 1);
            splits++;
        }
        cp_async_wait<0>();
    }
};

/* ---- The kernel ------------------------------------------------------------------------------ */

enum { THREADS = 3 * WARPGROUP_THREADS, SCORE_REGISTERS = 152, SUM_REGISTERS = 176 };

template <typename R> DEVICE void prepare(uint32_t smem)
{
    using Shared = typename R::Shared;
    enum { WARPS_OF_GROUP = WARPGROUP_THREADS / 32, GATHERING_THREADS = 2 * WARPGROUP_THREADS };
    for (uint32_t i = 0; i < KV_STAGES * R::GROUPS; i++)
        mbarrier_init(SHARED_AT(smem, arrived) + 8 * i, GATHERING_THREADS);
    mbarrier_init(SHARED_AT(smem, full), WARPS_OF_GROUP);
    mbarrier_init(SHARED_AT(smem, empty), 2 * WARPS_OF_GROUP);
    mbarrier_init(SHARED_AT(smem, sum_full), WARPS_OF_GROUP);
    mbarrier_init(SHARED_AT(smem, sum_empty), 2 * WARPS_OF_GROUP);
    mbarrier_init(SHARED_AT(smem, q_full), GATHERING_THREADS);
    mbarrier_fence_init();
}

template <typename R> DEVICE void kernel(const struct sparse_decode_params &p)
{
    extern __shared__ __align__(1024) unsigned char memory[];
    typename R::Shared &shared = *(typename R::Shared *)memory;
    if (threadIdx.x == 0) prepare<R>(shared_address(memory));
    __syncthreads();
    wait_for_kernels_before();
    let_next_kernel_start();
    if (threadIdx.x == 0) shared.list = split_list(p, (unsigned)CtaCoord(p).worker);
    __syncthreads();
    if (threadIdx.x < WARPGROUP_THREADS) {
        give_registers<SCORE_REGISTERS>();
        if (__any_sync(~0u, shared.list.first <= shared.list.last)) Scores<R>(p, shared).run();
    } else {
        take_registers<SUM_REGISTERS>();
        if (__any_sync(~0u, shared.list.first <= shared.list.last)) Mainloop<R>(p, shared).run();
    }
}

} // namespace sparse_decode::plain

#define SPARSE_DECODE_KERNEL(NAME, D_QK, ELEMENT)                                                            \
    DEFINE_KERNEL(NAME, sparse_decode_params, (sparse_decode::plain::THREADS, 1),                            \
                  sparse_decode::plain::kernel<sparse_decode::plain::Rows<D_QK, ELEMENT>>(p))

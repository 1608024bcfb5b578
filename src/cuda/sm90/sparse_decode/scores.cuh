/* SPDX-License-Identifier: MIT
 *
 * The scores' warpgroup: converts raw keys to fp16 or bf16 in registers, computes S^T = K Qᵀ from there at
 * once, stores V to shared memory, and computes the softmax.
 */
#pragma once

#include "producer.cuh"
#include "queries.cuh"
#include "softmax.cuh"

namespace sparse_decode {

template <typename F> struct Scores {
    const struct sparse_decode_params &p;
    Shared &shared;
    const uint32_t smem;
    Keys<F> keys;
    Scales<F> scales[2];
    uint4 raw[3][2], rope[2][2];
    bool valid[2], next_valid[2];
    float s[32];
    Softmax<Shared, F::PREFILL> softmax;
    uint32_t half, half_parity; /* half of V to fill next, and its parity */
    bool next_fits;             /* whether fp16 holds the keys of the next block */

    DEVICE Scores(const struct sparse_decode_params &params, Shared &memory)
        : p(params), shared(memory), smem(shared_address(&memory)), keys(params, memory),
          softmax(params, memory), half(0), half_parity(0)
    {
    }

    /* Takes chunk c of this block from shared memory. */
    DEVICE void take_chunk(uint32_t first, int c)
    {
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (c < F::CODE_CHUNKS) raw[c % 3][i] = keys.take_raw(first, c, i);
        if (F::ROPE_IS_V && c == F::ROPE_TILE) take_rope();
    }

    DEVICE void take_rope()
    {
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) rope[i][h] = load_shared_16(keys.rope_at(keys.rope, i, h));
    }

    /* Takes the scales and rope values of the block that is requested, and the addresses of the keys of
     * the block after it. Returns whether fp16 holds all that the thread has seen and V needs. */
    DEVICE bool take_first(uint32_t of_extra)
    {
        cp_async_wait<F::FP4 == NO_BLOCKS ? V_TILES : 0>();
        __syncwarp();
        bool fits = true;
        uint32_t most[4] = {0, 0, 0, 0};
        if constexpr (F::HAS_ROPE) take_rope();
        const bool fp4 = F::FP4 == BLOCKS_OF_SOME_CACHE && __any_sync(~0u, keys.fp4);
        scales[0].load(keys.scales_at(0), fp4), scales[1].load(keys.scales_at(1), fp4);
        next_valid[0] = keys.valid[0], next_valid[1] = keys.valid[1];
        keys.take_indices(of_extra);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            fits &= scales[i].fit(F::PREFILL ? INFINITY : p.scale, fp4) |
                    (!F::F32_SCALES && !next_valid[i]); /* without a key: 0, which fits */
#pragma unroll
            for (int h = 0; F::ROPE_IS_V && h < 2; h++) { /* else they are multiplied as bf16 in any case */
                const uint4 &x = rope[i][h];
                most[0] = larger_bf16x2(most[0], x.x), most[1] = larger_bf16x2(most[1], x.y);
                most[2] = larger_bf16x2(most[2], x.z), most[3] = larger_bf16x2(most[3], x.w);
            }
        }
        if constexpr (!F::ROPE_IS_V) return fits;
        return fits & !too_large_for_fp16(
                          larger_bf16x2(larger_bf16x2(most[0], most[1]), larger_bf16x2(most[2], most[3])));
    }

    template <typename Element> DEVICE void rope_fragments(uint32_t (&f)[4][4]) const
    {
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const uint4 &x = rope[i][h];
                f[2 * h][i] = convert_bf16x2<Element>(x.x), f[2 * h][i + 2] = convert_bf16x2<Element>(x.y);
                f[2 * h + 1][i] = convert_bf16x2<Element>(x.z),
                          f[2 * h + 1][i + 2] = convert_bf16x2<Element>(x.w);
            }
    }

    /* `fp4`: argument of F::fp4 for the block. */
    template <typename Element> DEVICE void code_fragments(int c, bool fp4, uint32_t (&f)[4][4])
    {
        decltype(scales[0].template of_chunk<Element>(c)) scale[2];
        if constexpr (F::FP4 != NO_BLOCKS && !Element::IS_BF16) {
            const uint32_t by = F::fp4(fp4) ? scales[0].ONE_FORM_OF_FP4 : scales[0].ONE_FORM_OF_FP8;
#pragma unroll
            for (int i = 0; i < 2; i++) scale[i] = scales[i].of_either(c, by);
        } else if (F::fp4(fp4)) {
#pragma unroll
            for (int i = 0; i < 2; i++) scale[i] = scales[i].template fp4_of_chunk<Element>(c);
        } else {
#pragma unroll
            for (int i = 0; i < 2; i++) scale[i] = scales[i].template of_chunk<Element>(c);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const auto by = scale[i];
            const uint4 x = raw[c % 3][i];
            convert_codes(x.x, by, f[0][i], f[0][i + 2]), convert_codes(x.y, by, f[1][i], f[1][i + 2]);
            convert_codes(x.z, by, f[2][i], f[2][i + 2]), convert_codes(x.w, by, f[3][i], f[3][i + 2]);
        }
    }

    template <typename Element> DEVICE void multiply_chunk(const uint32_t (&f)[4][4], int tile, bool first)
    {
        const uint64_t q = wgmma_lines(SHARED_AT(smem, q), 0);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++)
            wgmma_64<Element>(s, f[k], wgmma_behind(q, (uint32_t)(tile * TILE_BYTES + 32 * k)),
                              !first || k > 0);
        wgmma_commit();
    }

    /* Waits until all codes of the pair are e4m3. FP8 blocks wait too, so that no warp falls two phases
     * behind. */
    DEVICE void wait_for_pair(int pair, uint32_t parity)
    {
        mbarrier_wait(SHARED_AT(smem, converted) + 8 * (uint32_t)pair, parity);
    }

    /* Computes S^T of a block whose scales and rope values are taken, and stores its V; requests the next
     * block's raw keys, and takes its scales and rope values. Returns whether fp16 holds that block, as
     * far as the thread has seen. `parity`: of the block's count. */
    template <typename Element> DEVICE bool score_block(bool last, uint32_t parity)
    {
        if constexpr (F::FP4 == NO_BLOCKS)
            cp_async_wait<5>(); /* chunks 0 to 2; from here on all but the newest six groups */
        else
            wait_for_pair(0, parity), wait_for_pair(1, parity);
        bool fp4 = false; /* in shared memory, since no register is left for it through the softmax */
        if constexpr (F::FP4 == BLOCKS_OF_SOME_CACHE)
            fp4 = __any_sync(~0u, load_shared_4(SHARED_AT(smem, fp4) + 4 * parity));
        if constexpr (F::FP4 == BLOCKS_OF_SOME_CACHE && !Element::IS_BF16)
#pragma unroll
            for (int i = 0; i < 2; i++) scales[i].to_one_form(fp4);
        const uint32_t first = keys.raw_at(0, 0);
        take_chunk(first, 0), take_chunk(first, 1), take_chunk(first, 2);
        valid[0] = next_valid[0], valid[1] = next_valid[1];
        uint32_t frag[2][4][4];
        hold(s);
        if constexpr (F::HAS_ROPE) {
            rope_fragments<Bf16>(frag[1]);
            multiply_chunk<Bf16>(frag[1], F::ROPE_TILE, true);
        }
        keys.load_indices();
        __syncwarp(); /* every lane has its scales */
        keys.ask_first(keys.next_rope());
        /* Matrix l / 8 of a step has keys 0 to 7 or 8 to 15 of the warp's, and the first or last eight of
         * the step's columns. */
        const uint32_t line = 16 * (uint32_t)warp() + (uint32_t)ldmatrix_tile_row(lane());
        const uint32_t v = SHARED_AT(smem, v) + swizzle_128(line, (uint32_t)ldmatrix_tile_chunk(lane()));
        uint32_t of_extra;
        uint32_t to[4]; /* of a step's matrices; own registers, so that no store waits for another */
#pragma unroll
        for (int c = 0; c < V_TILES; c++) {
            uint32_t(&f)[4][4] = frag[c % 2];
            if (c >= 1) wgmma_wait<1>(); /* products before c - 1 are done */
            if (c % 2) release_queries(c / 2, last);
            if (c % HALF_TILES == 0) {
                mbarrier_wait(SHARED_AT(smem, empty) + 8 * half, half_parity ^ 1);
#pragma unroll
                for (uint32_t k = 0; k < 4; k++) to[k] = (v ^ (32 * k)) + half * HALF_BYTES;
            }
            if (c < F::CODE_CHUNKS) {
                code_fragments<Element>(c, fp4, f);
                multiply_chunk<Element>(f, c, !F::HAS_ROPE && c == 0);
            } else {
                rope_fragments<Element>(f); /* V alone: K came first */
            }
            keys.ask_chunk(c, parity ^ 1);
            if (c + 3 < V_TILES) {
                if constexpr (F::FP4 == NO_BLOCKS)
                    cp_async_wait<6>();
                else if ((c + 3) % 2 == 0)
                    wait_for_pair((c + 3) / 2, parity);
                take_chunk(first, c + 3);
            }
            if (c == V_TILES - 1)
                of_extra = keys.read_of_extra(); /* before V's stores, which it would wait for */
#pragma unroll
            for (int k = 0; k < 4; k++) store_matrices(to[k] + (uint32_t)(c % HALF_TILES) * TILE_BYTES, f[k]);
            if (c % HALF_TILES == HALF_TILES - 1 && ++half == HALVES) half = 0, half_parity ^= 1;
        }
        keys.rope = keys.next_rope();
        const bool fits = take_first(of_extra);
        wgmma_wait<0>();
        hold(s);
        __syncwarp();
        if (lane() == 0) mbarrier_arrive(SHARED_AT(smem, products_done));
        release_queries(Q_GROUPS - 1, last);
        return fits;
    }

    /* Lets the sums' warps load a group of the next split's queries. */
    DEVICE void release_queries(int group, bool last)
    {
        if (last && lane() == 0) mbarrier_arrive(SHARED_AT(smem, q_empty) + 8 * (uint32_t)group);
    }

    /* Masks the scores of entries that name no key. */
    DEVICE void mask()
    {
        if (__all_sync(~0u, valid[0] & valid[1])) return;
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (!valid[i])
#pragma unroll
                for (int j = 0; j < 8; j++) s[4 * j + 2 * i] = s[4 * j + 2 * i + 1] = -INFINITY;
    }

    /* If a CTA has many splits, the first block's extra work costs less than a register for the flag. */
    template <typename Element> DEVICE void add_block(uint32_t p_stage, bool first, bool last)
    {
        const bool fits = score_block<Element>(last, p_stage);
        mask();
        next_fits = !softmax.template block<Element>(s, p_stage, !fits, F::ONE_SPLIT && first);
    }

    DEVICE void end_split(uint32_t count)
    {
        mbarrier_wait(SHARED_AT(smem, empty) + 8 * half, half_parity ^ 1);
        softmax.end((float(*)[HEADS])shared.v[half], (count & 1) ^ 1);
    }

    DEVICE int blocks_of_split(int i) const
    {
        return blocks_of(split_of<F>(p, shared.list, i));
    }

    /* A split is multiplied in fp16 up to the first block that fp16 does not hold, and in bf16 from there
     * on. The votes tell ptxas that a warp stays together: it then keeps matrix descriptors in uniform
     * registers. */
    DEVICE void run()
    {
        __align__(16) float kept[F::PREFILL ? 16 : 1];
        if constexpr (F::PREFILL) softmax.kept = (uint32_t)__cvta_generic_to_local(kept);
        keys.begin();
        next_fits = !any_of_scores(!take_first(keys.read_of_extra()));
        uint32_t p_stage = 0, count = 0;
        for (int i = shared.list.first; F::ONE_SPLIT ? count == 0 : __any_sync(~0u, i <= shared.list.last);
             i += shared.list.step) {
            const int blocks = blocks_of_split(i);
            int left = blocks;
            softmax.begin();
            mbarrier_wait(SHARED_AT(smem, q_full), count++ & 1);
            const bool fp16 = shared.q_beyond != count;
            for (; __any_sync(~0u, fp16 && next_fits && left > 0); left--, p_stage ^= 1)
                add_block<Fp16>(p_stage, left == blocks, left == 1);
            if constexpr (F::PREFILL && !F::ONE_SPLIT) {
                if (__any_sync(~0u, left > 0)) {
                    reload_queries<F>(p, request_of<F>(p, shared.list, i), smem);
                    for (; __any_sync(~0u, left > 0); left--, p_stage ^= 1)
                        add_block<Bf16>(p_stage, left == blocks, left == 1);
                }
                end_split(count);
            } else if (SELDOM(__any_sync(~0u, left > 0))) {
                reload_queries<F>(p, request_of<F>(p, shared.list, i), smem);
                for (; __any_sync(~0u, left > 0); left--, p_stage ^= 1)
                    add_block<Bf16>(p_stage, left == blocks, left == 1);
                end_split(count);
            } else {
                end_split(count); /* in the code twice: this copy is beside the fp16 code */
            }
        }
        if constexpr (F::FP4 != NO_BLOCKS) cp_async_commit();
        cp_async_wait<0>();
    }
};

} // namespace sparse_decode

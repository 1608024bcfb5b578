/* SPDX-License-Identifier: MIT
 *
 * The warpgroup with the scores, where keys are the first factor: S^T = K Q^T. Where queries are values codes of 16 keys by 32 columns are
 * read by ldmatrix, and each four of a row become two pairs of a row of A; columns of Q stand in the order in which they come so. This is
 * done in fp16, which holds all codes; a row of Q is fp16 times a power of two, so that no bit of bf16 is lost which is 2^-29 of the row's
 * largest value or more. Over FP8_656 each line of 128 columns has a sum of its own, which is added in fp32 times the key's scale; the last
 * columns are bf16 times the same power. Where queries are codes of FP8_656, S^T is made as by_lines.cuh has it.
 *
 * A thread has two keys of a block and a fourth of the rows: row maxima are a question of all warps. So references are asked of memory,
 * and all warps agree, by a barrier a block, whether one of them is to move.
 */
#pragma once

#include "../../device/cache.cuh"
#include "../../device/half_rows.cuh"
#include "../../device/warp.cuh"
#include "by_lines.cuh"
#include "scores.cuh"

/* Where columns c and c + 1 of a row of values stand, c even: the pair of the four codes that a lane reads which comes first is one of
 * the first eight columns of a product's sixteen, the other one of the last eight. */
template <int ROWS> DEVICE uint32_t value_place(int row, int c)
{
    const int pair = c / 2 % 8, word = pair % 2 * 4 + pair / 2, column = c / 16 * 16 + 2 * word;
    return (uint32_t)(column / LINE_ELEMENTS * ROWS * LINE_BYTES) +
           swizzle_128((uint32_t)row, (uint32_t)(column % LINE_ELEMENTS / CHUNK_ELEMENTS)) +
           (uint32_t)(column % CHUNK_ELEMENTS * 2);
}

/* The warps of a warpgroup take a row each at a time. `scales`: where the factors go that make scores of products, in shared memory. The
 * last columns of FP8_656 have a tile of their own. */
template <typename V>
DEVICE void load_queries(const struct dense_decode_params &p, const Task &task, uint32_t q, uint32_t scales,
                         float scale_of_all)
{
    constexpr int WORDS = D_QK / 64, CODE_WORDS = V::SCALED ? D_V / 64 : WORDS, ROWS = V::ROWS;
    const int warp = (int)(fresh_thread() / 32 % 4), lane = (int)(fresh_thread() % 32);
#pragma unroll 1
    for (int row = warp; row < ROWS; row += 4) {
        uint32_t words[WORDS];
        load_query_words(words, p, task, row, lane);
        const HalfScale power(__uint_as_float((uint32_t)largest_magnitude<WORDS>(words)));
        if (lane == 0)
            store_shared_4(scales + 4 * (uint32_t)row,
                           __float_as_uint(fminf(power.down * scale_of_all, FLT_MAX)));
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            const float low = Bf16::to_float((uint16_t)words[i]) * power.up,
                        high = Bf16::to_float((uint16_t)(words[i] >> 16)) * power.up;
            if (i < CODE_WORDS)
                store_shared_4(q + value_place<ROWS>(row, 64 * i + 2 * lane), Fp16::pack(low, high));
            else
                store_shared_4(q + (uint32_t)(CODE_WORDS * ROWS * LINE_BYTES) +
                                   swizzle_128((uint32_t)row, (uint32_t)lane / 4) + (uint32_t)(lane % 4 * 4),
                               Bf16::pack(low, high));
        }
    }
}

/* Scales of FP8_656 of keys from … 63 of a block become 0: of keys from `end` on, which no row sees, and those that are infinite, as they
 * are where a value is (half_scales.cuh), or NaN. A row that sees such a key has a score that is no number. */
DEVICE void clear_values(uint32_t keys, int from, int end)
{
    const uint32_t scales = keys + SCALES_AT;
#pragma unroll 1
    for (int i = from * SCALES_OF_KEY + (int)(fresh_thread() % WARPGROUP_THREADS); i < KEYS * SCALES_OF_KEY;
         i += WARPGROUP_THREADS) {
        const float scale = __uint_as_float(load_shared_4(scales + 4 * (uint32_t)i));
        if (i / SCALES_OF_KEY >= end || !(fabsf(scale) <= FLT_MAX))
            store_shared_4(scales + 4 * (uint32_t)i, 0);
    }
}

template <typename V> struct ConvertedScores {
    using Shared = SharedOf<V>;
    static constexpr int NS = V::ROWS / 8; /* of eight rows, of which a thread has two */
    const struct dense_decode_fp8_params &p;
    Shared &shared;
    const uint32_t base;
    float s[V::ROWS / 2]; /* S^T of a block */
    float sum[NS][2];     /* of the thread's keys; or, by lines: */
    RowSums<V> row_sums;
    ByLines<V> lines;
    /* Steps that codes are read ahead: two sums leave few registers. */
    static constexpr int AHEAD = V::SCALED ? 1 : 2;
    uint32_t fragment[2][2][4], raw[AHEAD][4];
    float part[V::ROWS / 2]; /* of FP8_656: the sum of the line in hand */
    Turn<V::BUFFERS> buffer;
    Turn<V::SLOTS> slot;
    uint32_t line_at, end_at,
        p_at; /* of the lane: in a line and in the end of a block's keys; in the first 16 rows of P */
    uint32_t scale_at; /* of FP8_656: the scales of the thread's first key, in a block's keys */
    int column;        /* the first of the thread's two of eight rows */

    DEVICE ConvertedScores(const struct dense_decode_fp8_params &params, Shared &memory)
        : p(params), shared(memory), base(shared_address(&memory)), column(2 * (lane() % 4))
    {
        const uint32_t key = (uint32_t)(16 * warp() + lane() % 16), chunk = (uint32_t)lane() / 16;
        line_at = swizzle_128(key, chunk), end_at = LINES * KEY_TILE_BYTES + swizzle_64(key, chunk);
        scale_at = (uint32_t)(SCALES_AT + (16 * warp() + lane() / 4) * SCALES_BYTES_OF_KEY);
        p_at = first_rows_at();
        /* Kept: a thread's number, read anew for every address, is what a block waits for. */
        asm volatile("" : "+r"(line_at), "+r"(end_at), "+r"(p_at), "+r"(column), "+r"(scale_at));
    }

    DEVICE static int lane() { return (int)(fresh_thread() % 32); }
    DEVICE static int warp() { return (int)(fresh_thread() / 32 % 4); }

    /* The task of the piece in hand lies in shared memory; every warp has a copy of its own. */
    DEVICE Task &task() const { return shared.task[warp()]; }
    DEVICE int blocks() const
    {
        return (int)((unsigned)(task().piece.end - task().piece.begin + KEYS - 1) / KEYS);
    }

    DEVICE uint32_t keys_at(int index) const
    {
        return SHARED_AT(base, keys) + (uint32_t)(index * V::KEYS_BYTES);
    }

    /* The barrier of the keys in hand. */
    DEVICE uint32_t full_at() const { return barrier_at(SHARED_AT(base, keys_full), buffer.index); }

    DEVICE static void sync() { barrier_sync(SCORES_BARRIER, WARPGROUP_THREADS); }

    /* ---- S^T --------------------------------------------------------------------------------------- */

    DEVICE void load(uint32_t (&to)[4], uint32_t keys, int step)
    {
        const bool end = step >= LINES * STEPS_OF_LINE;
        ldmatrix_x4(
            to, ((keys + (end ? end_at : line_at)) ^ (uint32_t)(2 * CHUNK_BYTES * (step % STEPS_OF_LINE))) +
                    (end ? 0 : (uint32_t)(step / STEPS_OF_LINE * KEY_TILE_BYTES)));
    }

    DEVICE void convert(uint32_t (&a)[2][4], const uint32_t (&codes)[4])
    {
#pragma unroll
        for (int i = 0; i < 4; i++) fp16_of_e4m3(a[i / 2][i % 2], a[i / 2][i % 2 + 2], codes[i]);
    }

    /* The first fragments, or products, of a block. */
    DEVICE void begin(uint32_t keys)
    {
        if constexpr (V::BY_LINES) {
            lines.template multiply<0>(keys, SHARED_AT(base, q));
            return;
        }
        load(raw[0], keys, 0);
        convert(fragment[0], raw[0]);
        if (AHEAD > 1) load(raw[1], keys, 1);
    }

    /* Issues the products of the second line, later: a warp that issues both lines at once stalls. */
    DEVICE void begin_more(uint32_t keys)
    {
        if constexpr (V::BY_LINES) lines.template multiply<1>(keys, SHARED_AT(base, q));
    }

    /* The last columns of FP8_656, which are values already. */
    DEVICE void score_rope(uint32_t keys)
    {
        const uint32_t lines = keys + LINES * KEY_TILE_BYTES,
                       queries =
                           SHARED_AT(base, q) + (uint32_t)(D_V / LINE_ELEMENTS * Shared::QUERY_TILE_BYTES);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < LINE_ELEMENTS / 16; i++)
            wgmma_lines_of<Bf16>(s, wgmma_lines(lines, i), wgmma_lines(queries, i), i > 0);
        wgmma_commit();
    }

    /* Adds the sum of a line, of which the last products are under way, times the scales of the thread's two keys. */
    DEVICE void add_line(uint32_t keys, int line)
    {
        float scale[2];
#pragma unroll
        for (int i = 0; i < 2; i++)
            scale[i] = scale_of_line(keys + scale_at + (uint32_t)(8 * i * SCALES_BYTES_OF_KEY), line);
        wgmma_wait<0>();
        hold(part);
        if (line == 0) hold(s);
#pragma unroll
        for (int e = 0; e < V::ROWS / 2; e++) s[e] = fmaf(part[e], scale[e / 2 % 2], s[e]);
    }

    /* What products are added to. */
    DEVICE float (&sums())[V::ROWS / 2]
    {
        if constexpr (V::SCALED)
            return part;
        else
            return s;
    }

    /* Fragments are read one or two ahead, and converted one ahead. */
    DEVICE void score(uint32_t keys)
    {
        if constexpr (V::BY_LINES) {
            lines.score(s, keys, SHARED_AT(base, q), keys + scale_at, &shared.q_scales[column],
                        fminf(p.dense.call.scale_log2, FLT_MAX));
            return;
        }
        constexpr int ALL = V::SCALED ? LINES * STEPS_OF_LINE : STEPS;
        const uint32_t queries = SHARED_AT(base, q);
        hold(s);
        if constexpr (V::SCALED) score_rope(keys);
#pragma unroll
        for (int i = 0; i < ALL; i++) {
            const bool begins = i == 0 || (V::SCALED && i % STEPS_OF_LINE == 0);
            if (i + AHEAD < ALL) load(raw[(i + AHEAD) % AHEAD], keys, i + AHEAD);
            if constexpr (V::SCALED)
                if (begins) hold(part);
            wgmma_fence();
#pragma unroll
            for (int h = 0; h < 2; h++)
                wgmma_lines_of<Fp16>(
                    sums(), fragment[i % 2][h],
                    wgmma_lines(queries + (uint32_t)(i / 2 * Shared::QUERY_TILE_BYTES), 2 * (i % 2) + h),
                    !begins || h > 0);
            wgmma_commit();
            if (i > 0) wgmma_wait<1>();
            if (i + 1 < ALL) convert(fragment[(i + 1) % 2], raw[(i + 1) % AHEAD]);
            if constexpr (V::SCALED)
                if (i % STEPS_OF_LINE == STEPS_OF_LINE - 1) add_line(keys, i / STEPS_OF_LINE);
        }
        wgmma_wait<0>();
        hold(s);
    }

    /* ---- Weights ----------------------------------------------------------------------------------- */

    /* Scores of keys that a row does not see, and codes that must not reach a product. */
    DEVICE void mask(int left, uint32_t keys, bool fits)
    {
        const Task &task = this->task();
        const int first_key = task.piece.begin + (blocks() - 1 - left) * KEYS;
        const int key = first_key + 16 * warp() + lane() / 4;
#pragma unroll
        for (int n = 0; n < NS; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const int end = min(task.end, visible_end(p.dense.call, task, 8 * n + column + j));
                if (key >= end) s[4 * n + j] = -INFINITY;
                if (key + 8 >= end) s[4 * n + 2 + j] = -INFINITY;
            }
        sync(); /* every warp's products have read the block */
        const int from = clamp_int(task.all_see - first_key, 0, KEYS);
        clear_codes(keys, from);
        /* Where values fit in fp16 they are finite, and those of keys that no row sees have scales of 0. */
        if (V::SCALED && !fits) clear_values(keys, from, task.end - first_key);
        fence_async_shared();
        sync();
    }

    /* Flags that the warps exchange at the barrier of a block. */
    enum { MOVES = 1 /* a reference of a row is to move, for the keys of any warp */, TOO_EARLY = 2 };

    /* Scores in powers of two, which they are already by lines. Returns MOVES and TOO_EARLY, if this or another warp is for it. */
    DEVICE uint32_t scale(int left, bool too_early)
    {
        bool late = false;
#pragma unroll
        for (int n = 0; n < NS; n++) {
            const float2 reference = *(const float2 *)&shared.references[8 * n + column];
            if (!V::BY_LINES) {
                const float2 by = *(const float2 *)&shared.q_scales[8 * n + column];
                s[4 * n] *= by.x, s[4 * n + 1] *= by.y, s[4 * n + 2] *= by.x, s[4 * n + 3] *= by.y;
            }
            late |= fmaxf(s[4 * n], s[4 * n + 2]) > reference.x + REFERENCE_LATE ||
                    fmaxf(s[4 * n + 1], s[4 * n + 3]) > reference.y + REFERENCE_LATE;
        }
        uint32_t(&moves)[4] = shared.moves[left % 2];
        late = __any_sync(~0u, late);
        if (lane() == 0) moves[warp()] = (late ? MOVES : 0) | (too_early ? TOO_EARLY : 0);
        sync();
        return moves[0] | moves[1] | moves[2] | moves[3];
    }

    DEVICE void move_references()
    {
#pragma unroll
        for (int n = 0; n < NS; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float most = fmaxf(s[4 * n + j], s[4 * n + 2 + j]);
#pragma unroll
                for (int lanes = 4; lanes < 32; lanes *= 2)
                    most = fmaxf(most, __shfl_xor_sync(~0u, most, lanes));
                if (lane() / 4 == 0) shared.of_warps[warp()][8 * n + column + j] = most;
            }
        sync();
        const int row = (int)(fresh_thread() % WARPGROUP_THREADS);
        if (row < V::ROWS) {
            const float most = fmaxf(fmaxf(shared.of_warps[0][row], shared.of_warps[1][row]),
                                     fmaxf(shared.of_warps[2][row], shared.of_warps[3][row])),
                        from = shared.references[row],
                        to = fmaxf(from, fminf(most, FLT_MAX) - REFERENCE_BELOW);
            shared.factor[slot.index][row] = exp2_approx(from - to), shared.references[row] = to;
        }
        sync();
        if (V::BY_LINES) row_sums.rescale(shared.factor[slot.index]);
#pragma unroll
        for (int n = 0; n < NS && !V::BY_LINES; n++) {
            const float2 factor = *(const float2 *)&shared.factor[slot.index][8 * n + column];
            sum[n][0] *= factor.x, sum[n][1] *= factor.y;
        }
    }

    /* Where the lane's row of 16 bytes of the first 16 rows goes, in a slot. */
    DEVICE static uint32_t first_rows_at()
    {
        return swizzle_128((uint32_t)(8 * (lane() / 16) + lane() % 8),
                           (uint32_t)(2 * warp() + lane() / 8 % 2));
    }

    /* The same in the slot in hand; over FP8_656 it is recomputed, for lack of registers. */
    DEVICE uint32_t weights_at() const
    {
        return SHARED_AT(base, p) + (uint32_t)(slot.index * V::ROWS * LINE_BYTES) +
               (V::SCALED ? first_rows_at() : p_at);
    }

    /* The rounding error of a weight in bf16; 0 where the weight is NaN or infinite. */
    DEVICE static float rest_of(float weight)
    {
        const float rest = weight - Bf16::to_float(Bf16::from_float(weight));
        return fabsf(rest) < 1.0f ? rest : 0.0f;
    }

    /* Stores the weights; or, with RESTS, their rounding errors in bf16. */
    template <typename Element, bool RESTS> DEVICE void exponentials(uint32_t to)
    {
#pragma unroll
        for (int n = 0; n < NS; n += 2) {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float2 reference = *(const float2 *)&shared.references[8 * (n + i) + column];
                const float *const of = s + 4 * (n + i);
                float low[2] = {exp2_approx(of[0] - reference.x), exp2_approx(of[1] - reference.y)},
                      high[2] = {exp2_approx(of[2] - reference.x), exp2_approx(of[3] - reference.y)};
#pragma unroll
                for (int j = 0; j < 2; j++)
                    if (RESTS)
                        low[j] = rest_of(low[j]), high[j] = rest_of(high[j]);
                    else if (!V::BY_LINES)
                        sum[n + i][j] += low[j] + high[j];
                words[2 * i] = Element::pack(low[0], low[1]),
                          words[2 * i + 1] = Element::pack(high[0], high[1]);
            }
            /* P^T of two times eight rows, as it stands in D, goes to lines of rows. */
            store_matrices_transposed(to + (uint32_t)(8 * n * LINE_BYTES), words);
        }
    }

    /* Makes P of a block. By lines the row sums are sums of the stored weights; in bf16 the rounding errors are added, or lse would show them. */
    template <typename Element> DEVICE void make_weights()
    {
        const uint32_t to = weights_at();
        if constexpr (V::BY_LINES && Element::IS_BF16) {
            exponentials<Element, true>(to);
            __syncwarp();
            row_sums.template add<Element>(to);
            __syncwarp();
        }
        exponentials<Element, false>(to);
        fence_async_shared();
        __syncwarp();
        if (lane() == 0) mbarrier_arrive(barrier_at(SHARED_AT(base, p_full), slot.index));
        if constexpr (V::BY_LINES) row_sums.template add<Element>(to);
    }

    /* What makes rows of the sums over a piece; a thread has a row. */
    DEVICE void finish()
    {
        const Task &task = this->task();
        const float of_cache = p.dense.call.kv_scale ? __ldg(p.dense.call.kv_scale) : 1.0f;
        const int row = (int)(fresh_thread() % WARPGROUP_THREADS);
        if (V::BY_LINES) row_sums.store(shared.of_warps[warp()]);
#pragma unroll
        for (int n = 0; n < NS && !V::BY_LINES; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float all = sum[n][j];
#pragma unroll
                for (int lanes = 4; lanes < 32; lanes *= 2) all += __shfl_xor_sync(~0u, all, lanes);
                if (lane() / 4 == 0) shared.of_warps[warp()][8 * n + column + j] = all;
            }
        sync();
        if (row < V::ROWS) {
            const bool direct = task.piece.slot == DIRECT;
            const float whole = (shared.of_warps[0][row] + shared.of_warps[1][row]) +
                                (shared.of_warps[2][row] + shared.of_warps[3][row]);
            const float left =
                finish_row(p.dense.call, task, direct, score_lse(shared.references[row], whole), row, true);
            shared.finish[slot.index][row] = whole == 0.0f ? 0.0f
                                                           : (direct      ? left * of_cache
                                                              : V::SCALED ? 1.0f
                                                                          : SLOT_UNIT) /
                                                                 whole;
        }
        __syncwarp();
    }

    /* ---- A block, a piece, all pieces ----------------------------------------------------------------- */

    /* `left`: blocks of the piece behind this one. By lines products of the next block are asked for in any case: ptxas takes two branches on
     * one condition for branches that may differ, and would wait for each product. Behind the last block they are for nobody; and where the
     * keys have not come, they are asked for again behind this block's softmax, which does not wait for them. */
    DEVICE void run_block(int left, bool masked)
    {
        const bool last = __all_sync(~0u, left == 0);
        if (V::SCALED) mbarrier_wait(barrier_at(SHARED_AT(base, scales_full), buffer.index), buffer.parity);
        const uint32_t keys = keys_at(buffer.index);
        score(keys);
        if (V::SCALED && !V::BY_LINES) column = 2 * (lane() % 4); /* so that it takes no register before */
        const bool fits = !V::SCALED || __any_sync(~0u, shared.fits[buffer.index]);
        buffer.next();
        const bool too_early =
            V::BY_LINES && !last && !__all_sync(~0u, mbarrier_test(full_at(), buffer.parity));
        if (!V::BY_LINES && !last) mbarrier_wait(full_at(), buffer.parity);
        if (V::BY_LINES || !last) begin(keys_at(buffer.index));
        if (masked) mask(left, keys, fits);
        const uint32_t agreed = scale(left, too_early);
        const bool moves = __any_sync(~0u, agreed & MOVES);
        begin_more(keys_at(buffer.index));
        mbarrier_wait(barrier_at(SHARED_AT(base, p_empty), slot.index), slot.parity ^ 1);
        if (moves) move_references();
        if (fresh_thread() < SCORES * WARPGROUP_THREADS + 4)
            shared.flags[slot.index].moved[fresh_thread() % 4] = moves && left + 1 < blocks();
        if (fresh_thread() == SCORES * WARPGROUP_THREADS) shared.flags[slot.index].cleared = masked;
        if (V::SCALED && SELDOM(!fits))
            make_weights<Bf16>();
        else
            make_weights<Fp16>();
        if (last) finish();
        if (lane() == 0) mbarrier_arrive(barrier_at(SHARED_AT(base, done), slot.index));
        slot.next();
        if constexpr (V::BY_LINES)
            if (SELDOM(__any_sync(~0u, agreed & TOO_EARLY))) {
                mbarrier_wait(full_at(), buffer.parity);
                lines.multiply_again(keys_at(buffer.index), SHARED_AT(base, q));
            }
    }

    DEVICE void take_queries()
    {
        if constexpr (V::BY_LINES) {
            load_query_lines<V>(p.dense.call, task(), SHARED_AT(base, q), SHARED_AT(base, q_scales));
        } else {
            const float of_cache = p.dense.call.kv_scale ? __ldg(p.dense.call.kv_scale) : 1.0f;
            load_queries<V>(p.dense.call, task(), SHARED_AT(base, q), SHARED_AT(base, q_scales),
                            fminf(of_cache * p.dense.call.scale_log2, FLT_MAX));
        }
    }

    DEVICE void run_piece(const Work &work)
    {
        const int begin_key = work.task.piece.begin,
                  masked = KEYS * work.blocks - (max(work.task.all_see, begin_key) - begin_key);
        if (__all_sync(~0u, work.blocks == 0)) {
            store_empty(p.dense.call, work.task, V::ROWS);
            return;
        }
        __syncwarp();
        if (lane() == 0) task() = work.task;
        const int row = (int)(fresh_thread() % WARPGROUP_THREADS);
        sync(); /* the piece before has been scored and finished by all warps */
        if (row < V::ROWS) shared.references[row] = LEAST_REFERENCE;
        take_queries();
        fence_async_shared();
        sync();
#pragma unroll
        for (int n = 0; n < NS; n++) sum[n][0] = sum[n][1] = 0.0f;
        row_sums.clear();
        mbarrier_wait(full_at(), buffer.parity);
        begin(keys_at(buffer.index)), begin_more(keys_at(buffer.index));
#pragma unroll 1
        for (int left = work.blocks - 1; __all_sync(~0u, left >= 0); left--)
            run_block(left, __any_sync(~0u, KEYS * left < masked));
        if constexpr (V::BY_LINES) lines.end();
    }

    DEVICE void run()
    {
        for (int i = shared.list.first; __all_sync(~0u, i <= shared.list.last); i += shared.list.step)
            run_piece(work_of<V>(p.dense, shared, i, Place(p.dense)));
    }
};

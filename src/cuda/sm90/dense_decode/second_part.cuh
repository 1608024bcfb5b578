/* SPDX-License-Identifier: MIT
 *
 * Requests that the plan splits once. The second part is the first split of its CTA, and the first part is
 * the last split of the CTA before it, so that the second part is usually stored long before the first is
 * done. The CTA with the first part then adds the second to its registers and writes the result. Nobody
 * waits: if the second part is not there yet, the first is stored too, and the kernel that joins the other
 * requests joins this one. Both ways give the same bits.
 *
 *      CTA i       … | splits of other requests | first part of r | second part of r stored? add it
 *      CTA i + 1   second part of r, stored, flags set | splits of other requests | …
 *
 * Each warp of either side sets a ready flag when its rows and columns are stored. The workspace is not
 * initialised, so the warp that reads the flags first clears those of an earlier call: any flag that it
 * finds later is of this call. If the other CTA was faster than that, its flags are lost, and the request is
 * left to the join.
 *
 * A warp beside the producer reads the flags once the last keys have been requested. That leaves time to
 * prefetch the second part to L2 and, once the last keys have been used, to load it to their stages in shared
 * memory. (The producer's own warp must not do it: lanes that wait for the producing lane slow it down, by
 * 2 % of the kernel with 256 rows.)
 */
#pragma once

#include "../../device/part.cuh"
#include "epilogue.cuh"
#include "producer.cuh"

namespace dense_decode {

/* ---- Ready flags ------------------------------------------------------------------------------- */

/* Returns the flags of the current tile that this CTA sets; next_flags returns those that it reads. */
DEVICE uint32_t *own_flags(const struct dense_decode_params &p)
{
    return p.split.ready_flags + (int64_t)fresh_block() * READY_FLAGS_OF_TILE;
}

DEVICE uint32_t *next_flags(const struct dense_decode_params &p)
{
    return own_flags(p) + (int64_t)p.split.tiles * READY_FLAGS_OF_TILE;
}

/* Called by one warp, the same that reads the flags. */
DEVICE void clear_next_flags(const struct dense_decode_params &p)
{
    const unsigned lane = fresh_thread() % 32;
    if (lane < READY_FLAGS_OF_TILE) next_flags(p)[lane] = 0;
    __syncwarp();
}

/* Says that the rows and columns of a warp are stored; called by that warp. `warp`: index below
 * READY_FLAGS_OF_TILE. */
DEVICE void set_ready(const struct dense_decode_params &p, int warp)
{
    __syncwarp();
    if (fresh_thread() % 32 == 0)
        asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(own_flags(p) + warp), "r"((int)PART_STORED)
                     : "memory");
}

/* Returns whether the second part is stored; called by one warp. Each lane has acquired the flag that it
 * read; __syncwarp passes that on to the lanes that read the data the flag guards, which a vote alone does
 * not. */
DEVICE bool second_part_is_ready(const struct dense_decode_params &p)
{
    uint32_t flag;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                 : "=r"(flag)
                 : "l"(next_flags(p) + fresh_thread() % READY_FLAGS_OF_TILE)
                 : "memory");
    const bool ready = __all_sync(~0u, flag == PART_STORED);
    __syncwarp();
    return ready;
}

DEVICE void set_joined(const struct dense_decode_params &p)
{
    *next_flags(p) = PART_JOINED;
}

/* ---- The second part in shared memory ---------------------------------------------------------- */

enum {
    SECOND_ROW_BYTES = D_V * (int)sizeof(float),
    SECOND_LINE_BYTES =
        SECOND_ROW_BYTES + 64 /* eight lanes read 64 bytes of each of two rows, in other banks */
};
static_assert(ROWS * SECOND_LINE_BYTES <= offsetof(Shared, tiles.q),
              "it lies where keys and rope columns were");

/* Returns whether the CTA waits for second_full at the end of this split, its last. */
DEVICE bool looks_for_second_part(const struct dense_decode_params &p, const Split &split)
{
    return (p.split.ready_flags != NULL) & split.first_of_two;
}

/* Fetches the second part; called by one warp that has no other work. */
template <typename V>
DEVICE void produce_second_part(const struct dense_decode_sm90_params &p, const SplitList &list,
                                const CtaCoord &cta, Shared &shared, uint32_t smem)
{
    const int lane = (int)(fresh_thread() % 32);
    if (list.last < list.first) return;
    const WorkTile work(p, list, list.last, cta.kv_head, cta.tile * ROWS, ROWS);
    if (!looks_for_second_part(p.call, work.task.split)) return;
    clear_next_flags(p.call);
    if (work.blocks == 0) return;

    mbarrier_wait_long(SHARED_AT(smem, keys_asked), 0);
    const uint32_t parities = shared.parities;

    Task second = work.task;
    second.split.part = 2 * (work.task.split.part / 2 + 1);
    const int64_t first_row = part_row(p.call, second, work.task.first_row);
    const float *from = p.call.split.part_out + first_row * D_V;
    const int rows = min(ROWS, p.call.rows - work.task.first_row);
    const uint32_t full = SHARED_AT(smem, second_full);
    const bool ready = second_part_is_ready(p.call);
    uint32_t bytes = 0;
    if (ready) {
        if (lane == 0) bulk_prefetch(from, (uint32_t)(rows * SECOND_ROW_BYTES));
#pragma unroll 1
        for (int row = lane; row < rows; row += 32) {
            shared.second_end[row] = load_fresh_part_end(p.call.split.part_ends + first_row + row);
            bytes += SECOND_ROW_BYTES;
        }
#pragma unroll 1
        for (int side = 0; side < 2; side++) wait_for_stage<V>(smem, side, parities >> side & 1);
        fence_async_global();
    }
    if (lane == 0) shared.second_part = ready;
    mbarrier_arrive_expect(full, bytes);
    if (ready)
#pragma unroll 1
        for (int row = lane; row < rows; row += 32)
            bulk_load(smem + (uint32_t)(row * SECOND_LINE_BYTES), from + row * D_V, SECOND_ROW_BYTES, full);
}

/* ---- The sum ----------------------------------------------------------------------------------- */

/* The end of a whole row and the weights of its two parts, computed as the join computes them. A part that
 * saw no key has weight 0. */
struct TwoParts {
    part_end whole;
    float weight[2];

    TwoParts() = default;
    DEVICE TwoParts(const part_end &first, const part_end &second)
    {
        whole.max = fmaxf(first.max, second.max);
        const float reference = parts_reference(whole.max);
        weight[0] = part_weight(first, reference), weight[1] = part_weight(second, reference);
        whole.sum = weight[0] + weight[1];
        const float inverse = reciprocal_approx(whole.sum);
        weight[0] = first.sum == 0.0f ? 0.0f : weight[0] * inverse;
        weight[1] = second.sum == 0.0f ? 0.0f : weight[1] * inverse;
    }
};

/* Epilogue that adds the second part to a thread's two rows of O on their way to `out`. */
struct WithSecond {
    TwoParts parts[2];
    float own_factor[2], factor[2]; /* own_factor normalises the first part; factor is the sink factor */
    const float *second[2];         /* in shared memory, at the thread's first column of the side */

    /* `row`: the first of the thread's two. `position`: of its first column. `end`, `own`: of the first
     * part. */
    DEVICE WithSecond(const Shared &shared, int row, int position, const part_end (&end)[2],
                      const float (&own)[2])
    {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            parts[i] = TwoParts(end[i], shared.second_end[row + 8 * i]);
            second[i] =
                (const float *)(shared.tiles.keys[0][0] + (row + 8 * i) * SECOND_LINE_BYTES) + position;
            own_factor[i] = own[i];
        }
    }

    DEVICE float joined(float own, float other, int i) const
    {
        const float first = fmaf(parts[i].weight[0], own, 0.0f);
        return (parts[i].weight[1] == 0.0f ? first : fmaf(parts[i].weight[1], other, first)) * factor[i];
    }

    template <int FIRST> DEVICE float4 values(const float (&o)[64], int e, int i, int column) const
    {
        const float4 own = scaled_values(o, e, own_factor[i]),
                     other = *(const float4 *)(second[i] + column + (e - FIRST) / 8 * 16);
        return make_float4(joined(own.x, other.x, i), joined(own.y, other.y, i), joined(own.z, other.z, i),
                           joined(own.w, other.w, i));
    }
};

} // namespace dense_decode

/* SPDX-License-Identifier: MIT
 *
 * Epilogue: writes sums that a warpgroup holds: dK and dV of a work tile, dq of a tile.
 *
 * dK and dV of a key head are summed over its query heads, in their order, so that they have the same bits in every
 * run: where a work tile has one of them, the first one stores its sums, in fp32 and in the accumulator layout, the next
 * ones add to them, the last one writes dk and dv. A warp has the same elements for each head, and waits for its own counter alone.
 */
#pragma once

#include "scheduler.cuh"

#include "../../device/backward_rows.cuh"
#include "../../device/quad.cuh"
#include "../../device/result.cuh"

namespace mha_backward {

/* Writes 64 rows of a consumer times `factor`, 16 bytes per store. `rows`: those that belong to the request.
 * `add_others`, called with sixteen values and the number of the first, adds to them. */
template <typename Element, int N, typename AddOthers>
DEVICE void store_rows(uint16_t *to, int64_t stride, int rows, float factor, const float (&d)[N],
                       AddOthers add_others)
{
    const int thread = (int)fresh_thread() % WARPGROUP_THREADS, row = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int i = 0; i < N / 16 * 16; i += 16) { /* 32 columns */
        float sum[16];
#pragma unroll
        for (int j = 0; j < 16; j++) sum[j] = d[i + j];
        add_others(sum, i);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t words[4];
#pragma unroll
            for (int j = 0; j < 4; j++)
                words[j] = Element::pack(sum[4 * j + 2 * half] * factor, sum[4 * j + 2 * half + 1] * factor);
            const uint4 eight = quad_gather_eight(words);
            store_global_16(to + (row + 8 * half) * stride + i * 2 + thread % 4 * 8, eight,
                            row + 8 * half < rows);
        }
    }
    if constexpr (N %
                  16) { /* 16 columns more, without others: a thread stores eight of one of its two rows */
        constexpr int FIRST = N / 16 * 16;
        static_assert(N % 16 == 8, "two times eight columns");
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int at = FIRST + j % 2 * 4 + j / 2 * 2;
            words[j] = Element::pack(d[at] * factor, d[at + 1] * factor);
        }
        const uint4 eight = quad_gather_eight(words);
        const int of = row + thread % 4 / 2 * 8;
        store_global_16(to + of * stride + FIRST * 2 + thread % 2 * 8, eight, of < rows);
    }
}

/* A consumer's sums over the query heads of a key head. */
struct HeadSums {
    float *sums;     /* of this thread: four values, and four more after every WARPGROUP_THREADS · 4 */
    uint32_t *added; /* heads that this warp has added */
    int before;      /* heads of the key head that come before those of the work tile */
    uint32_t heads;  /* of the work tile */
    bool is_last;

    /* The vote makes the branch uniform, as in mbarrier_wait. */
    DEVICE void wait_for_heads_before() const
    {
        while (!__all_sync(~0u, before == 0 || load_acquire(added) == (uint32_t)before)) {
        }
    }

    /* Adds sixteen values, from value `i` on, of the sums of the heads before to `d`. */
    DEVICE void add_heads_before(float (&d)[16], int i) const
    {
        float x[16] = {};
        static_assert(WARPGROUP_THREADS * 16 == 2048, "the distance of the loads");
        asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %17, 0;\n"
                     "@p ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%16];\n"
                     "@p ld.global.cg.v4.f32 {%4, %5, %6, %7}, [%16+2048];\n"
                     "@p ld.global.cg.v4.f32 {%8, %9, %10, %11}, [%16+4096];\n"
                     "@p ld.global.cg.v4.f32 {%12, %13, %14, %15}, [%16+6144];\n}"
                     : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3]), "+f"(x[4]), "+f"(x[5]), "+f"(x[6]),
                       "+f"(x[7]), "+f"(x[8]), "+f"(x[9]), "+f"(x[10]), "+f"(x[11]), "+f"(x[12]), "+f"(x[13]),
                       "+f"(x[14]), "+f"(x[15])
                     : "l"(sums + i * WARPGROUP_THREADS), "r"(before)
                     : "memory");
#pragma unroll
        for (int j = 0; j < 16; j++) d[j] += x[j];
    }

    /* Adds this head's values, which are those from `first` on. */
    template <int N> DEVICE void add(const float (&d)[N], int first) const
    {
#pragma unroll
        for (int i = 0; i < N; i += 16) {
            float sum[16];
#pragma unroll
            for (int j = 0; j < 16; j++) sum[j] = d[i + j];
            add_heads_before(sum, first + i);
#pragma unroll
            for (int j = 0; j < 16; j += 4)
                __stcg((float4 *)(sums + (first + i + j) * WARPGROUP_THREADS),
                       make_float4(sum[j], sum[j + 1], sum[j + 2], sum[j + 3]));
        }
    }

    DEVICE void count() const
    {
        __syncwarp();
        if (threadIdx.x % 32 == 0)
            asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(added), "r"(heads) : "memory");
    }
};

/* Returns the sums of part `part` of the work tile at `work`; of `parts` parts, each 64 keys by `columns`. */
DEVICE HeadSums head_sums(const mha_backward_sm90_params &p, uint32_t work, int part, int parts, int columns)
{
    const int group = p.call.group, thread = (int)fresh_thread() % WARPGROUP_THREADS,
              key_head = load_uniform(work + offsetof(WorkTile, k.head)),
              before = load_uniform(work + offsetof(WorkTile, head)) - key_head * group;
    const int64_t tile =
        ((int64_t)load_uniform(work + offsetof(WorkTile, block)) * p.call.h_kv + key_head) * parts + part;
    return {p.head_sums + tile * 64 * columns + thread * 4, p.heads_added + tile * 4 + thread / 32, before,
            (uint32_t)p.work_heads, before + p.work_heads == group};
}

/* Write dK or dV of 64 keys, from key `first` of the work tile on, with those of the query heads before, which begin at
 * value `at` of the sums. */
template <typename Element, int D_QK>
DEVICE void store_dk(const mha_backward_params &call, const WorkKeys &work, int first,
                     const float (&dk)[D_QK], const HeadSums &heads, int at)
{
    const int64_t key = (int64_t)(uint32_t)work.key + first; /* of an unsigned word, for shorter code */
    store_rows<Element>(call.dk.data + work.request * call.dk.request + key * call.dk.token +
                            work.head * call.dk.head,
                        call.dk.token, work.keys - first, call.scale * DS_UNSCALE<Element>, dk,
                        [&](float(&sum)[16], int i) { heads.add_heads_before(sum, at + i); });
}

template <typename Element, int D_V>
DEVICE void store_dv(const mha_backward_params &call, const WorkKeys &work, int first, const float (&dv)[D_V],
                     const HeadSums &heads, int at)
{
    const int64_t key = (int64_t)(uint32_t)work.key + first;
    store_rows<Element>(call.dv.data + work.request * call.dv.request + key * call.dv.token +
                            work.head * call.dv.head,
                        call.dv.token, work.keys - first, 1.0f / P_SCALE, dv,
                        [&](float(&sum)[16], int i) { heads.add_heads_before(sum, at + i); });
}

} // namespace mha_backward

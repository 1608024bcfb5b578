/* SPDX-License-Identifier: MIT
 *
 * The gradient of attention for a consumer's 64 keys and a tile of 64 rows: the products, named by the layout
 * of their operands (those of device/wgmma.cuh, and some that only the backward needs), and the gradient of
 * softmax. Keys are the rows of Sᵀ and dPᵀ.
 */
#pragma once

#include "layout.cuh"

#include "../../device/backward_rows.cuh"
#include "../../device/element.cuh"
#include "../../device/mma.cuh"
#include "../../device/result.cuh"

namespace mha_backward {

/* clang-format off */
#define WGMMA_NAMES_48 WGMMA_NAMES_32 ", " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_NAMES_96 WGMMA_NAMES_64 ", " \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_D_48(d) WGMMA_D_32(d), WGMMA_SUMS_8(d, 32), WGMMA_SUMS_8(d, 40)
#define WGMMA_D_96(d) WGMMA_D_64(d), WGMMA_SUMS_32(d, 64)
/* clang-format on */

/* ---- Products ------------------------------------------------------------------------------------ */

/* Returns the descriptor of a tile with lines of 128 or 64 bytes; groups of eight lines are contiguous.
 * `leading`: distance between tiles of 64 (32) columns. */
template <Swizzle SWIZZLE> DEVICE uint64_t descriptor_of(uint32_t tile, uint32_t leading, uint32_t offset)
{
    constexpr uint32_t EIGHT_LINES = SWIZZLE == SWIZZLE_128 ? 1024 : 512;
    const uint32_t low = (tile >> 4) + (offset >> 4 | leading >> 4 << 16);
    uint64_t descriptor;
    asm("mov.b64 %0, {%1, %2};"
        : "=l"(descriptor)
        : "r"(low), "r"(EIGHT_LINES >> 4 | (uint32_t)SWIZZLE << 30));
    return descriptor;
}

/* D (+)= A·B; A and B row by row in lines; 64 or 128 columns. */
template <typename Element> DEVICE void product_of_lines(float (&d)[32], uint64_t a, uint64_t b, int add)
{
    wgmma_64<Element>(d, a, b, add);
}
template <typename Element> DEVICE void product_of_lines(float (&d)[64], uint64_t a, uint64_t b, int add)
{
    wgmma_lines_of<Element>(d, a, b, add);
}

/* D += A·B; A in registers, B transposed; 64, 96, 128, 192 or 256 columns. */
template <typename Element> DEVICE void add_product(float (&d)[128], const uint32_t (&a)[4], uint64_t b)
{
    wgmma_256_columns<Element>(d, a, b, 1);
}
template <typename Element> DEVICE void add_product(float (&d)[32], const uint32_t (&a)[4], uint64_t b)
{
    wgmma_64_columns<Element>(d, a, b, 1);
}
template <typename Element> DEVICE void add_product(float (&d)[64], const uint32_t (&a)[4], uint64_t b)
{
    wgmma_128_columns<Element>(d, a, b, 1);
}
template <typename Element> DEVICE void add_product(float (&d)[96], const uint32_t (&a)[4], uint64_t b)
{
    WGMMA_OF("m64n192k16", WGMMA_NAMES_96, "%101", "{%96, %97, %98, %99}", "%100", "1", WGMMA_D_96, "r"(a[0]),
             "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));
}

template <typename Element> DEVICE void add_product(float (&d)[48], const uint32_t (&a)[4], uint64_t b)
{
    WGMMA_OF("m64n96k16", WGMMA_NAMES_48, "%53", "{%48, %49, %50, %51}", "%52", "1", WGMMA_D_48, "r"(a[0]),
             "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));
}

/* The same with A row by row in lines. */
template <typename Element> DEVICE void add_product(float (&d)[32], uint64_t a, uint64_t b)
{
    WGMMA_OF("m64n64k16", WGMMA_NAMES_32, "%34", "%32", "%33", "0, 1", WGMMA_D_32, "l"(a), "l"(b), "r"(1));
}
template <typename Element> DEVICE void add_product(float (&d)[64], uint64_t a, uint64_t b)
{
    wgmma_128_columns<Element>(d, a, b, 1);
}
template <typename Element> DEVICE void add_product(float (&d)[96], uint64_t a, uint64_t b)
{
    WGMMA_OF("m64n192k16", WGMMA_NAMES_96, "%98", "%96", "%97", "0, 1", WGMMA_D_96, "l"(a), "l"(b), "r"(1));
}

/* D (+)= A·B, both transposed: a line of A holds a column of it; 64, 96 or 128 columns of B. */
template <typename Element> DEVICE void product_of_columns(float (&d)[32], uint64_t a, uint64_t b, int add)
{
    WGMMA_OF("m64n64k16", WGMMA_NAMES_32, "%34", "%32", "%33", "1, 1", WGMMA_D_32, "l"(a), "l"(b), "r"(add));
}
template <typename Element> DEVICE void product_of_columns(float (&d)[64], uint64_t a, uint64_t b, int add)
{
    WGMMA_OF("m64n128k16", WGMMA_NAMES_64, "%66", "%64", "%65", "1, 1", WGMMA_D_64, "l"(a), "l"(b), "r"(add));
}
template <typename Element> DEVICE void product_of_columns(float (&d)[48], uint64_t a, uint64_t b, int add)
{
    WGMMA_OF("m64n96k16", WGMMA_NAMES_48, "%50", "%48", "%49", "1, 1", WGMMA_D_48, "l"(a), "l"(b), "r"(add));
}

/* ---- A consumer ----------------------------------------------------------------------------------- */

/* What a consumer computes of a tile of rows, but dQ: S, P, dP, dS, and its additions to dV and dK. */
template <typename Element, typename Layout> struct Gradient {
    static constexpr int ROWS = Layout::ROWS, D_QK = Layout::D_QK, D_V = Layout::D_V;
    static constexpr int SCORES = ROWS / 2, ROW_STEPS = ROWS / 16; /* values per thread; steps of 16 rows */
    /* dS gets P in fp32, or in fp16: where dV has bf16 in registers of its own, PACKS_P. */
    static constexpr bool KEEPS_P = Layout::KEEPS_P || (Layout::SENDS_P && !Element::IS_BF16),
                          PACKS_P = !KEEPS_P && Element::IS_BF16;
    static constexpr int HELD_STEPS = 4; /* of 16 columns of K, in registers, if S_EARLY */

    const mha_backward_sm90_params &p;
    const Layout l;
    const int group; /* consumer index: has keys 64 · group … of a work tile; in a pair all of its CTA's */

    const uint32_t stats_at; /* byte offset of the thread's columns within eight, in a tile's lse and delta */
    const uint32_t ds_at;    /* byte offset at which it stores dS in a tile of dS */
    uint32_t n = 0;          /* tile counter; selects the stages of Q, dO and dS, and their parities */
    int key_stage = 0;       /* of K and V of the work tile */

    static DEVICE int ds_stage(uint32_t n) { return (int)(n % 2); }
    static DEVICE uint32_t ds_parity(uint32_t n) { return n / 2 % 2; }
    static DEVICE int q_stage(uint32_t n) { return (int)(n % Layout::Q_STAGES); }
    static DEVICE uint32_t q_parity(uint32_t n) { return n / Layout::Q_STAGES % 2; }
    static DEVICE int dout_stage(uint32_t n) { return (int)(n % Layout::DO_STAGES); }
    static DEVICE uint32_t dout_parity(uint32_t n) { return n / Layout::DO_STAGES % 2; }

    /* Keeps the computation of the words ahead of the products that follow. */
    static DEVICE void hold_words(uint32_t (&w)[ROW_STEPS][4])
    {
#pragma unroll
        for (int i = 0; i < ROW_STEPS; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) asm volatile("" : "+r"(w[i][j])::"memory");
    }

    DEVICE void issue_scores(float (&s)[SCORES], uint32_t n) const
    {
        const uint32_t k = own_keys(), q = l.in_descriptor(l.q(q_stage(n)));
#pragma unroll
        for (int i = 0; i < D_QK / 16; i++)
            product_of_lines<Element>(s, k_descriptor(k, i), q_descriptor(q, i), i != 0);
        wgmma_commit();
    }

    /* Returns the address of this consumer's keys. */
    DEVICE uint32_t own_keys() const
    {
        return l.in_descriptor(l.k(key_stage)) + (uint32_t)(group * Layout::KEY_STEP) * Layout::K_LINE;
    }

    /* Return the descriptors of columns 16 i … 16 i + 15 of the keys at `k`, and of the tile of Q at `q`. */
    static DEVICE uint64_t k_descriptor(uint32_t k, int i)
    {
        return descriptor_of<Layout::K_SWIZZLE>(
            k, 0, (uint32_t)(i / Layout::K_STEPS) * Layout::K_TILE + (uint32_t)(i % Layout::K_STEPS) * 32);
    }
    static DEVICE uint64_t q_descriptor(uint32_t q, int i)
    {
        return descriptor_of<Layout::Q_SWIZZLE>(
            q, 0, (uint32_t)(i / Layout::Q_STEPS) * Layout::Q_TILE + (uint32_t)(i % Layout::Q_STEPS) * 32);
    }

    /* Loads the first 64 columns of this consumer's keys as fragments of A, so that the products read less shared
     * memory. */
    DEVICE void load_keys(uint32_t (&to)[HELD_STEPS][4]) const
    {
        const uint32_t at =
            l.k(key_stage) + (Layout::K_SWIZZLE == SWIZZLE_128 ? ds_at : key_in_short_lines());
#pragma unroll
        for (int i = 0; i < HELD_STEPS; i++)
            ldmatrix_x4(to[i], (at + (uint32_t)(i / Layout::K_STEPS) * Layout::K_TILE) ^
                                   (uint32_t)(i % Layout::K_STEPS * 2 * CHUNK_BYTES));
    }

    /* Returns ds_at for lines of 64 bytes. */
    static DEVICE uint32_t key_in_short_lines()
    {
        const uint32_t thread = fresh_thread() - WARPGROUP_THREADS, lane = thread % 32;
        return swizzle_64(thread / 32 * 16 + lane % 16, lane / 16);
    }

    DEVICE void issue_scores(float (&s)[SCORES], const uint32_t (&k)[HELD_STEPS][4], uint32_t n) const
    {
        const uint32_t from = own_keys();
#pragma unroll
        for (int i = 0; i < D_QK / 16; i++) {
            const uint64_t q = q_descriptor(l.q(q_stage(n)), i);
            if (i < HELD_STEPS)
                wgmma_64<Element>(s, k[i % HELD_STEPS], q, i != 0);
            else
                wgmma_64<Element>(s, k_descriptor(from, i), q, 1);
        }
        wgmma_commit();
    }

    DEVICE void issue_dp(float (&dp)[SCORES], uint32_t n) const
    {
        const uint32_t v = l.in_descriptor(l.v(key_stage)) +
                           (uint32_t)(group * Layout::KEY_STEP) * LINE_BYTES,
                       dout = l.in_descriptor(l.dout(dout_stage(n)));
#pragma unroll
        for (int i = 0; i < D_V / 16; i++)
            product_of_lines<Element>(
                dp,
                descriptor_of<SWIZZLE_128>(v, 0, (uint32_t)(i / 4) * Layout::V_TILE + (uint32_t)(i % 4) * 32),
                descriptor_of<SWIZZLE_128>(dout, 0,
                                           (uint32_t)(i / 4) * Layout::DO_TILE + (uint32_t)(i % 4) * 32),
                i != 0);
        wgmma_commit();
    }

    DEVICE void begin_dp(float (&dp)[SCORES], uint32_t n) const
    {
        mbarrier_wait(l.barrier(Layout::DO_FULL, dout_stage(n)), dout_parity(n));
        hold(dp);
        wgmma_fence();
        issue_dp(dp, n);
    }

    /* Issues dV += P dO, summed over the rows of the tile. */
    DEVICE void issue_dv(float (&dv)[D_V / 2], const uint32_t (&w)[ROW_STEPS][4], uint32_t n) const
    {
#pragma unroll
        for (int i = 0; i < ROW_STEPS; i++)
            add_product<Element>(dv, w[i],
                                 descriptor_of<SWIZZLE_128>(l.in_descriptor(l.dout(dout_stage(n))),
                                                            Layout::DO_TILE, (uint32_t)i * 16 * LINE_BYTES));
        wgmma_commit();
    }

    /* Issues dK += dS Q with dS from shared memory, because dQ needs the registers meanwhile. */
    DEVICE void issue_dk(float (&dk)[D_QK / 2], uint32_t n) const
    {
        const uint32_t ds = l.ds(ds_stage(n)) + (uint32_t)group * TILE_BYTES;
#pragma unroll
        for (int i = 0; i < ROW_STEPS; i++)
            add_product<Element>(dk,
                                 descriptor_of<SWIZZLE_128>(
                                     ds, 0, (uint32_t)(i / 4) * Layout::DS_TILE + (uint32_t)(i % 4) * 32),
                                 descriptor_of<Layout::Q_SWIZZLE>(l.q(q_stage(n)), Layout::Q_TILE,
                                                                  (uint32_t)i * 16 * Layout::Q_LINE));
        wgmma_commit();
    }

    /* Issues dK += dS Q with dS from registers. */
    DEVICE void issue_dk(float (&dk)[D_QK / 2], const uint32_t (&ds)[ROW_STEPS][4], uint32_t n) const
    {
#pragma unroll
        for (int i = 0; i < ROW_STEPS; i++)
            add_product<Element>(dk, ds[i],
                                 descriptor_of<Layout::Q_SWIZZLE>(l.in_descriptor(l.q(q_stage(n))),
                                                                  Layout::Q_TILE,
                                                                  (uint32_t)i * 16 * Layout::Q_LINE));
        wgmma_commit();
    }

    /* Returns four of sixteen rows' lse (which = 0) or delta (1). Rows are columns of Sᵀ: a thread has two of
     * every eight. */
    DEVICE float4 stats(int which, int sixteen, uint32_t n) const
    {
        float4 four;
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
                     : "r"(l.stats(q_stage(n)) + stats_at + (uint32_t)(which * ROWS + sixteen * 16) * 4));
        return four;
    }

    /* Sets masked scores to -inf. `diagonal`: row i of this tile sees key t of the CTA's if t + diagonal <= i. */
    DEVICE void mask(float (&s)[SCORES], int diagonal) const
    {
        const int thread = (int)fresh_thread() % WARPGROUP_THREADS,
                  first = Layout::KEY_STEP * group + thread / 32 * 16 + thread % 32 / 4 + diagonal -
                          thread % 4 * 2;
#pragma unroll
        for (int i = 0; i < SCORES; i++)
            if ((i >> 2) * 8 + (i & 1) < first + (i >> 1 & 1) * 8) s[i] = -INFINITY;
    }

    /* Masks keys past the request's last one. They are zeros, but their P may be infinite, and 0 × inf would
     * be NaN in dQ. `keys`: valid keys of this consumer. */
    DEVICE void mask_tail(float (&s)[SCORES], int keys) const
    {
        const int thread = (int)fresh_thread() % WARPGROUP_THREADS,
                  first = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
        for (int i = 0; i < SCORES; i++)
            if (first + (i >> 1 & 1) * 8 >= keys) s[i] = -INFINITY;
    }

    /* Loads the lse (which = 0) or delta (1) of the first N · 16 rows. */
    template <int N> DEVICE void load_stats(float4 (&to)[N], int which, uint32_t n) const
    {
#pragma unroll
        for (int j = 0; j < N; j++) to[j] = stats(which, j, n);
    }

    /* Computes P · P_SCALE, rounded to 16 bits for dV. dS is computed from P with more bits: keys of equal
     * weight share the same rounding error, which would remain in the sum dQ. Where registers cannot hold
     * fp32 P until dP is complete, `exact` receives pairs of fp16. */
    DEVICE void softmax_block(float (&s)[SCORES], const float4 (&lse)[ROW_STEPS], uint32_t (&w)[ROW_STEPS][4],
                              uint32_t (&exact)[ROW_STEPS][4]) const
    {
#pragma unroll
        for (int j = 0; j < ROW_STEPS; j++) softmax_step(s, j, lse[j], w[j], exact[j]);
    }

    /* The same for the rows of step `j`. */
    DEVICE void softmax_step(float (&s)[SCORES], int j, const float4 &lse, uint32_t (&w)[4],
                             uint32_t (&exact)[4]) const
    {
#pragma unroll
        for (int i = 8 * j; i < 8 * j + 8; i += 2) {
            s[i] = exp2_approx(fmaf(s[i], p.call.scale_log2, -(i & 4 ? lse.z : lse.x)));
            s[i + 1] = exp2_approx(fmaf(s[i + 1], p.call.scale_log2, -(i & 4 ? lse.w : lse.y)));
            w[i / 2 % 4] = Element::pack(s[i], s[i + 1]);
            if constexpr (PACKS_P) exact[i / 2 % 4] = Fp16::pack(s[i], s[i + 1]);
        }
    }

    /* Computes dS · P_SCALE · DS_SCALE; P carries P_SCALE, delta DS_SCALE. */
    DEVICE void softmax_gradient(const float (&s)[SCORES], const uint32_t (&w)[ROW_STEPS][4],
                                 const uint32_t (&exact)[ROW_STEPS][4], const float (&dp)[SCORES],
                                 const float4 (&early)[Layout::DELTA_EARLY],
                                 uint32_t (&ds)[ROW_STEPS][4]) const
    {
#pragma unroll
        for (int j = 0; j < ROW_STEPS; j++) {
            const float4 delta = j < Layout::DELTA_EARLY ? early[j % Layout::DELTA_EARLY] : stats(1, j, n);
#pragma unroll
            for (int i = 8 * j; i < 8 * j + 8; i += 2) {
                float a = s[i], b = s[i + 1];
                if constexpr (!KEEPS_P) {
                    const uint32_t pair = PACKS_P ? exact[j][i / 2 % 4] : w[j][i / 2 % 4];
                    a = Fp16::to_float((uint16_t)pair), b = Fp16::to_float((uint16_t)(pair >> 16));
                }
                ds[j][i / 2 % 4] =
                    Element::pack(a * fmaf(dp[i], DS_SCALE<Element>, -(i & 4 ? delta.z : delta.x)),
                                  b * fmaf(dp[i + 1], DS_SCALE<Element>, -(i & 4 ? delta.w : delta.y)));
            }
        }
    }

    /* Stores this consumer's dS, one line per key. Chunk c of key k is at c ^ k % 8, so that a step of two
     * chunks is an exclusive or. */
    DEVICE void store_ds(uint32_t tile, const uint32_t (&ds)[ROW_STEPS][4]) const
    {
#pragma unroll
        for (int i = 0; i < ROW_STEPS; i++)
            store_matrices((tile + (uint32_t)(i / 4) * Layout::DS_TILE + ds_at) ^
                               (uint32_t)(i % 4 * 2 * CHUNK_BYTES),
                           ds[i]);
    }
};

} // namespace mha_backward

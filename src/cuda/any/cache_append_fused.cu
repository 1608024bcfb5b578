/* SPDX-License-Identifier: MIT
 *
 * Appends vectors to pages with RMS norm or RoPE (fmla_cache_append with a norm_weight or a rope_table).
 * Lanes hold units of a token as in cache_append.cu, and change them in registers before they are quantised.
 *
 *   position, slot, all units of the vector, weights   independent loads
 *   cosines and sines                                  in flight during the norm
 *   RMS norm   squares and sums in double, in the order of norm_sum_of_squares: in a lane, then across
 *   RoPE       by the lanes that have the last 64 values
 *
 * With few tokens a warp takes one (each_token). With many, half a warp takes one, while the loads of the
 * next tokens are in flight (each_of_many).
 *
 * An aligned call is also small (cache.c), so offsets are 32-bit products. Other calls have a kernel per type of
 * vectors that chooses the format at run time: with one per format, this file took twice as long to compile.
 *
 * Limit: with many tokens instructions, some 340 warp instructions per token of FP8_528 with norm and RoPE;
 * with few tokens two dependent memory accesses (the position, then its row of the table). Every rounding is
 * one of new_token.h; packing to 16 bits rounds in hardware, to nearest even.
 */
#define CACHE_KERNEL(NAME, call, ...)                                                                        \
    DEFINE_KERNEL(NAME, cache_params, (32 * CACHE_WARPS, FUSED_BLOCKS), call<__VA_ARGS__>(p))
#include "../device/append.cuh"

#include "../../new_token.h"

/* ---- Units as numbers ------------------------------------------------------------------------ */

/* The same as value_of, without the sign and payload of a NaN: sums and products make all NaNs the same. */
template <typename In> DEVICE float number_of(const uint4 &unit, int i)
{
    return In::to_float((uint16_t)(word_of(unit, i / 2) >> i % 2 * 16));
}
template <> DEVICE float number_of<F32>(const uint4 &unit, int i)
{
    return __uint_as_float(word_of(unit, i));
}

template <typename In> DEVICE uint4 unit_of(const float *x)
{
    return make_uint4(In::pack(x[0], x[1]), In::pack(x[2], x[3]), In::pack(x[4], x[5]), In::pack(x[6], x[7]));
}
template <> DEVICE uint4 unit_of<F32>(const float *x)
{
    return make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
                      __float_as_uint(x[3]));
}

/* ---- RMS norm -------------------------------------------------------------------------------- */

template <bool ALIGNED, typename In> DEVICE uint4 load_weights(const struct cache_params &p, int unit)
{
    constexpr int BYTES = 16 / Unit<In>::VALUES;
    const uint8_t *const at = (const uint8_t *)p.norm_weight + 16 * unit;
    return !p.norm_weight ? make_uint4(0, 0, 0, 0)
           : ALIGNED      ? __ldg((const uint4 *)at)
                          : load_elements<BYTES>(at);
}

/* The norm weights of a lane's values, the same for every token. */
template <bool ALIGNED, typename In, int LANES> struct Weights {
    static constexpr int ROUNDS = NORM_WIDTH / LANES / Unit<In>::VALUES;
    uint4 unit[ROUNDS];

    DEVICE explicit Weights(const struct cache_params &p)
    {
#pragma unroll
        for (int r = 0; r < ROUNDS; r++)
            unit[r] = load_weights<ALIGNED, In>(p, (int)threadIdx.x % LANES + LANES * r);
    }
    /* The asm keeps the conversion to fp32 here. If it were hoisted above the loop, it would wait for the
     * weights before the units are loaded. */
    DEVICE uint4 of_round(int r) const
    {
        uint4 x = unit[r];
        asm volatile("" : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w));
        return x;
    }
};

/* For many tokens, where registers are scarce: one copy in shared memory. All threads must call the
 * constructor. */
template <typename In> struct Weights<true, In, MANY_LANES> {
    uint4 *shared;

    DEVICE explicit Weights(const struct cache_params &p)
    {
        __shared__ uint4 memory[NORM_WIDTH / Unit<In>::VALUES];
        static_assert(sizeof memory / 16 <= 32 * CACHE_WARPS, "a unit a thread");
        shared = memory;
        if (threadIdx.x < sizeof memory / 16)
            memory[threadIdx.x] = load_weights<true, In>(p, (int)threadIdx.x);
        __syncthreads();
    }
    DEVICE uint4 of_round(int r) const { return shared[(int)threadIdx.x % MANY_LANES + MANY_LANES * r]; }
};

/* Returns norm_of_four of values first … first + 3 of a unit. */
template <typename In> DEVICE double squares_of_four(const uint4 &unit, int first)
{
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = number_of<In>(unit, first + i);
    return norm_of_four(x);
}

/* Returns the sum to all lanes of the token. A lane sums eight neighbouring values; with fp32 two lanes share
 * them. */
template <typename In, int LANES> DEVICE double sum_of_squares(const uint4 *unit)
{
    constexpr int VALUES = Unit<In>::VALUES, ROUNDS = NORM_WIDTH / LANES / VALUES;
    double sum[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        sum[r] = squares_of_four<In>(unit[r], 0);
        sum[r] += VALUES == 8 ? squares_of_four<In>(unit[r], 4) : __shfl_xor_sync(~0u, sum[r], 1);
    }
#pragma unroll
    for (int half = ROUNDS / 2; half; half /= 2)
#pragma unroll
        for (int r = 0; r < half; r++) sum[r] += sum[r + half];
#pragma unroll
    for (int lanes = LANES / 2; lanes >= 8 / VALUES; lanes /= 2)
        sum[0] += __shfl_xor_sync(~0u, sum[0], lanes);
    return sum[0];
}

/* The same as norm_factor. The reciprocal square root is within an ulp of the exact one, and that of the
 * definition, which is rounded twice, is hardly farther away. Both round to the same fp32 number unless one
 * of them could be next to the midpoint of two. Such values, and those that are not normal in fp32, take the
 * definition. */
DEVICE float fast_norm_factor(double sum_of_squares, double eps)
{
    constexpr int LOST = 29, MIDDLE = 1 << (LOST - 1),
                  AROUND = 64; /* LOST: bits of double that fp32 does not have */
    constexpr uint32_t LEAST = 0x38100000,
                       MOST = 0x47efffff; /* upper words of double: normal numbers of fp32 */
    const double mean = fma(sum_of_squares, 1.0 / NORM_WIDTH, eps);
    double first;
    asm("rsqrt.approx.ftz.f64 %0, %1;" : "=d"(first) : "d"(mean));
    const double error = fma(-mean, first * first, 1.0), /* about 2^-20; its third power is dropped */
        root = fma(first * error, fma(error, 0.375, 0.5), first);
    const uint32_t lost = (uint32_t)__double2loint(root) << (32 - LOST),
                   high = (uint32_t)__double2hiint(root);
    constexpr uint32_t FROM = (uint32_t)(MIDDLE - AROUND) << (32 - LOST), NEAR = (2u * AROUND) << (32 - LOST);
    if (SELDOM(lost - FROM <= NEAR || high - LEAST >= MOST - LEAST))
        return norm_factor(sum_of_squares, (float)eps);
    return (float)root;
}

template <bool ALIGNED, typename In, int LANES>
DEVICE void norm(const struct cache_params &p, uint4 *unit, const Weights<ALIGNED, In, LANES> &weights)
{
    constexpr int VALUES = Unit<In>::VALUES;
    const float factor = fast_norm_factor(sum_of_squares<In, LANES>(unit), p.norm_eps);
#pragma unroll
    for (int r = 0; r < NORM_WIDTH / LANES / VALUES; r++) {
        float x[VALUES];
        const uint4 weight = weights.of_round(r);
#pragma unroll
        for (int i = 0; i < VALUES; i++)
            x[i] = norm_value(number_of<In>(unit[r], i), factor, number_of<In>(weight, i));
        unit[r] = unit_of<In>(x);
    }
}

/* ---- RoPE ------------------------------------------------------------------------------------ */

/* Cosines and sines for the lanes that have the last 64 values, one unit each. A pair of neighbours is within
 * a unit and shares one cosine; a pair of halves is in two units, half as many lanes apart. */
template <typename In> struct Rotation {
    static constexpr int VALUES = Unit<In>::VALUES, OWNERS = ROPE_WIDTH / VALUES;
    float cosine[VALUES], sine[VALUES];

    /* j: the index of the lane among the owners */
    template <bool SMALL> DEVICE void load(const struct cache_params &p, int64_t position, int j)
    {
        const float *row =
            (const float *)((const uint8_t *)p.rope_table + steps_of<SMALL>(position, p.table_stride) * 4);
        if (p.halves) {
            row += j % (OWNERS / 2) * VALUES;
            take<SMALL, VALUES>(cosine, row), take<SMALL, VALUES>(sine, row + ROPE_PAIRS);
        } else {
            row += j * (VALUES / 2);
            take<SMALL, VALUES / 2>(cosine, row), take<SMALL, VALUES / 2>(sine, row + ROPE_PAIRS);
        }
    }

    template <bool ALIGNED, int COUNT> static DEVICE void take(float *to, const float *from)
    {
#pragma unroll
        for (int i = 0; i < COUNT; i += 4) {
            if constexpr (ALIGNED && COUNT % 4 == 0) {
                const float4 four = __ldg((const float4 *)(from + i));
                to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
            } else if constexpr (ALIGNED) {
                const float2 two = __ldg((const float2 *)from);
                to[0] = two.x, to[1] = two.y;
            } else {
#pragma unroll
                for (int k = i; k < i + 4 && k < COUNT; k++) to[k] = __ldg(from + k);
            }
        }
    }

    /* Returns the rotated unit to the owners. All lanes must call. */
    DEVICE uint4 rotated(const struct cache_params &p, const uint4 &unit, int j) const
    {
        float x[VALUES];
        if (p.halves) {
            uint4 other;
            other.x = __shfl_xor_sync(~0u, unit.x, OWNERS / 2),
            other.y = __shfl_xor_sync(~0u, unit.y, OWNERS / 2);
            other.z = __shfl_xor_sync(~0u, unit.z, OWNERS / 2),
            other.w = __shfl_xor_sync(~0u, unit.w, OWNERS / 2);
            const float sign = j < OWNERS / 2 ? -1.0f : 1.0f;
#pragma unroll
            for (int i = 0; i < VALUES; i++)
                x[i] = rope_value(number_of<In>(unit, i), number_of<In>(other, i), cosine[i], sign * sine[i]);
        } else {
#pragma unroll
            for (int i = 0; i < VALUES; i++)
                x[i] = rope_value(number_of<In>(unit, i), number_of<In>(unit, i ^ 1), cosine[i / 2],
                                  i % 2 ? sine[i / 2] : -sine[i / 2]);
        }
        return unit_of<In>(x);
    }
};

/* ---- A token --------------------------------------------------------------------------------- */

/* A token's slot and position. The slot of a token that does not exist is -1. */
template <bool SMALL> struct Ahead {
    int64_t slot;
    uint2 loaded; /* the position as loaded, 32 or 64 bits; arithmetic on it would wait for the load */

    DEVICE Ahead(const struct cache_params &p, int64_t token, bool exists)
        : slot(-1), loaded(make_uint2(0, 0))
    {
        if (!exists) return;
        slot = __ldg(p.slots + token);
        if (!p.rotates) return;
        const uint32_t *const at = (const uint32_t *)p.positions + (p.wide_positions ? 2 * token : token);
        loaded.x = __ldg(at);
        if (p.wide_positions) loaded.y = __ldg(at + 1);
    }
    DEVICE int64_t position(const struct cache_params &p) const
    {
        if (SMALL) return loaded.x;
        return p.wide_positions ? (int64_t)((uint64_t)loaded.y << 32 | loaded.x) : (int32_t)loaded.x;
    }
    DEVICE bool has_row(const struct cache_params &p) const
    {
        if (SMALL) return !loaded.y && loaded.x < (uint32_t)p.table_rows;
        return (uint64_t)position(p) < (uint64_t)p.table_rows;
    }
};

/* Loads a lane's units of one vector after another. Only the round of the last 64 values can be in `rope`. */
template <bool ALIGNED, typename In, int LANES, int D_QK> struct Vectors {
    static constexpr int VALUES = Unit<In>::VALUES, BYTES = 16 / VALUES,
                         ROUNDS = (D_QK / VALUES + LANES - 1) / LANES,
                         LAST = (D_QK - ROPE_WIDTH) / (LANES * VALUES);
    const uint8_t *latent, *last;
    int64_t latent_step, last_step;

    DEVICE Vectors(const struct cache_params &p, int64_t token, int64_t step)
    {
        const int lane = threadIdx.x % LANES, of_last = (LAST * LANES + lane) * VALUES;
        const bool rope = of_last >= p.latent_width;
        latent = (const uint8_t *)p.latent + (token * p.latent_stride + lane * VALUES) * BYTES;
        last = rope ? (const uint8_t *)p.rope + (token * p.rope_stride + of_last - p.latent_width) * BYTES
                    : (const uint8_t *)p.latent + (token * p.latent_stride + of_last) * BYTES;
        latent_step = step * p.latent_stride * BYTES;
        last_step = rope ? step * p.rope_stride * BYTES : latent_step;
    }
    DEVICE void advance() { latent += latent_step, last += last_step; }

    DEVICE void load(bool exists, uint4 (&unit)[ROUNDS]) const
    {
        const bool has_last = ((int)(threadIdx.x % LANES) + LANES * LAST) * VALUES < D_QK;
#pragma unroll
        for (int r = 0; r < ROUNDS; r++) unit[r] = make_uint4(0, 0, 0, 0);
        if (!exists) return;
        load_latent<0>(unit);
        if (has_last) unit[LAST] = take<0>(last);
    }
    template <int R> DEVICE void load_latent(uint4 (&unit)[ROUNDS]) const
    {
        if constexpr (R < LAST) unit[R] = take<R * LANES * 16>(latent), load_latent<R + 1>(unit);
    }
    template <int OFFSET> static DEVICE uint4 take(const uint8_t *from)
    {
        if constexpr (ALIGNED) return load_once_16<OFFSET>(from);
        return load_elements<BYTES>(from + OFFSET);
    }
};

/* A lane's state for all tokens: the weights of its values, and the unit to which it applies RoPE, if any. */
template <bool ALIGNED, typename In, int LANES, int D_QK> struct Change {
    using From = Vectors<ALIGNED, In, LANES, D_QK>;
    static constexpr int FIRST_OWNER = (D_QK - ROPE_WIDTH) / Unit<In>::VALUES % LANES;
    Weights<ALIGNED, In, LANES> weights;
    int owner;
    bool owns;
    Rotation<In> rotation;

    DEVICE explicit Change(const struct cache_params &p)
        : weights(p), owner((int)(threadIdx.x % LANES) - FIRST_OWNER),
          owns(owner >= 0 && owner < Rotation<In>::OWNERS)
    {
    }
    /* Loads the table row ahead of its use. A token whose position has no row is not stored. */
    DEVICE void load_row(const struct cache_params &p, Ahead<ALIGNED> &ahead)
    {
        if (!p.rotates) return;
        if (!ahead.has_row(p))
            ahead.slot = -1;
        else if (owns)
            rotation.template load<ALIGNED>(p, ahead.position(p), owner);
    }
    DEVICE void norm_units(const struct cache_params &p, uint4 (&unit)[From::ROUNDS]) const
    {
        if (p.norm_weight) norm<ALIGNED, In, LANES>(p, unit, weights);
    }
    DEVICE void rotate_unit(const struct cache_params &p, uint4 (&unit)[From::ROUNDS]) const
    {
        if (!p.rotates) return;
        const uint4 rotated = rotation.rotated(p, unit[From::LAST], owner);
        if (owns) unit[From::LAST] = rotated;
    }
};

/* Few tokens: a warp takes one. `To` stores it. */
template <bool ALIGNED, typename In, int D_QK, typename To>
DEVICE void each_token(const struct cache_params &p)
{
    using From = Vectors<ALIGNED, In, 32, D_QK>;
    const int64_t step = (int64_t)gridDim.x * CACHE_WARPS;
    int64_t token = (int64_t)blockIdx.x * CACHE_WARPS + threadIdx.x / 32;
    if (token >= p.tokens) return;
    Ahead<ALIGNED> ahead(p, token, true); /* first, because the load of the table row waits for it */
    From vectors(p, token, step);
    uint4 unit[From::ROUNDS];
    vectors.load(true, unit);
    Change<ALIGNED, In, 32, D_QK> change(p);
    for (;;) {
        __syncwarp();
        change.load_row(p, ahead);
        if (is_slot(p, ahead.slot)) {
            change.norm_units(p, unit);
            change.rotate_unit(p, unit);
            To::template store<32>(p, unit, ahead.slot, true);
        }
        token += step;
        if (token >= p.tokens) return;
        vectors.advance();
        ahead = Ahead<ALIGNED>(p, token, true);
        vectors.load(true, unit);
    }
}

/* Many tokens: LANES lanes take one, and a warp several at a time, so that per-token instructions serve
 * several tokens. Meanwhile the units of the warp's next tokens are in flight and, after RoPE, their table
 * rows. */
template <typename In, int LANES, int D_QK, typename To>
DEVICE void each_of_many(const struct cache_params &p)
{
    using From = Vectors<true, In, LANES, D_QK>;
    constexpr int OF_WARP = 32 / LANES;
    const int step = (int)gridDim.x * (CACHE_WARPS * OF_WARP),
              first = ((int)blockIdx.x * CACHE_WARPS + (int)threadIdx.x / 32) * OF_WARP,
              which = (int)(threadIdx.x % 32) / LANES; /* the lane's token among the warp's */
    int left = (int)p.tokens - first;                  /* from the warp's first token on */
    From vectors(p, first + which, step);
    Change<true, In, LANES, D_QK> change(p);
    if (left <= 0) return;
    Ahead<true> own(p, first + which, which < left);
    uint4 unit[From::ROUNDS];
    vectors.load(which < left, unit);
    change.load_row(p, own);
    Ahead<true> next(p, first + which + step, which + step < left);
    for (;;) {
        uint4 following[From::ROUNDS];
        vectors.advance();
        vectors.load(which + step < left, following);
        change.norm_units(p, unit);
        change.rotate_unit(p, unit);
        change.load_row(p, next);
        const Ahead<true> after(p, (int)p.tokens - left + which + 2 * step, which + 2 * step < left);
        const bool valid = is_slot(p, own.slot);
        To::template store<LANES>(p, unit, valid ? own.slot : 0, valid);
        if (left <= step) return;
        left -= step, own = next, next = after;
#pragma unroll
        for (int r = 0; r < From::ROUNDS; r++) unit[r] = following[r];
    }
}

/* Stores a lane's units to the cache. */
template <bool ALIGNED, typename In, int FORMAT> struct Quantised {
    template <int LANES, int ROUNDS>
    static DEVICE void store(const struct cache_params &p, const uint4 (&unit)[ROUNDS], int64_t slot,
                             bool valid)
    {
        store_quantised<ALIGNED, In, FORMAT, ALIGNED, LANES>(p, unit, slot, valid);
    }
};

template <bool ALIGNED, typename In, typename To, int D_QK> struct As16 {
    template <int LANES, int ROUNDS>
    static DEVICE void store(const struct cache_params &p, const uint4 (&unit)[ROUNDS], int64_t slot,
                             bool valid)
    {
        constexpr int VALUES = Unit<In>::VALUES;
        uint8_t *const values = slot_address<ALIGNED>(p, slot).values;
#pragma unroll
        for (int r = 0; r < ROUNDS; r++) {
            const int first = ((int)(threadIdx.x % LANES) + LANES * r) * VALUES;
            if (first < D_QK && valid) store_unit<ALIGNED, In, To>(values + 2 * first, unit[r]);
        }
    }
};

/* ---- The kernels ----------------------------------------------------------------------------- */

template <typename In, int D_QK, typename To> DEVICE void append(const struct cache_params &p)
{
    if constexpr (Unit<In>::VALUES == 8) {
        if (p.many)
            each_of_many<In, MANY_LANES, D_QK, To>(p);
        else
            each_token<true, In, D_QK, To>(p);
    } else {
        each_token<true, In, D_QK, To>(p);
    }
}

template <typename In, int FORMAT> DEVICE void append_fp8(const struct cache_params &p)
{
    constexpr int D_QK = FORMAT == KV_FP8_656 || FORMAT == KV_FP8_576 ? 576 : 512;
    append<In, D_QK, Quantised<true, In, FORMAT>>(p);
}

template <typename In, typename To> DEVICE void append_16(const struct cache_params &p)
{
    if (p.d_qk == 576)
        append<In, 576, As16<true, In, To, 576>>(p);
    else
        append<In, 512, As16<true, In, To, 512>>(p);
}

CACHE_KERNELS(cache_append_fused, append_16, append_fp8)

/* Stores to a cache of any format that is as wide, at any address. */
template <typename In, int D_QK> struct AnyFormat {
    template <int FORMAT, int LANES, int ROUNDS>
    static DEVICE bool quantised(const struct cache_params &p, const uint4 (&unit)[ROUNDS], int64_t slot,
                                 bool valid)
    {
        if (p.format != FORMAT) return false;
        Quantised<false, In, FORMAT>::template store<LANES>(p, unit, slot, valid);
        return true;
    }
    template <int LANES, int ROUNDS>
    static DEVICE void store(const struct cache_params &p, const uint4 (&unit)[ROUNDS], int64_t slot,
                             bool valid)
    {
        if (p.format == KV_BF16)
            return As16<false, In, Bf16, D_QK>::template store<LANES>(p, unit, slot, valid);
        if (p.format == KV_FP16)
            return As16<false, In, Fp16, D_QK>::template store<LANES>(p, unit, slot, valid);
        if constexpr (D_QK == 576) {
            if (!quantised<KV_FP8_656, LANES>(p, unit, slot, valid))
                quantised<KV_FP8_576, LANES>(p, unit, slot, valid);
        } else {
            quantised<KV_FP8_584, LANES>(p, unit, slot, valid) ||
                quantised<KV_FP8_528, LANES>(p, unit, slot, valid) ||
                quantised<KV_FP8_528_SPLIT, LANES>(p, unit, slot, valid) ||
                quantised<KV_FP4_288, LANES>(p, unit, slot, valid) ||
                quantised<KV_FP4_288_SPLIT, LANES>(p, unit, slot, valid) ||
                quantised<KV_FP8_528_F32, LANES>(p, unit, slot, valid);
        }
    }
};

template <typename In> DEVICE void append_any(const struct cache_params &p)
{
    if (p.d_qk == 576)
        each_token<false, In, 576, AnyFormat<In, 576>>(p);
    else
        each_token<false, In, 512, AnyFormat<In, 512>>(p);
}

CACHE_KERNEL(cache_append_fused_any_bf16, append_any, Bf16)
CACHE_KERNEL(cache_append_fused_any_fp16, append_any, Fp16)
CACHE_KERNEL(cache_append_fused_any_fp32, append_any, F32)

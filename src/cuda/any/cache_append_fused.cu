/* SPDX-License-Identifier: MIT
 *
 * New vectors into pages, normed or turned on the way (fmla_cache_append with a norm_weight or a rope_table): a warp a token, as in
 * cache_append.cu, whose units are changed in registers before they are quantised.
 *
 *   position, slot, all units of the vector, weights   loads that do not wait for each other
 *   cosines and sines                                  on their way while the norm is worked out
 *   RMS norm   squares and sums in double, in the order of norm_sum_of_squares: a lane's own, then between lanes
 *   RoPE       two values a lane, which come from the lanes that have them, and go back
 *
 * What is aligned here is also small (cache.c): products of 32 bits say where something is.
 *
 * Limit: memory for many tokens, two trips to memory one behind the other (position, then its row of the table) for few. Every
 * rounding is one of new_token.h; what is packed to 16 bits is rounded by the hardware, to nearest even.
 */
#define CACHE_KERNEL(NAME, call, ...)                                                                        \
    DEFINE_KERNEL(NAME, cache_params, (32 * CACHE_WARPS, FUSED_BLOCKS),                                      \
                  if (p.aligned) call<true, __VA_ARGS__>(p);                                                 \
                  else call<false, __VA_ARGS__>(p))
#include "../device/append.cuh"

#include "../../new_token.h"

/* ---- Units as numbers ------------------------------------------------------------------------ */

/* Of a NaN neither sign nor digits matter here: sums and products make all NaNs one. */
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

/* The weights of a lane's values, which are those of every token. */
template <bool ALIGNED, typename In> struct Weights {
    static constexpr int VALUES = Unit<In>::VALUES, ROUNDS = NORM_WIDTH / 32 / VALUES, BYTES = 16 / VALUES;
    uint4 unit[ROUNDS];

    DEVICE explicit Weights(const struct cache_params &p)
    {
#pragma unroll
        for (int r = 0; r < ROUNDS; r++) {
            const uint8_t *const at =
                (const uint8_t *)p.norm_weight + ((threadIdx.x & 31) + 32 * r) * VALUES * BYTES;
            unit[r] = make_uint4(0, 0, 0, 0);
            if (p.norm_weight) unit[r] = ALIGNED ? __ldg((const uint4 *)at) : load_elements<BYTES>(at);
        }
    }
};

/* In all lanes. A sum of eight neighbours is a lane's, of fp32 two lanes'. */
template <typename In> DEVICE double sum_of_squares(const float (&x)[NORM_WIDTH / 32])
{
    double sum;
    if constexpr (Unit<In>::VALUES == 8) {
        sum = (norm_of_four(x) + norm_of_four(x + 4)) + (norm_of_four(x + 8) + norm_of_four(x + 12));
#pragma unroll
        for (int lanes = 16; lanes; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    } else {
        double four[4];
#pragma unroll
        for (int r = 0; r < 4; r++) {
            four[r] = norm_of_four(x + 4 * r);
            four[r] += __shfl_xor_sync(~0u, four[r], 1);
        }
        sum = (four[0] + four[2]) + (four[1] + four[3]);
#pragma unroll
        for (int lanes = 16; lanes > 1; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    }
    return sum;
}

/* norm_factor. The reciprocal root is within an ulp of the exact one, and the definition's, which is rounded twice, hardly farther:
 * where none of both could be beside the middle between two fp32 both round to the same. Others go by the definition. */
__device__ __noinline__ float exact_norm_factor(double sum_of_squares, float eps)
{
    return norm_factor(sum_of_squares, eps);
}

DEVICE float fast_norm_factor(double sum_of_squares, float eps)
{
    constexpr int LOST = 29, MIDDLE = 1 << (LOST - 1),
                  AROUND = 64;                           /* bits of double that fp32 does not have */
    constexpr int LEAST = 0x38100000, MOST = 0x47efffff; /* upper words of double: fp32's normal numbers */
    const double root = rsqrt(fma(sum_of_squares, 1.0 / NORM_WIDTH, (double)eps));
    const int lost = __double2loint(root) & ((1 << LOST) - 1), high = __double2hiint(root);
    const bool certain = abs(lost - MIDDLE) > AROUND && high >= LEAST && high < MOST;
    return certain ? (float)root : exact_norm_factor(sum_of_squares, eps);
}

template <bool ALIGNED, typename In>
DEVICE void norm(const struct cache_params &p, uint4 *unit, const Weights<ALIGNED, In> &weights)
{
    constexpr int VALUES = Unit<In>::VALUES;
    float x[NORM_WIDTH / 32];
#pragma unroll
    for (int i = 0; i < NORM_WIDTH / 32; i++) {
        x[i] = number_of<In>(unit[i / VALUES], i % VALUES);
        asm volatile("" : "+f"(x[i])); /* else they are made a second time below */
    }
    const float factor = fast_norm_factor(sum_of_squares<In>(x), p.norm_eps);
#pragma unroll
    for (int i = 0; i < NORM_WIDTH / 32; i++)
        x[i] = norm_value(x[i], factor, number_of<In>(weights.unit[i / VALUES], i % VALUES));
#pragma unroll
    for (int r = 0; r < NORM_WIDTH / 32 / VALUES; r++) unit[r] = unit_of<In>(x + r * VALUES);
}

/* ---- RoPE ------------------------------------------------------------------------------------ */

/* Word k of the last units, of which lane `base` has the first four: 0 … 31, of fp32 … 63. Who asks is every lane. */
DEVICE uint32_t last_word(const uint4 &unit, int base, int k)
{
    const int from = base + k / 4, word = k % 4;
    const uint32_t x = __shfl_sync(~0u, unit.x, from), y = __shfl_sync(~0u, unit.y, from),
                   z = __shfl_sync(~0u, unit.z, from), w = __shfl_sync(~0u, unit.w, from);
    return word & 2 ? (word & 1 ? w : z) : (word & 1 ? y : x);
}

template <bool SMALL> DEVICE const float *rope_row(const struct cache_params &p, int64_t position)
{
    return (const float *)((const uint8_t *)p.rope_table + steps_of<SMALL>(position, p.table_stride) * 4);
}

/* Every lane turns two of the 64 values, with the cosines and sines that it loads ahead: of 16 bits those of word `lane`, of fp32
 * pair `lane`. */
template <typename In> struct Turn {
    float cosine[2], sine[2];

    template <bool SMALL> DEVICE void load(const struct cache_params &p, int64_t position)
    {
        const int lane = threadIdx.x & 31, first = p.halves ? lane % 16 * 2 : lane;
        const float *const row = rope_row<SMALL>(p, position) + first;
        const int second = p.halves ? 1 : 0;
        cosine[0] = __ldg(row), cosine[1] = __ldg(row + second);
        sine[0] = __ldg(row + ROPE_PAIRS), sine[1] = __ldg(row + ROPE_PAIRS + second);
    }

    DEVICE uint4 turned(const struct cache_params &p, const uint4 &unit, int base) const
    {
        const int lane = threadIdx.x & 31;
        const uint32_t word = last_word(unit, base, lane);
        const float low = In::to_float((uint16_t)word), high = In::to_float((uint16_t)(word >> 16));
        float other_of_low = high, other_of_high = low, first = -1.0f, second = 1.0f;
        if (p.halves) {
            const uint32_t other = __shfl_xor_sync(~0u, word, 16);
            other_of_low = In::to_float((uint16_t)other),
            other_of_high = In::to_float((uint16_t)(other >> 16));
            first = second = lane < 16 ? -1.0f : 1.0f;
        }
        const uint32_t made = In::pack(rope_value(low, other_of_low, cosine[0], first * sine[0]),
                                       rope_value(high, other_of_high, cosine[1], second * sine[1]));
        const int from = 4 * (lane - base);
        uint4 turned;
        turned.x = __shfl_sync(~0u, made, from), turned.y = __shfl_sync(~0u, made, from + 1);
        turned.z = __shfl_sync(~0u, made, from + 2), turned.w = __shfl_sync(~0u, made, from + 3);
        return turned;
    }
};

template <> struct Turn<F32> {
    float cosine, sine;

    template <bool SMALL> DEVICE void load(const struct cache_params &p, int64_t position)
    {
        const float *const row = rope_row<SMALL>(p, position) + (threadIdx.x & 31);
        cosine = __ldg(row), sine = __ldg(row + ROPE_PAIRS);
    }

    DEVICE uint4 turned(const struct cache_params &p, const uint4 &unit, int base) const
    {
        const int lane = threadIdx.x & 31;
        const float a = __uint_as_float(last_word(unit, base, p.halves ? lane : 2 * lane)),
                    b = __uint_as_float(last_word(unit, base, p.halves ? lane + 32 : 2 * lane + 1));
        const float first = rope_value(a, b, cosine, -sine), second = rope_value(b, a, cosine, sine);
        float turned[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int value = 4 * (lane - base) + i, from = p.halves ? value : value / 2;
            const float of_first = __shfl_sync(~0u, first, from), of_second = __shfl_sync(~0u, second, from);
            turned[i] = (p.halves ? value < 32 : i % 2 == 0) ? of_first : of_second;
        }
        return unit_of<F32>(turned);
    }
};

/* ---- A token --------------------------------------------------------------------------------- */

DEVICE int64_t load_position(const struct cache_params &p, int64_t token)
{
    return p.wide_positions ? __ldg((const int64_t *)p.positions + token)
                            : __ldg((const int32_t *)p.positions + token);
}

/* Loads a token's units, and changes them; false: the token is skipped. d_qk is 512 or 576. */
template <bool ALIGNED, typename In, int ROUNDS>
DEVICE bool load_changed(const struct cache_params &p, const Weights<ALIGNED, In> &weights, int64_t token,
                         int64_t slot, int d_qk, uint4 (&unit)[ROUNDS])
{
    constexpr int VALUES = Unit<In>::VALUES;
    const int lane = threadIdx.x & 31;
    const int64_t position = p.turns ? load_position(p, token) : 0;
    const VectorPlace<In, ALIGNED> vector(p, token);
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        const int first = (lane + 32 * r) * VALUES;
        unit[r] = make_uint4(0, 0, 0, 0);
        if (32 * (r + 1) * VALUES <= d_qk - ROPE_WIDTH) /* never of `rope` */
            unit[r] = vector.template load_latent<ALIGNED>(first);
        else if (first < d_qk)
            unit[r] = vector.template load_unit<ALIGNED>(first);
    }
    __syncwarp();
    if (!is_slot(p, slot)) return false;
    Turn<In> turn;
    if (p.turns) {
        if ((uint64_t)position >= (uint64_t)p.table_rows) return false;
        turn.template load<ALIGNED>(p, position);
    }
    if (p.norm_weight) norm<ALIGNED, In>(p, unit, weights);
    if (p.turns) {
        const int rope = d_qk - ROPE_WIDTH, round = rope / (32 * VALUES), base = rope / VALUES % 32;
        const bool has = lane >= base && lane < base + ROPE_WIDTH / VALUES;
        uint4 last = unit[0];
#pragma unroll
        for (int r = 1; r < ROUNDS; r++)
            if (r == round) last = unit[r];
        last = turn.turned(p, last, base);
#pragma unroll
        for (int r = 1; r < ROUNDS; r++)
            if (r == round && has) unit[r] = last;
    }
    return true;
}

/* Calls append(token, slot) of this warp's tokens. What is aligned has fewer than 2^31 of them, and fewer than 2^15 are a step. */
template <bool ALIGNED> struct CountOf {
    using Type = uint32_t;
};
template <> struct CountOf<false> {
    using Type = int64_t;
};

template <bool ALIGNED, typename Token> DEVICE void each_token(const struct cache_params &p, Token append)
{
    using Count = typename CountOf<ALIGNED>::Type;
    const Count step = (Count)gridDim.x * CACHE_WARPS, tokens = (Count)p.tokens;
    for (Count token = (Count)blockIdx.x * CACHE_WARPS + threadIdx.x / 32; token < tokens; token += step)
        append(token, __ldg(p.slots + token));
}

template <bool ALIGNED, typename In, int FORMAT> DEVICE void append_fp8(const struct cache_params &p)
{
    constexpr int VALUES = Unit<In>::VALUES, MOST = 576, ROUNDS = (MOST / VALUES + 31) / 32;
    const struct kv_layout l = kv_layout_of((enum kv_format)FORMAT, 0);
    const Weights<ALIGNED, In> weights(p);
    each_token<ALIGNED>(p, [&](int64_t token, int64_t slot) {
        uint4 unit[ROUNDS];
        if (load_changed<ALIGNED, In>(p, weights, token, slot, l.nope + l.rope, unit))
            store_quantised<ALIGNED, In, FORMAT, ALIGNED>(p, unit, slot);
    });
}

template <bool ALIGNED, typename In, typename To> DEVICE void append_16(const struct cache_params &p)
{
    constexpr int VALUES = Unit<In>::VALUES, ROUNDS = (576 / VALUES + 31) / 32;
    const Weights<ALIGNED, In> weights(p);
    each_token<ALIGNED>(p, [&](int64_t token, int64_t slot) {
        uint4 unit[ROUNDS];
        if (!load_changed<ALIGNED, In>(p, weights, token, slot, p.d_qk, unit)) return;
        uint8_t *const values = slot_place<ALIGNED>(p, slot).values;
#pragma unroll
        for (int r = 0; r < ROUNDS; r++) {
            const int first = ((threadIdx.x & 31) + 32 * r) * VALUES;
            if (first < p.d_qk) store_unit<ALIGNED, In, To>(values + 2 * first, unit[r]);
        }
    });
}

CACHE_KERNELS(cache_append_fused, append_16, append_fp8)

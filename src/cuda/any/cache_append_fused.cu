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

/* norm_of_four of values first … first + 3 of a unit. Conversions to double are slow, but of a pipe that has nothing else to do: to move bits in
 * their place takes instructions of the pipe that is the limit. */
template <typename In> DEVICE double squares_of_four(const uint4 &unit, int first)
{
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = number_of<In>(unit, first + i);
    return norm_of_four(x);
}

/* In all lanes. A sum of eight neighbours is a lane's, of fp32 two lanes'. */
template <typename In> DEVICE double sum_of_squares(const uint4 *unit)
{
    double sum;
    if constexpr (Unit<In>::VALUES == 8) {
        sum = (squares_of_four<In>(unit[0], 0) + squares_of_four<In>(unit[0], 4)) +
              (squares_of_four<In>(unit[1], 0) + squares_of_four<In>(unit[1], 4));
#pragma unroll
        for (int lanes = 16; lanes; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    } else {
        double four[4];
#pragma unroll
        for (int r = 0; r < 4; r++) {
            four[r] = squares_of_four<In>(unit[r], 0);
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
DEVICE float fast_norm_factor(double sum_of_squares, double eps)
{
    constexpr int LOST = 29, MIDDLE = 1 << (LOST - 1),
                  AROUND = 64;                             /* bits of double that fp32 does not have */
    constexpr uint32_t LEAST = 0x38100000, MOST = 0x47efffff; /* upper words of double: fp32's normal numbers */
    const double mean = fma(sum_of_squares, 1.0 / NORM_WIDTH, eps);
    double first;
    asm("rsqrt.approx.ftz.f64 %0, %1;" : "=d"(first) : "d"(mean));
    const double error = fma(-mean, first * first, 1.0), /* some 2^-20, of which the third power is lost */
        root = fma(first * error, fma(error, 0.375, 0.5), first);
    const uint32_t lost = (uint32_t)__double2loint(root) << (32 - LOST), high = (uint32_t)__double2hiint(root);
    constexpr uint32_t FROM = (uint32_t)(MIDDLE - AROUND) << (32 - LOST), NEAR = (2u * AROUND) << (32 - LOST);
    if (SELDOM(lost - FROM <= NEAR || high - LEAST >= MOST - LEAST))
        return norm_factor(sum_of_squares, (float)eps);
    return (float)root;
}

template <bool ALIGNED, typename In>
DEVICE void norm(const struct cache_params &p, uint4 *unit, const Weights<ALIGNED, In> &weights)
{
    constexpr int VALUES = Unit<In>::VALUES;
    const float factor = fast_norm_factor(sum_of_squares<In>(unit), p.norm_eps);
#pragma unroll
    for (int r = 0; r < NORM_WIDTH / 32 / VALUES; r++) {
        float x[VALUES];
#pragma unroll
        for (int i = 0; i < VALUES; i++)
            x[i] = norm_value(number_of<In>(unit[r], i), factor, number_of<In>(weights.unit[r], i));
        unit[r] = unit_of<In>(x);
    }
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

/* Where a token goes and stands. A warp loads this of its next token while it works at one. */
struct Ahead {
    int64_t slot;
    uint2 loaded; /* the position, of 32 or 64 bits: what is worked out with it would wait for it */

    DEVICE Ahead(const struct cache_params &p, int64_t token)
        : slot(__ldg(p.slots + token)), loaded(make_uint2(0, 0))
    {
        if (!p.turns) return;
        if (p.wide_positions)
            loaded = __ldg((const uint2 *)p.positions + token);
        else
            loaded.x = __ldg((const uint32_t *)p.positions + token);
    }
    DEVICE int64_t position(const struct cache_params &p) const
    {
        return p.wide_positions ? (int64_t)((uint64_t)loaded.y << 32 | loaded.x) : (int32_t)loaded.x;
    }
    DEVICE bool has_row(const struct cache_params &p) const
    {
        return (uint64_t)position(p) < (uint64_t)p.table_rows;
    }
};

enum { SECTOR = 32 /* bytes that come from memory together */ };

DEVICE void prefetch_to_l2(const void *at)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

template <bool ALIGNED, typename In> DEVICE void prefetch_vector(const struct cache_params &p, int64_t token)
{
    constexpr int BYTES = 16 / Unit<In>::VALUES;
    const VectorPlace<In, ALIGNED> vector(p, token);
#pragma unroll
    for (int at = 0; at < NORM_WIDTH * BYTES; at += 32 * SECTOR)
        prefetch_to_l2(vector.at((at + (int)(threadIdx.x & 31) * SECTOR) / BYTES));
}

template <bool ALIGNED> DEVICE void prefetch_row(const struct cache_params &p, const Ahead &next)
{
    const int lane = threadIdx.x & 31;
    if (lane < ROPE_WIDTH * 4 / SECTOR && next.has_row(p))
        prefetch_to_l2((const uint8_t *)rope_row<ALIGNED>(p, next.position(p)) + lane * SECTOR);
}

/* Loads a token's units, and changes them; false: the token is skipped. d_qk is 512 or 576. */
template <bool ALIGNED, typename In, int ROUNDS>
DEVICE bool load_changed(const struct cache_params &p, const Weights<ALIGNED, In> &weights, int64_t token,
                         const Ahead &own, const Ahead &next, int d_qk, uint4 (&unit)[ROUNDS])
{
    constexpr int VALUES = Unit<In>::VALUES;
    const int lane = threadIdx.x & 31;
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
    if (!is_slot(p, own.slot)) return false;
    Turn<In> turn;
    if (p.turns) {
        if (!own.has_row(p)) return false;
        turn.template load<ALIGNED>(p, own.position(p));
        prefetch_row<ALIGNED>(p, next);
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

/* What is aligned has fewer than 2^31 tokens, and fewer than 2^15 are a step. */
template <bool ALIGNED> struct CountOf {
    using Type = uint32_t;
};
template <> struct CountOf<false> {
    using Type = int64_t;
};

/* Calls store(unit, slot) of each of the warp's tokens. */
template <bool ALIGNED, typename In, typename Store>
DEVICE void each_token(const struct cache_params &p, int d_qk, Store store)
{
    using Count = typename CountOf<ALIGNED>::Type;
    const Count step = (Count)gridDim.x * CACHE_WARPS, tokens = (Count)p.tokens;
    Count token = (Count)blockIdx.x * CACHE_WARPS + threadIdx.x / 32;
    if (token >= tokens) return;
    const Weights<ALIGNED, In> weights(p);
    Ahead own(p, token);
    for (;;) {
        const Count follows = token + step;
        Ahead next = own;
        if (follows < tokens) {
            next = Ahead(p, follows);
            prefetch_vector<ALIGNED, In>(p, follows);
        }
        uint4 unit[(576 / Unit<In>::VALUES + 31) / 32];
        if (load_changed<ALIGNED, In>(p, weights, token, own, next, d_qk, unit)) store(unit, own.slot);
        if (follows >= tokens) return;
        token = follows, own = next;
    }
}

template <bool ALIGNED, typename In, int FORMAT> DEVICE void append_fp8(const struct cache_params &p)
{
    const struct kv_layout l = kv_layout_of((enum kv_format)FORMAT, 0);
    each_token<ALIGNED, In>(p, l.nope + l.rope, [&](const auto &unit, int64_t slot) {
        store_quantised<ALIGNED, In, FORMAT, ALIGNED>(p, unit, slot);
    });
}

template <bool ALIGNED, typename In, typename To> DEVICE void append_16(const struct cache_params &p)
{
    each_token<ALIGNED, In>(p, p.d_qk, [&](const auto &unit, int64_t slot) {
        constexpr int VALUES = Unit<In>::VALUES;
        uint8_t *const values = slot_place<ALIGNED>(p, slot).values;
#pragma unroll
        for (int r = 0; r < (576 / VALUES + 31) / 32; r++) {
            const int first = ((threadIdx.x & 31) + 32 * r) * VALUES;
            if (first < p.d_qk) store_unit<ALIGNED, In, To>(values + 2 * first, unit[r]);
        }
    });
}

CACHE_KERNELS(cache_append_fused, append_16, append_fp8)

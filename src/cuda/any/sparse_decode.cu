/* SPDX-License-Identifier: MIT
 *
 * Sparse decode without tensor cores: every format and type, any alignment, any GPU. What Hopper's kernel refuses comes
 * here; it is not fast.
 *
 * A warp takes a row (query token, head) through the keys of its worker's pieces, one at a time: a lane has 16 columns of V,
 * four of every 128, and two of those that only K has. It finds 32 keys at a time, a lane one, and passes over entries that
 * name none. All in fp32.
 */
#include "../device/element.cuh"
#include "../device/fragment.h"
#include "../device/gather.cuh"
#include "../device/result.cuh"

static constexpr int D_V = 512, GROUPS = 4, GROUP_COLUMNS = D_V / GROUPS, OF_LANE = GROUP_COLUMNS / 32;
static constexpr int TAIL = 2 /* columns of a lane past D_V */;

/* A key's values in the columns of a lane. */
template <enum kv_format FORMAT> struct KeyValues {
    float v[GROUPS][OF_LANE], tail[TAIL];

    static __device__ __forceinline__ float scale_of(const uint8_t *scales, int column)
    {
        if constexpr (FORMAT == KV_FP8_656) return __ldg((const float *)scales + column / 128);
        return num_from_ue8m0(__ldg(scales + column / 64));
    }

    static __device__ __forceinline__ float value_16(const uint8_t *from)
    {
        const uint16_t bits = __ldg((const uint16_t *)from);
        return FORMAT == KV_FP16 ? Fp16::to_float(bits) : Bf16::to_float(bits);
    }

    __device__ __forceinline__ void load(const KeyPlace &key, int d_qk)
    {
        const struct kv_layout layout = kv_layout_of(FORMAT, 0);
        const int lane = (int)threadIdx.x % 32;
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            const int column = GROUP_COLUMNS * g + OF_LANE * lane;
            if constexpr (FORMAT == KV_FP8_656 || FORMAT == KV_FP8_584) {
                if (column < layout.nope) {
                    const float scale = scale_of(key.scales, column);
#pragma unroll
                    for (int e = 0; e < OF_LANE; e++)
                        v[g][e] =
                            num_from_bf16(num_to_bf16(num_from_e4m3(__ldg(key.token + column + e)) * scale));
                    continue;
                }
            }
            const int rope = FORMAT == KV_FP8_584 ? layout.rope_offset - 2 * layout.nope : 0;
#pragma unroll
            for (int e = 0; e < OF_LANE; e++) v[g][e] = value_16(key.token + rope + 2 * (column + e));
        }
        const int rope = FORMAT == KV_FP8_656 ? layout.rope_offset : 2 * D_V;
#pragma unroll
        for (int e = 0; e < TAIL; e++)
            tail[e] = d_qk > D_V ? value_16(key.token + rope + 2 * (TAIL * lane + e)) : 0.0f;
    }
};

template <enum kv_format FORMAT, typename Element> struct Row {
    const struct sparse_decode_params &p;
    const int token, head;
    float q[GROUPS][OF_LANE], q_tail[TAIL];
    float sum[GROUPS][OF_LANE], most, total;

    __device__ __forceinline__ Row(const struct sparse_decode_params &params, int row)
        : p(params), token(fast_divide(row, params.heads_divisor)), head(row - token * params.h_q)
    {
    }

    static __device__ __forceinline__ int lane() { return (int)threadIdx.x % 32; }

    __device__ __forceinline__ void load_q(int request)
    {
        const uint16_t *from = p.q + request * p.q_stride[0] + token * p.q_stride[1] + head * p.q_stride[2];
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
#pragma unroll
            for (int e = 0; e < OF_LANE; e++)
                q[g][e] = Element::to_float(__ldg(from + GROUP_COLUMNS * g + OF_LANE * lane() + e));
#pragma unroll
        for (int e = 0; e < TAIL; e++)
            q_tail[e] = p.d_qk > D_V ? Element::to_float(__ldg(from + D_V + TAIL * lane() + e)) : 0.0f;
    }

    __device__ __forceinline__ void add_key(const KeyPlace &key)
    {
        KeyValues<FORMAT> k;
        k.load(key, p.d_qk);
        float dot = 0.0f;
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
#pragma unroll
            for (int e = 0; e < OF_LANE; e++) dot = fmaf(q[g][e], k.v[g][e], dot);
#pragma unroll
        for (int e = 0; e < TAIL; e++) dot = fmaf(q_tail[e], k.tail[e], dot);
#pragma unroll
        for (int lanes = 16; lanes; lanes /= 2) dot += __shfl_xor_sync(~0u, dot, lanes);
        const float score = p.scale * dot, before = most;
        most = fmaxf(most, score);
        const float base = most == -INFINITY ? 0.0f : most;
        const float factor = before == -INFINITY ? 1.0f : expf(before - base), weight = expf(score - base);
        total = fmaf(total, factor, weight);
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
#pragma unroll
            for (int e = 0; e < OF_LANE; e++) sum[g][e] = fmaf(weight, k.v[g][e], sum[g][e] * factor);
    }

    __device__ __forceinline__ void store(const Piece &piece) const
    {
        const bool empty = total == 0.0f, direct = piece.slot == DIRECT;
        const float lse = empty ? -INFINITY : most + logf(total);
        const RowPlace place = {token, head};
        const float factor =
            (empty ? 0.0f : 1.0f / total) * (direct ? result_sink_factor(p.output.rules, head, lse) : 1.0f);
        const int64_t slot_row = piece.slot * ((int64_t)p.h_q * p.s_q) + (int64_t)token * p.h_q + head;
        const int64_t to = out_offset(p.output, piece.request, place);
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
#pragma unroll
            for (int e = 0; e < OF_LANE; e++) {
                const int column = GROUP_COLUMNS * g + OF_LANE * lane() + e;
                const float value = empty ? 0.0f : sum[g][e] * factor;
                if (direct)
                    p.output.out[to + column] = Element::from_float(value);
                else
                    p.split.slot_out[slot_row * D_V + slot_position(column)] = value;
            }
        if (lane()) return;
        if (direct)
            store_lse(p.output, piece.request, place, lse);
        else
            p.split.slot_lse[slot_row] = lse;
    }

    __device__ __forceinline__ void run(const Piece &piece)
    {
        const ListEnds ends = list_ends(p, piece.request);
        most = -INFINITY, total = 0.0f;
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
#pragma unroll
            for (int e = 0; e < OF_LANE; e++) sum[g][e] = 0.0f;
        load_q(piece.request);
#pragma unroll 1
        for (int64_t first = piece.begin; first < piece.end; first += 32) {
            const int64_t at = first + lane();
            KeyPlace mine = {NULL, NULL};
            if (at < piece.end)
                mine = key_place<FORMAT>(p.cache[at >= ends.extra_begin],
                                         list_entry(p, ends, piece.request, token, (int)at));
            uint32_t there = __ballot_sync(~0u, mine.token != NULL);
#pragma unroll 1
            for (; there; there &= there - 1) {
                const int source = __ffs((int)there) - 1;
                const KeyPlace key = {
                    (const uint8_t *)__shfl_sync(~0u, (unsigned long long)mine.token, source),
                    (const uint8_t *)__shfl_sync(~0u, (unsigned long long)mine.scales, source)};
                add_key(key);
            }
        }
        store(piece);
    }
};

template <enum kv_format FORMAT, typename Element>
__device__ __forceinline__ void sparse_decode(const struct sparse_decode_params &p)
{
    const int worker = fast_divide((int)blockIdx.x, p.tiles_divisor);
    const int tile = (int)blockIdx.x - worker * p.tiles, row = tile * SPARSE_WARPS + (int)threadIdx.x / 32;
    if (row >= p.s_q * p.h_q) return; /* a whole warp */
    Row<FORMAT, Element> mine(p, row);
    const PieceList list = piece_list(p, worker);
    for (int i = list.first; i <= list.last; i += list.step) {
        int length;
        mine.run(list_piece(p, list, i, &length));
    }
}

#define SPARSE_DECODE_KERNEL(NAME, FORMAT, ELEMENT)                                                          \
    extern "C" __global__ void __launch_bounds__(32 * SPARSE_WARPS)                                          \
        NAME(const __grid_constant__ struct sparse_decode_params p)                                          \
    {                                                                                                        \
        sparse_decode<FORMAT, ELEMENT>(p);                                                                   \
    }

SPARSE_DECODE_KERNEL(sparse_decode_bf16, KV_BF16, Bf16)
SPARSE_DECODE_KERNEL(sparse_decode_fp16, KV_FP16, Fp16)
SPARSE_DECODE_KERNEL(sparse_decode_fp8_656_bf16, KV_FP8_656, Bf16)
SPARSE_DECODE_KERNEL(sparse_decode_fp8_656_fp16, KV_FP8_656, Fp16)
SPARSE_DECODE_KERNEL(sparse_decode_fp8_584_bf16, KV_FP8_584, Bf16)
SPARSE_DECODE_KERNEL(sparse_decode_fp8_584_fp16, KV_FP8_584, Fp16)

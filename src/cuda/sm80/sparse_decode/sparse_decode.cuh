/* SPDX-License-Identifier: MIT
 *
 * Sparse decode and sparse prefill for latent/attend.cuh: the rows of a tile are heads of one token, since
 * every token has lists of its own; entries that name no key are masked for all rows. In a prefill each token
 * is a request of one token.
 */
#pragma once

#include "../../device/gather.cuh"
#include "../latent/attend.cuh"

/* A task of a CTA: a split of a token's lists, for one tile of heads. */
struct ListTask {
    Split split;
    int token, first_head;
    ListEnds ends;
    const int32_t *entries[2]; /* of the cache; of the extra cache */
};

template <typename Element> struct ListCall {
    static constexpr bool CAUSAL = false, WANTS_MAXIMA = true;
    using Task = ListTask;

    const struct sparse_sm80_params &params;
    const Task &task; /* in shared memory */

    /* ---- Tasks ---- */

    /* A CTA's progress through its tasks: a worker's splits, for one tile. */
    struct Turn {
        SplitList list;
        int next; /* index in the list */
    };

    static DEVICE int worker_of_block(const struct sparse_decode_params &p)
    {
        return fast_divide((int)blockIdx.x, p.tiles_divisor);
    }

    static DEVICE void begin_turn(const struct sparse_sm80_params &params, Turn &turn)
    {
        turn.list = split_list(params.call, (unsigned)worker_of_block(params.call));
        turn.next = turn.list.first;
    }

    /* Returns the next task in `task`, with tiles of `rows` heads; false after the last. Called by one
     * thread. */
    static DEVICE bool next_task(const struct sparse_sm80_params &params, int rows, Turn &turn, Task &task)
    {
        const struct sparse_decode_params &p = params.call;
        if (turn.next > turn.list.last) return false;
        const int tile = (int)blockIdx.x - worker_of_block(p) * p.tiles;
        int length;
        task.split = list_split(p, turn.list, turn.next, &length);
        task.token = fast_divide(tile, p.token_divisor);
        task.first_head = (tile - task.token * p.tiles_of_token) * rows;
        task.ends = list_ends(p, task.split.request);
#pragma unroll
        for (int i = 0; i < 2; i++)
            task.entries[i] = p.cache[i].indices + task.split.request * p.cache[i].indices_stride[0] +
                              task.token * p.cache[i].indices_stride[1];
        turn.next += turn.list.step;
        return true;
    }

    /* ---- The call, and the split ---- */

    DEVICE int d_qk() const
    {
        return params.call.d_qk;
    }
    DEVICE int stages() const
    {
        return params.stages;
    }
    DEVICE bool aligned() const
    {
        return params.vectors_aligned;
    }
    DEVICE float scale_log2() const
    {
        return params.call.scale_log2;
    }
    DEVICE const struct output_params &output() const
    {
        return params.call.output;
    }
    DEVICE int begin() const
    {
        return task.split.begin;
    }
    DEVICE int end() const
    {
        return task.split.end;
    }

    /* ---- Rows of the tile ---- */

    DEVICE bool has_row(int row) const
    {
        return task.first_head + row < params.call.h_q;
    }

    DEVICE RowPlace place(int row) const
    {
        return {task.token, task.first_head + row};
    }

    DEVICE const uint16_t *q_row(int row) const
    {
        const struct sparse_decode_params &p = params.call;
        return p.q + task.split.request * p.q_stride[0] + task.token * p.q_stride[1] +
               (task.first_head + row) * p.q_stride[2];
    }

    DEVICE bool direct() const
    {
        return task.split.slot == DIRECT;
    }
    DEVICE int64_t out_at(int row) const
    {
        return out_offset(output(), task.split.request, place(row));
    }

    DEVICE int64_t slot_row(int row) const
    {
        const struct sparse_decode_params &p = params.call;
        return task.split.slot * ((int64_t)p.h_q * p.s_q) + (int64_t)task.token * p.h_q + task.first_head +
               row;
    }

    DEVICE float *slot_at(int row) const
    {
        return params.call.split.slot_out + slot_row(row) * D_V;
    }

    /* Stores the row's lse, or its part_end if it goes to a slot; returns the factor by which the sink scales
     * the row. */
    DEVICE float finish_row(int row, const part_end &end) const
    {
        if (!direct()) {
            params.call.split.slot_end[slot_row(row)] = end;
            return 1.0f;
        }
        const float lse = score_lse(end.max, end.sum);
        store_lse(output(), task.split.request, place(row), lse);
        return result_sink_factor(output().rules, task.first_head + row, lse);
    }

    /* Stores the largest score; `most` is in natural units, not base 2. */
    DEVICE void store_maximum(int row, float most) const
    {
        if (params.max_logits)
            params.max_logits[task.split.request * params.max_stride + task.first_head + row] =
                most * output().rules.lse_factor;
    }
};

/* Flags of the named keys of the ring, a byte each. Other keys are zeros in the ring, and their scores become
 * -inf. */
template <typename Tile> struct NamedKeys {
    uint32_t at; /* [stages][KEYS] */

    DEVICE void set_key(int stage, uint32_t key, bool named) const
    {
        asm volatile("st.shared.u8 [%0], %1;" ::"r"(at + (uint32_t)(stage * Tile::KEYS) + key),
                     "r"((uint32_t)named)
                     : "memory");
    }

    /* Called by the eight threads of a key. */
    DEVICE void set(int stage, int pass, bool named) const
    {
        if (threadIdx.x % 8 == 0)
            set_key(stage, threadIdx.x / 8 + (uint32_t)(pass * Tile::KEYS_AT_ONCE), named);
    }

    /* Returns the flags of two adjacent keys, a byte each; `key` is even. */
    DEVICE uint32_t pair(int stage, int key) const
    {
        uint16_t both;
        asm volatile("ld.shared.u16 %0, [%1];"
                     : "=h"(both)
                     : "r"(at + (uint32_t)(stage * Tile::KEYS + key))
                     : "memory");
        return both;
    }
};

/* Keys from the lists of a token. A block of keys belongs to one cache, because the extra list begins at a
 * multiple of PLAN_BLOCK. */
template <typename Tile, typename Call> struct ListSource {
    static constexpr int PASSES = Tile::PASSES, KEYS_AT_ONCE = Tile::KEYS_AT_ONCE;
    static constexpr bool LISTED = true;
    using Flags = NamedKeys<Tile>;

    const Call call;

    struct Places {
        int index[PASSES]; /* -1: no entry */
    };

    DEVICE bool is_extra(unsigned first_key) const
    {
        return first_key >= (unsigned)call.task.ends.extra_begin;
    }

    /* Returns the key of a block that this thread copies in a pass. */
    static DEVICE unsigned key_of(int pass) { return threadIdx.x / 8 + (unsigned)(pass * KEYS_AT_ONCE); }

    /* Whether a key of a block has an entry, and the entry's address. */
    DEVICE bool has_entry(unsigned first_key, unsigned key) const
    {
        const ListEnds &ends = call.task.ends;
        const int end = min(call.task.split.end, is_extra(first_key) ? ends.extra_end : ends.count);
        return first_key + key < (unsigned)end;
    }

    DEVICE const int32_t *entry(unsigned first_key, unsigned key) const
    {
        const bool extra = is_extra(first_key);
        const unsigned from = extra ? (unsigned)call.task.ends.extra_begin : 0;
        return call.task.entries[extra] + (first_key + key - from);
    }

    DEVICE Places find(unsigned first_key) const
    {
        Places places;
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++)
            places.index[pass] =
                has_entry(first_key, key_of(pass)) ? __ldg(entry(first_key, key_of(pass))) : -1;
        return places;
    }

    /* Returns the addresses of this thread's keys of a block, from `column` on; an index that names no key is
     * not valid. */
    DEVICE void place(const uint16_t *(&from)[PASSES], bool (&valid)[PASSES], unsigned first_key, int column,
                      const Places &places) const
    {
        const struct sparse_cache_params &cache = call.params.call.cache[is_extra(first_key)];
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            const int index = places.index[pass], page = fast_divide(index, cache.page_divisor);
            valid[pass] = names_key(cache, index);
            const uint8_t *token =
                cache.data + page * cache.page_bytes + (index - page * cache.page_size) * cache.slot_bytes;
            from[pass] = (valid[pass] ? (const uint16_t *)token : call.params.call.q) + column;
        }
    }
};

template <typename Element, int ROWS, int KEYS, int WARPS, bool Q_IN_REGISTERS> struct SparseDecode {
    using Sizes = Tile<Element, ROWS, KEYS, WARPS, Q_IN_REGISTERS>;
    using Call = ListCall<Element>;
    using Kernel = Attend<Sizes, Call, RingKeys<Sizes, Call, ListSource<Sizes, Call>>>;
};

#define SPARSE_DECODE_KERNEL(NAME, ELEMENT, ROWS, KEYS, WARPS, Q_IN_REGISTERS)                               \
    DEFINE_KERNEL(NAME##_##ROWS##x##KEYS, sparse_sm80_params, (32 * (WARPS)),                                \
                  attend<typename SparseDecode<ELEMENT, ROWS, KEYS, WARPS, Q_IN_REGISTERS>::Kernel>(p))

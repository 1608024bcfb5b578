// Variants, shared-memory map, ring positions and pieces of work: what the three roles of the kernel agree on.
#pragma once
#include "decode.h"
#include "ptx.cuh"

#ifndef LAB_GATED
#define LAB_GATED 0
#endif
#ifndef LAB_PV_RS
#define LAB_PV_RS 0
#endif
#ifndef LAB_SPECULATE
#define LAB_SPECULATE 0
#endif
#ifndef LAB_ROPE_STAGES
#define LAB_ROPE_STAGES 2
#endif
#ifndef LAB_Q_REG_UNITS
#define LAB_Q_REG_UNITS 3
#endif
#ifndef LAB_P_BUFFERS
#define LAB_P_BUFFERS 1
#endif
#ifndef LAB_V_UNITS
#define LAB_V_UNITS 11
#endif
#ifndef LAB_SCORE_REGS
#define LAB_SCORE_REGS 168
#endif
#ifndef LAB_OUTPUT_REGS
#define LAB_OUTPUT_REGS 160
#endif

enum {
    Q_REG_UNITS = LAB_Q_REG_UNITS, // pairs of column groups of Q held in registers, 32 registers each
    V_UNITS = LAB_V_UNITS,
    P_BUFFERS = LAB_P_BUFFERS,
    GATED = LAB_GATED,         // 1: the second half of P V waits for the next block's scores, 2: all of it
    SPECULATE = LAB_SPECULATE, // exponentials first, then a look at the largest; else a maximum over S first
    PV_RS = LAB_PV_RS,         // P goes back to registers for P V
    ROPE_STAGES = LAB_ROPE_STAGES,
    GROUP_BYTES = 64 * 128, // 64 tokens (or rows) x 64 columns
    UNIT_BYTES = 2 * GROUP_BYTES,
    Q_REST_BYTES = (9 - 2 * Q_REG_UNITS) * GROUP_BYTES,
    SMEM_ROPE = V_UNITS * UNIT_BYTES,
    SMEM_Q = SMEM_ROPE + ROPE_STAGES * GROUP_BYTES,
    SMEM_P = SMEM_Q + Q_REST_BYTES,
    SMEM_SCALE = SMEM_P + P_BUFFERS * GROUP_BYTES, // factor of each row of O before this block
    SMEM_INV_SUM = SMEM_SCALE + P_BUFFERS * 256,   // 1 / sum of each row, with the last block of a piece
    SMEM_RESCALE = SMEM_INV_SUM + P_BUFFERS * 256, // one word a warp: do its rows of O need their factors?
    SMEM_ORDER = SMEM_RESCALE + P_BUFFERS * 16,    // what to do with this P (ORDER_*)
    SMEM_TARGET = SMEM_ORDER + P_BUFFERS * 4,      // where the finished O goes: slot of a part, or ~request
    BAR_V_FULL = SMEM_TARGET + P_BUFFERS * 4,
    BAR_V_EMPTY = BAR_V_FULL + V_UNITS * 8,
    BAR_ROPE_FULL = BAR_V_EMPTY + V_UNITS * 8,
    BAR_ROPE_EMPTY = BAR_ROPE_FULL + ROPE_STAGES * 8,
    BAR_Q_FULL = BAR_ROPE_EMPTY + ROPE_STAGES * 8,
    BAR_Q_EMPTY = BAR_Q_FULL + 8,
    BAR_P_FULL = BAR_Q_EMPTY + 8,
    BAR_P_EMPTY = BAR_P_FULL + P_BUFFERS * 8,
    BAR_SCORED = BAR_P_EMPTY + P_BUFFERS * 8, // the products Q K^T of an even, an odd block are done
    SMEM_BYTES = BAR_SCORED + 16,
    THREADS = 512,
    SCORE_BARRIER = 1 // named barrier of the scores warpgroup
};
static_assert(SMEM_BYTES <= 232448, "shared memory of a Hopper SM");

// An order of the scores to the output warpgroups, one word beside each P. Everything that the output needs to
// know of the ring travels here: its 128 accumulators leave no registers to follow the plan as well.
enum {
    ORDER_FIRST = 2, // first block of a piece: O starts from zero
    ORDER_LAST = 4,  // last block: store O
    ORDER_EXIT = 8,
    ORDER_PARITY = 16, // ring position of the block
    ORDER_SLOT_SHIFT = 8,
};

// Units of a block in the order in which they are filled and read: 0, 2, 1, 3. The left output warpgroup multiplies
// units 0, 1, the right one 2, 3; what they free first is filled first.
DEVICE int unit_in_order(int i)
{
    return (i & 1) * 2 + (i >> 1);
}

// Position in the ring of V units, of the first unit of a block; unit i of the order stands i slots on.
struct ring {
    int slot = 0, parity = 0;
    DEVICE void advance(int units)
    {
        slot += units;
        if (slot >= V_UNITS) slot -= V_UNITS, parity ^= 1;
    }
    DEVICE ring plus(int units) const
    {
        ring r = *this;
        r.advance(units);
        return r;
    }
    DEVICE uint32_t data(uint32_t smem) const { return smem + slot * UNIT_BYTES; }
    DEVICE uint32_t full(uint32_t smem) const { return smem + BAR_V_FULL + slot * 8; }
    DEVICE uint32_t empty(uint32_t smem) const { return smem + BAR_V_EMPTY + slot * 8; }
};

// The rope ring is counted in blocks.
struct rope_ring {
    uint32_t count = 0;
    DEVICE uint32_t stage() const { return ROPE_STAGES == 1 ? 0 : count & 1; }
    DEVICE uint32_t parity() const { return (ROPE_STAGES == 1 ? count : count >> 1) & 1; }
    DEVICE uint32_t data(uint32_t smem) const { return smem + SMEM_ROPE + stage() * GROUP_BYTES; }
    DEVICE uint32_t full(uint32_t smem) const { return smem + BAR_ROPE_FULL + stage() * 8; }
    DEVICE uint32_t empty(uint32_t smem) const { return smem + BAR_ROPE_EMPTY + stage() * 8; }
};

// The P buffers are counted in blocks too.
DEVICE uint32_t p_buffer(uint32_t count)
{
    return P_BUFFERS == 1 ? 0 : count & 1;
}
DEVICE uint32_t p_parity(uint32_t count)
{
    return (P_BUFFERS == 1 ? count : count >> 1) & 1;
}

// One request of a partition.
struct piece {
    int request, length, first_block, blocks, split; // split: part's slot, or -1 if the request is whole here
    DEVICE piece(const decode_params &p, const partition &part, int r)
    {
        request = r;
        length = max(0, min(p.seqlens[r], p.max_pages * PAGE));
        int all = (length + PAGE - 1) / PAGE;
        first_block = r == part.begin_request ? part.begin_block : 0;
        int end = r == part.end_request ? min(part.end_block, all) : all;
        blocks = max(0, end - first_block);
        bool is_split =
            (r == part.begin_request && part.first_is_split) || (r == part.end_request && part.last_is_split);
        split = is_split ? p.num_splits[r] + (r == part.begin_request ? part.begin_split : 0) : -1;
    }
};

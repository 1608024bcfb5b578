/* SPDX-License-Identifier: MIT
 *
 * Calls made from descriptors (src/operations.def) with tensors named after the arguments: struct
 * <op>_call, <op>_make and <op>_run of every operation. The includer decides where tensors are placed.
 */
#ifndef FMLA_NAMED_CALLS_H
#define FMLA_NAMED_CALLS_H

#include "arguments.h"
#include "described.h"

/* Optional tensors of all operations. */
enum {
    HAS_TABLE = 1,
    HAS_LENGTHS = 2,
    HAS_EXTRA = 4,
    HAS_EXTRA_LENGTHS = 8,
    HAS_SINK = 16,
    HAS_LSE = 32,
    HAS_ROPE = 64,
    HAS_TABLES = 128, /* of a plan */
    HAS_NORM = 256,
    HAS_TURNS = 512,
    HAS_DLSE = 1024,
    HAS_LAST = 2048,
    HAS_USED = 4096
};

static inline bool layout_has(const struct layout *l, const struct member *m)
{
    static const struct {
        const char *name;
        unsigned bit;
    } optional[] = {{"block_table", HAS_TABLE},
                    {"topk_length", HAS_LENGTHS},
                    {"extra_kv_cache", HAS_EXTRA},
                    {"extra_indices", HAS_EXTRA},
                    {"attn_sink", HAS_SINK},
                    {"d_attn_sink", HAS_SINK},
                    {"dlse", HAS_DLSE},
                    {"extra_topk_length", HAS_EXTRA_LENGTHS},
                    {"lse", HAS_LSE},
                    {"max_logits", HAS_LSE},
                    {"out_last", HAS_LAST},
                    {"lse_last", HAS_LAST},
                    {"rope", HAS_ROPE},
                    {"norm_weight", HAS_NORM},
                    {"positions", HAS_TURNS},
                    {"rope_table", HAS_TURNS},
                    {"partitions", HAS_TABLES},
                    {"num_splits", HAS_TABLES},
                    {"seqused_q", HAS_USED},
                    {"seqused_k", HAS_USED}};
    if (!strncmp(m->name, "cu_seqlens", 10)) return l->flat;
    if (!strcmp(m->name, "kv_scale")) return l->format == FMLA_KV_FP8_576;
    if (!strcmp(m->name, "q_scale")) return l->codes;
    for (size_t i = 0; (m->allowed & ALLOW_NULL) && i < sizeof optional / sizeof optional[0]; i++)
        if (*m->name == *optional[i].name && !strcmp(m->name, optional[i].name))
            return l->has & optional[i].bit;
    return true;
}

static inline void put_number(enum operation operation, void *args, const char *name, int32_t value)
{
    void *const at = option_at(operation, args, name);
    if (at) memcpy(at, &value, sizeof value);
}

/* Places a tensor of a call. */
typedef void place_tensor(struct held *held, const struct member *m, int which, const struct layout *layout);

static inline void named_make(enum operation operation, void *args, struct held *held,
                              const struct layout *layout, place_tensor *place)
{
    int which = 0;
    memset(args, 0, descriptors[operation].size);
    memcpy(args, &descriptors[operation].size, sizeof(size_t));
    for (const struct member *m = descriptors[operation].members; m->name; m++) {
        char *const at = (char *)args + m->offset;
        if (m->kind == MEMBER_FORMAT) memcpy(at, &layout->format, sizeof layout->format);
        if (m->kind == MEMBER_SECOND_FORMAT) { /* may be 0 only if there is such a cache */
            int32_t second = layout->extra_format;
            if (!m->low && !(layout->has & HAS_EXTRA)) second = 0;
            if (m->low && !second) second = layout->format;
            memcpy(at, &second, sizeof second);
        }
        if (described_wide(m)) memcpy(at, &layout->size[described_wide(m)], sizeof(int64_t));
        if (m->kind != MEMBER_TENSOR) continue;
        place(&held[which], m, which, layout);
        if (layout_has(layout, m)) *(const fmla_tensor **)(void *)at = &held[which].tensor;
        which++;
    }
    put_number(operation, args, "batch_invariant", layout->batch_invariant);
    put_number(operation, args, "num_partitions", layout->num_partitions);
    put_number(operation, args, "causal", layout->causal);
    put_number(operation, args, "products", layout->products);
    put_number(operation, args, "batch_dependent", layout->batch_dependent);
    if (operation == OP_MHA_FORWARD)
        put_number(operation, args, "num_splits", layout->num_splits); /* decode: a table */
    put_number(operation, args, "rope_pairs", layout->has & HAS_TURNS ? FMLA_ROPE_HALVES : FMLA_ROPE_NONE);
}

/* clang-format off */
#define OPERATION(op, OP)                                                                                    \
    struct op##_call {                                                                                       \
        union {                                                                                              \
            struct held held[MAX_TENSORS];                                                                   \
            struct {
#define TENSOR(op, member, allowed, d0, d1, d2, d3, d4) struct held member;
#define END(op)                                                                                              \
            };                                                                                               \
        };                                                                                                   \
        size_t bytes; /* workspace, as queried */                                                    \
        fmla_##op##_args args; /* at the same offset in all */                                               \
    };
#include "operations.def"
/* clang-format on */

#endif

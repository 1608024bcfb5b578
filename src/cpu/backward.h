/* SPDX-License-Identifier: MIT
 *
 * Gradients of dense MHA on the CPU: the contract between the driver (backward.c) and the microkernels.
 *
 * Tiles of keys and tiles of rows share the code. Up to most_lanes vectors of one side, keys or rows, lie
 * side by side in lanes; the vectors of the other side that they meet come in blocks of 64. Each vector is a
 * pair: x = q and y = dout of a query row, x = k and y = v of a key. Then
 *
 *   S = x · x      dP = y · y      P = 2^(S - lse)      dS = P (dP - delta)      dx += dS x      (dy += P y)
 *
 * gives dq with rows in the lanes, and dk and dv with keys in the lanes. lse and delta are those of the query
 * row, on either side.
 */
#ifndef FMLA_CPU_BACKWARD_H
#define FMLA_CPU_BACKWARD_H

#include "convert.h"
#include "result.h"
#include "tile.h"

/* A tile of lanes: keys of a key head, which meet its query rows, or query rows, which meet its keys. Rows
 * are ordered by token, then by query head. */
struct cpu_lanes {
    const struct backward_problem *problem;
    struct span span;
    int64_t request, key_head;
    const float *lse, *delta; /* of the rows of the request, in base 2; lse is +inf where a row saw no key */
    bool are_keys;
    int64_t first;
    int32_t count;
};

/* Gradients of a tile, for one instruction set. */
struct cpu_gradients {
    struct kernel_driver driver;
    int32_t most_lanes;                                              /* a multiple of 64 */
    size_t (*scratch_bytes)(const struct backward_problem *problem); /* per worker; a multiple of 64 */
    /* Returns Σ out · dout. */
    float (*delta)(const uint16_t *out, const uint16_t *dout, int64_t d_v, enum element element);
    void (*tile)(const struct cpu_lanes *lanes, void *scratch); /* scratch is 64-byte aligned */
};

driver_prepare cpu_backward_prepare;
driver_run cpu_backward_run;
#define CPU_BACKWARD_DRIVER                                                                                  \
    {                                                                                                        \
        .prepare = cpu_backward_prepare, .run = cpu_backward_run                                             \
    }

/* Defined if the build has FMLA_AVX512_BF16, FMLA_AVX512, FMLA_AVX2, in this order. */
extern const struct cpu_gradients cpu_avx512bf16_gradients, cpu_avx512_gradients, cpu_avx2_gradients;
extern const struct cpu_gradients cpu_generic_gradients;

/* ---- Vectors --------------------------------------------------------------------------------- */

static inline int64_t backward_group(const struct backward_problem *p)
{
    return p->h_q / p->h_kv;
}

static inline const uint8_t *backward_at(const struct token_view *view, int64_t request, int64_t token,
                                         int64_t head)
{
    return (const uint8_t *)(view->data + request * view->request + token * view->token + head * view->head);
}

/* Returns the pair of a query row, or of a key: x as token, y as value. */
static inline struct cpu_key backward_vectors(const struct cpu_lanes *lanes, bool of_keys, int64_t i)
{
    const struct backward_problem *p = lanes->problem;
    const int64_t group = backward_group(p), request = lanes->request;
    if (of_keys) {
        const int64_t key = lanes->span.first_key + i;
        return (struct cpu_key){.token = backward_at(&p->k, request, key, lanes->key_head),
                                .value = backward_at(&p->v, request, key, lanes->key_head)};
    }
    const int64_t token = lanes->span.first_token + i / group, head = lanes->key_head * group + i % group;
    return (struct cpu_key){.token = backward_at(&p->q, request, token, head),
                            .value = backward_at(&p->dout, request, token, head)};
}

/* Prefetches the vectors of a tile's lanes, which the hardware prefetcher does not foresee. */
static inline void backward_fetch(const struct cpu_lanes *lanes)
{
    const struct backward_problem *p = lanes->problem;
    CPU_HAS_EFFECT();
    for (int32_t l = 0; l < lanes->count; l++) {
        const struct cpu_key own = backward_vectors(lanes, lanes->are_keys, lanes->first + l);
        for (int64_t byte = 0; byte < p->d_qk * 2; byte += CACHE_LINE) __builtin_prefetch(own.token + byte);
        for (int64_t byte = 0; byte < p->d_v * 2; byte += CACHE_LINE) __builtin_prefetch(own.value + byte);
    }
}

/* A block of the other side's vectors, which the lanes meet next. */
struct cpu_met {
    struct cpu_key vectors[PLAN_BLOCK];
    int64_t index[PLAN_BLOCK];                /* rows, or keys, of the request */
    float lse[PLAN_BLOCK], delta[PLAN_BLOCK]; /* of rows */
    int32_t count;
};

/* Returns how many keys of its request a row sees. */
static inline int64_t backward_seen(const struct cpu_lanes *lanes, int64_t row)
{
    const struct span *span = &lanes->span;
    if (!lanes->problem->causal) return span->keys;
    const int64_t seen = span->keys - span->tokens + row / backward_group(lanes->problem) + 1;
    return seen < 0 ? 0 : seen;
}

/* Returns the first row that sees a key. */
static inline int64_t backward_first_row(const struct cpu_lanes *lanes, int64_t key)
{
    const struct span *span = &lanes->span;
    const int64_t token = key - (span->keys - span->tokens);
    return !lanes->problem->causal || token < 0 ? 0 : token * backward_group(lanes->problem);
}

/* The range of the other side's vectors that some lane sees: its begin, and its end. */
static inline int64_t backward_begin(const struct cpu_lanes *lanes)
{
    return lanes->are_keys ? backward_first_row(lanes, lanes->first) : 0;
}

static inline int64_t backward_end(const struct cpu_lanes *lanes)
{
    return lanes->are_keys ? lanes->span.tokens * backward_group(lanes->problem)
                           : backward_seen(lanes, lanes->first + lanes->count - 1);
}

/* Copies the next vectors, from *at on and before `end`, to `met` and moves *at past them. Rows that saw no
 * key are skipped. */
static inline void backward_meet(const struct cpu_lanes *lanes, int64_t *at, int64_t end, struct cpu_met *met)
{
    const struct backward_problem *p = lanes->problem;
    const struct token_view *const x = lanes->are_keys ? &p->q : &p->k, *const y = lanes->are_keys ? &p->dout
                                                                                                   : &p->v;
    const int64_t group = lanes->are_keys ? backward_group(p) : 1;
    int64_t token = *at / group, head = *at % group;
    int32_t count = 0;
    met->count = 0;
    if (*at >= end) return;
    const struct cpu_key first = backward_vectors(lanes, !lanes->are_keys, token * group);
    const int64_t before = token;
    for (; *at < end && count < PLAN_BLOCK; (*at)++) {
        if (!lanes->are_keys || lanes->lse[*at] != INFINITY) {
            const int64_t x_at = (token - before) * x->token + head * x->head,
                          y_at = (token - before) * y->token + head * y->head;
            if (lanes->are_keys) met->lse[count] = lanes->lse[*at], met->delta[count] = lanes->delta[*at];
            met->index[count] = *at;
            met->vectors[count++] = (struct cpu_key){.token = first.token + x_at * (int64_t)sizeof(uint16_t),
                                                     .value = first.value + y_at * (int64_t)sizeof(uint16_t)};
        }
        if (++head == group) head = 0, token++;
    }
    met->count = count;
}

/* Each lane sees the vectors [from, to) of a block: keys up to its last one, or rows from its first one
 * on. */
struct cpu_seen {
    int32_t from[PLAN_ROW_TILE], to[PLAN_ROW_TILE];
    int32_t begin, end;       /* some lane sees these */
    int32_t whole, whole_end; /* every lane sees these; may be empty */
};

/* Fills `seen` for `width` lanes from lane `first` on; lanes behind the last see what the last one sees. */
static inline void backward_masks(const struct cpu_lanes *lanes, const struct cpu_met *met, int32_t first,
                                  int32_t width, struct cpu_seen *seen)
{
    const int64_t least = lanes->first + first;
    int64_t most = least + width - 1;
    if (first + width > lanes->count) most = lanes->first + lanes->count - 1;
    if (!lanes->problem->causal || !met->count ||
        (lanes->are_keys ? backward_first_row(lanes, most) <= met->index[0]
                         : backward_seen(lanes, least) > met->index[met->count - 1])) { /* all see all */
        for (int32_t l = 0; l < width; l++) seen->from[l] = 0, seen->to[l] = met->count;
        seen->begin = seen->whole = 0, seen->end = seen->whole_end = met->count;
        return;
    }
    seen->begin = seen->whole_end = met->count, seen->end = seen->whole = 0;
    int32_t from = 0, to = 0;
    for (int32_t l = 0; l < width; l++) { /* from and to rise with the lane */
        const int32_t lane = first + l < lanes->count ? first + l : lanes->count - 1;
        const int64_t i = lanes->first + lane;
        if (lanes->are_keys) {
            const int64_t row = backward_first_row(lanes, i);
            while (from < met->count && met->index[from] < row) from++;
            to = met->count;
        } else {
            const int64_t key = backward_seen(lanes, i);
            while (to < met->count && met->index[to] < key) to++;
        }
        seen->from[l] = from, seen->to[l] = to;
        if (from < to && from < seen->begin) seen->begin = from;
        if (from < to && to > seen->end) seen->end = to;
        if (from > seen->whole) seen->whole = from;
        if (to < seen->whole_end) seen->whole_end = to;
    }
    if (seen->begin > seen->end) seen->begin = seen->end = 0;
    if (seen->whole > seen->whole_end) seen->whole = seen->whole_end = seen->end;
}

/* ---- Results --------------------------------------------------------------------------------- */

/* Writes the results of lane `lane`: dx and, for a key, dy. A row that saw no key gets zeros. */
static inline void backward_store(const struct cpu_lanes *lanes, int32_t lane, const float *dx,
                                  const float *dy)
{
    const struct backward_problem *p = lanes->problem;
    const int64_t i = lanes->first + lane, group = backward_group(p);
    if (lanes->are_keys) {
        const int64_t key = lanes->span.first_key + i;
        const struct token_view *dk = &p->dk, *dv = &p->dv;
        result_round(dk->data + lanes->request * dk->request + key * dk->token + lanes->key_head * dk->head,
                     dx, p->scale, p->d_qk, p->element);
        result_round(dv->data + lanes->request * dv->request + key * dv->token + lanes->key_head * dv->head,
                     dy, 1.0f, p->d_v, p->element);
        return;
    }
    const int64_t token = lanes->span.first_token + i / group, head = lanes->key_head * group + i % group;
    uint16_t *dq = p->dq.data + lanes->request * p->dq.request + token * p->dq.token + head * p->dq.head;
    if (lanes->lse[i] == INFINITY)
        memset(dq, 0, (size_t)p->d_qk * sizeof *dq);
    else
        result_round(dq, dx, p->scale, p->d_qk, p->element);
}

/* Returns Σ out · dout, from partial sums that do not wait for each other. */
static inline float backward_delta(const uint16_t *out, const uint16_t *dout, int64_t d_v,
                                   enum element element)
{
    enum { AT_A_TIME = 32 };
    float x[AT_A_TIME], y[AT_A_TIME], sum[AT_A_TIME] = {0}, total = 0.0f;
    for (int64_t d = 0; d < d_v; d += AT_A_TIME) {
        const int64_t count = d_v - d < AT_A_TIME ? d_v - d : AT_A_TIME;
        convert(x, out + d, count, element == ELEMENT_BF16);
        convert(y, dout + d, count, element == ELEMENT_BF16);
        for (int64_t i = 0; i < count; i++) sum[i] += x[i] * y[i];
    }
    for (int i = 0; i < AT_A_TIME; i++) total += sum[i];
    return total;
}

#endif

/* SPDX-License-Identifier: MIT
 *
 * Cases of dense MHA, forward and backward: separate or concatenated requests. For the runner,
 * concatenated requests are one request with all tokens; this file maps a token to its own request and to
 * the keys that it sees.
 */
#ifndef CHECKATTN_MHA_CASE_H
#define CHECKATTN_MHA_CASE_H

#include "axes.h"

/* Tensors that both operations have at the same index. */
#define MHA(member) TENSOR_mha_forward_##member
_Static_assert((int)MHA(q) == (int)TENSOR_mha_backward_q && (int)MHA(v) == (int)TENSOR_mha_backward_v &&
                   (int)MHA(cu_seqlens_q) == (int)TENSOR_mha_backward_cu_seqlens_q &&
                   (int)MHA(out) == (int)TENSOR_mha_backward_out &&
                   (int)MHA(lse) == (int)TENSOR_mha_backward_lse,
               "the last common tensor is lse");

enum {
    REQUESTS_APART,
    REQUESTS_RAGGED,  /* equal lengths */
    REQUESTS_VARIED,  /* lengths from 0 to the shape's */
    REQUESTS_HOSTILE, /* starts that are negative, decreasing, or past the last token */
    REQUESTS_CUT,     /* any lengths whose sum is the shape's */
    REQUESTS_WITHIN   /* as varied, among tokens and keys outside all requests */
};
enum { SIZES_192_128, SIZES_64_128 = 3, SIZES_256_256, MHA_WIDEST = 256 /* head size */ };

enum { SHAPE_GROUPS = 13 }; /* its gradients have several groups of key blocks a head */
enum { H_DETERMINISTIC = H_LSE, H_DLSE = H_SPLITS }; /* axes of gradients */

struct mha_case {
    struct test_case c;
    int64_t *first[2]; /* of queries, of keys; [requests + 1]: first token of each request among all tokens */
    int64_t *used[2];  /* [requests]: how many of them are in use */
};

/* Returns true for kernels that refuse the same cases, and whose gradients depend on the order of CTAs. */
bool mha_on_tensor_cores(const char *kernel);

/* Functions of both subjects. Tensor core kernels need rows at multiples of 16 bytes, and values as wide
 * as keys, or 128 with 192, or 64 with 96; with nothing to compute a kernel may take any layout. With both a sink
 * and dlse Hopper's gradients have neither 256/256 nor 192/128. Cases with NaN at ends are not for them: they
 * multiply values hidden from some rows of a tile by weights of 0, which NaN survives. */
bool mha_counts(const int64_t *v, int i, int j);
void mha_choose(struct subject *op, const struct run *run);
bool mha_has(const struct run *run, const int64_t *v);
bool mha_leaves(const struct test_case *c, bool *must);

void mha_draw(uint64_t seed);

/* Returns the tensor of that name. */
int mha_tensor(const struct test_case *c, const char *name);

/* Makes sizes, starts, lengths in use, q, k and v, and the options that depend on them. */
void mha_make(struct test_case *c);

/* Makes a tensor of random values, `width` numbers for each head of all tokens, or of all keys, of each
 * request. */
void mha_put_vector(struct test_case *c, int i, int64_t request, int64_t token, int64_t head, bool spike);

/* Spreads requests, or concatenated tokens, of all 16-bit tensors if the layout is far, so that the last
 * is more than 2^32 elements from the first. */
void mha_spread(struct test_case *c);

/* Return a request's number of tokens in use (of_keys: of keys), that with padding, and where they begin in their
 * dimension. */
static inline int64_t mha_length(const struct test_case *c, bool of_keys, int64_t request)
{
    return ((const struct mha_case *)c)->used[of_keys][request];
}
static inline int64_t mha_extent(const struct test_case *c, bool of_keys, int64_t request)
{
    const int64_t *first = ((const struct mha_case *)c)->first[of_keys];
    return first[request + 1] - first[request];
}
static inline int64_t mha_begin(const struct test_case *c, bool of_keys, int64_t request)
{
    return c->flat ? ((const struct mha_case *)c)->first[of_keys][request] : 0;
}

/* Return the request of a row, whose tokens all requests may share; the keys that a row sees: padding none. */
int64_t mha_request_of(const struct test_case *c, int64_t request, int64_t token);
int64_t mha_seen(const struct test_case *c, int64_t request, int64_t token, int64_t head);

/* Names no starts and no lengths in use in the arguments of a view. */
void mha_whole(const struct test_case *c, struct view *view);

/* Makes a request alone, in the same form; if requests are concatenated, it alone bounds the tokens, without its
 * padding. */
void mha_part(struct test_case *c, int64_t request, struct part *part);

/* Restores dimension b in a tensor of a view narrowed to one request. */
void mha_set_apart(struct view *view, int i);

/* What both operations have in common. Special cases: no keys at all, and offsets of more than 32 bits. By
 * the oracle: masks, heads, strides and starts against problems that have none. */
#define MHA_SUBJECT                                                                                          \
    .maker = &maker, .grid = {.counts = mha_counts}, .choose = mha_choose, .has = mha_has,                   \
    .leaves = mha_leaves, .fault_cases = fault_cases,                                                        \
    .timed = {"b 1, shape even, heads 16_1, causal 1", "b 1, shape even, heads 5_5, sizes 128_128"}
#define MHA_SPECIAL                                                                                          \
    "b 3, shape no_key, heads 32_4", "b 3, shape no_key, heads 32_4, requests ragged",                       \
        "b 3, shape rows, heads 2_1, causal 1, layout far",                                                  \
        "b 3, shape rows, heads 2_1, causal 1, requests varied, layout far",                                 \
        "b 3, shape rows, sizes 64_128, inputs spiked", "b 7, shape even, causal 1, used both",              \
        "b 7, shape even, requests ragged, heads 32_4, sizes 128_128, used both"
#define MHA_OWN_THREADS "b 7, shape even, heads 2_1, sizes 128_128, requests varied, causal 1, threads own"
#define MHA_BY_ORACLE                                                                                        \
    "b 3, shape rows, heads 2_1, requests varied, causal 1, layout odd, used both",                          \
        "b 3, shape odd, heads 16_1, sizes 64_64, requests apart, causal 1, layout swapped, used both",      \
        "b 7, shape rows, heads 5_5, sizes 64_128, requests hostile"
#define MHA_GPU(second_graph)                                                                                \
    .bases = {"heads 16_1, requests cut", "heads 32_4, sizes 128_128, requests cut, dtype fp16",             \
              "heads 16_1, sizes 64_64, requests cut"},                                                      \
    .graph = {"b 7, shape even, causal 1, layout padded, used both", second_graph},                          \
    .threads = {"heads 32_4", "heads 16_1, shape rows"}
#define MHA_REPEATS "b 7, shape even, causal 1", "b 7, shape tall, inputs steep"

#endif

/* SPDX-License-Identifier: MIT
 *
 * Cases of dense MHA, forward and backward: requests apart, or one after the other. There a case is of one request to the runner, whose
 * tokens are those of all; which of the case's own requests a token is of, and what keys that sees, is said here.
 */
#ifndef CHECKATTN_MHA_CASE_H
#define CHECKATTN_MHA_CASE_H

#include "axes.h"

/* Tensors that both operations have, in the same places. */
#define MHA(member) TENSOR_mha_forward_##member
_Static_assert((int)MHA(q) == (int)TENSOR_mha_backward_q && (int)MHA(v) == (int)TENSOR_mha_backward_v &&
                   (int)MHA(cu_seqlens_q) == (int)TENSOR_mha_backward_cu_seqlens_q &&
                   (int)MHA(out) == (int)TENSOR_mha_backward_out &&
                   (int)MHA(lse) == (int)TENSOR_mha_backward_lse,
               "the last common tensor is lse");

enum {
    REQUESTS_APART,
    REQUESTS_RAGGED,  /* of one length */
    REQUESTS_VARIED,  /* of lengths up to the shape's, 0 too */
    REQUESTS_HOSTILE, /* starts that are negative, that fall, and that are beyond the last token */
    REQUESTS_CUT,     /* of any lengths, which together are those of the shape */
    REQUESTS_WITHIN   /* as varied ones, among tokens and keys of no request */
};
enum {
    INPUTS_NORMAL,
    INPUTS_SPIKED, /* keys at borders weigh more */
    INPUTS_STEEP,  /* scores of ±200: without the maximum taken out, everything overflows */
    INPUTS_NAN_ENDS /* causal: the last key of a request is NaN, and rows that may not see it must not notice */
};

enum { SIZES_64_128 = 3 };

struct mha_case {
    struct test_case c;
    int64_t requests;
    int64_t *first_q, *first_k;      /* [requests + 1]: where requests begin among all tokens, in order */
    int64_t strides[MAX_TENSORS][4]; /* of those that lie far apart */
};

bool mha_on_tensor_cores(const char *kernel);

/* Tensor cores want rows at multiples of 16 bytes, and values as long as their keys, or as 128 of 192. */
bool mha_is_taken(const char *kernel, const int64_t *v);

/* For a grid. */
bool mha_counts(const int64_t *v, int i, int j);
double mha_cost(const int64_t *v);
/* The same without what a causal mask leaves out, for an operation of which large cases take ten times what making them does. Lengths that
 * are drawn count as the shape's, or else cases that may have next to nothing would be preferred. */
double mha_cost_seen(const int64_t *v);
bool mha_has(const struct run *run, const int64_t *v);
void mha_choose_types(struct subject *op, const struct run *run);

void mha_draw(uint64_t seed);

/* Sizes, starts, q, k and v, and the options that hang on them. */
void mha_make(struct test_case *c);

/* A tensor of tokens' heads with drawn values: `width` numbers for each, all tokens of a request or all its keys. */
void mha_put_vector(struct test_case *c, int i, int64_t request, int64_t token, int64_t head, bool spike);

/* Requests, or tokens where these follow each other, so far apart that the last is more than 2^32 elements from the first. */
void mha_spread(struct test_case *c, int i);

/* What a row sees: `seen` keys of its request, the first of which is first_key where requests are one after the other. */
struct mha_place {
    int64_t request, first_key, length, seen;
};
struct mha_place mha_place_of(const struct test_case *c, int64_t request, int64_t token);

/* Gives a tensor of a view, of which one request is left, the dimension b again. */
void mha_set_apart(struct view *view, int i);

const uint16_t *mha_row_of(const struct test_case *c, int i, int64_t request, int64_t token, int64_t head);

#endif

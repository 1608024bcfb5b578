/* SPDX-License-Identifier: MIT
 *
 * Calls the functions of both split plans through one struct that has the members of both argument
 * structs.
 */
#ifndef FMLA_SUPPORT_PLAN_CALL_H
#define FMLA_SUPPORT_PLAN_CALL_H

#include "flashmla/flashmla.h"

#include <stdbool.h>

/* Arguments of a plan of dense or sparse decode. */
struct plan_call {
    bool sparse;
    const fmla_tensor *seqlens, *topk_length, *extra_topk_length;
    int64_t b, s_q, h_q, h_kv, capacity, topk, extra_topk;
    fmla_device target;
    int32_t num_workers, num_partitions;
    void *plan;
    size_t plan_size;
    void *stream;
    const fmla_tensor *partitions, *num_splits;
};
/* Returns the address of length member k: dense decode has the requests' lengths; sparse decode those of
 * the indices (0) and of the extra indices (1). */
const fmla_tensor **plan_call_length(struct plan_call *call, int k);

fmla_status plan_call_size(const struct plan_call *call, size_t *bytes);
fmla_status plan_call_partitions(const struct plan_call *call, int32_t *count);
fmla_status plan_call_run(const struct plan_call *call);

#endif

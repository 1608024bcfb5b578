/* SPDX-License-Identifier: MIT
 *
 * The rules of operations that a descriptor cannot express.
 */
#include "check.h"
#include "plan.h"

#include <math.h>

fmla_status check_device_argument(const char *operation, const char *name, fmla_device *device)
{
    if (device->device_type == FMLA_DEVICE_CUDA_HOST) device->device_type = FMLA_DEVICE_CPU;
    TRY(check_range(operation, name, device->device_type, FMLA_DEVICE_CPU, FMLA_DEVICE_CUDA_HOST));
    return check_range(operation, name, device->id, 0, INT32_MAX);
}

fmla_status check_answer(const char *operation, const char *name, const void *answer)
{
    if (answer) return FMLA_OK;
    return fail(FMLA_INVALID_ARGUMENT, "%s: %s: is NULL, must point to the result", operation, name);
}

fmla_status check_heads(const char *operation, const char *name, int64_t h_q, int64_t h_kv)
{
    if (h_q % h_kv == 0) return FMLA_OK;
    return fail(FMLA_INVALID_ARGUMENT, "%s: %s: h_q is %lld, must be a multiple of the %lld key heads",
                operation, name, (long long)h_q, (long long)h_kv);
}

fmla_status check_starts(const struct checked_call *call, const char *name,
                         const struct checked_tensor *starts)
{
    if (!starts->name == !call->flat) return FMLA_OK;
    return fail(FMLA_INVALID_ARGUMENT, "%s: %s: is %s, must be %s where q has %d dimensions", call->operation,
                name, starts->name ? "given" : "NULL", starts->name ? "NULL" : "given", call->flat ? 3 : 4);
}

fmla_status check_scale(const char *operation, float given, int64_t d_qk, float *scale)
{
    if (!isfinite(given))
        return fail(FMLA_INVALID_ARGUMENT, "%s: softmax_scale: is %f, must be finite (0 = 1/sqrt(d_qk))",
                    operation, (double)given);
    *scale = given != 0.0f ? given : (float)(1.0 / sqrt((double)d_qk));
    return FMLA_OK;
}

fmla_status check_result_rules(const char *operation, const struct checked_tensor *sink, int32_t lse_empty,
                               int32_t log_base, struct result_rules *rules)
{
    if (log_base != FMLA_LOG_NATURAL && log_base != FMLA_LOG_BASE_2)
        return fail(FMLA_INVALID_ARGUMENT, "%s: log_base: is %d, must be %d (natural) or %d (base 2)",
                    operation, log_base, FMLA_LOG_NATURAL, FMLA_LOG_BASE_2);
    rules->attn_sink = sink->data;
    rules->lse_of_empty = lse_empty == FMLA_LSE_EMPTY_POSITIVE_INFINITY ? INFINITY : -INFINITY;
    rules->lse_factor = log_base == FMLA_LOG_BASE_2 ? 1.44269504088896341f : 1.0f;
    return FMLA_OK;
}

/* ---- Memory and plans ------------------------------------------------------------------------ */

fmla_status check_buffer(const char *operation, const char *name, const void *buffer, size_t size,
                         size_t needed, size_t alignment)
{
    if (size < needed)
        return fail(FMLA_BUFFER_TOO_SMALL, "%s: %s_size: is %zu, must be at least %zu bytes", operation, name,
                    size, needed);
    if (needed && !buffer)
        return fail(FMLA_INVALID_ARGUMENT, "%s: %s: is NULL, must point to %zu bytes", operation, name,
                    needed);
    if (needed && (uintptr_t)buffer % alignment)
        return fail(FMLA_INVALID_ARGUMENT, "%s: %s: is not aligned to %zu bytes", operation, name, alignment);
    return FMLA_OK;
}

fmla_status check_plan(const char *operation, const void *plan, size_t plan_size, int64_t batch)
{
    const struct plan_header *header = plan;
    TRY(check_buffer(operation, "plan", plan, plan_size, sizeof *header, 16));
    if (header->magic != PLAN_MAGIC)
        return fail(FMLA_INVALID_ARGUMENT,
                    "%s: plan: holds no plan, must come from fmla_decode_plan or fmla_sparse_plan",
                    operation);
    if (header->num_partitions < 1 || header->num_partitions > MAX_PARTITIONS || header->batch < 0 ||
        header->batch > MAX_BATCH)
        return fail(FMLA_INVALID_ARGUMENT, "%s: plan: is damaged: %d partitions of %lld requests", operation,
                    header->num_partitions, (long long)header->batch);
    if (batch >= 0 && header->batch != batch)
        return fail(FMLA_INVALID_ARGUMENT, "%s: plan: was made for %lld requests, must be for the %lld of q",
                    operation, (long long)header->batch, (long long)batch);
    return check_buffer(operation, "plan", plan, plan_size, plan_bytes(header->batch, header->num_partitions),
                        16);
}

fmla_status check_tables(const struct checked_call *call, const struct checked_tensor *rows,
                         const struct checked_tensor *splits, const void *plan, int32_t num_partitions,
                         int64_t b)
{
    const char *op = call->operation;
    if (!rows->name && !splits->name) return FMLA_OK;
    if (!rows->name || !splits->name)
        return fail(FMLA_INVALID_ARGUMENT, "%s: %s: is NULL, must be given with %s", op,
                    rows->name ? "num_splits" : "partitions", rows->name ? rows->name : splits->name);
    if (plan)
        return fail(FMLA_INVALID_ARGUMENT, "%s: plan: is given, must be NULL with partitions and num_splits",
                    op);
    TRY(check_size(op, splits, 0, "b + 1", b + 1, call->bound_by[DIM_b] ? call->bound_by[DIM_b]->name : "b"));
    if (num_partitions && num_partitions != rows->shape[0])
        return fail(FMLA_INVALID_ARGUMENT,
                    "%s: num_partitions: is %d, must be 0 or the %lld rows of partitions", op, num_partitions,
                    (long long)rows->shape[0]);
    return FMLA_OK;
}

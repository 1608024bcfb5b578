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

fmla_status check_used(const struct checked_call *call, const struct checked_tensor *used)
{
    if (!used->name || !call->flat) return FMLA_OK; /* else q has given b */
    return check_size(call->operation, used, 0, "b", call->size[DIM_splits] - 1, "cu_seqlens_q");
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

/* ---- Memory that tensors share ---------------------------------------------------------------- */

/* Multiples of `stride` bytes, from 0 to count - 1; those of stride 0 end a list. */
struct multiples {
    uint64_t stride, count;
};

enum { MOST_MULTIPLES = 2 * MAX_DIMENSIONS + 2, MOST_STEPS = 4096 };

/* Adds multiples to a list in descending order of strides; equal strides are joined. */
static void put_multiples(struct multiples list[MOST_MULTIPLES], uint64_t stride, uint64_t count)
{
    int at = 0;
    if (count < 2 || !stride) return;
    while (list[at].stride > stride) at++;
    if (list[at].stride == stride) {
        list[at].count += count - 1;
        return;
    }
    for (int i = MOST_MULTIPLES - 1; i > at; i--) list[i] = list[i - 1];
    list[at] = (struct multiples){stride, count};
}

/* Adds to a list what the offsets of a tensor's bytes are sums of. */
static void put_offsets(struct multiples list[MOST_MULTIPLES], const struct checked_tensor *tensor)
{
    const uint64_t bytes = (uint64_t)tensor->element_bytes;
    put_multiples(list, 1, bytes);
    for (int i = 0; i < MAX_DIMENSIONS; i++)
        put_multiples(list, (uint64_t)tensor->stride[i] * bytes, (uint64_t)tensor->shape[i]);
}

/* Returns the offset of the last byte of a tensor that has elements. */
static uint64_t last_offset(const struct checked_tensor *tensor)
{
    int64_t last = 0;
    for (int i = 0; i < MAX_DIMENSIONS; i++)
        if (tensor->shape[i] > 1) last += (tensor->shape[i] - 1) * tensor->stride[i];
    return (uint64_t)(last + 1) * (uint64_t)tensor->element_bytes - 1;
}

/* Returns whether one multiple of each of a list add up to `sum`. The strides of usual layouts leave at most two
 * choices each; after *steps choices the answer is yes. */
static bool adds_up(const struct multiples *list, uint64_t sum, int *steps)
{
    uint64_t others = 0; /* the most that they add */
    if (!sum || --*steps < 0) return true;
    if (!list->stride) return false;
    for (const struct multiples *other = list + 1; other->stride; other++)
        others += other->stride * (other->count - 1);
    uint64_t n = sum > others ? (sum - others - 1) / list->stride + 1 : 0;
    for (; n < list->count && n * list->stride <= sum; n++)
        if (adds_up(list + 1, sum - n * list->stride, steps)) return true;
    return false;
}

/* Returns false only if no byte belongs to both tensors. */
static bool share_memory(const struct checked_tensor *a, const struct checked_tensor *b)
{
    const uintptr_t at_a = (uintptr_t)a->data, at_b = (uintptr_t)b->data;
    if (!a->name || !b->name || a->empty || b->empty) return false;
    const uint64_t last = last_offset(b);
    if (at_b > at_a ? at_b - at_a > last_offset(a) : at_a - at_b > last) return false;
    /* A byte of both: at_a + x = at_b + y. Like y, last - y is a sum of multiples. */
    struct multiples list[MOST_MULTIPLES] = {{0, 0}};
    put_offsets(list, a), put_offsets(list, b);
    return adds_up(list, at_b - at_a + last, &(int){MOST_STEPS});
}

fmla_status check_apart(const char *operation, const struct checked_tensor *output,
                        const struct checked_tensor *other, const char *except)
{
    if (!share_memory(output, other)) return FMLA_OK;
    return fail(FMLA_INVALID_ARGUMENT, "%s: %s: shares memory with %s, must be apart from it%s", operation,
                output->name, other->name, except);
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

/* SPDX-License-Identifier: MIT
 *
 * What the files of public functions share: checks that are about more than one tensor.
 */
#ifndef FMLA_API_H
#define FMLA_API_H

#include "check.h"
#include "dispatch.h"
#include "plan.h"

#define TRY(call)                                                                                            \
    do {                                                                                                     \
        const fmla_status try_status = (call);                                                               \
        if (try_status) return try_status;                                                                   \
    } while (0)

enum { MAX_PARTITIONS = 65536 };

/* Batches are counted in 32 bits in plans; leave room for one split more a partition. */
enum { MAX_BATCH = INT32_MAX - MAX_PARTITIONS - 1 };

/* A device that is an argument by itself. Pinned host memory becomes the CPU. */
fmla_status check_device_argument(const char *operation, const char *name, fmla_device *device);

fmla_status check_heads(const char *operation, const char *name, int64_t h_q, int64_t h_kv);

/* What becomes of out and lse. */
fmla_status check_result_rules(const char *operation, const struct checked_tensor *sink, int32_t lse_empty,
                               int32_t log_base, struct result_rules *rules);

/* softmax_scale as the caller gives it, 0 for the default of d_qk, to the scale that is meant. */
fmla_status check_scale(const char *operation, float softmax_scale, int64_t d_qk, float *scale);

/* Memory of the caller: `needed` bytes, aligned. */
fmla_status check_buffer(const char *operation, const char *name, const void *buffer, size_t size,
                         size_t needed, size_t alignment);

/* Is this a plan in host memory, whole? `batch` < 0: of any batch. */
fmla_status check_plan(const char *operation, const void *plan, size_t plan_size, int64_t batch);

/* A plan as two tables, in place of `plan`: both or neither (tables->name is then NULL). `like` has b requests.
 * `extra`: CHECK_… */
fmla_status check_tables(const char *operation, const fmla_tensor *partitions, const fmla_tensor *num_splits,
                         const void *plan, int32_t num_partitions, const struct checked_tensor *like,
                         unsigned extra, struct checked_tensor *rows, struct checked_tensor *splits);

/* Tables in host memory: any plan ends with the last request, so one of another batch shows. */
fmla_status check_last_partition(const char *op, const struct plan_partition *partitions,
                                 int32_t num_partitions, int64_t b);

/* ---- Attention, checked ---------------------------------------------------------------------- */

/* q, out and lse of four, four and three dimensions. */
void fill_attention(const struct checked_tensor *q, const struct checked_tensor *out,
                    const struct checked_tensor *lse, struct attention_problem *problem);

/* The plan that a call by plan brings; the problem is whole otherwise. */
fmla_status check_given_plan(struct attention_problem *problem, const void *plan, size_t plan_size,
                             unsigned extra, const struct checked_tensor *rows,
                             const struct checked_tensor *splits);

/* The kernel for a problem that is whole but for its plan and its workspace. */
fmla_status attention_kernel(const struct attention_problem *problem, const char *name,
                             const struct kernel **kernel);

/* The workspace of a call, or of any up to its sizes; either answer may be NULL. */
fmla_status attention_size(const struct kernel *kernel, const struct attention_problem *problem,
                           size_t *bytes, size_t *alignment);
fmla_status attention_bound(const struct kernel *kernel, const struct attention_problem *problem,
                            size_t *bytes, size_t *alignment);

/* Checks the workspace and makes the call. */
fmla_status attention_run(const struct kernel *kernel, struct attention_problem *problem, void *workspace,
                          size_t workspace_size);

/* ---- Caches of the sparse operations (api_format.c) ------------------------------------------ */

/* A public cache format. */
struct api_format {
    const char *name;
    enum kv_format format;
    unsigned allow; /* types of a cache */
    int64_t d_qk;   /* 0: any */
    int64_t token;  /* elements of a token as the tensor's last dimension has them; 0: d_qk */
    int64_t unit;   /* bytes that strides and addresses must be multiples of */
};

/* The format that kv_format names; 0: that of q's type, unless `kv` (named `name`, may be NULL) has bytes. */
fmla_status check_kv_format(const char *operation, int32_t kv_format, const char *name, const fmla_tensor *kv,
                            const struct checked_tensor *q, const struct api_format **format);

/* Pages of that format, [pages, page_size, 1, …], without what names keys in them. `extra`: CHECK_… */
fmla_status check_kv_pages(const char *operation, const struct checked_tensor *kv,
                           const struct api_format *format, int64_t d_qk, unsigned extra,
                           struct key_source *keys);

/* The lists of keys in it, whose lengths may be absent. */
void fill_lists(const struct checked_tensor *indices, const struct checked_tensor *lengths, int64_t topk,
                struct key_source *keys);

#endif

/* SPDX-License-Identifier: MIT
 *
 * Linked into a flashmla of the tests' own, where ld's --wrap puts these functions in the place of the library's and
 * libc's: kernels that err, and a machine with little memory. The command that is installed has nothing of it.
 *
 * FMLA_PLANT says what cpu-generic does wrong: out, nan, lse, input, refused; sparse-out, sparse-lse; prefill-out, prefill-max,
 * prefill-lse; merge; append; gather.
 * FMLA_LITTLE_MEMORY: the machine has one page of it.
 */
#include "flashmla/flashmla.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

fmla_status __real_fmla_dense_decode(const fmla_dense_decode_args *args);
fmla_status __wrap_fmla_dense_decode(const fmla_dense_decode_args *args);
fmla_status __real_fmla_sparse_decode(const fmla_sparse_decode_args *args);
fmla_status __wrap_fmla_sparse_decode(const fmla_sparse_decode_args *args);
fmla_status __real_fmla_sparse_prefill(const fmla_sparse_prefill_args *args);
fmla_status __wrap_fmla_sparse_prefill(const fmla_sparse_prefill_args *args);
fmla_status __real_fmla_merge(const fmla_merge_args *args);
fmla_status __wrap_fmla_merge(const fmla_merge_args *args);
fmla_status __real_fmla_cache_append(const fmla_cache_append_args *args);
fmla_status __wrap_fmla_cache_append(const fmla_cache_append_args *args);
fmla_status __real_fmla_cache_gather(const fmla_cache_gather_args *args);
fmla_status __wrap_fmla_cache_gather(const fmla_cache_gather_args *args);
long __real_sysconf(int name);
long __wrap_sysconf(int name);

static bool planted(const char *kernel, const char *what)
{
    const char *plant = getenv("FMLA_PLANT");
    return plant && kernel && !strcmp(kernel, "cpu-generic") && !strcmp(plant, what);
}

static int64_t count(const fmla_tensor *tensor)
{
    int64_t elements = 1;
    for (int i = 0; i < tensor->ndim; i++) elements *= tensor->shape[i];
    return elements;
}

fmla_status __wrap_fmla_dense_decode(const fmla_dense_decode_args *args)
{
    fmla_dense_decode_args call = *args;
    uint16_t *out = args->out->data;
    float *lse = args->lse->data;
    const int64_t last = count(args->out) - 1;
    const bool bf16 = args->out->dtype.code == FMLA_TYPE_BFLOAT;
    if (planted(args->kernel, "refused")) call.workspace_size = 0;
    const fmla_status status = __real_fmla_dense_decode(&call);
    if (planted(args->kernel, "out")) out[last] = bf16 ? 0x3f80 : 0x3c00; /* 1: none is near it */
    if (planted(args->kernel, "nan")) out[last] = 0x7fff;
    if (planted(args->kernel, "lse")) lse[count(args->lse) - 1] += 0.01f;
    if (planted(args->kernel, "input")) *(char *)args->seqlens->data ^= 1;
    return status;
}

fmla_status __wrap_fmla_sparse_decode(const fmla_sparse_decode_args *args)
{
    const fmla_status status = __real_fmla_sparse_decode(args);
    const bool bf16 = args->out->dtype.code == FMLA_TYPE_BFLOAT;
    uint16_t *out = args->out->data;
    float *lse = args->lse->data;
    if (planted(args->kernel, "sparse-out")) out[count(args->out) - 1] = bf16 ? 0x3f80 : 0x3c00;
    if (planted(args->kernel, "sparse-lse")) lse[count(args->lse) - 1] += 0.01f;
    return status;
}

fmla_status __wrap_fmla_sparse_prefill(const fmla_sparse_prefill_args *args)
{
    const fmla_status status = __real_fmla_sparse_prefill(args);
    uint16_t *out = args->out->data;
    float *max_logits = args->max_logits ? args->max_logits->data : NULL;
    float *lse = args->lse ? args->lse->data : NULL;
    if (planted(args->kernel, "prefill-out")) out[count(args->out) - 1] = 0x4000; /* 2 */
    if (max_logits && planted(args->kernel, "prefill-max")) max_logits[count(args->max_logits) - 1] += 0.01f;
    if (lse && planted(args->kernel, "prefill-lse")) lse[count(args->lse) - 1] += 0.01f;
    return status;
}

fmla_status __wrap_fmla_merge(const fmla_merge_args *args)
{
    const fmla_status status = __real_fmla_merge(args);
    float *out = args->out->data;
    if (planted(args->kernel, "merge")) out[count(args->out) - 1] += 0.001f;
    return status;
}

/* One bit of one byte. */
fmla_status __wrap_fmla_cache_append(const fmla_cache_append_args *args)
{
    const fmla_status status = __real_fmla_cache_append(args);
    if (planted(args->kernel, "append")) *(char *)args->kv_cache->data ^= 1;
    return status;
}

fmla_status __wrap_fmla_cache_gather(const fmla_cache_gather_args *args)
{
    const fmla_status status = __real_fmla_cache_gather(args);
    if (planted(args->kernel, "gather")) *(char *)args->out->data ^= 1;
    return status;
}

long __wrap_sysconf(int name)
{
    return name == _SC_PHYS_PAGES && getenv("FMLA_LITTLE_MEMORY") ? 1 : __real_sysconf(name);
}

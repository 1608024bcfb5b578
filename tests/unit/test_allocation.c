/* SPDX-License-Identifier: MIT
 *
 * Tests that no operation allocates. The test replaces malloc and its relatives (glibc allows it, and
 * keeps its own under other names) and counts while the library works, on the caller's loop, because the
 * library's own starts threads at first. The first call of each kind is not counted: it does
 * once-per-process setup.
 */
#include "calls.h"

#include <errno.h>
#include <stdatomic.h>

static atomic_long allocations;

void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *old, size_t size);
void *__libc_memalign(size_t alignment, size_t size);

void *malloc(size_t size)
{
    atomic_fetch_add(&allocations, 1);
    return __libc_malloc(size);
}

void *calloc(size_t count, size_t size)
{
    atomic_fetch_add(&allocations, 1);
    return __libc_calloc(count, size);
}

void *realloc(void *old, size_t size)
{
    atomic_fetch_add(&allocations, 1);
    return __libc_realloc(old, size);
}

void *aligned_alloc(size_t alignment, size_t size)
{
    atomic_fetch_add(&allocations, 1);
    return __libc_memalign(alignment, size);
}

int posix_memalign(void **memory, size_t alignment, size_t size)
{
    atomic_fetch_add(&allocations, 1);
    *memory = __libc_memalign(alignment, size);
    return *memory ? 0 : ENOMEM;
}

/* ---- Calls ---------------------------------------------------------------------------------- */

static struct result result, plans;

static fmla_status again(int call, const struct way *way)
{
    const fmla_status status = call_small(call, &result, way);
    /* A refused call must not allocate either. */
    if (way->batch_invariant <= 1) return status;
    return status == FMLA_INVALID_ARGUMENT && *fmla_last_error() ? FMLA_OK : FMLA_DEVICE_ERROR;
}

static void count(const char *what, int call, struct way way)
{
    const char *const name = descriptors[small_calls[call].operation].name;
    struct way asking = way; /* workspace sizes differ between kernels */
    asking.wanted = &way.workspace_size;
    if (way.batch_invariant <= 1) CHECK_OK(call_small(call, &result, &asking));
    way.workspace = room_for(way.workspace_size);
    CHECK(again(call, &way) == FMLA_OK, "%s, %s %s: %s", name, what, way.kernel, fmla_last_error());
    const long before = atomic_load(&allocations);
    const fmla_status status = again(call, &way);
    const long after = atomic_load(&allocations);
    CHECK(status == FMLA_OK, "%s, %s %s: %s", name, what, way.kernel, fmla_last_error());
    CHECK(after == before, "%s, %s %s: %ld allocations", name, what, way.kernel, after - before);
    free(way.workspace);
}

static void count_all(int call, struct way way)
{
    count("as planned", call, way);
    if (!described_member(small_calls[call].operation, "batch_invariant")) return;
    way.planned = NULL;
    count("without a plan", call, way);
    way.batch_invariant = 1;
    count("batch-invariant", call, way);
    way.batch_invariant = 2;
    count("refused", call, way);
}

int main(void)
{
    /* Check that the counter counts. */
    const long before = atomic_load(&allocations);
    char *volatile planted = malloc(1);
    free(planted);
    CHECK(atomic_load(&allocations) > before, "%s", "the counter does not see malloc");

    static int32_t workers = 3;
    unsetenv("FLASHMLA_KERNEL");
    CHECK_OK(fmla_set_parallel_for(in_order, &workers, workers));
    struct way way = {.planned = &plans};
    draw();
    CHECK_OK(make_plans(&plans));
    fmla_capability row = FMLA_INIT(fmla_capability);
    for (int64_t i = 0; fmla_capabilities(cpu, i, &row) == FMLA_OK; i++)
        for (int k = 0; k < calls; k++)
            if (row.available && !strcmp(row.operation, descriptors[small_calls[k].operation].name))
                way.kernel = row.kernel, count_all(k, way);
    return check_done("test_allocation");
}

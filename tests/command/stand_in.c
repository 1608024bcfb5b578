/* SPDX-License-Identifier: MIT
 *
 * Linked into a flashmla for tests: kernels with errors, and a machine with little memory. The installed
 * command contains none of it.
 *
 * FMLA_PLANT selects the error of cpu-generic: `refused`, `idle` (it computes nothing), the name of an
 * operation (its first result is wrong), or one of the table below. FMLA_LITTLE_MEMORY: the machine has one
 * page of memory. FMLA_NO_PROCESSOR: all its processors are taken. FMLA_KNOWN_MACHINE: bench need not measure
 * its peaks and its load, which takes up to six seconds.
 */
#include "wrap.h"

#include "bench_warn.h"

#include "elements.h"
#include "peak.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

long __real_sysconf(int name);
long __wrap_sysconf(int name);
double __real_peak_flops(enum peak_unit unit, int threads);
double __wrap_peak_flops(enum peak_unit unit, int threads);
bool __real_peak_memory_open(struct peak_memory *memory, int threads);
bool __wrap_peak_memory_open(struct peak_memory *memory, int threads);
struct bench_load __real_bench_load_now(int threads);
struct bench_load __wrap_bench_load_now(int threads);

/* The last element of a tensor becomes a value or is off by one, or one bit of its first byte changes.
 * Rounding does not explain a `near` error for inputs of the table, but may for others. */
static const struct plant {
    const char *name;
    enum operation op;
    const char *tensor;
    enum { SET, ADD, FLIP } how;
    float value;
} plants[] = {
    {"out", OP_DENSE_DECODE, "out", SET, 1.0f},
    {"nan", OP_DENSE_DECODE, "out", SET, NAN},
    {"lse", OP_DENSE_DECODE, "lse", ADD, 0.01f},
    {"input", OP_DENSE_DECODE, "seqlens", FLIP, 0.0f},
    {"sparse-out", OP_SPARSE_DECODE, "out", SET, 1.0f},
    {"sparse-lse", OP_SPARSE_DECODE, "lse", ADD, 0.01f},
    {"prefill-out", OP_SPARSE_PREFILL, "out", SET, 2.0f},
    {"prefill-max", OP_SPARSE_PREFILL, "max_logits", ADD, 0.01f},
    {"prefill-lse", OP_SPARSE_PREFILL, "lse", ADD, 0.01f},
    {"mha-out", OP_MHA_FORWARD, "out", SET, 1.0f},
    {"mha-lse", OP_MHA_FORWARD, "lse", ADD, 0.01f},
    {"merge-out", OP_MERGE, "out", ADD, 0.001f},
    {"near-out", OP_DENSE_DECODE, "out", SET, 0.125f},
    {"near-out", OP_SPARSE_DECODE, "out", SET, 0.125f},
    {"near-out", OP_SPARSE_PREFILL, "out", SET, 0.125f},
    {"near-out", OP_MHA_FORWARD, "out", SET, 0.125f},
    {"near-lse", OP_DENSE_DECODE, "lse", ADD, 0.001f},
    {"near-lse", OP_SPARSE_DECODE, "lse", ADD, 0.001f},
    {"near-lse", OP_SPARSE_PREFILL, "lse", ADD, 0.001f},
    {"near-lse", OP_SPARSE_PREFILL, "max_logits", ADD, 0.001f},
    {"near-lse", OP_MHA_FORWARD, "lse", ADD, 0.0005f},
};

static void err(const fmla_tensor *tensor, const struct plant *plant)
{
    int64_t count = 1;
    if (plant->how == FLIP) {
        *(char *)tensor->data ^= 1;
        return;
    }
    for (int i = 0; i < tensor->ndim; i++) count *= tensor->shape[i];
    const float old = plant->how == ADD ? element_load(tensor->data, tensor->dtype, count - 1) : 0.0f;
    element_store(tensor->data, tensor->dtype, count - 1, old + plant->value);
}

/* Returns the error named `name` in a tensor of an operation; NULL: there is none. */
static const struct plant *plant_of(const char *name, enum operation op, const struct member *member)
{
    static const struct plant number = {.how = SET, .value = 2.0f}, byte = {.how = FLIP};
    const struct member *first = descriptors[op].members;
    while (!(first->allowed & IS_OUTPUT)) first++;
    if (!strcmp(name, descriptors[op].name) && member == first)
        return operation_is_of_caches(op) ? &byte : &number; /* a cache operation's results are exact */
    for (size_t i = 0; i < sizeof plants / sizeof *plants; i++)
        if (plants[i].op == op && !strcmp(plants[i].name, name) && !strcmp(plants[i].tensor, member->name))
            return &plants[i];
    return NULL;
}

static fmla_status around(enum operation op, const void *args, real_function *real)
{
    const char *plant = getenv("FMLA_PLANT"), *kernel;
    const struct member *member;
    struct call call;
    call_begin(&call, op);
    memcpy(&call.args, args, descriptors[op].size);
    const char **forced = call_option(&call, "kernel"); /* a plan has none */
    kernel = forced ? *forced : NULL;
    if (!plant || !kernel || strcmp(kernel, "cpu-generic") != 0) return real(args);
    if (!strcmp(plant, "refused") && op == OP_DENSE_DECODE)
        *(size_t *)call_option(&call, "workspace_size") = 0;
    if (!strcmp(plant, "idle")) return FMLA_OK;
    const fmla_status status = real(&call.args);
    for (int i = 0; (member = call_member(op, i)); i++)
        if (plant_of(plant, op, member) && wrapped_tensor(args, member))
            err(wrapped_tensor(args, member), plant_of(plant, op, member));
    return status;
}

long __wrap_sysconf(int name)
{
    if (name == _SC_NPROCESSORS_ONLN && getenv("FMLA_NO_PROCESSOR")) return 0;
    return name == _SC_PHYS_PAGES && getenv("FMLA_LITTLE_MEMORY") ? 1 : __real_sysconf(name);
}

/* ---- A machine that need not be measured ----------------------------------------------------- */

static bool is_known(void)
{
    return getenv("FMLA_KNOWN_MACHINE") != NULL;
}

/* More than any processor has, so that no row is faster than it can be. */
double __wrap_peak_flops(enum peak_unit unit, int threads)
{
    return is_known() ? 1e13 * threads : __real_peak_flops(unit, threads);
}

bool __wrap_peak_memory_open(struct peak_memory *memory, int threads)
{
    enum { BYTES = 1 << 20 };
    if (!is_known()) return __real_peak_memory_open(memory, threads);
    *memory = (struct peak_memory){.words = calloc(1, BYTES), .bytes = BYTES};
    return memory->words != NULL;
}

struct bench_load __wrap_bench_load_now(int threads)
{
    if (!is_known()) return __real_bench_load_now(threads);
    return (struct bench_load){.processors = threads, .allowed = threads, .threads = threads};
}

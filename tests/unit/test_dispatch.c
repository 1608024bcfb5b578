/* SPDX-License-Identifier: MIT
 *
 * Tests the promise of fmla_capabilities: of the available kernels whose features cover a call, the first
 * one runs. For every operation, type, size and cache format, on this processor and on all that the table
 * distinguishes.
 */
#include "head_sizes.h"
#include "tensors.h"

#include "dispatch.h"

static int has_size(const int32_t sizes[8], int64_t size)
{
    int has = !size || !sizes[0];
    for (int i = 0; i < 8 && sizes[i]; i++) has |= sizes[i] == size;
    return has;
}

/* Returns true if the row says that the kernel takes the call. If types do not matter, none is wanted. */
static int covers(const fmla_capability *row, const struct wanted *wanted)
{
    return !(wanted->elements & ~(unsigned)row->types) && has_size(row->d_qk, wanted->d_qk) &&
           has_size(row->d_v, wanted->d_v) &&
           !((wanted->formats | wanted->extra_formats) << FMLA_KV_BF16 & ~(unsigned)row->kv_formats);
}

/* Returns the first row that is available, covers the call and is not forced_only. */
static const char *promised(const struct wanted *wanted)
{
    fmla_capability row = FMLA_INIT(fmla_capability);
    for (int64_t i = 0; fmla_capabilities(cpu, i, &row) == FMLA_OK; i++)
        if (!strcmp(row.operation, operation_name(wanted->operation)) && row.available && !row.forced_only &&
            covers(&row, wanted))
            return row.kernel;
    return NULL;
}

static void check_choice(const struct wanted *wanted, const struct processor *processor)
{
    const struct kernel *kernel = NULL;
    const fmla_status status = dispatch(wanted, NULL, &kernel);
    const char *first = promised(wanted), *chosen = status ? NULL : kernel->name;
    CHECK(
        chosen == first || (chosen && first && !strcmp(chosen, first)),
        "%s of types %x, d_qk %d, formats %x and %x, on a processor with %x, Intel's %d: %s runs, the first "
        "row is %s",
        operation_name(wanted->operation), wanted->elements, (int)wanted->d_qk, wanted->formats,
        wanted->extra_formats, processor->meets, processor->intel, chosen ? chosen : "none",
        first ? first : "none");
}

static void check_operation(enum operation operation, const struct processor *processor)
{
    enum { LATENTS = 2, SIZES = LATENTS + HEAD_SIZES };
    const bool plan = operation == OP_DECODE_PLAN || operation == OP_SPARSE_PLAN,
               cached = operation == OP_DENSE_DECODE || operation == OP_SPARSE_DECODE ||
                        operation == OP_SPARSE_PREFILL,
               attention = cached || operation_is_mha(operation);
    const int formats = cached ? KV_FORMATS : 1, second = operation == OP_SPARSE_DECODE ? KV_FORMATS : 0;
    for (int e = 0; e < (plan ? 1 : 3); e++)
        for (int s = 0; s < (attention ? SIZES : 1); s++)
            for (int f = 0; f < formats * (1 + second); f++) {
                struct wanted wanted = {.operation = operation, .device = cpu, .argument = "q"};
                if (!plan) wanted.elements = 1u << e;
                if (attention && s < LATENTS) wanted.d_qk = s ? 576 : 512, wanted.d_v = 512;
                if (s >= LATENTS)
                    wanted.d_qk = head_d_qk[(s - LATENTS) % HEAD_D_QKS],
                    wanted.d_v = head_d_v[(s - LATENTS) / HEAD_D_QKS];
                if (cached) wanted.formats = 1u << f % formats;
                if (f >= formats) wanted.extra_formats = 1u << (f / formats - 1);
                check_choice(&wanted, processor);
            }
}

static const struct wanted dense_bf16 = {.operation = OP_DENSE_DECODE,
                                         .device = {FMLA_DEVICE_CPU, 0},
                                         .elements = ELEMENTS_BF16,
                                         .d_qk = 576,
                                         .d_v = 512};

/* Checks this processor also through the public functions. */
static void check_public(void)
{
    static _Alignas(64) uint16_t q_data[576], kv_data[576], out_data[512];
    static int32_t length = 1;
    fmla_dense_decode_args args = FMLA_INIT(fmla_dense_decode_args);
    args.q = TENSOR_OF(q_data, bf16, 1, 1, 1, 576), args.kv_cache = TENSOR_OF(kv_data, bf16, 1, 1, 1, 576);
    args.seqlens = TENSOR_OF(&length, i32, 1), args.out = TENSOR_OF(out_data, bf16, 1, 1, 1, 512);
    const char *name = NULL, *first = promised(&dense_bf16);
    CHECK(!fmla_dense_decode_kernel(&args, &name) && first && !strcmp(name, first), "%s runs, not %s",
          name ? name : fmla_last_error(), first ? first : "any");
}

int main(void)
{
    unsetenv("FLASHMLA_KERNEL");
    check_public();
    static const unsigned meets[] = {0, NEEDS_AVX2, NEEDS_AVX2 | NEEDS_AVX512,
                                     NEEDS_AVX2 | NEEDS_AVX512 | NEEDS_AVX512_BF16,
                                     NEEDS_AVX2 | NEEDS_AVX512 | NEEDS_AVX512_BF16 | NEEDS_AMX};
    for (int k = 0; k < 5; k++)
        for (int intel = 0; intel < 2; intel++) {
            const struct processor processor = {meets[k], intel};
            dispatch_pretend(&processor);
            for (int op = 0; op < OPERATIONS; op++) check_operation((enum operation)op, &processor);
            /* The intended choice: AMX if present, and AVX-512 BF16 only where it is the faster one. */
            const char *first = promised(&dense_bf16);
#if defined(FMLA_AMX)
            CHECK(first && !strcmp(first, "cpu-amx") == (k == 4),
                  "with %x, Intel's %d, dense decode's first row is %s", meets[k], intel,
                  first ? first : "none");
#endif
#if defined(FMLA_AVX512_BF16)
            if (k < 4)
                CHECK(first && !strcmp(first, "cpu-avx512bf16") == (k == 3 && !intel),
                      "with %x, Intel's %d, dense decode's first row is %s", meets[k], intel,
                      first ? first : "none");
#endif
            CHECK(first != NULL, "with %x nothing runs", meets[k]);
        }
    dispatch_pretend(NULL);
    check_public();
    return check_done("test_dispatch");
}

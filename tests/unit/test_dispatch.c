/* SPDX-License-Identifier: MIT
 *
 * What fmla_capabilities promises: of the available kernels whose features cover a call, the first runs. Asked of every
 * operation, type, size and cache format, on this processor and on all that the table knows to tell apart.
 */
#include "tensors.h"

#include "dispatch.h"

/* Is `word` one of the words of `text` after `title`, up to the next comma? */
static int names(const char *text, const char *title, const char *word)
{
    const char *at = strstr(text, title);
    if (!at) return 0;
    at += strlen(title);
    while (*at == ' ') {
        const size_t length = strcspn(++at, " ,");
        if (length == strlen(word) && !memcmp(at, word, length)) return 1;
        at += length;
    }
    return 0;
}

/* The elements and the format as the rows name them; NULL: none is asked. */
struct asked {
    const char *element, *d_qk, *format;
};

static int covers(const fmla_capability *row, const struct asked *asked)
{
    char dtypes[64];
    snprintf(dtypes, sizeof dtypes, ": %s", row->dtypes);
    if (asked->element && !names(dtypes, ":", asked->element)) return 0;
    if (asked->d_qk && !names(row->shapes, "d_qk", asked->d_qk)) return 0;
    return !asked->format || names(row->shapes, "cache", asked->format);
}

/* The first row that is available, covers the call, and runs unasked. */
static const char *promised(const char *operation, const struct asked *asked)
{
    fmla_capability row = FMLA_INIT(fmla_capability);
    for (int64_t i = 0; fmla_capabilities(cpu, i, &row) == FMLA_OK; i++)
        if (!strcmp(row.operation, operation) && row.available && !row.forced_only && covers(&row, asked))
            return row.kernel;
    return NULL;
}

static void check_choice(enum operation operation, const struct asked *asked, const struct wanted *wanted,
                         const struct processor *processor)
{
    const struct kernel *kernel = NULL;
    const fmla_status status = dispatch(wanted, NULL, &kernel);
    const char *first = promised(operation_name(operation), asked);
    const char *chosen = status ? NULL : kernel->name;
    CHECK(chosen == first || (chosen && first && !strcmp(chosen, first)),
          "%s of %s, d_qk %s, cache %s, on a processor with %x, Intel's %d: %s runs, the first row is %s",
          operation_name(operation), asked->element ? asked->element : "-", asked->d_qk ? asked->d_qk : "-",
          asked->format ? asked->format : "-", processor->meets, processor->intel, chosen ? chosen : "none",
          first ? first : "none");
}

static void check_operation(enum operation operation, const struct processor *processor)
{
    static const char *const elements[] = {"bf16", "fp16", "fp32"}, *const sizes[] = {"512", "576"},
                             *const formats[] = {"BF16", "FP16", "FP8_656", "FP8_584"};
    static const enum kv_format format_bits[] = {KV_BF16, KV_FP16, KV_FP8_656, KV_FP8_584};
    const int dense = operation == OP_DENSE_DECODE,
              sparse = operation == OP_SPARSE_DECODE || operation == OP_SPARSE_PREFILL;
    for (int e = 0; e < (operation == OP_DECODE_PLAN ? 1 : 3); e++)
        for (int s = 0; s < (dense || sparse ? 2 : 1); s++)
            for (int f = 0; f < (sparse ? 4 : 1); f++) {
                struct asked asked = {0};
                struct wanted wanted = {.operation = operation, .device = cpu, .argument = "q"};
                if (operation != OP_DECODE_PLAN) asked.element = elements[e], wanted.elements = 1u << e;
                if (dense || sparse) asked.d_qk = sizes[s], wanted.d_qk = s ? 576 : 512, wanted.d_v = 512;
                if (sparse) asked.format = formats[f], wanted.formats = 1u << format_bits[f];
                check_choice(operation, &asked, &wanted, processor);
            }
}

/* This processor's by the public functions too. */
static void check_public(void)
{
    static _Alignas(64) uint16_t q_data[576], kv_data[576], out_data[512];
    static int32_t length = 1;
    fmla_dense_decode_args args = FMLA_INIT(fmla_dense_decode_args);
    args.q = TENSOR_OF(q_data, bf16, 1, 1, 1, 576), args.kv_cache = TENSOR_OF(kv_data, bf16, 1, 1, 1, 576);
    args.seqlens = TENSOR_OF(&length, i32, 1), args.out = TENSOR_OF(out_data, bf16, 1, 1, 1, 512);
    const struct asked asked = {"bf16", "576", NULL};
    const char *name = NULL, *first = promised("dense_decode", &asked);
    CHECK(!fmla_dense_decode_kernel(&args, &name) && first && !strcmp(name, first), "%s runs, not %s",
          name ? name : fmla_last_error(), first ? first : "any");
}

int main(void)
{
    unsetenv("FLASHMLA_KERNEL");
    check_public();
    static const unsigned meets[] = {0, NEEDS_AVX2, NEEDS_AVX2 | NEEDS_AVX512,
                                     NEEDS_AVX2 | NEEDS_AVX512 | NEEDS_AVX512_BF16};
    for (int k = 0; k < 4; k++)
        for (int intel = 0; intel < 2; intel++) {
            const struct processor processor = {meets[k], intel};
            dispatch_pretend(&processor);
            for (int op = 0; op < OPERATIONS; op++) check_operation((enum operation)op, &processor);
            /* What the choice was made for: AVX-512 BF16 where it is the faster one, and only there. */
            const struct asked asked = {"bf16", "576", NULL};
            const char *first = promised("dense_decode", &asked);
#if defined(FMLA_AVX512_BF16)
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

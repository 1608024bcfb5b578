/* SPDX-License-Identifier: MIT
 *
 * Every argument that fmla_cache_append and fmla_cache_gather must reject, and odd ones that they must take.
 */
#include "arguments.h"

#include <math.h>

enum { TOKENS = 3, PAGES = 2, PAGE_SIZE = 4, NOPE = 512, ROPE = 64, D_QK = 576, BYTES = 656 };
enum { CACHE = PAGES * PAGE_SIZE * BYTES, OUT = TOKENS * D_QK, PATTERN = 0xc3 };

static const fmla_dtype i64 = {FMLA_TYPE_INT, 64, 1}, u8 = {FMLA_TYPE_UINT, 8, 1};

static _Alignas(16) float latent_data[TOKENS * D_QK + 1], rope_data[TOKENS * ROPE + 1], out_data[OUT + 1],
    out_before[OUT + 1];
static _Alignas(16) uint8_t cache_data[CACHE * 2 + 1], cache_before[CACHE * 2 + 1];
static _Alignas(16) int64_t slots_data[TOKENS + 1];

static struct held latent, rope, cache, slots, out;
static union {
    fmla_cache_append_args args;
    char bytes[sizeof(fmla_cache_append_args) + 64];
} append;
static union {
    fmla_cache_gather_args args;
    char bytes[sizeof(fmla_cache_gather_args) + 64];
} gather;
#define APPEND append.args
#define GATHER gather.args

#define FLOATS "bfloat16 or float16 or float32"
static const struct argument append_arguments[] = {
    {"latent", &latent, &APPEND.latent, FLOATS, 0, 0},
    {"rope", &rope, &APPEND.rope, "float32", 1, 0},
    {"kv_cache", &cache, &APPEND.kv_cache, "a type of one byte", 0, 1},
    {"slot_mapping", &slots, &APPEND.slot_mapping, "int64", 0, 0},
};
static const struct argument gather_arguments[] = {
    {"kv_cache", &cache, &GATHER.kv_cache, "a type of one byte", 0, 0},
    {"slots", &slots, &GATHER.slots, "int64", 0, 0},
    {"out", &out, &GATHER.out, FLOATS, 0, 1},
};
enum {
    APPEND_ARGUMENTS = sizeof append_arguments / sizeof append_arguments[0],
    GATHER_ARGUMENTS = sizeof gather_arguments / sizeof gather_arguments[0]
};

static void set_up(void)
{
    for (int i = 0; i < TOKENS * D_QK; i++) latent_data[i] = (float)(i % 17) - 8.0f;
    for (int i = 0; i < TOKENS * ROPE; i++) rope_data[i] = (float)(i % 5) + 1.0f;
    memset(cache_data, PATTERN, sizeof cache_data), memset(cache_before, PATTERN, sizeof cache_before);
    memset(out_data, PATTERN, sizeof out_data), memset(out_before, PATTERN, sizeof out_before);
    slots_data[0] = 7, slots_data[1] = -1, slots_data[2] = 2;
    HELD(&latent, latent_data, f32, 2, TOKENS, NOPE);
    HELD(&rope, rope_data, f32, 2, TOKENS, ROPE);
    HELD(&cache, cache_data, u8, 4, PAGES, PAGE_SIZE, 1, BYTES);
    HELD(&slots, slots_data, i64, 1, TOKENS);
    HELD(&out, out_data, f32, 2, TOKENS, D_QK);
    memset(&append, 0, sizeof append), memset(&gather, 0, sizeof gather);
    APPEND = FMLA_INIT(fmla_cache_append_args), GATHER = FMLA_INIT(fmla_cache_gather_args);
    for (int i = 0; i < APPEND_ARGUMENTS; i++)
        *append_arguments[i].member = &append_arguments[i].held->tensor;
    for (int i = 0; i < GATHER_ARGUMENTS; i++)
        *gather_arguments[i].member = &gather_arguments[i].held->tensor;
    APPEND.kv_format = GATHER.kv_format = FMLA_KV_FP8_656;
}

static int unchanged(void)
{
    return !memcmp(cache_data, cache_before, sizeof cache_data) &&
           !memcmp(out_data, out_before, sizeof out_data);
}

static void append_fails(const char *label, fmla_status status, const char *argument, const char *words)
{
    check_rejected(label, fmla_cache_append(&APPEND), status, "cache_append", argument, words);
    CHECK(unchanged(), "append, %s: a failed call wrote", label);
}

static void gather_fails(const char *label, fmla_status status, const char *argument, const char *words)
{
    check_rejected(label, fmla_cache_gather(&GATHER), status, "cache_gather", argument, words);
    CHECK(unchanged(), "gather, %s: a failed call wrote", label);
}

/* int64 has 64 bits already; any code of 8 bits is one byte, which lies anywhere, and as many bytes as elements fit. */
static int is_no_fault(const struct argument *argument, int fault)
{
    if (argument->held == &slots && fault == FAULT_BITS) return 1;
    return argument->held == &cache &&
           (fault == FAULT_CODE || fault == FAULT_CODE_UNKNOWN || fault == FAULT_BYTES_OVERFLOW ||
            fault == FAULT_DATA_MISALIGNED || fault == FAULT_OFFSET_MISALIGNED);
}

static void test_tensors(void)
{
    char words[160], label[96];
    for (int i = 0; i < APPEND_ARGUMENTS + GATHER_ARGUMENTS; i++)
        for (int fault = 0; fault < FAULTS; fault++) {
            const int of_append = i < APPEND_ARGUMENTS;
            const struct argument *argument =
                of_append ? &append_arguments[i] : &gather_arguments[i - APPEND_ARGUMENTS];
            if (is_no_fault(argument, fault)) continue;
            set_up();
            const char *what = spoil(argument, fault, words);
            if (!what) continue;
            snprintf(label, sizeof label, "%s: %s", argument->name, what);
            (of_append ? append_fails : gather_fails)(label, FMLA_INVALID_ARGUMENT, argument->name, words);
        }
    static struct held *const held[] = {&latent, &rope, &slots, &out};
    static const char *const names[] = {"latent", "rope", "slot_mapping", "out"};
    for (int i = 0; i < 4; i++) {
        set_up();
        held[i]->tensor.device = (fmla_device){FMLA_DEVICE_CUDA, 3};
        if (i < 3) append_fails("on cuda:3", FMLA_INVALID_ARGUMENT, names[i], "cuda:3|cpu|kv_cache");
        if (i >= 2)
            gather_fails("on cuda:3", FMLA_INVALID_ARGUMENT, i == 2 ? "slots" : "out", "cuda:3|cpu|kv_cache");
    }
}

#define MUTATION(name, ...)                                                                                  \
    static void name(void)                                                                                   \
    {                                                                                                        \
        __VA_ARGS__;                                                                                         \
    }

MUTATION(size_0, APPEND.struct_size = GATHER.struct_size = 0)
MUTATION(size_less, APPEND.struct_size = GATHER.struct_size = sizeof GATHER - 1)
MUTATION(size_tail, APPEND.struct_size = sizeof append; append.bytes[sizeof append - 1] = 1;
         GATHER.struct_size = sizeof gather; gather.bytes[sizeof gather - 1] = 1)
MUTATION(format_none, APPEND.kv_format = GATHER.kv_format = FMLA_KV_NONE)
MUTATION(format_6, APPEND.kv_format = GATHER.kv_format = 6)
MUTATION(format_negative, APPEND.kv_format = GATHER.kv_format = -1)
MUTATION(format_584, APPEND.kv_format = GATHER.kv_format = FMLA_KV_FP8_584)
MUTATION(format_bf16, APPEND.kv_format = GATHER.kv_format = FMLA_KV_BF16)
MUTATION(scale_given, APPEND.cache_scale = GATHER.cache_scale = 0.5f)
MUTATION(scale_negative, format_584(); APPEND.kv_format = GATHER.kv_format = FMLA_KV_FP8_576;
         APPEND.cache_scale = GATHER.cache_scale = -1.0f)
MUTATION(scale_infinite, APPEND.kv_format = GATHER.kv_format = FMLA_KV_FP8_576;
         APPEND.cache_scale = GATHER.cache_scale = INFINITY)
MUTATION(scale_nan, APPEND.kv_format = GATHER.kv_format = FMLA_KV_FP8_576;
         APPEND.cache_scale = GATHER.cache_scale = NAN)
MUTATION(kernel_unknown, APPEND.kernel = GATHER.kernel = "none")
MUTATION(page_size_0, cache.shape[1] = 0)
MUTATION(heads_2, HELD(&cache, cache_data, u8, 4, PAGES, 2, 2, BYTES))
MUTATION(bytes_655, cache.shape[3] = 655)
MUTATION(pages_many, HELD(&cache, cache_data, u8, 4, INT64_C(1) << 31, 1, 1, BYTES))
MUTATION(page_in_pieces, HELD(&cache, cache_data, u8, 4, PAGES, PAGE_SIZE, 1, 584);
         cache.strides[1] = 592, cache.strides[0] = 8192; format_584(); latent.shape[1] = out.shape[1] = 448;
         out.shape[1] = 512)
static void all_cuda(void)
{
    struct held *const all[] = {&latent, &rope, &cache, &slots, &out};
    for (int i = 0; i < 5; i++) all[i]->tensor.device = (fmla_device){FMLA_DEVICE_CUDA, 99};
}

static const struct mutation mutations[] = {
    {"struct_size 0", size_0, FMLA_INVALID_ARGUMENT, "struct_size", "0|must be"},
    {"struct_size too small", size_less, FMLA_INVALID_ARGUMENT, "struct_size", "must be"},
    {"struct_size with a tail", size_tail, FMLA_UNSUPPORTED, "struct_size", "0.1.0"},
    {"no format", format_none, FMLA_INVALID_ARGUMENT, "kv_format", "is not given|FMLA_KV_"},
    {"format 6", format_6, FMLA_INVALID_ARGUMENT, "kv_format", "6|1|5"},
    {"format -1", format_negative, FMLA_INVALID_ARGUMENT, "kv_format", "-1|1|5"},
    {"another format", format_584, FMLA_INVALID_ARGUMENT, "kv_cache", "656|584"},
    {"a format of another type", format_bf16, FMLA_INVALID_ARGUMENT, "kv_cache", "dtype is uint8|bfloat16"},
    {"a scale", scale_given, FMLA_INVALID_ARGUMENT, "cache_scale", "0.5|must be 0"},
    {"a negative scale", scale_negative, FMLA_INVALID_ARGUMENT, "cache_scale", "-1|finite and > 0"},
    {"an infinite scale", scale_infinite, FMLA_INVALID_ARGUMENT, "cache_scale", "inf|finite"},
    {"a scale of NaN", scale_nan, FMLA_INVALID_ARGUMENT, "cache_scale", "nan|finite"},
    {"unknown kernel", kernel_unknown, FMLA_INVALID_ARGUMENT, "kernel", "none|cpu-generic|ref"},
    {"page_size 0", page_size_0, FMLA_INVALID_ARGUMENT, "kv_cache", "page_size|0|1"},
    {"two heads", heads_2, FMLA_INVALID_ARGUMENT, "kv_cache", "h_kv|2|1"},
    {"655 bytes", bytes_655, FMLA_INVALID_ARGUMENT, "kv_cache", "655|656"},
    {"2^31 pages", pages_many, FMLA_INVALID_ARGUMENT, "kv_cache", "pages|2147483648|2147483647"},
    {"a page in pieces", page_in_pieces, FMLA_INVALID_ARGUMENT, "kv_cache", "stride of dimension 1|592|584"},
    {"all on cuda", all_cuda, FMLA_UNSUPPORTED, "kv_cache", "device is cuda:99: "},
};

/* What one of the two operations can be told alone. */
static void test_sizes(void)
{
    set_up(), latent.shape[0] = 2, latent.shape[1] = NOPE;
    append_fails("tokens of rope", FMLA_INVALID_ARGUMENT, "rope", "tokens|3|2");
    set_up(), rope.shape[1] = 63;
    append_fails("width of rope", FMLA_INVALID_ARGUMENT, "rope", "63|64");
    set_up(), latent.shape[1] = D_QK;
    append_fails("all values and rope", FMLA_INVALID_ARGUMENT, "latent", "d_qk - 64|576|512");
    set_up(), APPEND.rope = NULL;
    append_fails("no rope", FMLA_INVALID_ARGUMENT, "latent", "d_qk|512|576");
    set_up(), rope.tensor.dtype = bf16;
    append_fails("another type", FMLA_INVALID_ARGUMENT, "rope", "bfloat16|float32");
    set_up(), slots.shape[0] = 2;
    append_fails("tokens of the mapping", FMLA_INVALID_ARGUMENT, "slot_mapping", "tokens|2|3");
    gather_fails("tokens of out", FMLA_INVALID_ARGUMENT, "out", "tokens|3|2");
    set_up(), out.shape[1] = 512;
    gather_fails("width of out", FMLA_INVALID_ARGUMENT, "out", "d_qk|512|576");
    set_up(), HELD(&cache, cache_data, bf16, 4, PAGES, PAGE_SIZE, 1, 64);
    HELD(&latent, latent_data, f32, 2, TOKENS, 0), APPEND.kv_format = FMLA_KV_BF16;
    append_fails("nothing but rope", FMLA_INVALID_ARGUMENT, "rope", "NULL|64");

    /* A slot that is none: found before anything is written. */
    static const int64_t none[] = {8, -2, INT64_MAX, INT64_MIN};
    char words[64];
    for (int i = 0; i < 4; i++) {
        for (int oracle = 0; oracle < 2; oracle++) {
            set_up(), slots_data[2] = none[i], APPEND.kernel = oracle ? "ref" : NULL;
            snprintf(words, sizeof words, "entry 2 is %" PRId64 "|-1|8", none[i]);
            append_fails("no slot", FMLA_INVALID_ARGUMENT, "slot_mapping", words);
        }
    }
}

static void check_accepted(const char *label, int written)
{
    CHECK(fmla_cache_append(&APPEND) == FMLA_OK, "append, %s: %s", label, fmla_last_error());
    CHECK(!memcmp(cache_data, cache_before, sizeof cache_data) == !written, "append, %s: %s written", label,
          written ? "nothing was" : "something was");
    CHECK(fmla_cache_gather(&GATHER) == FMLA_OK, "gather, %s: %s", label, fmla_last_error());
    if (!written) return;
    CHECK(out_data[0] == latent_data[0] && out_data[D_QK] == 0.0f && out_data[2 * D_QK - 1] == 0.0f,
          "gather, %s: %g %g %g", label, (double)out_data[0], (double)out_data[D_QK],
          (double)out_data[2 * D_QK - 1]);
}

static void test_accepted(void)
{
    set_up(), check_accepted("as it is", 1);
    set_up(), APPEND.struct_size = sizeof append, GATHER.struct_size = sizeof gather;
    check_accepted("a larger struct, zero behind", 1);
    set_up(), cache.tensor.dtype = (fmla_dtype){10 /* DLPack's e4m3 */, 8, 1};
    check_accepted("another type of one byte", 1);
    set_up(), cache.tensor.byte_offset = 1, check_accepted("an odd address", 1);
    set_up(), cache.strides[0] = 2 * PAGE_SIZE * BYTES, check_accepted("pages apart", 1);
    set_up(), HELD(&cache, cache_data, u8, 4, 1, 2 * PAGE_SIZE, 1, BYTES), cache.strides[0] = INT64_MAX;
    check_accepted("one page, of any stride", 1);
    set_up(), HELD(&cache, cache_data, u8, 4, 2 * PAGE_SIZE, 1, 1, BYTES), cache.strides[1] = INT64_MAX;
    check_accepted("pages of one slot, of any stride", 1);
    set_up(), cache.strides[1] = BYTES + 3, cache.strides[0] = PAGE_SIZE * (BYTES + 3);
    check_accepted("slots apart", 1);
    set_up(), APPEND.rope = NULL, HELD(&latent, latent_data, f32, 2, TOKENS, D_QK);
    check_accepted("one tensor of all values", 1);
    set_up(), APPEND.kv_format = GATHER.kv_format = FMLA_KV_FP8_576, cache.shape[3] = 576;
    APPEND.cache_scale = GATHER.cache_scale = 1.0f, check_accepted("FP8_576", 1);
    set_up();
    struct held *const all[] = {&latent, &rope, &cache, &slots, &out};
    for (int i = 0; i < 5; i++) all[i]->tensor.device = (fmla_device){FMLA_DEVICE_CUDA_HOST, 0};
    check_accepted("pinned host memory", 1);
    set_up(), slots_data[0] = slots_data[2] = -1, check_accepted("no slots", 0);
    set_up(), HELD(&latent, NULL, f32, 2, 0, NOPE), HELD(&rope, NULL, f32, 2, 0, ROPE);
    HELD(&slots, NULL, i64, 1, 0), HELD(&out, NULL, f32, 2, 0, D_QK), check_accepted("no tokens", 0);
    set_up(), HELD(&cache, NULL, u8, 4, 0, PAGE_SIZE, 1, BYTES), slots_data[0] = slots_data[2] = -1;
    check_accepted("no pages", 0);
    /* The last token of a slot stays, on any number of threads. */
    set_up(), slots_data[0] = slots_data[1] = slots_data[2] = 5;
    CHECK(!fmla_cache_append(&APPEND) && !fmla_cache_gather(&GATHER), "%s", fmla_last_error());
    for (int t = 0; t < TOKENS; t++)
        CHECK(out_data[t * D_QK + NOPE] == rope_data[(TOKENS - 1) * ROPE], "one slot: token %d", t);
}

int main(void)
{
    test_tensors();
    for (size_t k = 0; k < sizeof mutations / sizeof mutations[0]; k++) {
        const struct mutation *m = &mutations[k];
        set_up(), m->apply(), append_fails(m->label, m->status, m->argument, m->words);
        set_up(), m->apply(), gather_fails(m->label, m->status, m->argument, m->words);
    }
    check_rejected("NULL", fmla_cache_append(NULL), FMLA_INVALID_ARGUMENT, "cache_append", "args", "NULL");
    check_rejected("NULL", fmla_cache_gather(NULL), FMLA_INVALID_ARGUMENT, "cache_gather", "args", "NULL");
    test_sizes();
    test_accepted();
    return check_done("test_cache_errors");
}

/* SPDX-License-Identifier: MIT */
#include "verify_cache.h"

#include "batch.h"
#include "gpu_call.h"

#include "elements.h"
#include "gpu.h"
#include "random.h"

#include <inttypes.h>
#include <string.h>

enum { TOKENS = VERIFY_CACHE_ROWS, PAGES = 3, PAGE_SIZE = 64, MOST = 1152, D_QK = 576, D_ROPE = 64 };

static const struct {
    const char *name;
    int32_t kv_format, d_qk, bytes;
} formats[VERIFY_CACHE_CASES] = {{"BF16", FMLA_KV_BF16, 576, 1152},
                                 {"FP16", FMLA_KV_FP16, 576, 1152},
                                 {"FP8_656", FMLA_KV_FP8_656, 576, 656},
                                 {"FP8_584", FMLA_KV_FP8_584, 512, 584},
                                 {"FP8_576", FMLA_KV_FP8_576, 576, 576}};

const char *verify_cache_name(int which)
{
    return formats[which].name;
}

/* The call's tensors; of gather, latent is out. */
struct memory {
    _Alignas(16) uint8_t cache[PAGES * PAGE_SIZE * MOST];
    _Alignas(16) float vectors[TOKENS * D_QK];
    _Alignas(16) float rope[TOKENS * D_ROPE];
    _Alignas(16) int64_t slots[TOKENS];
};

/* The same call on the memory at `at`, which is of `device`. */
static fmla_status call(fmla_device device, char *at, bool gather, int which, const char *kernel,
                        void *stream)
{
    const bool wide = formats[which].bytes == 2 * formats[which].d_qk;
    const int64_t of_vectors[] = {TOKENS, formats[which].d_qk - (gather ? 0 : D_ROPE)},
                  of_rope[] = {TOKENS, D_ROPE}, tokens = TOKENS,
                  of_cache[] = {PAGES, PAGE_SIZE, 1, formats[which].bytes / (wide ? 2 : 1)};
    const fmla_dtype bytes = dtype_of(FMLA_TYPE_UINT, 8), f32 = dtype_of(FMLA_TYPE_FLOAT, 32);
    const fmla_dtype of_values = dtype_of(which ? FMLA_TYPE_FLOAT : FMLA_TYPE_BFLOAT, 16);
    const fmla_tensor
        cache = {at + offsetof(struct memory, cache), device, 4, wide ? of_values : bytes, of_cache, NULL, 0},
        vectors = {at + offsetof(struct memory, vectors), device, 2, f32, of_vectors, NULL, 0},
        rope = {at + offsetof(struct memory, rope), device, 2, f32, of_rope, NULL, 0},
        slots = {
            at + offsetof(struct memory, slots), device, 1, dtype_of(FMLA_TYPE_INT, 64), &tokens, NULL, 0};
    const float scale = formats[which].kv_format == FMLA_KV_FP8_576 ? 0.037f : 0.0f;
    if (gather) {
        fmla_cache_gather_args args = FMLA_INIT(fmla_cache_gather_args);
        args.kv_cache = &cache, args.slots = &slots, args.out = &vectors;
        args.kv_format = formats[which].kv_format, args.cache_scale = scale;
        args.kernel = kernel, args.stream = stream;
        return fmla_cache_gather(&args);
    }
    fmla_cache_append_args args = FMLA_INIT(fmla_cache_append_args);
    args.latent = &vectors, args.rope = &rope, args.kv_cache = &cache, args.slot_mapping = &slots;
    args.kv_format = formats[which].kv_format, args.cache_scale = scale;
    args.kernel = kernel, args.stream = stream;
    return fmla_cache_append(&args);
}

static bool call_on_gpu(fmla_device device, struct memory *host, bool gather, int which, const char *kernel,
                        struct fault *fault)
{
    void *memory = NULL, *stream = NULL;
    bool good = gpu_open(device.id, fault) && gpu_stream_open(&stream, fault) &&
                gpu_alloc(&memory, sizeof *host, fault) && gpu_upload(memory, host, sizeof *host, fault);
    if (good && call(device, memory, gather, which, kernel, stream))
        good = fault_set(fault, "%s", fmla_last_error());
    good = good && gpu_stream_wait(stream, fault) && gpu_download(host, memory, sizeof *host, fault);
    gpu_free(memory);
    gpu_stream_close(stream);
    return good;
}

bool verify_cache(fmla_device device, bool gather, const char *kernel, int which, struct fault *fault)
{
    static struct memory mine, theirs;
    const fmla_device cpu = {FMLA_DEVICE_CPU, 0};
    struct random_state random = {77 + (uint64_t)which};
    memset(&mine, 0x3c, sizeof mine); /* values and scales that are ordinary numbers in every format */
    batch_fill(mine.vectors, dtype_of(FMLA_TYPE_FLOAT, 32), TOKENS * D_QK, D_QK, &random);
    batch_fill(mine.rope, dtype_of(FMLA_TYPE_FLOAT, 32), TOKENS * D_ROPE, D_ROPE, &random);
    for (int t = 0; t < TOKENS; t++) mine.slots[t] = t % 7 == 3 ? -1 : t * 5 % (PAGES * PAGE_SIZE);
    if (gather)
        for (size_t i = 0; i < sizeof mine.cache; i++)
            mine.cache[i] = (uint8_t)(0x38 + random_u64(&random) % 8);
    theirs = mine;
    if (call(cpu, (char *)&theirs, gather, which, "ref", NULL))
        return fault_set(fault, "%s", fmla_last_error());
    if (device_is_gpu(device)) {
        if (!call_on_gpu(device, &mine, gather, which, kernel, fault)) return false;
    } else if (call(cpu, (char *)&mine, gather, which, kernel, NULL)) {
        return fault_set(fault, "%s", fmla_last_error());
    }
    int64_t wrong = 0;
    for (size_t i = 0; i < sizeof mine; i++) wrong += ((char *)&mine)[i] != ((char *)&theirs)[i];
    return !wrong || fault_set(fault, "%" PRId64 " bytes differ from the oracle's", wrong);
}

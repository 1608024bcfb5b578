/* SPDX-License-Identifier: MIT
 *
 * Cache append and gather with pages so far apart that offsets take more than 32 bits: two pages of address space between
 * every two, of which on the CPU nothing is memory that is not touched. The oracle has the same slots next to each other.
 */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS, MAP_NORESERVE */

#include "cache_far.h"
#include "device.h"
#include "kvformat.h"
#include "random.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

enum { PAGES = 3, PAGE_SIZE = 4, SLOTS = PAGES * PAGE_SIZE, TOKENS = 5, MOST = 656, MOST_D = 576 };

static const int64_t page_stride = (INT64_C(1) << 31) + 4096;
static const int64_t slots[TOKENS] = {0, 5, SLOTS - 1, -1, 2 * PAGE_SIZE};

struct far {
    int32_t format;
    struct kv_layout layout;
    int64_t page_bytes; /* next to each other */
    float vectors[TOKENS * MOST_D], out[TOKENS * MOST_D];
    uint8_t near[PAGES * PAGE_SIZE * MOST];
    uint8_t *far;                 /* on the CPU */
    struct device_scratch on_gpu; /* the same there */
};

/* The call on the far pages, or the oracle's on the near ones. */
static fmla_status call(struct far *f, const struct run *run, bool gather, bool oracle)
{
    const fmla_device cpu = {FMLA_DEVICE_CPU, 0};
    const bool gpu = on_gpu(run) && !oracle;
    const int64_t of_vectors[] = {TOKENS, kv_width(&f->layout)}, tokens = TOKENS,
                  bytes = f->layout.page_bytes_a_slot, of_cache[] = {PAGES, PAGE_SIZE, 1, bytes},
                  strides[] = {oracle ? f->page_bytes : page_stride, bytes, bytes, 1};
    const fmla_dtype u8 = {FMLA_TYPE_UINT, 8, 1}, i64 = {FMLA_TYPE_INT, 64, 1};
    struct device_blocks blocks = {0};
    int64_t list[TOKENS];
    memcpy(list, slots, sizeof list);
    if (gpu) device_add(&blocks, f, sizeof *f), device_add(&blocks, list, sizeof list);
    const fmla_tensor host_vectors = {gather ? f->out : f->vectors, cpu, 2, dtype_f32, of_vectors, NULL, 0},
                      host_list = {list, cpu, 1, i64, &tokens, NULL, 0};
    fmla_tensor vectors = host_vectors, slot_list = host_list,
                cache = {oracle ? f->near : f->far, cpu, 4, u8, of_cache, strides, 0};
    if (gpu) {
        device_tensor(&blocks, &host_vectors, &vectors), device_tensor(&blocks, &host_list, &slot_list);
        cache.data = f->on_gpu.memory, cache.device = run->device;
    }
    fmla_cache_append_args append = FMLA_INIT(fmla_cache_append_args);
    fmla_cache_gather_args gathered = FMLA_INIT(fmla_cache_gather_args);
    append.latent = gathered.out = &vectors, append.kv_cache = gathered.kv_cache = &cache;
    append.slot_mapping = gathered.slots = &slot_list;
    append.kv_format = gathered.kv_format = f->format;
    append.kernel = gathered.kernel = oracle ? "ref" : run->kernel;
    const fmla_status status = gather ? fmla_cache_gather(&gathered) : fmla_cache_append(&append);
    if (gpu) {
        if (!status) device_wait(NULL), device_down(&blocks, f);
        device_free(&blocks);
    }
    return status;
}

/* A page of the far ones into `to`, or from there. */
static void move_page(struct far *f, const struct run *run, int page, uint8_t *bytes, bool in)
{
    const size_t at = (size_t)(page * page_stride), count = (size_t)f->page_bytes;
    if (!on_gpu(run))
        memcpy(in ? f->far + at : bytes, in ? bytes : f->far + at, count);
    else if (in)
        device_scratch_write(&f->on_gpu, at, bytes, count);
    else
        device_scratch_read(&f->on_gpu, at, bytes, count);
}

static const char *check(struct far *f, const struct run *run, bool gather)
{
    struct random_state random = {run->seed + (uint64_t)f->format};
    uint8_t page[PAGE_SIZE * MOST];
    float theirs[TOKENS * MOST_D];
    f->layout = kv_layout_of((enum kv_format)(f->format - 1), 0);
    f->page_bytes = (int64_t)PAGE_SIZE * f->layout.page_bytes_a_slot;
    memset(f->near, 0x3c, sizeof f->near); /* e4m3 and scales that are ordinary numbers */
    for (int i = 0; i < TOKENS * MOST_D; i++) f->vectors[i] = random_normal(&random);
    for (int i = 0; gather && i < PAGES * PAGE_SIZE * MOST; i++)
        f->near[i] ^= (uint8_t)(random_u64(&random) & 3);
    for (int i = 0; i < PAGES; i++) move_page(f, run, i, f->near + i * f->page_bytes, true);
    if (call(f, run, gather, true)) return fmla_last_error();
    memcpy(theirs, f->out, sizeof theirs);
    memset(f->out, 0xff, sizeof f->out);
    if (call(f, run, gather, false)) return fmla_last_error();
    const size_t wanted = (size_t)(TOKENS * kv_width(&f->layout)) * sizeof(float);
    if (gather && memcmp(f->out, theirs, wanted) != 0) return "vectors of pages that are far apart are wrong";
    for (int i = 0; i < PAGES; i++) {
        move_page(f, run, i, page, false);
        if (memcmp(page, f->near + i * f->page_bytes, (size_t)f->page_bytes) != 0)
            return "pages that are far apart are wrong";
    }
    return NULL;
}

void check_cache_far(const struct run *run, bool gather, struct tally *tally)
{
    static const int32_t formats[] = {FMLA_KV_FP8_656, FMLA_KV_FP8_584};
    static struct far f;
    const size_t bytes = (size_t)(PAGES - 1) * (size_t)page_stride + PAGE_SIZE * MOST;
    if (on_gpu(run) ? device_memory() < 3 * bytes : sizeof(void *) < 8)
        return; /* no GPU that computes for a living */
    if (on_gpu(run)) {
        device_scratch_make(&f.on_gpu, bytes, 0);
    } else {
        f.far = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (f.far == MAP_FAILED) {
            report(tally, run, "pages far apart", "no address space for them");
            return;
        }
    }
    for (int i = 0; i < 2; i++) {
        f.format = formats[i];
        const char *wrong = check(&f, run, gather);
        if (wrong) report(tally, run, i ? "FP8_584, pages far apart" : "FP8_656, pages far apart", wrong);
        tally->cases++, tally->rows += TOKENS;
    }
    if (on_gpu(run))
        device_scratch_free(&f.on_gpu);
    else
        munmap(f.far, bytes);
}

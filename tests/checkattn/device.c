/* SPDX-License-Identifier: MIT */
#define _GNU_SOURCE /* MAP_ANONYMOUS */
#include "device.h"

#include "random.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { GUARD_BYTES = 256, GUARD = 0x5a };

const fmla_device device_pages = {0, 0};
const struct device_stress *device_stress;

static fmla_device current; /* type 0: pages */

static _Thread_local struct reason reason; /* of this thread's last step */

static void must(bool good)
{
    if (good) return;
    fprintf(stderr, "checkattn: %s\n", reason.text);
    exit(3);
}

void device_enter(void)
{
    if (current.device_type != FMLA_DEVICE_CUDA) return;
    must(gpu_open(current.id, &reason));
}

void device_open(fmla_device device)
{
    current = device;
    device_enter();
}

size_t device_memory(void)
{
    struct gpu_description description;
    must(gpu_describe(current.id, &description, &reason));
    return description.memory;
}

/* ---- Memory between guard pages --------------------------------------------------------------- */

/* A buffer begins at the start of its pages or ends at their end; the rest of the pages has a pattern. */
enum { PATTERN = 0x3b };

static _Thread_local struct random_state ends;

void device_draw_pages(uint64_t seed)
{
    ends.state = seed;
}

static size_t page_size(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

/* Returns `bytes` rounded up to whole pages. */
static size_t whole_pages(size_t bytes)
{
    return (bytes + page_size() - 1) / page_size() * page_size();
}

/* Returns the start of a buffer's pages. The guard page in front differs from the page of the buffer's
 * address, even if the buffer has no bytes and its address is the guard page behind. */
static unsigned char *begin_of(const void *memory)
{
    return (unsigned char *)((uintptr_t)memory / page_size() * page_size());
}

/* Never NULL: without address space the process ends. */
static void *pages_alloc(size_t bytes, size_t alignment)
{
    const size_t guard = page_size(), inner = whole_pages(bytes);
    unsigned char *all =
        mmap(NULL, inner + 2 * guard, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED || mprotect(all, guard, PROT_NONE) ||
        mprotect(all + guard + inner, guard, PROT_NONE)) {
        fprintf(stderr, "checkattn: no pages for %zu bytes\n", bytes);
        exit(1);
    }
    unsigned char *begin = all + guard, *memory = begin;
    if (random_between(&ends, 0, 2)) memory += (inner - bytes) / alignment * alignment;
    memset(begin, PATTERN, inner);
    return memory;
}

/* Returns true if the rest of the pages was never written. */
static bool pages_intact(const void *memory, size_t bytes)
{
    const unsigned char *begin = begin_of(memory), *end = begin + whole_pages(bytes), *at = begin;
    for (; at < (const unsigned char *)memory; at++)
        if (*at != PATTERN) return false;
    for (at += bytes; at < end; at++)
        if (*at != PATTERN) return false;
    return true;
}

/* ---- A GPU's memory, or pages ----------------------------------------------------------------- */

static bool on_pages(void)
{
    return current.device_type != FMLA_DEVICE_CUDA;
}

static void *allocate(size_t bytes, size_t alignment)
{
    void *memory = NULL;
    if (on_pages()) return pages_alloc(bytes, alignment);
    must(gpu_alloc(&memory, bytes, &reason));
    return memory;
}

static void release(void *memory, size_t bytes)
{
    if (!on_pages()) {
        gpu_free(memory);
        return;
    }
    if (memory && !pages_intact(memory, bytes) && device_stress)
        device_stress->wrong("bytes beside a buffer were written");
    if (memory) munmap(begin_of(memory) - page_size(), whole_pages(bytes) + 2 * page_size());
}

/* Copies to the device or back. */
static void transfer(void *there, void *host, size_t bytes, bool up)
{
    if (on_pages())
        memcpy(up ? there : host, up ? host : there, bytes);
    else
        must(up ? gpu_upload(there, host, bytes, &reason) : gpu_download(host, there, bytes, &reason));
}

static void fill_with(void *to, int byte, size_t bytes)
{
    if (on_pages())
        memset(to, byte, bytes);
    else
        must(gpu_fill(to, (unsigned char)byte, bytes, &reason));
}

/* ---- Blocks --------------------------------------------------------------------------------- */

static struct device_block *new_block(struct device_blocks *blocks, void *host, size_t bytes)
{
    if (blocks->count == DEVICE_BLOCKS) {
        fprintf(stderr, "checkattn: a case has more than %d blocks\n", DEVICE_BLOCKS);
        exit(3);
    }
    struct device_block *block = &blocks->block[blocks->count++];
    *block = (struct device_block){.host = host, .bytes = bytes};
    return block;
}

void device_add(struct device_blocks *blocks, void *host, size_t bytes, size_t alignment)
{
    struct device_block *block = new_block(blocks, host, bytes);
    block->device = allocate(bytes, alignment);
    transfer(block->device, host, bytes, true);
}

void device_add_guarded(struct device_blocks *blocks, const struct guarded *g)
{
    if (!g->memory) return;
    if (on_pages())
        device_add(blocks, g->memory + GUARDED_FRONT, guarded_extent(g), g->tensor.dtype.bits / 8);
    else
        device_add(blocks, g->memory, g->whole, 16);
}

void device_add_zeros(struct device_blocks *blocks, void *host, size_t bytes)
{
    struct device_block *block = new_block(blocks, host, bytes);
    block->device = allocate(bytes, 16);
    fill_with(block->device, 0, bytes);
}

static const struct device_block *block_of(const struct device_blocks *blocks, const void *host)
{
    const uintptr_t at = (uintptr_t)host;
    for (int i = 0; i < blocks->count; i++) {
        const uintptr_t begin = (uintptr_t)blocks->block[i].host;
        if (at >= begin && at < begin + blocks->block[i].bytes) return &blocks->block[i];
    }
    for (int i = 0; i < blocks->count; i++) /* a block without bytes */
        if (at == (uintptr_t)blocks->block[i].host + blocks->block[i].bytes) return &blocks->block[i];
    fprintf(stderr, "checkattn: an address is in no block of its case\n");
    exit(3);
}

void device_add_in_place(struct device_blocks *blocks, void *host, size_t bytes,
                         const struct device_blocks *like)
{
    const struct device_block *theirs = &like->block[blocks->count];
    struct device_block *block = new_block(blocks, host, bytes);
    if (blocks->count > like->count || bytes > theirs->bytes) {
        fprintf(stderr, "checkattn: a case does not fit in the place of another\n");
        exit(3);
    }
    block->device = theirs->device, block->borrowed = true;
    transfer(block->device, host, bytes, true);
}

void device_drop(struct device_blocks *blocks, int count)
{
    while (blocks->count > count) {
        const struct device_block *last = &blocks->block[--blocks->count];
        if (!last->borrowed) release(last->device, last->bytes);
    }
}

void device_move(const struct device_blocks *blocks, const void *host, bool up)
{
    for (int i = 0; i < blocks->count; i++) {
        const struct device_block *block = &blocks->block[i];
        if (!host || block_of(blocks, host) == block) transfer(block->device, block->host, block->bytes, up);
    }
}

void *device_address(const struct device_blocks *blocks, const void *host)
{
    if (!host) return NULL;
    const struct device_block *block = block_of(blocks, host);
    return block->device + ((const unsigned char *)host - block->host);
}

bool device_is(const struct device_blocks *blocks, const void *host)
{
    const struct device_block *block = block_of(blocks, host);
    return device_scratch_is(&(struct device_scratch){block->device, block->bytes}, block->host);
}

struct device_scratch device_place(const struct device_blocks *blocks, const void *host)
{
    const struct device_block *block = block_of(blocks, host);
    return (struct device_scratch){block->device, block->bytes};
}

void device_part(const struct device_blocks *blocks, void *host, size_t bytes, bool up)
{
    transfer(device_address(blocks, host), host, bytes, up);
}

const fmla_tensor *device_tensor(const struct device_blocks *blocks, const fmla_tensor *tensor,
                                 fmla_tensor *storage)
{
    if (!tensor) return NULL;
    *storage = *tensor;
    storage->device = on_pages() ? (fmla_device){FMLA_DEVICE_CPU, 0} : current;
    storage->data = device_address(blocks, tensor->data);
    return storage;
}

/* ---- Scratch memory ------------------------------------------------------------------------- */

/* No canary is needed between guard pages. */
static size_t guard_bytes(void)
{
    return on_pages() ? 0 : GUARD_BYTES;
}

void device_scratch_make(struct device_scratch *scratch, size_t bytes, int fill)
{
    *scratch = (struct device_scratch){allocate(bytes + guard_bytes(), 64), bytes};
    device_scratch_fill(scratch, fill);
    fill_with(scratch->memory + bytes, GUARD, guard_bytes());
}

void device_scratch_fill(const struct device_scratch *scratch, int fill)
{
    fill_with(scratch->memory, fill, scratch->bytes);
}

void device_scratch_write(const struct device_scratch *scratch, size_t at, const void *bytes, size_t count)
{
    transfer(scratch->memory + at, (void *)(uintptr_t)bytes, count, true);
}

bool device_scratch_intact(const struct device_scratch *scratch)
{
    unsigned char guard[GUARD_BYTES];
    if (on_pages()) return pages_intact(scratch->memory, scratch->bytes);
    transfer(scratch->memory + scratch->bytes, guard, GUARD_BYTES, false);
    bool intact = true;
    for (int i = 0; i < GUARD_BYTES; i++) intact &= guard[i] == GUARD;
    return intact;
}

bool device_scratch_is(const struct device_scratch *scratch, const void *bytes)
{
    unsigned char *copy = malloc(scratch->bytes + 1);
    transfer(scratch->memory, copy, scratch->bytes, false);
    const bool same = !memcmp(copy, bytes, scratch->bytes);
    free(copy);
    return same;
}

void device_scratch_free(struct device_scratch *scratch)
{
    release(scratch->memory, scratch->bytes + guard_bytes());
    *scratch = (struct device_scratch){NULL, 0};
}

void device_tables_make(struct device_tables *t, int32_t partitions, int64_t b, int fill)
{
    const fmla_device device = on_pages() ? (fmla_device){FMLA_DEVICE_CPU, 0} : current;
    *t = (struct device_tables){.rows_shape = {partitions, FMLA_PARTITION_FIELDS}, .splits_shape = {b + 1}};
    device_scratch_make(&t->rows, (size_t)partitions * FMLA_PARTITION_FIELDS * sizeof(int32_t), fill);
    device_scratch_make(&t->splits, (size_t)(b + 1) * sizeof(int32_t), fill);
    t->tensor[0] = (fmla_tensor){t->rows.memory, device, 2, dtype_i32, t->rows_shape, NULL, 0};
    t->tensor[1] = (fmla_tensor){t->splits.memory, device, 1, dtype_i32, t->splits_shape, NULL, 0};
}

/* ---- Streams and graphs --------------------------------------------------------------------- */

void *device_stream_open(void)
{
    void *stream;
    if (on_pages()) return NULL;
    must(gpu_stream_open(&stream, &reason));
    return stream;
}

void device_wait(void *stream)
{
    if (on_pages()) return;
    must(gpu_stream_wait(stream, &reason));
}

void device_capture_begin(void *stream)
{
    must(gpu_capture_begin(stream, &reason));
}

void *device_capture_end(void *stream)
{
    void *graph;
    must(gpu_capture_end(stream, &graph, &reason));
    return graph;
}

void device_launch(void *graph, void *stream)
{
    must(gpu_graph_launch(graph, stream, &reason));
}

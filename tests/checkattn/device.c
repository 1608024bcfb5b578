/* SPDX-License-Identifier: MIT */
#include "device.h"

#include "gpu.h"
#include "pages.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GUARD_BYTES = 256, GUARD = 0x5a };

const fmla_device device_pages = {0, 0};
const struct device_stress *device_stress;

static fmla_device current; /* type 0: pages */

static void must(bool good, const struct fault *fault)
{
    if (good) return;
    fprintf(stderr, "checkattn: %s\n", fault->text);
    exit(3);
}

void device_enter(void)
{
    struct fault fault;
    if (current.device_type != FMLA_DEVICE_CUDA) return;
    must(gpu_open(current.id, &fault), &fault);
}

void device_open(fmla_device device)
{
    current = device;
    device_enter();
}

fmla_device device_now(void)
{
    return current;
}

size_t device_memory(void)
{
    struct fault fault;
    struct gpu_description description;
    must(gpu_describe(current.id, &description, &fault), &fault);
    return description.memory;
}

/* ---- A GPU's memory, or pages ----------------------------------------------------------------- */

static bool on_pages(void)
{
    return current.device_type != FMLA_DEVICE_CUDA;
}

static void *allocate(size_t bytes, size_t alignment)
{
    struct fault fault;
    void *memory = NULL;
    if (on_pages()) return pages_alloc(bytes, alignment);
    must(gpu_alloc(&memory, bytes, &fault), &fault);
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
    pages_free(memory, bytes);
}

static void upload(void *to, const void *from, size_t bytes)
{
    struct fault fault;
    if (on_pages())
        memcpy(to, from, bytes);
    else
        must(gpu_upload(to, from, bytes, &fault), &fault);
}

static void download(void *to, const void *from, size_t bytes)
{
    struct fault fault;
    if (on_pages())
        memcpy(to, from, bytes);
    else
        must(gpu_download(to, from, bytes, &fault), &fault);
}

static void fill_with(void *to, int byte, size_t bytes)
{
    struct fault fault;
    if (on_pages())
        memset(to, byte, bytes);
    else
        must(gpu_fill(to, (unsigned char)byte, bytes, &fault), &fault);
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

static void add_aligned(struct device_blocks *blocks, void *host, size_t bytes, size_t alignment)
{
    struct device_block *block = new_block(blocks, host, bytes);
    block->device = allocate(bytes, alignment);
    upload(block->device, host, bytes);
}

void device_add(struct device_blocks *blocks, void *host, size_t bytes)
{
    add_aligned(blocks, host, bytes, 16);
}

void device_add_guarded(struct device_blocks *blocks, const struct guarded *g)
{
    if (!g->memory) return;
    if (on_pages())
        add_aligned(blocks, g->memory + GUARDED_FRONT, guarded_extent(g), g->tensor.dtype.bits / 8);
    else
        device_add(blocks, g->memory, g->whole);
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
    for (int i = 0; i < blocks->count; i++) /* of a block without bytes */
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
    upload(block->device, host, bytes);
}

void device_drop(struct device_blocks *blocks, int count)
{
    while (blocks->count > count) {
        const struct device_block *last = &blocks->block[--blocks->count];
        if (!last->borrowed) release(last->device, last->bytes);
    }
}

void device_free(struct device_blocks *blocks)
{
    device_drop(blocks, 0);
}

void device_up(const struct device_blocks *blocks, const void *host)
{
    for (int i = 0; i < blocks->count; i++) {
        const struct device_block *block = &blocks->block[i];
        if (host && block_of(blocks, host) != block) continue;
        upload(block->device, block->host, block->bytes);
    }
}

void device_down(const struct device_blocks *blocks, const void *host)
{
    for (int i = 0; i < blocks->count; i++) {
        const struct device_block *block = &blocks->block[i];
        if (host && block_of(blocks, host) != block) continue;
        download(block->host, block->device, block->bytes);
    }
}

void *device_address(const struct device_blocks *blocks, const void *host)
{
    if (!host) return NULL;
    const struct device_block *block = block_of(blocks, host);
    return block->device + ((const unsigned char *)host - block->host);
}

struct device_scratch device_place(const struct device_blocks *blocks, const void *host)
{
    const struct device_block *block = block_of(blocks, host);
    return (struct device_scratch){block->device, block->bytes};
}

void device_up_part(const struct device_blocks *blocks, const void *host, size_t bytes)
{
    upload(device_address(blocks, host), host, bytes);
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

/* Pages are guard enough. */
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
    upload(scratch->memory + at, bytes, count);
}

void device_scratch_read(const struct device_scratch *scratch, size_t at, void *bytes, size_t count)
{
    download(bytes, scratch->memory + at, count);
}

bool device_scratch_intact(const struct device_scratch *scratch)
{
    unsigned char guard[GUARD_BYTES];
    if (on_pages()) return pages_intact(scratch->memory, scratch->bytes);
    download(guard, scratch->memory + scratch->bytes, GUARD_BYTES);
    bool intact = true;
    for (int i = 0; i < GUARD_BYTES; i++) intact &= guard[i] == GUARD;
    return intact;
}

bool device_scratch_is(const struct device_scratch *scratch, const void *bytes)
{
    unsigned char *copy = malloc(scratch->bytes + 1);
    download(copy, scratch->memory, scratch->bytes);
    const bool same = !memcmp(copy, bytes, scratch->bytes);
    free(copy);
    return same;
}

void device_scratch_free(struct device_scratch *scratch)
{
    release(scratch->memory, scratch->bytes + guard_bytes());
    *scratch = (struct device_scratch){NULL, 0};
}

/* ---- Streams and graphs --------------------------------------------------------------------- */

void *device_stream_open(void)
{
    struct fault fault;
    void *stream;
    if (on_pages()) return NULL;
    must(gpu_stream_open(&stream, &fault), &fault);
    return stream;
}

void device_stream_close(void *stream)
{
    if (!on_pages()) gpu_stream_close(stream);
}

void device_wait(void *stream)
{
    struct fault fault;
    if (on_pages()) return;
    must(gpu_stream_wait(stream, &fault), &fault);
}

void device_capture_begin(void *stream)
{
    struct fault fault;
    must(gpu_capture_begin(stream, &fault), &fault);
}

void *device_capture_end(void *stream)
{
    struct fault fault;
    void *graph;
    must(gpu_capture_end(stream, &graph, &fault), &fault);
    return graph;
}

void device_launch(void *graph, void *stream)
{
    struct fault fault;
    must(gpu_graph_launch(graph, stream, &fault), &fault);
}

void device_graph_close(void *graph)
{
    if (!on_pages()) gpu_graph_close(graph);
}

/* ---- One call --------------------------------------------------------------------------------- */

enum { RESULTS = 3 };

/* A call of any operation, its arguments on the device already. */
struct call {
    fmla_status (*run)(const void *args);
    const void *args;
    void **workspace, **stream; /* in args */
    size_t *workspace_size;
    size_t bytes, alignment;             /* of the workspace */
    const fmla_tensor *results[RESULTS]; /* on the host; NULL: not wanted */
    const fmla_tensor *input;            /* one of them, on the host */
};

/* Are the results on the device what they are on the host? */
static bool untouched(const struct device_blocks *blocks, const struct call *call)
{
    bool same = true;
    for (int i = 0; i < RESULTS; i++) {
        if (!call->results[i]) continue;
        const struct device_block *block = block_of(blocks, call->results[i]->data);
        unsigned char *there = malloc(block->bytes + 1);
        download(there, block->device, block->bytes);
        same &= !memcmp(there, block->host, block->bytes);
        free(there);
    }
    return same;
}

/* The call with a workspace that it must refuse. */
static void must_refuse(const struct device_blocks *blocks, const struct call *call, void *workspace,
                        size_t bytes, fmla_status expected)
{
    char what[400];
    *call->workspace = workspace, *call->workspace_size = bytes;
    const fmla_status status = call->run(call->args);
    if (status != expected) {
        snprintf(what, sizeof what,
                 "a workspace of %zu bytes at %p, where %zu at a multiple of %zu are needed, gave %s", bytes,
                 workspace, call->bytes, call->alignment, fmla_status_name(status));
        device_stress->wrong(what);
    }
    if (device_stress->refused) device_stress->refused(blocks, call->results[0]);
    if (!untouched(blocks, call)) device_stress->wrong("a call that was refused wrote to a result");
}

static void refusals(const struct device_blocks *blocks, const struct call *call)
{
    if (!call->bytes) return;
    struct device_scratch scratch;
    device_scratch_make(&scratch, call->bytes - 1, 0x77);
    must_refuse(blocks, call, scratch.memory, call->bytes - 1, FMLA_BUFFER_TOO_SMALL);
    must_refuse(blocks, call, scratch.memory, 0, FMLA_BUFFER_TOO_SMALL);
    must_refuse(blocks, call, NULL, call->bytes, FMLA_INVALID_ARGUMENT);
    device_scratch_free(&scratch);
    if (call->alignment == 1) return;
    const size_t beside = 1 + call->bytes % (call->alignment - 1);
    device_scratch_make(&scratch, call->bytes + beside, 0x77);
    must_refuse(blocks, call, scratch.memory + beside, call->bytes, FMLA_INVALID_ARGUMENT);
    device_scratch_free(&scratch);
}

static fmla_status run_call(const struct device_blocks *blocks, const struct call *call, int fill)
{
    struct device_scratch workspace;
    for (int i = 0; i < RESULTS; i++)
        if (call->results[i]) device_up(blocks, call->results[i]->data);
    if (device_stress) refusals(blocks, call);
    device_scratch_make(&workspace, call->bytes, fill);
    void *stream = fill ? device_stream_open() : NULL; /* the default stream too */
    *call->workspace = workspace.memory, *call->workspace_size = call->bytes, *call->stream = stream;
    const fmla_status status = call->run(call->args);
    if (device_stress && device_stress->after)
        device_stress->after(blocks, call->results[0], call->input, &workspace);
    if (!status) {
        device_wait(stream);
        for (int i = 0; i < RESULTS; i++)
            if (call->results[i]) device_down(blocks, call->results[i]->data);
    }
    if (!device_scratch_intact(&workspace) && device_stress) {
        device_stress->wrong("the call wrote past the end of its workspace");
    } else if (!device_scratch_intact(&workspace)) {
        fprintf(stderr, "checkattn: the call wrote past the end of its workspace\n");
        exit(3);
    }
    device_stream_close(stream);
    device_scratch_free(&workspace);
    return status;
}

/* ---- Dense decode --------------------------------------------------------------------------- */

void device_decode_args_make(struct device_decode_args *to, const struct device_blocks *blocks,
                             const fmla_dense_decode_args *from)
{
    to->args = *from;
    const fmla_tensor **tensors[] = {&to->args.q,       &to->args.kv_cache,   &to->args.block_table,
                                     &to->args.seqlens, &to->args.attn_sink,  &to->args.out,
                                     &to->args.lse,     &to->args.partitions, &to->args.num_splits};
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++)
        *tensors[i] = device_tensor(blocks, *tensors[i], &to->tensor[i]);
    to->args.plan = device_address(blocks, from->plan);
}

static fmla_status run_dense(const void *args)
{
    return fmla_dense_decode(args);
}

fmla_status device_decode_run(struct device_decode_args *on_device, const struct device_blocks *blocks,
                              const fmla_dense_decode_args *args, int fill)
{
    fmla_dense_decode_args *there = &on_device->args;
    struct call call = {.run = run_dense,
                        .args = there,
                        .workspace = &there->workspace,
                        .stream = &there->stream,
                        .workspace_size = &there->workspace_size,
                        .results = {args->out, args->lse},
                        .input = args->q};
    const fmla_status status = fmla_dense_decode_workspace_size(there, &call.bytes, &call.alignment);
    return status ? status : run_call(blocks, &call, fill);
}

fmla_status device_decode_call(const struct device_blocks *blocks, const fmla_dense_decode_args *args,
                               int fill)
{
    struct device_decode_args on_device;
    device_decode_args_make(&on_device, blocks, args);
    return device_decode_run(&on_device, blocks, args, fill);
}

/* ---- Sparse decode -------------------------------------------------------------------------- */

void device_sparse_args_make(struct device_sparse_args *to, const struct device_blocks *blocks,
                             const fmla_sparse_decode_args *from)
{
    to->args = *from;
    const fmla_tensor **tensors[] = {&to->args.q,
                                     &to->args.kv_cache,
                                     &to->args.indices,
                                     &to->args.topk_length,
                                     &to->args.attn_sink,
                                     &to->args.extra_kv_cache,
                                     &to->args.extra_indices,
                                     &to->args.extra_topk_length,
                                     &to->args.out,
                                     &to->args.lse,
                                     &to->args.partitions,
                                     &to->args.num_splits};
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++)
        *tensors[i] = device_tensor(blocks, *tensors[i], &to->tensor[i]);
    to->args.plan = device_address(blocks, from->plan);
}

static fmla_status run_sparse(const void *args)
{
    return fmla_sparse_decode(args);
}

fmla_status device_sparse_call(const struct device_blocks *blocks, const fmla_sparse_decode_args *args,
                               int fill)
{
    struct device_sparse_args on_device;
    device_sparse_args_make(&on_device, blocks, args);
    fmla_sparse_decode_args *there = &on_device.args;
    struct call call = {.run = run_sparse,
                        .args = there,
                        .workspace = &there->workspace,
                        .stream = &there->stream,
                        .workspace_size = &there->workspace_size,
                        .results = {args->out, args->lse},
                        .input = args->q};
    const fmla_status status = fmla_sparse_decode_workspace_size(there, &call.bytes, &call.alignment);
    return status ? status : run_call(blocks, &call, fill);
}

/* ---- Sparse prefill ------------------------------------------------------------------------- */

void device_prefill_args_make(struct device_prefill_args *to, const struct device_blocks *blocks,
                              const fmla_sparse_prefill_args *from)
{
    to->args = *from;
    const fmla_tensor **tensors[] = {&to->args.q,           &to->args.kv,        &to->args.indices,
                                     &to->args.topk_length, &to->args.attn_sink, &to->args.out,
                                     &to->args.max_logits,  &to->args.lse};
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++)
        *tensors[i] = device_tensor(blocks, *tensors[i], &to->tensor[i]);
}

static fmla_status run_prefill(const void *args)
{
    return fmla_sparse_prefill(args);
}

fmla_status device_prefill_call(const struct device_blocks *blocks, const fmla_sparse_prefill_args *args,
                                int fill)
{
    struct device_prefill_args on_device;
    device_prefill_args_make(&on_device, blocks, args);
    fmla_sparse_prefill_args *there = &on_device.args;
    struct call call = {.run = run_prefill,
                        .args = there,
                        .workspace = &there->workspace,
                        .stream = &there->stream,
                        .workspace_size = &there->workspace_size,
                        .results = {args->out, args->max_logits, args->lse},
                        .input = args->q};
    const fmla_status status = fmla_sparse_prefill_workspace_size(there, &call.bytes, &call.alignment);
    return status ? status : run_call(blocks, &call, fill);
}

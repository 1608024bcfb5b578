/* SPDX-License-Identifier: MIT */
#include "device.h"

#include "gpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GUARD_BYTES = 256, GUARD = 0x5a };

static fmla_device current;

static void must(bool good, const struct fault *fault)
{
    if (good) return;
    fprintf(stderr, "checkattn: %s\n", fault->text);
    exit(3);
}

void device_enter(void)
{
    struct fault fault;
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

void device_add(struct device_blocks *blocks, void *host, size_t bytes)
{
    struct fault fault;
    struct device_block *block = new_block(blocks, host, bytes);
    void *memory = NULL;
    must(gpu_alloc(&memory, bytes, &fault) && gpu_upload(memory, host, bytes, &fault), &fault);
    block->device = memory;
}

void device_add_guarded(struct device_blocks *blocks, const struct guarded *g)
{
    if (g->memory) device_add(blocks, g->memory, g->whole);
}

void device_add_zeros(struct device_blocks *blocks, void *host, size_t bytes)
{
    struct fault fault;
    struct device_block *block = new_block(blocks, host, bytes);
    void *memory = NULL;
    must(gpu_alloc(&memory, bytes, &fault) && gpu_fill(memory, 0, bytes, &fault), &fault);
    block->device = memory;
}

static const struct device_block *block_of(const struct device_blocks *blocks, const void *host)
{
    const uintptr_t at = (uintptr_t)host;
    for (int i = 0; i < blocks->count; i++) {
        const uintptr_t begin = (uintptr_t)blocks->block[i].host;
        if (at >= begin && at < begin + blocks->block[i].bytes) return &blocks->block[i];
    }
    fprintf(stderr, "checkattn: an address is in no block of its case\n");
    exit(3);
}

void device_add_in_place(struct device_blocks *blocks, void *host, size_t bytes,
                         const struct device_blocks *like)
{
    struct fault fault;
    const struct device_block *theirs = &like->block[blocks->count];
    struct device_block *block = new_block(blocks, host, bytes);
    if (blocks->count > like->count || bytes > theirs->bytes) {
        fprintf(stderr, "checkattn: a case does not fit in the place of another\n");
        exit(3);
    }
    block->device = theirs->device, block->borrowed = true;
    must(gpu_upload(block->device, host, bytes, &fault), &fault);
}

void device_drop(struct device_blocks *blocks, int count)
{
    while (blocks->count > count) {
        const struct device_block *last = &blocks->block[--blocks->count];
        if (!last->borrowed) gpu_free(last->device);
    }
}

void device_free(struct device_blocks *blocks)
{
    device_drop(blocks, 0);
}

void device_up(const struct device_blocks *blocks, const void *host)
{
    struct fault fault;
    for (int i = 0; i < blocks->count; i++) {
        const struct device_block *block = &blocks->block[i];
        if (host && block_of(blocks, host) != block) continue;
        must(gpu_upload(block->device, block->host, block->bytes, &fault), &fault);
    }
}

void device_down(const struct device_blocks *blocks, const void *host)
{
    struct fault fault;
    for (int i = 0; i < blocks->count; i++) {
        const struct device_block *block = &blocks->block[i];
        if (host && block_of(blocks, host) != block) continue;
        must(gpu_download(block->host, block->device, block->bytes, &fault), &fault);
    }
}

void *device_address(const struct device_blocks *blocks, const void *host)
{
    if (!host) return NULL;
    const struct device_block *block = block_of(blocks, host);
    return block->device + ((const unsigned char *)host - block->host);
}

void device_up_part(const struct device_blocks *blocks, const void *host, size_t bytes)
{
    struct fault fault;
    must(gpu_upload(device_address(blocks, host), host, bytes, &fault), &fault);
}

const fmla_tensor *device_tensor(const struct device_blocks *blocks, const fmla_tensor *tensor,
                                 fmla_tensor *storage)
{
    if (!tensor) return NULL;
    *storage = *tensor;
    storage->device = current;
    storage->data = device_address(blocks, tensor->data);
    return storage;
}

/* ---- Scratch memory ------------------------------------------------------------------------- */

void device_scratch_make(struct device_scratch *scratch, size_t bytes, int fill)
{
    struct fault fault;
    void *memory = NULL;
    must(gpu_alloc(&memory, bytes + GUARD_BYTES, &fault), &fault);
    *scratch = (struct device_scratch){memory, bytes};
    device_scratch_fill(scratch, fill);
    must(gpu_fill(scratch->memory + bytes, GUARD, GUARD_BYTES, &fault), &fault);
}

void device_scratch_fill(const struct device_scratch *scratch, int fill)
{
    struct fault fault;
    must(gpu_fill(scratch->memory, (unsigned char)fill, scratch->bytes, &fault), &fault);
}

void device_scratch_write(const struct device_scratch *scratch, size_t at, const void *bytes, size_t count)
{
    struct fault fault;
    must(gpu_upload(scratch->memory + at, bytes, count, &fault), &fault);
}

void device_scratch_read(const struct device_scratch *scratch, size_t at, void *bytes, size_t count)
{
    struct fault fault;
    must(gpu_download(bytes, scratch->memory + at, count, &fault), &fault);
}

bool device_scratch_intact(const struct device_scratch *scratch)
{
    struct fault fault;
    unsigned char guard[GUARD_BYTES];
    must(gpu_download(guard, scratch->memory + scratch->bytes, GUARD_BYTES, &fault), &fault);
    bool intact = true;
    for (int i = 0; i < GUARD_BYTES; i++) intact &= guard[i] == GUARD;
    return intact;
}

bool device_scratch_is(const struct device_scratch *scratch, const void *bytes)
{
    struct fault fault;
    unsigned char *copy = malloc(scratch->bytes + 1);
    must(gpu_download(copy, scratch->memory, scratch->bytes, &fault), &fault);
    const bool same = !memcmp(copy, bytes, scratch->bytes);
    free(copy);
    return same;
}

void device_scratch_free(struct device_scratch *scratch)
{
    gpu_free(scratch->memory);
    *scratch = (struct device_scratch){NULL, 0};
}

/* ---- Streams and graphs --------------------------------------------------------------------- */

void *device_stream_open(void)
{
    struct fault fault;
    void *stream;
    must(gpu_stream_open(&stream, &fault), &fault);
    return stream;
}

void device_stream_close(void *stream)
{
    gpu_stream_close(stream);
}

void device_wait(void *stream)
{
    struct fault fault;
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
    gpu_graph_close(graph);
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

fmla_status device_decode_run(struct device_decode_args *on_device, const struct device_blocks *blocks,
                              const fmla_dense_decode_args *args, int fill)
{
    struct device_scratch workspace;
    size_t bytes = 0, alignment = 0;
    fmla_status status = fmla_dense_decode_workspace_size(&on_device->args, &bytes, &alignment);
    if (status) return status;
    device_scratch_make(&workspace, bytes, fill);
    device_up(blocks, args->out->data);
    if (args->lse) device_up(blocks, args->lse->data);
    void *stream = fill ? device_stream_open() : NULL; /* the default stream too */
    on_device->args.workspace = workspace.memory, on_device->args.workspace_size = bytes;
    on_device->args.stream = stream;
    status = fmla_dense_decode(&on_device->args);
    if (!status) {
        device_wait(stream);
        device_down(blocks, args->out->data);
        if (args->lse) device_down(blocks, args->lse->data);
    }
    if (!device_scratch_intact(&workspace)) {
        fprintf(stderr, "checkattn: the call wrote past the end of its workspace\n");
        exit(3);
    }
    device_stream_close(stream);
    device_scratch_free(&workspace);
    return status;
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

fmla_status device_sparse_call(const struct device_blocks *blocks, const fmla_sparse_decode_args *args,
                               int fill)
{
    struct device_sparse_args on_device;
    struct device_scratch workspace;
    size_t bytes = 0, alignment = 0;
    device_sparse_args_make(&on_device, blocks, args);
    fmla_status status = fmla_sparse_decode_workspace_size(&on_device.args, &bytes, &alignment);
    if (status) return status;
    device_scratch_make(&workspace, bytes, fill);
    device_up(blocks, args->out->data);
    if (args->lse) device_up(blocks, args->lse->data);
    void *stream = fill ? device_stream_open() : NULL; /* the default stream too */
    on_device.args.workspace = workspace.memory, on_device.args.workspace_size = bytes;
    on_device.args.stream = stream;
    status = fmla_sparse_decode(&on_device.args);
    if (!status) {
        device_wait(stream);
        device_down(blocks, args->out->data);
        if (args->lse) device_down(blocks, args->lse->data);
    }
    if (!device_scratch_intact(&workspace)) {
        fprintf(stderr, "checkattn: the call wrote past the end of its workspace\n");
        exit(3);
    }
    device_stream_close(stream);
    device_scratch_free(&workspace);
    return status;
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

fmla_status device_prefill_call(const struct device_blocks *blocks, const fmla_sparse_prefill_args *args,
                                int fill)
{
    const fmla_tensor *results[] = {args->out, args->max_logits, args->lse};
    enum { RESULTS = sizeof results / sizeof results[0] };
    struct device_prefill_args on_device;
    struct device_scratch workspace;
    size_t bytes = 0, alignment = 0;
    device_prefill_args_make(&on_device, blocks, args);
    fmla_status status = fmla_sparse_prefill_workspace_size(&on_device.args, &bytes, &alignment);
    if (status) return status;
    device_scratch_make(&workspace, bytes, fill);
    for (int i = 0; i < RESULTS; i++)
        if (results[i]) device_up(blocks, results[i]->data);
    void *stream = fill ? device_stream_open() : NULL; /* the default stream too */
    on_device.args.workspace = workspace.memory, on_device.args.workspace_size = bytes;
    on_device.args.stream = stream;
    status = fmla_sparse_prefill(&on_device.args);
    if (!status) {
        device_wait(stream);
        for (int i = 0; i < RESULTS; i++)
            if (results[i]) device_down(blocks, results[i]->data);
    }
    if (!device_scratch_intact(&workspace)) {
        fprintf(stderr, "checkattn: the call wrote past the end of its workspace\n");
        exit(3);
    }
    device_stream_close(stream);
    device_scratch_free(&workspace);
    return status;
}

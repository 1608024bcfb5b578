/* SPDX-License-Identifier: MIT
 *
 * On a real GPU: graphs of MHA over ragged requests, replayed in turns. Hopper's tile scheduler keeps counters in
 * the workspace, which the first CTA clears and the last one gives up (sm90/mha_forward/scheduler.cuh). The host
 * knows only a bound of the tiles here, so some CTAs have none: they are done at once, perhaps before the
 * counters are cleared. Exit 77 if there is no Hopper.
 */
#include "arguments.h"

#include "cuda/params.h"
#include "gpu.h"

#include <stdlib.h>
#include <unistd.h>

/* SECONDS: after so many the kernel does not end. */
enum { SKIPPED = 77, CALLS = 16, REPLAYS = 60000, SECONDS = 60 };
/* 128 tiles of 128 rows: 4 of each head. By the bound there are 160, so the grid has a CTA an SM. */
enum { TOKENS = 512, KEYS = 8192, H_Q = 32, H_KV = 4, D = 128 };

static struct reason reason;

#define WORKS(call)                                                                                          \
    do {                                                                                                     \
        if (!(call)) printf("%s: %s\n", #call, reason.text), exit(1);                                        \
    } while (0)

static fmla_tensor tensor(fmla_dtype dtype, int ndim, const int64_t *shape)
{
    void *memory;
    size_t bytes = dtype.bits / 8;
    for (int i = 0; i < ndim; i++) bytes *= (size_t)shape[i];
    WORKS(gpu_alloc(&memory, bytes, &reason));
    WORKS(gpu_fill(memory, 0, bytes, &reason));
    return (fmla_tensor){memory, {FMLA_DEVICE_CUDA, 0}, ndim, dtype, shape, NULL, 0};
}

/* A captured call; its counters are at the start of the workspace. */
struct call {
    fmla_tensor q, k, out, starts_q, starts_k;
    void *workspace, *graph;
};

static void capture(struct call *c, fmla_dtype dtype, void *stream)
{
    static const int64_t q[] = {TOKENS, H_Q, D}, k[] = {KEYS, H_KV, D}, starts[] = {2};
    static const int32_t tokens[] = {0, TOKENS}, keys[] = {0, KEYS};
    fmla_mha_forward_args args = FMLA_INIT(fmla_mha_forward_args);
    c->q = tensor(dtype, 3, q), c->k = tensor(dtype, 3, k), c->out = tensor(dtype, 3, q);
    c->starts_q = tensor(i32, 1, starts), c->starts_k = tensor(i32, 1, starts);
    WORKS(gpu_upload(c->starts_q.data, tokens, sizeof tokens, &reason));
    WORKS(gpu_upload(c->starts_k.data, keys, sizeof keys, &reason));
    args.q = &c->q, args.k = args.v = &c->k, args.out = &c->out;
    args.cu_seqlens_q = &c->starts_q, args.cu_seqlens_k = &c->starts_k;
    args.kernel = "cuda-sm90", args.causal = 1, args.stream = stream;
    CHECK_OK(fmla_mha_forward_workspace_size(&args, &args.workspace_size, NULL));
    WORKS(gpu_alloc(&c->workspace, args.workspace_size, &reason));
    WORKS(gpu_fill(c->workspace, 0xff, args.workspace_size, &reason));
    args.workspace = c->workspace;
    CHECK_OK(fmla_prepare((fmla_device){FMLA_DEVICE_CUDA, 0}));
    WORKS(gpu_capture_begin(stream, &reason));
    CHECK_OK(fmla_mha_forward(&args));
    WORKS(gpu_capture_end(stream, &c->graph, &reason));
}

/* Replays a call; returns whether its last CTA gave up the counters. */
static bool replay(const struct call *c, void *stream)
{
    struct tile_counters counters;
    WORKS(gpu_graph_launch(c->graph, stream, &reason));
    WORKS(gpu_stream_wait(stream, &reason));
    WORKS(gpu_download(&counters, c->workspace, sizeof counters, &reason));
    return counters.ticket == 0;
}

int main(void)
{
    struct gpu_description gpu;
    struct call calls[CALLS];
    void *stream;
    if (!gpu_open(0, &reason) || !gpu_describe(0, &gpu, &reason) || gpu.major != 9) {
        printf("%s\nneeds a GPU of compute capability 9.0\n", reason.text);
        return SKIPPED;
    }
    alarm(SECONDS); /* ends the test if a kernel does not end */
    WORKS(gpu_stream_open(&stream, &reason));
    for (int i = 0; i < CALLS; i++) capture(&calls[i], i % 2 ? fp16 : bf16, stream);
    int kept = 0;
    for (int i = 0; i < REPLAYS; i++) kept += !replay(&calls[i % CALLS], stream);
    CHECK_EQ(kept, 0);
    for (int i = 0; i < CALLS; i++) gpu_graph_close(calls[i].graph);
    gpu_stream_close(stream);
    return check_done("test_gpu_replays");
}

/* SPDX-License-Identifier: MIT */
#include "gpu_stream.h"

#include "ptx_text.h"

#include <string.h>

/* The ring is as deep as shared memory allows: an SM needs some 70 KB in flight to read its share. */
enum { SLOTS = 12, SLOT_BYTES = 18432, LEAST_VECTORS = 4 };
enum { LOAD_THREADS = 512, LOAD_BLOCKS_PER_SM = 2, LOADS = 9 /* of 512 bytes, in flight per warp */ };

/* CTAs take equal shares of the chunks, one after another. Chunk i of a share goes to slot i mod 12;
 * before its copy is issued, chunk i - 12 must have arrived, and is summed if a sum is wanted. */
static const char ptx_bulk[] =
    ".version 8.0\n"
    ".target sm_90\n"
    ".address_size 64\n"
    ".extern .shared .align 128 .b8 ring[];\n"
    ".visible .entry stream(.param .u64 from, .param .u64 list, .param .u32 number, .param .u32 vector,\n"
    "                       .param .u64 sink) .maxntid 32\n"
    "{\n"
    ".shared .align 8 .b64 full[12];\n"
    ".reg .pred p, leader, summing;\n"
    ".reg .b32 n, i, k, end, bytes, words, size, first, count, slot, bar, bars, parity, tid, cta, ncta, w, "
    "s;\n"
    ".reg .b64 base, chunks, at, x, to;\n"
    "ld.param.u64 base, [from]; ld.param.u64 chunks, [list]; ld.param.u64 to, [sink];\n"
    "ld.param.u32 n, [number]; ld.param.u32 size, [vector];\n"
    "mov.u32 tid, %tid.x; mov.u32 cta, %ctaid.x; mov.u32 ncta, %nctaid.x;\n"
    "setp.eq.u32 leader, tid, 0;\n"
    "setp.ne.u64 summing, to, 0;\n"
    "div.u32 k, n, ncta; rem.u32 w, n, ncta;\n"
    "min.u32 i, cta, w; mad.lo.u32 i, cta, k, i;\n"
    "mov.u32 n, k;\n"
    "setp.lt.u32 p, cta, w;\n"
    "@p add.u32 n, n, 1;\n"
    "setp.eq.u32 p, n, 0;\n"
    "@p ret;\n"
    "mul.wide.u32 x, i, 8; add.u64 chunks, chunks, x;\n"
    "mov.u32 bars, full;\n"
    "mov.u32 bar, bars;\n"
    "mov.u32 k, 0;\n"
    "init:\n"
    "@leader mbarrier.init.shared.b64 [bar], 1;\n"
    "add.u32 bar, bar, 8; add.u32 k, k, 1;\n"
    "setp.lt.u32 p, k, 12;\n"
    "@p bra init;\n"
    "fence.mbarrier_init.release.cluster;\n"
    "fence.proxy.async;\n"
    "bar.warp.sync 0xffffffff;\n"
    "ld.global.v2.u32 {first, count}, [chunks];\n"
    "mov.u32 i, 0; mov.u32 s, 0; mov.u32 parity, 1;\n" /* 0 from the second round on, which waits first */
    "mov.u32 slot, ring; mov.u32 bar, bars;\n"
    "add.u32 end, n, 12;\n"
    "loop:\n"
    "setp.lt.u32 p, i, 12;\n"
    "@p bra ask;\n"
    "wait:\n"
    "mbarrier.try_wait.parity.shared.b64 p, [bar], parity;\n"
    "@!p bra wait;\n"
    "@!summing bra ask;\n"
    "sub.u32 k, i, 12; mul.wide.u32 x, k, 8; add.u64 x, x, chunks;\n"
    "ld.global.u32 words, [x+4];\n"
    "mul.lo.u32 words, words, size;\n" /* in bytes */
    "shl.b32 k, tid, 2;\n"
    "sum:\n"
    "setp.ge.u32 p, k, words;\n"
    "@p bra summed;\n"
    "add.u32 w, slot, k;\n"
    "ld.shared.u32 w, [w];\n"
    "add.u32 s, s, w; add.u32 k, k, 128;\n"
    "bra sum;\n"
    "summed:\n"
    "bar.warp.sync 0xffffffff;\n"
    "ask:\n"
    "setp.ge.u32 p, i, n;\n"
    "@p bra next;\n"
    "mul.lo.u32 bytes, count, size;\n"
    "mul.wide.u32 at, first, size; add.u64 at, at, base;\n"
    "@leader mbarrier.arrive.expect_tx.shared.b64 _, [bar], bytes;\n"
    "@leader cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [slot], [at], bytes, [bar];\n"
    "next:\n"
    "add.u32 i, i, 1;\n"
    "mul.wide.u32 x, i, 8; add.u64 x, x, chunks;\n"
    "setp.lt.u32 p, i, n;\n"
    "@p ld.global.v2.u32 {first, count}, [x];\n" /* loads during the wait for the next slot */
    "add.u32 slot, slot, 18432; add.u32 bar, bar, 8;\n"
    "sub.u32 k, bar, bars;\n"
    "setp.eq.u32 p, k, 96;\n"
    "@p mov.u32 slot, ring;\n"
    "@p mov.u32 bar, bars;\n"
    "@p xor.b32 parity, parity, 1;\n"
    "setp.lt.u32 p, i, end;\n"
    "@p bra loop;\n"
    "@summing red.global.add.u32 [to], s;\n"
    "ret;\n"
    "}\n";

/* Warp w takes chunks w, w + warps, …, each at once: nine loads of 16 bytes per thread, of which those
 * past the chunk's end are skipped. The sum, unused in a timed run, keeps the loads alive. */
static const char load_head[] =
    ".version 8.0\n"
    ".target sm_80\n"
    ".address_size 64\n"
    ".visible .entry stream(.param .u64 from, .param .u64 list, .param .u32 number, .param .u32 vector,\n"
    "                       .param .u64 sink) .maxntid 512\n"
    "{\n"
    ".reg .pred p;\n"
    ".reg .b32 n, i, unit, units, size, first, count, lane, warps, s, r<36>;\n"
    ".reg .b64 base, chunks, at, x, to;\n"
    "ld.param.u64 base, [from]; ld.param.u64 chunks, [list]; ld.param.u64 to, [sink];\n"
    "ld.param.u32 n, [number]; ld.param.u32 size, [vector];\n"
    "mov.u32 i, %ctaid.x; mov.u32 unit, %ntid.x; mov.u32 s, %tid.x; mov.u32 warps, %nctaid.x;\n"
    "mad.lo.u32 i, i, unit, s; shr.u32 i, i, 5;\n"
    "mul.lo.u32 warps, warps, unit; shr.u32 warps, warps, 5;\n"
    "and.b32 lane, s, 31;\n"
    "mov.u32 s, 0;\n"
    "setp.ge.u32 p, i, n;\n"
    "@p ret;\n"
    "mul.wide.u32 x, i, 8; add.u64 x, x, chunks;\n"
    "ld.global.v2.u32 {first, count}, [x];\n"
    "loop:\n"
    "mul.wide.u32 at, first, size; add.u64 at, at, base;\n"
    "mul.wide.u32 x, lane, 16; add.u64 at, at, x;\n"
    "mul.lo.u32 units, count, size; shr.u32 units, units, 4;\n"
    "mov.u32 unit, lane;\n";

static const char load_tail[] = "add.u32 i, i, warps;\n"
                                "setp.lt.u32 p, i, n;\n"
                                "@p bra loop;\n"
                                "setp.ne.u64 p, to, 0;\n"
                                "@p red.global.add.u32 [to], s;\n"
                                "ret;\n"
                                "}\n";

static void write_load(FILE *text, const void *unused)
{
    (void)unused;
    fprintf(text, "%s", load_head);
    for (int r = 0; r < 4 * LOADS; r++) fprintf(text, "mov.u32 r%d, 0;\n", r);
    for (int k = 0; k < LOADS; k++) {
        fprintf(text, "setp.lt.u32 p, unit, units;\n@p ld.global.v4.u32 "), ptx_list(text, "r", 4 * k, 4);
        fprintf(text, ", [at+%d];\nadd.u32 unit, unit, 32;\n", 512 * k);
    }
    fprintf(text, "add.u32 unit, i, warps;\n" /* load the next chunk's entry with the data */
                  "mul.wide.u32 x, unit, 8; add.u64 x, x, chunks;\n"
                  "setp.lt.u32 p, unit, n;\n"
                  "@p ld.global.v2.u32 {first, count}, [x];\n"
                  "bar.warp.sync 0xffffffff;\n"); /* issue all loads before summing any */
    for (int r = 0; r < 4 * LOADS; r++) fprintf(text, "add.u32 s, s, r%d;\n", r);
    fprintf(text, "%s", load_tail);
}

bool gpu_stream_kernel_open(struct gpu_stream *stream, const struct gpu_description *gpu,
                            struct reason *reason)
{
    memset(stream, 0, sizeof *stream);
    stream->bulk = gpu->major == 9;
    stream->threads = stream->bulk ? 32 : LOAD_THREADS;
    stream->blocks = (unsigned)gpu->multiprocessors * (stream->bulk ? 1 : LOAD_BLOCKS_PER_SM);
    stream->shared = stream->bulk ? SLOTS * SLOT_BYTES : 0;
    return (stream->bulk ? gpu_module_open(&stream->module, ptx_bulk, reason)
                         : ptx_open(&stream->module, write_load, NULL, reason)) &&
           gpu_kernel(&stream->kernel, stream->module, "stream", reason) &&
           (!stream->shared || gpu_kernel_shared(stream->kernel, stream->shared, reason));
}

void gpu_stream_kernel_close(struct gpu_stream *stream)
{
    gpu_module_close(stream->module);
    memset(stream, 0, sizeof *stream);
}

uint32_t gpu_stream_most(const struct gpu_stream *stream, uint32_t vector_bytes, int64_t vectors)
{
    const int64_t room = (stream->bulk ? SLOT_BYTES : LOADS * 512) / vector_bytes;
    const int64_t share = vectors / ((int64_t)stream->blocks * SLOTS);
    const int64_t most = stream->bulk && share < room ? share : room;
    return (uint32_t)(most < LEAST_VECTORS ? LEAST_VECTORS : most);
}

bool gpu_stream_list_open(struct gpu_stream_list *list, const void *base, uint32_t vector_bytes,
                          const struct gpu_stream_chunk *chunks, int64_t count, struct reason *reason)
{
    *list = (struct gpu_stream_list){base, vector_bytes, (uint32_t)count, NULL};
    if (count > INT32_MAX) return reason_set(reason, "there are more than 2^31 chunks to read");
    const size_t bytes = (size_t)count * sizeof *chunks;
    return gpu_alloc(&list->chunks, bytes, reason) && gpu_upload(list->chunks, chunks, bytes, reason);
}

bool gpu_stream_send(const struct gpu_stream *stream, const struct gpu_stream_list *list, void *sum, void *to,
                     struct reason *reason)
{
    struct gpu_stream_list of = *list;
    void *parameters[] = {&of.base, &of.chunks, &of.count, &of.vector_bytes, &sum};
    return gpu_launch(stream->kernel, stream->blocks, stream->threads, stream->shared, to, parameters,
                      reason);
}

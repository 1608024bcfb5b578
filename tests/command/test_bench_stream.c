/* SPDX-License-Identifier: MIT
 *
 * Tests the vectors read by bench's bare stream, and the fixed-length batch beside a varying one. On a
 * GPU, the stream's kernels sum what they read, and every word must have been read once; --gpu: there must
 * be a GPU. Run in a folder where a file may be created.
 */
#include "../unit/check.h"

#include "bench_report.h"
#include "bench_stream.h"
#include "gpu.h"

#include <stdlib.h>
#include <unistd.h>

static const int32_t ragged[] = {1, 0, 63, 64, 65, 200, 17, 128};
static const struct shape shapes[] = {
    {OP_DENSE_DECODE, 8, 1, 64, 2, 1, 576, .page_size = 64, .lengths = ragged},
    {OP_DENSE_DECODE, 8, 1, 64, 2, 2, 512, .page_size = 17, .lengths = ragged},
    {OP_DENSE_DECODE, 8, 1, 64, 3, 3, 576, .page_size = 1, .lengths = ragged},
    {OP_DENSE_DECODE, 3, 2, 100, 1, 1, 576, .page_size = 0}, /* without a block table */
    {OP_DENSE_DECODE, 16, 1, 300, 1, 1, 576, .page_size = 64, .varlen = true},
    /* The ring wraps a few times. */
    {OP_DENSE_DECODE, 32, 1, 4096, 1, 1, 576, .page_size = 64, .varlen = true},
    {OP_DENSE_DECODE, 16, 1, 4096, 1, 1, 512, .page_size = 64},
    {OP_DENSE_DECODE, 8, 1, 64, 2, 1, 576, .page_size = 17, .format = FMLA_KV_FP8_656, .lengths = ragged},
    {OP_DENSE_DECODE, 8, 1, 64, 2, 1, 576, .page_size = 64, .format = FMLA_KV_FP8_576, .lengths = ragged},
    {OP_DENSE_DECODE, 8, 1, 64, 2, 1, 512, .page_size = 64, .format = FMLA_KV_FP8_584, .lengths = ragged},
};
enum { SHAPES = sizeof shapes / sizeof *shapes };

static void must(bool good, const struct reason *reason)
{
    if (good) return;
    fprintf(stderr, "%s\n", reason->text);
    exit(1);
}

/* Returns the position of vector `head` of key t of request r, from the table. */
static int64_t place(const struct call *call, int64_t r, int64_t t, int64_t head)
{
    const int64_t *cache = call_tensor(call, "kv_cache")->shape;
    const fmla_tensor *table = call_tensor(call, "block_table");
    const int64_t page = table ? ((const int32_t *)table->data)[r * table->shape[1] + t / cache[1]] : r;
    return (page * cache[1] + t % cache[1]) * cache[2] + head;
}

/* Checks that the chunks, vector by vector, are the keys of the requests in order, and that their bytes
 * are the cache bytes that the floor counts. */
static void check_chunks(const struct call *call, uint32_t most)
{
    const int64_t count = bench_stream_chunks(call, most, NULL), h_kv = call_size(call, DIM_h_kv);
    const int32_t *lengths = call_tensor(call, "seqlens")->data;
    struct gpu_stream_chunk *chunks = malloc((size_t)(count + 1) * sizeof *chunks);
    if (!chunks) exit(1);
    CHECK_EQ(bench_stream_chunks(call, most, chunks), count);
    int64_t at = 0, of_chunk = 0, vectors = 0;
    for (int64_t r = 0; r < call_size(call, DIM_b); r++)
        for (int64_t v = 0; v < lengths[r] * h_kv; v++, vectors++) {
            const int64_t expected = place(call, r, v / h_kv, v % h_kv);
            const int64_t came = at < count ? chunks[at].first + of_chunk : -1;
            CHECK(came == expected, "request %" PRId64 ", vector %" PRId64 ": %" PRId64 ", not %" PRId64, r,
                  v, came, expected);
            if (at < count && ++of_chunk == chunks[at].count) at++, of_chunk = 0;
        }
    CHECK(at == count && !of_chunk, "%" PRId64 " of %" PRId64 " chunks hold keys", at, count);
    for (int64_t i = 0; i < count; i++)
        CHECK(chunks[i].count >= 1 && chunks[i].count <= most, "a chunk of %u vectors, at most %u",
              chunks[i].count, most);
    CHECK_EQ(bench_stream_vectors(call), vectors);
    const double of_q_and_out = 2.0 * (double)(call_size(call, DIM_b) * call_size(call, DIM_s_q)) *
                                (double)(call_size(call, DIM_h_q) * (call_size(call, DIM_d_qk) + CALL_D_V));
    const double bytes = (double)vectors * bench_stream_vector_bytes(call);
    CHECK(bytes == call_work(call).bytes - of_q_and_out, "%.0f bytes, the floor's %.0f", bytes,
          call_work(call).bytes - of_q_and_out);
    free(chunks);
}

static void check_fixed(const struct call *call)
{
    int64_t keys = 0, least = INT32_MAX, most = 0;
    const int64_t b = call_size(call, DIM_b);
    int32_t *fixed = malloc((size_t)b * sizeof *fixed);
    if (!fixed) exit(1);
    make_fixed_lengths(call_tensor(call, "seqlens")->data, b, fixed);
    for (int64_t r = 0; r < b; r++) {
        keys += fixed[r];
        if (fixed[r] < least) least = fixed[r];
        if (fixed[r] > most) most = fixed[r];
    }
    CHECK_EQ(keys, (int64_t)call_work(call).keys);
    CHECK(most - least <= 1, "lengths of %" PRId64 " to %" PRId64, least, most);
    free(fixed);
}

/* A list of hashes, each equal to its index, and the hashes reported for a kernel, by the last digits; "":
 * none. */
static const struct {
    const char *file, *target;
} hashed[] = {
    {"any/merge.cu", "sm_90"},
    {"sm80/dense_decode/dense_decode_bf16.cu", "sm_80"},
    {"sm80/dense_decode/dense_decode_bf16.cu", "sm_90a"},
    {"sm80/dense_decode/dense_decode_fp16.cu", "sm_90"},
    {"sm90/dense_decode/dense_decode_fp16.cu", "sm_90a"},
    {"sm90/dense_decode/dense_decode_bf16.cu", "sm_90a"},
    {"any/sparse_decode.cu", "sm_90"},
    {"any/sparse_decode.cu", "sm_80"},
    {"sm90/sparse_decode/small/sparse_decode_rope.cu", "sm_90a"},
    {"sm90/sparse_decode/sparse_decode_rope.cu", "sm_90a"},
    {"any/sparse_prefill.cu", "sm_90"},
    {"sm90/sparse_prefill/sparse_prefill_bf16.cu", "sm_90a"},
    {"sm90/sparse_prefill/sparse_prefill_rope.cu", "sm_90a"},
    {"any/mha_forward.cu", "sm_90"},
    {"sm90/mha_forward/mha_forward_bf16.cu", "sm_90a"},
    {"sm80/dense_decode/dense_decode_bytes.cu", "sm_90"},
    {"sm80/sparse_decode/sparse_decode_f32.cu", "sm_90"},
    {"sm80/sparse_decode/sparse_decode_any.cu", "sm_90"},
    {"sm80/mha_backward/mha_backward_fp16.cu", "sm_90"},
    {"sm90/sparse_decode/plain/sparse_decode_fp16.cu", "sm_90a"}, /* 20 */
    {"sm90/sparse_decode/sparse_decode_no_rope.cu", "sm_90a"},
    {"sm90/sparse_decode/small/sparse_decode_no_rope.cu", "sm_90a"},
    {"sm90/sparse_prefill/sparse_prefill_no_rope.cu", "sm_90a"},
};
static const struct {
    const char *kernel;
    struct shape shape;
    int major;
    const char *digits;
} told[] = {
    {"cuda-sm80", {.op = OP_DENSE_DECODE}, 9, "3"},
    {"cuda-sm80", {.op = OP_DENSE_DECODE, .type = ELEMENT_FP16}, 9, "4"},
    {"cuda-sm80", {.op = OP_DENSE_DECODE, .type = ELEMENT_FP16}, 8, ""},
    {"cuda-sm90", {.op = OP_DENSE_DECODE, .type = ELEMENT_FP16}, 9, "5"},
    {"cuda", {.op = OP_MERGE}, 9, "1"},
    {"cuda", {.op = OP_SPARSE_DECODE, .format = FMLA_KV_FP8_656}, 9, "7"},
    {"cuda", {.op = OP_SPARSE_DECODE, .format = FMLA_KV_FP8_656}, 8, "8"},
    {"cuda-sm90", {.op = OP_SPARSE_DECODE, .format = FMLA_KV_FP8_656}, 9, "a9"}, /* large batches and small */
    {"cuda-sm90-64", {.op = OP_SPARSE_DECODE, .format = FMLA_KV_FP8_656}, 9, "a"},
    {"cuda-sm90-16", {.op = OP_SPARSE_DECODE, .format = FMLA_KV_FP8_656}, 9, "9"},
    {"cuda", {.op = OP_SPARSE_PREFILL, .format = FMLA_KV_FP8_656}, 9, "b"},
    {"cuda-sm90", {.op = OP_SPARSE_PREFILL, .format = FMLA_KV_FP8_656}, 9, "d"},
    {"cuda-sm90", {.op = OP_SPARSE_PREFILL, .format = FMLA_KV_FP8_584}, 9, "d"},
    {"cuda-sm90", {.op = OP_SPARSE_PREFILL, .format = FMLA_KV_BF16}, 9, "c"},
    {"cuda-sm90", {.op = OP_SPARSE_DECODE, .type = ELEMENT_FP16, .format = FMLA_KV_FP16}, 9, "4"},
    {"cuda-sm90", {.op = OP_SPARSE_DECODE, .format = FMLA_KV_FP8_528}, 9, "56"},
    {"cuda-sm90-16", {.op = OP_SPARSE_DECODE, .format = FMLA_KV_FP8_528_F32}, 9, "6"},
    {"cuda-sm90", {.op = OP_SPARSE_PREFILL, .format = FMLA_KV_FP4_288}, 9, "7"},
    {"cuda", {.op = OP_MHA_FORWARD}, 9, "e"},
    {"cuda-sm90", {.op = OP_MHA_FORWARD}, 9, "f"},
    {"cuda-sm80", {.op = OP_DENSE_DECODE, .format = FMLA_KV_FP8_576}, 9, "0"},  /* of 16 */
    {"cuda-sm80", {.op = OP_SPARSE_DECODE, .format = FMLA_KV_FP8_656}, 9, "1"}, /* of 17, and so on */
    {"cuda-sm80", {.op = OP_SPARSE_PREFILL, .format = FMLA_KV_FP8_528_F32}, 9, "1"},
    {"cuda-sm80",
     {.op = OP_SPARSE_DECODE, .format = FMLA_KV_FP8_528, .extra_topk = 64, .extra_format = FMLA_KV_FP4_288},
     9,
     "2"},
    {"cuda-sm80", {.op = OP_SPARSE_DECODE, .format = FMLA_KV_FP8_584}, 9, ""},
    {"cuda-sm80", {.op = OP_MHA_BACKWARD, .type = ELEMENT_FP16}, 9, "3"},
    {"another", {.op = OP_SPARSE_DECODE, .format = FMLA_KV_BF16}, 9, ""},
};

static void check_code(void)
{
    static const char path[] = "hashes";
    char hash[BENCH_CODE] = "";
    FILE *file = fopen(path, "w");
    if (!file || fputs("# toolkit 13.0.88\n", file) < 0) exit(1);
    for (unsigned i = 0; i < sizeof hashed / sizeof *hashed; i++)
        fprintf(file, "%064x  src/cuda/%s %s\n", i + 1, hashed[i].file, hashed[i].target);
    if (fclose(file)) exit(1);
    for (size_t i = 0; i < sizeof told / sizeof *told; i++) {
        const struct bench_row row = {.shape = &told[i].shape, .kernel = told[i].kernel};
        const size_t count = strlen(told[i].digits);
        const bool found = bench_report_code(path, &row, told[i].major, 0, hash);
        CHECK(found == (count > 0), "%s, line %zu: %s", told[i].kernel, i, hash);
        CHECK(!found || strlen(hash) == 65 * count - 1, "%s, line %zu: %s", told[i].kernel, i, hash);
        for (size_t k = 0; found && k < count; k++)
            CHECK(hash[65 * k + 63] == told[i].digits[k] && hash[65 * k + 64] == (k + 1 < count ? ' ' : '\0'),
                  "%s, line %zu: %s", told[i].kernel, i, hash);
        CHECK(!bench_report_code("there is no such file", &row, told[i].major, 0, hash), "of no file: %s",
              hash);
    }
    fmla_capability has = FMLA_INIT(fmla_capability); /* none is missing */
    for (int64_t i = 0; fmla_capabilities((fmla_device){FMLA_DEVICE_CUDA, 0}, i, &has) == FMLA_OK; i++) {
        if (!has.kernel || strncmp(has.operation, "sparse_", 7) != 0) continue;
        if (!policies[operation_named(has.operation)].work) continue; /* plans have no rows */
        const struct shape shape = {.op = operation_named(has.operation), .format = FMLA_KV_FP8_656};
        const struct bench_row row = {.shape = &shape, .kernel = has.kernel};
        CHECK(bench_report_code(path, &row, 9, 0, hash), "%s of %s: none", row.kernel, has.operation);
    }
    unlink(path);
}

/* ---- On a GPU ------------------------------------------------------------------------------- */

static uint32_t sum_of(const struct call *call, int64_t vector, int64_t vectors)
{
    const fmla_tensor *cache = call_tensor(call, "kv_cache");
    const int64_t words = cache->shape[3] * element_bytes(cache->dtype) / 4;
    uint32_t sum = 0, word;
    for (int64_t i = vector * words; i < (vector + vectors) * words; i++) {
        memcpy(&word, (const char *)cache->data + 4 * i, 4);
        sum += word;
    }
    return sum;
}

static uint32_t sum_on_gpu(const struct gpu_stream *stream, const struct gpu_stream_list *list)
{
    struct reason reason;
    void *to = NULL, *sum = NULL;
    uint32_t came = 0;
    must(gpu_stream_open(&to, &reason) && gpu_alloc(&sum, 4, &reason) && gpu_fill(sum, 0, 4, &reason),
         &reason);
    must(gpu_stream_send(stream, list, NULL, to, &reason) &&
             gpu_stream_send(stream, list, sum, to, &reason) && gpu_stream_wait(to, &reason) &&
             gpu_download(&came, sum, 4, &reason),
         &reason);
    gpu_free(sum), gpu_stream_close(to);
    return came;
}

static void check_on_gpu(const struct call *call, const struct gpu_stream *stream)
{
    struct reason reason;
    void *cache;
    struct gpu_stream_list list;
    const fmla_tensor *host = call_tensor(call, "kv_cache");
    const int32_t *lengths = call_tensor(call, "seqlens")->data;
    const size_t bytes = call_bytes(host);
    must(gpu_alloc(&cache, bytes, &reason) && gpu_upload(cache, host->data, bytes, &reason) &&
             bench_stream_open(&list, stream, call, cache, &reason),
         &reason);
    uint32_t expected = 0;
    for (int64_t r = 0; r < call_size(call, DIM_b); r++)
        for (int64_t t = 0; t < lengths[r]; t++)
            expected += sum_of(call, place(call, r, t, 0), host->shape[2]);
    uint32_t came = sum_on_gpu(stream, &list);
    CHECK(came == expected, "%s: the sum is %08x, not %08x", stream->bulk ? "bulk copies" : "loads", came,
          expected);
    /* Without its last chunk the stream's sum must be smaller by it. */
    struct gpu_stream_chunk last;
    list.count--;
    must(gpu_download(&last, (const struct gpu_stream_chunk *)list.chunks + list.count, sizeof last, &reason),
         &reason);
    const uint32_t of_last = sum_of(call, last.first, last.count);
    came = sum_on_gpu(stream, &list);
    CHECK(of_last && came == expected - of_last, "%s, a chunk less: the sum is %08x, not %08x",
          stream->bulk ? "bulk copies" : "loads", came, expected - of_last);
    gpu_free(list.chunks), gpu_free(cache);
}

/* Loads work everywhere, so they are also tested on compute capability 9. */
static void open_kernels(struct gpu_stream kernels[2], int *count)
{
    struct gpu_description gpu;
    struct reason reason;
    must(gpu_describe(0, &gpu, &reason), &reason);
    printf("on %s\n", gpu.name);
    *count = gpu.major == 9 ? 2 : 1;
    must(gpu_stream_kernel_open(&kernels[0], &gpu, &reason), &reason);
    gpu.major = 8;
    if (*count == 2) must(gpu_stream_kernel_open(&kernels[1], &gpu, &reason), &reason);
}

int main(int argc, char **argv)
{
    struct reason reason;
    struct gpu_stream kernels[2];
    int count = 0;
    if (gpu_open(0, &reason)) {
        open_kernels(kernels, &count);
    } else {
        printf("%s: the kernels were not run\n", reason.text);
        if (argc > 1 && !strcmp(argv[1], "--gpu")) return 1;
    }
    for (int i = 0; i < SHAPES; i++) {
        struct call batch;
        must(make_call(&batch, &shapes[i], &reason), &reason);
        for (uint32_t most = 1; most <= 64; most *= 4) check_chunks(&batch, most);
        check_fixed(&batch);
        CHECK_EQ(bench_stream_can(&batch), shapes[i].format != FMLA_KV_FP8_584);
        for (int k = 0; bench_stream_can(&batch) && k < count; k++) check_on_gpu(&batch, &kernels[k]);
        call_close(&batch);
    }
    for (int k = 0; k < count; k++) gpu_stream_kernel_close(&kernels[k]);
    check_code();
    return check_done("bench_stream");
}

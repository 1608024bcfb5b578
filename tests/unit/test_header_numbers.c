/* SPDX-License-Identifier: MIT
 *
 * Tests the numbers in the header's comments: workspace sizes, which are computed here for calls on fake GPUs
 * and on the CPU, and the largest max_s_q. And tickets, which no two processes share.
 */
#include "fake_cuda/drawn_calls.h"
#include "head_sizes.h"

#include "cuda/launch.h"

#include <stdarg.h>

/* ---- The header's text -------------------------------------------------------------------------- */

static char header[1 << 17];

/* Reads the header; line ends, stars of comments and runs of spaces become one space. */
static void read_header(void)
{
    FILE *file = fopen(HEADER, "r");
    size_t length = 0;
    if (!file) abort();
    for (int c; (c = getc(file)) != EOF && length + 1 < sizeof header;) {
        const bool space = c == ' ' || c == '\n' || (c == '*' && length && header[length - 1] == ' ');
        if (!space)
            header[length++] = (char)c;
        else if (length && header[length - 1] != ' ')
            header[length++] = ' ';
    }
    fclose(file);
}

/* Reads the `count` numbers of a sentence, as scanf does, from where `begin` stands. */
__attribute__((format(scanf, 3, 4))) static void read_numbers(const char *begin, int count,
                                                              const char *format, ...)
{
    va_list numbers;
    read_header();
    const char *const at = strstr(header, begin);
    va_start(numbers, format);
    CHECK(at && vsscanf(at, format, numbers) == count, "the header has no \"%s\"", format);
    va_end(numbers);
}

/* ---- Workspaces --------------------------------------------------------------------------------- */

static size_t ask_bytes(enum operation operation, const struct layout *layout, fmla_device device)
{
    static struct held held[MAX_TENSORS];
    static _Alignas(16) char args[MOST_ARGS];
    const struct shape shape = {.of = *layout};
    struct answer answer = {0};
    make_call(operation, args, held, &shape, device);
    CHECK_OK(described_ask(operation, ASK_BYTES, args, &answer));
    return answer.bytes;
}

static const fmla_device gpu_0 = {FMLA_DEVICE_CUDA, 0}, host = {FMLA_DEVICE_CPU, 0};

/* Returns the most workspace that a call of sparse prefill takes, of up to three tokens an SM. */
static int64_t most_of_prefill(int32_t format)
{
    static const int64_t heads[] = {1, 16, 64, 65, 128, 192};
    size_t most = 0;
    for (int64_t tokens = 1; tokens <= 3 * fake->sms; tokens++)
        for (size_t h = 0; h < sizeof heads / sizeof *heads; h++)
            for (int64_t topk = 64; topk <= 16384; topk *= 2) {
                struct layout l = {.s_q = tokens, .h_q = heads[h], .h_kv = 1, .page_size = 64, .topk = topk};
                l.format = format, l.flat = format == FMLA_KV_BF16;
                const size_t bytes = ask_bytes(OP_SPARSE_PREFILL, &l, gpu_0);
                if (bytes > most) most = bytes;
            }
    return (int64_t)most;
}

static void sparse_prefill(void)
{
    long long bf16_bytes[1] = {-1}, bytes[2] = {-1, -1};
    read_numbers("up to 68096 bytes per SM", 1, "up to %lld bytes per SM", &bf16_bytes[0]);
    read_numbers("over pages of bytes up to", 2, "over pages of bytes up to %lld bytes per SM and %lld more",
                 &bytes[0], &bytes[1]);
    const int64_t of_bf16 = most_of_prefill(FMLA_KV_BF16), of_bytes = most_of_prefill(FMLA_KV_FP8_656);
    CHECK_EQ(of_bf16, bf16_bytes[0] * fake->sms);
    CHECK(of_bytes > bytes[0] * fake->sms && of_bytes <= bytes[0] * fake->sms + bytes[1],
          "%lld bytes for %d SMs", (long long)of_bytes, fake->sms);
}

static void sparse_prefill_elsewhere(void)
{
    fake->capability = 100;
    CHECK_EQ(most_of_prefill(FMLA_KV_BF16), 0);
    CHECK_EQ(most_of_prefill(FMLA_KV_FP8_656), 0);
}

static const struct layout heads = {
    .b = 3, .s_q = 1000, .s_k = 1000, .h_q = 4, .h_kv = 2, .d_qk = 192, .d_v = 128, .num_splits = 1};

static void mha_forward(void)
{
    long long bytes[2] = {-1, -1};
    read_numbers("it is 256 bytes on Hopper", 2, "it is %lld bytes on Hopper and %lld on other GPUs",
                 &bytes[0], &bytes[1]);
    CHECK_EQ((int64_t)ask_bytes(OP_MHA_FORWARD, &heads, gpu_0), bytes[0]);
    CHECK_EQ(bytes[1], 0);
}

static void mha_forward_elsewhere(void)
{
    fake->capability = 80;
    CHECK_EQ((int64_t)ask_bytes(OP_MHA_FORWARD, &heads, gpu_0), 0);
}

/* Rows of whole tiles: tokens are a multiple of every tile here. */
static void mha_backward(void)
{
    long long bytes[2] = {-1, -1};
    struct layout l = heads;
    read_numbers("on Hopper 4 · d_qk", 2, "on Hopper %lld · d_qk + %lld bytes per row", &bytes[0], &bytes[1]);
    for (int i = 0; i < HEAD_D_QKS; i++) {
        l.d_qk = head_d_qk[i], l.d_v = l.d_qk < 128 ? 64 : l.d_qk > 192 ? 256 : 128, l.s_q = 1 << 14;
        const int64_t rows = l.b * l.s_q * l.h_q, each = bytes[0] * l.d_qk + bytes[1],
                      size = (int64_t)ask_bytes(OP_MHA_BACKWARD, &l, gpu_0);
        CHECK(size >= rows * each && size <= rows * (each + 1), "%lld bytes, %lld rows of %lld",
              (long long)size, (long long)rows, (long long)each);
    }
}

/* Scratch and rounding are the same for both calls, whose sizes are multiples of a cache line. */
static void mha_backward_on_cpu(void)
{
    long long per[3] = {-1, -1, -1};
    struct layout few = heads, many = heads;
    read_numbers(
        "on the CPU it is 8 bytes per row", 3,
        "on the CPU it is %lld bytes per row, %lld bytes per 64 rows of a head, %lld bytes per request",
        &per[0], &per[1], &per[2]);
    few.b = 64, many.b = 64 * 1025, few.s_q = many.s_q = 64;
    const int64_t more = many.b - few.b, rows = more * few.s_q * few.h_q;
    CHECK_EQ((int64_t)(ask_bytes(OP_MHA_BACKWARD, &many, host) - ask_bytes(OP_MHA_BACKWARD, &few, host)),
             rows * per[0] + rows / 64 * per[1] + more * per[2]);
}

/* ---- max_s_q, max_s_k --------------------------------------------------------------------------- */

static void longest_request(void)
{
    static const char *const names[] = {"max_s_q", "max_s_k"};
    static struct held held[MAX_TENSORS];
    static _Alignas(16) char args[MOST_ARGS];
    const enum operation operations[] = {OP_MHA_FORWARD, OP_MHA_BACKWARD};
    long long bits[2] = {-1, -1};
    read_numbers("upper bounds of a request's tokens and keys, below", 2,
                 "upper bounds of a request's tokens and keys, below %lld^%lld", &bits[0], &bits[1]);
    CHECK_EQ(bits[0], 2);
    if (bits[1] < 0 || bits[1] > 62) return;
    for (int i = 0; i < 4; i++) {
        const enum operation operation = operations[i / 2];
        struct shape shape = {.of = heads};
        struct answer answer = {0};
        shape.of.flat = true, shape.of.tokens_q = shape.of.tokens_k = 100, shape.of.splits = 4;
        make_call(operation, args, held, &shape, host);
        int64_t *const most = option_at(operation, args, names[i % 2]);
        *most = (INT64_C(1) << bits[1]) - 1;
        CHECK_OK(described_ask(operation, ASK_BYTES, args, &answer));
        ++*most;
        check_rejected(names[i % 2], described_ask(operation, ASK_BYTES, args, &answer),
                       FMLA_INVALID_ARGUMENT, descriptors[operation].name, names[i % 2],
                       "2147483648|must be in [0, 2147483647]");
    }
}

/* ---- Tickets ------------------------------------------------------------------------------------- */

/* Launches once in each of two processes, and many times in this one. */
static void tickets(void)
{
    enum { MANY = 1000, PROCESSES = 8, TICKET_BITS = 40 /* that the kernels compare */ };
    static uint64_t seen[PROCESSES + MANY];
    int pipes[2];
    if (pipe(pipes)) abort();
    for (int i = 0; i < PROCESSES; i++) {
        const pid_t pid = fork();
        if (!pid) {
            const uint64_t ticket = cuda_ticket();
            _exit(write(pipes[1], &ticket, sizeof ticket) != sizeof ticket);
        }
        int status = -1;
        CHECK(pid > 0 && waitpid(pid, &status, 0) == pid && !status, "child %d", i);
        if (read(pipes[0], &seen[i], sizeof seen[i]) != sizeof seen[i]) abort();
    }
    for (int i = 0; i < MANY; i++) seen[PROCESSES + i] = cuda_ticket();
    int equal = 0;
    for (int i = 0; i < PROCESSES + MANY; i++)
        for (int k = 0; k < i; k++) equal += (seen[i] ^ seen[k]) << (64 - TICKET_BITS) == 0;
    CHECK_EQ(equal, 0);
}

int main(int argc, char **argv)
{
    return RUN_SCENARIOS(argc, argv, "test_header_numbers", sparse_prefill, sparse_prefill_elsewhere,
                         mha_forward, mha_forward_elsewhere, mha_backward, mha_backward_on_cpu,
                         longest_request, tickets);
}

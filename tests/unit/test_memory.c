/* SPDX-License-Identifier: MIT
 *
 * A call uses no memory except its tensors and the queried workspace: the process's peak resident size
 * does not grow during a call, with both resident before it.
 */
#include "filled.h"

#include <limits.h>

enum { B = 4, S_K = 2048, PAGE = 64, SKIPPED = 77 };

/* Allowed growth in KiB: thread stacks, of which longer calls touch a little more. A copy of the cache (9
 * MiB) or of one request's partial results (256 KiB per split) is more. */
enum { ALLOWED = 192 };

/* A thread's first participation touches its stack, which does not count as the call's: one of these calls
 * must not grow. */
enum { CALLS = 8 };

/* Returns a line of /proc/self/status in KiB; -1 if there is none. */
static long status_of(const char *name)
{
    char line[256];
    long value = -1;
    FILE *file = fopen("/proc/self/status", "r");
    while (file && value < 0 && fgets(line, sizeof line, file))
        if (!strncmp(line, name, strlen(name))) value = strtol(line + strlen(name) + 1, NULL, 10);
    if (file) fclose(file);
    return value;
}

/* Resets the peak to the current size. */
static int reset_peak(void)
{
    FILE *file = fopen("/proc/self/clear_refs", "w");
    if (!file) return 0;
    const int written = fputs("5", file) >= 0;
    return fclose(file) == 0 && written;
}

int main(void)
{
    const struct layout layout =
        DESIGNATED(.b = B, .s_q = 1, .h_q = 128, .h_kv = 1, .d_qk = 576, .d_v = 512, .pages = B * S_K / PAGE,
                   .page_size = PAGE, .max_pages = S_K / PAGE, .type = {FMLA_TYPE_BFLOAT, 16, 1},
                   .has = HAS_TABLE | HAS_LSE);
    static struct dense_decode_call c;
    named_make(OP_DENSE_DECODE, &c.args, c.held, &layout, place_filled);
    int32_t *const lengths = c.seqlens.tensor.data;
    CHECK_EQ(fmla_prepare((fmla_device){FMLA_DEVICE_CPU, 0}), FMLA_OK); /* starts the threads */
    fmla_dense_decode_args args = c.args;
    for (int invariant = 0; invariant < 2; invariant++) {
        args.batch_invariant = invariant;
        size_t bytes = 0;
        CHECK_EQ(fmla_dense_decode_workspace_size(&args, &bytes, NULL), FMLA_OK);
        args.workspace = aligned_alloc(64, (bytes + 63) / 64 * 64);
        args.workspace_size = bytes;
        CHECK(args.workspace, "no memory for %zu bytes", bytes);
        if (!args.workspace) break;
        memset(args.workspace, 1, bytes);
        for (int r = 0; r < B; r++) lengths[r] = 1;
        CHECK_EQ(fmla_dense_decode(&args), FMLA_OK);
        for (int r = 0; r < B; r++) lengths[r] = S_K - r;
        (void)status_of("VmRSS"); /* memory for reading is resident too */
        long least = LONG_MAX;
        for (int call = 0; call < CALLS && least > ALLOWED; call++) {
            const int counted = reset_peak();
            const long before = status_of("VmRSS");
            if (!counted || before < 0) {
                puts("needs a system that tells the largest resident size of a process");
                free(args.workspace);
                return SKIPPED;
            }
            CHECK_EQ(fmla_dense_decode(&args), FMLA_OK);
            const long after = status_of("VmHWM");
            printf("workspace %zu bytes; resident %ld KiB before the call, at most %ld in it\n", bytes,
                   before, after);
            if (after - before < least) least = after - before;
        }
        CHECK(least <= ALLOWED, "grew by %ld KiB over each of %d calls", least, CALLS);
        free(args.workspace);
    }
    return check_done("test_memory");
}

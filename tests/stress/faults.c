/* SPDX-License-Identifier: MIT */
#define _GNU_SOURCE /* popen */
#include "stress.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static volatile unsigned char sink;

#define DEFECT(name, ...)                                                                                    \
    static void name(const struct device_blocks *blocks, const fmla_tensor *output,                          \
                     const fmla_tensor *given, struct device_scratch *workspace)                             \
    {                                                                                                        \
        const struct device_scratch out = device_place(blocks, output->data),                                \
                                    input = device_place(blocks, given->data);                               \
        (void)out, (void)input, (void)workspace;                                                             \
        __VA_ARGS__;                                                                                         \
    }
DEFECT(past_end, out.memory[out.bytes] += 1)
DEFECT(before_begin, out.memory[-1] += 1)
/* Only if the result does not end at the end of its pages, so that only a pattern detects it. A case runs
 * twice on the same memory: the writes must not cancel. */
DEFECT(past_end_quietly,
       if ((uintptr_t)(out.memory + out.bytes) % (uintptr_t)sysconf(_SC_PAGESIZE)) out.memory[out.bytes] += 1)
/* Only if the input ends at the end of its pages; elsewhere a read is not detected. */
DEFECT(read_beyond, sink = input.memory[input.bytes])
DEFECT(workspace_end, workspace->memory[workspace->bytes] += 1)
DEFECT(input_written, if (input.bytes) input.memory[input.bytes - 1] += 1)

static void written_though_refused(const struct device_blocks *blocks, const fmla_tensor *out)
{
    const struct device_scratch place = device_place(blocks, out->data);
    if (place.bytes) place.memory[place.bytes / 2] += 1;
}

static const struct fault_kind kinds[] = {
    {.name = "past-end", .hooks.after = past_end},
    {.name = "past-end-quietly", .hooks.after = past_end_quietly},
    {.name = "before-begin", .hooks.after = before_begin},
    {.name = "read-beyond", .hooks.after = read_beyond},
    {.name = "workspace", .hooks.after = workspace_end},
    {.name = "input", .hooks.after = input_written},
    {.name = "refused", .hooks.refused = written_though_refused},
    {.name = "dropped-key", .defect = FAULT_DROPPED_KEY},
    {.name = "gap", .defect = FAULT_GAP},
    {.name = "merge-base", .defect = FAULT_MERGE_BASE, .only = 1 + OP_MERGE},
    {.name = "cache-value", .defect = FAULT_CACHE_VALUE, .only = 1 + OP_CACHE_APPEND},
    {.name = "gather-value", .defect = FAULT_GATHER_VALUE, .only = 1 + OP_CACHE_GATHER},
};
enum { KINDS = sizeof kinds / sizeof kinds[0] };

const struct fault_kind *fault_of(const char *name)
{
    for (int i = 0; i < KINDS; i++)
        if (!strcmp(kinds[i].name, name)) return &kinds[i];
    return NULL;
}

/* Returns true if a run with the fault ends with 1 and names a call. */
static bool is_seen(const char *program, uint64_t seed, const char *name)
{
    char command[4500], line[4096];
    bool named = false;
    snprintf(command, sizeof command, "'%s' --seed %llu --threads 1 --calls 60 --fault %s 2>&1", program,
             (unsigned long long)seed, name);
    FILE *output = popen(command, "r"); // NOLINT(cert-env33-c): of this program's own name
    if (!output) return false;
    while (fgets(line, sizeof line, output)) named |= strstr(line, " --call ") != NULL;
    const int status = pclose(output);
    return named && WIFEXITED(status) && WEXITSTATUS(status) == 1;
}

int faults_check(const char *program, uint64_t seed)
{
    int unseen = 0;
    for (int i = 0; i < KINDS; i++) {
        const bool seen = is_seen(program, seed, kinds[i].name);
        printf("%s fault %s: %s\n", seen ? "ok" : "FAILED", kinds[i].name, seen ? "seen" : "not seen");
        unseen += !seen;
    }
    return unseen > 0;
}

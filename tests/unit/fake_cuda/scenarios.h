/* SPDX-License-Identifier: MIT
 *
 * Scenarios with the fake driver, each in its own process, since the library inspects a machine only once.
 */
#ifndef FMLA_SCENARIOS_H
#define FMLA_SCENARIOS_H

#include "../tensors.h"
#include "fake_cuda.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

typedef void scenario(void);

/* The fake's own functions, open in every scenario. */
static struct fake_cuda *fake;
static int (*fake_depth)(void);
static unsigned (*fake_capture_mode)(void);
static void (*fake_context)(struct CUctx_st *context, int device);
static struct driver fake_entries; /* to make contexts current as a caller would */

static inline void fake_find(void *library, const char *name, void *entry)
{
    void *symbol = dlsym(library, name);
    if (!symbol) {
        fprintf(stderr, "libcuda.so.1 here is not the fake: it has no %s\n", name);
        exit(99);
    }
    memcpy(entry, &symbol, sizeof symbol);
}

static inline void fake_open(void)
{
    struct fake_cuda *(*state)(void);
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        exit(99);
    }
    fake_find(library, "fake_cuda_state", &state);
    fake_find(library, "fake_cuda_depth", &fake_depth);
    fake_find(library, "fake_cuda_capture_mode", &fake_capture_mode);
    fake_find(library, "fake_cuda_context", &fake_context);
    fake_find(library, "cuCtxPushCurrent_v2", &fake_entries.context_push);
    fake_find(library, "cuCtxPopCurrent_v2", &fake_entries.context_pop);
    fake = state();
}

/* A process that was started again tells how many checks it made. */
__attribute__((destructor)) static void fake_tell(void)
{
    const char *const pipe_end = getenv("FAKE_CHECKS");
    if (pipe_end && write(atoi(pipe_end), &check_count, sizeof check_count) != sizeof check_count) _exit(99);
}

/* Runs this program again with a number after an option, followed by its own arguments, and returns its
 * exit status; 0: success. Its checks are added to those of this process. */
static inline int fake_again(char **argv, const char *option, int number)
{
    char text[16], pipe_end[16], *again[8] = {argv[0], (char *)(uintptr_t)option, text};
    int pipes[2], status = -1;
    uint64_t checks = 0;
    for (int i = 1; i < 4 && argv[i]; i++) again[i + 2] = argv[i];
    snprintf(text, sizeof text, "%d", number);
    if (pipe(pipes)) return -1;
    snprintf(pipe_end, sizeof pipe_end, "%d", pipes[1]);
    const pid_t pid = fork();
    if (pid == 0) {
        setenv("FAKE_CHECKS", pipe_end, 1);
        execv(argv[0], again);
        _exit(99);
    }
    close(pipes[1]);
    if (read(pipes[0], &checks, sizeof checks) == sizeof checks) check_count += checks;
    close(pipes[0]);
    return pid > 0 && waitpid(pid, &status, 0) == pid ? status : -1;
}

/* Reads numbers on the command line that replace the defaults; returns the one after --machine, or -1: a
 * process represents one machine, since the library inspects it once. */
static inline int fake_numbers(int argc, char **argv, int64_t *numbers, int count)
{
    const bool child = argc >= 3 && !strcmp(argv[1], "--machine");
    for (int i = 0, at = child ? 3 : 1; i < count && at < argc; i++, at++)
        numbers[i] = strtoll(argv[at], NULL, 10);
    return child ? atoi(argv[2]) : -1;
}

/* Runs a process for each machine. */
static inline int fake_machines(char **argv, int machines, const char *test)
{
    for (int i = 0; i < machines; i++) {
        const int status = fake_again(argv, "--machine", i);
        CHECK(!status, "machine %d ended with %x", i, (unsigned)status);
    }
    return check_done(test);
}

/* main: runs every scenario, or the one whose number follows --scenario. `names` are theirs, as the source
 * lists them. */
static inline int run_scenarios(int argc, char **argv, const char *test, const char *names,
                                scenario *const scenarios[], int count)
{
    const int one = argc == 3 && !strcmp(argv[1], "--scenario") ? atoi(argv[2]) % count : -1;
    for (int i = 0; i < count; i++, names += strcspn(names, ",") + 2) {
        char name[64];
        snprintf(name, sizeof name, "%.*s", (int)strcspn(names, ","), names);
        if (one < 0) {
            const int status = fake_again(argv, "--scenario", i);
            CHECK(!status, "scenario \"%s\" ended with %x", name, (unsigned)status);
        }
        if (i != one) continue;
        fake_open();
        scenarios[i]();
        if (!check_count) check_fail(__FILE__, __LINE__, name, "nothing was checked");
        return check_failures != 0;
    }
    return check_done(test);
}

#define RUN_SCENARIOS(argc, argv, test, ...)                                                                 \
    run_scenarios(argc, argv, test, #__VA_ARGS__, (scenario *const[]){__VA_ARGS__},                          \
                  sizeof((scenario *const[]){__VA_ARGS__}) / sizeof(scenario *))

#endif

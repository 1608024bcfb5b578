/* SPDX-License-Identifier: MIT
 *
 * Scenarios with the fake driver, each in a process of its own: the library looks at a machine once.
 */
#ifndef FMLA_SCENARIOS_H
#define FMLA_SCENARIOS_H

#include "../arguments.h"
#include "fake_cuda.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

struct scenario {
    const char *name;
    void (*run)(void);
};

#define SCENARIO(function)                                                                                   \
    {                                                                                                        \
#function, function                                                                                  \
    }

/* The fake's own functions; opened by scenarios that need them. */
static struct fake_cuda *fake;
static int (*fake_depth)(void);
static unsigned (*fake_capture_mode)(void);
static void (*fake_context)(struct CUctx_st *context, int device);
static struct driver fake_entries; /* to make contexts current as a caller does */

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

/* main: every scenario, or the one whose number stands behind --scenario. */
static inline int run_scenarios(const char *test, const struct scenario *scenarios, int count, int argc,
                                char **argv)
{
    if (argc == 3 && !strcmp(argv[1], "--scenario")) {
        const struct scenario *scenario = &scenarios[atoi(argv[2]) % count];
        scenario->run();
        if (!check_count) check_fail(__FILE__, __LINE__, scenario->name, "nothing was checked");
        return check_failures != 0;
    }
    for (int i = 0; i < count; i++) {
        char number[16];
        snprintf(number, sizeof number, "%d", i);
        const pid_t pid = fork();
        if (pid == 0) {
            execl(argv[0], argv[0], "--scenario", number, (char *)NULL);
            _exit(99);
        }
        int status = -1;
        CHECK(pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0,
              "scenario \"%s\" ended with %x", scenarios[i].name, (unsigned)status);
    }
    return check_done(test);
}

#endif

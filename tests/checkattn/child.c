/* SPDX-License-Identifier: MIT */
#include "record.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

enum { PATIENCE_MS = 600 * 1000 }; /* also reports a kernel that hangs */

static pid_t start(const struct run *like, const char *operation, const char *kernel, fmla_device device,
                   int fd)
{
    char device_text[32], seed[32], cases[32], only[32], fd_text[32];
    snprintf(device_text, sizeof device_text, "cuda:%d", device.id);
    snprintf(seed, sizeof seed, "%llu", (unsigned long long)like->seed);
    snprintf(cases, sizeof cases, "%lld", (long long)like->most_cases);
    snprintf(only, sizeof only, "%lld", (long long)like->only_case);
    snprintf(fd_text, sizeof fd_text, "%d", fd);
    const char *arguments[20] = {"checkattn", "--here",  "--no-time", "--device", device_text,
                                 "--op",      operation, "--kernel",  kernel,     "--seed",
                                 seed,        "--tally", fd_text};
    int count = 13;
    if (like->most_cases) arguments[count++] = "--cases", arguments[count++] = cases;
    if (like->only_case) arguments[count++] = "--case", arguments[count++] = only;
    if (like->own_threads) arguments[count++] = "--threads", arguments[count++] = "own";
    char *vector[20]; /* posix_spawn declares them writable but does not write */
    memcpy(vector, arguments, sizeof vector);
    pid_t child;
    return posix_spawn(&child, "/proc/self/exe", NULL, NULL, vector, environ) ? -1 : child;
}

/* Reads the child's report until it arrives, the child ends, or time runs out. */
static bool hear(int fd, struct tally *told, bool *late)
{
    struct pollfd wait = {.fd = fd, .events = POLLIN};
    int ready;
    do ready = poll(&wait, 1, PATIENCE_MS);
    while (ready < 0 && errno == EINTR);
    *late = ready == 0;
    return ready > 0 && read(fd, told, sizeof *told) == (ssize_t)sizeof *told;
}

bool child_run(const struct run *like, const char *operation, const char *kernel, fmla_device device,
               struct tally *told, char *why, size_t size)
{
    int ends[2], status = 0;
    bool late = false;
    memset(told, 0, sizeof *told);
    fflush(stdout);
    if (pipe(ends)) {
        snprintf(why, size, "no pipe to a process of its own: %s", strerror(errno));
        return false;
    }
    const pid_t child = start(like, operation, kernel, device, ends[1]);
    close(ends[1]);
    const bool heard = child > 0 && hear(ends[0], told, &late);
    close(ends[0]);
    if (child < 0) {
        snprintf(why, size, "a process of its own could not be started");
        return false;
    }
    if (late) kill(child, SIGKILL);
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) continue;
    const bool good = WIFEXITED(status) && WEXITSTATUS(status) == 0;
    if (late)
        snprintf(why, size, "its process ran for more than %d s and was ended", PATIENCE_MS / 1000);
    else if (WIFSIGNALED(status))
        snprintf(why, size, "its process was ended by signal %d (%s)", WTERMSIG(status),
                 strsignal(WTERMSIG(status)));
    else if (!heard)
        snprintf(why, size, "its process ended with status %d before it had told its result",
                 WEXITSTATUS(status));
    return heard && good;
}

void child_tell(int fd, const struct tally *told)
{
    if (write(fd, told, sizeof *told) != (ssize_t)sizeof *told) perror("checkattn: telling the result");
    close(fd);
}

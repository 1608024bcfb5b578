/* SPDX-License-Identifier: MIT */
#define _GNU_SOURCE /* mremap */
#include "infile.h"

#include "outfile.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FIRST_ROOM = 1 << 20, MAPPED_FILES = 4 };

/* ---- A file that shrinks --------------------------------------------------------------------- */

/* The handler may read the list at any moment: `line` is set last and cleared first. */
static struct mapped {
    const unsigned char *begin;
    size_t bytes;
    char *_Atomic line; /* message if it was cut; NULL = entry unused */
} mapped_files[MAPPED_FILES];

static const char *program_name = "";
static bool stderr_is_terminal;
static atomic_flag told = ATOMIC_FLAG_INIT;

static void say(const char *text)
{
    if (write(STDERR_FILENO, text, strlen(text)) < 0) return; /* nowhere else to report */
}

static void on_bus_error(int signal_number, siginfo_t *info, void *context)
{
    (void)context;
    const unsigned char *const at = info->si_addr;
    for (int i = 0; i < MAPPED_FILES; i++) {
        const struct mapped *file = &mapped_files[i];
        const char *line = file->line;
        if (!line || at < file->begin || at >= file->begin + file->bytes) continue;
        while (atomic_flag_test_and_set(&told)) pause(); /* only one thread reports */
        if (stderr_is_terminal) say("\r\033[K");         /* replaces the progress line */
        say(program_name), say(line);
        outfile_remove_unfinished();
        _exit(1);
    }
    outfile_remove_unfinished();
    signal(signal_number, SIG_DFL); /* the repeated access then ends the process */
}

void infile_handle_signals(const char *program)
{
    struct sigaction action = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO};
    program_name = program;
    stderr_is_terminal = isatty(STDERR_FILENO);
    sigaction(SIGBUS, &action, NULL);
}

static bool remember(struct infile *file, const char *name, struct reason *reason)
{
    static const char what[] = ": became shorter while it was read, or its disk failed\n";
    const size_t size = strlen(name) + sizeof what + 2;
    char *line = malloc(size);
    if (!line) return reason_set(reason, "%s: out of memory", name);
    snprintf(line, size, ": %s%s", name, what);
    for (int i = 0; i < MAPPED_FILES; i++) {
        if (mapped_files[i].line) continue;
        mapped_files[i].begin = file->bytes, mapped_files[i].bytes = file->room;
        mapped_files[i].line = line;
        file->slot = i;
        return true;
    }
    free(line); /* more files than any program here opens: SIGBUS ends it without the message */
    return true;
}

/* ---- Opening and reading --------------------------------------------------------------------- */

const char *infile_name(const char *path)
{
    return strcmp(path, "-") ? path : "standard input";
}

static bool map(struct infile *file, int fd, uint64_t size, const char *name, struct reason *reason)
{
    if (size == 0) return true;
    void *bytes = size > SIZE_MAX ? MAP_FAILED : mmap(NULL, (size_t)size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (bytes == MAP_FAILED)
        return reason_set(reason, "%s: cannot map %llu bytes: %s", name, (unsigned long long)size,
                          strerror(errno));
    file->bytes = bytes, file->room = (size_t)size, file->size = size;
    return remember(file, name, reason);
}

static bool open_input(struct infile *file, const char *path, struct reason *reason)
{
    struct stat status;
    const char *const name = infile_name(path);
    const bool standard = name != path, terminal = standard && isatty(STDIN_FILENO);
    const int flags = O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK; /* opening a pipe must not block */
    const int fd = standard ? STDIN_FILENO : open(path, flags);
    if (fd < 0) return reason_set(reason, "%s: cannot open: %s", name, strerror(errno));
    bool good = true;
    if (fstat(fd, &status))
        good = reason_set(reason, "%s: cannot read: %s", name, strerror(errno));
    else if (S_ISDIR(status.st_mode))
        good = reason_set(reason, "%s: is a directory, must be a file", name);
    else if (terminal)
        good = reason_set(reason, "%s: is a terminal, must be a file or a pipe", name);
    else if (S_ISREG(status.st_mode) && (!standard || lseek(fd, 0, SEEK_CUR) == 0))
        good = map(file, fd, (uint64_t)status.st_size, name, reason);
    else if (standard)
        file->fd = fd;
    else
        good = reason_set(reason, "%s: is no regular file; a pipe is read from standard input, as -", name);
    if (!standard) close(fd);
    return good;
}

bool infile_open(struct infile *file, const char *path, struct reason *reason)
{
    *file = (struct infile){.fd = -1, .slot = -1};
    const bool good = open_input(file, path, reason);
    if (!good) infile_close(file);
    return good;
}

/* Anonymous memory: tensors are aligned as in a mapped file, and growing copies nothing. */
static bool grow(struct infile *file, const char *path, struct reason *reason)
{
    const size_t room = file->room ? 2 * file->room : FIRST_ROOM;
    void *bytes = room < file->room ? MAP_FAILED
                  : file->bytes
                      ? mremap(file->bytes, file->room, room, MREMAP_MAYMOVE)
                      : mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (bytes == MAP_FAILED)
        return reason_set(reason, "%s: no memory for %zu bytes", infile_name(path), room);
    file->bytes = bytes, file->room = room;
    return true;
}

bool infile_need(struct infile *file, uint64_t bytes, const char *path, struct reason *reason)
{
    while (file->fd >= 0 && file->size < bytes) {
        if (file->size == file->room && !grow(file, path, reason)) return false;
        const uint64_t left = bytes - file->size;
        const size_t room = file->room - (size_t)file->size;
        const ssize_t got = read(file->fd, file->bytes + file->size, left < room ? (size_t)left : room);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return reason_set(reason, "%s: cannot read: %s", infile_name(path), strerror(errno));
        if (got == 0) file->fd = -1;
        file->size += (uint64_t)got;
    }
    return true;
}

void infile_close(struct infile *file)
{
    if (file->bytes) {
        struct mapped *remembered = file->slot >= 0 ? &mapped_files[file->slot] : NULL;
        if (remembered) {
            char *line = remembered->line;
            remembered->line = NULL;
            free(line);
        }
        munmap(file->bytes, file->room);
    }
    *file = (struct infile){.fd = -1, .slot = -1};
}

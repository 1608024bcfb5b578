/* SPDX-License-Identifier: MIT */
#define _XOPEN_SOURCE 700 /* realpath */
#include "outfile.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

enum { BUFFER_BYTES = 1 << 16, UNFINISHED_FILES = 4 };

struct outfile {
    int fd;
    int slot;        /* index in unfinished[]; -1 for a target written directly */
    char *shown;     /* the caller's name, for messages */
    char *target;    /* the temporary file is renamed to this */
    char *temporary; /* NULL for a target written directly, and for lines already at the target */
    bool lines;
    off_t whole; /* file of lines: size up to the last whole line; -1 if not a regular file */
    size_t used; /* bytes in buffer */
    char buffer[BUFFER_BYTES];
};

/* Temporary files that a signal must remove. The handler may run at any moment: an entry is set only after
 * the file exists, and cleared before its name is freed. */
static char *volatile unfinished[UNFINISHED_FILES];

static int claimed_stdout = -1; /* standard output's descriptor, once claimed */

void outfile_remove_unfinished(void)
{
    for (int i = 0; i < UNFINISHED_FILES; i++)
        if (unfinished[i]) unlink(unfinished[i]);
}

static void remove_unfinished(int signal_number)
{
    outfile_remove_unfinished();
    signal(signal_number, SIG_DFL);
    raise(signal_number);
}

void outfile_handle_signals(void)
{
    const int fatal[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGPIPE};
    for (size_t i = 0; i < sizeof fatal / sizeof *fatal; i++) {
        struct sigaction action;
        sigaction(fatal[i], NULL, &action);
        if (action.sa_handler == SIG_IGN) continue; /* keep nohup's SIG_IGN */
        memset(&action, 0, sizeof action);
        action.sa_handler = remove_unfinished;
        sigaction(fatal[i], &action, NULL);
    }
    signal(SIGXFSZ, SIG_IGN);
    atexit(outfile_remove_unfinished); /* also if a library calls exit */
}

static bool write_fault(const struct outfile *file, struct reason *reason)
{
    return reason_set(reason, "%s: cannot write: %s", file->shown, strerror(errno));
}

static bool has_room(const struct outfile *file, uint64_t expected_bytes, struct reason *reason)
{
    struct statvfs fs;
    if (fstatvfs(file->fd, &fs) || fs.f_blocks == 0) return true; /* unknown: rely on write errors */
    const uint64_t unit = fs.f_frsize ? fs.f_frsize : fs.f_bsize;
    const uint64_t room = fs.f_bavail > UINT64_MAX / unit ? UINT64_MAX : fs.f_bavail * unit;
    if (room >= expected_bytes) return true;
    return reason_set(reason, "%s: needs %llu bytes, and its file system has %llu left", file->shown,
                      (unsigned long long)expected_bytes, (unsigned long long)room);
}

static bool open_temporary(struct outfile *file, struct reason *reason)
{
    const char *slash = strrchr(file->target, '/');
    const size_t length =
        slash ? (size_t)(slash - file->target) + 1 : 0; /* of the directory; 0: the current one */
    const size_t size = length + 64;
    file->temporary = malloc(size);
    if (!file->temporary) return reason_set(reason, "%s: out of memory", file->shown);
    for (int attempt = 0; attempt < 100; attempt++) {
        snprintf(file->temporary, size, "%.*s.flashmla-%ld-%d.tmp", (int)length, file->target, (long)getpid(),
                 attempt);
        file->fd = open(file->temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (file->fd >= 0 || errno != EEXIST) break;
    }
    if (file->fd < 0) return reason_set(reason, "%s: cannot create: %s", file->shown, strerror(errno));
    for (int i = 0; i < UNFINISHED_FILES && file->slot < 0; i++)
        if (!unfinished[i]) unfinished[i] = file->temporary, file->slot = i;
    return true;
}

static bool open_stdout(struct outfile *file, struct reason *reason)
{
    const int from = claimed_stdout >= 0 ? claimed_stdout : STDOUT_FILENO;
    file->fd = fcntl(from, F_DUPFD_CLOEXEC, 3);
    return file->fd >= 0 || write_fault(file, reason);
}

bool outfile_claim_stdout(struct reason *reason)
{
    fflush(stdout);
    claimed_stdout = fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3);
    const int nowhere = open("/dev/null", O_WRONLY | O_CLOEXEC);
    const bool good = claimed_stdout >= 0 && nowhere >= 0 && dup2(nowhere, STDOUT_FILENO) >= 0;
    if (!good) reason_set(reason, "cannot write to standard output: %s", strerror(errno));
    if (nowhere >= 0) close(nowhere);
    return good;
}

static bool open_target(struct outfile *file, const char *path, struct reason *reason)
{
    struct stat status;
    if (!strcmp(path, "-")) return open_stdout(file, reason);
    const bool exists = stat(path, &status) == 0;
    if (!*path) return reason_set(reason, "the name of the output file is empty");
    if (exists && S_ISDIR(status.st_mode))
        return reason_set(reason, "%s: is a directory, must be a file to write", path);
    if (exists && !S_ISREG(status.st_mode)) {
        file->fd = open(path, O_WRONLY | O_CLOEXEC | O_NOCTTY);
        return file->fd >= 0 || reason_set(reason, "%s: cannot write: %s", path, strerror(errno));
    }
    /* Resolve symbolic links, so that they stay links. */
    file->target = exists ? realpath(path, NULL) : strdup(path);
    if (!file->target) return reason_set(reason, "%s: cannot write: %s", path, strerror(errno));
    return open_temporary(file, reason);
}

struct outfile *outfile_open(const char *path, uint64_t expected_bytes, struct reason *reason)
{
    struct outfile *file = calloc(1, sizeof *file);
    char *shown = strdup(strcmp(path, "-") ? path : "standard output");
    if (!file || !shown) {
        reason_set(reason, "%s: out of memory", path);
        free(file), free(shown);
        return NULL;
    }
    file->fd = -1, file->slot = -1, file->shown = shown, file->whole = -1;
    if (open_target(file, path, reason) && (!file->temporary || has_room(file, expected_bytes, reason)))
        return file;
    outfile_abandon(file);
    return NULL;
}

static bool write_all(struct outfile *file, const char *data, size_t bytes, struct reason *reason)
{
    while (bytes > 0) {
        const ssize_t done = write(file->fd, data, bytes < (1u << 30) ? bytes : (1u << 30));
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) return write_fault(file, reason);
        data += done, bytes -= (size_t)done;
    }
    return true;
}

static bool flush(struct outfile *file, struct reason *reason)
{
    const size_t used = file->used;
    file->used = 0;
    return write_all(file, file->buffer, used, reason);
}

bool outfile_write(struct outfile *file, const void *data, size_t bytes, struct reason *reason)
{
    if (file->used + bytes > BUFFER_BYTES && !flush(file, reason)) return false;
    if (bytes >= BUFFER_BYTES) return write_all(file, data, bytes, reason);
    if (bytes) memcpy(file->buffer + file->used, data, bytes);
    file->used += bytes;
    return true;
}

bool outfile_printf(struct outfile *file, struct reason *reason, const char *format, ...)
{
    char text[2048];
    va_list values;
    va_start(values, format);
    const int length = vsnprintf(text, sizeof text, format, values);
    va_end(values);
    if (length < 0 || (size_t)length >= sizeof text)
        return reason_set(reason, "%s: a line has more than %zu characters", file->shown, sizeof text - 1);
    return outfile_write(file, text, (size_t)length, reason);
}

static void forget(struct outfile *file)
{
    if (file->slot >= 0) unfinished[file->slot] = NULL;
    free(file->shown), free(file->target), free(file->temporary), free(file);
}

struct outfile *outfile_open_lines(const char *path, struct reason *reason)
{
    struct outfile *file = outfile_open(path, 0, reason);
    if (!file) return NULL;
    file->lines = true;
    if (file->temporary) file->whole = 0;
    return file;
}

/* Renames the temporary file to the target, or removes it. */
static bool appear(struct outfile *file, struct reason *reason)
{
    if (rename(file->temporary, file->target)) return write_fault(file, reason);
    if (file->slot >= 0) unfinished[file->slot] = NULL;
    file->slot = -1;
    free(file->temporary);
    file->temporary = NULL;
    return true;
}

bool outfile_line(struct outfile *file, const char *text, struct reason *reason)
{
    const size_t length = strlen(text);
    if (!outfile_write(file, text, length, reason) || !outfile_write(file, "\n", 1, reason) ||
        !flush(file, reason)) {
        /* Truncate the partial line; the disk may be full. */
        const bool cut = file->whole >= 0 && !ftruncate(file->fd, file->whole);
        if (cut && lseek(file->fd, file->whole, SEEK_SET) < 0) file->whole = -1;
        return false;
    }
    if (file->whole >= 0) file->whole += (off_t)length + 1;
    return !file->temporary || appear(file, reason);
}

bool outfile_commit(struct outfile *file, struct reason *reason)
{
    bool good = flush(file, reason);
    if (good && (file->temporary || file->whole >= 0) && fsync(file->fd)) good = write_fault(file, reason);
    const int closed = close(file->fd);
    file->fd = -1;
    if (good && closed) good = write_fault(file, reason);
    if (good && file->temporary && rename(file->temporary, file->target)) good = write_fault(file, reason);
    if (!good) {
        outfile_abandon(file);
        return false;
    }
    forget(file);
    return true;
}

void outfile_abandon(struct outfile *file)
{
    if (!file) return;
    const bool created = file->fd >= 0 || file->slot >= 0;
    if (file->temporary && created) unlink(file->temporary);
    if (file->fd >= 0) close(file->fd);
    forget(file);
}

/* SPDX-License-Identifier: MIT
 *
 * An input file as memory. A regular file is mapped, so only the used parts of a large file are read, and
 * each once. Other kinds of standard input are read into memory as far as the caller asks.
 */
#ifndef FMLA_SUPPORT_INFILE_H
#define FMLA_SUPPORT_INFILE_H

#include "reason.h"

#include <stddef.h>
#include <stdint.h>

struct infile {
    unsigned char *bytes; /* read-only; infile_need may move it */
    uint64_t size;        /* bytes available */
    size_t room;          /* bytes mapped */
    int fd;               /* remaining input; -1 = none */
    int slot;             /* index in the list of mapped files; -1 = not listed */
};

/* Returns the name for messages: "standard input" for "-", else the path. */
const char *infile_name(const char *path);

/* Opens `path`, or standard input if it is "-". Fails with a reason if it cannot be read, or is neither a
 * regular file nor standard input. */
bool infile_open(struct infile *file, const char *path, struct reason *reason);

/* Reads until `bytes` are available or the input ends; then size is smaller. */
bool infile_need(struct infile *file, uint64_t bytes, const char *path, struct reason *reason);

/* `file` may be zero-initialised or already closed. */
void infile_close(struct infile *file);

/* For programs: reading a mapped file that was truncated, or whose disk fails, raises SIGBUS. After this
 * call, SIGBUS removes unfinished output files and ends the program with exit code 1 and one line that
 * begins with `program` and names the file. `program` must stay valid. */
void infile_handle_signals(const char *program);

#endif

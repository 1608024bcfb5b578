/* SPDX-License-Identifier: MIT
 *
 * An input file as memory. A regular file is mapped: only what is used of a large one is read, and none of it twice. What
 * else standard input may be is read into memory, as far as its user asks.
 */
#ifndef FMLA_SUPPORT_INFILE_H
#define FMLA_SUPPORT_INFILE_H

#include "fault.h"

#include <stddef.h>
#include <stdint.h>

struct infile {
    unsigned char *bytes; /* read-only; another address after infile_need */
    uint64_t size;        /* bytes that are there */
    size_t room;          /* bytes that are mapped */
    int fd;               /* what is still to be read; -1 = nothing */
    int slot;             /* in the list of mapped files; -1 = not there */
};

/* "standard input" for "-", else the path: how messages call it. */
const char *infile_name(const char *path);

/* Opens `path`, or standard input if it is "-". False with a fault where it cannot be read, or is neither a regular file nor
 * standard input. */
bool infile_open(struct infile *file, const char *path, struct fault *fault);

/* Reads on until `bytes` are there, or the input ends before: then size is less. */
bool infile_need(struct infile *file, uint64_t bytes, const char *path, struct fault *fault);

/* `file` may be zero-initialised, or closed. */
void infile_close(struct infile *file);

/* For programs: where a mapped file becomes shorter than it was, or its disk fails, reading it raises SIGBUS. From now on
 * that ends the program with exit code 1 and one line, which begins with `program` and names the file; unfinished output
 * files are removed first. `program` stays where it is. */
void infile_handle_signals(const char *program);

#endif

/* SPDX-License-Identifier: MIT
 *
 * An output file that is either whole or absent. Bytes go to a temporary file beside the target, which takes
 * the target's name when everything has reached the disk; on any error, and on a signal, it is removed.
 * A target that exists and is no regular file (/dev/stdout, a pipe) is written directly, and so is standard output, "-".
 *
 * A file of lines is for what comes line by line and is wanted even if the rest never comes: the temporary file takes the
 * target's name with its first line, and from then on the file holds whole lines at any time, whatever ends the program.
 */
#ifndef FMLA_SUPPORT_OUTFILE_H
#define FMLA_SUPPORT_OUTFILE_H

#include "fault.h"

#include <stddef.h>
#include <stdint.h>

struct outfile;

/* Opens `path` for `expected_bytes`, and refuses when its file system has less room than that (0 = unknown).
 * NULL with a fault if that fails. */
struct outfile *outfile_open(const char *path, uint64_t expected_bytes, struct fault *fault);

/* The same for a file of lines. */
struct outfile *outfile_open_lines(const char *path, struct fault *fault);

/* To a file of lines: `text`, which is one line without its end. It is in the file, whole, or not at all. */
bool outfile_line(struct outfile *file, const char *text, struct fault *fault);

/* Both report the first error only once it is certain: buffered bytes fail in a later call. */
bool outfile_write(struct outfile *file, const void *data, size_t bytes, struct fault *fault);
bool outfile_printf(struct outfile *file, struct fault *fault, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Makes the file appear under its name and frees `file`, whether that works or not. */
bool outfile_commit(struct outfile *file, struct fault *fault);

/* Removes what was written, but no lines, and frees `file`; NULL is allowed. */
void outfile_abandon(struct outfile *file);

/* For programs that write a file to standard output: from now on only what is opened as "-" goes there, and what is printed
 * goes nowhere. False with a fault if there is no standard output. */
bool outfile_claim_stdout(struct fault *fault);

/* For programs: from now on SIGINT, SIGTERM, SIGHUP, SIGQUIT and SIGPIPE remove unfinished files before they
 * end the process, and a file size limit (SIGXFSZ) is an error of a write. */
void outfile_handle_signals(void);

/* What those signals do; a handler of another signal may call it, too. */
void outfile_remove_unfinished(void);

#endif

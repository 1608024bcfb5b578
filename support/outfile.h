/* SPDX-License-Identifier: MIT
 *
 * An output file that is either whole or absent. Bytes go to a temporary file beside the target, which takes
 * the target's name when everything has reached the disk; on any error, and on a signal, it is removed.
 * A target that exists and is no regular file (/dev/stdout, a pipe) is written directly.
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

/* Both report the first error only once it is certain: buffered bytes fail in a later call. */
bool outfile_write(struct outfile *file, const void *data, size_t bytes, struct fault *fault);
bool outfile_printf(struct outfile *file, struct fault *fault, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Makes the file appear under its name and frees `file`, whether that works or not. */
bool outfile_commit(struct outfile *file, struct fault *fault);

/* Removes what was written and frees `file`; NULL is allowed. */
void outfile_abandon(struct outfile *file);

/* For programs: from now on SIGINT, SIGTERM, SIGHUP, SIGQUIT and SIGPIPE remove unfinished files before they
 * end the process, and a file size limit (SIGXFSZ) is an error of a write. */
void outfile_handle_signals(void);

#endif

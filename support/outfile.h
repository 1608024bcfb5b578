/* SPDX-License-Identifier: MIT
 *
 * An output file that is either complete or absent. Bytes go to a temporary file beside the target, which is
 * renamed to the target once all data has reached the disk; an error or a signal removes it. A target that
 * exists and is not a regular file (/dev/stdout, a pipe) is written directly, and so is standard output, "-".
 *
 * A file of lines holds records that are useful even if the program ends early: the temporary file is
 * renamed to the target with its first line, and from then on the file holds only whole lines, however the
 * program ends.
 */
#ifndef FMLA_SUPPORT_OUTFILE_H
#define FMLA_SUPPORT_OUTFILE_H

#include "reason.h"

#include <stddef.h>
#include <stdint.h>

struct outfile;

/* Opens `path`, and refuses if its file system has less than `expected_bytes` left (0 = unknown). Returns
 * NULL with a reason on failure. */
struct outfile *outfile_open(const char *path, uint64_t expected_bytes, struct reason *reason);

/* Like outfile_open, for a file of lines. */
struct outfile *outfile_open_lines(const char *path, struct reason *reason);

/* Appends `text`, one line without its newline, to a file of lines. The line is written whole or not at
 * all. */
bool outfile_line(struct outfile *file, const char *text, struct reason *reason);

/* Output is buffered, so an error may be reported by a later call. */
bool outfile_write(struct outfile *file, const void *data, size_t bytes, struct reason *reason);
bool outfile_printf(struct outfile *file, struct reason *reason, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Makes the file appear under its name. Frees `file` in either case. */
bool outfile_commit(struct outfile *file, struct reason *reason);

/* Removes the written data, except lines, and frees `file`; NULL is allowed. */
void outfile_abandon(struct outfile *file);

/* For programs that write a file to standard output: after this call only files opened as "-" reach it,
 * and everything printed is discarded. Fails with a reason if there is no standard output. */
bool outfile_claim_stdout(struct reason *reason);

/* For programs: after this call SIGINT, SIGTERM, SIGHUP, SIGQUIT and SIGPIPE remove unfinished files
 * before they end the process, and exceeding a file size limit (SIGXFSZ) is a write error. */
void outfile_handle_signals(void);

/* Removes unfinished files, as those signals do; may be called from other signal handlers. */
void outfile_remove_unfinished(void);

#endif

/* SPDX-License-Identifier: MIT
 *
 * Writes the output of --json for every command: a file of lines, each one JSON object.
 */
#ifndef FLASHMLA_TOOL_JSON_LINE_H
#define FLASHMLA_TOOL_JSON_LINE_H

#include "outfile.h"

#include <jansson.h>

/* Adds a line and releases the object. NULL means that memory was insufficient. */
bool json_line(struct outfile *file, json_t *object, struct reason *reason);

/* Writes a file with only this object: opens, writes and closes it. */
bool json_file(const char *path, json_t *object, struct reason *reason);

#endif

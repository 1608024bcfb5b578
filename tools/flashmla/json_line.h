/* SPDX-License-Identifier: MIT
 *
 * What --json writes, in every command: a file of lines, each of them one JSON object.
 */
#ifndef FLASHMLA_TOOL_JSON_LINE_H
#define FLASHMLA_TOOL_JSON_LINE_H

#include "outfile.h"

#include <jansson.h>

/* Adds a line and releases the object. NULL is one that there was no memory for. */
bool json_line(struct outfile *file, json_t *object, struct fault *fault);

/* A file of the one object: opened, written, closed. */
bool json_file(const char *path, json_t *object, struct fault *fault);

#endif

/* SPDX-License-Identifier: MIT
 *
 * Calls in tensor files: a tensor is called as the member of the argument struct that it is; options are in the metadata.
 */
#ifndef FLASHMLA_TOOL_CALL_FILE_H
#define FLASHMLA_TOOL_CALL_FILE_H

#include "call.h"

#include "safetensors.h"

/* What the file is of. */
enum operation call_file_operation(const struct safetensors_file *file);

/* Begins the call of an open file, whose inputs and options it takes; tensors that the operation does not know are passed
 * over. Ranks and types are checked as far as the command itself relies on them, the rest is the library's to check. `path`
 * is the file's name in messages; the file stays open as long as the call. */
bool call_file_read(struct call *call, const struct safetensors_file *file, const char *path,
                    struct fault *fault);

/* Declares the call's tensors of these names that are there, in this order; the names end with NULL. How many. */
enum { CALL_FILE_NAMES = 10 };
size_t call_file_declare(const struct call *call, const char *const *names,
                         struct safetensors_declaration tensors[CALL_FILE_NAMES]);

/* Writes those tensors that are in memory. */
bool call_file_write(const struct call *call, const struct safetensors_declaration *tensors, size_t count,
                     struct safetensors_writer *writer, struct fault *fault);

#endif

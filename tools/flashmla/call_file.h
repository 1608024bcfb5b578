/* SPDX-License-Identifier: MIT
 *
 * Calls in tensor files: a tensor is named after its member of the argument struct; options are in the
 * metadata.
 */
#ifndef FLASHMLA_TOOL_CALL_FILE_H
#define FLASHMLA_TOOL_CALL_FILE_H

#include "call.h"

#include "safetensors.h"

/* Returns the operation that the file is for. */
enum operation call_file_operation(const struct safetensors_file *file);

/* Begins the call of an open file with its inputs and options, and ignores tensors unknown to the
 * operation. Checks ranks and types only as far as the command itself relies on them; the library checks
 * the rest. `path` is the file's name in messages; the file must stay open as long as the call. */
bool call_file_read(struct call *call, const struct safetensors_file *file, const char *path,
                    struct reason *reason);

/* Declares the call's present tensors among these names, which end with NULL, in this order, and returns
 * their number. */
enum { CALL_FILE_NAMES = 16 };
size_t call_file_declare(const struct call *call, const char *const *names,
                         struct safetensors_declaration tensors[CALL_FILE_NAMES]);

/* Writes the tensors that have memory. */
bool call_file_write(const struct call *call, const struct safetensors_declaration *tensors, size_t count,
                     struct safetensors_writer *writer, struct reason *reason);

#endif

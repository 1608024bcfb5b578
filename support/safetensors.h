/* SPDX-License-Identifier: MIT
 *
 * Tensor files in the safetensors format: the header's length in 8 bytes little-endian, the header (JSON: for
 * each tensor its dtype, shape and data_offsets; strings under "__metadata__"), then the data.
 *
 * Before the reader returns a tensor, it checks that the file has the size its header claims, that no two
 * tensors share bytes and that no byte is unclaimed. Every error is one line that names file and tensor.
 */
#ifndef FMLA_SUPPORT_SAFETENSORS_H
#define FMLA_SUPPORT_SAFETENSORS_H

#include "reason.h"

#include "flashmla/flashmla.h"

#include <stddef.h>

enum { SAFETENSORS_MAX_DIMS = 8 };

/* Name in files and type in memory; codes outside fmla_dtype are DLPack's. */
struct safetensors_dtype {
    const char *name; /* "BF16" */
    fmla_dtype dtype;
};

struct safetensors_tensor {
    const char *name;
    const struct safetensors_dtype *type;
    int32_t ndim;
    int64_t shape[SAFETENSORS_MAX_DIMS];
    uint64_t begin, end; /* bytes, from the start of the data */
    const void *data;    /* read-only; valid until safetensors_close */
};

/* ---- Reading ---- */

struct safetensors_file;

/* `path` may be "-", standard input. Returns NULL with a reason if the file cannot be read or is malformed. */
struct safetensors_file *safetensors_open(const char *path, struct reason *reason);
void safetensors_close(struct safetensors_file *file);

/* Tensors are in order of position; `index` is in [0, safetensors_count). */
size_t safetensors_count(const struct safetensors_file *file);
const struct safetensors_tensor *safetensors_at(const struct safetensors_file *file, size_t index);

/* Both return NULL if there is no such name. */
const struct safetensors_tensor *safetensors_find(const struct safetensors_file *file, const char *name);
const char *safetensors_metadata(const struct safetensors_file *file, const char *key);

/* ---- Writing: the tensors are declared first, then their bytes follow in that order ---- */

struct safetensors_declaration {
    const char *name;
    fmla_dtype dtype;
    int32_t ndim;
    int64_t shape[SAFETENSORS_MAX_DIMS];
};

struct safetensors_note {
    const char *key, *value;
};

struct safetensors_writer;

/* Nothing appears under `path` before safetensors_commit. The first tensor starts at a multiple of 64
 * bytes. Returns NULL with a reason if the file cannot be created or its file system has too little room. */
struct safetensors_writer *safetensors_create(const char *path, const struct safetensors_declaration *tensors,
                                              size_t tensor_count, const struct safetensors_note *notes,
                                              size_t note_count, struct reason *reason);
bool safetensors_write(struct safetensors_writer *writer, const void *data, size_t bytes,
                       struct reason *reason);

/* Frees the writer in either case; fails with a reason if the bytes written differ from those declared. */
bool safetensors_commit(struct safetensors_writer *writer, struct reason *reason);

/* Removes the file and frees the writer; NULL is allowed. */
void safetensors_abandon(struct safetensors_writer *writer);

#endif

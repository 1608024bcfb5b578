/* SPDX-License-Identifier: MIT
 *
 * Reading and writing share the table of types and the rules of shapes; jansson handles the header's JSON.
 */
#include "safetensors.h"

#include "infile.h"
#include "json_memory.h"
#include "outfile.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

/* The format's reference reader has the same limit. */
#define HEADER_MAX   ((uint64_t)100 << 20)
#define LENGTH_BYTES 8u
#define ALIGNMENT    64u

static const struct safetensors_dtype types[] = {
    {"BF16", {FMLA_TYPE_BFLOAT, 16, 1}},
    {"F16", {FMLA_TYPE_FLOAT, 16, 1}},
    {"F32", {FMLA_TYPE_FLOAT, 32, 1}},
    {"F64", {FMLA_TYPE_FLOAT, 64, 1}},
    {"I8", {FMLA_TYPE_INT, 8, 1}},
    {"I16", {FMLA_TYPE_INT, 16, 1}},
    {"I32", {FMLA_TYPE_INT, 32, 1}},
    {"I64", {FMLA_TYPE_INT, 64, 1}},
    {"U8", {FMLA_TYPE_UINT, 8, 1}},
    {"U16", {FMLA_TYPE_UINT, 16, 1}},
    {"U32", {FMLA_TYPE_UINT, 32, 1}},
    {"U64", {FMLA_TYPE_UINT, 64, 1}},
    {"BOOL", {6, 8, 1}},
    {"F8_E4M3", {10, 8, 1}},
    {"F8_E5M2", {12, 8, 1}},
    {"F8_E8M0", {14, 8, 1}},
};
#define TYPE_COUNT (sizeof types / sizeof *types)
#define TYPE_NAMES "BF16 F16 F32 F64 I8 I16 I32 I64 U8 U16 U32 U64 BOOL F8_E4M3 F8_E5M2 F8_E8M0"

/* Sets *bytes to the size of a contiguous tensor; returns false if it does not fit in 63 bits. */
static bool tensor_bytes(fmla_dtype dtype, int32_t ndim, const int64_t *shape, uint64_t *bytes)
{
    int64_t product = dtype.bits / 8;
    for (int32_t i = 0; i < ndim; i++)
        if (__builtin_mul_overflow(product, shape[i], &product)) return false;
    *bytes = (uint64_t)product;
    return true;
}

/* ---- Reading ---- */

struct safetensors_file {
    struct infile in;
    uint64_t data_begin, data_bytes;
    json_t *header; /* owns the names and the metadata */
    size_t count;
    struct safetensors_tensor *tensors;
};

/* Reads the header's length and checks it before reading or allocating the header. */
static bool read_header_length(struct infile *in, const char *path, uint64_t *length, struct reason *reason)
{
    if (!infile_need(in, LENGTH_BYTES, path, reason)) return false;
    path = infile_name(path);
    if (in->size < LENGTH_BYTES)
        return reason_set(reason, "%s: has %" PRIu64 " bytes, a safetensors file has at least %u", path,
                          in->size, LENGTH_BYTES + 2);
    *length = 0;
    for (unsigned i = LENGTH_BYTES; i-- > 0;) *length = *length << 8 | in->bytes[i];
    if (*length > HEADER_MAX)
        return reason_set(reason, "%s: header claims %" PRIu64 " bytes, at most %" PRIu64 " are allowed",
                          path, *length, HEADER_MAX);
    return true;
}

static json_t *read_header(struct infile *in, const char *path, uint64_t length, struct reason *reason)
{
    json_error_t error;
    if (!infile_need(in, LENGTH_BYTES + length, path, reason)) return NULL;
    path = infile_name(path);
    if (length > in->size - LENGTH_BYTES) {
        reason_set(reason, "%s: header claims %" PRIu64 " bytes, the file has %" PRIu64 " after its length",
                   path, length, in->size - LENGTH_BYTES);
        return NULL;
    }
    json_t *header =
        json_loadb((const char *)in->bytes + LENGTH_BYTES, length, JSON_REJECT_DUPLICATES, &error);
    if (!header) reason_set(reason, "%s: header: byte %d: %s", path, error.position, error.text);
    if (header && !json_is_object(header)) {
        reason_set(reason, "%s: header: must be a JSON object", path);
        json_decref(header);
        return NULL;
    }
    return header;
}

/* For input that is not mapped: reads the data that the header claims, and one more byte if there is one.
 * The claims are checked later against the bytes read. */
static bool read_data(struct safetensors_file *file, const char *path, struct reason *reason)
{
    const char *name;
    json_t *entry;
    json_int_t claimed = 0;
    json_object_foreach(file->header, name, entry)
    {
        const json_int_t end = json_integer_value(json_array_get(json_object_get(entry, "data_offsets"), 1));
        if (end > claimed) claimed = end;
    }
    const uint64_t all = file->data_begin + (uint64_t)claimed + 1;
    if (!infile_need(&file->in, all, path, reason)) return false;
    file->data_bytes = file->in.size - file->data_begin;
    return true;
}

static bool check_metadata(const char *path, const json_t *metadata, struct reason *reason)
{
    const char *key;
    json_t *value;
    if (!metadata) return true;
    if (!json_is_object(metadata))
        return reason_set(reason, "%s: __metadata__: must be an object of strings", path);
    json_object_foreach((json_t *)metadata, key, value) if (!json_is_string(value)) return reason_set(
        reason, "%s: __metadata__: \"%s\" must be a string", path, key);
    return true;
}

/* Returns NULL with a reason if `value` names no type of the format. */
static const struct safetensors_dtype *parse_dtype(const char *path, const char *tensor, const json_t *value,
                                                   struct reason *reason)
{
    const char *name = json_string_value(value);
    for (size_t i = 0; name && i < TYPE_COUNT; i++)
        if (!strcmp(types[i].name, name)) return &types[i];
    reason_set(reason, "%s: tensor \"%s\": dtype %s is unknown, must be one of " TYPE_NAMES, path, tensor,
               name ? name : "(no string)");
    return NULL;
}

static bool parse_shape(const char *path, struct safetensors_tensor *tensor, const json_t *value,
                        struct reason *reason)
{
    if (!json_is_array(value))
        return reason_set(reason, "%s: tensor \"%s\": shape must be an array", path, tensor->name);
    if (json_array_size(value) > SAFETENSORS_MAX_DIMS)
        return reason_set(reason, "%s: tensor \"%s\": has %zu dimensions, at most %d are allowed", path,
                          tensor->name, json_array_size(value), SAFETENSORS_MAX_DIMS);
    tensor->ndim = (int32_t)json_array_size(value);
    for (int32_t i = 0; i < tensor->ndim; i++) {
        const json_t *size = json_array_get(value, (size_t)i);
        if (!json_is_integer(size) || json_integer_value(size) < 0)
            return reason_set(reason, "%s: tensor \"%s\": shape[%d] must be an integer of 0 or more", path,
                              tensor->name, i);
        tensor->shape[i] = json_integer_value(size);
    }
    return true;
}

static bool parse_offsets(const struct safetensors_file *file, const char *path,
                          struct safetensors_tensor *tensor, const json_t *value, struct reason *reason)
{
    static const _Alignas(ALIGNMENT) unsigned char nothing[ALIGNMENT];
    const json_t *begin = json_array_get(value, 0), *end = json_array_get(value, 1);
    uint64_t bytes;
    if (json_array_size(value) != 2 || !json_is_integer(begin) || !json_is_integer(end) ||
        json_integer_value(begin) < 0 || json_integer_value(end) < json_integer_value(begin))
        return reason_set(reason,
                          "%s: tensor \"%s\": data_offsets must be [begin, end] with 0 <= begin <= end", path,
                          tensor->name);
    tensor->begin = (uint64_t)json_integer_value(begin);
    tensor->end = (uint64_t)json_integer_value(end);
    if (tensor->end > file->data_bytes)
        return reason_set(reason,
                          "%s: tensor \"%s\": data_offsets [%" PRIu64 ", %" PRIu64 "] reach past the %" PRIu64
                          " bytes of data",
                          path, tensor->name, tensor->begin, tensor->end, file->data_bytes);
    if (!tensor_bytes(tensor->type->dtype, tensor->ndim, tensor->shape, &bytes))
        return reason_set(reason, "%s: tensor \"%s\": shape counts more elements than 63 bits hold", path,
                          tensor->name);
    if (tensor->end - tensor->begin != bytes)
        return reason_set(reason,
                          "%s: tensor \"%s\": data_offsets hold %" PRIu64
                          " bytes, its shape and dtype %s take %" PRIu64,
                          path, tensor->name, tensor->end - tensor->begin, tensor->type->name, bytes);
    tensor->data = bytes ? file->in.bytes + file->data_begin + tensor->begin : nothing;
    return true;
}

static int by_position(const void *left, const void *right)
{
    const struct safetensors_tensor *a = left, *b = right;
    if (a->begin != b->begin) return a->begin < b->begin ? -1 : 1;
    return a->end < b->end ? -1 : a->end > b->end;
}

/* Checks that in order of position every tensor begins where the previous one ends, and that the last ends
 * with the data. */
static bool check_cover(const struct safetensors_file *file, const char *path, struct reason *reason)
{
    uint64_t covered = 0;
    for (size_t i = 0; i < file->count; i++) {
        const struct safetensors_tensor *tensor = &file->tensors[i];
        if (tensor->begin < covered)
            return reason_set(reason, "%s: tensors \"%s\" and \"%s\" overlap at byte %" PRIu64 " of the data",
                              path, tensor[-1].name, tensor->name, tensor->begin);
        if (tensor->begin > covered)
            return reason_set(reason,
                              "%s: tensor \"%s\": bytes %" PRIu64 " to %" PRIu64
                              " of the data before it belong to no tensor",
                              path, tensor->name, covered, tensor->begin);
        covered = tensor->end;
    }
    if (covered == file->data_bytes) return true;
    return reason_set(reason, "%s: the tensors end at byte %" PRIu64 " of %" PRIu64 " bytes of data", path,
                      covered, file->data_bytes);
}

static bool parse_header(struct safetensors_file *file, const char *path, struct reason *reason)
{
    const char *name;
    json_t *entry;
    if (!check_metadata(path, json_object_get(file->header, "__metadata__"), reason)) return false;
    file->tensors = calloc(json_object_size(file->header) + 1, sizeof *file->tensors);
    if (!file->tensors) return reason_set(reason, "%s: out of memory", path);
    json_object_foreach(file->header, name, entry)
    {
        if (!strcmp(name, "__metadata__")) continue;
        struct safetensors_tensor *tensor = &file->tensors[file->count++];
        tensor->name = name;
        if (!json_is_object(entry))
            return reason_set(reason, "%s: tensor \"%s\": must be an object", path, name);
        tensor->type = parse_dtype(path, name, json_object_get(entry, "dtype"), reason);
        if (!tensor->type || !parse_shape(path, tensor, json_object_get(entry, "shape"), reason) ||
            !parse_offsets(file, path, tensor, json_object_get(entry, "data_offsets"), reason))
            return false;
    }
    qsort(file->tensors, file->count, sizeof *file->tensors, by_position);
    return check_cover(file, path, reason);
}

struct safetensors_file *safetensors_open(const char *path, struct reason *reason)
{
    struct safetensors_file *file = calloc(1, sizeof *file);
    uint64_t length = 0;
    if (!file) {
        reason_set(reason, "%s: out of memory", infile_name(path));
        return NULL;
    }
    if (infile_open(&file->in, path, reason) && read_header_length(&file->in, path, &length, reason) &&
        (file->header = read_header(&file->in, path, length, reason)) != NULL) {
        file->data_begin = LENGTH_BYTES + length;
        if (read_data(file, path, reason) && parse_header(file, infile_name(path), reason)) return file;
    }
    safetensors_close(file);
    return NULL;
}

void safetensors_close(struct safetensors_file *file)
{
    if (!file) return;
    infile_close(&file->in);
    json_decref(file->header);
    free(file->tensors);
    free(file);
}

size_t safetensors_count(const struct safetensors_file *file)
{
    return file->count;
}

const struct safetensors_tensor *safetensors_at(const struct safetensors_file *file, size_t index)
{
    return &file->tensors[index];
}

const struct safetensors_tensor *safetensors_find(const struct safetensors_file *file, const char *name)
{
    for (size_t i = 0; i < file->count; i++)
        if (!strcmp(file->tensors[i].name, name)) return &file->tensors[i];
    return NULL;
}

const char *safetensors_metadata(const struct safetensors_file *file, const char *key)
{
    return json_string_value(json_object_get(json_object_get(file->header, "__metadata__"), key));
}

/* ---- Writing ---- */

struct safetensors_writer {
    struct outfile *out;
    char *path;
    uint64_t expected, written; /* bytes of data */
};

static const char *type_name(fmla_dtype dtype)
{
    for (size_t i = 0; i < TYPE_COUNT; i++)
        if (!memcmp(&types[i].dtype, &dtype, sizeof dtype)) return types[i].name;
    return NULL;
}

static json_t *declare(const struct safetensors_declaration *tensor, uint64_t begin, uint64_t end)
{
    json_t *shape = json_array();
    for (int32_t i = 0; i < tensor->ndim; i++) json_array_append_new(shape, json_integer(tensor->shape[i]));
    return json_pack("{s:s, s:o, s:[I, I]}", "dtype", type_name(tensor->dtype), "shape", shape,
                     "data_offsets", (json_int_t)begin, (json_int_t)end);
}

/* Returns the header as text, in declaration order; *data_bytes is the size of all tensors together. */
static char *header_text(const char *path, const struct safetensors_declaration *tensors, size_t tensor_count,
                         const struct safetensors_note *notes, size_t note_count, uint64_t *data_bytes,
                         struct reason *reason)
{
    json_memory_watch();
    json_t *header = json_object();
    json_t *metadata = json_object();
    bool good = true;
    *data_bytes = 0;
    for (size_t i = 0; i < note_count; i++)
        json_object_set_new(metadata, notes[i].key, json_string(notes[i].value));
    json_object_set_new(header, "__metadata__", metadata);
    for (size_t i = 0; i < tensor_count && good; i++) {
        uint64_t bytes = 0;
        if (!type_name(tensors[i].dtype)) {
            good = reason_set(reason, "%s: tensor \"%s\": its type has no name in this format", path,
                              tensors[i].name);
        } else if (!tensor_bytes(tensors[i].dtype, tensors[i].ndim, tensors[i].shape, &bytes) ||
                   bytes > INT64_MAX - *data_bytes - HEADER_MAX) {
            good = reason_set(reason, "%s: tensor \"%s\": has more bytes than a file can have", path,
                              tensors[i].name);
        } else {
            json_t *entry = declare(&tensors[i], *data_bytes, *data_bytes + bytes);
            if (json_object_set_new(header, tensors[i].name, entry) && !json_memory_failed())
                good = reason_set(reason, "%s: tensor \"%s\": its name is no UTF-8", path, tensors[i].name);
            *data_bytes += bytes;
        }
    }
    char *text = good ? json_dumps(header, JSON_COMPACT | JSON_PRESERVE_ORDER) : NULL;
    json_decref(header);
    if (text && !json_memory_failed()) return text;
    if (good) reason_set(reason, "%s: out of memory", path);
    free(text);
    return NULL;
}

static bool write_header(struct safetensors_writer *writer, const char *text, struct reason *reason)
{
    static const char spaces[ALIGNMENT + 1] = "                                "
                                              "                                ";
    const uint64_t used = strlen(text);
    const uint64_t padding = (ALIGNMENT - (LENGTH_BYTES + used) % ALIGNMENT) % ALIGNMENT;
    unsigned char length[LENGTH_BYTES];
    for (unsigned i = 0; i < LENGTH_BYTES; i++) length[i] = (unsigned char)((used + padding) >> (8 * i));
    return outfile_write(writer->out, length, sizeof length, reason) &&
           outfile_write(writer->out, text, used, reason) &&
           outfile_write(writer->out, spaces, padding, reason);
}

struct safetensors_writer *safetensors_create(const char *path, const struct safetensors_declaration *tensors,
                                              size_t tensor_count, const struct safetensors_note *notes,
                                              size_t note_count, struct reason *reason)
{
    struct safetensors_writer *writer = calloc(1, sizeof *writer);
    char *text = NULL;
    if (!writer || !(writer->path = strdup(path))) {
        reason_set(reason, "%s: out of memory", path);
        free(writer);
        return NULL;
    }
    text = header_text(path, tensors, tensor_count, notes, note_count, &writer->expected, reason);
    if (text) writer->out = outfile_open(path, writer->expected + strlen(text) + ALIGNMENT, reason);
    const bool good = text && writer->out && write_header(writer, text, reason);
    free(text);
    if (good) return writer;
    safetensors_abandon(writer);
    return NULL;
}

bool safetensors_write(struct safetensors_writer *writer, const void *data, size_t bytes,
                       struct reason *reason)
{
    writer->written += bytes;
    return outfile_write(writer->out, data, bytes, reason);
}

bool safetensors_commit(struct safetensors_writer *writer, struct reason *reason)
{
    bool good = writer->written == writer->expected ||
                reason_set(reason, "%s: %" PRIu64 " bytes of data were written, %" PRIu64 " were declared",
                           writer->path, writer->written, writer->expected);
    if (good) {
        good = outfile_commit(writer->out, reason);
        writer->out = NULL;
    }
    safetensors_abandon(writer);
    return good;
}

void safetensors_abandon(struct safetensors_writer *writer)
{
    if (!writer) return;
    outfile_abandon(writer->out);
    free(writer->path);
    free(writer);
}

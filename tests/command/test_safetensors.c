/* SPDX-License-Identifier: MIT
 *
 * Tests malformed tensor files, each refused with its own line, and a round trip. Run in an empty folder:
 * files are created in the current one.
 */
#include "../unit/check.h"

#include "safetensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char path[] = "hostile.safetensors";

/* Writes a file of a claimed header length, a header, and `data` bytes of zeros. */
static void put(uint64_t claimed, const char *header, size_t header_bytes, size_t data)
{
    FILE *file = fopen(path, "wb");
    if (!file) abort();
    for (int i = 0; i < 8; i++) fputc((int)(claimed >> (8 * i)) & 255, file);
    fwrite(header, 1, header_bytes, file);
    for (size_t i = 0; i < data; i++) fputc(0, file);
    if (fclose(file)) abort();
}

/* Checks that the file is refused with a line that contains `part`. */
static void refused(const char *what, const char *part)
{
    struct reason reason = {""};
    struct safetensors_file *file = safetensors_open(path, &reason);
    CHECK(!file, "%s: was accepted", what);
    CHECK(!strncmp(reason.text, path, strlen(path)), "%s: '%s' does not name the file", what, reason.text);
    CHECK(strstr(reason.text, part), "%s: '%s' does not say '%s'", what, reason.text, part);
    CHECK(!strchr(reason.text, '\n'), "%s: more than one line", what);
    safetensors_close(file);
}

#define TENSOR(name, dtype, shape, offsets)                                                                  \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"
#define Q(shape, offsets)   "{" TENSOR("q", "F32", shape, offsets) "}"
#define A_AND_B(of_a, of_b) "{" TENSOR("a", "U8", "[8]", of_a) "," TENSOR("b", "U8", "[8]", of_b) "}"

static const struct {
    const char *header;
    size_t data;
    const char *part;
} lies[] = {
    {Q("[16]", "[0,99]"), 64, "tensor \"q\": data_offsets [0, 99] reach past the 64 bytes of data"},
    {Q("[16]", "[0,60]"), 60, "take 64"},
    {Q("[8]", "[32,0]"), 32, "begin <= end"},
    {Q("[8]", "[-32,0]"), 32, "begin <= end"},
    {Q("[8]", "[0,32,64]"), 32, "begin <= end"},
    {Q("[8]", "[0,32.0]"), 32, "begin <= end"},
    {"{\"q\":{\"dtype\":\"F32\",\"shape\":[8]}}", 32, "data_offsets must be"},
    {Q("[8]", "[0,18446744073709551616]"), 32, "too big integer"},
    {Q("[-8]", "[0,32]"), 32, "shape[0] must be"},
    {Q("[8.0]", "[0,32]"), 32, "shape[0] must be"},
    {Q("8", "[0,32]"), 32, "shape must be an array"},
    {Q("[4611686018427387904,4]", "[0,0]"), 0, "63 bits"},
    {Q("[1,1,1,1,1,1,1,1,1]", "[0,4]"), 4, "9 dimensions"},
    {"{\"q\":{\"dtype\":\"F33\",\"shape\":[8],\"data_offsets\":[0,32]}}", 32, "dtype F33 is unknown"},
    {"{\"q\":{\"dtype\":7,\"shape\":[8],\"data_offsets\":[0,32]}}", 32, "must be one of BF16"},
    {"{\"q\":{\"shape\":[8],\"data_offsets\":[0,32]}}", 32, "must be one of BF16"},
    {A_AND_B("[0,8]", "[7,15]"), 15, "tensors \"a\" and \"b\" overlap at byte 7"},
    {A_AND_B("[0,8]", "[0,8]"), 8, "overlap"},
    {A_AND_B("[0,8]", "[9,17]"), 17, "bytes 8 to 9"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,8]}}", 9, "end at byte 8 of 9"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]},"
     "\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}",
     0, "duplicate"},
    {"{\"__metadata__\":{\"seed\":1}}", 0, "\"seed\" must be a string"},
    {"{\"__metadata__\":[]}", 0, "__metadata__: must be an object"},
    {"{\"a\":5}", 0, "tensor \"a\": must be an object"},
    {"[]", 0, "must be a JSON object"},
    {"{", 0, "header: byte"},
    {"{}x", 0, "header: byte"},
    {"{\"evil\\nname\":5}", 0, "tensor \"evil?name\""},
    {"\xff\xfe", 0, "header: byte"},
};

static void test_lies(void)
{
    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
        const size_t length = strlen(lies[i].header);
        put(length, lies[i].header, length, lies[i].data);
        refused(lies[i].header, lies[i].part);
    }
}

/* Arrays nested deeper than a parser's stack, and a NUL inside the header. */
static void test_odd_headers(void)
{
    char *deep = malloc(100000);
    if (!deep) abort();
    memset(deep, '[', 100000);
    put(100000, deep, 100000, 0);
    refused("deep nesting", "header: byte");
    free(deep);
    put(3, "{\0}", 3, 0);
    refused("a NUL in the header", "header: byte");
}

static void test_lengths(void)
{
    put(0, "", 0, 0);
    refused("an empty header", "header: byte");
    put((uint64_t)4 << 30, "{}", 2, 0);
    refused("a 4 GiB header", "claims 4294967296 bytes, at most 104857600 are allowed");
    put(UINT64_MAX, "{}", 2, 0);
    refused("a header of 2^64 - 1", "at most");
    put(100, "{}", 2, 0);
    refused("a truncated header", "claims 100 bytes, the file has 2 after its length");
    for (off_t size = 0; size < 8; size++) {
        if (truncate(path, size)) abort();
        refused("a file shorter than its length field", "bytes, a safetensors file has at least");
    }
}

static void test_no_files(void)
{
    struct reason reason = {""};
    CHECK(!safetensors_open(".", &reason) && strstr(reason.text, "is a directory"), "directory: %s",
          reason.text);
    CHECK(!safetensors_open("/dev/zero", &reason) && strstr(reason.text, "no regular file"), "device: %s",
          reason.text);
    CHECK(!safetensors_open("nowhere", &reason) && strstr(reason.text, "cannot open"), "absent: %s",
          reason.text);
    if (mkfifo("pipe", 0600)) abort();
    CHECK(!safetensors_open("pipe", &reason) && strstr(reason.text, "no regular file"), "pipe: %s",
          reason.text);
    unlink("pipe");
}

/* A valid file truncated at any length is refused. */
static void test_truncation(void)
{
    static const char good[] = Q("[4]", "[0,16]");
    const off_t whole = (off_t)(8 + strlen(good) + 16);
    put(strlen(good), good, strlen(good), 16);
    struct reason reason = {""};
    struct safetensors_file *file = safetensors_open(path, &reason);
    CHECK(file, "a good file: %s", reason.text);
    safetensors_close(file);
    for (off_t size = whole - 1; size >= 0; size--) {
        if (truncate(path, size)) abort();
        refused("a cut file", path);
    }
}

static void test_round_trip(void)
{
    static const struct safetensors_declaration tensors[] = {
        {"first", {FMLA_TYPE_BFLOAT, 16, 1}, 2, {3, 5}},
        {"nothing", {FMLA_TYPE_INT, 32, 1}, 2, {0, 7}},
        {"scalar", {FMLA_TYPE_FLOAT, 64, 1}, 0, {0}},
    };
    static const struct safetensors_note notes[] = {{"seed", "17"}, {"a \"quoted\" key", "value\n"}};
    static const unsigned char data[38] = {1, 2, 3, [29] = 30, [37] = 38};
    struct reason reason = {""};
    struct safetensors_writer *writer = safetensors_create(path, tensors, 3, notes, 2, &reason);
    CHECK(writer, "create: %s", reason.text);
    if (!writer) return;
    CHECK(safetensors_write(writer, data, 30, &reason) && safetensors_write(writer, data + 30, 8, &reason) &&
              safetensors_commit(writer, &reason),
          "write: %s", reason.text);
    struct safetensors_file *file = safetensors_open(path, &reason);
    CHECK(file, "open: %s", reason.text);
    if (!file) return;
    const struct safetensors_tensor *first = safetensors_find(file, "first");
    const struct safetensors_tensor *nothing = safetensors_find(file, "nothing");
    const struct safetensors_tensor *scalar = safetensors_find(file, "scalar");
    CHECK(safetensors_count(file) == 3 && first && nothing && scalar, "tensors are missing");
    CHECK(first && first->ndim == 2 && first->shape[0] == 3 && first->shape[1] == 5, "first: shape");
    CHECK(first && !memcmp(first->data, data, 30), "first: data");
    CHECK(first && (uintptr_t)first->data % 64 == 0, "first: not aligned");
    CHECK(first && !strcmp(first->type->name, "BF16"), "first: dtype");
    CHECK(nothing && nothing->data && nothing->begin == nothing->end, "nothing: data");
    CHECK(scalar && scalar->ndim == 0 && !memcmp(scalar->data, data + 30, 8), "scalar: data");
    CHECK(!safetensors_find(file, "second"), "a tensor that is not there");
    const char *seed = safetensors_metadata(file, "seed");
    CHECK(seed && !strcmp(seed, "17"), "metadata");
    const char *quoted = safetensors_metadata(file, "a \"quoted\" key");
    CHECK(quoted && !strcmp(quoted, "value\n"), "quoted metadata");
    CHECK(!safetensors_metadata(file, "none"), "metadata that is not there");
    safetensors_close(file);
}

static void test_unfinished(void)
{
    static const struct safetensors_declaration tensor = {"t", {FMLA_TYPE_UINT, 8, 1}, 1, {10}};
    struct reason reason = {""};
    unlink(path);
    struct safetensors_writer *writer = safetensors_create(path, &tensor, 1, NULL, 0, &reason);
    CHECK(writer, "create: %s", reason.text);
    if (!writer) return;
    CHECK(safetensors_write(writer, "short", 5, &reason), "write: %s", reason.text);
    CHECK(!safetensors_commit(writer, &reason) && strstr(reason.text, "5 bytes of data were written, 10"),
          "a short file: %s", reason.text);
    CHECK(access(path, F_OK), "an unfinished file was left");
    static const struct safetensors_declaration huge = {"t", {FMLA_TYPE_UINT, 8, 1}, 1, {(int64_t)1 << 60}};
    CHECK(!safetensors_create(path, &huge, 1, NULL, 0, &reason) && strstr(reason.text, "left"), "huge: %s",
          reason.text);
    static const struct safetensors_declaration more = {
        "t", {FMLA_TYPE_INT, 64, 1}, 2, {(int64_t)1 << 31, (int64_t)1 << 31}};
    CHECK(!safetensors_create(path, &more, 1, NULL, 0, &reason) && strstr(reason.text, "more bytes than"),
          "overflowing: %s", reason.text);
    CHECK(access(path, F_OK), "a refused file was left");
}

int main(void)
{
    test_lies();
    test_odd_headers();
    test_lengths();
    test_no_files();
    test_truncation();
    test_round_trip();
    test_unfinished();
    unlink(path);
    return check_done("safetensors");
}

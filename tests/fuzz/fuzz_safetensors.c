/* SPDX-License-Identifier: MIT
 *
 * Fuzzes the reader of tensor files. The first byte selects how the rest becomes a file: unchanged, or as
 * the header of one, whose length and data are then added, since a mutation rarely keeps a length right.
 */
#define _GNU_SOURCE /* memfd_create */
#include "fuzz.h"

#include "safetensors.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static void put(int fd, const void *data, size_t bytes)
{
    if (write(fd, data, bytes) != (ssize_t)bytes) abort();
}

static void make_file(int fd, const uint8_t *data, size_t size)
{
    static const uint8_t zeros[1024];
    struct bytes in = {data, size};
    const uint32_t form = take(&in);
    if (ftruncate(fd, 0) || lseek(fd, 0, SEEK_SET)) abort();
    if (form % 4) {
        uint8_t length[8] = {0};
        const size_t more = form % 4 == 1 ? 16 : take32(&in) % sizeof zeros;
        for (int i = 0; i < 4; i++) length[i] = (uint8_t)(in.left >> (8 * i));
        put(fd, length, sizeof length);
        put(fd, in.at, in.left);
        put(fd, zeros, more);
    } else {
        put(fd, in.at, in.left);
    }
}

/* Receives what is read, so that reads are not optimised away. */
static volatile unsigned sink;

/* Reads every byte and every number, and checks the reader's promises about the tensors. */
static void walk(const struct safetensors_file *file)
{
    uint64_t covered = 0;
    for (size_t i = 0; i < safetensors_count(file); i++) {
        const struct safetensors_tensor *tensor = safetensors_at(file, i);
        PROMISE(tensor->begin == covered && tensor->end >= covered, "tensor %zu is not next", i);
        covered = tensor->end;
        PROMISE(tensor->ndim >= 0 && tensor->ndim <= SAFETENSORS_MAX_DIMS, "%d dimensions", tensor->ndim);
        uint64_t bytes = tensor->type->dtype.bits / 8;
        for (int32_t d = 0; d < tensor->ndim; d++) {
            PROMISE(tensor->shape[d] >= 0, "size %lld", (long long)tensor->shape[d]);
            bytes *= (uint64_t)tensor->shape[d];
        }
        PROMISE(bytes == tensor->end - tensor->begin, "%llu bytes", (unsigned long long)bytes);
        PROMISE(tensor->data, "tensor %zu has no data", i);
        const unsigned char *data = tensor->data;
        for (uint64_t k = 0; k < bytes; k++) sink += data[k];
        PROMISE(safetensors_find(file, tensor->name), "%s cannot be found", tensor->name);
    }
    const char *note = safetensors_metadata(file, "causal");
    if (note) sink += (unsigned)strlen(note);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static int fd = -1;
    static char path[64];
    if (fd < 0) {
        fd = memfd_create("input", MFD_CLOEXEC);
        if (fd < 0) abort();
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    }
    make_file(fd, data, size);
    struct reason reason = {""};
    struct safetensors_file *file = safetensors_open(path, &reason);
    if (!file) {
        PROMISE(*reason.text && !strchr(reason.text, '\n'), "refused with \"%s\"", reason.text);
        return 0;
    }
    walk(file);
    safetensors_close(file);
    return 0;
}

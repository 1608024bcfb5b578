/* SPDX-License-Identifier: MIT
 *
 * Cases on a GPU. A case is made in host memory, as everywhere; each block of that memory, canaries and gaps included,
 * has a copy on the device, the call runs on the copies, and what it wrote comes back into the host's blocks. So one
 * set of comparisons serves every device. What goes wrong in the driver ends the process: each GPU kernel has one of
 * its own.
 *
 * As long as no GPU is opened, "the device" is host memory behind guard pages (pages.h), to which only what a call may touch
 * is copied: tensors without canaries, up to their last element. A run whose device is device_pages has its calls there.
 */
#ifndef CHECKATTN_DEVICE_H
#define CHECKATTN_DEVICE_H

#include "gpu.h"
#include "memory.h"

#include <stdint.h>

/* Not a device of the library's: cases know by it that their calls are made on copies. */
extern const fmla_device device_pages;

struct device_block {
    unsigned char *host; /* not owned */
    size_t bytes;
    unsigned char *device;
    bool borrowed; /* the device memory is that of another list */
};

enum { DEVICE_BLOCKS = 24 };

/* Zero-initialised: a case on the CPU has none. */
struct device_blocks {
    int count;
    struct device_block block[DEVICE_BLOCKS];
};

/* The GPU under test: once in a process, then in every other thread that uses it. */
void device_open(fmla_device device);
void device_enter(void);
size_t device_memory(void); /* of the GPU */

/* Copies a block to the device, where its address is such a multiple, and one of 256 on a GPU. */
void device_add(struct device_blocks *blocks, void *host, size_t bytes, size_t alignment);
void device_add_guarded(struct device_blocks *blocks, const struct guarded *guarded);

/* A block that is 0 on the device, of which device_part copies what is not. */
void device_add_zeros(struct device_blocks *blocks, void *host, size_t bytes);
void device_part(const struct device_blocks *blocks, void *host, size_t bytes, bool up);

/* Another case of the same shapes takes the place of `blocks` on the device: what the host's blocks of `like` hold now
 * is what memory at the same addresses will hold. */
void device_add_in_place(struct device_blocks *blocks, void *host, size_t bytes,
                         const struct device_blocks *like);

/* Frees all but the first `count`. */
void device_drop(struct device_blocks *blocks, int count);

/* Host to device or back, of the block that has this address, or of all (NULL). */
void device_move(const struct device_blocks *blocks, const void *host, bool up);

/* Is the block of this address on the device what it is on the host? */
bool device_is(const struct device_blocks *blocks, const void *host);

/* Where an address of a block is on the device; NULL stays NULL. */
void *device_address(const struct device_blocks *blocks, const void *host);

/* The tensor on the device, NULL for NULL. `storage` holds it. */
const fmla_tensor *device_tensor(const struct device_blocks *blocks, const fmla_tensor *tensor,
                                 fmla_tensor *storage);

/* Device memory that is no copy: filled with a byte, and guarded behind. Its address is a multiple of 64. */
struct device_scratch {
    unsigned char *memory;
    size_t bytes;
};

void device_scratch_make(struct device_scratch *scratch, size_t bytes, int fill);
void device_scratch_fill(const struct device_scratch *scratch, int fill);
void device_scratch_write(const struct device_scratch *scratch, size_t at, const void *bytes, size_t count);
bool device_scratch_intact(const struct device_scratch *scratch);
bool device_scratch_is(const struct device_scratch *scratch,
                       const void *bytes); /* holds these, all of them */
void device_scratch_free(struct device_scratch *scratch);

/* Where the block of a host address is, and how long it is; to be written by tests of the tests alone. */
struct device_scratch device_place(const struct device_blocks *blocks, const void *host);

/* The tables of a plan there, of so many partitions and requests. */
struct device_tables {
    struct device_scratch rows, splits;
    fmla_tensor tensor[2];
    int64_t rows_shape[2], splits_shape[1];
};

void device_tables_make(struct device_tables *tables, int32_t partitions, int64_t b, int fill);

/* Streams and graphs, without a way to fail; gpu.h closes them. Host memory has neither: NULL. */
void *device_stream_open(void);
void device_wait(void *stream);
void device_capture_begin(void *stream);
void *device_capture_end(void *stream);
void device_launch(void *graph, void *stream);

/* What a stress test does beside the calls of a case; NULL, the default: nothing. */
struct device_stress {
    /* After a call, before its results come back: plants what a kernel with a defect would have done. */
    void (*after)(const struct device_blocks *blocks, const fmla_tensor *out, const fmla_tensor *input,
                  struct device_scratch *workspace);
    /* The same, after a call that was refused. */
    void (*refused)(const struct device_blocks *blocks, const fmla_tensor *out);
    /* A workspace that is too short, or not aligned, must be refused, and nothing written; also told here are patterns
     * around buffers that were written over. */
    void (*wrong)(const char *what);
};
extern const struct device_stress *device_stress;

#endif

/* SPDX-License-Identifier: MIT
 *
 * Cases on a GPU. A case is made in host memory; each block of that memory, canaries and gaps included, has a
 * copy on the device, the call runs on the copies, and its outputs are copied back into the host's blocks. So
 * one set of comparisons serves every device. Driver errors end the process: each GPU kernel is checked in
 * its own.
 *
 * Until a GPU is opened, "the device" is host memory between inaccessible guard pages, which receives only
 * the memory that a call may touch: tensors without canaries, up to their last element. A run on
 * device_pages makes its calls there.
 */
#ifndef CHECKATTN_DEVICE_H
#define CHECKATTN_DEVICE_H

#include "gpu.h"
#include "memory.h"

#include <stdint.h>

/* Not a device of the library; marks cases whose calls run on copies. */
extern const fmla_device device_pages;

struct device_block {
    unsigned char *host; /* not owned */
    size_t bytes;
    unsigned char *device;
    bool borrowed; /* the device memory belongs to another list */
};

enum { DEVICE_BLOCKS = 32 };

/* Zero-initialise it; a case on the CPU has no blocks. */
struct device_blocks {
    int count;
    struct device_block block[DEVICE_BLOCKS];
};

/* Sets this thread's seed for the choice of the end of the pages at which buffers are placed. */
void device_draw_pages(uint64_t seed);

/* Open the GPU under test: once per process, then in every other thread that uses it. */
void device_open(fmla_device device);
void device_enter(void);
size_t device_memory(void); /* of the GPU */

/* Copies a block to the device, at a multiple of `alignment`, and of 256 on a GPU. */
void device_add(struct device_blocks *blocks, void *host, size_t bytes, size_t alignment);
void device_add_guarded(struct device_blocks *blocks, const struct guarded *guarded);

/* Adds a block of zeros on the device; device_part copies the nonzero parts. */
void device_add_zeros(struct device_blocks *blocks, void *host, size_t bytes);
void device_part(const struct device_blocks *blocks, void *host, size_t bytes, bool up);

/* Puts another case of the same shapes in the place of `like`'s blocks on the device: memory at the same
 * addresses then holds the new blocks' contents. */
void device_add_in_place(struct device_blocks *blocks, void *host, size_t bytes,
                         const struct device_blocks *like);

/* Frees all blocks except the first `count`. */
void device_drop(struct device_blocks *blocks, int count);

/* Copies the block at this address, or all (NULL), from host to device or back. */
void device_move(const struct device_blocks *blocks, const void *host, bool up);

/* Returns true if the block at this address is equal on device and host. */
bool device_is(const struct device_blocks *blocks, const void *host);

/* Returns the device address of an address in a block; NULL stays NULL. */
void *device_address(const struct device_blocks *blocks, const void *host);

/* Returns the tensor on the device, in `storage`; NULL for NULL. */
const fmla_tensor *device_tensor(const struct device_blocks *blocks, const fmla_tensor *tensor,
                                 fmla_tensor *storage);

/* Device memory without a host block: filled with a byte, with a guard behind it. Its address is a
 * multiple of 64. */
struct device_scratch {
    unsigned char *memory;
    size_t bytes;
};

void device_scratch_make(struct device_scratch *scratch, size_t bytes, int fill);
void device_scratch_fill(const struct device_scratch *scratch, int fill);
void device_scratch_write(const struct device_scratch *scratch, size_t at, const void *bytes, size_t count);
bool device_scratch_intact(const struct device_scratch *scratch);
bool device_scratch_is(const struct device_scratch *scratch,
                       const void *bytes); /* contains exactly these bytes */
void device_scratch_free(struct device_scratch *scratch);

/* Returns the device place of a host address's block and its length; only tests of checkattn itself write
 * there. */
struct device_scratch device_place(const struct device_blocks *blocks, const void *host);

/* Plan tables on the device, for this many partitions and requests. */
struct device_tables {
    struct device_scratch rows, splits;
    fmla_tensor tensor[2];
    int64_t rows_shape[2], splits_shape[1];
};

void device_tables_make(struct device_tables *tables, int32_t partitions, int64_t b, int fill);

/* Streams and graphs; errors end the process, and gpu.h closes them. Host memory has neither: NULL. */
void *device_stream_open(void);
void device_wait(void *stream);
void device_capture_begin(void *stream);
void *device_capture_end(void *stream);
void device_launch(void *graph, void *stream);

/* Hooks of a stress test around the calls of a case; NULL, the default: none. */
struct device_stress {
    /* Called after a call, before its results are copied back: plants the effect of a kernel's defect. */
    void (*after)(const struct device_blocks *blocks, const fmla_tensor *out, const fmla_tensor *input,
                  struct device_scratch *workspace);
    /* Like `after`, after a call that was refused. */
    void (*refused)(const struct device_blocks *blocks, const fmla_tensor *out);
    /* Reports an error: a workspace that is too short or misaligned was not refused, a refused call wrote
     * a result, or a pattern around a buffer was overwritten. */
    void (*wrong)(const char *what);
};
extern const struct device_stress *device_stress;

#endif

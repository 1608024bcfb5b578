/* SPDX-License-Identifier: MIT
 *
 * Host memory between guard pages: inaccessible pages directly before and after it. A buffer begins at the
 * start of its pages or ends at their end; the rest of the pages has a pattern.
 */
#ifndef CHECKATTN_PAGES_H
#define CHECKATTN_PAGES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Sets this thread's seed for the choice of the end of the pages at which buffers are placed. */
void pages_draw(uint64_t seed);

/* Returns memory aligned to `alignment`. Never NULL: without address space the process ends. */
void *pages_alloc(size_t bytes, size_t alignment);

/* Returns true if the rest of the pages was never written. */
bool pages_intact(const void *memory, size_t bytes);
void pages_free(void *memory, size_t bytes);

#endif

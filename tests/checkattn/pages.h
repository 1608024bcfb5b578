/* SPDX-License-Identifier: MIT
 *
 * Host memory behind guard pages: a page that may not be touched directly before it and one directly behind it. A buffer
 * begins where its pages begin, or ends where they end; what is left of them has a pattern.
 */
#ifndef CHECKATTN_PAGES_H
#define CHECKATTN_PAGES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Of this thread, from now on: at which end buffers lie is drawn from this seed. */
void pages_draw(uint64_t seed);

/* Bytes whose address is a multiple of `alignment`. Never NULL: the process ends without address space. */
void *pages_alloc(size_t bytes, size_t alignment);

/* Was what is left of the pages never written? */
bool pages_intact(const void *memory, size_t bytes);
void pages_free(void *memory, size_t bytes);

#endif

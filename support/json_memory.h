/* SPDX-License-Identifier: MIT
 *
 * jansson returns NULL when memory runs out and accepts NULL as an absent value: a value built from such
 * parts is well-formed but incomplete. Its allocations are therefore watched, and the builder of a value
 * checks json_memory_failed before using it.
 */
#ifndef FMLA_SUPPORT_JSON_MEMORY_H
#define FMLA_SUPPORT_JSON_MEMORY_H

#include <stdbool.h>

/* Begins to watch; call it before the first JSON value is made. Not thread-safe. */
void json_memory_watch(void);

/* Returns true if an allocation has failed since then. */
bool json_memory_failed(void);

#endif

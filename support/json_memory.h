/* SPDX-License-Identifier: MIT
 *
 * jansson answers a lack of memory with NULL, and takes NULL as a value that is not there: what is built from such parts is
 * well-formed and incomplete. So its allocations are watched, and whoever built something asks before using it.
 */
#ifndef FMLA_SUPPORT_JSON_MEMORY_H
#define FMLA_SUPPORT_JSON_MEMORY_H

#include <stdbool.h>

/* Begins to watch; before the first JSON value is made. Not for several threads. */
void json_memory_watch(void);

/* Has an allocation failed since? */
bool json_memory_failed(void);

#endif

/* SPDX-License-Identifier: MIT
 *
 * What a GPU kernel of dense decode promises beyond the values of one call.
 */
#ifndef CHECKATTN_DECODE_DEVICE_H
#define CHECKATTN_DECODE_DEVICE_H

#include "checkattn.h"

/* Graphs: captured once, replayed with other inputs in place. The first call of the process: that it loads the kernel
 * must not disturb a capture. */
void check_device_first_use(const struct run *run, struct tally *tally);

/* The same bits on 20 runs, several streams and threads at once, requests alone and in a batch, a cache past 2^32
 * elements. */
void check_device_decode(const struct run *run, struct tally *tally);

#endif

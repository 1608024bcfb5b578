/* SPDX-License-Identifier: MIT
 *
 * What a GPU kernel of sparse prefill promises beyond the values of one call.
 */
#ifndef CHECKATTN_PREFILL_DEVICE_H
#define CHECKATTN_PREFILL_DEVICE_H

#include "checkattn.h"

/* Graphs, captured once and replayed with other inputs in place: the first calls of the process, so that loading the kernel
 * does not disturb a capture. The same bits on 20 runs and on two streams at once; lists and lengths of any values. */
void check_prefill_device(const struct run *run, struct tally *tally);

#endif

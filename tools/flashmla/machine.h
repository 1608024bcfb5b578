/* SPDX-License-Identifier: MIT
 *
 * The name of a device and its description by the library, as `info` and `verify` write them.
 */
#ifndef FLASHMLA_TOOL_MACHINE_H
#define FLASHMLA_TOOL_MACHINE_H

#include "flashmla/flashmla.h"

#include <jansson.h>
#include <stddef.h>

/* Returns "cpu" or "cuda:0". */
const char *machine_device_name(fmla_device device, char name[16]);

/* Returns the result of fmla_device_describe; if that fails, `reason` says why. */
fmla_device_info machine_describe(fmla_device device);

/* Copies the processor's name as Linux reports it; "" elsewhere. */
void machine_cpu_name(char *name, size_t size);

/* Returns a GPU's name, compute capability, SMs, shared memory and driver, and the architectures that the
 * build has machine code for. */
json_t *machine_gpu_json(int32_t id);

/* Returns machine_gpu_json of a GPU, or the processor's name and the number of threads. */
json_t *machine_json(fmla_device device);

#endif

/* SPDX-License-Identifier: MIT */
#ifndef FLASHMLA_TOOL_KERNELS_H
#define FLASHMLA_TOOL_KERNELS_H

#include "fault.h"

/* Is there a kernel of this name that computes the operation, on whatever device? If not, a fault that names those that
 * there are. NULL is the library's choice. */
bool kernel_exists(const char *operation, const char *name, struct fault *fault);

#endif

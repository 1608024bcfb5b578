/* SPDX-License-Identifier: MIT */
#ifndef FMLA_CPU_ALLOW_AMX_H
#define FMLA_CPU_ALLOW_AMX_H

#include <stdbool.h>

/* Asks the system to let all threads of this process, present and future, use AMX tiles. Returns whether the
 * processor has tiles and their bf16 products and the system grants them. */
bool cpu_allow_amx(void);

#endif

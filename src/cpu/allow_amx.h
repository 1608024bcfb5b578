/* SPDX-License-Identifier: MIT */
#ifndef FMLA_CPU_ALLOW_AMX_H
#define FMLA_CPU_ALLOW_AMX_H

#include <stdbool.h>

/* Has this processor tiles and their products of bf16, and does the system let this process use them? It is asked to, for all threads
 * of now and later. */
bool cpu_allow_amx(void);

#endif

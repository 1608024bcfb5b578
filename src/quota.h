/* SPDX-License-Identifier: MIT
 *
 * The CPU quota of the process: what a container or a service manager lets it use.
 */
#ifndef FMLA_QUOTA_H
#define FMLA_QUOTA_H

#include <stdint.h>

/* Returns the least number of whole processors that covers the CPU quota of the process's control group and
 * of those above it (cgroup v2: cpu.max, v1: cpu.cfs_quota_us and cpu.cfs_period_us); 0 without a quota, or
 * if it is unknown. It does not allocate. `root` precedes every path that is read: "" for this machine, a
 * folder for tests. */
int32_t quota_processors(const char *root);

#endif

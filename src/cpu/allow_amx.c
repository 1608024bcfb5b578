/* SPDX-License-Identifier: MIT */
#define _GNU_SOURCE /* syscall */
#include "allow_amx.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Returns whether the system saves the state of tiles; CPUID's OSXSAVE says that XGETBV may ask. */
static bool saves_tiles(void)
{
    enum { TILE_CONFIG = 1 << 17, TILE_DATA = 1 << 18, OSXSAVE = 1 << 27 };
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & OSXSAVE)) return false;
    __asm__("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
    return (a & TILE_CONFIG) && (a & TILE_DATA);
}

bool cpu_allow_amx(void)
{
    enum { AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24 };                /* leaf 7, edx */
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 }; /* <asm/prctl.h> of Linux 5.16 */
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & AMX_BF16) || !(d & AMX_TILE)) return false;
    return saves_tiles() && !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
}
#else
bool cpu_allow_amx(void)
{
    return false;
}
#endif

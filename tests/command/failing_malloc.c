/* SPDX-License-Identifier: MIT
 *
 * To be preloaded: memory runs out at the FMLA_FAIL_AT-th allocation of the process (from 1), for that one or, with
 * FMLA_FAIL_ON=1, for good. When it does, a byte goes to descriptor 9. glibc's names.
 */
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *old, size_t size);
void *__libc_memalign(size_t alignment, size_t size);

static int fails(void)
{
    static atomic_long count;
    static long at = -1;
    static int on;
    if (at < 0) { /* the first allocation comes before there is a second thread */
        const char *number = getenv("FMLA_FAIL_AT"), *more = getenv("FMLA_FAIL_ON");
        at = number ? strtol(number, NULL, 10) : 0;
        on = more && *more == '1';
    }
    const long now = atomic_fetch_add(&count, 1) + 1;
    if (!at || now < at || (now > at && !on)) return 0;
    if (now == at && write(9, "x", 1) != 1) _exit(99);
    errno = ENOMEM;
    return 1;
}

void *malloc(size_t size)
{
    return fails() ? NULL : __libc_malloc(size);
}

void *calloc(size_t count, size_t size)
{
    return fails() ? NULL : __libc_calloc(count, size);
}

void *realloc(void *old, size_t size)
{
    return fails() ? NULL : __libc_realloc(old, size);
}

void *aligned_alloc(size_t alignment, size_t size)
{
    return fails() ? NULL : __libc_memalign(alignment, size);
}

int posix_memalign(void **memory, size_t alignment, size_t size)
{
    if (fails()) return ENOMEM;
    *memory = __libc_memalign(alignment, size);
    return *memory ? 0 : ENOMEM;
}

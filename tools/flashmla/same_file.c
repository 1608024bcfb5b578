/* SPDX-License-Identifier: MIT */
#include "same_file.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static bool describe(const char *path, bool written, struct stat *status)
{
    if (!strcmp(path, "-")) return !fstat(written ? STDOUT_FILENO : STDIN_FILENO, status);
    return !stat(path, status);
}

static bool is_one(const struct stat *a, const struct stat *b)
{
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino;
}

static const char *last_part(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static bool describe_folder(const char *path, struct stat *status)
{
    const char *name = last_part(path);
    if (name == path) return !stat(".", status);
    char *folder = strndup(path, (size_t)(name - path));
    const bool found = folder && !stat(folder, status);
    free(folder);
    return found;
}

bool same_file(const char *a, bool a_written, const char *b, bool b_written)
{
    struct stat of_a, of_b;
    const bool a_is = describe(a, a_written, &of_a), b_is = describe(b, b_written, &of_b);
    if (a_is && b_is) /* a socket may be both input and output, a terminal all of them */
        return is_one(&of_a, &of_b) &&
               (S_ISREG(of_a.st_mode) || (a_written && b_written && !S_ISCHR(of_a.st_mode)));
    if (a_is || b_is) return false;
    return describe_folder(a, &of_a) && describe_folder(b, &of_b) && is_one(&of_a, &of_b) &&
           !strcmp(last_part(a), last_part(b));
}

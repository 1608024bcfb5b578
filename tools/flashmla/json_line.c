/* SPDX-License-Identifier: MIT */
#include "json_line.h"

#include "json_memory.h"

#include <stdlib.h>

bool json_line(struct outfile *file, json_t *object, struct reason *reason)
{
    char *text = object ? json_dumps(object, JSON_COMPACT | JSON_REAL_PRECISION(6)) : NULL;
    json_decref(object);
    const bool good = text && !json_memory_failed() ? outfile_line(file, text, reason)
                                                    : reason_set(reason, "out of memory for JSON");
    free(text);
    return good;
}

bool json_file(const char *path, json_t *object, struct reason *reason)
{
    struct outfile *file = outfile_open_lines(path, reason);
    if (!file) {
        json_decref(object);
        return false;
    }
    if (json_line(file, object, reason)) return outfile_commit(file, reason);
    outfile_abandon(file);
    return false;
}

/* SPDX-License-Identifier: MIT
 *
 * The affinity mask of a process in a container shows the host's processors even if a quota lets it use the
 * time of only two. Threads beyond the quota are stopped together in each period, in the middle of an item.
 *
 * /proc/self/cgroup names the process's group in each hierarchy, /proc/self/mountinfo where hierarchies are
 * mounted, and from which group on: a container may see its own group as the root, or the host's path
 * (cgroups(7), proc_pid_mountinfo(5)).
 */
#include "quota.h"

#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST_LINE = 2048, MOST_PATH = 1024 };

/* ---- Files, line by line, without stdio's memory ------------------------------------------------ */

struct lines {
    int file;
    size_t used, at;
    char buffer[MOST_LINE];
};

static bool open_lines(struct lines *lines, const char *root, const char *path)
{
    char name[MOST_PATH];
    lines->used = lines->at = 0;
    if (snprintf(name, sizeof name, "%s%s", root, path) >= (int)sizeof name) return false;
    lines->file = open(name, O_RDONLY | O_CLOEXEC);
    return lines->file >= 0;
}

/* Returns the next line without its end; NULL after the last. Of a longer line it returns the beginning. */
static char *next_line(struct lines *lines)
{
    memmove(lines->buffer, lines->buffer + lines->at, lines->used - lines->at);
    lines->used -= lines->at, lines->at = 0;
    for (;;) {
        char *const end = memchr(lines->buffer, '\n', lines->used);
        if (end) {
            *end = 0, lines->at = (size_t)(end + 1 - lines->buffer);
            return lines->buffer;
        }
        if (lines->used == MOST_LINE) lines->used = MOST_LINE / 2; /* drops the middle of a long line */
        const ssize_t came = read(lines->file, lines->buffer + lines->used, MOST_LINE - lines->used);
        if (came <= 0) break;
        lines->used += (size_t)came;
    }
    if (!lines->used || lines->used == MOST_LINE) return NULL;
    lines->buffer[lines->used] = 0, lines->at = lines->used;
    return lines->buffer;
}

/* Reads the first line of folder/name into `text`. */
static bool read_line(const char *root, const char *folder, const char *name, char *text, size_t room)
{
    char path[MOST_PATH];
    struct lines lines;
    if (snprintf(path, sizeof path, "%s/%s", folder, name) >= (int)sizeof path) return false;
    if (!open_lines(&lines, root, path)) return false;
    const char *const line = next_line(&lines);
    close(lines.file);
    return line && snprintf(text, room, "%s", line) < (int)room;
}

/* ---- Quotas ------------------------------------------------------------------------------------ */

/* A hierarchy that can limit CPU time: version 2, or the controller `cpu` of version 1. */
struct hierarchy {
    bool is_v2;
    char group[MOST_PATH];               /* of the process; empty: none */
    char from[MOST_PATH], at[MOST_PATH]; /* the mount: the group that is its root, and its folder */
};

/* Returns the processors that a quota of one group covers; 0: no quota. */
static int32_t processors_of(long long quota, long long period)
{
    if (quota <= 0 || period <= 0) return 0;
    const long long processors = quota / period + (quota % period != 0);
    return processors > INT32_MAX ? 0 : (int32_t)processors;
}

static int32_t group_processors(const char *root, const char *folder, bool is_v2)
{
    char text[64], *end;
    long long quota = 0, period = 0;
    if (is_v2) { /* "200000 100000"; "max 100000" has no quota */
        if (!read_line(root, folder, "cpu.max", text, sizeof text)) return 0;
        quota = strtoll(text, &end, 10), period = strtoll(end, NULL, 10);
        return processors_of(quota, period);
    }
    if (read_line(root, folder, "cpu.cfs_quota_us", text, sizeof text)) quota = strtoll(text, NULL, 10);
    if (read_line(root, folder, "cpu.cfs_period_us", text, sizeof text)) period = strtoll(text, NULL, 10);
    return processors_of(quota, period);
}

/* Returns the least of the quotas of the process's group and of those above it, up to the mount. */
static int32_t least_of(const char *root, const struct hierarchy *h)
{
    char folder[MOST_PATH];
    const size_t root_length = strcmp(h->from, "/") ? strlen(h->from) : 0;
    const char *below = h->group;
    if (!strncmp(below, h->from, root_length) && (!below[root_length] || below[root_length] == '/'))
        below += root_length;
    else if (root_length)
        below = ""; /* the group is not below the mount: a container that sees its own as the root */
    if (!strcmp(below, "/")) below = "";
    if (snprintf(folder, sizeof folder, "%s%s", h->at, below) >= (int)sizeof folder) return 0;
    const size_t mount = strlen(h->at);
    int32_t least = 0;
    for (;;) {
        const int32_t own = group_processors(root, folder, h->is_v2);
        if (own && (!least || own < least)) least = own;
        char *const slash = strrchr(folder + mount, '/');
        if (!slash) return least;
        *slash = 0;
    }
}

/* Returns whether a list of words separated by commas has this one. */
static bool has_word(const char *list, size_t length, const char *word)
{
    const size_t own = strlen(word);
    for (const char *end = list + length; list < end;) {
        const char *comma = memchr(list, ',', (size_t)(end - list));
        const size_t size = (size_t)((comma ? comma : end) - list);
        if (size == own && !memcmp(list, word, own)) return true;
        list += size + 1;
    }
    return false;
}

/* Finds the process's groups: "0::/group" of version 2, "4:cpu,cpuacct:/group" of version 1. */
static void find_groups(const char *root, struct hierarchy *v1, struct hierarchy *v2)
{
    struct lines lines;
    if (!open_lines(&lines, root, "/proc/self/cgroup")) return;
    for (char *line; (line = next_line(&lines));) {
        char *const controllers = strchr(line, ':'),
                    *group = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!group) continue;
        const size_t length = (size_t)(group - controllers - 1);
        struct hierarchy *const h = !length ? v2 : has_word(controllers + 1, length, "cpu") ? v1 : NULL;
        if (h) snprintf(h->group, sizeof h->group, "%s", group + 1);
    }
    close(lines.file);
}

/* Finds where the hierarchies are mounted: "36 35 0:30 ROOT AT options … - TYPE source options". */
static void find_mounts(const char *root, struct hierarchy *v1, struct hierarchy *v2)
{
    struct lines lines;
    if (!open_lines(&lines, root, "/proc/self/mountinfo")) return;
    for (char *line; (line = next_line(&lines));) {
        char from[MOST_PATH], at[MOST_PATH], type[16], options[MOST_PATH];
        const char *const end = strstr(line, " - ");
        if (!end || sscanf(line, "%*s %*s %*s %1023s %1023s", from, at) != 2 ||
            sscanf(end, " - %15s %*s %1023s", type, options) != 2)
            continue;
        const bool is_v2 = !strcmp(type, "cgroup2");
        struct hierarchy *const h = is_v2 ? v2 : v1;
        if (h->at[0] || (!is_v2 && (strcmp(type, "cgroup") || !has_word(options, strlen(options), "cpu"))))
            continue;
        memcpy(h->from, from, sizeof from), memcpy(h->at, at, sizeof at);
    }
    close(lines.file);
}

int32_t quota_processors(const char *root)
{
    struct hierarchy h[2] = {{.is_v2 = false}, {.is_v2 = true}};
    int32_t least = 0;
    find_groups(root, &h[0], &h[1]);
    find_mounts(root, &h[0], &h[1]);
    for (int i = 0; i < 2; i++) {
        const int32_t own = h[i].group[0] && h[i].at[0] ? least_of(root, &h[i]) : 0;
        if (own && (!least || own < least)) least = own;
    }
    return least;
}

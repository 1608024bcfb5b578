/* SPDX-License-Identifier: MIT */
#include "record.h"

#include "outfile.h"

#include <stdio.h>
#include <string.h>

/* Replaces characters that JSON would have to escape in names of drivers and files. */
static const char *plain(char *text)
{
    for (char *at = text; *at; at++)
        if (*at == '"' || *at == '\\' || (unsigned char)*at < ' ') *at = '?';
    return text;
}

static bool write_kernels(const struct record *record, struct outfile *file, struct reason *reason)
{
    if (!outfile_printf(file, reason, "  \"kernels\": [\n")) return false;
    for (int i = 0; i < record->count; i++) {
        const struct tally *tally = &record->row[i].tally;
        if (!outfile_printf(
                file, reason,
                "    {\"operation\": \"%s\", \"kernel\": \"%s\", \"passed\": %s, \"cases\": %lld, "
                "\"rows\": %lld, \"pairs\": %lld, \"pairs_covered\": %lld, \"failures\": %lld, "
                "\"seconds\": %.1f}%s\n",
                record->row[i].operation, record->row[i].kernel, record->row[i].passed ? "true" : "false",
                (long long)tally->cases, (long long)tally->rows, (long long)tally->pairs,
                (long long)tally->covered, (long long)tally->failed, tally->seconds,
                i + 1 < record->count ? "," : ""))
            return false;
    }
    return outfile_printf(file, reason, "  ],\n");
}

/* Writes the hashes from lines of "<64 hexadecimal digits>  <file> <architecture>" after a line "# toolkit
 * <version>". */
static bool write_hashes(const char *program, struct outfile *file, struct reason *reason)
{
    char path[4096], line[512], toolkit[128] = "", hash[65], source[256], target[64];
    const char *slash = strrchr(program, '/');
    snprintf(path, sizeof path, "%.*skernels.sha256", slash ? (int)(slash - program) + 1 : 0, program);
    FILE *list = fopen(path, "r");
    if (!list) fprintf(stderr, "checkattn: there is no %s: hashes of machine code are not recorded\n", path);
    bool good = true, first = true;
    while (good && list && fgets(line, sizeof line, list)) {
        if (sscanf(line, "# toolkit %127[^\n]", toolkit) == 1) {
            good =
                outfile_printf(file, reason, "  \"toolkit\": \"%s\",\n  \"machine_code\": [", plain(toolkit));
        } else if (*toolkit && sscanf(line, "%64[0-9a-f] %255s %63s", hash, source, target) == 3) {
            good = outfile_printf(file, reason,
                                  "%s\n    {\"source\": \"%s\", \"target\": \"%s\", \"sha256\": \"%s\"}",
                                  first ? "" : ",", plain(source), plain(target), hash);
            first = false;
        }
    }
    if (list) fclose(list);
    if (good && !*toolkit) good = outfile_printf(file, reason, "  \"toolkit\": \"\",\n  \"machine_code\": [");
    return good && outfile_printf(file, reason, "%s]\n", first ? "" : "\n  ");
}

static bool write_all(const struct record *record, uint64_t seed, const char *program, struct outfile *file,
                      struct reason *reason)
{
    struct gpu_description gpu = record->gpu;
    return outfile_printf(file, reason,
                          "{\n  \"library\": \"%s\",\n  \"seed\": %llu,\n  \"complete\": %s,\n"
                          "  \"device\": \"%s\",\n  \"compute_capability\": \"%d.%d\",\n"
                          "  \"driver\": \"%s\",\n",
                          fmla_version_string(), (unsigned long long)seed,
                          record->complete ? "true" : "false", plain(gpu.name), gpu.major, gpu.minor,
                          plain(gpu.driver)) &&
           write_kernels(record, file, reason) && write_hashes(program, file, reason) &&
           outfile_printf(file, reason, "}\n");
}

bool record_write(const struct record *record, uint64_t seed, const char *program, const char *path)
{
    struct reason reason;
    if (!record->count) {
        fprintf(stderr, "checkattn: %s: not written, for no GPU kernel was run\n", path);
        return false;
    }
    struct outfile *file = outfile_open(path, 0, &reason);
    bool good = file && write_all(record, seed, program, file, &reason);
    if (good)
        good = outfile_commit(file, &reason);
    else
        outfile_abandon(file);
    if (!good) fprintf(stderr, "checkattn: %s\n", reason.text);
    return good;
}

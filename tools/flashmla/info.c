/* SPDX-License-Identifier: MIT
 *
 * flashmla info: version, threads, and every kernel of the library as each device sees it.
 */
#include "commands.h"
#include "options.h"

#include "json_memory.h"

#include "flashmla/flashmla.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>

static const struct command info = {"info", NULL, "what runs on this machine, on which kernel",
                                    "\n"
                                    "A kernel that does not run here stands with the reason. \"only when "
                                    "named\" is the oracle: it runs with\n"
                                    "run --kernel ref, or with FLASHMLA_KERNEL=ref in the environment.\n"
                                    "\n"
                                    "Examples\n"
                                    "  flashmla info\n"
                                    "  flashmla info --json\n"};

static const struct {
    const char *name;
    fmla_device device;
} devices[] = {{"cpu", {FMLA_DEVICE_CPU, 0}}, {"cuda:0", {FMLA_DEVICE_CUDA, 0}}};
enum { DEVICES = sizeof devices / sizeof *devices };

static const char *or_dash(const char *text)
{
    return text && *text ? text : "-";
}

static void print_row(const char *device, const fmla_capability *row)
{
    const char *state = !row->available ? row->reason : row->forced_only ? "only when named" : "yes";
    printf("%-7s %-13s %-12s %-10s %-24s %s\n", device, or_dash(row->operation), or_dash(row->kernel),
           or_dash(row->dtypes), or_dash(row->shapes), state);
}

static json_t *json_row(const fmla_capability *row)
{
    return json_pack("{s:s?, s:s?, s:s?, s:s?, s:b, s:b, s:s?}", "operation", row->operation, "kernel",
                     row->kernel, "dtypes", row->dtypes, "shapes", row->shapes, "available", row->available,
                     "forced_only", row->forced_only, "reason", row->reason);
}

/* Walks the rows of a device: into `rows` if it is there, else onto stdout. */
static void walk(int device, json_t *rows)
{
    for (int64_t i = 0;; i++) {
        fmla_capability row = FMLA_INIT(fmla_capability);
        if (fmla_capabilities(devices[device].device, i, &row) != FMLA_OK) return;
        if (rows)
            json_array_append_new(rows, json_row(&row));
        else
            print_row(devices[device].name, &row);
    }
}

static void print_table(void)
{
    printf("flashmla %s, %d threads\n\n", fmla_version_string(), (int)fmla_num_threads());
    printf("%-7s %-13s %-12s %-10s %-24s %s\n", "device", "operation", "kernel", "dtypes", "shapes",
           "runs here");
    for (int d = 0; d < DEVICES; d++) walk(d, NULL);
}

static int print_json(void)
{
    json_memory_watch();
    json_t *by_device = json_object();
    for (int d = 0; d < DEVICES; d++) {
        json_t *rows = json_array();
        walk(d, rows);
        json_object_set_new(by_device, devices[d].name, rows);
    }
    json_t *all = json_pack("{s:s, s:i, s:o}", "version", fmla_version_string(), "threads",
                            (int)fmla_num_threads(), "devices", by_device);
    char *text = json_dumps(all, JSON_INDENT(2));
    json_decref(all);
    if (!text || json_memory_failed()) {
        free(text);
        return complain(&info, EXIT_FAILED, "out of memory");
    }
    puts(text);
    free(text);
    return EXIT_GOOD;
}

int command_info(int argc, char **argv)
{
    bool json = false;
    const struct option options[] = {{"--json", OPTION_ON, &json, NULL, "print JSON", 0, 0, {NULL}, NULL},
                                     {0}};
    switch (options_parse(&info, options, argc, argv, NULL)) {
    case OPTIONS_HELPED: return EXIT_GOOD;
    case OPTIONS_WRONG: return EXIT_USAGE;
    case OPTIONS_PARSED: break;
    }
    if (fmla_version() / 100 != FMLA_VERSION_MAJOR * 100 + FMLA_VERSION_MINOR)
        return complain(&info, EXIT_FAILED, "this command was built for %d.%d, the library is %s",
                        FMLA_VERSION_MAJOR, FMLA_VERSION_MINOR, fmla_version_string());
    if (json) return print_json();
    print_table();
    return EXIT_GOOD;
}

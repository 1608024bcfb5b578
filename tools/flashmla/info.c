/* SPDX-License-Identifier: MIT
 *
 * flashmla info: prints, for each device, the kernel that runs each operation here, or every kernel and why it
 * does not run; and the GPUs, or why there are none.
 */
#include "fill.h"
#include "json_line.h"
#include "machine.h"
#include "options.h"
#include "policy.h"

#include "json_memory.h"

#include "flashmla/flashmla.h"

#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

static const struct command info = {
    "info",
    NULL,
    "list the kernels that run on this machine",
    "\n"
    "A line is an operation: the kernel that runs it here and, after a semicolon, the kernel of types or "
    "formats of caches that the first does not take. A call with another head size or alignment may go to "
    "a later kernel. A GPU that cannot be used is listed with the reason.\n"
    "\n"
    "--all lists every kernel with what it takes, in the order of preference, and why it does not run "
    "here. \"if named\" marks the oracle, which runs with run --kernel ref or with FLASHMLA_KERNEL=ref in "
    "the environment, and the parts of another kernel, which chooses among them.\n"
    "\n"
    "Examples\n"
    "  flashmla info\n"
    "  flashmla info --all\n"
    "  flashmla info --json -\n",
    OPERAND_WORD,
    NULL};

enum { WIDTH = 80, INDENT = 2 };

static const fmla_device cpu = {FMLA_DEVICE_CPU, 0};

/* GPUs are enumerated by number; without a GPU, number 0 gives the reason. */
static fmla_device gpu(int32_t id)
{
    return (fmla_device){FMLA_DEVICE_CUDA, id};
}

/* Formats CUDA's version numbers: 13000 is 13.0, a compute capability of 90 is 9.0. */
static const char *version_text(int32_t version, char text[16])
{
    snprintf(text, 16, "%d.%d", version / 1000, version % 1000 / 10);
    return text;
}

static const char *const types[] = {"bf16", "fp16", "fp32"};
enum { TYPES = sizeof types / sizeof *types };

/* Returns the arguments that a kernel takes, as lists; an empty list limits nothing. */
static json_t *json_takes(const fmla_capability *row)
{
    static const char *const products[] = {"bf16", "fp8"};
    json_t *type = json_array(), *format = json_array(), *d_qk = json_array(), *d_v = json_array(),
           *product = json_array();
    for (int t = 0; t < TYPES; t++)
        if (row->types >> t & 1) json_array_append_new(type, json_string(types[t]));
    for (int i = 0; i < 4; i++) {
        if (row->d_qk[i]) json_array_append_new(d_qk, json_integer(row->d_qk[i]));
        if (row->d_v[i]) json_array_append_new(d_v, json_integer(row->d_v[i]));
    }
    for (int32_t f = FMLA_KV_BF16; f <= KV_FORMATS; f++)
        if (row->kv_formats >> f & 1) json_array_append_new(format, json_string(format_name(f)));
    for (int p = 0; p < 2; p++)
        if (row->products >> p & 1) json_array_append_new(product, json_string(products[p]));
    return json_pack("{s:o, s:o, s:o, s:o, s:o}", "types", type, "d_qk", d_qk, "d_v", d_v, "kv_formats",
                     format, "products", product);
}

/* Formats the lists: "bf16 fp16, d_qk 512 576, d_v 512, BF16 FP8_656, products bf16 fp8". */
static void words_of(json_t *lists, char *text, size_t size)
{
    const char *name;
    json_t *list, *element;
    size_t i, used = 0;
    json_object_foreach(lists, name, list)
    {
        json_array_foreach(list, i, element)
        {
            const char *before = i ? " " : used ? ", " : "";
            const bool named = !i && (json_is_integer(element) || !strcmp(name, "products"));
            const int length = json_is_string(element)
                                   ? snprintf(text + used, size - used, "%s%s%s%s", before, named ? name : "",
                                              named ? " " : "", json_string_value(element))
                                   : snprintf(text + used, size - used, "%s%s%s%d", before, named ? name : "",
                                              named ? " " : "", (int)json_integer_value(element));
            used += (size_t)length;
        }
    }
}

static json_t *json_row(const fmla_capability *row)
{
    json_t *json = json_pack("{s:s?, s:s?, s:b, s:b, s:s, s:s}", "operation", row->operation, "kernel",
                             row->kernel, "available", row->available, "forced_only", row->forced_only,
                             "reason", row->reason, "part_of", row->part_of);
    json_object_update_new(json, json_takes(row));
    return json;
}

/* ---- As text -------------------------------------------------------------------------------- */

/* Prints the rest of a line that begins at column `at`; further lines where it is wider are indented as far. */
__attribute__((format(printf, 2, 3))) static void print_filled(size_t at, const char *format, ...)
{
    char text[512];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    fill_words(text, strlen(text), at, at ? at : INDENT, WIDTH);
}

/* Prints one row of the table of all kernels. */
static void print_row(const fmla_capability *row)
{
    char takes[200] = ""; /* longer than any row's text */
    json_t *lists = json_takes(row);
    words_of(lists, takes, sizeof takes);
    json_decref(lists);
    const size_t at =
        (size_t)printf("%*s%-14s %-14s %-9s ", INDENT, "", row->operation, row->kernel ? row->kernel : "-",
                       !row->available    ? "no"
                       : row->forced_only ? "if named"
                                          : "yes");
    print_filled(at, "%s%s%s%s%s", *row->part_of ? "part of " : row->reason, row->part_of,
                 (*row->part_of || *row->reason) && *takes ? "; takes " : "", takes,
                 *row->part_of || *row->reason || *takes ? "" : "-");
}

static void print_all(fmla_device device)
{
    fmla_capability row = FMLA_INIT(fmla_capability);
    printf("%*s%-14s %-14s %-9s %s\n", INDENT, "", "operation", "kernel", "runs here", "takes");
    for (int64_t i = 0; fmla_capabilities(device, i, &row) == FMLA_OK; i++) print_row(&row);
}

/* The kernels of an operation, as its line names them. */
struct line {
    const char *operation, *reason; /* why the last kernel does not run here */
    char kernels[256];
    int32_t types, formats; /* that they take */
};

/* Adds the kernel to the line, after the types or, if none of them is new, the formats that those before it do
 * not take. A kernel that adds neither runs only calls of other sizes, and is left out. */
static void add_kernel(struct line *line, const fmla_capability *row)
{
    const int32_t new_types = row->types & ~line->types, new_formats = row->kv_formats & ~line->formats;
    const bool first = !*line->kernels, of_types = !first && new_types, of_formats = !first && !new_types;
    char words[160] = "";
    size_t used = 0;
    for (int t = 0; t < TYPES; t++)
        if (of_types && new_types >> t & 1)
            used += (size_t)snprintf(words + used, sizeof words - used, " %s", types[t]);
    for (int32_t f = FMLA_KV_BF16; f <= KV_FORMATS; f++)
        if (of_formats && new_formats >> f & 1)
            used += (size_t)snprintf(words + used, sizeof words - used, " %s", format_name(f));
    line->types |= row->types, line->formats |= row->kv_formats;
    used = strlen(line->kernels);
    if (first || *words)
        snprintf(line->kernels + used, sizeof line->kernels - used, "%s%s%s%s", first ? "" : ";", words,
                 first ? "" : ": ", row->kernel);
}

static void print_line(const struct line *line)
{
    if (!line->operation) return;
    const size_t at = (size_t)printf("%*s%-14s ", INDENT, "", line->operation);
    print_filled(at, "%s%s", *line->kernels ? line->kernels : "none: ", *line->kernels ? "" : line->reason);
}

/* Prints a line for each operation of the device. */
static void print_chosen(fmla_device device)
{
    fmla_capability row = FMLA_INIT(fmla_capability);
    struct line line = {0};
    for (int64_t i = 0; fmla_capabilities(device, i, &row) == FMLA_OK; i++) {
        if (!line.operation || strcmp(line.operation, row.operation) != 0) {
            print_line(&line);
            line = (struct line){.operation = row.operation};
        }
        line.reason = row.reason;
        if (row.available && !row.forced_only) add_kernel(&line, &row);
    }
    print_line(&line);
}

static bool same_gpu(const fmla_device_info *a, const fmla_device_info *b)
{
    return !strcmp(a->name, b->name) && !strcmp(a->reason, b->reason) && a->workers == b->workers &&
           a->compute_capability == b->compute_capability && a->shared_bytes == b->shared_bytes;
}

/* Prints the heading of GPUs [id, *end), which are alike; *end is one past them. */
static fmla_device_info print_gpus(int32_t id, int32_t *end)
{
    char name[16], last[24] = "";
    const fmla_device_info g = machine_describe(gpu(id));
    fmla_device_info other = g;
    for (*end = id + 1; *end < g.count; ++*end) {
        other = machine_describe(gpu(*end));
        if (!same_gpu(&g, &other)) break;
    }
    if (*end > id + 1) snprintf(last, sizeof last, " to cuda:%d", *end - 1);
    machine_device_name(gpu(id), name);
    if (g.compute_capability)
        print_filled(0, "%s%s: %s, compute capability %d.%d, %d SMs, %g KiB of shared memory a block", name,
                     last, g.name, g.compute_capability / 10, g.compute_capability % 10, g.workers,
                     g.shared_bytes / 1024.0);
    if (*g.reason) print_filled(0, "%s%s: not used: %s", name, last, g.reason);
    return g;
}

static void print_cuda(const fmla_device_info *g)
{
    char driver[16], built[16], ptx[32] = "";
    if (g->driver || g->built_with) putchar('\n');
    if (g->driver) printf("driver: CUDA %s\n", version_text(g->driver, driver));
    if (!g->built_with) return;
    if (g->ptx) snprintf(ptx, sizeof ptx, ", PTX from %d on", g->ptx);
    print_filled(0, "build: kernels by CUDA %s for %s%s; needs %s or later",
                 version_text(g->built_with, built), g->built_for, ptx, g->needs);
}

static void print_text(bool all)
{
    void (*const print)(fmla_device device) = all ? print_all : print_chosen;
    const char *forced = getenv("FLASHMLA_KERNEL");
    fmla_device_info g = {0};
    char name[128];
    machine_cpu_name(name, sizeof name);
    printf("flashmla %s\n\n", fmla_version_string());
    const fmla_device_info host = machine_describe(cpu);
    print_filled(0, "cpu: %s, %d threads (%s)", *name ? name : "unknown", (int)host.workers,
                 host.workers_from);
    print(cpu);
    for (int32_t id = 0, end; !id || id < g.count; id = end) {
        putchar('\n');
        g = print_gpus(id, &end);
        if (!*g.reason) print(gpu(id));
    }
    print_cuda(&g);
    if (forced && *forced) print_filled(0, "FLASHMLA_KERNEL: calls that name no kernel run %s", forced);
    if (!all) puts("\nflashmla info --all lists every kernel, and why one does not run here.");
}

/* ---- As JSON -------------------------------------------------------------------------------- */

static json_t *json_rows(fmla_device device)
{
    json_t *rows = json_array();
    fmla_capability row = FMLA_INIT(fmla_capability);
    for (int64_t i = 0; fmla_capabilities(device, i, &row) == FMLA_OK; i++)
        json_array_append_new(rows, json_row(&row));
    return rows;
}

static bool write_json(const char *path, struct reason *reason)
{
    const int32_t gpus = machine_describe(gpu(0)).count;
    char name[16];
    json_t *by_device = json_object(), *described = json_array();
    json_object_set_new(by_device, "cpu", json_rows(cpu));
    for (int32_t id = 0; !id || id < gpus; id++) {
        json_object_set_new(by_device, machine_device_name(gpu(id), name), json_rows(gpu(id)));
        json_array_append_new(described, machine_gpu_json(id));
    }
    json_t *all = json_pack("{s:s, s:i, s:o, s:o}", "version", fmla_version_string(), "threads",
                            (int)fmla_num_threads(), "devices", by_device, "gpus", described);
    return json_file(path, all, reason);
}

int command_info(int argc, char **argv)
{
    bool all = false;
    const char *json = NULL;
    struct reason reason = {""};
    const struct option options[] = {
        OPTION_SWITCH("--all", &all, "list every kernel, what it takes, and why it does not run here"),
        OPTION_JSON(&json),
        {0}};
    const int done = options_parse(&info, options, argc, argv, NULL);
    if (done >= 0) return done;
    if (fmla_version() / 100 != FMLA_VERSION_MAJOR * 100 + FMLA_VERSION_MINOR)
        return complain(&info, EXIT_FAILED, "this command was built for %d.%d, the library is %s",
                        FMLA_VERSION_MAJOR, FMLA_VERSION_MINOR, fmla_version_string());
    json_memory_watch();
    if (json && !write_json(json, &reason)) return complain(&info, EXIT_FAILED, "%s", reason.text);
    print_text(all);
    return json_memory_failed() ? complain(&info, EXIT_FAILED, "out of memory") : EXIT_GOOD;
}

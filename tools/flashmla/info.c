/* SPDX-License-Identifier: MIT
 *
 * flashmla info: prints version, threads, every kernel of the library as each device supports it, and the
 * GPUs, or why there are none.
 */
#include "json_line.h"
#include "machine.h"
#include "options.h"
#include "policy.h"

#include "json_memory.h"

#include "flashmla/flashmla.h"

#include <jansson.h>
#include <stdio.h>

static const struct command info = {
    "info",
    NULL,
    "list the kernels and which of them run on this machine",
    "\n"
    "The last column says why a kernel does not run here. \"only when named\" marks the oracle, which "
    "runs with run --kernel ref or with FLASHMLA_KERNEL=ref in the environment, and the parts of "
    "another kernel, which chooses among them. A GPU that cannot be used is listed below the table "
    "with the reason.\n"
    "\n"
    "Examples\n"
    "  flashmla info\n"
    "  flashmla info --json -\n",
    OPERAND_WORD,
    NULL};

static const char *or_dash(const char *text)
{
    return text && *text ? text : "-";
}

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

/* Returns the arguments that a kernel takes, as lists; an empty list limits nothing. */
static json_t *json_takes(const fmla_capability *row)
{
    static const char *const types[] = {"bf16", "fp16", "fp32"}, *const products[] = {"bf16", "fp8"};
    json_t *type = json_array(), *format = json_array(), *d_qk = json_array(), *d_v = json_array(),
           *product = json_array();
    for (int t = 0; t < 3; t++)
        if (row->types >> t & 1) json_array_append_new(type, json_string(types[t]));
    for (int i = 0; i < 4; i++) {
        if (row->d_qk[i]) json_array_append_new(d_qk, json_integer(row->d_qk[i]));
        if (row->d_v[i]) json_array_append_new(d_v, json_integer(row->d_v[i]));
    }
    for (int32_t f = FMLA_KV_BF16; f <= FMLA_KV_FP8_528_F32; f++)
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

static void print_row(const char *device, const fmla_capability *row)
{
    const char *state = !row->available ? row->reason : row->forced_only ? "only when named" : "yes";
    char takes[160] = "-"; /* longer than any row's text */
    json_t *lists = json_takes(row);
    words_of(lists, takes, sizeof takes);
    json_decref(lists);
    printf("%-7s %-14s %-14s %-87s %s%s%s\n", device, or_dash(row->operation), or_dash(row->kernel), takes,
           state, *row->part_of ? ", part of " : "", row->part_of);
}

static json_t *json_row(const fmla_capability *row)
{
    json_t *json = json_pack("{s:s?, s:s?, s:b, s:b, s:s, s:s}", "operation", row->operation, "kernel",
                             row->kernel, "available", row->available, "forced_only", row->forced_only,
                             "reason", row->reason, "part_of", row->part_of);
    json_object_update_new(json, json_takes(row));
    return json;
}

/* Reports the rows of a device: into `rows` if given, else to stdout. */
static void walk(fmla_device device, json_t *rows)
{
    char name[16];
    for (int64_t i = 0;; i++) {
        fmla_capability row = FMLA_INIT(fmla_capability);
        if (fmla_capabilities(device, i, &row) != FMLA_OK) return;
        if (rows)
            json_array_append_new(rows, json_row(&row));
        else
            print_row(machine_device_name(device, name), &row);
    }
}

/* ---- As text -------------------------------------------------------------------------------- */

static void print_gpu(int32_t id)
{
    char name[16];
    const fmla_device_info g = machine_describe(gpu(id));
    if (g.compute_capability)
        printf("%-7s %s: compute capability %d.%d, %d SMs, %g KiB of shared memory a block\n",
               machine_device_name(gpu(id), name), g.name, g.compute_capability / 10,
               g.compute_capability % 10, g.workers, g.shared_bytes / 1024.0);
    if (*g.reason)
        printf("%-7s not used: %s\n", g.compute_capability ? "" : machine_device_name(gpu(id), name),
               g.reason);
}

static void print_table(void)
{
    const fmla_device_info first = machine_describe(gpu(0));
    char version[16];
    printf("flashmla %s, %d threads\n\n", fmla_version_string(), (int)fmla_num_threads());
    printf("%-7s %-14s %-14s %-68s %s\n", "device", "operation", "kernel", "takes", "runs here");
    walk(cpu, NULL);
    for (int32_t id = 0; id < first.count; id++)
        if (!*machine_describe(gpu(id)).reason) walk(gpu(id), NULL);
    putchar('\n');
    for (int32_t id = 0; !id || id < first.count; id++) print_gpu(id);
    if (first.driver) printf("%-7s has CUDA %s\n", "driver", version_text(first.driver, version));
    if (!first.built_with) return;
    printf("%-7s kernels by CUDA %s for %s", "build", version_text(first.built_with, version),
           first.built_for);
    if (first.ptx) printf(", PTX from %d on", first.ptx);
    printf("; needs %s or later\n", first.needs);
}

/* ---- As JSON -------------------------------------------------------------------------------- */

static bool write_json(const char *path, struct fault *fault)
{
    const int32_t gpus = machine_describe(gpu(0)).count;
    char name[16];
    json_t *by_device = json_object(), *described = json_array();
    json_t *rows = json_array();
    walk(cpu, rows);
    json_object_set_new(by_device, "cpu", rows);
    for (int32_t id = 0; !id || id < gpus; id++) {
        rows = json_array();
        walk(gpu(id), rows);
        json_object_set_new(by_device, machine_device_name(gpu(id), name), rows);
        json_array_append_new(described, machine_gpu_json(id));
    }
    json_t *all = json_pack("{s:s, s:i, s:o, s:o}", "version", fmla_version_string(), "threads",
                            (int)fmla_num_threads(), "devices", by_device, "gpus", described);
    return json_file(path, all, fault);
}

int command_info(int argc, char **argv)
{
    const char *json = NULL;
    struct fault fault = {""};
    const struct option options[] = {OPTION_JSON(&json), {0}};
    const int done = options_parse(&info, options, argc, argv, NULL);
    if (done >= 0) return done;
    if (fmla_version() / 100 != FMLA_VERSION_MAJOR * 100 + FMLA_VERSION_MINOR)
        return complain(&info, EXIT_FAILED, "this command was built for %d.%d, the library is %s",
                        FMLA_VERSION_MAJOR, FMLA_VERSION_MINOR, fmla_version_string());
    json_memory_watch();
    if (json && !write_json(json, &fault)) return complain(&info, EXIT_FAILED, "%s", fault.text);
    print_table();
    return json_memory_failed() ? complain(&info, EXIT_FAILED, "out of memory") : EXIT_GOOD;
}

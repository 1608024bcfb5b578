/* SPDX-License-Identifier: MIT
 *
 * flashmla plan: prints the split plan of a batch as a table, as JSON and as a picture.
 */
#include "call_file.h"
#include "json_line.h"
#include "lengths.h"
#include "options.h"
#include "plan_view.h"
#include "policy.h"

#include "infile.h"
#include "json_memory.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>

static const struct command plan = {
    "plan",
    "[FILE]",
    "print the split plan of a batch, and draw it",
    "\n"
    "FILE, a tensor file as make-input writes it, gives lengths and heads; without it the options do. "
    "The plan is made for --partitions partitions, or for as many as suit --workers workers (SMs or "
    "threads; default: the threads of this machine). A row of the table is one partition. It begins "
    "at a key of a request and ends before a key of a request: 64 x blocks at a boundary between "
    "splits, the length at the end of a request. split is the split index of its first request. An idle "
    "partition ends in "
    "the request before the one in which it begins.\n"
    "\n"
    "Examples\n"
    "  flashmla plan --batch 128 --seq-len 4096 --partitions 78\n"
    "  flashmla plan --seq-lens 100,9000,0,2500 --partitions 8 --svg plan.svg\n"
    "  flashmla plan batch.safetensors --workers 132 --json -\n",
    OPERAND_INPUT,
    NULL};

struct plan_options {
    struct lengths lengths;
    int64_t heads, kv_heads, query_tokens, workers, partitions;
    bool heads_given, kv_heads_given, query_tokens_given;
    const char *json, *svg;
};

struct plan_row plan_row_of(const struct plan_picture *picture, int64_t partition)
{
    const int32_t *fields = picture->view.partitions + partition * FMLA_PARTITION_FIELDS;
    struct plan_row row = {.begin_request = fields[0],
                           .end_request = fields[1],
                           .begin_key = (int64_t)fields[2] * BLOCK_KEYS,
                           .split = fields[4]};
    const int64_t end_length = row.end_request >= 0 ? picture->lengths[row.end_request] : 0;
    const int64_t end_block_key = (int64_t)fields[3] * BLOCK_KEYS;
    row.end_key = end_block_key < end_length ? end_block_key : end_length;
    for (int64_t r = row.begin_request; r <= row.end_request; r++) {
        const int64_t begin = r == row.begin_request ? fields[2] : 0;
        const int64_t end = r == row.end_request ? fields[3] : plan_blocks(picture->lengths[r]);
        row.load += end - begin + REQUEST_OVERHEAD;
    }
    return row;
}

/* ---- Output ---- */

static double imbalance(const struct plan_picture *picture)
{
    return picture->mean_load > 0.0 ? (double)picture->max_load / picture->mean_load : 1.0;
}

static void print_table(const struct plan_picture *picture)
{
    const fmla_plan_view *view = &picture->view;
    int64_t split_requests = 0, most = 0, most_request = 0;
    printf("%9s %13s %9s %11s %9s %6s %6s\n", "partition", "begin request", "begin key", "end request",
           "end key", "split", "load");
    for (int64_t p = 0; p < view->num_partitions; p++) {
        const struct plan_row row = plan_row_of(picture, p);
        printf("%9" PRId64 " %13" PRId64 " %9" PRId64 " %11" PRId64 " %9" PRId64 " %6" PRId64 " %6" PRId64
               "%s\n",
               p, row.begin_request, row.begin_key, row.end_request, row.end_key, row.split, row.load,
               row.end_request < row.begin_request ? "  idle" : "");
    }
    for (int64_t r = 0; r < view->batch; r++) {
        const int64_t splits = view->num_splits[r + 1] - view->num_splits[r];
        split_requests += splits > 1;
        if (splits > most) most = splits, most_request = r;
    }
    printf("\n%" PRId64 " requests, %" PRId64 " partitions, payload %" PRId64
           " (blocks of %d keys, and %d more for a request touched)\n",
           view->batch, view->num_partitions, view->payload, BLOCK_KEYS, REQUEST_OVERHEAD);
    printf("load: largest %" PRId64 ", mean %.1f, imbalance %.3f\n", picture->max_load, picture->mean_load,
           imbalance(picture));
    if (!view->batch) {
        puts(PLAN_EMPTY);
        return;
    }
    printf("splits: %d, %" PRId64 " requests are split, at most into %" PRId64 " (request %" PRId64 ")\n",
           (int)view->num_splits[view->batch], split_requests, most, most_request);
}

static json_t *json_partitions(const struct plan_picture *picture)
{
    json_t *rows = json_array();
    for (int64_t p = 0; p < picture->view.num_partitions; p++) {
        const struct plan_row row = plan_row_of(picture, p);
        json_array_append_new(rows, json_pack("{s:I, s:I, s:I, s:I, s:I, s:I}", "begin_request",
                                              (json_int_t)row.begin_request, "begin_key",
                                              (json_int_t)row.begin_key, "end_request",
                                              (json_int_t)row.end_request, "end_key", (json_int_t)row.end_key,
                                              "split", (json_int_t)row.split, "load", (json_int_t)row.load));
    }
    return rows;
}

static bool write_json(const char *path, const struct plan_picture *picture, struct reason *reason)
{
    const fmla_plan_view *view = &picture->view;
    json_memory_watch();
    json_t *splits = json_array(), *lengths = json_array();
    for (int64_t r = 0; r <= view->batch; r++)
        json_array_append_new(splits, json_integer(view->num_splits[r]));
    for (int64_t r = 0; r < view->batch; r++)
        json_array_append_new(lengths, json_integer(picture->lengths[r]));
    json_t *all = json_pack("{s:I, s:I, s:f, s:f, s:o, s:o, s:o}", "payload", (json_int_t)view->payload,
                            "max_load", (json_int_t)picture->max_load, "mean_load", picture->mean_load,
                            "imbalance", imbalance(picture), "lengths", lengths, "num_splits", splits,
                            "partitions", json_partitions(picture));
    return json_file(path, all, reason);
}

/* ---- Making it ---- */

/* Reads lengths, heads and query tokens from a tensor file. */
static int32_t *lengths_of_file(const char *path, struct plan_options *options, int64_t *batch,
                                struct reason *reason)
{
    struct call call;
    const char *const name = infile_name(path);
    struct safetensors_file *file = safetensors_open(path, reason);
    int32_t *lengths = NULL;
    if (!file) return NULL;
    const enum operation op = call_file_operation(file);
    if (op != OP_DENSE_DECODE) {
        reason_set(reason, "%s: is a file of %s, must be one of dense decode", name, operation_title(op));
    } else if (call_file_read(&call, file, name, reason)) {
        *batch = call_tensor(&call, "seqlens")->shape[0];
        lengths = malloc(((size_t)*batch + 1) * sizeof *lengths);
        if (!lengths) reason_set(reason, "%s: no memory for %" PRId64 " lengths", name, *batch);
        for (int64_t r = 0; lengths && r < *batch; r++) lengths[r] = (int32_t)call_length(&call, r);
        options->query_tokens = call_size(&call, DIM_s_q), options->heads = call_size(&call, DIM_h_q);
        options->kv_heads = call_size(&call, DIM_h_kv);
    }
    safetensors_close(file);
    return lengths;
}

static bool make_plan(const struct plan_options *options, const int32_t *lengths, int64_t batch, void **bytes,
                      struct plan_picture *picture, int *exit_code, struct reason *reason)
{
    const fmla_tensor seqlens = {.data = (void *)lengths,
                                 .device = {FMLA_DEVICE_CPU, 0},
                                 .ndim = 1,
                                 .dtype = {FMLA_TYPE_INT, 32, 1},
                                 .shape = &batch};
    fmla_decode_plan_args args = FMLA_INIT(fmla_decode_plan_args);
    args.seqlens = &seqlens;
    args.s_q = options->query_tokens, args.h_q = options->heads, args.h_kv = options->kv_heads;
    args.num_workers = (int32_t)options->workers, args.num_partitions = (int32_t)options->partitions;
    fmla_status status = fmla_decode_plan_size(&args, &args.plan_size);
    if (status == FMLA_OK) {
        args.plan = *bytes = aligned_alloc(16, (args.plan_size / 16 + 1) * 16);
        if (!args.plan) {
            reason_set(reason, "no memory for a plan of %zu bytes", args.plan_size);
            return false;
        }
        status = fmla_decode_plan(&args);
    }
    picture->view = FMLA_INIT(fmla_plan_view);
    if (status == FMLA_OK) status = fmla_plan_describe(args.plan, args.plan_size, &picture->view);
    if (status != FMLA_OK) {
        *exit_code = status == FMLA_UNSUPPORTED ? EXIT_UNSUPPORTED : EXIT_FAILED;
        reason_set(reason, "%s", fmla_last_error());
        return false;
    }
    int64_t total = 0;
    picture->lengths = lengths;
    for (int64_t p = 0; p < picture->view.num_partitions; p++) {
        const int64_t load = plan_row_of(picture, p).load;
        total += load;
        if (load > picture->max_load) picture->max_load = load;
    }
    picture->mean_load = (double)total / (double)picture->view.num_partitions;
    return true;
}

static int plan_batch(const char *path, struct plan_options *options)
{
    struct reason reason = {""};
    struct plan_picture picture = {0};
    void *bytes = NULL;
    int64_t batch = 0;
    int exit_code = EXIT_FAILED;
    if (path && (lengths_any_given(&options->lengths) || options->heads_given || options->kv_heads_given ||
                 options->query_tokens_given))
        return complain(&plan, EXIT_USAGE,
                        "%s: lengths, heads and query tokens come from the file; no option may set them",
                        path);
    if (options->heads % options->kv_heads)
        return complain(&plan, EXIT_USAGE, "--kv-heads: %" PRId64 " must divide --heads %" PRId64,
                        options->kv_heads, options->heads);
    int32_t *lengths = path ? lengths_of_file(path, options, &batch, &reason)
                            : lengths_make(&options->lengths, &batch, &reason);
    if (!lengths) return complain(&plan, path ? EXIT_FAILED : EXIT_USAGE, "%s", reason.text);
    bool good = make_plan(options, lengths, batch, &bytes, &picture, &exit_code, &reason);
    if (good && options->svg) good = plan_svg_write(options->svg, &picture, &reason);
    if (good && options->json) good = write_json(options->json, &picture, &reason);
    if (good) print_table(&picture);
    free(lengths), free(bytes);
    return good ? EXIT_GOOD : complain(&plan, exit_code, "%s", reason.text);
}

int command_plan(int argc, char **argv)
{
    struct plan_options o = {.lengths = LENGTHS_DEFAULTS, .heads = 16, .kv_heads = 1, .query_tokens = 1};
    const char *path = NULL;
    const struct option options[] = {
        LENGTHS_OPTIONS(o.lengths),
        OPTION_NUMBER("--heads", &o.heads, 1, 4096, "query heads; default 16", &o.heads_given),
        OPTION_NUMBER("--kv-heads", &o.kv_heads, 1, 4096, "key heads; default 1", &o.kv_heads_given),
        OPTION_NUMBER("--query-tokens", &o.query_tokens, 1, 4096, "query tokens of a request; default 1",
                      &o.query_tokens_given),
        OPTION_NUMBER("--workers", &o.workers, 1, 65536, "SMs or threads to plan for", NULL),
        OPTION_NUMBER("--partitions", &o.partitions, 1, 65536, "number of partitions; overrides --workers",
                      NULL),
        OPTION_JSON(&o.json),
        OPTION_FILE("--svg", &o.svg, "draw the plan there"),
        {0}};
    int status = options_parse(&plan, options, argc, argv, &path);
    if (status < 0) status = plan_batch(path, &o);
    free(o.lengths.list.items);
    return status;
}

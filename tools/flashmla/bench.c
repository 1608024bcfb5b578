/* SPDX-License-Identifier: MIT
 *
 * flashmla bench: times the kernels of a device and measures the device's peaks in the same run.
 * docs/performance.md describes the method.
 */
#include "bench_grid.h"
#include "bench_report.h"
#include "hint.h"

#include "gpu.h"
#include "outfile.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct command bench = {
    "bench",
    NULL,
    "time the kernels of this machine beside its measured peaks",
    "\n"
    "Grids of dense_decode: cpu (the default); h20, latency, peers and varlen (shapes of server "
    "GPUs); quick (three small rows, warm caches). sparse_decode has the grids cpu, peers, formats "
    "and quick, sparse_prefill cpu, peers and quick, each row with its own cache format. mha_forward "
    "and mha_backward have cpu, mha (shapes of server GPUs) and quick: causal and full, with as many "
    "query tokens as keys. A list replaces that axis of the grid. --d-qk and --kv-heads of "
    "sparse_prefill apply only to keys that are not bytes. With --varlen, the lengths of mha_forward "
    "and mha_backward lie between an 80th of --seq-len and --seq-len. With --used, none to all of a "
    "request's tokens and keys are in use, at random: us, FLOP and floor are of those.\n"
    "\n"
    "Before each run the caches are emptied. On the CPU, a read of memory larger than the caches does "
    "this. On a GPU, two matrix products with weights and code larger than its caches do, as in an "
    "engine, or a read with --between read. us is the median of the runs, min the least; x floor is the "
    "median over the floor, the longer of bytes / read bandwidth and FLOP / "
    "peak, both measured in this run with as many threads. A row that takes over 2 s is run 3 times. "
    "On a GPU a call is captured in a graph; the plan is made before it and timed separately. stream "
    "is the time in which a bare kernel reads the row's keys and nothing else, timed in turns with "
    "the call; rows in FP8_584 have none. --fixed times a batch of varying lengths in turns with a "
    "batch of one length and as many keys, and prints var / fixed; the grid varlen (the large batches "
    "of peers) always does.\n"
    "\n"
    "A warning on standard error says if other work runs on the machine's processors, or if rows took less "
    "time than they need at the measured peaks.\n"
    "\n"
    "--json writes one line per row as soon as the row is timed. If the command is stopped, the lines "
    "written remain.\n"
    "\n"
    "Examples\n"
    "  flashmla bench\n"
    "  flashmla bench --heads 128 --seq-len 4096,16384 --batch 1 --threads 1 --kernel cpu-avx2\n"
    "  flashmla bench --grid quick --json quick.jsonl\n"
    "  flashmla bench --cache all --batch 8 --heads 16\n"
    "  flashmla bench --cache fp8_576 --products all --batch 8 --heads 16\n"
    "  flashmla bench --op merge --parts 2,8\n"
    "  flashmla bench --op merge --parts 1 --last yes\n"
    "  flashmla bench --op sparse_decode --grid quick --heads 16,128\n"
    "  flashmla bench --op sparse_decode --grid peers --cache fp8_528 --extra-cache fp4_288\n"
    "  flashmla bench --op sparse_prefill --device cuda:0 --grid peers --json sparse_prefill.jsonl\n"
    "  flashmla bench --op mha_forward --d-qk 192 --causal yes --threads 1\n"
    "  flashmla bench --op mha_backward --d-qk 128 --sink both --used both\n"
    "  flashmla bench --op cache_append --device cuda:0 --tokens 128,65536\n"
    "  flashmla bench --op cache_append --norm both --rope all --tokens 128\n"
    "  flashmla bench --device cuda:0 --grid peers --json dense_decode.jsonl\n"
    "  flashmla bench --device cuda:0 --grid varlen --seq-len 4096,8192 --no-stream\n",
    OPERAND_WORD,
    NULL};

struct bench_options {
    const char *grid, *kernel, *json;
    fmla_device device;
    int op, extra_cache;               /* indices in the choices */
    const char *names[OPTION_CHOICES]; /* those of op */
    int between;                       /* index in the choices: enum bench_between */
    bool between_given, extra_cache_given;
    int64_t repeat, threads;
    bool warm, host, no_stream, fixed;
    struct bench_axes axes;
};

/* ---- All rows -------------------------------------------------------------------------------- */

static bool all_rows(struct bench_session *s, const struct shape *rows, int64_t count, int *exit_code,
                     struct reason *reason)
{
    *exit_code = EXIT_UNSUPPORTED;
    if (!bench_timer_open(&s->timer, bench_only_copies(s->op), s->stream, reason)) {
        if (!device_is_gpu(s->timer.device)) *exit_code = EXIT_FAILED;
        return false;
    }
    *exit_code = EXIT_FAILED;
    bench_report_head(s->op);
    for (int64_t i = 0; i < count; i++)
        if (!bench_row(s, &rows[i], reason)) return false;
    if (!s->timed) {
        *exit_code = EXIT_UNSUPPORTED;
        return reason_set(reason, "no row of the grid runs here: %s", s->passed_over.text);
    }
    if (!s->json) return true;
    struct outfile *json = s->json;
    s->json = NULL; /* commit frees it */
    return outfile_commit(json, reason);
}

static enum bench_between between_of(const struct bench_options *o)
{
    if (o->host) return BENCH_HOST;
    if (o->warm || (!strcmp(o->grid, "quick") && !o->between_given)) return BENCH_NOTHING;
    return device_is_gpu(o->device) ? (enum bench_between)o->between : BENCH_READ;
}

static int bench_rows(const struct bench_options *o, enum operation op, const struct shape *rows,
                      int64_t count)
{
    const fmla_device device = o->device;
    const bool stream = device_is_gpu(device) && op == OP_DENSE_DECODE && !o->no_stream && !o->host;
    struct bench_session s = {
        .timer = {.device = device, .between = between_of(o), .repeat = o->repeat, .kernel = o->kernel},
        .op = op,
        .stream = stream,
        .fixed = o->fixed && op == OP_DENSE_DECODE};
    struct reason reason = {""};
    const struct bench_load load = bench_load_now(device_is_gpu(device) ? 1 : fmla_num_threads());
    char warning[BENCH_WARNING];
    int exit_code = EXIT_FAILED;
    if (bench_is_busy(&load, warning)) complain(&bench, EXIT_GOOD, "warning: %s", warning);
    bool good = !o->json || (s.json = outfile_open_lines(o->json, &reason));
    good = good && all_rows(&s, rows, count, &exit_code, &reason);
    bench_timer_close(&s.timer);
    outfile_abandon(s.json);
    if (bench_beaten_says(&s.beaten, s.timed, warning)) complain(&bench, EXIT_GOOD, "warning: %s", warning);
    return good ? EXIT_GOOD : complain(&bench, exit_code, "%s", reason.text);
}

/* ---- The command ---------------------------------------------------------------------------- */

/* Returns EXIT_GOOD if the row's head counts and head size fit together. */
static int check_row(const struct shape *shape)
{
    if (shape->h_q && shape->h_q % shape->h_kv)
        return complain(&bench, EXIT_USAGE, "--kv-heads: %" PRId64 " must divide --heads %" PRId64,
                        shape->h_kv, shape->h_q);
    if (!operation_is_mha(shape->op) && !cache_formats[shape->format].token && shape->d_qk != 512 &&
        shape->d_qk != 576)
        return complain(&bench, EXIT_USAGE, "--d-qk: %" PRId64 " must be 512 or 576", shape->d_qk);
    return EXIT_GOOD;
}

static int bench_all(struct bench_options *o)
{
    const enum operation op = operation_named(o->names[o->op]);
    static int64_t extras[] = {FMLA_KV_BF16,          FMLA_KV_FP8_656,       FMLA_KV_FP8_584,
                               FMLA_KV_FP8_528,       FMLA_KV_FP8_528_SPLIT, FMLA_KV_FP4_288,
                               FMLA_KV_FP4_288_SPLIT, FMLA_KV_FP8_528_F32};
    const struct option_counts *caches = &o->axes.axis[AXIS_FORMAT], *products = &o->axes.axis[AXIS_PRODUCTS];
    struct reason reason = {""};
    char grids[128], near[HINT];
    int64_t count;
    if (!kernel_exists(o->names[o->op], o->kernel, &reason))
        return complain(&bench, EXIT_USAGE, "%s", reason.text);
    for (int64_t i = 0; i < caches->count; i++) caches->items[i] = format_chosen((int)caches->items[i]);
    if (caches->count == 1 && !takes_format(op, (int32_t)caches->items[0]))
        return complain(&bench, EXIT_USAGE, "--cache: %s does not apply to --op %s",
                        format_name((int32_t)caches->items[0]), o->names[o->op]);
    if (o->extra_cache_given && op != OP_SPARSE_DECODE)
        return complain(&bench, EXIT_USAGE, "--extra-cache: applies only to --op sparse_decode");
    if (o->between_given && o->warm)
        return complain(&bench, EXIT_USAGE, "--between: cannot be combined with --warm");
    if (o->host && (o->warm || o->between_given))
        return complain(&bench, EXIT_USAGE,
                        "--host: cannot be combined with --warm or --between: the GPU is idle");
    if (o->host && !device_is_gpu(o->device))
        return complain(&bench, EXIT_USAGE, "--host: needs a GPU (--device cuda:0)");
    if (o->between_given && o->between == BENCH_PRODUCTS && !device_is_gpu(o->device))
        return complain(&bench, EXIT_USAGE, "--between: products needs a GPU (--device cuda:0)");
    if (o->extra_cache_given)
        o->axes.axis[AXIS_EXTRA_FORMAT] = (struct option_counts){extras + o->extra_cache, 1};
    struct shape *rows = bench_grid(op, o->grid, &o->axes, &count);
    bench_grid_names(op, grids, sizeof grids);
    if (count < 0)
        return complain(&bench, EXIT_USAGE, "--grid: '%s' must be one of %s%s", o->grid, grids,
                        hint(o->grid, grids, near));
    if (!rows) return complain(&bench, EXIT_FAILED, "no memory for so many rows");
    if (!count) {
        free(rows);
        if (o->extra_cache_given)
            return complain(
                &bench, EXIT_USAGE,
                "--extra-cache: --grid %s has no row with an extra cache and keys of the size of %s", o->grid,
                format_name((int32_t)extras[o->extra_cache]));
        const int32_t which = (int32_t)products->items[0];
        return complain(&bench, EXIT_USAGE, "--products: %s needs --cache %s", products_name(which),
                        which == MADE_CODES ? "fp8_576" : "fp8_656 or fp8_576");
    }
    for (int64_t i = 0; i < count; i++) {
        const int wrong = check_row(&rows[i]);
        if (!wrong) continue;
        free(rows);
        return wrong;
    }
    for (int64_t i = 0; i < count; i++)
        rows[i].no_forward = op == OP_MHA_BACKWARD && device_is_gpu(o->device);
    if (o->threads) fmla_set_num_threads((int32_t)o->threads); /* the option checks the range */
    if (!strcmp(o->grid, "varlen")) o->fixed = true;
    const int exit_code = bench_rows(o, op, rows, count);
    free(rows);
    return exit_code;
}

#define AXIS(name, which, least, most, help)                                                                 \
    OPTION_LIST(name, &o.axes.axis[which], "A,B", least, most, help, NULL)

int command_bench(int argc, char **argv)
{
    struct bench_options o = {.grid = "cpu", .repeat = 15, .device = {FMLA_DEVICE_CPU, 0}};
    char operations[200];
    struct option options[] = {
        OPTION_ONE_OF("--op", &o.op, "NAME", operations, NULL, NULL),
        OPTION_ROW("--grid", OPTION_TEXT, &o.grid, "NAME",
                   "cpu (the default), h20, latency, peers, formats, varlen, mha or quick", 0, 0, NULL, "cpu",
                   "h20", "latency", "peers", "formats", "varlen", "mha", "quick"),
        AXIS("--batch", AXIS_BATCH, 1, 65536, "requests"),
        AXIS("--query-tokens", AXIS_QUERY_TOKENS, 1, 1 << 20, "query tokens of a request, or of a prefill"),
        AXIS("--seq-len", AXIS_SEQ_LEN, 1, 1 << 24, "keys of a request, or all keys of a prefill"),
        AXIS("--heads", AXIS_HEADS, 1, 4096, "query heads"),
        AXIS("--kv-heads", AXIS_KV_HEADS, 1, 4096, "key heads"),
        AXIS("--d-qk", AXIS_D_QK, 1, 576, "head size: 512 or 576; any with mha_forward and mha_backward"),
        AXIS("--d-v", AXIS_D_V, 1, 512,
             "mha_forward: head size of values; default 128, with --d-qk 256 256, with 96 64, else at most "
             "--d-qk"),
        AXIS("--page-size", AXIS_PAGE_SIZE, 1, 65536, "keys of a page"),
        OPTION_SET_OF("--dtype", &o.axes.axis[AXIS_DTYPE], "TYPE", "bf16, fp16 or both", "bf16", "fp16",
                      "both"),
        OPTION_SET_OF(
            "--cache", &o.axes.axis[AXIS_FORMAT], "FORMAT",
            "format of the cache: plain (that of --dtype; the default of dense_decode), fp8_656, "
            "fp8_584, fp8_576 (not sparse) or all; except for dense_decode also fp8_528, fp8_528_split, "
            "fp4_288, fp4_288_split and fp8_528_f32",
            "plain", "fp8_656", "fp8_584", "fp8_576", "fp8_528", "fp8_528_split", "fp4_288", "fp4_288_split",
            "fp8_528_f32", "all"),
        OPTION_ONE_OF("--extra-cache", &o.extra_cache, "FORMAT",
                      "sparse_decode: time only the rows with an extra cache, in this format",
                      &o.extra_cache_given, "plain", "fp8_656", "fp8_584", "fp8_528", "fp8_528_split",
                      "fp4_288", "fp4_288_split", "fp8_528_f32"),
        OPTION_SET_OF("--products", &o.axes.axis[AXIS_PRODUCTS], "WHICH",
                      "dense_decode over fp8_656 or fp8_576: bf16 (the default), fp8, codes (fp8 with q as "
                      "codes) or all of these",
                      "bf16", "fp8", "codes", "all"),
        OPTION_SET_OF("--causal", &o.axes.axis[AXIS_CAUSAL], "WHEN", "no, yes or both", "no", "yes", "both"),
        OPTION_SET_OF("--varlen", &o.axes.axis[AXIS_VARLEN], "WHEN",
                      "varying lengths, around --seq-len or up to it: no, yes or both", "no", "yes", "both"),
        OPTION_SET_OF("--used", &o.axes.axis[AXIS_USED], "WHEN",
                      "mha_forward and mha_backward: lengths in use of tokens and keys: no, yes or both",
                      "no", "yes", "both"),
        OPTION_SET_OF("--sink", &o.axes.axis[AXIS_SINK], "WHEN", "attention sinks: no, yes or both", "no",
                      "yes", "both"),
        OPTION_SET_OF("--norm", &o.axes.axis[AXIS_NORM], "WHEN",
                      "cache_append: RMS norm first: no, yes or both", "no", "yes", "both"),
        OPTION_SET_OF("--rope", &o.axes.axis[AXIS_TURNS], "PAIRS",
                      "cache_append: RoPE first: none, interleaved, halves or all of these", "none",
                      "interleaved", "halves", "all"),
        AXIS("--topk", AXIS_TOPK, 1, 1 << 24, "sparse: indices of a token"),
        AXIS("--parts", AXIS_PARTS, 1, 1024, "parts to merge; default 2,8"),
        OPTION_SET_OF("--last", &o.axes.axis[AXIS_LAST], "WHEN",
                      "merge: one part more, at pointers of its own: no, yes or both", "no", "yes", "both"),
        AXIS("--tokens", AXIS_TOKENS, 1, 1 << 24, "tokens of the cache operations; default 128,4096,65536"),
        OPTION_DEVICE(&o.device),
        OPTION_KERNEL(&o.kernel),
        OPTION_THREADS(&o.threads),
        OPTION_NUMBER("--repeat", &o.repeat, 1, 100000, "runs of a row; default 15", NULL),
        OPTION_ONE_OF("--between", &o.between, "WHAT",
                      "what empties the caches before a run: products (the default on a GPU) or read",
                      &o.between_given, "products", "read"),
        OPTION_SWITCH("--warm", &o.warm, "leave the caches as the last run left them"),
        OPTION_SWITCH("--host", &o.host,
                      "on a GPU: time the host until the call returns, instead of the GPU"),
        OPTION_SWITCH("--fixed", &o.fixed,
                      "with varying lengths, also time a batch of fixed length with as many keys"),
        OPTION_SWITCH("--no-stream", &o.no_stream,
                      "on a GPU: do not time the stream of the same keys with each row"),
        OPTION_JSON(&o.json),
        {0}};
    operation_choices(false, o.names, operations, sizeof operations);
    memcpy(options[0].choices, o.names, sizeof o.names);
    int status = options_parse(&bench, options, argc, argv, NULL);
    if (status < 0) status = bench_all(&o);
    for (int a = 0; a < BENCH_AXES; a++)
        if (a != AXIS_EXTRA_FORMAT) free(o.axes.axis[a].items);
    return status;
}

/* SPDX-License-Identifier: MIT */
#include "policy.h"
#include "hint.h"

#include "plan_call.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

static const int32_t *integers(const struct call *call, const char *name)
{
    const fmla_tensor *tensor = call_tensor(call, name);
    return tensor ? tensor->data : NULL;
}

static bool is_on(const struct call *call, const char *name)
{
    const int32_t *option = call_option(call, name);
    return option && *option;
}

static double size(const struct call *call, enum dimension dimension)
{
    return (double)call_size(call, dimension);
}

static double token_bytes(const fmla_tensor *cache)
{
    return (double)cache->shape[cache->ndim - 1] * element_bytes(cache->dtype);
}

int32_t call_format(const struct call *call)
{
    const int32_t *format = call_option(call, "kv_format");
    return format && *format                                ? *format
           : call->tensor[0].dtype.code == FMLA_TYPE_BFLOAT ? FMLA_KV_BF16
                                                            : FMLA_KV_FP16;
}

int32_t call_format_of(const struct call *call, const char *cache)
{
    const int32_t *second = call_option(call, "extra_kv_format");
    return second && *second && !strcmp(cache, "extra_kv_cache") ? *second : call_format(call);
}

/* ---- What run prints ------------------------------------------------------------------------- */

static void print_shape(const char *name, const fmla_tensor *tensor)
{
    printf("%-12s [", name);
    for (int i = 0; i < tensor->ndim; i++) printf("%s%" PRId64, i ? ", " : "", tensor->shape[i]);
    putchar(']');
}

static void print_q(const struct call *call)
{
    const fmla_tensor *q = call_tensor(call, "q");
    print_shape("q", q);
    printf(" %s%s%s%s\n",
           q->dtype.bits == 8                  ? "e4m3"
           : q->dtype.code == FMLA_TYPE_BFLOAT ? "bf16"
                                               : "fp16",
           is_on(call, "products") ? ", FP8 products" : "", is_on(call, "causal") ? ", causal" : "",
           call_tensor(call, "attn_sink") ? ", sink" : "");
}

static void print_dense(const struct call *call, const struct work *work)
{
    const int32_t format = call_format(call);
    print_q(call);
    print_shape("kv_cache", call_tensor(call, "kv_cache"));
    if (cache_formats[format].token) printf(" %s", format_name(format));
    puts(call_tensor(call, "block_table") ? "" : ", no block table");
    printf("%-12s %.0f of %" PRId64 " requests; %.0f (row, key) pairs attended\n", "keys", work->keys,
           call_size(call, DIM_b), work->pairs);
}

static void print_sparse(const struct call *call, const struct work *work)
{
    const struct key_source *keys = policies[call->op].keys;
    print_q(call);
    for (int k = 0; k < KEY_SOURCES && keys[k].cache; k++) {
        const fmla_tensor *cache = call_tensor(call, keys[k].cache);
        if (!cache) continue;
        print_shape(k ? "extra cache" : keys[k].cache, cache);
        printf(" %s, %" PRId64 " indices a token\n", format_name(call_format_of(call, keys[k].cache)),
               call_tensor(call, keys[k].list)->shape[2]);
    }
    printf("%-12s %.0f (token, key) pairs attended\n", "keys", work->keys);
}

/* ---- Dense decode ---------------------------------------------------------------------------- */

int64_t call_length(const struct call *call, int64_t r)
{
    const int64_t pages = call_tensor(call, "block_table") ? call_size(call, DIM_max_pages) : 1;
    const int32_t length = integers(call, "seqlens")[r];
    int64_t capacity;
    if (__builtin_mul_overflow(pages, call_size(call, DIM_page_size), &capacity)) capacity = INT64_MAX;
    return length < 0 ? 0 : length > capacity ? capacity : length;
}

/* Returns the keys of request r that its token j sees. */
static int64_t visible(const struct call *call, int64_t r, int64_t j)
{
    const int64_t length = call_length(call, r);
    const int64_t seen = is_on(call, "causal") ? length - call_size(call, DIM_s_q) + j + 1 : length;
    return seen < 0 ? 0 : seen;
}

static struct work dense_work(const struct call *call)
{
    const int64_t b = call_size(call, DIM_b), s_q = call_size(call, DIM_s_q);
    const double h_q = size(call, DIM_h_q), row = size(call, DIM_d_qk) + size(call, DIM_d_v);
    struct work work = {0};
    for (int64_t r = 0; r < b; r++) {
        work.keys += (double)call_length(call, r);
        for (int64_t j = 0; j < s_q; j++) work.pairs += (double)visible(call, r, j) * h_q;
    }
    work.flop = 2.0 * work.pairs * row;
    work.bytes = work.keys * size(call, DIM_h_kv) * token_bytes(call_tensor(call, "kv_cache")) +
                 2.0 * (double)b * (double)s_q * h_q * row;
    return work;
}

/* A row of a causal call sees the keys of a shorter request. */
static void dense_narrow(struct call *part, const struct call *call, const int64_t *at,
                         int32_t room[NARROWED])
{
    *room = (int32_t)visible(call, at[0], at[1]);
    part->tensor[TENSOR_dense_decode_seqlens].data = room;
    *(int32_t *)call_option(part, "causal") = 0;
    if (call_tensor(call, "block_table")) return;
    /* Page r has the keys of request r. */
    fmla_tensor *cache = &part->tensor[TENSOR_dense_decode_kv_cache];
    const int64_t first = at[0] * part->strides[TENSOR_dense_decode_kv_cache][0];
    cache->data = (char *)cache->data + first * element_bytes(cache->dtype);
    part->shape[TENSOR_dense_decode_kv_cache][0] -= at[0];
}

/* Checks that used entries of the block table are pages. */
static bool dense_check(const struct call *call, struct reason *reason)
{
    const int64_t page_size = call_size(call, DIM_page_size), pages = call_size(call, DIM_pages);
    const int64_t max_pages = call_size(call, DIM_max_pages), b = call_size(call, DIM_b);
    const int32_t *table = integers(call, "block_table");
    for (int64_t r = 0; table && r < b; r++) {
        const int64_t length = call_length(call, r);
        for (int64_t i = 0; i * page_size < length; i++)
            if (table[r * max_pages + i] < 0 || table[r * max_pages + i] >= pages)
                return reason_set(
                    reason, "block_table[%" PRId64 ", %" PRId64 "]: is %d, must be one of %" PRId64 " pages",
                    r, i, table[r * max_pages + i], pages);
    }
    return true;
}

static fmla_status plan(const struct call *call, struct plan_call *args, size_t *bytes)
{
    args->stream = *(void **)call_option(call, "stream");
    args->num_partitions = *(int32_t *)call_option(call, "num_partitions");
    args->plan = call->plan, args->plan_size = *(size_t *)call_option(call, "plan_size");
    return bytes ? plan_call_size(args, bytes) : plan_call_run(args);
}

static fmla_status dense_plan(const struct call *call, size_t *bytes)
{
    struct plan_call args = {0};
    args.seqlens = call_tensor(call, "seqlens");
    args.s_q = call_size(call, DIM_s_q), args.h_q = call_size(call, DIM_h_q);
    args.h_kv = call_size(call, DIM_h_kv), args.capacity = call_size(call, DIM_page_size);
    if (call_tensor(call, "block_table")) args.capacity *= call_size(call, DIM_max_pages);
    return plan(call, &args, bytes);
}

/* ---- The sparse operations ------------------------------------------------------------------- */

/* Returns the number of valid entries in the lists. `lengths` are those of requests of `a_request` lists
 * each. */
static double named_keys(const int32_t *list, int64_t lists, int64_t topk, const int32_t *lengths,
                         int64_t a_request, int64_t slots)
{
    double keys = 0.0;
    for (int64_t l = 0; list && l < lists; l++, list += topk) {
        int64_t count = lengths ? lengths[l / a_request] : topk;
        count = count < 0 ? 0 : count > topk ? topk : count;
        for (int64_t i = 0; i < count; i++) keys += list[i] >= 0 && list[i] < slots;
    }
    return keys;
}

int64_t call_row_keys(const struct call *row, const struct key_source *from)
{
    const fmla_tensor *cache = call_tensor(row, from->cache);
    if (!cache) return 0;
    if (row->op == OP_DENSE_DECODE) return call_length(row, 0);
    if (!from->list) return cache->shape[cache->ndim - 3];
    const fmla_tensor *list = call_tensor(row, from->list);
    const int32_t *count = integers(row, from->count);
    const int64_t topk = list->shape[list->ndim - 1];
    return count && *count < topk ? *count : topk;
}

int64_t call_row_slot(const struct call *row, const struct key_source *from, int64_t i)
{
    const int32_t *list = from->list ? integers(row, from->list) : NULL;
    if (row->op != OP_DENSE_DECODE) return list ? list[i] : i;
    const int64_t page_size = call_size(row, DIM_page_size);
    return list ? list[i / page_size] * page_size + i % page_size : i;
}

static struct work sparse_work(const struct call *call)
{
    const int64_t s_q = call_size(call, DIM_s_q), tokens = call_size(call, DIM_b) * s_q;
    const double rows = (double)tokens * size(call, DIM_h_q);
    const double row = size(call, DIM_d_qk) + size(call, DIM_d_v);
    struct work work = {0};
    const fmla_tensor *extra = call_tensor(call, "extra_kv_cache");
    const double keys = named_keys(integers(call, "indices"), tokens, call_size(call, DIM_topk),
                                   integers(call, "topk_length"), s_q,
                                   call_size(call, DIM_pages) * call_size(call, DIM_page_size));
    const double of_extra =
        named_keys(integers(call, "extra_indices"), tokens, call_size(call, DIM_extra_topk),
                   integers(call, "extra_topk_length"), s_q,
                   call_size(call, DIM_extra_pages) * call_size(call, DIM_extra_page_size));
    work.keys = keys + of_extra;
    work.flop = 2.0 * work.keys * size(call, DIM_h_q) * row;
    work.bytes = keys * token_bytes(call_tensor(call, "kv_cache")) + 2.0 * rows * row;
    if (extra) work.bytes += of_extra * token_bytes(extra);
    return work;
}

static fmla_status sparse_plan(const struct call *call, size_t *bytes)
{
    struct plan_call args = {.sparse = true, .target = call->device};
    args.b = call_size(call, DIM_b), args.s_q = call_size(call, DIM_s_q);
    args.h_q = call_size(call, DIM_h_q), args.topk = call_size(call, DIM_topk);
    args.topk_length = call_tensor(call, "topk_length");
    args.extra_topk = call_tensor(call, "extra_indices") ? call_size(call, DIM_extra_topk) : 0;
    args.extra_topk_length = call_tensor(call, "extra_topk_length");
    return plan(call, &args, bytes);
}

/* Counts as read the tokens of kv that this number of entries can reach. */
static struct work prefill_work(const struct call *call)
{
    const fmla_tensor *kv = call_tensor(call, "kv"), *lengths = call_tensor(call, "topk_length");
    const int64_t slots = kv->ndim == 4 ? kv->shape[0] * kv->shape[1] : kv->shape[0];
    const int64_t s_q = call_size(call, DIM_s_q), h_kv = call_size(call, DIM_h_kv);
    const int64_t topk = call_size(call, DIM_topk);
    const double row = size(call, DIM_d_qk) + size(call, DIM_d_v), all = (double)slots * (double)h_kv;
    const double rows = (double)s_q * size(call, DIM_h_q);
    struct work work = {0};
    work.keys =
        named_keys(integers(call, "indices"), s_q * h_kv, topk, integers(call, "topk_length"), h_kv, slots);
    work.flop = h_kv > 0 ? 2.0 * work.keys * size(call, DIM_h_q) / (double)h_kv * row : 0.0;
    work.bytes = 2.0 * rows * row + (work.keys < all ? work.keys : all) * token_bytes(kv) +
                 4.0 * (double)s_q * (double)h_kv * (double)topk;
    if (lengths) work.bytes += 4.0 * (double)s_q;
    if (call_tensor(call, "max_logits")) work.bytes += 4.0 * rows;
    if (call_tensor(call, "lse")) work.bytes += 4.0 * rows;
    return work;
}

/* ---- Dense MHA ------------------------------------------------------------------------------- */

/* Tokens or keys of a request: those in use, and all with padding; first is 0 if requests are separate. */
struct span {
    int64_t first, count, extent;
};
struct request {
    struct span q, k;
};

static int64_t end_of(struct span span)
{
    return span.first + span.count;
}

/* Clamps as the library does (cu_seqlens and seqused in flashmla/flashmla.h). */
static int64_t clamped(int64_t start, int64_t least, int64_t most)
{
    return start < least ? least : start > most ? most : start;
}

/* Returns the span of request r; `before` is the previous request's. starts: NULL: requests are separate, with `tokens`
 * each; used: NULL: all are in use. */
static struct span span_of(const int32_t *starts, const int32_t *used, int64_t r, struct span before,
                           int64_t tokens)
{
    struct span span = {0, tokens, tokens};
    if (starts) {
        span.first = clamped(starts[r], before.first + before.extent, tokens);
        span.count = span.extent = clamped(starts[r + 1], span.first, tokens) - span.first;
    }
    if (used) span.count = clamped(used[r], 0, span.extent);
    return span;
}

static struct request next_request(const struct call *call, int64_t r, struct request before)
{
    const int32_t *of_q = integers(call, "cu_seqlens_q"), *of_k = integers(call, "cu_seqlens_k");
    return (struct request){span_of(of_q, integers(call, "seqused_q"), r, before.q,
                                    call_size(call, of_q ? DIM_tokens_q : DIM_s_q)),
                            span_of(of_k, integers(call, "seqused_k"), r, before.k,
                                    call_size(call, of_k ? DIM_tokens_k : DIM_s_k))};
}

static int64_t requests_of(const struct call *call)
{
    return call_is_flat(call) ? call_size(call, DIM_splits) - 1 : call_size(call, DIM_b);
}

void call_set_longest(struct call *call)
{
    static const struct {
        const char *starts, *used, *most;
        enum dimension tokens;
    } of[] = {{"cu_seqlens_q", "seqused_q", "max_s_q", DIM_tokens_q},
              {"cu_seqlens_k", "seqused_k", "max_s_k", DIM_tokens_k}};
    for (int i = 0; i < 2; i++) {
        const fmla_tensor *starts = call_tensor(call, of[i].starts), *used = call_tensor(call, of[i].used);
        int64_t *most = call_option(call, of[i].most);
        struct span span = {0};
        if (starts && used && used->shape[0] + 1 != starts->shape[0]) continue; /* the library refuses it */
        for (int64_t r = 0; starts && r + 1 < starts->shape[0]; r++) {
            span = span_of(starts->data, used ? used->data : NULL, r, span, call_size(call, of[i].tokens));
            if (span.count > *most) *most = span.count;
        }
    }
}

/* Returns the (token, key) pairs: the last token of a causal request sees all keys, each earlier one sees
 * one less. */
static double pairs_of(const struct call *call, const struct request *request)
{
    const double s_q = (double)request->q.count, s_k = (double)request->k.count;
    const double seeing = s_q < s_k ? s_q : s_k;
    return is_on(call, "causal") ? seeing * (2.0 * s_k - seeing + 1.0) / 2.0 : s_q * s_k;
}

static struct work mha_work(const struct call *call)
{
    const double h_q = size(call, DIM_h_q), row = size(call, DIM_d_qk) + size(call, DIM_d_v);
    const int64_t requests = requests_of(call);
    struct request request = {0};
    struct work work = {0};
    double tokens = 0.0;
    for (int64_t r = 0; r < requests; r++) {
        request = next_request(call, r, request);
        tokens += (double)request.q.count, work.keys += (double)request.k.count;
        work.pairs += pairs_of(call, &request) * h_q;
    }
    work.flop = 2.0 * work.pairs * row;
    work.bytes = 2.0 * (tokens * h_q + work.keys * size(call, DIM_h_kv)) * row;
    if (call_tensor(call, "lse")) work.bytes += 4.0 * tokens * h_q;
    if (call_is_flat(call)) work.bytes += 8.0 * (double)(requests + 1);
    return work;
}

/* Counts five products, three as wide as keys and two as wide as values. Bytes: q, k, v, out and dout are
 * read, dq, dk and dv written. */
static struct work backward_work(const struct call *call)
{
    const double d_qk = size(call, DIM_d_qk), d_v = size(call, DIM_d_v), row = d_qk + d_v;
    struct work work = mha_work(call);
    const double rows = (double)call_bytes(call_tensor(call, "lse")) / 4.0;
    work.flop = 2.0 * work.pairs * (3.0 * d_qk + 2.0 * d_v);
    work.bytes += 2.0 * rows * row + 2.0 * work.keys * size(call, DIM_h_kv) * row;
    return work;
}

static void print_mha(const struct call *call, const struct work *work)
{
    print_q(call);
    print_shape("k", call_tensor(call, "k")), putchar('\n');
    print_shape("v", call_tensor(call, "v")), putchar('\n');
    printf("%-12s %.0f%s of %" PRId64 " requests%s; %.0f (row, key) pairs attended\n", "keys", work->keys,
           call_tensor(call, "seqused_k") ? " in use" : "", requests_of(call),
           call_is_flat(call) ? ", one after the other" : "", work->pairs);
}

/* A row is a request of one unmasked token over the first keys of its request. A token of no
 * request remains outside; padding sees no key. */
static void mha_narrow(struct call *part, const struct call *call, const int64_t *at, int32_t room[NARROWED])
{
    const bool flat = call_is_flat(call);
    const int64_t token = at[!flat], requests = requests_of(call);
    struct request request = {0};
    for (int64_t r = flat ? 0 : at[0]; r < requests && token >= request.q.first + request.q.extent; r++)
        request = next_request(call, r, request);
    const bool is_padding = token >= end_of(request.q) && token < request.q.first + request.q.extent;
    const bool has = token >= request.q.first && token < end_of(request.q);
    int64_t seen = has ? request.k.count : 0;
    if (is_on(call, "causal")) seen += token + 1 - end_of(request.q);
    if (!has || seen < 0) seen = 0;
    for (int i = TENSOR_mha_forward_k; i <= TENSOR_mha_forward_v; i++) {
        fmla_tensor *keys = &part->tensor[i];
        keys->data =
            (char *)keys->data + request.k.first * part->strides[i][!flat] * element_bytes(keys->dtype);
        part->shape[i][!flat] = seen;
    }
    for (int i = 0; flat && i < 2; i++) {
        part->tensor[TENSOR_mha_forward_cu_seqlens_q + i].data = room + 2 * i;
        part->shape[TENSOR_mha_forward_cu_seqlens_q + i][0] = 2;
    }
    for (int i = 0; i < 2; i++) {
        part->tensor[TENSOR_mha_forward_seqused_q + i].data = room + 4;
        part->shape[TENSOR_mha_forward_seqused_q + i][0] = 1;
    }
    room[0] = 0, room[1] = has || is_padding, room[2] = 0, room[3] = (int32_t)seen, room[4] = INT32_MAX;
    *(int32_t *)call_option(part, "causal") = 0;
}

/* ---- What only moves or joins data ----------------------------------------------------------- */

static double all_bytes(const struct call *call)
{
    double bytes = 0.0;
    for (int i = 0; i < MAX_TENSORS; i++)
        if (call->tensor[i].shape) bytes += (double)call_bytes(&call->tensor[i]);
    return bytes;
}

static struct work merge_work(const struct call *call)
{
    const double rows = size(call, DIM_b) * size(call, DIM_s_q) * size(call, DIM_h_q);
    const double parts = size(call, DIM_n_out) + (call_tensor(call, "out_last") ? 1.0 : 0.0);
    return (struct work){.flop = 2.0 * parts * rows * size(call, DIM_d_v), .bytes = all_bytes(call)};
}

/* Counts the cache's tokens. */
static struct work cache_work(const struct call *call)
{
    const fmla_tensor *cache = call_tensor(call, "kv_cache");
    return (struct work){.bytes = all_bytes(call) - (double)call_bytes(cache) +
                                  size(call, DIM_tokens) * token_bytes(cache)};
}

static struct work convert_work(const struct call *call)
{
    const double token =
        token_bytes(call_tensor(call, "src_cache")) + token_bytes(call_tensor(call, "dst_cache"));
    return (struct work){.bytes = size(call, DIM_tokens) * (token + 2.0 * sizeof(int64_t))};
}

/* ---- The table ------------------------------------------------------------------------------- */

const struct policy policies[OPERATIONS] = {
    [OP_DENSE_DECODE] = {.has = "q",
                         .lacks = "indices",
                         .rows = {DIM_b, DIM_s_q, DIM_h_q},
                         .sliced = 3,
                         .budget = 2e9,
                         .results = {{"out", &tolerance_dense_decode_out}, {"lse", &tolerance_decode_lse}},
                         .keys = {{"kv_cache", "block_table", "seqlens", NULL}},
                         .work = dense_work,
                         .print = print_dense,
                         .narrow = dense_narrow,
                         .check = dense_check,
                         .plan = dense_plan},
    [OP_SPARSE_DECODE] = {.has = "indices",
                          .rows = {DIM_b, DIM_s_q, DIM_h_q},
                          .sliced = 2,
                          .budget = 1e9,
                          .results = {{"out", &tolerance_sparse_decode_out}, {"lse", &tolerance_decode_lse}},
                          .keys = {{"kv_cache", "indices", "topk_length", NULL},
                                   {"extra_kv_cache", "extra_indices", "extra_topk_length", NULL}},
                          .work = sparse_work,
                          .print = print_sparse,
                          .plan = sparse_plan},
    [OP_SPARSE_PREFILL] = {.has = "kv",
                           .lacks = "kv_cache",
                           .rows = {DIM_s_q, DIM_h_q},
                           .sliced = 1,
                           .budget = 1e9,
                           .results = {{"out", &tolerance_sparse_prefill_out},
                                       {"lse", &tolerance_prefill_lse},
                                       {"max_logits", &tolerance_prefill_lse}},
                           .keys = {{"kv", "indices", "topk_length", NULL}},
                           .work = prefill_work,
                           .print = print_sparse},
    [OP_MHA_FORWARD] = {.has = "k",
                        .lacks = "dout",
                        .rows = {DIM_b, DIM_s_q, DIM_h_q},
                        .flat_rows = {DIM_tokens_q, DIM_h_q},
                        .sliced = 3,
                        .budget = 2e9,
                        .results = {{"out", &tolerance_mha_out}, {"lse", &tolerance_prefill_lse}},
                        .keys = {{.cache = "k", .values = "v"}},
                        .work = mha_work,
                        .print = print_mha,
                        .narrow = mha_narrow},
    [OP_MHA_BACKWARD] = {.has = "dout",
                         .rows = {DIM_b, DIM_s_q, DIM_h_q},
                         .flat_rows = {DIM_tokens_q, DIM_h_q},
                         .budget = INFINITY, /* a key's gradients depend on all rows */
                         .results = {{"dq", &tolerance_mha_out},
                                     {"dk", &tolerance_mha_out},
                                     {"dv", &tolerance_mha_out},
                                     {"d_attn_sink", &tolerance_mha_dsink}},
                         .work = backward_work,
                         .print = print_mha},
    [OP_MERGE] = {.rows = {DIM_b, DIM_s_q, DIM_h_q},
                  .results = {{"out", &tolerance_exact_f32}, {"lse", &tolerance_decode_lse}},
                  .work = merge_work},
    [OP_CACHE_APPEND] = {.rows = {DIM_tokens}, .results = {{"kv_cache", NULL}}, .work = cache_work},
    [OP_CACHE_GATHER] = {.rows = {DIM_tokens}, .results = {{"out", NULL}}, .work = cache_work},
    [OP_CACHE_CONVERT] = {.rows = {DIM_tokens}, .results = {{"dst_cache", NULL}}, .work = convert_work},
};

const enum dimension *call_rows(const struct call *call)
{
    const struct policy *policy = &policies[call->op];
    return *policy->flat_rows && call_is_flat(call) ? policy->flat_rows : policy->rows;
}

struct work call_work(const struct call *call)
{
    return policies[call->op].work(call);
}

enum operation operation_named(const char *name)
{
    int op = 0;
    while (op < OPERATIONS && strcmp(descriptors[op].name, name) != 0) op++;
    return (enum operation)op;
}

void operation_choices(bool run, const char **names, char *words, size_t room)
{
    *words = '\0';
    for (int op = 0; op < OPERATIONS; op++) {
        const size_t used = strlen(words);
        if (!policies[op].work || (run && !policies[op].print)) continue;
        snprintf(words + used, room - used, "%s%s%s", used ? ", " : "", descriptors[op].name,
                 used ? "" : " (the default)");
        *names++ = descriptors[op].name;
    }
    *names = NULL;
}

const char *operation_title(enum operation op)
{
    static char title[32];
    snprintf(title, sizeof title, "%s", descriptors[op].name);
    for (char *c = title; *c; c++)
        if (*c == '_') *c = ' ';
    return title;
}

const char *format_name(int32_t kv_format)
{
    return cache_formats[kv_format].name + strlen("FMLA_KV_");
}

int32_t format_chosen(int index)
{
    return index ? FMLA_KV_FP8_656 + index - 1 : 0;
}

bool takes_format(enum operation op, int32_t kv_format)
{
    const bool listed = op == OP_SPARSE_DECODE || op == OP_SPARSE_PREFILL;
    if (!kv_format) return true;
    return kv_format >= first_format(op) && kv_format <= last_format(op) &&
           !(listed && kv_format == FMLA_KV_FP8_576);
}

static const struct member *format_option(enum operation op)
{
    const struct member *member = descriptors[op].members;
    while (member->name && member->kind != MEMBER_FORMAT) member++;
    return member;
}

int32_t first_format(enum operation op)
{
    return (int32_t)format_option(op)->low;
}

int32_t last_format(enum operation op)
{
    return (int32_t)format_option(op)->high;
}

bool operation_has(enum operation op, const char *name)
{
    const struct member *member = descriptors[op].members;
    while (member->name && strcmp(member->name, name) != 0) member++;
    return member->name != NULL;
}

bool takes_lengths(enum operation op)
{
    return operation_has(op, "seqlens");
}

int64_t usual_d_v(int64_t d_qk)
{
    if (d_qk == 96) return 64;
    return d_qk == 256 ? 256 : d_qk < 128 ? d_qk : 128;
}

int double_by_value(const void *left, const void *right)
{
    const double a = *(const double *)left, b = *(const double *)right;
    return a < b ? -1 : a > b;
}

bool kernel_exists(const char *operation, const char *name, struct reason *reason)
{
    /* The rows of GPU 0 exist even without a GPU. */
    static const fmla_device devices[] = {{FMLA_DEVICE_CPU, 0}, {FMLA_DEVICE_CUDA, 0}};
    char names[400] = "", near[HINT];
    if (!name) return true;
    for (size_t d = 0; d < sizeof devices / sizeof *devices; d++) {
        fmla_capability row = FMLA_INIT(fmla_capability);
        for (int64_t i = 0; fmla_capabilities(devices[d], i, &row) == FMLA_OK; i++) {
            if (!row.kernel || strcmp(row.operation, operation) != 0) continue;
            if (!strcmp(row.kernel, name)) return true;
            const size_t used = strlen(names);
            snprintf(names + used, sizeof names - used, "%s%s", used ? ", " : "", row.kernel);
        }
    }
    return reason_set(reason, "--kernel: '%.100s' must be a kernel of %s: %s%s", name, operation, names,
                      hint(name, names, near));
}

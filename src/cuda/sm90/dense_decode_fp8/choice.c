/* SPDX-License-Identifier: MIT */
#include "choice.h"

#include "../dense_decode/choice.h"

/* The TMA views count pairs of codes: elements of 16 bits. */
enum {
    PAIR = 2,
    LINE = 128 / PAIR,
    SHORT_LINE = 64 / PAIR,
    SCALES = 16 / PAIR,
    LINES = 4,
    KEYS = 64 /* of a block */,
    ALIGNMENT = 16
};
enum { MOST_LANES = 1 << 20 };

/* Tile sizes, and the time of a call on an H200 with each, in nanoseconds: per call, and per block of
 * keys. (Measured with 1 to 16 requests of 1024 to 16384 keys and 16 to 256 rows, 26 November 2026.) */
static const struct {
    int32_t rows;
    int64_t call, block;
} tiles_of[] = {{16, 12700, 1080}, {32, 13900, 1170}, {64, 16500, 1330}};
enum { TILES = sizeof tiles_of / sizeof *tiles_of };

int32_t sm90_dense_decode_fp8_rows(const struct attention_problem *p)
{
    int i = 0;
    while (i < TILES - 1 && tiles_of[i].rows < p->s_q * p->h_q) i++;
    return tiles_of[i].rows;
}

int32_t sm90_dense_decode_fp8_rows_join_in_kernel(const struct attention_problem *p, int32_t sms)
{
    const int32_t most = sm90_dense_decode_fp8_rows(p);
    const int64_t blocks = p->b * ((p->capacity - 1) / KEYS + 1);
    int32_t best = most;
    int64_t least = INT64_MAX;
    for (int i = 0; i < TILES && tiles_of[i].rows <= most; i++) {
        const int64_t tiles = (p->s_q * p->h_q - 1) / tiles_of[i].rows + 1, workers = sms / tiles;
        if (workers < 2 * p->b) continue; /* every request has a worker, and some are left over */
        const int64_t time = tiles_of[i].call + tiles_of[i].block * ((blocks - 1) / workers + 1);
        if (time < least) best = tiles_of[i].rows, least = time;
    }
    return best;
}

static bool strides_possible(const struct attention_problem *p, int64_t bytes)
{
    const int64_t pairs = PAIR / bytes;
    const bool outer = !p->q_stride[0] || tensor_stride_possible(p->b, p->q_stride[0] / pairs);
    for (int i = 0; i < 3; i++)
        if (p->q_stride[i] % pairs) return false;
    return outer && tensor_stride_possible(p->s_q, p->q_stride[1] / pairs) &&
           tensor_stride_possible(p->h_q, p->q_stride[2] / pairs);
}

const char *sm90_dense_decode_fp8_refuses(const struct attention_problem *p, const char **argument)
{
    const struct key_source *keys = &p->keys[0];
    const bool some_keys = keys->pages > 0 && keys->page_size > 0;
    const void *const q = p->q_codes ? (const void *)p->q_codes : p->q;
    if (!p->b) return NULL;
    *argument = "kv_cache";
    if (keys->table && keys->page_size % KEYS) return "takes pages of a multiple of 64 keys";
    if (some_keys &&
        ((uintptr_t)keys->k.data % ALIGNMENT || keys->k.page_bytes % PAIR || keys->k.slot_bytes % PAIR ||
         (keys->k.page_bytes && !tensor_stride_possible(keys->pages, keys->k.page_bytes / PAIR)) ||
         !tensor_stride_possible(keys->page_size, keys->k.slot_bytes / PAIR)))
        return "takes a cache whose base and strides are multiples of 16 bytes";
    *argument = "q";
    if ((uintptr_t)q % ALIGNMENT || !strides_possible(p, p->q_codes ? 1 : PAIR))
        return "takes queries whose base and strides are multiples of 16 bytes";
    const int64_t rows = sm90_dense_decode_fp8_rows(p), tiles = (p->s_q * p->h_q - 1) / rows + 1;
    const int64_t workers = p->b > p->num_partitions ? p->b : p->num_partitions; /* > 0 */
    if (tiles > (INT32_MAX - MOST_LANES) / workers)
        return "takes fewer than 2^31 tiles of 64 rows times partitions";
    if (p->q_codes && !sm90_dense_decode_q_heads(p))
        return "takes codes of several tokens where their heads are contiguous, or where h_q divides 64 or "
               "is a multiple of it";
    *argument = "out";
    if ((uintptr_t)p->out % ALIGNMENT || !tensor_stride_possible(p->b, p->out_stride[0]) ||
        !tensor_stride_possible(p->s_q, p->out_stride[1]) ||
        !tensor_stride_possible(p->h_q, p->out_stride[2]))
        return "takes an output whose base and strides are multiples of 16 bytes";
    *argument = "softmax_scale";
    if (!(p->scale >= 1e-30f)) return "takes a scale of at least 1e-30";
    return NULL;
}

struct tensor_view sm90_dense_decode_fp8_q_view(const struct attention_problem *p, int32_t rows, bool end)
{
    struct attention_problem pairs = *p;
    const int32_t line = end ? SHORT_LINE : LINE;
    pairs.q = (const uint16_t *)(const void *)(p->q_codes + (end ? p->d_v : 0));
    for (int i = 0; i < 3; i++) pairs.q_stride[i] /= PAIR;
    struct tensor_view view = sm90_dense_decode_q_view(&pairs);
    view.element = ELEMENT_BF16;
    view.size[0] = view.stride[3] = view.box[0] = line;
    view.size[3] = view.box[3] = end ? 1 : LINES;
    if (rows < view.box[1]) view.box[1] = rows;
    view.box[2] = view.box[2] > 1 ? rows / view.box[1] : 1;
    return view;
}

/* Returns a view of `lines` lines of every key, from byte `at` of the key on. */
static struct tensor_view view_of_keys(const struct attention_problem *p, int32_t at, int32_t line,
                                       int32_t lines)
{
    const struct key_source *keys = &p->keys[0];
    const bool some_keys = keys->pages && keys->page_size; /* an empty cache may have no address */
    const void *const q = p->q_codes ? (const void *)p->q_codes : p->q;
    return (struct tensor_view){
        .data = some_keys ? (const void *)(keys->k.data + at) : q,
        .element = ELEMENT_BF16,
        .size = {line, keys->page_size, lines, keys->pages > 0 && !keys->k.page_bytes ? 1 : keys->pages, 1},
        .stride = {1, keys->k.slot_bytes / PAIR, line, keys->k.page_bytes / PAIR, 0},
        .box = {line, KEYS, lines, 1, 1},
    };
}

struct tensor_view sm90_dense_decode_fp8_key_view(const struct attention_problem *p, bool end)
{
    const struct kv_layout layout = kv_layout_of(p->format, 0);
    if (!end) return view_of_keys(p, 0, LINE, LINES);
    return p->format == KV_FP8_656 ? view_of_keys(p, layout.rope_offset, LINE, 1)
                                   : view_of_keys(p, (int32_t)p->d_v, SHORT_LINE, 1);
}

struct tensor_view sm90_dense_decode_fp8_scale_view(const struct attention_problem *p)
{
    return view_of_keys(p, kv_layout_of(p->format, 0).scale_offset, SCALES, 1);
}

/* SPDX-License-Identifier: MIT
 *
 * Tests the host side of Hopper's dense decode: the calls it accepts, the TMA maps of queries and cache,
 * whether the boxes that the kernel loads hold the rows and keys that it expects, the driver's arguments,
 * and the dispatch.
 */
#include "fake_cuda/launches.h"

#include "cuda/kernels.h"
#include "cuda/sm90/dense_decode/choice.h"

#include "random.h"

#include <math.h>

/* ---- Problems ------------------------------------------------------------------------------------------- */

enum { ROWS = SM90_DENSE_DECODE_ROWS, COLUMNS = 64 /* per line */ };

struct sizes {
    int64_t b, s_q, h_q, h_kv, d_qk, pages, page_size;
};

/* Contiguous, with a block table. */
static struct attention_problem problem_of(const struct sizes *s)
{
    struct attention_problem p =
        SHAPE_OF(attention_problem, .b = s->b, .s_q = s->s_q, .h_q = s->h_q, .h_kv = s->h_kv, .d_qk = s->d_qk,
                 .d_v = 512, .capacity = 4 * s->page_size, .element = ELEMENT_BF16,
                 .device = {FMLA_DEVICE_CUDA, 0}, .q = (const uint16_t *)(const void *)region(0),
                 .q_stride = {s->s_q * s->h_q * s->d_qk, s->h_q * s->d_qk, s->d_qk},
                 .out = (uint16_t *)(void *)region(5),
                 .out_stride = {s->s_q * s->h_q * 512, s->h_q * 512, 512}, .scale = 0.125f);
    p.keys[0] = SHAPE_OF(key_source, .kind = KEYS_PAGED, .pages = s->pages, .page_size = s->page_size,
                         .k = {(const uint8_t *)region(1), 2 * s->page_size * s->h_kv * s->d_qk,
                               2 * s->h_kv * s->d_qk, 2 * s->d_qk},
                         .table = (const int32_t *)(const void *)region(2), .table_stride = {4},
                         .lengths = (const int32_t *)(const void *)region(3), .capacity = 4 * s->page_size);
    return p;
}

static const struct sizes plain_sizes = {3, 2, 16, 2, 576, 9, 64};

/* ---- What it takes -------------------------------------------------------------------------------------- */

/* Checks the argument and message with which the problem is refused; argument NULL: it is accepted. */
static void check_taken(const char *label, const struct attention_problem *p, const char *argument,
                        const char *words)
{
    const char *named = "";
    const char *why = sm90_dense_decode_refuses(p, &named);
    CHECK(argument ? why && !strcmp(named, argument) && has_words(why, words) : !why, "%s: %s: %s", label,
          named, why ? why : "taken");
}

/* Changes one thing in an accepted problem. */
#define PROBLEM(...)                                                                                         \
    struct attention_problem p = problem_of(&plain_sizes);                                                   \
    __VA_ARGS__
#define REFUSED(argument, words, ...)                                                                        \
    do {                                                                                                     \
        PROBLEM(__VA_ARGS__);                                                                                \
        check_taken(#__VA_ARGS__, &p, argument, words);                                                      \
    } while (0)
#define TAKEN(...) REFUSED(NULL, NULL, __VA_ARGS__)

static const uint8_t *uneven_bytes(const void *data)
{
    return (const uint8_t *)data + 8;
}

static const uint16_t *uneven(const void *data)
{
    return (const uint16_t *)(const void *)((const char *)data + 8);
}

static void takes_caches(void)
{
    static const char aligned[] = "base and strides|16 bytes", pages[] = "multiple of 64 keys";
    TAKEN();
    TAKEN(p.keys[0].page_size = 128);
    TAKEN(p.keys[0].page_size = 256);
    REFUSED("kv_cache", pages, p.keys[0].page_size = 16);
    REFUSED("kv_cache", pages, p.keys[0].page_size = 61);
    REFUSED("kv_cache", pages, p.keys[0].page_size = 96);
    TAKEN(p.keys[0].table = NULL, p.keys[0].page_size = 61); /* one page per request */
    TAKEN(p.keys[0].table = NULL, p.keys[0].page_size = 16);
    REFUSED("kv_cache", aligned, p.keys[0].k.data = uneven_bytes(p.keys[0].k.data));
    REFUSED("kv_cache", aligned, p.keys[0].k.page_bytes += 8);
    REFUSED("kv_cache", aligned, p.keys[0].k.slot_bytes += 8);
    REFUSED("kv_cache", aligned, p.keys[0].k.head_bytes += 8);
    REFUSED("kv_cache", aligned, p.keys[0].k.slot_bytes = 0);
    REFUSED("kv_cache", aligned, p.keys[0].k.head_bytes = 0);
    REFUSED("kv_cache", aligned, p.keys[0].k.page_bytes = INT64_C(1) << 40); /* 2^40 bytes */
    TAKEN(p.keys[0].k.page_bytes = (INT64_C(1) << 40) - 16);
    TAKEN(p.keys[0].k.page_bytes = 0); /* every page is the same */
    TAKEN(p.keys[0].k.page_bytes = 8, p.keys[0].pages = 1);
    TAKEN(p.keys[0].k.slot_bytes += 16, p.keys[0].k.page_bytes += 32);
    TAKEN(p.h_kv = 1, p.keys[0].k.head_bytes = 6);
    TAKEN(p.keys[0].pages = 0, p.keys[0].k.data = NULL); /* an empty cache is not read */
    TAKEN(p.keys[0].pages = 0, p.keys[0].k.data = uneven_bytes(p.keys[0].k.data), p.keys[0].k.slot_bytes = 6);
}

static void takes_queries(void)
{
    static const char aligned[] = "base and strides|16 bytes", heads[] = "several tokens|64";
    REFUSED("q", aligned, p.q = uneven(p.q));
    for (int i = 0; i < 3; i++) REFUSED("q", aligned, p.q_stride[i] += 4);
    REFUSED("q", aligned, p.q_stride[1] = 0);
    REFUSED("q", aligned, p.q_stride[2] = 0);
    REFUSED("q", aligned, p.q_stride[0] = INT64_C(1) << 39);
    TAKEN(p.q_stride[0] = 0); /* every request is the same */
    TAKEN(p.q_stride[0] = 4, p.b = 1);
    TAKEN(p.q_stride[1] = 3, p.s_q = 1);
    TAKEN(p.q_stride[2] = 3, p.h_q = p.h_kv = 1);
    TAKEN(p.q_stride[1] += 8, p.q_stride[0] += 16); /* 8 heads per key head, which divide 64 */
    TAKEN(p.h_q = 40, p.h_kv = 1, p.q_stride[1] = 40 * 576, p.q_stride[0] = 80 * 576);
    REFUSED("q", heads, p.h_q = 40, p.h_kv = 1, p.q_stride[1] = 41 * 576, p.q_stride[0] = 82 * 576);
    REFUSED("q", heads, p.h_q = 80, p.q_stride[1] = 80 * 576, p.q_stride[0] = 160 * 576);
    REFUSED("q", heads, p.h_q = 192, p.q_stride[1] = 192 * 576, p.q_stride[0] = 384 * 576);
    TAKEN(p.h_q = 256, p.q_stride[1] = 256 * 576, p.q_stride[0] = 512 * 576);
    TAKEN(p.h_q = 80,
          p.s_q = 1); /* one token: rows past the key head's belong to another and are discarded */
    /* As many CTAs as fit an int, with 2^20 to spare for lanes. */
    const int64_t most = (INT32_MAX - (1 << 20)) / 2;
    TAKEN(p.b = most);
    REFUSED("q", "2^31 tiles", p.b = most + 1);
    TAKEN(p.num_partitions = (int32_t)most);
    REFUSED("q", "2^31 tiles", p.num_partitions = (int32_t)most + 1);
    REFUSED("q", "2^31 tiles", p.s_q = 9, p.num_partitions = (int32_t)(most / 2 + 1)); /* 72 rows */
    TAKEN(p.s_q = 8, p.num_partitions = (int32_t)(most / 2 + 1));
}

static void takes_the_rest(void)
{
    static const char aligned[] = "output|base and strides|16 bytes";
    REFUSED("out", aligned, p.out++);
    for (int i = 0; i < 3; i++) REFUSED("out", aligned, p.out_stride[i] += 4);
    TAKEN(p.out_stride[0] += 8);
    TAKEN(p.out_stride[0] = 3, p.b = 1);
    TAKEN(p.out_stride[1] = 3, p.s_q = 1);
    TAKEN(p.scale = 1e-30f);
    REFUSED("softmax_scale", "at least 1e-30", p.scale = 0.99e-30f);
    REFUSED("softmax_scale", "at least 1e-30", p.scale = -0.125f);
    REFUSED("softmax_scale", "at least 1e-30", p.scale = NAN);
    /* Without requests nothing is checked. */
    TAKEN(p.b = 0, p.keys[0].page_size = 61, p.q = uneven(p.q),
          p.keys[0].k.data = uneven_bytes(p.keys[0].k.data), p.out++, p.scale = -1.0f);
}

/* ---- Where boxes lie ------------------------------------------------------------------------------------- */

/* Returns the index in the tensor of the element that TMA loads as element `at` of the box at `place`; -1:
 * a zero, because it is outside. Innermost dimension first, in memory as in coordinates. */
static int64_t element_of(const struct tensor_view *v, const int64_t place[5], int64_t at)
{
    int64_t offset = 0;
    for (int i = 0; i < TENSOR_DIMS; i++) {
        const int64_t x = place[i] + at % v->box[i];
        at /= v->box[i];
        if (x < 0 || x >= v->size[i]) return -1;
        offset += x * (i ? v->stride[i] : 1);
    }
    return offset;
}

static int64_t elements_of_box(const struct tensor_view *v)
{
    int64_t count = 1;
    for (int i = 0; i < TENSOR_DIMS; i++) count *= v->box[i];
    return count;
}

/* Returns the last element that a box can load. */
static int64_t last_element(const struct tensor_view *v)
{
    int64_t last = v->size[0] - 1;
    for (int i = 1; i < TENSOR_DIMS; i++) last += (v->size[i] - 1) * v->stride[i];
    return last;
}

static int64_t far(int64_t size, int64_t stride)
{
    return size > 1 ? (size - 1) * stride : 0;
}

/* Checks the queries of a tile: the coordinates are those of produce_queries
 * (sm90/dense_decode/producer.cuh). */
static int64_t wrong_query(const struct attention_problem *p, int64_t request, int64_t kv_head, int64_t tile)
{
    const struct tensor_view v = sm90_dense_decode_q_view(p);
    const int64_t q_heads = sm90_dense_decode_q_heads(p), group = p->h_q / p->h_kv;
    const int64_t rows = p->s_q * group, row = tile * ROWS, request_step = p->q_stride[0] != 0;
    if (elements_of_box(&v) != 2 * COLUMNS * ROWS) return -2;
    for (int64_t unit = 0; 2 * unit < p->d_qk / COLUMNS; unit++) {
        const int64_t place[5] = {0, kv_head * q_heads + row % q_heads, row / q_heads, 2 * unit,
                                  request * request_step};
        for (int64_t at = 0; at < 2 * COLUMNS * ROWS; at++) {
            const int64_t mine = row + at / COLUMNS % ROWS;
            const int64_t column = (2 * unit + at / COLUMNS / ROWS) * COLUMNS + at % COLUMNS;
            if (mine >= rows) continue; /* discarded */
            const int64_t expected = request * p->q_stride[0] + mine / group * p->q_stride[1] +
                                     (kv_head * group + mine % group) * p->q_stride[2] + column;
            if (element_of(&v, place, at) != (column < p->d_qk ? expected : -1)) return mine;
        }
    }
    return -1;
}

/* Checks 64 keys of a page: the coordinates are those of block_coord and load_block. */
static int64_t wrong_key(const struct attention_problem *p, int64_t page, int64_t kv_head, int64_t block)
{
    const struct key_view *k = &p->keys[0].k;
    const int64_t first = block * 64, page_step = p->keys[0].k.page_bytes != 0;
    for (int64_t group = 0; group < p->d_qk / COLUMNS; group += 2) {
        const int32_t groups = group < 8 ? 2 : 1; /* those past d_v have their own map */
        const struct tensor_view v = sm90_dense_decode_key_view(p, groups);
        const int64_t place[5] = {0, first, group, page * page_step, kv_head};
        if (elements_of_box(&v) != groups * COLUMNS * 64) return -2;
        for (int64_t at = 0; at < groups * COLUMNS * 64; at++) {
            const int64_t key = first + at / COLUMNS % 64;
            const int64_t column = (group + at / COLUMNS / 64) * COLUMNS + at % COLUMNS;
            const int64_t expected =
                (page * k->page_bytes + key * k->slot_bytes + kv_head * k->head_bytes) / 2 + column;
            if (element_of(&v, place, at) != (key < p->keys[0].page_size ? expected : -1)) return key;
        }
    }
    return -1;
}

/* Each form in which 64 rows are one box, with gaps between tokens. */
static const struct {
    struct sizes s;
    int64_t gap, q_heads; /* q_heads: heads that the map treats as one token's */
} forms[] = {
    {{3, 1, 128, 1, 576, 9, 64}, 0, 128}, {{3, 1, 5, 1, 512, 9, 64}, 0, 5}, /* one key head */
    {{3, 2, 40, 1, 576, 9, 64}, 0, 80},                                     /* tokens follow each other */
    {{3, 2, 16, 1, 576, 9, 64}, 8, 16},   {{3, 2, 128, 1, 576, 9, 64}, 8, 128},
    {{3, 2, 64, 1, 576, 9, 64}, 8, 64},   {{3, 1, 24, 2, 576, 9, 64}, 0, 12}, /* key heads */
    {{3, 5, 16, 2, 576, 9, 64}, 0, 8},    {{3, 5, 256, 2, 576, 9, 256}, 0, 128},
    {{3, 5, 8, 8, 512, 9, 64}, 0, 1},     {{3, 7, 1, 1, 512, 9, 64}, 0, 7},
    {{3, 7, 1, 1, 512, 9, 64}, 512, 7}, /* one head has no head stride */
};
enum { FORMS = sizeof forms / sizeof forms[0] };

static struct attention_problem problem_of_form(int i)
{
    struct attention_problem p = problem_of(&forms[i].s);
    p.q_stride[1] += forms[i].gap, p.q_stride[0] = p.s_q * p.q_stride[1];
    if (p.h_q == 1) p.q_stride[2] = 5;
    const int64_t heads = sm90_dense_decode_q_heads(&p);
    CHECK(heads == forms[i].q_heads, "form %d: %" PRId64 " heads", i, heads);
    check_taken("a form", &p, NULL, NULL);
    const struct tensor_view v = sm90_dense_decode_q_view(&p);
    CHECK(v.data == p.q && v.element == p.element, "form %d: other data", i);
    return p;
}

static int64_t padded(struct random_state *random, int64_t stride)
{
    return stride + (random_between(random, 0, 3) ? 0 : 8 * random_between(random, 1, 9));
}

static struct attention_problem random_problem(struct random_state *random)
{
    static const int64_t groups[] = {1, 2, 3, 4, 8, 12, 16, 32, 48, 64, 80, 96, 128, 192},
                         pages[] = {64, 128, 256, 16, 61};
    struct sizes s =
        SHAPE_OF(sizes, .b = random_between(random, 1, 3),
                 .s_q = random_between(random, 1, random_between(random, 1, 9)),
                 .h_kv = random_between(random, 0, 1) ? 1 : random_between(random, 2, 4),
                 .d_qk = random_between(random, 0, 1) ? 576 : 512, .pages = random_between(random, 1, 4),
                 .page_size = pages[random_between(random, 0, 4)]);
    s.h_q = s.h_kv * groups[random_between(random, 0, 13)];
    struct attention_problem p = problem_of(&s);
    p.q_stride[2] = padded(random, s.d_qk);
    p.q_stride[1] = padded(random, s.h_q * p.q_stride[2]);
    p.q_stride[0] = random_between(random, 0, 7) ? padded(random, s.s_q * p.q_stride[1]) : 0;
    if (s.h_q == 1) p.q_stride[2] = random_between(random, 0, 5);
    const int64_t head = padded(random, s.d_qk), slot = padded(random, s.h_kv * head);
    const int64_t page = random_between(random, 0, 7) ? padded(random, s.page_size * slot) : 0;
    p.keys[0].k.page_bytes = 2 * page, p.keys[0].k.slot_bytes = 2 * slot, p.keys[0].k.head_bytes = 2 * head;
    if (random_between(random, 0, 2) == 0) p.keys[0].table = NULL;
    return p;
}

/* ---- What the driver is passed ---------------------------------------------------------------------------- */

static void enter(struct cuda_scope *scope)
{
    CHECK_OK(cuda_enter("test", "x", 0, scope));
}

static void boxes(void)
{
    struct cuda_scope scope;
    struct random_state random = {90};
    int encoded = 0, taken = 0, merged = 0, whole_tokens = 0, shared = 0;
    enter(&scope);
    for (int i = 0; i < 2000; i++) {
        struct attention_problem p = i < FORMS ? problem_of_form(i) : random_problem(&random);
        const char *argument;
        const bool empty = i >= FORMS && i % 16 == 0;
        if (empty) p.keys[0].pages = 0, p.keys[0].k.data = NULL;
        if (sm90_dense_decode_refuses(&p, &argument)) continue;
        const struct tensor_view q = sm90_dense_decode_q_view(&p), keys = sm90_dense_decode_key_view(&p, 2),
                                 rope = sm90_dense_decode_key_view(&p, 1);
        CHECK(keys.data == (empty ? (const void *)p.q : p.keys[0].k.data) && (keys.size[3] == 0) == empty,
              "%" PRId64 " pages at %p", keys.size[3], keys.data);
        /* What a call accepts, the driver accepts. */
        struct tensor_map map;
        CHECK_OK(tensor_map_make("test", &scope, "x", &q, &map));
        CHECK_OK(tensor_map_make("test", &scope, "x", &keys, &map));
        CHECK_OK(tensor_map_make("test", &scope, "x", &rope, &map));
        encoded++;
        if (empty || i >= 640) continue;
        taken++, shared += !p.q_stride[0] && p.b > 1;
        merged += p.s_q > 1 && sm90_dense_decode_q_heads(&p) == p.s_q * p.h_q;
        whole_tokens += q.box[2] > 1;
        const int64_t tiles = (p.s_q * (p.h_q / p.h_kv) + ROWS - 1) / ROWS;
        const int64_t request = random_between(&random, 0, p.b - 1);
        const int64_t kv_head = random_between(&random, 0, p.h_kv - 1);
        for (int64_t tile = 0; tile < tiles; tile++) {
            const int64_t wrong = wrong_query(&p, request, kv_head, tile);
            CHECK(wrong == -1,
                  "b %" PRId64 ", s_q %" PRId64 ", h_q %" PRId64 ", h_kv %" PRId64 ": tile %" PRId64
                  ": row %" PRId64 " (-2: the box)",
                  p.b, p.s_q, p.h_q, p.h_kv, tile, wrong);
        }
        const struct key_view *k = &p.keys[0].k;
        const int64_t blocks = (p.keys[0].page_size + 63) / 64,
                      page = random_between(&random, 0, p.keys[0].pages - 1);
        const int64_t wrong = wrong_key(&p, page, kv_head, random_between(&random, 0, blocks - 1));
        CHECK(wrong == -1,
              "pages of %" PRId64 ", h_kv %" PRId64 ", d_qk %" PRId64 ": key %" PRId64 " (-2: the box)",
              p.keys[0].page_size, p.h_kv, p.d_qk, wrong);
        /* No box at any coordinates reads past the tensor. */
        CHECK_ALL({last_element(&q), far(p.b, p.q_stride[0]) + far(p.s_q, p.q_stride[1]) +
                                         far(p.h_q, p.q_stride[2]) + p.d_qk - 1},
                  {last_element(&keys), far(p.keys[0].pages, k->page_bytes / 2) +
                                            far(p.keys[0].page_size, k->slot_bytes / 2) +
                                            far(p.h_kv, k->head_bytes / 2) + p.d_qk - 1});
    }
    cuda_leave(&scope);
    CHECK(encoded > 500 && taken > 200 && merged > 20 && whole_tokens > 20 && shared > 5,
          "%d problems taken, %d merged, %d of whole tokens, %d of shared queries", taken, merged,
          whole_tokens, shared);
}

static void encoded(void)
{
    struct cuda_scope scope;
    struct tensor_map map;
    enter(&scope);
    struct tensor_view v =
        SHAPE_OF(tensor_view, .data = region(0), .element = ELEMENT_FP16, .size = {64, 100, 9, 1, 7},
                 .stride = {12345, 576, 64, 3, 65536}, .box = {64, 32, 2, 1, 1});
    CHECK_OK(tensor_map_make("test", &scope, "x", &v, &map));
    const struct fake_tensor *passed = passed_of(&map);
    CHECK_ALL({passed->type, CU_TENSOR_FLOAT16}, {passed->rank, 5}, {offset(passed->base, 0), 0},
              {passed->swizzle, CU_TENSOR_SWIZZLE_128B}, {passed->interleave, CU_TENSOR_INTERLEAVE_NONE},
              {passed->promotion, CU_TENSOR_PROMOTION_128B}, {passed->fill, CU_TENSOR_FILL_ZERO});
    for (int i = 0; i < TENSOR_DIMS; i++) {
        CHECK_ALL({passed->sizes[i], v.size[i]}, {passed->box[i], v.box[i]}, {passed->steps[i], 1});
    }
    CHECK_ALL({passed->strides[0], 2 * 576}, {passed->strides[1], 2 * 64},
              {passed->strides[2], 16 /* single element: never used */}, {passed->strides[3], 2 * 65536});
    /* An empty tensor is represented by one element. */
    v.element = ELEMENT_BF16, v.size[4] = 0;
    CHECK_OK(tensor_map_make("test", &scope, "x", &v, &map));
    passed = passed_of(&map);
    CHECK_EQ(passed->type, CU_TENSOR_BFLOAT16);
    for (int i = 0; i < TENSOR_DIMS; i++) CHECK_EQ(passed->sizes[i], 1);
    for (int i = 0; i < TENSOR_DIMS - 1; i++) CHECK_EQ(passed->strides[i], 16);
    cuda_leave(&scope);
}

/* A driver refusal is returned as its error, with the tensor's name. */
static void not_encoded(void)
{
    struct cuda_scope scope;
    struct tensor_map map;
    const struct tensor_view good =
        SHAPE_OF(tensor_view, .data = region(0), .element = ELEMENT_BF16, .size = {64, 8, 8, 8, 8},
                 .stride = {1, 64, 512, 4096, 32768}, .box = {64, 8, 8, 1, 1});
    enter(&scope);
#define MAKE(...)                                                                                            \
    struct tensor_view v = good;                                                                             \
    __VA_ARGS__;                                                                                             \
    const fmla_status status = tensor_map_make("test", &scope, "the_tensor", &v, &map)
#define NOT_MADE(...)                                                                                        \
    do {                                                                                                     \
        MAKE(__VA_ARGS__);                                                                                   \
        check_rejected(#__VA_ARGS__, status, FMLA_DEVICE_ERROR, "test", "cuda:0",                            \
                       "cuTensorMapEncodeTiled of the_tensor");                                              \
    } while (0)
    NOT_MADE(v.data = region(0) + 8);
    NOT_MADE(v.data = NULL);
    NOT_MADE(v.stride[1] = 68);
    NOT_MADE(v.stride[4] = 0);
    NOT_MADE(v.stride[4] = INT64_C(1) << 39);
    NOT_MADE(v.box[0] = 128);
    NOT_MADE(v.box[1] = 257);
    NOT_MADE(v.box[4] = 0);
    NOT_MADE(v.size[2] = (INT64_C(1) << 32) + 1);
    MAKE((void)0); /* the previous refusals were not for the unchanged part */
    CHECK_OK(status);
    CHECK_EQ(fake->tensors, 1);
    cuda_leave(&scope);
}

/* Checks that tensor_stride_possible agrees with the driver. */
static void strides(void)
{
    struct cuda_scope scope;
    struct tensor_map map;
    enter(&scope);
    const int64_t most = INT64_C(1) << 39;
    const int64_t cases[] = {0, 1, 4, 7, 8, 9, 12, 16, 576, most - 8, most - 1, most, most + 8};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int64_t size = 1; size <= 3; size++) {
            const struct tensor_view v = SHAPE_OF(tensor_view, .data = region(0), .size = {64, size, 1, 1, 1},
                                                  .stride = {1, cases[i], 8, 8, 8}, .box = {64, 64, 1, 1, 1});
            CHECK(tensor_stride_possible(size, cases[i]) ==
                      (tensor_map_make("test", &scope, "x", &v, &map) == FMLA_OK),
                  "size %" PRId64 ", stride %" PRId64, size, cases[i]);
        }
    CHECK(!tensor_stride_possible(2, -8), "%s", "a negative stride");
    cuda_leave(&scope);
}

/* ---- Dispatch --------------------------------------------------------------------------------------------- */

/* Calls with one property that Hopper's kernel does not support. */
#define DISPATCHED(argument, of_layout, of_call)                                                             \
    do {                                                                                                     \
        struct dense_decode_call c = {0};                                                                    \
        struct layout layout = dense_layout(SMALL_SIZES);                                                    \
        of_layout;                                                                                           \
        decode_call(&c, layout);                                                                             \
        of_call;                                                                                             \
        check_left(#of_layout " " #of_call, OP_DENSE_DECODE, &c.args, "cuda-sm90", "cuda-sm80", argument,    \
                   "kernel cuda-sm90 takes");                                                                \
        CHECK_EQ(fake->tensors, 3); /* from the first case */                                                \
    } while (0)

static void dispatched(void)
{
    DISPATCHED(NULL, (void)0, (void)0);
    DISPATCHED("kv_cache", layout.page_size = 61, (void)0);
    DISPATCHED("kv_cache", (void)0, c.kv_cache.strides[0] += 4);
    DISPATCHED("q", (void)0, c.q.tensor.byte_offset = 8);
    DISPATCHED("q", (layout.s_q = 2, layout.h_q = 24, layout.h_kv = 2), (void)0);
    DISPATCHED("out", (void)0, c.out.tensor.byte_offset = 2);
    DISPATCHED("softmax_scale", (void)0, c.args.softmax_scale = -0.5f);
}

static void forced_elsewhere(void)
{
    fake->capability = 100;
    SMALL_CALL(c);
    c.args.kernel = "cuda-sm90";
    check_rejected("forced", dense_decode_run(&c), FMLA_UNSUPPORTED, "dense_decode", "q",
                   "kernel cuda-sm90|compute capability is not 9.0");
    CHECK_EQ(fake->launches, 0);
}

int main(int argc, char **argv)
{
    return RUN_SCENARIOS(argc, argv, "test_cuda_sm90", takes_caches, takes_queries, takes_the_rest, boxes,
                         encoded, not_encoded, strides, dispatched, forced_elsewhere);
}

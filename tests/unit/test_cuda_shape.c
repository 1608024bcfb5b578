/* SPDX-License-Identifier: MIT
 *
 * Tests the choice of tile shape in the portable dense decode: the table, and the choice for every number
 * of rows and amount of shared memory. "--names" prints "image kernel" of every kernel that the library
 * may launch.
 */
#include "check.h"

#include "cuda/kernels.h"
#include "cuda/sm80/latent/shape.h"

#include "random.h"

enum { KIB_99 = 101376, KIB_163 = 166912, KIB_227 = 232448 }; /* Ada; A100; Hopper */

static void test_table(void)
{
    CHECK_EQ(latent_shapes[0].rows, 16);
    for (int i = 0; i < LATENT_SHAPE_COUNT; i++) {
        const struct latent_shape *s = &latent_shapes[i];
        CHECK(s->rows % 16 == 0 && s->warps % (s->rows / 16) == 0 && s->most_stages >= 2, "%dx%d", s->rows,
              s->keys);
        CHECK(!i || s->rows > s[-1].rows || (s->rows == s[-1].rows && s->keys > s[-1].keys),
              "%dx%d: the order", s->rows, s->keys);
    }
    CHECK(latent_shared_bytes(&latent_shapes[0], LATENT_TABLE, 2) <= KIB_99 - 1024, "%d bytes",
          latent_shared_bytes(&latent_shapes[0], LATENT_TABLE, 2));
}

static void test_bytes(void)
{
    const struct latent_shape narrow = {16, 32, 4, 5, 0}, deep = {16, 64, 8, 5, 1}, wide = {64, 64, 8, 5, 0};
    CHECK_EQ(latent_shared_bytes(&narrow, LATENT_TABLE, 2),
             16 * 1152 + 2 * 32 * 1152 + 16 * 128 + 384 /* 4 * 16 * 4 + 16 * 4, rounded up to lines */);
    CHECK_EQ(latent_shared_bytes(&deep, LATENT_TABLE, 3), 3 * 64 * 1152 + 16 * 128 + 640);
    CHECK_EQ(latent_shared_bytes(&wide, LATENT_TABLE, 2),
             64 * 1152 + 2 * 64 * 1152 + 64 * 128 + 2 * 64 * 4 + 64 * 4);
    CHECK_EQ(latent_shared_bytes(&narrow, LATENT_TABLE_OF_BYTES, 1),
             16 * 1152 + 32 * 1152 + 32 * 704 + 16 * 128 + 384);
}

/* PTX for 8.9 or 12.1 has no larger tiles on a GPU with more shared memory than these. */
static void test_most_bytes(void)
{
    const int32_t codes[] = {80, 86, 89, 90, 100, 103, 120, 121},
                  most[] = {KIB_227, KIB_163, KIB_163, KIB_227, KIB_227, KIB_227, KIB_99, KIB_99};
    for (int i = 0; i < 8; i++) {
        CHECK(latent_bytes(KIB_227, codes[i]) == most[i], "code for %d", codes[i]);
        CHECK_EQ(latent_bytes(KIB_99, codes[i]), KIB_99);
        CHECK_EQ(LATENT_MOST_ROWS_OF_BYTES(codes[i]), codes[i] < 89 ? 32 : 64);
    }
    CHECK_EQ(latent_choose(64, INT32_MAX, LATENT_TABLE, latent_bytes(KIB_227, 89)).shape, LATENT_SHAPE_64x32);
    CHECK_EQ(latent_choose(64, INT32_MAX, LATENT_LIST, latent_bytes(KIB_227, 121)).shape, LATENT_SHAPE_16x32);
}

/* Tiles stay small in code that does not convert e4m3 by an instruction. */
static void test_most_rows(void)
{
    enum { ROWS = LATENT_MOST_ROWS_OF_BYTES(86) };
    CHECK_EQ(ROWS, 32);
    for (int32_t bytes = KIB_99; bytes <= KIB_227; bytes += 512)
        for (int64_t rows = 1; rows <= 200; rows++) {
            const struct latent_choice c = latent_choose(rows, ROWS, LATENT_TABLE_OF_BYTES, bytes);
            CHECK(latent_shapes[c.shape].rows <= ROWS && c.shared_bytes < bytes && c.stages == 1,
                  "%lld rows, %d bytes: shape %d", (long long)rows, bytes, c.shape);
        }
    CHECK_EQ(latent_choose(64, ROWS, LATENT_TABLE_OF_BYTES, KIB_163).shape, LATENT_SHAPE_32x64);
}

/* For every table: the choice fits; no other shape that fits reads the keys less often, or reads them as
 * often and leaves fewer rows of the tile idle or takes more keys at once; one more stage would not fit or
 * would not help. */
static void test_rules_of(enum latent_source kind, int64_t rows, int32_t bytes)
{
    const bool of_bytes = kind == LATENT_TABLE_OF_BYTES;
    const struct latent_choice c = latent_choose(rows, INT32_MAX, kind, bytes);
    const struct latent_shape *chosen = &latent_shapes[c.shape];
    CHECK(c.stages >= (of_bytes ? 1 : 2) && c.stages <= (of_bytes ? 1 : chosen->most_stages) &&
              c.shared_bytes < bytes && c.shared_bytes == latent_shared_bytes(chosen, kind, c.stages),
          "%lld rows, %d bytes: %d stages, %d bytes", (long long)rows, bytes, c.stages, c.shared_bytes);
    CHECK(of_bytes || c.stages == chosen->most_stages ||
              latent_shared_bytes(chosen, kind, c.stages + 1) + 1024 > bytes,
          "%lld rows, %d bytes: a stage more fits", (long long)rows, bytes);
    for (int i = 0; i < LATENT_SHAPE_COUNT; i++) {
        const struct latent_shape *s = &latent_shapes[i];
        if (!latent_stages(s, kind, bytes)) continue;
        const int64_t tiles = (rows + s->rows - 1) / s->rows;
        const int64_t chosen_tiles = (rows + chosen->rows - 1) / chosen->rows;
        const int better = s->rows > chosen->rows   ? tiles < chosen_tiles
                           : s->rows < chosen->rows ? rows <= s->rows
                                                    : s->keys > chosen->keys;
        CHECK(!better, "%lld rows, %d bytes: %dx%d is better than %dx%d", (long long)rows, bytes, s->rows,
              s->keys, chosen->rows, chosen->keys);
    }
}

static void test_rules(void)
{
    for (int32_t bytes = KIB_99; bytes <= KIB_227; bytes += 512)
        for (int64_t rows = 1; rows <= 201; rows++)
            for (int i = 0; i < 2; i++)
                test_rules_of(i ? LATENT_TABLE_OF_BYTES : LATENT_TABLE, rows > 200 ? INT64_C(1) << 31 : rows,
                              bytes);
}

/* The kernels' division of keys by the page size. */
static void test_divisor(void)
{
    struct random_state random = {77};
    static const uint32_t edges[] = {
        1, 2, 3, 61, 64, 65535, 65536, 65537, (1u << 30) + 1, INT32_MAX - 1, INT32_MAX};
    for (int i = 0; i < 20000; i++) {
        const uint32_t d = i < 11 ? edges[i] : (uint32_t)random_between(&random, 1, INT32_MAX >> i % 31);
        if (!d) continue;
        const struct divisor divisor = divisor_of(d);
        const uint32_t near = (uint32_t)(INT32_MAX / d * (uint64_t)d); /* last multiple */
        const uint32_t numbers[] = {
            0, 1, d - 1, d, near - 1, near, near / d / 2 * d, near / d / 2 * d + d - 1, INT32_MAX};
        for (size_t k = 0; k < sizeof numbers / sizeof *numbers; k++) {
            if (numbers[k] > INT32_MAX) continue;
            CHECK((uint64_t)numbers[k] * divisor.multiplier >> divisor.shift == numbers[k] / d, "%u / %u",
                  numbers[k], d);
        }
    }
}

static void print_names(void)
{
    const struct cuda_kernel *kernel;
    for (int i = 0; (kernel = cuda_kernel_at(i)); i++) printf("%s %s\n", kernel->image, kernel->name);
}

int main(int argc, char **argv)
{
    if (argc > 1 && !strcmp(argv[1], "--names")) {
        print_names();
        return 0;
    }
    test_table();
    test_bytes();
    test_rules();
    test_most_bytes();
    test_most_rows();
    test_divisor();
    return check_done("test_cuda_shape");
}

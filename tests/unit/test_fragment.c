/* SPDX-License-Identifier: MIT
 *
 * Tests the fragments and swizzles that kernels compute addresses with: every element has one holder, the
 * result of one instruction is the operand of the next, and corners are as in the PTX ISA.
 */
#include "check.h"

#include "cuda/device/fragment.h"

enum { MAX_ROWS = 64, MAX_COLUMNS = 256, MAX_N = 256 };

typedef int lane_function(int lane);
typedef int element_function(int lane, int e);

/* ---- Every element of a tile is held once --------------------------------------------------- */

static int held[MAX_ROWS][MAX_COLUMNS];

static void hold(const char *name, int rows, int columns, int row, int column)
{
    const int inside = row >= 0 && row < rows && column >= 0 && column < columns;
    CHECK(inside, "%s: row %d, column %d of %d x %d", name, row, column, rows, columns);
    if (inside) held[row][column]++;
}

static void check_held_once(const char *name, int rows, int columns)
{
    for (int row = 0; row < rows; row++)
        for (int column = 0; column < columns; column++)
            CHECK(held[row][column] == 1, "%s: row %d, column %d is held %d times", name, row, column,
                  held[row][column]);
    memset(held, 0, sizeof held);
}

static void check_fragment(const char *name, int rows, int columns, int lanes, element_function *row,
                           element_function *column)
{
    for (int lane = 0; lane < lanes; lane++)
        for (int e = 0; e < rows * columns / lanes; e++)
            hold(name, rows, columns, row(lane, e), column(lane, e));
    check_held_once(name, rows, columns);
}

static void test_fragments(void)
{
    check_fragment("mma A", 16, 16, 32, mma_a_row, mma_a_column);
    check_fragment("mma B", 16, 8, 32, mma_b_row, mma_b_column);
    check_fragment("mma C", 16, 8, 32, mma_c_row, mma_c_column);
    check_fragment("wgmma A", 64, 16, 128, wgmma_a_row, wgmma_a_column);
    for (int n = 8; n <= MAX_N; n += 8) check_fragment("wgmma D", 64, n, 128, wgmma_d_row, wgmma_d_column);
}

/* ---- ldmatrix ------------------------------------------------------------------------------- */

static const struct form {
    const char *name;
    int rows, columns;
    lane_function *row, *chunk;
} tile = {"tile", 16, 16, ldmatrix_tile_row, ldmatrix_tile_chunk},
  row_of_8 = {"8 x 32", 8, 32, ldmatrix_row_of_8, ldmatrix_chunk_of_4},
  pair = {"pair", 16, 16, ldmatrix_pair_row, ldmatrix_pair_chunk};

struct place {
    int row, column;
};

/* Returns the source of a lane's element e. */
static struct place loaded(const struct form *form, int lane, int e)
{
    const int from = ldmatrix_source(lane, e);
    return (struct place){form->row(from),
                          CHUNK_ELEMENTS * form->chunk(from) + ldmatrix_source_element(lane, e)};
}

static struct place loaded_trans(const struct form *form, int lane, int e)
{
    const int from = ldmatrix_trans_source(lane, e);
    return (struct place){form->row(from),
                          CHUNK_ELEMENTS * form->chunk(from) + ldmatrix_trans_source_element(lane, e)};
}

static void check_form(const struct form *form)
{
    for (int lane = 0; lane < 32; lane++) hold(form->name, form->rows, 4, form->row(lane), form->chunk(lane));
    check_held_once(form->name, form->rows, form->columns / CHUNK_ELEMENTS);
    for (int trans = 0; trans < 2; trans++) {
        for (int lane = 0; lane < 32; lane++)
            for (int e = 0; e < 8; e++) {
                const struct place at = (trans ? loaded_trans : loaded)(form, lane, e);
                hold(form->name, form->rows, form->columns, at.row, at.column);
            }
        check_held_once(form->name, form->rows, form->columns);
    }
}

/* A lane gets 8 elements: B's fragment twice. For keys stored in rows, B's column is the row. */
static void test_ldmatrix(void)
{
    check_form(&tile), check_form(&row_of_8), check_form(&pair);
    for (int lane = 0; lane < 32; lane++)
        for (int e = 0; e < 8; e++) {
            const int second = e / 4, b = e % 4;
            struct place at = loaded(&tile, lane, e);
            CHECK(at.row == mma_a_row(lane, e) && at.column == mma_a_column(lane, e),
                  "a tile is A of mma: lane %d, element %d: %d, %d", lane, e, at.row, at.column);
            at = loaded_trans(&tile, lane, e);
            CHECK(at.row == mma_b_row(lane, b) && at.column == mma_b_column(lane, b) + 8 * second,
                  "a tile transposed is two B side by side: lane %d, element %d: %d, %d", lane, e, at.row,
                  at.column);
            at = loaded(&row_of_8, lane, e);
            CHECK(at.column == mma_b_row(lane, b) + 16 * second && at.row == mma_b_column(lane, b),
                  "8 rows are two B along k: lane %d, element %d: %d, %d", lane, e, at.row, at.column);
            at = loaded(&pair, lane, e);
            CHECK(at.column == mma_b_row(lane, b) && at.row == mma_b_column(lane, b) + 8 * second,
                  "a pair is two B of 8 keys: lane %d, element %d: %d, %d", lane, e, at.row, at.column);
        }
}

/* ---- From one product to the next ----------------------------------------------------------- */

/* P = exp(S) is A of the second product: two adjacent C, rounded, are A of 16 keys; lanes exchange
 * nothing. */
static void test_chained(void)
{
    for (int lane = 0; lane < 32; lane++)
        for (int e = 0; e < 8; e++) {
            CHECK_ALL({mma_a_row(lane, e), mma_c_row(lane, e % 4)},
                      {mma_a_column(lane, e), mma_c_column(lane, e % 4) + 8 * (e / 4)});
        }
    for (int thread = 0; thread < WARPGROUP_THREADS; thread++)
        for (int e = 0; e < MAX_N / 2; e++) {
            CHECK_ALL({wgmma_d_row(thread, e), wgmma_a_row(thread, e % 8)},
                      {wgmma_d_column(thread, e), wgmma_a_column(thread, e % 8) + 16 * (e / 8)});
        }
}

/* ---- Corners, from the figures of the PTX ISA ------------------------------------------------ */

static void test_corners(void)
{
#define PLACE(name)  #name, name##_row, name##_column
#define SOURCE(name) #name, name##_source, name##_source_element
    static const struct {
        const char *name;
        element_function *row_of, *column_of;
        int count;
        struct {
            int lane, e, row, column;
        } at[6];
    } corners[] = {
        {PLACE(mma_a),
         6,
         {{0, 0, 0, 0}, {3, 1, 0, 7}, {0, 2, 8, 0}, {0, 4, 0, 8}, {28, 3, 15, 1}, {31, 7, 15, 15}}},
        {PLACE(mma_b), 5, {{0, 0, 0, 0}, {3, 1, 7, 0}, {0, 2, 8, 0}, {4, 0, 0, 1}, {31, 3, 15, 7}}},
        {PLACE(mma_c), 4, {{1, 1, 0, 3}, {28, 0, 7, 0}, {0, 2, 8, 0}, {31, 3, 15, 7}}},
        {PLACE(wgmma_a), 4, {{0, 2, 8, 0}, {0, 4, 0, 8}, {32, 0, 16, 0}, {127, 7, 63, 15}}},
        {PLACE(wgmma_d),
         5,
         {{3, 1, 0, 7}, {64, 2, 40, 0}, {0, 4, 0, 8}, {96, 0, 48, 0}, {127, 127, 63, 255}}},
        {SOURCE(ldmatrix), 3, {{0, 2, 8, 0}, {31, 7, 31, 7}, {1, 0, 0, 2}}},
        {SOURCE(ldmatrix_trans), 2, {{1, 0, 2, 0}, {4, 1, 1, 1}}}};
    for (size_t k = 0; k < sizeof corners / sizeof corners[0]; k++)
        for (int i = 0; i < corners[k].count; i++) {
            const int lane = corners[k].at[i].lane, e = corners[k].at[i].e;
            const int row = corners[k].row_of(lane, e), column = corners[k].column_of(lane, e);
            CHECK(row == corners[k].at[i].row && column == corners[k].at[i].column,
                  "%s: lane %d, element %d is at %d, %d, expected %d, %d", corners[k].name, lane, e, row,
                  column, corners[k].at[i].row, corners[k].at[i].column);
        }
}

/* ---- Slots ---------------------------------------------------------------------------------- */

static void test_slots(void)
{
    enum { COLUMNS = 512, COLUMNS_OF_C = 8 };
    static int taken[COLUMNS];
    for (int column = 0; column < COLUMNS; column++) {
        const int position = part_position(column);
        const int inside = position / 16 == column / 16 && position >= 0 && position < COLUMNS;
        CHECK(inside, "slot: column %d at %d", column, position);
        if (inside) taken[position]++;
        CHECK_EQ(part_column(position), column);
    }
    for (int i = 0; i < COLUMNS; i++) CHECK(taken[i] == 1, "slot: %d columns at %d", taken[i], i);
    /* A lane's elements of a row in two neighbouring C's are 16 aligned bytes. */
    for (int first = 0; first < COLUMNS; first += 2 * COLUMNS_OF_C)
        for (int lane = 0; lane < WARP_LANES; lane++) {
            CHECK_EQ(part_position_of_lane(lane) % 4, 0);
            for (int e = 0; e < 4; e++) {
                const int column = first + COLUMNS_OF_C * (e / 2) + mma_c_column(lane, e % 2);
                CHECK_EQ(part_position(column), first + part_position_of_lane(lane) + e);
            }
        }
    CHECK_ALL({part_position(1), 1}, {part_position(2), 4}, {part_position(8), 2}, {part_position(23), 29},
              {part_position(511), 511});
}

/* A lane of four has eight upper halves in the first and eight in the second half of every 64. Their third bytes
 * are 16 in a row, so each position is taken once. */
static void test_third_bytes(void)
{
    enum { COLUMNS = 512, TILE = 64, LANES = 4 };
    for (int first = 0; first < COLUMNS; first += TILE)
        for (int lane = 0; lane < LANES; lane++)
            for (int e = 0; e < 16; e++)
                CHECK_EQ(third_byte_position(first + TILE / 2 * (e / 8) + 8 * lane + e % 8),
                         first + 16 * lane + e);
    CHECK_ALL({third_byte_position(7), 7}, {third_byte_position(8), 16}, {third_byte_position(32), 8},
              {third_byte_position(511), 511});
}

/* ---- Swizzles ------------------------------------------------------------------------------- */

static const struct swizzle {
    const char *name;
    uint32_t (*offset)(uint32_t row, uint32_t chunk);
    uint32_t row_bytes, bits; /* bits of a byte address that change */
} swizzles[] = {{"swizzle 128", swizzle_128, 128, 0x70u},
                {"swizzle 64", swizzle_64, 64, 0x30u},
                {"swizzle 32", swizzle_32, 32, 0x10u}};

static void test_swizzle(const struct swizzle *s)
{
    enum { ROWS = 64, GROUPS = 8 };
    const uint32_t chunks = s->row_bytes / CHUNK_BYTES;
    static int taken[ROWS * LINE_BYTES / CHUNK_BYTES];
    memset(taken, 0, sizeof taken);
    for (uint32_t row = 0; row < ROWS; row++)
        for (uint32_t chunk = 0; chunk < chunks; chunk++) {
            const uint32_t offset = s->offset(row, chunk), plain = row * s->row_bytes + chunk * CHUNK_BYTES;
            CHECK(offset == (plain ^ (plain >> 3 & s->bits)), "%s: row %u, chunk %u at %u", s->name,
                  (unsigned)row, (unsigned)chunk, (unsigned)offset);
            const int inside = offset % CHUNK_BYTES == 0 && offset < ROWS * s->row_bytes;
            CHECK(inside, "%s: row %u, chunk %u at %u", s->name, (unsigned)row, (unsigned)chunk,
                  (unsigned)offset);
            if (inside) taken[offset / CHUNK_BYTES]++;
        }
    for (uint32_t i = 0; i < ROWS * chunks; i++)
        CHECK(taken[i] == 1, "%s: %d chunks at %u", s->name, taken[i], (unsigned)(i * CHUNK_BYTES));
    /* ldmatrix reads one chunk of 8 rows at a time: each of the 32 banks once. */
    for (uint32_t first = 0; first < ROWS; first += 8)
        for (uint32_t chunk = 0; chunk < chunks; chunk++) {
            unsigned groups = 0;
            for (uint32_t row = first; row < first + 8; row++)
                groups |= 1u << (s->offset(row, chunk) / CHUNK_BYTES % GROUPS);
            CHECK(groups == 0xffu, "%s: rows from %u, chunk %u: bank groups %#x", s->name, (unsigned)first,
                  (unsigned)chunk, groups);
        }
}

static void test_swizzles(void)
{
    for (size_t k = 0; k < sizeof swizzles / sizeof swizzles[0]; k++) test_swizzle(&swizzles[k]);
    CHECK_ALL({swizzle_128(0, 5), 80}, {swizzle_128(1, 0), 144}, {swizzle_128(3, 5), 480},
              {swizzle_128(7, 7), 896}, {swizzle_128(8, 0), 1024}, {swizzle_64(1, 3), 112},
              {swizzle_64(2, 0), 144}, {swizzle_64(7, 3), 448}, {swizzle_64(8, 1), 528},
              {swizzle_32(3, 1), 112}, {swizzle_32(4, 0), 144}, {swizzle_32(7, 1), 224},
              {swizzle_32(8, 1), 272});
}

int main(void)
{
    test_fragments();
    test_ldmatrix();
    test_chained();
    test_corners();
    test_slots();
    test_third_bytes();
    test_swizzles();
    return check_done("test_fragment");
}

/* SPDX-License-Identifier: MIT
 *
 * Tests when bench warns: of other work on the machine, and of rows faster than its peaks.
 */
#include "../unit/check.h"

#include "bench_warn.h"

static const struct {
    struct bench_load load;
    const char *says; /* "": nothing */
} loads[] = {
    {{.others = 0.0, .processors = 2, .allowed = 2, .threads = 2}, ""},
    {{.others = 0.4, .processors = 2, .allowed = 2, .threads = 2}, ""}, /* a daemon now and then */
    {{.others = 1.0, .processors = 2, .allowed = 2, .threads = 2},
     "takes 2 threads, others run 1.0, and there are 2 processors"},
    {{.others = 1.0, .processors = 2, .allowed = 2, .threads = 1}, ""},
    {{.others = 2.0, .processors = 2, .allowed = 2, .threads = 1}, "takes 1 thread, others run 2.0"},
    {{.others = 30.0, .processors = 64, .allowed = 2, .threads = 2}, ""}, /* a few of many processors */
    {{.others = 63.0, .processors = 64, .allowed = 2, .threads = 2}, "the machine is busy"},
    {{.others = 0.0, .processors = 64, .allowed = 2, .threads = 4},
     "may use 2 processors: times will be too long; use --threads 2"},
};

static const struct {
    enum bench_between between;
    double seconds, memory, arithmetic;
    bool beaten;
} rows[] = {
    {BENCH_READ, 1.0, 0.5, 0.9, false},    {BENCH_READ, 1.0, 0.5, 1.1, true},
    {BENCH_READ, 1.0, 1.1, 0.5, true},     {BENCH_PRODUCTS, 1.0, 1.1, 0.5, true},
    {BENCH_READ, 1.0, 1.02, 1.02, false},  /* within the noise of peaks */
    {BENCH_NOTHING, 1.0, 1.1, 0.5, false}, /* warm caches: keys come from them */
    {BENCH_NOTHING, 1.0, 0.5, 1.1, true},  {BENCH_HOST, 1.0, 9.0, 9.0, false}, /* the host only launches */
};

int main(void)
{
    char text[BENCH_WARNING];
    for (size_t i = 0; i < sizeof loads / sizeof *loads; i++) {
        strcpy(text, "nothing");
        const bool busy = bench_is_busy(&loads[i].load, text);
        CHECK(busy == (*loads[i].says != 0) && (!busy || strstr(text, loads[i].says)), "load %zu: %d, '%s'",
              i, busy, text);
    }
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct bench_beaten beaten = {0};
        bench_beaten_add(&beaten, "cpu-avx2", rows[i].between, rows[i].seconds, rows[i].memory,
                         rows[i].arithmetic);
        CHECK(bench_beaten_says(&beaten, 3, text) == rows[i].beaten, "row %zu", i);
    }
    struct bench_beaten beaten = {0};
    for (int i = 1; i <= 3; i++) bench_beaten_add(&beaten, "cpu-avx2", BENCH_READ, 1e-6 * i, 2.5e-6, 0.0);
    bench_beaten_add(&beaten, "cpu-generic", BENCH_READ, 1e-9, 1e-6, 0.0);
    CHECK(bench_beaten_says(&beaten, 5, text) && strstr(text, "3 of 5 rows took less time") &&
              strstr(text, "first cpu-avx2 with 1.0 us of 2.5:"),
          "'%s'", text);
    const struct bench_load now = bench_load_now(1);
    CHECK(now.others >= 0.0 && now.processors >= 1 && now.allowed >= 1,
          "%f others, %d processors, %d allowed", now.others, now.processors, now.allowed);
    return check_done("test_bench_warn");
}

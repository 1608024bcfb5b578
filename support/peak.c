/* SPDX-License-Identifier: MIT
 *
 * Each loop accumulates into independent sums in registers, more of them than latency times issue rate,
 * which is 8 to 16 on current processors. The sums are loaded from memory, so that the compiler cannot see
 * that they are equal, and there is no clobber that would make it spill them.
 */
#include "peak.h"

#include "pthread_loop.h"
#include "timing.h"

#include "cpu/allow_amx.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { MAX_SUMS = 24, MAX_LANES = 16 };

/* Products and sums stay near 1: no step is subnormal, which is slower on some processors. */
struct registers {
    _Alignas(64) float sums[MAX_SUMS * MAX_LANES];
    _Alignas(64) float factor[MAX_LANES];
    _Alignas(64) float term[MAX_LANES];
};

static void registers_fill(struct registers *r)
{
    for (int i = 0; i < MAX_SUMS * MAX_LANES; i++) r->sums[i] = 1.0f + 0x1p-12f * (float)i;
    for (int i = 0; i < MAX_LANES; i++) r->factor[i] = 1.0f - 0x1p-10f, r->term[i] = 0x1p-10f;
}

/* PEAK_LOOP(function, attributes, vector, sums, STEP): STEP(sum, x, y) returns the new sum. */
#define PEAK_LOOP(function, attributes, vector, count, STEP)                                                 \
    attributes static void function(struct registers *r, int64_t steps)                                      \
    {                                                                                                        \
        vector sum[count];                                                                                   \
        const vector x = *(const vector *)(void *)r->factor, y = *(const vector *)(void *)r->term;           \
        _Pragma("GCC unroll 24") for (int s = 0; s < (count); s++) sum[s] = ((vector *)(void *)r->sums)[s];  \
        for (int64_t i = 0; i < steps; i++) {                                                                \
            _Pragma("GCC unroll 24") for (int s = 0; s < (count); s++) sum[s] = STEP(sum[s], x, y);          \
        }                                                                                                    \
        _Pragma("GCC unroll 24") for (int s = 0; s < (count); s++)((vector *)(void *)r->sums)[s] = sum[s];   \
    }

typedef float vector128 __attribute__((vector_size(16), may_alias));
#define STEP_GENERIC(sum, x, y) ((sum) * (x) + (y))
PEAK_LOOP(loop_generic, , vector128, 12, STEP_GENERIC)

#if defined(__x86_64__)
#define STEP_AVX2(sum, x, y)   _mm256_fmadd_ps(sum, x, y)
#define STEP_AVX512(sum, x, y) _mm512_fmadd_ps(sum, x, y)
#define STEP_BF16(sum, x, y)   _mm512_dpbf16_ps(sum, (__m512bh)(x), (__m512bh)(y))
PEAK_LOOP(loop_avx2, __attribute__((target("avx2,fma"))), __m256, 12, STEP_AVX2)
PEAK_LOOP(loop_avx512, __attribute__((target("avx512f"))), __m512, 24, STEP_AVX512)
#if defined(FMLA_PEAK_BF16)
PEAK_LOOP(loop_avx512bf16, __attribute__((target("avx512f,avx512bf16"))), __m512, 24, STEP_BF16)
#endif
#if defined(FMLA_PEAK_AMX)
/* Six sums in tiles; a tile step is 16 · 16 · 32 products. */
__attribute__((target("amx-tile,amx-bf16"))) static void loop_amx(struct registers *r, int64_t steps)
{
    _Alignas(64) struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int t = 0; t < 8; t++) config.row_bytes[t] = 64, config.rows[t] = 16;
    __asm__ volatile("" ::: "memory"); /* compilers do not know that tile loads read memory */
    _tile_loadconfig(&config);
    _tile_loadd(0, r->sums, 64);
    _tile_loadd(1, r->sums, 64);
    _tile_loadd(2, r->sums, 64);
    _tile_loadd(3, r->sums, 64);
    _tile_loadd(4, r->sums, 64);
    _tile_loadd(5, r->sums, 64);
    _tile_loadd(6, r->factor, 0);
    _tile_loadd(7, r->term, 0);
    for (int64_t i = 0; i < steps; i++) {
        _tile_dpbf16ps(0, 6, 7);
        _tile_dpbf16ps(1, 6, 7);
        _tile_dpbf16ps(2, 6, 7);
        _tile_dpbf16ps(3, 6, 7);
        _tile_dpbf16ps(4, 6, 7);
        _tile_dpbf16ps(5, 6, 7);
    }
    _tile_stored(0, r->sums, 64);
    _tile_release();
}
#endif
#endif

static const struct unit {
    const char *name;
    void (*loop)(struct registers *r, int64_t steps);
    int flop_a_step; /* of all sums */
} units[PEAK_UNITS] = {
    [PEAK_GENERIC] = {"multiply and add, 128 bits", loop_generic, 12 * 4 * 2},
#if defined(__x86_64__)
    [PEAK_AVX2] = {"vfmadd ps ymm", loop_avx2, 12 * 8 * 2},
    [PEAK_AVX512] = {"vfmadd ps zmm", loop_avx512, 24 * 16 * 2},
#if defined(FMLA_PEAK_BF16)
    [PEAK_AVX512_BF16] = {"vdpbf16ps zmm", loop_avx512bf16, 24 * 16 * 4},
#endif
#if defined(FMLA_PEAK_AMX)
    [PEAK_AMX] = {"tdpbf16ps", loop_amx, 6 * 16 * 16 * 32 * 2},
#endif
#endif
};

const char *peak_unit_name(enum peak_unit unit)
{
    return units[unit].name ? units[unit].name : "";
}

enum peak_unit peak_unit_of(const char *kernel)
{
    static const char *const kernels[PEAK_UNITS] = {"cpu-generic", "cpu-avx2", "cpu-avx512", "cpu-avx512bf16",
                                                    "cpu-amx"};
    for (int unit = 0; unit < PEAK_UNITS; unit++)
        if (!strcmp(kernels[unit], kernel)) return (enum peak_unit)unit;
    return PEAK_GENERIC;
}

bool peak_unit_available(enum peak_unit unit)
{
    if (!units[unit].loop) return false;
#if defined(__x86_64__)
    switch (unit) {
    case PEAK_AVX2: return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case PEAK_AVX512: return __builtin_cpu_supports("avx512f");
    case PEAK_AVX512_BF16: return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bf16");
    case PEAK_AMX: return cpu_allow_amx();
    default: break;
    }
#endif
    return true;
}

/* ---- Arithmetic ----------------------------------------------------------------------------- */

struct steps {
    const struct unit *unit;
    int64_t count;
};

static void run_steps(void *data, int index)
{
    const struct steps *steps = data;
    (void)index;
    struct registers r;
    registers_fill(&r);
    steps->unit->loop(&r, steps->count);
    volatile float used = r.sums[0]; /* keeps the loop alive */
    (void)used;
}

/* Returns the seconds of `count` steps on every one of `threads` threads. */
static double run_loop(const struct unit *unit, int threads, int64_t count)
{
    struct steps steps = {unit, count};
    const double start = timing_now();
    pthread_each(threads, run_steps, &steps);
    return timing_now() - start;
}

double peak_flops(enum peak_unit unit, int threads)
{
    enum { TRIES = 20 };
    if (!peak_unit_available(unit)) return 0.0;
    /* Choose steps so long that starting threads is negligible; measured on one thread, which waits for no
     * other. */
    int64_t steps = 1 << 16;
    while (run_loop(&units[unit], 1, steps) < 0.01) steps *= 2;
    double best = 1e30;
    for (int i = 0; i < TRIES; i++) {
        const double seconds = run_loop(&units[unit], threads, steps);
        if (seconds < best) best = seconds;
    }
    return (double)threads * (double)steps * units[unit].flop_a_step / best;
}

/* ---- Memory --------------------------------------------------------------------------------- */

enum { MEBI = 1 << 20, WORDS_AT_ONCE = 32 };

static size_t system_bytes(int name)
{
    const long value = sysconf(name);
    return value > 0 ? (size_t)value : 0;
}

/* Thread `index` always has the same part of the memory. */
struct parts {
    uint64_t *words;
    int64_t mebis;
    int threads;
    _Atomic uint64_t all;
};

static int64_t part_begin(const struct parts *parts, int index)
{
    return parts->mebis * index / parts->threads;
}

static void fill_part(void *data, int index)
{
    const struct parts *parts = data;
    for (int64_t i = part_begin(parts, index); i < part_begin(parts, index + 1); i++)
        memset((char *)parts->words + i * MEBI, 1, MEBI);
}

bool peak_memory_open(struct peak_memory *memory, int threads)
{
    memset(memory, 0, sizeof *memory);
#if defined(_SC_LEVEL3_CACHE_SIZE)
    memory->cache_bytes = system_bytes(_SC_LEVEL3_CACHE_SIZE);
#endif
    /* Use twice the cache size: a cache whose replacement is not LRU keeps part of a smaller buffer. */
    const size_t all = system_bytes(_SC_PHYS_PAGES) * system_bytes(_SC_PAGESIZE);
    size_t bytes = 2 * memory->cache_bytes;
    if (bytes < (size_t)128 * MEBI) bytes = (size_t)128 * MEBI;
    if (all && bytes > all / 4) bytes = all / 4;
    bytes = bytes / MEBI * MEBI;
    memory->words = aligned_alloc(64, bytes);
    memory->bytes = bytes;
    if (!memory->words) return false;
    /* First touch places pages near the thread that reads them. */
    struct parts parts = {memory->words, (int64_t)(bytes / MEBI), threads, 0};
    pthread_each(threads, fill_part, &parts);
    return true;
}

void peak_memory_close(struct peak_memory *memory)
{
    free(memory->words);
    memory->words = NULL;
}

static uint64_t read_mebi(const uint64_t *words)
{
    uint64_t sum[WORDS_AT_ONCE] = {0}, all = 0;
    for (int64_t i = 0; i < MEBI / (int64_t)sizeof *words; i += WORDS_AT_ONCE)
        for (int w = 0; w < WORDS_AT_ONCE; w++) sum[w] ^= words[i + w];
    for (int w = 0; w < WORDS_AT_ONCE; w++) all ^= sum[w];
    return all;
}

static void read_part(void *data, int index)
{
    struct parts *parts = data;
    uint64_t all = 0;
    for (int64_t i = part_begin(parts, index); i < part_begin(parts, index + 1); i++)
        all ^= read_mebi(parts->words + i * (MEBI / (int64_t)sizeof *parts->words));
    atomic_fetch_xor(&parts->all, all);
}

double peak_memory_read(const struct peak_memory *memory, int threads)
{
    struct parts parts = {memory->words, (int64_t)(memory->bytes / MEBI), threads, 0};
    const double start = timing_now();
    pthread_each(threads, read_part, &parts);
    volatile uint64_t used = atomic_load(&parts.all);
    (void)used;
    return timing_now() - start;
}

double peak_bandwidth(const struct peak_memory *memory, int threads)
{
    enum { TRIES = 5 };
    double best = 1e30;
    for (int i = 0; i < TRIES; i++) {
        const double seconds = peak_memory_read(memory, threads);
        if (seconds < best) best = seconds;
    }
    return (double)memory->bytes / best;
}

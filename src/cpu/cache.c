/* SPDX-License-Identifier: MIT
 *
 * Cache append, gather and convert on the CPU: the driver, which assigns tokens to threads. cache_token.h
 * handles one token.
 */
#include "cpu.h"

#include "../error.h"
#include "cost.h"

struct work {
    const struct cache_problem *problem;
    const struct cpu_cache *cache;
    int64_t shares;
};

static double cost_of(const struct cache_problem *p)
{
    return cost_of_moving((double)p->tokens * (double)p->d_qk * sizeof(float));
}

/* ---- Append, and the writing half of convert -------------------------------------------------- */

/* Returns the share that writes a slot. One share writes all tokens of a slot in their order, so that the
 * last one stays, without memory to sort them. The multiplication spreads slots that have a common stride. */
static int64_t share_of(int64_t slot, int64_t shares)
{
    return (int64_t)(((uint64_t)slot * UINT64_C(0x9e3779b97f4a7c15) >> 32) % (uint64_t)shares);
}

static void write_share(void *data, int64_t index, int32_t worker)
{
    const struct work *work = data;
    const struct cache_problem *p = work->problem;
    const bool converts = p->operation == OP_CACHE_CONVERT;
    (void)worker;
    for (int64_t t = 0; t < p->tokens; t++) {
        if (p->slots[t] < 0 || (converts && p->source_slots[t] < 0)) continue;
        if (work->shares > 1 && share_of(p->slots[t], work->shares) != index) continue;
        if (converts)
            work->cache->convert(p, t, p->slots[t]);
        else
            work->cache->store(p, t, p->slots[t]);
    }
}

static fmla_status write_all(const struct cpu_cache *cache, const struct cache_problem *p)
{
    const struct thread_pool pool = threads_now();
    const double cost = cost_of(p);
    const int32_t threads = threads_worth(&pool, cost);
    struct work work = {p, cache, threads < p->tokens ? threads : p->tokens};
    threads_run(&pool, work.shares, cost, write_share, &work);
    return FMLA_OK;
}

static fmla_status append(const struct cpu_cache *cache, const struct cache_problem *p)
{
    for (int64_t t = 0; t < p->tokens; t++)
        if (p->slots[t] < -1 || p->slots[t] >= p->cache.slots)
            return fail(FMLA_INVALID_ARGUMENT,
                        "cache_append: slot_mapping: entry %lld is %lld, must be -1 or in [0, %lld)",
                        (long long)t, (long long)p->slots[t], (long long)p->cache.slots);
    for (int64_t t = 0; p->rope_pairs && t < p->tokens; t++) {
        const int64_t position = cache_position(p, t);
        if (p->slots[t] >= 0 && (position < 0 || position >= p->table_rows))
            return fail(FMLA_INVALID_ARGUMENT,
                        "cache_append: positions: entry %lld is %lld, must be in [0, %lld), the rows "
                        "of rope_table",
                        (long long)t, (long long)position, (long long)p->table_rows);
    }
    return write_all(cache, p);
}

/* ---- Convert -------------------------------------------------------------------------------- */

static fmla_status check_slots(const char *name, const int64_t *slots, const int64_t *others, int64_t tokens,
                               const struct cache_pages *cache)
{
    for (int64_t t = 0; t < tokens; t++)
        if (slots[t] != -1 && others[t] != -1 && !cache_has(cache, slots[t]))
            return fail(FMLA_INVALID_ARGUMENT,
                        "cache_convert: %s: entry %lld is %lld, must be -1 or in [0, %lld)", name,
                        (long long)t, (long long)slots[t], (long long)cache->slots);
    return FMLA_OK;
}

static fmla_status convert(const struct cpu_cache *cache, const struct cache_problem *p)
{
    fmla_status status = check_slots("src_slots", p->source_slots, p->slots, p->tokens, &p->source);
    if (!status) status = check_slots("dst_slots", p->slots, p->source_slots, p->tokens, &p->cache);
    return status ? status : write_all(cache, p);
}

/* ---- Gather --------------------------------------------------------------------------------- */

enum { TOKENS_OF_ITEM = 16 };

static void gather_item(void *data, int64_t index, int32_t worker)
{
    const struct work *work = data;
    const struct cache_problem *p = work->problem;
    (void)worker;
    for (int64_t t = index * TOKENS_OF_ITEM; t < p->tokens && t < (index + 1) * TOKENS_OF_ITEM; t++) {
        const int64_t slot = p->slots[t];
        work->cache->load(p, t, cache_has(&p->cache, slot) ? slot : -1);
    }
}

static fmla_status gather(const struct cpu_cache *cache, const struct cache_problem *p)
{
    const struct thread_pool pool = threads_now();
    struct work work = {p, cache, 0};
    threads_run(&pool, (p->tokens + TOKENS_OF_ITEM - 1) / TOKENS_OF_ITEM, cost_of(p), gather_item, &work);
    return FMLA_OK;
}

fmla_status cpu_cache_run(const struct kernel_driver *driver, union problem problem,
                          const struct prepared *prepared)
{
    const struct cpu_cache *cache = (const struct cpu_cache *)driver;
    const enum operation operation = problem.cache->operation;
    (void)prepared;
    return operation == OP_CACHE_APPEND   ? append(cache, problem.cache)
           : operation == OP_CACHE_GATHER ? gather(cache, problem.cache)
                                          : convert(cache, problem.cache);
}

/* SPDX-License-Identifier: MIT
 *
 * Sparse decode as the driver of decode is given it. A token's list is what the plan cuts: the indices into the cache that
 * count, from the next edge of a block on those into the extra cache. An entry that names no key is passed over, so the
 * inner kernels see keys alone, a block of them at a time, wherever they were gathered from.
 */
#include "cpu.h"

static int32_t next_keys(const struct cpu_tile *tile, int64_t *at, int64_t end, struct cpu_key *keys);

static struct cpu_decode call_of(const struct sparse_decode_problem *p)
{
    return (struct cpu_decode){
        .sparse = p,
        .next_keys = next_keys,
        .operation = "sparse_decode",
        .b = p->b,
        .s_q = p->s_q,
        .h_q = p->h_q,
        .d_qk = p->d_qk,
        .d_v = p->d_v,
        .sets = p->s_q,
        .set_rows = p->h_q,
        .tile_rows = PLAN_ROW_TILE,
        .capacity = p->capacity,
        .element = p->element,
        .layout = kv_layout_of(p->format, (int32_t)p->d_qk),
        .q = p->q,
        .q_stride = p->q_stride,
        .out = p->out,
        .out_stride = p->out_stride,
        .lse = p->lse,
        .lse_stride = p->lse_stride,
        .rules = &p->rules,
        .scale = p->scale,
        .batch_invariant = p->batch_invariant,
        .plan = p->plan,
        .plan_in_tables = p->plan_in_tables,
        .partitions = p->partitions,
        .num_partitions = p->num_partitions,
        .bound = p->bound,
        .workspace = p->workspace,
        .workspace_size = p->workspace_size,
    };
}

fmla_status cpu_sparse_decode_size(const struct kernel *kernel, const struct sparse_decode_problem *p,
                                   size_t *bytes, size_t *alignment)
{
    const struct cpu_decode call = call_of(p);
    return cpu_decode_size(kernel, &call, bytes, alignment);
}

fmla_status cpu_sparse_decode(const struct kernel *kernel, const struct sparse_decode_problem *p)
{
    const struct cpu_decode call = call_of(p);
    return cpu_decode_run(kernel, &call);
}

static int64_t clamp(int64_t x, int64_t low, int64_t high)
{
    return x < low ? low : x > high ? high : x;
}

int32_t cpu_gather_keys(const struct kv_layout *layout, const struct sparse_cache *cache,
                        const int32_t *indices, int64_t first, int64_t *at, int64_t end,
                        struct cpu_key keys[PLAN_BLOCK], int32_t count)
{
    for (; *at < end && count < PLAN_BLOCK; ++*at) {
        int64_t slot;
        const int64_t page = sparse_page(cache, indices[*at - first], &slot);
        if (page < 0) continue;
        const uint8_t *data = cache->data + page * cache->page_bytes;
        const uint8_t *token = data + slot * cache->slot_bytes;
        const uint8_t *scales = layout->scale_bytes ? data + kv_scales_at(layout, cache->page_size, slot)
                                                    : token + layout->scale_offset;
        keys[count++] = (struct cpu_key){token, scales};
    }
    return count;
}

static int32_t gather(const struct cpu_tile *tile, const struct sparse_cache *cache, int64_t first,
                      int64_t *at, int64_t end, struct cpu_key *keys, int32_t count)
{
    const int32_t *indices =
        cache->indices + tile->request * cache->indices_stride[0] + tile->set * cache->indices_stride[1];
    return cpu_gather_keys(&tile->call->layout, cache, indices, first, at, end, keys, count);
}

static int32_t next_keys(const struct cpu_tile *tile, int64_t *at, int64_t end, struct cpu_key *keys)
{
    const struct sparse_decode_problem *p = tile->call->sparse;
    const int64_t count = plan_topk_count(p->topk.topk, p->topk.length, tile->request);
    const int32_t found = gather(tile, &p->cache[0], 0, at, clamp(count, 0, end), keys, 0);
    if (found == PLAN_BLOCK) return found;
    if (!p->topk.extra_topk) {
        *at = end;
        return found;
    }
    const int64_t first = plan_extra_begin(count);
    const int64_t extra = plan_topk_count(p->topk.extra_topk, p->topk.extra_length, tile->request);
    if (*at < first) *at = clamp(first, *at, end);
    if (*at >= end) return found;
    return gather(tile, &p->cache[1], first, at, clamp(first + extra, 0, end), keys, found);
}

/* SPDX-License-Identifier: MIT
 *
 * Finds the addresses of a request's keys, by the kind of their source. With lists, the plan splits entries:
 * those of the first list, then, from the next block boundary on, those of the second. Entries that name no
 * key are skipped, so the microkernels see only keys, a block of them at a time, wherever they were gathered
 * from.
 */
#include "cpu.h"

static const struct kv_layout *layout_of(const struct cpu_tile *tile, const struct key_source *source)
{
    return &tile->call->layouts[source - tile->call->problem->keys];
}

static const uint8_t *scales_at(const struct kv_layout *layout, const uint8_t *page, const uint8_t *token,
                                int64_t page_size, int64_t slot)
{
    static const float one = 1.0f; /* the driver multiplies scores and results by the scale of the cache */
    if (kv_is_exact(layout)) return (const uint8_t *)&one;
    return layout->scale_bytes ? page + kv_scales_at(layout, page_size, slot) : token + layout->scale_offset;
}

static struct cpu_key key_at(const struct cpu_tile *tile, const struct key_source *source, int64_t page,
                             int64_t slot)
{
    const int64_t head = tile->set % tile->call->problem->h_kv;
    const uint8_t *data = source->k.data + page * source->k.page_bytes + head * source->k.head_bytes;
    const uint8_t *token = data + slot * source->k.slot_bytes;
    const struct key_view *v = &source->v;
    const struct kv_layout *layout = layout_of(tile, source);
    return (struct cpu_key){
        .token = token,
        .scales = scales_at(layout, data, token, source->page_size, slot),
        .value = tile->call->value_bytes
                     ? v->data + page * v->page_bytes + head * v->head_bytes + slot * v->slot_bytes
                     : token,
        .layout = layout,
    };
}

/* Fills `count` keys from slot `slot` of a page on. Where scales lie in their tokens, or there are none, the
 * keys are a constant distance apart. */
static void keys_of_page(const struct cpu_tile *tile, const struct key_source *source, int64_t page,
                         int64_t slot, struct cpu_key *keys, int32_t count)
{
    const struct kv_layout *layout = layout_of(tile, source);
    if (layout->scale_bytes || kv_is_exact(layout)) {
        for (int32_t t = 0; t < count; t++) keys[t] = key_at(tile, source, page, slot + t);
        return;
    }
    const int64_t step = source->k.slot_bytes,
                  value_step = tile->call->value_bytes ? source->v.slot_bytes : step;
    const struct cpu_key first = key_at(tile, source, page, slot);
    for (int32_t t = 0; t < count; t++)
        keys[t] = (struct cpu_key){first.token + t * step, first.scales + t * step,
                                   first.value + t * value_step, layout};
}

int32_t cpu_paged_keys(const struct cpu_tile *tile, int64_t *at, int64_t end, struct cpu_key keys[PLAN_BLOCK])
{
    const struct key_source *source = &tile->call->problem->keys[0];
    const int32_t *table = source->table ? source->table + tile->request * source->table_stride[0] : NULL;
    int32_t count = 0;
    if (*at >= end) return 0;
    int64_t page = *at / source->page_size, slot = *at % source->page_size;
    while (*at < end && count < PLAN_BLOCK) {
        int64_t run = source->page_size - slot;
        if (run > PLAN_BLOCK - count) run = PLAN_BLOCK - count;
        if (run > end - *at) run = end - *at;
        keys_of_page(tile, source, table ? table[page] : tile->request, tile->first_key + slot, keys + count,
                     (int32_t)run);
        count += (int32_t)run, *at += run, slot = 0, page++;
    }
    return count;
}

fmla_status cpu_check_pages(const struct attention_problem *p)
{
    const struct key_source *source = &p->keys[0];
    if (source->kind != KEYS_PAGED || !source->table) return FMLA_OK;
    for (int64_t r = 0; r < p->b; r++) {
        const int64_t length = attention_length(p, r);
        const int64_t pages = (length + source->page_size - 1) / source->page_size;
        const int32_t *row = source->table + r * source->table_stride[0];
        for (int64_t i = 0; i < pages; i++)
            if (row[i] < 0 || row[i] >= source->pages)
                return fail(FMLA_INVALID_ARGUMENT,
                            "%s: block_table: entry [%lld, %lld] is %d, must be in [0, %lld): "
                            "request %lld has %lld keys",
                            operation_name(p->operation), (long long)r, (long long)i, row[i],
                            (long long)source->pages, (long long)r, (long long)length);
    }
    return FMLA_OK;
}

/* Appends the keys that entries [*at, end) of a list name to the first `count` keys, until there are
 * PLAN_BLOCK; moves *at past these entries and returns the new count. The list begins with entry `first`. */
static int32_t gather(const struct cpu_tile *tile, const struct key_source *source, int64_t first,
                      int64_t *at, int64_t end, struct cpu_key *keys, int32_t count)
{
    const int64_t h_kv = tile->call->problem->h_kv;
    const int32_t *list = source->table + tile->request * source->table_stride[0] +
                          tile->set / h_kv * source->table_stride[1] +
                          tile->set % h_kv * source->table_stride[2];
    for (; *at < end && count < PLAN_BLOCK; ++*at) {
        int64_t slot;
        const int64_t page = key_page(source, list[*at - first], &slot);
        if (page >= 0) keys[count++] = key_at(tile, source, page, slot);
    }
    return count;
}

int32_t cpu_listed_keys(const struct cpu_tile *tile, int64_t *at, int64_t end,
                        struct cpu_key keys[PLAN_BLOCK])
{
    const struct key_source *lists = tile->call->problem->keys;
    const int64_t count = plan_topk_count(lists[0].capacity, lists[0].lengths, tile->request);
    const int32_t found = gather(tile, &lists[0], 0, at, cpu_clamp(count, 0, end), keys, 0);
    if (found == PLAN_BLOCK) return found;
    if (!lists[1].capacity) {
        *at = end;
        return found;
    }
    const int64_t first = plan_extra_begin(count);
    const int64_t extra = plan_topk_count(lists[1].capacity, lists[1].lengths, tile->request);
    if (*at < first) *at = cpu_clamp(first, *at, end);
    if (*at >= end) return found;
    return gather(tile, &lists[1], first, at, cpu_clamp(first + extra, 0, end), keys, found);
}

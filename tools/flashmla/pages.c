/* SPDX-License-Identifier: MIT */
#include "pages.h"

#include <inttypes.h>
#include <stdlib.h>

enum { MAX_TABLE = 1 << 28 /* entries: 1 GiB */ };

static void count_pages(struct pages *pages, const int32_t *seqlens, int64_t batch)
{
    pages->max_pages = 1, pages->count = 0;
    for (int64_t r = 0; r < batch; r++) {
        const int64_t of_request = (seqlens[r] + pages->page_size - 1) / pages->page_size;
        pages->count += of_request;
        if (of_request > pages->max_pages) pages->max_pages = of_request;
    }
}

bool pages_deal(struct pages *pages, const int32_t *seqlens, int64_t batch, struct random_state *random,
                struct reason *reason)
{
    count_pages(pages, seqlens, batch);
    if (pages->count > INT32_MAX)
        return reason_set(reason, "the batch has %" PRId64 " pages, at most %d are allowed", pages->count,
                          INT32_MAX);
    if (batch * pages->max_pages > MAX_TABLE)
        return reason_set(
            reason, "the block table is %" PRId64 " by %" PRId64 " pages, at most %d entries are allowed",
            batch, pages->max_pages, MAX_TABLE);
    int32_t *order = calloc((size_t)pages->count + 1, sizeof *order);
    pages->page_keys = calloc((size_t)pages->count + 1, sizeof *pages->page_keys);
    pages->block_table = calloc((size_t)(batch * pages->max_pages) + 1, sizeof *pages->block_table);
    if (!order || !pages->page_keys || !pages->block_table) {
        free(order);
        return reason_set(reason, "no memory for a block table of %" PRId64 " by %" PRId64 " pages", batch,
                          pages->max_pages);
    }
    for (int64_t page = 0; page < pages->count; page++) order[page] = (int32_t)page;
    random_shuffle(random, order, pages->count);
    int64_t next = 0;
    for (int64_t r = 0; r < batch; r++)
        for (int64_t i = 0; i < pages->max_pages; i++) {
            const int64_t left = seqlens[r] - i * pages->page_size;
            int32_t *entry = &pages->block_table[r * pages->max_pages + i];
            *entry = left > 0 ? order[next++] : -1;
            if (left > 0)
                pages->page_keys[*entry] = (int32_t)(left < pages->page_size ? left : pages->page_size);
        }
    free(order);
    return true;
}

void pages_free(struct pages *pages)
{
    free(pages->page_keys), free(pages->block_table);
    pages->page_keys = pages->block_table = NULL;
}

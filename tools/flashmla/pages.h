/* SPDX-License-Identifier: MIT
 *
 * The pages of a batch in random order, as in a serving system: no request is contiguous.
 */
#ifndef FLASHMLA_TOOL_PAGES_H
#define FLASHMLA_TOOL_PAGES_H

#include "random.h"
#include "reason.h"

struct pages {
    int64_t page_size, max_pages, count;
    int32_t *page_keys;   /* [count]: slots of each page that hold keys */
    int32_t *block_table; /* [batch, max_pages]; -1 past a request's last page */
};

/* The caller sets page_size; fills in the rest for these lengths. Returns false with a reason if they are
 * too many. */
bool pages_deal(struct pages *pages, const int32_t *seqlens, int64_t batch, struct random_state *random,
                struct reason *reason);
void pages_free(struct pages *pages);

#endif

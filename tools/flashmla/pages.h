/* SPDX-License-Identifier: MIT
 *
 * The pages of a batch, dealt out in random order as a serving system's are, so that no request is contiguous.
 */
#ifndef FLASHMLA_TOOL_PAGES_H
#define FLASHMLA_TOOL_PAGES_H

#include "fault.h"
#include "random.h"

struct pages {
    int64_t page_size, max_pages, count;
    int32_t *page_keys;   /* [count]: how many slots of each hold keys */
    int32_t *block_table; /* [batch, max_pages]; -1 where a request has no page */
};

/* page_size is the caller's; fills in the rest for these lengths. False with a fault if they are too many. */
bool pages_deal(struct pages *pages, const int32_t *seqlens, int64_t batch, struct random_state *random,
                struct fault *fault);
void pages_free(struct pages *pages);

#endif

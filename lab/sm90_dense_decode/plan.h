// The split plan on the host, with the cost of a request overridable (blocks a partition pays beside a request's own).
#pragma once
#include "decode.h"
#include <stdlib.h>

static inline int plan_blocks(int length) { return length > 0 ? (length + PAGE - 1) / PAGE : 1; }

static inline void plan_decode(const int *seqlens, int b, int partitions, int overhead, partition *rows, int *num_splits) {
    int64_t total = 0;
    for (int r = 0; r < b; r++) total += plan_blocks(seqlens[r]) + overhead;
    int64_t payload = (total + partitions - 1) / partitions + overhead;
    int request = 0, block = 0, split = 0;
    num_splits[0] = 0;
    for (int k = 0; k < partitions; k++) {
        partition row = {b, b - 1, 0, 0, 0, 0, 0, 0};
        if (request < b) {
            row.begin_request = request, row.begin_block = block, row.begin_split = split;
            row.first_is_split = split > 0;
            int64_t rem = payload;
            int cut = 0;
            row.end_request = request - 1;
            while (request < b) {
                int left = plan_blocks(seqlens[request]) - block;
                if (rem >= left + overhead) {
                    rem -= left + overhead;
                    row.end_request = request, row.end_block = block + left;
                    row.last_is_split = split > 0;
                    num_splits[request + 1] = num_splits[request] + split + 1;
                    request++, block = 0, split = 0;
                } else {
                    if (rem > overhead) {
                        block += (int)(rem - overhead), split++, cut = 1;
                        row.end_request = request, row.end_block = block, row.last_is_split = 1;
                    }
                    break;
                }
            }
            if (cut && row.begin_request == row.end_request) row.first_is_split = 1;
        }
        rows[k] = row;
    }
    if (request < b) abort();
}

/* SPDX-License-Identifier: MIT
 *
 * Dense MHA forward on tensor cores, host side: how rows form tiles, and how the keys of tiles are split
 * (mha_splits.h), for kernels with tiles of any size.
 */
#ifndef FMLA_CUDA_MHA_TILES_H
#define FMLA_CUDA_MHA_TILES_H

#include "../problem.h"

enum { MHA_MOST_BLOCKS = 65536 /* CTAs: their tile counters run past the last tile */ };

/* What splits are computed for. */
struct mha_tiling {
    int64_t rows, keys; /* of a tile; of a block */
    int32_t slots;      /* CTAs that run at the same time */
};

/* How the keys of tiles are split (mha_forward_sm90_params). */
struct mha_splitting {
    int32_t splits, blocks_of_split, most_splits;
    int64_t part_rows; /* upper bound; 0: nothing is split */
};

/* Returns the query heads of a tile of `rows` rows: all heads of a key head where tiles of a single head's rows would
 * be more, else 1. */
int32_t mha_heads_of_tile(const struct attention_problem *problem, int64_t rows);

/* Returns an upper bound of the number of tiles, for ragged requests of any lengths. */
int64_t mha_tiles(const struct attention_problem *problem, int64_t rows);

/* Returns the number of tiles if all requests have `tokens` tokens; the largest number if there are more. */
int64_t mha_tiles_of_requests(const struct attention_problem *problem, int64_t rows, int64_t tokens);

struct mha_splitting mha_splitting(const struct attention_problem *problem, const struct mha_tiling *tiling);

/* Returns the most rows of parts of any call up to these sizes, for whatever h_kv. */
int64_t mha_most_part_rows(const struct attention_problem *problem, const struct mha_tiling *tiling);

/* Returns an upper bound of the splits of all tiles of `rows` rows, and of the tiles that are not split. */
int64_t mha_most_items(const struct attention_problem *problem, int64_t rows, const struct mha_tiling *tiling,
                       const struct mha_splitting *splitting);

#endif

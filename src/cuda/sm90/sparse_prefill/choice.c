/* SPDX-License-Identifier: MIT */
#include "choice.h"

#include "../../launch.h"

enum { GROUP = 64 /* columns of a line of shared memory */, GROUPS_OF_BOX = 2, ALIGNMENT = 16 };
enum { MOST_ENTRIES = INT32_MAX - 256 /* of a list: the producer looks a block of 64 ahead */ };

/* Returns whether every token is aligned. In an FP8_584 page, which is contiguous, tokens are 576 bytes
 * apart. */
static bool keys_aligned(const struct attention_problem *p)
{
    const struct key_source *keys = &p->keys[0];
    const int64_t shape[] = {keys->pages, keys->page_size, p->h_kv};
    const int64_t steps[] = {keys->k.page_bytes, keys->k.slot_bytes, keys->k.head_bytes};
    return !keys->pages || cuda_rows_aligned(keys->k.data, shape, steps, 3, 1, ALIGNMENT);
}

/* Returns whether TMA can step over tokens and heads. */
static bool rows_possible(const struct attention_problem *p, const uint16_t *data, const int64_t stride[3])
{
    return (uintptr_t)data % ALIGNMENT == 0 && tensor_stride_possible(p->b, stride[0]) &&
           tensor_stride_possible(p->h_q, stride[2]);
}

const char *sm90_sparse_prefill_refuses(const struct attention_problem *p, const char **argument)
{
    static const char *const keys[KV_FORMATS] = {
        [KV_BF16] = "takes keys whose base and strides are multiples of 16 bytes",
        [KV_FP8_656] = "takes FP8_656 pages whose base and strides are multiples of 16 bytes",
        [KV_FP8_584] =
            "takes FP8_584 pages whose base and stride are multiples of 16 bytes (contiguous pages: "
            "an even page_size)",
    };
    static const char any_keys[] = "takes pages whose base and strides are multiples of 16 bytes";
    if (!p->b) return NULL;
    *argument = "q";
    if (!rows_possible(p, p->q, p->q_stride))
        return "takes queries whose base and strides are multiples of 16 bytes, strides of 16 to below 2^40";
    *argument = "kv";
    if (!keys_aligned(p)) return keys[p->format] ? keys[p->format] : any_keys;
    *argument = "indices";
    if (p->capacity > MOST_ENTRIES) return "takes fewer than 2^31 - 256 indices per token";
    *argument = "out";
    if (!rows_possible(p, p->out, p->out_stride))
        return "takes an output whose base and strides are multiples of 16 bytes, strides below 2^40";
    *argument = "softmax_scale";
    if (!(p->scale >= 1e-30f)) return "takes a scale of at least 1e-30";
    return NULL;
}

struct tensor_view sm90_sparse_prefill_view(const struct attention_problem *p, const uint16_t *data,
                                            const int64_t stride[2], int64_t tokens, int64_t heads,
                                            int64_t columns)
{
    return (struct tensor_view){
        .data = data,
        .element = p->element,
        .size = {GROUP, heads, columns / GROUP, tokens, 1},
        .stride = {1, stride[1], GROUP, stride[0], 0},
        .box = {GROUP, SM90_SPARSE_PREFILL_HEADS, GROUPS_OF_BOX, 1, 1},
    };
}

enum { BLOCK = 64 /* entries */, LEAST_SAVED = 3 /* blocks: the join takes as long as two or three */ };

/* Returns the splits per tile if the last round has `rest` tiles; 1: tiles are not split. */
static int64_t splits_of_tile(int64_t rest, int64_t blocks, int32_t sms)
{
    const int64_t at_once = sms / rest,
                  splits = at_once < MOST_PREFILL_SPLITS ? at_once : MOST_PREFILL_SPLITS;
    const int64_t most = (blocks + splits - 1) / splits; /* blocks per split */
    return blocks - most < LEAST_SAVED ? 1 : (blocks + most - 1) / most;
}

struct prefill_splits sm90_sparse_prefill_splits(int64_t tiles, int64_t topk, int32_t sms)
{
    enum { MOST_ROUNDS = 8 /* beyond, the last round is too small a share to pay for the splits */ };
    const int64_t rest = tiles % sms, blocks = cuda_ceil_div(topk, BLOCK);
    const bool few = rest && tiles <= (int64_t)MOST_ROUNDS * sms;
    const int64_t splits = few ? splits_of_tile(rest, blocks, sms) : 1;
    return (struct prefill_splits){.whole = (int32_t)(splits > 1 ? tiles - rest : tiles),
                                   .of_tile = (int32_t)splits,
                                   .divisor = divisor_of((uint32_t)splits)};
}

int32_t sm90_sparse_prefill_split_keys(int64_t tiles, int64_t topk, int32_t sms)
{
    const int64_t blocks = cuda_ceil_div(topk, BLOCK), fit = tiles ? sms / tiles : 0,
                  splits = fit < MOST_PARTS_JOINED_IN_KERNEL ? fit : MOST_PARTS_JOINED_IN_KERNEL;
    const int64_t most = splits ? cuda_ceil_div(blocks, splits) : blocks; /* blocks per split */
    return blocks - most < LEAST_SAVED ? 0 : (int32_t)(most * BLOCK);
}

/* Lists of at most `enough` blocks suffice: no longer list gives more splits. */
int64_t sm90_sparse_prefill_most_splits(int64_t tiles, int64_t topk, int32_t sms)
{
    const int64_t blocks = cuda_ceil_div(topk, BLOCK), enough = 3 * MOST_PREFILL_SPLITS;
    int64_t most = 0;
    for (int64_t rest = 1; rest <= tiles && rest < sms; rest++)
        for (int64_t some = blocks < enough ? blocks : enough; some > 0; some--) {
            const int64_t splits = splits_of_tile(rest, some, sms);
            if (splits > 1 && rest * splits > most) most = rest * splits;
        }
    return most;
}

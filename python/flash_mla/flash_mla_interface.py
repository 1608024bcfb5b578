# SPDX-License-Identifier: MIT
"""The functions of FlashMLA (github.com/deepseek-ai/FlashMLA), with its names, signatures and conventions, and the two that
vLLM's copy of it has for FP8 products.

Arrays are PyTorch's tensors, NumPy arrays or any others that support DLPack; results are of the first argument's kind. All
arrays of a call are on one device, which selects the back end. docs/semantics.md defines what is computed.
"""

from __future__ import annotations

import math
from typing import Any, Literal, Optional, Tuple, overload

from . import _library, _operations
from ._arguments import MLA_WIDTHS, OF_LISTS, OF_TABLES, check_given, check_kinds, check_width, extra_format_of, flag_of
from ._arguments import integer_of, kv_format_of, lse_options, module_of, of_values, scale_of, shape_of
from ._metadata import FlashMLASchedMeta, get_mla_metadata, get_mla_metadata_dense_fp8, plan_of
from ._mha import flash_attn_varlen_func, flash_attn_varlen_kvpacked_func, flash_attn_varlen_qkvpacked_func
from ._types import FIRST_OF_BYTES

__all__ = [
    "FlashMLASchedMeta",
    "capabilities",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "flash_mla_with_kvcache_fp8",
    "get_mla_metadata",
    "get_mla_metadata_dense_fp8",
    "merge_states",
]

# ---- Decode ---------------------------------------------------------------------------------------------------------


def flash_mla_with_kvcache(
    q: Any,
    k_cache: Any,
    block_table: Optional[Any],
    cache_seqlens: Optional[Any],
    head_dim_v: int,
    tile_scheduler_metadata: Optional[Any],
    num_splits: Optional[Any] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    is_fp8_kvcache: Optional[bool] = None,
    indices: Optional[Any] = None,
    attn_sink: Optional[Any] = None,
    extra_k_cache: Optional[Any] = None,
    extra_indices_in_kvcache: Optional[Any] = None,
    topk_length: Optional[Any] = None,
    extra_topk_length: Optional[Any] = None,
    out: Optional[Any] = None,
    enable_batch_invariant: bool = False,
    *,
    lse: Optional[Any] = None,
    batch_invariant: bool = False,
    lse_empty: float = math.inf,
    log_base: float = math.e,
    stream: int = 0,
    kv_scale: Optional[Any] = None,
    kv_format: Optional[str] = None,
    extra_kv_format: Optional[str] = None,
) -> Tuple[Any, Any]:
    """Computes attention of a few new tokens of each request over its cached latent keys; V is the first head_dim_v values of K.

    Args:
        q: [b, s_q, h_q, d_qk], bf16 or fp16; d_qk is 576 or 512.
        k_cache: [pages, page_size, h_k, d_qk], the type of q. Page size 64 is the fastest.
        block_table: [b, max_pages], int32: the page of each page_size keys of a request. Entries past a request's last page are
            not read. None: page r holds the keys of request r.
        cache_seqlens: [b], int32: the keys of each request. 0 is allowed. With indices, neither is read.
        head_dim_v: 512.
        tile_scheduler_metadata, num_splits: both results of `get_mla_metadata`, of either generation. None: this call makes a
            plan.
        softmax_scale: None: 1 / sqrt(d_qk).
        causal: token j of s_q sees the keys t ≤ length - s_q + j; else all of them.
        indices: [b, s_q, topk], int32: sparse attention: the keys that each token sees, page · page_size + slot; an entry that is
            no slot of the cache names no key. h_k is then 1.
        is_fp8_kvcache: True: k_cache is bytes (uint8, int8 or float8_e4m3fn), [pages, page_size, 1, 656] (d_qk is 576), [pages,
            page_size, 1, 584] (512) or, unless indices is given, [pages, page_size, 1, 576] (576), and if it is, 528 (512,
            FP8_528) or 288 (512, FP4_288); docs/semantics.md, "Cache formats". False: it has the type of q. None: its type
            decides, so calls written for either default of FlashMLA (False, and True since September 2026) work.
        topk_length: [b], int32: only so many indices of a token count.
        extra_k_cache, extra_indices_in_kvcache, extra_topk_length: the same of a second cache. Its format is that of k_cache, or,
            if both are bytes and their tokens differ in size, the format with that size.
        attn_sink: [h_q], fp32: out *= 1 / (1 + exp(attn_sink - lse)).
        out, lse: where to write the results, in place of new ones. They may have strides.
        batch_invariant, or by FlashMLA's name enable_batch_invariant: a request's result has the same bits whatever else is in
            the batch.
        lse_empty: lse of a row that sees no key, math.inf or -math.inf (which merging wants). Its out is 0.
        log_base: of lse: math.e or 2.
        stream: the CUDA stream's handle, for arrays other than PyTorch's, whose current stream is used.
        kv_scale: [1], fp32: the scale of an FP8 cache of 576 bytes a token; None: 1. Another cache has none.
        kv_format, extra_kv_format: the formats of the caches by their names, as `cache_append` has them. "FP8_528_SPLIT", "FP4_288_SPLIT" and "FP8_528_F32" are not told from others by a token's bytes.

    Returns:
        (out, lse): [b, s_q, h_q, head_dim_v] of the type of q, and [b, h_q, s_q] fp32, the log-sum-exp of each row's scores.

    Raises:
        TypeError, ValueError: an argument is not what it must be; the message names it and what is allowed.
        NotImplementedError: no kernel for this call runs on this machine; the message says why. Or, under grad mode, a tensor
            requires a gradient: there is no backward pass.
        RuntimeError: the GPU's driver refused something.
    """
    this = _operations.DECODE
    module = module_of(this, "q", q)
    if indices is None:
        if extra_k_cache is not None or extra_indices_in_kvcache is not None:
            raise ValueError(f"{this}: extra_k_cache, extra_indices_in_kvcache: must be None where indices is None")
        if topk_length is not None or extra_topk_length is not None:
            raise ValueError(f"{this}: topk_length, extra_topk_length: must be None where indices is None")
        if extra_kv_format is not None:
            raise ValueError(f"{this}: extra_kv_format: must be None where indices is None")
        names, formats, named = _DENSE, _library.DENSE_FP8_FORMATS, OF_TABLES
        read: Tuple[Any, ...] = (k_cache, block_table, cache_seqlens, kv_scale)
    else:
        if kv_scale is not None:
            raise ValueError(f"{this}: kv_scale: must be None where indices is given")
        names, formats, named = _SPARSE, _library.FP8_FORMATS, OF_LISTS
        extra = extra_k_cache, extra_indices_in_kvcache, extra_topk_length
        read = k_cache, indices, topk_length, *extra
    arrays = read + (attn_sink, out, lse)
    for array in arrays:
        if array is not None and type(array) is not type(q):  # which most often settles it
            check_kinds(this, module, *zip(names, arrays))
            break
    if k_cache is None or (indices is None and cache_seqlens is None):
        name, where = "k_cache" if k_cache is None else "cache_seqlens", " where indices is None" * (indices is None)
        raise TypeError(f"{this}: {name}: is None, must be {module.KIND}{where}")
    causal = flag_of(this, "causal", causal)
    of_q, of_cache = shape_of(this, module, "q", q, 4), shape_of(this, module, "k_cache", k_cache, 4)
    (b, s_q, h_q, d_qk), (_, page_size, h_k, width) = of_q, of_cache
    check_width(this, of_q, width, "k_cache", MLA_WIDTHS)
    head_dim_v, softmax_scale = of_values(this, module, d_qk, head_dim_v, softmax_scale, out)
    batch_invariant, stream = flag_of(this, "batch_invariant", batch_invariant), integer_of(this, "stream", stream)
    if enable_batch_invariant is not False:
        batch_invariant |= flag_of(this, "enable_batch_invariant", enable_batch_invariant)
    of_lse = lse_options(this, lse_empty, log_base)
    if is_fp8_kvcache is None:
        is_fp8_kvcache = kv_format is None and module.is_of_bytes(this, "k_cache", k_cache, stream)
    format_ = kv_format_of(this, "k_cache", is_fp8_kvcache, of_cache, formats, kv_format, named)
    if indices is None:
        config: Tuple[Any, ...] = b, s_q, h_q, page_size, h_k, causal, format_ >= FIRST_OF_BYTES, None, None, None
        plan = plan_of(
            this, tile_scheduler_metadata, num_splits, config, module, cache_seqlens, stream, batch_invariant
        )
        dense = q, k_cache, block_table, cache_seqlens, *plan, attn_sink, kv_scale
        options = format_, softmax_scale, causal, *of_lse, batch_invariant
        return module.run(_operations.DENSE_DECODE, dense, (out, lse), options, stream, head_dim_v)
    if causal:
        raise ValueError(f"{this}: causal: is True, must be False where indices is given: it names what a token sees")
    topk = shape_of(this, module, "indices", indices, 3)[2]
    of_extra = shape_of(this, module, "extra_k_cache", extra_k_cache, 4)
    extra_topk = shape_of(this, module, "extra_indices_in_kvcache", extra_indices_in_kvcache, 3)[2]
    config = b, s_q, h_q, page_size, h_k, False, format_ >= FIRST_OF_BYTES, topk, of_extra[1], extra_topk
    lengths = topk_length, extra_topk_length
    plan = plan_of(this, tile_scheduler_metadata, num_splits, config, module, q, stream, batch_invariant, lengths)
    sparse = q, k_cache, indices, topk_length, attn_sink, *extra, *plan
    extra_format = extra_format_of(this, extra_kv_format, format_, of_cache, of_extra)
    of_sparse = format_, softmax_scale, *of_lse, batch_invariant, extra_format
    return module.run(_operations.SPARSE_DECODE, sparse, (out, lse), of_sparse, stream, head_dim_v)


def flash_mla_with_kvcache_fp8(
    q: Any,
    k_cache: Any,
    block_table: Optional[Any],
    cache_seqlens: Any,
    head_dim_v: int,
    tile_scheduler_metadata: Optional[Any],
    num_splits: Optional[Any] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    descale_q: Optional[Any] = None,
    descale_k: Optional[Any] = None,
    *,
    out: Optional[Any] = None,
    lse: Optional[Any] = None,
    attn_sink: Optional[Any] = None,
    batch_invariant: bool = False,
    lse_empty: float = math.inf,
    log_base: float = math.e,
    stream: int = 0,
) -> Tuple[Any, Any]:
    """Computes `flash_mla_with_kvcache` over all keys of an FP8 cache with FP8 products: queries are e4m3 codes too, and a kernel
    may multiply codes by codes (docs/semantics.md, "FP8 products"). The name and the arguments up to descale_k are vLLM's.

    Args:
        q: [b, s_q, h_q, 576]: e4m3 codes, float8_e4m3fn, uint8 or int8. Or, which vLLM's function does not take, bf16 values: the
            call quantises each row with a scale of its own.
        k_cache: [pages, page_size, 1, 576]: e4m3 codes, of the same types. Or, which vLLM's function does not take either,
            [pages, page_size, 1, 656], with q in bf16.
        descale_q: [1], fp32: the scale of q's codes; None: 1. Values have none.
        descale_k: [1], fp32: the scale of a cache of 576 bytes a token; None: 1. One of 656 has its scales within.
        block_table, cache_seqlens, head_dim_v, softmax_scale, causal, out, lse, attn_sink, batch_invariant, lse_empty, log_base,
            stream: as in `flash_mla_with_kvcache`.
        tile_scheduler_metadata, num_splits: both results of `get_mla_metadata_dense_fp8` or of `get_mla_metadata`. None: this
            call makes a plan.

    Returns:
        (out, lse): [b, s_q, h_q, head_dim_v] bf16, and [b, h_q, s_q] fp32, the log-sum-exp of each row's scores.

    Raises:
        As `flash_mla_with_kvcache`.
    """
    this = _operations.DECODE_FP8
    module = module_of(this, "q", q)
    arrays = k_cache, block_table, cache_seqlens, descale_q, descale_k, attn_sink, out, lse
    for array in arrays:
        if array is not None and type(array) is not type(q):  # which most often settles it
            check_kinds(this, module, *zip(_DENSE_FP8, arrays))
            break
    if k_cache is None or cache_seqlens is None:
        raise TypeError(f"{this}: {'k_cache' if k_cache is None else 'cache_seqlens'}: is None, must be {module.KIND}")
    causal = flag_of(this, "causal", causal)
    of_q, of_cache = shape_of(this, module, "q", q, 4), shape_of(this, module, "k_cache", k_cache, 4)
    (b, s_q, h_q, d_qk), (_, page_size, h_k, width) = of_q, of_cache
    check_width(this, of_q, width, "k_cache", MLA_WIDTHS)
    head_dim_v, softmax_scale = of_values(this, module, d_qk, head_dim_v, softmax_scale, out)
    batch_invariant, stream = flag_of(this, "batch_invariant", batch_invariant), integer_of(this, "stream", stream)
    of_lse = lse_options(this, lse_empty, log_base)
    kv_format = kv_format_of(this, "k_cache", True, of_cache, _library.FP8_PRODUCT_FORMATS)
    config = b, s_q, h_q, page_size, h_k, causal, True, None, None, None
    plan = plan_of(this, tile_scheduler_metadata, num_splits, config, module, cache_seqlens, stream, batch_invariant)
    inputs = q, k_cache, block_table, cache_seqlens, *plan, attn_sink, descale_k, descale_q
    options = kv_format, softmax_scale, causal, *of_lse, batch_invariant
    return module.run(_operations.DENSE_DECODE_FP8, inputs, (out, lse), options, stream, head_dim_v)


# Returns the arrays other than q, for attention over all keys or over named keys.
_DENSE: Tuple[str, ...] = ("k_cache", "block_table", "cache_seqlens", "kv_scale", "attn_sink", "out", "lse")
_SPARSE = (
    "k_cache",
    "indices",
    "topk_length",
    "extra_k_cache",
    "extra_indices_in_kvcache",
    "extra_topk_length",
    *_DENSE[4:],
)
_DENSE_FP8 = *_DENSE[:3], "descale_q", "descale_k", *_DENSE[4:]


# ---- Merge ----------------------------------------------------------------------------------------------------------


def merge_states(
    out_parts: Any,
    lse_parts: Any,
    attn_sink: Optional[Any] = None,
    *,
    out: Optional[Any] = None,
    lse: Optional[Any] = None,
    part: Optional[int] = None,
    lse_empty: float = math.inf,
    log_base: float = math.e,
    stream: int = 0,
) -> Tuple[Any, Any]:
    """Joins n results over disjoint sets of keys into the result over all of them: parts of one machine or of several. For new
    results, PyTorch's autograd gives the gradients of the parts, of their lse and of attn_sink (docs/semantics.md, "Merge"), but
    no second derivatives, and none to torch.func.

    Args:
        out_parts: [n, b, s_q, h_q, d_v], bf16, fp16 or fp32. Or a pair (tuple or list) of two parts, each [b, s_q, h_q, d_v].
        lse_parts: [n, b, h_q, s_q], fp32; or such a pair, each [b, h_q, s_q]. A part whose lse is +inf or -inf saw no key, and
            its out is not read.
        attn_sink: [h_q], fp32: applied once, to the whole. Parts are computed without it.
        out, lse: where to write the results, in place of new ones; out may be of another type than the parts. Each may be
            exactly one part, which the result then replaces.
        part: out_parts is the out of this part alone, [b, s_q, h_q, d_v], and the out of the result is what it contributes: out ·
            exp(lse_parts[part] - lse). The contributions of all parts add up to the result of the merge, as ranks that have
            exchanged their lse add up their out. None: all parts are merged.
        lse_empty: lse of a row for which no part saw a key, math.inf or -math.inf.
        log_base: of the lse of the parts and of the result: math.e or 2.
        stream: as in `flash_mla_with_kvcache`.

    Returns:
        (out, lse): [b, s_q, h_q, d_v] and [b, h_q, s_q] fp32.

    Raises:
        As `flash_mla_with_kvcache`.
    """
    this, out_last, lse_last = _operations.MERGE, None, None
    is_pair = isinstance(out_parts, _PAIRS) or isinstance(lse_parts, _PAIRS)
    if is_pair:
        if part is not None:
            raise ValueError(f"{this}: part: is {part}, must be None where out_parts or lse_parts is a pair")
        out_parts, out_last = _pair_of(this, "out_parts", out_parts, "lse_parts")
        lse_parts, lse_last = _pair_of(this, "lse_parts", lse_parts, "out_parts")
    module = module_of(this, "out_parts", out_parts)
    check_given(this, module, ("lse_parts", lse_parts))
    check_kinds(this, module, ("attn_sink", attn_sink), ("out", out), ("lse", lse))
    options, stream = lse_options(this, lse_empty, log_base), integer_of(this, "stream", stream)
    number = 0
    if is_pair:
        check_given(this, module, ("out_parts[1]", out_last), ("lse_parts[1]", lse_last))
        out_parts = module.as_only(this, "out_parts", out_parts, stream)
        lse_parts = module.as_only(this, "lse_parts", lse_parts, stream)
    elif part is not None:
        number = _number_of(this, part, shape_of(this, module, "lse_parts", lse_parts, 4)[0])
        shape_of(this, module, "out_parts", out_parts, 4)
        out_parts = module.as_only(this, "out_parts", out_parts, stream)
    inputs = out_parts, lse_parts, out_last, lse_last, attn_sink
    return module.run(_operations.MERGE_STATES, inputs, (out, lse), (*options, number), stream)


_PAIRS = tuple, list


def _pair_of(this: str, name: str, parts: Any, other: str) -> Tuple[Any, Any]:
    if not isinstance(parts, _PAIRS):
        raise TypeError(f"{this}: {name}: is {type(parts).__name__}, must be a pair as {other} is")
    if len(parts) != 2:
        raise ValueError(f"{this}: {name}: has {len(parts)} arrays, must have 2; n parts are one array with n first")
    return parts[0], parts[1]


def _number_of(this: str, part: Any, n: int) -> int:
    """Returns the library's number of a part: 1 more, as 0 stands for all."""
    if not 0 <= integer_of(this, "part", part) < n:
        raise ValueError(f"{this}: part: is {part}, must be at least 0 and below the {n} parts of lse_parts")
    return integer_of(this, "part", part) + 1


# ---- Prefill --------------------------------------------------------------------------------------------------------


@overload
def flash_mla_sparse_fwd(
    q: Any, kv: Any, indices: Any, sm_scale: float, d_v: int = 512, attn_sink: Optional[Any] = None,
    topk_length: Optional[Any] = None, indexer_topk: Literal[0] = 0, *, is_fp8_kvcache: bool = False,
    out: Optional[Any] = None, max_logits: Optional[Any] = None, lse: Optional[Any] = None,
    lse_empty: float = math.inf, log_base: float = math.e, stream: int = 0, kv_format: Optional[str] = None,
) -> Tuple[Any, Any, Any]:  # fmt: skip
    ...


@overload
def flash_mla_sparse_fwd(
    q: Any, kv: Any, indices: Any, sm_scale: float, d_v: int = 512, attn_sink: Optional[Any] = None,
    topk_length: Optional[Any] = None, indexer_topk: int = 0, *, is_fp8_kvcache: bool = False,
    out: Optional[Any] = None, max_logits: Optional[Any] = None, lse: Optional[Any] = None,
    lse_empty: float = math.inf, log_base: float = math.e, stream: int = 0, kv_format: Optional[str] = None,
) -> Tuple[Any, ...]:  # fmt: skip
    ...


def flash_mla_sparse_fwd(
    q: Any,
    kv: Any,
    indices: Any,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Optional[Any] = None,
    topk_length: Optional[Any] = None,
    indexer_topk: int = 0,
    *,
    is_fp8_kvcache: bool = False,
    out: Optional[Any] = None,
    max_logits: Optional[Any] = None,
    lse: Optional[Any] = None,
    lse_empty: float = math.inf,
    log_base: float = math.e,
    stream: int = 0,
    kv_format: Optional[str] = None,
) -> Tuple[Any, ...]:
    """Computes attention of each prefill token over the keys that `indices` names; V is the first d_v values of K.

    Args:
        q: [s_q, h_q, d_qk], bf16; d_qk is 576 or 512.
        kv: [s_kv, h_kv, d_qk], bf16. Or pages, [pages, page_size, 1, d_qk], whose tokens are page · page_size + slot.
        indices: [s_q, h_kv, topk], int32: the tokens of kv that each token sees; an entry outside [0, s_kv) names no key,
            anywhere in the list.
        sm_scale: the factor of the scores.
        d_v: 512.
        attn_sink: [h_q], fp32: out *= 1 / (1 + exp(attn_sink - lse)).
        topk_length: [s_q], int32: only so many indices of a token count.
        indexer_topk: above 0, lse_indexer is returned too: the lse over only the first indexer_topk indices of a token, up to
            topk_length. Any number and any h_q are allowed. It costs as much as a call with lists of that length; the other
            results have the same bits with and without.
        is_fp8_kvcache: kv is pages of bytes (uint8, int8 or float8_e4m3fn), [pages, page_size, 1, 656] (d_qk is 576) or [pages,
            page_size, 1, 584, 528 or 288] (512); docs/semantics.md, "Cache formats".
        out, max_logits, lse: where to write the results, in place of new ones. They may have strides.
        lse_empty: lse of a row that sees no key, math.inf or -math.inf. Its out is 0, its max_logits -inf.
        log_base: of lse, lse_indexer and max_logits: math.e, as FlashMLA has it since 2026, or 2, as its documentation had it
            in 2025.
        stream, kv_format: as in `flash_mla_with_kvcache`.

    Returns:
        (out, max_logits, lse), with indexer_topk (out, max_logits, lse, lse_indexer): [s_q, h_q, d_v] bf16 and [s_q, h_q] fp32,
        the largest of each row's scores and their log-sum-exp.

    Raises:
        As `flash_mla_with_kvcache`.
    """
    this = _operations.PREFILL
    module = module_of(this, "q", q)
    check_given(this, module, ("kv", kv), ("indices", indices))
    check_kinds(this, module, ("topk_length", topk_length), ("attn_sink", attn_sink))
    check_kinds(this, module, ("out", out), ("max_logits", max_logits), ("lse", lse))
    of_q, keys = shape_of(this, module, "q", q, 3), shape_of(this, module, "kv", kv, 3, 4)
    check_width(this, of_q, keys[-1], "kv", MLA_WIDTHS)
    shape_of(this, module, "indices", indices, 3)
    sm_scale = scale_of(this, "sm_scale", sm_scale)
    d_v, _ = of_values(this, module, of_q[2], d_v, sm_scale, out, "d_v")
    indexer_topk = integer_of(this, "indexer_topk", indexer_topk)
    if indexer_topk < 0:
        raise ValueError(f"{this}: indexer_topk: is {indexer_topk}, must be 0 (no lse_indexer) or more")
    format_ = kv_format_of(this, "kv", is_fp8_kvcache, keys, named=kv_format)
    options = format_, sm_scale, *lse_options(this, lse_empty, log_base)
    stream, operation = integer_of(this, "stream", stream), _operations.SPARSE_PREFILL
    of_the_first: Tuple[Any, ...] = ()
    if indexer_topk:  # before the others: its out and max_logits are discarded
        inputs = q, kv, module.first(this, q, "indices", indices, indexer_topk, stream), topk_length, None
        out, max_logits, *of_the_first = module.run(operation, inputs, (out, max_logits, None), options, stream, d_v)
    inputs = q, kv, indices, topk_length, attn_sink
    results = module.run(operation, inputs, (out, max_logits, lse), options, stream, d_v)
    return *results, *of_the_first


# ---- Available kernels ----------------------------------------------------------------------------------------------


def capabilities(device: Any = "cpu") -> list[dict[str, Any]]:
    """Lists the library's kernels for one device.

    Args:
        device: "cpu", "cuda", "cuda:1", or a torch.device.

    Returns:
        A row for each kernel: operation, kernel (None where the operation has none there), reason (why it does not run
        there; "" if it does), part_of (the kernel that runs this one where it suits; "" for others), available,
        forced_only (it runs only when named), types (of vectors outside caches, "bfloat16"), kv_formats (that a call
        may name), d_qk and d_v (the sizes that it takes), products (of dense decode, "bf16" or "fp8"). An empty tuple: any,
        or it has no such argument.

    Raises:
        ValueError: the device is none of these.
    """
    return _operations.capabilities(*_operations.place_of("capabilities", device))

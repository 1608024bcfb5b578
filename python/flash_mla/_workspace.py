# SPDX-License-Identifier: MIT
"""Bounds the memory that calls need besides their arrays, before there are any arrays."""

from __future__ import annotations

import math
from typing import Any, Mapping, Optional

from . import _library, _operations
from ._arguments import flag_of, integer_of
from ._types import dtype_word, word_of

_THIS = "workspace_bound"
_D_V = 512


def workspace_bound(
    function: str,
    device: Any = "cpu",
    *,
    s_q: int,
    h_q: int,
    b: Optional[int] = None,
    topk: Optional[int] = None,
    extra_topk: int = 0,
    max_pages: Optional[int] = None,
    page_size: int = 64,
    h_k: int = 1,
    d_qk: int = 576,
    dtype: str = "bfloat16",
    is_fp8_kvcache: bool = False,
    batch_invariant: bool = False,
) -> int:
    """Returns the maximum memory that one call takes beside its arrays, for an engine to leave free. Smaller batches may take
    more than the largest, so a trial run does not measure it.

    Args:
        function: "flash_mla_with_kvcache", "flash_mla_with_kvcache_fp8" or "flash_mla_sparse_fwd".
        device: as in `capabilities`.
        s_q, h_q, b, topk, extra_topk, max_pages: the largest of any call: tokens of a request (for flash_mla_sparse_fwd, of the
            prefill), heads, requests, the lengths of the lists of `indices` and of `extra_indices_in_kvcache`, entries of a row
            of the block table. flash_mla_sparse_fwd has no b, flash_mla_with_kvcache_fp8 no topk, and flash_mla_with_kvcache
            takes either topk (sparse attention) or max_pages.
        page_size, h_k, d_qk, dtype, is_fp8_kvcache, batch_invariant: the same in all calls; dtype is that of q. For
            flash_mla_with_kvcache_fp8 the cache is always FP8, and dtype is "bfloat16" or "float8_e4m3fn".

    Returns:
        Bytes, enough for calls with a plan of `get_mla_metadata` and without.

    Raises:
        As `flash_mla_with_kvcache`.
    """
    if function not in (_operations.DECODE, _operations.DECODE_FP8, _operations.PREFILL):
        names = f"{_operations.DECODE!r}, {_operations.DECODE_FP8!r} or {_operations.PREFILL!r}"
        raise ValueError(f"{_THIS}: function: is {function!r}, must be {names}")
    prefill, fp8_products = function == _operations.PREFILL, function == _operations.DECODE_FP8
    for name, value, wanted in (
        ("b", b, not prefill),
        ("max_pages", max_pages, fp8_products or (not prefill and topk is None)),
        ("topk", topk, prefill or max_pages is None),
    ):
        if (value is not None) != wanted:
            either = " (give either topk or max_pages)" if function == _operations.DECODE and name != "b" else ""
            raise ValueError(
                f"{_THIS}: {name}: is {value}, must be {'given' if wanted else 'None'} for {function}{either}"
            )
    sizes = {"s_q": s_q, "h_q": h_q, "h_k": h_k, "page_size": page_size, "d_qk": d_qk}
    optional = {"b": b, "topk": topk, "max_pages": max_pages}
    sizes.update({name: value for name, value in optional.items() if value is not None})
    for name, value in sizes.items():
        if not 1 <= integer_of(_THIS, name, value) < 2**31:
            raise ValueError(f"{_THIS}: {name}: is {value}, must be in [1, 2^31)")
    if d_qk < _D_V:
        raise ValueError(f"{_THIS}: d_qk: is {d_qk}, must be at least the {_D_V} of the values")
    extra_topk = integer_of(_THIS, "extra_topk", extra_topk)
    if not 0 <= extra_topk < 2**31 or (extra_topk and (prefill or topk is None)):
        raise ValueError(f"{_THIS}: extra_topk: is {extra_topk}, must be in [0, 2^31), and 0 except in sparse decode")
    place = _operations.place_of(_THIS, device)
    other = "float8_e4m3fn" if fp8_products else "float16"
    if dtype not in ("bfloat16", other):
        raise ValueError(f"{_THIS}: dtype: is {dtype!r}, must be 'bfloat16' or {other!r}")
    packed = flag_of(_THIS, "is_fp8_kvcache", is_fp8_kvcache) or fp8_products
    bytes_of = {576: 656} if fp8_products else {576: 656, 512: 584}
    if packed and d_qk not in bytes_of:
        raise ValueError(f"{_THIS}: d_qk: is {d_qk}, must be {' or '.join(map(str, bytes_of))} where the cache is FP8")
    if packed and h_k != 1:
        raise ValueError(f"{_THIS}: h_k: is {h_k}, must be 1 where the cache is FP8")
    options: dict[str, Any] = {"softmax_scale": d_qk**-0.5}
    options["kv_format"] = _library.FP8_FORMATS[bytes_of[d_qk]] if packed else 0
    if not prefill:
        options["batch_invariant"] = flag_of(_THIS, "batch_invariant", batch_invariant)
    codes = dtype == "float8_e4m3fn"
    element, of_out = word_of(dtype, 8 if codes else 16), word_of("bfloat16" if codes else dtype, 16)
    cache = (word_of("uint8", 8), (1, page_size, 1, bytes_of[d_qk])) if packed else (element, (1, page_size, h_k, d_qk))
    int32, fp32 = dtype_word(0, 32), word_of("float32", 32)
    if prefill:
        keys = cache if packed else (element, (1, h_k, d_qk))
        tensors = {"q": (element, (s_q, h_q, d_qk)), "kv": keys, "indices": (int32, (s_q, h_k, topk))}
        tensors.update(
            {"out": (element, (s_q, h_q, _D_V)), "max_logits": (fp32, (s_q, h_q)), "lse": (fp32, (s_q, h_q))}
        )
        return _ask(_operations.SPARSE_PREFILL, place, tensors, options)
    tensors = {"q": (element, (b, s_q, h_q, d_qk)), "kv_cache": cache}
    tensors.update({"out": (of_out, (b, s_q, h_q, _D_V)), "lse": (fp32, (b, h_q, s_q))})
    if topk is None:
        pages, most = min(int(b or 0) * int(max_pages or 0), 2**31 - 1), 0
        tensors.update({"block_table": (int32, (b, max_pages)), "seqlens": (int32, (b,))})
        operation = _operations.DENSE_DECODE_FP8 if fp8_products else _operations.DENSE_DECODE
        type_, (_, *of_page, size) = cache
        rows = (size, 576) if packed and d_qk == 576 else (size,)  # d_qk is known but not the format
        for row in (576,) if codes else rows:
            tensors["kv_cache"] = type_, (pages, *of_page, row)
            options["kv_format"] = _library.DENSE_FP8_FORMATS[row] if packed else 0
            most = max(most, _ask(operation, place, tensors, options))
        return most
    tensors["indices"] = int32, (b, s_q, topk)
    if extra_topk:
        tensors.update({"extra_kv_cache": cache, "extra_indices": (int32, (b, s_q, extra_topk))})
    return _ask(_operations.SPARSE_DECODE, place, tensors, options)


def _ask(
    operation: _operations.Operation,
    place: tuple[int, int],
    tensors: Mapping[str, tuple[int, tuple[Any, ...]]],
    options: Mapping[str, Any],
) -> int:
    for name, (_, shape) in tensors.items():
        if math.prod(shape) >= 2**63:
            raise ValueError(f"{_THIS}: {name}: would have {math.prod(shape)} elements, must have fewer than 2^63")
    status, size = operation.workspace_bound(place, tensors, options)
    if status:
        _library.fail(status, _THIS, {}, {})
    return size

# SPDX-License-Identifier: MIT
"""The functions of SGLang 0.5.23's sglang/kernels/ops/attention/flash_mla_interface.py, with its signatures. These are also
the signatures of sgl_kernel/flash_mla.py of sglang-kernel 0.4.10, which has no use_legacy.

flash_mla.flash_mla_interface documents, under the same names, what the functions compute and refuse.
"""

from __future__ import annotations

import math
from typing import Any, Dict, NoReturn, Optional, Tuple, Union

from .. import flash_mla_interface
from ..flash_mla_interface import FlashMLASchedMeta

__all__ = [
    "FlashMLASchedMeta",
    "SPLIT_KV_MIN_TOPK",
    "flash_mla_mega_decode",
    "flash_mla_mega_prefill",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
]

SPLIT_KV_MIN_TOPK = 641
"""With at least this many indices over both caches SGLang may write FlashMLA's scheduler tables into the metadata (Blackwell only)."""


def get_mla_metadata(
    cache_seqlens: Optional[Any] = None,
    num_q_tokens_per_head_k: Optional[int] = None,
    num_heads_k: Optional[int] = None,
    num_heads_q: Optional[int] = None,
    is_fp8_kvcache: bool = False,
    topk: Optional[int] = None,
) -> Tuple[Union[Any, FlashMLASchedMeta], Optional[Any]]:
    """Returns metadata. The first table's number of rows depends neither on the batch nor on the lengths, so a batch's tables may
    be copied into those of the largest."""
    return flash_mla_interface.get_mla_metadata(
        cache_seqlens, num_q_tokens_per_head_k, num_heads_k, num_heads_q, is_fp8_kvcache, topk
    )


# SGLang's names of the formats: the bytes of a token, and this package's names, before and after FlashMLA's change of
# September 2026, which moved the scales of a token after its codes. None: the format that the bytes imply.
_FORMATS: Dict[str, Tuple[int, Optional[str], Optional[str]]] = {
    "V32": (656, None, None),
    "V32_NO_ROPE": (528, "FP8_528_F32", "FP8_528_F32"),
    "V4": (584, None, None),
    "V41": (528, "FP8_528_SPLIT", "FP8_528"),
}
_FP4 = "FP4_288_SPLIT", "FP4_288"  # 288 bytes


def _formats_of(
    k_cache: Any, extra_k_cache: Optional[Any], kv_format: Optional[str], has_tables: bool, use_legacy: bool
) -> Dict[str, str]:
    """Returns kv_format and extra_kv_format if the bytes of a token do not imply them."""
    this, of_token = "flash_mla_with_kvcache", k_cache.shape[-1]
    if kv_format is None and of_token == 528:
        kv_format = "V32_NO_ROPE" if has_tables else "V41"
    if kv_format is None:
        return {}
    if kv_format not in _FORMATS:
        raise ValueError(f"{this}: kv_format: is {kv_format!r}, must be None, {', '.join(map(repr, _FORMATS))}")
    wanted, *names = _FORMATS[kv_format]
    if of_token != wanted:
        raise ValueError(
            f"{this}: kv_format: is {kv_format!r} with {wanted} bytes per token, but k_cache has {of_token}"
        )
    name = names[not use_legacy]
    if name is None:
        return {}
    if extra_k_cache is None:
        return {"kv_format": name}
    extra = _FP4[not use_legacy] if extra_k_cache.shape[-1] == 288 else name
    return {"kv_format": name, "extra_kv_format": extra}


def flash_mla_with_kvcache(
    q: Any,
    k_cache: Any,
    block_table: Optional[Any],
    cache_seqlens: Optional[Any],
    head_dim_v: int,
    tile_scheduler_metadata: Union[Any, FlashMLASchedMeta],
    num_splits: Optional[Any] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    descale_q: Optional[Any] = None,
    descale_k: Optional[Any] = None,
    is_fp8_kvcache: bool = False,
    indices: Optional[Any] = None,
    attn_sink: Optional[Any] = None,
    extra_k_cache: Optional[Any] = None,
    extra_indices_in_kvcache: Optional[Any] = None,
    topk_length: Optional[Any] = None,
    extra_topk_length: Optional[Any] = None,
    kv_format: Optional[str] = None,
    *,
    use_legacy: bool = True,
) -> Tuple[Any, Any]:
    """Queries of one byte are e4m3 codes, with the scales descale_q and descale_k, over all keys of a cache of such codes.
    use_legacy is SGLang's layout of tokens of 528 and 288 bytes: with True, codes of all tokens precede their scales.
    """
    of_codes = indices is None and q.dtype.itemsize == 1
    if not of_codes and (descale_q is not None or descale_k is not None):
        raise ValueError("flash_mla_with_kvcache: descale_q, descale_k: must be None where q has values")
    if indices is None and kv_format is not None:
        raise ValueError("flash_mla_with_kvcache: kv_format: must be None where indices is None")
    metadata, has_tables = tile_scheduler_metadata, num_splits is not None
    if isinstance(metadata, FlashMLASchedMeta) and not metadata.have_initialized:
        metadata.tile_scheduler_metadata = metadata.num_splits = None  # SGLang's own, for the tiles of another kernel
    first = q, k_cache, block_table, cache_seqlens, head_dim_v, metadata, num_splits, softmax_scale, causal
    if of_codes:
        return flash_mla_interface.flash_mla_with_kvcache_fp8(*first, descale_q, descale_k, attn_sink=attn_sink)
    formats: Dict[str, Any] = (
        {} if indices is None else _formats_of(k_cache, extra_k_cache, kv_format, has_tables, use_legacy)
    )
    return flash_mla_interface.flash_mla_with_kvcache(
        *first,
        *(is_fp8_kvcache, indices, attn_sink, extra_k_cache, extra_indices_in_kvcache, topk_length, extra_topk_length),
        **formats,
    )


def flash_mla_sparse_fwd(
    q: Any,
    kv: Any,
    indices: Any,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Optional[Any] = None,
    topk_length: Optional[Any] = None,
    *,
    use_legacy: bool = True,
) -> Tuple[Any, Any, Any]:
    """Returns (out, max_logits, lse), the last two to base 2 with use_legacy, as in SGLang, else natural. Takes any number of
    heads: SGLang need not pad."""
    return flash_mla_interface.flash_mla_sparse_fwd(
        q, kv, indices, sm_scale, d_v, attn_sink, topk_length, log_base=2 if use_legacy else math.e
    )


# ---- Missing functions ----------------------------------------------------------------------------------------------


def _not_there(name: str) -> NoReturn:
    raise NotImplementedError(
        f"{name}: norm, rotation, attention and quantised output in one call are not supported; SGLang calls them separately "
        "with --dsv4-attn-backend flashmla"
    )


def flash_mla_mega_prefill(
    q: Any,
    kv: Any,
    indices: Any,
    positions: Any,
    cos_sin_cache: Any,
    softmax_scale: float,
    *,
    attn_sink: Optional[Any] = None,
    topk_length: Optional[Any] = None,
    enable_q_norm: bool = False,
    rms_norm_eps: float = 0.0,
    use_legacy: bool = True,
) -> NoReturn:
    _not_there("flash_mla_mega_prefill")


def flash_mla_mega_decode(
    q: Any,
    kv: Any,
    indices: Any,
    positions: Any,
    cos_sin_cache: Any,
    softmax_scale: float,
    *,
    attn_sink: Optional[Any] = None,
    topk_length: Optional[Any] = None,
    extra_kv: Optional[Any] = None,
    extra_indices: Optional[Any] = None,
    extra_topk_length: Optional[Any] = None,
    enable_q_norm: bool = False,
    rms_norm_eps: float = 0.0,
    use_legacy: bool = True,
) -> NoReturn:
    _not_there("flash_mla_mega_decode")

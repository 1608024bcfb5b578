# SPDX-License-Identifier: MIT
"""Has the names of FlashMLA's extension module, for programs that call it, or import it to test whether FlashMLA is installed.

This is not an extension module: the functions call those of flash_mla.flash_mla_interface, on every device, with the
arguments of FlashMLA's extension. Dense multi-head attention is not among them; use flash_attn_varlen_func.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

from . import flash_mla_interface
from .flash_mla_interface import FlashMLASchedMeta

__all__ = ["dense_decode_fwd", "sparse_decode_fwd", "sparse_prefill_fwd"]


def _metadata_of(tile_scheduler_metadata: Optional[Any], num_splits: Optional[Any]) -> Tuple[Any, Any, Any]:
    """Returns the metadata to pass on, and the holder of the tables after the call."""
    if tile_scheduler_metadata is None and num_splits is None:
        metadata = FlashMLASchedMeta()
        return metadata, None, metadata
    return tile_scheduler_metadata, num_splits, FlashMLASchedMeta(False, None, tile_scheduler_metadata, num_splits)


def dense_decode_fwd(
    q: Any,
    kcache: Any,
    head_size_v: int,
    seqlens_k: Any,
    block_table: Any,
    softmax_scale: float,
    is_causal: bool,
    tile_scheduler_metadata: Optional[Any],
    num_splits: Optional[Any],
    out_: Optional[Any] = None,
) -> Tuple[Any, Any, Any, Any]:
    """flash_mla_with_kvcache without indices. The tables are those that get_mla_metadata made, or None.

    Returns:
        (out, lse, tile_scheduler_metadata, num_splits): the tables that were given, or that were made in this call.
    """
    metadata, num_splits, tables = _metadata_of(tile_scheduler_metadata, num_splits)
    out, lse = flash_mla_interface.flash_mla_with_kvcache(
        *(q, kcache, block_table, seqlens_k, head_size_v, metadata, num_splits, softmax_scale, is_causal), out=out_
    )
    return out, lse, tables.tile_scheduler_metadata, tables.num_splits


def sparse_decode_fwd(
    q: Any,
    kv: Any,
    indices: Any,
    topk_length: Optional[Any],
    attn_sink: Optional[Any],
    tile_scheduler_metadata: Optional[Any],
    num_splits: Optional[Any],
    extra_kv: Optional[Any],
    extra_indices: Optional[Any],
    extra_topk_length: Optional[Any],
    d_v: int,
    sm_scale: float,
    out_: Optional[Any] = None,
    enable_batch_invariant: bool = False,
) -> Tuple[Any, Any, Any, Any]:
    """flash_mla_with_kvcache with indices, over caches of bytes.

    Returns:
        As dense_decode_fwd; None and None for tables that the batch-invariant mode does not make.
    """
    metadata, num_splits, tables = _metadata_of(tile_scheduler_metadata, num_splits)
    out, lse = flash_mla_interface.flash_mla_with_kvcache(
        *(q, kv, None, None, d_v, metadata, num_splits, sm_scale, False, True, indices, attn_sink, extra_kv),
        *(extra_indices, topk_length, extra_topk_length, out_, enable_batch_invariant),
    )
    return out, lse, tables.tile_scheduler_metadata, tables.num_splits


def sparse_prefill_fwd(
    q: Any,
    kv: Any,
    indices: Any,
    sm_scale: float,
    d_v: int,
    attn_sink: Optional[Any],
    topk_length: Optional[Any],
    out_: Optional[Any] = None,
) -> Tuple[Any, ...]:
    """Calls flash_mla_sparse_fwd; returns (out, max_logits, lse)."""
    return flash_mla_interface.flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v, attn_sink, topk_length, out=out_)

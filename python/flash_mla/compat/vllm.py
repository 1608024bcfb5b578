# SPDX-License-Identifier: MIT
"""The functions of vLLM 0.33.0's vllm/v1/attention/ops/flashmla.py, with its signatures.

flash_mla.flash_mla_interface documents, under the same names, what the functions compute and refuse.
"""

from __future__ import annotations

import sys
from typing import Any, Optional, Tuple

from .. import _operations, flash_mla_interface
from ..flash_mla_interface import FlashMLASchedMeta, flash_attn_varlen_func, flash_attn_varlen_kvpacked_func
from ..flash_mla_interface import flash_attn_varlen_qkvpacked_func, get_mla_metadata_dense_fp8

__all__ = [
    "FlashMLASchedMeta",
    "_is_flashmla_available",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "flash_mla_with_kvcache_fp8",
    "get_mla_metadata",
    "get_mla_metadata_dense_fp8",
    "is_flashmla_dense_supported",
    "is_flashmla_sparse_supported",
]

# ---- What runs here -------------------------------------------------------------------------------------------------


def _uses_a_gpu() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def _supported(operation: str) -> Tuple[bool, Optional[str]]:
    """Returns whether a kernel of the operation runs on the first GPU, and if not, why. vLLM also asks before it forks, and children of
    a process that has called the driver cannot use a GPU. So the result is True until PyTorch uses a GPU; a call then fails with the
    reason.
    """
    if not _uses_a_gpu():
        return True, None
    rows = [row for row in flash_mla_interface.capabilities("cuda") if row["operation"] == operation]
    if any(row["available"] and not row["forced_only"] for row in rows):
        return True, None
    return False, next((row["reason"] for row in rows if row["reason"]), f"{operation} has no kernel for GPUs here")


def _is_flashmla_available() -> Tuple[bool, Optional[str]]:
    """Returns (True, None), or (False, why sparse decode does not run on the first GPU)."""
    return _supported(_operations.SPARSE_DECODE.name)


def is_flashmla_dense_supported() -> Tuple[bool, Optional[str]]:
    """Returns the same for dense decode, which, unlike vLLM's, is not limited to Hopper."""
    return _supported(_operations.DENSE_DECODE.name)


def is_flashmla_sparse_supported() -> Tuple[bool, Optional[str]]:
    """Returns the same for sparse decode, which, unlike vLLM's, is not limited to Hopper and Blackwell."""
    return _supported(_operations.SPARSE_DECODE.name)


# ---- Decode ---------------------------------------------------------------------------------------------------------


def get_mla_metadata(*args: Any, **kwargs: Any) -> Tuple[FlashMLASchedMeta, None]:
    """Returns (FlashMLASchedMeta, None) for any arguments; the first call that gets it fills it."""
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: Any,
    k_cache: Any,
    block_table: Optional[Any],
    cache_seqlens: Optional[Any],
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Optional[Any] = None,
    attn_sink: Optional[Any] = None,
    extra_k_cache: Optional[Any] = None,
    extra_indices_in_kvcache: Optional[Any] = None,
    topk_length: Optional[Any] = None,
    extra_topk_length: Optional[Any] = None,
    out: Optional[Any] = None,
    enable_batch_invariant: bool = False,
) -> Tuple[Any, Any]:
    """With VLLM_BATCH_INVARIANT vLLM writes tables into the metadata that give the whole batch to one partition, so that no request
    is cut. They are in FlashMLA's order of 2025 and are not read: such metadata asks for the batch-invariant mode."""
    return flash_mla_interface.flash_mla_with_kvcache(
        *(q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits, softmax_scale),
        *(causal, is_fp8_kvcache, indices, attn_sink, extra_k_cache, extra_indices_in_kvcache, topk_length),
        *(extra_topk_length, out, enable_batch_invariant),
        batch_invariant=_has_tables_of_its_own(tile_scheduler_metadata),
    )


def _has_tables_of_its_own(metadata: Any) -> bool:
    if not isinstance(metadata, FlashMLASchedMeta) or metadata.have_initialized:
        return False
    return metadata.tile_scheduler_metadata is not None


def flash_mla_with_kvcache_fp8(
    q: Any,
    k_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    head_dim_v: int,
    tile_scheduler_metadata: Any,
    num_splits: Any,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    descale_q: Optional[Any] = None,
    descale_k: Optional[Any] = None,
) -> Tuple[Any, Any]:
    return flash_mla_interface.flash_mla_with_kvcache_fp8(
        *(q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits, softmax_scale),
        *(causal, descale_q, descale_k),
    )


# ---- Prefill --------------------------------------------------------------------------------------------------------


def flash_mla_sparse_fwd(
    q: Any,
    kv: Any,
    indices: Any,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Optional[Any] = None,
    topk_length: Optional[Any] = None,
    out: Optional[Any] = None,
    *,
    return_softmax_lse: bool = True,
) -> Tuple[Any, Any, Any]:
    """Returns (out, max_logits, lse). Takes any number of heads and any strides of out: vLLM need not pad. return_softmax_lse,
    which the file of 0.33.0 lacks: False gives None for max_logits and lse."""
    out, max_logits, lse = flash_mla_interface.flash_mla_sparse_fwd(
        q, kv, indices, sm_scale, d_v, attn_sink, topk_length, out=out
    )
    return (out, max_logits, lse) if return_softmax_lse else (out, None, None)

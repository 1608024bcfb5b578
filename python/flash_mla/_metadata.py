# SPDX-License-Identifier: MIT
"""The scheduler's metadata under FlashMLA's names: the distribution of a batch's keys over the SMs, in both of its generations."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Optional, Tuple

from . import _library, _operations
from ._arguments import check_kinds, integer_of, module_of, shape_of


@dataclasses.dataclass
class FlashMLASchedMeta:
    """The distribution of a batch's keys over the SMs: `get_mla_metadata` makes it, the first `flash_mla_with_kvcache` or
    `flash_mla_with_kvcache_fp8` that gets it fills it, and later calls use it. It serves every layer of a model in one step,
    because it depends only on the lengths (in sparse attention topk_length and extra_topk_length) and the shapes. Take a new one
    when lengths change: with the old one a GPU's results may be wrong, though no access is out of bounds."""

    class Config(NamedTuple):
        """What it was filled for; the calls after the first must agree."""

        b: int
        s_q: int
        h_q: int
        page_block_size: int
        h_k: int
        causal: bool
        is_fp8_kvcache: bool
        topk: Optional[int]
        extra_page_block_size: Optional[int]
        extra_topk: Optional[int]

    have_initialized: bool = False
    config: Optional[Config] = None
    tile_scheduler_metadata: Optional[Any] = None
    """[partitions, 8], int32, on the device of the call: what each partition has (docs/semantics.md, "The split plan")."""
    num_splits: Optional[Any] = None
    """[b + 1], int32: prefix sums of the number of splits of each request."""


def get_mla_metadata(
    cache_seqlens: Optional[Any] = None,
    num_q_tokens_per_head_k: Optional[int] = None,
    num_heads_k: Optional[int] = None,
    num_heads_q: Optional[int] = None,
    is_fp8_kvcache: bool = False,
    topk: Optional[int] = None,
    *args: Any,
    **kwargs: Any,
) -> Tuple[Any, Any]:
    """Makes the metadata of a batch for `flash_mla_with_kvcache`, for either generation of FlashMLA's interface.

    Without arguments: (FlashMLASchedMeta, None). The first call fills it.

    With arguments: (tile_scheduler_metadata, num_splits), the split plan as two int32 arrays on the device of the lengths.
    Both may be copied into arrays of the same shapes that a captured CUDA graph reads. The first one passed alone acts as a
    FlashMLASchedMeta.

    Args:
        cache_seqlens: [b], int32: the keys of each request.
        num_q_tokens_per_head_k: s_q · h_q / h_k.
        num_heads_k: h_k.
        num_heads_q, is_fp8_kvcache, topk: for sparse attention, where every query token names topk keys; only the number of
            lengths is used then. is_fp8_kvcache makes no difference.
        args, kwargs: other arguments of FlashMLA, which ignores all arguments since 2026. Ignored.

    Returns:
        (FlashMLASchedMeta, None), or two arrays: [partitions, 8], where the number of partitions depends on the device,
        num_q_tokens_per_head_k and num_heads_k (in sparse attention also on topk), never on the batch, and [b + 1].

    Raises:
        As `flash_mla_with_kvcache`.
    """
    if cache_seqlens is None:
        return FlashMLASchedMeta(), None
    lists = None if topk is None else (num_heads_q, topk)
    return _tables(_operations.PLAN, cache_seqlens, num_q_tokens_per_head_k, num_heads_k, lists)


def get_mla_metadata_dense_fp8(cache_seqlens: Any, num_q_tokens_per_head_k: int, num_heads_k: int) -> Tuple[Any, Any]:
    """Makes the metadata of a batch for `flash_mla_with_kvcache_fp8`, with vLLM's name and arguments. The plan is that of
    `get_mla_metadata`, whose results work too.

    Args:
        cache_seqlens: [b], int32: the keys of each request.
        num_q_tokens_per_head_k: s_q · h_q / h_k.
        num_heads_k: h_k, which is 1.

    Returns:
        (tile_scheduler_metadata, num_splits), as `get_mla_metadata` with arguments.

    Raises:
        As `flash_mla_with_kvcache`.
    """
    return _tables(_operations.PLAN_FP8, cache_seqlens, num_q_tokens_per_head_k, num_heads_k, None)


def _tables(
    this: str,
    cache_seqlens: Any,
    num_q_tokens_per_head_k: Any,
    num_heads_k: Any,
    lists: Optional[Tuple[Any, Any]],
) -> Tuple[Any, Any]:
    """Makes the tables of a split plan. `lists`: num_heads_q and topk of sparse attention."""
    module = module_of(this, "cache_seqlens", cache_seqlens)
    (b,) = shape_of(this, module, "cache_seqlens", cache_seqlens, 1)
    rows = integer_of(this, "num_q_tokens_per_head_k", num_q_tokens_per_head_k)
    heads = integer_of(this, "num_heads_k", num_heads_k)
    for name, value in (("num_q_tokens_per_head_k", rows), ("num_heads_k", heads)):
        if value < 1:
            raise ValueError(f"{this}: {name}: is {value}, must be at least 1")
    if rows * heads >= 2**31:
        raise ValueError(f"{this}: num_q_tokens_per_head_k: times num_heads_k is {rows * heads}, must be below 2^31")
    if lists is None:
        sizes: Tuple[int, ...] = (1, rows * heads, heads)
        tables = module.plan(_operations.DENSE_PLAN, this, cache_seqlens, (cache_seqlens,), sizes, 0)
    else:
        h_q, topk = integer_of(this, "num_heads_q", lists[0]), integer_of(this, "topk", lists[1])
        if heads != 1:
            raise ValueError(f"{this}: num_heads_k: is {heads}, must be 1 where topk is given")
        if h_q < 1 or rows % h_q:
            raise ValueError(f"{this}: num_heads_q: is {h_q}, must divide num_q_tokens_per_head_k, {rows}")
        sizes = b, topk, 0, rows // h_q, h_q
        tables = module.plan(_operations.SPARSE_PLAN, this, cache_seqlens, (None, None), sizes, 0)
    if not module.is_compiling():
        _attach(tables[0], FlashMLASchedMeta())
    return tables


def _attach(partitions: Any, meta: FlashMLASchedMeta) -> None:
    """Lets the first table serve as metadata. Callers of the newer generation pass arguments, which their FlashMLA ignores, and use
    only the first result; the first call must then fill it, possibly under graph capture."""
    try:
        partitions.sched_meta = meta
    except AttributeError:  # an array without attributes, such as NumPy's
        pass


_CONFIG_NAMES = {
    "b": "q.shape[0]",
    "s_q": "q.shape[1]",
    "h_q": "q.shape[2]",
    "page_block_size": "k_cache.shape[1]",
    "h_k": "k_cache.shape[2]",
    "topk": "indices.shape[-1]",
    "extra_page_block_size": "extra_k_cache.shape[1]",
    "extra_topk": "extra_indices_in_kvcache.shape[-1]",
}


def _check_config(this: str, filled_for: Any, config: Tuple[Any, ...]) -> None:
    """Raises with the name of the first size that differs."""
    for field, first, now in zip(FlashMLASchedMeta.Config._fields, filled_for, config):
        if first != now:
            name = _CONFIG_NAMES.get(field, field)
            raise ValueError(
                f"{this}: tile_scheduler_metadata: was filled by a call where {name} is {first}, in this call it is {now}; "
                "take a new one from get_mla_metadata"
            )


def plan_of(
    this: str,
    metadata: Optional[Any],
    num_splits: Optional[Any],
    config: Tuple[Any, ...],
    module: Any,
    like: Any,
    stream: int,
    batch_invariant: bool,
    lengths: Optional[Tuple[Optional[Any], Optional[Any]]] = None,
) -> Tuple[Optional[Any], Optional[Any]]:
    """Returns the two tables of the plan, and makes them if they are missing. None: the call plans for itself if it needs to.
    `like`: cache_seqlens, or q with the `lengths` of sparse attention."""
    if num_splits is not None:  # the older generation's call
        check_kinds(this, module, ("tile_scheduler_metadata", metadata), ("num_splits", num_splits))
        if metadata is None:
            raise TypeError(
                f"{this}: tile_scheduler_metadata: is None, must be {module.KIND} where num_splits is given"
            )
        return metadata, num_splits
    if metadata is None:
        return None, None
    if module.is_compiling() and module.is_array(metadata):  # a tensor in a graph has no such attribute
        if metadata.shape[1:] == (_library.PARTITION_FIELDS,):
            return None, None  # the call makes the same plan
        meta = None
    else:
        meta = metadata if isinstance(metadata, FlashMLASchedMeta) else getattr(metadata, "sched_meta", None)
    if meta is None:
        raise TypeError(
            f"{this}: tile_scheduler_metadata: is {type(metadata).__name__}, must be what get_mla_metadata returned, with "
            "num_splits if that was an array"
        )
    if batch_invariant:
        return None, None
    if not meta.have_initialized:
        if getattr(metadata, "tile_scheduler_metadata", None) is not None:
            raise ValueError(
                f"{this}: tile_scheduler_metadata: has tables that get_mla_metadata did not make; for results that do not "
                "depend on the batch pass batch_invariant=True"
            )
        filled = FlashMLASchedMeta.Config(*config)
        if lengths is None:
            sizes: Tuple[Any, ...] = filled.s_q, filled.h_q, filled.h_k
            tables = module.plan(_operations.DENSE_PLAN, this, like, (like,), sizes, stream)
        else:
            sizes = filled.b, filled.topk, filled.extra_topk or 0, filled.s_q, filled.h_q
            tables = module.plan(_operations.SPARSE_PLAN, this, like, lengths, sizes, stream)
        meta.tile_scheduler_metadata, meta.num_splits = tables
        meta.config, meta.have_initialized = filled, True
        return tables
    if (
        meta.config != config
    ):  # may be true under torch.compile for equal values: in some versions a named tuple never equals a tuple
        _check_config(this, meta.config, config)
    if not module.is_array(meta.tile_scheduler_metadata):
        kind = type(meta.tile_scheduler_metadata).__name__
        raise TypeError(f"{this}: tile_scheduler_metadata: was filled by a call with {kind}, must be {module.KIND}")
    return meta.tile_scheduler_metadata, meta.num_splits

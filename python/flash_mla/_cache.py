# SPDX-License-Identifier: MIT
"""Writes vectors into the paged caches that FlashMLA's functions read, reads vectors from them, and converts between formats."""

from __future__ import annotations

from typing import Any, Optional

from . import _operations
from ._arguments import check_given, check_kinds, format_named, integer_of, module_of, number_of, scale_of


def _scale_or_0(function: str, name: str, value: Any, otherwise: str = "0 = 1") -> float:
    value = number_of(function, name, value)
    return value if value == 0 else scale_of(function, name, value, otherwise)


_ROPE_PAIRS = {None: 0, "interleaved": 1, "halves": 2}  # FMLA_ROPE_…


def _rope_pairs(function: str, rope_pairs: Any) -> int:
    if rope_pairs is not None and not isinstance(rope_pairs, str):
        raise TypeError(f"{function}: rope_pairs: is {type(rope_pairs).__name__}, must be a str or None")
    if rope_pairs not in _ROPE_PAIRS:
        raise ValueError(f"{function}: rope_pairs: is {rope_pairs!r}, must be 'interleaved' or 'halves'")
    return _ROPE_PAIRS[rope_pairs]


def cache_append(
    latent: Any,
    rope: Optional[Any],
    kv_cache: Any,
    slot_mapping: Any,
    kv_format: str,
    *,
    cache_scale: float = 0.0,
    norm_weight: Optional[Any] = None,
    norm_eps: float = 0.0,
    positions: Optional[Any] = None,
    rope_table: Optional[Any] = None,
    rope_pairs: Optional[str] = None,
    stream: int = 0,
) -> None:
    """Writes the vectors of new tokens into pages, quantised to the format; applies the RMS norm and RoPE first, in the same
    pass, if requested (docs/semantics.md, "Cache append").

    Args:
        latent: [tokens, d_qk - 64], bf16, fp16 or fp32; [tokens, d_qk] where rope is None.
        rope: [tokens, 64], of the same type: the last 64 values of each token.
        kv_cache: [pages, page_size, 1, d_qk] bf16 or fp16, or [pages, page_size, 1, bytes of a token] uint8, int8 or
            float8_e4m3fn; written.
        slot_mapping: [tokens], int64 (int32 is converted): page · page_size + offset; -1 skips the token; on a GPU any other
            number that is no slot does too.
        kv_format: "BF16", "FP16", "FP8_656", "FP8_584", "FP8_576", "FP8_528", "FP8_528_SPLIT", "FP4_288", "FP4_288_SPLIT" or
            "FP8_528_F32" (docs/semantics.md, "Cache formats").
        cache_scale: the scale of a whole FP8_576 cache; 0 means 1. 0 for other formats.
        norm_weight, norm_eps: [512], of the type of latent, and the addend to the mean of the squares, for the RMS norm of the
            first 512 values of each token. None: no norm.
        positions, rope_table, rope_pairs: [tokens], int32 or int64; [max_positions, 64], fp32: 32 cosines and 32 sines of each
            position; "interleaved" (values 2 i and 2 i + 1 are a pair) or "halves" (i and 32 + i): RoPE of the last 64 values.
            None, all three: no RoPE. On a GPU a token whose position is outside the table is skipped.
        stream: as in `flash_mla_with_kvcache`.

    Raises:
        As `flash_mla_with_kvcache`.
    """
    this = _operations.APPEND
    module = module_of(this, "latent", latent)
    check_given(this, module, ("kv_cache", kv_cache), ("slot_mapping", slot_mapping))
    check_kinds(this, module, ("rope", rope), ("norm_weight", norm_weight))
    check_kinds(this, module, ("positions", positions), ("rope_table", rope_table))
    options = format_named(this, "kv_format", kv_format), _scale_or_0(this, "cache_scale", cache_scale)
    changes = _scale_or_0(this, "norm_eps", norm_eps, "0: nothing is added"), _rope_pairs(this, rope_pairs)
    stream = integer_of(this, "stream", stream)
    slots = module.slots_of(this, "slot_mapping", slot_mapping, stream)
    tensors = latent, rope, kv_cache, slots, norm_weight, positions, rope_table
    module.run(_operations.CACHE_APPEND, tensors, (), options + changes, stream)


def cache_gather(
    kv_cache: Any, slots: Any, kv_format: str, *, out: Optional[Any] = None, cache_scale: float = 0.0, stream: int = 0
) -> Any:
    """Reads the vectors of tokens from pages, as the values that attention uses.

    Args:
        kv_cache, kv_format, cache_scale, stream: as in `cache_append`.
        slots: [tokens], int64 (int32 is converted): page · page_size + offset; -1, or any other number that is no slot, gives a
            row of zeros.
        out: [tokens, d_qk], bf16, fp16 or fp32: the array to write. A new one has the type of a BF16 or FP16 cache; for other
            caches bf16, or fp32 if arrays are not PyTorch's.

    Returns:
        out.

    Raises:
        As `flash_mla_with_kvcache`.
    """
    this = _operations.GATHER
    module = module_of(this, "kv_cache", kv_cache)
    check_given(this, module, ("slots", slots))
    check_kinds(this, module, ("out", out))
    options = format_named(this, "kv_format", kv_format), _scale_or_0(this, "cache_scale", cache_scale)
    stream = integer_of(this, "stream", stream)
    slots = module.slots_of(this, "slots", slots, stream)
    return module.run(_operations.CACHE_GATHER, (kv_cache, slots), (out,), options, stream)


def cache_convert(
    src_cache: Any,
    src_slots: Any,
    src_format: str,
    dst_cache: Any,
    dst_slots: Any,
    dst_format: str,
    *,
    src_scale: float = 0.0,
    dst_scale: float = 0.0,
    stream: int = 0,
) -> None:
    """Copies tokens from pages of one format and page size to pages of another, in one pass.

    Args:
        src_cache, src_format, src_scale: as kv_cache, kv_format and cache_scale in `cache_append`, but read.
        dst_cache, dst_format, dst_scale: the same, with equal d_qk; written; shares no memory with src_cache.
        src_slots, dst_slots: [tokens], int64 (int32 is converted): where each token is, and where it goes. -1 in either skips the
            token; on a GPU any other number that is no slot does too.
        stream: as in `flash_mla_with_kvcache`.

    Raises:
        As `flash_mla_with_kvcache`.
    """
    this = _operations.CONVERT
    module = module_of(this, "src_cache", src_cache)
    check_given(this, module, ("src_slots", src_slots), ("dst_cache", dst_cache), ("dst_slots", dst_slots))
    formats = format_named(this, "src_format", src_format), format_named(this, "dst_format", dst_format)
    scales = _scale_or_0(this, "src_scale", src_scale), _scale_or_0(this, "dst_scale", dst_scale)
    stream = integer_of(this, "stream", stream)
    sources = module.slots_of(this, "src_slots", src_slots, stream)
    slots = module.slots_of(this, "dst_slots", dst_slots, stream)
    module.run(_operations.CACHE_CONVERT, (src_cache, sources, dst_cache, slots), (), formats + scales, stream)

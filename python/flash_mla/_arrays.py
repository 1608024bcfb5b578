# SPDX-License-Identifier: MIT
"""NumPy's arrays, and everything else that speaks DLPack (CuPy, JAX, …): what the public functions call for them.

bf16 arrays are those of ml_dtypes, since NumPy itself has no such type. A new array comes from the library of the caller's
by the Python array API (`__array_namespace__`); an array without it can be given `out=` and `lse=`.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, Callable, Dict, Optional, Tuple

from . import _library, _operations
from ._call import Call
from ._described import KIND, Described, HostArray, Unfit, described, device_of, is_array, is_numpy, kind_of
from ._described import put, refuse_fixed, shape_of
from ._types import dtype_word

__all__ = [
    "KIND",
    "device_of",
    "is_array",
    "kind_of",
    "put",
    "shape_of",
]  # what it has for others beside the functions below
_THIS = sys.modules[__name__]


def is_compiling() -> bool:
    """Nobody compiles these."""
    return False


# ---- Made -----------------------------------------------------------------------------------------------------------


def _make(like: Any, shape: Tuple[int, ...], dtype: Any) -> Optional[Any]:
    """A new array of the kind and on the device of `like`, or None; `dtype` is one, or the name of one."""
    if is_numpy(like):
        return sys.modules["numpy"].empty(shape, dtype)
    if not hasattr(like, "__array_namespace__"):
        return None
    namespace = like.__array_namespace__()
    dtype = getattr(namespace, dtype) if isinstance(dtype, str) else dtype
    return namespace.empty(shape, dtype=dtype, device=like.device)


def _result(function: str, name: str, given: Optional[Any], like: Any, shape: Tuple[int, ...], dtype: Any) -> Any:
    """`given`, or a new one."""
    if given is not None:
        refuse_fixed(function, name, given)
    made = _make(like, shape, dtype or getattr(like, "dtype", None)) if given is None else given
    if made is None:
        kind = type(like).__name__
        raise TypeError(
            f"{function}: {name}: cannot be made where arrays are {kind}, without __array_namespace__; pass {name}="
        )
    return made


def _memory(function: str, name: str, like: Any, shape: Tuple[int, ...], bits: int) -> Any:
    """Of the array's own library; else, as the caller does not look at it as a rule, of the host."""
    made = _make(like, shape, "int32" if bits == 32 else "uint8")
    if made is None and device_of(like)[0] == _library.CUDA:
        kind = type(like).__name__
        raise TypeError(f"{function}: {name}: its memory cannot be made: {kind} has no __array_namespace__")
    return HostArray(shape, bits) if made is None else made


_KEPT = 1 << 24
"""Bytes of host memory that a Call keeps for the next one, as far as it wants no more: of fresh memory every page costs a fault."""


def scratch(call: Call, like: Any, size: int, stream: int) -> Tuple[Any, int]:
    """Memory for one call on the stream, and its address."""
    if is_numpy(like) or like.form[0] != _library.CUDA:
        memory = call.memory
        if memory is None or memory.shape[0] < size:
            memory = HostArray((size,), 8)
            if size <= _KEPT:
                call.memory = memory
        return memory, memory.address
    this = _operations.DECODE
    on_gpu = Described(this, "workspace", _memory(this, "q", like.array, (size,), 8))
    return on_gpu, on_gpu.address


def free_scratch(memory: Any) -> None:
    """It goes with its last name."""


# ---- What the public functions call -----------------------------------------------------------------------------------


def _run(
    operation: Callable[..., None],
    this: str,
    arrays: Dict[str, Any],
    written: Tuple[str, ...],
    options: Tuple[Any, ...],
    stream: int,
) -> None:
    """Calls an operation with arrays, by the names that the public function has for them and in the order of the operation's."""
    given = [described(this, name, array, stream, name in written) for name, array in arrays.items()]
    try:
        operation(_THIS, *given, *options, stream)
    except Unfit:
        for name, array in arrays.items():
            if array is not None:
                described(this, name, array, stream, named=True)  # which says it with the name
        raise


def plan_decode(function: str, seqlens: Any, s_q: int, h_q: int, h_kv: int, stream: int) -> Tuple[Any, Any]:
    lengths = Described(function, "cache_seqlens", seqlens, stream)
    shape = lengths.form[3]
    if len(shape) != 1:
        raise ValueError(f"{function}: cache_seqlens: has {len(shape)} dimensions, must have 1")
    rows = _operations.decode_partitions(function, *lengths.form[:2], s_q, h_q, h_kv)
    partitions = _memory(function, "tile_scheduler_metadata", seqlens, (rows, _library.PARTITION_FIELDS), 32)
    num_splits = _memory(function, "num_splits", seqlens, (shape[0] + 1,), 32)
    table, splits = (described(function, "num_splits", array, stream) for array in (partitions, num_splits))
    _operations.decode_plan(function, _THIS, lengths, s_q, h_q, h_kv, table, splits, stream)
    return partitions, num_splits


def decode(q, k_cache, block_table, cache_seqlens, plan, attn_sink, d_v, out, lse, options, stream):
    this = _operations.DECODE
    b, s_q, h_q, _ = shape_of(this, "q", q)
    out = _result(this, "out", out, q, (b, s_q, h_q, d_v), None)
    lse = _result(this, "lse", lse, q, (b, h_q, s_q), "float32")
    arrays = {
        "q": q,
        "k_cache": k_cache,
        "block_table": block_table,
        "cache_seqlens": cache_seqlens,
        "tile_scheduler_metadata": plan[0],
        "num_splits": plan[1],
        "attn_sink": attn_sink,
        "out": out,
        "lse": lse,
    }
    _run(_operations.dense_decode, this, arrays, ("out", "lse"), options, stream)
    return out, lse


def plan_sparse(function, q, topk_length, extra_topk_length, sizes, stream):
    """`sizes`: b, topk, extra_topk, s_q, h_q."""
    b = sizes[0]
    place = device_of(q)
    lengths = [
        None if array is None else Described(function, name, array, stream)
        for name, array in (("topk_length", topk_length), ("extra_topk_length", extra_topk_length))
    ]
    rows = _operations.sparse_partitions(function, *place, *sizes)
    partitions = _memory(function, "tile_scheduler_metadata", q, (rows, _library.PARTITION_FIELDS), 32)
    num_splits = _memory(function, "num_splits", q, (b + 1,), 32)
    tables = [described(function, "num_splits", table, stream) for table in (partitions, num_splits)]
    _operations.sparse_plan(function, _THIS, place, *lengths, *sizes, *tables, stream)
    return partitions, num_splits


def decode_sparse(q, inputs, plan, d_v, out, lse, options, stream):
    """`inputs`: by the names that flash_mla_with_kvcache has for them, in the order of the library's operation."""
    this = _operations.DECODE
    b, s_q, h_q, _ = shape_of(this, "q", q)
    out = _result(this, "out", out, q, (b, s_q, h_q, d_v), None)
    lse = _result(this, "lse", lse, q, (b, h_q, s_q), "float32")
    tables = {"tile_scheduler_metadata": plan[0], "num_splits": plan[1]}
    arrays = {"q": q, **inputs, **tables, "out": out, "lse": lse}
    _run(_operations.sparse_decode, this, arrays, ("out", "lse"), options, stream)
    return out, lse


def prefill_sparse(q, inputs, d_v, indexer_topk, out, max_logits, lse, options, stream):
    """`inputs`: by the names that flash_mla_sparse_fwd has for them, in the order of the library's operation."""
    this = _operations.PREFILL
    rows = shape_of(this, "q", q)[:2]
    outputs = {
        "out": _result(this, "out", out, q, (*rows, d_v), None),
        "max_logits": _result(this, "max_logits", max_logits, q, rows, "float32"),
        "lse": _result(this, "lse", lse, q, rows, "float32"),
    }
    arrays, results, written = {"q": q, **inputs, **outputs}, tuple(outputs.values()), tuple(outputs)
    if indexer_topk:  # first: what it leaves in out and max_logits is not wanted
        lse_indexer = _make(q, rows, "float32")
        if lse_indexer is None:
            kind = type(q).__name__
            raise TypeError(f"{this}: indexer_topk: must be 0 where arrays are {kind}, without __array_namespace__")
        first = Described(this, "indices", inputs["indices"], stream).first(indexer_topk)
        of_the_first = {**arrays, "indices": first, "attn_sink": None, "lse": lse_indexer}
        _run(_operations.sparse_prefill, this, of_the_first, written, options, stream)
        results = *results, lse_indexer
    _run(_operations.sparse_prefill, this, arrays, written, options, stream)
    return results


def merge_states(out_parts, lse_parts, attn_sink, out, lse, options, stream):
    this = _operations.MERGE
    out = _result(this, "out", out, out_parts, shape_of(this, "out_parts", out_parts)[1:], None)
    lse = _result(this, "lse", lse, lse_parts, shape_of(this, "lse_parts", lse_parts)[1:], "float32")
    arrays = {"out_parts": out_parts, "lse_parts": lse_parts, "attn_sink": attn_sink, "out": out, "lse": lse}
    _run(_operations.merge, this, arrays, ("out", "lse"), options, stream)
    return out, lse


def append(latent, rope, kv_cache, slot_mapping, options, stream):
    this = _operations.APPEND
    refuse_fixed(this, "kv_cache", kv_cache)
    slots = _slots(this, "slot_mapping", slot_mapping, stream)
    arrays = {"latent": latent, "rope": rope, "kv_cache": kv_cache, "slot_mapping": slots}
    _run(_operations.cache_append, this, arrays, ("kv_cache",), options, stream)


def gather(kv_cache, slots, out, options, stream):
    this = _operations.GATHER
    kv_format = options[0]
    shapes = shape_of(this, "kv_cache", kv_cache), shape_of(this, "slots", slots)
    dtype = "float32" if kv_format > 2 else None
    out = _result(this, "out", out, kv_cache, _operations.gathered_shape(*shapes, kv_format), dtype)
    arrays = {"kv_cache": kv_cache, "slots": _slots(this, "slots", slots, stream), "out": out}
    _run(_operations.cache_gather, this, arrays, ("out",), options, stream)
    return out


def _slots(function: str, name: str, slots: Any, stream: int) -> Any:
    """int64, as the library wants them, where they are int32: some libraries make no other integers unless they are told to."""
    if is_numpy(slots):
        return slots.astype("int64") if slots.dtype == "int32" else slots
    given = Described(function, name, slots, stream)
    device_type, device, dtype, shape, strides = given.form
    if dtype != _operations.INT32 or len(shape) != 1:
        return given
    if device_type == _library.CPU:
        wide = HostArray(tuple(shape), 64)
        step = max(strides[0], 1)
        if shape[0]:
            narrow = (ctypes.c_int32 * ((shape[0] - 1) * step + 1)).from_address(given.address)
            wide.fill(narrow[::step])
        return wide
    if not hasattr(slots, "__array_namespace__"):
        return given
    # The two halves of each number side by side: no type of 64 bits is asked for.
    halves = Described(function, name, slots.__array_namespace__().stack([slots, slots >> 31], axis=-1), stream)
    halves.form = device_type, device, dtype_word(0, 64), shape, (halves.form[4][0] // 2,)
    return halves

# SPDX-License-Identifier: MIT
"""The library's operations, for every kind of array.

`arrays` is the module that knows the caller's kind: _torch or _arrays. It puts arrays down as C sees them, and makes scratch
memory.
"""

from __future__ import annotations

import ctypes
from typing import Any, Mapping, Optional

from . import _library
from ._call import Call, Calls, put_tensor
from ._library import library
from ._types import dtype_word

_plans = Calls(_library.DecodePlanArgs, ["seqlens"], optional=["partitions", "num_splits"])
_decodes = Calls(
    _library.DenseDecodeArgs,
    ["q", "kv_cache", "seqlens", "out", "lse"],
    optional=["block_table", "partitions", "num_splits", "attn_sink"],
)
_sparse_plans = Calls(
    _library.DecodePlanArgs, [], optional=["topk_length", "extra_topk_length", "partitions", "num_splits"]
)
_sparse_decodes = Calls(
    _library.SparseDecodeArgs,
    ["q", "kv_cache", "indices", "out", "lse"],
    optional=[
        *("topk_length", "attn_sink", "extra_kv_cache", "extra_indices", "extra_topk_length"),
        *("partitions", "num_splits"),
    ],
)
_prefills = Calls(
    _library.SparsePrefillArgs,
    ["q", "kv", "indices", "out", "max_logits", "lse"],
    optional=["topk_length", "attn_sink"],
)
_merges = Calls(_library.MergeArgs, ["out_parts", "lse_parts", "out", "lse"], optional=["attn_sink"])

_appends = Calls(_library.CacheAppendArgs, ["latent", "kv_cache", "slot_mapping"], optional=["rope"])
_gathers = Calls(_library.CacheGatherArgs, ["kv_cache", "slots", "out"])

# The functions' names, and how they call what the library's messages begin with, where that differs.
PLAN, DECODE, MERGE = "get_mla_metadata", "flash_mla_with_kvcache", "merge_states"
PREFILL = "flash_mla_sparse_fwd"
APPEND, GATHER = "cache_append", "cache_gather"
_NAMES: Mapping[str, Mapping[str, str]] = {
    PLAN: {
        "seqlens:": "cache_seqlens:",
        "s_q:": "num_q_tokens_per_head_k:",
        "h_q:": "num_q_tokens_per_head_k:",
        "h_kv:": "num_heads_k:",
        "b:": "cache_seqlens:",  # of a plan for sparse attention, on a device that has none
    },
    DECODE: {
        "kv_cache:": "k_cache:",
        "seqlens:": "cache_seqlens:",
        "q: d_v": "head_dim_v: d_v",
        "extra_kv_cache:": "extra_k_cache:",
        "extra_indices:": "extra_indices_in_kvcache:",
        "kv_format:": "is_fp8_kvcache:",
        # Of the plan that is made for it:
        "s_q:": "q: s_q:",
        "h_q:": "q: h_q:",
        "h_kv:": "k_cache: h_k:",
        "b:": "q: b:",
        "topk:": "indices: topk:",
        "extra_topk:": "extra_indices_in_kvcache: extra_topk:",
        "partitions:": "tile_scheduler_metadata:",
    },
    PREFILL: {
        "q: d_v": "d_v: d_v",
        "kv_format:": "is_fp8_kvcache:",
        "softmax_scale:": "sm_scale:",
    },
    MERGE: {},
    APPEND: {},
    GATHER: {},
}
# What Python says in another way: the format is a number there, and here a flag and the number of bytes.
_SENTENCES: Mapping[str, Mapping[str, str]] = {
    function: {
        "kv_format: is 0, must name the format": f"is_fp8_kvcache: is False, must be True where {cache} has bytes"
    }
    for function, cache in ((DECODE, "k_cache"), (PREFILL, "kv"))
}
INT32 = dtype_word(0, 32)
_WORKSPACE_SIZE = _library.DenseDecodeArgs.workspace_size.offset  # where the library writes it


def _check(status: int, function: str) -> None:
    if status:
        _library.fail(status, function, _NAMES[function], _SENTENCES.get(function, {}))


def in_words_of(function: str, text: str) -> str:
    """A text that begins with an argument of the library's operation, with the name that the function has for it."""
    return _library.in_words_of(_NAMES[function], text)


# ---- What runs here -------------------------------------------------------------------------------------------------


def place_of(function: str, device: Any) -> tuple[int, int]:
    """A device by its name: its type and its number."""
    kind, colon, index = str(device).partition(":")
    places = {"cpu": _library.CPU, "cuda": _library.CUDA}
    if kind not in places or not (index.isdigit() or not colon):
        raise ValueError(f"{function}: device: is {device!r}, must be 'cpu', 'cuda' or 'cuda:1'")
    return places[kind], int(index or 0)


_WORDS = ("operation", "kernel", "dtypes", "shapes", "reason", "part_of")


def capabilities(device_type: int, device_id: int) -> list[dict[str, Any]]:
    """The rows of fmla_capabilities for one device."""
    rows: list[dict[str, Any]] = []
    row = _library.Capability(struct_size=ctypes.sizeof(_library.Capability))
    while not library.fmla_capabilities(_library.Device(device_type, device_id), len(rows), row):
        words = {name: getattr(row, name) for name in _WORDS}
        text = {name: None if word is None else word.decode() for name, word in words.items()}
        rows.append({**text, "available": bool(row.available), "forced_only": bool(row.forced_only)})
    return rows


def require(function: str, operation: str, device_type: int, device_id: int) -> None:
    """Raises NotImplementedError, naming the operation, unless a kernel for it runs on the device."""
    rows = [row for row in capabilities(device_type, device_id) if row["operation"] == operation]
    if any(row["available"] and not row["forced_only"] for row in rows):
        return
    reasons = sorted({row["reason"] for row in rows if row["reason"]})
    why = "; ".join(reasons) if reasons else "this version of the library has no kernel for it"
    raise NotImplementedError(f"{function}: {operation}: {why}")


# ---- The plan -------------------------------------------------------------------------------------------------------


def decode_partitions(function: str, device_type: int, device: int, s_q: int, h_q: int, h_kv: int) -> int:
    """How many partitions a plan has on a device; the lengths and their number play no part."""
    call, count = _plans.take(None), ctypes.c_int32()
    args = call.args
    put_tensor(call.at.seqlens, 0, device_type, device, INT32, (0,), (1,))
    args.partitions, args.num_splits = None, None
    args.s_q, args.h_q, args.h_kv = s_q, h_q, h_kv
    _check(library.fmla_decode_plan_partitions(call.address, ctypes.addressof(count)), function)
    _plans.give_back(call, None)
    return count.value


def decode_plan(
    function: str,
    arrays: Any,
    seqlens: Any,
    s_q: int,
    h_q: int,
    h_kv: int,
    partitions: Any,
    num_splits: Any,
    stream: int,
) -> None:
    """fmla_decode_plan into the two tables."""
    call = _plans.take(arrays)
    args, at, put = call.args, call.at, arrays.put
    put(seqlens, at.seqlens)
    args.partitions = put(partitions, at.partitions)
    args.num_splits = put(num_splits, at.num_splits)
    args.s_q, args.h_q, args.h_kv, args.stream = s_q, h_q, h_kv, stream
    _check(library.fmla_decode_plan(call.address), function)
    _plans.give_back(call, arrays)


# ---- Dense decode ---------------------------------------------------------------------------------------------------


def dense_decode(
    arrays: Any,
    q: Any,
    kv_cache: Any,
    block_table: Optional[Any],
    seqlens: Any,
    partitions: Optional[Any],
    num_splits: Optional[Any],
    attn_sink: Optional[Any],
    out: Any,
    lse: Any,
    softmax_scale: float,
    causal: bool,
    lse_empty: int,
    log_base: int,
    batch_invariant: bool,
    stream: int,
) -> None:
    """fmla_dense_decode into `out` and `lse`."""
    call = _decodes.take(arrays)
    args, at, put = call.args, call.at, arrays.put
    put(q, at.q)
    put(kv_cache, at.kv_cache)
    put(seqlens, at.seqlens)
    put(out, at.out)
    put(lse, at.lse)
    args.block_table = put(block_table, at.block_table)
    args.partitions = put(partitions, at.partitions)
    args.num_splits = put(num_splits, at.num_splits)
    args.attn_sink = put(attn_sink, at.attn_sink)
    args.softmax_scale, args.causal = softmax_scale, causal
    args.lse_empty, args.log_base, args.batch_invariant = lse_empty, log_base, batch_invariant
    args.stream = stream
    _run_decode(arrays, call, q, stream)
    _decodes.give_back(call, arrays)


def _run_decode(arrays: Any, call: Call, q: Any, stream: int) -> None:
    args, address = call.args, call.address
    _check(library.fmla_dense_decode_workspace_size(address, address + _WORKSPACE_SIZE, None), DECODE)
    memory, args.workspace = arrays.scratch(call, q, args.workspace_size, stream)
    try:
        _check(library.fmla_dense_decode(address), DECODE)
    finally:
        arrays.free_scratch(memory)


# ---- Sparse decode --------------------------------------------------------------------------------------------------


def sparse_partitions(
    function: str, device_type: int, device: int, b: int, topk: int, extra_topk: int, s_q: int, h_q: int
) -> int:
    """How many partitions a plan for sparse decode has on a device. b and the lists may be 0, where they are not known: as many as a
    large batch wants."""
    call, count = _sparse_plans.take(None), ctypes.c_int32()
    args = call.args
    args.topk_length = args.extra_topk_length = args.partitions = args.num_splits = None
    args.sparse, args.s_q, args.h_q, args.b, args.topk, args.extra_topk = 1, s_q, h_q, b, topk, extra_topk
    args.target.device_type, args.target.id = device_type, device
    _check(library.fmla_decode_plan_partitions(call.address, ctypes.addressof(count)), function)
    _sparse_plans.give_back(call, None)
    return count.value


def sparse_plan(
    function: str,
    arrays: Any,
    place: tuple[int, int],
    topk_length: Optional[Any],
    extra_topk_length: Optional[Any],
    b: int,
    topk: int,
    extra_topk: int,
    s_q: int,
    h_q: int,
    partitions: Any,
    num_splits: Any,
    stream: int,
) -> None:
    """fmla_decode_plan for sparse decode into the two tables, which are on device `place`."""
    call = _sparse_plans.take(arrays)
    args, at, put = call.args, call.at, arrays.put
    args.topk_length = put(topk_length, at.topk_length)
    args.extra_topk_length = put(extra_topk_length, at.extra_topk_length)
    args.partitions = put(partitions, at.partitions)
    args.num_splits = put(num_splits, at.num_splits)
    args.sparse, args.b, args.topk, args.extra_topk = 1, b, topk, extra_topk
    args.s_q, args.h_q, args.stream = s_q, h_q, stream
    args.target.device_type, args.target.id = place
    _check_place(function, place, topk_length=args.topk_length, extra_topk_length=args.extra_topk_length)
    _check(library.fmla_decode_plan(call.address), function)
    _sparse_plans.give_back(call, arrays)


def _check_place(function: str, place: tuple[int, int], **lengths: Optional[int]) -> None:
    """The library would plan where the lengths are, and take the tables to be in the wrong place. `lengths`: addresses of
    tensors as C sees them."""
    for name, address in lengths.items():
        if address is None:
            continue
        device = _library.Tensor.from_address(address).device
        theirs, ours = (
            f"cuda:{number}" if kind == _library.CUDA else "cpu"
            for kind, number in ((device.device_type, device.id), place)
        )
        if theirs != ours:
            raise ValueError(f"{function}: {name}: device is {theirs}, must be {ours} as q's")


def sparse_decode(
    arrays: Any,
    q: Any,
    kv_cache: Any,
    indices: Any,
    topk_length: Optional[Any],
    attn_sink: Optional[Any],
    extra_kv_cache: Optional[Any],
    extra_indices: Optional[Any],
    extra_topk_length: Optional[Any],
    partitions: Optional[Any],
    num_splits: Optional[Any],
    out: Any,
    lse: Any,
    kv_format: int,
    softmax_scale: float,
    lse_empty: int,
    log_base: int,
    batch_invariant: bool,
    stream: int,
) -> None:
    """fmla_sparse_decode into `out` and `lse`."""
    call = _sparse_decodes.take(arrays)
    args, at, put = call.args, call.at, arrays.put
    put(q, at.q)
    put(kv_cache, at.kv_cache)
    put(indices, at.indices)
    put(out, at.out)
    put(lse, at.lse)
    args.topk_length = put(topk_length, at.topk_length)
    args.attn_sink = put(attn_sink, at.attn_sink)
    args.extra_kv_cache = put(extra_kv_cache, at.extra_kv_cache)
    args.extra_indices = put(extra_indices, at.extra_indices)
    args.extra_topk_length = put(extra_topk_length, at.extra_topk_length)
    args.partitions = put(partitions, at.partitions)
    args.num_splits = put(num_splits, at.num_splits)
    args.kv_format, args.softmax_scale = kv_format, softmax_scale
    args.lse_empty, args.log_base, args.batch_invariant = lse_empty, log_base, batch_invariant
    args.stream = stream
    size = call.address + _library.SparseDecodeArgs.workspace_size.offset
    _check(library.fmla_sparse_decode_workspace_size(call.address, size, None), DECODE)
    memory, args.workspace = arrays.scratch(call, q, args.workspace_size, stream)
    try:
        _check(library.fmla_sparse_decode(call.address), DECODE)
    finally:
        arrays.free_scratch(memory)
    _sparse_decodes.give_back(call, arrays)


# ---- Sparse prefill -------------------------------------------------------------------------------------------------


def sparse_prefill(
    arrays: Any,
    q: Any,
    kv: Any,
    indices: Any,
    topk_length: Optional[Any],
    attn_sink: Optional[Any],
    out: Any,
    max_logits: Any,
    lse: Any,
    kv_format: int,
    softmax_scale: float,
    lse_empty: int,
    log_base: int,
    stream: int,
) -> None:
    """fmla_sparse_prefill into `out`, `max_logits` and `lse`."""
    call = _prefills.take(arrays)
    args, at, put = call.args, call.at, arrays.put
    put(q, at.q)
    put(kv, at.kv)
    put(indices, at.indices)
    put(out, at.out)
    put(max_logits, at.max_logits)
    put(lse, at.lse)
    args.topk_length = put(topk_length, at.topk_length)
    args.attn_sink = put(attn_sink, at.attn_sink)
    args.kv_format, args.softmax_scale = kv_format, softmax_scale
    args.lse_empty, args.log_base, args.stream = lse_empty, log_base, stream
    size = call.address + _library.SparsePrefillArgs.workspace_size.offset
    _check(library.fmla_sparse_prefill_workspace_size(call.address, size, None), PREFILL)
    memory, args.workspace = (
        arrays.scratch(call, q, args.workspace_size, stream) if args.workspace_size else (None, None)
    )
    try:
        _check(library.fmla_sparse_prefill(call.address), PREFILL)
    finally:
        arrays.free_scratch(memory)
    _prefills.give_back(call, arrays)


# ---- Merge ----------------------------------------------------------------------------------------------------------


def merge(
    arrays: Any,
    out_parts: Any,
    lse_parts: Any,
    attn_sink: Optional[Any],
    out: Any,
    lse: Any,
    lse_empty: int,
    log_base: int,
    stream: int,
) -> None:
    """fmla_merge into `out` and `lse`."""
    call = _merges.take(arrays)
    args, at, put = call.args, call.at, arrays.put
    put(out_parts, at.out_parts)
    put(lse_parts, at.lse_parts)
    put(out, at.out)
    put(lse, at.lse)
    args.attn_sink = put(attn_sink, at.attn_sink)
    args.lse_empty, args.log_base, args.stream = lse_empty, log_base, stream
    _check(library.fmla_merge(call.address), MERGE)
    _merges.give_back(call, arrays)


# ---- The cache ------------------------------------------------------------------------------------------------------


def cache_append(
    arrays: Any,
    latent: Any,
    rope: Optional[Any],
    kv_cache: Any,
    slot_mapping: Any,
    kv_format: int,
    cache_scale: float,
    stream: int,
) -> None:
    """fmla_cache_append."""
    call = _appends.take(arrays)
    args, at, put = call.args, call.at, arrays.put
    put(latent, at.latent)
    put(kv_cache, at.kv_cache)
    put(slot_mapping, at.slot_mapping)
    args.rope = put(rope, at.rope)
    args.kv_format, args.cache_scale, args.stream = kv_format, cache_scale, stream
    _check(library.fmla_cache_append(call.address), APPEND)
    _appends.give_back(call, arrays)


def cache_gather(
    arrays: Any, kv_cache: Any, slots: Any, out: Any, kv_format: int, cache_scale: float, stream: int
) -> None:
    """fmla_cache_gather into `out`."""
    call = _gathers.take(arrays)
    args, at, put = call.args, call.at, arrays.put
    put(kv_cache, at.kv_cache)
    put(slots, at.slots)
    put(out, at.out)
    args.kv_format, args.cache_scale, args.stream = kv_format, cache_scale, stream
    _check(library.fmla_cache_gather(call.address), GATHER)
    _gathers.give_back(call, arrays)


FP8_584 = 4  # FMLA_KV_FP8_584


def gathered_shape(kv_cache_shape: Any, slots_shape: Any, kv_format: int) -> tuple[int, int]:
    """Of `out`: what is no shape of a cache or of slots is the library's to refuse."""
    tokens = slots_shape[0] if len(slots_shape) else 0
    if kv_format > 2:
        return tokens, 512 if kv_format == FP8_584 else 576
    return tokens, kv_cache_shape[-1] if len(kv_cache_shape) else 0

# SPDX-License-Identifier: MIT
"""The library's operations on described tensors (_call.View): what every kind of array shares.

`arrays` is the module that knows the caller's kind of array: _torch or _arrays. It describes arrays and makes new ones.
"""

from __future__ import annotations

import ctypes
from typing import Any, Mapping, Optional

from . import _library
from ._call import Call, Calls, View
from ._library import library

_plans = Calls(_library.DecodePlanArgs, ["seqlens"])
_decodes = Calls(_library.DenseDecodeArgs, ["q", "kv_cache", "block_table", "seqlens", "attn_sink", "out", "lse"])
_merges = Calls(_library.MergeArgs, ["out_parts", "lse_parts", "attn_sink", "out", "lse"])

# What the Python functions call the library's arguments, where that differs.
DECODE = "flash_mla_with_kvcache"
DECODE_NAMES = {"kv_cache": "k_cache", "seqlens": "cache_seqlens"}
PLAN = "get_mla_metadata"
PLAN_NAMES = {"seqlens": "cache_seqlens"}
MERGE = "merge_states"


def capabilities(device_type: int, device_id: int = 0) -> list[dict[str, Any]]:
    """The rows of fmla_capabilities for one device."""
    rows = []
    row = _library.Capability(struct_size=ctypes.sizeof(_library.Capability))
    while True:
        status = library.fmla_capabilities(_library.Device(device_type, device_id), len(rows), row)
        if status:  # past the end, or no such type of device
            if not rows:
                _library.fail(status, "capabilities", {})
            return rows
        text = {
            name: value.decode() if value is not None else None
            for name in ("operation", "kernel", "dtypes", "shapes", "reason")
            for value in [getattr(row, name)]
        }
        rows.append({**text, "available": bool(row.available), "forced_only": bool(row.forced_only)})


def require(function: str, operation: str, device_type: int, device_id: int) -> None:
    """Raises NotImplementedError, naming the operation, unless a kernel for it runs on the device."""
    rows = [row for row in capabilities(device_type, device_id) if row["operation"] == operation]
    if any(row["available"] and not row["forced_only"] for row in rows):
        return
    reasons = sorted({row["reason"] for row in rows if row["reason"]})
    why = "; ".join(reasons) if reasons else "this version of the library has no kernel for it"
    raise NotImplementedError(f"{function}: {operation}: {why}")


# ---- The plan -------------------------------------------------------------------------------------------------------


def _describe_plan(seqlens: View, s_q: int, h_q: int, h_kv: int) -> Call:
    call = _plans.take()
    call.put("seqlens", seqlens)
    args = call.args
    args.s_q, args.h_q, args.h_kv = s_q, h_q, h_kv
    args.plan, args.plan_size, args.stream = None, 0, None
    return call


def decode_plan_words(seqlens: View, s_q: int, h_q: int, h_kv: int) -> int:
    """How many int32 a plan for these requests takes. Depends on the shape and the device of `seqlens` alone."""
    call, size = _describe_plan(seqlens, s_q, h_q, h_kv), ctypes.c_size_t()
    status = library.fmla_decode_plan_size(call.address, size)
    if status:
        _library.fail(status, PLAN, PLAN_NAMES)
    _plans.give_back(call)
    return size.value // 4


def decode_plan(seqlens: View, s_q: int, h_q: int, h_kv: int, plan: View, stream: int) -> None:
    """Writes the plan of the requests into `plan`, int32."""
    call = _describe_plan(seqlens, s_q, h_q, h_kv)
    call.args.plan, call.args.plan_size, call.args.stream = plan[0], 4 * plan[4][0], stream
    status = library.fmla_decode_plan(call.address)
    if status:
        _library.fail(status, PLAN, PLAN_NAMES)
    _plans.give_back(call)


# ---- Dense decode ---------------------------------------------------------------------------------------------------


def dense_decode(
    arrays: Any,
    q: Any,
    kv_cache: Any,
    block_table: Optional[Any],
    seqlens: Any,
    plan: Optional[Any],
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
    """fmla_dense_decode into `out` and `lse`; the workspace is one of the arrays' own."""
    view = arrays.view
    call = _decodes.take()
    put = call.put
    put("q", view(q))
    put("kv_cache", view(kv_cache))
    put("block_table", None if block_table is None else view(block_table))
    put("seqlens", view(seqlens))
    put("attn_sink", None if attn_sink is None else view(attn_sink))
    put("out", view(out))
    put("lse", view(lse))
    args = call.args
    if plan is None:
        args.plan, args.plan_size = None, 0
    else:
        described = view(plan)
        args.plan, args.plan_size = described[0], 4 * described[4][0]
    args.softmax_scale, args.causal = softmax_scale, causal
    args.lse_empty, args.log_base, args.batch_invariant = lse_empty, log_base, batch_invariant
    args.workspace, args.workspace_size, args.stream = None, 0, stream
    size = ctypes.c_size_t()
    status = library.fmla_dense_decode_workspace_size(call.address, size, None)
    if not status:
        workspace = arrays.scratch(q, size.value)
        args.workspace, args.workspace_size = view(workspace)[0], size.value
        status = library.fmla_dense_decode(call.address)
    if status:
        _library.fail(status, DECODE, DECODE_NAMES)
    _decodes.give_back(call)


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
    view = arrays.view
    call = _merges.take()
    call.put("out_parts", view(out_parts))
    call.put("lse_parts", view(lse_parts))
    call.put("attn_sink", None if attn_sink is None else view(attn_sink))
    call.put("out", view(out))
    call.put("lse", view(lse))
    args = call.args
    args.lse_empty, args.log_base, args.stream = lse_empty, log_base, stream
    status = library.fmla_merge(call.address)
    if status:
        _library.fail(status, MERGE, {})
    _merges.give_back(call)

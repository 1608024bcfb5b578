# SPDX-License-Identifier: MIT
"""PyTorch: what the public functions call for its tensors.

Imported where PyTorch has been: with this package if it was there before, else with the first array.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch
from torch.autograd import forward_ad

from . import _operations
from . import _torch_operators as operators
from ._torch_tensors import KIND, device_of, is_array, kind_of, of_c, shape_of, strange

__all__ = [
    "KIND",
    "device_of",
    "is_array",
    "kind_of",
    "shape_of",
]  # what it has for the public functions beside those below
_ops = torch.ops.flash_mla
is_compiling = torch.compiler.is_compiling

# ---- How an operation is called ---------------------------------------------------------------------------------------


def _is_plain(tensors: Tuple[Optional[torch.Tensor], ...]) -> bool:
    """Nobody is compiling, tracing, transforming, watching or asking for gradients, and these are tensors whose values lie in their
    memory: an operator's function may then be called without the dispatcher, whose time a call of few microseconds feels. The first
    is there."""
    if is_compiling() or _dispatch_modes() or _transforms() or _is_profiled() or _is_tracing():
        return False
    if forward_ad._current_level >= 0:
        return False
    with_gradients = _grad_is_enabled()
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) is not _Tensor or _is_negative(tensor) or (with_gradients and tensor.requires_grad):
            return False
    first: Any = tensors[0]
    return first.is_cuda or first.is_cpu


_Tensor, _is_negative, _grad_is_enabled = torch.Tensor, torch.Tensor.is_neg, torch.is_grad_enabled
_dispatch_modes, _transforms = of_c("_len_torch_dispatch_stack"), of_c("_functorch", "peek_interpreter_stack")
_is_profiled, _is_tracing = of_c("_autograd", "_profiler_enabled"), of_c("_is_tracing")


def _run(
    this: str,
    operator: str,
    names: Tuple[str, ...],
    tensors: Tuple[Any, ...],
    *rest: Any,
    written: Tuple[Any, ...] = (),
) -> Any:
    """Calls an operator with tensors, among them those that are `written`, and what comes after them. `names`: what the public
    function calls the tensors."""
    if not _is_plain(tensors):
        if not is_compiling():
            _refuse_strange(this, names, tensors)
        return getattr(_ops, operator).default(*tensors, *rest)
    try:
        results = getattr(operators, operator)(*tensors, *rest)
    except (ValueError, RuntimeError):
        _refuse_strange(this, names, tensors)
        raise
    if written:
        operators.count_writes(*written)
    return results


def _refuse_strange(this: str, names: Tuple[str, ...], tensors: Tuple[Any, ...]) -> None:
    why = strange(this, zip(names, tensors), _WRITTEN[this])
    if why is not None:
        raise ValueError(why) from None


_WRITTEN = {
    _operations.PLAN: (),
    _operations.DECODE: ("out", "lse"),
    _operations.PREFILL: ("out", "max_logits", "lse"),
    _operations.MERGE: ("out", "lse"),
    _operations.APPEND: ("kv_cache",),
    _operations.GATHER: ("out",),
}


# ---- What the public functions call -----------------------------------------------------------------------------------

# They take a `stream` as those of _arrays do, and have no use for it: it is the current one.


def plan_decode(
    function: str, seqlens: torch.Tensor, s_q: int, h_q: int, h_kv: int, stream: int
) -> Tuple[torch.Tensor, torch.Tensor]:
    if _is_plain((seqlens,)):
        return operators.plan(function, seqlens, s_q, h_q, h_kv)
    return _run(function, "decode_plan", ("cache_seqlens",), (seqlens,), s_q, h_q, h_kv)


_DENSE = "q", "k_cache", "block_table", "cache_seqlens", "tile_scheduler_metadata", "num_splits", "attn_sink"


def decode(q, k_cache, block_table, cache_seqlens, plan, attn_sink, d_v, out, lse, options, stream):
    inputs = q, k_cache, block_table, cache_seqlens, *plan, attn_sink
    if out is None and lse is None:
        return _run(_operations.DECODE, "dense_decode", _DENSE, inputs, d_v, *options)
    results = _complete(out, lse, operators.decode_results, q, d_v)
    _run(
        _operations.DECODE, "dense_decode_out", (*_DENSE, "out", "lse"), (*inputs, *results), *options, written=results
    )
    return results


def plan_sparse(function, q, topk_length, extra_topk_length, sizes, stream):
    if _is_plain((q, topk_length, extra_topk_length)):
        return operators.plan_of_lists(function, q, topk_length, extra_topk_length, sizes, sizes)
    names = "q", "topk_length", "extra_topk_length"
    return _run(function, "sparse_plan", names, (q, topk_length, extra_topk_length), *sizes)


def decode_sparse(q, inputs, plan, d_v, out, lse, options, stream):
    names, tensors = ("q", *inputs, "tile_scheduler_metadata", "num_splits"), (q, *inputs.values(), *plan)
    if out is None and lse is None:
        return _run(_operations.DECODE, "sparse_decode", names, tensors, d_v, *options)
    results = _complete(out, lse, operators.decode_results, q, d_v)
    _run(
        _operations.DECODE, "sparse_decode_out", (*names, "out", "lse"), (*tensors, *results), *options, written=results
    )
    return results


def prefill_sparse(q, inputs, d_v, indexer_topk, out, max_logits, lse, options, stream):
    this, names, tensors = _operations.PREFILL, ("q", *inputs), (q, *inputs.values())
    if out is None and max_logits is None and lse is None and not indexer_topk:
        return _run(this, "sparse_prefill", names, tensors, d_v, *options)
    out = q.new_empty(*q.shape[:2], d_v) if out is None else out
    max_logits = operators.prefill_row(q) if max_logits is None else max_logits
    lse = operators.prefill_row(q) if lse is None else lse
    results, names = (out, max_logits, lse), (*names, "out", "max_logits", "lse")
    if indexer_topk:  # first: what it leaves in out and max_logits is not wanted
        kv, indices, topk_length, _ = inputs.values()
        lse_indexer = operators.prefill_row(q)
        first = q, kv, indices[:, :, :indexer_topk], topk_length, None, out, max_logits, lse_indexer
        _run(this, "sparse_prefill_out", names, first, *options)
        _run(this, "sparse_prefill_out", names, (*tensors, *results), *options, written=results)
        return *results, lse_indexer
    _run(this, "sparse_prefill_out", names, (*tensors, *results), *options, written=results)
    return results


def merge_states(out_parts, lse_parts, attn_sink, out, lse, options, stream):
    names, inputs = ("out_parts", "lse_parts", "attn_sink"), (out_parts, lse_parts, attn_sink)
    if out is None and lse is None:
        return _run(_operations.MERGE, "merge", names, inputs, *options)
    results = _complete(out, lse, operators.merge_results, out_parts, lse_parts)
    _run(_operations.MERGE, "merge_out", (*names, "out", "lse"), (*inputs, *results), *options, written=results)
    return results


def append(latent, rope, kv_cache, slot_mapping, options, stream):
    names = "latent", "rope", "kv_cache", "slot_mapping"
    tensors = latent, rope, kv_cache, _slots(slot_mapping)
    _run(_operations.APPEND, "cache_append", names, tensors, *options, written=(kv_cache,))


def gather(kv_cache, slots, out, options, stream):
    inputs = kv_cache, _slots(slots)
    if out is None:
        return _run(_operations.GATHER, "cache_gather", ("kv_cache", "slots"), inputs, *options)
    _run(_operations.GATHER, "cache_gather_out", ("kv_cache", "slots", "out"), (*inputs, out), *options, written=(out,))
    return out


def _slots(slots: torch.Tensor) -> torch.Tensor:
    """As the library wants them."""
    return slots.to(torch.int64) if slots.dtype == torch.int32 else slots


def _complete(out, lse, make, *arguments):
    """The results that were given, at least one of them, and a new one for the other."""
    if out is not None and lse is not None:
        return out, lse
    new_out, new_lse = make(*arguments)
    return (new_out, lse) if out is None else (out, new_lse)

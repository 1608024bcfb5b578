# SPDX-License-Identifier: MIT
"""Implements the public functions for PyTorch's tensors.

Imported once PyTorch has been: with this package if PyTorch was imported before it, else with the first array.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any, DefaultDict, Dict, Optional, Sequence, Tuple

import torch
from torch import SymInt
from torch.autograd import forward_ad

from . import _operations
from . import _torch_gradients as _torch_gradients  # these two register their operators
from . import _torch_merge as _torch_merge
from . import _torch_operators as operators
from ._torch_repeat import Repeats
from ._torch_tensors import KIND, device_of, is_array, is_of_bytes, kind_of, of_c, shape_of, strange

# Exported in addition to the functions below:
__all__ = ["KIND", "SymInt", "device_of", "is_array", "is_of_bytes", "kind_of", "shape_of"]
_ops = operators.registered
is_compiling = torch.compiler.is_compiling

# ---- How an operation is called ---------------------------------------------------------------------------------------


def _is_watched() -> bool:
    """Returns whether a mode compiles, traces, transforms or profiles calls, or computes tangents: calls must then go through the
    dispatcher."""
    if is_compiling() or _dispatch_modes() or _transforms() or _is_profiled() or _is_tracing():
        return True
    return forward_ad._current_level >= 0


def _are_plain(tensors: Tuple[Optional[torch.Tensor], ...]) -> bool:
    """Returns whether all tensors have their values in memory and none needs a gradient. If no mode is active either, the call skips
    the dispatcher, whose time is noticeable in a call of a few microseconds. The first tensor must not be None.
    """
    if not _KINDS.issuperset(map(type, tensors)):
        return False
    present: Any = [tensor for tensor in tensors if tensor is not None]
    if any(map(_is_negative, present)) or (_grad_is_enabled() and any(map(_requires_grad, present))):
        return False
    first = present[0]
    return first.is_cuda or first.is_cpu


_KINDS, _is_negative, _grad_is_enabled = {torch.Tensor, type(None)}, torch.Tensor.is_neg, torch.is_grad_enabled
_requires_grad = operator.attrgetter("requires_grad")
_dispatch_modes, _transforms = of_c("_len_torch_dispatch_stack"), of_c("_functorch", "peek_interpreter_stack")
_is_profiled, _is_tracing = of_c("_autograd", "_profiler_enabled"), of_c("_is_tracing")


def _refuse_strange(this: str, names: Sequence[str], tensors: Tuple[Any, ...]) -> None:
    why = strange(this, zip(names, tensors), _WRITTEN[this])
    if why is not None:
        raise ValueError(why) from None


_WRITTEN: Dict[str, Tuple[str, ...]] = {_operations.PLAN: (), _operations.PLAN_FP8: ()}


for _operation in _operations.OPERATIONS:
    _written = tuple(_operation.names[i] for i in _operation.written)
    _WRITTEN[_operation.function] = _WRITTEN.get(_operation.function, ()) + _written
_repeats: DefaultDict[_operations.Operation, Repeats] = defaultdict(Repeats)


# ---- Called by the public functions ------------------------------------------------------------------------------------

# They take a `stream` like those of _arrays but ignore it: the current stream is used.


def last_like(operation, inputs, numbers, turned):
    """Returns the entry of calls with these arguments, for a function whose checks take longer than a repetition; None if a mode is
    active. If the entry has a `repeat`, it may be called before the checks. A call that it accepts has tensors of the forms, and
    numbers, that passed them, and needs no gradient. `numbers`: immutable and in the form in which they were passed."""
    return None if _is_watched() else _repeats[operation].last(inputs, None, numbers, turned)


def run(operation, inputs, given, options, stream, d_v=None, turned=False, last=None):
    """Calls an operation. Returns the results `given`, with new ones in place of None. `turned`: the last one, which is new, is
    returned as its transpose. A repeated call makes it so, which takes less time than a view. `last`: what `last_like` returned, if
    its `repeat` did not accept the call."""
    watched, all_new = last is None and _is_watched(), len(given) > 0
    for result in given:
        if result is not None:
            all_new = False
    if all_new and not watched and last is None:
        last = _repeats[operation].last(inputs, d_v, options, turned)
        again = last.repeat and last.repeat(inputs)
        if again is not None:
            return again
    results = _run_anew(operation, inputs, given, options, d_v, watched, all_new, last)
    return (*results[:-1], results[-1].T) if turned else results


def _run_anew(operation, inputs, given, options, d_v, watched, all_new, last):
    """Makes a call that repeats no other; `last` notes it, if not None."""
    size, tensors, results = options[0] if d_v is None else d_v, inputs, given
    if not all_new:
        if any([result is None for result in given]):
            made = operators.new_results(operation, inputs, size)
            results = tuple([new if result is None else result for result, new in zip(given, made)])
        tensors = inputs + results
    if watched or not _are_plain(tensors):
        if not is_compiling():
            _refuse_strange(operation.function, operation.names, tensors)
        if all_new and operation is _operations.MERGE_STATES and wants_gradient(*inputs):
            return _differentiable(_ops.merge_states, operation.function, operation.names, inputs, options)
        if all_new:
            return getattr(_ops, operation.operator).default(*inputs, *(() if d_v is None else (d_v,)), *options)
        getattr(_ops, operators.into_name(operation)).default(*tensors, *options)
        return results if len(results) != 1 else results[0]
    try:
        if all_new:
            results = operators.plain_results(operation, inputs, size)
            tensors = inputs + results
        operators.launch(operation, tensors, options)
    except (ValueError, RuntimeError):
        _refuse_strange(operation.function, operation.names, tensors)
        raise
    if last is not None:
        last.note(operation, inputs, results, options)
    else:
        operators.count_writes(*[tensors[i] for i in operation.written])
    return results if len(results) != 1 else results[0]


def plan(operation, function, like, lengths, sizes, stream):
    """Makes the tables of a split plan on the device of `like`."""
    names, tensors, name = operation.names[: len(lengths)], lengths, "decode_plan"
    if operation is _operations.SPARSE_PLAN:
        names, tensors, name = ("q", *names), (like, *lengths), "sparse_plan"
    if not _is_watched() and _are_plain(tensors):
        return operators.plan(operation, function, like, lengths, sizes)
    if not is_compiling():
        _refuse_strange(function, names, tensors)
    return getattr(_ops, name).default(*tensors, *sizes)


def wants_gradient(*tensors):
    """Returns whether autograd needs the gradient of one of the tensors."""
    if not is_compiling() and _transforms():
        tensors = tuple(map(_within_vmap, tensors))
    return _grad_is_enabled() and any([tensor is not None and tensor.requires_grad for tensor in tensors])


def _within_vmap(tensor):
    """Returns the tensor that torch.func.vmap maps over; the mapped one does not say whether it requires a gradient."""
    while tensor is not None and torch._C._functorch.is_batchedtensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def _refuse_transforms(this, names, tensors):
    """Refuses derivatives other than those of reverse mode. PyTorch's own words for them would not name the function."""
    operators.refuse_tangents(this, zip(names, tensors))
    transforms = torch._C._functorch.get_interpreter_stack() or ()
    if any([transform.key().name in ("Grad", "Jvp") for transform in transforms]):
        at = [tensor is not None and tensor.requires_grad for tensor in map(_within_vmap, tensors)].index(True)
        operators.refuse_gradient(this, names[at], "is differentiated by torch.func")


def attend_for_gradient(names, tensors, options):
    """Calls dense MHA with a derivative. `tensors`: q, k and v, or a packed tensor in place of k (_torch_gradients.py); where the
    sequences begin; the sink."""
    return _differentiable(_ops.mha, _operations.MHA, names, tensors, options)


def _differentiable(operator, this, names, tensors, options):
    """Calls an operator that has a derivative."""
    if not is_compiling():
        _refuse_strange(this, names, tensors)
        _refuse_transforms(this, names, tensors)
    return operator.default(*tensors, *options)


def first(function, like, name, tensor, count, stream):
    """Returns the first `count` entries of the last dimension."""
    return tensor[..., :count]


def parts(function, name, tensor, ends, stream):
    """Splits a tensor's last dimension at its `ends`, the last of which is the end of the tensor."""
    try:
        return [tensor.narrow(-1, begin, end - begin) for begin, end in zip((0, *ends), ends)]
    except RuntimeError:
        raise _without_memory(function, name, tensor) from None


def as_only(function, name, tensor, stream):
    """Returns the tensor as the only entry of a new first dimension."""
    try:
        return tensor.unsqueeze(0)
    except RuntimeError:
        raise _without_memory(function, name, tensor) from None


def transposed(function, name, tensor, stream):
    """Returns the transpose of a two-dimensional tensor to write to."""
    try:
        return tensor.t()
    except RuntimeError:
        raise _without_memory(function, name, tensor) from None


def _without_memory(function, name, tensor):
    """Returns the error for a tensor that PyTorch cannot view."""
    return ValueError(strange(function, [(name, tensor)]) or f"{function}: {name}: data is NULL, must point to memory")


def slots_of(function, name, slots, stream):
    """Converts int32 slots to the int64 of the library."""
    return slots.to(torch.int64) if slots.dtype == torch.int32 else slots

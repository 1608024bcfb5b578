# SPDX-License-Identifier: MIT
"""The operations as operators of PyTorch's dispatcher.

Operators such as flash_mla::dense_decode create their results; those such as ::dense_decode_out, and ::cache_append and
::cache_convert, write into given ones. Each has the registrations that torch.compile needs. They run on the current stream,
allocate from PyTorch's allocator and do not synchronise.

::mha_backward writes gradients. None of these is differentiable (those in _torch_gradients.py and _torch_merge.py are): under
grad mode a call refuses a tensor that requires a gradient, in eager mode and in a compiled graph, whose backward pass is made
before it is known whether it will be used.
"""

from __future__ import annotations

import functools
from ctypes import c_float, c_int64
from typing import Any, Iterable, NoReturn, Sequence, Tuple

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from . import _library, _operations, _torch_tensors
from ._argument_structs import ARGUMENTS
from ._call import contiguous
from ._torch_tensors import current_device, current_stream, device_of, is_elsewhere, of_guards, stream_of

# ---- Registration -----------------------------------------------------------------------------------------------------

# The package's name. A process may load it under several: the Hugging Face Hub loads a kernel under its id.
NAMESPACE = __package__
operators = torch.library.Library(NAMESPACE, "DEF")
registered = getattr(torch.ops, NAMESPACE)


def register(name: str, schema: str, of: str, function: Any, fake: Any, differentiable: bool = False) -> None:
    """Registers the function as an operator on the CPU and on NVIDIA GPUs. `of`: the public function; `fake`: returns results without
    values, for tensors without memory; `differentiable`: the caller registers a derivative."""
    operators.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        operators.impl(name, function, key)
    operator = getattr(registered, name).default
    if not differentiable:
        operators.impl(name, _without_gradient(operator, of), "Autograd", with_keyset=True)
    aliases = [argument.alias_info for argument in operator._schema.arguments]
    written = [i for i, alias in enumerate(aliases) if alias is not None and alias.is_write]
    if written:
        operators.impl(name, _counting(operator, written), "ADInplaceOrView", with_keyset=True)
    torch.library.register_fake(f"{NAMESPACE}::{name}")(fake)
    if hasattr(torch.library, "register_vmap"):  # PyTorch 2.5 or later
        torch.library.register_vmap(f"{NAMESPACE}::{name}", _one_by_one(operator, of, written), lib=operators)


def _one_by_one(operator, function: str, written: list[int]):
    """Returns the operator's rule for torch.func.vmap: one call after the other, each on a view of its part of the tensors."""
    names = [argument.name for argument in operator._schema.arguments]

    def rule(info, in_dims, *arguments):
        for i in written:
            if arguments[i] is not None and in_dims[i] is None:
                name = _operations.name_in(function, names[i])
                raise NotImplementedError(
                    f"{function}: {name}: is written by every call that torch.func.vmap makes of one, must have the dimension "
                    "over which vmap maps"
                )
        if not info.batch_size:
            raise ValueError(f"{function}: torch.func.vmap maps over a dimension of size 0, must have at least 1")
        results = [
            operator(*[a if d is None else a.select(d, i) for a, d in zip(arguments, in_dims)])
            for i in range(info.batch_size)
        ]
        if results[0] is None:
            return None, None
        if isinstance(results[0], torch.Tensor):
            return torch.stack(results), 0
        return tuple(map(torch.stack, zip(*results))), (0,) * len(results[0])

    return rule


def _without_gradient(operator, function: str):
    """Returns the operator's kernel for the Autograd key, which refuses gradients."""
    names = [argument.name for argument in operator._schema.arguments]
    below = torch._C._after_autograd_keyset

    def autograd(keys, *arguments):
        if torch.is_grad_enabled():
            for name, value in zip(names, arguments):
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    refuse_gradient(function, name, "requires a gradient")
        refuse_tangents(function, zip(names, arguments))
        return operator.redispatch(keys & below, *arguments)

    return autograd


def _counting(operator, written: list[int]):
    """Returns a writing operator's kernel for the ADInplaceOrView key. It raises the version of the written tensors, so that a backward
    pass that saved one detects the change."""
    below = torch._C._after_ADInplaceOrView_keyset

    def count(keys, *arguments):
        result = operator.redispatch(keys & below, *arguments)
        count_writes(*(arguments[i] for i in written))
        return result

    return count


def count_writes(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        if tensor is not None:
            increment_version(tensor)


def refuse_tangents(function: str, named: Iterable[Tuple[str, Any]]) -> None:
    """Refuses tensors that have a tangent of forward-mode differentiation."""
    if forward_ad._current_level >= 0:
        for name, value in named:
            if isinstance(value, torch.Tensor) and forward_ad.unpack_dual(value).tangent is not None:
                refuse_gradient(function, name, "has a tangent")


def refuse_gradient(function: str, name: str, why: str) -> NoReturn:
    name = _operations.name_in(function, name)
    of_this_kind = " of this kind (new results have one for Tensor.backward() and torch.autograd.grad)"
    raise NotImplementedError(
        f"{function}: {name}: {why}, and this function has no derivative{of_this_kind * (function in (_operations.MHA, _operations.MERGE))}; call it "
        "under torch.no_grad() or torch.inference_mode(), or pass the tensor's detach()"
    )


# ---- Operators ------------------------------------------------------------------------------------------------------

_FLAGS, _NUMBERS = ("causal", "batch_invariant", "batch_dependent"), {c_float: "float", c_int64: "SymInt"}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, _operations.BF16_OR_FP32: torch.bfloat16}


def into_name(operation: _operations.Operation) -> str:
    """Returns the name of the operator that writes into given results; an operation without results has only that one."""
    return operation.operator if operation.results is None else operation.operator + "_out"


def new_results(
    operation: _operations.Operation, inputs: Sequence[torch.Tensor], size: int
) -> Tuple[torch.Tensor, ...]:
    results: Any = operation.results
    first = inputs[0]
    forms, new = results(first.shape, None if operation.is_attention else inputs[1].shape, size), first.new_empty
    return tuple(
        [  # separate sizes are faster than a tuple
            new(*(shape or _SCALAR)) if dtype is None else new(*(shape or _SCALAR), dtype=_DTYPES[dtype])
            for shape, dtype in forms
        ]
    )


_SCALAR: Any = ((),)


def plain_results(
    operation: _operations.Operation, inputs: Sequence[torch.Tensor], size: int
) -> Tuple[torch.Tensor, ...]:
    """Does the same when no mode is active: on the current GPU without PyTorch's dispatcher."""
    first, results = inputs[0], operation.results
    if _empty_on_gpu is None or not first.is_cuda or first.get_device() != current_device():
        return new_results(operation, inputs, size)
    forms = results(first.shape, None if operation.is_attention else inputs[1].shape, size)
    made = []
    for shape, dtype in forms:
        shape = tuple(shape)  # a plain tuple, not torch.Size
        made.append(_empty_on_gpu(shape, _strides(shape), first.dtype if dtype is None else _DTYPES[dtype]))
    return tuple(made)


_empty_on_gpu = of_guards("_empty_strided_cuda")


@functools.lru_cache(maxsize=256)
def _strides(shape: Tuple[int, ...]) -> Tuple[int, ...]:
    """Returns the strides that PyTorch gives a tensor without gaps."""
    return contiguous([max(size, 1) for size in shape])


def launch(operation: _operations.Operation, tensors: Tuple[Any, ...], options: Tuple[Any, ...]) -> None:
    """Runs the operation on the current stream of the first tensor's device."""
    first, stream = tensors[0], 0
    if first.is_cuda:
        device = first.get_device()
        if device != current_device():
            with torch.cuda.device(device):
                return launch(operation, tensors, options)
        stream = stream_of(device)
    operation(_torch_tensors, tensors, options, stream)


def _add(operation: _operations.Operation) -> None:
    """Registers the operator that writes into given results and the one that makes them."""
    count = len(operation.tensors)
    tensors, letters = [], iter("abcd")
    for name, may_be_none, written in zip(operation.tensors, operation.may_be_none, operation.is_written):
        tensors.append(f"Tensor{f'({next(letters)}!)' if written else ''}{'?' * may_be_none} {name}")
    types = {name: type_ for name, type_, *_ in ARGUMENTS[operation.name]._fields_}
    numbers = [f"{'bool' if name in _FLAGS else _NUMBERS.get(types[name], 'int')} {name}" for name in operation.options]
    name = into_name(operation)

    def into(*arguments):
        launch(operation, arguments, arguments[count:])  # the tensors come first; launch reads only these

    register(name, f"({', '.join(tensors + numbers)}) -> ()", operation.function, into, lambda *arguments: None)
    if operation.results is None:
        return
    inputs = count - len(operation.written)
    sized = int(operation.is_attention)
    numbers = ["int d_v"] * sized + numbers

    def make(*arguments, fake=False):
        results = new_results(operation, arguments[:inputs], arguments[inputs])
        if not fake:
            launch(operation, arguments[:inputs] + results, arguments[inputs + sized :])
        return results if len(results) != 1 else results[0]

    made = ", ".join(["Tensor"] * len(operation.written))
    schema = f"({', '.join(tensors[:inputs] + numbers)}) -> " + (f"({made})" if len(operation.written) > 1 else made)
    register(operation.operator, schema, operation.function, make, functools.partial(make, fake=True))


for _operation in _operations.OPERATIONS:
    _add(_operation)

# ---- The plan -------------------------------------------------------------------------------------------------------


def plan(operation, function, like, lengths, sizes):
    """Makes the tables on the device of `like`."""
    if is_elsewhere(like):
        with torch.cuda.device(like.device):
            return plan(operation, function, like, lengths, sizes)
    tables = _tables(operation, function, like, lengths, sizes)
    place = device_of(like)
    _operations.fill_plan(operation, function, _torch_tensors, place, lengths, tables, sizes, current_stream(like))
    return tables


def _tables(operation, function, like, lengths, sizes):
    place = (_library.CUDA, like.device.index or 0) if like.is_cuda else (_library.CPU, 0)
    shape = None if lengths[0] is None else lengths[0].shape
    shapes = _operations.plan_shapes(operation, function, place, shape, sizes)
    return tuple([like.new_empty(shape, dtype=torch.int32) for shape in shapes])


def _add_plan(name: str, schema: str, operation: _operations.Operation, arguments_of: Any) -> None:
    """`arguments_of`: returns the arguments of `plan` after the function from those of the operator."""
    this = _operations.DECODE
    register(
        name,
        f"({schema}) -> (Tensor, Tensor)",
        _operations.PLAN,
        lambda *arguments: plan(operation, this, *arguments_of(*arguments)),
        lambda *arguments: _tables(operation, this, *arguments_of(*arguments)),
    )


_add_plan(
    "decode_plan",
    "Tensor seqlens, int s_q, int h_q, int h_kv",
    _operations.DENSE_PLAN,
    lambda seqlens, *sizes: (seqlens, (seqlens,), sizes),
)
_add_plan(
    "sparse_plan",
    "Tensor q, Tensor? topk_length, Tensor? extra_topk_length, SymInt b, int topk, int extra_topk, int s_q, int h_q",
    _operations.SPARSE_PLAN,
    lambda q, topk_length, extra_topk_length, *sizes: (q, (topk_length, extra_topk_length), sizes),
)

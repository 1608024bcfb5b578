# SPDX-License-Identifier: MIT
"""Implements the public functions for NumPy arrays and all others that support DLPack (CuPy, JAX, …).

bf16 arrays have the type of ml_dtypes, since NumPy itself has none. A new array comes from the library of the caller's array
through the Python array API (`__array_namespace__`); for arrays without it, pass `out=` and `lse=`.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from typing import Any, Optional, Sequence, Tuple

from . import _library, _operations
from ._call import Call
from ._described import KIND, Described, HostArray, Unfit, described, device_of, is_array, is_numpy, kind_of
from ._described import all_described, dtype_of, host_scratch, is_of_bytes, put_all, refuse_fixed, shape_of
from ._types import dtype_word

# Exported in addition to the functions below:
__all__ = ["KIND", "device_of", "dtype_of", "is_array", "is_of_bytes", "kind_of", "put_all", "shape_of"]
_THIS = sys.modules[__name__]


def is_compiling() -> bool:
    """Only PyTorch compiles calls."""
    return False


# ---- Made -----------------------------------------------------------------------------------------------------------


def _whole(array: Any) -> Any:
    """Returns the caller's array, of which a Described may be a part."""
    return array.array if type(array) is Described else array


def _maker(like: Any) -> Any:
    """Returns a function that makes an array like `like` from a shape and a type or its name; None if there is none."""
    like = _whole(like)
    if is_numpy(like):
        return _numpy_empty
    if not hasattr(like, "__array_namespace__"):
        return None
    namespace = like.__array_namespace__()

    def make(shape: Tuple[int, ...], dtype: Any) -> Any:
        dtype = getattr(namespace, dtype) if isinstance(dtype, str) else dtype
        return namespace.empty(shape, dtype=dtype, device=like.device)

    return make


def _numpy_empty(shape: Tuple[int, ...], dtype: Any) -> Any:
    return sys.modules["numpy"].empty(
        shape, importlib.import_module("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype
    )


def _memory(function: str, name: str, like: Any, shape: Tuple[int, ...], bits: int) -> Any:
    """Allocates an array with the library of `like`; without one, in host memory, which the caller rarely reads."""
    make = _maker(like)
    if make is None and device_of(like)[0] == _library.CUDA:
        kind = type(like).__name__
        raise TypeError(f"{function}: {name}: memory on the GPU cannot be allocated: {kind} has no __array_namespace__")
    return HostArray(shape, bits) if make is None else make(shape, "int32" if bits == 32 else "uint8")


def scratch(call: Call, like: Any, size: int, stream: int) -> Tuple[Any, int]:
    """Returns memory for one call on the stream, and its address."""
    if is_numpy(like) or like.form[0] != _library.CUDA:
        return host_scratch(call, size)
    this = _operations.DECODE
    on_gpu = Described(this, "workspace", _memory(this, "q", like.array, (size,), 8))
    return on_gpu, on_gpu.address


def free_scratch(memory: Any) -> None:
    """Python frees it with the last reference."""


# ---- Called by the public functions ------------------------------------------------------------------------------------


def last_like(
    operation: _operations.Operation, inputs: Tuple[Any, ...], numbers: Tuple[Any, ...], turned: bool
) -> None:
    """Returns None: no calls on these arrays are kept."""


def run(
    operation: _operations.Operation,
    inputs: Tuple[Any, ...],
    given: Tuple[Any, ...],
    options: Tuple[Any, ...],
    stream: int,
    d_v: Optional[int] = None,
    turned: bool = False,
    last: None = None,
) -> Any:
    """Calls an operation. Returns the results `given`, with new ones in place of None. `turned`: the last one, which is new, is
    returned as its transpose. `last`: what `last_like` returned."""
    arrays, missing = inputs + given, False
    for i in operation.written:
        if arrays[i] is None:
            missing = True
        else:
            refuse_fixed(operation.function, operation.names[i], arrays[i])
    results = _completed(operation, inputs, given, options[0] if d_v is None else d_v) if missing else given
    call(operation, inputs + results, options, stream)
    if turned:
        return (*results[:-1], results[-1].T)
    return results if len(results) != 1 else results[0]


def _completed(
    operation: _operations.Operation, inputs: Tuple[Any, ...], given: Tuple[Any, ...], size: Any
) -> Tuple[Any, ...]:
    """Returns the results `given`, with new ones in place of None."""
    this, names, like = operation.function, operation.names, inputs[0]
    make = _maker(like)
    if make is None:
        name = next(name for name, array in zip(names[len(inputs) :], given) if array is None)
        kind = type(_whole(like)).__name__
        raise TypeError(f"{this}: {name}: cannot be made: {kind} has no __array_namespace__; pass {name}=")
    second = min(1, len(inputs) - 1)  # with one input, that input
    forms = operation.results(shape_of(this, names[0], like), shape_of(this, names[second], inputs[second]), size)
    dtypes = {None: getattr(_whole(like), "dtype", None), _operations.BF16_OR_FP32: "float32"}
    try:
        return tuple(
            [
                make(shape, dtypes.get(dtype, dtype)) if array is None else array
                for array, (shape, dtype) in zip(given, forms)
            ]
        )
    except (AttributeError, ImportError):
        kind = type(_whole(like)).__name__
        raise TypeError(
            f"{this}: {names[len(inputs)]}: cannot be made: the library of {kind} has no bfloat16 (NumPy needs the package "
            f"ml_dtypes for it); pass {names[len(inputs)]}="
        ) from None


def call(operation: _operations.Operation, tensors: Tuple[Any, ...], options: Tuple[Any, ...], stream: int) -> None:
    this, names, written = operation.function, operation.names, operation.is_written
    try:
        operation(_THIS, all_described(this, names, tensors, written, stream), options, stream)
    except Unfit:
        for name, array, is_written in zip(names, tensors, written):
            if array is not None:
                described(this, name, array, stream, is_written, named=True)  # raises with the name
        raise


def plan(
    operation: _operations.Operation,
    function: str,
    like: Any,
    lengths: Tuple[Any, ...],
    sizes: Tuple[int, ...],
    stream: int,
) -> Tuple[Any, Any]:
    """Makes the tables of a split plan, of the kind and on the device of `like`."""
    place = device_of(like)
    given = [described(function, name, a, stream, named=True) for name, a in zip(operation.names, lengths)]
    shapes = _operations.plan_shapes(operation, function, place, given[0] and given[0].shape, sizes)
    names = "tile_scheduler_metadata", "num_splits"
    partitions, num_splits = (_memory(function, name, like, shape, 32) for name, shape in zip(names, shapes))
    tables = [described(function, name, array, stream) for name, array in zip(names, (partitions, num_splits))]
    _operations.fill_plan(operation, function, _THIS, place, given, tables, sizes, stream)
    return partitions, num_splits


def first(function: str, like: Any, name: str, array: Any, count: int, stream: int) -> Any:
    """Returns the first `count` entries of the last dimension; the results will be made like the array `like`."""
    if _maker(like) is None:
        kind = type(like).__name__
        raise TypeError(f"{function}: indexer_topk: is {count}, must be 0: {kind} has no __array_namespace__")
    return Described(function, name, array, stream).part(0, count)


def wants_gradient(*arrays: Any) -> bool:
    """These arrays have no autograd."""
    return False


def parts(function: str, name: str, array: Any, ends: Sequence[int], stream: int) -> list[Any]:
    """Splits an array's last dimension at its `ends`, the last of which is the end of the array."""
    begins = (0, *ends)
    if is_numpy(array):
        return [array[..., begin:end] for begin, end in zip(begins, ends)]
    whole = Described(function, name, array, stream)
    return [whole.part(begin, end) for begin, end in zip(begins, ends)]


def as_only(function: str, name: str, array: Any, stream: int) -> Any:
    """Returns the array as the only entry of a new first dimension."""
    return array[None] if is_numpy(array) else Described(function, name, array, stream).as_only()


def transposed(function: str, name: str, array: Any, stream: int) -> Any:
    """Returns the transpose of a two-dimensional array to write to."""
    refuse_fixed(function, name, array)
    return array.T if is_numpy(array) else Described(function, name, array, stream, True).transposed()


def slots_of(function: str, name: str, slots: Any, stream: int) -> Any:
    """Converts int32 slots to the int64 of the library: some array libraries have only int32 by default."""
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
    # Stacks the two 32-bit halves of each number, without a 64-bit type.
    halves = Described(function, name, slots.__array_namespace__().stack([slots, slots >> 31], axis=-1), stream)
    halves.form = device_type, device, dtype_word(0, 64), shape, (halves.form[4][0] // 2,)
    return halves

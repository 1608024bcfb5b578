# SPDX-License-Identifier: MIT
"""One call's arguments as C sees them.

A call of the library takes a struct, which points to tensors, which point to shapes and strides. A Call keeps the struct and
the tensors in one piece of memory, which is filled anew for every call:

    | args | tensor | shape 8 × int64 | strides 8 × int64 | tensor | shape | strides | …

Whoever knows an array fills its tensor in: `describe` of _torch and _arrays, which `put_tensor` serves.
"""

from __future__ import annotations

import ctypes
import struct
from types import SimpleNamespace
from typing import Any, Callable, Sequence

from . import _library

_MOST_DIMS = 8  # of a shape that is looked at; the library refuses one of more dimensions by their number alone
_HEAD = struct.Struct("=QiiiIQQQ")  # fmla_tensor
_DIMS = struct.Struct(f"={_MOST_DIMS}q")
_STRUCT_SIZE = ctypes.sizeof(_library.Tensor) + 2 * _DIMS.size


def dtype_word(code: int, bits: int) -> int:
    """A DLPack dtype (code, bits, one lane) as the four bytes of fmla_dtype."""
    return code | bits << 8 | 1 << 16


def put_tensor(
    at: int,
    data: int,
    device_type: int,
    device: int,
    dtype: int,
    shape: Sequence[int],
    strides: Sequence[int],
) -> None:
    """Writes a tensor to the address `at` of a Call; `dtype` is a dtype_word, strides count elements."""
    memory = (ctypes.c_char * _STRUCT_SIZE).from_address(at)
    head = ctypes.sizeof(_library.Tensor)
    nothing = (0,) * _MOST_DIMS
    _DIMS.pack_into(memory, head, *(*shape, *nothing)[:_MOST_DIMS])
    _DIMS.pack_into(memory, head + _DIMS.size, *(*strides, *nothing)[:_MOST_DIMS])
    _HEAD.pack_into(memory, 0, data, device_type, device, len(shape), dtype, at + head, at + head + _DIMS.size, 0)


class Call:
    """The arguments of one operation: `args`, the struct, and `at`, the addresses of the tensors that it may point to."""

    def __init__(self, struct_type: type[ctypes.Structure], tensors: Sequence[str]):
        size = ctypes.sizeof(struct_type)
        self._memory = ctypes.create_string_buffer(size + _STRUCT_SIZE * len(tensors))
        self.address = ctypes.addressof(self._memory)
        self.args: Any = struct_type.from_buffer(self._memory)
        self.args.struct_size = size
        self.at = SimpleNamespace(**{name: self.address + size + i * _STRUCT_SIZE for i, name in enumerate(tensors)})


class Calls:
    """Calls of one operation that nobody is filling. Whoever takes one has it alone until it is given back, so threads, and
    finalizers that run amid a call, do not meet. One that an error leaves behind is not given back."""

    def __init__(self, struct_type: type[ctypes.Structure], tensors: Sequence[str]):
        self._new = lambda: Call(struct_type, tensors)
        self._idle: list[Call] = []
        self.give_back: Callable[[Call], None] = self._idle.append

    def take(self) -> Call:
        try:
            return self._idle.pop()
        except IndexError:
            return self._new()

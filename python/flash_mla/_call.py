# SPDX-License-Identifier: MIT
"""One call's arguments as C sees them.

A call of the library takes a struct, which points to tensors, which point to shapes and strides. A Call keeps all of them in
one piece of memory whose inner pointers are set once, and which is filled anew for every call:

    | args | tensor | shape 8 × int64 | strides 8 × int64 | tensor | shape | strides | …
"""

from __future__ import annotations

import ctypes
import itertools
import struct
from typing import Optional, Sequence, Tuple

from . import _library

_MOST_DIMS = 8  # of a shape that is looked at; the library refuses one of more dimensions by their number alone

View = Tuple[int, int, int, int, Sequence[int], Sequence[int]]
"""A tensor, described: address, device type, device id, dtype (as `dtype_word`), shape, strides in elements."""


def dtype_word(code: int, bits: int) -> int:
    """A DLPack dtype (code, bits, one lane) as the four bytes of fmla_dtype."""
    return code | bits << 8 | 1 << 16


_POINTER = struct.Struct("=Q")
# fmla_tensor, the shape, the strides, for each number of dimensions.
_TENSOR = [struct.Struct(f"=QiiiIQQQ{n}q{8 * (_MOST_DIMS - n)}x{n}q") for n in range(_MOST_DIMS + 1)]
_DIMS_BYTES = _MOST_DIMS * 8


class Call:
    """The arguments of one operation. `args` has the scalar members; tensors are put in by name."""

    def __init__(self, struct_type: type[ctypes.Structure], tensors: Sequence[str]):
        size, tensor_size = ctypes.sizeof(struct_type), ctypes.sizeof(_library.Tensor)
        stride = tensor_size + 2 * _DIMS_BYTES
        self._memory = ctypes.create_string_buffer(size + stride * len(tensors))
        self.address = ctypes.addressof(self._memory)
        self.args = struct_type.from_buffer(self._memory)
        self.args.struct_size = size
        # Of each tensor: where the pointer to it is, where it is itself, and its address.
        self._places = {
            name: (getattr(struct_type, name).offset, at, self.address + at)
            for name, at in zip(tensors, itertools.count(size, stride))
        }
        self._shape = tensor_size  # from a tensor's address to its shape's
        self._strides = tensor_size + _DIMS_BYTES

    def put(self, name: str, view: Optional[View]) -> None:
        """Sets tensor `name`; None: there is none."""
        member, at, address = self._places[name]
        if view is None:
            _POINTER.pack_into(self._memory, member, 0)
            return
        data, place, device, dtype, shape, strides = view
        ndim = n = len(shape)
        if n > _MOST_DIMS:
            shape, strides, n = shape[:_MOST_DIMS], strides[:_MOST_DIMS], _MOST_DIMS
        _POINTER.pack_into(self._memory, member, address)
        _TENSOR[n].pack_into(
            self._memory,
            at,
            data,
            place,
            device,
            ndim,
            dtype,
            address + self._shape,
            address + self._strides,
            0,
            *shape,
            *strides,
        )


class Calls:
    """Calls of one operation that nobody is filling. Whoever takes one has it alone until it is given back, so threads, and
    finalizers that run amid a call, do not meet. One that an error leaves behind is not given back."""

    def __init__(self, struct_type: type[ctypes.Structure], tensors: Sequence[str]):
        self._new = lambda: Call(struct_type, tensors)
        self._idle: list[Call] = []
        self.give_back = self._idle.append

    def take(self) -> Call:
        try:
            return self._idle.pop()
        except IndexError:
            return self._new()

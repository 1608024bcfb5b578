# SPDX-License-Identifier: MIT
"""One call's arguments as C sees them.

A call of the library takes a struct, which points to tensors, which point to shapes and strides. A Call keeps all of them in
one piece of memory whose inner pointers are set once:

    | args | tensor | shape 8 × int64 | strides 8 × int64 | tensor | shape | strides | …

Calls of a model differ in little but addresses. So a tensor is described by its form, everything but the address, and a
Call writes forms only where they are others than those of the call before.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
from typing import Any, Callable, Optional, Sequence, Tuple

from . import _library

Form = Tuple[int, int, int, Sequence[int], Sequence[int]]
"""A tensor without its address: device type, device id, dtype (a `dtype_word`), shape, strides in elements."""


def dtype_word(code: int, bits: int) -> int:
    """A DLPack dtype (code, bits, one lane) as the four bytes of fmla_dtype."""
    return code | bits << 8 | 1 << 16


_MOST_DIMS = 8  # of a shape that is looked at; the library refuses one of more dimensions by their number alone
_FORM = struct.Struct("=iiiI")  # fmla_tensor's device, ndim, dtype, after its data
_POINTER = struct.Struct("=Q")
_DIMS = [struct.Struct(f"={n}q{8 * (_MOST_DIMS - n)}x{n}q") for n in range(_MOST_DIMS + 1)]


class Call:
    """The arguments of one operation. `args` has the scalar members and pointers to memory; tensors are known by their order."""

    def __init__(self, struct_type: type[ctypes.Structure], tensors: Sequence[str]):
        size, tensor_size = ctypes.sizeof(struct_type), ctypes.sizeof(_library.Tensor)
        step = tensor_size + 2 * _MOST_DIMS * 8
        self._memory = ctypes.create_string_buffer(size + step * len(tensors))
        self.address = ctypes.addressof(self._memory)
        self.args: Any = struct_type.from_buffer(self._memory)
        self.args.struct_size = size
        self.known: Any = None
        """What the caller filled this in with, forms and options; None: nothing yet."""
        self.size = ctypes.c_size_t()
        """The workspace that this takes."""
        self._members = [getattr(struct_type, name).offset for name in tensors]
        self._offsets = list(itertools.islice(itertools.count(size, step), len(tensors)))
        self._tensors = [_library.Tensor.from_buffer(self._memory, at) for at in self._offsets]
        for tensor, at in zip(self._tensors, self._offsets):
            tensor.shape = self.address + at + tensor_size
            tensor.strides = tensor.shape + _MOST_DIMS * 8

    def set_forms(self, forms: Sequence[Optional[Form]]) -> None:
        """Of all tensors; None: there is none."""
        for form, member, at in zip(forms, self._members, self._offsets):
            if form is None:
                _POINTER.pack_into(self._memory, member, 0)
                continue
            place, device, dtype, shape, strides = form
            ndim = len(shape)
            seen = min(ndim, _MOST_DIMS)
            _POINTER.pack_into(self._memory, member, self.address + at)
            _FORM.pack_into(self._memory, at + 8, place, device, ndim, dtype)
            dims = at + ctypes.sizeof(_library.Tensor)
            _DIMS[seen].pack_into(self._memory, dims, *shape[:seen], *strides[:seen])

    def set_addresses(self, addresses: Sequence[int]) -> None:
        """Of all tensors; of one that is not there, anything."""
        for tensor, address in zip(self._tensors, addresses):
            tensor.data = address


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

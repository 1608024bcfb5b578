# SPDX-License-Identifier: MIT
"""One call's arguments as C sees them.

A call of the library takes a struct, which points to tensors, which point to shapes and strides. A Call keeps the memory of
all of them, which is filled anew for every call. Whoever knows an array fills its Place in: `put` of _torch and _arrays,
which `put_tensor` serves.
"""

from __future__ import annotations

import ctypes
import struct
from collections import defaultdict
from types import SimpleNamespace
from typing import Any, Sequence

from . import _library

_MOST_DIMS = 8  # of a shape that is looked at; the library refuses one of more dimensions by their number alone
_HEAD = struct.Struct("=QiiiIQQQ")  # fmla_tensor
_DIMS = struct.Struct(f"={_MOST_DIMS}q")
_SHAPE = ctypes.sizeof(_library.Tensor)
_STRIDES = _SHAPE + _DIMS.size


class Place(ctypes.c_char * (_STRIDES + _DIMS.size)):  # type: ignore[misc]
    """A tensor and what it may point to: | fmla_tensor | shape 8 × int64 | strides 8 × int64 |. ctypes passes it, as any array,
    by its address."""

    def __init__(self) -> None:
        super().__init__()  # which makes the memory, in PyPy's ctypes
        self.address = ctypes.addressof(self)
        self.data = ctypes.c_void_p.from_buffer(self)
        self.form: Any = None  # what stands here already, in the terms of whoever put it there


def put_tensor(
    place: Place,
    data: int,
    device_type: int,
    device: int,
    dtype: int,
    shape: Sequence[int],
    strides: Sequence[int],
) -> int:
    """Writes a tensor, whose address is returned; `dtype` is a dtype_word, strides count elements."""
    nothing = (0,) * _MOST_DIMS
    at = place.address
    _DIMS.pack_into(place, _SHAPE, *(*shape, *nothing)[:_MOST_DIMS])
    _DIMS.pack_into(place, _STRIDES, *(*strides, *nothing)[:_MOST_DIMS])
    _HEAD.pack_into(place, 0, data, device_type, device, len(shape), dtype, at + _SHAPE, at + _STRIDES, 0)
    return at


class Call:
    """The arguments of one operation: `args`, the struct; `address`, its own; `at`, the Places of the tensors. Those that are
    `always` there it points to from the first. `memory`: what whoever fills it keeps for its next call."""

    def __init__(self, struct_type: type[ctypes.Structure], always: Sequence[str], optional: Sequence[str]):
        self.args: Any = struct_type(struct_size=ctypes.sizeof(struct_type))
        self.address = ctypes.addressof(self.args)
        self.at = SimpleNamespace(**{name: Place() for name in (*always, *optional)})
        self.memory: Any = None
        for name in always:
            setattr(self.args, name, getattr(self.at, name).address)


class Calls:
    """Calls of one operation that nobody is filling, those of each kind of array by themselves. Whoever takes one has it alone until
    it is given back, so threads, and finalizers that run amid a call, do not meet. One that an error leaves behind is not given back.
    """

    def __init__(self, struct_type: type[ctypes.Structure], always: Sequence[str], optional: Sequence[str] = ()):
        self._new = lambda: Call(struct_type, always, optional)
        self._idle: defaultdict[Any, list[Call]] = defaultdict(list)

    def take(self, kind: Any) -> Call:
        try:
            return self._idle[kind].pop()
        except IndexError:
            return self._new()

    def give_back(self, call: Call, kind: Any) -> None:
        self._idle[kind].append(call)

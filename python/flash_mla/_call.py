# SPDX-License-Identifier: MIT
"""The arguments of one call in C's layout.

A call of the library takes a struct, which points to tensors, which point to shapes and strides. A Call owns the memory of
all of them and refills it for every call. `put_all` of _torch_tensors and _described fill in the Places of arrays, using
`put_tensor`.
"""

from __future__ import annotations

import ctypes
import math
import operator
import struct
from typing import Any, Iterator, Sequence

from ._structs import Tensor

_MOST_DIMS = 8  # the library reads no more: it refuses a larger number of dimensions
_HEAD = struct.Struct("=QiiiIQQQ")  # fmla_tensor
_DIMS = struct.Struct(f"={_MOST_DIMS}q")
_SHAPE = ctypes.sizeof(Tensor)
_STRIDES = _SHAPE + _DIMS.size


class Place(ctypes.c_char * (_STRIDES + _DIMS.size)):  # type: ignore[misc]
    """A tensor with its shape and strides: | fmla_tensor | shape 8 × int64 | strides 8 × int64 |. ctypes passes arrays by address."""

    def __init__(self) -> None:
        super().__init__()  # allocates the memory in PyPy's ctypes
        self.address = ctypes.addressof(self)
        self.data = ctypes.c_void_p.from_buffer(self)
        self.dtype = ctypes.c_uint32.from_buffer(self, Tensor.dtype.offset)  # a dtype_word
        self.form: Any = None  # the current contents, as recorded by the writer


def put_tensor(
    place: Place, data: int, device_type: int, device: int, dtype: int, shape: Sequence[int], strides: Sequence[int]
) -> int:
    """Writes a tensor and returns its address; `dtype` is a dtype_word, strides count elements."""
    nothing = (0,) * _MOST_DIMS
    at = place.address
    _DIMS.pack_into(place, _SHAPE, *(*shape, *nothing)[:_MOST_DIMS])
    _DIMS.pack_into(place, _STRIDES, *(*strides, *nothing)[:_MOST_DIMS])
    _HEAD.pack_into(place, 0, data, device_type, device, len(shape), dtype, at + _SHAPE, at + _STRIDES, 0)
    return at


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of an array without gaps."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


class Call:
    """The arguments of one operation.

    `args`: the struct, in `memory` at `address`. `places`, `addresses`: those of the tensors. `wants_all`: no tensor may be None.
    `values`: the current contents of the struct, in the caller's order. `sized`: the first tensor's shape for which the struct has
    the size of the workspace. `scratch`: memory kept for the next call.
    """

    def __init__(self, struct_type: type[ctypes.Structure], tensors: int, wants_all: bool):
        self.memory = (ctypes.c_char * ctypes.sizeof(struct_type))()
        self.args: Any = struct_type.from_buffer(self.memory)
        self.address = ctypes.addressof(self.memory)
        self.places = [Place() for _ in range(tensors)]
        self.addresses = tuple([place.address for place in self.places])
        self.wants_all = wants_all
        self.values: Any = None
        self.sized: Any = None
        self.scratch: Any = None


class Struct:
    """Writes an argument struct from values in the order of `names`, its members; members of a struct in it count as its own. Other
    members become 0. One write of all members is faster than one write each."""

    def __init__(self, struct_type: type[ctypes.Structure], names: Sequence[str]):
        members = list(_members(struct_type))
        assert {name for name, _ in members} >= set(names)
        self._types = [type_ for _, type_ in members]
        self.order = operator.itemgetter(*(names.index(name) + 1 if name in names else 0 for name, _ in members))
        """Sorts (0, values…) into the order of the struct for `pack`."""
        self.pack = struct.Struct("@" + "".join(type_._type_.replace("z", "P") for type_ in self._types)).pack_into

    def cut_off(self, values: Sequence[Any]) -> list[Any]:
        """Converts values as C does: integers too large for their type wrap, floats become infinite."""
        return [type_(value).value or 0 for type_, value in zip(self._types, values)]


def _members(struct_type: Any) -> Iterator[tuple[str, Any]]:
    for name, type_, *_ in struct_type._fields_:
        if issubclass(type_, ctypes.Structure):
            yield from _members(type_)
        else:
            yield name, type_

# SPDX-License-Identifier: MIT
"""NumPy arrays, and all others that support DLPack, in C's layout.

A NumPy array is written directly: in a call of a few microseconds every new object costs noticeable time, so its shape and
strides stay in its Place between calls and only the address changes. All others are converted to Described first.
"""

from __future__ import annotations

import copy
import ctypes
import math
import mmap
import struct
import sys
from typing import Any, Sequence, Tuple

from . import _library, _structs
from ._call import Call, Place, contiguous, put_tensor
from ._types import dtype_word, word_of

KIND = "an array with __dlpack__"

Form = Tuple[int, int, int, Sequence[int], Sequence[int]]
"""An array without its address: device type, device id, dtype (a dtype_word), shape, strides in elements."""

# ---- Kinds of arrays --------------------------------------------------------------------------------------------------


class _NotThere:
    """A class without instances."""


_ndarray: Any = _NotThere
"""numpy.ndarray, once NumPy has been imported."""


def is_numpy(value: object) -> bool:
    if isinstance(value, _ndarray):
        return True
    return _ndarray is _NotThere and _find_numpy() and isinstance(value, _ndarray)


def _find_numpy() -> bool:
    global _ndarray
    _ndarray = getattr(sys.modules.get("numpy"), "ndarray", _NotThere)
    return _ndarray is not _NotThere


def _jax(*names: str) -> Any:
    """Returns a class of JAX; without JAX, one without instances."""
    value: Any = sys.modules.get("jax")
    for name in names:
        value = getattr(value, name, None)
    return value or _NotThere


def is_array(value: object) -> bool:
    if type(value) is _ndarray or is_numpy(value):
        return type(value) is _ndarray or not isinstance(value, _masked())
    return isinstance(value, (Described, HostArray)) or (
        hasattr(value, "__dlpack__") and not isinstance(value, _jax("core", "Tracer"))
    )


def _masked() -> Any:
    return getattr(sys.modules.get("numpy.ma"), "MaskedArray", _NotThere)


def kind_of(value: object) -> str:
    """Returns the words for a value that is not an array."""
    kind = type(value).__name__
    if isinstance(value, _jax("core", "Tracer")):
        return (
            f"{kind}, which has no values while JAX traces (call this outside of jax.jit, or through jax.pure_callback)"
        )
    if isinstance(value, _masked()):
        return f"{kind}, whose mask no kernel reads (pass its filled())"
    return kind


def refuse_fixed(function: str, name: str, array: Any) -> None:
    """Refuses an immutable array as an output. Only its class tells that a JAX array is immutable."""
    if not is_numpy(array) and isinstance(array, _jax("Array")):
        instead = "omit it, or pass a NumPy array" if name != "kv_cache" else "keep it in a NumPy array"
        raise ValueError(f"{function}: {name}: is a jax.Array, which is immutable, must be writable; {instead}")


def device_of(array: Any) -> Tuple[int, int]:
    if not hasattr(array, "__dlpack_device__") or is_numpy(array):
        return _library.CPU, 0
    place, index = array.__dlpack_device__()
    return int(place), int(index)


def shape_of(function: str, name: str, array: Any) -> Tuple[int, ...]:
    """Works also for an array with only DLPack's two methods."""
    if type(array) is _ndarray:
        return array.shape
    return tuple(array.shape) if hasattr(array, "shape") else tuple(Described(function, name, array).form[3])


def is_of_bytes(function: str, name: str, array: Any, stream: int) -> bool:
    """Returns whether an element has one byte. Asks for a capsule, which makes one stream wait for another, only if the array has no
    dtype.itemsize."""
    size = getattr(getattr(array, "dtype", None), "itemsize", None)
    return size == 1 if isinstance(size, int) else Described(function, name, array, stream).form[2] >> 8 & 255 == 8


# ---- Described ------------------------------------------------------------------------------------------------------

_DEFAULT_STREAM = 1  # CUDA's default stream in the array API standard


def _of_capsules() -> Any:
    """Returns CPython's (PyCapsule_GetPointer, PyCapsule_IsValid), which take the id of a capsule: ctypes converts an integer fastest.
    Returns None if this Python has no ctypes.pythonapi, as in PyPy. The functions of `api` itself are shared, and other code may set
    their types.
    """
    api = getattr(ctypes, "pythonapi", None)
    if api is None:
        return None
    pointer, found = (
        ctypes.PYFUNCTYPE(type_, ctypes.c_void_p, ctypes.c_char_p) for type_ in (ctypes.c_void_p, ctypes.c_int)
    )
    return pointer(("PyCapsule_GetPointer", api)), found(("PyCapsule_IsValid", api))


capsules = _of_capsules()


class _VersionedHead(ctypes.Structure):
    """The members before the tensor in DLPack's DLManagedTensorVersioned."""

    _fields_ = [
        *_structs.neighbours(ctypes.c_uint32, "major minor"),
        *_structs.neighbours(ctypes.c_void_p, "manager_context deleter"),
        *_structs.neighbours(ctypes.c_uint64, "flags"),
    ]


_READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY


class Described:
    """An array with its form and address, both valid while this object lives."""

    def __init__(self, function: str, name: str, array: Any, stream: int = 0, written: bool = False):
        self.array = array
        self.form: Form
        self._what = f"{function}: {name}"
        if isinstance(array, HostArray):
            self.address, self.form = array.address, array.form
        elif is_numpy(array):
            if written and not array.flags.writeable:
                raise ValueError(f"{self._what}: is read-only, must be writable")
            self.address, self.form = _address(array), _form(self._what, array)
        else:
            self._describe_capsule(stream, written)

    @property
    def shape(self) -> Sequence[int]:
        return self.form[3]

    def __dlpack_device__(self) -> Tuple[int, int]:
        return self.form[:2]

    def part(self, begin: int, end: int) -> Described:
        """Returns the entries [begin, end) of the last dimension, fewer if it is shorter."""
        part = copy.copy(self)
        device_type, device, dtype, shape, strides = self.form
        part.address += begin * strides[-1] * (dtype >> 8 & 255) // 8
        part.form = device_type, device, dtype, (*shape[:-1], min(end, shape[-1]) - begin), strides
        return part

    def as_only(self) -> Described:
        only = copy.copy(self)
        only.form = *self.form[:3], (1, *self.form[3]), (0, *self.form[4])
        return only

    def transposed(self) -> Described:
        turned = copy.copy(self)
        turned.form = *self.form[:3], self.form[3][::-1], self.form[4][::-1]
        return turned

    def _describe_capsule(self, stream: int, written: bool) -> None:
        if capsules is None:
            kind = type(self.array).__name__
            raise TypeError(
                f"{self._what}: is {kind}, must be a NumPy array on this Python, {sys.implementation.name}, which has no "
                "ctypes.pythonapi to read DLPack capsules with"
            )
        get_pointer, is_valid = capsules
        on_gpu = device_of(self.array)[0] == _library.CUDA
        self._capsule = self.array.__dlpack__(stream=stream or _DEFAULT_STREAM) if on_gpu else self.array.__dlpack__()
        label, offset = b"dltensor", 0
        if not is_valid(id(self._capsule), label):
            label, offset = b"dltensor_versioned", ctypes.sizeof(_VersionedHead)
        start = get_pointer(id(self._capsule), label)
        if offset and written and _VersionedHead.from_address(start).flags & _READ_ONLY:
            raise ValueError(f"{self._what}: is read-only, must be writable")
        tensor = _structs.Tensor.from_address(start + offset)
        dtype, device, ndim = tensor.dtype, tensor.device, tensor.ndim
        if dtype.lanes != 1:
            raise ValueError(f"{self._what}: its elements have {dtype.lanes} lanes, must have 1")
        dims = ctypes.c_int64 * ndim
        shape = tuple(dims.from_address(tensor.shape)) if ndim else ()
        if tensor.strides and ndim:
            strides = tuple(dims.from_address(tensor.strides))
        else:
            strides = contiguous(shape)
        self.address = (tensor.data or 0) + tensor.byte_offset
        self.form = device.device_type, device.id, dtype_word(dtype.code, dtype.bits), shape, strides


def described(function: str, name: str, array: Any, stream: int, written: bool = False, named: bool = False) -> Any:
    """Returns what `_put` takes: None and arrays of exactly NumPy's class unchanged, others Described. `named`: describes NumPy's too, so
    that errors name the array."""
    if array is None or type(array) is Described:
        return array
    if type(array) is not _ndarray or named:
        return Described(function, name, array, stream, written)
    if written and not array.flags.writeable:
        raise ValueError(f"{function}: {name}: is read-only, must be writable")
    return array


def all_described(
    function: str, names: Sequence[str], arrays: Sequence[Any], written: Sequence[bool], stream: int
) -> list[Any]:
    """Does the same for several arrays, without a call for NumPy arrays that are writable where needed, as most are."""
    return [
        array
        if array is None or (type(array) is _ndarray and (not w or array.flags.writeable))
        else described(function, name, array, stream, w)
        for name, array, w in zip(names, arrays, written)
    ]


def put_all(arrays: Sequence[Any], call: Call) -> list[int]:
    """Writes what `described` returned to places and returns their addresses, 0 for None."""
    return [0 if array is None else _put(array, place) for place, array in zip(call.places, arrays)]


def dtype_of(array: Any, place: Place) -> int:
    """Returns the dtype_word of an array that `_put` wrote to its place."""
    return place.dtype.value


def _put(array: Any, place: Place) -> int:
    if type(array) is not _ndarray:
        place.form = None
        return put_tensor(place, array.address, *array.form)
    form = array.shape, array.strides, array.dtype
    if form != place.form:
        place.form = None
        put_tensor(place, 0, *_form("", array))
        place.form = form
    if _get_pointer is None:
        place.data.value = _address(array)
    else:  # the result of _address_by_struct
        capsule = array.__array_struct__
        place.data.value = _pointer_at(_get_pointer(id(capsule), None) + _DATA).value
    return place.address


# ---- Memory of the package's own --------------------------------------------------------------------------------------


class HostArray:
    """An integer array (int32, int64 or uint8) in page-aligned host memory, which is private: after fork the child writes to a copy."""

    def __init__(self, shape: Tuple[int, ...], bits: int):
        self.shape = shape
        size = max(math.prod(shape) * bits // 8, 1)
        self._pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))
        self.form: Form = _library.CPU, 0, dtype_word(1 if bits == 8 else 0, bits), shape, contiguous(shape)

    def fill(self, values: Sequence[int]) -> None:
        """Fills an int64 array."""
        struct.pack_into(f"{len(values)}q", self._pages, 0, *values)


_KEPT = 1 << 24
"""The most bytes of host memory that a Call keeps for its next use: each page of fresh memory costs a page fault."""


def host_scratch(call: Call, size: int) -> Tuple[HostArray, int]:
    """Returns memory for one call, and its address."""
    memory = call.scratch
    if memory is None or memory.shape[0] < size:
        memory = HostArray((size,), 8)
        if size <= _KEPT:
            call.scratch = memory
    return memory, memory.address


# ---- NumPy's ----------------------------------------------------------------------------------------------------------


class Unfit(ValueError):
    """Raised for an array that `_put` cannot write; it does not have the array's name."""


def _form(what: str, array: Any) -> Form:
    """Returns the form of a NumPy array. With `what` "" it raises Unfit, else a ValueError that begins with `what`."""
    dtype, item = array.dtype, array.itemsize
    why = None
    if not dtype.isnative:
        why = f"dtype is {dtype}, must have this machine's byte order"
    elif any(stride % item for stride in array.strides):
        why = f"strides are {array.strides} bytes, must be multiples of an element's {item}"
    if why is not None:
        raise ValueError(f"{what}: {why}") if what else Unfit(why)
    strides = tuple(stride // item for stride in array.strides)
    return _library.CPU, 0, word_of(dtype.name, 8 * item), array.shape, strides


def _address_by_attributes(array: Any) -> int:
    return array.__array_interface__["data"][0]


class _ArrayInterface(ctypes.Structure):
    """PyArrayInterface."""

    _fields_ = [
        *_structs.neighbours(ctypes.c_int, "two ndim"),
        *_structs.neighbours(ctypes.c_char, "kind"),
        *_structs.neighbours(ctypes.c_int, "item flags"),
        *_structs.neighbours(ctypes.c_void_p, "shape strides data"),
    ]


_DATA, _pointer_at = _ArrayInterface.data.offset, ctypes.c_void_p.from_address


def _address_by_struct(array: Any) -> int:
    """Uses NumPy's C protocol, which takes a third of the time. The capsule owns the struct."""
    capsule = array.__array_struct__
    return _pointer_at(_get_pointer(id(capsule), None) + _DATA).value or 0


_get_pointer = capsules and capsules[0]
_address = _address_by_attributes if capsules is None else _address_by_struct

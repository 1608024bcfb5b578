# SPDX-License-Identifier: MIT
"""NumPy's arrays, and everything else that speaks DLPack (CuPy, …): described, and made.

bf16 arrays are those of ml_dtypes, since NumPy itself has no such type. A new array comes from the library of the caller's
by the Python array API (`__array_namespace__`); an array without it can be given `out=` and `lse=`.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from typing import Any, Optional, Tuple

from . import _library, _operations
from ._call import Form, dtype_word

KIND = "an array with __dlpack__"
_THIS = sys.modules[__name__]


def _is_numpy(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_array(value: object) -> bool:
    return _is_numpy(value) or hasattr(value, "__dlpack__")


def device_of(array: Any) -> Tuple[int, int]:
    if _is_numpy(array):
        return _library.CPU, 0
    place, index = array.__dlpack_device__()
    return int(place), int(index)


# ---- Described ------------------------------------------------------------------------------------------------------

_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]

_NUMPY_KINDS = {"b": 6, "i": 0, "u": 1, "f": 2, "c": 5}  # NumPy's → DLPack's
_DEFAULT_STREAM = 1  # CUDA's, as the array API's standard names it


class _Described:
    """An array and its description, which stays valid as long as this lives."""

    def __init__(self, name: str, array: Any, written: bool = False):
        self.array = array
        if _is_numpy(array):
            if written and not array.flags.writeable:
                raise ValueError(f"{name}: is read-only, must be writable")
            self.address, self.form = _describe_numpy(name, array)
        else:
            on_gpu = array.__dlpack_device__()[0] == _library.CUDA
            self._capsule = array.__dlpack__(stream=_DEFAULT_STREAM) if on_gpu else array.__dlpack__()
            self.address, self.form = _describe_capsule(name, self._capsule)


def _describe_numpy(name: str, array: Any) -> Tuple[int, Form]:
    dtype, item = array.dtype, array.itemsize
    if not dtype.isnative:
        raise ValueError(f"{name}: dtype is {dtype}, must be of this machine's byte order")
    if any(stride % item for stride in array.strides):
        raise ValueError(f"{name}: strides are {array.strides} bytes, must be multiples of the {item} of an element")
    kind = 4 if dtype.name == "bfloat16" else _NUMPY_KINDS.get(dtype.kind, 255)
    data = array.__array_interface__["data"][0]
    strides = tuple(stride // item for stride in array.strides)
    return data, (_library.CPU, 0, dtype_word(kind, 8 * item), array.shape, strides)


def _describe_capsule(name: str, capsule: object) -> Tuple[int, Form]:
    label, offset = b"dltensor", 0
    if not _is_valid(capsule, label):
        label, offset = b"dltensor_versioned", 32  # version, manager's context, deleter and flags come first
    tensor = _library.Tensor.from_address(_get_pointer(capsule, label) + offset)
    dtype, device, ndim = tensor.dtype, tensor.device, tensor.ndim
    if dtype.lanes != 1:
        raise ValueError(f"{name}: its elements have {dtype.lanes} lanes, must have 1")
    dims = ctypes.c_int64 * ndim
    shape = tuple(dims.from_address(tensor.shape)) if ndim else ()
    if tensor.strides and ndim:
        strides = tuple(dims.from_address(tensor.strides))
    else:
        strides = tuple(math.prod(shape[i + 1 :]) for i in range(ndim))
    data = (tensor.data or 0) + tensor.byte_offset
    return data, (device.type, device.id, dtype_word(dtype.code, dtype.bits), shape, strides)


def form(described: _Described) -> Form:
    return described.form


def address(described: Any) -> int:
    return described.address


# ---- Made -----------------------------------------------------------------------------------------------------------


def _empty(name: str, like: Any, shape: Tuple[int, ...], dtype: Any) -> Any:
    """A new array of the kind and on the device of `like`; `dtype` is one, or the name of one."""
    if _is_numpy(like):
        return sys.modules["numpy"].empty(shape, dtype)
    if not hasattr(like, "__array_namespace__"):
        kind = type(like).__name__
        raise TypeError(
            f"{name}: cannot be made for inputs that are {kind}, which has no __array_namespace__; pass {name}="
        )
    namespace = like.__array_namespace__()
    dtype = getattr(namespace, dtype) if isinstance(dtype, str) else dtype
    return namespace.empty(shape, dtype=dtype, device=like.device)


class _HostMemory:
    """Scratch memory of the host, aligned to a page."""

    def __init__(self, size: int):
        self._pages = mmap.mmap(-1, max(size, 1))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))


def scratch(like: _Described, size: int) -> Any:
    if like.form[0] != _library.CUDA:
        return _HostMemory(size)
    return _Described("workspace", _empty("workspace", like.array, (size,), "uint8"))


# ---- What the public functions call -----------------------------------------------------------------------------------


def _inputs(**arrays: Any) -> list[Optional[_Described]]:
    return [None if array is None else _Described(name, array) for name, array in arrays.items()]


def plan_decode(seqlens: Any, s_q: int, h_q: int, h_kv: int, stream: int) -> Tuple[Any, Any]:
    lengths = _Described("cache_seqlens", seqlens)
    rows = _operations.decode_partitions(lengths.form, s_q, h_q, h_kv)
    partitions = _empty("tile_scheduler_metadata", seqlens, (rows, _library.PARTITION_FIELDS), "int32")
    num_splits = _empty("num_splits", seqlens, (seqlens.shape[0] + 1,), "int32")
    tables = _inputs(tile_scheduler_metadata=partitions, num_splits=num_splits)
    _operations.decode_plan(_THIS, lengths, s_q, h_q, h_kv, *tables, stream)
    return partitions, num_splits


def decode(q, k_cache, block_table, cache_seqlens, plan, attn_sink, d_v, out, lse, options, stream):
    b, s_q, h_q, _ = q.shape
    out = _empty("out", q, (b, s_q, h_q, d_v), q.dtype) if out is None else out
    lse = _empty("lse", q, (b, h_q, s_q), "float32") if lse is None else lse
    partitions, num_splits = plan
    inputs = _inputs(
        q=q,
        k_cache=k_cache,
        block_table=block_table,
        cache_seqlens=cache_seqlens,
        tile_scheduler_metadata=partitions,
        num_splits=num_splits,
        attn_sink=attn_sink,
    )
    results = _Described("out", out, written=True), _Described("lse", lse, written=True)
    _operations.dense_decode(_THIS, *inputs, *results, *options, stream)
    return out, lse


def merge_states(out_parts, lse_parts, attn_sink, out, lse, options, stream):
    out = _empty("out", out_parts, tuple(out_parts.shape[1:]), out_parts.dtype) if out is None else out
    lse = _empty("lse", lse_parts, tuple(lse_parts.shape[1:]), "float32") if lse is None else lse
    inputs = _inputs(out_parts=out_parts, lse_parts=lse_parts, attn_sink=attn_sink)
    results = _Described("out", out, written=True), _Described("lse", lse, written=True)
    _operations.merge(_THIS, *inputs, *results, *options, stream)
    return out, lse

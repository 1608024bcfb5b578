# SPDX-License-Identifier: MIT
"""NumPy's arrays, and everything else that speaks DLPack (CuPy, …): described, and made.

bf16 arrays are those of ml_dtypes, since NumPy itself has no such type. A new array comes from the library of the caller's
by the Python array API (`__array_namespace__`); an array without it can be given `out=` and `lse=`.
"""

from __future__ import annotations

import copy
import ctypes
import math
import mmap
import sys
from typing import Any, Optional, Sequence, Tuple

from . import _library, _operations
from ._call import Place, put_tensor
from ._types import dtype_word

KIND = "an array with __dlpack__"
_THIS = sys.modules[__name__]


def _is_numpy(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_array(value: object) -> bool:
    return _is_numpy(value) or hasattr(value, "__dlpack__") or isinstance(value, HostArray)


def device_of(array: Any) -> Tuple[int, int]:
    if not hasattr(array, "__dlpack_device__") or _is_numpy(array):
        return _library.CPU, 0
    place, index = array.__dlpack_device__()
    return int(place), int(index)


def shape_of(function: str, name: str, array: Any) -> Tuple[int, ...]:
    """Also of an array that has nothing but DLPack's two methods."""
    return tuple(array.shape) if hasattr(array, "shape") else tuple(_Described(function, name, array).form[3])


Form = Tuple[int, int, int, Sequence[int], Sequence[int]]
"""An array without its address: device type, device id, dtype (a dtype_word), shape, strides in elements."""

# ---- Described ------------------------------------------------------------------------------------------------------

_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]

_NUMPY_KINDS = {"b": 6, "i": 0, "u": 1, "f": 2, "c": 5}  # NumPy's → DLPack's
_DEFAULT_STREAM = 1  # CUDA's, as the array API's standard names it


def _contiguous(shape: Sequence[int]) -> Tuple[int, ...]:
    """The strides of an array without gaps."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


class _VersionedHead(ctypes.Structure):
    """What comes before the tensor in DLPack's DLManagedTensorVersioned."""

    _fields_ = [
        ("version", ctypes.c_uint32 * 2),
        ("manager_context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
    ]


_READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY


class _Described:
    """An array, its form and its address, which stay valid as long as this lives."""

    def __init__(self, function: str, name: str, array: Any, stream: int = 0, written: bool = False):
        self.array = array
        self.form: Form
        self._what = f"{function}: {name}"
        if isinstance(array, HostArray):
            self.address, self.form = array.address, array.form
        elif _is_numpy(array):
            self._describe_numpy(written)
        else:
            on_gpu = device_of(array)[0] == _library.CUDA
            self._capsule = array.__dlpack__(stream=stream or _DEFAULT_STREAM) if on_gpu else array.__dlpack__()
            self._describe_capsule(written)

    def _describe_numpy(self, written: bool) -> None:
        array = self.array
        dtype, item = array.dtype, array.itemsize
        if written and not array.flags.writeable:
            raise ValueError(f"{self._what}: is read-only, must be writable")
        if not dtype.isnative:
            raise ValueError(f"{self._what}: dtype is {dtype}, must be of this machine's byte order")
        if any(stride % item for stride in array.strides):
            raise ValueError(
                f"{self._what}: strides are {array.strides} bytes, must be multiples of an element's {item}"
            )
        kind = 4 if dtype.name == "bfloat16" else _NUMPY_KINDS.get(dtype.kind, 255)
        strides = tuple(stride // item for stride in array.strides)
        self.address = array.__array_interface__["data"][0]
        self.form = _library.CPU, 0, dtype_word(kind, 8 * item), array.shape, strides

    def _describe_capsule(self, written: bool) -> None:
        label, offset = b"dltensor", 0
        if not _is_valid(self._capsule, label):
            label, offset = b"dltensor_versioned", ctypes.sizeof(_VersionedHead)
        start = _get_pointer(self._capsule, label)
        if offset and written and _VersionedHead.from_address(start).flags & _READ_ONLY:
            raise ValueError(f"{self._what}: is read-only, must be writable")
        tensor = _library.Tensor.from_address(start + offset)
        dtype, device, ndim = tensor.dtype, tensor.device, tensor.ndim
        if dtype.lanes != 1:
            raise ValueError(f"{self._what}: its elements have {dtype.lanes} lanes, must have 1")
        dims = ctypes.c_int64 * ndim
        shape = tuple(dims.from_address(tensor.shape)) if ndim else ()
        if tensor.strides and ndim:
            strides = tuple(dims.from_address(tensor.strides))
        else:
            strides = _contiguous(shape)
        self.address = (tensor.data or 0) + tensor.byte_offset
        self.form = device.device_type, device.id, dtype_word(dtype.code, dtype.bits), shape, strides


def _first(described: Any, count: int) -> _Described:
    """The first entries of the last dimension."""
    part = copy.copy(described)
    *form, shape, strides = described.form
    part.form = (*form, (*shape[:-1], min(count, shape[-1])), strides)
    return part


def put(described: Optional[_Described], place: Place) -> Optional[int]:
    """Writes the array to `place`, whose address is returned; None: there is none."""
    return None if described is None else put_tensor(place, described.address, *described.form)


# ---- Made -----------------------------------------------------------------------------------------------------------


class HostArray:
    """An int32 or uint8 array in host memory of its own, aligned to a page, for callers whose arrays cannot be made."""

    def __init__(self, shape: Tuple[int, ...], bits: int):
        self.shape = shape
        self._pages = mmap.mmap(-1, max(math.prod(shape) * bits // 8, 1))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))
        self.form: Form = _library.CPU, 0, dtype_word(0 if bits == 32 else 1, bits), shape, _contiguous(shape)


def _make(like: Any, shape: Tuple[int, ...], dtype: Any) -> Optional[Any]:
    """A new array of the kind and on the device of `like`, or None; `dtype` is one, or the name of one."""
    if _is_numpy(like):
        return sys.modules["numpy"].empty(shape, dtype)
    if not hasattr(like, "__array_namespace__"):
        return None
    namespace = like.__array_namespace__()
    dtype = getattr(namespace, dtype) if isinstance(dtype, str) else dtype
    return namespace.empty(shape, dtype=dtype, device=like.device)


def _result(function: str, name: str, given: Optional[Any], like: Any, shape: Tuple[int, ...], dtype: Any) -> Any:
    """`given`, or a new one."""
    made = _make(like, shape, dtype or getattr(like, "dtype", None)) if given is None else given
    if made is None:
        kind = type(like).__name__
        raise TypeError(
            f"{function}: {name}: cannot be made where arrays are {kind}, without __array_namespace__; pass {name}="
        )
    return made


def _memory(function: str, name: str, like: Any, shape: Tuple[int, ...], bits: int) -> Any:
    """Of the array's own library; else, as the caller does not look at it as a rule, of the host."""
    made = _make(like, shape, "int32" if bits == 32 else "uint8")
    if made is None and device_of(like)[0] == _library.CUDA:
        kind = type(like).__name__
        raise TypeError(f"{function}: {name}: its memory cannot be made: {kind} has no __array_namespace__")
    return HostArray(shape, bits) if made is None else made


def scratch(like: _Described, size: int, stream: int) -> Tuple[Any, int]:
    """Memory for one call on the stream, and its address."""
    if like.form[0] != _library.CUDA:
        memory = HostArray((size,), 8)
        return memory, memory.address
    this = _operations.DECODE
    described = _Described(this, "workspace", _memory(this, "q", like.array, (size,), 8))
    return described, described.address


def free_scratch(memory: Any) -> None:
    """It goes with its last name."""


# ---- What the public functions call -----------------------------------------------------------------------------------


def plan_decode(function: str, seqlens: Any, s_q: int, h_q: int, h_kv: int, stream: int) -> Tuple[Any, Any]:
    lengths = _Described(function, "cache_seqlens", seqlens, stream)
    shape = lengths.form[3]
    if len(shape) != 1:
        raise ValueError(f"{function}: cache_seqlens: has {len(shape)} dimensions, must have 1")
    rows = _operations.decode_partitions(function, *lengths.form[:2], s_q, h_q, h_kv)
    partitions = _memory(function, "tile_scheduler_metadata", seqlens, (rows, _library.PARTITION_FIELDS), 32)
    num_splits = _memory(function, "num_splits", seqlens, (shape[0] + 1,), 32)
    rows_of, splits_of = (_Described(function, "num_splits", table, stream) for table in (partitions, num_splits))
    _operations.decode_plan(function, _THIS, lengths, s_q, h_q, h_kv, rows_of, splits_of, stream)
    return partitions, num_splits


def decode(q, k_cache, block_table, cache_seqlens, plan, attn_sink, d_v, out, lse, options, stream):
    this = _operations.DECODE
    b, s_q, h_q, _ = shape_of(this, "q", q)
    out = _result(this, "out", out, q, (b, s_q, h_q, d_v), None)
    lse = _result(this, "lse", lse, q, (b, h_q, s_q), "float32")
    partitions, num_splits = plan
    inputs = _inputs(
        this,
        stream,
        q=q,
        k_cache=k_cache,
        block_table=block_table,
        cache_seqlens=cache_seqlens,
        tile_scheduler_metadata=partitions,
        num_splits=num_splits,
        attn_sink=attn_sink,
    )
    _operations.dense_decode(_THIS, *inputs, *_outputs(this, stream, out, lse), *options, stream)
    return out, lse


def plan_sparse(function, q, topk_length, extra_topk_length, sizes, stream):
    """`sizes`: b, topk, extra_topk, s_q, h_q."""
    b = sizes[0]
    place = device_of(q)
    lengths = _inputs(function, stream, topk_length=topk_length, extra_topk_length=extra_topk_length)
    rows = _operations.sparse_partitions(function, *place, *sizes)
    partitions = _memory(function, "tile_scheduler_metadata", q, (rows, _library.PARTITION_FIELDS), 32)
    num_splits = _memory(function, "num_splits", q, (b + 1,), 32)
    tables = [_Described(function, "num_splits", table, stream) for table in (partitions, num_splits)]
    _operations.sparse_plan(function, _THIS, place, *lengths, *sizes, *tables, stream)
    return partitions, num_splits


def decode_sparse(q, inputs, plan, d_v, out, lse, options, stream):
    """`inputs`: by the names that flash_mla_with_kvcache has for them, in the order of the library's operation."""
    this = _operations.DECODE
    b, s_q, h_q, _ = shape_of(this, "q", q)
    out = _result(this, "out", out, q, (b, s_q, h_q, d_v), None)
    lse = _result(this, "lse", lse, q, (b, h_q, s_q), "float32")
    tables = dict(zip(("tile_scheduler_metadata", "num_splits"), plan))
    described = _inputs(this, stream, q=q, **inputs, **tables)
    _operations.sparse_decode(_THIS, *described, *_outputs(this, stream, out, lse), *options, stream)
    return out, lse


def prefill_sparse(q, inputs, d_v, indexer_topk, out, max_logits, lse, options, stream):
    """`inputs`: by the names that flash_mla_sparse_fwd has for them, in the order of the library's operation."""
    this = _operations.PREFILL
    rows = shape_of(this, "q", q)[:2]
    results = [
        _result(this, "out", out, q, (*rows, d_v), None),
        _result(this, "max_logits", max_logits, q, rows, "float32"),
        _result(this, "lse", lse, q, rows, "float32"),
    ]
    if indexer_topk:
        results.append(_make(q, rows, "float32"))
        if results[3] is None:
            kind = type(q).__name__
            raise TypeError(f"{this}: indexer_topk: must be 0 where arrays are {kind}, without __array_namespace__")
    described = _inputs(this, stream, q=q, **inputs)
    names = "out", "max_logits", "lse", "lse_indexer"
    outputs = [_Described(this, name, array, stream, True) for name, array in zip(names, results)]
    if indexer_topk:  # first: what it leaves in out and max_logits is not wanted
        queries, keys, indices, lengths, _ = described
        first = _first(indices, indexer_topk)
        _operations.sparse_prefill(
            _THIS, queries, keys, first, lengths, None, *outputs[:2], outputs[3], *options, stream
        )
    _operations.sparse_prefill(_THIS, *described, *outputs[:3], *options, stream)
    return tuple(results)


def merge_states(out_parts, lse_parts, attn_sink, out, lse, options, stream):
    this = _operations.MERGE
    out = _result(this, "out", out, out_parts, shape_of(this, "out_parts", out_parts)[1:], None)
    lse = _result(this, "lse", lse, lse_parts, shape_of(this, "lse_parts", lse_parts)[1:], "float32")
    inputs = _inputs(this, stream, out_parts=out_parts, lse_parts=lse_parts, attn_sink=attn_sink)
    _operations.merge(_THIS, *inputs, *_outputs(this, stream, out, lse), *options, stream)
    return out, lse


def append(latent, rope, kv_cache, slot_mapping, options, stream):
    this = _operations.APPEND
    latents, ropes, slots = _inputs(this, stream, latent=latent, rope=rope, slot_mapping=slot_mapping)
    cache = _Described(this, "kv_cache", kv_cache, stream, True)
    _operations.cache_append(_THIS, latents, ropes, cache, slots, *options, stream)


def gather(kv_cache, slots, out, options, stream):
    this = _operations.GATHER
    kv_format = options[0]
    shapes = shape_of(this, "kv_cache", kv_cache), shape_of(this, "slots", slots)
    dtype = "float32" if kv_format > 2 else None
    out = _result(this, "out", out, kv_cache, _operations.gathered_shape(*shapes, kv_format), dtype)
    inputs = _inputs(this, stream, kv_cache=kv_cache, slots=slots)
    _operations.cache_gather(_THIS, *inputs, _Described(this, "out", out, stream, True), *options, stream)
    return out


def _inputs(function: str, stream: int, **arrays: Any) -> list[Optional[_Described]]:
    return [None if array is None else _Described(function, name, array, stream) for name, array in arrays.items()]


def _outputs(function: str, stream: int, out: Any, lse: Any) -> Tuple[_Described, _Described]:
    return _Described(function, "out", out, stream, True), _Described(function, "lse", lse, stream, True)

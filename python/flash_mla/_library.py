# SPDX-License-Identifier: MIT
"""The shared library as Python sees it: its structs, its functions, its errors.

The structs mirror include/flashmla/flashmla.h member for member; tests/python/test_layout.py compares them with what a C
compiler makes of the header.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from ctypes import c_char_p, c_float, c_int32, c_int64, c_size_t, c_uint8, c_uint16, c_uint64, c_void_p
from typing import Mapping, NoReturn

from . import _types

# ---- Structs --------------------------------------------------------------------------------------------------------


class Device(ctypes.Structure):
    _fields_ = [("device_type", c_int32), ("id", c_int32)]


class DType(ctypes.Structure):
    _fields_ = [("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16)]


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device", Device),
        ("ndim", c_int32),
        ("dtype", DType),
        ("shape", c_void_p),
        ("strides", c_void_p),
        ("byte_offset", c_uint64),
    ]


class Capability(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("operation", c_char_p),
        ("kernel", c_char_p),
        ("dtypes", c_char_p),
        ("shapes", c_char_p),
        ("reason", c_char_p),
        ("available", c_int32),
        ("forced_only", c_int32),
        ("part_of", c_char_p),
    ]


class DeviceInfo(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("name", c_char_p),
        ("reason", c_char_p),
        ("built_for", c_char_p),
        ("needs", c_char_p),
        ("count", c_int32),
        ("workers", c_int32),
        ("compute_capability", c_int32),
        ("shared_bytes", c_int32),
        ("driver", c_int32),
        ("driver_needed", c_int32),
        ("built_with", c_int32),
        ("ptx", c_int32),
    ]


class DecodePlanArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("seqlens", c_void_p),
        ("s_q", c_int64),
        ("h_q", c_int64),
        ("h_kv", c_int64),
        ("capacity", c_int64),
        ("target", Device),
        ("num_workers", c_int32),
        ("num_partitions", c_int32),
        ("plan", c_void_p),
        ("plan_size", c_size_t),
        ("stream", c_void_p),
        ("partitions", c_void_p),
        ("num_splits", c_void_p),
        ("sparse", c_int32),
        ("b", c_int32),
        ("topk", c_int64),
        ("extra_topk", c_int64),
        ("topk_length", c_void_p),
        ("extra_topk_length", c_void_p),
    ]


class DenseDecodeArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("q", c_void_p),
        ("kv_cache", c_void_p),
        ("block_table", c_void_p),
        ("seqlens", c_void_p),
        ("attn_sink", c_void_p),
        ("out", c_void_p),
        ("lse", c_void_p),
        ("plan", c_void_p),
        ("plan_size", c_size_t),
        ("workspace", c_void_p),
        ("workspace_size", c_size_t),
        ("stream", c_void_p),
        ("kernel", c_char_p),
        ("softmax_scale", c_float),
        ("causal", c_int32),
        ("lse_empty", c_int32),
        ("log_base", c_int32),
        ("batch_invariant", c_int32),
        ("num_partitions", c_int32),
        ("partitions", c_void_p),
        ("num_splits", c_void_p),
    ]


class SparseDecodeArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("q", c_void_p),
        ("kv_cache", c_void_p),
        ("indices", c_void_p),
        ("topk_length", c_void_p),
        ("attn_sink", c_void_p),
        ("extra_kv_cache", c_void_p),
        ("extra_indices", c_void_p),
        ("extra_topk_length", c_void_p),
        ("out", c_void_p),
        ("lse", c_void_p),
        ("plan", c_void_p),
        ("plan_size", c_size_t),
        ("partitions", c_void_p),
        ("num_splits", c_void_p),
        ("workspace", c_void_p),
        ("workspace_size", c_size_t),
        ("stream", c_void_p),
        ("kernel", c_char_p),
        ("kv_format", c_int32),
        ("softmax_scale", c_float),
        ("lse_empty", c_int32),
        ("log_base", c_int32),
        ("batch_invariant", c_int32),
        ("num_partitions", c_int32),
    ]


class SparsePrefillArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("q", c_void_p),
        ("kv", c_void_p),
        ("indices", c_void_p),
        ("topk_length", c_void_p),
        ("attn_sink", c_void_p),
        ("out", c_void_p),
        ("max_logits", c_void_p),
        ("lse", c_void_p),
        ("workspace", c_void_p),
        ("workspace_size", c_size_t),
        ("stream", c_void_p),
        ("kernel", c_char_p),
        ("kv_format", c_int32),
        ("softmax_scale", c_float),
        ("lse_empty", c_int32),
        ("log_base", c_int32),
    ]


class MergeArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("out_parts", c_void_p),
        ("lse_parts", c_void_p),
        ("attn_sink", c_void_p),
        ("out", c_void_p),
        ("lse", c_void_p),
        ("stream", c_void_p),
        ("kernel", c_char_p),
        ("lse_empty", c_int32),
        ("log_base", c_int32),
    ]


class CacheAppendArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("latent", c_void_p),
        ("rope", c_void_p),
        ("kv_cache", c_void_p),
        ("slot_mapping", c_void_p),
        ("stream", c_void_p),
        ("kernel", c_char_p),
        ("kv_format", c_int32),
        ("cache_scale", c_float),
    ]


class CacheGatherArgs(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("kv_cache", c_void_p),
        ("slots", c_void_p),
        ("out", c_void_p),
        ("stream", c_void_p),
        ("kernel", c_char_p),
        ("kv_format", c_int32),
        ("cache_scale", c_float),
    ]


CPU, CUDA = 1, 2  # FMLA_DEVICE_…
PARTITION_FIELDS = 8  # FMLA_PARTITION_FIELDS
FP8_FORMATS: Mapping[int, int] = {656: 3, 584: 4}  # bytes of a token → FMLA_KV_FP8_…

# ---- The library ----------------------------------------------------------------------------------------------------

_STRUCTS = ctypes.POINTER
_FUNCTIONS: Mapping[str, tuple[object, list[object]]] = {
    "fmla_version_string": (c_char_p, []),
    "fmla_last_error": (c_char_p, []),
    "fmla_capabilities": (c_int32, [Device, c_int64, _STRUCTS(Capability)]),
    "fmla_device_describe": (c_int32, [Device, _STRUCTS(DeviceInfo)]),
    # These take the addresses of a struct (of a Call: _call.py) and of what is asked.
    "fmla_decode_plan_partitions": (c_int32, [c_void_p, c_void_p]),
    "fmla_decode_plan": (c_int32, [c_void_p]),
    "fmla_dense_decode_workspace_size": (c_int32, [c_void_p, c_void_p, c_void_p]),
    "fmla_dense_decode_workspace_bound": (c_int32, [c_void_p, c_void_p, c_void_p]),
    "fmla_dense_decode": (c_int32, [c_void_p]),
    "fmla_sparse_decode_workspace_size": (c_int32, [c_void_p, c_void_p, c_void_p]),
    "fmla_sparse_decode_workspace_bound": (c_int32, [c_void_p, c_void_p, c_void_p]),
    "fmla_sparse_decode": (c_int32, [c_void_p]),
    "fmla_sparse_prefill_workspace_size": (c_int32, [c_void_p, c_void_p, c_void_p]),
    "fmla_sparse_prefill_workspace_bound": (c_int32, [c_void_p, c_void_p, c_void_p]),
    "fmla_sparse_prefill": (c_int32, [c_void_p]),
    "fmla_merge": (c_int32, [c_void_p]),
    "fmla_cache_append": (c_int32, [c_void_p]),
    "fmla_cache_gather": (c_int32, [c_void_p]),
}


def _path() -> str:
    """FLASHMLA_LIBRARY names one; else the one in this package; else the loader's (an installed libflashmla)."""
    named = os.environ.get("FLASHMLA_LIBRARY")
    if named:
        return named
    for folder in sys.modules[__package__].__path__:  # two in an editable install: the modules', and the library's
        bundled = os.path.join(folder, "libflashmla.so")
        if os.path.exists(bundled):
            return bundled
    return "libflashmla.so.0.1"


def _load() -> ctypes.CDLL:
    path = _path()
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise ImportError(
            f"flash_mla: cannot load {path}: {error}. Install the package with pip, which builds and bundles the "
            "library, or name a libflashmla.so in the environment variable FLASHMLA_LIBRARY"
        ) from error
    for name, (result, arguments) in _FUNCTIONS.items():
        try:
            function = getattr(library, name)
        except AttributeError as error:
            raise ImportError(f"flash_mla: {path} has no {name}: it is another version of the library") from error
        function.restype, function.argtypes = result, arguments
    return library


library = _load()

# ---- Errors ---------------------------------------------------------------------------------------------------------

# fmla_status → what Python raises. A buffer that is too small is this package's own mistake.
_EXCEPTIONS = {1: ValueError, 2: NotImplementedError, 3: RuntimeError, 4: RuntimeError}


_BY_CODE = re.compile(r"type code (\d+) with (\d+) bits")


def _type(found: re.Match[str]) -> str:
    return _types.name_of(int(found[1]), int(found[2])) or found[0]


def in_words_of(names: Mapping[str, str], text: str) -> str:
    """A text that begins with an argument's name, with what `names` has in the place of it."""
    for theirs, ours in names.items():
        if text.startswith(theirs):
            return ours + text[len(theirs) :]
    return text


def fail(status: int, function: str, names: Mapping[str, str], sentences: Mapping[str, str]) -> NoReturn:
    """Raises what the library says of the last call, in the caller's words.

    The library's text is "operation: argument: what came and what is allowed". The operation becomes the name of the Python
    `function`, the beginning of the rest what `names` has in its place, the code of a type its name. A text that begins with one of
    `sentences` becomes that sentence.
    """
    operation, _, text = library.fmla_last_error().decode().partition(": ")
    sentence = next((ours for theirs, ours in sentences.items() if text.startswith(theirs)), None)
    text = sentence or _BY_CODE.sub(_type, in_words_of(names, text))
    raise _EXCEPTIONS[status](f"{function}: {text or operation}")

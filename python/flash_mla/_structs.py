# SPDX-License-Identifier: MIT
"""The structs of include/flashmla/flashmla.h, member for member; tests/python/test_layout.py compares them with what a C compiler
makes of the header. A line has neighbours of one type.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_float, c_int32, c_int64, c_size_t, c_uint8, c_uint16, c_uint64, c_void_p
from typing import Any


def _of(type_: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, type_) for name in names.split()]


class Device(ctypes.Structure):
    _fields_ = _of(c_int32, "device_type id")


class DType(ctypes.Structure):
    _fields_ = [*_of(c_uint8, "code bits"), *_of(c_uint16, "lanes")]


class Tensor(ctypes.Structure):
    _fields_ = [
        *_of(c_void_p, "data"),
        *_of(Device, "device"),
        *_of(c_int32, "ndim"),
        *_of(DType, "dtype"),
        *_of(c_void_p, "shape strides"),
        *_of(c_uint64, "byte_offset"),
    ]


class Capability(ctypes.Structure):
    _fields_ = [
        *_of(c_size_t, "struct_size"),
        *_of(c_char_p, "operation kernel dtypes shapes reason"),
        *_of(c_int32, "available forced_only"),
        *_of(c_char_p, "part_of"),
    ]


class DeviceInfo(ctypes.Structure):
    _fields_ = [
        *_of(c_size_t, "struct_size"),
        *_of(c_char_p, "name reason built_for needs"),
        *_of(c_int32, "count workers compute_capability shared_bytes driver driver_needed built_with ptx"),
    ]


class DecodePlanArgs(ctypes.Structure):
    _fields_ = [
        *_of(c_size_t, "struct_size"),
        *_of(c_void_p, "seqlens"),
        *_of(c_int64, "s_q h_q h_kv capacity"),
        *_of(Device, "target"),
        *_of(c_int32, "num_workers num_partitions"),
        *_of(c_void_p, "plan"),
        *_of(c_size_t, "plan_size"),
        *_of(c_void_p, "stream partitions num_splits"),
        *_of(c_int32, "sparse b"),
        *_of(c_int64, "topk extra_topk"),
        *_of(c_void_p, "topk_length extra_topk_length"),
    ]


class DenseDecodeArgs(ctypes.Structure):
    _fields_ = [
        *_of(c_size_t, "struct_size"),
        *_of(c_void_p, "q kv_cache block_table seqlens attn_sink out lse plan"),
        *_of(c_size_t, "plan_size"),
        *_of(c_void_p, "workspace"),
        *_of(c_size_t, "workspace_size"),
        *_of(c_void_p, "stream"),
        *_of(c_char_p, "kernel"),
        *_of(c_float, "softmax_scale"),
        *_of(c_int32, "causal lse_empty log_base batch_invariant num_partitions"),
        *_of(c_void_p, "partitions num_splits"),
    ]


class SparseDecodeArgs(ctypes.Structure):
    _fields_ = [
        *_of(c_size_t, "struct_size"),
        *_of(
            c_void_p,
            "q kv_cache indices topk_length attn_sink extra_kv_cache extra_indices extra_topk_length out lse plan",
        ),
        *_of(c_size_t, "plan_size"),
        *_of(c_void_p, "partitions num_splits workspace"),
        *_of(c_size_t, "workspace_size"),
        *_of(c_void_p, "stream"),
        *_of(c_char_p, "kernel"),
        *_of(c_int32, "kv_format"),
        *_of(c_float, "softmax_scale"),
        *_of(c_int32, "lse_empty log_base batch_invariant num_partitions"),
    ]


class SparsePrefillArgs(ctypes.Structure):
    _fields_ = [
        *_of(c_size_t, "struct_size"),
        *_of(c_void_p, "q kv indices topk_length attn_sink out max_logits lse workspace"),
        *_of(c_size_t, "workspace_size"),
        *_of(c_void_p, "stream"),
        *_of(c_char_p, "kernel"),
        *_of(c_int32, "kv_format"),
        *_of(c_float, "softmax_scale"),
        *_of(c_int32, "lse_empty log_base"),
    ]


class MergeArgs(ctypes.Structure):
    _fields_ = [
        *_of(c_size_t, "struct_size"),
        *_of(c_void_p, "out_parts lse_parts attn_sink out lse stream"),
        *_of(c_char_p, "kernel"),
        *_of(c_int32, "lse_empty log_base"),
    ]


class CacheAppendArgs(ctypes.Structure):
    _fields_ = [
        *_of(c_size_t, "struct_size"),
        *_of(c_void_p, "latent rope kv_cache slot_mapping stream"),
        *_of(c_char_p, "kernel"),
        *_of(c_int32, "kv_format"),
        *_of(c_float, "cache_scale"),
    ]


class CacheGatherArgs(ctypes.Structure):
    _fields_ = [
        *_of(c_size_t, "struct_size"),
        *_of(c_void_p, "kv_cache slots out stream"),
        *_of(c_char_p, "kernel"),
        *_of(c_int32, "kv_format"),
        *_of(c_float, "cache_scale"),
    ]

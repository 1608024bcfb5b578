# SPDX-License-Identifier: MIT
"""The structs of include/flashmla/flashmla.h except the arguments of operations (_argument_structs.py), member for member;
tests/python/test_layout.py compares all with a C compiler's layout of the header. Each line lists neighbours of one type.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_int32, c_size_t, c_uint8, c_uint16, c_uint64, c_void_p
from typing import Any


def neighbours(type_: Any, names: str) -> list[tuple[str, Any]]:
    """Returns ctypes fields of one type."""
    return [(name, type_) for name in names.split()]


class Device(ctypes.Structure):
    _fields_ = neighbours(c_int32, "device_type id")


class DType(ctypes.Structure):
    _fields_ = [*neighbours(c_uint8, "code bits"), *neighbours(c_uint16, "lanes")]


class Tensor(ctypes.Structure):
    _fields_ = [
        *neighbours(c_void_p, "data"),
        *neighbours(Device, "device"),
        *neighbours(c_int32, "ndim"),
        *neighbours(DType, "dtype"),
        *neighbours(c_void_p, "shape strides"),
        *neighbours(c_uint64, "byte_offset"),
    ]


class Capability(ctypes.Structure):
    _fields_ = [
        *neighbours(c_size_t, "struct_size"),
        *neighbours(c_char_p, "operation kernel reason part_of"),
        *neighbours(c_int32, "available forced_only types kv_formats"),
        *neighbours(c_int32 * 8, "d_qk d_v"),
        *neighbours(c_int32, "products reserved"),
    ]


class DeviceInfo(ctypes.Structure):
    _fields_ = [
        *neighbours(c_size_t, "struct_size"),
        *neighbours(c_char_p, "name reason built_for needs"),
        *neighbours(c_int32, "count workers compute_capability shared_bytes driver driver_needed built_with ptx"),
        *neighbours(c_char_p, "workers_from"),
    ]


class Error(ctypes.Structure):
    _fields_ = [*neighbours(c_size_t, "struct_size"), *neighbours(c_char_p, "operation argument actual allowed other")]

# SPDX-License-Identifier: MIT
"""DLPack capsules made by hand, with contents that no library here would produce."""

from __future__ import annotations

import ctypes

from flash_mla import _structs


class Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = [("tensor", _structs.Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = ctypes.py_object
new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Capsuled:
    """An array of that memory, contiguous if it has no strides. Its capsules have no destructor."""

    def __init__(self, data, shape, code, bits, device=(1, 0), lanes=1, strides=None, byte_offset=0):
        self.shape, self.ndim = shape, len(shape)
        self._dims = (ctypes.c_int64 * len(shape))(*shape)
        self._strides = (ctypes.c_int64 * len(shape))(*strides) if strides else None
        self._managed = Managed()
        tensor = self._managed.tensor
        tensor.data, tensor.device, tensor.ndim = data, _structs.Device(*device), len(shape)
        tensor.dtype, tensor.byte_offset = _structs.DType(code, bits, lanes), byte_offset
        tensor.shape = ctypes.addressof(self._dims)
        tensor.strides = ctypes.addressof(self._strides) if strides else None

    def __dlpack_device__(self):
        device = self._managed.tensor.device
        return device.device_type, device.id

    def __dlpack__(self, stream=None):
        return new_capsule(ctypes.addressof(self._managed), b"dltensor", None)

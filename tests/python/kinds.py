# SPDX-License-Identifier: MIT
"""The kinds of array that the tests run on: NumPy's, and PyTorch's on the CPU and on a GPU, if installed.

A Kind makes arrays from NumPy's and converts them back, so a test is written once. If FMLA_TEST_LIBRARIES is set, for example
to "numpy", only those libraries are tested.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os

import numpy
import pytest

from caches import bf16_bits, nearest_bf16, of_bf16_bits
from flash_mla import _structs

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None
LIBRARIES = os.environ.get("FMLA_TEST_LIBRARIES", "numpy torch").split()
torch = None
if "torch" in LIBRARIES and importlib.util.find_spec("torch"):
    import torch

    # Otherwise conversions wait for its threads, which compete with the library's: half of the time of these tests.
    torch.set_num_threads(1)

needs_torch = pytest.mark.skipif(torch is None, reason="PyTorch is not installed")
needs_cuda = pytest.mark.skipif(torch is None or not torch.cuda.is_available(), reason="PyTorch sees no GPU")


class Kind:
    """A library's arrays of one element type on one device."""

    makes = True  # it can make results

    def __init__(self, library, element, device="cpu"):
        self.library, self.element, self.device = library, element, device
        self.is_torch = library == "torch"
        self.name = f"{library}-{device}-{element}" if self.is_torch else f"{library}-{element}"

    def _dtype(self, dtype):
        dtype = self.element if dtype is None else dtype
        if self.is_torch:
            return getattr(torch, dtype)
        return numpy.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)

    def array(self, values, dtype=None):
        """A new array of these values; dtype None: the kind's element."""
        values = numpy.asarray(values)
        if not self.is_torch:
            with numpy.errstate(invalid="ignore"):  # NaN to bfloat16
                return values.astype(self._dtype(dtype))
        # The view has its own storage.
        return torch.from_numpy(numpy.array(values)).to(self.device, self._dtype(dtype), copy=True)

    def int32(self, values):
        return self.array(numpy.asarray(values), "int32")

    def fp32(self, values):
        return self.array(numpy.asarray(values), "float32")

    def full(self, shape, value, dtype=None, order="C"):
        return self.array(numpy.full(shape, value, numpy.float32, order), dtype)

    def float64(self, array):
        """Returns the values of an array."""
        if self.is_torch:
            return array.detach().cpu().double().numpy()
        return numpy.asarray(array, dtype=numpy.float64)

    def bits(self, array):
        """Returns the bytes of an array, to compare exactly, NaN and the sign of zero included."""
        if self.is_torch:
            return array.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        return numpy.ascontiguousarray(array).tobytes()

    def all_bits(self, arrays):
        return [self.bits(array) for array in arrays]

    def transpose(self, array, *dims):
        return array.permute(*dims) if self.is_torch else array.transpose(*dims)

    def dtype_name(self, array):
        return str(array.dtype).replace("torch.", "")

    def is_one(self, array):
        """Returns whether an array is of this library and on this device."""
        if not self.is_torch:
            return isinstance(array, numpy.ndarray)
        return isinstance(array, torch.Tensor) and array.device.type == torch.device(self.device).type

    def __repr__(self):
        return self.name


# ---- Capsules made by hand, and bf16 without a library that has it ----------------------------------------------------


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


class Words(Capsuled):
    """bf16 in NumPy's 16-bit words; only DLPack tells the type. No library makes such arrays, so results are passed."""

    dtype = "bfloat16"

    def __init__(self, words):
        self.words = words = numpy.asarray(words)
        strides = [stride // 2 for stride in words.strides]
        super().__init__(words.ctypes.data, words.shape, 4, 16, strides=strides)

    def __getitem__(self, key):
        return Words(self.words[key])


class WordsKind(Kind):
    """Words for bf16, and NumPy's arrays for other types."""

    makes = False

    def __init__(self):
        super().__init__("words", "bfloat16")

    def array(self, values, dtype=None):
        if dtype not in (None, "bfloat16"):
            return super().array(values, dtype)
        words = bf16_bits(nearest_bf16(values))
        return Words(numpy.where(numpy.isnan(values), numpy.uint16(0x7FC0), words))

    def float64(self, array):
        if isinstance(array, Words):
            array = of_bf16_bits(array.words)
        return super().float64(array)

    def bits(self, array):
        return super().bits(array.words if isinstance(array, Words) else array)

    def is_one(self, array):
        return isinstance(array, (Words, numpy.ndarray))


def _kinds():
    kinds = [Kind("numpy", "float16")]
    if ml_dtypes is not None:
        kinds.append(Kind("numpy", "bfloat16"))
    if torch is not None:
        kinds += [Kind("torch", "bfloat16"), Kind("torch", "float16")]
        if torch.cuda.is_available():
            kinds += [Kind("torch", "bfloat16", "cuda"), Kind("torch", "float16", "cuda")]
    return [kind for kind in kinds if kind.library in LIBRARIES]


def each_of(values):
    """Returns a fixture that is each of the values in turn."""
    return pytest.fixture(params=values, ids=str)(lambda request: request.param)


KINDS = _kinds()
TORCH_KINDS = [kind for kind in KINDS if kind.is_torch]
DEVICES = sorted({kind.device for kind in TORCH_KINDS})
each_torch_kind = pytest.mark.parametrize("kind", TORCH_KINDS, ids=repr)

# Fixtures: a test that has one of these arguments, in a file that imports it, runs for each kind or device.
kind, device = each_of(KINDS), each_of(DEVICES)

# For functions that only compute in bf16.
WORDS = WordsKind()
BF16_KINDS = [WORDS, *(kind for kind in KINDS if kind.element == "bfloat16")]

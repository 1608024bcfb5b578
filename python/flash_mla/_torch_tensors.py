# SPDX-License-Identifier: MIT
"""PyTorch's tensors in C's layout: their addresses, unsupported kinds of tensors, scratch memory, streams."""

from __future__ import annotations

import ctypes
from typing import Any, Iterable, Mapping, Optional, Sequence, Tuple

import torch

from . import _library, _structs
from ._call import Call, Place, put_tensor
from ._described import capsules, host_scratch
from ._types import word_of

# ---- Tensors --------------------------------------------------------------------------------------------------------

# The dtype_word of every dtype.
_WORDS = {
    dtype: word_of(str(dtype).removeprefix("torch."), 8 * dtype.itemsize)
    for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
}


def form_of(tensor: torch.Tensor) -> Tuple[int, int, int, Sequence[int], Sequence[int]]:
    """Returns the arguments of `put_tensor` after the address."""
    return *device_of(tensor), _WORDS[tensor.dtype], tensor.shape, tensor.stride()


def _put_by_attributes(tensor: torch.Tensor, place: Place) -> int:
    return put_tensor(place, tensor.data_ptr(), *form_of(tensor))


def _exchange() -> Optional[Any]:
    """Returns PyTorch's function that writes a DLTensor (DLPack's exchange interface, PyTorch 2.10 or later), which takes a third of the
    time. The DLTensor points to the tensor's own shape and strides."""
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None or capsules is None:
        return None
    table = _ExchangeAPI.from_address(capsules[0](id(capsule), b"dlpack_exchange_api"))
    return table.tensor_from_object if table.major == 1 and table.tensor_from_object else None


class _ExchangeAPI(ctypes.Structure):
    """DLPackExchangeAPI, up to the last member used here."""

    _fields_ = [
        *_structs.neighbours(ctypes.c_uint32, "major minor"),
        *_structs.neighbours(ctypes.c_void_p, "older allocate managed_from_object managed_to_object"),
        # Called with the tensor's id, which is its address, and a Place, which is not declared: both are the cheapest
        # arguments for ctypes to convert.
        ("tensor_from_object", ctypes.PYFUNCTYPE(None, ctypes.c_void_p)),
    ]


_write = _exchange()


def dtype_of(tensor: torch.Tensor, place: Place) -> int:
    """Returns the dtype_word of a tensor. The exchange interface writes int8 for int4."""
    return _WORDS[tensor.dtype]


def put_all(tensors: Sequence[Any], call: Call) -> Sequence[int]:
    """Writes the tensors to places and returns their addresses, 0 for None. Tensors after the last place are ignored."""
    places, addresses = call.places, call.addresses
    if _write is not None:
        try:
            if call.wants_all:
                any(map(_write, map(id, tensors), places))  # each returns None, so all are called, from C
                return addresses
            given = zip(tensors, places, addresses)
            return [0 if tensor is None else _write(id(tensor), place) or address for tensor, place, address in given]
        except RuntimeError:  # a type unknown to DLPack: the library's error lists the valid ones
            pass
    return [0 if tensor is None else _put_by_attributes(tensor, place) for place, tensor in zip(places, tensors)]


# Called by torch.cuda.caching_allocator_alloc and _delete: memory from the same pool as tensors.
_allocate: Any = getattr(torch._C, "_cuda_cudaCachingAllocator_raw_alloc", None)
_free: Any = getattr(torch._C, "_cuda_cudaCachingAllocator_raw_delete", None)


def scratch(call: Call, like: torch.Tensor, size: int, stream: int) -> Tuple[Any, int]:
    """Returns memory for one call on the stream of the current GPU, and its address."""
    if not like.is_cuda:
        return host_scratch(call, size)
    if _allocate is not None:
        address = _allocate(size, stream)
        return address, address
    memory = like.new_empty(size, dtype=torch.uint8)
    return memory, memory.data_ptr()


def free_scratch(memory: Any) -> None:
    """Frees the memory once the call is in its stream or captured graph: its next user comes later in that stream."""
    if type(memory) is int and memory:
        _free(memory)


_OTHER_DEVICE = 12  # kDLExtDev: the library refuses it


def device_of(tensor: torch.Tensor) -> Tuple[int, int]:
    if tensor.is_cuda:
        return _library.CUDA, tensor.get_device()
    return (_library.CPU, 0) if tensor.is_cpu or tensor.is_meta else (_OTHER_DEVICE, tensor.get_device())


def is_array(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def shape_of(function: str, name: str, tensor: torch.Tensor) -> torch.Size:
    try:
        return tensor.shape
    except RuntimeError:  # a nested tensor, or a parameter that waits for its first input
        raise ValueError(strange(function, [(name, tensor)]) or f"{function}: {name}: has no shape") from None


def is_of_bytes(function: str, name: str, tensor: torch.Tensor, stream: int) -> bool:
    """Returns whether an element has one byte."""
    return tensor.element_size() == 1


KIND = "torch.Tensor"


def kind_of(value: object) -> str:
    """Returns the words for a value that is not a tensor."""
    return type(value).__name__


# ---- Tensors whose memory does not hold their values ------------------------------------------------------------------


def strange(
    function: str, tensors: Iterable[Tuple[str, Optional[torch.Tensor]]], written: Iterable[str] = ()
) -> Optional[str]:
    """Returns why one of the tensors has no memory to read or, if it is in `written`, to write; None if all have. Called only when a
    call fails or is unusual: the checks take longer than a call.
    """
    present = [(name, tensor) for name, tensor in tensors if tensor is not None]
    for name, tensor in present:
        why = _why_strange(tensor) or (_why_unwritable(tensor) if name in written else None)
        if why is not None:
            return f"{function}: {name}: {why}"
    return _why_apart(function, {name: tensor.device for name, tensor in present if type(tensor) is torch.Tensor})


def _why_apart(function: str, devices: Mapping[str, torch.device]) -> Optional[str]:
    """Returns the words for a tensor on a device type other than the others', which PyTorch's dispatcher accepts."""
    for name, device in devices.items():
        other = next((other for other in devices if devices[other].type != device.type), None)
        if device.type not in ("cpu", "cuda") and other is not None:
            return f"{function}: {name}: device is {device}, must be {devices[other]} as in {other}"
    return None


def _why_strange(tensor: torch.Tensor) -> Optional[str]:
    if torch.nn.parameter.is_lazy(tensor):
        return "is an uninitialized parameter, must have a shape and memory"
    if tensor.is_nested:
        return "is a nested tensor, must have one shape; pass torch.nested.to_padded_tensor of it, or its parts"
    if tensor.layout is not torch.strided:
        return f"layout is {tensor.layout}, must be torch.strided; pass the tensor's to_dense()"
    if tensor.is_quantized:
        return f"dtype is {str(tensor.dtype).removeprefix('torch.')} (a quantized tensor), must not be quantized"
    if tensor._is_zerotensor():
        return "is a zero tensor, which has no memory; pass torch.zeros_like of it"
    if _is_wrapped(tensor) and not _transforms():
        return "is a tensor of a torch.func transform that has ended"
    return None


def _why_unwritable(tensor: torch.Tensor) -> Optional[str]:
    if tensor.is_neg() or tensor.is_conj():
        lazily = "negated" if tensor.is_neg() else "conjugated"
        return f"is a lazily {lazily} view, which no kernel can write; pass a tensor with memory of its own"
    return None


def of_c(*names: str) -> Any:
    """Returns a function of torch._C; in versions without it, one that returns True."""
    value: Any = torch._C
    for name in names:
        value = getattr(value, name, None)
    return value or (lambda *arguments: True)


def of_guards(name: str) -> Any:
    """Returns the object of torch._C._dynamo.guards with this name, or None in versions without it."""
    return getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), name, None)


_transforms = of_c("_functorch", "peek_interpreter_stack")
_is_wrapped = of_c("_functorch", "is_functorch_wrapped_tensor")

# ---- GPUs -----------------------------------------------------------------------------------------------------------

current_device = getattr(torch._C, "_cuda_getDevice", None) or torch.cuda.current_device


def _stream_of(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


# The current stream of a GPU, usually without creating the object of the public interface.
stream_of = getattr(torch._C, "_cuda_getCurrentRawStream", None) or _stream_of


def current_stream(tensor: torch.Tensor) -> int:
    """Returns the current stream of the tensor's device; 0 on the CPU."""
    return stream_of(tensor.get_device()) if tensor.is_cuda else 0


def is_elsewhere(tensor: torch.Tensor) -> bool:
    """Returns whether the current GPU is not the tensor's."""
    return tensor.is_cuda and current_device() != tensor.get_device()

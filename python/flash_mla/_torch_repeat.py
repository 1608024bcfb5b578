# SPDX-License-Identifier: MIT
"""Repeats an operation's previous call on PyTorch's tensors, with the same numbers and with tensors that differ only in their
addresses, as in the layers of a model.

One check of PyTorch's guards, which torch.compile puts in front of a graph, then covers the tensors: class, dispatch keys,
type, device, sizes and strides, and whether a gradient is required. Only the addresses of the C arguments are rewritten.
"""

from __future__ import annotations

import ctypes
import operator
from typing import Any, Dict, List, Optional, Tuple

import torch

from . import _operations, _torch_tensors
from ._call import put_tensor
from ._structs import Tensor
from ._torch_tensors import current_device, form_of, of_guards, stream_of

_Guards = of_guards("TensorGuards")
_EMPTY = {"cpu": of_guards("_empty_strided_cpu"), "cuda": of_guards("_empty_strided_cuda")}
_WORTH = 8  # this many short calls amortise the preparation
_MOST_WAITED = 1 << 10
_MOST_KEPT = 8  # per operation; on the CPU each may keep some memory for its next call (_described.host_scratch)

_Tensor, _data_ptr, _requires_grad = torch.Tensor, torch.Tensor.data_ptr, operator.attrgetter("requires_grad")
_WORDS = ctypes.sizeof(Tensor) // 8
"""The 8-byte words of an fmla_tensor; the first is the address."""


class Repeats:
    """The last calls of one operation, by queries' shape, d_v and options."""

    def __init__(self) -> None:
        self._last: Dict[Any, Last] = {}

    def last(self, inputs: Tuple[Any, ...], d_v: Any, options: Tuple[Any, ...], turned: bool) -> Last:
        """Returns the entry for calls with these numbers and queries of this shape. `turned`: their last result is returned as its
        transpose."""
        try:
            key = inputs[0].shape, d_v, options, turned
            return self._last[key]
        except RuntimeError:  # the tensor has no shape
            return Last(turned)
        except KeyError:
            if len(self._last) >= _MOST_KEPT:
                self._last.clear()
            return self._last.setdefault(key, Last(turned))


class Last:
    """Keeps the last call with one key, if the next may repeat it."""

    def __init__(self, turned: bool) -> None:
        self.repeat: Optional[Repeat] = None
        self._passed, self._wait, self._turned = 0, 1, turned

    def note(
        self, operation: _operations.Operation, inputs: Tuple[Any, ...], results: Tuple[Any, ...], options: Any
    ) -> None:
        """Replaces the kept call by one that did not match it; its tensors are plain (_torch.py), and no mode is active. After a kept call
        with fewer than _WORTH hits, the next replacement waits for twice as many calls."""
        self._passed += 1
        if self._passed <= self._wait:
            return
        useless = self.repeat is not None and self.repeat.hits < _WORTH
        self._passed, self._wait = 0, min(2 * self._wait + 1, _MOST_WAITED) if useless else 0
        if _Guards is None or _EMPTY[inputs[0].device.type] is None:
            self._wait = _MOST_WAITED
        elif not any(map(_requires_grad, [tensor for tensor in inputs if tensor is not None])):
            try:
                self.repeat = Repeat(operation, inputs, results, options, self._turned)
            except (TypeError, ValueError, RuntimeError):  # the guards of this version have another interface
                self._wait = _MOST_WAITED


class Repeat:
    """The parts of a call that its repetitions share."""

    def __init__(
        self,
        operation: _operations.Operation,
        inputs: Tuple[Any, ...],
        results: Tuple[Any, ...],
        options: Any,
        turned: bool,
    ):
        present = [at for at, tensor in enumerate(inputs) if tensor is not None]
        first, tensors = inputs[0], [inputs[at] for at in present]
        self.hits = 0
        self._operation, self._options = operation, options
        self._absent = [at for at, tensor in enumerate(inputs) if tensor is None]
        self._present = operator.itemgetter(*present)  # two or more: no operation has fewer
        # The guards refuse a tensor passed twice, such as one scale for queries and keys: identity is checked separately.
        first_of = {id(tensor): at for at, tensor in reversed([*enumerate(tensors)])}
        self._twice = [(at, first_of[id(tensor)]) for at, tensor in enumerate(tensors) if at != first_of[id(tensor)]]
        self._once = sorted(first_of.values())
        once = [tensors[at] for at in self._once]
        sizes, strides = [list(tensor.shape) for tensor in once], [list(tensor.stride()) for tensor in once]
        self._are_alike = _Guards(*once, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        self._device = first.get_device() if first.is_cuda else None
        self._empty = _EMPTY[first.device.type]
        made = (*results[:-1], results[-1].T) if turned else results
        self._results = [(tuple(result.shape), result.stride(), result.dtype) for result in made]
        self._places = [*present, *operation.written]
        self._forms = [form_of(tensor) for tensor in (*tensors, *results)]
        self._idle: List[_Arguments] = []

    def __call__(self, inputs: Tuple[Any, ...]) -> Any:
        """Returns the results of a repetition; no mode may be active. Returns None if the call differs or fails; the general path then
        reports the error."""
        for at in self._absent:
            if inputs[at] is not None:
                return None
        tensors, pointers, stream = self._present(inputs), [], 0
        try:
            for tensor in tensors:
                # The guards fail on a tensor without strides: one without memory, or a nested one.
                if type(tensor) is not _Tensor or tensor.is_nested:
                    return None
                pointers.append(tensor.data_ptr())
        except RuntimeError:  # it has no memory
            return None
        once = tensors
        if self._twice:
            if any([tensors[at] is not tensors[first] for at, first in self._twice]):
                return None
            once = [tensors[at] for at in self._once]
        if not self._are_alike(*once):
            return None
        if self._device is not None:
            if current_device() != self._device:
                return None
            stream = stream_of(self._device)
        empty = self._empty
        results = [empty(*form) for form in self._results]
        pointers += map(_data_ptr, results)
        if self._launch(pointers, tensors[0], stream):
            return None
        self.hits += 1
        return tuple(results) if len(results) != 1 else results[0]

    def _launch(self, pointers: List[int], like: Any, stream: int) -> int:
        """Returns a status. The caller owns the arguments until it returns them to `_idle`, as with an Operation."""
        try:
            arguments = self._idle.pop()
        except IndexError:
            arguments = _Arguments(self._operation, self._places, self._forms, self._options)
        arguments.words[::_WORDS] = pointers
        arguments.call.args.stream = stream
        status = self._operation.launch_sized(_torch_tensors, arguments.call, like, stream)
        if not status:
            self._idle.append(arguments)
        return status


class _Arguments:
    """The arguments of one call at a time. Each call writes the addresses of its tensors to `words`."""

    def __init__(self, operation: _operations.Operation, places: List[int], forms: List[Any], options: Tuple[Any, ...]):
        self.call = operation.new_call()
        tensors = (Tensor * len(places))()
        addresses = [0] * len(operation.tensors)
        for i, (place, form) in enumerate(zip(places, forms)):
            put_tensor(self.call.places[place], 0, *form)
            tensors[i] = Tensor.from_buffer(self.call.places[place])  # its shape and strides stay in the place
            addresses[place] = ctypes.addressof(tensors) + i * ctypes.sizeof(Tensor)
        operation.fill(self.call, (*addresses, *options, 0))
        operation.ask_size(self.call)
        self.words: Any = (ctypes.c_uint64 * (_WORDS * len(places))).from_buffer(tensors)

# SPDX-License-Identifier: MIT
"""Checks the arguments of the public functions: the kind of an array, flags, numbers, options."""

from __future__ import annotations

import math
import operator
import sys
from typing import Any, Mapping, Optional, Tuple

from . import _library
from ._argument_structs import FORMATS_OF
from ._types import FIRST_OF_BYTES, FORMATS


def formats_of(operation: str) -> Tuple[str, ...]:
    first, last = FORMATS_OF[operation]
    return tuple(name for name, value in FORMATS.items() if FORMATS[first] <= value <= FORMATS[last])


OF_LISTS = tuple(name for name in formats_of("sparse_decode") if name != "FP8_576")
OF_TABLES, OF_CACHES = formats_of("dense_decode"), formats_of("cache_append")
"""The formats of sparse attention, of dense decode and of the cache operations."""

_torch: Any = None
"""The module _torch, once PyTorch has been imported; this package does not import PyTorch itself."""


_arrays: Any = None
"""The module _arrays, once an array needs it."""


def module_of(function: str, name: str, array: Any) -> Any:
    """Returns the module for the kind of `array`: _torch or _arrays."""
    global _arrays
    if _torch is not None:
        if _torch.is_array(array):
            return _torch
    elif "torch" in sys.modules:
        _import_torch()
        return module_of(function, name, array)
    if _arrays is None:
        from . import _arrays
    if not _arrays.is_array(array):
        raise TypeError(f"{function}: {name}: is {_arrays.kind_of(array)}, must be a torch.Tensor or {_arrays.KIND}")
    return _arrays


def _import_torch() -> None:
    global _torch
    from . import _torch


if "torch" in sys.modules:  # registers the operators that stored programs call
    _import_torch()


def check_kinds(function: str, module: Any, *arrays: Tuple[str, Any]) -> None:
    """Checks that all arrays other than None have the first one's kind."""
    for name, array in arrays:
        if array is not None and not module.is_array(array):
            raise TypeError(f"{function}: {name}: is {module.kind_of(array)}, must be {module.KIND}")


def check_given(function: str, module: Any, *arrays: Tuple[str, Any]) -> None:
    """Checks that there are arrays of the first one's kind."""
    for name, array in arrays:
        if array is None:
            raise TypeError(f"{function}: {name}: is None, must be {module.KIND}")
    check_kinds(function, module, *arrays)


def flag_of(function: str, name: str, value: Any) -> bool:
    if value is True or value is False:
        return value
    if not hasattr(value, "__index__") and type(value).__name__ not in ("bool", "bool_"):  # NumPy's bool
        raise TypeError(f"{function}: {name}: is {type(value).__name__}, must be a bool")
    if value not in (0, 1):
        raise ValueError(f"{function}: {name}: is {value!r}, must be True or False")
    return bool(value)


def integer_of(function: str, name: str, value: Any) -> int:
    """Checks an int. A size that PyTorch's export keeps open stays a symbol: operator.index would fix it."""
    if type(value) is int or (_torch is not None and isinstance(value, _torch.SymInt)):
        return value
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{function}: {name}: is {type(value).__name__}, must be an int") from None


def number_of(function: str, name: str, value: Any) -> float:
    if type(value) is float:
        return value
    if not hasattr(value, "__float__"):
        raise TypeError(f"{function}: {name}: is {type(value).__name__}, must be a float")
    return float(value)


def scale_of(function: str, name: str, value: Any, otherwise: str = "") -> float:
    """Checks a scale: the library reads it as fp32 and takes 0 as the default."""
    value = number_of(function, name, value)
    if not _NOTHING_AS_FP32 < abs(value) < _INFINITE_AS_FP32:
        hint = f" ({otherwise})" if otherwise else ""
        raise ValueError(f"{function}: {name}: is {value}, must be finite and not 0 in fp32{hint}")
    return value


# Numbers up to the first are 0 in fp32; numbers from the second on are infinite.
_NOTHING_AS_FP32, _INFINITE_AS_FP32 = 2.0**-150, (2 - 2**-24) * 2.0**127


_INFINITY, _E = math.inf, math.e


def lse_options(function: str, lse_empty: float, log_base: float) -> Tuple[int, int]:
    """Returns the library's numbers of both options."""
    if lse_empty == _INFINITY and log_base == _E:  # the usual case
        return 0, 0
    if lse_empty == math.inf:
        empty = 0
    elif lse_empty == -math.inf:
        empty = 1
    else:
        raise ValueError(f"{function}: lse_empty: is {lse_empty!r}, must be math.inf or -math.inf")
    if log_base == math.e:
        return empty, 0
    if log_base == 2:
        return empty, 2
    raise ValueError(f"{function}: log_base: is {log_base!r}, must be math.e or 2")


def shape_of(this: str, module: Any, name: str, array: Optional[Any], rank: int, or_rank: int = -1) -> Any:
    """Checks the number of dimensions and returns the shape; for None, a tuple of `rank` Nones."""
    if array is None:
        return (None,) * rank
    shape = module.shape_of(this, name, array)
    if len(shape) != rank and len(shape) != or_rank:
        wanted = f"{rank} or {or_rank}" if or_rank > 0 else rank
        raise ValueError(f"{this}: {name}: has {len(shape)} dimensions, must have {wanted}")
    return shape


def check_width(this: str, q: Any, width: int, name: str, widths: Tuple[int, ...]) -> None:
    """Checks that q, of this shape, is as wide as the keys `name`, whose last dimension is `width`, where these have one of the
    `widths` and q has none. In any other case the library's message is right, which takes q's width for the one that counts.
    """
    if q[-1] in widths:
        return
    width = _library.WIDTHS.get(int(width), width)
    if q[-1] != width and width in widths:
        raise ValueError(f"{this}: q: d_qk (dimension {len(q) - 1}) is {q[-1]}, must be {width} as in {name}")


MLA_WIDTHS, MHA_WIDTHS = (576, 512), (256, 192, 128, 96, 64)  # the d_qk that there are


def of_values(
    this: str, module: Any, d_qk: int, d_v: Any, scale: Optional[Any], out: Optional[Any], name: str = "head_dim_v"
) -> Tuple[int, float]:
    """Checks d_v, which the function calls `name`, and the softmax scale, and returns both."""
    d_v = integer_of(this, name, d_v)
    if not 1 <= d_v <= d_qk:
        raise ValueError(f"{this}: {name}: is {d_v}, must be in [1, {d_qk}]")
    if out is not None and module.shape_of(this, "out", out)[-1:] != (d_v,):
        shape = tuple(module.shape_of(this, "out", out))
        raise ValueError(f"{this}: out: shape is {shape}, must end with {name}, {d_v}")
    if scale is None:
        return d_v, d_qk**-0.5
    return d_v, scale_of(this, "softmax_scale", scale, "None = 1 / sqrt(d_qk)")


def format_named(function: str, name: str, value: Any, names: Tuple[str, ...] = OF_CACHES) -> int:
    """Returns FMLA_KV_… of the format `value`, which must be in `names`."""
    if not isinstance(value, str):
        raise TypeError(f"{function}: {name}: is {type(value).__name__}, must be a str")
    if value not in names:
        raise ValueError(f"{function}: {name}: is {value!r}, must be one of {', '.join(names)}")
    return FORMATS[value]


def kv_format_of(
    function: str,
    name: str,
    is_fp8_kvcache: Any,
    shape: Any,
    formats: Mapping[int, int] = _library.FP8_FORMATS,
    named: Optional[str] = None,
    names: Tuple[str, ...] = OF_LISTS,
) -> int:
    """Returns FMLA_KV_…: the format `named`, else the one of `formats` with as many bytes per token; 0 = the type of the array."""
    packed = flag_of(function, "is_fp8_kvcache", is_fp8_kvcache)
    if named is not None:
        kv_format = format_named(function, "kv_format", named, names)
        if packed and named in ("BF16", "FP16"):
            raise ValueError(
                f"{function}: kv_format: is {named!r}, must be a format of bytes where is_fp8_kvcache is True"
            )
        return kv_format
    if not packed:
        return 0
    if shape[-1] not in formats:
        sizes = " or ".join(map(str, formats))
        raise ValueError(f"{function}: {name}: shape is {tuple(shape)}, must end with {sizes} where it is FP8")
    return formats[shape[-1]]


def extra_format_of(function: str, named: Optional[str], kv_format: int, shape: Any, extra_shape: Any) -> int:
    """Returns FMLA_KV_… of extra_k_cache; 0 = that of k_cache, also where both have as many bytes per token."""
    if named is not None:
        if extra_shape[-1] is None:
            raise ValueError(f"{function}: extra_kv_format: is {named!r}, must be None where extra_k_cache is None")
        return format_named(function, "extra_kv_format", named, OF_LISTS)
    if kv_format < FIRST_OF_BYTES or extra_shape[-1] in (None, shape[-1]):
        return 0
    return _library.FP8_FORMATS.get(extra_shape[-1], 0)

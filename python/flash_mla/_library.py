# SPDX-License-Identifier: MIT
"""The shared library in Python: its functions and its errors. _structs.py and _argument_structs.py have its structs."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from ctypes import c_char_p, c_int32, c_int64, c_void_p
from typing import Any, Mapping, NoReturn, Tuple

from . import _types
from ._argument_structs import ARGUMENTS
from ._structs import Capability, Device, DeviceInfo, Error

CPU, CUDA = 1, 2  # FMLA_DEVICE_…
PARTITION_FIELDS = 8  # FMLA_PARTITION_FIELDS


def _of_sizes(*names: str) -> Mapping[int, int]:
    """Returns bytes of a token → format; a format's name ends with them."""
    return {int(name.rpartition("_")[2]): _types.FORMATS[name] for name in names}


# For sparse attention, for dense decode, and for dense decode with FP8 products. If two formats have the same size, the one
# with scales inside its tokens.
FP8_FORMATS = _of_sizes("FP8_656", "FP8_584", "FP8_528", "FP4_288")
DENSE_FP8_FORMATS = _of_sizes("FP8_656", "FP8_584", "FP8_576")
FP8_PRODUCT_FORMATS = _of_sizes("FP8_576", "FP8_656")
WIDTHS: Mapping[int, int] = {656: 576, 584: 512, 528: 512, 288: 512}  # bytes of a token → d_qk; 576 bytes: 576

# ---- The library ----------------------------------------------------------------------------------------------------

_FUNCTIONS: dict[str, tuple[object, list[object]]] = {
    "fmla_version_string": (c_char_p, []),
    "fmla_last_error_describe": (c_int32, [ctypes.POINTER(Error)]),
    "fmla_capabilities": (c_int32, [Device, c_int64, ctypes.POINTER(Capability)]),
    "fmla_device_describe": (c_int32, [Device, ctypes.POINTER(DeviceInfo)]),
}
# These take the address of an argument struct (of a Call: _call.py) and the addresses of the results.
for _name, _struct in ARGUMENTS.items():
    _FUNCTIONS[f"fmla_{_name}"] = c_int32, [c_void_p]
    if hasattr(_struct, "target"):  # a plan for this device
        _FUNCTIONS[f"fmla_{_name}_partitions"] = c_int32, [c_void_p, c_void_p]
    for _asked in ("size", "bound") if hasattr(_struct, "workspace") else ():
        _FUNCTIONS[f"fmla_{_name}_workspace_{_asked}"] = c_int32, [c_void_p, c_void_p, c_void_p]


def _path() -> str:
    """Returns the path in FLASHMLA_LIBRARY, else the library in this package, else the name for the loader (an installed libflashmla)."""
    named = os.environ.get("FLASHMLA_LIBRARY")
    if named:
        return named
    for folder in sys.modules[__package__].__path__:  # an editable install has two folders: modules and library
        bundled = os.path.join(folder, "libflashmla.so")
        if os.path.exists(bundled):
            return bundled
    return "libflashmla.so.0.2"


def _load() -> ctypes.CDLL:
    path = _path()
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise _missing(
            f"cannot load {path}: {error}. Install the package with pip, which builds and bundles the library, or name a "
            "libflashmla.so in the environment variable FLASHMLA_LIBRARY"
        ) from error
    for name, (result, arguments) in _FUNCTIONS.items():
        try:
            function = getattr(library, name)
        except AttributeError as error:
            raise _missing(f"{path} has no {name}: it is another version of the library") from error
        function.restype, function.argtypes = result, arguments
    return library


def _missing(why: str) -> ImportError:
    """Returns the error of a library that cannot be used. If nothing catches it while python -m looks for its module, whose package
    this is, it ends Python with its line alone."""
    missing = ImportError(f"flash_mla: {why}")
    if getattr(sys, "argv", [])[:1] == ["-m"]:
        otherwise = sys.excepthook

        def one_line(type_: Any, error: Any, trace: Any) -> None:
            print(error, file=sys.stderr) if error is missing else otherwise(type_, error, trace)

        sys.excepthook = one_line
    return missing


library = _load()

# ---- Errors ---------------------------------------------------------------------------------------------------------

# fmla_status → Python exception. FMLA_BUFFER_TOO_SMALL is a bug in this package.
_EXCEPTIONS = {1: ValueError, 2: NotImplementedError, 3: RuntimeError, 4: RuntimeError}


_BY_CODE = re.compile(r"type code (\d+) with (\d+) bits")


def _type(found: re.Match[str]) -> str:
    return _types.name_of(int(found[1]), int(found[2])) or found[0]


def name_of(names: Mapping[str, str], argument: str, actual: str = "") -> str:
    """Returns the Python function's name for an argument of the library's. A key "q: d_v" is of an `actual` that begins with d_v."""
    return names.get(f"{argument}: {actual.partition(' ')[0]}", names.get(argument, argument))


Sentences = Mapping[Tuple[str, str], str]
"""(argument, beginning of the actual value) → what a Python function says instead."""


def fail(status: int, function: str, names: Mapping[str, str], sentences: Sentences) -> NoReturn:
    """Raises the library's last error with the name of the Python function, its arguments' `names`, and a type's name for its code,
    or with one of `sentences`."""
    error = Error(struct_size=ctypes.sizeof(Error))
    library.fmla_last_error_describe(error)
    argument, actual, allowed, other = (
        part.decode() for part in (error.argument, error.actual, error.allowed, error.other)
    )
    for (of, begins), sentence in sentences.items():
        if argument == of and actual.startswith(begins):
            raise _EXCEPTIONS[status](f"{function}: {sentence}")
    allowed = allowed[: len(allowed) - len(other)] + name_of(names, other)
    text = _BY_CODE.sub(_type, ", ".join(filter(None, (actual, allowed)))) or error.operation.decode()
    raise _EXCEPTIONS[status](": ".join(filter(None, (function, name_of(names, argument, actual), text))))

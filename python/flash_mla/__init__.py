# SPDX-License-Identifier: MIT
"""Attention kernels for multi-head latent attention (MLA), with the interface of FlashMLA.

>>> from flash_mla import flash_mla_with_kvcache, get_mla_metadata

The functions take PyTorch tensors (the package itself does not import PyTorch), NumPy arrays, and any others that support DLPack,
on the CPU and on NVIDIA GPUs. The functions are documented where they are defined: flash_mla.flash_mla_interface has those of
FlashMLA, flash_mla._cache those of the cache, flash_mla._workspace workspace_bound. docs/semantics.md of the project defines what
they compute.
"""

import typing as _typing

from ._cache import cache_append, cache_convert, cache_gather
from ._workspace import workspace_bound
from .flash_mla_interface import *  # noqa: F403
from .flash_mla_interface import __all__ as _names

__all__ = [
    *_names,
    "cache_append",
    "cache_convert",
    "cache_gather",
    "workspace_bound",
    "upstream_version",
    "__version__",
]

upstream_version = "2026.04"
"""Year and month of the FlashMLA whose functions these replace; __version__ is that of this package. FlashMLA calls all of its
versions 1.0.0."""


if _typing.TYPE_CHECKING:
    __version__: str
else:  # otherwise a type checker would take every missing name for a str

    def __getattr__(name):
        if name == "__version__":
            from ._library import library

            return library.fmla_version_string().decode()
        raise AttributeError(f"module 'flash_mla' has no attribute {name!r}")

    def __dir__():
        return sorted({*globals(), *__all__})

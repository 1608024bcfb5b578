# SPDX-License-Identifier: MIT
"""Tests the cost and the effects of importing the package, each in a separate process."""

import inspect
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

import pytest

import flash_mla
from calls import OPERATIONS
from kinds import needs_torch
from programs import output_of

FOLDER = pathlib.Path(flash_mla.__file__).parent


def python(program, **environment):
    return output_of("-c", program, **environment)


def test_everything_is_there():
    assert {operation.function for operation in OPERATIONS.values()} <= set(flash_mla.__all__)


def test_dir_has_what_there_is():
    names = dir(flash_mla)
    assert set(flash_mla.__all__) <= set(names) == {name for name in names if hasattr(flash_mla, name)}
    assert len(names) == len(set(names)) and "TYPE_CHECKING" not in names and not hasattr(flash_mla, "TYPE_CHECKING")
    public = {name for name in names if not name.startswith("_")} - set(flash_mla.__all__)
    assert all(inspect.ismodule(getattr(flash_mla, name)) for name in public), public


def test_neither_numpy_nor_torch_is_imported():
    loaded = python("import sys, flash_mla; print(*sys.modules)").split()
    assert "flash_mla.flash_mla_interface" in loaded
    assert not {"numpy", "torch", "ml_dtypes", "flash_mla._torch"} & set(loaded)


def test_numpy_arrays_do_not_bring_torch():
    program = """
import sys, numpy, flash_mla
flash_mla.merge_states(numpy.zeros((2, 1, 1, 1, 8), "float32"), numpy.zeros((2, 1, 1, 1), "float32"))
print(*sys.modules)
"""
    assert "torch" not in python(program).split()


@needs_torch
def test_first_tensor_warns_of_nothing():
    program = "import torch, flash_mla; flash_mla.merge_states(torch.zeros(2, 1, 1, 1, 8), torch.zeros(2, 1, 1, 1))"
    output_of("-W", "error", "-c", program)


def test_import_is_quick():
    """Takes the best of several runs, minus the time of the bare interpreter."""

    def seconds(program):
        best = float("inf")
        for _ in range(7):
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", program], check=True)
            best = min(best, time.perf_counter() - start)
        return best

    flash_mla_takes = seconds("import flash_mla") - seconds("pass")
    assert flash_mla_takes < 0.15


def test_version_is_the_header_s():
    header = pathlib.Path(__file__).resolve().parents[2] / "include" / "flashmla" / "flashmla.h"
    numbers = [re.search(rf"FMLA_VERSION_{part} (\d+)", header.read_text()) for part in ("MAJOR", "MINOR", "PATCH")]
    assert flash_mla.__version__ == ".".join(number.group(1) for number in numbers)


def test_version_of_flash_mla():
    """upstream_version is not the package's version."""
    assert re.fullmatch(r"20\d\d\.\d\d", flash_mla.upstream_version)


def test_attribute_that_is_not_there():
    with pytest.raises(AttributeError, match="'flash_mla' has no attribute 'nothing'"):
        flash_mla.nothing


def test_star_import():
    program = "from flash_mla import *; print(*sorted(name for name in globals() if not name.startswith('__')))"
    assert set(python(program).split()) == set(flash_mla.__all__) - {"__version__"}


def test_names_of_flash_mla():
    """Imports the names that code written for FlashMLA imports."""
    program = """
from flash_mla import flash_attn_varlen_func, flash_attn_varlen_kvpacked_func, flash_attn_varlen_qkvpacked_func
from flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata
from flash_mla.flash_mla_interface import FlashMLASchedMeta
import flash_mla.flash_mla_interface as interface
assert interface.flash_mla_with_kvcache is flash_mla_with_kvcache
import flash_mla.cuda
assert flash_mla.cuda.sparse_decode_fwd
"""
    python(program)


@pytest.mark.parametrize(
    "library,words",
    [
        ("/nowhere/libflashmla.so", ("flash_mla: cannot load /nowhere/libflashmla.so", "pip", "FLASHMLA_LIBRARY")),
        ("libm.so.6", ("has no fmla_",)),  # the C library's math, without our functions
    ],
)
def test_library_that_is_missing_or_another(library, words):
    program = "try: import flash_mla\nexcept ImportError as error: print(error)"
    message = python(program, FLASHMLA_LIBRARY=library)
    assert all(word in message for word in words), message


def test_library_of_the_package(tmp_path):
    """Without FLASHMLA_LIBRARY the package loads its own library."""
    shutil.copytree(FOLDER, tmp_path / "flash_mla")
    shutil.copy(flash_mla._library.library._name, tmp_path / "flash_mla" / "libflashmla.so")
    program = "import flash_mla; print(flash_mla._library.library._name)"
    name = python(program, FLASHMLA_LIBRARY="", PYTHONPATH=str(tmp_path)).strip()
    assert name == str(tmp_path / "flash_mla" / "libflashmla.so")


WITHOUT_PYTHONAPI = """
import ctypes
if hasattr(ctypes, "pythonapi"):
    del ctypes.pythonapi
import flash_mla
assert flash_mla.__version__ and flash_mla.capabilities()

class OnlyDLPack:
    shape = 3, 1, 1, 4, 8
    def __dlpack__(self, stream=None):
        raise AssertionError("nobody could read it")
    def __dlpack_device__(self):
        return 1, 0

try:
    flash_mla.merge_states(OnlyDLPack(), OnlyDLPack(), out=OnlyDLPack(), lse=OnlyDLPack())
except TypeError as error:
    print(error)
try:
    import numpy
except ImportError:
    raise SystemExit
out, lse = flash_mla.merge_states(numpy.ones((2, 1, 1, 4, 8), "float32"), numpy.zeros((2, 1, 4, 1), "float32"))
assert out.shape == (1, 1, 4, 8) and abs(out - 1).max() < 1e-6 and abs(lse - numpy.log(2)).max() < 1e-6, (out, lse)
cache = numpy.zeros((2, 4, 1, 40), "float16")
flash_mla.cache_append(numpy.ones((3, 40), "float16"), None, cache, numpy.array([0, 1, 7], "int32"), "FP16")
assert cache.sum() == 120
q, keys = numpy.ones((1, 1, 4, 576), "float16"), numpy.ones((1, 64, 1, 576), "float16")
for meta in (None, flash_mla.get_mla_metadata()[0]):
    for _ in range(2):
        out, _ = flash_mla.flash_mla_with_kvcache(q, keys, None, numpy.full(1, 9, "int32"), 512, meta)
        assert (out == 1).all()
print("numpy")
"""
REFUSED = "merge_states: out_parts: is OnlyDLPack, must be a NumPy array on this Python, "


def test_python_without_ctypes_pythonapi():
    """As in PyPy, NumPy's arrays are taken, and a capsule is refused with the reason."""
    said = python(WITHOUT_PYTHONAPI).splitlines()
    assert said[0].startswith(f"{REFUSED}cpython, ") and said[1:] == ["numpy"]


@pytest.mark.skipif(shutil.which("pypy3") is None and "FMLA_PYPY" not in os.environ, reason="PyPy is not installed")
def test_pypy():
    """Runs PyPy, with its own NumPy if it has one. FMLA_PYPY names the interpreter."""
    program = [os.environ.get("FMLA_PYPY", "pypy3"), "-c", WITHOUT_PYTHONAPI]
    done = subprocess.run(program, env=dict(os.environ, PYTHONPATH=str(FOLDER.parent)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{REFUSED}pypy, ")


def test_types_are_declared():
    assert (FOLDER / "py.typed").is_file()


TYPED = """
import flash_mla
from typing import Any, Tuple

three: Tuple[Any, Any, Any] = flash_mla.flash_mla_sparse_fwd(1, 2, 3, 0.5)
four: Tuple[Any, ...] = flash_mla.flash_mla_sparse_fwd(1, 2, 3, 0.5, indexer_topk=64)
out, most, lse, of_the_first = four
version: str = flash_mla.__version__
a, b = flash_mla.flash_mla_sparse_fwd(1, 2, 3, 0.5)  # wrong: there are three
flash_mla.flash_mla_sparse(1)  # wrong: a name that is not there
flash_mla.cache_apend  # wrong: another
"""


@pytest.mark.skipif(shutil.which("mypy") is None, reason="mypy is not installed")
def test_type_checker_sees_what_is_there(tmp_path):
    program = tmp_path / "typed.py"
    program.write_text(TYPED)
    checker = ["mypy", "--no-error-summary", "--cache-dir", tmp_path / "cache", program]
    environment = dict(os.environ, MYPYPATH=str(FOLDER.parent))
    done = subprocess.run(checker, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    marked = [number for number, line in enumerate(TYPED.splitlines(), 1) if "# wrong" in line]
    found = [int(line.split(":")[1]) for line in done.stdout.splitlines() if "error:" in line]
    assert found == marked, done.stdout


@pytest.mark.parametrize(
    "name", [name for name in flash_mla.__all__ if name not in ("__version__", "upstream_version")]
)
def test_documentation(name):
    """Every argument is documented; those of the packed functions are flash_attn_varlen_func's."""
    value = getattr(flash_mla, name)
    text = inspect.getdoc(value)
    assert text and not text.startswith(f"{name}("), "a docstring, not what dataclass makes up"
    if inspect.isfunction(value) and "packed" not in name:
        for argument in inspect.signature(value).parameters:
            assert re.search(rf"\b{argument}\b", text), argument

# SPDX-License-Identifier: MIT
"""Uses an installed flash_mla from an empty folder: it must load its own library and attend. For one request of one key the
softmax is 1, so the output is that key's first values for any query. With the argument --alone it must need only the system's
libraries.
"""

import importlib.metadata
import pathlib
import subprocess
import sys
import sysconfig

import flash_mla
import ml_dtypes
import numpy
from flash_mla import _library

packages = pathlib.Path(sysconfig.get_path("purelib")).resolve()
for what in (flash_mla.__file__, _library.library._name):
    assert packages in pathlib.Path(what).resolve().parents, f"{what} is not in {packages}"
# Only the caller imports it.
assert "torch" not in sys.modules
version = importlib.metadata.version("flash_mla")
assert flash_mla.__version__ == version, f"the library is {flash_mla.__version__}, the package {version}"

for dtype in (numpy.float16, ml_dtypes.bfloat16):
    q = numpy.ones((1, 1, 2, 576), dtype)
    cache = (numpy.arange(64 * 576) % 61 / 64).astype(dtype).reshape(1, 64, 1, 576)
    table, lengths = numpy.zeros((1, 1), numpy.int32), numpy.ones(1, numpy.int32)
    metadata, num_splits = flash_mla.get_mla_metadata()
    out, lse = flash_mla.flash_mla_with_kvcache(q, cache, table, lengths, 512, metadata, num_splits)
    assert out.dtype == dtype and out.shape == (1, 1, 2, 512), (out.dtype, out.shape)
    assert (out == cache[0, 0, 0, :512]).all(), "the output is not the only key's value"
    score = cache[0, 0, 0].astype(numpy.float64).sum() / 24  # of ones; 24 is the root of 576
    assert numpy.allclose(lse, score), (lse, score)

if "--alone" in sys.argv:
    files = subprocess.run(["ldd", _library.library._name], capture_output=True, text=True, check=True).stdout
    needed = {line.split()[0].rsplit("/", 1)[-1].split(".")[0] for line in files.splitlines()}
    system = {"linux-vdso", "libc", "libm", "libdl", "libpthread", "ld-linux-x86-64", "ld-linux-aarch64"}
    assert needed <= system, f"the library needs {sorted(needed - system)} too"

print(f"flash_mla {version} in Python {sys.version.split()[0]} with NumPy {numpy.__version__}: as expected")

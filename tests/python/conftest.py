# SPDX-License-Identifier: MIT
"""What every test of the Python package starts from: the library that it loads is named, and said once."""

import os
import tempfile

import pytest

# The threads of NumPy's BLAS wait busily for work that is too small for them, beside those of the library and of PyTorch.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def pytest_configure(config):
    # What PyTorch's compiler leaves behind goes away with the tests.
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        config._inductor_cache = tempfile.TemporaryDirectory(prefix="flash_mla-inductor-")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = config._inductor_cache.name


def pytest_report_header(config):
    return f"FLASHMLA_LIBRARY: {os.environ.get('FLASHMLA_LIBRARY', 'not set')}"


@pytest.fixture
def fresh_compiler():
    """PyTorch's, which knows nothing of other tests."""
    from kinds import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()

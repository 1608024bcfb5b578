# SPDX-License-Identifier: MIT
"""Setup of all tests of the Python package: names the library to load and reports it once."""

import os
import tempfile

import pytest

# The threads of NumPy's BLAS spin while they wait and compete with the threads of the library and of PyTorch.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def pytest_configure(config):
    # Files of PyTorch's compiler are removed with the tests.
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        config._inductor_cache = tempfile.TemporaryDirectory(prefix="flash_mla-inductor-")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = config._inductor_cache.name


def pytest_report_header(config):
    return f"FLASHMLA_LIBRARY: {os.environ.get('FLASHMLA_LIBRARY', 'not set')}"


@pytest.fixture
def fresh_compiler():
    """Resets PyTorch's compiler before and after the test."""
    from kinds import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def call(name, device):
    """The small call of that name on PyTorch's tensors."""
    from torch_calls import of

    return of(name, device)


@pytest.fixture
def expected(name, device):
    """The results of a call with the same values."""
    from torch_calls import of

    other = of(name, device)
    return other(**other.given())

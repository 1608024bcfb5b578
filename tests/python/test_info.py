# SPDX-License-Identifier: MIT
"""Tests python -m flash_mla.info: what is installed and what runs here."""

import os
import re

import pytest

import flash_mla
from flash_mla import _library, _operations, _structs, info
from kinds import needs_cuda, torch
from programs import run


def report(**environment):
    done = run("-W", "error", "-m", "flash_mla.info", **environment)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


def test_names_version_library_and_every_operation():
    text = report(OMP_NUM_THREADS="3")
    assert f"flash_mla {flash_mla.__version__}\n" in text
    assert f"library  {os.path.abspath(_library.library._name)}\n" in text
    assert re.search(r"^cpu: 3 threads \(OMP_NUM_THREADS\), \w", text, re.M)
    for row in _operations.capabilities(_library.CPU, 0):
        line = re.search(rf"^  {row['operation']} +(.*)$", text, re.M).group(1).split(", ")
        assert (row["kernel"] in line) == (row["available"] and not row["forced_only"]), row
        if not row["available"]:
            assert re.search(rf"^  not .*\b{row['kernel']}\b.*: {re.escape(row['reason'])}$", text, re.M), row


def test_without_numpy_and_torch(tmp_path):
    for name in ("numpy", "torch", "ml_dtypes"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('asked for')\n")
    assert "dense_decode" in report(PYTHONPATH=f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


@pytest.mark.parametrize("argument, code", [("--help", 0), ("everything", 2)])
def test_arguments(argument, code):
    done = run("-m", "flash_mla.info", argument)
    assert done.returncode == code and "usage: python -m flash_mla.info" in done.stdout + done.stderr


def test_says_why_no_gpu_is_used():
    """The text below cuda:0 is the library's reason, or the kernels that run there."""
    described = info._describe(_structs.Device(_library.CUDA, 0))
    below = report().partition("\ncuda:0:")[2]
    assert f"not used: {described.reason.decode()}\n" in below if described.reason else "  dense_decode " in below


TEXTS = dict(name=b"NVIDIA H200", reason=b"", built_for=b"80 90a", needs=b"CUDA 13.0 (driver 580)")
GPU = dict(TEXTS, struct_size=88, count=2, compute_capability=90, driver=13010, built_with=13000, ptx=80)


def test_gpus(monkeypatch):
    """Fakes two GPUs, one of them too old."""

    def describe(device):
        if device.device_type == _library.CPU:
            return _structs.DeviceInfo(workers=8, workers_from=b"CPU quota")
        old = dict(name=b"Tesla T4", compute_capability=75, reason=b"Tesla T4 is too old") if device.id else {}
        return _structs.DeviceInfo(**dict(GPU, **old))

    def capabilities(device_type, device_id):
        row = dict(operation="merge", kernel="cuda", available=True, forced_only=False, reason="")
        not_here = dict(row, kernel="cuda-sm90", available=False, reason="too small")
        return [row, not_here, not_here] if device_type == _library.CUDA else [dict(row, kernel="cpu-avx2")]

    monkeypatch.setattr(info, "_describe", describe)
    monkeypatch.setattr(_operations, "capabilities", capabilities)
    lines = info.lines()
    assert lines[2:] == [
        "build    kernels by CUDA 13.0: machine code for 80 90a; PTX for all from 80 on, which the driver compiles at first "
        "use; needs CUDA 13.0 (driver 580) or later",
        "driver   CUDA 13.1",
        "",
        "cpu: 8 threads (CPU quota), avx2",
        "  merge          cpu-avx2",
        "",
        "cuda:0: NVIDIA H200, compute capability 9.0",
        "  merge          cuda",
        "  not cuda-sm90: too small",
        "",
        "cuda:1: Tesla T4, compute capability 7.5",
        "  not used: Tesla T4 is too old",
    ]


@needs_cuda
def test_gpu_of_this_machine():
    text = report()
    major, minor = torch.cuda.get_device_capability(0)
    assert f"\ncuda:0: {torch.cuda.get_device_name(0)}, compute capability {major}.{minor}\n" in text
    assert re.search(r"^  dense_decode +cuda-sm", text.partition("\ncuda:0:")[2], re.M)

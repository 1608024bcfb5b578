# SPDX-License-Identifier: MIT
"""Prints the installed version, its build and the kernels that run on this machine: python -m flash_mla.info"""

from __future__ import annotations

import argparse
import ctypes
import os
from typing import Any

from . import _library, _operations, _structs
from ._command import run, say
from ._library import library


def _describe(device: _structs.Device) -> _structs.DeviceInfo:
    described = _structs.DeviceInfo(struct_size=ctypes.sizeof(_structs.DeviceInfo))
    library.fmla_device_describe(device, described)
    return described


def _runs(rows: list[dict[str, Any]]) -> list[str]:
    """Returns each operation's kernels, preferred first; then each reason why other kernels do not run."""
    kernels: dict[str, list[str]] = {}
    reasons: dict[str, list[str]] = {}
    for row in rows:
        names = kernels.setdefault(row["operation"], [])
        if not row["available"]:
            reasons.setdefault(row["reason"], []).append(row["kernel"] or row["operation"])
        elif not row["forced_only"]:
            names.append(row["kernel"])
    runs = [f"  {operation:15}{', '.join(names) or 'nothing'}" for operation, names in kernels.items()]
    return runs + [f"  not {', '.join(dict.fromkeys(names))}: {reason}" for reason, names in reasons.items()]


def _instruction_sets(rows: list[dict[str, Any]]) -> str:
    """Returns this processor's instruction sets that the library has kernels for: the part after the hyphen in cpu-avx2."""
    names = (row["kernel"].partition("-")[2] for row in rows if row["available"] and not row["forced_only"])
    return " ".join(sorted({name for name in names if name != "generic"})) or "portable code only"


def _version(number: int) -> str:
    """Formats a CUDA version: 13000 is 13.0."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _build(gpu: _structs.DeviceInfo) -> str:
    """Describes the GPUs that the library has kernels for."""
    if not gpu.built_with:
        return "without kernels for GPUs: there was no nvcc of CUDA 12.0 or later, or FMLA_CUDA was OFF"
    targets = f"kernels by CUDA {_version(gpu.built_with)}: machine code for {gpu.built_for.decode()}"
    if gpu.ptx:
        targets += f"; PTX for all from {gpu.ptx} on, which the driver compiles at first use"
    return f"{targets}; needs {gpu.needs.decode()} or later"


def lines() -> list[str]:
    """Returns the lines of the report."""
    cpu, gpu = _structs.Device(_library.CPU, 0), _structs.Device(_library.CUDA, 0)
    host, first, rows = _describe(cpu), _describe(gpu), _operations.capabilities(_library.CPU, 0)
    said = [
        f"flash_mla {library.fmla_version_string().decode()}",
        f"library  {os.path.abspath(library._name) if os.path.exists(library._name) else library._name}",
        f"build    {_build(first)}",
        f"driver   CUDA {_version(first.driver)}" if first.driver else "driver   none in use",
        "",
        f"cpu: {host.workers} threads ({host.workers_from.decode()}), {_instruction_sets(rows)}",
        *_runs(rows),
    ]
    for gpu.id in range(max(first.count, 1)):
        described = _describe(gpu)
        if described.compute_capability:
            capability = f"{described.compute_capability // 10}.{described.compute_capability % 10}"
            said += ["", f"cuda:{gpu.id}: {described.name.decode()}, compute capability {capability}"]
        else:
            said += ["", f"cuda:{gpu.id}:"]
        if described.reason:
            said.append(f"  not used: {described.reason.decode()}")
        else:
            said += _runs(_operations.capabilities(_library.CUDA, gpu.id))
    return said


def _main() -> int:
    argparse.ArgumentParser(prog=_NAME, description=__doc__).parse_args()
    say("\n".join(lines()))
    return 0


_NAME = "python -m flash_mla.info"
if __name__ == "__main__":
    run(_NAME, _main)

#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Turns a wheel of this package into a repository of the Hugging Face Hub, which the package `kernels` loads.

    python3 packaging/hf_kernels.py WHEEL FOLDER

makes FOLDER/build/<variant>/ for every variant that the wheel serves: one for the CPU and, if its library has kernels for GPUs, one
for PyTorch builds of that CUDA version. The program imports the wheel to read what it has, so it must run on the wheel's platform; it
needs nothing else. packaging/README.md describes the layout and cites its sources.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile
from typing import NoReturn

PACKAGE, NAME, VERSION = (
    "flash_mla",
    "flash-mla",
    0,
)  # the Hub reserves version 0 for an interface that may change
KERNELS = "0.17.2"  # the version of `kernels` that was tested; it knows variants of the stable ABI
GLIBC = 28  # the Hub's requirement: manylinux_2_28

ASK = f"""
import json
from {PACKAGE} import _library, _structs, info
gpu = info._describe(_structs.Device(_library.CUDA, 0))
print(json.dumps(dict(built_with=gpu.built_with, built_for=gpu.built_for.decode(), ptx=gpu.ptx)))
"""


def refuse(text: str) -> NoReturn:
    print(f"hf_kernels.py: {text}", file=sys.stderr)
    sys.exit(2)


def contents(wheel: pathlib.Path) -> tuple[dict[str, bytes], dict[str, str]]:
    """Returns {path in the package: bytes}, and {name: text} of WHEEL, METADATA and LICENSE."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            files = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    except (OSError, zipfile.BadZipFile) as error:
        refuse(f"WHEEL: {wheel} cannot be read: {error}")
    package = {name[len(PACKAGE) + 1 :]: data for name, data in files.items() if name.startswith(f"{PACKAGE}/")}
    about = {name.rpartition("/")[2]: data.decode() for name, data in files.items() if ".dist-info/" in name}
    for needed in ("__init__.py", "libflashmla.so"):
        if needed not in package:
            refuse(f"WHEEL: {wheel} has no {PACKAGE}/{needed}, must be a wheel of this package")
    for needed in ("WHEEL", "METADATA", "LICENSE"):
        if needed not in about:
            refuse(f"WHEEL: {wheel} has no {needed} in its .dist-info folder")
    return package, about


def what_it_has(wheel: pathlib.Path, package: dict[str, bytes]) -> dict:
    """Returns what the library reports of the GPUs that it was built for."""
    with tempfile.TemporaryDirectory() as folder:
        put(pathlib.Path(folder, PACKAGE), package)
        environment = {name: value for name, value in os.environ.items() if name != "FLASHMLA_LIBRARY"}
        done = subprocess.run(
            [sys.executable, "-B", "-c", ASK], env={**environment, "PYTHONPATH": folder}, capture_output=True, text=True
        )
    if done.returncode:
        refuse(f"WHEEL: {wheel} cannot be imported here: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout)


def put(folder: pathlib.Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def capability(number: str) -> str:
    """Returns "9.0a" for "90a", "12.0" for "120"."""
    digits = number.rstrip("af")
    return f"{digits[:-1]}.{digits[-1]}{number[len(digits):]}"


def variants(has: dict, machine: str, torch: tuple[str, str]) -> dict[str, dict]:
    """Returns {name: the backend of its metadata}. A wheel is for no single PyTorch version, so its variants are of the stable ABI, which
    serve this version and later ones. CUDA variants serve PyTorch builds of the same major version of CUDA and the same or a later minor
    one; the drivers that these need also run the library's machine code."""
    beginning = f"torch-stable-abi{torch[0]}{torch[1]}"
    found = {f"{beginning}-cpu-{machine}-linux": {"type": "cpu"}}
    if has["built_with"]:
        cuda = f"cu{has['built_with'] // 1000}{has['built_with'] % 1000 // 10}"
        archs = [capability(number) for number in has["built_for"].split()]
        archs += [f"{capability(str(has['ptx']))}+PTX"] if has["ptx"] else []
        found[f"{beginning}-{cuda}-{machine}-linux"] = {"type": "cuda", "archs": archs}
    return found


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def metadata(files: dict[str, bytes], backend: dict) -> dict:
    digests = {name: sha256(files[name]) for name in sorted(files)}
    whole = hashlib.sha256(b"".join(name.encode() + digest for name, digest in digests.items())).hexdigest()
    return {
        "name": NAME,
        "id": f"_{PACKAGE}_{backend['type']}_{whole[:12]}",  # the module's name: one process may load two versions
        "version": VERSION,
        "kernels-minver": KERNELS,
        "license": "MIT",
        "python-depends": [],
        "backend": backend,
        "digest": {
            "algorithm": "sha256",
            "files": {name: base64.b64encode(digest).decode() for name, digest in digests.items()},
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=pathlib.Path, metavar="WHEEL", help="of this package: scripts/wheel.sh makes one")
    parser.add_argument("folder", type=pathlib.Path, metavar="FOLDER", help="the repository to make; new, or empty")
    options = parser.parse_args()
    if options.folder.exists() and (not options.folder.is_dir() or any(options.folder.iterdir())):
        refuse(f"FOLDER: {options.folder} is there already, must be new or an empty folder")
    package, about = contents(options.wheel)
    tag = re.search(r"^Tag: py3-none-(?:manylinux_2_(\d+)|\w*linux\w*?)_(x86_64|aarch64)$", about["WHEEL"], re.M)
    torch = re.search(r"^Requires-Dist: torch ?>=(\d)\.(\d+)", about["METADATA"], re.M)
    if not tag or not torch:
        refuse(
            f"WHEEL: {options.wheel} names no platform py3-none-…linux… or no PyTorch, must be a wheel of this package"
        )
    has = what_it_has(options.wheel, package)
    files = {**package, "LICENSE": about["LICENSE"].encode()}
    for variant, backend in variants(has, tag[2], (torch[1], torch[2])).items():
        folder = options.folder / "build" / variant
        put(folder, files)
        text = json.dumps(metadata(files, backend), indent=2)
        (folder / "metadata.json").write_text(f"{text}\n", encoding="utf-8")
        print(folder)
    if not tag[1] or int(tag[1]) > GLIBC:
        runs = f"glibc 2.{tag[1]} or later" if tag[1] else "systems like the one that built it"
        print(f"not for the Hub: it asks for manylinux_2_{GLIBC}, and this wheel is for {runs}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

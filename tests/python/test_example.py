# SPDX-License-Identifier: MIT
"""The examples in Python, as a user runs them."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from kinds import needs_cuda, needs_torch

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples" / "python"
pytestmark = needs_torch


def run(*command, **options):
    done = subprocess.run(
        [sys.executable, *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_toy_deepseek(device, dtype):
    """From before the end of a page to after it."""
    command = [EXAMPLES / "toy_deepseek.py", "--device", device, "--dtype", dtype, "--steps", 6]
    code, output, errors = run(*command)
    assert code == 0, output + errors
    assert re.search(r"step  0  lengths \[61, 2, 131\]", output) and re.search(r"lengths \[66, 7, 136\]", output)
    assert "agree" in output.splitlines()[-1]


@pytest.mark.parametrize(
    "fault",
    [
        "PagedCache.append = lambda self, request, latents, append=PagedCache.append: append(self, request, latents.flip(-1))",
        "flash_mla_with_kvcache = lambda q, *rest, f=flash_mla_with_kvcache, **options: f(q * 1.1, *rest, **options)",
        "flash_mla_with_kvcache = lambda q, p, t, n, *rest, f=flash_mla_with_kvcache, **options: "
        "f(q, p, t, n - 1, *rest, **options)",
    ],
    ids=["cache", "scale", "length"],
)
def test_toy_deepseek_sees_faults(fault, tmp_path):
    """The same program with a fault ends with 1."""
    text = (EXAMPLES / "toy_deepseek.py").read_text().replace("\ndef main()", f"\n{fault}\n\n\ndef main()")
    (tmp_path / "faulty.py").write_text(text)
    code, output, errors = run(tmp_path / "faulty.py", "--steps", 2)
    assert code == 1 and "differ" in errors, output + errors


def test_examples_are_all_here():
    assert sorted(os.listdir(EXAMPLES)) == ["toy_deepseek.py"]

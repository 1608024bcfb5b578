# SPDX-License-Identifier: MIT
"""Runs the Python blocks of README.md as printed: each continues the one before it."""

import pathlib
import re

import pytest

from kinds import needs_cuda
from programs import output_of

TEXT = (pathlib.Path(__file__).resolve().parents[2] / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.S | re.M)
# Results that a reader would check.
LOOK = "\nassert out.shape == (2, 1, 16, 512) and lse.shape == (2, 16, 1), (out.shape, lse.shape)\n"


def test_blocks_are_found():
    assert len(BLOCKS) == 2


def test_first_block():
    output_of("-c", BLOCKS[0] + LOOK)


@pytest.mark.parametrize("block", BLOCKS)
def test_block_compiles(block):
    compile(block, "README.md", "exec")


@needs_cuda
def test_all_blocks():
    output_of("-c", "\n".join(BLOCKS) + LOOK + "assert out.is_cuda and lse.is_cuda\n")

# SPDX-License-Identifier: MIT
"""The examples in Python."""

import importlib.util
import os
import pathlib
import re
import sys

import pytest

from kinds import needs_cuda, needs_torch
from programs import output_of

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples" / "python"
pytestmark = needs_torch


def test_examples_are_all_here():
    assert sorted(os.listdir(EXAMPLES)) == ["toy_deepseek.py", "train_mla.py"]


@pytest.fixture
def toy():
    """The program as a module of its own."""
    specification = importlib.util.spec_from_file_location("toy_deepseek", EXAMPLES / "toy_deepseek.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def run(toy, monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", ["toy_deepseek.py", *map(str, options)])
    return toy.main()


def test_toy_deepseek_as_a_program():
    """As a user runs it, with what it says when he asks for nothing."""
    lines = output_of(EXAMPLES / "toy_deepseek.py").splitlines()
    assert len(lines) == 13 and "agree" in lines[-1], lines


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_toy_deepseek(toy, monkeypatch, capsys, device, dtype):
    """From before the end of a page to after it."""
    assert run(toy, monkeypatch, "--device", device, "--dtype", dtype, "--steps", 6) == 0
    output = capsys.readouterr().out
    assert re.search(r"step  0  lengths \[61, 2, 131\]", output) and re.search(r"lengths \[66, 7, 136\]", output)
    assert "agree" in output.splitlines()[-1]


@pytest.mark.parametrize("fault", ["scale", "length", "cache", "nan"])
def test_toy_deepseek_sees_faults(toy, monkeypatch, capsys, fault):
    """A layer that computes something else ends with 1."""
    decode, append = toy.flash_mla_with_kvcache, toy.PagedCache.append

    def wrong_decode(q, pages, table, lengths, *rest, softmax_scale, **options):
        if fault == "scale":
            softmax_scale *= 1.2
        if fault == "length":
            lengths = lengths - 1
        out, lse = decode(q, pages, table, lengths, *rest, softmax_scale=softmax_scale, **options)
        return (out * float("nan") if fault == "nan" else out), lse

    def wrong_append(self, request, latents):
        append(self, request, latents.flip(-1) if fault == "cache" else latents)

    monkeypatch.setattr(toy, "flash_mla_with_kvcache", wrong_decode)
    monkeypatch.setattr(toy.PagedCache, "append", wrong_append)
    assert run(toy, monkeypatch, "--steps", 2) == 1
    assert "differ" in capsys.readouterr().err


@pytest.mark.parametrize("sizes", ["192/128", "64/64"])
def test_train_mla(sizes):
    """The losses fall, and alike."""
    lines = output_of(EXAMPLES / "train_mla.py", "--steps", "12", "--sizes", sizes).splitlines()
    losses = [[float(word.rstrip(";")) for word in line.split()[1:3]] for line in lines[1:]]
    assert losses[-1][0] < losses[0][0] - 0.5 and "largest difference" in lines[-1], lines

# SPDX-License-Identifier: MIT
"""bench/sidebyside.py, as far as it goes without a GPU: the rows, the peers that they name, and what is refused."""

import collections
import importlib
import pathlib
import sys
import types

import pytest

from programs import run

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "bench" / "sidebyside.py"
WITHOUT_TORCH = """
import os, runpy, sys
sys.modules["torch"] = None
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def script(monkeypatch):
    """The names of all of its modules, without PyTorch."""
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.syspath_prepend(SCRIPT.parent)
    before = set(sys.modules)
    names = {}
    for module in ("beside.rows", "beside.contestants", "beside.timing", "sidebyside"):
        names.update(vars(importlib.import_module(module)))
    yield types.SimpleNamespace(**names)
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("beside", "sidebyside"):
            del sys.modules[name]


def test_help_needs_no_torch():
    done = run("-c", WITHOUT_TORCH, SCRIPT, "--help")
    assert done.returncode == 0 and "fetch FOLDER" in done.stdout, done


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["time", "out", "--peers", ".", "--groups", "fp9"], "--groups: invalid choice: 'fp9'"),
        (["time", "out", "--peers", ".", "--runs", "0"], "--runs: is 0, must be a whole number from 1 on"),
        (["time", "out", "--peers", "none"], "--peers: none is no folder"),
        (["time", "out", "--peers", "."], "time: PyTorch is not installed"),
        (["time", "out"], "--peers"),
        (["fetch", SCRIPT.parent], "FOLDER: "),
        (["fetch", "none", "--python", "312"], "--python: is 312, must be a version such as 3.12"),
    ],
)
def test_refused(arguments, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run("-c", WITHOUT_TORCH, SCRIPT, *arguments)
    assert done.returncode == 2 and text in done.stderr, done
    assert not list(tmp_path.iterdir())


def test_rows_and_their_peers(script):
    found = {name: collections.Counter((row.kind, row.peers) for row in rows) for name, rows in script.GROUPS.items()}
    assert found == {
        "dense": {("dense", ("flashmla", "fa3")): 35},
        "small": {("dense_small", ("flashmla", "fa3")): 58},
        "sparse": {("sparse_decode", ("flashmla",)): 48, ("sparse_decode", ()): 16},
        "prefill": {("sparse_prefill", ("flashmla",)): 14},
        "mha": {("mha_fwd", ("fa3", "fa4", "cudnn")): 19, ("mha_varlen", ("fa3",)): 2},
    }
    rows = [row for group in script.GROUPS.values() for row in group]
    assert len({script.words_for(row) for row in rows}) == len(rows)
    for row in rows:
        for contestant in (script.Ours, *(script.PEERS[name] for name in row.peers)):
            assert callable(getattr(contestant, row.operation)), (row, contestant)


def test_arguments_by_their_places(script):
    fa3 = script.FlashAttention3
    assert (len(fa3.FORWARD), len(fa3.PLAN)) == (37, 23)  # of the operators
    assert list(script.in_order({"a": 0, "b": 1}, {"b": 2})) == [0, 2]
    with pytest.raises(TypeError, match="no arguments of the operator: {'c'}"):
        script.in_order({"a": 0}, {"c": 2})


def test_summary(script):
    rows = [(name, row) for name in ("dense", "mha") for row in script.GROUPS[name][:2]]
    assert script.summary(rows, [{"ratio": 1.0}, {"ratio": 4.0}, None, {}], ["a row: fa4 is not there"]) == [
        "dense: 2 of 2 rows have a ratio, geometric mean 2.000, smallest 1.000",
        "mha_fwd 192/128: 0 of 2 rows have a ratio",
        "failed: a row: fa4 is not there",
    ]

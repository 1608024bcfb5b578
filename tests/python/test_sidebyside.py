# SPDX-License-Identifier: MIT
"""bench/sidebyside.py, as far as it goes without a GPU: the rows, the peers that they name, and what is refused; where
PyTorch is, the gradients of dense MHA on the CPU, beside a stand-in for peers."""

import collections
import importlib
import pathlib
import random
import sys
import time
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


def names_of_all_modules(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    before = set(sys.modules)
    names = {}
    for module in ("beside.rows", "beside.contestants", "beside.timing", "sidebyside"):
        names.update(vars(importlib.import_module(module)))
    yield types.SimpleNamespace(**names)
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("beside", "sidebyside"):
            del sys.modules[name]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    yield from names_of_all_modules(monkeypatch)


@pytest.fixture
def with_torch(monkeypatch):
    pytest.importorskip("torch")
    yield from names_of_all_modules(monkeypatch)


def test_help_needs_no_torch():
    done = run("-c", WITHOUT_TORCH, SCRIPT, "--help")
    assert done.returncode == 0 and "fetch FOLDER" in done.stdout, done


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["time", "out", "--peers", ".", "--groups", "fp9"], "--groups: invalid choice: 'fp9'"),
        (["time", "out", "--peers", ".", "--without", "fa4"], "--without: invalid choice: 'fa4'"),
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
        "mha_bwd": {("mha_bwd", ("fa4", "cudnn")): 20},
    }
    rows = [row for group in script.GROUPS.values() for row in group]
    assert len({script.words_for(row) for row in rows}) == len(rows)
    for row in rows:
        for contestant, method in script.calls_of(row).values():
            assert callable(getattr({"ours": script.Ours, **script.PEERS}[contestant], method)), (row, contestant)
    assert script.OURS == ["ours_direct", "ours_deterministic"]


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


def test_summary_of_gradients(script):
    rows = [("mha_bwd", row) for row in script.GROUPS["mha_bwd"]]
    lines = [{"ratio": 1.25, "ratio_deterministic": 1.5, "share_deterministic": 0.9}, *[{}] * 17, {"ratio": 2.0}, None]
    assert script.summary(rows, lines, []) == [
        "mha_bwd 192/128: 1 of 6 rows have a ratio, geometric mean 1.250, smallest 1.250",
        "mha_bwd 192/128: 1 of 6 rows have a ratio_deterministic, geometric mean 1.500, smallest 1.500",
        "mha_bwd 192/128: 1 of 6 rows have a share_deterministic, geometric mean 0.900, smallest 0.900",
        "mha_bwd 128/128: 0 of 6 rows have a ratio",
        "mha_bwd 64/64: 0 of 6 rows have a ratio",
        "mha_bwd 128/128, 32/4 heads: 1 of 2 rows have a ratio, geometric mean 2.000, smallest 2.000",
    ]


@pytest.mark.parametrize(
    "us, expected",
    [
        (dict(ours=2, fa4=5, cudnn=3), dict(ratio=1.5)),
        (dict(ours=2, fa4=3, fa4_deterministic=6), dict(ratio=1.5)),
        (dict(ours=2, cudnn=3), {}),  # FlashAttention-4 is not there
        (
            dict(ours=2, ours_direct=1, ours_deterministic=4, fa4=3, fa4_deterministic=6),
            dict(ratio=1.5, ratio_deterministic=1.5, share_deterministic=0.5),
        ),
    ],
)
def test_ratios_of_gradients(script, us, expected):
    assert script.ratios(script.GROUPS["mha_bwd"][0], us) == expected


class StandIn:
    """Gradients by PyTorch's own attention, on the CPU."""

    def __init__(self, script):
        self.script = script

    def mha_backward(self, x):
        import torch

        q, k, v = inputs = [tensor.float().requires_grad_() for tensor in x.batch]
        by_head = [tensor.transpose(1, 2).repeat_interleave(q.shape[2] // tensor.shape[2], 1) for tensor in inputs]
        attention = torch.nn.functional.scaled_dot_product_attention
        output = attention(*by_head, is_causal=x.causal).transpose(1, 2)
        call = self.script.gradients(output, inputs, x.dout.view(output.shape).float())
        return lambda: tuple(gradient.to(torch.bfloat16) for gradient in call())

    mha_backward_deterministic = mha_backward


class Event:
    def __init__(self, enable_timing):
        self.at = 0.0

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, end):
        return 1000 * (end.at - self.at)


@pytest.fixture
def session(with_torch, monkeypatch):
    cuda = with_torch.torch.cuda
    monkeypatch.setattr(cuda, "synchronize", lambda: None)
    monkeypatch.setattr(cuda, "_sleep", lambda clocks: None)
    monkeypatch.setattr(cuda, "Event", Event)
    present = {"ours": with_torch.Ours(), "fa4": StandIn(with_torch), "cudnn": StandIn(with_torch)}
    return with_torch.Session(present, {}, seed=1, before=lambda: None, runs=3)


NAMES = ["ours", "fa4", "cudnn", "ours_direct", "ours_deterministic", "fa4_deterministic"]


@pytest.mark.parametrize(
    "shape", [(2, 70, 2, 2, 192, 128, True), (1, 33, 4, 2, 64, 64, False), (3, 17, 2, 1, 128, 128, True)]
)
def test_gradients(with_torch, session, shape):
    measured, wrong = session.outcome(with_torch.MhaGradients(*shape))
    assert wrong == []
    assert [name[:-3] for name in measured if name.endswith("_us")] == NAMES
    assert {"ratio", "ratio_deterministic", "share_deterministic"} < set(measured) and "lacks" not in measured


def test_gradients_without(with_torch, session):
    session.left_out = ["ours_deterministic"]
    measured, wrong = session.outcome(with_torch.MhaGradients(1, 20, 2, 2, 64, 64, True))
    assert wrong == [] and "ours_deterministic_us" not in measured and "ratio_deterministic" not in measured
    session.absent = {"fa4": session.present.pop("fa4")}
    measured, wrong = session.outcome(with_torch.MhaGradients(1, 20, 2, 2, 64, 64, True))
    assert wrong == ["fa4 is not there"] and measured["lacks"] == ["fa4", "fa4_deterministic"]
    assert "cudnn_us" in measured and "ratio" not in measured


def test_gradients_that_are_too_slow(with_torch, session, monkeypatch):
    ours = session.present["ours"]
    monkeypatch.setattr(ours, "mha_backward_deterministic", lambda x: lambda: time.sleep(0.51))
    small, large = (with_torch.MhaGradients(1, tokens, 2, 2, 64, 64, True) for tokens in (20, 30))
    for row, why in ((small, "TooSlow: a call takes 0.5"), (large, "it was too slow for fewer FLOP")):
        measured, wrong = session.outcome(row)
        assert len(wrong) == 1 and wrong[0].startswith(f"ours_deterministic failed: {why}"), wrong
        assert measured["lacks"] == ["ours_deterministic"] and measured["ratio"] > 0


@pytest.mark.parametrize("name", NAMES)
def test_gradients_that_differ(with_torch, session, monkeypatch, name):
    """A planted fault in dk of each, and of deterministic calls one unit in the last place of one call."""
    contestant, method = with_torch.calls_of(with_torch.MhaGradients)[name]
    honest = getattr(session.present[contestant], method)
    row, calls = with_torch.MhaGradients(2, 40, 2, 2, 64, 64, True), 0
    every, fourth = 3.0, 0.0  # what is added in every call, and in the second one for the second outcome

    def planted(x, **options):
        call = honest(x, **options)

        def wrong_call():
            nonlocal calls
            calls += 1
            results = call()
            results[1][-1, ..., 0, 5] += every + fourth * (calls == 4)
            return results

        return wrong_call

    monkeypatch.setattr(session.present[contestant], method, planted)
    measured, wrong = session.outcome(row)
    whose = "fp32 arithmetic" if name == "ours" else "ours"
    assert measured == {} and any(text.startswith(f"{name}: its dk differs from {whose}: ") for text in wrong), wrong
    if name.endswith("deterministic"):
        every, fourth = 0.0, 0.01
        measured, wrong = session.outcome(row)
        assert measured == {} and wrong == [f"{name}: two calls gave other bits"]


def test_gradients_beside_fp32(with_torch):
    """Ours is wrong where all others agree with it."""
    row = with_torch.MhaGradients(2, 40, 4, 2, 64, 64, True)
    x = row.inputs(random.Random(1))
    results = with_torch.Ours().mha_backward(x)()
    ready = {"ours": with_torch.Prepared(None, None, results, 1)}
    assert with_torch.disagreements(row, x, ready) == []
    results[0][41, 1, 3] += 1
    (text,) = with_torch.disagreements(row, x, ready)
    assert text.startswith("ours: its dq differs from fp32 arithmetic: cosine 0.99")

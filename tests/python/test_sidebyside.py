# SPDX-License-Identifier: MIT
"""Tests bench/sidebyside.py as far as possible without a GPU: the rows, the peers that they name, and refusals; with PyTorch,
also dense MHA of a server's batches, its gradients, decode with FP8 products, and errors of all operations on the CPU, next
to stand-ins for peers."""

import collections
import dataclasses
import importlib
import json
import math
import os
import pathlib
import random
import re
import sys
import time
import types

import pytest

from programs import run

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "bench" / "sidebyside.py"
RESULTS = SCRIPT.parent / "results" / "h200"
TIMES = RESULTS / "sidebyside.jsonl"
ERRORS = RESULTS / "accuracy.jsonl"
PERFORMANCE = SCRIPT.parents[1] / "docs" / "performance.md"
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
    for module in ("beside.rows", "beside.contestants", "beside.errors", "beside.timing", "sidebyside"):
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
        (["errors", "none"], "OUT.jsonl: FileNotFoundError: "),
        (["errors", SCRIPT], "OUT.jsonl: JSONDecodeError: "),
        (["errors", TIMES], "has no errors; must have rows of the group accuracy"),
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
        "fp8": {("dense_fp8", ("vllm_fp8",)): 16, ("dense_fp8_656", ()): 16},
        "sparse": {("sparse_decode", ("flashmla",)): 48, ("sparse_decode", ()): 16},
        "prefill": {("sparse_prefill", ("flashmla",)): 14},
        "mha": {("mha_fwd", ("fa3", "fa4", "cudnn")): 19, ("mha_varlen", ("fa3",)): 2},
        "mha_chunk": {("mha_chunk", ("fa3_splits",)): 56},
        "mha_chunk_64": {("mha_chunk", ("fa3_splits",)): 19},
        "mha_mixed": {("mha_mixed", ("fa3", "fa3_splits", "fa4")): 6, ("mha_decode", ("fa3", "fa3_splits", "fa4")): 18},
        "mha_sink": {("mha_sink", ("fa3", "fa3_splits")): 8},
        "mha_used": {("mha_used", ("fa3", "fa3_splits")): 9},
        "mha_short": {("mha_short", ("fa3", "fa4")): 12},
        "mha_256": {
            ("mha_fwd", ("fa3", "fa4", "cudnn")): 7,
            ("mha_varlen", ("fa3",)): 1,
            ("mha_chunk", ("fa3_splits",)): 16,
            ("mha_short", ("fa3", "fa4")): 2,
        },
        "mha_256_bwd": {("mha_bwd", ("fa4", "cudnn")): 7},
        "mha_96_bwd": {("mha_bwd", ("fa4", "cudnn")): 6},
        "mha_gqa_bwd": {("mha_bwd", ("fa4", "cudnn")): 10},
        "mha_bwd": {("mha_bwd", ("fa4", "cudnn")): 20},
        "accuracy": {
            ("dense_errors", ("flashmla", "fa3")): 12,
            ("dense_fp8_errors", ("vllm_fp8",)): 4,
            ("sparse_decode_errors", ("flashmla",)): 10,
            ("sparse_prefill_errors", ("flashmla",)): 6,
            ("mha_fwd_errors", ("fa3", "fa4", "cudnn")): 8,
            ("mha_fwd_errors", ("fa3", "cudnn")): 16,
            ("mha_chunk_errors", ("fa3_splits",)): 6,
            ("mha_bwd_errors", ("fa4", "cudnn")): 8,
            ("mha_bwd_errors", ("cudnn",)): 18,
        },
        "sm80": {("mha_fwd_sm80", ("fa2",)): 19, ("mha_chunk_sm80", ("fa2",)): 21},
        "sm80_bwd": {("mha_bwd_sm80", ("fa2",)): 20},
    }
    rows = [row for group in script.GROUPS.values() for row in group]
    assert len({script.words_for(row) for row in rows}) == len(rows)
    for row in rows:
        for contestant, method in script.calls_of(row).values():
            assert callable(getattr({"ours": script.Ours, **script.PEERS}[contestant], method)), (row, contestant)
    assert script.OURS == [
        *("ours_bf16_q", "ours_bf16", "ours_bf16_cache", "ours_invariant", "ours_direct", "ours_deterministic")
    ]
    assert set(script.VLLM_LIBRARIES) == {
        "vllm/_flashmla_C.abi3.so",
        "vllm/_flashmla_extension_C.abi3.so",
        "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
    }


def test_arguments_by_their_places(script):
    fa3 = script.FlashAttention3
    assert (len(fa3.FORWARD), len(fa3.PLAN)) == (37, 23)  # arguments of the operators
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


def test_fp8_rows(script):
    """Tests the shapes of either cache, and the summary of rows without a peer."""
    rows = script.GROUPS["fp8"]
    shapes = [tuple(script.shape_of(row).values()) for row in rows]
    assert shapes[:16] == shapes[16:] and shapes[:5] == [
        (1, 1, 8192, 16),
        (1, 1, 8192, 64),
        (1, 1, 8192, 128),
        (1, 2, 8192, 128),
        (16, 1, 8192, 16),
    ]
    assert sorted({(b, s_k) for b, _, s_k, _ in shapes}) == [(1, 8192), (16, 8192), (128, 4096), (128, 32768)]
    assert script.words_for(rows[16]) == "dense_fp8_656 b=1 s_q=1 s_k=8192 h_q=16"
    lines = [{"ratio": 1.5}] * 16 + [{}] * 16
    text = "fp8: 16 of 32 rows have a ratio, geometric mean 1.500, smallest 1.500"
    assert script.summary([("fp8", row) for row in rows], lines, []) == [text]
    us = dict(ours=2, vllm_fp8=5, ours_bf16_q=3, ours_bf16=3, ours_bf16_cache=1)
    assert script.ratios(rows[0], us) == {"ratio": 2.5} and script.ratios(rows[16], dict(ours=2, ours_bf16=3)) == {}


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


def test_groups_with_forced_kernels(script, monkeypatch):
    """Such groups are not timed with others, and the summary counts them by head sizes."""
    assert set(script.FORCED) == {"sm80", "sm80_bwd"} and not set(script.FORCED) & set(script.NOT_FORCED)
    monkeypatch.setenv("FLASHMLA_KERNEL", "")
    with pytest.raises(SystemExit):
        script.force_kernels(["mha", "sm80_bwd"])
    script.force_kernels(["sm80", "sm80_bwd"])
    assert os.environ["FLASHMLA_KERNEL"] == "mha_forward=cuda-sm80,mha_backward=cuda-sm80"
    rows = [("sm80", script.GROUPS["sm80"][0]), ("sm80_bwd", script.GROUPS["sm80_bwd"][-1])]
    assert script.summary(rows, [{"ratio": 1.5}, {"ratio": 0.5, "share_deterministic": 0.75}], []) == [
        "mha_fwd_sm80 192/128: 1 of 1 rows have a ratio, geometric mean 1.500, smallest 1.500",
        "mha_bwd_sm80 128/128, 32/4 heads: 1 of 1 rows have a ratio, geometric mean 0.500, smallest 0.500",
        "mha_bwd_sm80 128/128, 32/4 heads: 1 of 1 rows have a share_deterministic, geometric mean 0.750, smallest 0.750",
    ]
    assert script.ratios(script.GROUPS["sm80_bwd"][0], dict(ours=2, ours_deterministic=4, fa2=3)) == dict(
        ratio=1.5, share_deterministic=0.5
    )


@pytest.mark.parametrize(
    "us, expected",
    [
        (dict(ours=2, fa4=5, cudnn=3), dict(ratio=1.5)),
        (dict(ours=2, fa4=3, fa4_deterministic=6), dict(ratio=1.5)),
        (dict(ours=2, cudnn=3), {}),  # FlashAttention-4 is absent
        (
            dict(ours=2, ours_direct=1, ours_deterministic=4, fa4=3, fa4_deterministic=6),
            dict(ratio=1.5, ratio_deterministic=1.5, share_deterministic=0.5),
        ),
    ],
)
def test_ratios_of_gradients(script, us, expected):
    assert script.ratios(script.GROUPS["mha_bwd"][0], us) == expected


def test_rows_of_a_server(script):
    """Tests the ratios of a group with batch-invariant calls, how the summary counts its rows, and that no row needs more memory
    than a GPU has."""
    rows = [("mha_mixed", row) for row in script.GROUPS["mha_mixed"]]
    us = dict(ours=2, ours_invariant=4, fa3=8, fa3_splits=3, fa4=5)
    assert script.ratios(rows[0][1], us) == {"ratio": 1.5, "share_invariant": 0.5}
    assert script.ratios(rows[0][1], dict(ours=2, ours_invariant=4)) == {"share_invariant": 0.5}
    lines = [{"ratio": 1.5, "share_invariant": 0.5}] * 2 + [{}] * 22
    assert script.summary(rows, lines, [])[:2] == [
        "mha_mixed 192/128: 2 of 2 rows have a ratio, geometric mean 1.500, smallest 1.500",
        "mha_mixed 192/128: 2 of 2 rows have a share_invariant, geometric mean 0.500, smallest 0.500",
    ]
    assert script.words_for(rows[0][1]) == "mha_mixed mix=decode_and_chunk h=16 h_kv=16 d_qk=192 d_v=128 causal=True"
    for name in ("mha_chunk_64", "mha_mixed", "mha_sink", "mha_used"):
        for row in script.GROUPS[name]:
            if row.kind == "mha_mixed":
                keys = sum(of.count * of.keys[1] for of in script.MIXES[row.mix])
                assert all(of.tokens[1] <= of.keys[0] for of in script.MIXES[row.mix])
            else:
                keys = row.b * row.s_k
                assert row.s_q <= (row.s_k // 2 if row.kind == "mha_used" else row.s_k)
            assert 2 * keys * row.h_kv * (row.d_qk + row.d_v) < 40e9
            assert row.kind != "mha_sink" or row.h <= 64  # FlashAttention-3's limit


class StandIn:
    """A stand-in for a peer: gradients by PyTorch's own attention on the CPU."""

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


def plant(monkeypatch, session, place, spoil):
    """Spoils the results of a contestant's calls by a method; `place`: both names."""
    contestant, method = session.present[place[0]], place[1]
    honest = getattr(contestant, method)

    def planted(x, **options):
        call = honest(x, **options)

        def wrong_call():
            results = call()
            spoil(results)
            return results

        return wrong_call

    monkeypatch.setattr(contestant, method, planted)


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
    """Plants a fault in each contestant's dk, and one unit in the last place in one of two deterministic calls."""
    row, calls = with_torch.MhaGradients(2, 40, 2, 2, 64, 64, True), 0
    every, fourth = 3.0, 0.0  # added in every call, and in the second call for the second outcome

    def spoil(results):
        nonlocal calls
        calls += 1
        results[1][-1, ..., 0, 5] += every + fourth * (calls == 4)

    plant(monkeypatch, session, with_torch.calls_of(row)[name], spoil)
    measured, wrong = session.outcome(row)
    whose = "fp32 arithmetic" if name == "ours" else "ours"
    assert measured == {} and any(text.startswith(f"{name}: its dk differs from {whose}: ") for text in wrong), wrong
    if name.endswith("deterministic"):
        every, fourth = 0.0, 0.01
        measured, wrong = session.outcome(row)
        assert measured == {} and wrong == [f"{name}: two calls gave other bits"]


def test_gradients_beside_fp32(with_torch):
    """Ours is found wrong even if all others agree with it."""
    row = with_torch.MhaGradients(2, 40, 4, 2, 64, 64, True)
    x = row.inputs(random.Random(1))
    results = with_torch.Ours().mha_backward(x)()
    ready = {"ours": with_torch.Prepared(None, None, results, 1)}
    assert with_torch.disagreements(row, x, ready) == []
    results[0][41, 1, 3] += 1
    (text,) = with_torch.disagreements(row, x, ready)
    assert text.startswith("ours: its dq differs from fp32 arithmetic: cosine 0.99")


class Operators:
    """A stand-in for vLLM's FP8 operators, in PyTorch on the CPU; weights are rounded to e4m3, as in vLLM's."""

    plan = ("the plan", "its splits")

    def get_mla_decoding_metadata_dense_fp8(self, seqlens_k, rows, heads):
        self.planned = (seqlens_k.tolist(), rows, heads)
        return self.plan

    def fwd_kvcache_mla_fp8(
        self, q, cache, d_v, seqlens_k, table, scale, causal, plan, num_splits, descale_q, descale_k
    ):
        import torch

        (b, s_q, h_q, d_qk), codes = q.shape, torch.float8_e4m3fn
        assert (d_qk, d_v, causal, (plan, num_splits)) == (576, 512, True, self.plan)
        assert self.planned == (seqlens_k.tolist(), s_q * h_q, 1)
        assert q.dtype == cache.dtype == codes and descale_q.tolist() == descale_k.tolist() == [1.0]
        output = torch.empty(b, s_q, h_q, d_v, dtype=torch.bfloat16)
        for request, length in enumerate(seqlens_k.tolist()):
            k = torch.cat([cache[page, :, 0].float() for page in table[request]])[:length]
            for token in range(s_q):
                seen = k[: length - s_q + token + 1]
                scores = q[request, token].float() @ seen.T * scale
                p = (scores - scores.amax(1, keepdim=True)).exp()
                output[request, token] = p.to(codes).float() @ seen[:, :d_v] / p.sum(1, keepdim=True)
        return [output, None]


@pytest.fixture
def fp8(with_torch, session, monkeypatch):
    """Returns the session with a stand-in for vLLM's operators, and calls instead of graphs."""

    def called(call):
        return types.SimpleNamespace(replay=call), call()

    monkeypatch.setattr(sys.modules["beside.timing"], "captured", called)
    vllm = with_torch.VllmFp8.__new__(with_torch.VllmFp8)
    vllm.functions = Operators()
    session.present["vllm_fp8"] = vllm
    return session


NAMES_FP8 = {
    "DenseFp8": ["ours", "vllm_fp8", "ours_bf16_q", "ours_bf16", "ours_bf16_cache"],
    "DenseFp8Packed": ["ours", "ours_bf16"],
}


@pytest.mark.parametrize("shape", [(2, 2, 330, 4), (3, 1, 128, 2), (1, 3, 70, 16)])
@pytest.mark.parametrize("kind", NAMES_FP8)
def test_fp8(with_torch, fp8, kind, shape):
    row = getattr(with_torch, kind)(*shape)
    measured, wrong = fp8.outcome(row)
    assert wrong == [] and "lacks" not in measured
    assert [name[:-3] for name in measured if name.endswith("_us")] == NAMES_FP8[kind]
    assert ("ratio" in measured) == (kind == "DenseFp8")


def test_fp8_without(with_torch, fp8):
    row = with_torch.DenseFp8(1, 1, 70, 2)
    fp8.left_out = ["ours_bf16_cache"]
    fp8.absent = {"vllm_fp8": fp8.present.pop("vllm_fp8")}
    measured, wrong = fp8.outcome(row)
    assert wrong == ["vllm_fp8 is not there"] and measured["lacks"] == ["vllm_fp8"]
    assert "ours_bf16_us" in measured and not {"ours_bf16_cache_us", "ratio"} & set(measured)
    assert fp8.outcome(with_torch.DenseFp8Packed(1, 1, 70, 2))[1] == []


@pytest.mark.parametrize("kind, name", [(kind, name) for kind, names in NAMES_FP8.items() for name in names])
def test_fp8_that_differs(with_torch, fp8, monkeypatch, kind, name):
    """Plants a fault of half of a row's root mean square in one element; in ours, whose bound against fp32 arithmetic is closer,
    a sixth."""
    row = getattr(with_torch, kind)(2, 2, 130, 4)

    def spoil(output):
        of_row = output[-1, -1, -1]
        of_row[5] += (0.16 if name == "ours" else 0.5) * of_row.float().square().mean().sqrt()

    plant(monkeypatch, fp8, with_torch.calls_of(row)[name], spoil)
    measured, wrong = fp8.outcome(row)
    whose = "fp32 arithmetic" if name == "ours" else "ours"
    assert measured == {} and len(wrong) == 1, wrong
    assert wrong[0].startswith(f"{name}: its output differs from {whose}: "), wrong


def test_fp8_reads_the_pages_of_its_table(with_torch, fp8):
    """The calls have another table than the reference."""
    for row in (with_torch.DenseFp8(2, 1, 130, 4), with_torch.DenseFp8Packed(2, 1, 130, 4)):
        x = row.inputs(random.Random(1))
        output = getattr(with_torch.Ours(), row.operation)(x)()
        ready = {"ours": with_torch.Prepared(None, None, (output,), 1)}
        assert with_torch.disagreements(row, x, ready) == []
        x.table = x.table.flip(0)
        (text,) = with_torch.disagreements(row, x, ready)
        assert text.startswith("ours: its output differs from fp32 arithmetic: ")


# ---- Dense MHA of a server -------------------------------------------------------------------------------------------


def attended_alone(q, k, v, scale, sink=None):
    """Computes causal attention of the last tokens of one request in fp32: q is [tokens, h, d], k and v [keys, h_kv, d]."""
    import torch

    q, k, v = (tensor.float().transpose(0, 1) for tensor in (q, k, v))
    k, v = (tensor.repeat_interleave(len(q) // len(tensor), 0) for tensor in (k, v))
    hidden = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(k.shape[1] - q.shape[1] + 1)
    scores = (q @ k.mT * scale).masked_fill(hidden, -math.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.float()[:, None, None].expand(-1, q.shape[1], 1)], -1)
    return (scores.softmax(-1)[..., : k.shape[1]] @ v).transpose(0, 1).to(torch.bfloat16)


def attended_each(q, k, v, ends, ends_k, scale):
    import torch

    spans = zip(ends, ends[1:], ends_k, ends_k[1:])
    return torch.cat([attended_alone(q[a:b], k[c:d], v[c:d], scale) for a, b, c, d in spans])


class Operators3:
    """A stand-in for FlashAttention-3's operator, in PyTorch on the CPU."""

    def __init__(self, names):
        self.names, self.splits, self.takes = list(names), set(), {"s_aux", "seqused_k"}

    def fwd(self, *given):
        import torch

        x = types.SimpleNamespace(**dict(zip(self.names, given, strict=True)))
        assert x.is_causal and x.max_seqlen_q == int(x.cu_seqlens_q.diff().max())
        assert (x.page_table is None) == (x.seqused_k is None)
        self.splits.add(x.num_splits)
        if x.seqused_k is None:
            assert x.max_seqlen_k == int(x.cu_seqlens_k.diff().max())
            keys = [slice(*span) for span in zip(x.cu_seqlens_k[:-1], x.cu_seqlens_k[1:])]
            pairs = [(x.k[span], x.v[span]) for span in keys]
        else:  # a page a request
            assert x.cu_seqlens_k is None and x.max_seqlen_k == int(x.seqused_k.max())
            assert x.page_table.tolist() == [[page] for page in range(len(x.k))]
            used = x.seqused_k if "seqused_k" in self.takes else x.seqused_k.new_full((len(x.k),), x.k.shape[1])
            pairs = [(k[:count], v[:count]) for k, v, count in zip(x.k, x.v, used)]
        assert x.s_aux is None or x.s_aux.dtype == torch.bfloat16
        sink = x.s_aux if "s_aux" in self.takes else None
        queries = [x.q[a:b] for a, b in zip(x.cu_seqlens_q, x.cu_seqlens_q[1:])]
        return [torch.cat([attended_alone(q, k, v, x.softmax_scale, sink) for q, (k, v) in zip(queries, pairs)])]


@pytest.fixture
def served(with_torch, session, monkeypatch):
    """Returns the session with stand-ins for FlashAttention-3 and -4, and calls instead of graphs; batches are small."""
    monkeypatch.setattr(
        sys.modules["beside.timing"], "captured", lambda call: (types.SimpleNamespace(replay=call), call())
    )
    small = with_torch.Requests
    mixes = {
        "mixed": (small(3, (1, 1), (20, 300)), small(1, (70, 70), (90, 90))),
        "chunks": (small(4, (2, 30), (40, 200)),),
    }
    monkeypatch.setattr(sys.modules["beside.rows"], "MIXES", mixes)
    session.operators = Operators3(with_torch.FlashAttention3.FORWARD)
    for name in ("fa3", "fa3_splits"):
        session.present[name] = with_torch.PEERS[name].__new__(with_torch.PEERS[name])
        session.present[name].functions = session.operators
    fa4 = with_torch.FlashAttention4.__new__(with_torch.FlashAttention4)

    def of_sequences(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal):
        assert causal and max_seqlen_q == int(cu_seqlens_q.diff().max())
        assert max_seqlen_k == int(cu_seqlens_k.diff().max())
        return attended_each(q, k, v, cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), softmax_scale), None

    fa4.of_sequences = of_sequences
    session.present["fa4"] = fa4
    return session


def rows_of_a_server(script):
    return [
        script.MhaMixed("mixed", 4, 4, 192, 128),
        script.MhaMixed("chunks", 4, 1, 128, 128),
        script.MhaDecode(5, 1, 130, 4, 4, 64, 64),
        script.MhaSink(2, 30, 150, 8, 2, 64, 64),
        script.MhaUsed(3, 7, 200, 4, 4, 192, 128),
    ]


@pytest.mark.parametrize("place", range(5))
def test_mha_of_a_server(with_torch, served, place):
    """All contestants take part, FlashAttention-3 once without splits and once with its own number, and agree."""
    row = rows_of_a_server(with_torch)[place]
    measured, wrong = served.outcome(row)
    assert wrong == [] and "lacks" not in measured and measured["ratio"] > 0
    assert [name[:-3] for name in measured if name.endswith("_us")] == ["ours", *row.peers, *row.variants]
    assert ("share_invariant" in measured) == ("ours_invariant" in row.variants) == (place < 3)
    assert served.operators.splits == {0, 1}


@pytest.mark.parametrize("place, lost", [(3, "s_aux"), (4, "seqused_k")])
def test_mha_of_a_server_that_differs(with_torch, served, place, lost):
    """A peer that does not read the sink, or the lengths in use, gives another result."""
    served.operators.takes.remove(lost)
    measured, wrong = served.outcome(rows_of_a_server(with_torch)[place])
    assert measured == {} and [text[: text.index(" differs")] for text in wrong] == [
        f"{name}: its output" for name in ("fa3", "fa3_splits")
    ]


def test_mha_of_a_server_without_peers(with_torch, served):
    """A row counts if ours and one named peer ran."""
    served.absent = {name: served.present.pop(name) for name in ("fa3", "fa3_splits")}
    measured, wrong = served.outcome(rows_of_a_server(with_torch)[0])
    assert wrong == ["fa3 is not there", "fa3_splits is not there"] and measured["ratio"] > 0
    measured, _ = served.outcome(rows_of_a_server(with_torch)[3])
    assert "ours_us" in measured and "ratio" not in measured and measured["lacks"] == ["fa3", "fa3_splits"]


@pytest.mark.parametrize("place", range(5))
def test_inputs_of_a_server(with_torch, served, place):
    """Tests lengths, and that FLOP count the pairs that are seen."""
    row = rows_of_a_server(with_torch)[place]
    x = row.inputs(random.Random(3))
    tokens, keys = x.ends.diff().tolist(), (x.ends_k.diff() if x.used is None else x.used).tolist()
    assert all(least <= most for least, most in zip(tokens, keys)) and (x.longest, x.longest_k) == (
        max(tokens),
        max(keys),
    )
    pairs = sum(s_q * s_k - s_q * (s_q - 1) / 2 for s_q, s_k in zip(tokens, keys))
    assert x.flop == pytest.approx(2 * row.h * pairs * (row.d_qk + row.d_v), rel=0.02)
    assert (x.sink is None) == (row.kind != "mha_sink") and (x.used is None) == (row.kind != "mha_used")


def test_batch_invariant_call(with_torch, monkeypatch):
    """The variant of ours asks for it, and the call itself does not."""
    ours, asked = with_torch.Ours(), []

    def recorded(*arguments, **options):
        asked.append(options.get("batch_invariant", False))
        return arguments[0]

    monkeypatch.setattr(ours, "functions", types.SimpleNamespace(flash_attn_varlen_func=recorded))
    row = with_torch.MhaDecode(1, 1, 30, 2, 2, 64, 64)
    for _, method in with_torch.calls_of(row).values():
        if method.startswith("mha_forward"):
            getattr(ours, method)(row.inputs(random.Random(1)))()
    assert asked == [False, False, False, False, True]


# ---- Errors ---------------------------------------------------------------------------------------------------------


def test_error_of(with_torch):
    """Two of four elements are off, of a result whose root mean square is 2."""
    torch = with_torch.torch
    exact = torch.tensor([[2.0, -2.0], [2.0, 2.0]], dtype=torch.float64)
    result = torch.tensor([[2.5, -2.0], [2.0, 1.0]], dtype=torch.bfloat16)
    assert with_torch.error_of(result, exact) == pytest.approx((math.sqrt(1.25 / 4) / 2, 0.5))


@pytest.mark.parametrize(
    "ours, beyond",
    [
        ((1.05, 2.4), []),
        ((1.051, 2.4), ["output_rms"]),
        ((1, 2.41), ["output_worst"]),
        ((2, 9), ["output_rms", "output_worst"]),
    ],
)
def test_judgement(script, ours, beyond):
    """The least rms and the least worst element are of different peers."""
    row = script.GROUPS["accuracy"][0]
    peers = {"flashmla": script.Error(1.0, 3.0), "fa3": script.Error(1.5, 2.0)}
    found = {name: {"output": error} for name, error in {"ours": script.Error(*ours), **peers}.items()}
    fields = script.measured_of(row, found)
    assert fields["beyond"] == beyond and fields["fa3_output_worst"] == 2
    assert (fields["output_rms_ratio"], fields["output_worst_ratio"]) == (ours[0], round(ours[1] / 2, 3))
    assert "beyond" not in script.measured_of(row, {"ours": found["ours"]})


def test_summary_of_errors(script):
    rows = [("accuracy", row) for row in script.GROUPS["accuracy"][:4]] + [("dense", script.GROUPS["dense"][0])]
    lines = [
        dict(beyond=[], output_rms_ratio=0.9, output_worst_ratio=1.2),
        dict(beyond=["dk_rms"], dq_rms_ratio=1.0, dk_rms_ratio=1.1, dq_worst_ratio=1.15, dk_worst_ratio=1.1),
        {},
        None,
        {"ratio": 2.0},
    ]
    words = [script.words_for(row) for _, row in rows]
    assert script.summary(rows, lines, []) == [
        "dense: 1 of 1 rows have a ratio, geometric mean 2.000, smallest 2.000",
        f"{words[0]}: within: rms 0.900, worst 1.200",
        f"{words[1]}: beyond (dk_rms): rms 1.100, worst 1.150",
        f"{words[2]}: not beside a peer",
        f"{words[3]}: not beside a peer",
        "errors: 1 of 2 rows within 1.05 (rms) and 1.2 (worst) times the best peer's; 4 rows in all",
    ]


def written(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def line_of(kind, peaky, of, run=7, **more):
    """Makes a line; `of`: {result: rms of ours, of a peer}."""
    rms = {f"{name}_{result}_rms": rms for result, pair in of.items() for name, rms in zip(("ours", "cudnn"), pair)}
    sizes = dict(d_qk=192, d_v=128, dtype="float16")
    return dict(kind=kind, run=run, peaky=peaky, **sizes, peers={"cudnn": "9"}, **rms, **more)


def test_table_of_errors(tmp_path):
    """Shows figures of the row with the largest ratio of rms, the largest ratios of any row, and the last run alone."""
    within = dict(output_rms_ratio=0.9, output_worst_ratio=1.3, beyond=["output_worst"])
    lines = [
        line_of("mha_fwd_errors", False, {"output": (9, 9)}, run=6),
        line_of("mha_fwd_errors", False, {"output": (0.0018, 0.002)}, **within),
        line_of(
            "mha_fwd_errors", False, {"output": (0.002, 0.002)}, output_rms_ratio=1.0, output_worst_ratio=1.0, beyond=[]
        ),
        line_of(
            "mha_bwd_errors", True, {"dq": (0.0021, 0.002), "dk": (0.002, 0.002)}, dq_rms_ratio=1.051, beyond=["dq_rms"]
        ),
        line_of("mha_chunk_errors", True, {"output": (0.002,)}) | {"peers": {}},
        {"kind": "dense", "run": 8},
    ]
    done = run("-c", WITHOUT_TORCH, SCRIPT, "errors", written(tmp_path / "record", lines))
    assert done.returncode == 0 and done.stdout.splitlines()[2:] == [
        "| MHA forward, 192/128 | fp16 | 2.00 | 2.00 | 1.000 | **1.300** | – | – | – | – | 1 of 2 |",
        "| MHA dq, dk, dv, 192/128 | fp16 | – | – | – | – | 2.10, 2.00 | 2.00, 2.00 | **1.051** | – | 1 of 1 |",
        "| MHA forward of a chunk, 192/128 | fp16 | – | – | – | – | 2.00 | – | – | – | 0 of 0 |",
    ]
    head = done.stdout.splitlines()[:2]
    assert len({line.count("|") for line in done.stdout.splitlines()}) == 1 and head[1].startswith("|---|---|--:|")


def test_document_has_the_table_of_errors(script):
    """Without a record it has none."""
    text = PERFORMANCE.read_text(encoding="utf-8")
    lines = script.table_of(ERRORS) if ERRORS.is_file() else []
    assert ("peaky: ours" in text) == bool(lines) and "\n".join(lines) in text


def small_errors(script):
    """Makes a row of every operation and kind of cache."""
    kinds = script.MhaErrors, script.MhaGradientsErrors
    second = script.Second(256, 64, 256, 64, False), script.Second(256, 64, 256, 2, True)
    half = dict(dtype="float16")
    return [
        script.DenseErrors(2, 2, 200, 4),
        script.DenseErrors(5, 1, 70, 4, varlen=True, **half),
        script.DenseFp8Errors(2, 2, 200, 4),
        script.SparseErrors(2, 2, 512, 64, 64, 576),
        *(script.SparseErrors(5, 2, 512, 64, 64, 512, of) for of in second),
        script.PrefillErrors(40, 300, 64, 16, 576),
        script.PrefillErrors(7, 300, 64, 16, 512),
        *(kind(2, 90, 4, 2, 192, 128, True) for kind in kinds),
        *(kind(2, 90, 2, 2, 64, 64, False, **half) for kind in kinds),
        *(kind(1, 90, 2, 2, 256, 256, True, **half) for kind in kinds),
        script.MhaChunkErrors(2, 40, 150, 4, 2, 128, 128),
    ]


@pytest.fixture
def alike(with_torch, session):
    """Returns the session with our functions as stand-ins for all peers."""
    session.present = {name: with_torch.Ours() for name in ("ours", *with_torch.PEERS)}
    return session


@pytest.mark.parametrize("place", range(15))
def test_errors(with_torch, alike, place):
    """Errors are those of rounding alone, so the double arithmetic is right."""
    row = small_errors(with_torch)[place]
    least, most = (1e-4, 8e-4) if row.dtype == "float16" else (1e-3, 8e-3)
    for peaky in (False, True):
        row = dataclasses.replace(row, peaky=peaky)
        measured, wrong = alike.outcome(row)
        assert wrong == [] and measured["beyond"] == []
        for of in row.results:
            assert least < measured[f"ours_{of}_rms"] < most and measured[f"{of}_worst_ratio"] == 1, measured
            assert measured[f"ours_{of}_worst"] < 0.1 and f"{row.peers[0]}_{of}_rms" in measured


def test_peaky_inputs(with_torch):
    """Queries are six times as large, also in their other forms, and keys the same."""
    torch = with_torch.torch
    for row in small_errors(with_torch):
        pair = []
        for peaky in (False, True):
            torch.manual_seed(1)
            pair.append(vars(dataclasses.replace(row, peaky=peaky).inputs(random.Random(1))))
        for name in {"q", "codes", "k", "cache", "kv"} & set(pair[0]):
            plain, other = (x[name].double() for x in pair)
            near = dict(rtol=0.13, atol=0.01) if name == "codes" else dict(rtol=0.01, atol=0.01)
            assert torch.allclose(plain * 6 if name in ("q", "codes") else plain, other, **near), (row, name)
        for x in pair:
            assert "batch" not in x or torch.equal(x["batch"][0].flatten(0, 1), x["q"])


@pytest.mark.parametrize("place", range(15))
@pytest.mark.parametrize("whose", ["ours", "peer"])
def test_errors_that_are_planted(with_torch, alike, monkeypatch, place, whose):
    """Moves an element of a measured result: beyond the rule, or, if it is far, its contestant loses its place."""
    row = small_errors(with_torch)[place]
    name, by = "ours" if whose == "ours" else row.peers[0], 0.2

    def spoil(results):
        result = results if row.results == ("output",) else results[-1]
        result.flatten(0, -3)[-1, 0, 5] += by * result.float().square().mean().sqrt()

    plant(monkeypatch, alike, (name, row.operation), spoil)
    measured, wrong = alike.outcome(row)
    of = row.results[-1]
    assert wrong == [] and (f"{of}_worst" in measured["beyond"]) == (whose == "ours")
    by = math.inf
    measured, wrong = alike.outcome(row)
    assert len(wrong) == 1 and wrong[0].startswith(
        f"{name}: far from double arithmetic, rms of the error of {of} "
    ), wrong
    assert measured == {} if whose == "ours" else measured["lacks"] == [name]


def test_errors_without(with_torch, alike, monkeypatch):
    """A peer that is absent, that refuses a row, or whose result has another shape, loses its place."""
    row = with_torch.MhaErrors(1, 40, 2, 2, 64, 64, True)
    alike.absent = {"fa3": alike.present.pop("fa3")}
    monkeypatch.setattr(alike.present["fa4"], "mha_forward", lambda x: x.unknown)
    monkeypatch.setattr(alike.present["cudnn"], "mha_forward", lambda x: lambda: x.q[:3])
    measured, wrong = alike.outcome(row)
    assert [text.split(":")[0] for text in wrong] == ["fa3 is not there", "fa4 failed", "cudnn failed"]
    assert measured["lacks"] == ["fa3", "fa4", "cudnn"] and "beyond" not in measured and "ours_output_rms" in measured
    monkeypatch.setattr(with_torch.MhaErrors, "reference", lambda self, x: x.unknown)
    measured, wrong = alike.outcome(row)
    assert measured == {} and wrong[-1].startswith("double arithmetic failed: AttributeError")


def test_time_of_errors(with_torch, alike, monkeypatch, tmp_path, capsys):
    """Lines, summary, exit code and table of a group of errors, once without a peer."""
    main, torch = sys.modules["sidebyside"], with_torch.torch
    monkeypatch.setitem(main.GROUPS, "accuracy", small_errors(with_torch)[:4])
    monkeypatch.setattr(main, "check_machine", lambda: None)
    monkeypatch.setattr(main, "what_comes_before", lambda flush: None)
    monkeypatch.setattr(torch, "set_default_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    for contestant in alike.present.values():
        contestant.version = "1"
    out = tmp_path / "out.jsonl"
    arguments = ["time", str(out), "--peers", str(tmp_path), "--groups", "accuracy", "--seed", "5"]
    for absent in ({}, {"fa3": "no file"}):
        present = {name: one for name, one in alike.present.items() if name not in absent}
        monkeypatch.setattr(main, "contestants_for", lambda rows, folder: (present, absent))
        assert main.main(arguments) == len(absent)
        assert "errors: 4 of 4 rows within" in capsys.readouterr().out
        lines = [json.loads(line) for line in out.read_text().splitlines()][-4:]
        assert [line["kind"] for line in lines] == ["dense_errors"] * 2 + ["dense_fp8_errors", "sparse_decode_errors"]
        assert list(lines[0]["peers"]) == [name for name in ("flashmla", "fa3") if name not in absent]
        assert "runs" not in lines[0] and lines[0]["seed"] == 5 and ("lacks" in lines[0]) == bool(absent)
    assert main.main(["errors", str(out)]) == 0
    digits = re.search(r"\| dense decode \| bf16 \| ([0-9.]+) ", capsys.readouterr().out)[1]
    assert 1.6 < float(digits) < 2.6  # of a CPU with and without bf16 products

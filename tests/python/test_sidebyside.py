# SPDX-License-Identifier: MIT
"""Tests bench/sidebyside.py as far as possible without a GPU: the rows, the peers that they name, and refusals; with PyTorch,
also the gradients of dense MHA and decode with FP8 products on the CPU, next to stand-ins for peers."""

import collections
import importlib
import os
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
        "fp8": {("dense_fp8", ("vllm_fp8",)): 16, ("dense_fp8_656", ()): 16},
        "sparse": {("sparse_decode", ("flashmla",)): 48, ("sparse_decode", ()): 16},
        "prefill": {("sparse_prefill", ("flashmla",)): 14},
        "mha": {("mha_fwd", ("fa3", "fa4", "cudnn")): 19, ("mha_varlen", ("fa3",)): 2},
        "mha_chunk": {("mha_chunk", ("fa3_splits",)): 56},
        "mha_short": {("mha_short", ("fa3", "fa4")): 12},
        "mha_256": {
            ("mha_fwd", ("fa3", "fa4", "cudnn")): 7,
            ("mha_varlen", ("fa3",)): 1,
            ("mha_chunk", ("fa3_splits",)): 16,
            ("mha_short", ("fa3", "fa4")): 2,
        },
        "mha_256_bwd": {("mha_bwd", ("fa4", "cudnn")): 7},
        "mha_gqa_bwd": {("mha_bwd", ("fa4", "cudnn")): 10},
        "mha_bwd": {("mha_bwd", ("fa4", "cudnn")): 20},
        "sm80": {("mha_fwd_sm80", ("fa2",)): 19},
        "sm80_bwd": {("mha_bwd_sm80", ("fa2",)): 20},
    }
    rows = [row for group in script.GROUPS.values() for row in group]
    assert len({script.words_for(row) for row in rows}) == len(rows)
    for row in rows:
        for contestant, method in script.calls_of(row).values():
            assert callable(getattr({"ours": script.Ours, **script.PEERS}[contestant], method)), (row, contestant)
    assert script.OURS == ["ours_bf16_q", "ours_bf16", "ours_bf16_cache", "ours_direct", "ours_deterministic"]
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

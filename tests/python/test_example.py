# SPDX-License-Identifier: MIT
"""The examples in Python."""

import importlib.util
import os
import pathlib
import sys

import pytest

from kinds import needs_cuda, needs_torch, torch
from programs import output_of

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples" / "python"
pytestmark = needs_torch


def test_examples_are_all_here():
    assert sorted(os.listdir(EXAMPLES)) == ["mla_module.py", "train_mla.py"]


# ---- mla_module.py ----------------------------------------------------------------------------------------------------


@pytest.fixture
def mla(monkeypatch):
    """Loads the program as a module."""
    specification = importlib.util.spec_from_file_location("mla_module", EXAMPLES / "mla_module.py")
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, "mla_module", module)  # dataclasses look up their types there
    specification.loader.exec_module(module)
    return module


def run(mla, monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", ["mla_module.py", *map(str, options)])
    return mla.main()


def test_mla_module_as_a_program():
    """Runs it without options, as a user does."""
    lines = output_of(EXAMPLES / "mla_module.py").splitlines()
    assert len(lines) == 15 and "agree" in lines[-1], lines


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("dtype, cache", [("bfloat16", "plain"), ("float16", "plain"), ("bfloat16", "FP8_656")])
@pytest.mark.parametrize("prefill", [(60, 1, 130), (0, 300)])
def test_mla_module(mla, monkeypatch, capsys, device, dtype, cache, prefill):
    """Steps cross the end of a page; some requests have no tokens, no earlier tokens, or several chunks of them."""
    options = ["--device", device, "--dtype", dtype, "--cache", cache, "--steps", 6, "--prefill", *prefill]
    assert run(mla, monkeypatch, *options) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["prefill"] * 2 + ["decode"] * 6
    assert str([tokens + 8 for tokens in prefill]) in lines[-2] and "agree" in lines[-1]


FAULTS = ("scale", "length", "cache", "merge", "context", "nan")


@pytest.mark.parametrize("fault", FAULTS)
def test_mla_module_sees_faults(mla, monkeypatch, capsys, fault):
    """A layer with a fault ends with 1."""
    decode, append = mla.flash_mla_with_kvcache, mla.cache_append
    merge, prefill = mla.merge_states, mla.flash_attn_varlen_func

    def wrong_decode(q, pages, table, lengths, *rest, softmax_scale, **options):
        if fault == "scale":
            softmax_scale *= 1.2
        if fault == "length":
            lengths = lengths - 1
        out, lse = decode(q, pages, table, lengths, *rest, softmax_scale=softmax_scale, **options)
        return (out * float("nan") if fault == "nan" else out), lse

    def wrong_append(c, k_rope, *rest):
        append(c.flip(-1) if fault == "cache" else c, k_rope, *rest)

    def wrong_merge(outs, lses):
        return merge(outs[:-1], lses[:-1]) if fault == "merge" else merge(outs, lses)

    def wrong_prefill(*arguments, causal, **options):
        return prefill(*arguments, causal=causal or fault == "context", **options)

    monkeypatch.setattr(mla, "flash_mla_with_kvcache", wrong_decode)
    monkeypatch.setattr(mla, "cache_append", wrong_append)
    monkeypatch.setattr(mla, "merge_states", wrong_merge)
    monkeypatch.setattr(mla, "flash_attn_varlen_func", wrong_prefill)
    assert run(mla, monkeypatch, "--steps", 2) == 1
    assert "differ" in capsys.readouterr().err


def test_mla_module_has_the_checkpoint_s_parameters(mla):
    """The names are those of model.layers.N.self_attn in DeepSeek-V3's published index, without bias."""
    with torch.device("meta"):
        found = {name: tuple(value.shape) for name, value in mla.MLA().state_dict().items()}
    assert found == {
        "q_a_proj.weight": (1536, 7168),
        "q_a_layernorm.weight": (1536,),
        "q_b_proj.weight": (128 * 192, 1536),
        "kv_a_proj_with_mqa.weight": (576, 7168),
        "kv_a_layernorm.weight": (512,),
        "kv_b_proj.weight": (128 * 256, 512),
        "o_proj.weight": (7168, 128 * 128),
    }


def test_mla_module_rope_is_a_complex_product(mla):
    x, positions = torch.randn(5, 3, 64, dtype=torch.float64), torch.tensor([0, 1, 17, 400, 4095])
    frequencies = 10000.0 ** (-torch.arange(0, 64, 2) / 64)
    factors = torch.polar(torch.ones(5, 32, dtype=torch.float64), positions[:, None].double() * frequencies)
    expected = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (32, 2))) * factors[:, None]).flatten(-2)
    torch.testing.assert_close(mla.rope(x, positions, frequencies), expected, rtol=0, atol=2e-3)  # angles are fp32


def test_mla_module_layers_share_a_step(mla):
    """Two layers over one batch share the plan that the first fills; each gives the results it gives alone."""
    torch.manual_seed(3)
    layers = [mla.MLA(hidden=64, heads=8, q_lora=32).bfloat16() for _ in range(2)]
    x = torch.randn(40, 64).bfloat16()
    outs = []
    for together in (True, False):
        torch.manual_seed(4)  # for the order of pages
        batches = [mla.Batch(2, 80, "cpu")] * 2 if together else [mla.Batch(2, 80, "cpu") for _ in range(2)]
        pages = [batch.new_pages(torch.bfloat16, "BF16") for batch in batches]
        for counts in ([30, 10], None):
            shared = None
            for i, (layer, batch) in enumerate(zip(layers, batches)):
                if not (together and i):
                    shared = batch.decode() if counts is None else batch.prefill(counts)
                out = layer(x[:2] if counts is None else x, pages[i], shared)
            assert not together or counts or shared.plan.have_initialized
        outs.append(out)
    assert torch.equal(*outs)


def test_mla_module_batch_refuses(mla):
    """A refused batch is unchanged."""
    batch = mla.Batch(2, 100, "cpu")
    batch.prefill([100, 3])
    for call, text in (
        (lambda: batch.decode(29), "request 0 would have 129, must be at most 128"),
        (lambda: batch.decode(0), r"is \[0, 0\], must be 2 numbers from 1 on"),
        (lambda: batch.prefill([1, -1]), r"is \[1, -1\], must be 2 numbers from 0 on"),
        (lambda: batch.prefill([1]), r"is \[1\], must be 2 numbers"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    assert batch.lengths == [100, 3] and batch.decode(28).most == 28


@pytest.mark.parametrize("option", [("--prefill", -1), ("--prefill", 0), ("--steps", -1), ("--context-part", 0)])
def test_mla_module_refuses(mla, monkeypatch, capsys, option):
    with pytest.raises(SystemExit) as ended:
        run(mla, monkeypatch, *option)
    assert ended.value.code == 2 and "too small" in capsys.readouterr().err


# ---- train_mla.py -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", ["256/256", "192/128", "96/64", "64/64"])
def test_train_mla(sizes):
    """All losses fall, and equally."""
    lines = output_of(EXAMPLES / "train_mla.py", "--steps", "12", "--sizes", sizes).splitlines()
    losses = [[float(word.rstrip(";")) for word in line.split()[1:3]] for line in lines[1:]]
    assert losses[-1][0] < losses[0][0] - 0.5 and "largest difference" in lines[-1], lines

# SPDX-License-Identifier: MIT
"""Tests workspace_bound: no call up to the sizes takes more; and wrong arguments."""

import math
import random

import numpy
import pytest

import flash_mla
from caches import D_QK
from flash_mla import _arrays, _operations, flash_mla_sparse_fwd, flash_mla_with_kvcache, flash_mla_with_kvcache_fp8
from flash_mla import get_mla_metadata, workspace_bound
from kinds import Kind, ml_dtypes
from test_errors import refused

KIND = Kind("numpy", "bfloat16" if ml_dtypes else "float16")
DEVICES = ["cpu"] + ["cuda"] * any(row["available"] for row in flash_mla.capabilities("cuda"))


def taken(operation):
    """Returns the workspace of the last call."""
    return operation.idle[_arrays][-1].args.workspace_size


def zeros(*shape, dtype=None):
    return KIND.full(shape, 0, dtype)


def draws(first):
    """Yields the largest sizes, then smaller ones."""
    draw = random.Random(0)
    return [first] + [tuple(draw.randint(1, most) for most in first) for _ in range(12)]


@pytest.mark.parametrize("planned", [False, True], ids=["plan=inside", "plan=meta"])
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("layout", [None, *D_QK])
def test_dense_decode(layout, batch_invariant, planned):
    options, d_qk = dict(batch_invariant=batch_invariant, is_fp8_kvcache=layout is not None), D_QK.get(layout, 576)
    sizes = dict(b=6, s_q=3, h_q=32, max_pages=4, d_qk=d_qk, dtype=KIND.element)
    bound = workspace_bound("flash_mla_with_kvcache", **sizes, **options)
    cache, most = zeros(24, 64, 1, layout or d_qk, dtype=layout and "uint8"), 0
    for b, s_q, h_q, length in draws((6, 3, 32, 256)):
        table = numpy.arange(4 * b, dtype=numpy.int32).reshape(b, 4)
        lengths = numpy.linspace(0, length, b).astype(numpy.int32)
        meta = get_mla_metadata()[0] if planned else None
        flash_mla_with_kvcache(zeros(b, s_q, h_q, d_qk), cache, table, lengths, 512, meta, **options)
        most = max(most, taken(_operations.DENSE_DECODE))
    assert 0 < most <= bound


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("dtype,layout", [("bfloat16", 656), ("bfloat16", 576), ("float8_e4m3fn", 576)])
def test_fp8_products(dtype, layout, batch_invariant):
    sizes, options = dict(b=6, s_q=3, h_q=32, max_pages=4), dict(batch_invariant=batch_invariant)
    bound = workspace_bound("flash_mla_with_kvcache_fp8", **sizes, dtype=dtype, **options)
    assert bound == workspace_bound("flash_mla_with_kvcache_fp8", **sizes, dtype=dtype, is_fp8_kvcache=True, **options)
    if ml_dtypes is None:
        pytest.skip("results are bf16")
    cache, most = zeros(24, 64, 1, layout, dtype="uint8"), 0
    for b, s_q, h_q, length in draws((6, 3, 32, 256)):
        table = numpy.arange(4 * b, dtype=numpy.int32).reshape(b, 4)
        lengths = numpy.linspace(0, length, b).astype(numpy.int32)
        q = zeros(b, s_q, h_q, 576, dtype="uint8" if dtype == "float8_e4m3fn" else None)
        flash_mla_with_kvcache_fp8(q, cache, table, lengths, 512, None, **options)
        most = max(most, taken(_operations.DENSE_DECODE_FP8))
    assert 0 < most <= bound


@pytest.mark.parametrize("larger", [3, 5])
def test_bound_of_dense_decode_is_for_both_formats_of_a_width(larger, monkeypatch):
    """d_qk does not distinguish 656 bytes a token from 576, and calls may have either."""
    ask = _operations.DENSE_DECODE.workspace_bound

    def more_for_one(place, tensors, options):
        status, size = ask(place, tensors, options)
        return status, size + 1000 * (options["kv_format"] == larger)

    sizes = dict(b=6, s_q=3, h_q=32, max_pages=4, is_fp8_kvcache=True)
    bound = workspace_bound("flash_mla_with_kvcache", **sizes)
    monkeypatch.setattr(_operations.DENSE_DECODE, "workspace_bound", more_for_one)
    assert workspace_bound("flash_mla_with_kvcache", **sizes) == bound + 1000


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "FP8"])
@pytest.mark.parametrize("extra_topk", [0, 90])
@pytest.mark.parametrize("prefill", [False, True], ids=["decode", "prefill"])
def test_sparse(prefill, extra_topk, packed):
    if prefill and (extra_topk or ml_dtypes is None):
        pytest.skip("of one list, and of bf16")
    options, most = dict(is_fp8_kvcache=packed), 0
    cache = zeros(4, 64, 1, 656, dtype="uint8") if packed else zeros(4, 64, 1, 576)
    if prefill:
        bound = workspace_bound("flash_mla_sparse_fwd", s_q=40, h_q=16, topk=200, **options)
    else:
        sizes = dict(b=6, s_q=2, h_q=16, topk=200, extra_topk=extra_topk, dtype=KIND.element)
        bound = workspace_bound("flash_mla_with_kvcache", **sizes, **options)
    for b, s_q, h_q, topk in draws((1, 40, 16, 200) if prefill else (6, 2, 16, 200)):
        q, indices = zeros(b, s_q, h_q, 576), zeros(b, s_q, topk, dtype="int32")
        if prefill:
            flash_mla_sparse_fwd(q[0], cache, indices[0][:, None], 0.5, **options)
        else:
            extra = {}
            if extra_topk:
                extra = dict(extra_k_cache=cache, extra_indices_in_kvcache=zeros(b, s_q, extra_topk, dtype="int32"))
            flash_mla_with_kvcache(q, cache, None, None, 512, None, indices=indices, **extra, **options)
        most = max(most, taken(_operations.SPARSE_PREFILL if prefill else _operations.SPARSE_DECODE))
    assert most <= bound and (most or prefill)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["b", "s_q", "h_q", "topk"])
def test_it_never_falls(name, device):
    sizes, last = dict(b=4, s_q=2, h_q=16, topk=128), 0
    for value in (1, 3, 5, 33, 64, 100, 256):
        bound = workspace_bound("flash_mla_with_kvcache", device, **dict(sizes, **{name: value}), is_fp8_kvcache=True)
        assert bound >= last
        last = bound
    assert last > 0


DENSE = dict(function="flash_mla_with_kvcache", b=4, s_q=2, h_q=16, max_pages=8)
SPARSE = dict(function="flash_mla_with_kvcache", b=4, s_q=2, h_q=16, topk=64)
PREFILL = dict(function="flash_mla_sparse_fwd", s_q=2, h_q=16, topk=64)
FP8 = dict(DENSE, function="flash_mla_with_kvcache_fp8")
NUMBERS = [0, -1, 2**31, "4", 1.5]
WRONG = [
    *[(DENSE, "function", value) for value in ("merge_states", "", None, 1)],
    *[(DENSE, "device", value) for value in ("gpu", None, "cuda:x")],
    *[
        (DENSE, name, value)
        for name in ("b", "s_q", "h_q", "h_k", "max_pages", "page_size", "d_qk")
        for value in NUMBERS
    ],
    *[(SPARSE, "topk", value) for value in NUMBERS],
    *[(SPARSE, "extra_topk", value) for value in (-1, 2**31, "4", None)],
    *[(DENSE, name, None) for name in ("b", "max_pages")],
    *[(PREFILL, name, 3) for name in ("b", "max_pages", "extra_topk")],
    *[(DENSE, "dtype", value) for value in ("float32", None, 16)],
    *[(DENSE, "is_fp8_kvcache", value) for value in (2, "yes")],
    *[(SPARSE, "batch_invariant", value) for value in (2, "yes")],
    *[(dict(sizes, is_fp8_kvcache=True), "d_qk", value) for sizes in (DENSE, SPARSE) for value in (500, 656)],
    *[(dict(sizes, is_fp8_kvcache=True), "h_k", 2) for sizes in (DENSE, SPARSE, PREFILL)],
    *[(FP8, name, None) for name in ("b", "max_pages")],
    *[(FP8, "dtype", value) for value in ("float16", "uint8", None)],
    *[(FP8, "d_qk", value) for value in (512, 400, 656)],
    *[(FP8, name, 2) for name in ("topk", "extra_topk", "h_k")],
    (DENSE, "dtype", "float8_e4m3fn"),
    (DENSE, "d_qk", 400),
    (DENSE, "extra_topk", 8),
    (SPARSE, "max_pages", 8),
]


@pytest.mark.parametrize("right,name,value", WRONG, ids=str)
def test_refused(right, name, value):
    assert workspace_bound(**right) >= 0
    with refused((TypeError, ValueError, NotImplementedError), "workspace_bound", name):
        workspace_bound(**{**right, name: value})


def test_every_argument_is_in_the_table():
    code = workspace_bound.__code__
    assert {name for _, name, _ in WRONG} == set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    assert math.isfinite(workspace_bound(**PREFILL))


def test_size_is_asked_for_once(monkeypatch):
    """A repeated call allocates the same size at once, and asks for the size if that is too small."""
    operation, asked = _operations.DENSE_DECODE, []
    ask = operation._ask_size
    monkeypatch.setattr(operation, "_ask_size", lambda *arguments: asked.append(1) or ask(*arguments))
    numbers = numpy.random.default_rng(0)
    queries, cache = (numbers.standard_normal(shape).astype("float16") for shape in ((2, 1, 16, 576), (8, 64, 1, 576)))
    table, lengths = numpy.arange(8, dtype=numpy.int32).reshape(2, 4), numpy.array([200, 256], numpy.int32)

    def call(q=queries):
        return flash_mla_with_kvcache(q, cache, table[: len(q)], lengths[: len(q)], 512, None)

    first = call()
    before = len(asked)
    assert all(numpy.array_equal(a, b) for a, b in zip(first, call())) and len(asked) == before
    size = taken(operation)
    assert size > 1
    operation.idle[_arrays][-1].args.workspace_size = 1
    assert all(numpy.array_equal(a, b) for a, b in zip(first, call())) and len(asked) == before + 1
    assert taken(operation) == size
    call(queries[:1])
    assert len(asked) == before + 2

# SPDX-License-Identifier: MIT
"""merge_states against NumPy, and against attention over all keys at once."""

import math

import numpy
import pytest

from attention import DECODE_LSE, DECODE_OUT, EXACT_FP32, Batch, check_close, check_decode, conventions, dense
from attention import log_sum_exp, with_sink
from flash_mla import flash_mla_with_kvcache, merge_states
from kinds import KINDS, each_kind, torch

N, B, S_Q, H_Q, D_V = 5, 3, 2, 6, 40
ELEMENTS = ["element", "float32"]


def parts(n=N, seed=0, d_v=D_V):
    """Parts of different weight, with a row that none of them saw, one that a single one saw, parts without keys."""
    random = numpy.random.default_rng(seed)
    out = random.normal(0, 0.1, (n, B, S_Q, H_Q, d_v))
    lse = random.normal(0, 3, (n, B, H_Q, S_Q))
    if n:
        lse[:, 0, 1, 1] = numpy.resize([math.inf, -math.inf], n)
        lse[1:, 1, 2, 0] = -math.inf
        lse[n // 2, 2] = math.inf
        lse[0, 2, 3, 0] = -math.inf
        out[~numpy.isfinite(lse.transpose(0, 1, 3, 2))] = math.nan  # which is not read
    return out, lse


def merged(out_parts, lse_parts, sink=None, lse_empty=math.inf, log_base=math.e):
    """In double precision; lse in the base log_base."""
    natural = numpy.where(numpy.isfinite(lse_parts), lse_parts * math.log(log_base), -math.inf)
    lse = log_sum_exp(natural, 0)
    weights = numpy.exp(natural - numpy.where(lse == -math.inf, 0.0, lse)).transpose(0, 1, 3, 2)[..., None]
    out = numpy.sum(numpy.where(weights > 0, weights * out_parts, 0.0), axis=0)
    return with_sink(out, lse, sink), conventions(lse, lse_empty, log_base)


def element_of(kind, element):
    return kind.element if element == "element" else element


def check(kind, got, expected, element):
    out, lse = got
    assert kind.is_one(out) and kind.is_one(lse)
    assert (kind.dtype_name(out), kind.dtype_name(lse)) == (element, "float32")
    check_close("out", kind.float64(out), expected[0], EXACT_FP32 if element == "float32" else DECODE_OUT)
    check_close("lse", kind.float64(lse), expected[1], EXACT_FP32 if element == "float32" else DECODE_LSE)


def given(kind, element="float32", **options):
    """Parts as arrays, and what they hold after rounding."""
    out, lse = (array.astype(numpy.float32) for array in parts(**options))
    arrays = kind.array(out, element), kind.fp32(lse)
    return arrays, (kind.float64(arrays[0]), kind.float64(arrays[1]))


@each_kind
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("n", [1, 2, 5, 33])
def test_values(kind, element, n):
    element = element_of(kind, element)
    arrays, values = given(kind, element, n=n)
    check(kind, merge_states(*arrays), merged(*values), element)


@each_kind
@pytest.mark.parametrize("d_v", [1, 7, 64, 512])
def test_any_length_of_a_value(kind, d_v):
    arrays, values = given(kind, d_v=d_v)
    check(kind, merge_states(*arrays), merged(*values), "float32")


@each_kind
@pytest.mark.parametrize("lse_empty", [math.inf, -math.inf])
@pytest.mark.parametrize("log_base", [math.e, 2])
@pytest.mark.parametrize("sink", [False, True])
def test_conventions(kind, lse_empty, log_base, sink):
    values_of_sink = numpy.array([0.3, -2, math.inf, -math.inf, 5, 0], numpy.float32) if sink else None
    arrays, values = given(kind)
    got = merge_states(*arrays, kind.fp32(values_of_sink) if sink else None, lse_empty=lse_empty, log_base=log_base)
    expected = merged(*values, values_of_sink, lse_empty, log_base)
    assert expected[1][0, 1, 1] == lse_empty
    check(kind, got, expected, "float32")


@each_kind
def test_no_parts(kind):
    arrays, _ = given(kind, n=0)
    out, lse = merge_states(*arrays)
    assert not numpy.any(kind.float64(out)) and numpy.all(kind.float64(lse) == math.inf)
    assert tuple(out.shape) == (B, S_Q, H_Q, D_V) and tuple(lse.shape) == (B, H_Q, S_Q)


@each_kind
@pytest.mark.parametrize("empty", ["b", "s_q", "h_q"])
def test_no_rows(kind, empty):
    b, s_q, h_q = (0 if empty == name else size for name, size in (("b", B), ("s_q", S_Q), ("h_q", H_Q)))
    out, lse = merge_states(kind.full((N, b, s_q, h_q, 8), 1), kind.full((N, b, h_q, s_q), 1, "float32"))
    assert tuple(out.shape) == (b, s_q, h_q, 8) and tuple(lse.shape) == (b, h_q, s_q)


@each_kind
def test_a_single_part_stays_as_it_is(kind):
    random = numpy.random.default_rng(3)
    out = kind.array(random.normal(0, 1, (1, B, S_Q, H_Q, D_V)))
    got, _ = merge_states(out, kind.fp32(random.normal(0, 3, (1, B, H_Q, S_Q))))
    assert kind.bits(got) == kind.bits(out)


@each_kind
@pytest.mark.parametrize("element", ELEMENTS)
def test_given_results(kind, element):
    """Of another type than the parts, with strides, into parts of larger arrays whose rest stays as it is."""
    arrays, values = given(kind, "float32" if element == "element" else kind.element)
    element = element_of(kind, element)
    large_out, large_lse = kind.full((B, S_Q, H_Q + 2, D_V + 8), 7, element), kind.full((B, H_Q, S_Q + 3), 7, "float32")
    out, lse = large_out[:, :, 1:-1, 8:], large_lse[:, :, 2 : S_Q + 2]
    got = merge_states(*arrays, out=out, lse=lse)
    assert got[0] is out and got[1] is lse
    check(kind, got, merged(*values), element)
    assert numpy.sum(kind.float64(large_out) != 7) <= B * S_Q * H_Q * D_V
    assert numpy.sum(kind.float64(large_lse) != 7) <= B * S_Q * H_Q
    kept = numpy.ones(tuple(large_out.shape), bool)
    kept[:, :, 1:-1, 8:] = False
    assert numpy.all(kind.float64(large_out)[kept] == 7)


@each_kind
@pytest.mark.parametrize("which", ["out", "lse"])
def test_one_given_result(kind, which):
    arrays, values = given(kind)
    array = kind.full((B, S_Q, H_Q, D_V) if which == "out" else (B, H_Q, S_Q), 7, "float32")
    got = merge_states(*arrays, **{which: array})
    assert got[which == "lse"] is array
    check(kind, got, merged(*values), "float32")


@each_kind
def test_parts_with_strides(kind):
    arrays, values = given(kind)
    large = kind.full((N, B + 1, S_Q, H_Q + 1, D_V + 8), math.nan, "float32")
    large[:, 1:, :, 1:, :D_V] = arrays[0]
    large_lse = kind.full((N + 2, B, H_Q, S_Q + 1), math.nan, "float32")
    large_lse[1:-1, :, :, :S_Q] = arrays[1]
    got = merge_states(large[:, 1:, :, 1:, :D_V], large_lse[1:-1, :, :, :S_Q])
    check(kind, got, merged(*values), "float32")


@each_kind
def test_parts_join_in_order(kind):
    """The same bits in every run."""
    arrays, _ = given(kind, n=17)
    first = kind.all_bits(merge_states(*arrays))
    assert kind.all_bits(merge_states(*arrays)) == first


@pytest.mark.parametrize("log_base", [math.e, 2])
def test_attention_in_parts_is_attention(log_base):
    """Keys cut into parts, one of them empty, each computed in double precision, rounded to fp32 and merged."""
    kind = KINDS[0]
    random = numpy.random.default_rng(1)
    q, keys = random.normal(0, 0.3, (S_Q, H_Q, 32)), random.normal(0, 1, (90, 2, 32))
    results = [dense(q, some, 24) for some in (keys[:1], keys[1:40], keys[40:40], keys[40:])]
    out_parts = numpy.stack([out[None] for out, _ in results])
    lse_parts = numpy.stack([conventions(lse, -math.inf, log_base)[None] for _, lse in results])
    out, lse = merge_states(kind.fp32(out_parts), kind.fp32(lse_parts), log_base=log_base)
    expected = dense(q, keys, 24)
    check_close("out", kind.float64(out)[0], expected[0], EXACT_FP32)
    check_close("lse", kind.float64(lse)[0], conventions(expected[1], math.inf, log_base), (1e-6, 1e-6, 1e-9))


@each_kind
@pytest.mark.parametrize("log_base", [math.e, 2])
@pytest.mark.parametrize("lse_empty", [math.inf, -math.inf])
def test_decode_in_parts_is_decode(kind, lse_empty, log_base):
    """As machines share a long context: each decodes its keys, and the sink is applied to the whole."""
    whole = Batch([200, 64, 0, 3], h_q=6)
    sink = kind.fp32(whole.sink)
    states = []
    for share in ([0, 100], [100, 101], [101, 200]):
        mine = Batch([max(0, min(length, share[1]) - share[0]) for length in whole.lengths], h_q=6)
        for request in range(whole.b):
            mine.keys[request] = whole.keys[request][share[0] : share[1]]
            for i, key in enumerate(mine.keys[request]):
                mine.cache[mine.table[request, i // 64], i % 64] = key
        arrays = dict(mine.arrays(kind), q=kind.array(whole.q))
        states.append(flash_mla_with_kvcache(*arrays.values(), 512, None, lse_empty=lse_empty, log_base=log_base))
    stack = numpy.stack if not kind.is_torch else torch.stack
    got = merge_states(
        stack([out for out, _ in states]),
        stack([lse for _, lse in states]),
        sink,
        lse_empty=lse_empty,
        log_base=log_base,
    )
    check_decode(kind, got, whole.expected(kind, sink=whole.sink, lse_empty=lse_empty, log_base=log_base))

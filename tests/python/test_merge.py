# SPDX-License-Identifier: MIT
"""Tests merge_states against NumPy, and against attention over all keys at once."""

import math
import re

import numpy
import pytest

from attention import DECODE_LSE, DECODE_OUT, EXACT_FP32, Batch, check_close, check_decode, conventions, dense
from attention import log_sum_exp, with_sink
from flash_mla import flash_mla_with_kvcache, merge_states
from kinds import KINDS, kind, torch

N, B, S_Q, H_Q, D_V = 5, 3, 2, 6, 40


class Parts:
    """Parts of different weight; one row no part saw, one a single part saw; some parts have no keys. `element`: their
    type; None: the kind's."""

    def __init__(self, n=N, seed=0, d_v=D_V, element=None):
        random = numpy.random.default_rng(seed)
        self.element = element
        self.out = random.normal(0, 0.1, (n, B, S_Q, H_Q, d_v)).astype(numpy.float32)
        self.lse = lse = random.normal(0, 3, (n, B, H_Q, S_Q)).astype(numpy.float32)
        self.sink = numpy.array([0.3, -2, math.inf, -math.inf, 5, 0], numpy.float32)
        if n:
            lse[:, 0, 1, 1] = numpy.resize([math.inf, -math.inf], n)
            lse[1:, 1, 2, 0] = -math.inf
            lse[n // 2, 2] = math.inf
            lse[0, 2, 3, 0] = -math.inf
            self.out[~numpy.isfinite(lse.transpose(0, 1, 3, 2))] = math.nan  # not read

    def inputs(self):
        return {"out_parts": (self.out, self.element), "lse_parts": (self.lse, "float32")}

    def results(self):
        return {"out": (self.out.shape[1:], self.element), "lse": (self.lse.shape[1:], "float32")}

    def arguments(self, kind):
        return {name: kind.array(*given) for name, given in self.inputs().items()}

    def expected(self, kind, **options):
        return merged(kind.float64(kind.array(self.out, self.element)), self.lse.astype(float), **options)


def merged(out_parts, lse_parts, sink=None, lse_empty=math.inf, log_base=math.e):
    """Merges in double precision; lse is in base log_base."""
    natural = numpy.where(numpy.isfinite(lse_parts), lse_parts * math.log(log_base), -math.inf)
    lse = log_sum_exp(natural, 0)
    weights = numpy.exp(natural - numpy.where(lse == -math.inf, 0.0, lse)).transpose(0, 1, 3, 2)[..., None]
    out = numpy.sum(numpy.where(weights > 0, weights * out_parts, 0.0), axis=0)
    return with_sink(out, lse, sink), conventions(lse, lse_empty, log_base)


def check(kind, got, expected, element=None):
    """Checks results; `element`: the type of out; None: the kind's."""
    out, lse = got
    assert kind.is_one(out) and kind.is_one(lse)
    assert (kind.dtype_name(out), kind.dtype_name(lse)) == (element or kind.element, "float32")
    check_close("out", kind.float64(out), expected[0], EXACT_FP32 if element == "float32" else DECODE_OUT)
    check_close("lse", kind.float64(lse), expected[1], EXACT_FP32 if element == "float32" else DECODE_LSE)


@pytest.mark.parametrize("element", [None, "float32"])
@pytest.mark.parametrize(
    "shape", [*(dict(n=n) for n in (1, 2, 5, 33)), *(dict(d_v=d) for d in (1, 7, 64, 512))], ids=str
)
def test_values(kind, element, shape):
    parts = Parts(**shape, element=element)
    check(kind, merge_states(**parts.arguments(kind)), parts.expected(kind), element)


def test_no_parts(kind):
    out, lse = merge_states(**Parts(n=0).arguments(kind))
    assert not numpy.any(kind.float64(out)) and numpy.all(kind.float64(lse) == math.inf)
    assert tuple(out.shape) == (B, S_Q, H_Q, D_V) and tuple(lse.shape) == (B, H_Q, S_Q)


@pytest.mark.parametrize("empty", ["b", "s_q", "h_q"])
def test_no_rows(kind, empty):
    b, s_q, h_q = (0 if empty == name else size for name, size in (("b", B), ("s_q", S_Q), ("h_q", H_Q)))
    out, lse = merge_states(kind.full((N, b, s_q, h_q, 8), 1), kind.full((N, b, h_q, s_q), 1, "float32"))
    assert tuple(out.shape) == (b, s_q, h_q, 8) and tuple(lse.shape) == (b, h_q, s_q)


def test_a_single_part_stays_as_it_is(kind):
    random = numpy.random.default_rng(3)
    out = kind.array(random.normal(0, 1, (1, B, S_Q, H_Q, D_V)))
    got, _ = merge_states(out, kind.fp32(random.normal(0, 3, (1, B, H_Q, S_Q))))
    assert kind.bits(got) == kind.bits(out)


def test_given_results_of_another_type(kind):
    for parts, element in ((Parts(element="float32"), None), (Parts(), "float32")):
        out = kind.full(parts.out.shape[1:], 7, element)
        got = merge_states(**parts.arguments(kind), out=out)
        assert got[0] is out
        check(kind, got, parts.expected(kind), element)


# ---- Pairs, results in place, contributions ---------------------------------------------------------------------------


def entry(kind, array, i):
    """Returns entry i of the first dimension; arrays that only DLPack describes are copied."""
    return array[i] if hasattr(array, "__getitem__") else kind.array(kind.float64(array)[i], kind.dtype_name(array))


def results_of(kind, parts):
    """Returns the results that a call must be given."""
    return {} if kind.makes else {name: kind.full(*given[:1], 7, given[1]) for name, given in parts.results().items()}


@pytest.mark.parametrize("form", [tuple, list])
def test_a_pair(kind, form):
    """Two arrays have the bits of one with both."""
    parts = Parts(n=2)
    stacked, sink = parts.arguments(kind), kind.fp32(parts.sink)
    pair = {name: form(entry(kind, array, i) for i in range(2)) for name, array in stacked.items()}
    expected = merge_states(**stacked, attn_sink=sink, **results_of(kind, parts))
    got = merge_states(**pair, attn_sink=sink, **results_of(kind, parts))
    check(kind, got, parts.expected(kind, sink=parts.sink))
    assert kind.all_bits(got) == kind.all_bits(expected)


@pytest.mark.parametrize("pair", [False, True], ids=["one array", "pair"])
@pytest.mark.parametrize("index", [0, 1])
def test_in_place(kind, index, pair):
    """out and lse may be a part."""
    if not kind.is_torch and not isinstance(kind.full((1,), 0), numpy.ndarray):
        pytest.skip("its arrays cannot be viewed")
    parts = Parts(n=2)
    expected = kind.all_bits(merge_states(**parts.arguments(kind)))
    given = parts.arguments(kind)
    out, lse = (given[name][index] for name in ("out_parts", "lse_parts"))
    others = [kind.bits(given[name][1 - index]) for name in given]
    inputs = {name: (array[0], array[1]) for name, array in given.items()} if pair else given
    got = merge_states(**inputs, out=out, lse=lse)
    assert got[0] is out and got[1] is lse and kind.all_bits((out, lse)) == expected
    assert [kind.bits(given[name][1 - index]) for name in given] == others, "the other part keeps its values"


@pytest.mark.parametrize("log_base", [math.e, 2])
def test_contributions(kind, log_base):
    """What the parts contribute adds up to the merge; a part without keys contributes 0, whatever its out holds."""
    parts = Parts(n=3, element="float32")
    given, options = parts.arguments(kind), dict(attn_sink=kind.fp32(parts.sink), log_base=log_base)
    out, lse = merge_states(**given, **options, **results_of(kind, parts))
    total = 0
    for part in range(3):
        own = entry(kind, given["out_parts"], part)
        mine, same = merge_states(own, given["lse_parts"], **options, part=part, **results_of(kind, parts))
        assert kind.bits(same) == kind.bits(lse)
        mine = kind.float64(mine)
        assert not mine[~numpy.isfinite(parts.lse[part].transpose(0, 2, 1))].any()
        total += mine
    check_close("out", total, kind.float64(out), EXACT_FP32)


def taken(array, first, shape):
    """Returns a view of the array's elements from `first` on."""
    return array.reshape(-1)[first : first + math.prod(shape)].reshape(shape)


@pytest.mark.parametrize(
    "exception,said,call",
    [
        (TypeError, "lse_parts: is ndarray, must be a pair as out_parts is", lambda o, l: merge_states((o[0], o[1]), l)),
        (TypeError, "out_parts: is ndarray, must be a pair as lse_parts is", lambda o, l: merge_states(o, (l[0], l[1]))),
        (ValueError, "out_parts: has 3 arrays, must have 2", lambda o, l: merge_states([*o, o[0]], [l[0], l[1]])),
        (ValueError, "lse_parts: has 1 arrays, must have 2", lambda o, l: merge_states([*o], [l[0]])),
        (TypeError, "out_parts: is NoneType, must be", lambda o, l: merge_states((None, o[0]), (l[0], l[1]))),
        (TypeError, "out_parts[1]: is None, must be", lambda o, l: merge_states((o[0], None), (l[0], l[1]))),
        (TypeError, "lse_parts[1]: is str, must be", lambda o, l: merge_states((o[0], o[1]), (l[0], "lse"))),
        (ValueError, "out_parts[1]: dtype is float16, must be float32",
         lambda o, l: merge_states((o[0], o[1].astype("float16")), (l[0], l[1]))),
        (ValueError, "lse_parts[1]: b (dimension 0) is 2, must be 3",
         lambda o, l: merge_states((o[0], o[1]), (l[0], l[1][1:]))),
        (ValueError, "part: is 0, must be None", lambda o, l: merge_states((o[0], o[1]), (l[0], l[1]), part=0)),
        (ValueError, "part: is 2, must be at least 0 and below the 2 parts", lambda o, l: merge_states(o[0], l, part=2)),
        (ValueError, "out_parts: has 5 dimensions, must have 4", lambda o, l: merge_states(o, l, part=0)),
        (ValueError, "out: shares memory with out_parts, must be apart from it or exactly one part",
         lambda o, l: merge_states(o, l, out=taken(o, 1, o[0].shape))),
        (ValueError, "out: shares memory with out_parts[1]",
         lambda o, l: merge_states((o[0].copy(), o[1]), (l[0], l[1]), out=taken(o, o[1].size - 1, o[1].shape))),
        (ValueError, "lse: shares memory with out_parts[1], must be apart from it",
         lambda o, l: merge_states((o[0], o[1]), (l[0], l[1]), lse=taken(o[1], 0, l[0].shape))),
        (ValueError, "lse: shares memory with lse_parts, must be apart from it or exactly one part",
         lambda o, l: merge_states(o, l, lse=taken(l, 3, l[0].shape))),
    ],
)  # fmt: skip
def test_errors(exception, said, call):
    parts = Parts(n=2)
    with pytest.raises(exception, match=re.escape(f"merge_states: {said}")):
        call(parts.out, parts.lse)


# ---- Of attention -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("log_base", [math.e, 2])
def test_attention_in_parts_is_attention(log_base):
    """Divides keys into parts, one of them empty, each computed in double precision, rounded to fp32 and merged."""
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


@pytest.mark.parametrize("log_base", [math.e, 2])
@pytest.mark.parametrize("lse_empty", [math.inf, -math.inf])
def test_decode_in_parts_is_decode(kind, lse_empty, log_base):
    """Machines share a long context: each decodes its keys, and the sink is applied to the whole."""
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

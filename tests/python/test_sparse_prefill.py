# SPDX-License-Identifier: MIT
"""Tests flash_mla_sparse_fwd over contiguous keys, plain pages and FP8 pages, against plain attention over the same keys."""

import math

import numpy
import pytest

from attention import check_close, conventions, over_lists, that_name, with_sink
from caches import NAMED, Cache, bf16_bits
from flash_mla import flash_mla_sparse_fwd
from kinds import BF16_KINDS, WORDS, each_of

D_V = 512
NO_KEYS = (-1, 2147483647, -2147483648, -123456, 114514)  # and s_kv
# docs/semantics.md, "Tolerances".
OUT = (8e-4, 3.01 / 128, 7e-6)
ROWS = (1e-6, 2.01 / 65536, 1e-7)

kind = each_of(BF16_KINDS)
each_kind_that_makes = pytest.mark.parametrize("kind", BF16_KINDS[1:], ids=repr)


def new_results(kind, s_q, h_q):
    rows = {name: kind.full((s_q, h_q), 7, "float32") for name in ("max_logits", "lse")}
    return dict(rows, out=kind.full((s_q, h_q, D_V), 7))


def call(kind, arguments):
    """Passes results for kinds that cannot make them."""
    if kind is WORDS:
        arguments = {**new_results(kind, *arguments["q"].shape[:2]), **arguments}
    return flash_mla_sparse_fwd(**arguments)


# ---- Prefills -------------------------------------------------------------------------------------------------------


class Prefill:
    """Lists of any keys, with entries that name none; entries past a given length name keys too. Plain keys that
    no token sees are NaN."""

    def __init__(
        self, s_q=5, s_kv=300, h_q=4, h_kv=1, topk=90, d=576, pages=None, layout="plain", lengths=None, seed=0
    ):
        random = numpy.random.default_rng(seed)
        self.s_q, self.h_q, self.h_kv, self.layout = s_q, h_q, h_kv, layout
        self.d = {"plain": d, 656: 576}.get(layout, 512)
        self.s_kv = s_kv if pages is None else math.prod(pages)
        self.lengths = None if lengths is None else numpy.array(lengths, numpy.int32)
        self.sink = random.normal(0, 2, h_q).astype(numpy.float32)
        self.lists = random.integers(0, max(self.s_kv, 1), (s_q, h_kv, topk)).astype(numpy.int32)
        none = random.random(self.lists.shape) < (0.2 if self.s_kv else 1)
        self.lists[none] = random.choice((*NO_KEYS, self.s_kv), int(numpy.sum(none)))
        self.q = (random.normal(0.03, 0.1, (s_q, h_q, self.d))).astype(numpy.float32)
        if layout != "plain":
            self.cache = Cache(random, layout, *pages, self.d)
            self.memory = self.cache.memory
            return
        self.memory = random.normal(-0.02, 0.1, (self.s_kv, h_kv, self.d)).astype(numpy.float32)
        for head in range(h_kv):
            seen = [self.named(token, head) for token in range(s_q)]
            unseen = numpy.ones(self.s_kv, bool)
            unseen[numpy.concatenate([numpy.zeros(0, int), *seen])] = False
            self.memory[unseen, head] = math.nan
        if pages is not None:
            self.memory = self.memory.reshape(*pages, 1, self.d)

    def named(self, token, head, first=None):
        """Returns the keys that a token sees through the `first` entries of its list."""
        count = None if self.lengths is None else self.lengths[token]
        return that_name(self.lists[token, head][:first], count, self.s_kv)

    def inputs(self):
        """{name: (values, type; None: that of the queries)}."""
        inputs = {"q": (self.q, None), "kv": (self.memory, None if self.layout == "plain" else "uint8")}
        lengths = {} if self.lengths is None else {"topk_length": (self.lengths, "int32")}
        return {**inputs, "indices": (self.lists, "int32"), **lengths}

    def results(self):
        rows = (self.s_q, self.h_q), "float32"
        return {"out": ((*rows[0], D_V), None), "max_logits": rows, "lse": rows}

    def arguments(self, kind):
        options = dict(sm_scale=0.5, is_fp8_kvcache=self.layout != "plain")
        if self.layout in NAMED and self.layout not in ("FP8_528", "FP4_288"):
            options = dict(sm_scale=0.5, kv_format=self.layout)
        return {**{name: kind.array(*given) for name, given in self.inputs().items()}, **options}

    def expected(self, kind, scale=0.5, sink=None, lse_empty=math.inf, log_base=math.e, first=None):
        """Returns (out, max_logits, lse)."""
        q, plain = kind.float64(kind.array(self.q)), self.layout == "plain"
        memory = kind.float64(kind.array(self.memory)).reshape(-1, self.h_kv, self.d) if plain else None
        of_heads = []
        for head, of_head in enumerate(numpy.split(q[None], self.h_kv, axis=2)):

            def keys(_, token):
                named = self.named(token, head, first)
                return memory[named, head] if plain else self.cache.values[named]

            of_heads.append(over_lists(of_head, keys, scale))
        out, most, lse = (numpy.concatenate(parts, axis) for axis, parts in zip((2, 1, 1), zip(*of_heads)))
        out = with_sink(out, lse, sink)[0]
        return out, most[0].T / math.log(log_base), conventions(lse[0].T, lse_empty, log_base)


def check(kind, got, expected):
    assert isinstance(got, tuple) and len(got) == len(expected)
    assert all(map(kind.is_one, got))
    assert [kind.dtype_name(array) for array in got] == ["bfloat16", *["float32"] * (len(got) - 1)]
    for name, array, values in zip(("out", "max_logits", "lse", "lse_indexer"), got, expected):
        check_close(name, kind.float64(array), values, OUT if name == "out" else ROWS)


# ---- Values ---------------------------------------------------------------------------------------------------------

SHAPES = [
    dict(),
    dict(d=512, s_q=1),
    dict(h_q=128, topk=300, s_kv=1000),
    dict(h_q=64, d=512, topk=64, s_q=40),
    dict(h_q=6, h_kv=2),
    dict(lengths=[0, 90, -3, 1000, 17]),
    dict(h_q=64, topk=200, lengths=[0, 200, -2147483648, 2147483647, 65]),
    dict(pages=(5, 64)),
    dict(pages=(5, 61), d=512, lengths=[0, 90, -3, 1000, 17]),
    dict(pages=(50, 1)),
    dict(layout=656, pages=(5, 64)),
    dict(layout=584, pages=(5, 64), h_q=64),
    dict(layout=656, pages=(7, 3), h_q=128, topk=300, lengths=[0, 300, 299, 1, 64]),
    dict(layout=584, pages=(50, 1), topk=1),
    dict(topk=0),
    dict(s_kv=0),
    dict(pages=(0, 64), layout=656),
    *[dict(layout=name, pages=(5, 61)) for name in NAMED],
    dict(s_q=0),
    dict(s_q=300, s_kv=40, h_q=16, topk=40),
]


@pytest.mark.parametrize("none", [*NO_KEYS, 300], ids=str)
@pytest.mark.parametrize("sink", [-math.inf, 0.0, math.inf, None], ids=str)
def test_rows_without_a_key(kind, none, sink):
    """Only the second token sees keys; a sink does not change the out of the others."""
    prefill = Prefill()
    prefill.lists[[0, 2, 3, 4]] = none
    arguments = prefill.arguments(kind)
    if sink is not None:
        arguments["attn_sink"] = kind.full((4,), sink, "float32")
    for empty in (math.inf, -math.inf):
        got = call(kind, dict(arguments, lse_empty=empty))
        check(kind, got, prefill.expected(kind, sink=None if sink is None else numpy.full(4, sink), lse_empty=empty))
        out, most, lse = map(kind.float64, got)
        for token in (0, 2, 3, 4):
            assert not numpy.any(out[token]) and numpy.all(most[token] == -math.inf) and numpy.all(lse[token] == empty)


def test_an_index_that_stands_twice_counts_twice(kind):
    prefill = Prefill(topk=8)
    prefill.lists[:] = 7
    prefill.memory[7] = 0.25
    got = call(kind, prefill.arguments(kind))
    check(kind, got, prefill.expected(kind))
    difference = kind.float64(got[2]) - kind.float64(got[1])
    assert numpy.allclose(difference, math.log(8), rtol=1e-5)


def test_the_sink_changes_out_alone(kind):
    prefill = Prefill()
    arguments = prefill.arguments(kind)
    without = kind.all_bits(call(kind, arguments))
    sunk = kind.all_bits(call(kind, dict(arguments, attn_sink=kind.fp32(prefill.sink))))
    assert sunk[0] != without[0] and sunk[1:] == without[1:]


# ---- lse_indexer ----------------------------------------------------------------------------------------------------


@each_kind_that_makes
@pytest.mark.parametrize("lengths", [None, [0, 90, 3, 64, 65]], ids=["lists=whole", "lists=cut"])
@pytest.mark.parametrize("count", [1, 64, 89, 90, 512, 2048, 2**40])
@pytest.mark.parametrize("shape", [dict(), dict(h_q=6, h_kv=2), dict(layout=656, pages=(5, 64))], ids=str)
def test_lse_indexer(kind, shape, count, lengths):
    """lse_indexer is over the first entries of a list; it does not change other results, nor does the sink change any lse."""
    prefill = Prefill(**shape, lengths=lengths)
    prefill.lists[1, :, :64] = -1
    for options in ({}, dict(lse_empty=-math.inf, log_base=2)):
        arguments = dict(prefill.arguments(kind), attn_sink=kind.fp32(prefill.sink), **options)
        got = call(kind, dict(arguments, indexer_topk=count))
        part = prefill.expected(kind, first=count, **options)[2]
        check(kind, got, (*prefill.expected(kind, sink=prefill.sink, **options), part))
        assert kind.all_bits(got[:3]) == kind.all_bits(call(kind, dict(arguments, indexer_topk=0)))


@each_kind_that_makes
@pytest.mark.parametrize("count", [64, 512, 2048])
@pytest.mark.parametrize("s_q,h_q,topk", [(1, 16, 1024), (5, 64, 1024), (2, 128, 2048)])
@pytest.mark.parametrize("layout", ["plain", 656, 584])
def test_lse_indexer_of_lists_that_are_split(kind, layout, s_q, h_q, topk, count):
    """Short calls with long lists are split on Hopper, and on CPUs of several threads: that there are two calls changes no bit, from the
    first call on."""
    prefill = Prefill(s_q=s_q, h_q=h_q, topk=topk, layout=layout, pages=None if layout == "plain" else (6, 64))
    arguments = dict(prefill.arguments(kind), attn_sink=kind.fp32(prefill.sink))
    alone = [kind.all_bits(call(kind, arguments)) for _ in range(4)]
    beside = [kind.all_bits(call(kind, dict(arguments, indexer_topk=count))[:3]) for _ in range(4)]
    assert all(bits == alone[0] for bits in alone + beside)


@each_kind_that_makes
def test_lse_indexer_with_given_results(kind):
    prefill = Prefill()
    results = dict(out=kind.full((5, 4, D_V), 7), lse=kind.full((5, 4), 7, "float32"))
    got = call(kind, dict(prefill.arguments(kind), indexer_topk=64, **results))
    assert got[0] is results["out"] and got[2] is results["lse"]
    check(kind, got, (*prefill.expected(kind), prefill.expected(kind, first=64)[2]))


def test_lse_indexer_where_arrays_cannot_be_made():
    with pytest.raises(TypeError, match="^flash_mla_sparse_fwd: indexer_topk: is [0-9]+, must be 0: Words has no"):
        call(WORDS, dict(Prefill().arguments(WORDS), indexer_topk=64))


# ---- Words ----------------------------------------------------------------------------------------------------------


def test_words_are_what_bf16_rounds_to():
    """The tests' own kind of array keeps values that bf16 holds, and rounds others to nearest even."""
    exact = (bf16_bits(numpy.linspace(-3, 3, 101)).astype(numpy.uint32) << 16).view(numpy.float32)
    assert numpy.array_equal(WORDS.float64(WORDS.array(exact)), exact)
    halves = numpy.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, math.nan, -math.inf])
    expected = numpy.array([1, 1 + 2**-6, 1 + 2**-7, math.nan, -math.inf])
    assert numpy.array_equal(WORDS.float64(WORDS.array(halves)), expected, equal_nan=True)

# SPDX-License-Identifier: MIT
"""Tests flash_attn_varlen_func and its packed forms against plain attention; test_families.py tests what all operations share."""

import math

import numpy
import pytest

import flash_mla
from attention import check_close, conventions, dense, with_sink
from calls import kinds_for
from flash_mla import _mha, flash_attn_varlen_func
from kinds import KINDS, Kind, device, each_of, needs_torch, torch
from test_errors import refused

# docs/semantics.md, "Tolerances".
OUT = (1e-3, 8.01 / 128, 7e-6)
LSE = (1e-6, 2.01 / 65536, 1e-7)

MHA_KINDS = kinds_for("mha_forward", KINDS)
kind = each_of(MHA_KINDS)
QKV, KV = "flash_attn_varlen_qkvpacked_func", "flash_attn_varlen_kvpacked_func"
name = each_of([QKV, KV])


class Sequences:
    """Tokens and keys of sequences, one after the other; `first` more precede and follow them: those of no sequence are NaN.
    `lengths`: (tokens, keys) of each."""

    def __init__(self, lengths, h_q=4, h_kv=2, d=64, d_v=64, first=0, seed=0):
        random = numpy.random.default_rng(seed)
        self.h_q, self.d_v, self.lengths = h_q, d_v, numpy.reshape(numpy.array(lengths, numpy.int32), (-1, 2))
        self.cu = first + numpy.concatenate([numpy.zeros((1, 2), int), numpy.cumsum(self.lengths, axis=0)])
        self.tokens, self.keys = (int(last) + first for last in self.cu[-1])
        shapes = {"q": (self.tokens, h_q, d), "k": (self.keys, h_kv, d), "v": (self.keys, h_kv, d_v)}
        self.values = {}
        for name, shape in shapes.items():
            values = self.values[name] = numpy.clip(random.normal(0, 0.1, shape), -1, 1).astype(numpy.float32)
            values[:first] = values[len(values) - first :] = math.nan
        self.sink = random.normal(0, 2, h_q).astype(numpy.float32)

    def inputs(self):
        """{name: (values, type; None: that of the queries)}."""
        starts = {name: (self.cu[:, i], "int32") for i, name in enumerate(("cu_seqlens_qo", "cu_seqlens_kv"))}
        return {**{name: (values, None) for name, values in self.values.items()}, **starts}

    def results(self):
        """Adds NumPy's name for the order of a result that is not contiguous in its last dimension."""
        return {
            "out": ((self.tokens, self.h_q, self.d_v), None),
            "lse": ((self.tokens, self.h_q), "float32", "F"),
        }

    def arguments(self, kind):
        most = numpy.max(self.lengths, axis=0, initial=0)
        arrays = {name: kind.array(*given) for name, given in self.inputs().items()}
        return dict(arrays, max_seqlen_qo=int(most[0]), max_seqlen_kv=int(most[1]))

    def expected(self, kind, sink=None, scale=None, causal=False, lse_empty=math.inf, log_base=math.e):
        """Returns (out, lse), NaN outside all sequences."""
        out, lse = (numpy.full(shape, math.nan) for shape, *_ in self.results().values())
        q, k, v = (kind.float64(kind.array(values)) for values in self.values.values())
        for (token, key), (next_token, next_key) in zip(self.cu, self.cu[1:]):
            keys, values = k[key:next_key], v[key:next_key]
            out[token:next_token], natural = dense(q[token:next_token], keys, self.d_v, scale, causal, values)
            out[token:next_token] = with_sink(out[None, token:next_token], natural[None], sink)[0]
            lse[token:next_token] = conventions(natural.T, lse_empty, log_base)
        return out, lse


def call(kind, arguments):
    return flash_attn_varlen_func(**arguments)


def check(kind, got, expected):
    assert isinstance(got, tuple) and len(got) == 2 and all(map(kind.is_one, got))
    assert [kind.dtype_name(array) for array in got] == [kind.element, "float32"]
    for name, array, values, tolerance in zip(("out", "lse"), got, expected, (OUT, LSE)):
        check_close(name, kind.float64(array), values, tolerance)


SHAPES = [
    dict(lengths=[(5, 7), (0, 3), (4, 0), (0, 0), (1, 100)]),
    dict(lengths=[(5, 7), (0, 3), (4, 0), (70, 3), (1, 100)], causal=True),  # more tokens than keys
    dict(lengths=[(1, 1)], h_q=1, h_kv=1),
    dict(lengths=[(130, 130), (65, 200)], d=192, d_v=128, h_q=3, h_kv=3, causal=True),
    dict(lengths=[(33, 64), (64, 33)], d=128, d_v=128, h_q=16, h_kv=1),
    dict(lengths=[(33, 64), (65, 130)], d=256, d_v=256, causal=True),
    dict(lengths=[(33, 64), (65, 130)], d=96, d_v=64),
    dict(lengths=[(33, 64), (64, 33)], h_q=6, h_kv=3, causal=True),
    dict(lengths=[(0, 0)]),
    dict(lengths=[(0, 9)]),
    dict(lengths=[(9, 0)], causal=True),
    dict(lengths=[]),
]


@pytest.mark.parametrize("causal", [False, True])
def test_tokens_of_no_sequence_are_not_written(kind, causal):
    problem = Sequences([(5, 7), (3, 2)], first=3)
    given = {name: kind.full(shape, math.nan, *form) for name, (shape, *form) in problem.results().items()}
    got = flash_attn_varlen_func(**problem.arguments(kind), **given, causal=causal)
    check(kind, got, problem.expected(kind, causal=causal))


@pytest.mark.parametrize("given", [dict(num_splits=n) for n in (1, 2, 64)] + [dict(batch_invariant=True)], ids=str)
def test_splits(kind, given):
    problem = Sequences([(6, 1500), (3, 40)])
    got = flash_attn_varlen_func(**problem.arguments(kind), **given)
    check(kind, got, problem.expected(kind))


@pytest.mark.parametrize(
    "changed",
    [dict(max_seqlen_qo=0, max_seqlen_kv=0), dict(max_seqlen_qo=2**31 - 1), dict(is_varlen=False), dict(deterministic=True)],
    ids=str,
)  # fmt: skip
def test_what_makes_no_difference(kind, changed):
    arguments = Sequences([(6, 9)] * 3).arguments(kind)
    expected = kind.all_bits(flash_attn_varlen_func(**arguments))
    assert kind.all_bits(flash_attn_varlen_func(**{**arguments, **changed})) == expected


def test_lse_is_the_transpose_of_what_is_in_memory(kind):
    """lse is FlashMLA's; its transpose, for merge_states, has no gaps."""
    _, lse = flash_attn_varlen_func(**Sequences([(6, 9)]).arguments(kind))
    strides = lse.stride() if kind.is_torch else tuple(stride // lse.itemsize for stride in lse.strides)
    assert tuple(lse.shape) == (6, 4) and strides == (1, 6)


@pytest.mark.parametrize("given", [False, True])
def test_lse_with_heads_first(kind, given):
    """It is what is in memory, and a given array is written as it is."""
    problem = Sequences([(6, 9), (3, 4)])
    arguments = problem.arguments(kind)
    _, expected = flash_attn_varlen_func(**arguments)
    lse = kind.full((4, 9), 7, "float32") if given else None
    out = kind.full(problem.results()["out"][0], 7) if given else None
    _, got = flash_attn_varlen_func(**arguments, lse_heads_first=True, lse=lse, out=out)
    assert tuple(got.shape) == (4, 9) and (not given or got is lse)
    assert numpy.array_equal(kind.float64(got).T, kind.float64(expected))
    strides = got.stride() if kind.is_torch else tuple(stride // got.itemsize for stride in got.strides)
    assert strides == (9, 1)


def test_wrong_lse_with_heads_first(kind):
    arguments = Sequences([(6, 9)]).arguments(kind)
    with pytest.raises(ValueError, match="^flash_attn_varlen_func: lse: h_q .* is 6, must be 4"):
        flash_attn_varlen_func(**arguments, lse=kind.full((6, 4), 7, "float32"), lse_heads_first=True)


def test_wrong_lse_is_told_as_it_was_given(kind):
    """The library sees the transpose."""
    arguments = Sequences([(6, 9)]).arguments(kind)
    for shape, said in (
        ((4, 6), r"shape is \(4, 6\), must be \(6, 4\), \[tokens, h_q\]"),
        ((6, 4), "stride of the dimension of tokens must be 1,"),
    ):
        with pytest.raises(ValueError, match=f"^flash_attn_varlen_func: lse: {said}"):
            flash_attn_varlen_func(**arguments, lse=kind.full(shape, 7, "float32"))


# ---- Packed -----------------------------------------------------------------------------------------------------------


def packed(name, problem, kind):
    """Returns the arguments of a packed form; `problem` has equal heads, and, if q is packed too, as many keys as tokens."""
    q, _, _, *lengths = problem.arguments(kind).values()
    parts = list(problem.values.values())[name == KV :]
    whole, d = kind.array(numpy.concatenate(parts, axis=2)), parts[0].shape[2]
    return (q, whole, *lengths, d) if name == KV else (whole, *lengths[::2], d)


@pytest.mark.parametrize(
    "shape", [dict(d=192, d_v=128), dict(d=256, d_v=256), dict(d=96, d_v=64), dict(d_v=64)], ids=str
)
def test_packed(name, kind, shape):
    check_packed(name, kind, **shape)


def check_packed(name, kind, **shape):
    """Passes results for kinds that cannot make them."""
    problem = Sequences([(5, 5), (0, 0), (70, 70)], h_q=3, h_kv=3, **shape)
    options = dict(causal=True, softmax_scale=0.2, lse_empty=-math.inf, log_base=2)
    if not kind.makes:
        options.update({n: kind.full(shape, 7, *form) for n, (shape, *form) in problem.results().items()})
    got = getattr(flash_mla, name)(*packed(name, problem, kind), **options)
    check(kind, got, problem.expected(kind, scale=0.2, causal=True, lse_empty=-math.inf, log_base=2))


def test_packed_copies_nothing(name, kind, monkeypatch):
    problem, seen = Sequences([(5, 5)], h_q=3, h_kv=3), {}
    arguments = packed(name, problem, kind)
    # After the differentiated inputs and the position of the cut.
    monkeypatch.setattr(_mha, "_attend", lambda source, d_qk, q, k, v, *_: seen.update(enumerate((q, k, v))))
    getattr(flash_mla, name)(*arguments)
    whole, parts = (arguments[0], range(3)) if name == QKV else (arguments[1], (1, 2))
    for i in parts:
        assert seen[i]._base is whole if kind.is_torch else numpy.shares_memory(seen[i], whole)


WRONG = [
    *[(0, TypeError, value) for value in (None, 1, "text", [1])],
    *[(0, ValueError, lambda kind, shape=shape: kind.full(shape, 0)) for shape in ((), (5, 192), (1, 5, 3, 192))],
    *[(-1, TypeError, value) for value in (None, "64", 64.0)],
    *[(-1, ValueError, value) for value in (0, -1, 128, 192, 2**40)],
]


@pytest.mark.parametrize("place,exception,value", WRONG, ids=str)
def test_packed_wrong(name, kind, place, exception, value):
    arguments = list(packed(name, Sequences([(5, 5)], h_q=3, h_kv=3), kind))
    place = 1 if name == KV and place == 0 else place
    arguments[place] = value(kind) if callable(value) else value
    with refused(exception, name, "head_dim_qk" if place == -1 else "qkv" if name == QKV else "kv"):
        getattr(flash_mla, name)(*arguments)


def emptied(tensor):
    tensor.untyped_storage().resize_(0)
    return tensor


@needs_torch
@pytest.mark.parametrize("make,said", [(emptied, "data is NULL"), (lambda tensor: tensor.to_mkldnn(), "_mkldnn")])
def test_packed_without_memory(name, make, said):
    arguments = list(packed(name, Sequences([(5, 5)], h_q=3, h_kv=3), Kind("torch", "bfloat16")))
    place = 0 if name == QKV else 1
    arguments[place] = make(arguments[place])
    with refused(ValueError, name, "qkv" if name == QKV else "kv", said=said):
        getattr(flash_mla, name)(*arguments)


@needs_torch
def test_packed_compiled(name, device, fresh_compiler):
    kind = Kind("torch", "bfloat16", device)
    arguments = packed(name, Sequences([(5, 5), (9, 9)], h_q=3, h_kv=3), kind)
    function = getattr(flash_mla, name)
    compiled = torch.compile(lambda *given: function(*given, causal=True), backend="aot_eager", fullgraph=True)
    assert kind.all_bits(compiled(*arguments)) == kind.all_bits(function(*arguments, causal=True))


# ---- Unsupported arguments ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in MHA_KINDS], ids=repr)
def test_device_without_a_kernel(kind):
    with pytest.raises(NotImplementedError, match="^flash_attn_varlen_func: "):
        flash_attn_varlen_func(**Sequences([(5, 5)]).arguments(kind))

# SPDX-License-Identifier: MIT
"""A small call of every public function that computes, on PyTorch's tensors, and their arguments by kind; batches of either
decode, and prefills. A test that imports this is skipped without PyTorch."""

from __future__ import annotations

import functools
import importlib
import inspect
import math

import numpy
import pytest

import flash_mla
from attention import Batch, BatchFp8, check_decode, check_fp8
from calls import NAMES, Call, needs_kernel
from kinds import Kind, torch
from test_mha import KV, QKV, Sequences, packed
from test_mha import check as check_mha
from test_sparse import Sparse
from test_sparse import check as check_sparse
from test_sparse_prefill import Prefill
from test_sparse_prefill import check as check_prefill

if torch is None:
    pytest.skip("PyTorch is not installed", allow_module_level=True)
importlib.import_module("flash_mla._torch")  # registers the operators; otherwise imported for the first tensor

DECODE, PREFILL = flash_mla.flash_mla_with_kvcache, flash_mla.flash_mla_sparse_fwd
DECODE_FP8 = flash_mla.flash_mla_with_kvcache_fp8


def of(name, device="cpu"):
    """Returns the call of that name, with the same values in new tensors."""
    return Call(name, Kind("torch", "bfloat16", device))


# (call, input) and (call, output) of each; a cache that is appended to is always given. One input is only bytes.
INPUTS = [(name, argument) for name in NAMES for argument in of(name).inputs] + [("dense_decode-576", "kv_scale")]
OUTPUTS = [(name, argument) for name in NAMES for argument in of(name).outputs]


# Parameters of most tests: by name, each call and each of its arguments.
each_name = pytest.mark.parametrize("name", NAMES)
each_input = pytest.mark.parametrize("name,argument", INPUTS)
each_output = pytest.mark.parametrize("name,argument", OUTPUTS)


def same(got, expected):
    """Compares bit for bit: one kernel serves a call."""
    return len(got) == len(expected) and all(
        torch.equal(mine.contiguous().view(torch.uint8), its.contiguous().view(torch.uint8))
        for mine, its in zip(got, expected)
    )


# ---- Variants -------------------------------------------------------------------------------------------------------

OF_BYTES = ("dense_decode-576", "dense_decode_fp8-656", "sparse_decode-656", "sparse_prefill-656")
CONVENTIONS = dict(lse_empty=-math.inf, log_base=2)
PLANNED = dict(tile_scheduler_metadata=lambda _: flash_mla.get_mla_metadata()[0])
NO_EXTRA = dict.fromkeys(("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length"))
NO_NORM, NO_ROPE = dict(norm_weight=None, norm_eps=0), dict.fromkeys(("positions", "rope_table", "rope_pairs"))


def pages_of(size, value=0):
    """Returns a function that makes pages of so many bytes a token."""
    return lambda cache: cache.new_full((2, 4, 1, size), value, dtype=torch.uint8)


# Calls, and their arguments that differ; a function makes one from the call's own.
VARIANTS = [
    *[(name, {}) for name in (*NAMES, *OF_BYTES)],
    ("dense_decode", dict(attn_sink=None)),
    ("dense_decode", dict(attn_sink=None, causal=True, **PLANNED)),
    ("dense_decode", dict(causal=True, **CONVENTIONS, **PLANNED)),
    ("dense_decode", dict(softmax_scale=0.1, causal=True, batch_invariant=True, **CONVENTIONS)),
    ("dense_decode", dict(q=lambda q: q[:, :, :2], attn_sink=lambda sink: sink[:2])),
    ("dense_decode", dict(q=torch.Tensor.half, k_cache=torch.Tensor.half, block_table=None, attn_sink=None)),
    *[(f"dense_decode-{n}", dict(attn_sink=None, causal=True)) for n in (656, 584)],
    ("dense_decode-576", dict(attn_sink=None, causal=True, **PLANNED)),
    ("dense_decode-576", dict(kv_scale=None, causal=True, is_fp8_kvcache=None)),
    ("dense_decode_fp8-576", dict(attn_sink=None, causal=True, **PLANNED)),
    ("dense_decode_fp8-576", dict(descale_q=None, descale_k=None, batch_invariant=True, **CONVENTIONS)),
    ("dense_decode_fp8-576", dict(causal=True, batch_invariant=True, **CONVENTIONS)),
    ("dense_decode_fp8-576", dict(q=lambda q: torch.full_like(q, 0.1, dtype=torch.bfloat16), descale_q=None)),
    ("dense_decode_fp8-656", dict(attn_sink=None, causal=True)),
    ("sparse_decode", dict(topk_length=None, attn_sink=None, is_fp8_kvcache=None, **NO_EXTRA)),
    ("sparse_decode-656", dict(attn_sink=None, batch_invariant=True, **NO_EXTRA, **CONVENTIONS)),
    ("sparse_decode-656", dict(is_fp8_kvcache=None, **PLANNED)),
    ("sparse_prefill", dict(attn_sink=None)),
    ("sparse_prefill", dict(indexer_topk=32, **CONVENTIONS)),
    ("sparse_prefill-656", dict(topk_length=None, attn_sink=None)),
    ("mha_forward", dict(max_seqlen_qo=0, max_seqlen_kv=0, softmax_scale=0.1, causal=True, **CONVENTIONS)),
    ("merge", dict(attn_sink=None)),
    ("merge", CONVENTIONS),
    ("merge", dict(out_parts=torch.Tensor.float, lse_parts=lambda lse: lse.fill_(-math.inf), attn_sink=None)),
    ("merge", dict(out_parts=lambda out: out[:, 1:], lse_parts=lambda lse: lse[:, 1:], attn_sink=None, log_base=2)),
    ("merge", dict(out_parts=lambda out: (out[0], out[1]), lse_parts=lambda lse: (lse[0], lse[1]))),
    ("merge", dict(out_parts=lambda out: out[1], part=2, **CONVENTIONS)),
    ("cache_append-656", {}),
    ("cache_append-656", dict(NO_NORM, positions=torch.Tensor.long, rope_pairs="interleaved")),
    ("cache_append-656", dict(NO_ROPE, latent=lambda x: x[:, :448], kv_cache=pages_of(584), kv_format="FP8_584")),
    (
        "cache_append-656",
        dict(
            **dict(NO_NORM, rope=None, kv_cache=pages_of(576), kv_format="FP8_576", cache_scale=0.5, **NO_ROPE),
            latent=lambda x: x.new_ones(3, 576, dtype=torch.float32),
        ),
    ),
    ("cache_convert-656", dict(dst_cache=pages_of(576), dst_format="FP8_576", dst_scale=0.5)),
    ("cache_gather-656", {}),
    ("cache_gather", dict(kv_cache=pages_of(584), kv_format="FP8_584")),
    ("cache_gather", dict(kv_cache=pages_of(576, 60), kv_format="FP8_576", cache_scale=0.5)),
]


def variant(name, changed, kind):
    """Returns a call with the arguments that differ, and outputs in the form of results that it has made."""
    call = Call(name, kind)
    for argument, value in changed.items():
        place = next((place for place in (call.inputs, call.outputs) if argument in place), call.options)
        place[argument] = value(place.get(argument)) if callable(value) else value
    if not call.given():
        call.outputs = dict(zip(call.outputs, map(torch.zeros_like, call())))
    return call


# ---- Batches --------------------------------------------------------------------------------------------------------


class OfBytes(Batch):
    """A batch over bytes; skips the test if no kernel reads its cache."""

    operation = "dense_decode"

    def arguments(self, kind):
        needs_kernel(self.operation, kind, self.layout)
        return super().arguments(kind)


class OfCodes(OfBytes, BatchFp8):
    """A batch for FP8 products, whose results are bf16."""

    operation = "dense_decode_fp8"


BATCH = Batch([100, 0, 65, 7], s_q=2, h_q=4)
# A batch of either decode with its lengths, and the comparison of its results: for FP8 caches Hopper has its own kernel.
LENGTHS = [300, 20, 65, 140]
SPARSE = dict(b=4, h_q=16, topk=300)
BATCHES = {
    "dense": (functools.partial(Batch, LENGTHS, s_q=2, h_q=16), check_decode),
    "dense-576": (functools.partial(OfBytes, LENGTHS, s_q=2, h_q=16, layout=576, kv_scale=2.0**-10), check_decode),
    "dense-fp8": (
        functools.partial(OfCodes, LENGTHS, s_q=2, h_q=16, q_scale=2.0**-10, kv_scale=2.0**-10),
        check_fp8,
    ),
    "dense-fp8-128": (functools.partial(OfCodes, LENGTHS, h_q=128), check_fp8),
    "plain": (functools.partial(Sparse, **SPARSE, lengths=[LENGTHS]), check_sparse),
    "FP8_656": (functools.partial(Sparse, layout=656, **SPARSE, lengths=[LENGTHS]), check_sparse),
    "FP8_584-twice": (
        functools.partial(Sparse, layout=584, **SPARSE, extra=(70, 30, 2), lengths=[LENGTHS, [70, 3, 0, -1]]),
        check_sparse,
    ),
}
each_batch = pytest.mark.parametrize("make,check", BATCHES.values(), ids=BATCHES)


def decode(arrays, meta=None, **options):
    return DECODE(*arrays.values(), 512, meta, **options)


def call(arguments, meta=None, **options):
    """Calls decode; queries of one byte are codes."""
    function = DECODE_FP8 if arguments["q"].dtype.itemsize == 1 else DECODE
    return function(**dict(arguments, tile_scheduler_metadata=meta), **options)


def tensors(arguments):
    return {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}


# ---- Prefill --------------------------------------------------------------------------------------------------------


class OfPrefills:
    """Calls of flash_mla_sparse_fwd whose tensors have the same shapes."""

    def __init__(self, **shape):
        lengths = [90, 0, 64, 1, 17], [3, 90, 90, 65, 0]
        self.problems = [Prefill(**shape, h_q=64, lengths=given) for given in lengths]

    def __call__(self, arguments):
        return PREFILL(**arguments, indexer_topk=32)

    def arguments(self, kind, problem):
        return problem.arguments(kind)

    def check(self, kind, got, problem):
        check_prefill(kind, got, (*problem.expected(kind), problem.expected(kind, first=32)[2]))


class OfSequences:
    """Calls of a function of dense MHA. The first problem has the longest sequences."""

    def __init__(self, name, *lengths, **shape):
        self.name, self.function = name, getattr(flash_mla, name)
        self.problems = [Sequences(given, **shape, seed=seed) for seed, given in enumerate(lengths)]

    def __call__(self, arguments):
        return self.function(**arguments, causal=True)

    def arguments(self, kind, problem):
        if self.name not in (QKV, KV):
            return problem.arguments(kind)
        return dict(zip(inspect.signature(self.function).parameters, packed(self.name, problem, kind)))

    def check(self, kind, got, problem):
        check_mha(kind, got, problem.expected(kind, causal=True))


# (tokens, keys) of sequences.
APART = (
    [(300, 500), (0, 20), (64, 65), (1, 0)],
    [(65, 64), (300, 1), (0, 500), (0, 20)],
    [(0, 85), (0, 0), (300, 500), (65, 0)],
)
TOGETHER = [(300, 300), (0, 0), (64, 64), (1, 1)], [(1, 1), (64, 64), (300, 300), (0, 0)]
PREFILLS = {
    "sparse": OfPrefills,
    "sparse-656": functools.partial(OfPrefills, layout=656, pages=(5, 64)),
    # More tiles than a GPU has SMs, and fewer.
    "mha": functools.partial(OfSequences, "flash_attn_varlen_func", *APART, h_q=32, h_kv=16, d=192, d_v=128),
    "mha-few": functools.partial(OfSequences, "flash_attn_varlen_func", *APART, h_q=16, h_kv=1),
    QKV: functools.partial(OfSequences, QKV, *TOGETHER, h_q=16, h_kv=16),
    KV: functools.partial(OfSequences, KV, *TOGETHER, h_q=32, h_kv=32, d=128, d_v=128),
}
each_prefill = pytest.mark.parametrize("make", PREFILLS.values(), ids=PREFILLS)


# ---- Any number -----------------------------------------------------------------------------------------------------


def of_any_number(name, kind, n, keys=None, pages=9, sequences=2):
    """Returns a function and its tensors, of n requests or tokens. In dense MHA there are as many keys if `keys` is None."""
    random = numpy.random.default_rng(n)
    q, cache = (kind.array(random.normal(0, 0.25, shape)) for shape in ((n, 1, 4, 576), (pages, 64, 1, 576)))
    table, lengths = kind.int32(random.integers(0, pages, (n, pages // 3))), kind.int32(random.integers(0, 190, n))
    lists, slots = kind.int32(random.integers(0, 500, (n, 1, 64))), kind.array(numpy.arange(n), "int64")
    kv = kind.array(random.normal(0, 0.25, (n if keys is None else keys, 2, 320)))
    starts, of_keys = (kind.int32(numpy.linspace(0, len(array), sequences + 1)) for array in (q, kv))
    meta = flash_mla.get_mla_metadata
    plans = {
        "unplanned": lambda *lengths: (None,),
        "metadata": lambda *lengths: meta(),
        "tables": lambda lengths, *topk: meta(lengths, 4, 1, *((4, False, *topk) if topk else ())),
    }
    operation, _, planned = name.partition(", ")
    if operation == "dense_decode":
        return lambda q, c, t, s: DECODE(q, c, t, s, 512, *plans[planned](s)), (q, cache, table, lengths)
    if operation == "sparse_decode":
        return (
            lambda q, c, i, s: DECODE(q, c, None, None, 512, *plans[planned](s, 64), indices=i),
            (q, cache, lists, lengths),
        )
    if operation == "sparse_prefill":
        count = 32 if planned else 0
        return (
            lambda q, kv, i: PREFILL(q, kv, i, 0.04, indexer_topk=count),
            (q[:, 0], cache[:, 0], lists),
        )
    if operation == "mha":
        call = flash_mla.flash_attn_varlen_func
        return (
            lambda q, k, v, c, d: call(q, k, v, c, d, q.shape[0], k.shape[0], causal=True),
            (q[:, 0, :, :192], kv[..., :192], kv[..., 192:], starts, of_keys),
        )
    if operation == "mha of packed keys":
        call = flash_mla.flash_attn_varlen_kvpacked_func
        given = q[:, 0, :, :192], kv, starts, of_keys
        return lambda q, kv, c, d: call(q, kv, c, d, q.shape[0], kv.shape[0], 192), given
    if operation == "cache_gather":
        return lambda c, s: flash_mla.cache_gather(c, s, "BF16"), (cache, slots)
    if operation == "merge":
        return flash_mla.merge_states, (kind.full((3, n, 1, 4, 64), 0.5), kind.fp32(numpy.ones((3, n, 4, 1))))
    raise KeyError(operation)


OF_PLANS = [f"{of}_decode, {planned}" for of in ("dense", "sparse") for planned in ("unplanned", "metadata", "tables")]
OF_ANY_NUMBER = [
    *OF_PLANS,
    "sparse_prefill",
    "sparse_prefill, lse_indexer",
    "mha",
    "mha of packed keys",
    "cache_gather",
    "merge",
]


def bits_of(kind, results):
    """Returns the bits of one result or several."""
    return kind.all_bits(results if isinstance(results, tuple) else (results,))


def watch(seen):
    """Returns a mode of PyTorch's dispatch that appends every operator's name and arguments to `seen`."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            seen.append((str(function), arguments))
            return function(*arguments, **(options or {}))

    return Watch()

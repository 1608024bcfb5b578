# SPDX-License-Identifier: MIT
"""Tests flash_mla_with_kvcache_fp8 against attention in double precision over the same quantised inputs, on every kind of array.

Shapes on a GPU are supported by Hopper's kernel.
"""

import re

import numpy
import pytest

from attention import BatchFp8, check_fp8
from calls import needs_kernel
from flash_mla import flash_mla_with_kvcache, flash_mla_with_kvcache_fp8, get_mla_metadata, get_mla_metadata_dense_fp8
from kinds import BF16_KINDS, each_of, ml_dtypes
from programs import output_of
from test_decode import SHAPES_OF_BYTES

SHAPES = [
    dict(lengths=[100], h_q=16),
    dict(lengths=[130, 3], h_q=128),
    dict(lengths=[300, 0, 1], h_q=16, s_q=2, causal=True),
    dict(lengths=[65, 200], h_q=128, s_q=2, causal=True),
    dict(lengths=[80] * 20, h_q=16),
    dict(lengths=[2000, 5], h_q=16, causal=True),
    dict(lengths=[2000, 700, 64], h_q=128),
]
SHAPES_OF_CPUS = [shape for shape in SHAPES_OF_BYTES if shape not in SHAPES]
# Scales that are powers of two or not, one of the two, and none; queries with values, over either cache.
WAYS = [
    dict(q_scale=2.0**-10, kv_scale=2.0**-10),
    dict(q_scale=0.8125 * 2.0**-9, kv_scale=0.7 * 2.0**-9),
    dict(q_scale=2.0**-10),
    dict(kv_scale=0.8125 * 2.0**-9),
    dict(),
    dict(codes=False, kv_scale=0.8125 * 2.0**-9),
    dict(codes=False),
    dict(codes=False, layout=656),
]


def batch_for(kind, **shape):
    """Returns a batch; skips if no kernel on the kind's device takes it."""
    needs_kernel("dense_decode_fp8", kind, shape.get("layout", 576))
    return BatchFp8(**shape)


def call(kind, arguments, **options):
    """Passes results for kinds that cannot make them."""
    if not kind.makes:
        b, s_q, h_q, *_ = *arguments["q"].shape, 1, 1, 1
        new = {"out": kind.full((b, s_q, h_q, 512), 7), "lse": kind.full((b, h_q, s_q), 7, "float32")}
        arguments = {**new, **arguments}
    return flash_mla_with_kvcache_fp8(**{**arguments, **options})


kind = each_of(BF16_KINDS)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("shape", SHAPES + SHAPES_OF_CPUS, ids=str)
def test_values(kind, shape, way):
    """Tests a plan made in the call, tables, and metadata of either function, with and without a sink."""
    if kind.device != "cpu" and shape in SHAPES_OF_CPUS:
        pytest.skip("of CPUs")
    shape = dict(shape)
    causal = shape.pop("causal", False)
    batch = batch_for(kind, **shape, **way)
    arguments, lengths = batch.arguments(kind), kind.int32(batch.lengths)
    expected = batch.expected(kind, causal=causal)
    tables = get_mla_metadata_dense_fp8(lengths, batch.s_q * batch.h_q, 1)
    for plan in ((None, None), tables, get_mla_metadata(), get_mla_metadata(lengths, batch.s_q * batch.h_q, 1)):
        planned = dict(zip(("tile_scheduler_metadata", "num_splits"), plan))
        check_fp8(kind, call(kind, arguments, causal=causal, **planned), expected)
    got = call(kind, arguments, causal=causal, attn_sink=kind.fp32(batch.sink))
    check_fp8(kind, got, batch.expected(kind, causal=causal, sink=batch.sink))


# ---- Arguments ------------------------------------------------------------------------------------------------------


def test_scales_are_read_by_each_call(kind):
    """A call reads the scales from memory when it runs; without one it uses 1."""
    ones = batch_for(kind, lengths=[100, 30], s_q=2, h_q=16)
    arguments = ones.arguments(kind)
    small = kind.fp32([1]), kind.fp32([1])
    for q_scale, k_scale in ((0.5, 1), (1, 0.5), (0.25, 0.5), (1, 1)):
        small[0][:], small[1][:] = q_scale, k_scale
        batch = batch_for(kind, lengths=[100, 30], s_q=2, h_q=16, q_scale=q_scale)
        batch.q, batch.keys = ones.q, [keys * k_scale for keys in ones.keys]  # also exact in bf16
        for _ in range(3):
            got = call(kind, arguments, descale_q=small[0], descale_k=small[1])
            check_fp8(kind, got, batch.expected(kind))
        check_fp8(kind, call(kind, arguments), ones.expected(kind))


def test_values_are_quantised_row_by_row(kind):
    """Rows of all magnitudes, one of them zeros, do not depend on each other."""
    batch = batch_for(kind, lengths=[100, 30], s_q=2, h_q=16, codes=False)
    batch.q *= 2.0 ** numpy.linspace(-40, 3, 64).round().reshape(2, 2, 16, 1)
    batch.q[1, 0, 3] = 0
    check_fp8(kind, call(kind, batch.arguments(kind)), batch.expected(kind))


@pytest.mark.parametrize("code", [127, 255])
def test_nan_among_the_codes_goes_through(kind, code):
    """A NaN in a query reaches only its row."""
    batch = batch_for(kind, lengths=[100, 30], s_q=2, h_q=16)
    batch.q[1, 0, 3, 500] = code
    out, lse = call(kind, batch.arguments(kind))
    expected = batch.expected(kind)
    assert numpy.sum(numpy.isnan(expected[1])) == 1
    check_fp8(kind, (out, lse), expected)


# ---- Metadata -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths,rows", [([300, 0, 65], 32), ([1] * 40, 128), ([], 16)])
def test_metadata(kind, lengths, rows):
    """The tables are those of get_mla_metadata, bit for bit."""
    lengths = kind.int32(lengths)
    tables, expected = get_mla_metadata_dense_fp8(lengths, rows, 1), get_mla_metadata(lengths, rows, 1)
    assert kind.all_bits(tables) == kind.all_bits(expected)
    assert all(mine.shape == its.shape and mine.dtype == its.dtype for mine, its in zip(tables, expected))


def test_metadata_of_either_function_serves_both(kind):
    """One plan serves both functions. A plan for other sizes is refused by the name of the function called."""
    batch, meta = batch_for(kind, lengths=[300, 0, 65], s_q=2, h_q=16, codes=False), get_mla_metadata()[0]
    arguments = dict(batch.arguments(kind), tile_scheduler_metadata=meta)
    check_fp8(kind, call(kind, arguments), batch.expected(kind))
    assert meta.config == (3, 2, 16, 64, 1, False, True, None, None, None)
    held = kind.all_bits((meta.tile_scheduler_metadata, meta.num_splits))
    if kind.makes:
        flash_mla_with_kvcache(**arguments, is_fp8_kvcache=True)
    assert kind.all_bits((meta.tile_scheduler_metadata, meta.num_splits)) == held
    with pytest.raises(ValueError, match="^flash_mla_with_kvcache_fp8: tile_scheduler_metadata: .* causal is False"):
        call(kind, arguments, causal=True)


@pytest.mark.parametrize("kind", [kind for kind in BF16_KINDS if kind.is_torch], ids=repr)
def test_first_table_alone_is_filled_by_the_first_call(kind):
    """The first table acts like that of get_mla_metadata."""
    batch = batch_for(kind, lengths=[300, 0, 65], s_q=2, h_q=16)
    stale, _ = get_mla_metadata_dense_fp8(kind.int32([1, 1, 1]), 2 * 16, 1)
    arguments = dict(batch.arguments(kind), tile_scheduler_metadata=stale)
    check_fp8(kind, call(kind, arguments, causal=True), batch.expected(kind, causal=True))
    assert stale.sched_meta.have_initialized


LENGTHS = numpy.array([100, 20], numpy.int32)


@pytest.mark.parametrize(
    "arguments",
    [
        *[(lengths, 16, 1) for lengths in (3, [1, 2], LENGTHS[None], LENGTHS.astype("int64"), LENGTHS[::-1])],
        *[(LENGTHS, rows, 1) for rows in (None, "1", 1.0, 0, -1, 2**40)],
        *[(LENGTHS, 16, heads) for heads in (None, "1", 1.0, 0, -1, 2**40)],
    ],
    ids=str,
)
def test_metadata_is_refused_in_its_own_name(arguments):
    """Apart from the name, messages are those of get_mla_metadata."""
    with pytest.raises((TypeError, ValueError)) as caught:
        get_mla_metadata(*arguments)
    words = str(caught.value).partition(": ")[2]
    with pytest.raises(caught.type, match="^" + re.escape(f"get_mla_metadata_dense_fp8: {words}") + "$"):
        get_mla_metadata_dense_fp8(*arguments)


def test_metadata_wants_lengths():
    """This metadata is never empty."""
    with pytest.raises(TypeError, match="^get_mla_metadata_dense_fp8: cache_seqlens: is NoneType"):
        get_mla_metadata_dense_fp8(None, 16, 1)


# ---- Results --------------------------------------------------------------------------------------------------------


def test_numpy_without_bf16():
    """For queries of codes results are bf16, a type from ml_dtypes, which is imported then; without it results must be passed."""
    program = """
import sys, numpy
from flash_mla import flash_mla_with_kvcache_fp8
if {hidden}:
    sys.modules["ml_dtypes"] = None
q, cache = numpy.zeros((1, 1, 16, 576), "uint8"), numpy.zeros((2, 64, 1, 576), "uint8")
table, lengths = numpy.zeros((1, 2), "int32"), numpy.array([100], "int32")
try:
    print(flash_mla_with_kvcache_fp8(q, cache, table, lengths, 512, None)[0].dtype)
except TypeError as error:
    print(error)
"""
    if ml_dtypes is not None:
        assert output_of("-c", program.format(hidden=False)).strip() == "bfloat16"
    said = output_of("-c", program.format(hidden=True))
    assert said.startswith("flash_mla_with_kvcache_fp8: out: cannot be made") and said.strip().endswith("pass out=")

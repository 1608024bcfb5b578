# SPDX-License-Identifier: MIT
"""Arrays that are nobody's: all that they have is __dlpack__ and __dlpack_device__. out= and lse= are given."""

import gc
import weakref

import numpy
import pytest

from attention import Batch, check_decode
from flash_mla import flash_mla_with_kvcache, get_mla_metadata, merge_states
from kinds import Kind, defect

KIND = Kind("numpy", "float16")


class OnlyDLPack:
    """A NumPy array seen through DLPack alone."""

    def __init__(self, array):
        self._array = array

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()

    def __dlpack__(self, stream=None):
        assert stream is None, "the CPU has no streams"
        return self._array.__dlpack__()


class ShapedDLPack(OnlyDLPack):
    """One that says its shape too, as every array library's does."""

    shape = property(lambda self: self._array.shape)
    ndim = property(lambda self: self._array.ndim)
    dtype = property(lambda self: self._array.dtype)


WRAPPERS = [
    defect(OnlyDLPack, why="AttributeError: ndim and shape are asked of q and k_cache themselves", id="OnlyDLPack"),
    pytest.param(ShapedDLPack, id="ShapedDLPack"),
]


def decode(wrap, batch, meta=None, **options):
    q, k_cache, block_table, cache_seqlens = (None if a is None else wrap(a) for a in batch.arrays(KIND).values())
    return flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, 512, meta, **options)


def results(batch):
    return (
        numpy.zeros((batch.b, batch.s_q, batch.h_q, 512), numpy.float16),
        numpy.zeros((batch.b, batch.h_q, batch.s_q), numpy.float32),
    )


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("table", [True, False])
def test_decode(wrap, table):
    batch = Batch([60, 0, 64], s_q=2, table=table)
    out, lse = results(batch)
    given = wrap(out), wrap(lse)
    got = decode(wrap, batch, out=given[0], lse=given[1], attn_sink=wrap(batch.sink), causal=True)
    assert got[0] is given[0] and got[1] is given[1]
    check_decode(KIND, (out, lse), batch.expected(KIND, causal=True, sink=batch.sink))


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_decode_into_numpy_arrays(wrap, batch_invariant):
    batch = Batch([60, 100])
    out, lse = results(batch)
    got = decode(wrap, batch, out=out, lse=lse, batch_invariant=batch_invariant)
    assert got[0] is out and got[1] is lse
    check_decode(KIND, got, batch.expected(KIND))


@pytest.mark.parametrize(
    "wrap",
    [
        defect(OnlyDLPack, why="as above", id="OnlyDLPack"),
        defect(
            ShapedDLPack, why='TypeError: "plan: cannot be made …; pass plan=", which is no argument', id="ShapedDLPack"
        ),
    ],
)
def test_decode_with_metadata(wrap):
    batch = Batch([60, 100])
    meta, _ = get_mla_metadata()
    for _ in range(2):
        out, lse = results(batch)
        decode(wrap, batch, meta, out=out, lse=lse)
        check_decode(KIND, (out, lse), batch.expected(KIND))
    assert meta.have_initialized


@pytest.mark.parametrize("missing", ["out", "lse"])
@pytest.mark.parametrize(
    "wrap",
    [
        defect(OnlyDLPack, why="as above", id="OnlyDLPack"),
        defect(ShapedDLPack, why="the message lacks the function's name", id="ShapedDLPack"),
    ],
)
def test_decode_without_results(wrap, missing):
    batch = Batch([60, 100])
    given = dict(zip(("out", "lse"), results(batch)))
    del given[missing]
    with pytest.raises(TypeError, match=rf"^flash_mla_with_kvcache: {missing}: .*{missing}="):
        decode(wrap, batch, **given)


@pytest.mark.parametrize("wrap", [OnlyDLPack, ShapedDLPack])
def test_merge(wrap):
    out_parts = numpy.full((3, 2, 1, 4, 8), 2, numpy.float32)
    lse_parts = numpy.zeros((3, 2, 4, 1), numpy.float32)
    out, lse = numpy.zeros((2, 1, 4, 8), numpy.float32), numpy.zeros((2, 4, 1), numpy.float32)
    merge_states(wrap(out_parts), wrap(lse_parts), out=wrap(out), lse=wrap(lse))
    numpy.testing.assert_allclose(out, 2, rtol=1e-6)
    numpy.testing.assert_allclose(lse, numpy.log(3), rtol=1e-6)


@pytest.mark.parametrize("missing", ["out", "lse"])
@pytest.mark.parametrize(
    "wrap",
    [
        defect(OnlyDLPack, why="AttributeError: shape is asked of out_parts itself", id="OnlyDLPack"),
        defect(ShapedDLPack, why="the message lacks the function's name", id="ShapedDLPack"),
    ],
)
def test_merge_without_results(wrap, missing):
    given = {"out": numpy.zeros((2, 1, 4, 8), numpy.float32), "lse": numpy.zeros((2, 4, 1), numpy.float32)}
    del given[missing]
    out_parts, lse_parts = numpy.zeros((3, 2, 1, 4, 8), numpy.float32), numpy.zeros((3, 2, 4, 1), numpy.float32)
    with pytest.raises(TypeError, match=rf"^merge_states: {missing}: .*{missing}="):
        merge_states(wrap(out_parts), wrap(lse_parts), **given)


def test_numpy_arrays_beside_those_of_others():
    """q decides what results are made by."""
    batch = Batch([60, 100])
    arrays = batch.arrays(KIND)
    arrays["k_cache"] = ShapedDLPack(arrays["k_cache"])
    check_decode(KIND, flash_mla_with_kvcache(*arrays.values(), 512, None), batch.expected(KIND))


def test_strides_and_offset_come_through():
    batch = Batch([60, 100], s_q=2)
    arrays = batch.arrays(KIND)
    large = numpy.full((3, 2, 9, 600), numpy.nan, numpy.float16)
    large[1:, :, 2:6, 8:584] = arrays["q"]
    arrays["q"] = ShapedDLPack(large[1:, :, 2:6, 8:584])
    out, lse = results(batch)
    flash_mla_with_kvcache(*arrays.values(), 512, None, out=out, lse=lse)
    check_decode(KIND, (out, lse), batch.expected(KIND))


def test_nothing_is_held_after_the_call():
    """A capsule that nobody took is destroyed with its array."""

    class Owned(numpy.ndarray):
        pass

    cache = Batch([60, 100]).arrays(KIND)
    arrays = {name: array.view(Owned) for name, array in cache.items()}
    alive = [weakref.ref(array) for array in arrays.values()]
    batch = Batch([60, 100])
    out, lse = results(batch)
    wrapped = [ShapedDLPack(array) for array in arrays.values()]
    flash_mla_with_kvcache(*wrapped, 512, None, out=out, lse=lse)
    del arrays, wrapped
    gc.collect()
    assert [reference() for reference in alive] == [None] * 4


@pytest.mark.parametrize("argument", ["k_cache", "block_table", "cache_seqlens", "attn_sink", "out", "lse"])
def test_argument_without_dlpack(argument):
    batch = Batch([60, 100])
    out, lse = results(batch)
    arguments = dict(
        batch.arrays(KIND), head_dim_v=512, tile_scheduler_metadata=None, attn_sink=batch.sink, out=out, lse=lse
    )
    arguments[argument] = memoryview(b"bytes")
    with pytest.raises(TypeError, match=f"^flash_mla_with_kvcache: {argument}: is memoryview"):
        flash_mla_with_kvcache(**arguments)

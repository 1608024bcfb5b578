# SPDX-License-Identifier: MIT
"""Tests arrays of no library, which have only __dlpack__ and __dlpack_device__. out= and lse= are given."""

import gc
import weakref

import numpy
import pytest

from attention import Batch, check_decode
from flash_mla import flash_mla_with_kvcache, get_mla_metadata, merge_states
from kinds import Capsuled, Kind, each_of, needs_cuda, torch
from test_families import FAMILIES, new_results
from test_mha import KV, QKV, check_packed
from test_sparse import Sparse
from test_sparse import check as check_sparse

KIND = Kind("numpy", "float16")


class OnlyDLPack:
    """A NumPy array with only DLPack's methods."""

    def __init__(self, array):
        self._array = array

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()

    def __dlpack__(self, stream=None):
        assert stream is None, "the CPU has no streams"
        return self._array.__dlpack__()


class ShapedDLPack(OnlyDLPack):
    """One that also has a shape, as arrays of every library do."""

    shape = property(lambda self: self._array.shape)
    ndim = property(lambda self: self._array.ndim)
    dtype = property(lambda self: self._array.dtype)


class Versioned(ShapedDLPack):
    """A producer whose capsules have a version, and flags."""

    def __dlpack__(self, stream=None):
        return self._array.__dlpack__(max_version=(1, 0))


class Foreign(ShapedDLPack):
    """An array of a library that has the array API's standard names, as CuPy's and JAX's do."""

    device = property(lambda self: self._array.device if hasattr(self._array, "device") else "cpu")
    T = property(lambda self: Foreign(self._array.T))

    def __array_namespace__(self, api_version=None):
        return ForeignLibrary(torch if torch is not None and isinstance(self._array, torch.Tensor) else numpy)

    def __dlpack__(self, stream=None):
        on_cpu = self.__dlpack_device__()[0] == 1
        assert (stream is None) == on_cpu, "of a GPU, the stream that the consumer works on"
        return self._array.__dlpack__(**({} if on_cpu else {"stream": stream}))


class ForeignLibrary:
    def __init__(self, library):
        self._library = library

    def __getattr__(self, name):
        return getattr(self._library, name)  # dtypes

    def empty(self, shape, *, dtype, device):
        if self._library is numpy:
            assert device == "cpu"
            return Foreign(numpy.empty(shape, dtype))
        return Foreign(torch.empty(shape, dtype=dtype, device=device))


def decode(wrap, batch, meta=None, **options):
    q, k_cache, block_table, cache_seqlens = (None if a is None else wrap(a) for a in batch.arrays(KIND).values())
    return flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, 512, meta, **options)


def results(batch):
    return tuple(new_results(KIND, batch, 0).values())


class Wrapped(Kind):
    """Wraps NumPy's arrays as another library's, which makes results if it has a namespace."""

    def __init__(self, wrap, unwrap=lambda array: getattr(array, "_array", array), element="float16"):
        super().__init__(getattr(wrap, "__name__", "jax"), element)
        self._wrap, self._unwrap = wrap, unwrap
        self.makes = hasattr(self.array(1), "__array_namespace__")

    def array(self, values, dtype=None):
        return self._wrap(super().array(values, dtype))

    def float64(self, array):
        return super().float64(self._unwrap(array))

    def dtype_name(self, array):
        return str(self._unwrap(array).dtype)

    def is_one(self, array):
        return isinstance(array, type(self.array(1)))


HAS_VERSIONS = pytest.mark.skipif(
    tuple(int(n) for n in numpy.__version__.split(".")[:2]) < (2, 1), reason="NumPy before 2.1 makes no such capsules"
)
WRAPPED = [
    *map(Wrapped, (OnlyDLPack, ShapedDLPack, Foreign)),
    pytest.param(Wrapped(Versioned), marks=HAS_VERSIONS),
]
kind = each_of(WRAPPED)
# NumPy itself does not export bf16, which sparse prefill and FP8 products need.
each_family = pytest.mark.parametrize("name", [n for n in FAMILIES if "prefill" not in n and "fp8" not in n])
each_way = pytest.mark.parametrize("way", ["plain", "planned", "batch_invariant", "into NumPy's"])


@each_way
@each_family
def test_family(name, kind, way):
    check_family(FAMILIES[name], kind, way)


def check_family(family, kind, way):
    if way in ("planned", "batch_invariant") and not family.is_decode:
        pytest.skip("it has no plan")
    plain = Kind("numpy", kind.element)
    for changed in (dict(), dict(lengths=[60, 0, 64], table=False)) if family.of is Batch else (dict(),):
        problem, meta, given = family.make(**changed), get_mla_metadata()[0], {}
        arguments, of = family.arguments(kind, problem), kind
        if way == "into NumPy's":
            of = plain
        if not kind.makes or of is plain:
            given = new_results(of, problem, 7)
        more = {"planned": {"tile_scheduler_metadata": meta}, "batch_invariant": {"batch_invariant": True}}.get(way, {})
        for _ in range(2):
            got = family.check_call_of(of, kind, problem, {**arguments, **given, **more})
            assert all(array is mine for array, mine in zip(got, given.values()))
        if way == "planned":
            assert meta.have_initialized and kind.makes == kind.is_one(meta.tile_scheduler_metadata)


@each_family
def test_results_that_cannot_be_made(name, kind):
    family = FAMILIES[name]
    problem = family.make()
    forms = new_results(kind, problem, 7)
    for missing in () if kind.makes else forms:
        given = {name: array for name, array in forms.items() if name != missing}
        with pytest.raises(TypeError, match=rf"^{family.function}: {missing}: .*{missing}="):
            family.call(kind, {**family.arguments(kind, problem), **given})


@pytest.mark.parametrize("name", [QKV, KV])
def test_packed(name, kind):
    check_packed(name, kind, d=192, d_v=128)


@needs_cuda
@pytest.mark.parametrize("planned", [False, True], ids=["plan=inside", "plan=meta"])
@pytest.mark.parametrize("on_stream", [False, True])
@pytest.mark.parametrize(
    "batch,check",
    [
        (Batch([60, 0, 100], s_q=2), check_decode),
        (Sparse(layout=584, extra=(70, 30, 2), lengths=[[0, 90], [70, 3]]), check_sparse),
    ],
    ids=["dense", "sparse"],
)
def test_arrays_of_a_gpu(batch, check, planned, on_stream):
    """Tests arrays like CuPy's; the stream is an argument."""
    kind = Kind("torch", "float16", "cuda")
    arguments = batch.arguments(kind)
    arguments.update({name: Foreign(value) for name, value in arguments.items() if isinstance(value, torch.Tensor)})
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    handle = stream.cuda_stream if on_stream else 0
    arguments["tile_scheduler_metadata"] = get_mla_metadata()[0] if planned else None
    out, lse = flash_mla_with_kvcache(**arguments, stream=handle)
    torch.cuda.synchronize()
    check(kind, (out._array, lse._array), batch.expected(kind))
    merged = merge_states(Foreign(out._array[None]), Foreign(lse._array[None]), stream=handle)
    torch.cuda.synchronize()
    assert torch.equal(merged[0]._array, out._array)


@HAS_VERSIONS
def test_result_whose_capsule_says_that_it_is_read_only():
    batch = Batch([60, 100])
    out, lse = results(batch)
    out.flags.writeable = False
    with pytest.raises((TypeError, ValueError), match="^flash_mla_with_kvcache: out: "):
        decode(Versioned, batch, out=Versioned(out), lse=lse)
    assert not numpy.any(out)


def test_numpy_arrays_beside_those_of_others():
    """The library of q makes the results."""
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


@pytest.mark.parametrize("strides", [False, True])
@pytest.mark.parametrize("byte_offset", [0, 48])
def test_capsule_with_an_offset_and_without_strides(byte_offset, strides):
    """Without strides an array is contiguous; the offset is added to the address."""
    batch = Batch([60, 100], s_q=2)
    arrays = batch.arrays(KIND)
    array = arrays["k_cache"]
    address = array.__array_interface__["data"][0] - byte_offset
    of_elements = [stride // array.itemsize for stride in array.strides] if strides else None
    arrays["k_cache"] = Capsuled(address, array.shape, 2, 16, byte_offset=byte_offset, strides=of_elements)
    check_decode(KIND, flash_mla_with_kvcache(*arrays.values(), 512, None), batch.expected(KIND))


@pytest.mark.parametrize(
    "wrong",
    [
        dict(lanes=2),
        dict(bits=8),
        dict(code=4),
        dict(device=(7, 0)),
        dict(device=(1, -1)),
        dict(shape=(4, 64, 1, -576)),
    ],
    ids=str,
)
def test_capsule_that_is_refused(wrong):
    batch = Batch([60, 100], s_q=2)
    arrays = batch.arrays(KIND)
    array = arrays["k_cache"]
    good = dict(data=array.__array_interface__["data"][0], shape=array.shape, code=2, bits=16)
    arrays["k_cache"] = Capsuled(**dict(good, **wrong))
    for said in [False, None]:
        with pytest.raises(ValueError) as caught:
            flash_mla_with_kvcache(*arrays.values(), 512, None, is_fp8_kvcache=said)
        assert str(caught.value).startswith("flash_mla_with_kvcache: k_cache: ")


@pytest.mark.parametrize("code", [0, 1, 10])
def test_cache_of_bytes_by_its_capsule_alone(code):
    """Tests DLPack's type codes of int8, uint8 and float8_e4m3fn."""
    batch = Batch([60, 100], s_q=2, layout=656)
    arrays = batch.arrays(KIND)
    expected = flash_mla_with_kvcache(*arrays.values(), 512, None, is_fp8_kvcache=True)
    data, shape = arrays["k_cache"].ctypes.data, arrays["k_cache"].shape
    given = dict(arrays, k_cache=Capsuled(data, shape, code, bits=8))
    assert KIND.all_bits(flash_mla_with_kvcache(*given.values(), 512, None)) == KIND.all_bits(expected)


@pytest.mark.parametrize("said", [True, None])
def test_no_other_type_of_one_byte_is_a_cache(said):
    """Tests every type code of DLPack, and those that DLPack does not have: a name or the code is in the message."""
    names = {2: "float8", 6: "bool", 8: "float8_e4m3", 11: "float8_e4m3fnuz", 12: "float8_e5m2", 14: "float8_e8m0fnu"}
    arrays = Batch([60, 100], s_q=2, layout=656).arrays(KIND)
    data, shape = arrays["k_cache"].ctypes.data, arrays["k_cache"].shape
    for code in set(range(256)) - {0, 1, 10}:
        given = dict(arrays, k_cache=Capsuled(data, shape, code, bits=8))
        with pytest.raises(ValueError) as caught:
            flash_mla_with_kvcache(*given.values(), 512, None, is_fp8_kvcache=said)
        message = str(caught.value)
        assert message.startswith(f"flash_mla_with_kvcache: k_cache: dtype is {names.get(code, '')}"), message
        assert message.endswith(", must be uint8, int8 or float8_e4m3fn where an element has one byte"), message


def test_nothing_is_held_after_the_call():
    """An unused capsule is destroyed with its array."""

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

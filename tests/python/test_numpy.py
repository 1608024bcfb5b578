# SPDX-License-Identifier: MIT
"""Tests NumPy arrays in particular: their possible forms, the memory kept between calls, and its ownership."""

import numpy
import pytest

from attention import Batch, check_decode
from calls import NAMES, Call
from flash_mla import _arrays, _described, _library, _operations, flash_mla_with_kvcache, get_mla_metadata, merge_states
from kinds import WORDS, Kind, ml_dtypes
from programs import in_threads, output_of

KIND = Kind("numpy", "float16")


def decode(batch, meta=None, **options):
    return flash_mla_with_kvcache(*batch.arrays(KIND).values(), 512, meta, **options)


# ---- Forms of arrays --------------------------------------------------------------------------------------------------


def fixed(argument, name="dense_decode", kind=KIND):
    """Returns a call with a read-only array."""
    call = Call(name, kind)
    array = {**call.inputs, **call.outputs}[argument]
    if isinstance(array, numpy.ndarray):
        array.flags.writeable = False
    return call


@pytest.mark.parametrize("argument", ["q", "k_cache", "block_table", "cache_seqlens", "attn_sink"])
def test_input_of_numpy_may_be_read_only(argument):
    fixed(argument)()


@pytest.mark.parametrize("name", NAMES)
def test_result_of_numpy_that_is_read_only(name):
    for argument in Call(name, WORDS).outputs:
        call = fixed(argument, name, WORDS if name == "sparse_prefill" else KIND)
        if isinstance(call.outputs[argument], numpy.ndarray):
            with pytest.raises(ValueError, match=f"^{call.name}: {argument}: is read-only"):
                call(**call.outputs)


@pytest.mark.parametrize(
    "dtype,called",
    [
        ("object", "object"),
        ("complex64", "complex64"),
        ("datetime64[s]", "datetime64[s]"),
        ("S3", "bytes24"),
        ("bool", "bool"),
        pytest.param("float8_e4m3fn", "float8_e4m3fn", marks=pytest.mark.skipif(not ml_dtypes, reason="no float8")),
    ],
)
def test_type_is_called_by_its_name(dtype, called):
    with pytest.raises(ValueError) as caught:
        Call("dense_decode", KIND)(q=numpy.zeros((2, 2, 4, 576), dtype))
    assert str(caught.value) == f"flash_mla_with_kvcache: q: dtype is {called}, must be bfloat16 or float16"


def test_memory_map(tmp_path):
    """A memory map is an array of a subclass."""
    batch = Batch([60, 100])
    arrays = batch.arrays(KIND)
    arrays["k_cache"].tofile(tmp_path / "cache")
    arrays["k_cache"] = numpy.memmap(tmp_path / "cache", numpy.float16, "r", shape=arrays["k_cache"].shape)
    check_decode(KIND, flash_mla_with_kvcache(*arrays.values(), 512, None), batch.expected(KIND))


# ---- Memory kept between calls ----------------------------------------------------------------------------------------


def test_calls_of_changing_shapes():
    """Alternates arrays with equal numbers of elements but other dimensions or strides, whose stored shapes must not be mixed
    up."""
    batches = [
        Batch([60], h_q=8),
        Batch([60], s_q=2, h_q=4),
        Batch([60, 60], h_q=4),
        Batch([60], h_q=8, d=512),
        Batch([60], h_q=8),
    ]
    for _ in range(2):
        for batch in batches:
            check_decode(KIND, decode(batch), batch.expected(KIND))
    batch = batches[0]
    wide = dict(batch.arrays(KIND))
    wide["q"] = numpy.repeat(wide["q"], 2, axis=2)[:, :, ::2]  # the same shape with other strides
    for arrays in (batch.arrays(KIND), wide, batch.arrays(KIND)):
        check_decode(KIND, flash_mla_with_kvcache(*arrays.values(), 512, None), batch.expected(KIND))


def test_types_of_changing_names():
    """Alternates types of one size: int32 in place of fp32, and back."""
    parts = numpy.ones((2, 1, 1, 4, 8), numpy.float32), numpy.zeros((2, 1, 4, 1), numpy.float32)
    expected = merge_states(*parts)
    for _ in range(2):
        with pytest.raises(ValueError, match="lse_parts: dtype is int32"):
            merge_states(parts[0], parts[1].astype(numpy.int32))
        got = merge_states(*parts)
        assert all(numpy.array_equal(mine, its) for mine, its in zip(got, expected))


def test_workspaces_of_threads_and_of_children_are_their_own():
    """Memory kept for the next call is not shared between threads or with a forked child."""
    _library.library.fmla_set_num_threads(2)  # many threads need more than is kept
    batches = [Batch([50 * i + 200, 3], s_q=2, h_q=2, seed=i) for i in range(4)]
    expected = [batch.expected(KIND) for batch in batches]

    def work(i):
        for _ in range(6):
            check_decode(KIND, decode(batches[i % 4]), expected[i % 4])

    in_threads(8, work)
    assert kept_memory()
    for address in kept_memory():
        assert "s" not in permissions(address), "a child would write into its parent's"
    _library.library.fmla_set_num_threads(0)


def kept_memory():
    return [call.scratch.address for call in _operations.DENSE_DECODE.idle[_arrays] if call.scratch is not None]


def permissions(address):
    with open("/proc/self/maps") as maps:
        for line in maps:
            start, _, end = line.split()[0].partition("-")
            if int(start, 16) <= address < int(end, 16):
                return line.split()[1]
    raise AssertionError("there is no such memory")


def test_large_workspaces_are_not_kept():
    meta, _ = get_mla_metadata()
    batch = Batch([64] * 3, s_q=2, h_q=4)
    check_decode(KIND, decode(batch, meta), batch.expected(KIND))
    kept, _described._KEPT = _described._KEPT, 0
    try:
        before = sorted(kept_memory())
        batch = Batch([300] * 20, s_q=4, h_q=128)
        decode(batch)
        assert sorted(kept_memory()) == before
    finally:
        _described._KEPT = kept


def test_addresses_are_those_of_the_arrays():
    """Tests both ways to get an address from NumPy."""
    array = numpy.arange(24, dtype=numpy.int16).reshape(4, 6)
    for part in (array, array[1:, 2:], array[:0], numpy.zeros(()), array.T):
        address = part.ctypes.data
        assert _described._address_by_attributes(part) == _described._address_by_struct(part) == address


def test_addresses_outlive_what_told_them():
    """Overwrites freed memory, so that an address read too late is detected."""
    program = (
        "import numpy, flash_mla\n"
        "from flash_mla import _described\n"
        "arrays = [numpy.zeros(n + 1) for n in range(100)]\n"
        "assert all(_described._address(a) == a.__array_interface__['data'][0] for a in arrays)\n"
    )
    output_of("-X", "dev", "-c", program)

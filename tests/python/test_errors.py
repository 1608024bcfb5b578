# SPDX-License-Identifier: MIT
"""Every argument, wrong in every way that makes sense: the exception; a message that names function and argument."""

import math
import re

import numpy
import pytest

import flash_mla
from attention import Batch
from flash_mla import flash_mla_with_kvcache, get_mla_metadata, merge_states
from kinds import KINDS, Kind, each_kind, needs_cuda, needs_torch, torch
from programs import output_of

TYPE, VALUE, NOT_THERE = TypeError, ValueError, NotImplementedError
B, S_Q, H_Q, D, D_V, PAGES = 2, 3, 4, 576, 512, 8


def check_message(error, function, *arguments):
    """The function's name comes first; one of these arguments is in it as a whole word, "k_cache.shape[1]" too."""
    message = str(error)
    assert message.startswith(f"{function}: "), message
    assert any(re.search(rf"(?<!\w){re.escape(argument)}(?!\w)", message) for argument in arguments), message


class Values:
    """A wrong array of each kind. `names`: what the message may call it; None: the argument that it is given as."""

    def __init__(self, make, name, names=None):
        self.make, self.name, self.names = make, name, names

    def as_(self, *names):
        return Values(self.make, self.name, names)


def full(*shape, dtype=None):
    return Values(lambda kind: kind.full(shape, 0, dtype), f"{dtype or 'element'}{list(shape)}")


def part(shape, key, dtype=None):
    """Some of an array, where its strides count."""
    name = ",".join(f"{s.start or ''}:{s.stop or ''}:{s.step or ''}" if isinstance(s, slice) else str(s) for s in key)
    return Values(lambda kind: kind.full(shape, 0, dtype)[key], f"part[{name}]")


def other_element(*shape):
    return Values(
        lambda kind: kind.full(shape, 0, "float32" if kind.element == "float16" else "float16"), "another element"
    )


def broadcast(*shape, dtype=None):
    """All elements of the first dimension in one place."""

    def make(kind):
        one = kind.full((1, *shape[1:]), 0, dtype)
        return (
            one.expand(*shape)
            if kind.is_torch
            else numpy.lib.stride_tricks.as_strided(one, shape, (0, *one.strides[1:]))
        )

    return Values(make, "broadcast")


def cases(table, arguments=None):
    """Parameters (argument, value, exception) of {argument: [(exception, value, …), …]}."""
    parameters = []
    for argument in arguments or table:
        for exception, *values in table[argument]:
            for value in values:
                name = f"{argument}={value.name if isinstance(value, Values) else repr(value)}"
                parameters.append(pytest.param(argument, value, exception, id=name))
    return parameters


def check_refused(function, arguments, argument, value, exception, kind):
    given = value.make(kind) if isinstance(value, Values) else value
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as caught:
        function(**dict(arguments, **{argument: given}))
    assert caught.type is exception
    names = value.names if isinstance(value, Values) and value.names else (argument,)
    check_message(caught.value, function.__name__, *names)


# ---- flash_mla_with_kvcache -----------------------------------------------------------------------------------------

NO_ARRAY = [1, 1.5, "text", [1, 2]]
OPTIONS = {  # which other functions have too
    "lse_empty": [(VALUE, "text", None, 0, math.nan, [1])],
    "log_base": [(VALUE, "text", None, 10, 1, 0, -2, math.nan, [1])],
    "stream": [(TYPE, "text", 1.5)],
}
DECODE = {
    "q": [
        (TYPE, None, *NO_ARRAY),
        (VALUE, full(B, S_Q, H_Q, D, dtype="float32"), full(B, S_Q, H_Q, D, dtype="int32")),
        (VALUE, full(S_Q, H_Q, D), full(1, B, S_Q, H_Q, D), full()),
        (VALUE, full(B, 0, H_Q, D), full(B, S_Q, 0, D), full(B, S_Q, H_Q, 0).as_("head_dim_v")),
        (VALUE, full(B + 1, S_Q, H_Q, D).as_("block_table"), full(B, S_Q, H_Q, 512).as_("k_cache"), full(B, S_Q, 3, D)),
        (VALUE, part((B, S_Q, H_Q, 2 * D), (slice(None), slice(None), slice(None), slice(None, None, 2)))),
    ],
    "k_cache": [
        (TYPE, None, *NO_ARRAY),
        (VALUE, other_element(PAGES, 64, 2, D), full(PAGES, 64, 2, D, dtype="int32")),
        (VALUE, full(PAGES, 64, D), full(1, PAGES, 64, 2, D)),
        (VALUE, full(PAGES, 64, 2, 512), full(PAGES, 0, 2, D), full(PAGES, 64, 0, D), full(PAGES, 64, 3, D).as_("q")),
        (VALUE, part((PAGES, 64, 2, 2 * D), (slice(None), slice(None), slice(None), slice(None, None, 2)))),
    ],
    "block_table": [
        (TYPE, *NO_ARRAY),
        (VALUE, full(B, 4, dtype="int64"), full(B, 4, dtype="float32"), full(B, 4, dtype="int16")),
        (VALUE, full(B, dtype="int32"), full(B, 4, 1, dtype="int32"), full(B + 1, 4, dtype="int32")),
        (VALUE, part((B, 8), (slice(None), slice(None, None, 2)), "int32")),
        (
            VALUE,
            Values(lambda kind: kind.int32([[0, 1, 2, 3], [-1, 0, 0, 0]]), "page -1 that is used"),
            Values(lambda kind: kind.int32([[0, 1, 2, 3], [PAGES, 0, 0, 0]]), "page past the cache that is used"),
        ),
    ],
    "cache_seqlens": [
        (TYPE, None, *NO_ARRAY),
        (VALUE, full(B, dtype="int64"), full(B, dtype="float32"), full(B)),
        (VALUE, full(dtype="int32"), full(B, 1, dtype="int32"), full(B - 1, dtype="int32"), full(0, dtype="int32")),
        (VALUE, part((2 * B,), (slice(None, None, 2),), "int32")),
    ],
    "head_dim_v": [(TYPE, None, "512", [512], 512.0, 1.5), (VALUE, 0, -1, D + 1, 2**40), (NOT_THERE, 256, 1)],
    "tile_scheduler_metadata": [(TYPE, 1, "text", (1, 2), full(8, 8, dtype="int32"))],
    "num_splits": [(TYPE, 1, full(B + 1, dtype="int32").as_("tile_scheduler_metadata"))],
    "softmax_scale": [
        (TYPE, "text", [1]),
        (VALUE, 0, 0.0, 1e-50, -1e-50, 7e-46, math.inf, -math.inf, math.nan, 1e300, 3.5e38),
    ],
    "causal": [(TYPE, "text", [1])],
    "is_fp8_kvcache": [(TYPE, "text", [1]), (NOT_THERE, True)],
    "attn_sink": [
        (TYPE, *NO_ARRAY),
        (VALUE, full(H_Q, dtype="float16"), full(H_Q, dtype="float64"), full(H_Q, dtype="int32")),
        (VALUE, full(dtype="float32"), full(1, H_Q, dtype="float32"), full(H_Q + 1, dtype="float32")),
        (VALUE, part((2 * H_Q,), (slice(None, None, 2),), "float32")),
    ],
    "extra_k_cache": [(VALUE, full(PAGES, 64, 1, D))],
    "extra_indices_in_kvcache": [(VALUE, full(B, S_Q, 64, dtype="int32"))],
    "topk_length": [(VALUE, full(B, dtype="int32"))],
    "extra_topk_length": [(VALUE, full(B, dtype="int32"))],
    "out": [
        (TYPE, *NO_ARRAY),
        (VALUE, full(B, S_Q, H_Q, D_V, dtype="float32"), other_element(B, S_Q, H_Q, D_V)),
        (VALUE, full(S_Q, H_Q, D_V), full(B + 1, S_Q, H_Q, D_V), full(B, 1, H_Q, D_V), full(B, S_Q, 1, D_V)),
        (VALUE, full(B, S_Q, H_Q, D), full(B, S_Q, H_Q, 1), full(B, S_Q, H_Q, 0)),
        (VALUE, part((B, S_Q, H_Q, 2 * D_V), (slice(None), slice(None), slice(None), slice(None, None, 2)))),
        (VALUE, broadcast(B, S_Q, H_Q, D_V)),
    ],
    "lse": [
        (TYPE, *NO_ARRAY),
        (VALUE, full(B, H_Q, S_Q), full(B, H_Q, S_Q, dtype="float64")),
        (VALUE, full(H_Q, S_Q, dtype="float32"), full(B, S_Q, H_Q, dtype="float32")),
        (VALUE, full(B + 1, H_Q, S_Q, dtype="float32")),
        (VALUE, part((B, H_Q, 2 * S_Q), (slice(None), slice(None), slice(None, None, 2)), "float32")),
        (VALUE, broadcast(B, H_Q, S_Q, dtype="float32")),
    ],
    "batch_invariant": [(TYPE, "text", [1])],
    **OPTIONS,
}


def decode_arguments(kind):
    return {
        "q": kind.full((B, S_Q, H_Q, D), 0),
        "k_cache": kind.full((PAGES, 64, 2, D), 0),
        "block_table": kind.int32(numpy.arange(PAGES).reshape(B, 4)),
        "cache_seqlens": kind.int32([200, 70]),
        "head_dim_v": D_V,
        "tile_scheduler_metadata": None,
    }


@each_kind
def test_decode_arguments_as_they_are_meant(kind):
    """What the tables change one argument of is right."""
    flash_mla_with_kvcache(**decode_arguments(kind))


@each_kind
@pytest.mark.parametrize("argument,value,exception", cases(DECODE))
def test_decode(kind, argument, value, exception):
    if argument == "block_table" and "that is used" in getattr(value, "name", "") and kind.device != "cpu":
        pytest.skip("a GPU does not look at the entries of a table")
    if argument == "stream" and kind.is_torch:
        pytest.skip("PyTorch's current stream is used")
    check_refused(flash_mla_with_kvcache, decode_arguments(kind), argument, value, exception, kind)


# What a plan is made of, and refused for, before attention is looked at.
PLANNED = {
    "q": [
        (VALUE, full(B, 0, H_Q, D), full(B, S_Q, 0, D), full(B, S_Q, 3, D)),
        (VALUE, full(S_Q, H_Q, D), full(B, S_Q, H_Q, D, dtype="float32")),
    ],
    "k_cache": [
        (VALUE, full(PAGES, 64, 0, D), full(PAGES, 64, 3, D).as_("q")),
        (VALUE, full(PAGES, 64, D), full(PAGES, 0, 2, D)),
    ],
    "cache_seqlens": [
        (VALUE, full(B, dtype="int64"), full(dtype="int32"), full(B, 1, dtype="int32")),
        (VALUE, part((2 * B,), (slice(None, None, 2),), "int32")),
        (VALUE, full(B - 1, dtype="int32")),
    ],
}


@each_kind
@pytest.mark.parametrize("argument,value,exception", cases(PLANNED))
def test_decode_with_metadata(kind, argument, value, exception):
    arguments = dict(decode_arguments(kind), tile_scheduler_metadata=get_mla_metadata()[0])
    check_refused(flash_mla_with_kvcache, arguments, argument, value, exception, kind)


# Beside tables that fit.
TABLES = {
    "tile_scheduler_metadata": [
        (TYPE, None, 1),
        (
            VALUE,
            full(8, 7, dtype="int32"),
            full(8, 8, dtype="int64"),
            full(64, dtype="int32"),
            full(0, 8, dtype="int32"),
        ),
        (VALUE, part((8, 16), (slice(None), slice(0, 8)), "int32"), full(8, 8, dtype="int32")),  # the last: of no batch
    ],
    "num_splits": [
        (TYPE, 1),
        (VALUE, full(B, dtype="int32"), full(B + 1, dtype="int64"), full(B + 1, 1, dtype="int32")),
        (VALUE, part((2 * B + 2,), (slice(None, None, 2),), "int32")),
    ],
}


@each_kind
@pytest.mark.parametrize("argument,value,exception", cases(TABLES))
def test_decode_with_tables(kind, argument, value, exception):
    if getattr(value, "name", "") == "int32[8, 8]" and kind.device != "cpu":
        pytest.skip("a GPU does not look at the entries of a table")
    lengths = decode_arguments(kind)["cache_seqlens"]
    partitions, num_splits = get_mla_metadata(lengths, S_Q * H_Q // 2, 2)
    arguments = dict(decode_arguments(kind), tile_scheduler_metadata=partitions, num_splits=num_splits)
    flash_mla_with_kvcache(**arguments)
    check_refused(flash_mla_with_kvcache, arguments, argument, value, exception, kind)


# ---- get_mla_metadata -----------------------------------------------------------------------------------------------

METADATA = {
    "cache_seqlens": [
        (TYPE, *NO_ARRAY),
        (VALUE, full(B, dtype="int64"), full(dtype="int32"), full(B, 1, dtype="int32")),
        (VALUE, part((2 * B,), (slice(None, None, 2),), "int32")),
    ],
    "num_q_tokens_per_head_k": [(TYPE, None, "1", 1.0), (VALUE, 0, -1, 2**40)],
    "num_heads_k": [(TYPE, None, "1", 1.0), (VALUE, 0, -1, 2**40)],
}


@each_kind
@pytest.mark.parametrize("argument,value,exception", cases(METADATA))
def test_metadata(kind, argument, value, exception):
    arguments = dict(cache_seqlens=kind.int32([1] * B), num_q_tokens_per_head_k=8, num_heads_k=2)
    check_refused(flash_mla.get_mla_metadata, arguments, argument, value, exception, kind)


def test_every_argument_of_decode_is_in_the_table():
    code = flash_mla_with_kvcache.__code__
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    assert set(arguments) == {*DECODE, "indices"}


@each_kind
@pytest.mark.parametrize(
    "argument,value,exception", [("tile_scheduler_metadata", 1, TypeError), ("num_splits", 1, TypeError)]
)
def test_batch_invariant_decode(kind, argument, value, exception):
    arguments = dict(decode_arguments(kind), batch_invariant=True)
    check_refused(flash_mla_with_kvcache, arguments, argument, value, exception, kind)


@each_kind
def test_without_a_table_there_is_a_page_for_each_request(kind):
    arguments = dict(decode_arguments(kind), block_table=None, k_cache=kind.full((B - 1, 256, 2, D), 0))
    with pytest.raises(ValueError) as caught:
        flash_mla_with_kvcache(**arguments)
    check_message(caught.value, "flash_mla_with_kvcache", "k_cache")


def test_nothing_is_written_on_failure():
    kind = KINDS[0]
    out, lse = kind.full((B, S_Q, H_Q, D_V), 7), kind.full((B, H_Q, S_Q), 7, "float32")
    arguments = decode_arguments(kind)
    arguments["block_table"][1, 1] = -1
    with pytest.raises(ValueError, match="block_table"):
        flash_mla_with_kvcache(**arguments, out=out, lse=lse)
    assert numpy.all(kind.float64(out) == 7) and numpy.all(kind.float64(lse) == 7)


def test_a_call_after_a_failed_one_is_right():
    """Nothing of a refused call stays behind."""
    kind = KINDS[0]
    expected = kind.all_bits(flash_mla_with_kvcache(**decode_arguments(kind)))
    for changed in ({"attn_sink": kind.full(H_Q, 1, "float64")}, {"lse_empty": -math.inf, "softmax_scale": math.nan}):
        with pytest.raises(ValueError):
            flash_mla_with_kvcache(**dict(decode_arguments(kind), **changed))
        got = flash_mla_with_kvcache(**decode_arguments(kind))
        assert kind.all_bits(got) == expected


def test_too_few_and_too_many_arguments():
    with pytest.raises(TypeError, match="flash_mla_with_kvcache"):
        flash_mla_with_kvcache()
    with pytest.raises(TypeError, match="flash_mla_with_kvcache"):
        flash_mla_with_kvcache(**decode_arguments(KINDS[0]), block_size=64)


# ---- Kinds and devices that do not go together -----------------------------------------------------------------------


OTHER_DEVICE = """
from attention import Batch
from flash_mla import flash_mla_with_kvcache, get_mla_metadata
from kinds import Kind

batch, (meta, _) = Batch([100, 20]), get_mla_metadata()
flash_mla_with_kvcache(*batch.arrays(Kind("torch", "float16", {first!r})).values(), 512, meta)
try:
    flash_mla_with_kvcache(*batch.arrays(Kind("torch", "float16", {then!r})).values(), 512, meta)
except ValueError as error:
    assert str(error).startswith("flash_mla_with_kvcache: tile_scheduler_metadata: "), error
else:
    raise AssertionError("it was taken")
"""


@needs_cuda
@pytest.mark.parametrize("first,then", [("cpu", "cuda"), ("cuda", "cpu")])
def test_metadata_that_another_device_filled(first, then):
    """In a process of its own, which a wrong address would end."""
    output_of("-c", OTHER_DEVICE.format(first=first, then=then))


@needs_torch
@pytest.mark.parametrize("filled_by", ["numpy", "torch"])
def test_metadata_that_another_library_filled(filled_by):
    """It is refused by name, or it serves."""
    batch = Batch([100, 20])
    first, then = Kind(filled_by, "float16"), Kind("torch" if filled_by == "numpy" else "numpy", "float16")
    meta, _ = get_mla_metadata()
    flash_mla_with_kvcache(*batch.arrays(first).values(), 512, meta)
    try:
        out, _ = flash_mla_with_kvcache(*batch.arrays(then).values(), 512, meta)
    except (TypeError, ValueError) as error:
        check_message(error, "flash_mla_with_kvcache", "tile_scheduler_metadata")
    else:
        assert then.is_one(out)


# ---- merge_states ---------------------------------------------------------------------------------------------------

N = 3
MERGE = {
    "out_parts": [
        (TYPE, None, *NO_ARRAY),
        (VALUE, full(N, B, S_Q, H_Q, 8, dtype="float64"), full(N, B, S_Q, H_Q, 8, dtype="int32")),
        (VALUE, full(B, S_Q, H_Q, 8), full(N + 1, B, S_Q, H_Q, 8), full(N, B + 1, S_Q, H_Q, 8)),
        (VALUE, full(N, B, S_Q + 1, H_Q, 8), full(N, B, S_Q, H_Q + 1, 8)),
        (VALUE, part((N, B, S_Q, H_Q, 16), (*[slice(None)] * 4, slice(None, None, 2)))),
    ],
    "lse_parts": [
        (TYPE, None, *NO_ARRAY),
        (VALUE, full(N, B, H_Q, S_Q), full(N, B, H_Q, S_Q, dtype="float64")),
        (VALUE, full(B, H_Q, S_Q, dtype="float32"), full(N, B, S_Q, H_Q, dtype="float32")),
        (VALUE, full(N + 1, B, H_Q, S_Q, dtype="float32"), full(N, B + 1, H_Q, S_Q, dtype="float32")),
        (VALUE, part((N, B, H_Q, 2 * S_Q), (*[slice(None)] * 3, slice(None, None, 2)), "float32")),
    ],
    "attn_sink": [
        (TYPE, *NO_ARRAY),
        (VALUE, full(H_Q, dtype="float16"), full(H_Q, dtype="float64")),
        (VALUE, full(1, H_Q, dtype="float32"), full(H_Q + 1, dtype="float32")),
    ],
    "out": [
        (TYPE, *NO_ARRAY),
        (VALUE, full(B, S_Q, H_Q, 8, dtype="float64"), full(B, S_Q, H_Q, 8, dtype="int32")),
        (VALUE, full(N, B, S_Q, H_Q, 8), full(B, S_Q, H_Q, 7), full(B + 1, S_Q, H_Q, 8), full(B, H_Q, S_Q, 8)),
        (VALUE, broadcast(B, S_Q, H_Q, 8)),
    ],
    "lse": [
        (TYPE, *NO_ARRAY),
        (VALUE, full(B, H_Q, S_Q), full(B, H_Q, S_Q, dtype="float64")),
        (VALUE, full(N, B, H_Q, S_Q, dtype="float32"), full(B, S_Q, H_Q, dtype="float32")),
        (VALUE, broadcast(B, H_Q, S_Q, dtype="float32")),
    ],
    **OPTIONS,
}


def merge_arguments(kind):
    return {"out_parts": kind.full((N, B, S_Q, H_Q, 8), 0), "lse_parts": kind.full((N, B, H_Q, S_Q), 0, "float32")}


@each_kind
def test_merge_arguments_as_they_are_meant(kind):
    merge_states(**merge_arguments(kind))


@each_kind
@pytest.mark.parametrize("argument,value,exception", cases(MERGE))
def test_merge(kind, argument, value, exception):
    if argument == "stream" and kind.is_torch:
        pytest.skip("PyTorch's current stream is used")
    check_refused(merge_states, merge_arguments(kind), argument, value, exception, kind)


def test_every_argument_of_merge_is_in_the_table():
    code = merge_states.__code__
    assert set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]) == set(MERGE)


# ---- What is not there ----------------------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize(
    "function,operation,shapes",
    [
        ("flash_attn_varlen_func", "mha_forward", [(4, 4, 192), (8, 4, 192), (8, 4, 128), (3,), (3,)]),
        ("flash_attn_varlen_qkvpacked_func", "mha_forward", [(4, 4, 512), (3,)]),
        ("flash_attn_varlen_kvpacked_func", "mha_forward", [(4, 4, 192), (8, 4, 320), (3,), (3,)]),
    ],
)
def test_operation_that_is_not_there(kind, function, operation, shapes):
    numbers = {
        "flash_attn_varlen_func": [4, 8],
        "flash_attn_varlen_qkvpacked_func": [4, 192],
        "flash_attn_varlen_kvpacked_func": [4, 8, 192],
    }
    arrays = [kind.full(shape, 0) for shape in shapes]
    if any(row["operation"] == operation and row["available"] for row in flash_mla.capabilities(kind.device)):
        pytest.skip("it is there")
    with pytest.raises(NotImplementedError, match=f"^(flash_attn_varlen_func|{function}): q: {operation}: "):
        getattr(flash_mla, function)(*arrays, *numbers[function])


# ---- capabilities ---------------------------------------------------------------------------------------------------


def test_capabilities_of_the_cpu():
    rows = flash_mla.capabilities()
    assert rows == flash_mla.capabilities("cpu")
    columns = {
        "operation": (str,),
        "kernel": (str, type(None)),
        "types": (tuple,),
        "kv_formats": (tuple,),
        "d_qk": (tuple,),
        "d_v": (tuple,),
        "reason": (str,),
        "available": (bool,),
        "forced_only": (bool,),
        "part_of": (str,),
    }
    for row in rows:
        assert {name: isinstance(row[name], types) for name, types in columns.items()} == dict.fromkeys(row, True)
        assert row["available"] == (row["reason"] == "")
    for operation in ("dense_decode", "merge", "decode_plan"):
        assert any(row["operation"] == operation and row["available"] and not row["forced_only"] for row in rows)


def test_capabilities_of_a_gpu():
    """Rows with or without a GPU; where nothing runs, each says why."""
    for device in ("cuda", "cuda:0", "cuda:1", "cuda:63"):
        rows = flash_mla.capabilities(device)
        assert rows and all(row["available"] == (row["reason"] == "") for row in rows)
        parts = {row["kernel"]: row["part_of"] for row in rows if row["part_of"]}
        assert parts == {"cuda-sm90-64": "cuda-sm90", "cuda-sm90-16": "cuda-sm90"}
    assert not any(row["available"] for row in flash_mla.capabilities("cuda:63"))


@needs_torch
@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:0"])
def test_capabilities_of_a_torch_device(device):
    assert flash_mla.capabilities(torch.device(device)) == flash_mla.capabilities(device)


@pytest.mark.parametrize("device", ["gpu", "", "cuda:", "cuda:x", "cuda:-1", "cuda:1.5", ":0", "meta", None, 0, "CPU"])
def test_capabilities_of_no_device(device):
    with pytest.raises(ValueError) as caught:
        flash_mla.capabilities(device)
    check_message(caught.value, "capabilities", "device")


@needs_cuda
def test_capabilities_of_the_gpu_that_is_there():
    assert any(row["available"] and row["operation"] == "dense_decode" for row in flash_mla.capabilities("cuda"))

# SPDX-License-Identifier: MIT
"""Tests every argument of every function with every sensible fault: the exception, and a message that names function and
argument. The faults of a tensor are generated from src/operations.def."""

import contextlib
import functools
import inspect
import math
import re

import numpy
import pytest

import flash_mla
from attention import Batch
from caches import D_QK
from calls import NAMES, OPERATIONS, TEXT, Call, kinds_for, ranges
from flash_mla import flash_mla_with_kvcache, get_mla_metadata, get_mla_metadata_dense_fp8
from kinds import BF16_KINDS, KINDS, WORDS, Kind, ml_dtypes, needs_cuda, needs_torch, torch
from programs import output_of

TYPE, VALUE, NOT_THERE = TypeError, ValueError, NotImplementedError
NO_ARRAY = [1, 1.5, "text", [1, 2]]
# The sizes in these calls, chosen so that each has a wrong neighbour.
SIZES = dict(s_q=3, h_kv=2, pages=8, max_pages=4)


def check_message(error, function, *arguments):
    """The message begins with the function's name and contains one of these arguments as a whole word, "k_cache.shape[1]" too."""
    message = str(error)
    assert message.startswith(f"{function}: "), message
    assert any(re.search(rf"(?<!\w){re.escape(argument)}(?!\w)", message) for argument in arguments), message


@contextlib.contextmanager
def refused(exception, function, *arguments, said=None):
    """The block raises such an exception, whose message is as above and matches `said`."""
    with pytest.raises(exception, match=said) as caught:
        yield caught
    check_message(caught.value, function, *arguments)


# ---- Valid calls ----------------------------------------------------------------------------------------------------


def empty_metadata(call):
    return {"tile_scheduler_metadata": get_mla_metadata()[0]}


def tables(make, *sizes):
    names = "tile_scheduler_metadata", "num_splits"
    return lambda call: dict(zip(names, make(call.inputs["cache_seqlens"], *sizes)))


FP8_KINDS = kinds_for("dense_decode_fp8", BF16_KINDS, 576)
OF_CACHES = "cache_append", "cache_gather", "cache_convert"
# By name: the operation, its additional arguments, and the kinds of array.
FUNCTIONS = {
    **{name: (name, None, KINDS) for name in ("dense_decode", "sparse_decode", "merge", *OF_CACHES)},
    **{f"{name} of bytes": (f"{name}-656", None, KINDS) for name in ("sparse_decode", *OF_CACHES)},
    "dense_decode, planned before": ("dense_decode", empty_metadata, KINDS),
    "dense_decode, planned in tables": ("dense_decode", tables(get_mla_metadata, 3 * 4 // 2, 2), KINDS),
    **{f"dense_decode of {n} bytes": (f"dense_decode-{n}", None, kinds_for("dense_decode", KINDS, n)) for n in D_QK},
    "dense_decode of 576 bytes, planned before": (
        *("dense_decode-576", empty_metadata),
        kinds_for("dense_decode", KINDS, 576),
    ),
    "FP8 products": ("dense_decode_fp8-576", None, FP8_KINDS),
    "FP8 products, planned before": ("dense_decode_fp8-576", empty_metadata, FP8_KINDS),
    "FP8 products, planned in tables": (
        "dense_decode_fp8-576",
        tables(get_mla_metadata_dense_fp8, 3 * 16, 1),
        FP8_KINDS,
    ),
    "FP8 products of 656 bytes": ("dense_decode_fp8-656", None, kinds_for("dense_decode_fp8", BF16_KINDS, 656)),
    "sparse_decode of bytes, planned before": ("sparse_decode-656", empty_metadata, KINDS),
    "sparse_prefill": ("sparse_prefill", None, BF16_KINDS),
    "sparse_prefill with lse_indexer": ("sparse_prefill", lambda call: {"indexer_topk": 16}, BF16_KINDS[1:]),
    "sparse_prefill of pages": ("sparse_prefill-pages", None, BF16_KINDS),
    "sparse_prefill of bytes": ("sparse_prefill-656", None, BF16_KINDS),
    "mha_forward": ("mha_forward", None, kinds_for("mha_forward", KINDS)),
    "get_mla_metadata": ("decode_plan", None, KINDS),
}
for each in NAMES:  # operations without a row
    operator, _, size = each.partition("-")
    if not any(name.partition("-")[0] == operator for name, *_ in FUNCTIONS.values()):
        FUNCTIONS[operator] = (each, None, kinds_for(operator, KINDS, int(size) if size else None))
FUNCTIONS = {name: row for name, row in FUNCTIONS.items() if row[2]}  # if nothing makes bf16, lse_indexer has none


@functools.lru_cache(maxsize=None)
def call_of(operation, kind):
    return Call(operation, kind, **SIZES)


def right(name, kind):
    """Returns a call and all of its arguments: unchanged arrays, and a new plan."""
    operation, more, _ = FUNCTIONS[name]
    call = call_of(operation, kind)
    return call, {**call.inputs, **call.options, **call.given(), **(more(call) if more else {})}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_as_they_are_meant(name):
    """The calls in which the tests below change one argument are valid."""
    for kind in FUNCTIONS[name][2]:
        call, arguments = right(name, kind)
        call.function(**arguments)


# ---- Tensors --------------------------------------------------------------------------------------------------------


def wrong_types(tensor, call):
    """Returns the types that the tensor must not have."""
    wrong = {"float32", "float64", "int16", "int32", "int64", "float16", call.kind.element, "uint8"}
    may = {tensor.dtype(call.is_packed) or call.kind.element}
    may |= {"ALLOW_FLOATS", "ALLOW_FP16"} & tensor.allowed and {"float16"}
    may |= {"ALLOW_FLOATS"} & tensor.allowed and {"float32"}
    may |= {"ALLOW_I64"} & tensor.allowed and {"int32", "int64"}  # slots are converted
    return sorted(wrong - may)


def wrong_shapes(tensor, call, given):
    """Returns {name: a shape that the tensor must not have}."""
    shape = tensor.shape
    found = {"one dimension more": (1, *shape), "none": ()}
    if len(shape) > 1 and not ("OR_FLAT" in tensor.allowed and len(shape) == 4 and not call.is_packed):
        found["one dimension less"] = shape[1:]
    for i, dim in enumerate(tensor.dims):
        least, greatest = ranges(call.operation).get(dim, (0, None))
        others = [
            t for t in call.tensors if dim in t.dims and t is not tensor and (tensor.is_output or t.argument in given)
        ]
        if others or greatest == shape[i] or dim == "width" or tensor.is_output and dim == "d_v":
            found[f"{dim} + 1"] = (*shape[:i], shape[i] + 1, *shape[i + 1 :])
        if others or least:
            found[f"{dim} 0"] = (*shape[:i], 0, *shape[i + 1 :])
    return found


def spaced(kind, tensor, dtype):
    """Returns every second innermost element of a larger array."""
    return kind.full((*tensor.shape[:-1], 2 * tensor.shape[-1]), 0, dtype)[(..., slice(None, None, 2))]


def shared(kind, tensor, dtype):
    """Returns an array whose first dimension has a stride of 0."""
    one = kind.full((1, *tensor.shape[1:]), 0, dtype)
    if kind.is_torch:
        return one.expand(*tensor.shape)
    return numpy.lib.stride_tricks.as_strided(one, tensor.shape, (0, *one.strides[1:]))


def wrong_arrays(name, kind):
    """Returns (argument, what is wrong, exception, function that makes it) of every tensor."""
    call, given = right(name, kind)
    takes = inspect.signature(call.function).parameters
    for tensor in call.tensors:
        argument, dtype = tensor.argument, tensor.dtype(call.is_packed)
        if argument not in takes:  # the tables of a plan, which the call makes
            continue
        optional = argument in ("indices", "cache_seqlens")  # without them it is another operation or has no plan
        optional = call.operation in ("sparse_decode", "decode_plan") if optional else "ALLOW_NULL" in tensor.allowed
        for value in NO_ARRAY + [None] * (not optional and argument not in call.outputs):
            yield argument, f"is {value!r}", TYPE, lambda value=value: value
        for wrong in wrong_types(tensor, call):
            yield argument, wrong, VALUE, lambda tensor=tensor, wrong=wrong: kind.full(tensor.shape, 0, wrong)
        for what, shape in wrong_shapes(tensor, call, given).items():
            yield argument, what, VALUE, lambda shape=shape, dtype=dtype: kind.full(shape, 0, dtype)
        if dtype != "uint8" and tensor.shape != (1,):
            yield argument, "spaced", VALUE, lambda tensor=tensor, dtype=dtype: spaced(kind, tensor, dtype)
        if tensor.is_output and (dtype or kind is not WORDS):
            yield argument, "shared", VALUE, lambda tensor=tensor, dtype=dtype: shared(kind, tensor, dtype)


def check_refused(name, kind, changed, exception, *named):
    call, arguments = right(name, kind)
    with refused((TypeError, ValueError, NotImplementedError), call.name, *named) as caught:
        call.function(**{**arguments, **changed})
    assert caught.type is exception


@pytest.mark.parametrize(
    "name,kind,argument,exception,make",
    [
        pytest.param(name, kind, argument, exception, make, id=f"{name}-{argument}: {what}-{kind}")
        for name, (*_, kinds) in FUNCTIONS.items()
        for kind in kinds
        for argument, what, exception, make in wrong_arrays(name, kind)
    ],
)
def test_tensor(name, kind, argument, exception, make):
    value = make()
    check_refused(name, kind, {argument: value}, exception, argument)


@pytest.mark.parametrize(
    "name", [name for name in FUNCTIONS if "q" in Call(FUNCTIONS[name][0], FUNCTIONS[name][2][0]).inputs]
)
@pytest.mark.parametrize("width", [0, 63, 191, 511, 575, 577])
def test_width_of_q(name, width):
    """A width that no kernel has is q's fault, not that of keys, which have another, or of head_dim_v."""
    for kind in FUNCTIONS[name][2]:
        call, given = right(name, kind)
        tensor = next(tensor for tensor in call.tensors if tensor.argument == "q")
        right_width = tensor.shape[-1]
        q = kind.full((*tensor.shape[:-1], width), 0, tensor.dtype(call.is_packed))
        with pytest.raises(ValueError) as caught:
            call.function(**{**given, "q": q})
        message = str(caught.value)
        assert message.startswith(
            f"{call.name}: q: d_qk (dimension {len(tensor.shape) - 1}) is {width}, must be "
        ), message
        assert f"must be {right_width} as in k" in message


# The types of one byte, of which only uint8, int8 and float8_e4m3fn are bytes of a cache, or codes.
ONE_BYTE = "bool float8_e5m2 float8_e5m2fnuz float8_e4m3fnuz float8_e8m0fnu float8_e4m3 float8_e3m4 float8_e4m3b11fnuz "
ONE_BYTE += "float6_e2m3fn float6_e3m2fn float4_e2m1fn int4 uint4 int2 uint2 int1 uint1 bits8"


def filled(kind, shape, dtype):
    """Returns an array of a type that may have no conversions."""
    if kind.is_torch and hasattr(torch, dtype):
        return kind.full(shape, 0, "uint8").view(getattr(torch, dtype))
    if kind.is_torch or dtype != "bool" and not hasattr(ml_dtypes, dtype):
        pytest.skip(f"{kind.library} has no {dtype}")
    return numpy.zeros(shape, dtype if dtype == "bool" else getattr(ml_dtypes, dtype))


@pytest.mark.parametrize("dtype", ONE_BYTE.split())
@pytest.mark.parametrize("kind", KINDS, ids=repr)
def test_type_of_one_byte(kind, dtype):
    """Every function refuses the type by its name, for each argument that may be bytes."""
    tested = 0
    for name in (name for name in FUNCTIONS if kind in FUNCTIONS[name][2]):
        call, _ = right(name, kind)
        for tensor in call.tensors:
            if tensor.dtype(call.is_packed) == "uint8":
                changed = {tensor.argument: filled(kind, tensor.shape, dtype)}
                check_refused(
                    name, kind, changed, VALUE, f"{tensor.argument}: dtype is {dtype}, must be uint8, int8 or"
                )
                tested += 1
    assert tested


def test_what_may_be_bytes():
    """The package knows from its own marks which tensors may be bytes; src/operations.def has others."""
    for operation in OPERATIONS.values():
        found = re.findall(rf"^TENSOR\({operation.name}, (\w+), ([\w |]+),", TEXT, re.M)
        words = {"IS_CACHE"} | ({"ALLOW_CODES"} if operation.operator == "dense_decode_fp8" else set())
        expected = {name for name, allowed in found if words & set(allowed.split(" | "))}
        marked = {name for name, may in zip(operation.tensors, operation.may_be_bytes) if may}
        assert marked == expected, operation.operator


# ---- Arguments other than tensors -----------------------------------------------------------------------------------

OF_LSE = {
    "lse_empty": [(VALUE, "text", None, 0, math.nan, [1])],
    "log_base": [(VALUE, "text", None, 10, 1, 0, -2, math.nan, [1])],
}
STREAM = {"stream": [(TYPE, "text", 1.5)]}
FLAG = (TYPE, "text", [1])
OF_CACHE = {
    "kv_format": [(TYPE, None, 3), (VALUE, "FP8", "fp8_656", "", "FP8_584")],
    "cache_scale": [(TYPE, None, "1"), (VALUE, 0.5, 1e-50, math.nan)],
    **STREAM,
}
OF_FORMAT = [(TYPE, 3, ["FP8_656"]), (VALUE, "FP8", "fp8_656", "")]
SCALE = [
    (TYPE, "text", [1]),
    (VALUE, 0, 0.0, 1e-50, -1e-50, 7e-46, math.inf, -math.inf, math.nan, 1e300, 3.5e38),
]
LENGTH = [(TYPE, None, "4", 4.0), (VALUE, -1, 2**31)]
OF_DECODE = {
    "head_dim_v": [(TYPE, None, "512", [512], 512.0, 1.5), (VALUE, 0, -1, 577, 2**40), (NOT_THERE, 256, 1)],
    "tile_scheduler_metadata": [(TYPE, 1, "text", (1, 2))],
    "softmax_scale": SCALE,
    "causal": [FLAG],
    "batch_invariant": [FLAG],
    **OF_LSE,
    **STREAM,
}
OPTIONS = {
    **{operation.function: STREAM for operation in OPERATIONS.values()},  # unless listed below
    "flash_mla_with_kvcache": {
        **OF_DECODE,
        "is_fp8_kvcache": [FLAG, (VALUE, 2)],
        "kv_format": OF_FORMAT,
        "enable_batch_invariant": [FLAG],
    },
    "flash_mla_with_kvcache_fp8": OF_DECODE,
    "flash_mla_sparse_fwd": {
        "sm_scale": [(TYPE, None, "text", [1]), (VALUE, 0, 0.0, 1e-60, math.inf, -math.inf, math.nan, 1e300)],
        "d_v": [(TYPE, None, "512", 512.0), (VALUE, 0, -1, 577, 2**40), (NOT_THERE, 256, 1)],
        "indexer_topk": [(TYPE, None, "512", 512.0, [512]), (VALUE, -1, -512)],
        "is_fp8_kvcache": [FLAG, (VALUE, 2)],
        "kv_format": OF_FORMAT,
        **OF_LSE,
        **STREAM,
    },
    "flash_attn_varlen_func": {
        "max_seqlen_qo": LENGTH,
        "max_seqlen_kv": LENGTH,
        "dropout_p": [(TYPE, None, "0"), (VALUE, 0.1, 1, -0.5, 1e-50, math.nan)],
        "softmax_scale": SCALE,
        **{name: [FLAG, (VALUE, 2)] for name in ("causal", "deterministic", "is_varlen", "batch_invariant")},
        "lse_heads_first": [FLAG, (VALUE, 2)],
        "num_splits": [(TYPE, None, "2", 2.0), (VALUE, -1, 65, 2**40)],
        **OF_LSE,
        **STREAM,
    },
    "merge_states": {"part": [(TYPE, "0", 1.5, [0]), (VALUE, -1, 3, 2**40)], **OF_LSE, **STREAM},
    "cache_append": {
        **OF_CACHE,
        "norm_eps": [(TYPE, None, "1"), (VALUE, -1.0, 1e-50, math.inf, math.nan)],
        "rope_pairs": [(TYPE, 1, True), (VALUE, "none", "half", "")],
    },
    "cache_gather": OF_CACHE,
    "cache_convert": {
        **{name: [(TYPE, None, 3), (VALUE, "FP8", "fp8_656", "")] for name in ("src_format", "dst_format")},
        **{name: OF_CACHE["cache_scale"] for name in ("src_scale", "dst_scale")},
        **STREAM,
    },
    "get_mla_metadata": {
        "num_q_tokens_per_head_k": [(TYPE, None, "1", 1.0), (VALUE, 0, -1, 2**40)],
        "num_heads_k": [(TYPE, None, "1", 1.0), (VALUE, 0, -1, 2**40)],
    },
}


def of_options():
    for name, (*_, kinds) in FUNCTIONS.items():
        function = right(name, kinds[-1])[0].name
        for argument, rows in OPTIONS[function].items():
            for exception, value in ((exception, value) for exception, *values in rows for value in values):
                yield pytest.param(name, argument, value, exception, id=f"{name}-{argument}={value!r}")


@pytest.mark.parametrize("name,argument,value,exception", list(of_options()))
def test_option(name, argument, value, exception):
    for kind in FUNCTIONS[name][2]:
        if exception is NOT_THERE and not kind.makes or argument == "stream" and kind.is_torch:
            continue  # results of another d_v are given; PyTorch's current stream is used
        check_refused(name, kind, {argument: value}, exception, argument, *["kv_cache"] * (argument == "kv_format"))


# ---- Tensors that are right elsewhere -------------------------------------------------------------------------------

NO_KV_SCALE = "kv_scale: is given, must be None unless k_cache is bytes and a token of it has 576 bytes"
OF_NO_BATCH = {"tile_scheduler_metadata": ((8, 8), "int32")}
SPECIAL = [  # (function, {argument: value; of an array (shape, type) or values}, exception, what is named)
    ("dense_decode", {"k_cache": ((8, 64, 3, 576), None)}, VALUE, "q"),  # 4 heads over 3
    ("dense_decode", {"q": ((2, 3, 4, 512), None)}, VALUE, "k_cache"),
    ("dense_decode", {"block_table": [[0, 1, 2, 3], [8, 0, 0, 0]], "cache_seqlens": [200, 70]}, VALUE, "block_table"),
    ("dense_decode", {"block_table": None, "k_cache": ((1, 256, 2, 576), None)}, VALUE, "k_cache"),  # a page for each
    ("dense_decode", {"is_fp8_kvcache": True}, VALUE, "k_cache"),  # not a byte cache
    ("dense_decode", {"kv_scale": ((1,), "float32")}, VALUE, NO_KV_SCALE),
    *[
        (f"dense_decode of {n} bytes{planned}", changed, VALUE, named)
        for n, d_qk in D_QK.items()
        for planned in ("", ", planned before")[: 1 + (n == 576)]
        for changed, named in (
            ({"is_fp8_kvcache": False}, "is_fp8_kvcache"),
            ({"k_cache": ((8, 64, 1, 600), "uint8")}, "k_cache"),
            ({"k_cache": ((8, 64, 2, n), "uint8")}, "k_cache"),
            ({"q": ((2, 3, 4, 1088 - d_qk), None)}, "q"),
            ({"k_cache": ((8, 64, 1, 584 if n == 656 else 656), "uint8")}, "kv_scale" if n == 576 else "q"),
            ({"kv_scale": ((1,), "float32")}, NO_KV_SCALE),
        )
        if n != 576 or "kv_scale" not in changed
    ],
    *[
        (name, changed, VALUE, named)
        for name in ("FP8 products", "FP8 products, planned before", "FP8 products, planned in tables")
        for changed, named in (
            ({"q": ((2, 3, 16, 512), "uint8")}, "q"),
            ({"q": ((2, 3, 16, 576), None)}, "descale_q"),  # which has values
            ({"k_cache": ((8, 64, 1, 656), "uint8")}, "descale_k"),
            ({"k_cache": ((8, 64, 1, 656), "uint8"), "descale_k": None}, "q"),
            ({"k_cache": ((8, 64, 1, 584), "uint8")}, "k_cache"),
            ({"k_cache": ((8, 64, 2, 576), "uint8")}, "k_cache"),
        )
    ],
    *[
        ("FP8 products of 656 bytes", changed, VALUE, named)
        for changed, named in (
            ({"q": ((2, 3, 16, 576), "uint8")}, "q"),
            ({"descale_q": ((1,), "float32")}, "descale_q"),
            ({"descale_k": ((1,), "float32")}, "descale_k"),
        )
    ],
    ("FP8 products", {"block_table": None, "k_cache": ((1, 256, 1, 576), "uint8")}, VALUE, "k_cache"),
    ("FP8 products, planned in tables", {"num_splits": ((2,), "int32")}, VALUE, "num_splits"),
    *[
        (name, changed, exception, named)
        for name in ("dense_decode", "FP8 products")
        for changed, exception, named in (
            ({"block_table": [[0, 1, 2, 3], [-1, 0, 0, 0]]}, VALUE, "block_table"),
            ({"tile_scheduler_metadata": ((8, 8), "int32")}, TYPE, "tile_scheduler_metadata"),
            ({"num_splits": ((3,), "int32")}, TYPE, "tile_scheduler_metadata"),
        )
    ],
    ("dense_decode", {"tile_scheduler_metadata": 1, "batch_invariant": True}, TYPE, "tile_scheduler_metadata"),
    ("dense_decode", {"num_splits": 1, "batch_invariant": True}, TYPE, "num_splits"),
    *[
        ("dense_decode", {argument: ((2, 8, 64), "int32")}, VALUE, argument)
        for argument in ("topk_length", "extra_topk_length", "extra_k_cache", "extra_indices_in_kvcache")
    ],
    ("dense_decode, planned in tables", OF_NO_BATCH, VALUE, "tile_scheduler_metadata"),
    ("dense_decode, planned in tables", {"num_splits": 1}, TYPE, "num_splits"),
    ("dense_decode, planned in tables", {"tile_scheduler_metadata": None}, TYPE, "tile_scheduler_metadata"),
    *[
        ("dense_decode, planned in tables", {"tile_scheduler_metadata": value}, VALUE, "tile_scheduler_metadata")
        for value in (
            *[((8, 7), "int32"), ((8, 8), "int64"), ((64,), "int32"), ((0, 8), "int32")],
            lambda kind: kind.full((8, 16), 0, "int32")[:, :8],
        )
    ],
    *[
        ("dense_decode, planned in tables", {"num_splits": value}, VALUE, "num_splits")
        for value in (
            ((2,), "int32"),
            ((3,), "int64"),
            ((3, 1), "int32"),
            lambda kind: kind.full((6,), 0, "int32")[::2],
        )
    ],
    *[
        (f"sparse_decode of bytes{planned}", changed, VALUE, named)
        for planned in ("", ", planned before")
        for changed, named in (
            ({"causal": True}, "causal"),
            ({"is_fp8_kvcache": False}, "is_fp8_kvcache"),
            ({"kv_scale": ((1,), "float32")}, "kv_scale"),
            ({"k_cache": ((4, 64, 1, 584), "uint8")}, "q"),  # whose d_qk is 512
            ({"k_cache": ((4, 64, 1, 576), "uint8")}, "k_cache"),
            ({"kv_format": "FP8_576"}, "kv_format"),
            ({"kv_format": "BF16"}, "kv_format"),
            ({"extra_kv_format": "FP8_576"}, "extra_kv_format"),
            ({"extra_kv_format": "FP8_528"}, "extra_k_cache"),
            ({"extra_k_cache": ((1, 16, 1, 528), "uint8")}, "extra_kv_format"),  # whose d_qk is 512
            ({"extra_k_cache": None}, "extra_k_cache"),
            ({"extra_indices_in_kvcache": None}, "extra_indices_in_kvcache"),
            ({"extra_k_cache": None, "extra_indices_in_kvcache": None}, "extra_topk_length"),
        )
    ],
    ("sparse_prefill", {"q": ((3, 4, 512), None)}, VALUE, "kv"),
    ("sparse_prefill", {"kv": ((1, 200, 64, 2, 576), None)}, VALUE, "kv"),
    ("sparse_prefill", {"kv": ((200, 64, 2, 576), None)}, VALUE, "kv"),
    ("sparse_prefill", {"q": ((3, 3, 576), None), "attn_sink": None}, VALUE, "q"),  # over 2
    ("sparse_prefill of bytes", {"kv": ((8, 64, 1, 584), "uint8")}, VALUE, "q"),
    ("sparse_prefill of bytes", {"kv": ((8, 64, 1, 576), "uint8")}, VALUE, "kv"),
    ("sparse_prefill of bytes", {"kv_format": "FP8_576"}, VALUE, "kv_format"),
    ("sparse_prefill of bytes", {"kv_format": "FP8_528"}, VALUE, "kv"),
    ("dense_decode", {"extra_kv_format": "FP8_528"}, VALUE, "extra_kv_format"),
    ("dense_decode", {"kv_format": "FP8_528"}, VALUE, "kv_format"),
    ("sparse_decode of bytes", {"extra_kv_format": 3}, TYPE, "extra_kv_format"),
    ("mha_forward", {"k": ((9, 3, 192), None), "v": ((9, 3, 128), None)}, VALUE, "q"),  # 4 heads over 3
    ("mha_forward", {"q": ((6, 4, 80), None), "k": ((9, 2, 80), None)}, NOT_THERE, "d_qk"),
    ("mha_forward", {"v": ((9, 2, 96), None)}, NOT_THERE, "d_v"),
    (
        "mha_forward",
        {"q": ((2, 3, 4, 192), None), "k": ((2, 4, 2, 192), None), "v": ((2, 4, 2, 128), None)},
        VALUE,
        "q",
    ),
    ("mha_forward", {"lse": ((6, 4), "float32")}, VALUE, "lse"),  # whose tokens are apart
    ("mha_forward", {"seqused_q": ((4,), "int32"), "seqused_k": None}, VALUE, "cu_seqlens_qo"),  # of 3 sequences
    ("mha_forward", {"seqused_q": None, "seqused_k": ((2,), "int32")}, VALUE, "seqused_k"),
    *[
        ("get_mla_metadata", dict(dict(num_heads_q=4, topk=64, num_heads_k=1), **changed), exception, argument)
        for argument, exception, *values in (
            *[("num_heads_q", TYPE, None), ("num_heads_q", VALUE, 3, 0), ("num_heads_k", VALUE, 2)],
            *[("topk", TYPE, "2048"), ("topk", VALUE, -1, 2**31)],
        )
        for changed in ({argument: value} for value in values)
    ],
]


def given_as(kind, value):
    if isinstance(value, tuple):
        return kind.full(value[0], 0, value[1])
    if callable(value):
        return value(kind)
    return kind.int32(value) if isinstance(value, list) else value


@pytest.mark.parametrize(
    "name,changed,exception,named", SPECIAL, ids=lambda value: re.sub(" at 0x\\w+", "", str(value))
)
def test_arguments_that_do_not_go_together(name, changed, exception, named):
    for kind in FUNCTIONS[name][2]:
        if kind.device != "cpu" and (type(changed.get("block_table")) is list or changed is OF_NO_BATCH):
            continue  # a GPU does not check the entries of a table
        given = {argument: given_as(kind, value) for argument, value in changed.items()}
        check_refused(name, kind, given, exception, named)


@pytest.mark.parametrize("function", OPTIONS)
def test_every_argument_is_in_a_table(function):
    tested = set(OPTIONS[function])
    for name, (*_, kinds) in FUNCTIONS.items():
        if right(name, kinds[0])[0].name == function:
            tested |= {argument for argument, *_ in wrong_arrays(name, kinds[0])}
    functions = {name: right(name, kinds[-1])[0].name for name, (*_, kinds) in FUNCTIONS.items()}
    tested |= {argument for name, changed, *_ in SPECIAL if functions[name] == function for argument in changed}
    no_difference = {"is_fp8_kvcache", "args", "kwargs"}
    unused = no_difference if function == "get_mla_metadata" else set()
    assert tested | unused == set(inspect.signature(getattr(flash_mla, function)).parameters)


# ---- After an error -------------------------------------------------------------------------------------------------


def test_nothing_is_written_on_failure():
    call = Call("dense_decode", KINDS[0])
    call.inputs["block_table"][1, 0] = -1
    with pytest.raises(ValueError, match="block_table"):
        call(**call.outputs)
    assert all(numpy.all(call.kind.float64(array) == 7) for array in call.outputs.values())


def test_a_call_after_a_failed_one_is_right():
    """A refused call leaves nothing behind."""
    kind = KINDS[0]
    call = Call("dense_decode", kind)
    expected = kind.all_bits(call())
    for changed in ({"attn_sink": kind.full(4, 1, "float64")}, {"lse_empty": -math.inf, "softmax_scale": math.nan}):
        with pytest.raises(ValueError):
            call(**changed)
        assert kind.all_bits(call()) == expected


def test_too_few_and_too_many_arguments():
    with pytest.raises(TypeError, match="flash_mla_with_kvcache"):
        flash_mla_with_kvcache()
    with pytest.raises(TypeError, match="flash_mla_with_kvcache"):
        flash_mla_with_kvcache(**right("dense_decode", KINDS[0])[1], block_size=64)


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
    """Runs in its own process, because a wrong address would end it."""
    output_of("-c", OTHER_DEVICE.format(first=first, then=then))


@needs_torch
@pytest.mark.parametrize("filled_by", ["numpy", "torch"])
def test_metadata_that_another_library_filled(filled_by):
    """Such metadata is refused by name, or works."""
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


# ---- capabilities ---------------------------------------------------------------------------------------------------


def test_capabilities_of_the_cpu():
    rows = flash_mla.capabilities()
    assert rows == flash_mla.capabilities("cpu")
    columns = {
        str: "operation reason part_of kernel",
        tuple: "types kv_formats d_qk d_v products",
        bool: "available forced_only",
    }
    types = {name: type_ for type_, names in columns.items() for name in names.split()}
    for row in rows:
        no_kernel = {"kernel": str} if row["kernel"] is None else {}
        assert {**{name: type(value) for name, value in row.items()}, **no_kernel} == types
        assert row["available"] == (row["reason"] == "")
    for operation in {operation.name for operation in OPERATIONS.values()}:
        assert any(row["operation"] == operation and row["available"] and not row["forced_only"] for row in rows)


def test_capabilities_of_a_gpu():
    """There are rows without a GPU too; if nothing runs, each says why."""
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
    with refused(ValueError, "capabilities", "device"):
        flash_mla.capabilities(device)


@needs_cuda
def test_capabilities_of_the_gpu_that_is_there():
    assert any(row["available"] and row["operation"] == "dense_decode" for row in flash_mla.capabilities("cuda"))

# SPDX-License-Identifier: MIT
"""A small call of every public function that computes, on any kind of array, made from the tensors that src/operations.def
describes: its arguments by kind, and the requirements of each tensor."""

from __future__ import annotations

import functools
import inspect
import pathlib
import re
from typing import NamedTuple

import numpy
import pytest

import flash_mla
from caches import D_QK
from flash_mla import _operations
from flash_mla._argument_structs import FORMATS_OF
from flash_mla._types import FORMATS

TEXT = (pathlib.Path(__file__).resolve().parents[2] / "src" / "operations.def").read_text()
OPERATIONS = {o.operator: o for o in vars(_operations).values() if isinstance(o, _operations.Operation)}


def _name_of_call(operator):
    """Returns the operator with the bytes of a token, if it is over codes or its operation takes only caches of bytes."""
    first, _ = FORMATS_OF.get(OPERATIONS[operator].name, ("BF16", None))
    size = "576" if operator == "dense_decode_fp8" else first.rpartition("_")[2]
    return f"{operator}-{size}" if size.isdigit() else operator


NOT_CALLED = "decode_plan", "sparse_plan", "mha_backward"  # by no public function alone
NAMES = tuple(_name_of_call(operator) for operator in OPERATIONS if operator not in NOT_CALLED)

SIZES = dict(b=2, s_q=2, h_q=4, h_kv=1, one_head=1, d_qk=576, d_v=512, pages=4, page_size=64, max_pages=2, s_kv=200)
SIZES.update(one=1, extra_pages=1, extra_page_size=64, topk=64, extra_topk=32, n=3, tokens=3, width=40, rope=64)
SIZES.update(n_out=3, normed=512, max_positions=9, turned=64)
OF_CACHE = dict(pages=2, page_size=4, d_qk=104)
OTHER_SIZES = {"sparse_prefill": dict(s_q=3), "merge": dict(d_v=16), "cache_append": OF_CACHE, "cache_gather": OF_CACHE}
OTHER_SIZES["cache_convert"] = dict(pages=2, page_size=4, d_qk=104, extra_pages=2, extra_page_size=4)
OTHER_SIZES["dense_decode_fp8"] = dict(h_q=16)  # supported by Hopper's kernel
OTHER_SIZES["mha_forward"] = dict(b=3, tokens_q=6, tokens_k=9, splits=4, h_kv=2, d_qk=192, d_v=128)
NEW_TOKEN = ("norm_weight", "positions", "rope_table")
IF_FLAT = {"b": None, "page_size": None, "pages": "s_kv", "one_head": "h_kv", "s_q": "tokens_q", "s_k": "tokens_k"}


def format_of(bytes_of_token):
    """Returns the name of the format, which ends with the bytes."""
    return next(name for name in FORMATS if name.endswith(f"_{bytes_of_token}"))


@functools.lru_cache(maxsize=None)
def is_there(operation, device, element=None, bytes_of_token=None):
    """Returns whether a kernel for it runs on the device; `element` and `bytes_of_token`: with queries of this type over such an
    FP8 cache."""
    rows = [row for row in flash_mla.capabilities(device) if row["operation"] == OPERATIONS[operation].name]
    if operation == "dense_decode_fp8":
        rows = [row for row in rows if "fp8" in row["products"] and element in (None, "bfloat16")]
    if bytes_of_token is not None:
        of_values = re.search(rf"^TENSOR\({OPERATIONS[operation].name}, \w+, .*ALLOW_(BF16|FP16|FLOATS)", TEXT, re.M)
        rows = [row for row in rows if not of_values or element in row["types"]]
        rows = [row for row in rows if format_of(bytes_of_token) in row["kv_formats"]]
        if operation == "dense_decode" and device != "cpu":  # a GPU's kernels take bf16 queries of such caches
            rows = [row for row in rows if element == "bfloat16"]
    return any(row["available"] and not row["forced_only"] for row in rows)


def needs_kernel(operation, kind, bytes_of_token):
    """Skips the test if none runs for this kind of queries over such an FP8 cache."""
    if not is_there(operation, kind.device, kind.element, bytes_of_token):
        pytest.skip(f"no kernel on {kind.device}")


def kinds_for(operation, kinds, bytes_of_token=None):
    return [kind for kind in kinds if is_there(operation, kind.device, kind.element, bytes_of_token)]


class Tensor(NamedTuple):
    """A tensor of an operation: its argument's name, the words of its descriptor, its dimensions and its shape."""

    argument: str
    allowed: set[str]
    dims: list[str]
    shape: tuple[int, ...]
    order: str

    @property
    def is_output(self):
        return "IS_OUTPUT" in self.allowed

    def dtype(self, packed):
        """Returns the type; None: that of the queries."""
        if "IS_CACHE" in self.allowed and packed:
            return "uint8"
        return next((dtype for word, dtype in DTYPES.items() if word in self.allowed), None)


DTYPES = {"ALLOW_F32": "float32", "ALLOW_I32": "int32", "ALLOW_I64": "int64", "ALLOW_CODES": "uint8"}


def ranges(operation):
    """Returns {dimension: (least, greatest)} of an operation; None: no limit."""
    found = re.findall(rf"^RANGE\({OPERATIONS[operation].name}, (\w+), (\d+), (\w+)\)$", TEXT, re.M)
    return {dimension: (int(low), int(high) if high.isdigit() else None) for dimension, low, high in found}


def tensors(operation, layout, sizes):
    """Returns the tensors for which the public function has arguments, in their order."""
    this, found = OPERATIONS[operation], []
    names = dict(zip(this.tensors, this.names))
    of_codes = operation == "dense_decode_fp8" and layout == "576"
    for member, allowed, dims in re.findall(rf"^TENSOR\({this.name}, (\w+), ([\w |]+), (.*)\)$", TEXT, re.M):
        if member in ("partitions", "num_splits"):  # made by get_mla_metadata
            continue
        if member in ("out_last", "lse_last"):  # an argument has them only in a pair with another part
            continue
        if member in NEW_TOKEN and not layout:  # only with d_qk 512 and 576
            continue
        if member == "kv_scale" and layout != "576" or member == "q_scale" and not of_codes:
            continue
        allowed, dims = set(allowed.split(" | ")), [dim for dim in dims.split(", ") if dim != "_"]
        if "ALLOW_CODES" in allowed:
            allowed = {"ALLOW_CODES"} if of_codes else allowed - {"ALLOW_CODES"}
            allowed -= {"ALLOW_FP16"} if operation == "dense_decode_fp8" else set()
        if "OR_FLAT" in allowed and not layout:  # form_of
            dims = [dim for dim in (IF_FLAT.get(dim, dim) for dim in dims) if dim is not None]
        order = "F" if (operation, member) == ("mha_forward", "lse") else "C"  # Python's lse is the transpose
        dims = dims[::-1] if order == "F" else dims
        shape = [sizes["one_head" if layout and dim == "h_kv" else dim] for dim in dims]
        if layout.isdigit():
            shape[-1] = {"IS_CACHE" in allowed: int(layout), dims == ["tokens", "width"]: 512}.get(True, shape[-1])
        found.append(Tensor(names[member], allowed, dims, tuple(shape), order))
    return found


class Call:
    """`inputs`: the arrays that are read, by name; `outputs`: arrays that may be passed for results; `options`: the rest."""

    def __init__(self, name, kind, **sizes):
        """`name`: PyTorch's name of the operation, followed by the bytes of a token (-656) if its cache is FP8, and by -pages if
        flat keys are possible but keys are in pages. Values are always the same, in new arrays."""
        self.operation, _, layout = name.partition("-")
        self.is_packed = packed = layout.isdigit()
        of_bytes = (kind.element, layout) if packed and "cache" not in self.operation else ()
        if not is_there(self.operation, kind.device, *of_bytes):
            pytest.skip(f"{name} has no kernel on {kind.device}")
        only = {dim: least for dim, (least, greatest) in ranges(self.operation).items() if least == greatest}
        of_format = dict(d_qk=D_QK[int(layout)]) if packed and int(layout) in D_QK else {}
        sizes = {**SIZES, **OTHER_SIZES.get(self.operation, {}), **of_format, **only, **sizes}
        self.kind, self.tensors = kind, tensors(self.operation, layout, sizes)
        self.name = OPERATIONS[self.operation].function
        self.function = getattr(flash_mla, self.name)
        random, keys = numpy.random.default_rng(0), sizes["pages"] * sizes["page_size"]
        keys = sizes["s_kv"] if self.operation == "sparse_prefill" and not layout else keys
        integers = {
            "block_table": numpy.arange(sizes["pages"]),
            "cache_seqlens": [100, 7],
            "indices": random.integers(0, keys, 1000),
            "topk_length": [64, 5, 0],
            "extra_indices_in_kvcache": random.integers(0, sizes["extra_page_size"], 1000),
            "extra_topk_length": [3, 32],
            "cu_seqlens_qo": [0, 2, 2, 6],
            "cu_seqlens_kv": [0, 5, 9, 9],
            "seqused_q": [2, 1, 3],
            "seqused_k": [4, 9, -1],
        }
        self.inputs, self.outputs = {}, {}
        for tensor in self.tensors:
            dtype = tensor.dtype(packed)
            if tensor.is_output:
                self.outputs[tensor.argument] = kind.full(tensor.shape, 7, dtype, tensor.order)
            elif tensor.argument in ("kv_scale", "descale_k", "descale_q"):
                self.inputs[tensor.argument] = kind.fp32([0.3])
            elif "ALLOW_CODES" in tensor.allowed:
                codes = numpy.resize([48, 170, 25, 0, 60, 181, 40], tensor.shape)
                self.inputs[tensor.argument] = kind.array(codes, dtype)
            elif dtype is None or dtype == "float32":
                self.inputs[tensor.argument] = kind.array(random.normal(0, 0.25, tensor.shape), dtype)
            else:
                values = [60] if dtype == "uint8" else integers.get(tensor.argument, [0, 5, 2])
                self.inputs[tensor.argument] = kind.array(numpy.resize(values, tensor.shape), dtype)
        plain = {"bfloat16": "BF16", "float16": "FP16"}.get(kind.element)
        values = dict(head_dim_v=512, sm_scale=0.04, is_fp8_kvcache=bool(packed), tile_scheduler_metadata=None)
        values.update(kv_format=format_of(layout) if packed else plain, num_q_tokens_per_head_k=8, num_heads_k=2)
        values.update(block_table=None, cache_seqlens=None, max_seqlen_qo=4, max_seqlen_kv=5)
        values.update(src_format=values["kv_format"], dst_format=values["kv_format"])
        values.update(norm_eps=1e-6 if packed else 0.0, rope_pairs="halves" if packed else None)
        if "cache" not in self.operation:  # otherwise the bytes of a token imply it
            del values["kv_format"]
        arguments = [name for name in inspect.signature(self.function).parameters if name not in self.inputs]
        self.options = {name: values[name] for name in arguments if name in values}

    def __call__(self, **changed):
        """Returns the results as a tuple."""
        given = {**self.inputs, **self.options, **changed}
        got = self.function(**given)
        got = given.get("kv_cache", given.get("dst_cache")) if self.name in ("cache_append", "cache_convert") else got
        return got if isinstance(got, tuple) else (got,)

    def given(self):
        """Returns the outputs that must be passed."""
        return dict(self.outputs) if self.name in ("cache_append", "cache_convert") or not self.kind.makes else {}

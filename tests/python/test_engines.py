# SPDX-License-Identifier: MIT
"""Tests flash_mla.compat: the calls of engines (engine_calls.py), on tensors as engines pass them, against plain attention."""

import importlib
import inspect
import math
import pathlib
import re
import shutil
import subprocess
import textwrap

import numpy
import pytest

import flash_mla
import flash_mla.cuda
from attention import GARBAGE, SPARSE_OUT, check_close, check_decode, check_fp8, conventions, dense, over_lists
from attention import that_name, with_sink
from caches import Cache, of_codes, random_codes
from engine_calls import BACK_ENDS, CALLS, SIGNATURES, Metadata, OneRow, T
from flash_mla import FlashMLASchedMeta
from flash_mla.compat import sglang, vllm
from kinds import KINDS, Kind, kind, needs_cuda, torch
from test_sparse_prefill import OUT as PREFILL_OUT
from test_sparse_prefill import ROWS as PREFILL_ROWS

SCALES = {"descale_q": 0.00173, "descale_k": 0.00101}  # give the codes values of about 0.1

# ---- Signatures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine,name", [(engine, name) for engine in SIGNATURES for name in SIGNATURES[engine]])
def test_signature_is_the_engine_s(engine, name):
    """Compares names, order and defaults; arguments that this package adds are keyword-only."""
    module = {"flash_mla": flash_mla, "vllm": vllm}.get(engine, sglang)
    assert name in module.__all__
    theirs = SIGNATURES[engine][name]
    names = [part.split("=")[0] for part in theirs.split(", ") if part]
    ours = inspect.signature(getattr(module, name)).parameters.values()
    kept = [p.replace(annotation=p.empty) for p in ours if p.kind != p.KEYWORD_ONLY or p.name in names]
    assert str(inspect.Signature(kept)) == f"({theirs})"


def test_one_import_brings_all():
    """The patch of examples/engines for vLLM appends this import."""
    names = {}
    exec("from flash_mla.compat.vllm import *", names)
    assert set(SIGNATURES["vllm"]) | {"FlashMLASchedMeta"} == set(names) - {"__builtins__"}


@pytest.mark.parametrize("uses_a_gpu", [False, True])
def test_what_vllm_asks_first(monkeypatch, uses_a_gpu):
    """The driver is not asked before a GPU is used."""
    monkeypatch.setattr(vllm, "_uses_a_gpu", lambda: uses_a_gpu)
    rows = flash_mla.capabilities("cuda") if uses_a_gpu else []
    if not uses_a_gpu:
        monkeypatch.setattr(flash_mla.flash_mla_interface, "capabilities", None)
    for supported, operation in (
        (vllm._is_flashmla_available, "sparse_decode"),
        (vllm.is_flashmla_dense_supported, "dense_decode"),
        (vllm.is_flashmla_sparse_supported, "sparse_decode"),
    ):
        there, reason = supported()
        if any(row["available"] and row["operation"] == operation and not row["forced_only"] for row in rows):
            assert (there, reason) == (True, None)
        elif uses_a_gpu:
            assert there is False and isinstance(reason, str) and reason
        else:
            assert (there, reason) == (True, None)


# ---- Tensors --------------------------------------------------------------------------------------------------------


def sizes_of(words, sizes):
    """Evaluates sizes written as numbers, letters and their products."""
    return tuple(eval(word, {}, sizes) for word in words.split())


class Tensors:
    """The tensors of one recorded call, and its expected results."""

    def __init__(self, call, kind, seed=0):
        self.call, self.kind, self.random = call, kind, numpy.random.default_rng(seed)
        self.sizes = call.sizes
        self.records = {name.lstrip("="): value for name, value in call.arguments}
        self.caches, self.values, self.made = {}, {}, {}

    def shape(self, name):
        return sizes_of(self.records[name].dims, self.sizes)

    def has(self, name):
        return isinstance(self.records.get(name), T)

    def content(self, name, record):
        """Returns the contents of a tensor, in NumPy."""
        random, shape = self.random, sizes_of(record.dims, self.sizes)
        if name.endswith("k_cache") and shape[-1] not in (512, 576):
            pages, page_size, _, of_token = shape
            layout = record.format or of_token
            self.caches[name] = Cache(random, layout, pages, page_size, 576 if layout == 656 else 512)
            return self.caches[name].memory
        if name in ("q", "k_cache", "kv"):
            if record.dtype == "float8_e4m3fn":
                return random_codes(random, shape, SCALES["descale_q" if name == "q" else "descale_k"])
            return numpy.clip(random.normal(0, 1 if name == "q" else 0.1, shape), -1, 1).astype(numpy.float32)
        if "indices" in name:
            slots = self.slots("extra_k_cache" if name.startswith("extra") else "k_cache")
            return random.integers(-slots // 8, slots + slots // 8, shape).astype(numpy.int32)
        if name.endswith("topk_length"):
            most = self.sizes["extra" if name.startswith("extra") else "topk"]
            return numpy.resize(numpy.array([most, 0, most // 3, most + 7], numpy.int32), shape)
        if name == "cache_seqlens":
            most = self.sizes["table"] * 64
            return numpy.resize(numpy.array([min(300, most), 0, 64, most], numpy.int32), shape)
        if name == "block_table":
            table = numpy.resize(numpy.array(GARBAGE, numpy.int32), shape)
            if "indices" not in self.records:
                for row, length in zip(table, self.values["cache_seqlens"]):
                    used = -(-length // 64)
                    row[:used] = random.integers(0, self.sizes["pages"], used)
            return table
        if name in SCALES:
            return numpy.full(shape, SCALES[name], numpy.float32)
        if name == "attn_sink":
            return random.normal(0, 2, shape).astype(numpy.float32)
        assert name == "out", name
        return numpy.full(shape, math.nan, numpy.float32)

    def slots(self, name):
        return math.prod(self.shape(name)[:2]) if self.has(name) else self.sizes["kv"]

    def tensor(self, name, record):
        """Makes a tensor with the recorded type and strides."""
        kind = self.kind
        self.values[name] = values = self.content(name, record)
        dtype = {"bfloat16": None, "float8_e4m3fn": "uint8"}.get(record.dtype, record.dtype)
        if record.strides is None:
            array = kind.array(values, dtype)
        else:
            strides = sizes_of(record.strides, self.sizes)
            room = kind.array(numpy.full(values.shape[0] * strides[0], 0, values.dtype), dtype)
            if kind.is_torch:
                array = torch.as_strided(room, values.shape, strides)
                array.copy_(kind.array(values, dtype))
            else:
                strides = [stride * room.itemsize for stride in strides]
                array = numpy.lib.stride_tricks.as_strided(room, values.shape, strides)
                array[...] = kind.array(values, dtype)
        if record.dtype == "float8_e4m3fn" and kind.is_torch:
            array = array.view(torch.float8_e4m3fn)
        return array

    def value(self, name, value):
        if isinstance(value, T):
            if name not in self.made:
                self.made[name] = self.tensor(name, value)
            return self.made[name]
        return eval(value, {}, self.sizes) if isinstance(value, str) and name != "kv_format" else value

    def metadata(self, module, record):
        """Makes the metadata that the engine has made before, by name."""
        if isinstance(record, OneRow):
            meta, b = FlashMLASchedMeta(), self.sizes["b"]
            meta.tile_scheduler_metadata = self.kind.int32([[0, 0, b - 1, self.sizes["table"], 0, 0, 0, 0]])
            meta.num_splits = self.kind.int32([0] * (b + 1))
            return {"tile_scheduler_metadata": meta}
        positional, named = self.split(record.arguments)
        results = getattr(module, record.function)(*positional, **named)
        if record.part is not None:
            return {"tile_scheduler_metadata": results[record.part]}
        return dict(zip(("tile_scheduler_metadata", "num_splits"), results))

    def split(self, arguments):
        given = [(name, self.value(name.lstrip("="), value)) for name, value in arguments]
        positional = [value for name, value in given if name[0] != "="]
        return positional, {name[1:]: value for name, value in given if name[0] == "="}

    def arguments(self, module):
        order = sorted(self.call.arguments, key=lambda argument: argument[0] != "=cache_seqlens")
        for name, value in order:  # a table depends on the lengths
            if isinstance(value, T):
                self.value(name.lstrip("="), value)
        plain = [(name, value) for name, value in self.call.arguments if not isinstance(value, (Metadata, OneRow))]
        positional, named = self.split(plain)
        for value in self.records.values():
            if isinstance(value, (Metadata, OneRow)):
                named.update(self.metadata(module, value))
        return positional, named

    # ---- Expected results ----------------------------------------------------------------------------------------

    def numbers(self, name):
        """Returns the values of an argument."""
        if self.records[name].dtype == "float8_e4m3fn":
            return of_codes(self.values[name], SCALES["descale_q" if name == "q" else "descale_k"])
        return self.kind.float64(self.made[name])

    def listed(self, of, *at):
        """Returns the keys that a token's list names."""
        extra = of.startswith("extra")
        lists, lengths = ("extra_indices_in_kvcache", "extra_topk_length") if extra else ("indices", "topk_length")
        count = self.values[lengths][at[0]] if self.has(lengths) else None
        entries = that_name(self.values[lists][at], count, self.slots(of))
        if of in self.caches:
            return self.caches[of].keys(self.kind, entries)
        return self.numbers(of)[entries, 0]

    def keys_of_request(self, r):
        cache, pages = self.numbers("k_cache"), self.values["block_table"][r]
        length = self.values["cache_seqlens"][r]
        return cache[pages[: -(-length // 64)]].reshape(-1, 1, 576)[:length]

    def expected(self):
        """Returns (out, lse [b, h, s]), in flash_mla's conventions."""
        q, scale, sink = self.numbers("q"), self.records["softmax_scale"], self.values.get("attn_sink")
        if self.has("indices"):
            caches = [of for of in ("k_cache", "extra_k_cache") if self.has(of)]
            out, _, lse = over_lists(q, lambda *at: numpy.concatenate([self.listed(of, *at) for of in caches]), scale)
        else:
            requests = [dense(q[r], self.keys_of_request(r), 512, scale, self.records["causal"]) for r in range(len(q))]
            out, lse = map(numpy.stack, zip(*requests))
        return with_sink(out, lse, sink), conventions(lse, math.inf, math.e)

    def expected_of_prefill(self, log_base):
        out, most, lse = over_lists(
            self.numbers("q")[None], lambda _, token: self.listed("kv", token, 0), self.records["sm_scale"]
        )
        out = with_sink(out, lse, self.values.get("attn_sink"))
        return out[0], most[0].T / math.log(log_base), conventions(lse[0].T, math.inf, log_base)


def can_run(call, kind):
    """NumPy alone has no bf16; its float16 stands in for it in decode. Results of FP8 products and of sparse prefill have bf16."""
    of_values = call.function == "flash_mla_with_kvcache" and dict(call.arguments)["=q"].dtype == "bfloat16"
    if kind.is_torch or kind.element == "bfloat16":
        return kind.element == "bfloat16"
    return of_values


REPLAYS = [
    pytest.param(call, kind, id=f"{call.name}-{kind}") for call in CALLS for kind in KINDS if can_run(call, kind)
]

# ---- Calls ----------------------------------------------------------------------------------------------------------


def test_the_record_is_whole():
    """Every call has a name, a file and a line, and both engines occur."""
    assert len({call.name for call in CALLS}) == len(CALLS)
    assert {call.engine for call in CALLS} == {"vllm", "sglang"}
    assert all(call.file.startswith(call.engine) and call.line > 0 for call in CALLS)
    assert {call.function for call in CALLS} == {
        *("flash_mla_with_kvcache", "flash_mla_with_kvcache_fp8", "flash_mla_sparse_fwd")
    }


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_the_wrapper_takes_the_arguments(call):
    function = getattr(importlib.import_module(f"flash_mla.compat.{call.engine}"), call.function)
    positional = [name for name, _ in call.arguments if name[0] != "="]
    named = {name[1:]: None for name, _ in call.arguments if name[0] == "="}
    if "num_splits" in inspect.signature(function).parameters:
        named.setdefault("num_splits", None)
    assert list(inspect.signature(function).bind(*positional, **named).arguments)[: len(positional)] == positional


@pytest.mark.parametrize("call,kind", REPLAYS)
def test_replay(call, kind):
    """Makes the call twice, as two layers that share the metadata: the same bits."""
    module = importlib.import_module(f"flash_mla.compat.{call.engine}")
    function, tensors = getattr(module, call.function), Tensors(call, kind)
    positional, named = tensors.arguments(module)
    for name, record in tensors.records.items():
        if isinstance(record, T) and record.strides is not None:
            unit = 1 if kind.is_torch else tensors.made[name].itemsize
            strides = tensors.made[name].stride() if kind.is_torch else tensors.made[name].strides
            assert tuple(strides) == tuple(unit * stride for stride in sizes_of(record.strides, call.sizes))
    results = function(*positional, **named)
    if call.function == "flash_mla_sparse_fwd":
        expected = tensors.expected_of_prefill(2 if call.engine == "sglang" else math.e)
        for name, got, wanted in zip(("out", "max_logits", "lse"), results, expected):
            check_close(name, kind.float64(got), wanted, PREFILL_OUT if name == "out" else PREFILL_ROWS)
    elif tensors.records["q"].dtype == "float8_e4m3fn":
        check_fp8(kind, results, tensors.expected())
    else:
        check_decode(kind, results, tensors.expected(), *(() if not tensors.has("indices") else (SPARSE_OUT,)))
    if named.get("out") is not None:
        assert results[0] is named["out"]
    bits = kind.all_bits(results)
    assert kind.all_bits(function(*positional, **named)) == bits


# ---- What engines do beside their calls -----------------------------------------------------------------------------


def recorded(name, kind, **sizes):
    """Returns the tensors of a call, with other `sizes` if given, and its positional and named arguments."""
    call = next(call for call in CALLS if call.name == name)
    if not can_run(call, kind):
        pytest.skip("is of bf16")
    tensors = Tensors(call._replace(sizes={**call.sizes, **sizes}), kind)
    return tensors, *tensors.arguments(importlib.import_module(f"flash_mla.compat.{call.engine}"))


def test_tables_of_vllm_ask_for_the_batch_invariant_mode(kind):
    """Such a call does not fill the metadata, and its results are those of the mode."""
    _, _, named = recorded("vllm_dense_batch_invariant", kind)
    results = vllm.flash_mla_with_kvcache(**named)
    assert not named["tile_scheduler_metadata"].have_initialized
    named.update(tile_scheduler_metadata=None, batch_invariant=True)
    assert kind.all_bits(results) == kind.all_bits(flash_mla.flash_mla_with_kvcache(**named))
    named.pop("batch_invariant")
    again = flash_mla.flash_mla_with_kvcache(**named, enable_batch_invariant=True)
    assert kind.all_bits(results) == kind.all_bits(again)


def tables_of_dsa(kind, b, topk):
    return sglang.get_mla_metadata(
        cache_seqlens=kind.int32([1] * b),
        num_q_tokens_per_head_k=64,
        **dict(num_heads_k=1, num_heads_q=64, is_fp8_kvcache=True, topk=topk),
    )


def put_tables_of_dsa(kind, tables, b, topk):
    """Writes tables into those of a larger batch, and returns the arguments of a call of b requests."""
    places = tables[0], tables[1][: b + 1]
    for place, table in zip(places, tables_of_dsa(kind, b, topk)):
        place[...] = table
    return dict(tile_scheduler_metadata=places[0], num_splits=places[1])


def test_the_plan_of_a_small_batch_in_the_memory_of_a_large_one(kind):
    """SGLang captures its sparse decode with slices of the largest batch's tables, and copies a step's tables into them."""
    calls = {b: recorded("sglang_dsa", kind, b=b)[2] for b in (1, 3)}
    largest = tables_of_dsa(kind, 64, 128)
    rows = {tuple(tables_of_dsa(kind, b, 128)[0].shape) for b in (1, 2, 3, 4, 8, 16, 33, 64)}
    assert rows == {tuple(largest[0].shape)}
    for b, named in calls.items():
        expected = kind.all_bits(sglang.flash_mla_with_kvcache(**named))
        named.update(put_tables_of_dsa(kind, largest, b, 128))
        assert kind.all_bits(sglang.flash_mla_with_kvcache(**named)) == expected


@needs_cuda
@pytest.mark.parametrize("b", [1, 4, 8, 33, 64])
def test_captured_sparse_decode_of_sglang(b):
    """The same in a graph: captured with the tables of the largest batch, replayed with the step's tables in them."""
    kind, topk = Kind("torch", "bfloat16", "cuda"), 2048
    tensors, _, named = recorded("sglang_dsa", kind, b=b, topk=topk, pages=40)
    largest = tables_of_dsa(kind, 64, topk)
    named.update(tile_scheduler_metadata=largest[0], num_splits=largest[1][: b + 1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = sglang.flash_mla_with_kvcache(**named)
    put_tables_of_dsa(kind, largest, b, topk)
    graph.replay()
    check_decode(kind, results, tensors.expected(), SPARSE_OUT)


def test_tables_of_sglang_are_not_read(kind):
    """On Blackwell SGLang fills the metadata of DeepSeek-V4.1 by its own kernel, for FlashMLA's tiles."""
    tensors, _, named = recorded("sglang_v41_c1", kind)
    meta = named["tile_scheduler_metadata"]
    meta.tile_scheduler_metadata, meta.num_splits = kind.int32([[7] * 8]), kind.int32([0] * 4)
    check_decode(kind, sglang.flash_mla_with_kvcache(**named), tensors.expected(), SPARSE_OUT)
    assert meta.have_initialized and len(meta.num_splits) == 4


WRONG = [
    (dict(descale_k=1.0), "descale_q, descale_k"),
    (dict(kv_format="V33"), "kv_format: is 'V33', must be None, 'V32', 'V32_NO_ROPE', 'V4', 'V41'"),
    (dict(kv_format="V4"), "kv_format: is 'V4' with 584 bytes per token, but k_cache has 656"),
    (dict(indices=None), "kv_format: must be None where indices is None"),
]


@pytest.mark.parametrize("changed,words", WRONG, ids=lambda value: str(value)[:20])
def test_what_sglang_s_wrapper_refuses(changed, words):
    _, _, named = recorded("sglang_dsa", KINDS[0])
    with pytest.raises(ValueError, match=words):
        sglang.flash_mla_with_kvcache(**{**named, **changed})


@pytest.mark.parametrize("name", ["flash_mla_mega_prefill", "flash_mla_mega_decode"])
def test_what_is_not_there_says_so(name):
    with pytest.raises(NotImplementedError, match=f"^{name}: .* not supported.*--dsv4-attn-backend flashmla$"):
        getattr(sglang, name)(*[None] * 6)


FORMATS_OF_SGLANG = [
    (528, None, None, True, True, {"kv_format": "FP8_528_F32"}),
    (528, None, None, False, True, {"kv_format": "FP8_528_SPLIT"}),
    (528, None, None, False, False, {"kv_format": "FP8_528"}),
    (528, 288, None, False, True, {"kv_format": "FP8_528_SPLIT", "extra_kv_format": "FP4_288_SPLIT"}),
    (528, 288, None, False, False, {"kv_format": "FP8_528", "extra_kv_format": "FP4_288"}),
    (528, 528, "V41", False, False, {"kv_format": "FP8_528", "extra_kv_format": "FP8_528"}),
    (528, None, "V32_NO_ROPE", False, True, {"kv_format": "FP8_528_F32"}),
    (656, None, "V32", True, True, {}),
    (584, 584, None, False, True, {}),
]


@pytest.mark.parametrize("of_token,of_extra,kv_format,has_tables,use_legacy,formats", FORMATS_OF_SGLANG)
def test_formats_of_sglang(of_token, of_extra, kv_format, has_tables, use_legacy, formats):
    """Tests the format that SGLang names, or implies by the kind of metadata."""
    cache = numpy.zeros((1, 64, 1, of_token), numpy.uint8)
    extra = None if of_extra is None else numpy.zeros((1, 64, 1, of_extra), numpy.uint8)
    assert sglang._formats_of(cache, extra, kv_format, has_tables, use_legacy) == formats
    names = set(formats.values())
    assert names <= set(flash_mla._types.FORMATS)


def test_vllm_has_no_use_for_lse(kind):
    _, positional, named = recorded("vllm_prefill_out", kind)
    out, max_logits, lse = vllm.flash_mla_sparse_fwd(*positional, **named, return_softmax_lse=False)
    assert out is named["out"] and max_logits is None and lse is None
    in_eighth_place = [*positional, 512, None, named["topk_length"], named["out"]]
    assert vllm.flash_mla_sparse_fwd(*in_eighth_place)[0] is named["out"]


# ---- flash_mla.cuda --------------------------------------------------------------------------------------------------


def test_the_functions_of_the_extension_module(kind):
    tensors, _, named = recorded("vllm_dense", kind)
    first = [named[name] for name in ("q", "k_cache", "head_dim_v", "cache_seqlens", "block_table", "softmax_scale")]
    out, lse, rows, splits = flash_mla.cuda.dense_decode_fwd(*first, True, None, None)
    check_decode(kind, (out, lse), tensors.expected())
    again = flash_mla.cuda.dense_decode_fwd(*first, True, rows, splits)
    assert kind.all_bits(again[:2]) == kind.all_bits((out, lse)) and again[2] is rows and again[3] is splits

    tensors, _, named = recorded("sglang_v4_c4", kind)
    names = "q k_cache indices topk_length attn_sink None None extra_k_cache extra_indices_in_kvcache extra_topk_length"
    first = [named.get(name) for name in (*names.split(), "head_dim_v", "softmax_scale")]
    results = flash_mla.cuda.sparse_decode_fwd(*first)
    check_decode(kind, results[:2], tensors.expected(), SPARSE_OUT)
    assert tuple(results[2].shape)[1:] == (8,) and len(results[3]) == tensors.sizes["b"] + 1
    invariant = flash_mla.cuda.sparse_decode_fwd(*first, None, True)
    check_decode(kind, invariant[:2], tensors.expected(), SPARSE_OUT)
    assert invariant[2:] == (None, None)
    if kind.element != "bfloat16":
        return
    tensors, _, named = recorded("sglang_v4_prefill", kind)
    names = "q", "kv", "indices", "sm_scale", "d_v", "attn_sink", "topk_length"
    results = flash_mla.cuda.sparse_prefill_fwd(*[named[name] for name in names])
    check_close("out", kind.float64(results[0]), tensors.expected_of_prefill(math.e)[0], PREFILL_OUT)


# ---- The patches ----------------------------------------------------------------------------------------------------

ROOT = pathlib.Path(__file__).resolve().parents[2]
PATCHES = sorted((ROOT / "examples" / "engines").glob("*.patch"))
WRAPPERS = {
    "vllm": "vllm/v1/attention/ops/flashmla.py",
    "sglang": "sglang/kernels/ops/attention/flash_mla_interface.py",
}
# Where an engine pads heads, with the text that is there now.
PADDING = {
    "vllm": {
        "vllm/models/deepseek_v4/nvidia/flashmla.py": "return next(n for n in (8, 16, 32, 64, 128) if num_heads <= n)",
        "vllm/models/deepseek_v41/nvidia/flashmla.py": "if max(num_heads, smallest) <= n)",
        "vllm/v1/attention/backends/mla/flashmla_sparse.py": "self.prefill_padding = 1 ",
    },
    "sglang": {
        "sglang/srt/layers/attention/dsa_backend.py": "required_padding = 1 ",
        "sglang/srt/models/deepseek_v4.py": "return self.n_local_heads",
    },
}
each_patch = pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)


def files_of(text):
    """Returns {file: its hunks} of a patch; text before the first file is ignored."""
    parts = re.split(r"^--- a/(.*)\n\+\+\+ b/(.*)\n", text, flags=re.M)[1:]
    assert parts[::3] == parts[1::3]
    return {file: hunks_of(hunks) for file, hunks in zip(parts[::3], parts[2::3])}


def hunks_of(text):
    """Returns (first line of the old text, old lines, new lines) of each hunk."""
    hunks, lines = [], text.splitlines()
    while lines:
        begin, old, new = re.fullmatch(r"@@ -(\d+(?:,\d+)?) \+\d+(?:,(\d+))? @@", lines.pop(0)).group(1, 1, 2)
        first, _, count = begin.partition(",")
        wanted, body = (int(count or 1), int(new or 1)), []
        while lines and not lines[0].startswith("@@"):
            body.append(lines.pop(0))
        assert {line[:1] for line in body} <= {" ", "-", "+"}, old
        sides = [[line[1:] for line in body if line[0] != other] for other in "+-"]
        assert tuple(map(len, sides)) == wanted
        hunks.append((int(first), *sides))
    return hunks


def test_there_is_a_patch_for_each_engine():
    assert {patch.name.split("-")[0] for patch in PATCHES} == set(WRAPPERS) == {call.engine for call in CALLS}
    versions = {call.wheel.replace(" ", "-") for call in CALLS}
    assert {patch.stem for patch in PATCHES} == versions


@each_patch
def test_patch(patch, tmp_path):
    """The patch appends one import to the engine's wrapper file, changes what pads heads, and applies with `patch -p1`."""
    engine, files = patch.name.split("-")[0], files_of(patch.read_text())
    assert set(files) == {WRAPPERS[engine], *PADDING[engine]}
    hunks = files[WRAPPERS[engine]]
    added = [line for _, old, new in hunks for line in new if line not in old]
    assert added[-1].startswith(f"from flash_mla.compat.{engine} import *")
    assert all(not line or line[0] == "#" for line in added[:-1])
    for line in [line for _, old, new in hunks for line in old if line not in new]:
        with pytest.raises(ImportError):  # this package's error, which is why the import is removed
            exec(line)
    if shutil.which("patch") is None:
        pytest.skip("there is no patch")
    expected = {}
    for name, hunks in files.items():
        old, new = [], []
        for first, before, after in hunks:
            between = [f"# {number}" for number in range(len(old) + 1, first)]
            old, new = old + between + before, new + between + after
        file = tmp_path / name
        file.parent.mkdir(parents=True)
        file.write_text("".join(line + "\n" for line in old))
        expected[file] = new
    done = subprocess.run(["patch", "-p1"], cwd=tmp_path, stdin=patch.open(), capture_output=True, text=True)
    assert done.returncode == 0 and "fuzz" not in done.stdout and "offset" not in done.stdout, done
    for file, new in expected.items():
        assert file.read_text().splitlines() == new


@each_patch
def test_patch_stops_padding(patch):
    engine = patch.name.split("-")[0]
    for name, hunks in files_of(patch.read_text()).items():
        if name in PADDING[engine]:
            old, new = (" ".join(line for hunk in hunks for line in hunk[side]) for side in (1, 2))
            assert "64" in old and PADDING[engine][name] in new and PADDING[engine][name] not in old


@pytest.mark.parametrize("model", ["deepseek_v4", "deepseek_v41"])
def test_heads_that_vllm_makes(model):
    """Its fused insert has kernels for these numbers of heads; its mega attention, a subclass, for two of them."""
    (hunk,) = files_of(PATCHES[-1].read_text())[f"vllm/models/{model}/nvidia/flashmla.py"]
    names = {}
    body = textwrap.indent(textwrap.dedent("\n".join(line for line in hunk[2] if line.strip() != ")")), "    ")
    exec(f"class DeepseekV4FlashMLAAttention: pass\ndef heads(cls, num_heads):\n{body}\n", names)
    plain, heads = names["DeepseekV4FlashMLAAttention"], names["heads"]
    for number in range(1, 129):
        least = min(n for n in (8, 16, 32, 64, 128) if n >= number)
        assert heads(plain, number) == least
        if model == "deepseek_v41":
            assert heads(type("Mega", (plain,), {}), number) == max(least, 64)


# ---- Options ----------------------------------------------------------------------------------------------------------


def test_options_are_documented():
    """The document has a row for each back end that was read in the wheels, and no other."""
    text = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
    section = text.partition("## Options that select it\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    engines = {"vllm": "vLLM", "sglang": "SGLang"}
    expected = [
        f"| {engines[row.wheel.split()[0]]} | {row.model} | {row.cache} | `{row.default}` | "
        + (f"`{row.option}` |" if row.option else "none |")
        for row in BACK_ENDS
    ]
    assert rows == [
        row.replace("`flashmla_sparse, in decode fa3`", "`flashmla_sparse`, in decode `fa3`") for row in expected
    ]

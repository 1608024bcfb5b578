# SPDX-License-Identifier: MIT
"""What PyTorch asks of an operator: its compiler, its tracers, its modes, threads; on a GPU streams and graphs."""

import concurrent.futures
import functools
import importlib
import math
import subprocess
import sys
import threading

import pytest

from attention import Batch, check_decode
from flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata, merge_states
from kinds import TORCH_KINDS, Kind, each_torch_kind, needs_cuda, torch
from test_sparse import Sparse
from test_sparse import check as check_sparse
from test_sparse_prefill import Prompt
from test_sparse_prefill import check as check_prefill

if torch is None:
    pytest.skip("PyTorch is not installed", allow_module_level=True)
importlib.import_module("flash_mla._torch")  # which registers the operators, and is else imported for the first tensor

DEVICES = sorted({kind.device for kind in TORCH_KINDS})
each_device = pytest.mark.parametrize("device", DEVICES)
BATCH = Batch([100, 0, 65, 7], s_q=2, h_q=4)
# A batch of either decode with its lengths, and how its results are compared: over FP8 caches Hopper has a kernel of its own.
LENGTHS = [300, 20, 65, 140]
SPARSE = dict(b=4, h_q=16, topk=300)
BATCHES = {
    "dense": (functools.partial(Batch, LENGTHS, s_q=2, h_q=16), check_decode),
    "plain": (functools.partial(Sparse, **SPARSE, lengths=[LENGTHS]), check_sparse),
    "FP8_656": (functools.partial(Sparse, layout=656, **SPARSE, lengths=[LENGTHS]), check_sparse),
    "FP8_584-twice": (
        functools.partial(Sparse, layout=584, **SPARSE, extra=(70, 30, 2), lengths=[LENGTHS, [70, 3, 0, -1]]),
        check_sparse,
    ),
}
each_batch = pytest.mark.parametrize("make,check", BATCHES.values(), ids=BATCHES)


def decode(arrays, meta=None, **options):
    return flash_mla_with_kvcache(*arrays.values(), 512, meta, **options)


def call(arguments, meta=None, **options):
    """Of either decode."""
    return flash_mla_with_kvcache(**dict(arguments, tile_scheduler_metadata=meta), **options)


def tensors(arguments):
    return {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}


def bits(kind, arrays):
    return [kind.bits(array) for array in arrays]


# ---- The operators --------------------------------------------------------------------------------------------------


def plan_of(arrays):
    return torch.ops.flash_mla.decode_plan(arrays["cache_seqlens"], BATCH.s_q, BATCH.h_q, 1)


def samples(device):
    """(operator, arguments) of each, in several ways."""
    kind = Kind("torch", "bfloat16", device)
    arrays = BATCH.arrays(kind)
    q, cache, table, lengths = arrays.values()
    small = Batch([5, 64], h_q=2, table=False).arrays(Kind("torch", "float16", device))
    sink = kind.fp32(BATCH.sink)
    scale = 576**-0.5
    large = kind.full((4, 2, 4, 600), 0), kind.full((4, 5, 2), 0, "float32")
    slots, wide_format = kind.array([5, -1, 0], "int64"), 1  # FMLA_KV_BF16

    def results():
        return kind.full((4, 2, 4, 512), 0), kind.full((4, 4, 2), 0, "float32")

    def small_results():
        return torch.zeros(2, 1, 2, 512, dtype=torch.float16, device=device), torch.zeros(2, 2, 1, device=device)

    parts = kind.full((3, 2, 2, 4, 16), 1), kind.full((3, 2, 4, 2), 0.5, "float32")
    wide = kind.full((2, 1, 1, 3, 8), 1, "float32"), kind.full((2, 1, 3, 1), -math.inf, "float32")
    return {
        "flash_mla::decode_plan": [
            (lengths, 2, 4, 1),
            (lengths[:1], 1, 128, 1),
            (lengths[1:3], 4, 16, 4),
        ],
        "flash_mla::dense_decode": [
            (q, cache, table, lengths, None, None, None, 512, scale, False, 0, 0, False),
            (q, cache, table, lengths, *plan_of(arrays), None, 512, scale, True, 0, 0, False),
            (q, cache, table, lengths, None, None, sink, 512, 0.1, True, 1, 2, True),
            (q[1:, :, :2], cache, table[1:], lengths[1:], None, None, sink[:2], 512, scale, False, 0, 0, False),
            (*small.values(), None, None, None, 512, scale, False, 0, 0, False),
        ],
        "flash_mla::dense_decode_out": [
            (q, cache, table, lengths, None, None, None, *results(), scale, False, 0, 0, False),
            (q, cache, table, lengths, *plan_of(arrays), sink, *results(), scale, True, 1, 2, False),
            (
                q,
                cache,
                table,
                lengths,
                None,
                None,
                None,
                large[0][..., 8:520],
                large[1][:, 1:],
                scale,
                False,
                0,
                0,
                True,
            ),
            (*small.values(), None, None, None, *small_results(), scale, False, 0, 0, False),
        ],
        **sparse_samples(kind),
        **prefill_samples(kind),
        "flash_mla::merge": [
            (*parts, None, 0, 0),
            (*parts, sink, 1, 2),
            (*wide, None, 0, 0),
            (parts[0][:, 1:], parts[1][:, 1:], None, 0, 2),
        ],
        "flash_mla::merge_out": [
            (*parts, None, kind.full((2, 2, 4, 16), 0), kind.full((2, 4, 2), 0, "float32"), 0, 0),
            (*parts, sink, kind.full((2, 2, 4, 16), 0, "float32"), kind.full((2, 4, 2), 0, "float32"), 1, 2),
            (*wide, None, kind.full((1, 1, 3, 8), 0), kind.full((1, 3, 1), 0, "float32"), 1, 0),
        ],
        "flash_mla::cache_append": [
            (kind.full((3, 512), 1), kind.full((3, 64), 2), kind.full((2, 4, 1, 656), 0, "uint8"), slots, 3, 0.0),
            (kind.full((3, 448), 1), kind.full((3, 64), 2), kind.full((2, 4, 1, 584), 0, "uint8"), slots, 4, 0.0),
            (kind.full((3, 576), 1, "float32"), None, kind.full((2, 4, 1, 576), 0, "uint8"), slots, 5, 0.5),
            (kind.full((3, 40), 1), None, kind.full((2, 4, 1, 40), 0), slots, wide_format, 0.0),
        ],
        "flash_mla::cache_gather": [
            (kind.full((2, 4, 1, 656), 60, "uint8"), slots, 3, 0.0),
            (kind.full((2, 4, 1, 584), 60, "uint8"), slots[1:], 4, 0.0),
            (kind.full((2, 4, 1, 40), 0), slots, wide_format, 0.0),
        ],
        "flash_mla::cache_gather_out": [
            (kind.full((2, 4, 1, 576), 60, "uint8"), slots, kind.full((3, 576), 0, "float32"), 5, 0.5),
            (kind.full((2, 4, 1, 40), 0), slots, kind.full((3, 80), 0)[:, :40], wide_format, 0.0),
        ],
    }


def sparse_samples(kind):
    """Of sparse attention: a plain cache, an FP8 one, and a second one beside it."""
    plain, packed, both = (
        Sparse(),
        Sparse(layout=656),
        Sparse(layout=584, extra=(70, 30, 2), lengths=[[0, 90], [70, 3]]),
    )
    inputs = []
    for batch in (plain, packed, both):
        given = batch.arguments(kind)
        names = "q", "k_cache", "indices", "topk_length", None, "extra_k_cache", "extra_indices_in_kvcache"
        inputs.append([given.get(name) for name in (*names, "extra_topk_length")])
    lengths = inputs[2][3], inputs[2][7]
    sink = kind.fp32(both.sink)
    tables = torch.ops.flash_mla.sparse_plan(inputs[2][0], *lengths, 2, 90, 70, 2, 4)
    options = 0.04, 0, 0, False

    def results():
        return kind.full((2, 2, 4, 512), 0), kind.full((2, 4, 2), 0, "float32")

    return {
        "flash_mla::sparse_plan": [
            (inputs[0][0], None, None, 2, 90, 0, 2, 4),
            (inputs[2][0], *lengths, 2, 90, 70, 2, 4),
        ],
        "flash_mla::sparse_decode": [
            (*inputs[0], None, None, 512, 0, *options),
            (*inputs[1], None, None, 512, 3, 0.04, 1, 2, True),
            (*inputs[2][:4], sink, *inputs[2][5:], *tables, 512, 4, *options),
        ],
        "flash_mla::sparse_decode_out": [
            (*inputs[0], None, None, *results(), 0, *options),
            (*inputs[2], *tables, *results(), 4, *options),
        ],
    }


def prefill_samples(kind):
    """Of sparse prefill: keys in one piece, of two heads, and pages of bytes."""
    plain, packed = Prompt(h_kv=2, lengths=[0, 90, -3, 1000, 17]), Prompt(layout=656, pages=(5, 64))
    names = "q", "kv", "indices", "topk_length"
    inputs = [[prompt.arguments(kind).get(name) for name in names] for prompt in (plain, packed)]
    sink = kind.fp32(plain.sink)

    def results():
        return kind.full((5, 4, 512), 0), kind.full((5, 4), 0, "float32"), kind.full((5, 4), 0, "float32")

    return {
        "flash_mla::sparse_prefill": [
            (*inputs[0], None, 512, 0, 0.5, 0, 0),
            (*inputs[0], sink, 512, 0, 0.5, 1, 2),
            (*inputs[1], None, 512, 3, 0.5, 0, 0),
        ],
        "flash_mla::sparse_prefill_out": [
            (*inputs[0], sink, *results(), 0, 0.5, 0, 0),
            (*inputs[1], None, *results(), 3, 0.5, 1, 2),
        ],
    }


def operator(name):
    namespace, name = name.split("::")
    return getattr(getattr(torch.ops, namespace), name).default


def test_every_operator_has_samples():
    assert {n for n in torch._C._dispatch_get_all_op_names() if n.startswith("flash_mla::")} == set(samples("cpu"))


@each_device
@pytest.mark.parametrize(
    "name,index", [(name, index) for name, several in samples("cpu").items() for index in range(len(several))]
)
def test_opcheck(name, index, device):
    """The schema says what is written, results do not alias inputs, the fake results are as the real ones, …"""
    torch.library.opcheck(operator(name), samples(device)[name][index])


@each_device
@pytest.mark.parametrize("b", [0, 1, 5])
@pytest.mark.parametrize("s_q,h_q,h_kv", [(1, 128, 1), (2, 16, 4)])
def test_fake_plan_has_the_size_of_the_real_one(b, s_q, h_q, h_kv, device):
    lengths = torch.arange(b, dtype=torch.int32, device=device)
    real = torch.ops.flash_mla.decode_plan(lengths, s_q, h_q, h_kv)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = torch.ops.flash_mla.decode_plan(mode.from_tensor(lengths), s_q, h_q, h_kv)
    for mine, its in zip(fake, real):
        assert (mine.shape, mine.dtype, mine.device) == (its.shape, its.dtype, its.device)


# ---- Tracing --------------------------------------------------------------------------------------------------------


@each_device
@pytest.mark.parametrize("planned", [False, True], ids=["plan=inside", "plan=meta"])
def test_fake_tensors(planned, device):
    kind = Kind("torch", "bfloat16", device)
    real = decode(BATCH.arrays(kind))
    parts = kind.full((3, 4, 2, 4, 512), 0), kind.full((3, 4, 4, 2), 0, "float32")
    with torch._subclasses.FakeTensorMode() as mode:
        arrays = {name: mode.from_tensor(array) for name, array in BATCH.arrays(kind).items()}
        fake = decode(arrays, get_mla_metadata()[0] if planned else None)
        merged = merge_states(*(mode.from_tensor(part) for part in parts))
        out, lse = mode.from_tensor(real[0]), mode.from_tensor(real[1])
        given = decode(arrays, out=out, lse=lse)
    for results in (fake, merged, given):
        for array, like in zip(results, real):
            assert isinstance(array, torch._subclasses.FakeTensor)
            assert (array.shape, array.dtype, array.stride(), array.device) == (
                like.shape,
                like.dtype,
                like.stride(),
                like.device,
            )
    assert given[0] is out and given[1] is lse


def test_fake_tensors_of_sparse_prefill():
    """Of a GPU that may not be there."""
    with torch._subclasses.FakeTensorMode():
        q = torch.empty(70, 64, 576, dtype=torch.bfloat16, device="cuda")
        kv = torch.empty(1000, 1, 576, dtype=torch.bfloat16, device="cuda")
        indices = torch.empty(70, 1, 2048, dtype=torch.int32, device="cuda")
        for results in (flash_mla_sparse_fwd(q, kv, indices, 0.5), flash_mla_sparse_fwd(q, kv, indices, 0.5, 512)):
            assert [tuple(array.shape) for array in results] == [(70, 64, 512), (70, 64), (70, 64)]
            assert [array.dtype for array in results] == [torch.bfloat16, torch.float32, torch.float32]
            assert {array.device.type for array in results} == {"cuda"}
        assert tuple(flash_mla_sparse_fwd(q, kv, indices, 0.5, indexer_topk=512)[3].shape) == (70, 64)


@pytest.mark.parametrize(
    "planned",
    [
        False,
        pytest.param(
            True,
            marks=pytest.mark.xfail(
                not torch.cuda.is_available(),
                reason="the fake plan asks the GPU that is not there",
                raises=NotImplementedError,
                strict=True,
            ),
        ),
    ],
    ids=["plan=inside", "plan=meta"],
)
def test_fake_tensors_of_a_gpu_that_may_not_be_there(planned):
    """As a model is traced, or exported, on a machine without one."""
    with torch._subclasses.FakeTensorMode():
        arrays = {
            "q": torch.empty(4, 2, 4, 576, dtype=torch.bfloat16, device="cuda"),
            "k_cache": torch.empty(8, 64, 1, 576, dtype=torch.bfloat16, device="cuda"),
            "block_table": torch.empty(4, 2, dtype=torch.int32, device="cuda"),
            "cache_seqlens": torch.empty(4, dtype=torch.int32, device="cuda"),
        }
        out, lse = decode(arrays, get_mla_metadata()[0] if planned else None)
    assert tuple(out.shape) == (4, 2, 4, 512) and tuple(lse.shape) == (4, 4, 2) and out.device.type == "cuda"


@each_device
@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
def test_make_fx(tracing_mode, device):
    from torch.fx.experimental.proxy_tensor import make_fx

    kind = Kind("torch", "bfloat16", device)

    def step(q, k_cache, block_table, cache_seqlens):
        meta, _ = get_mla_metadata()
        out, lse = flash_mla_with_kvcache(q * 2, k_cache, block_table, cache_seqlens, 512, meta, causal=True)
        return merge_states(out[None], lse[None])

    arrays = BATCH.arrays(kind)
    graph = make_fx(step, tracing_mode=tracing_mode)(*arrays.values())
    called = [str(node.target) for node in graph.graph.nodes if "flash_mla" in str(node.target)]
    assert called == ["flash_mla.decode_plan.default", "flash_mla.dense_decode.default", "flash_mla.merge.default"]
    assert bits(kind, graph(*arrays.values())) == bits(kind, step(*arrays.values()))
    arrays["cache_seqlens"] = kind.int32([64, 0, 65, 3])  # nothing of the values is in the graph
    assert bits(kind, graph(*arrays.values())) == bits(kind, step(*arrays.values()))


@each_device
@pytest.mark.parametrize("strict", [False, True])
def test_export(strict, device):
    class Layer(torch.nn.Module):
        def forward(self, q, k_cache, block_table, cache_seqlens):
            return flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, 512, None, causal=True)

    kind = Kind("torch", "bfloat16", device)
    arrays = tuple(BATCH.arrays(kind).values())
    program = torch.export.export(Layer(), arrays, strict=strict)
    assert bits(kind, program.module()(*arrays)) == bits(kind, Layer()(*arrays))


# ---- torch.compile --------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
class TestCompile:
    @staticmethod
    def step(q, k_cache, block_table, cache_seqlens, meta=None):
        out, lse = flash_mla_with_kvcache(q * 2, k_cache, block_table, cache_seqlens, 512, meta, None, 0.1, True)
        return out + 1, lse

    @each_device
    @pytest.mark.parametrize("meta", ["none", "empty", "filled"])
    def test_decode(self, meta, device):
        kind = Kind("torch", "bfloat16", device)
        arrays = BATCH.arrays(kind).values()
        plain = get_mla_metadata()[0] if meta != "none" else None
        expected = self.step(*arrays, plain)
        compiled = torch.compile(self.step, backend="aot_eager", fullgraph=True)
        mine = get_mla_metadata()[0] if meta != "none" else None
        if meta == "filled":
            self.step(*arrays, mine)
            plan = mine.tile_scheduler_metadata
        for _ in range(3):
            assert bits(kind, compiled(*arrays, mine)) == bits(kind, expected)
        if mine is not None:
            assert mine.have_initialized and mine.config == plain.config
            assert kind.bits(mine.tile_scheduler_metadata) == kind.bits(plain.tile_scheduler_metadata)
        if meta == "filled":
            assert mine.tile_scheduler_metadata is plan

    @each_device
    @pytest.mark.parametrize("passed_on", ["both", "first"])
    @pytest.mark.parametrize("made", ["inside", "outside"])
    def test_tables(self, made, passed_on, device):
        """Those of the older generation; the first alone is planned for in the call, which gives the same bits."""
        kind = Kind("torch", "bfloat16", device)
        arrays = BATCH.arrays(kind)

        def step(q, k_cache, block_table, cache_seqlens, tables):
            tables = get_mla_metadata(cache_seqlens, 2 * 4, 1) if tables is None else tables
            splits = tables[1] if passed_on == "both" else None
            return flash_mla_with_kvcache(q * 1, k_cache, block_table, cache_seqlens, 512, tables[0], splits)

        tables = get_mla_metadata(arrays["cache_seqlens"], 2 * 4, 1) if made == "outside" else None
        expected = step(*arrays.values(), tables)
        for dynamic in (None, True):
            compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=dynamic)
            assert bits(kind, compiled(*arrays.values(), tables)) == bits(kind, expected)

    @each_device
    def test_table_that_is_none(self, device):
        """The compiler leaves the call to Python, which says it."""

        def step(q, k_cache, block_table, cache_seqlens):
            return flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, 512, block_table)

        arrays = BATCH.arrays(Kind("torch", "bfloat16", device)).values()
        with pytest.raises(
            Exception, match="tile_scheduler_metadata: is Tensor, must be what get_mla_metadata returned"
        ):
            torch.compile(step, backend="aot_eager")(*arrays)

    @each_device
    def test_one_metadata_for_several_layers(self, device):
        def model(q, k_cache, block_table, cache_seqlens):
            meta, _ = get_mla_metadata()
            for _ in range(3):
                out, _ = flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, 512, meta, causal=True)
                q = torch.cat([out, q[..., 512:]], dim=-1)
            return q

        kind = Kind("torch", "bfloat16", device)
        arrays = BATCH.arrays(kind).values()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert kind.bits(compiled(*arrays)) == kind.bits(model(*arrays))

    @each_device
    @pytest.mark.parametrize("planned", [False, True], ids=["plan=inside", "plan=meta"])
    def test_dynamic_batch(self, planned, device):
        """One graph for every number of requests, once the package has met PyTorch."""
        kind = Kind("torch", "bfloat16", device)
        graphs = []

        def counting(graph, inputs):
            graphs.append(graph)
            return graph.forward

        compiled = torch.compile(self.step, backend=counting, fullgraph=True)
        for lengths in ([100, 0, 65], [3, 64], [10] * 7):
            batch = Batch(lengths, s_q=2)
            arrays = batch.arrays(kind)
            for name in ("q", "block_table", "cache_seqlens"):
                torch._dynamo.mark_dynamic(arrays[name], 0)
            torch._dynamo.maybe_mark_dynamic(arrays["block_table"], 1)
            torch._dynamo.maybe_mark_dynamic(arrays["k_cache"], 0)
            metas = [get_mla_metadata()[0] if planned else None for _ in range(2)]
            expected, got = self.step(*arrays.values(), metas[1]), compiled(*arrays.values(), metas[0])
            assert bits(kind, got) == bits(kind, expected)
        assert len(graphs) == 1

    @each_device
    def test_dynamic_batch_through_autograd_s_tracer(self, device):
        """aot_eager asks the fake operators about sizes that are symbols."""
        kind = Kind("torch", "bfloat16", device)
        compiled = torch.compile(self.step, backend="aot_eager", fullgraph=True, dynamic=True)
        for lengths in ([100, 0, 65], [3, 64]):
            arrays = Batch(lengths, s_q=2).arrays(kind).values()
            metas = get_mla_metadata()[0], get_mla_metadata()[0]
            assert bits(kind, compiled(*arrays, metas[0])) == bits(kind, self.step(*arrays, metas[1]))

    @each_device
    def test_given_results(self, device):
        """What is written into is written into, a part of a larger tensor too."""

        def step(q, k_cache, block_table, cache_seqlens, large, lse):
            out = large[:, :, :4, 8:520]
            flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, 512, None, out=out, lse=lse)
            return out * 2

        kind = Kind("torch", "bfloat16", device)
        arrays = BATCH.arrays(kind).values()
        results = [(kind.full((4, 2, 6, 528), 7), kind.full((4, 4, 2), 7, "float32")) for _ in range(2)]
        got = torch.compile(step, backend="aot_eager", fullgraph=True)(*arrays, *results[0])
        assert kind.bits(got) == kind.bits(step(*arrays, *results[1]))
        assert bits(kind, results[0]) == bits(kind, results[1])

    @each_device
    @pytest.mark.parametrize("planned", [False, True])
    def test_sparse(self, planned, device):
        kind = Kind("torch", "bfloat16", device)
        batch = Sparse(layout=656, extra=(70, 30, 2))

        def step(q, cache, indices, extra, extra_indices, meta):
            out, lse = flash_mla_with_kvcache(
                q * 1, cache, None, None, 512, meta, is_fp8_kvcache=True, indices=indices, extra_k_cache=extra,
                extra_indices_in_kvcache=extra_indices,
            )  # fmt: skip
            return out + 0, lse + 0

        given = batch.arguments(kind)
        names = "q", "k_cache", "indices", "extra_k_cache", "extra_indices_in_kvcache"
        compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
        meta = get_mla_metadata()[0] if planned else None
        check_sparse(kind, compiled(*(given[name] for name in names), meta), batch.expected(kind))

    @each_device
    @pytest.mark.parametrize("indexer_topk", [0, 64])
    @pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
    def test_sparse_prefill(self, backend, indexer_topk, device):
        kind = Kind("torch", "bfloat16", device)
        prompt = Prompt(h_kv=2, lengths=[0, 90, -3, 64, 17])

        def step(q, kv, indices, topk_length, sink):
            options = dict(attn_sink=sink, topk_length=topk_length, indexer_topk=indexer_topk)
            return flash_mla_sparse_fwd(q, kv, indices, 0.5, **options)

        given = prompt.arguments(kind)
        arrays = *(given[name] for name in ("q", "kv", "indices", "topk_length")), kind.fp32(prompt.sink)
        expected = step(*arrays)
        got = torch.compile(step, backend=backend, fullgraph=True)(*arrays)
        assert bits(kind, got) == bits(kind, expected) and len(got) == (4 if indexer_topk else 3)
        part = [prompt.expected(kind, first=indexer_topk)[2]] if indexer_topk else []
        check_prefill(kind, tuple(got), (*prompt.expected(kind, sink=prompt.sink), *part))

    @each_device
    @pytest.mark.parametrize("indexer_topk", [0, 64])
    def test_sparse_prefill_of_any_length(self, indexer_topk, device):
        """One graph for every number of tokens and of keys."""
        kind = Kind("torch", "bfloat16", device)
        graphs = []

        def counting(graph, inputs):
            graphs.append(graph)
            return graph.forward

        def step(q, kv, indices):
            return flash_mla_sparse_fwd(q * 1, kv, indices, 0.5, indexer_topk=indexer_topk)

        compiled = torch.compile(step, backend=counting, fullgraph=True)
        traced = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
        for s_q, s_kv in ((5, 300), (7, 90), (2, 1000)):
            given = Prompt(s_q=s_q, s_kv=s_kv).arguments(kind)
            arrays = [given[name] for name in ("q", "kv", "indices")]
            expected = bits(kind, step(*arrays))
            assert bits(kind, traced(*arrays)) == expected
            for array in arrays:
                torch._dynamo.mark_dynamic(array, 0)
            assert bits(kind, compiled(*arrays)) == expected
        assert len(graphs) == 1

    @each_device
    def test_sparse_prefill_into_given_results(self, device):
        def step(q, kv, indices, large, lse):
            out = large[:, :4, 8:520]
            _, most, _ = flash_mla_sparse_fwd(q, kv, indices, 0.5, out=out, lse=lse)
            return out * 2, most + 1

        kind = Kind("torch", "bfloat16", device)
        given = Prompt().arguments(kind)
        arrays = [given[name] for name in ("q", "kv", "indices")]
        results = [(kind.full((5, 6, 528), 7), kind.full((5, 4), 7, "float32")) for _ in range(2)]
        got = torch.compile(step, backend="aot_eager", fullgraph=True)(*arrays, *results[0])
        assert bits(kind, got) == bits(kind, step(*arrays, *results[1]))
        assert bits(kind, results[0]) == bits(kind, results[1])

    @each_device
    def test_merge(self, device):
        def step(out_parts, lse_parts, sink):
            out, lse = merge_states(out_parts, lse_parts, sink, lse_empty=-math.inf, log_base=2)
            return out * 2, lse + 1

        kind = Kind("torch", "bfloat16", device)
        parts = torch.randn(3, 2, 2, 4, 16, device=device), torch.randn(3, 2, 4, 2, device=device)
        sink = torch.zeros(4, device=device)
        compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
        assert bits(kind, compiled(*parts, sink)) == bits(kind, step(*parts, sink))

    @each_device
    def test_inductor(self, device):
        """Nothing here but our operators, so that no C++ compiler works for half a minute."""

        def step(q, k_cache, block_table, cache_seqlens, out, meta):
            first = flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, 512, meta, causal=True, out=out)
            second = flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, 512, meta, causal=True)
            return *first, *merge_states(second[0][None], second[1][None])

        kind = Kind("torch", "bfloat16", device)
        arrays = BATCH.arrays(kind).values()
        results = [kind.full((4, 2, 4, 512), 7) for _ in range(2)]
        expected = step(*arrays, results[0], get_mla_metadata()[0])
        got = torch.compile(step, backend="inductor", fullgraph=True)(*arrays, results[1], get_mla_metadata()[0])
        assert bits(kind, got) == bits(kind, expected) and kind.bits(results[1]) == kind.bits(results[0])

    @each_device
    def test_wrong_argument(self, device):
        """An eager call's words where tracing finds it; PyTorch's compiler wraps what is raised within it."""
        kind = Kind("torch", "bfloat16", device)
        arrays = dict(BATCH.arrays(kind), cache_seqlens=kind.array(BATCH.lengths, "int64"))
        compiled = torch.compile(self.step, backend="aot_eager", fullgraph=True)
        with pytest.raises(Exception, match="cache_seqlens: dtype is int64, must be int32"):
            compiled(*arrays.values(), None)


FIRST_USE = """
import torch
from flash_mla import flash_mla_with_kvcache

class Layer(torch.nn.Module):
    def forward(self, q, k_cache, block_table, cache_seqlens):
        return flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, 512, None)

q, k_cache = torch.zeros(1, 1, 4, 576, dtype=torch.float16), torch.zeros(2, 64, 1, 576, dtype=torch.float16)
block_table, cache_seqlens = torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
arrays = q, k_cache, block_table, cache_seqlens
if {how!r} == "compile":
    out, lse = torch.compile(Layer(), backend="aot_eager", fullgraph=True)(*arrays)
elif {how!r} == "operator":
    out, lse = torch.ops.flash_mla.dense_decode(*arrays, None, None, None, 512, 1.0, False, 0, 0, False)
else:
    program = torch.export.export(Layer(), arrays)
    out, lse = program.module()(*arrays)
assert out.shape == (1, 1, 4, 512)
"""


@pytest.mark.parametrize(
    "how",
    [
        "compile",
        "export",
        "operator",
    ],
)
def test_compiled_before_anything_else_was_called(how):
    """In a process of its own: there is no eager call before."""
    done = subprocess.run([sys.executable, "-c", FIRST_USE.format(how=how)], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr


# ---- Modes ----------------------------------------------------------------------------------------------------------


@each_torch_kind
def test_inference_mode(kind):
    expected = bits(kind, decode(BATCH.arrays(kind), causal=True))
    meta, _ = get_mla_metadata()
    with torch.inference_mode():
        arrays = BATCH.arrays(kind)
        for _ in range(2):
            out, lse = decode(arrays, meta, causal=True)
            assert out.is_inference() and bits(kind, (out, lse)) == expected
        parts = merge_states(out[None], lse[None])
    assert bits(kind, parts)[1] == expected[1]
    assert bits(kind, decode(BATCH.arrays(kind), meta, causal=True)) == expected  # outside, with a plan from inside


@each_torch_kind
@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda q: torch.nn.Parameter(q, requires_grad=False), id="Parameter"),
        pytest.param(lambda q: q.as_subclass(type("Sub", (torch.Tensor,), {})), id="subclass"),
    ],
)
def test_subclasses_of_tensor(kind, wrap):
    arrays = BATCH.arrays(kind)
    expected = bits(kind, decode(arrays))
    arrays["q"] = wrap(arrays["q"])
    got = decode(arrays)
    assert bits(kind, [array.as_subclass(torch.Tensor) for array in got]) == expected


@each_torch_kind
@pytest.mark.parametrize("argument", ["q", "k_cache"])
def test_subclass_sees_the_operators(argument, kind):
    """One that does something of its own with every function that is called with it."""

    class Watching(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return super().__torch_function__(function, types, args, kwargs or {})

    arrays, seen = BATCH.arrays(kind), []
    expected = bits(kind, decode(arrays))
    arrays[argument] = arrays[argument].as_subclass(Watching)
    got = decode(arrays)
    assert "flash_mla.dense_decode.default" in seen
    assert bits(kind, [array.as_subclass(torch.Tensor) for array in got]) == expected


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated
@each_torch_kind
def test_torch_jit_trace(kind):
    """The traced function calls the operators again, and returns no constants."""

    def step(q, k_cache, block_table, cache_seqlens):
        return flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, 512, None, causal=True)

    arrays = BATCH.arrays(kind)
    traced = torch.jit.trace(step, tuple(arrays.values()), check_trace=False)
    arrays["cache_seqlens"] = kind.int32([64, 0, 65, 3])
    assert bits(kind, traced(*arrays.values())) == bits(kind, step(*arrays.values()))


@each_torch_kind
def test_modes_of_dispatch_see_the_operators(kind):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    arrays, seen = BATCH.arrays(kind), []
    with Watch():
        out, lse = decode(arrays, get_mla_metadata()[0])
        decode(arrays, out=out, lse=lse)
        merge_states(out[None], lse[None])
    ours = [name for name in seen if "flash_mla" in name]
    assert ours == [
        f"flash_mla.{name}.default" for name in ("decode_plan", "dense_decode", "dense_decode_out", "merge")
    ]


@each_torch_kind
def test_functionalize(kind):
    """Results that are made are seen. functorch functionalizes no operator of others that writes into what it is given."""
    arrays = BATCH.arrays(kind)

    def step(q):
        return decode(dict(arrays, q=q))

    def step_into(q):
        out = torch.zeros(4, 2, 4, 512, dtype=q.dtype, device=q.device)
        return decode(dict(arrays, q=q), out=out)

    assert bits(kind, torch.func.functionalize(step)(arrays["q"])) == bits(kind, decode(arrays))
    with pytest.raises(RuntimeError, match="functionalizing"):
        torch.func.functionalize(step_into)(arrays["q"])


@pytest.mark.parametrize("planned", [False, True], ids=["plan=inside", "plan=meta"])
def test_meta_device(planned):
    """Shapes and types without memory, as every operator of PyTorch gives them."""
    arrays = {name: array.to("meta") for name, array in BATCH.arrays(Kind("torch", "bfloat16")).items()}
    out, lse = decode(arrays, get_mla_metadata()[0] if planned else None)
    assert out.is_meta and tuple(out.shape) == (4, 2, 4, 512) and out.dtype == torch.bfloat16
    assert lse.is_meta and tuple(lse.shape) == (4, 4, 2) and lse.dtype == torch.float32
    merged = merge_states(out[None], lse[None])
    assert merged[0].is_meta and merged[0].shape == out.shape


@pytest.mark.filterwarnings("ignore")  # quantized tensors are deprecated
@pytest.mark.parametrize("argument", ["q", "k_cache", "block_table", "cache_seqlens"])
@pytest.mark.parametrize("dtype", ["qint8", "bits8"])
def test_dtype_that_dlpack_has_no_name_for(dtype, argument):
    """The message is the library's own, not that of PyTorch's DLPack."""
    arrays = BATCH.arrays(Kind("torch", "bfloat16"))
    if dtype == "bits8":
        arrays[argument] = arrays[argument].to(torch.uint8).view(torch.bits8)
    else:
        arrays[argument] = torch.quantize_per_tensor(arrays[argument].float(), 1.0, 0, torch.qint8)
    with pytest.raises(ValueError, match=f"^flash_mla_with_kvcache: {argument}: dtype"):
        decode(arrays)


# ---- Threads --------------------------------------------------------------------------------------------------------


@pytest.fixture
def restless():
    """Python changes threads as often as it can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("restless")
@each_torch_kind
def test_threads(kind):
    """Eight at once, with shapes of their own, and errors among them."""
    batches = [Batch([50 * i + 1, 3, 0], s_q=1 + i % 2, h_q=4 * (1 + i % 3), seed=i) for i in range(8)]
    start = threading.Barrier(len(batches))

    def work(i):
        batch = batches[i]
        arrays = batch.arrays(kind)
        sink = kind.fp32(batch.sink) if i % 2 else None
        expected = batch.expected(kind, causal=i % 3 == 0, sink=batch.sink if i % 2 else None)
        start.wait()
        for turn in range(12):
            meta = get_mla_metadata()[0] if turn % 2 else None
            check_decode(kind, decode(arrays, meta, attn_sink=sink, causal=i % 3 == 0), expected)
            if turn % 4 == i % 4:
                with pytest.raises(ValueError, match="attn_sink: dtype is float64"):
                    decode(arrays, attn_sink=torch.zeros(batch.h_q, dtype=torch.float64, device=kind.device))

    with concurrent.futures.ThreadPoolExecutor(len(batches)) as pool:
        for done in [pool.submit(work, i) for i in range(len(batches))]:
            done.result()


@each_torch_kind
@each_batch
def test_threads_that_share_metadata(kind, make, check):
    """Who comes first fills it; all get the same."""
    batch = make()
    arguments, expected = batch.arguments(kind), batch.expected(kind)
    for _ in range(5):
        meta, _ = get_mla_metadata()
        start = threading.Barrier(4)

        def work():
            start.wait()
            return call(arguments, meta)

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(work) for _ in range(4)]:
                check(kind, done.result(), expected)


# ---- On a GPU -------------------------------------------------------------------------------------------------------


def cuda_kinds():
    return [kind for kind in TORCH_KINDS if kind.device == "cuda"] or [Kind("torch", "bfloat16", "cuda")]


each_cuda_kind = pytest.mark.parametrize("kind", cuda_kinds(), ids=repr)


def change(arguments, lengths):
    given = arguments["cache_seqlens"] if "indices" not in arguments else arguments["topk_length"]
    given.copy_(torch.tensor(lengths, dtype=torch.int32))


GRAPHS = [
    pytest.param(*batch, options, id=f"{name}-{options}")
    for name, batch in BATCHES.items()
    for options in ({}, {"batch_invariant": True}, {"causal": True})
    if name == "dense" or "causal" not in options  # lists of keys have no mask
]


@needs_cuda
@each_cuda_kind
@pytest.mark.parametrize("make,check,options", GRAPHS)
def test_cuda_graph(kind, make, check, options):
    """Captured with the plan made inside the call, or by metadata within the graph; lengths change in place."""
    batch = make()
    arguments = batch.arguments(kind)
    causal = {name: value for name, value in options.items() if name == "causal"}
    sink = kind.fp32(batch.sink)
    for meta_of in (lambda: None, lambda: get_mla_metadata()[0]):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = call(arguments, meta_of(), attn_sink=sink, **options)
        for lengths in (LENGTHS, [1, 20, 0, 64], [0, 0, 0, 0], [299, 1, 2, 100], LENGTHS):
            change(arguments, lengths)
            graph.replay()
            check(kind, got, batch.expected(kind, lengths=lengths, sink=batch.sink, **causal))


@needs_cuda
@each_cuda_kind
@each_batch
def test_cuda_graph_of_given_results_and_a_merge(kind, make, check):
    """Everything that is read changes in place: another step's queries, keys, and where they are."""
    batch, other = make(), make(seed=1)
    arguments = batch.arguments(kind)
    shape = batch.b, batch.s_q, batch.h_q, 512
    out, lse = kind.full(shape, 7), kind.full((batch.b, batch.h_q, batch.s_q), 7, "float32")
    merged_out, merged_lse = torch.empty_like(out), torch.empty_like(lse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(arguments, out=out, lse=lse)
        merge_states(out[None], lse[None], out=merged_out, lse=merged_lse)
    for step, lengths in ((batch, LENGTHS), (batch, [5, 0, 64, 1]), (other, LENGTHS), (other, [1, 20, 65, 3])):
        for name, array in tensors(step.arguments(kind)).items():
            arguments[name].copy_(array)
        change(arguments, lengths)
        graph.replay()
        check(kind, (out, lse), step.expected(kind, lengths=lengths))
        assert torch.equal(merged_out, out)  # a zero may have the other sign


@needs_cuda
@pytest.mark.parametrize("shape", [dict(), dict(layout=656, pages=(5, 64))], ids=str)
def test_cuda_graph_of_sparse_prefill(shape):
    """Captured on first use; queries, lists and lengths change in place."""
    kind = Kind("torch", "bfloat16", "cuda")
    prompts = [Prompt(**shape, h_q=64, lengths=lengths) for lengths in ([90, 0, 64, 1, 17], [3, 90, 90, 65, 0])]
    arguments = prompts[0].arguments(kind)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = flash_mla_sparse_fwd(**arguments, indexer_topk=32)
    for prompt in (*prompts, prompts[0]):
        for name, array in tensors(prompt.arguments(kind)).items():
            arguments[name].copy_(array)
        graph.replay()
        check_prefill(kind, got, (*prompt.expected(kind), prompt.expected(kind, first=32)[2]))


@needs_cuda
def test_cuda_sparse_prefill_does_not_synchronise():
    kind, prompt = Kind("torch", "bfloat16", "cuda"), Prompt(h_q=64)
    arguments = prompt.arguments(kind)
    flash_mla_sparse_fwd(**arguments, indexer_topk=32)
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    got = flash_mla_sparse_fwd(**arguments)
    assert not torch.cuda.current_stream().query()
    check_prefill(kind, got, prompt.expected(kind))


def use_everything_once(arguments):
    """Loads kernels, and leaves PyTorch's allocator with the memory that a call takes: both may wait for the GPU."""
    out, lse = call(arguments, get_mla_metadata()[0])
    merge_states(out[None], lse[None])


@needs_cuda
@each_cuda_kind
@each_batch
def test_cuda_stream(kind, make, check):
    """The current stream's order is kept: the inputs come late, on a stream that is not the default one."""
    batch = make()
    arguments, expected = batch.arguments(kind), batch.expected(kind)
    inputs = tensors(arguments)
    late = {name: torch.zeros_like(array) for name, array in inputs.items()}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        use_everything_once(arguments)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        for name, array in inputs.items():
            late[name].copy_(array, non_blocking=True)
        meta, _ = get_mla_metadata()
        out, lse = call(dict(arguments, **late), meta)
        merged = merge_states(out[None], lse[None])
        assert not stream.query(), "nothing waits for the GPU"
    stream.synchronize()
    check(kind, (out, lse), expected)
    assert torch.equal(merged[0], out)


@needs_cuda
@each_cuda_kind
@each_batch
def test_cuda_calls_do_not_synchronise(kind, make, check):
    batch = make()
    arguments = batch.arguments(kind)
    use_everything_once(arguments)
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    out, lse = call(arguments, get_mla_metadata()[0])
    merge_states(out[None], lse[None])
    assert not torch.cuda.current_stream().query()
    check(kind, (out, lse), batch.expected(kind))


@needs_cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
@each_batch
def test_cuda_device_that_is_not_the_current_one(make, check):
    kind, batch = Kind("torch", "bfloat16", "cuda:1"), make()
    arguments, expected = batch.arguments(kind), batch.expected(kind)
    with torch.cuda.device(0):
        meta, _ = get_mla_metadata()
        for _ in range(2):
            out, lse = call(arguments, meta)
            assert out.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
            check(kind, (out, lse), expected)
        merge_states(out[None], lse[None])
        with pytest.raises(ValueError, match="^flash_mla_with_kvcache: k_cache: device is cuda:0, must be cuda:1"):
            call(dict(arguments, k_cache=arguments["k_cache"].to("cuda:0")))


@needs_cuda
@each_batch
def test_cuda_memory_comes_from_the_allocator_of_pytorch(make, check):
    arguments = make().arguments(Kind("torch", "bfloat16", "cuda"))
    call(arguments)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        call(arguments, get_mla_metadata()[0])
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


@needs_cuda
@each_batch
def test_cuda_workspace_comes_from_the_allocator_of_pytorch(make, check):
    """With results and plan given there is nothing else to allocate."""
    arguments = make().arguments(Kind("torch", "bfloat16", "cuda"))
    meta, _ = get_mla_metadata()
    out, lse = call(arguments, meta)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call(arguments, meta, out=out, lse=lse)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before < torch.cuda.max_memory_allocated()

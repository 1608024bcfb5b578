# SPDX-License-Identifier: MIT
"""torch.compile: one graph without a break, with the same bits as eager calls; also as the first thing that a process does."""

import math

import pytest

from attention import Batch
from flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata, merge_states
from kinds import Kind, each_device, torch
from programs import output_of
from test_sparse import Sparse
from test_sparse import check as check_sparse
from test_sparse_prefill import Prompt
from test_sparse_prefill import check as check_prefill
from torch_calls import BATCH


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
            assert kind.all_bits(compiled(*arrays, mine)) == kind.all_bits(expected)
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
            assert kind.all_bits(compiled(*arrays.values(), tables)) == kind.all_bits(expected)

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
            assert kind.all_bits(got) == kind.all_bits(expected)
        assert len(graphs) == 1

    @each_device
    def test_dynamic_batch_through_autograd_s_tracer(self, device):
        """aot_eager asks the fake operators about sizes that are symbols."""
        kind = Kind("torch", "bfloat16", device)
        compiled = torch.compile(self.step, backend="aot_eager", fullgraph=True, dynamic=True)
        for lengths in ([100, 0, 65], [3, 64]):
            arrays = Batch(lengths, s_q=2).arrays(kind).values()
            metas = get_mla_metadata()[0], get_mla_metadata()[0]
            assert kind.all_bits(compiled(*arrays, metas[0])) == kind.all_bits(self.step(*arrays, metas[1]))

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
        assert kind.all_bits(results[0]) == kind.all_bits(results[1])

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
        assert kind.all_bits(got) == kind.all_bits(expected) and len(got) == (4 if indexer_topk else 3)
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
            expected = kind.all_bits(step(*arrays))
            assert kind.all_bits(traced(*arrays)) == expected
            for array in arrays:
                torch._dynamo.mark_dynamic(array, 0)
            assert kind.all_bits(compiled(*arrays)) == expected
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
        assert kind.all_bits(got) == kind.all_bits(step(*arrays, *results[1]))
        assert kind.all_bits(results[0]) == kind.all_bits(results[1])

    @each_device
    def test_merge(self, device):
        def step(out_parts, lse_parts, sink):
            out, lse = merge_states(out_parts, lse_parts, sink, lse_empty=-math.inf, log_base=2)
            return out * 2, lse + 1

        kind = Kind("torch", "bfloat16", device)
        parts = torch.randn(3, 2, 2, 4, 16, device=device), torch.randn(3, 2, 4, 2, device=device)
        sink = torch.zeros(4, device=device)
        compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
        assert kind.all_bits(compiled(*parts, sink)) == kind.all_bits(step(*parts, sink))

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
        assert kind.all_bits(got) == kind.all_bits(expected) and kind.bits(results[1]) == kind.bits(results[0])

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


@pytest.mark.parametrize("how", ["compile", "export", "operator"])
def test_compiled_before_anything_else_was_called(how):
    """In a process of its own: there is no eager call before."""
    output_of("-c", FIRST_USE.format(how=how))

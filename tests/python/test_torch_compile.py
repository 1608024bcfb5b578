# SPDX-License-Identifier: MIT
"""Tests torch.compile: one graph without a break, with the same bits as eager calls; also as the first action of a process."""

import pytest

from calls import is_there
from flash_mla import flash_mla_with_kvcache, get_mla_metadata
from kinds import DEVICES, Kind, each_of, torch
from programs import output_of
from torch_calls import BATCH, OF_ANY_NUMBER, VARIANTS, bits_of, of_any_number, variant


kind = each_of([Kind("torch", "bfloat16", device) for device in DEVICES])


def counted():
    """Returns a list of graphs, and a backend that adds to it."""
    graphs = []
    return graphs, lambda graph, inputs: graphs.append(graph) or graph.forward


@pytest.mark.usefixtures("fresh_compiler")
class TestCompile:
    @staticmethod
    def step(q, k_cache, block_table, cache_seqlens, meta=None):
        out, lse = flash_mla_with_kvcache(q * 2, k_cache, block_table, cache_seqlens, 512, meta, None, 0.1, True)
        return out + 1, lse

    @pytest.mark.parametrize("meta", ["none", "empty", "filled"])
    def test_decode(self, meta, kind):
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

    @pytest.mark.parametrize("passed_on", ["both", "first"])
    @pytest.mark.parametrize("made", ["inside", "outside"])
    def test_tables(self, made, passed_on, kind):
        """Tests the older generation's tables; with the first alone the call makes the plan, with the same bits."""
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

    def test_table_that_is_none(self, kind):
        """The compiler leaves the call to Python, which raises the error."""

        def step(q, k_cache, block_table, cache_seqlens):
            return flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, 512, block_table)

        arrays = BATCH.arrays(kind).values()
        with pytest.raises(
            Exception, match="tile_scheduler_metadata: is Tensor, must be what get_mla_metadata returned"
        ):
            torch.compile(step, backend="aot_eager")(*arrays)

    def test_one_metadata_for_several_layers(self, kind):
        def model(q, k_cache, block_table, cache_seqlens):
            meta, _ = get_mla_metadata()
            for _ in range(3):
                out, _ = flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, 512, meta, causal=True)
                q = torch.cat([out, q[..., 512:]], dim=-1)
            return q

        arrays = BATCH.arrays(kind).values()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert kind.bits(compiled(*arrays)) == kind.bits(model(*arrays))

    @pytest.mark.parametrize("name", OF_ANY_NUMBER)
    def test_any_number(self, name, kind):
        """One graph serves every number of requests, tokens, keys, pages and sequences, and all maximum lengths."""
        graphs, counting = counted()
        if name.startswith("mha") and not is_there("mha_forward", kind.device):
            pytest.skip("no kernel")
        several = [of_any_number(name, kind, *sizes) for sizes in ((7, 30, 9, 2), (20, 3, 12, 4), (2, 70, 6, 3))]
        function, first = several[0]
        compiled = torch.compile(function, backend=counting, fullgraph=True)
        traced = torch.compile(
            function, backend="aot_eager", fullgraph=True, dynamic=True
        )  # calls the fakes with symbols
        open_sizes = [
            [i for i in range(array.ndim) if array.shape[i] != other.shape[i]]
            for array, other in zip(first, several[1][1])
        ]
        for _, arrays in several:
            expected = bits_of(kind, function(*arrays))
            assert bits_of(kind, traced(*arrays)) == expected
            for array, dims in zip(arrays, open_sizes):
                torch._dynamo.mark_dynamic(array, dims)
            assert bits_of(kind, compiled(*arrays)) == expected
        assert len(graphs) == 1

    @pytest.mark.parametrize("given,backend", [(False, "aot_eager"), (True, "inductor")], ids=["made", "given"])
    @pytest.mark.parametrize("name,changed", VARIANTS)
    def test_call(self, name, changed, given, backend, kind):
        """Written tensors are parts of larger ones, except bytes, which have no gaps. The graph has only our operators, so inductor
        needs no C++ compiler, which takes half a minute."""
        call = variant(name, changed, kind)
        shapes = {name: array.shape for name, array in call.outputs.items() if given or call.given()}
        orders = {tensor.argument: tensor.order for tensor in call.tensors}
        dtype = {name: kind.dtype_name(array) for name, array in call.outputs.items()}
        gap = {name: 0 if dtype[name] == "uint8" else 8 for name in shapes}

        def step(inputs, large, meta):
            outputs = {n: large[n][..., : s[-2], gap[n] : gap[n] + s[-1]] for n, s in shapes.items()}
            of_plan = {"tile_scheduler_metadata": meta} if "decode" in name else {}
            return call.function(**{**call.options, **inputs, **outputs, **of_plan})

        def run(step):
            whole = {n: (*s[:-2], s[-2] + (gap[n] > 0), s[-1] + 2 * gap[n]) for n, s in shapes.items()}
            large = {name: kind.full(shape, 7, dtype[name], orders[name]) for name, shape in whole.items()}
            meta = get_mla_metadata()[0] if "decode" in name else None
            got = [step(call.inputs, large, meta), step(call.inputs, large, None)]
            got = [result for results in got for result in (results if isinstance(results, tuple) else (results,))]
            return kind.all_bits([array for array in (*got, *large.values()) if array is not None])

        assert run(torch.compile(step, backend=backend, fullgraph=True)) == run(step)

    def test_wrong_argument(self, kind):
        """Tracing finds the error with an eager call's message, wrapped by PyTorch's compiler."""
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
    out, lse = torch.ops.flash_mla.dense_decode(*arrays, *[None] * 4, 512, 0, 1.0, False, 0, 0, False)
else:
    program = torch.export.export(Layer(), arrays)
    out, lse = program.module()(*arrays)
assert out.shape == (1, 1, 4, 512)
"""


@pytest.mark.parametrize("how", ["compile", "export", "operator"])
def test_compiled_before_anything_else_was_called(how):
    """Runs in its own process, without an eager call before."""
    output_of("-c", FIRST_USE.format(how=how))

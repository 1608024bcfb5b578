# SPDX-License-Identifier: MIT
"""Tests PyTorch's requirements of an operator on a GPU: streams, graphs, the allocator, several devices."""

import pytest

from flash_mla import get_mla_metadata, merge_states
from kinds import TORCH_KINDS, Kind, each_of, needs_cuda, torch
from torch_calls import BATCHES, LENGTHS, call, each_batch, each_prefill, same, tensors


def cuda_kinds():
    return [kind for kind in TORCH_KINDS if kind.device == "cuda"] or [Kind("torch", "bfloat16", "cuda")]


kind = each_of(cuda_kinds())
pytestmark = needs_cuda


def change(arguments, lengths):
    given = arguments["cache_seqlens"] if "indices" not in arguments else arguments["topk_length"]
    given.copy_(torch.tensor(lengths, dtype=torch.int32))


GRAPHS = [
    pytest.param(*batch, options, id=f"{name}-{options}")
    for name, batch in BATCHES.items()
    for options in ({}, {"batch_invariant": True}, {"causal": True})
    if name.startswith("dense") or "causal" not in options  # lists of keys have no mask
]


@pytest.mark.parametrize("make,check,options", GRAPHS)
def test_cuda_graph(kind, make, check, options):
    """Captures a call that makes its plan, or metadata within the graph; lengths change in place."""
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


@each_batch
def test_cuda_graph_of_given_results_and_a_merge(kind, make, check):
    """All inputs change in place: another step's queries, keys and their places."""
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


@each_prefill
def test_cuda_graph_of_prefill(make):
    """Captures the first use; all inputs change in place: queries, keys, lists, lengths, starts of sequences."""
    kind, prefill = Kind("torch", "bfloat16", "cuda"), make()
    problems = prefill.problems
    arguments = prefill.arguments(kind, problems[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = prefill(arguments)
    for problem in (*problems, problems[0]):
        for name, array in tensors(prefill.arguments(kind, problem)).items():
            arguments[name].copy_(array)
        graph.replay()
        prefill.check(kind, got, problem)
        assert same(got, prefill(arguments))


@each_prefill
def test_cuda_prefill_does_not_synchronise(make):
    kind, prefill = Kind("torch", "bfloat16", "cuda"), make()
    arguments = prefill.arguments(kind, prefill.problems[0])
    prefill(arguments)
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    got = prefill(arguments)
    assert not torch.cuda.current_stream().query()
    prefill.check(kind, got, prefill.problems[0])


def use_everything_once(arguments):
    """Loads kernels and fills PyTorch's allocator with a call's memory: both may wait for the GPU."""
    out, lse = call(arguments, get_mla_metadata()[0])
    merge_states(out[None], lse[None])


@each_batch
def test_cuda_stream(kind, make, check):
    """Calls keep the current stream's order: inputs arrive late, on a stream other than the default."""
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
        with pytest.raises(
            ValueError, match="^flash_mla_with_kvcache(_fp8)?: k_cache: device is cuda:0, must be cuda:1"
        ):
            call(dict(arguments, k_cache=arguments["k_cache"].to("cuda:0")))


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


@each_batch
def test_cuda_workspace_comes_from_the_allocator_of_pytorch(make, check):
    """With results and plan passed, only the workspace is allocated."""
    arguments = make().arguments(Kind("torch", "bfloat16", "cuda"))
    meta, _ = get_mla_metadata()
    out, lse = call(arguments, meta)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call(arguments, meta, out=out, lse=lse)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before < torch.cuda.max_memory_allocated()

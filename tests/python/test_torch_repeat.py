# SPDX-License-Identifier: MIT
"""Tests calls that repeat the previous one, which take a shorter path, and calls that do not."""

import numpy
import pytest

from calls import NAMES, OPERATIONS
from flash_mla import _operations
from kinds import device, needs_cuda, torch
from programs import in_threads
from test_errors import refused
from test_torch_lazy import alike
from torch_calls import of, same, watch

from flash_mla import _torch, _torch_repeat  # isort: skip

# Operations that make their results.
WAYS = [name for name in (*NAMES, "dense_decode-576", "dense_decode_fp8-656") if not of(name).given()]
each_way = pytest.mark.parametrize("name", WAYS)
each_input = pytest.mark.parametrize(
    "name,argument", [(name, argument) for name in WAYS for argument in of(name).inputs]
)


@pytest.fixture(autouse=True)
def forgotten():
    """Clears kept calls before every test."""
    _torch._repeats.clear()


def hits(call):
    """Returns how often the short way was taken."""
    last = _torch._repeats[OPERATIONS[call.operation]]._last.values()
    return sum(each.repeat.hits for each in last if each.repeat is not None)


def settled(name, device):
    """Returns a call that has taken the short way once, and its results."""
    call = of(name, device)
    call(), call()
    results = call()
    assert hits(call) == 1
    return call, results


def long_way(call, **changed):
    _torch._repeats.clear()
    return call(**changed)


# ---- Taken --------------------------------------------------------------------------------------------------------------


@each_way
def test_short_way(name, device):
    """Every call makes new results, with the bits of the long way."""
    call, results = settled(name, device)
    before = [result.clone() for result in results]
    again, expected = call(), long_way(call)
    assert same(again, expected) and same(before, expected) and same(results, expected)
    assert not {result.data_ptr() for result in again} & {result.data_ptr() for result in results}
    assert [(result.shape, result.stride()) for result in again] == [(its.shape, its.stride()) for its in expected]


SAME_FORM = {
    "memory of its own": torch.clone,
    "behind another": lambda tensor: torch.cat([tensor, tensor])[len(tensor) :],
}
OTHER_FORM = {
    "rows apart": lambda tensor: torch.stack([tensor, tensor], 1)[:, 0] if tensor.ndim > 1 else tensor.clone(),
    "negative": lambda tensor: torch._neg_view(-tensor),
    "parameter": lambda tensor: torch.nn.Parameter(tensor.clone(), requires_grad=False),
    "subclass": lambda tensor: tensor.clone().as_subclass(type("Sub", (torch.Tensor,), {})),
}


@each_input
@pytest.mark.parametrize("change", [*SAME_FORM, *OTHER_FORM])
def test_input_elsewhere(name, argument, change, device):
    """The old input is overwritten and must not be read."""
    call, expected = settled(name, device)
    held, call.inputs[argument] = call.inputs[argument], {**SAME_FORM, **OTHER_FORM}[change](call.inputs[argument])
    held.zero_()
    before = hits(call)
    results = [array.as_subclass(torch.Tensor) for array in call()]
    # For rows with gaps another kernel may run on a GPU.
    assert same(results, expected) if device == "cpu" or change != "rows apart" else alike(results, expected)
    if change != "rows apart":  # may be none
        assert hits(call) - before == (change in SAME_FORM)


@pytest.mark.parametrize(
    "name,argument",
    [
        *[("dense_decode", "attn_sink"), ("dense_decode-576", "kv_scale")],
        *[("dense_decode_fp8-576", "descale_q"), ("dense_decode_fp8-576", "descale_k")],
    ],
)
def test_input_that_comes_and_goes(call, argument):
    without = {argument: None}
    expected = [long_way(call), long_way(call, **without)]
    for given, wanted in ((without, 1), ({}, 0), (without, 1)):
        _torch._repeats.clear()
        other = {} if given else without
        call(**given), call(**given), call(**given)
        assert hits(call) == 1 and same(call(**other), expected[1 - wanted]) and same(call(**given), expected[wanted])


def test_one_tensor_for_two_inputs(device):
    """One tensor is the scale of queries and of keys. Calls with two tensors come in between."""
    call = of("dense_decode_fp8-576", device)
    scale, other = call.inputs["descale_q"], call.inputs["descale_q"] / 2
    pairs = [
        dict(descale_q=q, descale_k=k) for q, k in ((scale, scale), (scale, other), (other, other), (other, scale))
    ]
    expected = [long_way(call, **pair) for pair in pairs]
    for pair in pairs:
        _torch._repeats.clear()
        call(**pair), call(**pair), call(**pair)
        assert hits(call) == 1
        for changed, results in zip(pairs, expected):
            assert same(call(**changed), results)


def test_either_order_of_lse(device):
    """Repeated calls make lse in the order that the long way returns."""
    call, results = settled("mha_forward", device)
    for heads_first in (True, False, True):
        expected = long_way(call, lse_heads_first=heads_first)
        call(lse_heads_first=heads_first), call(lse_heads_first=heads_first)
        got = call(lse_heads_first=heads_first)
        assert hits(call) and same(got, expected) and got[1].stride() == expected[1].stride()
        assert same([got[0], got[1].T if heads_first else got[1]], results)


def test_numbers_that_change(device):
    call, results = settled("dense_decode", device)
    for changed in (dict(softmax_scale=0.5), dict(causal=True), dict(log_base=2), dict(batch_invariant=True)):
        got = call(**changed)
        assert same(got, long_way(call, **changed))
        settled_again = call(), call()
        assert same(settled_again[1], results)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_of_autograd(mode, device):
    call, expected = settled("dense_decode", device)
    with mode():
        for _ in range(4):
            results = call()
            assert same(results, expected)
            assert all(result.is_inference() == (mode is torch.inference_mode) for result in results)
        assert hits(call) > 1
    assert same(call(), expected)


def test_threads_that_make_the_same_call(device):
    call, expected = settled("dense_decode", device)

    def work(i):
        for _ in range(50):
            assert same(call(), expected)

    in_threads(4, work)


@needs_cuda
def test_stream_of_a_call():
    """A call runs on the current stream, whichever earlier calls had; a graph can capture the short way too."""
    call, expected = settled("dense_decode", "cuda")
    late, before = call.inputs["q"].clone(), hits(call)
    call.inputs["q"].zero_()
    torch.cuda.synchronize()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        call.inputs["q"].copy_(late)
        results = call()
    stream.synchronize()
    assert same(results, expected) and hits(call) == before + 1
    with torch.cuda.graph(graph):
        results = call()
    assert hits(call) == before + 2
    for result in results:
        result.zero_()
    graph.replay()
    assert same(results, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="PyTorch sees no two GPUs")
def test_gpu_that_is_not_the_current_one():
    call, expected = settled("dense_decode", "cuda:0")
    with torch.cuda.device(1):
        assert same(call(), expected)
    assert hits(call) == 1 and same(call(), expected) and hits(call) == 2
    other = of("dense_decode", "cuda:1")
    for _ in range(3):
        assert same([result.to("cuda:0") for result in other()], expected)


# ---- Not taken ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argument", ["q", "k_cache", "attn_sink"])
def test_gradients_are_refused(argument, device):
    """Gradients are refused even after calls under no_grad with the same tensor."""
    call, expected = settled("dense_decode", device)
    call.inputs[argument] = call.inputs[argument].clone().requires_grad_()
    for _ in range(3):
        with pytest.raises(NotImplementedError, match=f"{argument}: requires a gradient|requires a gradient"):
            call()
        with torch.no_grad():
            assert same(call(), expected)


REFUSED = {
    "nested": lambda tensor: torch.nested.nested_tensor(list(tensor) if tensor.ndim > 1 else [tensor]),
    "sparse": lambda tensor: tensor.to_sparse(),
    "of another type": lambda tensor: tensor.double(),
    "of more dimensions": lambda tensor: tensor[None],
    "meta": lambda tensor: tensor.to("meta"),
    "zero": lambda tensor: torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype, device=tensor.device),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("change", REFUSED)
@pytest.mark.parametrize("argument", ["q", "k_cache", "block_table", "cache_seqlens", "attn_sink"])
def test_input_that_is_refused(argument, change, device):
    call, expected = settled("dense_decode", device)
    if argument not in call.inputs:
        pytest.skip(f"there is no {argument}")
    with refused(ValueError, call.name, argument):
        call(**{argument: REFUSED[change](call.inputs[argument])})
    assert same(call(), expected)


def test_who_watches_sees_the_operator(device):
    call, expected = settled("dense_decode", device)
    seen = []
    with watch(seen):
        assert same(call(), expected)
    assert "flash_mla.dense_decode.default" in dict(seen)


def test_call_that_fails_takes_the_long_way(device, monkeypatch):
    call, expected = settled("dense_decode", device)
    operation, launched = _operations.DENSE_DECODE, []
    launch = operation.launch

    def fails_once(address):
        launched.append(address)
        return launch(address) if len(launched) > 1 else 3

    monkeypatch.setattr(operation, "launch", fails_once)
    assert same(call(), expected) and len(launched) == 2


@pytest.mark.parametrize("missing", ["guards", "guards of these arguments", "memory"])
def test_pytorch_without(missing, device, monkeypatch):
    """The short way uses private parts of PyTorch, which another version may lack."""
    expected = of("dense_decode", device)()
    _torch._repeats.clear()
    if missing == "memory":
        monkeypatch.setitem(_torch_repeat._EMPTY, device.split(":")[0], None)
    else:
        monkeypatch.setattr(_torch_repeat, "_Guards", None if missing == "guards" else lambda *tensors: None)
    call = of("dense_decode", device)
    for _ in range(3):
        assert same(call(), expected)
    assert not hits(call)


def test_calls_in_turns(device, monkeypatch):
    """Queries of two shapes both take the short way. Caches of two shapes replace each other's kept call, less and less often,
    until calls settle."""
    made = []
    repeat = _torch_repeat.Repeat
    monkeypatch.setattr(_torch_repeat, "Repeat", lambda *arguments: made.append(1) or repeat(*arguments))
    for argument, change, most in (
        ("q", lambda q: q[:, :1], 2),
        ("k_cache", lambda cache: torch.cat([cache, cache]), 12),
    ):
        calls = of("dense_decode", device), of("dense_decode", device)
        calls[1].inputs[argument] = change(calls[1].inputs[argument])
        expected = [long_way(call) for call in calls]
        _torch._repeats.clear()
        made.clear()
        for _ in range(40):
            for call, results in zip(calls, expected):
                assert same(call(), results)
        assert 2 <= len(made) <= most
    for _ in range(200):
        calls[0]()
    before = hits(calls[0])
    assert same(calls[0](), expected[0]) and hits(calls[0]) == before + 1


def test_calls_of_many_shapes(device):
    """Only some calls are kept."""
    call = of("dense_decode", device)
    for count in range(200):
        call(softmax_scale=1 + count)
    assert len(_torch._repeats[_operations.DENSE_DECODE]._last) <= _torch_repeat._MOST_KEPT


# ---- Before the checks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argument,equal",
    [
        *[("max_seqlen_qo", 4.0), ("max_seqlen_kv", 5.0), ("stream", 0.0), ("num_splits", 0.0)],
        *[(name, 0.0) for name in ("causal", "deterministic", "batch_invariant", "lse_heads_first")],
        ("is_varlen", 1.0),
    ],
)
def test_equal_number_of_a_wrong_type(argument, equal, device):
    """dense MHA looks for a kept call before it checks the arguments: a float equals the integer or flag of one, but is refused."""
    call, expected = settled("mha_forward", device)
    with refused(TypeError, call.name, argument):
        call(**{argument: equal})
    assert hits(call) == 1 and same(call(), expected) and hits(call) == 2


def test_number_that_changes_in_place(device):
    """A number may be any object with a value; the value counts."""
    call, scale = of("mha_forward", device), torch.tensor(0.5)
    for value in (0.5, 0.25):
        scale.fill_(value)
        expected = long_way(call, softmax_scale=value)
        for _ in range(4):
            assert same(call(softmax_scale=scale), expected)
    assert hits(call) == 2  # by the number that the checks return


def test_array_of_a_wrong_kind(device):
    call, expected = settled("mha_forward", device)
    for argument in ("k", "v", "cu_seqlens_qo", "cu_seqlens_kv"):
        for wrong in (None, 1, numpy.zeros(3)):
            with refused(TypeError, call.name, argument):
                call(**{argument: wrong})
    with refused(TypeError, call.name, "seqused_k"):
        call(seqused_k=[1])
    assert same(call(), expected)


def test_gradients_of_a_kept_call(device):
    """A tensor that requires a gradient gets it, whatever calls were kept."""
    call, expected = settled("mha_forward", device)
    for argument in ("q", "k", "v", "attn_sink"):
        tensor = call.inputs[argument].clone().requires_grad_()
        for _ in range(3):
            results = call(**{argument: tensor})
            assert same([result.detach() for result in results], expected)
            assert torch.autograd.grad([result.float().sum() for result in results], tensor)[0].shape == tensor.shape
            with torch.no_grad():
                assert not any(result.requires_grad for result in call(**{argument: tensor}))


# ---- Types of one byte ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["repeated", "compiled", "operator"])
@pytest.mark.parametrize("argument,dtype", [("q", torch.float8_e5m2), ("k_cache", torch.bool), ("k_cache", torch.int4)])
def test_codes_of_another_type(argument, dtype, way, device, fresh_compiler):
    """No way around the general one lets bytes pass that are no e4m3 codes."""
    if (way, dtype) == ("compiled", torch.int4):
        pytest.skip("PyTorch traces no such tensor")
    call, _ = settled("dense_decode_fp8-576", device)
    tensor = call.inputs[argument].view(dtype)
    if way == "operator":
        operator = getattr(torch.ops.flash_mla, call.operation).default
        by_name = {"kv_cache": "k_cache", "seqlens": "cache_seqlens", "kv_scale": "descale_k", "q_scale": "descale_q"}
        given = dict(call.inputs, **{argument: tensor}, d_v=512, kv_format=5, softmax_scale=0.04)
        given.update(causal=False, lse_empty=0, log_base=0, batch_invariant=False)
        names = [each.name for each in operator._schema.arguments]

        def run():
            return operator(*[given.get(by_name.get(name, name)) for name in names])

    else:
        function = torch.compile(call, backend="aot_eager") if way == "compiled" else call

        def run():
            return function(**{argument: tensor})

    name = str(dtype).removeprefix("torch.")
    with refused(ValueError, call.name, f"{argument}: dtype is {name}, must be uint8, int8 or float8_e4m3fn where"):
        run()

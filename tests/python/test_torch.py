# SPDX-License-Identifier: MIT
"""Tests PyTorch's requirements of an operator: tracers, modes, threads. test_torch_compile.py has the compiler, test_torch_cuda.py
streams and graphs on a GPU."""

import collections
import contextlib
import functools
import sys

import pytest

from attention import Batch, check_decode, strided
from calls import Call, is_there
import flash_mla
from flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata, merge_states
from kinds import TORCH_KINDS, Kind, device, each_of, torch
from programs import in_threads
from torch_calls import BATCH, OF_ANY_NUMBER, VARIANTS, bits_of, call, decode, each_batch, of_any_number, variant, watch

kind = each_of(TORCH_KINDS)

# ---- The operators --------------------------------------------------------------------------------------------------


def apart(kind, result):
    """Returns a part of a larger tensor with the values and the order of a result."""
    if result.stride(-1) != 1:
        return apart(kind, result.mT).mT
    return strided(kind, kind.float64(result), kind.dtype_name(result))


def run_gradients(kind):
    call = Call("mha_forward", kind)
    for name in ("q", "k", "v", "attn_sink"):
        call.inputs[name].requires_grad_()
    call(causal=True, deterministic=True)[0].sum().backward()


@functools.lru_cache(maxsize=None)
def samples(device):
    """Returns the arguments with which public functions call each operator."""
    kind, seen, found = Kind("torch", "bfloat16", device), [], collections.defaultdict(list)
    with watch(seen):
        for name, changed in VARIANTS:
            with contextlib.suppress(pytest.skip.Exception):  # no kernel on the device
                call = variant(name, changed, kind)  # which has made results
                call(**call.outputs)
                if not call.given():
                    call(**{argument: apart(kind, result) for argument, result in call.outputs.items()})
        for lengths in ([], [7], [0, 65, 1, 2, 3]):
            for more in ((128, 1), (8, 4), (8, 1, 4, False, 90)):
                get_mla_metadata(kind.int32(lengths), *more)
        if is_there("mha_backward", device):
            run_gradients(kind)
    for name, arguments in list(seen):
        if name == "flash_mla.merge.default":  # the one with a derivative takes the same
            seen.append(("flash_mla.merge_states.default", arguments))
    for name, arguments in seen:
        if name.startswith("flash_mla."):
            found[name.removesuffix(".default").replace(".", "::")].append([detached(value) for value in arguments])
    for arguments in found["flash_mla::mha_gradients"][:1]:  # one with a gradient of lse; the library's operator alone
        *tensors, sink, used_q, used_k, out, lse, dout = arguments[:11]
        without = None, None, None
        dlse, numbers = torch.ones_like(lse), (4, 5, 0.0, True, True, 0)
        found["flash_mla::mha_gradients"].append([*arguments[:11], dlse, *arguments[12:]])
        found["flash_mla::mha_gradients"].append([*tensors, *without, out, lse, dout, dlse, False, *arguments[13:]])
        gradients = list(map(torch.zeros_like, (*tensors[:3], sink)))
        read = out, lse, dout
        optional = sink, used_q, used_k
        found["flash_mla::mha_backward"].append([*tensors, *optional, *read, dlse, *gradients, *numbers])
        found["flash_mla::mha_backward"].append([*tensors, *without, *read, None, *gradients[:3], None, *numbers])
    for parts in found["flash_mla::merge"][:1]:  # of another type
        out, lse = torch.ops.flash_mla.merge(*parts)
        found["flash_mla::merge_out"].append([*parts[:5], out.float(), lse, 1, 2, 0])
    return found


def detached(value):
    return value.detach() if isinstance(value, torch.Tensor) else value


def operator(name):
    namespace, name = name.split("::")
    return getattr(getattr(torch.ops, namespace), name).default


def test_every_operator_has_samples():
    assert {n for n in torch._C._dispatch_get_all_op_names() if n.startswith("flash_mla::")} == set(samples("cpu"))


@pytest.mark.parametrize(
    "name,index", [(name, index) for name, several in samples("cpu").items() for index in range(len(several))]
)
def test_opcheck(name, index, device):
    """Checks that the schema says what is written, results do not alias inputs, fake results match real ones, …"""
    several = samples(device).get(name, [])
    if not several[index:]:
        pytest.skip(f"no kernel on {device}")
    torch.library.opcheck(operator(name), several[index])


OF_BATCH = [((4, 2, 4, 512), torch.bfloat16), ((4, 4, 2), torch.float32)]

# ---- Tracing --------------------------------------------------------------------------------------------------------


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
            for what in ("shape", "dtype", "device"):
                assert getattr(array, what) == getattr(like, what)
            assert array.stride() == like.stride()
    assert given[0] is out and given[1] is lse


def test_fake_tensors_of_sparse_prefill():
    """The fake tensors are on a GPU that need not exist."""
    with torch._subclasses.FakeTensorMode():
        q = torch.empty(70, 64, 576, dtype=torch.bfloat16, device="cuda")
        kv = torch.empty(1000, 1, 576, dtype=torch.bfloat16, device="cuda")
        indices = torch.empty(70, 1, 2048, dtype=torch.int32, device="cuda")
        for results in (flash_mla_sparse_fwd(q, kv, indices, 0.5), flash_mla_sparse_fwd(q, kv, indices, 0.5, 512)):
            assert [tuple(array.shape) for array in results] == [(70, 64, 512), (70, 64), (70, 64)]
            assert [array.dtype for array in results] == [torch.bfloat16, torch.float32, torch.float32]
            assert {array.device.type for array in results} == {"cuda"}
        assert tuple(flash_mla_sparse_fwd(q, kv, indices, 0.5, indexer_topk=512)[3].shape) == (70, 64)


NO_GPU = pytest.mark.xfail(
    not torch.cuda.is_available(),
    reason="the fake plan asks the GPU that is not there",
    raises=NotImplementedError,
    strict=True,
)


@pytest.mark.parametrize(
    "device,planned", [("meta", False), ("meta", True), ("cuda", False), pytest.param("cuda", True, marks=NO_GPU)]
)
def test_tensors_without_memory(device, planned):
    """Calls give shapes and types, also on a GPU that need not exist, as when a model is exported on a machine without one."""
    real = BATCH.arrays(Kind("torch", "bfloat16"))
    with torch._subclasses.FakeTensorMode() if device == "cuda" else contextlib.nullcontext():
        arrays = {name: torch.empty(array.shape, dtype=array.dtype, device=device) for name, array in real.items()}
        out, lse = decode(arrays, get_mla_metadata()[0] if planned else None)
        for results in ((out, lse), merge_states(out[None], lse[None])):
            assert [(tuple(array.shape), array.dtype) for array in results] == OF_BATCH
            assert all(array.device.type == device for array in results)


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
    assert kind.all_bits(graph(*arrays.values())) == kind.all_bits(step(*arrays.values()))
    arrays["cache_seqlens"] = kind.int32([64, 0, 65, 3])  # the graph contains no values
    assert kind.all_bits(graph(*arrays.values())) == kind.all_bits(step(*arrays.values()))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", OF_ANY_NUMBER)
def test_export_for_any_number(name, strict, device):
    """One exported program serves any number of requests or tokens, also where a size of a tensor is an argument."""
    kind, size = Kind("torch", "bfloat16", device), 7
    function, arrays = of_any_number(name, kind, size)

    class Layer(torch.nn.Module):
        def forward(self, *arrays):
            return function(*arrays)

    number = torch.export.Dim("number", min=3, max=500)
    open_sizes = tuple({i: number for i, of in enumerate(array.shape) if of == size} for array in arrays)
    assert sum(map(bool, open_sizes)) >= min(2, len(arrays) - 1)
    with torch.no_grad():
        program = torch.export.export(Layer(), arrays, dynamic_shapes=(open_sizes,), strict=strict)
        others = of_any_number(name, kind, 20)[1]
        got, expected = program.module()(*others), function(*others)
    assert bits_of(kind, got) == bits_of(kind, expected)


# ---- Modes ----------------------------------------------------------------------------------------------------------


def test_inference_mode(kind):
    expected = kind.all_bits(decode(BATCH.arrays(kind), causal=True))
    meta, _ = get_mla_metadata()
    with torch.inference_mode():
        arrays = BATCH.arrays(kind)
        for _ in range(2):
            out, lse = decode(arrays, meta, causal=True)
            assert out.is_inference() and kind.all_bits((out, lse)) == expected
        parts = merge_states(out[None], lse[None])
    assert kind.all_bits(parts)[1] == expected[1]
    assert kind.all_bits(decode(BATCH.arrays(kind), meta, causal=True)) == expected  # outside, with a plan from inside


@pytest.mark.parametrize("argument", ["q", "k_cache"])
def test_subclass_sees_the_operators(argument, kind):
    """A subclass sees every function that is called with it."""

    class Watching(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return super().__torch_function__(function, types, args, kwargs or {})

    arrays, seen = BATCH.arrays(kind), []
    expected = kind.all_bits(decode(arrays))
    arrays[argument] = arrays[argument].as_subclass(Watching)
    got = decode(arrays)
    assert "flash_mla.dense_decode.default" in seen
    assert kind.all_bits([array.as_subclass(torch.Tensor) for array in got]) == expected


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated
def test_torch_jit_trace(kind):
    """The traced function calls the operators again, and returns no constants."""

    def step(q, k_cache, block_table, cache_seqlens):
        return flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, 512, None, causal=True)

    arrays = BATCH.arrays(kind)
    traced = torch.jit.trace(step, tuple(arrays.values()), check_trace=False)
    arrays["cache_seqlens"] = kind.int32([64, 0, 65, 3])
    assert kind.all_bits(traced(*arrays.values())) == kind.all_bits(step(*arrays.values()))


def test_modes_of_dispatch_see_the_operators(kind):
    arrays, seen = BATCH.arrays(kind), []
    with watch(seen):
        out, lse = decode(arrays, get_mla_metadata()[0])
        decode(arrays, out=out, lse=lse)
        merge_states(out[None], lse[None])
    ours = [name for name, _ in seen if "flash_mla" in name]
    assert ours == [
        f"flash_mla.{name}.default" for name in ("decode_plan", "dense_decode", "dense_decode_out", "merge")
    ]


# ---- Threads --------------------------------------------------------------------------------------------------------


@pytest.fixture
def restless():
    """Makes Python switch threads as often as possible."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("restless")
def test_threads(kind):
    """Eight threads make calls at once, with different shapes and some errors."""
    batches = [Batch([50 * i + 1, 3, 0], s_q=1 + i % 2, h_q=4 * (1 + i % 3), seed=i) for i in range(8)]
    options = [dict(causal=i % 3 == 0, sink=batch.sink if i % 2 else None) for i, batch in enumerate(batches)]
    expected = [batch.expected(kind, **given) for batch, given in zip(batches, options)]

    def work(i):
        arrays, sink, causal = batches[i].arrays(kind), kind.fp32(batches[i].sink) if i % 2 else None, i % 3 == 0
        for turn in range(12):
            meta = get_mla_metadata()[0] if turn % 2 else None
            check_decode(kind, decode(arrays, meta, attn_sink=sink, causal=causal), expected[i])
            if turn % 4 == i % 4:
                with pytest.raises(ValueError, match="attn_sink: dtype is float64"):
                    decode(arrays, attn_sink=torch.zeros(batches[i].h_q, dtype=torch.float64, device=kind.device))

    in_threads(len(batches), work)


@each_batch
def test_threads_that_share_metadata(kind, make, check):
    """The first thread fills the metadata; all get the same results."""
    batch = make()
    arguments, expected = batch.arguments(kind), batch.expected(kind)
    for _ in range(5):
        meta, _ = get_mla_metadata()
        in_threads(4, lambda i: check(kind, call(arguments, meta), expected))

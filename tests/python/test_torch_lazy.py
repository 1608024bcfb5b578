# SPDX-License-Identifier: MIT
"""Tests tensors whose memory does not hold their values, or that have none: each is read correctly or refused by name."""

import warnings

import pytest

from attention import Batch
from flash_mla import flash_mla_with_kvcache, get_mla_metadata
from kinds import Kind, device, each_torch_kind, needs_cuda, torch
from test_errors import refused
from torch_calls import each_input, each_name, each_output, of, same

UninitializedParameter = torch.nn.parameter.UninitializedParameter

# ---- Read correctly ---------------------------------------------------------------------------------------------------


def negative(tensor):
    return torch._neg_view(-tensor)


def imaginary(tensor):
    """Makes a negative view without PyTorch's private functions, by a conjugate. There is no complex bf16."""
    return torch.complex(torch.zeros(tensor.shape, device=tensor.device), -tensor.float()).conj().imag.to(tensor.dtype)


MEANT = {
    "negative": negative,
    "negated twice": lambda tensor: torch._neg_view(torch._neg_view(tensor)),
    "negative part of a larger one": lambda tensor: negative(torch.cat([tensor, tensor]))[: len(tensor)],
    "imaginary part of a conjugate": imaginary,
    "parameter": lambda tensor: torch.nn.Parameter(tensor, requires_grad=False),
    "copied on write": torch._lazy_clone,
    "subclass": lambda tensor: tensor.as_subclass(type("Sub", (torch.Tensor,), {})),
}


@each_input
@pytest.mark.parametrize("wrap", MEANT.values(), ids=MEANT)
def test_input_that_means_other_values_than_it_holds(call, expected, argument, wrap):
    meant = wrap(call.inputs[argument])
    assert torch.equal(meant.as_subclass(torch.Tensor), call.inputs[argument])
    assert same([array.as_subclass(torch.Tensor) for array in call(**call.given(), **{argument: meant})], expected)


@each_name
def test_all_inputs_negative_at_once(call, expected):
    changed = {argument: negative(tensor) for argument, tensor in call.inputs.items()}
    assert same(call(**call.given(), **changed), expected)


@pytest.mark.parametrize("made_by", ["meta", "tables"])
def test_plan_of_negative_lengths(made_by, device):
    """Lengths, and then tables, are negative views."""
    batch = Batch([100, 0, 65], s_q=2)
    arrays = batch.arrays(Kind("torch", "bfloat16", device))
    expected = flash_mla_with_kvcache(*arrays.values(), 512, get_mla_metadata()[0])
    lengths = arrays["cache_seqlens"] = negative(arrays["cache_seqlens"])
    if made_by == "meta":
        plan = get_mla_metadata()
    else:
        plan = [negative(table) for table in get_mla_metadata(lengths, 2 * 4, 1)]
    assert same(flash_mla_with_kvcache(*arrays.values(), 512, *plan), expected)


def alike(results, expected):
    """Compares within the tolerances of kernels."""
    return all(torch.allclose(*pair, rtol=2e-2, atol=1e-3, equal_nan=True) for pair in zip(results, expected))


@each_input
def test_input_that_is_repeated_by_its_strides(call, name, argument, device):
    """The first dimension has a stride of 0; a list that needs a stride of 1 is refused by name."""
    first = call.inputs[argument][:1]
    call.inputs[argument] = first.repeat(len(call.inputs[argument]), *[1] * (first.ndim - 1))
    expected = call(**call.given())
    call.outputs = of(name, device).outputs
    repeated = first.expand_as(call.inputs[argument])
    if first.ndim == 1 and repeated.stride() == (0,):
        with refused(ValueError, call.name, argument):
            call(**call.given(), **{argument: repeated})
    else:
        results = call(**call.given(), **{argument: repeated})
        # TMA takes no stride of 0: on Hopper another kernel may run, with different rounding.
        assert same(results, expected) if device == "cpu" else alike(results, expected)


@each_output
def test_output_that_is_a_copy_on_write(call, name, argument, device):
    """The original keeps its values."""
    other = call.outputs[argument]
    call.outputs[argument] = torch._lazy_clone(other)
    results = call(**call.outputs)
    assert torch.all(other == 7) and any(result is call.outputs[argument] for result in results)
    expected = of(name, device)
    assert same(results, expected(**expected.outputs))


# ---- Refused ----------------------------------------------------------------------------------------------------------


def lists_of(tensor):
    return list(tensor) if tensor.ndim > 1 else [tensor]


REFUSED = {  # with words of the message
    "sparse": (lambda tensor: tensor.to_sparse(), "torch.sparse_coo"),
    "sparse rows": (lambda tensor: tensor.reshape(-1, tensor.shape[-1]).to_sparse_csr(), ""),
    "mkldnn": (lambda tensor: tensor.to_mkldnn(), "torch._mkldnn"),
    "nested": (lambda tensor: torch.nested.nested_tensor(lists_of(tensor)), "nested tensor"),
    "jagged": (lambda tensor: torch.nested.nested_tensor(lists_of(tensor), layout=torch.jagged), "nested tensor"),
    "zero": (lambda tensor: torch._efficientzerotensor(tensor.shape, **like(tensor)), "zero tensor"),
    "uninitialized": (lambda tensor: UninitializedParameter(requires_grad=False), "uninitialized parameter"),
    "meta": (lambda tensor: tensor.to("meta"), "device is meta"),
    "float8": (lambda tensor: tensor.to(torch.float8_e4m3fn), ""),
    "other float8": (lambda tensor: tensor.to(torch.float8_e5m2), "dtype is float8_e5m2"),
    "quantized": (lambda tensor: torch.quantize_per_tensor(tensor.float(), 1.0, 0, torch.qint8), "dtype is qint8"),
    "bits": (lambda tensor: tensor.to(torch.uint8).view(torch.bits8), "dtype is bits8"),
    "conjugate": (lambda tensor: tensor.to(torch.complex64).conj(), "dtype is complex64"),
    "without storage": (lambda tensor: emptied(tensor.clone()), "data is NULL"),
}
# Forms that a written tensor must not have.
LAZY = {
    "negative": (negative, ""),
    "conjugated": (lambda tensor: torch.view_as_complex(tensor.new_zeros(*tensor.shape, 2).float()).conj(), ""),
}


def like(tensor):
    return dict(dtype=tensor.dtype, device=tensor.device)


def emptied(tensor):
    """Frees the memory, as for sharded parameters between uses."""
    tensor.untyped_storage().resize_(0)
    return tensor


def make(wrap, tensor):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some kinds are called prototypes, or deprecated
        try:
            return wrap(tensor)
        except (RuntimeError, NotImplementedError, ValueError) as error:
            pytest.skip(f"PyTorch makes no such tensor: {str(error).splitlines()[0]}")


@each_input
@pytest.mark.parametrize("kind", REFUSED)
def test_input_that_is_refused(call, name, argument, kind):
    if call.inputs[argument].dtype is torch.uint8 and kind == "float8":
        pytest.skip("bytes may have this type")
    wrap, said = REFUSED[kind]
    strange = {argument: make(wrap, call.inputs[argument])}
    if kind == "float8" and argument in ("k_cache", "kv"):
        argument, said = "is_fp8_kvcache", None
    with refused(ValueError, call.name, argument, said=said or None) as caught:
        call(**{**call.given(), **strange})
    assert "type code" not in str(caught.value)
    assert all(torch.all(tensor == 7) for tensor in call.outputs.values()), "nothing is written"


@each_output
@pytest.mark.parametrize("kind", [*REFUSED, *LAZY])
def test_output_that_is_refused(call, name, argument, kind):
    outputs = dict(call.outputs)
    outputs[argument] = make({**REFUSED, **LAZY}[kind][0], outputs[argument])
    with refused(ValueError, call.name, argument):
        call(**outputs)
    for other, tensor in call.outputs.items():
        assert torch.all(tensor == 7), f"nothing is written into {other}"


@each_input
def test_fake_tensor_among_real_ones(call, argument):
    """The message is PyTorch's."""
    fake = torch._subclasses.FakeTensorMode().from_tensor(call.inputs[argument])
    with pytest.raises(AssertionError, match="FakeTensor"):
        call(**call.given(), **{argument: fake})


def test_tensor_that_left_its_transform(device):
    call, left = of("dense_decode", device), []
    torch.func.vmap(lambda q: (left.append(q), q)[1])(call.inputs["q"][None])
    with pytest.raises(ValueError, match="^flash_mla_with_kvcache: q: .*torch.func transform"):
        call(q=left[0])


def test_tensor_of_another_device():
    """The device is neither the CPU nor an NVIDIA GPU; its index must not be taken for a GPU's."""
    import torch._lazy.ts_backend as backend

    try:
        backend.init()
    except RuntimeError as error:
        pytest.skip(str(error))
    call = of("dense_decode")
    with pytest.raises(ValueError, match="^flash_mla_with_kvcache: k_cache: device is lazy:0, must be cpu"):
        call(k_cache=call.inputs["k_cache"].to("lazy"))


# ---- Transforms -------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error")  # without a rule, PyTorch warns and asks for a report
@each_input
def test_vmap_takes_one_after_the_other(call, name, argument):
    given = call.given()
    tensor = call.inputs[argument]
    changed = torch.stack([tensor, tensor if argument.startswith("cu_seqlens") else tensor.flip(0)])  # these ascend
    # What a call writes has the dimension over which vmap maps.
    written = {name: torch.stack([tensor, tensor]) for name, tensor in given.items()}

    def mapped(tensor, written):
        return call(**written, **{argument: tensor})

    results = torch.func.vmap(mapped)(changed, written)
    for i in range(2):
        expected = call(**{name: tensor.clone() for name, tensor in given.items()}, **{argument: changed[i]})
        assert same([array[i] for array in results], expected)
    if given:
        with pytest.raises(NotImplementedError, match=rf"^{call.name}: {next(iter(given))}: .*torch.func.vmap"):
            torch.func.vmap(lambda tensor: call(**given, **{argument: tensor}))(changed)
    else:
        with pytest.raises(ValueError, match=rf"^{call.name}: torch.func.vmap maps over a dimension of size 0"):
            torch.func.vmap(lambda tensor: call(**{argument: tensor}))(changed[:0])


@pytest.mark.filterwarnings("error")
def test_vmap_over_a_negative_view(device):
    call = of("dense_decode", device)
    expected = call()
    cache = negative(call.inputs["k_cache"])
    results = torch.func.vmap(lambda q: call(q=q, k_cache=cache))(call.inputs["q"][None])
    assert same([array[0] for array in results], expected)


@each_name
def test_functionalize(call):
    """New results are functionalized, also of negative views. functorch refuses other libraries' operators that write into
    arguments."""
    with pytest.raises(RuntimeError, match="functionalizing"):
        torch.func.functionalize(lambda tensor: call(**{**call.outputs, next(iter(call.inputs)): tensor}))(
            next(iter(call.inputs.values()))
        )
    if call.given():
        return
    expected, first = call(), next(iter(call.inputs))
    got = torch.func.functionalize(lambda tensor: call(**{first: torch._neg_view(tensor)}))(-call.inputs[first])
    assert same(got, expected)


@each_name
def test_compiled_with_a_negative_view(call, name, device, fresh_compiler):
    """The view is made outside of the graph, or inside."""
    first = next(iter(call.inputs))
    expected = call(**call.given())

    def outside(tensor, outputs):
        return call(**outputs, **{first: tensor})

    def inside(tensor, outputs):
        return call(**outputs, **{first: torch._neg_view(tensor)})

    for step, tensor in ((outside, negative(call.inputs[first])), (inside, -call.inputs[first])):
        fresh = of(name, device).given()
        assert same(torch.compile(step, backend="aot_eager", fullgraph=True)(tensor, fresh), expected)


@needs_cuda
@each_torch_kind
def test_cuda_negative_view_on_a_stream(kind):
    """The copy that resolves a view runs on the call's stream."""
    if kind.device != "cuda":
        pytest.skip("of a GPU")
    call = of("dense_decode", "cuda")
    expected = call()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        got = call(q=negative(call.inputs["q"]))
    torch.cuda.synchronize()
    assert same(got, expected)

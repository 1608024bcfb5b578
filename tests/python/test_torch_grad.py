# SPDX-License-Identifier: MIT
"""Tests gradients: only new results of dense MHA have them (test_mha_gradients.py); every other call refuses at once, in eager mode,
compiled, and as an operator."""

import pytest

from kinds import each_device, torch
from test_errors import check_message
from torch_calls import each_name, each_output, same

import torch_calls

# Integers have no gradients.
FLOATS = [
    (name, argument)
    for name, argument in torch_calls.INPUTS
    if torch_calls.of(name).inputs[argument].is_floating_point()
]
each_float = pytest.mark.parametrize("name,argument", FLOATS)
each_without_derivative = pytest.mark.parametrize("name,argument", [of for of in FLOATS if of[0] != "mha_forward"])


def check_refusal(error, call, argument):
    check_message(error, call.name, argument)
    message = str(error)
    assert "no derivative" in message and "torch.no_grad()" in message and "detach()" in message


def with_gradient(call, argument):
    """Returns a tensor computed from a parameter, like a model's queries."""
    tensor = call.inputs.get(argument, call.outputs.get(argument))
    return tensor * torch.ones((), dtype=tensor.dtype, device=tensor.device, requires_grad=True)


@each_device
@each_without_derivative
@pytest.mark.parametrize("given", [False, True], ids=["results=made", "results=given"])
@pytest.mark.parametrize("leaf", [False, True], ids=["computed", "leaf"])
def test_input_that_requires_a_gradient(name, argument, leaf, given, device):
    call = torch_calls.of(name, device)
    outputs = dict(call.outputs) if given else call.given()
    tensor = call.inputs[argument].requires_grad_() if leaf else with_gradient(call, argument)
    with pytest.raises(NotImplementedError) as caught:
        call(**outputs, **{argument: tensor})
    check_refusal(caught.value, call, argument)
    assert all(torch.all(output == 7) for output in outputs.values()), "nothing is written"


@each_device
@each_output
def test_output_that_requires_a_gradient(name, argument, device):
    call = torch_calls.of(name, device)
    outputs = dict(call.outputs)
    outputs[argument] = with_gradient(call, argument)
    with pytest.raises(NotImplementedError) as caught:
        call(**outputs)
    check_refusal(caught.value, call, argument)


@each_device
@each_float
@pytest.mark.parametrize("given", [False, True], ids=["results=made", "results=given"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_mode_it_does_not_matter(name, argument, mode, given, device):
    call, plain = torch_calls.of(name, device), torch_calls.of(name, device)
    expected = plain(**(plain.outputs if given else plain.given()))
    tensor = with_gradient(call, argument)
    with mode():
        got = call(**(call.outputs if given else call.given()), **{argument: tensor})
    assert same(got, expected) and not any(result.requires_grad for result in got)


@each_device
@each_float
def test_detached_input(name, argument, device):
    """Results are constants for autograd."""
    call, plain = torch_calls.of(name, device), torch_calls.of(name, device)
    expected = plain(**plain.given())
    got = call(**call.given(), **{argument: with_gradient(call, argument).detach()})
    assert same(got, expected) and not any(result.requires_grad for result in got)


@each_device
@each_without_derivative
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled(name, argument, backend, device):
    """The call is refused while the graph is made, with an eager call's message inside PyTorch's; under no_grad the graph
    runs."""
    call, plain = torch_calls.of(name, device), torch_calls.of(name, device)
    expected = plain(**plain.given())

    def step(tensor, outputs):
        return call(**outputs, **{argument: tensor * 1})

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    learnt = call.inputs[argument].clone().requires_grad_()
    with pytest.raises(Exception, match=rf"{call.name}: {argument}: requires a gradient"):
        compiled(learnt, call.given())
    torch._dynamo.reset()
    with torch.no_grad():
        got = compiled(learnt, torch_calls.of(name, device).given())
    assert same(got, expected) and not any(result.requires_grad for result in got)


@each_device
@each_name
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_beside_what_learns(name, device):
    """Under grad mode, a gradient bypasses the operation."""
    call = torch_calls.of(name, device)
    weight = torch.full((), 3.0, device=device, requires_grad=True)

    def step(weight, outputs):
        return call(**outputs)[0].float().sum() + weight * 2

    torch.compile(step, backend="aot_eager", fullgraph=True)(weight, call.given()).backward()
    assert weight.grad == 2


@each_device
@each_without_derivative
def test_exported(name, argument, device):
    """Export is refused in the same way, and works under no_grad."""
    call = torch_calls.of(name, device)
    if call.given():
        pytest.skip("what writes into its arguments returns nothing to export")

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones((), device=device, dtype=call.inputs[argument].dtype))

        def forward(self, tensor):
            return call(**{argument: tensor * self.weight})

    inputs = (call.inputs[argument],)
    with pytest.raises(Exception, match="requires a gradient"):
        torch.export.export(Layer(), inputs, strict=False)
    with torch.no_grad():
        program = torch.export.export(Layer(), inputs, strict=False)
        assert same(program.module()(*inputs), Layer()(*inputs))


@each_device
@each_without_derivative
@pytest.mark.parametrize("transform", ["grad", "jvp", "vjp"])
def test_derivatives_of_functorch(name, argument, transform, device):
    call = torch_calls.of(name, device)
    given = call.given()

    def total(tensor):
        return call(**given, **{argument: tensor})[0].float().sum()

    tensor = call.inputs[argument]
    with pytest.raises(NotImplementedError) as caught:
        if transform == "grad":
            torch.func.grad(total)(tensor)
        elif transform == "jvp":
            torch.func.jvp(total, (tensor,), (torch.ones_like(tensor),))
        else:
            torch.func.vjp(total, tensor)
    check_refusal(caught.value, call, argument)


@each_device
@each_float
def test_tangent_of_forward_mode(name, argument, device):
    import torch.autograd.forward_ad as forward_ad

    call, plain = torch_calls.of(name, device), torch_calls.of(name, device)
    expected = plain(**plain.given())
    with forward_ad.dual_level():
        assert same(call(**call.given()), expected), "without a tangent there is nothing to lose"
        dual = forward_ad.make_dual(call.inputs[argument], torch.ones_like(call.inputs[argument]))
        with pytest.raises(NotImplementedError) as caught:
            call(**call.given(), **{argument: dual})
    check_refusal(caught.value, call, argument)


def test_operator_by_its_own_name():
    """Calls the operator as a stored program does."""
    call = torch_calls.of("sparse_prefill")
    q, kv, indices, lengths, sink = call.inputs.values()
    with pytest.raises(NotImplementedError) as caught:
        torch.ops.flash_mla.sparse_prefill(q.requires_grad_(), kv, indices, lengths, sink, 512, 0, 0.04, 0, 0)
    check_refusal(caught.value, call, "q")


def test_every_operator_says_so():
    """No operator uses PyTorch's fallback, whose results claim a gradient that nobody computes."""
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("flash_mla::")}
    for name in names:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "Autograd"), name


# ---- Versions ---------------------------------------------------------------------------------------------------------


@each_device
@each_output
@pytest.mark.parametrize("how", ["plain", "watched"])
def test_what_is_written_has_a_new_version(name, argument, how, device):
    """A backward pass that saved the tensor reports that it changed."""
    call = torch_calls.of(name, device)
    output = call.outputs[argument]
    learnt = torch.ones_like(output, requires_grad=True)
    product = (learnt * output).sum()  # its gradient is the value of output
    if how == "plain":
        call(**call.outputs)
    else:
        with torch.autograd.profiler.profile():
            call(**call.outputs)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()

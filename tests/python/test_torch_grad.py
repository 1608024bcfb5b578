# SPDX-License-Identifier: MIT
"""Tests gradients: only new results of dense MHA (test_mha_gradients.py) and of merge (test_merge_gradients.py) have them; every
other call refuses at once, in eager mode, compiled, and as an operator."""

import pytest

from kinds import device, torch
from test_errors import refused
from torch_calls import INPUTS, each_name, each_output, of, same

forward_ad = torch.autograd.forward_ad
# Integers have no gradients.
FLOATS = [(name, argument) for name, argument in INPUTS if of(name).inputs[argument].is_floating_point()]
each_float = pytest.mark.parametrize("name,argument", FLOATS)
DIFFERENTIABLE = "mha_forward", "merge"
each_without_derivative = pytest.mark.parametrize(
    "name,argument", [each for each in FLOATS if each[0] not in DIFFERENTIABLE]
)


def no_derivative(call, argument, said="no derivative"):
    """The block is refused because of a derivative with respect to the argument."""
    return refused(
        NotImplementedError, call.name, argument, said=rf"{said}.*; call it under torch.no_grad\(\) .*detach\(\)"
    )


def with_gradient(call, argument):
    """Returns a tensor computed from a parameter, like a model's queries."""
    tensor = call.inputs.get(argument, call.outputs.get(argument))
    return tensor * torch.ones((), dtype=tensor.dtype, device=tensor.device, requires_grad=True)


@each_without_derivative
@pytest.mark.parametrize("given", [False, True], ids=["results=made", "results=given"])
@pytest.mark.parametrize("leaf", [False, True], ids=["computed", "leaf"])
def test_input_that_requires_a_gradient(call, argument, leaf, given):
    outputs = dict(call.outputs) if given else call.given()
    tensor = call.inputs[argument].requires_grad_() if leaf else with_gradient(call, argument)
    with no_derivative(call, argument):
        call(**outputs, **{argument: tensor})
    assert all(torch.all(output == 7) for output in outputs.values()), "nothing is written"


@each_output
def test_output_that_requires_a_gradient(call, argument):
    outputs = dict(call.outputs)
    outputs[argument] = with_gradient(call, argument)
    with no_derivative(call, argument):
        call(**outputs)


@each_float
@pytest.mark.parametrize("given", [False, True], ids=["results=made", "results=given"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_mode_it_does_not_matter(name, argument, mode, given, device):
    call, plain = of(name, device), of(name, device)
    expected = plain(**(plain.outputs if given else plain.given()))
    tensor = with_gradient(call, argument)
    with mode():
        got = call(**(call.outputs if given else call.given()), **{argument: tensor})
    assert same(got, expected) and not any(result.requires_grad for result in got)


@each_float
def test_detached_input(call, expected, argument):
    """Results are constants for autograd."""
    got = call(**call.given(), **{argument: with_gradient(call, argument).detach()})
    assert same(got, expected) and not any(result.requires_grad for result in got)


@each_without_derivative
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(call, expected, name, argument, backend, device, fresh_compiler):
    """The call is refused while the graph is made, with an eager call's message inside PyTorch's; under no_grad the graph
    runs."""

    def step(tensor, outputs):
        return call(**outputs, **{argument: tensor * 1})

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    learnt = call.inputs[argument].clone().requires_grad_()
    with pytest.raises(Exception, match=rf"{call.name}: {argument}: requires a gradient"):
        compiled(learnt, call.given())
    torch._dynamo.reset()
    with torch.no_grad():
        got = compiled(learnt, of(name, device).given())
    assert same(got, expected) and not any(result.requires_grad for result in got)


@each_name
def test_compiled_beside_what_learns(call, device, fresh_compiler):
    """Under grad mode, a gradient bypasses the operation."""
    weight = torch.full((), 3.0, device=device, requires_grad=True)

    def step(weight, outputs):
        return call(**outputs)[0].float().sum() + weight * 2

    torch.compile(step, backend="aot_eager", fullgraph=True)(weight, call.given()).backward()
    assert weight.grad == 2


@each_without_derivative
def test_exported(call, argument, device):
    """Export is refused in the same way, and works under no_grad."""
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


DERIVATIVES = {
    "grad": lambda f, tensor: torch.func.grad(f)(tensor),
    "vjp": lambda f, tensor: torch.func.vjp(f, tensor),
    "jvp": lambda f, tensor: torch.func.jvp(f, (tensor,), (torch.ones_like(tensor),)),
}
# Of functions whose results may have another derivative.
OF_DIFFERENTIABLE = {
    **DERIVATIVES,
    "jacrev": lambda f, tensor: torch.func.jacrev(f)(tensor),
    "grad of vmap": lambda f, tensor: torch.func.grad(lambda x: torch.func.vmap(f)(x).sum())(tensor[None]),
    "vmap of grad": lambda f, tensor: torch.func.vmap(torch.func.grad(f))(tensor[None]),
    "compiled grad": lambda f, tensor: torch.compile(torch.func.grad(f), backend="aot_eager")(tensor),
    "tangent": lambda f, tensor: with_tangent(f, tensor.requires_grad_()),
}


def with_tangent(f, tensor):
    with forward_ad.dual_level():
        return f(forward_ad.make_dual(tensor, torch.ones_like(tensor)))


@pytest.mark.parametrize(
    "name,argument,how",
    [(*each, how) for each in FLOATS for how in (OF_DIFFERENTIABLE if each[0] in DIFFERENTIABLE else DERIVATIVES)],
)
def test_derivatives_of_functorch(call, name, argument, how, fresh_compiler):
    given = call.given()

    def total(tensor):
        return call(**given, **{argument: tensor})[0].float().sum()

    reverse = r"no derivative of this kind .*Tensor.backward\(\) and torch.autograd.grad"
    with no_derivative(call, argument, reverse if name in DIFFERENTIABLE else "no derivative"):
        OF_DIFFERENTIABLE[how](total, call.inputs[argument])


@each_float
def test_tangent_of_forward_mode(call, expected, argument):
    with forward_ad.dual_level():
        assert same(call(**call.given()), expected), "without a tangent there is nothing to lose"
        dual = forward_ad.make_dual(call.inputs[argument], torch.ones_like(call.inputs[argument]))
        with no_derivative(call, argument):
            call(**call.given(), **{argument: dual})


def test_operator_by_its_own_name():
    """Calls the operator as a stored program does."""
    call = of("sparse_prefill")
    q, kv, indices, lengths, sink = call.inputs.values()
    with no_derivative(call, "q"):
        torch.ops.flash_mla.sparse_prefill(q.requires_grad_(), kv, indices, lengths, sink, 512, 0, 0.04, 0, 0)


def test_every_operator_says_so():
    """No operator uses PyTorch's fallback, whose results claim a gradient that nobody computes."""
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("flash_mla::")}
    for name in names:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "Autograd"), name


# ---- Versions ---------------------------------------------------------------------------------------------------------


@each_output
@pytest.mark.parametrize("how", ["plain", "watched"])
def test_what_is_written_has_a_new_version(call, argument, how):
    """A backward pass that saved the tensor reports that it changed."""
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

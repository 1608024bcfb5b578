# SPDX-License-Identifier: MIT
"""Tests gradients of merge_states against autograd of a plain merge in float64, eager and compiled; and refusals."""

import math

import pytest

torch = pytest.importorskip("torch")

from calls import is_there
from flash_mla import merge_states
from kinds import each_of

device = each_of(["cpu"] + ["cuda"] * (torch.cuda.is_available() and is_there("merge", "cuda")))
B, S_Q, H_Q, D_V = 2, 3, 4, 24


def plain(outs, lses, sink, log_base, part):
    """Merges in float64 what is not empty. Returns (out, lse, where lse is finite)."""
    empty = torch.isinf(lses)
    natural = torch.where(empty, 0.0, lses) * math.log(log_base)
    weights = torch.where(empty, 0.0, natural.exp())
    total = weights.sum(0)
    seen = total > 0
    shares, total = weights / torch.where(seen, total, 1.0), torch.where(seen, total, 1.0).log()
    if sink is not None:
        shares = shares * torch.sigmoid(total - sink[:, None])
    given = torch.where(empty.mT[..., None], 0.0, outs) * shares.mT[..., None]
    return given.sum(0) if part is None else given[part], total / math.log(log_base), seen


def leaves_of(n, dtype, device, sinks, empties):
    """Returns out, lse and, perhaps, sinks. Parts without keys hold NaN; for one row no part has keys."""
    torch.manual_seed(5)
    outs = torch.randn(n, B, S_Q, H_Q, D_V, device=device).to(dtype)
    lses = 2 * torch.randn(n, B, H_Q, S_Q, device=device)
    if empties:
        lses[0, 1], lses[:, 0, 1, 1], lses[-1, 0, 2] = -math.inf, math.inf, math.inf
        outs[torch.isinf(lses).mT] = math.nan
    given = [outs, lses]
    if sinks:
        given.append(torch.tensor([0.5, -math.inf, math.inf, -1.0], device=device))
    return [tensor.requires_grad_() for tensor in given]


def whole(outs, lses, *more, part=None, **options):
    return merge_states(outs, lses, *more, **options)


def pair(outs, lses, *more, part=None, **options):
    return merge_states((outs[0], outs[1]), [lses[0], lses[1]], *more, **options)


def alone(outs, lses, *more, part=None, **options):
    return merge_states(outs[part], lses, *more, part=part, **options)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("form,part", [(whole, None), (pair, None), (alone, 0), (alone, 1)])
@pytest.mark.parametrize("sinks", (False, True))
@pytest.mark.parametrize("empties", (False, True))
@pytest.mark.parametrize("log_base", (math.e, 2))
@pytest.mark.parametrize("compiled", (False, True))
def test_gradients(form, part, sinks, empties, log_base, dtype, device, compiled, fresh_compiler):
    leaves = leaves_of(2, dtype, device, sinks, empties)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    out, lse, seen = plain(*exact, *(() if sinks else (None,)), log_base, part)
    dout, dlse = torch.randn_like(out).to(dtype), torch.randn_like(lse).float()
    expected = torch.autograd.grad((out, lse), exact, (dout.double(), torch.where(seen, dlse, 0.0).double()))

    def call(*leaves):
        return form(*leaves, part=part, log_base=log_base)

    got = (torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call)(*leaves)
    assert torch.equal(torch.isfinite(got[1]), seen)
    mine = torch.autograd.grad(got, leaves, (dout, dlse))
    for leaf, gradient, reference in zip(leaves, mine, expected):
        assert gradient.dtype == leaf.dtype and torch.isfinite(gradient).all()
        error = (gradient.double() - reference).abs().max().item()
        bound = 1e-5 if gradient.dtype == torch.float32 else 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
        assert error <= bound * max(1.0, reference.abs().max().item()), error
    assert not mine[1][~torch.isfinite(leaves[1])].any(), "parts without keys"


def test_a_gradient_of_one_result():
    """out or lse alone may have a gradient, and only some inputs may require one."""
    outs, lses = leaves_of(3, torch.float32, "cpu", False, True)
    out, _ = merge_states(outs, lses.detach())
    (of_out,) = torch.autograd.grad(out.sum(), outs)
    assert torch.isfinite(of_out).all() and of_out.any()
    _, lse = merge_states(outs.detach(), lses)
    (of_lse,) = torch.autograd.grad(lse[torch.isfinite(lse)].sum(), lses)
    total = of_lse.sum(0)
    assert torch.allclose(total, torch.isfinite(lse).float(), atol=1e-6), "the shares of a row"


@pytest.mark.parametrize("n", (0, 1))
def test_few_parts(n):
    outs, lses = leaves_of(n, torch.float32, "cpu", False, False)
    out, lse = merge_states(outs, lses)
    gradient = torch.randn_like(out)
    of_out, of_lse = torch.autograd.grad((out, lse), (outs, lses), (gradient, torch.ones_like(lse)))
    assert torch.equal(of_out, gradient.expand_as(outs)) if n else of_out.shape == outs.shape
    assert torch.allclose(of_lse, torch.ones_like(lses), atol=1e-5)


def test_any_layout():
    """Views of larger tensors have the gradients of their copies."""
    outs, lses = (leaf.detach() for leaf in leaves_of(2, torch.float32, "cpu", False, True))
    spaced = outs.permute(3, 0, 2, 1, 4).contiguous().permute(1, 3, 2, 0, 4)
    of_views, of_copies = (
        torch.autograd.grad(merge_states(given, lses)[0].square().sum(), given)[0]
        for given in (spaced.requires_grad_(), outs.requires_grad_())
    )
    assert spaced.stride() != outs.stride() and torch.equal(of_views, of_copies)


@pytest.mark.parametrize("form", (whole, pair, alone))
@pytest.mark.parametrize("sinks", (False, True))
def test_opcheck(form, sinks, device):
    """PyTorch's checks of an operator, with inputs that require gradients."""
    outs, lses, *sink = leaves_of(2, torch.float32, device, sinks, False)
    last = (outs[1], lses[1]) if form is pair else (None, None)
    first = (outs[:1], lses[:1]) if form is pair else (outs[:1], lses) if form is alone else (outs, lses)
    tensors = [None if t is None else t.detach().requires_grad_() for t in (*first, *last, *(sink or [None]))]
    torch.library.opcheck(torch.ops.flash_mla.merge_states.default, (*tensors, 0, 2, int(form is alone)))


def test_gradients_through_vmap():
    outs, lses = (
        torch.stack([leaf.detach(), 2 * leaf.detach()]) for leaf in leaves_of(2, torch.float32, "cpu", False, False)
    )
    leaves = outs.requires_grad_(), lses.requires_grad_()
    mine = torch.autograd.grad(
        torch.func.vmap(lambda o, l: merge_states(o, l)[0].square().sum())(*leaves).sum(), leaves
    )
    each = [
        torch.autograd.grad(merge_states(*(leaf[i] for leaf in leaves))[0].square().sum(), leaves) for i in range(2)
    ]
    for i, gradient in enumerate(mine):
        assert torch.allclose(gradient, each[0][i] + each[1][i], atol=1e-6)


def test_refusals():
    outs, lses = leaves_of(2, torch.float32, "cpu", False, False)
    with pytest.raises(NotImplementedError, match="merge_states: has no second derivative; .*create_graph"):
        torch.autograd.grad(merge_states(outs, lses)[0].sum(), outs, create_graph=True)
    with pytest.raises(NotImplementedError, match="merge_states: out_parts: requires a gradient"):
        merge_states(outs, lses, out=outs.detach()[0])
    with pytest.raises(NotImplementedError, match="merge_states: lse_parts: requires a gradient"):
        merge_states(outs.detach(), lses, lse=torch.empty_like(lses[0]))


# ---- Compiled calls in place --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ("aot_eager", "eager"))
@pytest.mark.parametrize("form", (whole, pair))
def test_compiled_in_place(form, backend, device, fresh_compiler):
    outs, lses = (leaf.detach() for leaf in leaves_of(2, torch.float32, device, False, True))
    expected = merge_states(outs, lses)

    def call(outs, lses):
        form(outs, lses, out=outs[1], lse=lses[1])
        return outs * 1

    given = outs.clone(), lses.clone()
    later = torch.compile(call, backend=backend, fullgraph=True)(*given)
    for (mine, before), result in zip(zip(given, (outs, lses)), expected):
        assert torch.equal(mine[1], result) and torch.equal(mine[0].nan_to_num(), before[0].nan_to_num())
    assert torch.equal(later.nan_to_num(), given[0].nan_to_num()), "the graph sees what was written"

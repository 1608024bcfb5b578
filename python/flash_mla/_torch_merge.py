# SPDX-License-Identifier: MIT
"""Merge with gradients, as an operator of PyTorch's dispatcher.

flash_mla::merge_states is flash_mla::merge with a derivative, which PyTorch's own operators compute, in fp32. With L_i the natural
lse of part i, total = ln Σ exp(L_i), p_i = exp(L_i - total), and σ the sink's factor 1 / (1 + exp(sink - total)), out is
Σ w_i · out_i with w_i = σ · p_i. With c_i = dout · out_i and C = Σ w_i · c_i:

    dout_i = w_i · dout        dL_i = w_i · (c_i - C) + p_i · dtotal        dsink = -Σ (1 - σ) · C
"""

from __future__ import annotations

import math
from typing import List, Optional, Tuple

import torch

from . import _operations, _torch_operators
from ._torch_operators import launch, new_results

_this = _operations.MERGE_STATES
_OPTIONS = 3  # lse_empty, log_base, part


def _merge(*arguments):
    inputs = arguments[:-_OPTIONS]
    results = new_results(_this, inputs, 0)
    launch(_this, inputs + results, arguments[-_OPTIONS:])
    return results


def _merge_fake(*arguments):
    return new_results(_this, arguments[:-_OPTIONS], 0)


def _keep(ctx, inputs: Tuple, output: Tuple) -> None:
    ctx.save_for_backward(*inputs[:-_OPTIONS])
    ctx.options = inputs[-_OPTIONS:]
    ctx.set_materialize_grads(False)


def _of_out(of_lse: torch.Tensor) -> torch.Tensor:
    """Returns numbers of rows in the order of lse in that of out, for each value of a row."""
    return of_lse.transpose(-2, -1)[..., None]


def _backward(ctx, dout, dlse):
    if torch.is_grad_enabled():
        raise NotImplementedError(
            f"{_this.function}: has no second derivative; call backward without create_graph=True"
        )
    nothing = (None,) * _OPTIONS
    if dout is None and dlse is None:
        return (None,) * len(ctx.saved_tensors) + nothing
    out_parts, lse_parts, out_last, lse_last, sink = ctx.saved_tensors
    _, log_base, part = ctx.options
    to_natural = math.log(2) if log_base == 2 else 1.0

    given = lse_parts if lse_last is None else torch.cat((lse_parts, lse_last[None]))
    empty = torch.isinf(given)  # [n, b, h_q, s_q], as are the following
    lse = given.masked_fill(empty, -math.inf) * to_natural
    total = torch.logsumexp(lse, 0)
    shares = torch.exp(lse - total).masked_fill(empty, 0.0)
    factor = torch.ones_like(total)
    if sink is not None:
        factor = torch.sigmoid(total - sink[:, None]).masked_fill(total == -math.inf, 1.0)
    weights = factor * shares

    d_outs: List[Optional[torch.Tensor]] = [None, None]
    d_lse, of_sink = torch.zeros_like(lse), torch.zeros_like(total)
    if dout is not None:
        first, products = max(part - 1, 0), torch.zeros_like(lse)
        dout = dout.float()
        for i, outs in enumerate((out_parts, None if out_last is None else out_last[None])):
            if outs is None:
                continue
            some = slice(first, first + outs.shape[0])
            unseen = _of_out(empty[some])
            first += outs.shape[0]
            # What a part without keys holds, NaN perhaps, reaches nothing.
            products[some] = (outs.masked_fill(unseen, 0.0).float() * dout).sum(-1).transpose(-2, -1)
            if ctx.needs_input_grad[2 * i]:
                d_outs[i] = (_of_out(weights[some]) * dout).masked_fill(unseen, 0.0).to(outs.dtype)
        whole = (weights * products).sum(0)
        d_lse, of_sink = weights * (products - whole) * to_natural, (factor - 1.0) * whole
    if dlse is not None:
        d_lse = d_lse + shares * dlse
    d_lse = d_lse.masked_fill(empty, 0.0)
    d_parts, d_last = (d_lse, None) if lse_last is None else (d_lse[:-1], d_lse[-1])
    d_out_last = None if d_outs[1] is None else d_outs[1][0]
    return d_outs[0], d_parts, d_out_last, d_last, None if sink is None else of_sink.sum((0, 2)), *nothing


_torch_operators.register(
    "merge_states",
    "(Tensor out_parts, Tensor lse_parts, Tensor? out_last, Tensor? lse_last, Tensor? attn_sink, int lse_empty, "
    "int log_base, SymInt part) -> (Tensor, Tensor)",
    _this.function,
    _merge,
    _merge_fake,
    differentiable=True,
)
torch.library.register_autograd(
    f"{_torch_operators.NAMESPACE}::merge_states", _backward, setup_context=_keep, lib=_torch_operators.operators
)

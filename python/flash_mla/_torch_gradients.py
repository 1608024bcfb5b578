# SPDX-License-Identifier: MIT
"""Dense MHA with gradients, as two operators of PyTorch's dispatcher.

flash_mla::mha is flash_mla::mha_forward with a derivative, which flash_mla::mha_gradients computes. Both take q, k and v
separately, q and k with v side by side, or all three side by side: the gradient of a packed tensor is packed, without copies.
"""

from __future__ import annotations

import math
from typing import List, NoReturn, Optional, Tuple

import torch

from . import _operations, _torch_operators
from ._torch_operators import launch, new_results
from ._torch_tensors import of_c

# `k`: the keys if v is given; keys, then values if only q is given; else queries, keys, values. d_qk gives the widths.
_SOURCE = "Tensor? q, Tensor k, Tensor? v, Tensor cu_seqlens_q, Tensor cu_seqlens_k"
_OPTIONS = "int d_qk, SymInt max_s_q, SymInt max_s_k, float softmax_scale, bool causal, bool deterministic, int lse_empty, int log_base, \
bool batch_dependent, int num_splits"
_this = _operations.MHA
_dispatch_modes = of_c("_len_torch_dispatch_stack")


def _parts(q: Optional[torch.Tensor], k: torch.Tensor, v: Optional[torch.Tensor], d_qk: int) -> List[torch.Tensor]:
    if q is not None and v is not None:
        return [q, k, v]
    count = 1 if q is not None else 2
    widths = [d_qk] * count + [k.shape[-1] - count * d_qk]
    parts = list(k.split(widths, -1))
    return parts if q is None else [q, *parts]


def _attend(q, k, v, cu_q, cu_k, d_qk, max_s_q, max_s_k, scale, causal, deterministic, *others):
    parts = _parts(q, k, v, d_qk)
    results = new_results(_operations.MHA_FORWARD, parts, parts[2].shape[-1])
    tensors = (*parts, cu_q, cu_k, *results)
    launch(_operations.MHA_FORWARD, tensors, (max_s_q, max_s_k, scale, causal, *others))
    return results


def _attend_fake(q, k, v, cu_q, cu_k, d_qk, *options):
    parts = _parts(q, k, v, d_qk)
    return new_results(_operations.MHA_FORWARD, parts, parts[2].shape[-1])


def _new(tensor: Optional[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Returns memory for the gradient of a tensor. The launch writes all of it; tokens outside all sequences get 0."""
    return like.new_empty(0 if tensor is None else tensor.shape)


def _gradients_fake(q, k, v, *others):
    return _new(q, k), _new(k, k), _new(v, k)


def _gradients(
    q, k, v, cu_q, cu_k, out, lse, dout, dlse, d_qk, max_s_q, max_s_k, scale, causal, deterministic, _, log_base, *_more
):
    """`dlse`: the gradient of lse in a compiled graph, which has one even if none arrives: it must be 0. As PyTorch's own operators do,
    this looks for use_deterministic_algorithms when it runs."""
    if dlse is not None and dlse.is_cpu and _arrives(dlse):
        _refuse_gradient_of_lse()
    made = _gradients_fake(q, k, v)
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    written = _parts(None if q is None else made[0], made[1], None if v is None else made[2], d_qk)
    tensors = (*_parts(q, k, v, d_qk), cu_q, cu_k, out, lse, dout, *written)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    launch(_operations.MHA_BACKWARD, tensors, (max_s_q, max_s_k, scale, causal, deterministic, log_base))
    if dlse is not None and not dlse.is_cpu:
        _spoil(made, dlse)
    return made


def _arrives(dlse: torch.Tensor) -> torch.Tensor:
    """Returns whether a gradient of lse is one. A NaN is none: functions of lse that have an infinite derivative make it of 0."""
    return (dlse.abs() > 0).any()


def _spoil(made: Tuple[torch.Tensor, ...], dlse: torch.Tensor) -> None:
    """Makes all gradients NaN if a gradient reaches lse: to raise, the host would have to wait for the GPU, and no graph could capture
    the call."""
    arrives = _arrives(dlse)
    for gradient in made:
        gradient.masked_fill_(arrives, math.nan)


def _keep(ctx, inputs: Tuple, output: Tuple) -> None:
    ctx.save_for_backward(*inputs[:5], *output)
    ctx.options = inputs[5:]
    ctx.set_materialize_grads(False)


def _refuse_gradient_of_lse() -> NoReturn:
    raise NotImplementedError(f"{_this}: lse: has no derivative, but a gradient reaches it; use lse.detach()")


def _backward(ctx, dout, dlse):
    if torch.is_grad_enabled():
        raise NotImplementedError(f"{_this}: has no second derivative; call backward without create_graph=True")
    if dlse is not None and not _dispatch_modes():
        _refuse_gradient_of_lse()
    nothing = (None,) * (5 + len(ctx.options))
    q, k, v, *others = ctx.saved_tensors
    if dout is None:
        if dlse is None:
            return nothing
        dout = torch.zeros_like(others[2])
    made = _torch_operators.registered.mha_gradients(q, k, v, *others, dout, dlse, *ctx.options)
    return (*(None if of is None else gradient for of, gradient in zip((q, k, v), made)), *nothing[3:])


_torch_operators.register(
    "mha", f"({_SOURCE}, {_OPTIONS}) -> (Tensor, Tensor)", _this, _attend, _attend_fake, differentiable=True
)
_torch_operators.register(
    "mha_gradients",
    f"({_SOURCE}, Tensor out, Tensor lse, Tensor dout, Tensor? dlse, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    _this,
    _gradients,
    _gradients_fake,
)
torch.library.register_autograd(
    f"{_torch_operators.NAMESPACE}::mha", _backward, setup_context=_keep, lib=_torch_operators.operators
)

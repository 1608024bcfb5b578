# SPDX-License-Identifier: MIT
"""Dense MHA with gradients, as two operators of PyTorch's dispatcher.

flash_mla::mha is flash_mla::mha_forward with a derivative, which flash_mla::mha_gradients computes. Both take q, k and v
separately, q and k with v side by side, or all three side by side: the gradient of a packed tensor is packed, without copies.
"""

from __future__ import annotations

from typing import List, Optional, Tuple

import torch

from . import _operations, _torch_operators
from ._torch_operators import launch, new_results

# `k`: the keys if v is given; keys, then values if only q is given; else queries, keys, values. d_qk gives the widths.
_SOURCE = "Tensor? q, Tensor k, Tensor? v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? attn_sink, Tensor? seqused_q, \
Tensor? seqused_k"
_SOURCES = 8
_OPTIONS = "int d_qk, SymInt max_s_q, SymInt max_s_k, float softmax_scale, bool causal, bool deterministic, int lse_empty, int log_base, \
bool batch_dependent, int num_splits"
_this = _operations.MHA


def _parts(q: Optional[torch.Tensor], k: torch.Tensor, v: Optional[torch.Tensor], d_qk: int) -> List[torch.Tensor]:
    if q is not None and v is not None:
        return [q, k, v]
    count = 1 if q is not None else 2
    widths = [d_qk] * count + [k.shape[-1] - count * d_qk]
    parts = list(k.split(widths, -1))
    return parts if q is None else [q, *parts]


def _attend(
    q, k, v, cu_q, cu_k, attn_sink, used_q, used_k, d_qk, max_s_q, max_s_k, scale, causal, deterministic, *others
):
    parts = _parts(q, k, v, d_qk)
    results = new_results(_operations.MHA_FORWARD, parts, parts[2].shape[-1])
    tensors = (*parts, cu_q, cu_k, attn_sink, used_q, used_k, *results)
    launch(_operations.MHA_FORWARD, tensors, (max_s_q, max_s_k, scale, causal, *others))
    return results


def _attend_fake(q, k, v, cu_q, cu_k, attn_sink, used_q, used_k, d_qk, *options):
    parts = _parts(q, k, v, d_qk)
    return new_results(_operations.MHA_FORWARD, parts, parts[2].shape[-1])


def _new(tensor: Optional[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Returns memory for the gradient of a tensor. The launch writes all of it; tokens outside all sequences get 0."""
    return like.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape)


def _gradients_fake(q, k, v, cu_q, cu_k, attn_sink, used_q, used_k, out, lse, dout, dlse, of_sink, *options):
    return _new(q, k), _new(k, k), _new(v, k), _new(attn_sink if of_sink else None, lse)


def _gradients(
    q,
    k,
    v,
    cu_q,
    cu_k,
    attn_sink,
    used_q,
    used_k,
    out,
    lse,
    dout,
    dlse,
    of_sink,
    d_qk,
    max_s_q,
    max_s_k,
    scale,
    causal,
    deterministic,
    _,
    log_base,
    *_more,
):
    """`of_sink`: whether the gradient of attn_sink is wanted. As PyTorch's own operators do, this looks for
    use_deterministic_algorithms when it runs."""
    made = _gradients_fake(q, k, v, cu_q, cu_k, attn_sink, used_q, used_k, out, lse, dout, dlse, of_sink)
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    if dlse is not None and dlse.stride(-1) != 1:
        dlse = dlse.contiguous()
    written = _parts(None if q is None else made[0], made[1], None if v is None else made[2], d_qk)
    d_attn_sink = made[3] if of_sink else None
    inputs = (*_parts(q, k, v, d_qk), cu_q, cu_k, attn_sink, used_q, used_k, out, lse, dout, dlse)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    options = max_s_q, max_s_k, scale, causal, deterministic, log_base
    launch(_operations.MHA_BACKWARD, (*inputs, *written, d_attn_sink), options)
    return made


def _keep(ctx, inputs: Tuple, output: Tuple) -> None:
    ctx.save_for_backward(*inputs[:_SOURCES], *output)
    ctx.options = inputs[_SOURCES:]
    ctx.set_materialize_grads(False)


def _backward(ctx, dout, dlse):
    """A compiled graph has a gradient of every result that it returns: zeros if none arrives."""
    if torch.is_grad_enabled():
        raise NotImplementedError(f"{_this}: has no second derivative; call backward without create_graph=True")
    nothing = (None,) * (_SOURCES + len(ctx.options))
    source, results = ctx.saved_tensors[:_SOURCES], ctx.saved_tensors[_SOURCES:]
    if dout is None:
        if dlse is None:
            return nothing
        dout = torch.zeros_like(results[0])
    of_sink = ctx.needs_input_grad[5]
    *made, d_attn_sink = _torch_operators.registered.mha_gradients(*source, *results, dout, dlse, of_sink, *ctx.options)
    of_source = [None if of is None else gradient for of, gradient in zip(source, made)]
    return (*of_source, None, None, d_attn_sink if of_sink else None, *nothing[6:])


_torch_operators.register(
    "mha", f"({_SOURCE}, {_OPTIONS}) -> (Tensor, Tensor)", _this, _attend, _attend_fake, differentiable=True
)
_torch_operators.register(
    "mha_gradients",
    f"({_SOURCE}, Tensor out, Tensor lse, Tensor dout, Tensor? dlse, bool of_sink, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _this,
    _gradients,
    _gradients_fake,
)
torch.library.register_autograd(
    f"{_torch_operators.NAMESPACE}::mha", _backward, setup_context=_keep, lib=_torch_operators.operators
)

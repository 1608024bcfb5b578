# SPDX-License-Identifier: MIT
"""Dense multi-head attention over packed sequences, under FlashMLA's names."""

from __future__ import annotations

import math
from typing import Any, Optional, Tuple

from . import _operations
from ._arguments import MHA_WIDTHS, check_given, check_kinds, check_width, flag_of, integer_of, lse_options, module_of
from ._arguments import number_of, scale_of, shape_of


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_qo: Any,
    cu_seqlens_kv: Any,
    max_seqlen_qo: int,
    max_seqlen_kv: int,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
    *,
    out: Optional[Any] = None,
    lse: Optional[Any] = None,
    lse_empty: float = math.inf,
    log_base: float = math.e,
    stream: int = 0,
    batch_invariant: bool = False,
    num_splits: int = 0,
    attn_sink: Optional[Any] = None,
    lse_heads_first: bool = False,
    seqused_q: Optional[Any] = None,
    seqused_k: Optional[Any] = None,
) -> Tuple[Any, Any]:
    """Multi-head attention of a batch of sequences packed one after the other. For new results, PyTorch's autograd gives the
    gradients of q, k, v and attn_sink, through out and lse (docs/semantics.md, "Dense MHA, backward"), but no second derivatives, and
    none to torch.func.

    Args:
        q: [tokens, h_q, d_qk]; k: [keys, h_kv, d_qk]; v: [keys, h_kv, d_v]; bf16 or fp16. d_qk is 64, 96, 128, 192 or 256,
            d_v 64, 128 or 256. h_kv divides h_q: query head h reads key head h // (h_q // h_kv).
        cu_seqlens_qo, cu_seqlens_kv: [b + 1], int32: where each sequence's tokens and keys begin, and where the last ones end.
        max_seqlen_qo, max_seqlen_kv: bounds of a sequence's tokens and keys; results of a longer one are wrong. 0: not known.
        dropout_p: 0.
        softmax_scale: None: 1 / sqrt(d_qk).
        causal: token j of s_q sees the keys t ≤ s_k - s_q + j of its sequence; else all of them.
        deterministic: the gradient of q has the same bits in every run, as all other results always have. So it has while
            torch.use_deterministic_algorithms(True) holds in the backward pass.
        is_varlen: makes no difference; cu_seqlens determine the lengths.
        out, lse: where to write the results, in place of new ones. out may have strides; lse is the transpose of an array that
            may have some.
        lse_empty, log_base, stream: as in `flash_mla_with_kvcache`.
        batch_invariant: a sequence's results have the same bits in any batch. Where sequences have few tokens their keys are
            split; on a GPU by default into as many splits as take the least time for the whole batch.
        num_splits: of the keys of every sequence, at most 64; 1: none; 0: as many as take the least time.
        attn_sink: [h_q], fp32: out *= 1 / (1 + exp(attn_sink - lse)).
        lse_heads_first: lse is [h_q, tokens], as it is in memory.
        seqused_q, seqused_k: [b], int32: how many of each sequence's tokens, and of its keys, are in use, the first ones; clamped to
            those that it has. Bounds of lengths and causal count these. What follows is padding, which may hold anything: its
            out is 0, its lse that of a row without keys, and its gradients are 0.

    Returns:
        (out, lse): [tokens, h_q, d_v] of the type of q, and [tokens, h_q] fp32, the transpose of what is in memory. Results of
        tokens outside all sequences are not written; their gradients are 0.

    Raises:
        As `flash_mla_with_kvcache`.
    """
    # fmt: off
    return _attend(
        (q, k, v), 0, q, k, v, cu_seqlens_qo, cu_seqlens_kv, max_seqlen_qo, max_seqlen_kv, dropout_p, softmax_scale, causal,
        deterministic, is_varlen, out, lse, lse_empty, log_base, stream, batch_invariant, num_splits, attn_sink, lse_heads_first,
        seqused_q, seqused_k,
    )
    # fmt: on


# fmt: off
def _attend(
    source: Tuple[Any, Any, Any], d_qk: int,
    q: Any, k: Any, v: Any, cu_seqlens_qo: Any, cu_seqlens_kv: Any, max_seqlen_qo: int, max_seqlen_kv: int, dropout_p: float,
    softmax_scale: Optional[float], causal: bool, deterministic: bool, is_varlen: bool, out: Any, lse: Any, lse_empty: float,
    log_base: float, stream: int, batch_invariant: bool, num_splits: int, attn_sink: Any, lse_heads_first: bool, seqused_q: Any,
    seqused_k: Any,
) -> Tuple[Any, Any]:
    # fmt: on
    """`source`: the tensors that autograd differentiates: q, k and v, or packed ones, of which d_qk gives the widths. The arguments
    come one by one, because each call would make and unpack tuples of them."""
    this = _operations.MHA
    module = module_of(this, "q", q)
    inputs, last = (q, k, v, cu_seqlens_qo, cu_seqlens_kv, attn_sink, seqused_q, seqused_k), None
    if (
        out is None
        and lse is None
        and type(max_seqlen_qo) is type(max_seqlen_kv) is type(stream) is type(num_splits) is int
        and type(dropout_p) in _REAL
        and (softmax_scale is None or type(softmax_scale) is float)
        and type(lse_empty) is float
        and type(log_base) in _REAL
        and type(causal) is type(deterministic) is type(is_varlen) is type(batch_invariant) is bool
        and type(lse_heads_first) is bool
    ):  # equal numbers of these types pass the same checks; 1 and 1.0, which are equal too, would not
        flags = causal, deterministic, is_varlen, batch_invariant
        floats = dropout_p, softmax_scale, lse_empty, log_base
        numbers = max_seqlen_qo, max_seqlen_kv, stream, num_splits, *floats, *flags
        last = module.last_like(_operations.MHA_FORWARD, inputs, numbers, not lse_heads_first)
        again = last and last.repeat and last.repeat(inputs)
        if again is not None:
            return again
    kind = type(q)
    if not (
        type(k) is type(v) is type(cu_seqlens_qo) is type(cu_seqlens_kv) is kind
        and (out is None or type(out) is kind)
        and (lse is None or type(lse) is kind)
        and (attn_sink is None or type(attn_sink) is kind)
        and (seqused_q is None or type(seqused_q) is kind)
        and (seqused_k is None or type(seqused_k) is kind)
    ):  # the usual case passes
        arrays = k, v, cu_seqlens_qo, cu_seqlens_kv, out, lse, attn_sink, seqused_q, seqused_k
        check_given(this, module, *zip(_MHA, arrays[:4]))
        check_kinds(this, module, *zip(_MHA[4:], arrays[4:]))
    if number_of(this, "dropout_p", dropout_p) != 0:
        raise ValueError(f"{this}: dropout_p: is {dropout_p}, must be 0: there is no dropout")
    reproducible = flag_of(this, "deterministic", deterministic)
    flag_of(this, "is_varlen", is_varlen)
    heads_first = flag_of(this, "lse_heads_first", lse_heads_first)
    of_q = shape_of(this, module, "q", q, 3)
    tokens, h_q, _ = of_q
    check_width(this, of_q, shape_of(this, module, "k", k, 3)[2], "k", MHA_WIDTHS)
    d_v, stream = shape_of(this, module, "v", v, 3)[2], integer_of(this, "stream", stream)
    options = (
        integer_of(this, "max_seqlen_qo", max_seqlen_qo),
        integer_of(this, "max_seqlen_kv", max_seqlen_kv),
        0.0 if softmax_scale is None else scale_of(this, "softmax_scale", softmax_scale, "None = 1 / sqrt(d_qk)"),
        flag_of(this, "causal", causal),
        *lse_options(this, lse_empty, log_base),
        not flag_of(this, "batch_invariant", batch_invariant),
        integer_of(this, "num_splits", num_splits),
    )
    if not 0 <= options[-1] <= MOST_SPLITS:
        raise ValueError(
            f"{this}: num_splits: is {num_splits}, must be 1 to {MOST_SPLITS}, or 0 (as many as take the least time)"
        )
    in_memory = lse  # [h_q, tokens]
    if lse is not None and not heads_first:
        shape = tuple(shape_of(this, module, "lse", lse, 2))
        if shape != (tokens, h_q):
            raise ValueError(f"{this}: lse: shape is {shape}, must be {(tokens, h_q)}, [tokens, h_q] of q")
        in_memory = module.transposed(this, "lse", lse, stream)
    turned = lse is None and not heads_first
    if out is None and lse is None and module.wants_gradient(*source, attn_sink):
        names = "q", "k", "v", "cu_seqlens_qo", "cu_seqlens_kv", "attn_sink", "seqused_q", "seqused_k"
        all_options = (d_qk, *options[:4], reproducible, *options[4:])
        out, in_memory = module.attend_for_gradient(names, (*source, *inputs[3:]), all_options)
        return out, in_memory.T if turned else in_memory
    given = out, in_memory
    out, new = module.run(_operations.MHA_FORWARD, inputs, given, options, stream, d_v, turned, last)
    return out, new if lse is None else lse


MOST_SPLITS = 64
_REAL = float, int
# The arrays other than q.
_MHA = "k", "v", "cu_seqlens_qo", "cu_seqlens_kv", "out", "lse", "attn_sink", "seqused_q", "seqused_k"


def flash_attn_varlen_qkvpacked_func(
    qkv: Any,
    cu_seqlens: Any,
    max_seqlen: int,
    head_dim_qk: int,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
    *,
    out: Optional[Any] = None,
    lse: Optional[Any] = None,
    lse_empty: float = math.inf,
    log_base: float = math.e,
    stream: int = 0,
    batch_invariant: bool = False,
    num_splits: int = 0,
    attn_sink: Optional[Any] = None,
    lse_heads_first: bool = False,
    seqused_q: Optional[Any] = None,
    seqused_k: Optional[Any] = None,
) -> Tuple[Any, Any]:
    """Calls `flash_attn_varlen_func` on qkv [tokens, h, 2 · head_dim_qk + d_v]: q, k and v side by side, read in place. Errors
    name one of these."""
    q, k, v = _parts("flash_attn_varlen_qkvpacked_func", "qkv", qkv, head_dim_qk, 2, stream)
    # fmt: off
    return _attend(
        (None, qkv, None), head_dim_qk, q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal,
        deterministic, is_varlen, out, lse, lse_empty, log_base, stream, batch_invariant, num_splits, attn_sink, lse_heads_first,
        seqused_q, seqused_k,
    )
    # fmt: on


def flash_attn_varlen_kvpacked_func(
    q: Any,
    kv: Any,
    cu_seqlens_qo: Any,
    cu_seqlens_kv: Any,
    max_seqlen_qo: int,
    max_seqlen_kv: int,
    head_dim_qk: int,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
    *,
    out: Optional[Any] = None,
    lse: Optional[Any] = None,
    lse_empty: float = math.inf,
    log_base: float = math.e,
    stream: int = 0,
    batch_invariant: bool = False,
    num_splits: int = 0,
    attn_sink: Optional[Any] = None,
    lse_heads_first: bool = False,
    seqused_q: Optional[Any] = None,
    seqused_k: Optional[Any] = None,
) -> Tuple[Any, Any]:
    """Calls `flash_attn_varlen_func` on kv [keys, h_kv, head_dim_qk + d_v]: k and v side by side, read in place. Errors name one
    of these."""
    k, v = _parts("flash_attn_varlen_kvpacked_func", "kv", kv, head_dim_qk, 1, stream)
    # fmt: off
    return _attend(
        (q, kv, None), head_dim_qk, q, k, v, cu_seqlens_qo, cu_seqlens_kv, max_seqlen_qo, max_seqlen_kv, dropout_p, softmax_scale,
        causal, deterministic, is_varlen, out, lse, lse_empty, log_base, stream, batch_invariant, num_splits, attn_sink,
        lse_heads_first, seqused_q, seqused_k,
    )
    # fmt: on


def _parts(this: str, name: str, packed: Any, head_dim_qk: Any, count: int, stream: Any) -> Any:
    """Returns `count` parts of head_dim_qk values, and the rest."""
    module = module_of(this, name, packed)
    width = shape_of(this, module, name, packed, 3)[2]
    head_dim_qk, stream = integer_of(this, "head_dim_qk", head_dim_qk), integer_of(this, "stream", stream)
    if head_dim_qk < 1 or count * head_dim_qk >= width:
        most = f"{count} · head_dim_qk" if count > 1 else "head_dim_qk"
        raise ValueError(
            f"{this}: head_dim_qk: is {head_dim_qk}, must be at least 1, and {most} below the {width} values of {name}"
        )
    return module.parts(this, name, packed, [*(head_dim_qk * (i + 1) for i in range(count)), width], stream)

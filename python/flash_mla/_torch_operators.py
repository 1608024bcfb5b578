# SPDX-License-Identifier: MIT
"""The operations as operators of PyTorch's dispatcher.

Registered are flash_mla::decode_plan, ::dense_decode, ::sparse_plan, ::sparse_decode, ::sparse_prefill, ::merge, ::cache_gather,
which make their results, and ::dense_decode_out, ::sparse_decode_out, ::sparse_prefill_out, ::merge_out, ::cache_gather_out,
::cache_append, which write into given ones; each with what torch.compile asks of it. They run on the current stream, take their
memory from PyTorch's allocator and do not synchronise.

None has a gradient, and each says so at the call: under grad mode it refuses a tensor that requires one, in eager mode as in a
compiled graph, whose backward pass is made before it is known whether anybody wants it.
"""

from __future__ import annotations

from typing import NoReturn, Tuple

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from . import _library, _operations, _torch_tensors
from ._torch_tensors import current_stream, device_of, is_elsewhere

# ---- Operators ------------------------------------------------------------------------------------------------------

_operators = torch.library.Library("flash_mla", "DEF")


def _operator(schema: str, of: str):
    """Registers a function as the operator of its name, on the CPU and on NVIDIA GPUs. `of`: the public function that it is of."""

    def register(function):
        name = function.__name__
        _operators.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        for key in ("CPU", "CUDA"):
            _operators.impl(name, function, key)
        operator = getattr(torch.ops.flash_mla, name).default
        _operators.impl(name, _without_gradient(operator, of), "Autograd", with_keyset=True)
        aliases = [argument.alias_info for argument in operator._schema.arguments]
        written = [i for i, alias in enumerate(aliases) if alias is not None and alias.is_write]
        if written:
            _operators.impl(name, _counting(operator, written), "ADInplaceOrView", with_keyset=True)
        return function

    return register


def _without_gradient(operator, function: str):
    """What the dispatcher calls where autograd has its turn."""
    names = [argument.name for argument in operator._schema.arguments]
    below = torch._C._after_autograd_keyset

    def autograd(keys, *arguments):
        if torch.is_grad_enabled():
            for name, value in zip(names, arguments):
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    _refuse_gradient(function, name, "requires a gradient")
        if forward_ad._current_level >= 0:
            for name, value in zip(names, arguments):
                if isinstance(value, torch.Tensor) and forward_ad.unpack_dual(value).tangent is not None:
                    _refuse_gradient(function, name, "has a tangent")
        return operator.redispatch(keys & below, *arguments)

    return autograd


def _counting(operator, written: list[int]):
    """What the dispatcher calls of an operator that writes: the tensors have a new version, so that a backward pass which kept one of
    them for itself does not take the new values for the old ones."""
    below = torch._C._after_ADInplaceOrView_keyset

    def count(keys, *arguments):
        result = operator.redispatch(keys & below, *arguments)
        count_writes(*(arguments[i] for i in written))
        return result

    return count


def count_writes(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        increment_version(tensor)


def _refuse_gradient(function: str, name: str, why: str) -> NoReturn:
    name = _operations.in_words_of(function, f"{name}: ")
    raise NotImplementedError(
        f"{function}: {name}{why}, and this function has no derivative; call it under torch.no_grad() or "
        "torch.inference_mode(), or pass the tensor's detach()"
    )


def _fake(function):
    """Registers what an operator's results look like, for a call whose tensors have no memory."""
    return torch.library.register_fake("flash_mla::" + function.__name__.removeprefix("_fake_"))(function)


@_operator("(Tensor seqlens, int s_q, int h_q, int h_kv) -> (Tensor, Tensor)", of=_operations.PLAN)
def decode_plan(seqlens: torch.Tensor, s_q: int, h_q: int, h_kv: int) -> Tuple[torch.Tensor, torch.Tensor]:
    return plan(_operations.DECODE, seqlens, s_q, h_q, h_kv)


def plan(function: str, seqlens: torch.Tensor, s_q: int, h_q: int, h_kv: int) -> Tuple[torch.Tensor, torch.Tensor]:
    if is_elsewhere(seqlens):
        with torch.cuda.device(seqlens.device):
            return plan(function, seqlens, s_q, h_q, h_kv)
    tables = _plan_tables(function, seqlens, s_q, h_q, h_kv)
    _operations.decode_plan(function, _torch_tensors, seqlens, s_q, h_q, h_kv, *tables, current_stream(seqlens))
    return tables


def _plan_tables(
    function: str, seqlens: torch.Tensor, s_q: int, h_q: int, h_kv: int
) -> Tuple[torch.Tensor, torch.Tensor]:
    if seqlens.ndim != 1:
        raise ValueError(f"{function}: cache_seqlens: has {seqlens.ndim} dimensions, must have 1")
    place = (_library.CUDA, seqlens.device.index or 0) if seqlens.is_cuda else (_library.CPU, 0)
    rows = _operations.decode_partitions(function, *place, s_q, h_q, h_kv)
    partitions = seqlens.new_empty((rows, _library.PARTITION_FIELDS), dtype=torch.int32)
    return partitions, seqlens.new_empty((seqlens.shape[0] + 1,), dtype=torch.int32)


@_fake
def _fake_decode_plan(seqlens, s_q, h_q, h_kv):
    return _plan_tables(_operations.DECODE, seqlens, s_q, h_q, h_kv)


_DECODE = (
    "Tensor q, Tensor kv_cache, Tensor? block_table, Tensor seqlens, Tensor? partitions, "
    "Tensor? num_splits, Tensor? attn_sink"
    "{results}, float softmax_scale, bool causal, int lse_empty, int log_base, bool batch_invariant"
)


@_operator("(" + _DECODE.format(results=", Tensor(a!) out, Tensor(b!) lse") + ") -> ()", of=_operations.DECODE)
def dense_decode_out(
    q,
    kv_cache,
    block_table,
    seqlens,
    partitions,
    num_splits,
    attn_sink,
    out,
    lse,
    softmax_scale,
    causal,
    lse_empty,
    log_base,
    batch_invariant,
):
    if is_elsewhere(q):
        with torch.cuda.device(q.device):
            return dense_decode_out(
                q, kv_cache, block_table, seqlens, partitions, num_splits, attn_sink, out, lse,
                softmax_scale, causal, lse_empty, log_base, batch_invariant,
            )  # fmt: skip
    _operations.dense_decode(
        _torch_tensors, q, kv_cache, block_table, seqlens, partitions, num_splits, attn_sink, out, lse,
        softmax_scale, causal, lse_empty, log_base, batch_invariant, current_stream(q),
    )  # fmt: skip


@_fake
def _fake_dense_decode_out(*arguments):
    pass


def decode_results(q: torch.Tensor, d_v: int) -> Tuple[torch.Tensor, torch.Tensor]:
    b, s_q, h_q, _ = q.shape
    return q.new_empty(b, s_q, h_q, d_v), q.new_empty(b, h_q, s_q, dtype=torch.float32)


@_operator("(" + _DECODE.format(results=", int d_v") + ") -> (Tensor, Tensor)", of=_operations.DECODE)
def dense_decode(
    q,
    kv_cache,
    block_table,
    seqlens,
    partitions,
    num_splits,
    attn_sink,
    d_v,
    softmax_scale,
    causal,
    lse_empty,
    log_base,
    batch_invariant,
):
    out, lse = decode_results(q, d_v)
    dense_decode_out(
        q, kv_cache, block_table, seqlens, partitions, num_splits, attn_sink, out, lse,
        softmax_scale, causal, lse_empty, log_base, batch_invariant,
    )  # fmt: skip
    return out, lse


@_fake
def _fake_dense_decode(q, kv_cache, block_table, seqlens, partitions, num_splits, attn_sink, d_v, *options):
    return decode_results(q, d_v)


@_operator(
    "(Tensor q, Tensor? topk_length, Tensor? extra_topk_length, int b, int topk, int extra_topk, int s_q, int h_q)"
    " -> (Tensor, Tensor)",
    of=_operations.PLAN,
)
def sparse_plan(q, topk_length, extra_topk_length, b, topk, extra_topk, s_q, h_q):
    sizes = b, topk, extra_topk, s_q, h_q
    return plan_of_lists(_operations.DECODE, q, topk_length, extra_topk_length, sizes, _of_any_batch(sizes))


def _of_any_batch(sizes):
    """What the number of partitions may depend on in a compiled graph, where b can be a symbol: one graph serves every b."""
    return 0, 0, 0, *sizes[3:]


def plan_of_lists(function, q, topk_length, extra_topk_length, sizes, known):
    """`sizes`: b, topk, extra_topk, s_q, h_q; `known`: of those, what the number of partitions is to depend on."""
    if is_elsewhere(q):
        with torch.cuda.device(q.device):
            return plan_of_lists(function, q, topk_length, extra_topk_length, sizes, known)
    place, tables = device_of(q), _sparse_tables(function, q, sizes[0], known)
    _operations.sparse_plan(
        function, _torch_tensors, place, topk_length, extra_topk_length, *sizes, *tables, current_stream(q)
    )
    return tables


def _sparse_tables(function: str, q: torch.Tensor, b: int, known: Tuple[int, ...]) -> Tuple[torch.Tensor, torch.Tensor]:
    place = (_library.CUDA, q.device.index or 0) if q.is_cuda else (_library.CPU, 0)
    rows = _operations.sparse_partitions(function, *place, *known)
    partitions = q.new_empty((rows, _library.PARTITION_FIELDS), dtype=torch.int32)
    return partitions, q.new_empty((b + 1,), dtype=torch.int32)


@_fake
def _fake_sparse_plan(q, topk_length, extra_topk_length, b, topk, extra_topk, s_q, h_q):
    return _sparse_tables(_operations.DECODE, q, b, _of_any_batch((b, topk, extra_topk, s_q, h_q)))


_SPARSE = (
    "(Tensor q, Tensor kv_cache, Tensor indices, Tensor? topk_length, Tensor? attn_sink, Tensor? extra_kv_cache, "
    "Tensor? extra_indices, Tensor? extra_topk_length, Tensor? partitions, Tensor? num_splits"
    "{results}, int kv_format, float softmax_scale, int lse_empty, int log_base, bool batch_invariant)"
)


@_operator(_SPARSE.format(results=", Tensor(a!) out, Tensor(b!) lse") + " -> ()", of=_operations.DECODE)
def sparse_decode_out(
    q,
    kv_cache,
    indices,
    topk_length,
    attn_sink,
    extra_kv_cache,
    extra_indices,
    extra_topk_length,
    partitions,
    num_splits,
    out,
    lse,
    kv_format,
    softmax_scale,
    lse_empty,
    log_base,
    batch_invariant,
):
    inputs = q, kv_cache, indices, topk_length, attn_sink, extra_kv_cache, extra_indices, extra_topk_length
    rest = partitions, num_splits, out, lse, kv_format, softmax_scale, lse_empty, log_base, batch_invariant
    if is_elsewhere(q):
        with torch.cuda.device(q.device):
            return sparse_decode_out(*inputs, *rest)
    _operations.sparse_decode(_torch_tensors, *inputs, *rest, current_stream(q))


@_fake
def _fake_sparse_decode_out(*arguments):
    pass


@_operator(_SPARSE.format(results=", int d_v") + " -> (Tensor, Tensor)", of=_operations.DECODE)
def sparse_decode(
    q,
    kv_cache,
    indices,
    topk_length,
    attn_sink,
    extra_kv_cache,
    extra_indices,
    extra_topk_length,
    partitions,
    num_splits,
    d_v,
    kv_format,
    softmax_scale,
    lse_empty,
    log_base,
    batch_invariant,
):
    inputs = q, kv_cache, indices, topk_length, attn_sink, extra_kv_cache, extra_indices, extra_topk_length
    out, lse = decode_results(q, d_v)
    sparse_decode_out(
        *inputs, partitions, num_splits, out, lse, kv_format, softmax_scale, lse_empty, log_base, batch_invariant
    )
    return out, lse


@_fake
def _fake_sparse_decode(q, *arguments):
    return decode_results(q, arguments[9])


_PREFILL = (
    "(Tensor q, Tensor kv, Tensor indices, Tensor? topk_length, Tensor? attn_sink"
    "{results}, int kv_format, float softmax_scale, int lse_empty, int log_base)"
)


@_operator(
    _PREFILL.format(results=", Tensor(a!) out, Tensor(b!) max_logits, Tensor(c!) lse") + " -> ()",
    of=_operations.PREFILL,
)
def sparse_prefill_out(
    q,
    kv,
    indices,
    topk_length,
    attn_sink,
    out,
    max_logits,
    lse,
    kv_format,
    softmax_scale,
    lse_empty,
    log_base,
):
    tensors = q, kv, indices, topk_length, attn_sink, out, max_logits, lse
    options = kv_format, softmax_scale, lse_empty, log_base
    if is_elsewhere(q):
        with torch.cuda.device(q.device):
            return sparse_prefill_out(*tensors, *options)
    _operations.sparse_prefill(_torch_tensors, *tensors, *options, current_stream(q))


@_fake
def _fake_sparse_prefill_out(*arguments):
    pass


def prefill_row(q: torch.Tensor) -> torch.Tensor:
    """A result of a number a row."""
    return q.new_empty(q.shape[:2], dtype=torch.float32)


def _prefill_results(q: torch.Tensor, d_v: int) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.new_empty(*q.shape[:2], d_v), prefill_row(q), prefill_row(q)


@_operator(_PREFILL.format(results=", int d_v") + " -> (Tensor, Tensor, Tensor)", of=_operations.PREFILL)
def sparse_prefill(
    q,
    kv,
    indices,
    topk_length,
    attn_sink,
    d_v,
    kv_format,
    softmax_scale,
    lse_empty,
    log_base,
):
    inputs, options = (q, kv, indices, topk_length, attn_sink), (kv_format, softmax_scale, lse_empty, log_base)
    results = _prefill_results(q, d_v)
    sparse_prefill_out(*inputs, *results, *options)
    return results


@_fake
def _fake_sparse_prefill(q, kv, indices, topk_length, attn_sink, d_v, *options):
    return _prefill_results(q, d_v)


_MERGE = "Tensor out_parts, Tensor lse_parts, Tensor? attn_sink{results}, int lse_empty, int log_base"


@_operator("(" + _MERGE.format(results=", Tensor(a!) out, Tensor(b!) lse") + ") -> ()", of=_operations.MERGE)
def merge_out(out_parts, lse_parts, attn_sink, out, lse, lse_empty, log_base):
    if is_elsewhere(out_parts):
        with torch.cuda.device(out_parts.device):
            return merge_out(out_parts, lse_parts, attn_sink, out, lse, lse_empty, log_base)
    _operations.merge(
        _torch_tensors, out_parts, lse_parts, attn_sink, out, lse, lse_empty, log_base, current_stream(out_parts)
    )


@_fake
def _fake_merge_out(*arguments):
    pass


def merge_results(out_parts: torch.Tensor, lse_parts: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty(out_parts.shape[1:], dtype=out_parts.dtype, device=out_parts.device)
    return out, torch.empty(lse_parts.shape[1:], dtype=lse_parts.dtype, device=lse_parts.device)


@_operator("(" + _MERGE.format(results="") + ") -> (Tensor, Tensor)", of=_operations.MERGE)
def merge(out_parts, lse_parts, attn_sink, lse_empty, log_base):
    out, lse = merge_results(out_parts, lse_parts)
    merge_out(out_parts, lse_parts, attn_sink, out, lse, lse_empty, log_base)
    return out, lse


@_fake
def _fake_merge(out_parts, lse_parts, attn_sink, lse_empty, log_base):
    return merge_results(out_parts, lse_parts)


_APPEND = "Tensor latent, Tensor? rope, Tensor(a!) kv_cache, Tensor slot_mapping, int kv_format, float cache_scale"


@_operator("(" + _APPEND + ") -> ()", of=_operations.APPEND)
def cache_append(latent, rope, kv_cache, slot_mapping, kv_format, cache_scale):
    if is_elsewhere(latent):
        with torch.cuda.device(latent.device):
            return cache_append(latent, rope, kv_cache, slot_mapping, kv_format, cache_scale)
    _operations.cache_append(
        _torch_tensors, latent, rope, kv_cache, slot_mapping, kv_format, cache_scale, current_stream(latent)
    )  # fmt: skip


@_fake
def _fake_cache_append(*arguments):
    pass


@_operator(
    "(Tensor kv_cache, Tensor slots, Tensor(a!) out, int kv_format, float cache_scale) -> ()", of=_operations.GATHER
)
def cache_gather_out(kv_cache, slots, out, kv_format, cache_scale):
    if is_elsewhere(kv_cache):
        with torch.cuda.device(kv_cache.device):
            return cache_gather_out(kv_cache, slots, out, kv_format, cache_scale)
    _operations.cache_gather(_torch_tensors, kv_cache, slots, out, kv_format, cache_scale, current_stream(kv_cache))


@_fake
def _fake_cache_gather_out(*arguments):
    pass


def _gathered(kv_cache: torch.Tensor, slots: torch.Tensor, kv_format: int) -> torch.Tensor:
    shape = _operations.gathered_shape(kv_cache.shape, slots.shape, kv_format)
    return kv_cache.new_empty(shape, dtype=torch.bfloat16 if kv_format > 2 else kv_cache.dtype)


@_operator("(Tensor kv_cache, Tensor slots, int kv_format, float cache_scale) -> Tensor", of=_operations.GATHER)
def cache_gather(kv_cache, slots, kv_format, cache_scale):
    out = _gathered(kv_cache, slots, kv_format)
    cache_gather_out(kv_cache, slots, out, kv_format, cache_scale)
    return out


@_fake
def _fake_cache_gather(kv_cache, slots, kv_format, cache_scale):
    return _gathered(kv_cache, slots, kv_format)

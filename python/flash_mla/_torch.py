# SPDX-License-Identifier: MIT
"""PyTorch: its tensors described, and the operations registered with its dispatcher.

Imported where PyTorch has been: with this package if it was there before, else with the first array. Registered are
flash_mla::decode_plan, ::dense_decode, ::sparse_plan, ::sparse_decode, ::sparse_prefill, ::merge, ::cache_gather, which make their
results, and ::dense_decode_out, ::sparse_decode_out, ::sparse_prefill_out, ::merge_out, ::cache_gather_out, ::cache_append, which
write into given ones; each with what torch.compile asks of it. They run on the current stream, take their memory from PyTorch's
allocator and do not synchronise.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, Optional, Tuple

import torch

from . import _library, _operations
from ._call import Place, dtype_word, put_tensor

# ---- Tensors --------------------------------------------------------------------------------------------------------

_KINDS = {"bool": 6, "uint": 1, "int": 0, "float": 2, "bfloat": 4, "complex": 5}  # DLPack's codes


def _dtype_words() -> dict[torch.dtype, int]:
    """Of every dtype that DLPack has a name for. Others get a code that the library does not know, so that it refuses them."""
    words = {}
    for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}:
        name = str(dtype).removeprefix("torch.")
        kind = name.rstrip("0123456789")
        bits = 8 * dtype.itemsize
        words[dtype] = dtype_word(_KINDS.get(kind, 255), bits)
    return words


_WORDS = _dtype_words()


def _put_by_attributes(tensor: torch.Tensor, place: Place) -> int:
    device = tensor.get_device()  # -1: the CPU
    device_type, device = (_library.CPU, 0) if device < 0 else (_library.CUDA, device)
    form = device_type, device, _WORDS[tensor.dtype], tensor.shape, tensor.stride()
    return put_tensor(place, tensor.data_ptr(), *form)


def _exchange() -> Optional[Any]:
    """PyTorch's own function that writes a DLTensor, of DLPack's exchange interface, from PyTorch 2.10 on: a third of the time. The
    shape and the strides that it points to are the tensor's own."""
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return None
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    table = _ExchangeAPI.from_address(get_pointer(capsule, b"dlpack_exchange_api"))
    return table.tensor_from_object if table.major == 1 and table.tensor_from_object else None


class _ExchangeAPI(ctypes.Structure):
    """DLPackExchangeAPI, up to what is used of it."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("older", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("managed_from_object", ctypes.c_void_p),
        ("managed_to_object", ctypes.c_void_p),
        # Called with the tensor's id, which is its address, and a Place, which is not declared: either way ctypes has least to
        # convert.
        ("tensor_from_object", ctypes.PYFUNCTYPE(None, ctypes.c_void_p)),
    ]


_write = _exchange()


def put(tensor: Optional[torch.Tensor], place: Place) -> Optional[int]:
    """Writes the tensor to `place`, whose address is returned; None: there is none."""
    if tensor is None:
        return None
    if _write is not None:
        try:
            _write(id(tensor), place)
            return place.address
        except RuntimeError:  # of a type that DLPack has no name for: the library says what it wants
            pass
    return _put_by_attributes(tensor, place)


# What torch.cuda.caching_allocator_alloc and _delete call: the memory that a tensor would have, from the same pool.
_allocate: Any = getattr(torch._C, "_cuda_cudaCachingAllocator_raw_alloc", None)
_free: Any = getattr(torch._C, "_cuda_cudaCachingAllocator_raw_delete", None)


def scratch(like: torch.Tensor, size: int, stream: int) -> Tuple[Any, int]:
    """Memory for one call on the stream of the current GPU, and its address."""
    if like.is_cuda and _allocate is not None:
        address = _allocate(size, stream)
        return address, address
    memory = like.new_empty(size, dtype=torch.uint8)
    return memory, memory.data_ptr()


def free_scratch(memory: Any) -> None:
    """Once the call is in its stream, or in the graph that is captured from it: whoever gets the memory next comes after it
    there."""
    if type(memory) is int and memory:
        _free(memory)


def device_of(tensor: torch.Tensor) -> Tuple[int, int]:
    return (_library.CUDA, tensor.device.index) if tensor.is_cuda else (_library.CPU, 0)


def is_array(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def shape_of(function: str, name: str, tensor: torch.Tensor) -> torch.Size:
    return tensor.shape


KIND = "torch.Tensor"

# ---- GPUs -----------------------------------------------------------------------------------------------------------

_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # without the object that the public way makes
_current_device = getattr(torch._C, "_cuda_getDevice", None) or torch.cuda.current_device


def _stream(tensor: torch.Tensor) -> int:
    """The current stream of the tensor's device; 0 on the CPU."""
    if not tensor.is_cuda:
        return 0
    if _raw_stream is not None:
        return _raw_stream(tensor.get_device())
    return torch.cuda.current_stream(tensor.device).cuda_stream


def _is_elsewhere(tensor: torch.Tensor) -> bool:
    """Whether another GPU than the tensor's is the current one."""
    return tensor.is_cuda and _current_device() != tensor.get_device()


# ---- Operators ------------------------------------------------------------------------------------------------------

_operators = torch.library.Library("flash_mla", "DEF")


def _operator(schema: str):
    """Registers a function as the operator of its name, on the CPU and on NVIDIA GPUs."""

    def register(function):
        name = function.__name__
        _operators.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        for key in ("CPU", "CUDA"):
            _operators.impl(name, function, key)
        return function

    return register


def _fake(function):
    """Registers what an operator's results look like, for a call whose tensors have no memory."""
    return torch.library.register_fake("flash_mla::" + function.__name__.removeprefix("_fake_"))(function)


@_operator("(Tensor seqlens, int s_q, int h_q, int h_kv) -> (Tensor, Tensor)")
def decode_plan(seqlens: torch.Tensor, s_q: int, h_q: int, h_kv: int) -> Tuple[torch.Tensor, torch.Tensor]:
    return _plan(_operations.DECODE, seqlens, s_q, h_q, h_kv)


def _plan(function: str, seqlens: torch.Tensor, s_q: int, h_q: int, h_kv: int) -> Tuple[torch.Tensor, torch.Tensor]:
    if _is_elsewhere(seqlens):
        with torch.cuda.device(seqlens.device):
            return _plan(function, seqlens, s_q, h_q, h_kv)
    tables = _plan_tables(function, seqlens, s_q, h_q, h_kv)
    _operations.decode_plan(function, _THIS, seqlens, s_q, h_q, h_kv, *tables, _stream(seqlens))
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


@_operator("(" + _DECODE.format(results=", Tensor(a!) out, Tensor(b!) lse") + ") -> ()")
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
    if _is_elsewhere(q):
        with torch.cuda.device(q.device):
            return dense_decode_out(
                q, kv_cache, block_table, seqlens, partitions, num_splits, attn_sink, out, lse,
                softmax_scale, causal, lse_empty, log_base, batch_invariant,
            )  # fmt: skip
    _operations.dense_decode(
        _THIS, q, kv_cache, block_table, seqlens, partitions, num_splits, attn_sink, out, lse,
        softmax_scale, causal, lse_empty, log_base, batch_invariant, _stream(q),
    )  # fmt: skip


@_fake
def _fake_dense_decode_out(*arguments):
    pass


def _decode_results(q: torch.Tensor, d_v: int) -> Tuple[torch.Tensor, torch.Tensor]:
    b, s_q, h_q, _ = q.shape
    return q.new_empty(b, s_q, h_q, d_v), q.new_empty(b, h_q, s_q, dtype=torch.float32)


@_operator("(" + _DECODE.format(results=", int d_v") + ") -> (Tensor, Tensor)")
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
    out, lse = _decode_results(q, d_v)
    dense_decode_out(
        q, kv_cache, block_table, seqlens, partitions, num_splits, attn_sink, out, lse,
        softmax_scale, causal, lse_empty, log_base, batch_invariant,
    )  # fmt: skip
    return out, lse


@_fake
def _fake_dense_decode(q, kv_cache, block_table, seqlens, partitions, num_splits, attn_sink, d_v, *options):
    return _decode_results(q, d_v)


@_operator(
    "(Tensor q, Tensor? topk_length, Tensor? extra_topk_length, int b, int topk, int extra_topk, int s_q, int h_q)"
    " -> (Tensor, Tensor)"
)
def sparse_plan(q, topk_length, extra_topk_length, b, topk, extra_topk, s_q, h_q):
    sizes = b, topk, extra_topk, s_q, h_q
    return _sparse_plan(_operations.DECODE, q, topk_length, extra_topk_length, sizes, _of_any_batch(sizes))


def _of_any_batch(sizes):
    """What the number of partitions may depend on in a compiled graph, where b can be a symbol: one graph serves every b."""
    return 0, 0, 0, *sizes[3:]


def _sparse_plan(function, q, topk_length, extra_topk_length, sizes, known):
    """`sizes`: b, topk, extra_topk, s_q, h_q; `known`: of those, what the number of partitions is to depend on."""
    if _is_elsewhere(q):
        with torch.cuda.device(q.device):
            return _sparse_plan(function, q, topk_length, extra_topk_length, sizes, known)
    place, tables = device_of(q), _sparse_tables(function, q, sizes[0], known)
    _operations.sparse_plan(function, _THIS, place, topk_length, extra_topk_length, *sizes, *tables, _stream(q))
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


@_operator(_SPARSE.format(results=", Tensor(a!) out, Tensor(b!) lse") + " -> ()")
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
    if _is_elsewhere(q):
        with torch.cuda.device(q.device):
            return sparse_decode_out(*inputs, *rest)
    _operations.sparse_decode(_THIS, *inputs, *rest, _stream(q))


@_fake
def _fake_sparse_decode_out(*arguments):
    pass


@_operator(_SPARSE.format(results=", int d_v") + " -> (Tensor, Tensor)")
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
    out, lse = _decode_results(q, d_v)
    sparse_decode_out(
        *inputs, partitions, num_splits, out, lse, kv_format, softmax_scale, lse_empty, log_base, batch_invariant
    )
    return out, lse


@_fake
def _fake_sparse_decode(q, *arguments):
    return _decode_results(q, arguments[9])


_PREFILL = (
    "(Tensor q, Tensor kv, Tensor indices, Tensor? topk_length, Tensor? attn_sink"
    "{results}, int kv_format, float softmax_scale, int lse_empty, int log_base)"
)


@_operator(_PREFILL.format(results=", Tensor(a!) out, Tensor(b!) max_logits, Tensor(c!) lse") + " -> ()")
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
    if _is_elsewhere(q):
        with torch.cuda.device(q.device):
            return sparse_prefill_out(*tensors, *options)
    _operations.sparse_prefill(_THIS, *tensors, *options, _stream(q))


@_fake
def _fake_sparse_prefill_out(*arguments):
    pass


def _prefill_row(q: torch.Tensor) -> torch.Tensor:
    """A result of a number a row."""
    return q.new_empty(q.shape[:2], dtype=torch.float32)


def _prefill_results(q: torch.Tensor, d_v: int) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.new_empty(*q.shape[:2], d_v), _prefill_row(q), _prefill_row(q)


@_operator(_PREFILL.format(results=", int d_v") + " -> (Tensor, Tensor, Tensor)")
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


@_operator("(" + _MERGE.format(results=", Tensor(a!) out, Tensor(b!) lse") + ") -> ()")
def merge_out(out_parts, lse_parts, attn_sink, out, lse, lse_empty, log_base):
    if _is_elsewhere(out_parts):
        with torch.cuda.device(out_parts.device):
            return merge_out(out_parts, lse_parts, attn_sink, out, lse, lse_empty, log_base)
    _operations.merge(_THIS, out_parts, lse_parts, attn_sink, out, lse, lse_empty, log_base, _stream(out_parts))


@_fake
def _fake_merge_out(*arguments):
    pass


def _merge_results(out_parts: torch.Tensor, lse_parts: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty(out_parts.shape[1:], dtype=out_parts.dtype, device=out_parts.device)
    return out, torch.empty(lse_parts.shape[1:], dtype=lse_parts.dtype, device=lse_parts.device)


@_operator("(" + _MERGE.format(results="") + ") -> (Tensor, Tensor)")
def merge(out_parts, lse_parts, attn_sink, lse_empty, log_base):
    out, lse = _merge_results(out_parts, lse_parts)
    merge_out(out_parts, lse_parts, attn_sink, out, lse, lse_empty, log_base)
    return out, lse


@_fake
def _fake_merge(out_parts, lse_parts, attn_sink, lse_empty, log_base):
    return _merge_results(out_parts, lse_parts)


_APPEND = "Tensor latent, Tensor? rope, Tensor(a!) kv_cache, Tensor slot_mapping, int kv_format, float cache_scale"


@_operator("(" + _APPEND + ") -> ()")
def cache_append(latent, rope, kv_cache, slot_mapping, kv_format, cache_scale):
    if _is_elsewhere(latent):
        with torch.cuda.device(latent.device):
            return cache_append(latent, rope, kv_cache, slot_mapping, kv_format, cache_scale)
    _operations.cache_append(
        _THIS, latent, rope, kv_cache, slot_mapping, kv_format, cache_scale, _stream(latent)
    )  # fmt: skip


@_fake
def _fake_cache_append(*arguments):
    pass


@_operator("(Tensor kv_cache, Tensor slots, Tensor(a!) out, int kv_format, float cache_scale) -> ()")
def cache_gather_out(kv_cache, slots, out, kv_format, cache_scale):
    if _is_elsewhere(kv_cache):
        with torch.cuda.device(kv_cache.device):
            return cache_gather_out(kv_cache, slots, out, kv_format, cache_scale)
    _operations.cache_gather(_THIS, kv_cache, slots, out, kv_format, cache_scale, _stream(kv_cache))


@_fake
def _fake_cache_gather_out(*arguments):
    pass


def _gathered(kv_cache: torch.Tensor, slots: torch.Tensor, kv_format: int) -> torch.Tensor:
    shape = _operations.gathered_shape(kv_cache.shape, slots.shape, kv_format)
    return kv_cache.new_empty(shape, dtype=torch.bfloat16 if kv_format > 2 else kv_cache.dtype)


@_operator("(Tensor kv_cache, Tensor slots, int kv_format, float cache_scale) -> Tensor")
def cache_gather(kv_cache, slots, kv_format, cache_scale):
    out = _gathered(kv_cache, slots, kv_format)
    cache_gather_out(kv_cache, slots, out, kv_format, cache_scale)
    return out


@_fake
def _fake_cache_gather(kv_cache, slots, kv_format, cache_scale):
    return _gathered(kv_cache, slots, kv_format)


# ---- What the public functions call -----------------------------------------------------------------------------------

_THIS = sys.modules[__name__]
_ops = torch.ops.flash_mla
_decode_plan = _ops.decode_plan.default
_dense_decode, _dense_decode_out = _ops.dense_decode.default, _ops.dense_decode_out.default
_sparse_plan_op = _ops.sparse_plan.default
_sparse_decode, _sparse_decode_out = _ops.sparse_decode.default, _ops.sparse_decode_out.default
_sparse_prefill, _sparse_prefill_out = _ops.sparse_prefill.default, _ops.sparse_prefill_out.default
_merge, _merge_out = _ops.merge.default, _ops.merge_out.default
_cache_append = _ops.cache_append.default
_cache_gather, _cache_gather_out = _ops.cache_gather.default, _ops.cache_gather_out.default


def _is_plain(first: torch.Tensor, *others: Optional[torch.Tensor]) -> bool:
    """Nobody is compiling, tracing, transforming or watching, and these are tensors with memory: an operator's function may
    then be called without the dispatcher, whose time a call of few microseconds feels."""
    if _is_compiling() or _dispatch_modes() or _transforms() or _is_profiled() or _is_tracing():
        return False
    for tensor in others:
        if type(tensor) is not _Tensor and tensor is not None:
            return False
    return type(first) is _Tensor and (first.is_cuda or first.is_cpu)


def _of_c(*names: str) -> Any:
    """A function of torch._C that may not be there in every version; then it says that somebody watches."""
    value: Any = torch._C
    for name in names:
        value = getattr(value, name, None)
    return value or (lambda: True)


_Tensor, _is_compiling = torch.Tensor, torch.compiler.is_compiling
_dispatch_modes, _transforms = _of_c("_len_torch_dispatch_stack"), _of_c("_functorch", "peek_interpreter_stack")
_is_profiled, _is_tracing = _of_c("_autograd", "_profiler_enabled"), _of_c("_is_tracing")


# They take a `stream` as those of _arrays do, and have no use for it: it is the current one.


def plan_decode(
    function: str, seqlens: torch.Tensor, s_q: int, h_q: int, h_kv: int, stream: int
) -> Tuple[torch.Tensor, torch.Tensor]:
    if _is_plain(seqlens):
        return _plan(function, seqlens, s_q, h_q, h_kv)
    return _decode_plan(seqlens, s_q, h_q, h_kv)


def decode(q, k_cache, block_table, cache_seqlens, plan, attn_sink, d_v, out, lse, options, stream):
    partitions, num_splits = plan
    scale, causal, lse_empty, log_base, batch_invariant = options
    plain = _is_plain(q, k_cache, block_table, cache_seqlens, partitions, num_splits, attn_sink, out, lse)
    if out is None and lse is None:
        return (dense_decode if plain else _dense_decode)(
            q, k_cache, block_table, cache_seqlens, partitions, num_splits, attn_sink, d_v,
            scale, causal, lse_empty, log_base, batch_invariant,
        )  # fmt: skip
    inputs = q, k_cache, block_table, cache_seqlens, partitions, num_splits, attn_sink
    results = _complete(out, lse, _decode_results, q, d_v)
    (dense_decode_out if plain else _dense_decode_out)(*inputs, *results, *options)
    return results


def plan_sparse(function, q, topk_length, extra_topk_length, sizes, stream):
    if _is_plain(q, topk_length, extra_topk_length):
        return _sparse_plan(function, q, topk_length, extra_topk_length, sizes, sizes)
    return _sparse_plan_op(q, topk_length, extra_topk_length, *sizes)


def decode_sparse(q, inputs, plan, d_v, out, lse, options, stream):
    tensors = (q, *inputs.values(), *plan)
    if out is None and lse is None:
        return _sparse_decode(*tensors, d_v, *options)
    results = _complete(out, lse, _decode_results, q, d_v)
    _sparse_decode_out(*tensors, *results, *options)
    return results


def prefill_sparse(q, inputs, d_v, indexer_topk, out, max_logits, lse, options, stream):
    tensors = (q, *inputs.values())
    plain = _is_plain(*tensors, out, max_logits, lse)
    if out is None and max_logits is None and lse is None and not indexer_topk:
        return (sparse_prefill if plain else _sparse_prefill)(*tensors, d_v, *options)
    run = sparse_prefill_out if plain else _sparse_prefill_out
    out = q.new_empty(*q.shape[:2], d_v) if out is None else out
    max_logits = _prefill_row(q) if max_logits is None else max_logits
    lse = _prefill_row(q) if lse is None else lse
    results = out, max_logits, lse
    if indexer_topk:  # first: what it leaves in out and max_logits is not wanted
        kv, indices, topk_length, _ = inputs.values()
        lse_indexer = _prefill_row(q)
        run(q, kv, indices[:, :, :indexer_topk], topk_length, None, out, max_logits, lse_indexer, *options)
        results = (*results, lse_indexer)
    run(*tensors, out, max_logits, lse, *options)
    return results


def merge_states(out_parts, lse_parts, attn_sink, out, lse, options, stream):
    inputs = out_parts, lse_parts, attn_sink
    if out is None and lse is None:
        return _merge(*inputs, *options)
    results = _complete(out, lse, _merge_results, out_parts, lse_parts)
    _merge_out(*inputs, *results, *options)
    return results


def append(latent, rope, kv_cache, slot_mapping, options, stream):
    plain = _is_plain(latent, rope, kv_cache, slot_mapping)
    (cache_append if plain else _cache_append)(latent, rope, kv_cache, slot_mapping, *options)


def gather(kv_cache, slots, out, options, stream):
    plain = _is_plain(kv_cache, slots, out)
    if out is None:
        return (cache_gather if plain else _cache_gather)(kv_cache, slots, *options)
    (cache_gather_out if plain else _cache_gather_out)(kv_cache, slots, out, *options)
    return out


def _complete(out, lse, make, *arguments):
    """The results that were given, at least one of them, and a new one for the other."""
    if out is not None and lse is not None:
        return out, lse
    new_out, new_lse = make(*arguments)
    return (new_out, lse) if out is None else (out, new_lse)

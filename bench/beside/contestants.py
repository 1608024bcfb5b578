# SPDX-License-Identifier: MIT
"""The contestants. A method is named after an operation, takes the inputs of a row and returns the call to time.
The call's output may have any shape whose rows of d_v elements are ordered by query tokens, then heads.
Gradients are (dq, dk, dv), also ordered by tokens, then heads.
"""

import importlib.metadata
import math
import sys
from types import SimpleNamespace

try:
    import torch
except ImportError:  # only timing needs it
    torch = None

from beside.rows import D_V, ROPE


def first(results):
    """Returns the output of a function that may return more."""
    return results if isinstance(results, torch.Tensor) else results[0]


def differentiable(tensors):
    return [tensor.detach().requires_grad_() for tensor in tensors]


def gradients(output, inputs, dout):
    """Returns the timed call; the forward pass is already done."""
    return lambda: torch.autograd.grad(output, inputs, dout, retain_graph=True)


class Ours:
    def __init__(self):
        import flash_mla

        self.functions, self.version = flash_mla, flash_mla.__version__

    def dense_decode(self, x, **options):
        meta, _ = self.functions.get_mla_metadata()  # the first call stores the plan there
        arguments = (x.q, x.cache, x.table, x.lengths, D_V, meta)
        options = dict(softmax_scale=x.scale, causal=True, **options)
        return lambda: first(self.functions.flash_mla_with_kvcache(*arguments, **options))

    def dense_decode_of_bytes(self, x):
        return self.dense_decode(x, is_fp8_kvcache=True, kv_scale=x.descale_k)

    def dense_decode_of_values(self, x):
        return self.dense_decode(SimpleNamespace(**{**vars(x), "cache": x.cache.to(torch.bfloat16)}))

    def fp8_products(self, x, q, descale_q):
        _, s_q, h_q, _ = q.shape
        plan = self.functions.get_mla_metadata_dense_fp8(x.lengths, s_q * h_q, 1)
        arguments = (q, x.cache, x.table, x.lengths, D_V, *plan, x.scale, True, descale_q, x.descale_k)
        return lambda: first(self.functions.flash_mla_with_kvcache_fp8(*arguments))

    def dense_fp8(self, x):
        return self.fp8_products(x, x.codes, x.descale_q)

    def dense_fp8_of_values(self, x):
        return self.fp8_products(x, x.q, None)

    def sparse_decode(self, x):
        meta, _ = self.functions.get_mla_metadata()
        options = dict(
            softmax_scale=x.scale,
            is_fp8_kvcache=True,
            indices=x.indices,
            attn_sink=x.sink,
            extra_k_cache=x.extra_cache,
            extra_indices_in_kvcache=x.extra_indices,
            extra_topk_length=x.extra_lengths,
        )
        return lambda: first(self.functions.flash_mla_with_kvcache(x.q, x.cache, None, None, D_V, meta, **options))

    def sparse_prefill(self, x):
        return lambda: first(self.functions.flash_mla_sparse_fwd(x.q, x.kv, x.indices, x.scale, D_V, x.sink))

    def mha_forward(self, x, **options):
        arguments = (x.q, x.k, x.v, x.ends, x.ends_k, x.longest, x.longest_k)
        options = dict(causal=x.causal, attn_sink=x.sink, seqused_k=x.used, **options)
        return lambda: first(self.functions.flash_attn_varlen_func(*arguments, **options))

    def mha_forward_invariant(self, x):
        """Splits the keys of a request as if it were alone."""
        return self.mha_forward(x, batch_invariant=True)

    def mha_backward(self, x, deterministic=False):
        inputs, options = differentiable((x.q, x.k, x.v)), dict(causal=x.causal, deterministic=deterministic)
        sequences = (x.ends, x.ends, x.longest, x.longest)
        output, _ = self.functions.flash_attn_varlen_func(*inputs, *sequences, **options)
        return gradients(output, inputs, x.dout)

    def mha_backward_deterministic(self, x):
        return self.mha_backward(x, deterministic=True)

    def mha_backward_direct(self, x):
        """Calls the operator under autograd's call, which writes the gradients of all tokens."""
        inputs, longest = (x.q, x.k, x.v, x.ends, x.ends), (x.longest, x.longest)
        output, lse = self.functions.flash_attn_varlen_func(*inputs, *longest, causal=x.causal)
        made = tuple(torch.full_like(tensor, math.nan) for tensor in inputs[:3])
        deterministic, log_base = False, 0  # 0: e

        def call():
            tensors = (*inputs, None, None, None, output, lse.T, x.dout, None, *made, None)  # nothing optional
            torch.ops.flash_mla.mha_backward(*tensors, *longest, x.scale, x.causal, deterministic, log_base)
            return made

        return call


class FlashMLA:
    """FlashMLA from vLLM's wheel. A first call makes the plan of a decode, which timed calls get."""

    def __init__(self, folder):
        self.functions = library(folder, "_flashmla_C")
        self.version = version_in(folder, "vllm")

    def dense_decode(self, x):
        def call(plan):
            return self.functions.dense_decode_fwd(x.q, x.cache, D_V, x.lengths, x.table, x.scale, True, *plan, None)

        plan = call((None, None))[2:4]
        return lambda: first(call(plan))

    def sparse_decode(self, x):
        extra = (x.extra_cache, x.extra_indices, x.extra_lengths)

        def call(plan):
            given = (x.q, x.cache, x.indices, None, x.sink, *plan, *extra)
            return self.functions.sparse_decode_fwd(*given, D_V, x.scale, None, False)

        plan = call((None, None))[2:4]
        return lambda: first(call(plan))

    def sparse_prefill(self, x):
        given = (x.q, x.kv, x.indices, x.scale, D_V, x.sink, None, None)
        return lambda: first(self.functions.sparse_prefill_fwd(*given))


class VllmFp8:
    """vLLM's dense decode with FP8 products, from the same wheel as FlashMLA."""

    def __init__(self, folder):
        self.functions = library(folder, "_flashmla_extension_C")
        self.version = version_in(folder, "vllm")

    def dense_fp8(self, x):
        _, s_q, h_q, _ = x.codes.shape
        plan = self.functions.get_mla_decoding_metadata_dense_fp8(x.lengths, s_q * h_q, 1)
        given = (x.codes, x.cache, D_V, x.lengths, x.table, x.scale, True, *plan, x.descale_q, x.descale_k)
        return lambda: first(self.functions.fwd_kvcache_mla_fp8(*given))


class FlashAttention3:
    """FlashAttention-3 from vLLM's wheel. Its operators take only positional arguments: these are the names in order, with
    defaults."""

    MASK = dict(is_causal=True, window_size_left=-1, window_size_right=-1)
    SPLITS = dict(num_splits=0, pack_gqa=None, sm_margin=0)  # 0: the library chooses the number
    FORWARD = {
        **dict.fromkeys("q k v k_new v_new q_v out cu_seqlens_q cu_seqlens_k cu_seqlens_k_new".split()),
        **dict.fromkeys("seqused_q seqused_k max_seqlen_q max_seqlen_k page_table kv_batch_idx leftpad_k".split()),
        **dict.fromkeys("rotary_cos rotary_sin seqlens_rotary q_descale k_descale v_descale softmax_scale".split()),
        **MASK,
        **dict(softcap=0.0, is_rotary_interleaved=True, scheduler_metadata=None),
        **SPLITS,
        **dict(s_aux=None, cp_world_size=1, cp_rank=0, cp_tot_seqused_k=None),
    }
    PLAN = {
        **dict.fromkeys("batch_size max_seqlen_q max_seqlen_k num_heads num_heads_k headdim headdim_v".split()),
        **dict.fromkeys("qkv_dtype seqused_k cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q leftpad_k".split()),
        **dict(page_size=None, max_seqlen_k_new=0),
        **MASK,
        **dict(has_softcap=False),
        **SPLITS,
    }

    def __init__(self, folder):
        self.functions = library(folder, "_vllm_fa3_C")
        self.version = version_in(folder, "vllm")

    def forward(self, **given):
        return first(self.functions.fwd(*in_order(self.FORWARD, given)))

    def plan(self, **given):
        return self.functions.get_scheduler_metadata(*in_order(self.PLAN, given))

    def dense_decode(self, x):
        """Computes MLA with keys of 64 elements and values of 512, which a part of a query (q_v) multiplies."""
        b, s_q, h_q, _ = x.q.shape
        sizes = dict(max_seqlen_q=s_q, max_seqlen_k=x.longest, seqused_k=x.lengths)
        widths = dict(num_heads=h_q, num_heads_k=1, headdim=ROPE, headdim_v=D_V)
        plan = self.plan(batch_size=b, qkv_dtype=x.q.dtype, page_size=x.cache.shape[1], **sizes, **widths)
        tensors = dict(
            q=x.q[..., D_V:].contiguous().view(b * s_q, h_q, ROPE),
            q_v=x.q[..., :D_V].contiguous().view(b * s_q, h_q, D_V),
            k=x.cache[..., D_V:].contiguous(),
            v=x.cache[..., :D_V].contiguous(),
            cu_seqlens_q=torch.arange(0, (b + 1) * s_q, s_q, dtype=torch.int32),
            page_table=x.table,
        )
        return lambda: self.forward(**tensors, **sizes, softmax_scale=x.scale, scheduler_metadata=plan)

    splits_of_mha = 1

    def mha_forward(self, x):
        tensors = dict(q=x.q, cu_seqlens_q=x.ends)
        if x.used is None:
            tensors.update(k=x.k, v=x.v, cu_seqlens_k=x.ends_k)
        else:  # a request's room is its only page
            tensors.update(zip("kv", (of.unflatten(0, (len(x.used), -1)) for of in (x.k, x.v))), seqused_k=x.used)
            tensors["page_table"] = torch.arange(len(x.used), dtype=torch.int32).unsqueeze(1)
        if x.sink is not None:
            tensors["s_aux"] = x.sink.bfloat16()  # the only type that it takes
        options = dict(softmax_scale=x.scale, is_causal=x.causal, num_splits=self.splits_of_mha)
        return lambda: self.forward(**tensors, max_seqlen_q=x.longest, max_seqlen_k=x.longest_k, **options)


class FlashAttention3Splits(FlashAttention3):
    """The same, which chooses itself into how many splits it cuts the keys."""

    splits_of_mha = 0


class FlashAttention4:
    """FlashAttention-4 from its own wheel, which compiles a kernel at the first call of each kind."""

    def __init__(self, folder):
        packages = folder / "fa4"
        if not packages.is_dir():
            raise FileNotFoundError(f"{packages} is not there")
        sys.path[:0] = [str(packages), str(packages / "nvidia_cutlass_dsl" / "dsl_packages")]
        from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

        self.function, self.of_sequences = flash_attn_func, flash_attn_varlen_func
        self.version = version_in(packages, "flash-attn-4")

    def mha_forward(self, x):
        """Sequences that are no batch of one length go to the function for those."""
        if hasattr(x, "batch"):
            return lambda: first(self.function(*x.batch, causal=x.causal))
        tensors = dict(q=x.q, k=x.k, v=x.v, cu_seqlens_q=x.ends, cu_seqlens_k=x.ends_k)
        options = dict(max_seqlen_q=x.longest, max_seqlen_k=x.longest_k, softmax_scale=x.scale, causal=x.causal)
        return lambda: first(self.of_sequences(**tensors, **options))

    def mha_backward(self, x, deterministic=False):
        inputs = differentiable(x.batch)
        output = first(self.function(*inputs, causal=x.causal, deterministic=deterministic))
        return gradients(output, inputs, x.dout.view(output.shape))

    def mha_backward_deterministic(self, x):
        return self.mha_backward(x, deterministic=True)


class ScaledDotProduct:
    """A `backend` of PyTorch's scaled_dot_product_attention, on tensors with heads before tokens."""

    def attention(self, x, by_head):
        with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, self.backend)):
            function = torch.nn.functional.scaled_dot_product_attention
            return function(*by_head, is_causal=x.causal, enable_gqa=x.grouped)

    def mha_forward(self, x):
        by_head = [tensor.transpose(1, 2).contiguous() for tensor in x.batch]
        return lambda: self.attention(x, by_head).transpose(1, 2)

    def mha_backward(self, x):
        inputs = differentiable(tensor.transpose(1, 2).contiguous() for tensor in x.batch)
        output = self.attention(x, inputs)
        by_token = output.transpose(1, 2)
        dout = torch.empty_like(output).copy_(x.dout.view(by_token.shape).transpose(1, 2))
        call = gradients(output, inputs, dout)
        return lambda: tuple(gradient.transpose(1, 2) for gradient in call())


class CuDNN(ScaledDotProduct):
    backend = "CUDNN_ATTENTION"

    def __init__(self, folder):
        if not torch.backends.cudnn.is_available():
            raise RuntimeError("PyTorch has no cuDNN here")
        self.version = f"cuDNN {torch.backends.cudnn.version()}"


def padded(values, keys):
    """Pads values with zeros to the keys' length."""
    return torch.nn.functional.pad(values, (0, keys.shape[-1] - values.shape[-1]))


class FlashAttention2(ScaledDotProduct):
    """FlashAttention-2 from PyTorch. It needs values as long as keys: shorter ones are padded with zeros before the call, and the
    first part of the output, or gradient, is the result."""

    backend = "FLASH_ATTENTION"

    def __init__(self, folder):
        self.version = f"FlashAttention-2 of PyTorch {torch.__version__}"

    def mha_forward(self, x):
        q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in x.batch)
        by_head = (q, k, padded(v, k))
        return lambda: self.attention(x, by_head).transpose(1, 2)[..., : v.shape[-1]]

    def mha_backward(self, x):
        """Uses tensors ordered by tokens, then heads, for which it is faster."""
        q, k, v = x.batch
        inputs = differentiable((q, k, padded(v, k)))
        output = self.attention(x, [tensor.transpose(1, 2) for tensor in inputs])
        dout = padded(x.dout.view(*q.shape[:3], v.shape[-1]), k).transpose(1, 2)
        call = gradients(output, inputs, dout)

        def without_padding():
            dq, dk, dv = call()
            return dq, dk, dv[..., : v.shape[-1]]

        return without_padding


PEERS = {
    "flashmla": FlashMLA,
    "vllm_fp8": VllmFp8,
    "fa2": FlashAttention2,
    "fa3": FlashAttention3,
    "fa3_splits": FlashAttention3Splits,
    "fa4": FlashAttention4,
    "cudnn": CuDNN,
}


def in_order(defaults, given):
    """Returns all arguments of an operator, by position."""
    unknown = given.keys() - defaults.keys()
    if unknown:
        raise TypeError(f"no arguments of the operator: {unknown}")
    return ({**defaults, **given}).values()


def library(folder, name):
    """Loads the operators of an extension of PyTorch."""
    file = folder / f"{name}.abi3.so"
    if not file.is_file():
        raise FileNotFoundError(f"{file} is not there")
    torch.ops.load_library(str(file))
    return getattr(torch.ops, name)


def version_in(folder, distribution):
    for found in importlib.metadata.distributions(name=distribution, path=[str(folder)]):
        return f"{distribution} {found.version}"
    return f"{distribution}, version unknown"


def contestants_for(rows, folder):
    """Returns ({name: contestant}, {name: why it is missing}) for all contestants of the rows."""
    present, absent = {"ours": Ours()}, {}
    for name, peer in PEERS.items():
        if any(name in row.peers for row in rows):
            try:
                present[name] = peer(folder)
            except Exception as error:  # whatever an import may raise
                absent[name] = brief(error)
    return present, absent


def brief(error):
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"

# SPDX-License-Identifier: MIT
"""The calls of FlashMLA in the published wheels of inference engines, read there and recorded.

A Call names the wheel, file and line; the function of the engine's own wrapper file that it calls; and its arguments, each
under its name ("=" before the name: passed by keyword). A tensor is a T: its type, its dimensions, its strides if it is
not contiguous, and the format of its tokens if their bytes do not imply it. Sizes that depend on a model or a batch are
letters, with small values here (SIZES).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Tuple


class T(NamedTuple):
    dtype: str
    dims: str
    strides: Optional[str] = None
    format: Optional[str] = None


class Call(NamedTuple):
    name: str
    wheel: str
    file: str
    line: int
    function: str
    arguments: Tuple[Tuple[str, Any], ...]
    sizes: dict

    @property
    def engine(self):
        return self.wheel.split()[0]


class Metadata(NamedTuple):
    """The result of get_mla_metadata, or of `function`, called with these arguments."""

    arguments: Tuple[Tuple[str, Any], ...] = ()
    function: str = "get_mla_metadata"
    part: Optional[int] = None  # of the results; None: both are returned


class OneRow(NamedTuple):
    """A FlashMLASchedMeta into which vLLM has written tables of its own: one row, (0, 0, b - 1, blocks of the table, 0, 0, 0, 0), and
    zeros for num_splits."""


VLLM, SGLANG = "vllm 0.33.0", "sglang 0.5.23"
MLA, SPARSE = "vllm/v1/attention/backends/mla/flashmla.py", "vllm/v1/attention/backends/mla/flashmla_sparse.py"
V4, V41 = "vllm/models/deepseek_v4/nvidia/flashmla.py", "vllm/models/deepseek_v41/nvidia/flashmla.py"
HY = "vllm/models/hy_v4/nvidia/flashmla_sparse.py"
BACKEND, DSA = "sglang/srt/layers/attention/flashmla_backend.py", "sglang/srt/layers/attention/dsa_backend.py"
SG_V4 = "sglang/srt/layers/attention/deepseek_v4_backend.py"

# Letters in dimensions and strides.
SIZES = dict(b=3, s=1, h=16, pages=9, table=5, topk=128, extra=192, tokens=6, kv=300, real=16, rows=160)
BF16, I32, F32, BYTES, E4M3 = "bfloat16", "int32", "float32", "uint8", "float8_e4m3fn"


def _call(name, wheel, file, line, function, *arguments, **sizes):
    return Call(name, wheel, file, line, function, arguments, {**SIZES, **sizes})


def _dense(name, wheel, file, line, metadata, q=BF16, cache=BF16, function="flash_mla_with_kvcache", more=(), **sizes):
    return _call(
        *(name, wheel, file, line, function),
        ("=q", T(q, "b s h 576")),
        ("=k_cache", T(cache, "pages 64 1 576")),
        ("=block_table", T(I32, "b table")),
        ("=cache_seqlens", T(I32, "b")),
        ("=head_dim_v", 512),
        *metadata,
        ("=softmax_scale", 0.1352),
        ("=causal", True),
        *more,
        **sizes,
    )


_LENGTHS = (("cache_seqlens", T(I32, "b")), ("num_q_tokens_per_head_k", "s*h"), ("num_heads_k", 1))
_OF_VLLM = [("=tile_scheduler_metadata", Metadata(_LENGTHS + (("=is_fp8_kvcache", False),), part=0))]
_SGLANG = Metadata(_LENGTHS + (("=is_fp8_kvcache", False),))
_SGLANG_FP8 = Metadata(_LENGTHS + (("=is_fp8_kvcache", True),))
_SCALES = ("=descale_q", T(F32, "1")), ("=descale_k", T(F32, "1"))
_OF_DSA = Metadata(
    (
        ("=cache_seqlens", T(I32, "b")),
        ("=num_q_tokens_per_head_k", "s*h"),
        ("=num_heads_k", 1),
        ("=num_heads_q", "h"),
        ("=is_fp8_kvcache", True),
        ("=topk", "topk"),
    )
)


def _pages_of_584(page_size):
    """Pages are padded to multiples of 576 bytes."""
    return T(BYTES, f"pages {page_size} 1 584", f"({page_size}*584+575)//576*576 584 584 1")


def _rows_of_528(page_size):
    """A block has the pages of many layers in sequence, and its size is a multiple of 528 bytes: line 574 of
    vllm/models/deepseek_v41/attention.py."""
    return T(BYTES, f"pages {page_size} 1 528", "rows*528 528 528 1", "FP8_528")


def _sparse(
    name, wheel, file, line, d, k_cache, *more, scale=0.1352, tables=(None, None), metadata=Metadata(part=0), **sizes
):
    """`tables`: the block table and the lengths, which sparse decode does not read."""
    return _call(
        *(name, wheel, file, line, "flash_mla_with_kvcache"),
        ("=q", T(BF16, f"b s h {d}")),
        ("=k_cache", k_cache),
        ("=block_table", tables[0]),
        ("=cache_seqlens", tables[1]),
        ("=head_dim_v", 512),
        ("=tile_scheduler_metadata", metadata),
        ("=softmax_scale", scale),
        ("=is_fp8_kvcache", True),
        ("=indices", T(I32, "b s topk")),
        *more,
        **sizes,
    )


def _v4(name, wheel, file, line, k_cache, extra_k_cache, *more, **sizes):
    """DeepSeek-V4: a window of the last keys in one cache, and compressed keys in another."""
    has_extra = extra_k_cache is not None
    return _sparse(
        *(name, wheel, file, line, 512, k_cache),
        ("=topk_length", T(I32, "b")),
        ("=attn_sink", T(F32, "h")),
        ("=extra_k_cache", extra_k_cache),
        ("=extra_indices_in_kvcache", T(I32, "b s extra") if has_extra else None),
        ("=extra_topk_length", T(I32, "b") if has_extra else None),
        *more,
        **dict(sizes, scale=0.0442),
    )


def _v4_of_vllm(name, file, line, k_cache, extra_k_cache, **sizes):
    return _v4(name, VLLM, file, line, k_cache, extra_k_cache, ("=out", T(BF16, "b s h 512")), **sizes)


def _pages_of_v41(page_size, fp4=False):
    """Pages are padded to whole rows of codes."""
    token, row, format = (288, 256, "FP4_288_SPLIT") if fp4 else (528, 512, "FP8_528_SPLIT")
    strides = f"({page_size}*{token}+{row}-1)//{row}*{row} {token} {token} 1"
    return T(BYTES, f"pages {page_size} 1 {token}", strides, format)


def _tokens_of_v41(page_size, fp4=False):
    token, format = (288, "FP4_288") if fp4 else (528, "FP8_528")
    return T(BYTES, f"pages {page_size} 1 {token}", None, format)


def _dsa_of_sglang(name, d, k_cache, kv_format):
    tables = T(I32, "b 0"), T(I32, "b")
    more = ("=kv_format", kv_format)
    return _sparse(name, SGLANG, DSA, 3351, d, k_cache, more, tables=tables, metadata=_OF_DSA, h=64)


def _v4_of_sglang(name, k_cache, extra_k_cache, use_legacy=True):
    """Line 1268 binds use_legacy to the function earlier."""
    return _v4(name, SGLANG, SG_V4, 4384, k_cache, extra_k_cache, ("=use_legacy", use_legacy), h=64)


def _prefill(name, wheel, file, line, d, *more, sink="h", by="=", strides=None, **sizes):
    """`sink`: the heads of the sinks; None: there are none. `by`: "" if arguments up to the scale are positional."""
    return _call(
        *(name, wheel, file, line, "flash_mla_sparse_fwd"),
        (f"{by}q", T(BF16, f"tokens {sink or 'h'} {d}", strides)),
        (f"{by}kv", T(BF16, f"kv 1 {d}")),
        (f"{by}indices", T(I32, "tokens 1 topk")),
        (f"{by}sm_scale", {576: 0.1352, 512: 0.0442}[d]),
        ("=attn_sink", sink and T(F32, sink)),
        ("=topk_length", T(I32, "tokens")),
        *more,
        **sizes,
    )


def _out(heads="h", strides=None):
    return ("=out", T(BF16, f"tokens {heads} 512", strides))


CALLS = [
    # ---- vLLM: dense decode. s is above 1 for the verification of drafts and for prefills of up to 128 tokens.
    _dense("vllm_dense", VLLM, MLA, 325, _OF_VLLM, more=[("=is_fp8_kvcache", False)]),
    _dense("vllm_dense_drafts", VLLM, MLA, 325, _OF_VLLM, more=[("=is_fp8_kvcache", False)], s=3, h=128, b=2),
    _dense(
        *("vllm_dense_batch_invariant", VLLM, MLA, 325),
        [("=tile_scheduler_metadata", OneRow())],
        more=[("=is_fp8_kvcache", False)],
        table=64,
    ),
    _dense(
        *("vllm_dense_fp8", VLLM, MLA, 311),
        [("=tile_scheduler_metadata", Metadata(_LENGTHS, "get_mla_metadata_dense_fp8"))],
        *(E4M3, E4M3, "flash_mla_with_kvcache_fp8"),
        more=_SCALES,
        s=2,
    ),
    # ---- vLLM: sparse decode of DeepSeek-V3.2, over 656 bytes; a mixed batch is one request of many tokens.
    *(
        _sparse(
            *(name, VLLM, file, line, 576, T(BYTES, "pages 64 1 656"), *more),
            tables=(T(I32, "b 1"), T(I32, "b")),
            **sizes,
        )
        for name, file, line, more, sizes in (
            ("vllm_sparse", SPARSE, 1304, (), dict(h=64)),
            ("vllm_sparse_mixed_batch", SPARSE, 1304, (), dict(b=1, s=7, h=64)),
            ("vllm_sparse_sink", HY, 197, (("=attn_sink", T(F32, "h")),), dict(h=64, b=2)),
        )
    ),
    # ---- vLLM: sparse decode of DeepSeek-V4 and, on Hopper, V4.1, both over 584 bytes in padded pages.
    _v4_of_vllm("vllm_v4_window", V4, 248, _pages_of_584(64), None, h=64),
    _v4_of_vllm("vllm_v4_c4", V4, 248, _pages_of_584(64), _pages_of_584(64), h=64),
    _v4_of_vllm("vllm_v4_c128", V4, 248, _pages_of_584(64), _pages_of_584(2), h=128, b=2),
    _v4_of_vllm("vllm_v41", V41, 251, _pages_of_584(32), _pages_of_584(64), h=64),
    # On Blackwell V4.1 has 528 bytes in both caches; caches of 288 are only used by the mega attention, which is another call.
    _v4_of_vllm("vllm_v41_528_window", V41, 251, _rows_of_528(32), None, h=64),
    _v4_of_vllm("vllm_v41_528_c1", V41, 251, _rows_of_528(32), _rows_of_528(128), h=64),
    _v4_of_vllm("vllm_v41_528_c2", V41, 251, _rows_of_528(32), _rows_of_528(64), h=128, b=2),
    # ---- vLLM: sparse prefill over keys that it has gathered.
    _prefill("vllm_prefill", VLLM, SPARSE, 1393, 576, ("=out", None), sink=None, by="", h=64),
    _prefill("vllm_prefill_out", VLLM, SPARSE, 1393, 576, _out(), sink=None, by="", h=64),
    _prefill("vllm_prefill_sink", VLLM, HY, 267, 576, _out(), by="", h=64),
    _prefill("vllm_v4_prefill", VLLM, V4, 390, 512, _out(), h=64),
    # Only the real heads of 64: slices of q, of the sinks and of out.
    *(
        _prefill(
            *(f"vllm_v41_prefill_{heads}_heads", VLLM, V41, 372, 512, _out("real", "64*512 512 1")),
            **dict(sink="real", strides="64*512 512 1", real=heads),
        )
        for heads in (8, 16, 32)
    ),
    # ---- SGLang: dense decode, verifying of drafts, extending of drafts.
    _dense("sglang_dense", SGLANG, BACKEND, 495, [("=tile_scheduler_metadata", _SGLANG)]),
    _dense("sglang_verify", SGLANG, BACKEND, 584, [("=tile_scheduler_metadata", _SGLANG)], s=4),
    _dense(
        *("sglang_dense_fp8", SGLANG, BACKEND, 478),
        *([("=tile_scheduler_metadata", _SGLANG_FP8)], E4M3, E4M3),
        more=_SCALES,
    ),
    _dense(
        *("sglang_verify_fp8", SGLANG, BACKEND, 570),
        *([("=tile_scheduler_metadata", _SGLANG_FP8)], E4M3, E4M3),
        more=_SCALES,
        s=4,
    ),
    # ---- SGLang: sparse decode of DeepSeek-V3.2, also of models without RoPE values.
    _dsa_of_sglang("sglang_dsa", 576, T(E4M3, "pages 64 1 656"), "V32"),
    _dsa_of_sglang("sglang_dsa_no_rope", 512, T(E4M3, "pages 64 1 528", None, "FP8_528_F32"), "V32_NO_ROPE"),
    # ---- SGLang: sparse decode of DeepSeek-V4.
    _v4_of_sglang("sglang_v4_window", _pages_of_584(256), None),
    _v4_of_sglang("sglang_v4_c4", _pages_of_584(256), _pages_of_584(64)),
    _v4_of_sglang("sglang_v4_c128", _pages_of_584(256), _pages_of_584(2)),
    # ---- SGLang: the same call over pages of V4.1, on Blackwell alone (SGLANG_DSV4_KV_LAYOUT=v41): codes before scales. The extra
    # cache is FP4 where it has every token or every second one, unless SGLANG_DSV4_COMPRESSED_KV_LAYOUT=fp8.
    _v4_of_sglang("sglang_v41_window", _pages_of_v41(256), None),
    _v4_of_sglang("sglang_v41_c1", _pages_of_v41(256), _pages_of_v41(256, fp4=True)),
    _v4_of_sglang("sglang_v41_c2", _pages_of_v41(256), _pages_of_v41(128, fp4=True)),
    _v4_of_sglang("sglang_v41_c2_fp8", _pages_of_v41(256), _pages_of_v41(128)),
    _v4_of_sglang("sglang_v41_c4", _pages_of_v41(256), _pages_of_v41(64)),
    _v4_of_sglang("sglang_v41_c128", _pages_of_v41(256), _pages_of_v41(2)),
    # ---- SGLang: and, with v41_new, each token's scales behind its codes.
    _v4_of_sglang("sglang_v41_new_window", _tokens_of_v41(256), None, use_legacy=False),
    _v4_of_sglang("sglang_v41_new_c1", _tokens_of_v41(256), _tokens_of_v41(256, fp4=True), use_legacy=False),
    _v4_of_sglang("sglang_v41_new_c2", _tokens_of_v41(256), _tokens_of_v41(128, fp4=True), use_legacy=False),
    _v4_of_sglang("sglang_v41_new_c2_fp8", _tokens_of_v41(256), _tokens_of_v41(128), use_legacy=False),
    # ---- SGLang: sparse prefill; the first over the cache itself, the second over keys that it has gathered.
    _prefill("sglang_dsa_prefill", SGLANG, DSA, 2865, 576, ("=d_v", 512), sink=None, h=64),
    _prefill("sglang_v4_prefill", SGLANG, SG_V4, 4496, 512, ("=d_v", 512), h=64),
]

# ---- The engines' own wrapper files: the functions that flash_mla.compat has, as they are declared there ---------------

_TOKENS = "q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata"
_EXTRA = "extra_k_cache=None, extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None"
_PACKED = "dropout_p=0.0, softmax_scale=None, causal=False, deterministic=False, is_varlen=True"
_LISTS = "q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None"
_PLAN = "cache_seqlens=None, num_q_tokens_per_head_k=None, num_heads_k=None, num_heads_q=None, is_fp8_kvcache=False, topk=None"
_SG_DECODE = (
    f"{_TOKENS}, num_splits=None, softmax_scale=None, causal=False, descale_q=None, descale_k=None, is_fp8_kvcache=False, "
    f"indices=None, attn_sink=None, {_EXTRA}, kv_format=None"
)
_MEGA = "indices, positions, cos_sin_cache, softmax_scale, *, attn_sink=None, topk_length=None"
_MEGA_END = "enable_q_norm=False, rms_norm_eps=0.0, use_legacy=True"


class BackEnd(NamedTuple):
    """What an engine takes for a model and a cache on Hopper (9.0) or another GPU, by default, where its code decides it, and the
    option with which it calls the patched functions; None: it does so by default."""

    wheel: str
    model: str
    cache: str
    default: str
    option: Optional[str]
    file: str
    line: int


PLATFORM, MODEL_V4 = "vllm/platforms/cuda.py", "vllm/models/deepseek_v4/nvidia/model.py"
MODEL_V41, SG_GROUPS = "vllm/models/deepseek_v41/nvidia/model.py", "sglang/srt/arg_groups/"
_DENSE, _DSA = "dense MLA (V3, R1, Kimi K2)", "DSA (V3.2, GLM-5)"
BACK_ENDS = [
    BackEnd(VLLM, _DENSE, "bf16", "FLASH_ATTN_MLA", "--attention-backend FLASHMLA", PLATFORM, 150),
    BackEnd(VLLM, _DENSE, "fp8", "FLASHMLA", None, PLATFORM, 151),
    BackEnd(VLLM, _DSA, "bf16", "FLASH_ATTN_MLA_SPARSE", "--attention-backend FLASHMLA_SPARSE", PLATFORM, 141),
    BackEnd(VLLM, _DSA, "fp8", "FLASHMLA_SPARSE", None, PLATFORM, 142),
    BackEnd(VLLM, "V4", "fp8", "FLASHMLA_SPARSE_DSV4", None, MODEL_V4, 568),
    BackEnd(VLLM, "V4.1", "fp8", "FLASHMLA_SPARSE_DSV41", None, MODEL_V41, 258),
    BackEnd(
        *(VLLM, "V4.1 on 10.x", "NVFP4", "FLASHMLA_MEGA_ATTN_DSV41", "--attention-backend FLASHMLA_SPARSE"),
        *(MODEL_V41, 257),
    ),
    BackEnd(
        *(SGLANG, _DENSE, "any", "fa3", "--attention-backend flashmla", SG_GROUPS + "model_override_base.py", 338),
    ),
    BackEnd(
        *(SGLANG, _DSA, "bf16", "flashmla_sparse, in decode fa3", "--dsa-decode-backend flashmla_sparse"),
        *(SG_GROUPS + "overrides.py", 726),
    ),
    BackEnd(SGLANG, _DSA, "fp8", "flashmla_kv", None, SG_GROUPS + "overrides.py", 716),
    BackEnd(SGLANG, "V4, V4.1", "fp8", "flashmla", None, SG_GROUPS + "deepseek_v4_hook.py", 59),
    BackEnd(
        *(SGLANG, "V4.1 on 10.x", "fp8", "flashmla_mega", "--dsv4-attn-backend flashmla"),
        *(SG_GROUPS + "deepseek_v4_hook.py", 60),
    ),
]

_VARLEN = {
    "flash_attn_varlen_func": f"q, k, v, cu_seqlens_qo, cu_seqlens_kv, max_seqlen_qo, max_seqlen_kv, {_PACKED}",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, head_dim_qk, {_PACKED}",
    "flash_attn_varlen_kvpacked_func": "q, kv, cu_seqlens_qo, cu_seqlens_kv, max_seqlen_qo, max_seqlen_kv, head_dim_qk, "
    + _PACKED,
}
SIGNATURES = {
    "flash_mla": {  # FlashMLA's own
        "get_mla_metadata": f"{_PLAN}, *args, **kwargs",  # of 2025; that of 2026 ignores all arguments
        # The last two since September 2026; is_fp8_kvcache was False, and is True since then.
        "flash_mla_with_kvcache": f"{_TOKENS}, num_splits=None, softmax_scale=None, causal=False, is_fp8_kvcache=None, "
        f"indices=None, attn_sink=None, {_EXTRA}, out=None, enable_batch_invariant=False",
        "flash_mla_sparse_fwd": f"{_LISTS}, indexer_topk=0",
        "get_mla_metadata_dense_fp8": "cache_seqlens, num_q_tokens_per_head_k, num_heads_k",  # these two are vLLM's
        "flash_mla_with_kvcache_fp8": f"{_TOKENS}, num_splits=None, softmax_scale=None, causal=False, descale_q=None, "
        "descale_k=None",
        **_VARLEN,
    },
    "vllm": {  # vllm/v1/attention/ops/flashmla.py and vllm/third_party/flashmla/flash_mla_interface.py, vllm 0.33.0
        "_is_flashmla_available": "",
        "is_flashmla_dense_supported": "",
        "is_flashmla_sparse_supported": "",
        "get_mla_metadata": "*args, **kwargs",
        "get_mla_metadata_dense_fp8": "cache_seqlens, num_q_tokens_per_head_k, num_heads_k",
        "flash_mla_with_kvcache": f"{_TOKENS}, num_splits=None, softmax_scale=None, causal=False, is_fp8_kvcache=False, "
        f"indices=None, attn_sink=None, {_EXTRA}, out=None, enable_batch_invariant=False",
        "flash_mla_with_kvcache_fp8": f"{_TOKENS}, num_splits, softmax_scale=None, causal=False, descale_q=None, "
        "descale_k=None",
        "flash_mla_sparse_fwd": f"{_LISTS}, out=None",
        **_VARLEN,
    },
    "sglang": {  # sglang/kernels/ops/attention/flash_mla_interface.py, sglang 0.5.23
        "get_mla_metadata": _PLAN,
        "flash_mla_with_kvcache": f"{_SG_DECODE}, *, use_legacy=True",
        "flash_mla_sparse_fwd": f"{_LISTS}, *, use_legacy=True",
        "flash_mla_mega_prefill": f"q, kv, {_MEGA}, {_MEGA_END}",
        "flash_mla_mega_decode": f"q, kv, {_MEGA}, extra_kv=None, extra_indices=None, extra_topk_length=None, {_MEGA_END}",
    },
    "sgl_kernel": {  # sgl_kernel/flash_mla.py, sglang-kernel 0.4.10
        "get_mla_metadata": _PLAN,
        "flash_mla_with_kvcache": _SG_DECODE,
        "flash_mla_sparse_fwd": _LISTS,
    },
}

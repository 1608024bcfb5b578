# SPDX-License-Identifier: MIT
"""The argument struct and the cache formats of each operation, written by scripts/python_structs.py from src/operations.def: do
not edit it.
"""

from ctypes import Structure, c_char_p, c_float, c_int32, c_int64, c_size_t, c_void_p

from ._structs import Device, neighbours


class fmla_decode_plan_args(Structure):
    _fields_ = [
        *neighbours(c_size_t, "struct_size"),
        *neighbours(c_void_p, "seqlens"),
        *neighbours(c_int64, "s_q h_q h_kv capacity"),
        *neighbours(Device, "target"),
        *neighbours(c_int32, "num_workers num_partitions"),
        *neighbours(c_void_p, "plan"),
        *neighbours(c_size_t, "plan_size"),
        *neighbours(c_void_p, "stream partitions num_splits"),
    ]


class fmla_sparse_plan_args(Structure):
    _fields_ = [
        *neighbours(c_size_t, "struct_size"),
        *neighbours(c_void_p, "topk_length extra_topk_length"),
        *neighbours(c_int64, "b s_q h_q topk extra_topk"),
        *neighbours(Device, "target"),
        *neighbours(c_int32, "num_workers num_partitions"),
        *neighbours(c_void_p, "plan"),
        *neighbours(c_size_t, "plan_size"),
        *neighbours(c_void_p, "stream partitions num_splits"),
    ]


class fmla_dense_decode_args(Structure):
    _fields_ = [
        *neighbours(c_size_t, "struct_size"),
        *neighbours(c_void_p, "q kv_cache block_table seqlens attn_sink out lse plan"),
        *neighbours(c_size_t, "plan_size"),
        *neighbours(c_void_p, "workspace"),
        *neighbours(c_size_t, "workspace_size"),
        *neighbours(c_void_p, "stream"),
        *neighbours(c_char_p, "kernel"),
        *neighbours(c_int32, "kv_format products"),
        *neighbours(c_float, "softmax_scale"),
        *neighbours(c_int32, "causal lse_empty log_base batch_invariant num_partitions"),
        *neighbours(c_void_p, "partitions num_splits kv_scale q_scale"),
    ]


class fmla_sparse_decode_args(Structure):
    _fields_ = [
        *neighbours(c_size_t, "struct_size"),
        *neighbours(c_void_p, "q kv_cache indices topk_length attn_sink extra_kv_cache extra_indices"),
        *neighbours(c_void_p, "extra_topk_length out lse plan"),
        *neighbours(c_size_t, "plan_size"),
        *neighbours(c_void_p, "partitions num_splits workspace"),
        *neighbours(c_size_t, "workspace_size"),
        *neighbours(c_void_p, "stream"),
        *neighbours(c_char_p, "kernel"),
        *neighbours(c_int32, "kv_format"),
        *neighbours(c_float, "softmax_scale"),
        *neighbours(c_int32, "lse_empty log_base batch_invariant num_partitions extra_kv_format reserved"),
    ]


class fmla_sparse_prefill_args(Structure):
    _fields_ = [
        *neighbours(c_size_t, "struct_size"),
        *neighbours(c_void_p, "q kv indices topk_length attn_sink out max_logits lse workspace"),
        *neighbours(c_size_t, "workspace_size"),
        *neighbours(c_void_p, "stream"),
        *neighbours(c_char_p, "kernel"),
        *neighbours(c_int32, "kv_format"),
        *neighbours(c_float, "softmax_scale"),
        *neighbours(c_int32, "lse_empty log_base"),
    ]


class fmla_mha_forward_args(Structure):
    _fields_ = [
        *neighbours(c_size_t, "struct_size"),
        *neighbours(c_void_p, "q k v cu_seqlens_q cu_seqlens_k out lse"),
        *neighbours(c_int64, "max_s_q max_s_k"),
        *neighbours(c_void_p, "workspace"),
        *neighbours(c_size_t, "workspace_size"),
        *neighbours(c_void_p, "stream"),
        *neighbours(c_char_p, "kernel"),
        *neighbours(c_float, "softmax_scale"),
        *neighbours(c_int32, "causal lse_empty log_base batch_dependent num_splits"),
        *neighbours(c_void_p, "attn_sink seqused_q seqused_k"),
    ]


class fmla_mha_backward_args(Structure):
    _fields_ = [
        *neighbours(c_size_t, "struct_size"),
        *neighbours(c_void_p, "q k v cu_seqlens_q cu_seqlens_k out lse dout dq dk dv"),
        *neighbours(c_int64, "max_s_q max_s_k"),
        *neighbours(c_void_p, "workspace"),
        *neighbours(c_size_t, "workspace_size"),
        *neighbours(c_void_p, "stream"),
        *neighbours(c_char_p, "kernel"),
        *neighbours(c_float, "softmax_scale"),
        *neighbours(c_int32, "causal deterministic log_base"),
        *neighbours(c_void_p, "attn_sink dlse d_attn_sink seqused_q seqused_k"),
    ]


class fmla_merge_args(Structure):
    _fields_ = [
        *neighbours(c_size_t, "struct_size"),
        *neighbours(c_void_p, "out_parts lse_parts out_last lse_last attn_sink out lse stream"),
        *neighbours(c_char_p, "kernel"),
        *neighbours(c_int32, "lse_empty log_base"),
        *neighbours(c_int64, "part"),
    ]


class fmla_cache_append_args(Structure):
    _fields_ = [
        *neighbours(c_size_t, "struct_size"),
        *neighbours(c_void_p, "latent rope kv_cache slot_mapping stream"),
        *neighbours(c_char_p, "kernel"),
        *neighbours(c_int32, "kv_format"),
        *neighbours(c_float, "cache_scale"),
        *neighbours(c_void_p, "norm_weight positions rope_table"),
        *neighbours(c_float, "norm_eps"),
        *neighbours(c_int32, "rope_pairs"),
    ]


class fmla_cache_gather_args(Structure):
    _fields_ = [
        *neighbours(c_size_t, "struct_size"),
        *neighbours(c_void_p, "kv_cache slots out stream"),
        *neighbours(c_char_p, "kernel"),
        *neighbours(c_int32, "kv_format"),
        *neighbours(c_float, "cache_scale"),
    ]


class fmla_cache_convert_args(Structure):
    _fields_ = [
        *neighbours(c_size_t, "struct_size"),
        *neighbours(c_void_p, "src_cache src_slots dst_cache dst_slots stream"),
        *neighbours(c_char_p, "kernel"),
        *neighbours(c_int32, "src_format dst_format"),
        *neighbours(c_float, "src_scale dst_scale"),
    ]


ARGUMENTS = {name[5:-5]: struct for name, struct in list(globals().items()) if name.startswith("fmla_")}
FORMATS_OF = {
    "dense_decode": ("BF16", "FP8_576"),
    "sparse_decode": ("BF16", "FP8_528_F32"),
    "sparse_prefill": ("BF16", "FP8_528_F32"),
    "cache_append": ("BF16", "FP8_528_F32"),
    "cache_gather": ("BF16", "FP8_528_F32"),
    "cache_convert": ("BF16", "FP8_528_F32"),
}
"""The first and the last cache format of each operation."""

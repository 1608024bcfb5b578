# SPDX-License-Identifier: MIT
"""Written by scripts/structs.py: the name of the library, as CMakeLists.txt makes it of the version in the header, and the members of
each operation's argument struct behind its size, in their order, from src/operations.def.
"""

SONAME = "libflashmla.so.0.1"
MEMBERS = {
    "decode_plan": [
        ("TENSOR", "seqlens"),
        ("WIDE", "s_q h_q h_kv capacity"),
        ("DEVICE", "target"),
        ("INTEGER", "num_workers num_partitions"),
        ("POINTER", "plan"),
        ("BYTES", "plan_size"),
        ("POINTER", "stream"),
        ("TENSOR", "partitions num_splits"),
    ],
    "sparse_plan": [
        ("TENSOR", "topk_length extra_topk_length"),
        ("WIDE", "b s_q h_q topk extra_topk"),
        ("DEVICE", "target"),
        ("INTEGER", "num_workers num_partitions"),
        ("POINTER", "plan"),
        ("BYTES", "plan_size"),
        ("POINTER", "stream"),
        ("TENSOR", "partitions num_splits"),
    ],
    "dense_decode": [
        ("TENSOR", "q kv_cache block_table seqlens attn_sink out lse"),
        ("POINTER", "plan"),
        ("BYTES", "plan_size"),
        ("POINTER", "workspace"),
        ("BYTES", "workspace_size"),
        ("POINTER", "stream"),
        ("TEXT", "kernel"),
        ("REAL", "softmax_scale"),
        ("INTEGER", "causal lse_empty log_base batch_invariant num_partitions"),
        ("TENSOR", "partitions num_splits"),
    ],
    "sparse_decode": [
        ("TENSOR", "q kv_cache indices topk_length attn_sink extra_kv_cache extra_indices extra_topk_length out lse"),
        ("POINTER", "plan"),
        ("BYTES", "plan_size"),
        ("TENSOR", "partitions num_splits"),
        ("POINTER", "workspace"),
        ("BYTES", "workspace_size"),
        ("POINTER", "stream"),
        ("TEXT", "kernel"),
        ("FORMAT", "kv_format"),
        ("REAL", "softmax_scale"),
        ("INTEGER", "lse_empty log_base batch_invariant num_partitions"),
    ],
    "sparse_prefill": [
        ("TENSOR", "q kv indices topk_length attn_sink out max_logits lse"),
        ("POINTER", "workspace"),
        ("BYTES", "workspace_size"),
        ("POINTER", "stream"),
        ("TEXT", "kernel"),
        ("FORMAT", "kv_format"),
        ("REAL", "softmax_scale"),
        ("INTEGER", "lse_empty log_base"),
    ],
    "merge": [
        ("TENSOR", "out_parts lse_parts attn_sink out lse"),
        ("POINTER", "stream"),
        ("TEXT", "kernel"),
        ("INTEGER", "lse_empty log_base"),
    ],
    "cache_append": [
        ("TENSOR", "latent rope kv_cache slot_mapping"),
        ("POINTER", "stream"),
        ("TEXT", "kernel"),
        ("FORMAT", "kv_format"),
        ("REAL", "cache_scale"),
    ],
    "cache_gather": [
        ("TENSOR", "kv_cache slots out"),
        ("POINTER", "stream"),
        ("TEXT", "kernel"),
        ("FORMAT", "kv_format"),
        ("REAL", "cache_scale"),
    ],
}

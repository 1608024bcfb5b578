# SPDX-License-Identifier: MIT
"""A small call of every public function that computes, on PyTorch's tensors, and their arguments by what they are; batches of either
decode. A test that imports this is left out where there is no PyTorch."""

from __future__ import annotations

import functools
import importlib

import pytest

import flash_mla
from attention import Batch, check_decode
from kinds import torch
from test_sparse import Sparse
from test_sparse import check as check_sparse

if torch is None:
    pytest.skip("PyTorch is not installed", allow_module_level=True)
importlib.import_module("flash_mla._torch")  # which registers the operators, and is else imported for the first tensor

PAGES, PAGE_SIZE = 4, 64
DECODE, PREFILL = flash_mla.flash_mla_with_kvcache, flash_mla.flash_mla_sparse_fwd


class Call:
    """`inputs`: the tensors that are read, by name; `outputs`: those that can be given to be written; `options`: the rest."""

    def __init__(self, function, inputs, outputs, **options):
        self.function, self.inputs, self.outputs, self.options = function, inputs, outputs, options
        self.name = function.__name__

    def __call__(self, **changed):
        """The results as a tuple."""
        got = self.function(**{**self.inputs, **self.options, **changed})
        if self.name == "cache_append":
            got = {**self.inputs, **self.options, **changed}["kv_cache"]
        return got if isinstance(got, tuple) else (got,)


def of(name, device="cpu"):
    """The call of that name; every time with the same values in tensors of its own."""
    random = torch.Generator().manual_seed(0)

    def values(*shape, dtype=torch.bfloat16):
        return (torch.randn(shape, generator=random) / 4).to(device, dtype)

    def integers(*shape, below, dtype=torch.int32):
        return torch.randint(0, below, shape, generator=random).to(device, dtype)

    def empty(*shape, dtype=torch.float32):
        return torch.full(shape, 7, dtype=dtype, device=device)

    def of_decode():
        return {"out": empty(2, 2, 4, 512, dtype=bf16), "lse": empty(2, 4, 2)}

    bf16, fp16 = torch.bfloat16, torch.float16
    if name == "dense_decode":
        inputs = {
            "q": values(2, 2, 4, 576),
            "k_cache": values(PAGES, PAGE_SIZE, 1, 576),
            "block_table": torch.arange(PAGES, dtype=torch.int32, device=device).view(2, 2),
            "cache_seqlens": torch.tensor([100, 7], dtype=torch.int32, device=device),
            "attn_sink": values(4, dtype=torch.float32),
        }
        return Call(DECODE, inputs, of_decode(), head_dim_v=512, tile_scheduler_metadata=None)
    if name == "sparse_decode":
        inputs = {
            "q": values(2, 2, 4, 576),
            "k_cache": values(PAGES, PAGE_SIZE, 1, 576),
            "indices": integers(2, 2, 64, below=PAGES * PAGE_SIZE),
            "topk_length": torch.tensor([64, 5], dtype=torch.int32, device=device),
            "attn_sink": values(4, dtype=torch.float32),
            "extra_k_cache": values(1, PAGE_SIZE, 1, 576),
            "extra_indices_in_kvcache": integers(2, 2, 32, below=PAGE_SIZE),
            "extra_topk_length": torch.tensor([3, 32], dtype=torch.int32, device=device),
        }
        nothing = dict(block_table=None, cache_seqlens=None, tile_scheduler_metadata=None)
        return Call(DECODE, inputs, of_decode(), head_dim_v=512, **nothing)
    if name == "sparse_prefill":
        inputs = {
            "q": values(3, 4, 576),
            "kv": values(200, 1, 576),
            "indices": integers(3, 1, 64, below=200),
            "topk_length": torch.tensor([64, 5, 0], dtype=torch.int32, device=device),
            "attn_sink": values(4, dtype=torch.float32),
        }
        outputs = {"out": empty(3, 4, 512, dtype=bf16), "max_logits": empty(3, 4), "lse": empty(3, 4)}
        return Call(PREFILL, inputs, outputs, sm_scale=0.04)
    if name == "merge":
        inputs = {
            "out_parts": values(3, 2, 2, 4, 16),
            "lse_parts": values(3, 2, 4, 2, dtype=torch.float32),
            "attn_sink": values(4, dtype=torch.float32),
        }
        outputs = {"out": empty(2, 2, 4, 16, dtype=bf16), "lse": empty(2, 4, 2)}
        return Call(flash_mla.merge_states, inputs, outputs)
    slots = torch.tensor([0, 5, 2], device=device)
    if name == "cache_append":
        inputs = {"latent": values(3, 40, dtype=fp16), "slot_mapping": slots}
        return Call(
            flash_mla.cache_append, inputs, {"kv_cache": empty(2, 4, 1, 40, dtype=fp16)}, rope=None, kv_format="FP16"
        )
    assert name == "cache_gather"
    inputs = {"kv_cache": values(2, 4, 1, 40, dtype=fp16), "slots": slots}
    return Call(flash_mla.cache_gather, inputs, {"out": empty(3, 40, dtype=fp16)}, kv_format="FP16")


NAMES = ("dense_decode", "sparse_decode", "sparse_prefill", "merge", "cache_append", "cache_gather")
# (call, input) and (call, output) of each; a cache that is appended to is always given.
INPUTS = [(name, argument) for name in NAMES for argument in of(name).inputs]
OUTPUTS = [(name, argument) for name in NAMES for argument in of(name).outputs]


def given(call):
    """The outputs that a call cannot do without."""
    return dict(call.outputs) if call.name == "cache_append" else {}


# What most tests take: by name, of each call and each of its arguments.
each_name = pytest.mark.parametrize("name", NAMES)
each_input = pytest.mark.parametrize("name,argument", INPUTS)
each_output = pytest.mark.parametrize("name,argument", OUTPUTS)


def same(got, expected):
    """Bit by bit: there is one kernel for a call."""
    return len(got) == len(expected) and all(
        torch.equal(mine.contiguous().view(torch.uint8), its.contiguous().view(torch.uint8))
        for mine, its in zip(got, expected)
    )


# ---- Batches --------------------------------------------------------------------------------------------------------

BATCH = Batch([100, 0, 65, 7], s_q=2, h_q=4)
# A batch of either decode with its lengths, and how its results are compared: over FP8 caches Hopper has a kernel of its own.
LENGTHS = [300, 20, 65, 140]
SPARSE = dict(b=4, h_q=16, topk=300)
BATCHES = {
    "dense": (functools.partial(Batch, LENGTHS, s_q=2, h_q=16), check_decode),
    "plain": (functools.partial(Sparse, **SPARSE, lengths=[LENGTHS]), check_sparse),
    "FP8_656": (functools.partial(Sparse, layout=656, **SPARSE, lengths=[LENGTHS]), check_sparse),
    "FP8_584-twice": (
        functools.partial(Sparse, layout=584, **SPARSE, extra=(70, 30, 2), lengths=[LENGTHS, [70, 3, 0, -1]]),
        check_sparse,
    ),
}
each_batch = pytest.mark.parametrize("make,check", BATCHES.values(), ids=BATCHES)


def decode(arrays, meta=None, **options):
    return DECODE(*arrays.values(), 512, meta, **options)


def call(arguments, meta=None, **options):
    """What either decode computes."""
    return DECODE(**dict(arguments, tile_scheduler_metadata=meta), **options)


def tensors(arguments):
    return {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}

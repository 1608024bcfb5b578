#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""DeepSeek-V3's attention layer as an nn.Module over a paged cache: prefill in MHA form, chunked prefill, absorbed decode.

Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434; V3, arXiv 2412.19437) caches a latent vector c of 512 values for each
token, and 64 values that carry the position (RoPE). A head's keys and values are projections of c:

    k = [W_UK c, rope(k_r)]      v = W_UV c      out = W_O [softmax(q kᵀ / sqrt(192)) v of all heads]

Prefill projects c to keys and values, then computes dense attention with heads of 192 and 128 (`flash_attn_varlen_func`). In a chunked
prefill, the earlier tokens are gathered from the cache, some at a time, and projected too; `merge_states` joins the results.
Decode is absorbed: the projections are applied to the query and to the result, so the cache is read directly. All heads share one key of
576 values, whose first 512 are the value (`flash_mla_with_kvcache`):

    q · k = (W_UKᵀ q_nope) · c + q_rope · rope(k_r)      Σ p v = W_UV (Σ p c)

For each token, key and head, absorbed attention takes 2 · (576 + 512) FLOP and the MHA form 2 · (192 + 128). The MHA form also projects
each key once, for 2 · 512 · (128 + 128) FLOP a head. From some 170 new tokens of a request on, it takes fewer FLOP.

`MLA`, `Batch` and the functions that they call can be copied into a model unchanged. Parameters have the names and shapes of the
published checkpoints (`model.layers.N.self_attn.…`), without their FP8 scales.

    python3 examples/python/mla_module.py [--device cuda] [--dtype float16] [--cache FP8_656] [--prefill 60 1 130] [--steps 12]

runs a layer of random weights over three prefills, each in two chunks, then decodes. It compares every output with plain PyTorch in
fp32, which attends without a cache, and exits with 1 if one differs by too much.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any, Optional

import torch
from torch import nn

from flash_mla import cache_append, cache_gather, flash_attn_varlen_func, flash_mla_with_kvcache, get_mla_metadata
from flash_mla import merge_states

LATENT, ROPE, NOPE, VALUE = 512, 64, 128, 128  # widths of c and k_r; of q and k without position, and of v, in a head
PAGE = 64


# ---- The cache ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Step:
    """What the layers of a model share in one forward pass. Tokens are packed, request after request."""

    absorbed: bool
    positions: torch.Tensor  # [tokens], of the new tokens
    slots: torch.Tensor  # [tokens], int64: where the cache keeps them
    starts: torch.Tensor  # [b + 1], int32: where the tokens of each request begin
    most: int  # the most tokens of a request
    context: list[tuple[torch.Tensor, torch.Tensor, int]]  # earlier tokens, a part at a time: slots, starts, most
    block_table: torch.Tensor  # [b, pages], int32
    lengths: torch.Tensor  # [b], int32, with the new tokens
    plan: Any  # filled by the first absorbed layer, used by all


class Batch:
    """The pages of each request. The host knows all lengths, as an engine's scheduler does. Every layer has pages of its own, with the
    same slots.

    Args:
        requests, most_tokens: the number of requests, and the most tokens of one.
        context_part: how many earlier tokens of each request are projected to keys and values at a time.
    """

    def __init__(self, requests: int, most_tokens: int, device: Any, context_part: int = 1024):
        self.device, self.context_part = torch.device(device), context_part
        self.lengths = [0] * requests
        self._table = torch.full((requests, -(-most_tokens // PAGE)), -1, dtype=torch.int32)
        self._free = torch.randperm(self._table.numel()).tolist()

    def new_pages(self, dtype: torch.dtype, kv_format: str) -> torch.Tensor:
        """Returns the pages of one layer."""
        shape = self._table.numel(), PAGE, 1
        if kv_format in ("BF16", "FP16"):
            return torch.empty(*shape, LATENT + ROPE, dtype=dtype, device=self.device)
        return torch.empty(*shape, int(kv_format.partition("_")[2]), dtype=torch.uint8, device=self.device)

    def decode(self, tokens: int = 1) -> Step:
        """Gives every request `tokens` new tokens."""
        return self._step([tokens] * len(self.lengths), absorbed=True)

    def prefill(self, tokens: list[int]) -> Step:
        """Gives request r tokens[r] new tokens."""
        return self._step(tokens, absorbed=False)

    def _step(self, tokens: list[int], absorbed: bool) -> Step:
        if len(tokens) != len(self.lengths) or min(tokens) < absorbed:
            wanted = f"{len(self.lengths)} numbers from {int(absorbed)} on"
            raise ValueError(f"tokens: is {tokens}, must be {wanted}, one for each request")
        after, most = [old + new for old, new in zip(self.lengths, tokens)], self._table.shape[1] * PAGE
        if max(after) > most:
            raise ValueError(
                f"tokens: request {after.index(max(after))} would have {max(after)}, must be at most {most}"
            )
        before, self.lengths = self.lengths, after
        for request, (old, new) in enumerate(zip(before, self.lengths)):
            for page in range(-(-old // PAGE), -(-new // PAGE)):
                self._table[request, page] = self._free.pop()
        positions = torch.cat([torch.arange(old, new) for old, new in zip(before, self.lengths)])
        parts = [] if absorbed else range(0, max(before), self.context_part)
        return Step(
            absorbed,
            positions.to(self.device),
            *self._of(list(zip(before, self.lengths))),
            [self._of([(min(b, old), min(b + self.context_part, old)) for old in before]) for b in parts],
            self._table.to(self.device),
            torch.tensor(self.lengths, dtype=torch.int32, device=self.device),
            get_mla_metadata()[0],
        )

    def _of(self, ranges: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Returns the slots of tokens [begin, end) of each request, where each request's begin, and the most of one."""
        slots = []
        for row, (begin, end) in zip(self._table, ranges):
            token = torch.arange(begin, end)
            slots.append(row[token // PAGE].long() * PAGE + token % PAGE)
        counts = [end - begin for begin, end in ranges]
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        return torch.cat(slots).to(self.device), starts.to(self.device), max(counts)


# ---- The layer ----------------------------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


def rope(x: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Rotates the pairs (2i, 2i + 1) of x [tokens, …, 64] by the token's position times the pair's frequency."""
    angles = positions.float()[:, None] * frequencies
    angles = angles.view(len(positions), *[1] * (x.dim() - 2), ROPE // 2)
    even, odd = x[..., ::2].float(), x[..., 1::2].float()
    turned = torch.stack([even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()], dim=-1)
    return turned.flatten(-2).to(x.dtype)


class MLA(nn.Module):
    """DeepSeek-V3's attention, by default with V3's sizes.

    Args:
        frequencies: [32], fp32: those of RoPE. None: computed from `theta`. A model with YaRN, such as V3 itself, passes its own.
        softmax_scale: None: 1 / sqrt(192). A model with YaRN passes this times its mscale².
        kv_format: the cache's format: "BF16" or "FP16", which is then also the type of the weights, or "FP8_656".
    """

    frequencies: torch.Tensor

    def __init__(
        self,
        hidden: int = 7168,
        heads: int = 128,
        q_lora: int = 1536,
        theta: float = 10000.0,
        frequencies: Optional[torch.Tensor] = None,
        softmax_scale: Optional[float] = None,
        kv_format: str = "BF16",
    ):
        super().__init__()
        self.heads, self.kv_format = heads, kv_format
        self.softmax_scale = (NOPE + ROPE) ** -0.5 if softmax_scale is None else softmax_scale
        if frequencies is None:
            frequencies = theta ** (-torch.arange(0, ROPE, 2) / ROPE)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.q_a_proj, self.q_a_layernorm = nn.Linear(hidden, q_lora, bias=False), RMSNorm(q_lora)
        self.q_b_proj = nn.Linear(q_lora, heads * (NOPE + ROPE), bias=False)
        self.kv_a_proj_with_mqa, self.kv_a_layernorm = nn.Linear(hidden, LATENT + ROPE, bias=False), RMSNorm(LATENT)
        self.kv_b_proj = nn.Linear(LATENT, heads * (NOPE + VALUE), bias=False)  # W_UK and W_UV, head by head
        self.o_proj = nn.Linear(heads * VALUE, hidden, bias=False)

    def queries(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [tokens, hidden] → [tokens, heads, NOPE], [tokens, heads, ROPE]."""
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(-1, (self.heads, NOPE + ROPE))
        return q[..., :NOPE], rope(q[..., NOPE:], positions, self.frequencies)

    def latents(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [tokens, hidden] → what the cache keeps of each token, [tokens, LATENT], [tokens, ROPE]."""
        c, k_rope = self.kv_a_proj_with_mqa(x).split([LATENT, ROPE], dim=-1)
        return self.kv_a_layernorm(c), rope(k_rope, positions, self.frequencies)

    def keys_and_values(self, c: torch.Tensor, k_rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """→ [keys, heads, NOPE + ROPE], [keys, heads, VALUE]."""
        k_nope, v = self.kv_b_proj(c).unflatten(-1, (self.heads, NOPE + VALUE)).split([NOPE, VALUE], dim=-1)
        return torch.cat([k_nope, k_rope[:, None].expand(-1, self.heads, -1)], dim=-1), v

    @torch.no_grad()
    def forward(self, x: torch.Tensor, pages: torch.Tensor, step: Step) -> torch.Tensor:
        """x [tokens, hidden], packed → the same shape. Writes the new tokens to `pages`, which are this layer's."""
        c, k_rope = self.latents(x, step.positions)
        cache_append(c, k_rope, pages, step.slots, self.kv_format)
        q_nope, q_rope = self.queries(x, step.positions)
        if step.absorbed:
            heads = self._absorbed(q_nope, q_rope, pages, step)
        else:
            heads = self._expanded(torch.cat([q_nope, q_rope], dim=-1), c, k_rope, pages, step)
        return self.o_proj(heads.flatten(1))

    def _absorbed(self, q_nope: torch.Tensor, q_rope: torch.Tensor, pages: torch.Tensor, step: Step) -> torch.Tensor:
        w_uk, w_uv = self.kv_b_proj.weight.unflatten(0, (self.heads, NOPE + VALUE)).split([NOPE, VALUE], dim=1)
        q = torch.cat([torch.einsum("thn,hnl->thl", q_nope, w_uk), q_rope], dim=-1)
        out, _ = flash_mla_with_kvcache(
            q.unflatten(0, (len(step.lengths), -1)),  # [b, s_q, heads, 576]
            pages,
            step.block_table,
            step.lengths,
            LATENT,
            step.plan,
            softmax_scale=self.softmax_scale,
            causal=True,
            is_fp8_kvcache=pages.dtype == torch.uint8,
        )
        return torch.einsum("thl,hvl->thv", out.flatten(0, 1), w_uv)

    def _expanded(
        self, q: torch.Tensor, c: torch.Tensor, k_rope: torch.Tensor, pages: torch.Tensor, step: Step
    ) -> torch.Tensor:
        """Attention of each token over the new tokens up to itself and over all earlier tokens of its request."""

        def attend(c, k_rope, starts, most, causal):
            k, v = self.keys_and_values(c, k_rope)
            scale = self.softmax_scale
            return flash_attn_varlen_func(
                q, k, v, step.starts, starts, step.most, most, softmax_scale=scale, causal=causal
            )

        parts = [attend(c, k_rope, step.starts, step.most, True)]
        for slots, starts, most in step.context:
            earlier = cache_gather(pages, slots, self.kv_format)
            parts.append(attend(*earlier.split([LATENT, ROPE], dim=-1), starts, most, False))
        if len(parts) == 1:
            return parts[0][0]
        outs, lses = zip(*parts)  # [tokens, heads, VALUE], [tokens, heads]
        out, _ = merge_states(torch.stack(outs)[:, None], torch.stack([lse.T for lse in lses])[:, None])
        return out[0]


# ---- Plain PyTorch, and the comparison ------------------------------------------------------------------------------------


@torch.no_grad()
def plainly(layer: MLA, x: torch.Tensor) -> torch.Tensor:
    """Computes all tokens of a request, x [tokens, hidden], at once and without a cache. Every token attends to those up to itself."""
    positions = torch.arange(len(x), device=x.device)
    q = torch.cat(layer.queries(x, positions), dim=-1)
    k, v = layer.keys_and_values(*layer.latents(x, positions))
    scores = torch.einsum("thd,shd->hts", q, k) * layer.softmax_scale
    scores.masked_fill_(positions > positions[:, None], float("-inf"))
    return layer.o_proj(torch.einsum("hts,shv->thv", scores.softmax(-1), v).flatten(1))


# Relative to the norm of a token's output. bf16 has 8 bits and e4m3 has 4; a layer rounds several times.
BOUNDS = {"BF16": 0.01, "FP16": 0.0015, "FP8_656": 0.05}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:1")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--cache", default="plain", choices=["plain", "FP8_656"], help="plain: the type of --dtype")
    parser.add_argument("--prefill", type=int, nargs="+", default=[60, 1, 130], help="tokens of each request")
    parser.add_argument("--context-part", type=int, default=40, help="earlier tokens that are projected at a time")
    parser.add_argument("--steps", type=int, default=12, help="decode steps; every third has two tokens a request")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--q-lora", type=int, default=96)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if min(options.prefill) < 0 or max(options.prefill) < 1 or options.steps < 0 or options.context_part < 1:
        parser.error("--prefill, --steps, --context-part: a number is too small")

    torch.manual_seed(options.seed)
    device, dtype = options.device, getattr(torch, options.dtype)
    kv_format = {"bfloat16": "BF16", "float16": "FP16"}[options.dtype] if options.cache == "plain" else options.cache
    sizes = dict(hidden=options.hidden, heads=options.heads, q_lora=options.q_lora)
    exact = MLA(**sizes).to(device)
    layer = MLA(**sizes, kv_format=kv_format).to(device)
    layer.load_state_dict(exact.state_dict())
    for name, parameter in layer.named_parameters():
        parameter.data = parameter.to(dtype)
        exact.get_parameter(name).data = parameter.float()

    decoded = [2 if step % 3 == 2 else 1 for step in range(options.steps)]
    requests = [torch.randn(n + sum(decoded), options.hidden, device=device).to(dtype) for n in options.prefill]
    expected = [plainly(exact, x.float()) for x in requests]
    batch = Batch(len(requests), max(map(len, requests)), device, options.context_part)
    pages = batch.new_pages(dtype, kv_format)
    pages.fill_(255 if pages.dtype == torch.uint8 else float("nan"))  # an unwritten slot must not be read

    worst = 0.0
    first = [n // 2 for n in options.prefill]
    chunks = [("prefill", first), ("prefill", [n - m for n, m in zip(options.prefill, first)])]
    for kind, counts in chunks + [("decode", [n] * len(requests)) for n in decoded]:
        before = list(batch.lengths)
        step = batch.prefill(counts) if kind == "prefill" else batch.decode(counts[0])
        places = [slice(old, old + new) for old, new in zip(before, counts)]
        got = layer(torch.cat([x[place] for x, place in zip(requests, places)]), pages, step).float()
        wanted = torch.cat([y[place] for y, place in zip(expected, places)])
        difference = ((got - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max().item() if len(got) else 0.0
        print(f"{kind:7}  lengths {batch.lengths}  largest relative difference of a token {difference:.2e}")
        worst = max(worst, difference) if difference == difference else float("inf")

    if worst < BOUNDS[kv_format]:
        print(f"the layer and plain attention agree: {worst:.2e} < {BOUNDS[kv_format]}")
        return 0
    print(f"the layer and plain attention differ: {worst:.2e}, must be below {BOUNDS[kv_format]}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())

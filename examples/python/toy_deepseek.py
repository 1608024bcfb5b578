#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""One attention layer of a toy DeepSeek-V2, decoding token by token: plain attention against flash_mla.

Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) keeps, of each token, a latent vector c of 512 values and 64
values that carry the position (RoPE). A head's keys and values are projections of c:

    k = [W_uk c, rope(k_r)]      v = W_uv c      out = W_o [softmax(q kᵀ / sqrt(192)) v of all heads]

Plain attention projects every cached token again at every step. Absorbed, the projections move to the query and to the
result, and the cache is read as it is: one key of 576 values for all heads, whose first 512 are the value.

    q · k = (W_ukᵀ q_nope) · c + q_rope · rope(k_r)      Σ p v = W_uv (Σ p c)

    python3 examples/python/toy_deepseek.py [--device cuda] [--dtype float16] [--steps 12] [--seed 1]

prints the largest difference of each step, and ends with exit code 1 if one is too large.
"""

from __future__ import annotations

import argparse
import sys

import torch

from flash_mla import flash_mla_with_kvcache, get_mla_metadata

HIDDEN, HEADS = 256, 16
LATENT, ROPE, NOPE, VALUE = 512, 64, 128, 128  # of a token: c, k_r; of a head: q and k without position, v
PAGE = 64
SCALE = (NOPE + ROPE) ** -0.5
BOUND = 0.02  # of the largest magnitude of a step's output: bfloat16 has 8 bits


def rms_norm(x: torch.Tensor) -> torch.Tensor:
    return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rope(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Turns the pairs (2i, 2i + 1) of x [tokens, …, 64] by an angle that grows with the token's position."""
    frequencies = 10000.0 ** (-torch.arange(0, ROPE, 2, device=x.device) / ROPE)
    angles = positions[:, None].float() * frequencies
    angles = angles.view(len(positions), *[1] * (x.dim() - 2), ROPE // 2)
    even, odd = x[..., ::2].float(), x[..., 1::2].float()
    turned = torch.stack([even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()], dim=-1)
    return turned.flatten(-2).to(x.dtype)


class Layer:
    """The weights, small and random, and the three projections that both ways share."""

    def __init__(self, device: str, dtype: torch.dtype):
        def weight(*shape: int) -> torch.Tensor:
            return (torch.randn(*shape) * shape[-1] ** -0.5).to(device, dtype)

        self.w_q = weight(HEADS * (NOPE + ROPE), HIDDEN)
        self.w_dkv = weight(LATENT + ROPE, HIDDEN)
        self.w_uk = weight(HEADS, NOPE, LATENT)
        self.w_uv = weight(HEADS, VALUE, LATENT)
        self.w_o = weight(HIDDEN, HEADS * VALUE)

    def queries(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [b, HIDDEN] → [b, HEADS, NOPE], [b, HEADS, ROPE]."""
        q = (x @ self.w_q.T).view(-1, HEADS, NOPE + ROPE)
        return q[..., :NOPE], rope(q[..., NOPE:], positions)

    def latent(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [tokens, HIDDEN] → what the cache keeps of each, [tokens, LATENT + ROPE]."""
        c, k_rope = (x @ self.w_dkv.T).split([LATENT, ROPE], dim=-1)
        return torch.cat([rms_norm(c), rope(k_rope, positions)], dim=-1)

    def output(self, heads: torch.Tensor) -> torch.Tensor:
        return heads.flatten(1) @ self.w_o.T

    def attend_plainly(self, x: torch.Tensor, positions: torch.Tensor, cached: list[torch.Tensor]) -> torch.Tensor:
        """Each request's keys and values, projected from all of its latents."""
        q_nope, q_rope = self.queries(x, positions)
        results = []
        for request, latents in enumerate(cached):
            c, k_rope = latents.split([LATENT, ROPE], dim=-1)
            k = torch.einsum("tl,hnl->htn", c, self.w_uk)
            v = torch.einsum("tl,hvl->htv", c, self.w_uv)
            scores = torch.einsum("hn,htn->ht", q_nope[request].float(), k.float())
            scores += torch.einsum("hr,tr->ht", q_rope[request].float(), k_rope.float())
            weights = torch.softmax(scores * SCALE, dim=-1).to(v.dtype)
            results.append(torch.einsum("ht,htv->hv", weights, v))
        return self.output(torch.stack(results))

    def attend_absorbed(self, x: torch.Tensor, positions: torch.Tensor, cache: PagedCache) -> torch.Tensor:
        """W_uk goes into the query, W_uv into the result, and the cache is what the kernel reads."""
        q_nope, q_rope = self.queries(x, positions)
        q = torch.cat([torch.einsum("bhn,hnl->bhl", q_nope, self.w_uk), q_rope], dim=-1)
        plan, _ = get_mla_metadata()  # new lengths, new plan; the layers of a larger model would share it
        out, _ = flash_mla_with_kvcache(
            q[:, None],  # [b, s_q, h_q, d_qk]: one new token of each request
            cache.pages,
            cache.block_table,
            cache.lengths,
            LATENT,
            plan,
            softmax_scale=SCALE,
            causal=True,
        )
        return self.output(torch.einsum("bhl,hvl->bhv", out[:, 0], self.w_uv))


class PagedCache:
    """Pages of 64 tokens, given to requests as they grow."""

    def __init__(self, requests: int, most_tokens: int, device: str, dtype: torch.dtype):
        columns = -(-most_tokens // PAGE)
        self.pages = torch.full((requests * columns, PAGE, 1, LATENT + ROPE), float("nan"), device=device, dtype=dtype)
        self.block_table = torch.full((requests, columns), -1, device=device, dtype=torch.int32)
        self.lengths = torch.zeros(requests, device=device, dtype=torch.int32)
        self._free = torch.randperm(requests * columns).tolist()
        self._lengths = [0] * requests

    def append(self, request: int, latents: torch.Tensor) -> None:
        """latents [tokens, LATENT + ROPE]"""
        for latent in latents:
            page, slot = divmod(self._lengths[request], PAGE)
            if slot == 0:
                self.block_table[request, page] = self._free.pop()
            self.pages[self.block_table[request, page].item(), slot, 0] = latent
            self._lengths[request] += 1
        self.lengths[request] = self._lengths[request]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:1")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--prompts", type=int, nargs="+", default=[60, 1, 130], help="tokens that are there at first")
    parser.add_argument("--steps", type=int, default=12, help="tokens to decode")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    device, dtype = options.device, getattr(torch, options.dtype)
    layer = Layer(device, dtype)
    cache = PagedCache(len(options.prompts), max(options.prompts) + options.steps, device, dtype)
    plain: list[torch.Tensor] = []  # the same latents, each request's in one piece
    for request, tokens in enumerate(options.prompts):
        x = torch.randn(tokens, HIDDEN).to(device, dtype)
        plain.append(layer.latent(x, torch.arange(tokens, device=device)))
        cache.append(request, plain[request])

    x = torch.randn(len(options.prompts), HIDDEN).to(device, dtype)
    worst = 0.0
    for step in range(options.steps):
        positions = cache.lengths.clone()
        latents = layer.latent(x, positions)
        for request in range(len(plain)):
            plain[request] = torch.cat([plain[request], latents[request : request + 1]])
            cache.append(request, latents[request : request + 1])
        expected = layer.attend_plainly(x, positions, plain)
        got = layer.attend_absorbed(x, positions, cache)
        difference = ((got - expected).abs().max() / expected.abs().max()).item()
        print(f"step {step:2}  lengths {cache.lengths.tolist()}  largest difference {difference:.2e} of the output")
        worst = max(worst, difference) if difference == difference else float("inf")
        x = rms_norm(x + expected)  # the next token, as a layer above would give it

    if worst < BOUND:
        print(f"plain and absorbed attention agree: {worst:.2e} < {BOUND}")
        return 0
    print(f"plain and absorbed attention differ: {worst:.2e}, must be below {BOUND}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())

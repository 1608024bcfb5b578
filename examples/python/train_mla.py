# SPDX-License-Identifier: MIT
"""Trains a small MLA block in its MHA form, once with this package's attention and once with PyTorch's own, and prints both losses.

A block projects its input to a latent and the latent to the keys and values of all heads, and adds the result of attention to its input.
The model has two blocks. It is trained on made-up tokens, in packed sequences of several lengths. Weights are fp32, attention is in bf16.
Both runs begin with the same weights and see the same batches, so their losses differ by rounding only.

    python examples/python/train_mla.py [--device cpu|cuda] [--steps 30] [--sizes 192/128]
"""

from __future__ import annotations

import argparse
import math
import sys

import torch
from torch import nn

from flash_mla import flash_attn_varlen_func

HEADS, WIDTH, LATENT, VOCABULARY = 4, 128, 64, 64
LENGTHS = (37, 96, 5, 128, 70)


def starts_of(lengths, device):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)


def ours(q, k, v, starts):
    return flash_attn_varlen_func(q, k, v, starts, starts, max(LENGTHS), max(LENGTHS), causal=True)[0]


def theirs(q, k, v, starts):
    """PyTorch's attention, one sequence at a time."""
    outs = []
    for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist()):
        parts = (x[begin:end].transpose(0, 1)[None] for x in (q, k, v))
        outs.append(nn.functional.scaled_dot_product_attention(*parts, is_causal=True)[0].transpose(0, 1))
    return torch.cat(outs)


class Block(nn.Module):
    def __init__(self, d_qk, d_v, attend):
        super().__init__()
        self.sizes, self.attend = (d_qk, d_v), attend
        self.norm, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, LATENT, bias=False)
        self.query = nn.Linear(WIDTH, HEADS * d_qk, bias=False)
        self.up = nn.Linear(LATENT, HEADS * (d_qk + d_v), bias=False)
        self.out = nn.Linear(HEADS * d_v, WIDTH, bias=False)

    def forward(self, x, starts):
        y = self.norm(x)
        q = self.query(y).unflatten(-1, (HEADS, -1)).bfloat16()
        k, v = self.up(self.down(y)).unflatten(-1, (HEADS, -1)).bfloat16().split(self.sizes, -1)
        return x + self.out(self.attend(q, k, v, starts).flatten(1).float())


class Model(nn.Module):
    def __init__(self, d_qk, d_v, attend):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(d_qk, d_v, attend) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, starts):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, starts)
        return self.head(x)


def batch(generator, device):
    """Each sequence repeats one of eight words, so the next token can be predicted from those before it."""
    sequences = []
    for length in LENGTHS:
        number = int(torch.randint(8, (), generator=generator))
        word = torch.randint(VOCABULARY, (3 + number,), generator=torch.Generator().manual_seed(number))
        sequences.append(word.repeat(math.ceil((length + 1) / len(word)))[: length + 1])
    tokens, following = torch.cat([s[:-1] for s in sequences]), torch.cat([s[1:] for s in sequences])
    return tokens.to(device), following.to(device)


def train(attend, sizes, steps, device):
    torch.manual_seed(1)
    model = Model(*sizes, attend).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator, starts, losses = torch.Generator().manual_seed(2), starts_of(LENGTHS, device), []
    for _ in range(steps):
        tokens, following = batch(generator, device)
        loss = nn.functional.cross_entropy(model(tokens, starts), following)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--sizes", default="192/128", choices=("256/256", "192/128", "128/128", "96/64", "64/64"))
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split("/")]
    mine, reference = (train(attend, sizes, options.steps, options.device) for attend in (ours, theirs))
    print("step   flash_mla   PyTorch")
    for step in range(0, options.steps, max(1, options.steps // 10)):
        print(f"{step:4}   {mine[step]:9.4f}   {reference[step]:7.4f}")
    apart = max(abs(a - b) for a, b in zip(mine, reference))
    print(f"last   {mine[-1]:9.4f}   {reference[-1]:7.4f}; largest difference {apart:.4f}")
    if apart <= 0.05:
        return 0
    print(f"train_mla: the losses differ by {apart:.4f}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())

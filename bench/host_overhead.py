# SPDX-License-Identifier: MIT
"""What a call of flash_mla_with_kvcache takes on the host: the median of many, with the GPU idle and the plan reused.

    python3 bench/host_overhead.py [--device cuda] [--rounds 21] [--calls 200]

The breakdown comes from calls that end early: each stage is left out together with all that follow it, and the difference of
two such times is what it takes. The last one, the library's call, launches the kernels. A round times them all, one after the
other, so that what disturbs the machine for longer disturbs both sides of a difference. Shown is the median over the rounds;
the quartiles and the ends say how far to trust it. What PyTorch's own steps take is the floor for a call made of such.
"""

import argparse
import statistics
import time

import torch

import flash_mla
from flash_mla import _operations, _torch


def inputs(device):
    q = torch.randn(1, 1, 16, 576, device=device).bfloat16()
    cache = torch.randn(4, 64, 1, 576, device=device).bfloat16()
    table = torch.arange(4, dtype=torch.int32, device=device).view(1, 4)
    return q, cache, table, torch.tensor([200], dtype=torch.int32, device=device)


def median_us(call, calls, wait):
    """Few calls in a row, so that no queue fills up and makes the host wait."""
    times = []
    for _ in range(calls // 10):
        wait()
        for _ in range(10):
            begin = time.perf_counter_ns()
            call()
            times.append(time.perf_counter_ns() - begin)
    wait()
    return statistics.median(times) / 1000


class Without:
    """A function of a module that returns at once, for a while."""

    def __init__(self, module, name, result):
        self.module, self.name, self.result = module, name, result

    def __enter__(self):
        self.function = getattr(self.module, self.name)
        setattr(self.module, self.name, lambda *arguments: self.result)

    def __exit__(self, *exception):
        setattr(self.module, self.name, self.function)


def show(text, times):
    low, middle, high = statistics.quantiles(times, n=4)
    print(f"{middle:7.1f} us  {text:40} {low:6.1f} to {high:.1f}, all {min(times):.1f} to {max(times):.1f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=21, help="at least 2")
    parser.add_argument("--calls", type=int, default=200, help="of each kind in a round, at least 10")
    options = parser.parse_args()
    wait = torch.cuda.synchronize if options.device.startswith("cuda") else (lambda: None)
    arrays = inputs(options.device)
    one = torch.zeros(1, device=options.device)
    meta, _ = flash_mla.get_mla_metadata()

    def call():
        return flash_mla.flash_mla_with_kvcache(*arrays, 512, meta, causal=True)

    results = call()
    stages = [
        ("checks of arguments, the plan looked up", _torch, "decode", results),
        ("is anybody tracing or watching", _torch, "dense_decode", results),
        ("out and lse, made by PyTorch", _torch, "dense_decode_out", None),
        ("arguments put down as C has them", _operations, "_run_decode", 0),
        ("the workspace, from PyTorch", _operations.library, "fmla_dense_decode", 0),
    ]
    floor = {
        "torch.empty of 8192 bytes": lambda: torch.empty(8192, dtype=torch.uint8, device=options.device),
        "Tensor.zero_ of one element": one.zero_,
    }
    texts = [text for text, *_ in stages] + ["the library's call"]
    rounds = {text: [] for text in ["a call", *texts, *floor]}
    for _ in range(options.rounds):
        until = [0.0]
        for _, module, name, result in stages:
            with Without(module, name, result):
                until.append(median_us(call, options.calls, wait))
        until.append(median_us(call, options.calls, wait))
        rounds["a call"].append(until[-1])
        for text, before, after in zip(texts, until, until[1:]):
            rounds[text].append(after - before)
        for text, step in floor.items():
            rounds[text].append(median_us(step, options.calls, wait))
    print(f"torch {torch.__version__} on {options.device}; median, quartiles and ends of {options.rounds} rounds")
    for text, times in rounds.items():
        show(text, times)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: MIT
"""What a call of flash_mla_with_kvcache takes on the host: the median of many, with the GPU idle and the plan reused.

    python3 bench/host_overhead.py [--device cuda] [--calls 2000]

The breakdown comes from calls that end early: each stage is left out together with all that follow it, and the difference of
two such times is what it takes. The last one, the library's call, launches the kernels.
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


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--calls", type=int, default=2000)
    options = parser.parse_args()
    wait = torch.cuda.synchronize if options.device.startswith("cuda") else (lambda: None)
    arrays = inputs(options.device)
    meta, _ = flash_mla.get_mla_metadata()

    def call():
        return flash_mla.flash_mla_with_kvcache(*arrays, 512, meta, causal=True)

    results = call()
    stages = [
        ("checks of arguments, the plan looked up", _torch, "decode", results),
        ("is anybody tracing or watching", _torch, "dense_decode", results),
        ("out and lse, made by PyTorch", _torch, "dense_decode_out", None),
        ("arguments put down as C has them", _operations, "_run_decode", 0),
        ("the workspace, made by PyTorch", _operations.library, "fmla_dense_decode", 0),
    ]
    before = 0.0
    for text, module, name, result in stages:
        with Without(module, name, result):
            until = median_us(call, options.calls, wait)
        print(f"{until - before:6.1f} us  {text}")
        before = until
    whole = median_us(call, options.calls, wait)
    print(f"{whole - before:6.1f} us  the library's call")
    print(f"{whole:6.1f} us  a call, torch {torch.__version__} on {options.device}")


if __name__ == "__main__":
    main()

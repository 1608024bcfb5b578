# SPDX-License-Identifier: MIT
"""Measures the host's time of a call of flash_mla_with_kvcache with a reused plan, or of flash_attn_varlen_func: the median of
many, with the GPU idle. With PyTorch's tensors every call is like the one before (_torch_repeat.py), as those of a model's layers
are.

    python3 bench/host_overhead.py [--op dense_decode] [--arrays torch] [--device cuda] [--rounds 21] [--calls 200]
    OMP_NUM_THREADS=1 python3 bench/host_overhead.py --arrays numpy

The breakdown comes from calls that end early: each stage is omitted together with all later ones, and the difference of two such
times is its cost. The last stage, the library's call, launches the kernels. A round times them all in turn, so that a longer
disturbance affects both sides of a difference. The output has the median over rounds, with quartiles and extremes. The time of
PyTorch's own steps is the floor for a call made of them. NumPy's arrays are of the smallest problem, one head over one key,
without PyTorch in the process.
"""

import argparse
import statistics
import time
import types

import flash_mla
from flash_mla import _operations


# The inputs of a call, as PyTorch tensors and as NumPy arrays: shapes of bf16 or fp16 inputs, and integers.
INPUTS = {
    _operations.DENSE_DECODE: (
        (((1, 1, 16, 576), (4, 64, 1, 576)), ([[0, 1, 2, 3]], [200])),
        (((1, 1, 1, 576), (1, 64, 1, 576)), ([[0]], [1])),
    ),
    _operations.MHA_FORWARD: (
        (((200, 16, 192), (200, 16, 192), (200, 16, 128)), ([0, 200], [0, 200])),
        (((1, 1, 64), (1, 1, 64), (1, 1, 64)), ([0, 1], [0, 1])),
    ),
}
OPERATIONS = {operation.name: operation for operation in INPUTS}


def of_torch(operation, device):
    """Returns (inputs, stages, steps to compare with, wait, words) of a call."""
    import torch

    from flash_mla import _torch, _torch_repeat

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    shapes, integers = INPUTS[operation][0]
    arrays = [torch.randn(shape, device=device).bfloat16() for shape in shapes]
    arrays += [torch.tensor(values, dtype=torch.int32, device=device) for values in integers]
    before = "checks of arguments, the plan looked up", _torch, "run"
    if operation is _operations.MHA_FORWARD:  # looks for a call to repeat before the checks
        before = "types of arguments", _torch, "last_like"
    stages = [
        before,
        ("who watches; are tensors as before; out and lse", _torch_repeat.Repeat, "_launch"),
        *in_the_library(operation, "_launch_with", "the workspace, from PyTorch"),
    ]
    one = torch.zeros(1, device=device)
    steps = {
        "torch.empty of 8192 bytes": lambda: torch.empty(8192, dtype=torch.uint8, device=device),
        "Tensor.zero_ of one element": one.zero_,
    }
    wait = torch.cuda.synchronize if device.startswith("cuda") else (lambda: None)
    return arrays, stages, steps, wait, f"torch {torch.__version__} on {device}"


def of_numpy(operation, device):
    import numpy

    from flash_mla import _arrays

    if device not in (None, "cpu"):
        raise SystemExit(f"host_overhead.py: --device: is {device}, must be cpu where arrays are NumPy's")
    shapes, integers = INPUTS[operation][1]
    arrays = [numpy.zeros(shape, numpy.float16) for shape in shapes]
    arrays += [numpy.array(values, numpy.int32) for values in integers]
    stages = [
        ("checks of arguments, the plan looked up", _arrays, "run"),
        ("out and lse, made by NumPy", _arrays, "call"),
        *in_the_library(operation, "_launch_in_memory", "the workspace, kept from the last call"),
    ]
    steps = {"numpy.empty of 8192 bytes": lambda: numpy.empty(8192, numpy.uint8)}
    return arrays, stages, steps, lambda: None, f"numpy {numpy.__version__}"


def in_the_library(operation, launched, workspace):
    return [
        ("arguments put down as C has them", operation, launched),
        (workspace, operation, "launch"),
    ]


def median_us(call, calls, wait):
    """Makes few calls in a row, so that no full queue makes the host wait."""
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
    """Replaces a function of a module temporarily by one that returns at once."""

    def __init__(self, module, name, result):
        self.module, self.name, self.result = module, name, result

    def __enter__(self):
        self.function = getattr(self.module, self.name)
        setattr(self.module, self.name, lambda *arguments: self.result)

    def __exit__(self, *exception):
        setattr(self.module, self.name, self.function)


def show(text, times):
    low, middle, high = statistics.quantiles(times, n=4)
    print(f"{middle:7.1f} us  {text:46} {low:6.1f} to {high:.1f}, all {min(times):.1f} to {max(times):.1f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", choices=OPERATIONS, default="dense_decode")
    parser.add_argument("--arrays", choices=["torch", "numpy"], default="torch")
    parser.add_argument("--device", help="of PyTorch's tensors; the GPU where there is one")
    parser.add_argument("--rounds", type=int, default=21, help="at least 2")
    parser.add_argument("--calls", type=int, default=200, help="of each kind in a round, at least 10")
    options = parser.parse_args()
    made = of_torch if options.arrays == "torch" else of_numpy
    arrays, stages, floor, wait, words = made(OPERATIONS[options.op], options.device)
    function = flash_mla.flash_mla_with_kvcache
    others = 512, flash_mla.get_mla_metadata()[0]
    if options.op == "mha_forward":
        function, others = flash_mla.flash_attn_varlen_func, arrays[0].shape[:1] * 2

    def call():
        return function(*arrays, *others, causal=True)

    results = [call() for _ in range(3)][-1]  # the next call then repeats the previous one for PyTorch too
    nothing = dict.fromkeys(("launch", "_launch", "_launch_with", "_launch_in_memory"), 0)  # returns a status
    nothing["last_like"] = types.SimpleNamespace(repeat=lambda inputs: results)
    texts = [text for text, *_ in stages] + ["the library's call"]
    rounds = {text: [] for text in ["a call", *texts, *floor]}
    for _ in range(options.rounds):
        until = [0.0]
        for _, module, name in stages:
            with Without(module, name, nothing.get(name, results)):
                until.append(median_us(call, options.calls, wait))
        until.append(median_us(call, options.calls, wait))
        rounds["a call"].append(until[-1])
        for text, before, after in zip(texts, until, until[1:]):
            rounds[text].append(after - before)
        for text, step in floor.items():
            rounds[text].append(median_us(step, options.calls, wait))
    print(f"{function.__name__}, {words}; median, quartiles and ends of {options.rounds} rounds")
    for text, times in rounds.items():
        show(text, times)


if __name__ == "__main__":
    main()

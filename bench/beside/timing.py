# SPDX-License-Identifier: MIT
"""How contestants are compared and timed, and what is said of all rows."""

import math
import random
import statistics

try:
    import torch
except ImportError:  # only timing needs it
    torch = None

from beside.contestants import brief
from beside.rows import normal

COSINE = 0.9999  # of two outputs, at least
WORST = 0.1  # at most, of an element's difference over the root mean square of its row; rounding to bf16 makes 0.03


def difference(ours, theirs):
    """What is wrong with a peer's output; None where it agrees with ours. A NaN in either agrees with nothing."""
    width = ours.shape[-1]
    if theirs.shape[-1] != width or theirs.numel() != ours.numel():
        return f"its output is of shape {tuple(theirs.shape)}, ours of {tuple(ours.shape)}"
    sums, worst = torch.zeros(3, dtype=torch.float64), torch.zeros(())
    for a, b in zip(ours.reshape(-1, width).split(1 << 16), theirs.reshape(-1, width).split(1 << 16)):
        a, b = a.float(), b.float()
        sums += torch.stack([(c * d).sum(dtype=torch.float64) for c, d in ((a, b), (a, a), (b, b))])
        size = a.square().mean(1).sqrt().clamp_min(1e-30)
        worst = torch.maximum(worst, ((a - b).abs().amax(1) / size).amax())
    cosine, worst = (sums[0] / (sums[1] * sums[2]).sqrt()).item(), worst.item()
    if cosine >= COSINE and worst <= WORST:
        return None
    return f"its output differs from ours: cosine {cosine:.6f}, worst element {worst:.3g} root mean squares of its row"


def captured(call):
    """(a graph of the call, the output that its second replay wrote)"""
    for _ in range(2):  # what happens only once happens now: kernels are loaded or compiled, plans are made
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call()
    graph.replay()
    output.fill_(math.nan)
    graph.replay()
    torch.cuda.synchronize()
    return graph, output


def what_comes_before(flush):
    """What is done before each run, outside of its time."""
    if flush == "read":
        memory = torch.zeros(512 << 20, dtype=torch.uint8).view(torch.int32)
        return lambda: torch.amax(memory)
    tokens, weights = normal(128, 7168), [normal(7168, 18432), normal(7168, 18432)]
    result = torch.empty(128, 18432, dtype=torch.bfloat16)

    def two_products():
        for weight in weights:
            torch.mm(tokens, weight, out=result)

    return two_products


def medians_us(graphs, before, runs):
    times = {name: [] for name in graphs}
    for run in range(runs):
        for name in reversed(list(graphs)) if run % 2 else graphs:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before()
            begin.record()
            graphs[name].replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end) * 1000)
    return {name: statistics.median(values) for name, values in times.items()}


def outcome(row, present, absent, seed, before, runs):
    """(what was measured or {}, what went wrong). A row is timed where ours is there and every output agrees."""
    torch.manual_seed(seed)
    try:
        x = row.inputs(random.Random(seed))
    except Exception as error:  # too little memory, say
        return {}, [f"its inputs could not be made: {brief(error)}"]
    wrong = [f"{name} is not there" for name in row.peers if name in absent]
    calls, graphs, outputs = {}, {}, {}  # a graph reads the plan that its call holds
    for name in ("ours", *row.peers):
        if name in present:
            try:
                calls[name] = getattr(present[name], row.operation)(x)
                graphs[name], outputs[name] = captured(calls[name])
            except Exception as error:  # a peer may refuse a shape in any way
                wrong.append(f"{name} failed: {brief(error)}")
    if "ours" not in outputs:
        return {}, wrong
    ours = outputs.pop("ours")
    found = {name: difference(ours, output) for name, output in outputs.items()}
    differing = [f"{name}: {text}" for name, text in found.items() if text]
    if differing:
        return {}, wrong + differing
    us = medians_us(graphs, before, runs)
    measured = {f"{name}_us": round(value, 1) for name, value in us.items()}
    measured.update({f"{name}_tflops": round(x.flop / value / 1e6) for name, value in us.items()})
    if len(us) > 1:
        measured["ratio"] = round(min(us[name] for name in us if name != "ours") / us["ours"], 3)
    if wrong:
        measured["lacks"] = [name for name in row.peers if name not in us]
    return measured, wrong


def summary(rows, lines, wrong):
    """Lines of text about (group, row) pairs, the line written for each (None: not timed), and what went wrong."""
    ratios, texts = {}, []
    for (group, row), line in zip(rows, lines):
        name = f"{row.kind} {row.d_qk}/{row.d_v}" if group == "mha" else group
        ratios.setdefault(name, []).append((line or {}).get("ratio"))
    for name, values in ratios.items():
        known = [value for value in values if value is not None]
        text = f"{name}: {len(known)} of {len(values)} rows have a ratio"
        if known:
            text += f", geometric mean {statistics.geometric_mean(known):.3f}, smallest {min(known):.3f}"
        texts.append(text)
    return texts + [f"failed: {text}" for text in wrong]

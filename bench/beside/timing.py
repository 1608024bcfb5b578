# SPDX-License-Identifier: MIT
"""Compares and times contestants, and summarises all rows."""

import math
import random
import statistics
import time
from typing import Any, NamedTuple

try:
    import torch
except ImportError:  # only timing needs it
    torch = None

from beside.contestants import brief
from beside.errors import errors_beside, judgements
from beside.rows import OF_BF16, normal

AHEAD = 4_000_000  # clocks, some 2 ms: the GPU waits this long before an uncaptured call, so that the host gets ahead
LONGEST = 0.5  # seconds: longer calls are not timed; if all runs would take longer, a contestant has fewer runs


def difference(ours, theirs, name="output", together=1, least_row=0.0, whose="ours", limits=OF_BF16):
    """Returns what is wrong with a peer's output; None if it agrees with ours. NaN agrees with nothing."""
    width = ours.shape[-1]
    if theirs.shape[-1] != width or theirs.numel() != ours.numel():
        return f"its {name} is of shape {tuple(theirs.shape)}, {whose} of {tuple(ours.shape)}"
    sums, worst = torch.zeros(3, dtype=torch.float64), torch.zeros(())
    pairs = list(zip(ours.reshape(-1, width).split(1 << 16), theirs.reshape(-1, width).split(1 << 16)))
    least = torch.full((), 1e-30)
    if least_row:
        of_all = sum(a.float().square().sum(dtype=torch.float64) for a, _ in pairs) / ours.numel()
        least = least_row * of_all.sqrt().float().clamp_min(1e-30)
    for a, b in pairs:
        a, b = a.float(), b.float()
        sums += torch.stack([(c * d).sum(dtype=torch.float64) for c, d in ((a, b), (a, a), (b, b))])
        size = torch.maximum(largest_of(a.square().mean(1).sqrt(), together), least)
        worst = torch.maximum(worst, ((a - b).abs().amax(1) / size).amax())
    cosine, worst = (sums[0] / (sums[1] * sums[2]).sqrt()).item(), worst.item()
    if cosine >= limits.cosine and worst <= limits.worst:
        return None
    numbers = f"cosine {cosine:.6f}, worst element {worst:.3g} root mean squares of its row"
    return f"its {name} differs from {whose}: {numbers}"


def largest_of(values, together):
    """Replaces each element by the largest of its group of neighbours."""
    count = len(values)
    padded = torch.nn.functional.pad(values, (0, -count % together)).view(-1, together)
    return padded.amax(1).repeat_interleave(together)[:count]


def first_difference(row, ours, theirs, whose, limits):
    """Returns the difference of the first result of a row that differs."""
    measure = (row.together, row.least_row, whose, limits)
    found = (difference(a, b, name, *measure) for a, b, name in zip(ours, theirs, row.results))
    return next(filter(None, found), None)


def same_bits(left, right):
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(left, right))


class Prepared(NamedTuple):
    """A timed call of a contestant, with the memory that its graph reads, and the function of a run."""

    call: Any
    run: Any
    results: tuple
    runs: int
    same_again: bool = True  # a second call gives the same bits


class TooSlow(Exception):
    pass


def captured(call):
    """Returns (a graph of the call, the output of its second replay)."""
    for _ in range(2):  # one-time work: kernels are loaded or compiled, plans are made
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


def timed(call):
    torch.cuda.synchronize()
    begin = time.perf_counter()
    results = call()
    torch.cuda.synchronize()
    return results, time.perf_counter() - begin


def prepared(call, row, runs):
    if row.of_errors:
        results, _ = timed(call)
        return Prepared(call, call, results if isinstance(results, tuple) else (results,), runs)
    if row.captured:
        graph, output = captured(call)
        return Prepared(call, graph.replay, (output,), runs)
    results, _ = timed(call)  # kernels are loaded or compiled
    again, seconds = timed(call)
    if seconds > LONGEST:
        raise TooSlow(f"a call takes {seconds:.2f} s; one of more than {LONGEST} s is not timed")
    fewer = max(1, int(LONGEST / max(seconds, 1e-9)))
    return Prepared(call, call, results, min(runs, fewer), same_bits(results, again))


def what_comes_before(flush):
    """Returns the function that runs before each run, untimed."""
    if flush == "read":
        memory = torch.zeros(512 << 20, dtype=torch.uint8).view(torch.int32)
        return lambda: torch.amax(memory)
    tokens, weights = normal(128, 7168), [normal(7168, 18432), normal(7168, 18432)]
    result = torch.empty(128, 18432, dtype=torch.bfloat16)

    def two_products():
        for weight in weights:
            torch.mm(tokens, weight, out=result)

    return two_products


def medians_us(prepared, before, captured=True):
    times = {name: [] for name in prepared}
    for run in range(max(one.runs for one in prepared.values())):
        for name in reversed(list(prepared)) if run % 2 else prepared:
            if run >= prepared[name].runs:
                continue
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if not captured:
                torch.cuda._sleep(AHEAD)
            before()
            begin.record()
            prepared[name].run()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end) * 1000)
    return {name: statistics.median(values) for name, values in times.items()}


def calls_of(row):
    """Returns {name in a line: (contestant, method)} of all participants."""
    return {**{name: (name, row.operation) for name in ("ours", *row.peers)}, **row.variants}


class Session:
    """State that rows share: `before` is called before each run; contestants in `left_out` do not take part."""

    def __init__(self, present, absent, seed, before, runs, left_out=()):
        self.present, self.absent, self.seed, self.before, self.runs = present, absent, seed, before, runs
        self.left_out = left_out
        self.too_slow = {}  # {(kind, name): fewest FLOP of a call that was too slow}

    def prepare(self, row, x):
        """Returns ({name: Prepared}, what went wrong)."""
        ready, wrong = {}, [f"{name} is not there" for name in row.peers if name in self.absent]
        for name, (contestant, method) in calls_of(row).items():
            if contestant not in self.present or name in self.left_out:
                continue
            if x.flop >= self.too_slow.get((row.kind, name), math.inf):
                wrong.append(f"{name} failed: it was too slow for fewer FLOP")
                continue
            try:
                ready[name] = prepared(getattr(self.present[contestant], method)(x), row, self.runs)
            except Exception as error:  # a peer may raise anything for a shape it refuses
                if isinstance(error, TooSlow):
                    self.too_slow[row.kind, name] = x.flop
                wrong.append(f"{name} failed: {brief(error)}")
        return ready, wrong

    def outcome(self, row):
        """Returns (measurements or {}, what went wrong). A row is measured if ours is present, and timed
        if every output agrees."""
        torch.manual_seed(self.seed)
        try:
            x = row.inputs(random.Random(self.seed))
        except Exception as error:  # for example too little memory
            return {}, [f"its inputs could not be made: {brief(error)}"]
        ready, wrong = self.prepare(row, x)
        if "ours" not in ready:
            return {}, wrong
        measure = errors_beside if row.of_errors else self.times_beside
        found, measured, more = measure(row, x, ready)
        wrong += more
        if measured and wrong:
            measured["lacks"] = [name for name in calls_of(row) if name not in found and name not in self.left_out]
        return measured, wrong

    def times_beside(self, row, x, ready):
        """Returns (times, measurements or {}, what differs)."""
        differing = disagreements(row, x, ready)
        if differing:
            return {}, {}, differing
        us = medians_us(ready, self.before, row.captured)
        measured = {f"{name}_us": round(value, 1) for name, value in us.items()}
        measured.update({f"{name}_tflops": round(x.flop / value / 1e6) for name, value in us.items()})
        measured.update(ratios(row, us))
        fewer = {name: one.runs for name, one in ready.items() if one.runs < self.runs}
        if fewer:
            measured["fewer_runs"] = fewer
        return us, measured, []


def disagreements(row, x, ready):
    """Returns the differences of ours from fp32 arithmetic, of others from ours, and between two deterministic calls."""
    ours, texts = ready["ours"].results, []
    if row.reference:
        part, expected = row.reference(x)
        text = first_difference(row, expected, part(*ours), "fp32 arithmetic", OF_BF16)
        texts += [f"ours: {text}"] if text else []
    for name, one in ready.items():
        text = first_difference(row, ours, one.results, "ours", row.limits) if name != "ours" else None
        texts += [f"{name}: {text}"] if text else []
        if name.endswith("_deterministic") and not one.same_again:
            texts.append(f"{name}: two calls gave other bits")
    return texts


def ratios(row, us):
    """{"ratio": the time of the fastest peer over ours}. Where deterministic calls were timed too, that of
    FlashAttention-4's over ours, and the time of our call that is not deterministic over that of the one that is; likewise for a
    call that is batch-invariant."""
    found, peers = {}, [us[name] for name in row.peers if name in us]
    if peers and all(name in us for name in row.needed):
        found["ratio"] = round(min(peers) / us["ours"], 3)
    if "ours_deterministic" in us:
        if "fa4_deterministic" in us:
            found["ratio_deterministic"] = round(us["fa4_deterministic"] / us["ours_deterministic"], 3)
        found["share_deterministic"] = round(us["ours"] / us["ours_deterministic"], 3)
    if "ours_invariant" in us:
        found["share_invariant"] = round(us["ours"] / us["ours_invariant"], 3)
    return found


COLUMNS = ("ratio", "ratio_deterministic", "share_deterministic", "share_invariant")


def rows_counted_with(group, row):
    """Returns the name under which the summary counts a row."""
    if not group.startswith(("mha", "sm80")):
        return group
    heads = f", {row.h}/{row.h_kv} heads" if row.operation == "mha_backward" and row.h != row.h_kv else ""
    return f"{row.kind} {row.d_qk}/{row.d_v}{heads}"


def summary(rows, lines, wrong):
    """Returns lines of text about (group, row) pairs, the line written for each (None: not timed), and what went wrong."""
    found, texts = {}, []
    for (group, row), line in zip(rows, lines):
        if row.of_errors:
            continue
        of_name = found.setdefault(rows_counted_with(group, row), {column: [] for column in COLUMNS})
        for column in COLUMNS:
            of_name[column].append((line or {}).get(column))
    for name, columns in found.items():
        for column, values in columns.items():
            known = [value for value in values if value is not None]
            if not known and column != "ratio":
                continue
            text = f"{name}: {len(known)} of {len(values)} rows have a {column}"
            if known:
                text += f", geometric mean {statistics.geometric_mean(known):.3f}, smallest {min(known):.3f}"
            texts.append(text)
    return texts + judgements(rows, lines) + [f"failed: {text}" for text in wrong]

# SPDX-License-Identifier: MIT
"""Times attention on this machine: python -m flash_mla.bench [--device cuda] [--plot bench.svg] [--json bench.jsonl]

The table has, for each row, the time of a call (median of the runs) and its rates of arithmetic and of memory traffic;
docs/performance.md of the project defines how FLOP and bytes are counted. On a GPU a run is one replay of a CUDA graph of the call
between two events, and PyTorch is required. On the CPU a run is one call on NumPy arrays, timed by the clock. Before each run, two
matrix products of a model's size (on the CPU a read of 512 MB) leave the caches as other layers do, unless --warm is given. The plan
of a decode is made beforehand. Inputs are N(0, 0.1²), in shuffled pages of 64 keys.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import json
import math
import os
import pathlib
import statistics
import time
from typing import Any, Callable, Iterator, Optional, Sequence
from xml.sax.saxutils import escape

from . import _library, _structs, cache_append, flash_attn_varlen_func, flash_mla_sparse_fwd, flash_mla_with_kvcache
from . import get_mla_metadata
from ._command import File, run, say
from .info import _describe, _version
from ._library import library

PAGE, LATENT, D_QK = 64, 512, 576
TOKEN_BYTES = {"BF16": 2 * D_QK, "FP16": 2 * D_QK, "FP8_656": 656}
LONG_RUN = 2.0  # seconds: longer calls have FEW_RUNS runs
FEW_RUNS = 3


# ---- Devices: arrays and timing ---------------------------------------------------------------------------------------


class Host:
    """NumPy arrays on the CPU."""

    def __init__(self, dtype: Optional[str]):
        self.numpy = numpy = importlib.import_module("numpy")
        has_bf16 = importlib.util.find_spec("ml_dtypes") is not None
        if dtype == "bfloat16" and not has_bf16:
            raise ImportError("NumPy needs the package ml_dtypes for bfloat16, which is not installed")
        self.dtype = dtype or ("bfloat16" if has_bf16 else "float16")
        self.type = importlib.import_module("ml_dtypes").bfloat16 if self.dtype == "bfloat16" else numpy.float16
        self.random = numpy.random.default_rng(1)
        described = _describe(_structs.Device(_library.CPU, 0))
        self.name = _cpu_name()
        self.facts = {"cpu": self.name, "threads": described.workers}
        self.words = f"{self.name}, {described.workers} threads"
        self.between = "read"
        self._memory: Any = None
        self._most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2

    def normal(self, *shape: int) -> Any:
        if 6 * math.prod(shape) > self._most:  # fp32 first; the system may promise memory that it does not have
            raise MemoryError(f"an array of shape {shape} would take more than half of this machine's memory")
        values = self.random.standard_normal(shape, self.numpy.float32)
        values *= 0.1
        return values.astype(self.type)

    def empty(self, shape: Sequence[int], dtype: str = "") -> Any:
        return self.numpy.empty(shape, dtype or self.type)

    def numbers(self, values: Any) -> Any:
        return self.numpy.asarray(values, "int32")

    def slots(self, begin: int, end: int) -> Any:
        return self.numpy.arange(begin, end, dtype="int64")

    def orders(self, count: int, among: int, first: int) -> Any:
        """Returns [count, first]: in each row `first` different numbers below `among`, in random order."""
        return self.numpy.stack([self.random.permutation(among)[:first] for _ in range(count)]).astype("int32")

    def times(self, call: Callable[[], Any], runs: int, warm: bool) -> list[float]:
        """Returns the seconds of each run."""
        if self._memory is None and not warm:
            self._memory = self.numpy.ones(1 << 26)  # 512 MB
        found: list[float] = []
        call()
        while len(found) < runs:
            if not warm:
                self._memory.sum()
            start = time.perf_counter()
            call()
            found.append(time.perf_counter() - start)
            if found[-1] > LONG_RUN:
                runs = min(runs, FEW_RUNS)
        return found


class Gpu:
    """PyTorch tensors on a GPU."""

    def __init__(self, number: int, dtype: Optional[str]):
        self.torch = torch = importlib.import_module("torch")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if number >= count:
            raise RuntimeError(f"PyTorch sees {count or 'no'} GPU{'s' * (count > 1)} here")
        self.device = torch.device("cuda", number)
        torch.cuda.set_device(self.device)
        torch.manual_seed(1)
        self.dtype = dtype or "bfloat16"
        self.type = getattr(torch, self.dtype)
        described = _describe(_structs.Device(_library.CUDA, number))
        self.name = self.words = torch.cuda.get_device_name()
        self.facts = {"gpu": self.name, "driver": f"CUDA {_version(described.driver)}", "torch": torch.__version__}
        self.between = "products"
        self._products: Optional[Callable[[], None]] = None

    def normal(self, *shape: int) -> Any:
        return self.torch.randn(*shape, device=self.device, dtype=self.type).mul_(0.1)

    def empty(self, shape: Sequence[int], dtype: str = "") -> Any:
        return self.torch.empty(*shape, device=self.device, dtype=getattr(self.torch, dtype) if dtype else self.type)

    def numbers(self, values: Any) -> Any:
        return self.torch.tensor(values, device=self.device, dtype=self.torch.int32)

    def slots(self, begin: int, end: int) -> Any:
        return self.torch.arange(begin, end, device=self.device)

    def orders(self, count: int, among: int, first: int) -> Any:
        return self.torch.stack([self.torch.randperm(among, device=self.device)[:first].int() for _ in range(count)])

    def times(self, call: Callable[[], Any], runs: int, warm: bool) -> list[float]:
        torch = self.torch
        for _ in range(2):  # one-time work: kernels are loaded, the plan is made
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        found = []
        for _ in range(runs + 1):  # the first run does not count
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if not warm:
                self._leave_caches()
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end) * 1e-3)
        return found[1:]

    def _leave_caches(self) -> None:
        if self._products is None:
            tokens, weights = self.normal(128, 7168), [self.normal(7168, 18432) for _ in range(2)]
            result = self.empty((128, 18432))

            def products() -> None:
                for weight in weights:
                    self.torch.mm(tokens, weight, out=result)

            self._products = products
        self._products()


def _cpu_name() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return importlib.import_module("platform").machine()


# ---- Rows -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Row:
    """A call. Sizes that the operation lacks are None. `cache`: the format of a decode's cache, "plain" for the queries' type."""

    op: str
    h_q: int
    s_k: int
    b: Optional[int] = None
    s_q: Optional[int] = None
    topk: Optional[int] = None
    cache: Optional[str] = None

    def words(self) -> str:
        said = [self.cache] if self.cache else []
        sizes = ((name, getattr(self, name)) for name in ("b", "s_q", "h_q", "s_k", "topk"))
        return ", ".join(said + [f"{name} {size}" for name, size in sizes if size and (name, size) != ("s_q", 1)])


ROWS = {
    "cpu": (
        Row("dense_decode", b=1, s_q=1, h_q=16, s_k=4096, cache="plain"),
        Row("dense_decode", b=1, s_q=1, h_q=128, s_k=4096, cache="plain"),
        Row("dense_decode", b=1, s_q=1, h_q=128, s_k=4096, cache="FP8_656"),
        Row("sparse_decode", b=1, s_q=1, h_q=128, s_k=16384, topk=2048, cache="FP8_656"),
        Row("sparse_prefill", s_q=16, h_q=128, s_k=16384, topk=2048),
        Row("mha_forward", b=1, h_q=16, s_k=1024),
    ),
    "cuda": (
        Row("dense_decode", b=128, s_q=1, h_q=16, s_k=4096, cache="plain"),
        Row("dense_decode", b=128, s_q=1, h_q=128, s_k=4096, cache="plain"),
        Row("dense_decode", b=128, s_q=1, h_q=128, s_k=4096, cache="FP8_656"),
        Row("dense_decode", b=1, s_q=1, h_q=128, s_k=32768, cache="plain"),
        Row("sparse_decode", b=128, s_q=1, h_q=128, s_k=32768, topk=2048, cache="FP8_656"),
        Row("sparse_decode", b=2, s_q=1, h_q=128, s_k=32768, topk=2048, cache="FP8_656"),
        Row("sparse_prefill", s_q=4096, h_q=128, s_k=8192, topk=2048),
        Row("mha_forward", b=2, h_q=16, s_k=8192),
    ),
}
OPERATIONS = tuple(dict.fromkeys(row.op for row in ROWS["cpu"]))


@dataclasses.dataclass
class Work:
    """A call ready to run, with its FLOP and bytes."""

    call: Callable[[], Any]
    flop: float
    bytes: float
    sizes: dict[str, Any]  # sizes in the JSON line that the row lacks


def _pages(on: Any, keys: int, cache: str) -> Any:
    """Returns pages for `keys` keys, all written."""
    count = -(-keys // PAGE)
    if cache != "FP8_656":
        return on.normal(count, PAGE, 1, D_QK)
    pages = on.empty((count, PAGE, 1, TOKEN_BYTES[cache]), "uint8")
    at_once = 1 << 20
    for begin in range(0, count * PAGE, at_once):
        slots = on.slots(begin, min(begin + at_once, count * PAGE))
        tokens = on.normal(len(slots), D_QK)
        cache_append(tokens[:, :LATENT], tokens[:, LATENT:], pages, slots, cache)
    return pages


def _decode(row: Row, on: Any) -> Work:
    b, s_q, h_q, cache = row.b or 0, row.s_q or 1, row.h_q, _cache_name(row, on)
    each = -(-row.s_k // PAGE)
    pages, q = _pages(on, b * each * PAGE, cache), on.normal(b, s_q, h_q, D_QK)
    out, lse = on.empty((b, s_q, h_q, LATENT)), on.empty((b, h_q, s_q), "float32")
    attend = functools.partial(
        flash_mla_with_kvcache, q, pages, softmax_scale=192**-0.5, is_fp8_kvcache=cache == "FP8_656", out=out, lse=lse,
        head_dim_v=LATENT, tile_scheduler_metadata=get_mla_metadata()[0],
    )  # fmt: skip
    if row.topk is None:
        table = on.orders(1, b * each, b * each).reshape(b, each)
        call = functools.partial(attend, block_table=table, cache_seqlens=on.numbers([row.s_k] * b), causal=True)
        keys = b * row.s_k
        pairs = b * sum(row.s_k - s_q + j + 1 for j in range(s_q))
    else:
        names = on.orders(b * s_q, row.s_k, row.topk).reshape(b, s_q, row.topk)
        first = on.numbers([[[request * each * PAGE]] for request in range(b)])
        call = functools.partial(attend, block_table=None, cache_seqlens=None, indices=names + first)
        keys = pairs = b * s_q * row.topk
    moved = keys * TOKEN_BYTES[cache] + 2.0 * b * s_q * h_q * (D_QK + LATENT)
    sizes = dict(d_qk=D_QK, d_v=LATENT, h_kv=1, page_size=PAGE, causal=row.topk is None)
    return Work(call, 2.0 * pairs * h_q * (D_QK + LATENT), moved, sizes)


def _sparse_prefill(row: Row, on: Any) -> Work:
    s_q, h_q, topk = row.s_q or 0, row.h_q, row.topk or 0
    q, kv, lists = on.normal(s_q, h_q, D_QK), on.normal(row.s_k, 1, D_QK), on.orders(s_q, row.s_k, topk)[:, None]
    results = dict(out=on.empty((s_q, h_q, LATENT)))
    results.update({name: on.empty((s_q, h_q), "float32") for name in ("max_logits", "lse")})
    call = functools.partial(flash_mla_sparse_fwd, q, kv, lists, 192**-0.5, LATENT, **results)
    pairs, rows = s_q * topk, s_q * h_q
    moved = 2.0 * rows * (D_QK + LATENT) + 8.0 * rows + 4.0 * pairs + min(pairs, row.s_k) * 2.0 * D_QK
    return Work(call, 2.0 * pairs * h_q * (D_QK + LATENT), moved, dict(d_qk=D_QK, d_v=LATENT, h_kv=1))


def _mha_forward(row: Row, on: Any) -> Work:
    b, s, h, d_qk, d_v = row.b or 0, row.s_k, row.h_q, 192, 128
    q, k, v = on.normal(b * s, h, d_qk), on.normal(b * s, h, d_qk), on.normal(b * s, h, d_v)
    starts = on.numbers([request * s for request in range(b + 1)])
    results = dict(out=on.empty((b * s, h, d_v)), lse=on.empty((h, b * s), "float32").T)
    call = functools.partial(flash_attn_varlen_func, q, k, v, starts, starts, s, s, causal=True, **results)
    pairs = b * s * (s + 1) // 2
    moved = 4.0 * b * s * h * (d_qk + d_v) + 4.0 * b * s * h + 8.0 * (b + 1)
    return Work(call, 2.0 * pairs * h * (d_qk + d_v), moved, dict(s_q=s, d_qk=d_qk, d_v=d_v, h_kv=h, causal=True))


WORK = dict(dense_decode=_decode, sparse_decode=_decode, sparse_prefill=_sparse_prefill, mha_forward=_mha_forward)


def _cache_name(row: Row, on: Any) -> str:
    plain = {"bfloat16": "BF16", "float16": "FP16"}[on.dtype]
    return plain if row.cache in (None, "plain") else str(row.cache)


def time_row(row: Row, on: Any, runs: int, warm: bool) -> dict[str, Any]:
    """Times a row and returns its JSON line."""
    if row.cache:
        row = dataclasses.replace(row, cache=_cache_name(row, on))
    work = WORK[row.op](row, on)
    us = sorted(1e6 * seconds for seconds in on.times(work.call, runs, warm))
    median = statistics.median(us)
    shape = {name: size for name, size in dataclasses.asdict(row).items() if size is not None}
    rates = dict(tflops=1e-6 * work.flop / median, gbs=1e-3 * work.bytes / median)
    figures = {
        name: float(f"{value:.6g}") for name, value in dict(us=median, us_min=us[0], us_max=us[-1], **rates).items()
    }
    measured = dict(figures, runs=len(us), warm=warm)
    between = "nothing" if warm else on.between
    version = library.fmla_version_string().decode()
    dtype = {"bfloat16": "bf16", "float16": "fp16"}[on.dtype]
    return {**shape, **work.sizes, "dtype": dtype, **measured, "between": between, "version": version, **on.facts}


# ---- Output -----------------------------------------------------------------------------------------------------------


def _digits(value: float) -> str:
    """Formats three digits, or all before the point."""
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}" if value > 0 else "0"


LABEL, PANEL, STEP, TOP = 500, 220, 26, 84  # pixels
PANELS = (("tflops", "TFLOP/s"), ("gbs", "GB/s"))


def svg(title: str, timed: Sequence[tuple[Row, dict[str, Any]]]) -> Iterator[str]:
    """Yields the lines of an SVG picture: for each row a bar for arithmetic and one for memory."""
    width, height = LABEL + len(PANELS) * (PANEL + 90) + 20, TOP + STEP * len(timed) + 20
    yield '<?xml version="1.0" encoding="UTF-8"?>'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
    style = pathlib.Path(__file__).with_name("picture.css").read_text(encoding="ascii")
    yield f"<style>\n{style}</style>"
    yield '<rect width="100%" height="100%" class="ground"/>'
    yield f'<text x="20" y="32" class="title">{escape(title)}</text>'
    yield f'<text x="{LABEL - 12}" y="{TOP - 14}" class="head end">µs</text>'
    for panel, (field, unit) in enumerate(PANELS):
        left, most = LABEL + panel * (PANEL + 90), max((line[field] for _, line in timed), default=0.0)
        yield f'<text x="{left}" y="{TOP - 14}" class="head">{unit}</text>'
        for i, (_, line) in enumerate(timed):
            long = PANEL * line[field] / most if most else 0.0
            y = TOP + STEP * i
            yield f'<rect x="{left}" y="{y}" width="{long:.1f}" height="{STEP - 8}" class="c{panel}"/>'
            yield f'<text x="{left + long + 6:.1f}" y="{y + 14}">{_digits(line[field])}</text>'
    for i, (row, line) in enumerate(timed):
        y = TOP + STEP * i + 14
        yield f'<text x="20" y="{y}">{escape(f"{row.op}: {row.words()}")}</text>'
        yield f'<text x="{LABEL - 12}" y="{y}" class="end">{_digits(line["us"])}</text>'
    yield "</svg>"


# ---- The command ------------------------------------------------------------------------------------------------------


def _whole(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"is {text}, must be a whole number from 1 on")
    return number


_NAME = "python -m flash_mla.bench"


def _parser() -> argparse.ArgumentParser:
    said = argparse.ArgumentParser(
        prog=_NAME, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, types = said.add_argument, ("bfloat16", "float16")
    number: dict[str, Any] = dict(type=_whole, metavar="N")
    add("--device", help="cpu, cuda or cuda:N; without it cuda where PyTorch sees a GPU, else cpu")
    add("--ops", nargs="+", choices=OPERATIONS, default=OPERATIONS, metavar="OP", help=", ".join(OPERATIONS))
    add("--dtype", choices=types, help="bfloat16 or float16; default bfloat16 where the arrays support it")
    for name, words in (
        ("batch", "requests"),
        ("heads", "query heads; of mha_forward also key heads"),
        ("seq-len", "keys of a request; of sparse_prefill, all keys"),
        ("topk", "keys that a token of a sparse operation selects"),
        ("query-tokens", "tokens of sparse_prefill"),
    ):
        add(f"--{name}", **number, help=f"{words}; replaces the value of each row")
    few = "runs of a row; default 15, on a CPU at most 3 if a call takes over 2 s"
    add("--runs", **number, default=15, help=few)
    add("--warm", action="store_true", help="leave the caches as the previous run left them")
    add("--json", metavar="FILE", help="write one line of JSON per row as soon as it is timed")
    add("--plot", metavar="FILE", help="write the table as an SVG picture")
    return said


def _place(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Any:
    """Returns a Host or a Gpu."""
    device, has_torch = options.device, importlib.util.find_spec("torch") is not None
    if device is None:
        device = "cuda" if has_torch and importlib.import_module("torch").cuda.is_available() else "cpu"
    kind, colon, number = device.partition(":")
    if kind not in ("cpu", "cuda") or (colon and (kind == "cpu" or not number.isdecimal())):
        parser.error(f"argument --device: is {device}, must be cpu, cuda or cuda:N")
    needed = {"cpu": "numpy", "cuda": "torch"}[kind]
    if importlib.util.find_spec(needed) is None:
        parser.error(f"argument --device: is {device}, for which the package {needed} must be installed")
    try:
        return Host(options.dtype) if kind == "cpu" else Gpu(int(number or 0), options.dtype)
    except ImportError as error:
        parser.error(f"argument --dtype: is {options.dtype}: {error}")
    except RuntimeError as error:
        parser.error(f"argument --device: is {device}: {error}")


def _rows(parser: argparse.ArgumentParser, options: argparse.Namespace, kind: str) -> list[Row]:
    """Returns the rows asked for, each once."""
    given = dict(b=options.batch, h_q=options.heads, s_k=options.seq_len, topk=options.topk)
    found = []
    for row in ROWS[kind]:
        if row.op not in options.ops:
            continue
        changes = {name: size for name, size in given.items() if size is not None and getattr(row, name) is not None}
        if row.op == "sparse_prefill" and options.query_tokens is not None:
            changes["s_q"] = options.query_tokens
        row = dataclasses.replace(row, **changes)
        if row.topk is not None and row.topk > row.s_k:
            if options.topk is not None:
                parser.error(f"argument --topk: is {row.topk}, must be at most the keys of a request, {row.s_k}")
            row = dataclasses.replace(row, topk=row.s_k)
        found.append(row)
    return list(dict.fromkeys(found))


def _file(parser: argparse.ArgumentParser, option: str, path: Optional[str]) -> Any:
    try:
        return File(option, path)
    except OSError as error:
        return parser.error(f"argument {option}: {path} cannot be written: {error.strerror}")


def main(arguments: Optional[Sequence[str]] = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    on = _place(parser, options)
    rows = _rows(parser, options, "cuda" if isinstance(on, Gpu) else "cpu")
    title = f"flash_mla {library.fmla_version_string().decode()} on {on.words}, {on.dtype}"
    timed: list[tuple[Row, dict[str, Any]]] = []
    if options.plot is not None and options.plot == options.json:
        parser.error(f"argument --plot: is {options.plot}, as --json is, must be another file")
    with _file(parser, "--json", options.json) as lines, _file(parser, "--plot", options.plot) as plot:
        say(f"{title}; median of {options.runs} runs, caches {'warm' if options.warm else 'cold'}\n")
        say(f"{'operation':14}  {'shape':58}  {'µs':>9}  {'TFLOP/s':>8}  {'GB/s':>8}")
        for row in rows:
            shown = dataclasses.replace(row, cache=row.cache and _cache_name(row, on))
            beginning = f"{row.op:14}  {shown.words():58}"
            try:
                line = time_row(row, on, options.runs, options.warm)
            # RuntimeError is also PyTorch's where there is too little memory.
            except (MemoryError, NotImplementedError, RuntimeError, ValueError) as error:
                why = str(error).splitlines()[0] if str(error) else "there is too little memory"
                say(f"{beginning}  not timed: {why}")
                continue
            timed.append((shown, line))
            us, tflops, gbs = (_digits(line[name]) for name in ("us", "tflops", "gbs"))
            say(f"{beginning}  {us:>9}  {tflops:>8}  {gbs:>8}")
            lines.write(f"{json.dumps(line)}\n")
        if plot:
            plot.write("".join(f"{text}\n" for text in svg(title, timed)))
    return 0 if timed else 1


if __name__ == "__main__":
    run(_NAME, main)

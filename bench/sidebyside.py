# SPDX-License-Identifier: MIT
"""How fast flash_mla is beside published kernels for Hopper: the same tensors, one process, run by run in turn.

    python3 bench/sidebyside.py fetch FOLDER [--python 3.12]
    python3 bench/sidebyside.py time OUT.jsonl --peers FOLDER [--groups dense mha] [--runs 15] [--flush engine]

`fetch` downloads the peers' wheels with pip and unpacks what is needed of them into FOLDER: FlashMLA and
FlashAttention-3, which vLLM's wheel contains, and FlashAttention-4 with the packages that compile it. It needs no GPU.
--python is the version of the Python that will run `time`, on a machine of the same kind. cuDNN comes with PyTorch.

`time` needs a Hopper GPU, this package and PyTorch 2.10 or later; FlashAttention-4 also needs cuda-bindings and
protobuf. It appends one line of JSON a row to OUT.jsonl and prints a summary. FOLDER may lack peers: rows are then
timed with those that are there, and the exit code is 1.

A run is one replay of a CUDA graph of one call, with all kernels of the call; the plan of a decode is made before.
Before each run, two products with 264 MB of weights each leave the caches as an engine does (--flush engine), or 512 MB
are read (--flush read). The order of the contestants turns round from run to run, and the median counts. The ratio of a
row is the time of its fastest peer divided by ours. What the graphs wrote is compared before anything is timed; a row
whose outputs differ is not timed.

The exit code is 0, or 1 where a row lacks ours or a peer or its outputs differ, or 2 where the arguments or the machine
are refused.
"""

import argparse
import importlib.metadata
import json
import math
import pathlib
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import asdict, dataclass
from itertools import product
from types import SimpleNamespace
from typing import NamedTuple, Optional

try:
    import torch
except ImportError:  # only the command `time` needs it
    torch = None


# What is timed. A row is a problem: `operation` names the method of a contestant that computes it, `peers` names who
# else takes part, and `inputs` makes its tensors. A group is a list of rows. Another kind of problem is another class
# here, and a method of every contestant that computes it.

D_V = 512  # the width of a value of MLA
ROPE = 64  # the last elements of a key, which encode its position


@dataclass(frozen=True)
class Dense:
    """Decode over all keys of b requests: s_k each, or, where varlen, numbers from a normal distribution around it."""

    b: int
    s_q: int
    s_k: int
    h_q: int
    varlen: bool = False
    kind: str = "dense"

    operation = "dense_decode"
    peers = ("flashmla", "fa3")
    page = 64

    def inputs(self, chance):
        lengths = [self.s_k] * self.b
        if self.varlen:
            lengths = [max(self.s_q, int(chance.normalvariate(self.s_k, self.s_k / 2))) for _ in lengths]
        pages = self.b * (256 // self.page) * math.ceil(max(lengths) / 256)
        return SimpleNamespace(
            q=normal(self.b, self.s_q, self.h_q, D_V + ROPE),
            cache=normal(pages, self.page, 1, D_V + ROPE),
            table=torch.randperm(pages, dtype=torch.int32).view(self.b, -1),
            lengths=torch.tensor(lengths, dtype=torch.int32),
            longest=max(lengths),
            scale=(D_V + ROPE) ** -0.5,
            flop=2 * sum(lengths) * self.s_q * self.h_q * (2 * D_V + ROPE),
        )


class Second(NamedTuple):
    """The second cache of sparse decode, and the pages of both. Where varlen, requests use different numbers of the
    entries of their second lists."""

    s_k: int
    topk: int
    first_page: int
    page: int
    varlen: bool


@dataclass(frozen=True)
class Sparse:
    """Decode over the topk keys that each query token names, of s_k, from byte-packed caches."""

    b: int
    s_q: int
    s_k: int
    h_q: int
    topk: int
    d_qk: int
    extra: Optional[Second] = None

    kind = "sparse_decode"
    operation = "sparse_decode"
    most_tokens = 1 << 22  # of a cache: requests of a large batch share keys

    @property
    def peers(self):
        return ("flashmla",) if self.h_q in (64, 128) else ()  # nobody has published one for other head counts

    def inputs(self, chance):
        layout = "FP8_656" if self.d_qk == D_V + ROPE else "FP8_584"
        tokens = min(self.b * self.s_k, self.most_tokens)
        x = SimpleNamespace(
            q=normal(self.b, self.s_q, self.h_q, self.d_qk, deviation=1).clamp_(-1, 1),
            cache=packed_cache(tokens, layout, self.extra.first_page if self.extra else 64),
            indices=lists(self.b, self.s_q, self.topk, self.s_k, tokens),
            sink=torch.randn(self.h_q),
            scale=self.d_qk**-0.55,
            extra_cache=None,
            extra_indices=None,
            extra_lengths=None,
        )
        keys = self.b * self.s_q * self.topk
        if self.extra:
            tokens = min(self.b * self.extra.s_k, self.most_tokens)
            x.extra_cache = packed_cache(tokens, layout, self.extra.page)
            x.extra_indices = lists(self.b, self.s_q, self.extra.topk, self.extra.s_k, tokens)
            used = [self.extra.topk] * self.b
            if self.extra.varlen:
                used = [chance.randint(0, self.extra.topk) for _ in used]
                x.extra_lengths = torch.tensor(used, dtype=torch.int32)
            keys += self.s_q * sum(used)
        x.flop = 2 * keys * self.h_q * (self.d_qk + D_V)
        return x


@dataclass(frozen=True)
class Prefill:
    """Prefill of s_q tokens, each over the topk keys that it names of s_kv."""

    s_q: int
    s_kv: int
    topk: int
    h_q: int
    d_qk: int

    kind = "sparse_prefill"
    operation = "sparse_prefill"
    peers = ("flashmla",)

    def inputs(self, chance):
        return SimpleNamespace(
            q=normal(self.s_q, self.h_q, self.d_qk),
            kv=normal(self.s_kv, 1, self.d_qk),
            indices=lists(self.s_q, 1, self.topk, self.s_kv, self.s_kv),
            sink=torch.randn(self.h_q),
            scale=0.5,
            flop=2 * self.s_q * self.topk * self.h_q * (self.d_qk + D_V),
        )


@dataclass(frozen=True)
class Mha:
    """Attention with a key and a value a head: b sequences of s tokens, each over the keys of its own sequence."""

    b: int
    s: int
    h: int
    h_kv: int
    d_qk: int
    d_v: int
    causal: bool

    kind = "mha_fwd"
    operation = "mha_forward"
    peers = ("fa3", "fa4", "cudnn")

    def inputs(self, chance):
        x = sequences([self.s] * self.b, self)
        x.batch = [tensor.view(self.b, self.s, *tensor.shape[1:]) for tensor in (x.q, x.k, x.v)]
        return x


@dataclass(frozen=True)
class MhaVarlen:
    """The same for sequences of 100 to 8000 tokens, one after the other without a gap."""

    b: int
    h: int
    h_kv: int
    d_qk: int
    d_v: int
    causal: bool = True

    kind = "mha_varlen"
    operation = "mha_forward"
    peers = ("fa3",)

    def inputs(self, chance):
        return sequences([chance.randint(100, 8000) for _ in range(self.b)], self)


def dense_rows():
    shapes = product((4096, 8192), (16, 32, 64, 128), (1, 2), (False, True))
    rows = [Dense(128, s_q, s_k, h_q, varlen) for s_k, h_q, s_q, varlen in shapes]
    return rows + [Dense(b, s_q, 32768, h_q) for b, s_q, h_q in ((128, 1, 128), (128, 2, 128), (64, 1, 16))]


def small_rows():
    shapes = [(b, 1, s_k, h_q) for b, s_k, h_q in product((1, 2, 4, 8, 16, 32), (1024, 8192, 65536), (16, 64, 128))]
    shapes += [(b, 4, 8192, h_q) for b, h_q in product((1, 4), (16, 128))]
    return [Dense(*shape, kind="dense_small") for shape in shapes]


def sparse_rows():
    shapes = product((16, 64, 128), (1, 2), (1, 2, 4, 8, 16, 32, 64, 128))
    rows = [Sparse(b, s_q, 32768, h_q, 2048, 576) for h_q, s_q, b in shapes]
    rows.append(Sparse(148, 2, 32768, 128, 16384, 576))
    seconds = (
        (64, Second(16384, 512, 256, 64, False)),
        (128, Second(16384, 1024, 256, 64, False)),
        (128, Second(16384, 1024, 256, 2, True)),
    )
    return rows + [Sparse(b, 2, 16384, h_q, 128, 512, second) for b in (1, 2, 8, 64, 128) for h_q, second in seconds]


def prefill_rows():
    rows = [Prefill(4096, s_kv, 2048, 128, 576) for s_kv in (8192, 32768, 131072)]
    rows += [Prefill(4096, 32768, *rest) for rest in ((512, 64, 512), (1024, 128, 512), (2048, 16, 576))]
    return rows + [
        Prefill(s_q, 32768, topk, 128, d_qk) for s_q in (1, 16, 64, 256) for topk, d_qk in ((2048, 576), (512, 576))
    ]


def mha_rows():
    shapes = product(((192, 128), (128, 128), (64, 64)), ((8, 2048), (2, 8192), (1, 16384)), (True, False))
    rows = [Mha(b, s, 16, 16, d_qk, d_v, causal) for (d_qk, d_v), (b, s), causal in shapes]
    rows.append(Mha(2, 8192, 32, 4, 128, 128, True))
    return rows + [MhaVarlen(16, 128, 128, 192, 128), MhaVarlen(16, 32, 4, 128, 128)]


GROUPS = {
    "dense": dense_rows(),
    "small": small_rows(),
    "sparse": sparse_rows(),
    "prefill": prefill_rows(),
    "mha": mha_rows(),
}


def shape_of(row):
    """The sizes that a line of results has."""
    shape = asdict(row)
    shape.pop("kind", None)
    return shape


def words_for(row):
    """What is printed of a row."""
    shape = {name: value for name, value in shape_of(row).items() if value is not None}
    if "extra" in shape:
        shape["extra"] = ",".join(map(str, shape["extra"]))
    return " ".join([row.kind, *(f"{name}={value}" for name, value in shape.items())])


# The tensors.


def normal(*shape, deviation=0.1):
    return torch.empty(shape, dtype=torch.bfloat16).normal_(std=deviation)


def lists(b, s_q, topk, s_k, tokens):
    """[b, s_q, topk]: each token names topk of its request's s_k places, in random order, each at most once. Requests
    share places only where the cache has too few tokens for all."""
    own = min(s_k, tokens)
    begins = [request * own % (tokens - own + 1) for request in range(b)]
    rows = [torch.randperm(own, dtype=torch.int32)[:topk] + begins[token // s_q] for token in range(b * s_q)]
    return torch.stack(rows).view(b, s_q, topk)


def packed_cache(tokens, layout, page):
    """A cache in pages of so many tokens, which flash_mla quantised: FP8_656 and FP8_584 are FlashMLA's own layouts."""
    import flash_mla

    size, latent = {"FP8_656": (656, 512), "FP8_584": (584, 448)}[layout]
    cache = torch.zeros(math.ceil(tokens / page), page, 1, size, dtype=torch.uint8)
    for slots in torch.arange(tokens, dtype=torch.int64).split(1 << 18):
        flash_mla.cache_append(normal(len(slots), latent), normal(len(slots), ROPE), cache, slots, layout)
    return cache


def sequences(lengths, row):
    """Sequences of so many tokens one after the other, as queries and as keys."""
    ends = torch.tensor([0, *lengths]).cumsum(0)
    seen = sum(length * length for length in lengths) / (2 if row.causal else 1)
    return SimpleNamespace(
        q=normal(sum(lengths), row.h, row.d_qk, deviation=1),
        k=normal(sum(lengths), row.h_kv, row.d_qk, deviation=1),
        v=normal(sum(lengths), row.h_kv, row.d_v, deviation=1),
        ends=ends.to(torch.int32),
        longest=max(lengths),
        causal=row.causal,
        grouped=row.h != row.h_kv,
        scale=row.d_qk**-0.5,
        flop=2 * seen * row.h * (row.d_qk + row.d_v),
    )


# The contestants. A method is named after an operation, takes the inputs of a row and returns the call that is timed.
# The call's output may be of any shape in which the rows of d_v elements are in the order of query tokens, then heads.


def first(results):
    """The output, of a function that may return more."""
    return results if isinstance(results, torch.Tensor) else results[0]


class Ours:
    def __init__(self):
        import flash_mla

        self.functions, self.version = flash_mla, flash_mla.__version__

    def dense_decode(self, x):
        meta, _ = self.functions.get_mla_metadata()  # the first call puts the plan there
        arguments = (x.q, x.cache, x.table, x.lengths, D_V, meta)
        return lambda: first(self.functions.flash_mla_with_kvcache(*arguments, softmax_scale=x.scale, causal=True))

    def sparse_decode(self, x):
        meta, _ = self.functions.get_mla_metadata()
        options = dict(
            softmax_scale=x.scale,
            is_fp8_kvcache=True,
            indices=x.indices,
            attn_sink=x.sink,
            extra_k_cache=x.extra_cache,
            extra_indices_in_kvcache=x.extra_indices,
            extra_topk_length=x.extra_lengths,
        )
        return lambda: first(self.functions.flash_mla_with_kvcache(x.q, x.cache, None, None, D_V, meta, **options))

    def sparse_prefill(self, x):
        return lambda: first(self.functions.flash_mla_sparse_fwd(x.q, x.kv, x.indices, x.scale, D_V, x.sink))

    def mha_forward(self, x):
        arguments = (x.q, x.k, x.v, x.ends, x.ends, x.longest, x.longest)
        return lambda: first(self.functions.flash_attn_varlen_func(*arguments, causal=x.causal))


class FlashMLA:
    """FlashMLA as vLLM's wheel contains it. A first call makes the plan of a decode, and the timed calls get it."""

    def __init__(self, folder):
        self.functions = library(folder, "_flashmla_C")
        self.version = version_in(folder, "vllm")

    def dense_decode(self, x):
        def call(plan):
            return self.functions.dense_decode_fwd(x.q, x.cache, D_V, x.lengths, x.table, x.scale, True, *plan, None)

        plan = call((None, None))[2:4]
        return lambda: first(call(plan))

    def sparse_decode(self, x):
        extra = (x.extra_cache, x.extra_indices, x.extra_lengths)

        def call(plan):
            given = (x.q, x.cache, x.indices, None, x.sink, *plan, *extra)
            return self.functions.sparse_decode_fwd(*given, D_V, x.scale, None, False)

        plan = call((None, None))[2:4]
        return lambda: first(call(plan))

    def sparse_prefill(self, x):
        given = (x.q, x.kv, x.indices, x.scale, D_V, x.sink, None, None)
        return lambda: first(self.functions.sparse_prefill_fwd(*given))


class FlashAttention3:
    """FlashAttention-3 as vLLM's wheel contains it. Its operators take every argument by its place: these are the names
    in that order, with what is passed where a call says nothing."""

    MASK = dict(is_causal=True, window_size_left=-1, window_size_right=-1)
    SPLITS = dict(num_splits=0, pack_gqa=None, sm_margin=0)  # 0: the library chooses the number
    FORWARD = {
        **dict.fromkeys("q k v k_new v_new q_v out cu_seqlens_q cu_seqlens_k cu_seqlens_k_new".split()),
        **dict.fromkeys("seqused_q seqused_k max_seqlen_q max_seqlen_k page_table kv_batch_idx leftpad_k".split()),
        **dict.fromkeys("rotary_cos rotary_sin seqlens_rotary q_descale k_descale v_descale softmax_scale".split()),
        **MASK,
        **dict(softcap=0.0, is_rotary_interleaved=True, scheduler_metadata=None),
        **SPLITS,
        **dict(s_aux=None, cp_world_size=1, cp_rank=0, cp_tot_seqused_k=None),
    }
    PLAN = {
        **dict.fromkeys("batch_size max_seqlen_q max_seqlen_k num_heads num_heads_k headdim headdim_v".split()),
        **dict.fromkeys("qkv_dtype seqused_k cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q leftpad_k".split()),
        **dict(page_size=None, max_seqlen_k_new=0),
        **MASK,
        **dict(has_softcap=False),
        **SPLITS,
    }

    def __init__(self, folder):
        self.functions = library(folder, "_vllm_fa3_C")
        self.version = version_in(folder, "vllm")

    def forward(self, **given):
        return first(self.functions.fwd(*in_order(self.FORWARD, given)))

    def plan(self, **given):
        return self.functions.get_scheduler_metadata(*in_order(self.PLAN, given))

    def dense_decode(self, x):
        """MLA as attention with keys of 64 elements and values of 512, which a part of a query (q_v) multiplies."""
        b, s_q, h_q, _ = x.q.shape
        sizes = dict(max_seqlen_q=s_q, max_seqlen_k=x.longest, seqused_k=x.lengths)
        widths = dict(num_heads=h_q, num_heads_k=1, headdim=ROPE, headdim_v=D_V)
        plan = self.plan(batch_size=b, qkv_dtype=x.q.dtype, page_size=x.cache.shape[1], **sizes, **widths)
        tensors = dict(
            q=x.q[..., D_V:].contiguous().view(b * s_q, h_q, ROPE),
            q_v=x.q[..., :D_V].contiguous().view(b * s_q, h_q, D_V),
            k=x.cache[..., D_V:].contiguous(),
            v=x.cache[..., :D_V].contiguous(),
            cu_seqlens_q=torch.arange(0, (b + 1) * s_q, s_q, dtype=torch.int32),
            page_table=x.table,
        )
        return lambda: self.forward(**tensors, **sizes, softmax_scale=x.scale, scheduler_metadata=plan)

    def mha_forward(self, x):
        tensors = dict(q=x.q, k=x.k, v=x.v, cu_seqlens_q=x.ends, cu_seqlens_k=x.ends)
        options = dict(softmax_scale=x.scale, is_causal=x.causal, num_splits=1)
        return lambda: self.forward(**tensors, max_seqlen_q=x.longest, max_seqlen_k=x.longest, **options)


class FlashAttention4:
    """FlashAttention-4 of its own wheel, which compiles a kernel at the first call of a kind."""

    def __init__(self, folder):
        packages = folder / "fa4"
        if not packages.is_dir():
            raise FileNotFoundError(f"{packages} is not there")
        sys.path[:0] = [str(packages), str(packages / "nvidia_cutlass_dsl" / "dsl_packages")]
        from flash_attn.cute import flash_attn_func

        self.function, self.version = flash_attn_func, version_in(packages, "flash-attn-4")

    def mha_forward(self, x):
        return lambda: first(self.function(*x.batch, causal=x.causal))


class CuDNN:
    """cuDNN as PyTorch's scaled_dot_product_attention calls it, on tensors with the heads before the tokens."""

    def __init__(self, folder):
        if not torch.backends.cudnn.is_available():
            raise RuntimeError("PyTorch has no cuDNN here")
        self.version = f"cuDNN {torch.backends.cudnn.version()}"

    def mha_forward(self, x):
        by_head = [tensor.transpose(1, 2).contiguous() for tensor in x.batch]

        def call():
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
                attention = torch.nn.functional.scaled_dot_product_attention
                return attention(*by_head, is_causal=x.causal, enable_gqa=x.grouped).transpose(1, 2)

        return call


PEERS = {"flashmla": FlashMLA, "fa3": FlashAttention3, "fa4": FlashAttention4, "cudnn": CuDNN}


def in_order(defaults, given):
    """The arguments of an operator that takes them all, by their places."""
    unknown = given.keys() - defaults.keys()
    if unknown:
        raise TypeError(f"no arguments of the operator: {unknown}")
    return ({**defaults, **given}).values()


def library(folder, name):
    """The operators of an extension of PyTorch."""
    file = folder / f"{name}.abi3.so"
    if not file.is_file():
        raise FileNotFoundError(f"{file} is not there")
    torch.ops.load_library(str(file))
    return getattr(torch.ops, name)


def version_in(folder, distribution):
    for found in importlib.metadata.distributions(name=distribution, path=[str(folder)]):
        return f"{distribution} {found.version}"
    return f"{distribution}, version unknown"


def contestants_for(rows, folder):
    """({name: contestant}, {name: why there is none}), of all that the rows ask for."""
    present, absent = {"ours": Ours()}, {}
    for name, peer in PEERS.items():
        if any(name in row.peers for row in rows):
            try:
                present[name] = peer(folder)
            except Exception as error:  # whatever an import may raise
                absent[name] = brief(error)
    return present, absent


def brief(error):
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


# How they are compared and timed.

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


# The commands.


def refuse(text):
    print(f"sidebyside.py: {text}", file=sys.stderr)
    sys.exit(2)


def driver_version():
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, check=True, capture_output=True, text=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def check_machine():
    if torch is None:
        refuse("time: PyTorch is not installed for this Python; 2.10 or later is needed, with CUDA")
    if not torch.cuda.is_available():
        refuse("time: PyTorch finds no GPU here; one of compute capability 9.0 (Hopper) is needed")
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        gpu = torch.cuda.get_device_name()
        refuse(f"time: the GPU is {gpu} of compute capability {'%d.%d' % capability}; 9.0 (Hopper) is needed")
    try:
        Ours()
    except ImportError as error:
        refuse(
            f"time: the package flash_mla cannot be imported ({error}); install it, or name its folder in PYTHONPATH"
        )


def time_rows(options):
    if not options.peers.is_dir():
        refuse(f"--peers: {options.peers} is no folder; must be one that `sidebyside.py fetch` has filled")
    check_machine()
    try:
        out = open(options.out, "a")
    except OSError as error:
        refuse(f"OUT.jsonl: {error}; must be a file that lines can be appended to")
    torch.set_default_device("cuda:0")
    rows = [(group, row) for group in GROUPS if group in options.groups for row in GROUPS[group]]
    present, absent = contestants_for([row for _, row in rows], options.peers)
    for name, why in absent.items():
        print(f"{name} is not there: {why}")
    now = int(time.time())
    seed = now if options.seed is None else options.seed
    machine = dict(run=now, gpu=torch.cuda.get_device_name(), driver=driver_version(), torch=torch.__version__)
    method = dict(flush=options.flush, runs=options.runs, seed=seed)
    before = what_comes_before(options.flush)
    lines, all_wrong = [], []
    with out:
        for _, row in rows:
            measured, wrong = outcome(row, present, absent, seed, before, options.runs)
            print(words_for(row), *(f"{name}={value}" for name, value in measured.items()), *wrong, flush=True)
            all_wrong += [f"{words_for(row)}: {text}" for text in wrong]
            lines.append(None)
            if measured:
                versions = {name: present[name].version for name in row.peers if f"{name}_us" in measured}
                who = dict(ours=present["ours"].version, peers=versions)
                lines[-1] = {"kind": row.kind, **shape_of(row), **machine, **who, **method, **measured}
                print(json.dumps(lines[-1]), file=out, flush=True)
    print(*summary(rows, lines, all_wrong), sep="\n")
    return 1 if all_wrong else 0


VLLM = "vllm==0.33.0"
VLLM_LIBRARIES = (
    "vllm/_flashmla_C.abi3.so",
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
)
FA4 = (
    "flash-attn-4==4.0.0b36",
    "nvidia-cutlass-dsl==4.8.1",
    "nvidia-cutlass-dsl-libs-base==4.8.1",
    "nvidia-cutlass-dsl-libs-core==4.8.1",
    "nvidia-cutlass-dsl-libs-cu13==4.8.1",
    "quack-kernels==0.6.5",
    "apache-tvm-ffi==0.1.15.post2",
    "torch-c-dlpack-ext==0.1.5",
)
FA4_UNUSED = "nvidia_cutlass_dsl/cu13/lib/stubs/"  # for other machines


def fetch(options):
    folder = options.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(f"FOLDER: {error}; must be a folder that can be written, new or empty")
    if any(folder.iterdir()):
        refuse(f"FOLDER: {folder} is not empty; must be new or empty")
    with tempfile.TemporaryDirectory(dir=folder) as wheels:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--pre", "--only-binary=:all:", "--dest", wheels]
        if subprocess.run([*pip, "--python-version", options.python, VLLM, *FA4]).returncode:
            print("sidebyside.py: fetch: pip could not download the wheels", file=sys.stderr)
            return 1
        for wheel in pathlib.Path(wheels).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                if wheel.name.startswith("vllm-"):
                    unpack_vllm(archive, folder)
                else:
                    names = [name for name in archive.namelist() if not name.startswith(FA4_UNUSED)]
                    archive.extractall(folder / "fa4", names)
    print(f"{folder} has the peers for Python {options.python}: give it to `sidebyside.py time` as --peers")
    return 0


def unpack_vllm(archive, folder):
    """Its libraries, beside each other, and the file that tells its version."""
    for name in VLLM_LIBRARIES:
        (folder / pathlib.PurePosixPath(name).name).write_bytes(archive.read(name))
    archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")])


def count(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"is {text}, must be a whole number from 1 on")
    return int(text)


def python_version(text):
    if not re.fullmatch(r"3\.\d+", text):
        raise argparse.ArgumentTypeError(f"is {text}, must be a version such as 3.12")
    return text


def parse(arguments):
    parser = argparse.ArgumentParser(
        prog="sidebyside.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="fetch | time")
    own = "%d.%d" % sys.version_info[:2]
    command = commands.add_parser("fetch", help="download the peers into a folder")
    command.add_argument("folder", metavar="FOLDER", type=pathlib.Path, help="new or empty")
    command.add_argument("--python", type=python_version, default=own, help=f"that will run them; this one's, {own}")
    command.set_defaults(function=fetch)
    command = commands.add_parser("time", help="time them beside flash_mla")
    command.add_argument("out", metavar="OUT.jsonl", type=pathlib.Path, help="lines are appended to it")
    command.add_argument("--peers", metavar="FOLDER", type=pathlib.Path, required=True, help="that fetch has filled")
    command.add_argument("--groups", nargs="+", choices=list(GROUPS), default=list(GROUPS), help="of rows; all")
    command.add_argument("--runs", type=count, default=15, help="of each contestant in a row; 15")
    command.add_argument("--flush", choices=["engine", "read"], default="engine", help="what is done before a run")
    command.add_argument("--seed", type=int, help="of all that is drawn; the time")
    command.set_defaults(function=time_rows)
    return parser.parse_args(arguments)


def main(arguments=None):
    options = parse(arguments)
    return options.function(options)


if __name__ == "__main__":
    sys.exit(main())

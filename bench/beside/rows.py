# SPDX-License-Identifier: MIT
"""The problems and their tensors. A row is a problem: `operation` names the contestants' method that computes it,
`peers` names the other contestants, and `inputs` makes its tensors. A group is a list of rows. Another kind of problem
needs another class here, and a method in every contestant that computes it.
"""

import math
import operator
from dataclasses import asdict, dataclass
from itertools import product
from types import SimpleNamespace
from typing import NamedTuple, Optional

try:
    import torch
except ImportError:  # only timing needs it
    torch = None

D_V = 512  # width of an MLA value
E4M3_MOST = 448  # largest e4m3 value
ROPE = 64  # last elements of a key, which encode its position
LAYOUTS = {576: "FP8_656", 512: "FP8_584"}  # of caches of sparse decode, by the size of a key


class Limits(NamedTuple):
    """Bounds for two results that agree."""

    cosine: float  # at least
    worst: float  # at most: largest difference of an element, relative to the root mean square of its row


OF_BF16 = Limits(0.9999, 0.1)  # rounding to bf16 gives a worst element of 0.03


class Problem:
    """Defaults that a class overrides."""

    captured = True  # a run replays a graph; else it is a call
    results = ("output",)
    together = 1  # rows of results; differences in any of them are relative to the largest root mean square among them
    least_row = 0.0  # least scale, as a multiple of the root mean square of all rows
    limits = OF_BF16  # limits of others' results against ours
    needed = ()  # peers without which there is no ratio
    variants = {}  # additional calls: {name: (contestant, method)}
    reference = None  # computes some results in `arithmetic`, to check ours by OF_BF16 or to measure errors
    arithmetic = "float32"
    of_errors = False  # errors are measured and not times
    dtype = "bfloat16"  # of values that are no bytes

    def normal(self, *shape, deviation=0.1):
        return normal(*shape, deviation=deviation, dtype=self.dtype)

    def wide(self, tensor):
        return tensor.to(getattr(torch, self.arithmetic))


@dataclass(frozen=True)
class Dense(Problem):
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
            q=self.normal(self.b, self.s_q, self.h_q, D_V + ROPE),
            cache=self.normal(pages, self.page, 1, D_V + ROPE),
            table=torch.randperm(pages, dtype=torch.int32).view(self.b, -1),
            lengths=torch.tensor(lengths, dtype=torch.int32),
            longest=max(lengths),
            scale=(D_V + ROPE) ** -0.5,
            flop=2 * sum(lengths) * self.s_q * self.h_q * (2 * D_V + ROPE),
        )


@dataclass(frozen=True)
class DenseFp8(Problem):
    """Decode with FP8 products, of e4m3 queries, over all s_k keys of each of b requests, from a cache of FP8_576 with
    a scale of 1. Variants have bf16 queries: the call quantises them, or products are in bf16, over this cache or over
    one of bf16 with the same values."""

    b: int
    s_q: int
    s_k: int
    h_q: int

    kind = "dense_fp8"
    operation = "dense_fp8"
    peers = ("vllm_fp8",)
    variants = {
        "ours_bf16_q": ("ours", "dense_fp8_of_values"),
        "ours_bf16": ("ours", "dense_decode_of_bytes"),
        "ours_bf16_cache": ("ours", "dense_decode_of_values"),
    }
    limits = Limits(0.9995, 0.3)  # PyTorch measures 0.9997 and 0.17 with other rounding of queries, or weights in e4m3
    page = 64

    def inputs(self, chance):
        pages = self.b * math.ceil(self.s_k / self.page)
        q = normal(self.b, self.s_q, self.h_q, D_V + ROPE)
        return SimpleNamespace(
            q=q,
            codes=q.to(torch.float8_e4m3fn),
            descale_q=torch.ones(1),
            **self.cache_of(pages),
            table=torch.randperm(pages, dtype=torch.int32).view(self.b, -1),
            lengths=torch.full((self.b,), self.s_k, dtype=torch.int32),
            scale=(D_V + ROPE) ** -0.5,
            flop=2 * self.b * self.s_k * self.s_q * self.h_q * (2 * D_V + ROPE),
        )

    def cache_of(self, pages):
        values = normal(pages, self.page, 1, D_V + ROPE, deviation=1)
        return dict(cache=values.to(torch.float8_e4m3fn), descale_k=torch.ones(1))

    def reference(self, x):
        """Returns (a function that takes the last request from an output, its result in the row's arithmetic)."""
        pages = x.cache.view(torch.uint8)[x.table[-1].long()]
        tokens = pages.flatten(0, 2)[: self.s_k]
        q, k = (self.wide(values) for values in (self.query_values(x)[-1], self.key_values(tokens)))
        return lambda output: (output[-1],), (attended(q, k, x.scale),)

    def query_values(self, x):
        return x.codes.float()

    def key_values(self, tokens):
        return tokens.view(torch.float8_e4m3fn).float()


@dataclass(frozen=True)
class DenseFp8Packed(DenseFp8):
    """The same over caches of FP8_656, with bf16 queries, which the call quantises. There is no peer."""

    kind = "dense_fp8_656"
    operation = "dense_fp8_of_values"
    peers = ()
    variants = {"ours_bf16": ("ours", "dense_decode_of_bytes")}

    def cache_of(self, pages):
        cache = packed_cache(pages * self.page, "FP8_656", self.page, deviation=1)
        return dict(cache=cache, descale_k=None)  # its scales are inside

    def query_values(self, x):
        latent, rope = x.q.float().split((D_V, ROPE), -1)
        # Divide by a tensor: on a GPU PyTorch multiplies by a number's reciprocal, which changes one code in some millions.
        scale = latent.abs().amax(-1, keepdim=True) / latent.new_full((1,), E4M3_MOST)
        return torch.cat([(latent / scale).to(torch.float8_e4m3fn).float() * scale, rope], -1)

    def key_values(self, tokens):
        codes, scales, rope = (part.contiguous() for part in tokens.split((D_V, 16, 2 * ROPE), 1))
        latent = codes.view(torch.float8_e4m3fn).float().view(len(tokens), 4, -1)
        latent = latent * scales.view(torch.float32)[..., None]
        return torch.cat([latent.flatten(1), rope.view(torch.bfloat16).float()], 1)


class Second(NamedTuple):
    """The second cache of sparse decode, and the pages of both. Where varlen, requests use different numbers of the
    entries of their second lists."""

    s_k: int
    topk: int
    first_page: int
    page: int
    varlen: bool


@dataclass(frozen=True)
class Sparse(Problem):
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
    most_tokens = 1 << 22  # per cache: requests of a large batch share keys

    @property
    def peers(self):
        return ("flashmla",) if self.h_q in (64, 128) else ()  # no published kernel takes other head counts

    def inputs(self, chance):
        layout = LAYOUTS[self.d_qk]
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
class Prefill(Problem):
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
class Mha(Problem):
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
class MhaShort(Mha):
    """The same for many short prompts."""

    kind = "mha_short"
    peers = ("fa3", "fa4")


@dataclass(frozen=True)
class MhaPortable(Mha):
    """The same by the kernel for every GPU since Ampere, beside the kernel for those GPUs that PyTorch has."""

    kind = "mha_fwd_sm80"
    peers = ("fa2",)


@dataclass(frozen=True)
class MhaGradients(Mha):
    """Its gradients by q, k and v. The forward pass is made before, and is not timed. PyTorch's autograd makes all
    calls but ours_direct, which is the operator alone and writes into tensors that are there."""

    kind = "mha_bwd"
    operation = "mha_backward"
    peers = ("fa4", "cudnn")
    needed = ("fa4",)
    variants = {
        "ours_direct": ("ours", "mha_backward_direct"),
        "ours_deterministic": ("ours", "mha_backward_deterministic"),
        "fa4_deterministic": ("fa4", "mha_backward_deterministic"),
    }
    captured = False
    results = ("dq", "dk", "dv")
    together = 16  # a row of dq or dk is a sum that can cancel, so that rounding is large relative to that row alone
    least_row = 0.1  # the first token of a causal sequence sees one key: its dq is 0 but for rounding

    def inputs(self, chance):
        x = super().inputs(chance)
        x.dout = self.normal(self.b * self.s, self.h, self.d_v, deviation=1)
        x.flop = 2 * x.pairs * (3 * self.d_qk + 2 * self.d_v)
        return x

    def reference(self, x):
        """Returns (a function that takes a part of results, its result in the row's arithmetic): the last sequence and the first
        key head with its query heads."""
        tokens, heads = slice((self.b - 1) * self.s, None), slice(self.h // self.h_kv)
        q, k, v, dout = (self.wide(t[tokens]) for t in (x.q[:, heads], x.k[:, 0], x.v[:, 0], x.dout[:, heads]))

        def part(dq, dk, dv):
            return dq[tokens, heads], dk[tokens, 0], dv[tokens, 0]

        return part, gradients_of_head(q, k, v, dout, x.scale, self.causal)


@dataclass(frozen=True)
class MhaGradientsPortable(MhaGradients):
    """The same by the kernel for every GPU since Ampere, beside the kernel for those GPUs that PyTorch has."""

    kind = "mha_bwd_sm80"
    peers = ("fa2",)
    needed = ("fa2",)
    variants = {"ours_deterministic": ("ours", "mha_backward_deterministic")}


@dataclass(frozen=True)
class MhaVarlen(Problem):
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


@dataclass(frozen=True)
class MhaChunk(Problem):
    """The last s_q tokens of each of b requests over all its s_k keys: a chunk of a long prompt, as engines prefill it."""

    b: int
    s_q: int
    s_k: int
    h: int
    h_kv: int
    d_qk: int
    d_v: int
    causal: bool = True

    kind = "mha_chunk"
    operation = "mha_forward"
    peers = ("fa3_splits",)

    def inputs(self, chance):
        return sequences([self.s_q] * self.b, self, [self.s_k] * self.b)


BY_REQUEST = {"ours_invariant": ("ours", "mha_forward_invariant")}  # as a request alone, whatever else is in the batch


@dataclass(frozen=True)
class MhaDecode(MhaChunk):
    """One token of each of b requests over all its s_k keys."""

    kind = "mha_decode"
    peers = ("fa3", "fa3_splits", "fa4")
    variants = BY_REQUEST


class Requests(NamedTuple):
    """Requests of a batch, with tokens and keys in these ranges."""

    count: int
    tokens: tuple
    keys: tuple


# Batches of a server that prefills long prompts in chunks, in the order of their requests.
MIXES = {
    "decode_and_chunk": (Requests(31, (1, 1), (2048, 32768)), Requests(1, (2048, 2048), (8192, 8192))),
    "chunks": (Requests(8, (64, 1024), (4096, 65536)),),
}


@dataclass(frozen=True)
class MhaMixed(Problem):
    """The last tokens of each request over all its keys, for a batch of MIXES."""

    mix: str
    h: int
    h_kv: int
    d_qk: int
    d_v: int
    causal: bool = True

    kind = "mha_mixed"
    operation = "mha_forward"
    peers = ("fa3", "fa3_splits", "fa4")
    variants = BY_REQUEST

    def inputs(self, chance):
        drawn = [
            (chance.randint(*of.tokens), chance.randint(*of.keys)) for of in MIXES[self.mix] for _ in range(of.count)
        ]
        return sequences([tokens for tokens, _ in drawn], self, [keys for _, keys in drawn])


@dataclass(frozen=True)
class MhaSink(MhaChunk):
    """The same with a sink a head, which bf16 holds, as FlashAttention-3 takes it, but not at 192/128."""

    kind = "mha_sink"
    peers = ("fa3", "fa3_splits")

    def inputs(self, chance):
        x = super().inputs(chance)
        x.sink = (torch.randn(self.h) + math.log(self.s_k)).bfloat16().float()  # about half of a row's weight
        return x


@dataclass(frozen=True)
class MhaUsed(MhaChunk):
    """The same with room for s_k keys a request, of which a half to all are in use."""

    kind = "mha_used"
    peers = ("fa3", "fa3_splits")

    def inputs(self, chance):
        used = [chance.randint(max(self.s_q, self.s_k // 2), self.s_k) for _ in range(self.b)]
        return sequences([self.s_q] * self.b, self, [self.s_k] * self.b, used)


@dataclass(frozen=True)
class Errors(Problem):
    """Mixed into a problem, measures errors in place of times: against double arithmetic, of a part of the results. Scores have
    a deviation of 1; where peaky, of 6, because queries are six times as large, so that a few keys carry a row."""

    peaky: bool = False
    dtype: str = "bfloat16"

    of_errors = True
    arithmetic = "float64"
    captured = False
    variants = {}
    needed = ()
    deviation = 0.1  # of keys

    def inputs(self, chance):
        x = super().inputs(chance)
        x.q.normal_(std=6 if self.peaky else 1)  # in place, since x has views of it
        x.scale = 1 / (self.deviation * math.sqrt(x.q.shape[-1]))
        return x


MEASURED = 4  # requests of a decode whose errors are measured: the last ones


@dataclass(frozen=True)
class DenseErrors(Errors, Dense):
    kind: str = "dense_errors"

    def reference(self, x):
        """Returns (a function that takes a part of an output, its result in double arithmetic)."""
        expected = []
        for q, pages, length in zip(x.q[-MEASURED:], x.table[-MEASURED:], x.lengths[-MEASURED:]):
            keys = x.cache[pages.long()].flatten(0, 2)[:length]
            expected.append(attended(self.wide(q), self.wide(keys), x.scale))
        return lambda output: (output[-MEASURED:],), (torch.stack(expected),)


@dataclass(frozen=True)
class DenseFp8Errors(Errors, DenseFp8):
    kind = "dense_fp8_errors"
    deviation = 1

    def inputs(self, chance):
        x = super().inputs(chance)
        x.codes = x.q.to(torch.float8_e4m3fn)
        return x


@dataclass(frozen=True)
class SparseErrors(Errors, Sparse):
    kind = "sparse_decode_errors"

    def reference(self, x):
        """Returns (a function that takes a part of an output, its result in double arithmetic)."""
        expected = []
        for request in range(max(0, self.b - MEASURED), self.b):
            keys = self.keys(x.cache, x.indices[request])
            if self.extra:
                used = None if x.extra_lengths is None else x.extra_lengths[request]
                keys = torch.cat([keys, self.keys(x.extra_cache, x.extra_indices[request, :, :used])], 1)
            expected.append(attended_keys(self.wide(x.q[request]), keys, x.scale, self.wide(x.sink)))
        return lambda output: (output[-MEASURED:],), (torch.stack(expected),)

    def keys(self, cache, indices):
        """Returns the keys of lists [s_q, topk]. bf16 holds them, since flash_mla's scales are powers of two."""
        import flash_mla

        values = flash_mla.cache_gather(cache, indices.flatten().long(), LAYOUTS[self.d_qk])
        return self.wide(values).view(*indices.shape, self.d_qk)


@dataclass(frozen=True)
class PrefillErrors(Errors, Prefill):
    kind = "sparse_prefill_errors"

    def reference(self, x):
        """Returns (a function that takes the last 32 tokens of an output, their result in double arithmetic)."""
        last = slice(-32, None)
        keys = self.wide(x.kv[x.indices[last, 0].long(), 0])
        expected = attended_keys(self.wide(x.q[last]), keys, x.scale, self.wide(x.sink))
        return lambda output: (output[last],), (expected,)


class MhaSample(Errors):
    """Measures the last sequence and the first key head with its query heads."""

    deviation = 1

    @property
    def peers(self):
        """FlashAttention-4 compiles a kernel for each kind of call, for seconds: it has one kind of each size."""
        compiled = self.causal and self.dtype == "bfloat16" and self.h == self.h_kv
        return tuple(name for name in super().peers if compiled or name != "fa4")

    def reference(self, x):
        """Returns (a function that takes the sample from an output, its result in double arithmetic)."""
        heads, tokens, keys = slice(self.h // self.h_kv), slice(x.ends[-2], None), slice(x.ends_k[-2], None)
        q, k, v = (self.wide(tensor) for tensor in (x.q[tokens, heads], x.k[keys, 0], x.v[keys, 0]))
        return lambda output: (output[tokens, heads],), (output_of_head(q, k, v, x.scale, self.causal),)


@dataclass(frozen=True)
class MhaErrors(MhaSample, Mha):
    kind = "mha_fwd_errors"


@dataclass(frozen=True)
class MhaChunkErrors(MhaSample, MhaChunk):
    kind = "mha_chunk_errors"


@dataclass(frozen=True)
class MhaGradientsErrors(MhaSample, MhaGradients):
    kind = "mha_bwd_errors"
    reference = MhaGradients.reference


@dataclass(frozen=True)
class MhaChunkPortable(MhaChunk):
    """The same without a mask, which PyTorch's attention aligns otherwise, by the kernel for every GPU since Ampere."""

    causal: bool = False

    kind = "mha_chunk_sm80"
    peers = ("fa2",)

    def inputs(self, chance):
        x = super().inputs(chance)
        x.batch = [tensor.view(self.b, -1, *tensor.shape[1:]) for tensor in (x.q, x.k, x.v)]
        return x


def dense_rows():
    shapes = product((4096, 8192), (16, 32, 64, 128), (1, 2), (False, True))
    rows = [Dense(128, s_q, s_k, h_q, varlen) for s_k, h_q, s_q, varlen in shapes]
    return rows + [Dense(b, s_q, 32768, h_q) for b, s_q, h_q in ((128, 1, 128), (128, 2, 128), (64, 1, 16))]


def small_rows():
    shapes = [(b, 1, s_k, h_q) for b, s_k, h_q in product((1, 2, 4, 8, 16, 32), (1024, 8192, 65536), (16, 64, 128))]
    shapes += [(b, 4, 8192, h_q) for b, h_q in product((1, 4), (16, 128))]
    return [Dense(*shape, kind="dense_small") for shape in shapes]


def fp8_rows():
    shapes = product(((1, 8192), (16, 8192), (128, 4096), (128, 32768)), ((1, 16), (1, 64), (1, 128), (2, 128)))
    sizes = [(b, s_q, s_k, h_q) for (b, s_k), (s_q, h_q) in shapes]
    return [kind(*size) for kind in (DenseFp8, DenseFp8Packed) for size in sizes]


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


def mha_rows_of(kind):
    shapes = product(((192, 128), (128, 128), (64, 64)), ((8, 2048), (2, 8192), (1, 16384)), (True, False))
    rows = [kind(b, s, 16, 16, d_qk, d_v, causal) for (d_qk, d_v), (b, s), causal in shapes]
    return rows + [kind(2, 8192, 32, 4, 128, 128, True)]


def mha_rows():
    rows = mha_rows_of(Mha)
    return rows + [MhaVarlen(16, 128, 128, 192, 128), MhaVarlen(16, 32, 4, 128, 128)]


def chunk_rows():
    sizes = (16, 16, 192, 128), (128, 128, 192, 128), (32, 4, 128, 128)
    shapes = product((8192, 32768, 65536), (16, 64, 128, 512, 2048), sizes)
    rows = [MhaChunk(1, s_q, s_k, *of) for s_k, s_q, of in shapes]
    rows += [MhaChunk(1, s_q, 131072, 16, 16, 192, 128) for s_q in (16, 128, 512)]
    return rows + [MhaChunk(b, s_q, 32768, *of) for b, s_q, of in product((4, 16), (16, 128), (sizes[0], sizes[2]))]


SERVED = (16, 16, 192, 128), (32, 4, 128, 128), (16, 16, 64, 64)  # heads and their sizes


def chunk_rows_of_64():
    of = SERVED[2]
    rows = [MhaChunk(1, s_q, s_k, *of) for s_k, s_q in product((8192, 32768, 65536), (16, 64, 128, 512, 2048))]
    return rows + [MhaChunk(b, s_q, 32768, *of) for b, s_q in product((4, 16), (16, 128))]


def mixed_rows():
    rows = [MhaMixed(mix, *of) for of, mix in product(SERVED, MIXES)]
    shapes = [*product((1, 16, 64), (8192, 32768)), (1, 131072), (16, 131072)]
    rows += [MhaDecode(b, 1, s_k, *SERVED[0]) for b, s_k in shapes]
    ends = (1, 8192), (1, 131072), (16, 32768), (64, 8192), (64, 131072)
    return rows + [MhaDecode(b, 1, s_k, *of) for of, (b, s_k) in product(SERVED[1:], ends)]


def sink_rows():
    shapes = (8, 2048, 2048), (1, 512, 32768), (1, 2048, 32768), (64, 1, 8192)
    return [MhaSink(*shape, *of) for of, shape in product(((64, 8, 64, 64), SERVED[1]), shapes)]


def used_rows():
    shapes = (8, 1024, 4096), (16, 128, 16384), (64, 1, 32768)
    return [MhaUsed(*shape, *of) for of, shape in product(SERVED, shapes)]


def portable_rows():
    sizes = (16, 16, 192, 128), (16, 16, 128, 128), (32, 4, 128, 128)
    chunks = [*product((8192, 32768), (16, 128, 512)), (65536, 128)]
    rows = mha_rows_of(MhaPortable)
    return rows + [MhaChunkPortable(1, s_q, s_k, *of) for of in sizes for s_k, s_q in chunks]


def short_rows():
    shapes = product((64, 256), (128, 512), ((16, 16, 192, 128), (128, 128, 192, 128), (32, 4, 128, 128)))
    return [MhaShort(b, s, *of, True) for b, s, of in shapes]


def wide_rows():
    shapes = product(((8, 2048), (2, 8192), (1, 16384)), (True, False))
    rows = [Mha(b, s, 16, 16, 256, 256, causal) for (b, s), causal in shapes]
    rows += [Mha(2, 8192, 32, 4, 256, 256, True), MhaVarlen(16, 16, 16, 256, 256)]
    chunks = product((16, 128, 512, 2048), (8192, 32768), (8, 64))
    rows += [MhaChunk(1, s_q, s_k, h, h, 256, 256) for s_q, s_k, h in chunks]
    return rows + [MhaShort(64, s, 16, 16, 256, 256, True) for s in (128, 512)]


def wide_gradients_rows():
    shapes = product(((8, 2048), (2, 8192), (1, 16384)), (True, False))
    rows = [MhaGradients(b, s, 16, 16, 256, 256, causal) for (b, s), causal in shapes]
    return rows + [MhaGradients(2, 8192, 32, 4, 256, 256, True)]


def uneven_gradients_rows():
    shapes = product(((8, 2048), (2, 8192), (1, 16384)), (True, False))
    return [MhaGradients(b, s, 16, 16, 96, 64, causal) for (b, s), causal in shapes]


def grouped_gradients_rows():
    shapes = (
        (8, 2048, 32, 4),
        (1, 16384, 32, 4),
        (2, 4096, 32, 8),
        (2, 8192, 40, 8),
        (2, 8192, 64, 8),
        (1, 8192, 128, 8),
    )
    rows = [MhaGradients(b, s, h, h_kv, 128, 128, True) for b, s, h, h_kv in shapes]
    rows += [MhaGradients(4, 4096, 32, 8, 128, 128, False), MhaGradients(2, 8192, 16, 1, 128, 128, True)]
    return rows + [MhaGradients(2, 8192, 16, 2, 192, 128, True), MhaGradients(2, 8192, 64, 8, 64, 64, True)]


def mha_gradients_rows_of(kind):
    shapes = product(((192, 128), (128, 128), (64, 64)), ((8, 2048), (2, 8192), (1, 16384)), (True, False))
    rows = [kind(b, s, 16, 16, d_qk, d_v, causal) for (d_qk, d_v), (b, s), causal in shapes]
    return rows + [kind(2, 8192, 32, 4, 128, 128, causal) for causal in (True, False)]


def error_rows():
    """Each problem twice: Gaussian, then peaky."""
    half = dict(dtype="float16")
    dense = (8, 1, 4096, 16), (8, 1, 4096, 64), (8, 2, 4096, 128), (128, 1, 4096, 64)
    rows = [(DenseErrors, *shape) for shape in dense]
    rows += [(DenseFp8Errors, 8, 1, 4096, 64), (DenseFp8Errors, 8, 2, 4096, 128)]
    lists = (8, 1, 64, 2048), (8, 2, 128, 512), (64, 2, 128, 2048)
    rows += [(SparseErrors, b, s_q, 8192, h_q, topk, 576) for b, s_q, h_q, topk in lists]
    seconds = (64, Second(8192, 512, 256, 64, False)), (128, Second(8192, 1024, 256, 64, False))
    rows += [(SparseErrors, 8, 2, 8192, h_q, 128, 512, second) for h_q, second in seconds]
    prefill = (1024, 1024, 128, 576), (1024, 512, 64, 512), (64, 512, 128, 576)
    rows += [(PrefillErrors, s_q, 8192, *rest) for s_q, *rest in prefill]
    sizes, both = ((192, 128), (128, 128), (64, 64), (256, 256)), (MhaErrors, MhaGradientsErrors)
    mha = [(kind, 2, 2048, 16, 16, *of, causal) for kind, of, causal in product(both, sizes, (True, False))]
    rows += [*mha, (MhaGradientsErrors, 2, 2048, 32, 4, 128, 128, True)]
    chunks = (16, 16, 192, 128), (32, 4, 128, 128), (8, 8, 256, 256)
    rows += [(MhaChunkErrors, 1, 256, 8192, *of) for of in chunks]
    of_types = [(row, {}) for row in rows]
    of_types += [(row, half) for row in [rows[1], rows[2], *mha[::2]]]
    return [kind(*sizes, peaky=peaky, **types) for (kind, *sizes), types in of_types for peaky in (False, True)]


GROUPS = {
    "dense": dense_rows(),
    "small": small_rows(),
    "fp8": fp8_rows(),
    "sparse": sparse_rows(),
    "prefill": prefill_rows(),
    "mha": mha_rows(),
    "mha_chunk": chunk_rows(),
    "mha_chunk_64": chunk_rows_of_64(),
    "mha_mixed": mixed_rows(),
    "mha_sink": sink_rows(),
    "mha_used": used_rows(),
    "mha_short": short_rows(),
    "mha_256": wide_rows(),
    "mha_256_bwd": wide_gradients_rows(),
    "mha_96_bwd": uneven_gradients_rows(),
    "mha_bwd": mha_gradients_rows_of(MhaGradients),
    "mha_gqa_bwd": grouped_gradients_rows(),
    "accuracy": error_rows(),
    "sm80": portable_rows(),
    "sm80_bwd": mha_gradients_rows_of(MhaGradientsPortable),
}

# Our kernels that a group tests, as FLASHMLA_KERNEL takes them; other groups use the machine's best.
FORCED = {"sm80": "mha_forward=cuda-sm80", "sm80_bwd": "mha_backward=cuda-sm80"}


def shape_of(row):
    """Returns the sizes for a line of results."""
    shape = asdict(row)
    shape.pop("kind", None)
    return shape


def words_for(row):
    """Returns the printed form of a row."""
    shape = {name: value for name, value in shape_of(row).items() if value is not None}
    if "extra" in shape:
        shape["extra"] = ",".join(map(str, shape["extra"]))
    return " ".join([row.kind, *(f"{name}={value}" for name, value in shape.items())])


# The tensors.


def normal(*shape, deviation=0.1, dtype="bfloat16"):
    return torch.empty(shape, dtype=getattr(torch, dtype)).normal_(std=deviation)


def lists(b, s_q, topk, s_k, tokens):
    """Draws lists [b, s_q, topk]: each token names topk of its request's s_k places, in random order, each at most once. Requests
    share places only where the cache has too few tokens for all."""
    own = min(s_k, tokens)
    begins = [request * own % (tokens - own + 1) for request in range(b)]
    rows = [torch.randperm(own, dtype=torch.int32)[:topk] + begins[token // s_q] for token in range(b * s_q)]
    return torch.stack(rows).view(b, s_q, topk)


def packed_cache(tokens, layout, page, deviation=0.1):
    """Makes a cache in pages of so many tokens, quantised by flash_mla: FP8_656 and FP8_584 are FlashMLA's own layouts."""
    import flash_mla

    size, latent = {"FP8_656": (656, 512), "FP8_584": (584, 448)}[layout]
    cache = torch.zeros(math.ceil(tokens / page), page, 1, size, dtype=torch.uint8)
    for slots in torch.arange(tokens, dtype=torch.int64).split(1 << 18):
        values = (normal(len(slots), width, deviation=deviation) for width in (latent, ROPE))
        flash_mla.cache_append(*values, cache, slots, layout)
    return cache


def attended(q, k, scale):
    """Computes attention of a request's last tokens: q is [tokens, heads, d_qk], k [keys, d_qk]."""
    tokens, places = torch.arange(len(q)), torch.arange(len(k))
    hidden = places > len(k) - len(q) + tokens[:, None, None]
    return (q @ k.T * scale).masked_fill(hidden, -math.inf).softmax(-1) @ k[:, :D_V]


def attended_keys(q, keys, scale, sink):
    """Computes attention with a sink a head: q is [tokens, heads, d_qk], keys [tokens, topk, d_qk]."""
    scores = torch.cat([q @ keys.mT * scale, sink[:, None].expand(len(q), -1, 1)], -1)
    return scores.softmax(-1)[..., :-1] @ keys[..., :D_V]


def sequences(lengths, row, keys=None, used=None):
    """Makes sequences of so many tokens, one after the other, and as many keys each, unless `keys` says how many. Then the
    tokens are the last ones of their sequence: of the first `used` keys, if that is given."""
    keys = keys or lengths
    seen = used or keys
    hidden = sum(length * length for length in lengths) / 2 if row.causal else 0
    pairs = row.h * (sum(map(operator.mul, lengths, seen)) - hidden)
    return SimpleNamespace(
        q=row.normal(sum(lengths), row.h, row.d_qk, deviation=1),
        k=row.normal(sum(keys), row.h_kv, row.d_qk, deviation=1),
        v=row.normal(sum(keys), row.h_kv, row.d_v, deviation=1),
        ends=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        ends_k=torch.tensor([0, *keys]).cumsum(0).to(torch.int32),
        longest=max(lengths),
        longest_k=max(seen),
        used=torch.tensor(used, dtype=torch.int32) if used else None,
        sink=None,
        causal=row.causal,
        grouped=row.h != row.h_kv,
        scale=row.d_qk**-0.5,
        pairs=pairs,
        flop=2 * pairs * (row.d_qk + row.d_v),
    )


def weights_of(q, k, scale, causal):
    """Yields (head, tokens, their weights) of query heads that share a key head: q is [s, heads, d], k [keys, d]. Tokens are
    the last ones."""
    places = torch.arange(len(k))
    for head in range(q.shape[1]):
        for rows in torch.arange(len(q)).split(2048):  # all scores of a long sequence would take gigabytes
            scores = q[rows, head] @ k.T * scale
            if causal:
                scores.masked_fill_(places > len(k) - len(q) + rows[:, None], -math.inf)
            yield head, rows, scores.softmax(-1)


def output_of_head(q, k, v, scale, causal):
    """Returns the output [s, heads, d_v] of the query heads that share a key head: q is [s, heads, d], k and v [keys, d]."""
    output = q.new_empty(*q.shape[:2], v.shape[-1])
    for head, rows, p in weights_of(q, k, scale, causal):
        output[rows, head] = p @ v
    return output


def gradients_of_head(q, k, v, dout, scale, causal):
    """Returns (dq, dk, dv) of the query heads that share a key head: q and dout are [s, heads, d], k and v [s, d]."""
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for head, rows, p in weights_of(q, k, scale, causal):
        q_rows, dout_rows = q[rows, head], dout[rows, head]
        dp = dout_rows @ v.T
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
        dq[rows, head] = ds @ k
        dk += ds.T @ q_rows
        dv += p.T @ dout_rows
    return dq, dk, dv

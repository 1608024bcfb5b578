# SPDX-License-Identifier: MIT
"""References for the tests: attention in double precision, batches of requests, and the tolerances.

The formulas and the bounds are those of docs/semantics.md.
"""

from __future__ import annotations

import math

import numpy

from caches import D_QK, Cache, of_codes, quantised, random_codes

GARBAGE = (-1, 2147480000)  # block table entries past the last page of a request


# ---- Attention ------------------------------------------------------------------------------------------------------


def log_sum_exp(scores, axis):
    """Returns ln Σ exp(scores); -inf if there are none, or all are -inf."""
    most = numpy.max(scores, axis=axis, keepdims=True, initial=-math.inf)
    safe = numpy.where(numpy.isfinite(most), most, 0.0)
    with numpy.errstate(divide="ignore"):
        return numpy.squeeze(numpy.log(numpy.sum(numpy.exp(scores - safe), axis=axis, keepdims=True)) + safe, axis)


def with_sink(out, lse, sink):
    """Applies sink [h_q] to out [b, s_q, h_q, d_v] by the natural lse [b, h_q, s_q]."""
    if sink is None:
        return out
    with numpy.errstate(over="ignore", invalid="ignore"):
        factor = 1 / (1 + numpy.exp(sink[:, None] - lse))
    return out * numpy.where(numpy.isfinite(lse), factor, 0.0).transpose(0, 2, 1)[..., None]


def conventions(lse, lse_empty, log_base):
    """Converts a natural lse, -inf where a row sees no key, to the conventions of the caller."""
    empty = lse == -math.inf
    return numpy.where(empty, lse_empty, lse / math.log(log_base))


def dense(q, keys, d_v, scale=None, causal=False, values=None):
    """q [s_q, h_q, d], keys [s_k, h_kv, d], values [s_k, h_kv, d_v] (None: the first of the keys') → out [s_q, h_q, d_v],
    lse [h_q, s_q], -inf where a row sees no key."""
    values = keys[..., :d_v] if values is None else values
    s_q, h_q, d = q.shape
    s_k, h_kv, _ = keys.shape
    scale = d**-0.5 if scale is None else scale
    out, lse = numpy.zeros((s_q, h_q, d_v)), numpy.zeros((h_q, s_q))
    for token in range(s_q):
        seen = max(0, s_k - s_q + token + 1) if causal else s_k
        visible = keys[:seen].transpose(1, 0, 2)  # [h_kv, seen, d]
        scores = scale * (q[token].reshape(h_kv, h_q // h_kv, d) @ visible.transpose(0, 2, 1)).reshape(h_q, seen)
        lse[:, token] = log_sum_exp(scores, 1)
        weights = numpy.exp(scores - numpy.where(lse[:, token] == -math.inf, 0.0, lse[:, token])[:, None])
        out[token] = (weights.reshape(h_kv, h_q // h_kv, seen) @ values[:seen].transpose(1, 0, 2)).reshape(h_q, d_v)
    return out, lse


def that_name(entries, count, slots):
    """Returns the first `count` entries of a list (None: all) that name one of the slots."""
    entries = entries if count is None else entries[: max(0, count)]
    return entries[(entries >= 0) & (entries < slots)]


def over_lists(q, keys, scale=None):
    """q [b, s_q, h_q, d]; keys(request, token) returns the keys [n, d] that a token sees → out [b, s_q, h_q, 512]; the largest
    score and lse [b, h_q, s_q], -inf where a row sees no key."""
    b, s_q, h_q, d = q.shape
    scale = d**-0.5 if scale is None else scale
    out, most, lse = numpy.zeros((b, s_q, h_q, 512)), numpy.zeros((b, h_q, s_q)), numpy.zeros((b, h_q, s_q))
    for r, j in numpy.ndindex(b, s_q):
        seen = keys(r, j)
        one, of_row = dense(q[r, j][None], seen[:, None], 512, scale)
        out[r, j], lse[r, :, j] = one[0], of_row[:, 0]
        most[r, :, j] = numpy.max(scale * (q[r, j] @ seen.T), axis=1, initial=-math.inf)
    return out, most, lse


# ---- Batches --------------------------------------------------------------------------------------------------------


class Batch:
    """A batch of requests over a paged cache, in NumPy. Slots without a key hold NaN, unused table entries garbage.

    `layout` is "plain", or the bytes of a token of an FP8 cache; `kv_scale` is given to calls over 576 bytes, unless it is None.
    """

    def __init__(
        self,
        lengths,
        s_q=1,
        h_q=4,
        h_kv=1,
        d=576,
        page_size=64,
        table=True,
        seed=0,
        spare=2,
        layout="plain",
        kv_scale=None,
    ):
        random = numpy.random.default_rng(seed)
        d = D_QK.get(layout, d)
        self.lengths, self.layout = list(lengths), layout
        self.kv_scale = None if kv_scale is None else numpy.array([kv_scale], numpy.float32)
        self.b, self.s_q, self.h_q, self.h_kv, self.d, self.page_size = len(lengths), s_q, h_q, h_kv, d, page_size
        self.q = self._values(random, (self.b, s_q, h_q, d))
        self.keys = [self._values(random, (length, h_kv, d)) for length in lengths]
        self.sink = random.normal(0, 2, h_q).astype(numpy.float32)
        used = [-(-length // page_size) for length in lengths]
        if table:
            pages = random.permutation(sum(used) + spare)
            self.table = numpy.resize(numpy.array(GARBAGE, numpy.int32), (self.b, max(used, default=0) + spare))
        else:
            assert max(used, default=0) <= 1, "without a table, a request has one page"
            pages = numpy.arange(self.b + spare)
            self.table = None
        first, slots = 0, []
        for request, length in enumerate(lengths):
            of_request = pages[first : first + used[request]] if table else pages[[request]]
            if table:
                self.table[request, : len(of_request)] = of_request
            slots.append((of_request[:, None] * page_size + numpy.arange(page_size)).reshape(-1)[:length])
            first += used[request]
        if layout == "plain":
            self.cache = numpy.full((len(pages), page_size, h_kv, d), math.nan, numpy.float32)
            for of_request, keys in zip(slots, self.keys):
                self.cache.reshape(-1, h_kv, d)[of_request] = keys
            return
        holds_key = numpy.zeros(len(pages) * page_size, bool)
        for of_request in slots:
            holds_key[of_request] = True
        cache = Cache(random, layout, len(pages), page_size, d, holds_key, kv_scale)
        self.keys, self.cache = [cache.values[of_request][:, None] for of_request in slots], cache.memory

    @staticmethod
    def _values(random, shape):
        return numpy.clip(random.normal(0, 0.1, shape), -1, 1).astype(numpy.float32)

    def inputs(self):
        """{name: (values, type; None: that of the queries)}."""
        lengths = numpy.array(self.lengths, numpy.int32)
        tables = {"block_table": (self.table, "int32"), "cache_seqlens": (lengths, "int32")}
        scale = {} if self.kv_scale is None else {"kv_scale": (self.kv_scale, "float32")}
        k_cache = self.cache, None if self.layout == "plain" else "uint8"
        return {"q": (self.q, None), "k_cache": k_cache, **tables, **scale}

    def arrays(self, kind):
        """The arguments of a call."""
        return {name: None if given[0] is None else kind.array(*given) for name, given in self.inputs().items()}

    def results(self):
        """{name: (shape, type; None: that of the queries)}, in order."""
        return {"out": ((self.b, self.s_q, self.h_q, 512), None), "lse": ((self.b, self.h_q, self.s_q), "float32")}

    def arguments(self, kind):
        """Returns all arguments that a call needs, by name."""
        options = dict(head_dim_v=512, tile_scheduler_metadata=None, is_fp8_kvcache=self.layout != "plain")
        return {**self.arrays(kind), **options}

    def queries(self, kind):
        """Returns the values that a call reads from the queries."""
        return kind.float64(kind.array(self.q))

    def expected(
        self, kind, d_v=512, scale=None, causal=False, sink=None, lse_empty=math.inf, log_base=math.e, lengths=None
    ):
        """Returns (out, lse) in double precision, from the values as the kind rounds them."""
        out, lse = numpy.zeros((self.b, self.s_q, self.h_q, d_v)), numpy.zeros((self.b, self.h_q, self.s_q))
        q = self.queries(kind)
        for r, length in enumerate(self.lengths if lengths is None else lengths):
            keys = self.keys[r][:length]
            if self.layout == "plain":
                keys = kind.float64(kind.array(keys))
            out[r], lse[r] = dense(q[r], keys, d_v, scale, causal)
        return with_sink(out, lse, sink), conventions(lse, lse_empty, log_base)


class BatchFp8(Batch):
    """A batch for flash_mla_with_kvcache_fp8, with bf16 results. `codes`: queries are codes with the scale `q_scale`, which is
    passed unless it is None; else they are values."""

    def __init__(self, lengths, layout=576, codes=True, q_scale=None, seed=0, **shape):
        super().__init__(lengths, layout=layout, seed=seed, **shape)
        self.codes, self.q_scale = codes, None if q_scale is None else numpy.array([q_scale], numpy.float32)
        if codes:
            self.q = random_codes(numpy.random.default_rng(seed + 1000), self.q.shape, q_scale)

    def inputs(self):
        given = super().inputs()
        scales = {"descale_q": self.q_scale, "descale_k": given.pop("kv_scale", (None,))[0]}
        given["q"] = self.q, "uint8" if self.codes else None
        return {**given, **{name: (scale, "float32") for name, scale in scales.items() if scale is not None}}

    def arguments(self, kind):
        return {**self.arrays(kind), "head_dim_v": 512, "tile_scheduler_metadata": None}

    def queries(self, kind):
        if self.codes:
            return of_codes(self.q, None if self.q_scale is None else self.q_scale[0])
        return quantised(super().queries(kind), self.layout)


def strided(kind, array, dtype=None):
    """Returns the same values as a part of a larger array of NaN or garbage, with gaps in all dimensions but the last."""
    array = numpy.asarray(array)
    large = numpy.full([2 * size + 1 for size in array.shape[:-1]] + [array.shape[-1] + 24], math.nan)
    if array.dtype.kind == "i":
        large = numpy.full(large.shape, 2147480000, array.dtype)
    part = tuple([slice(1, None, 2)] * (array.ndim - 1) + [slice(8, array.shape[-1] + 8)])
    large[part] = array
    return kind.array(large, dtype)[part]


# ---- Comparison -----------------------------------------------------------------------------------------------------

DECODE_OUT = (8e-4, 2.01 / 128, 5e-6)
SPARSE_OUT = (1e-3, 2.01 / 128, 5e-6)
FP8_OUT = (3e-3, 4.01 / 128, 2e-4)
DECODE_LSE = (1e-6, 8.01 / 65536, 1e-7)
FP8_LSE = (1e-3, 8.01 / 65536, 1e-7)  # scales may be applied after the products
EXACT_FP32 = (1e-6, 1e-5, 1e-9)  # a merge of fp32 parts


def check_close(name, values, reference, tolerance):
    """Checks values by the rules of docs/semantics.md, "Tolerances"."""
    absolute, relative, cosine = tolerance
    assert values.shape == reference.shape, f"{name}: shape is {values.shape}, must be {reference.shape}"
    finite = numpy.isfinite(values) & numpy.isfinite(reference)
    special = (values == reference) | (numpy.isnan(values) & numpy.isnan(reference))
    assert numpy.all(finite | special), f"{name}: infinities or NaN differ at {numpy.argwhere(~(finite | special))[:3]}"
    a, b = values[finite], reference[finite]
    off = numpy.abs(a - b)
    wrong = (off >= absolute) & (off >= relative * numpy.abs(b))
    assert not numpy.any(wrong), f"{name}: {numpy.sum(wrong)} of {off.size} are off, by up to {numpy.max(off)}"
    if numpy.sum(b * b) >= 1e-12:
        difference = 1 - 2 * numpy.sum(a * b) / numpy.sum(a * a + b * b)
        assert difference < cosine, f"{name}: cosine difference is {difference}, must be below {cosine}"


def check_decode(kind, got, expected, tolerance=DECODE_OUT, of_lse=DECODE_LSE):
    """Checks results of a decode call against (out, lse), types included. `tolerance` is that of out."""
    out, lse = got
    assert kind.is_one(out) and kind.is_one(lse)
    assert (kind.dtype_name(out), kind.dtype_name(lse)) == (kind.element, "float32")
    check_close("out", kind.float64(out), expected[0], tolerance)
    check_close("lse", kind.float64(lse), expected[1], of_lse)


def check_fp8(kind, got, expected):
    """Checks results of FP8 products. A CPU multiplies bf16 values of the quantised inputs."""
    check_decode(kind, got, expected, *(() if kind.device == "cpu" else (FP8_OUT, FP8_LSE)))

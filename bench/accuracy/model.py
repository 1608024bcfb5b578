# SPDX-License-Identifier: MIT
"""Inputs, the exact result, and a model of dense decode over FP8 caches: each step alone, and all steps of a mode together."""

import functools
import math

import numpy

D, D_V, GROUP = 576, 512, 128
ROWS = 4  # per draw
KEYS = [1 << n for n in range(10, 18)]
SEED = 26
BLOCK = 8192  # keys whose products are in memory at once


def draws_of(keys):
    """Number of draws of all inputs: heavy tails differ from draw to draw."""
    return min(8, max(2, 16384 // keys))


# ---- Inputs -----------------------------------------------------------------------------------------------------------


def gaussian(random, keys):
    return random.standard_normal((keys, D)), 1 / math.sqrt(D)


def student(random, keys):
    return random.standard_t(5, (keys, D)) / math.sqrt(5 / 3), 1 / math.sqrt(D)


def outliers(random, keys):
    """One channel of 72 is 32 times as large: seven latent ones and one of RoPE."""
    size = numpy.where(numpy.arange(D) % 72 == 36, 32.0, 1.0)
    return random.standard_normal((keys, D)) * size, 1 / math.sqrt((size**2).sum())


def steep(random, keys):
    return random.standard_normal((keys, D)), 4 / math.sqrt(D)


def one_signed(random, keys):
    k = numpy.clip(random.normal(0, 0.3, (keys, D)), -0.875, 0.875)
    k[:, :D_V] = random.uniform(0.25, 0.484375, (keys, D_V))
    return k, 1 / 256


DISTRIBUTIONS = {
    "gaussian": (gaussian, "Gaussian"),
    "student": (student, "Student t, 5 degrees of freedom"),
    "outliers": (outliers, "Gaussian, 8 channels 32 times as large"),
    "steep": (steep, "Gaussian, scores 4 times as far apart"),
    "one_signed": (one_signed, "V of one sign, keys that weigh alike"),
}
"""name: (k and softmax_scale, words)."""


class Problem:
    """ROWS rows of queries and `keys` keys in fp32, with the exact result and caches of the keys."""

    def __init__(self, distribution, keys, draw):
        random = numpy.random.default_rng([SEED, list(DISTRIBUTIONS).index(distribution), keys, draw])
        k, self.scale = DISTRIBUTIONS[distribution][0](random, keys)
        self.k = fp32(k)
        self.q = fp32(random.standard_normal((ROWS, D)))
        self.v = self.k[:, :D_V]
        self.s = self.scale * (self.q @ self.k.T)
        self.p, self.sum, self.lse = weights(self.s)
        self.out = self.p @ self.v / self.sum

    @functools.cached_property
    def caches(self):
        return Cache576(self.k), Cache656(self.k)

    @functools.cached_property
    def cut_scores(self):
        """Returns scores of each cache with e4m3 queries, summed as tensor cores do."""
        return [self.scores(cache, e4m3_products) for cache in self.caches]

    def scores(self, cache, products):
        q, scale = cache.queries(self.q)
        return self.scale * cache.scores(q, scale, products)


def weights(s):
    """Returns exp(s − largest), their sum, and lse."""
    largest = s.max(axis=1, keepdims=True)
    p = numpy.exp(s - largest)
    total = p.sum(axis=1, keepdims=True)
    return p, total, numpy.log(total) + largest


# ---- Formats: docs/semantics.md, "Cache formats" -------------------------------------------------------------------------


def power_of_two(x):
    """Returns the largest power of two not above x, for fp32 or double without subnormals."""
    if x.dtype == numpy.float32:
        return (x.view(numpy.uint32) & numpy.uint32(0x7F800000)).view(numpy.float32)
    return (x.view(numpy.uint64) & numpy.uint64(0x7FF << 52)).view(numpy.float64)


def nearest(x, digits, least, most):
    """Rounds to `digits` binary digits after the first, ties to even; `least` is the smallest normal number."""
    step = power_of_two(numpy.maximum(numpy.abs(x), least))
    step *= 2.0**-digits
    rounded = x / step
    numpy.rint(rounded, out=rounded)
    rounded *= step
    return numpy.clip(rounded, -most, most, out=rounded)


def e4m3(x):
    return nearest(x, 3, 2.0**-6, 448.0)


def bf16(x):
    return nearest(x, 7, 2.0**-126, math.inf)


def fp16(x):
    return nearest(x, 10, 2.0**-14, 65504.0)


def fp32(x):
    return x.astype(numpy.float32).astype(numpy.float64)


def scale_576(k):
    return float(fp32(numpy.abs(k).max() / 448))


class Cache576:
    """A cache with 576 e4m3 codes a token and one scale."""

    name = "FP8_576"

    def __init__(self, k):
        self.scale = scale_576(k)
        self.codes = e4m3(fp32(k / self.scale))
        self.values = self.codes * self.scale

    def queries(self, q):
        """Returns the codes, and the scale of each row."""
        scale = fp32(numpy.abs(q).max(axis=1, keepdims=True) / 448)
        return e4m3(fp32(q / scale)), scale

    def scores(self, q, scale, products):
        return products(q, self.codes.T) * (scale * self.scale)


class Cache656:
    """A cache with 512 codes, a scale per 128 of them, and 64 RoPE values in bf16 a token."""

    name = "FP8_656"

    def __init__(self, k):
        groups = k[:, :D_V].reshape(len(k), D_V // GROUP, GROUP)
        amax = numpy.abs(groups).max(axis=2, keepdims=True)
        self.scale = numpy.exp2(numpy.ceil(numpy.log2(numpy.maximum(amax / 448, 1e-4))))
        codes = e4m3(groups / self.scale)
        self.codes = codes.reshape(len(k), D_V)
        self.values = numpy.concatenate([(codes * self.scale).reshape(len(k), D_V), bf16(k[:, D_V:])], axis=1)

    def queries(self, q):
        scale = fp32(numpy.abs(q[:, :D_V]).max(axis=1, keepdims=True) / 448)
        return numpy.concatenate([e4m3(fp32(q[:, :D_V] / scale)), bf16(q[:, D_V:])], axis=1), scale

    def scores(self, q, scale, products):
        s = numpy.zeros((len(q), len(self.codes)))
        for i in range(D_V // GROUP):
            part = slice(i * GROUP, (i + 1) * GROUP)
            s += products(q[:, part], self.codes[:, part].T) * self.scale[:, i].T
        return s * scale + q[:, D_V:] @ self.values[:, D_V:].T


# ---- Sums on tensor cores ---------------------------------------------------------------------------------------------


def cut_off(x, unit):
    """Returns x / unit, truncated towards zero."""
    return numpy.trunc(x / unit)


def summed(a, b, group, digits, of_sum, dtype):
    """Multiplies a [rows, n] by b [n, columns]. A group of terms and the sum so far are truncated at 2^-digits of the power of
    two in the largest of them, and added; the result keeps `of_sum` digits after the first (None: all). `dtype` represents all of
    this exactly."""
    a, b = a.astype(dtype), b.astype(dtype)
    total = numpy.zeros((len(a), b.shape[1]), dtype)
    for first in range(0, a.shape[1], group):
        terms = a[:, first : first + group, None] * b[first : first + group]
        largest = numpy.maximum(numpy.abs(terms).max(axis=1), numpy.abs(total))
        unit = unit_of(largest, digits)
        total = (cut_off(terms, unit[:, None]).sum(axis=1) + cut_off(total, unit)) * unit
        if of_sum is not None:
            unit = unit_of(numpy.abs(total), of_sum)
            total = cut_off(total, unit) * unit
    return total.astype(numpy.float64)


def unit_of(largest, digits):
    least = largest.dtype.type(1e-30)  # if everything is 0
    return power_of_two(numpy.maximum(largest, least)) * largest.dtype.type(2.0**-digits)


def by_columns(a, b, *how):
    blocks = [summed(a, b[:, first : first + BLOCK], *how) for first in range(0, b.shape[1], BLOCK)]
    return numpy.concatenate(blocks, axis=1)


def e4m3_products(a, b):
    """Multiplies as Hopper does: 32 terms and the sum so far are truncated at 2^-13 of the largest."""
    return by_columns(a, b, 32, 13, None, numpy.float32)


def fp16_products(a, b):
    """Multiplies fp16 or bf16 as Hopper does, with sums in fp32."""
    return by_columns(a, b, 16, 25, 23, numpy.float64)


def exact_products(a, b):
    return a @ b


# ---- What is computed -------------------------------------------------------------------------------------------------


def sources(x):
    """Yields (name, results) of each step alone; results are (out, exact out) or (out, exact out, lse, exact lse)."""

    def with_keys(k):
        p, total, lse = weights(x.scale * (x.q @ k.T))
        return p @ k[:, :D_V] / total, x.out, lse, x.lse

    def with_scores(s, exact):
        p, total, lse = weights(s)
        p_exact, total_exact, lse_exact = weights(exact)
        return p @ x.v / total, p_exact @ x.v / total_exact, lse, lse_exact

    def with_weights(p):
        return p @ x.v / x.sum, x.out

    for cache, cut in zip(x.caches, x.cut_scores):
        yield f"cache {cache.name}", with_keys(cache.values)
        yield f"sums of S e4m3 {cache.name}", with_scores(cut, x.scores(cache, exact_products))
    for name, q in (("q e4m3", numpy.multiply(*x.caches[0].queries(x.q))), ("q bf16", bf16(x.q))):
        yield name, with_scores(x.scale * (q @ x.k.T), x.s)
    for name, convert in (("P e4m3", e4m3), ("P bf16", bf16), ("P fp16", fp16)):
        yield name, with_weights(convert(x.p))
    v = x.caches[0].codes[:, :D_V]
    for name, p, products in (("e4m3", e4m3(x.p), e4m3_products), ("fp16", fp16(x.p), fp16_products)):
        yield f"sums of O {name}", (products(p, v) / x.sum, p @ v / x.sum)
    yield "out bf16", (bf16(x.out), x.out)


def modes(x):
    """Yields (name, results) of all steps together; the name has the mode and the cache."""
    of_bf16 = [("BF16", bf16(x.k), 1.0)]
    for cache in x.caches:  # the scale of FP8_576 multiplies scores and results
        exact = cache.name == "FP8_576"
        of_bf16.append((cache.name, *((cache.codes, cache.scale) if exact else (bf16(cache.values), 1.0))))
    for name, values, scale in of_bf16:
        p, total, lse = weights(x.scale * scale * (bf16(x.q) @ values.T))
        yield f"bf16 {name}", (bf16(fp16_products(bf16(p), values[:, :D_V]) * scale / total), x.out, lse, x.lse)
    for cache, cut in zip(x.caches, x.cut_scores):
        p, total, lse = weights(cut)
        v, scale = (
            (cache.codes[:, :D_V], cache.scale) if cache.name == "FP8_576" else (fp16(cache.values[:, :D_V]), 1.0)
        )
        yield f"fp8 {cache.name}", (bf16(fp16_products(fp16(p), v) * scale / total), x.out, lse, x.lse)
        if cache.name == "FP8_576":
            yield f"all-e4m3 {cache.name}", (bf16(e4m3_products(e4m3(p), v) * scale / total), x.out, lse, x.lse)


OF_MODEL = {"source": sources, "mode": modes}


def errors(results):
    """Returns the errors of the results of all draws, by their names in the record."""
    out, exact_out, *of_lse = (numpy.concatenate(parts) for parts in zip(*results))
    cross, square = (out * exact_out).sum(), (exact_out**2).sum()
    found = dict(
        out=math.sqrt(((out - exact_out) ** 2).sum() / square),
        cosine=1 - 2 * cross / ((out**2).sum() + square),
        bias=cross / square - 1,
    )
    if of_lse:
        found["lse"] = numpy.abs(of_lse[0] - of_lse[1]).mean()
    return {name: float(f"{value:.4g}") for name, value in found.items()}


def lines_of(distribution, keys, kinds, more):
    """Yields the lines of the record for each kind and the results of its function."""
    results = {}
    for draw in range(draws_of(keys)):
        x = Problem(distribution, keys, draw)
        for kind, function in kinds.items():
            for name, result in function(x):
                results.setdefault((kind, name), []).append(result)
    of_problem = dict(distribution=distribution, keys=keys, rows=ROWS * draws_of(keys), seed=SEED)
    for (kind, name), found in results.items():
        yield {**of_problem, "kind": kind, "name": name, **more, **errors(found)}

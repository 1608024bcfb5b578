# SPDX-License-Identifier: MIT
"""Makes pages of tokens in every cache format, and the values that their bytes represent: docs/semantics.md, "Cache formats"."""

from __future__ import annotations

import math

import numpy

D_QK = {656: 576, 584: 512, 576: 576}
"""FP8 formats are named by the bytes of a token."""


def e4m3(code):
    """Returns the value of a byte."""
    exponent, mantissa = code >> 3 & 15, code & 7
    value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if code & 128 else value


E4M3 = numpy.array([math.nan if code & 127 == 127 else e4m3(code) for code in range(256)])


def bf16_bits(values):
    """Returns the bits of values that bf16 holds; others are truncated."""
    return (numpy.asarray(values, numpy.float32).view(numpy.uint32) >> 16).astype(numpy.uint16)


def of_bf16_bits(bits):
    return numpy.left_shift(bits, 16, dtype=numpy.uint32).view(numpy.float32)


def nearest_bf16(values):
    """Rounds finite values to bf16, to nearest even."""
    bits = numpy.asarray(values, numpy.float32).view(numpy.uint32)
    return of_bf16_bits(((bits + (bits >> 16 & 1) + numpy.uint32(0x7FFF)) >> 16).astype(numpy.uint16))


_MAGNITUDES = E4M3[:127]
_BETWEEN = (_MAGNITUDES[1:] + _MAGNITUDES[:-1]) / 2


def nearest_e4m3(values):
    """Rounds finite values to values of e4m3 codes, to nearest even, saturated at 448."""
    magnitudes = numpy.abs(values)
    codes = numpy.searchsorted(_BETWEEN, magnitudes)
    half_way = magnitudes == _BETWEEN[numpy.minimum(codes, len(_BETWEEN) - 1)]
    return numpy.copysign(_MAGNITUDES[codes + (half_way & (codes % 2 == 1))], values)


def of_codes(codes, scale):
    """Returns the values of codes with one scale; None stands for 1."""
    return nearest_bf16(E4M3[codes].astype(numpy.float32) * numpy.float32(scale or 1)).astype(float)


def quantised(queries, layout):
    """Returns bf16 queries as FP8 products quantise them, over a cache of so many bytes a token (docs/semantics.md, "FP8
    products")."""
    queries = numpy.asarray(queries, numpy.float32)
    first, rest = numpy.split(queries, [{576: 576, 656: 512}[layout]], axis=-1)
    scale = numpy.max(numpy.abs(first), axis=-1, keepdims=True) / numpy.float32(448)
    scale[scale == 0] = 1
    worth = nearest_bf16(nearest_e4m3(first / scale).astype(numpy.float32) * scale)
    return numpy.concatenate([worth, rest], axis=-1).astype(float)


def random_codes(random, shape, scale):
    """Draws codes whose values with the scale, or with scales of about 2^-10, are tenths; None stands for 1."""
    most = 0x20 if scale is None else 0x70
    return (random.integers(0, most, shape) | random.integers(0, 2, shape) << 7).astype(numpy.uint8)


E2M1 = numpy.array([sign * value for sign in (1, -1) for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)])

NAMED = {  # formats of 512 values that are all codes: bytes of a token's codes and of its scales, values that share one, in pages
    "FP8_528": (512, 16, 32, False),
    "FP8_528_SPLIT": (512, 16, 32, True),
    "FP4_288": (256, 32, 16, False),
    "FP4_288_SPLIT": (256, 32, 16, True),
    "FP8_528_F32": (512, 16, 128, False),
}


def named_pages(random, name, pages, page_size):
    """Pages of random tokens of a format, and the values of the tokens, which are tenths."""
    of_codes_, of_scales, group, split = NAMED[name]
    slots, groups = pages * page_size, 512 // group
    if name.startswith("FP4"):
        code_bytes = random.integers(0, 256, (slots, 256)).astype(numpy.uint8)
        scale_bytes = random.integers(0x04, 0x18, (slots, groups)).astype(numpy.uint8)
        codes, scales = (
            E2M1[numpy.stack([code_bytes & 15, code_bytes >> 4], axis=2).reshape(slots, 512)],
            E4M3[scale_bytes],
        )
    else:
        code_bytes = random_codes(random, (slots, 512), 1)
        exponents = random.integers(-11, -8, (slots, groups))
        codes, scales = E4M3[code_bytes], 2.0**exponents
        scale_bytes = (exponents + 127).astype(numpy.uint8)
        if name == "FP8_528_F32":
            scales = (scales * random.uniform(0.5, 1, scales.shape)).astype(numpy.float32)
            scale_bytes = scales.view(numpy.uint8).reshape(slots, 16)
    values = nearest_bf16(codes.astype(numpy.float32) * numpy.repeat(scales, group, axis=1).astype(numpy.float32))
    parts = code_bytes, scale_bytes
    if split:
        parts = tuple(part.reshape(pages, page_size * part.shape[1]) for part in parts)
    memory = numpy.concatenate(parts, axis=1).reshape(pages, page_size, 1, of_codes_ + of_scales)
    return memory, values.astype(float)


class Cache:
    """Pages of tokens of one format, with their `values`. Every `used` slot holds a key (None: all are used); the others are NaN,
    except in a layout with a name. `scale` is that of a cache of 576 bytes a token; None stands for 1."""

    def __init__(self, random, layout, pages, page_size, d, used=None, scale=None):
        self.layout, self.pages, self.page_size = layout, pages, page_size
        slots = pages * page_size
        if layout == "plain":
            self.memory = numpy.clip(random.normal(0, 0.1, (pages, page_size, 1, d)), -1, 1).astype(numpy.float32)
            return
        if layout in NAMED:
            self.memory, self.values = named_pages(random, layout, pages, page_size)
            return
        unused = numpy.zeros(slots, bool) if used is None else ~used
        nope, group = {656: (512, 128), 584: (448, 64), 576: (576, 576)}[layout]
        codes = random_codes(random, (slots, nope), scale if layout == 576 else 1)
        code_bytes = codes.copy()
        if layout == 576:
            self.values = E4M3[codes] * float(numpy.float32(scale or 1))
            code_bytes[unused] = 255
            self.memory = code_bytes.reshape(pages, page_size, 1, 576)
            return
        exponents = random.integers(-11, -8, (slots, nope // group))
        rope = numpy.clip(random.normal(0, 0.1, (slots, 64)), -1, 1).astype(numpy.float32)
        bits = bf16_bits(rope)
        scales = numpy.repeat(2.0**exponents, group, axis=1)
        self.values = numpy.concatenate([E4M3[codes] * scales, of_bf16_bits(bits)], axis=1)
        rope_bytes = bits.view(numpy.uint8).reshape(slots, 128)
        if layout == 656:
            scale_bytes = (2.0**exponents).astype(numpy.float32).view(numpy.uint8).reshape(slots, 16)
            tokens = numpy.concatenate([code_bytes, scale_bytes, rope_bytes], axis=1)
            tokens[unused] = 255
            self.memory = tokens.reshape(pages, page_size, 1, 656)
        else:
            tokens = numpy.concatenate([code_bytes, rope_bytes], axis=1)
            scale_bytes = numpy.full((slots, 8), 255, numpy.uint8)
            scale_bytes[:, :7] = exponents + 127
            tokens[unused] = scale_bytes[unused] = 255
            parts = [tokens.reshape(pages, page_size * 576), scale_bytes.reshape(pages, page_size * 8)]
            self.memory = numpy.concatenate(parts, axis=1).reshape(pages, page_size, 1, 584)

    def array(self, kind):
        return kind.array(self.memory, None if self.layout == "plain" else "uint8")

    def keys(self, kind, slots):
        """Returns keys in double precision, as a call with this kind of array reads them."""
        if self.layout != "plain":
            return self.values[slots]
        return kind.float64(self.array(kind)).reshape(-1, self.memory.shape[-1])[slots]

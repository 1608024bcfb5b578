#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Computes the RMS norm of some tokens as docs/semantics.md ("Cache append") defines it and prints, for each, the bits of the sum
of squares, of the factor and the digest (FNV-1a, 64 bits) of the values. It shares nothing with src/: sums are written again in
the order of the document, in Python's doubles. Run it as
    python3 tests/unit/golden/norm.py
test_new_token draws the same values and compares these numbers with the library's.
"""
import math
import struct

TOKENS = 6
EPS = [0.0, 1e-6, 1e-5, 0.5, 1e-12, 1e-3]


def fp32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def bits(x, kind):
    return struct.unpack("<" + {"f": "I", "d": "Q"}[kind], struct.pack("<" + kind, x))[0]


def value(token, i, salt):
    """Exact in fp32: 24 bits, and a power of two that differs from value to value."""
    h = ((token * 512 + i) * 2 + salt + 1) * 2654435761 % 2**32
    g = (h ^ h >> 15) * 2246822519 % 2**32
    return ((g >> 8) - 2**23) * 2.0 ** (-23 + (h >> 4) % (1 + 6 * token) - 3 * token)


def sum_of_squares(x):
    sums = []
    for i in range(0, 512, 8):
        a, b, c, d, e, f, g, h = (v * v for v in x[i : i + 8])
        sums.append((((a + b) + c) + d) + (((e + f) + g) + h))
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [sums[i] + sums[i + half] for i in range(half)]
    return sums[0]


def digest(words):
    state = 0xCBF29CE484222325
    for word in words:
        for byte in struct.pack("<I", word):
            state = (state ^ byte) * 0x100000001B3 % 2**64
    return state


for token in range(TOKENS):
    x = [value(token, i, 0) for i in range(512)]
    w = [value(token, i, 1) for i in range(512)]
    total = sum_of_squares(x)
    factor = fp32(1.0 / math.sqrt(total / 512 + fp32(EPS[token])))
    y = [fp32(fp32(a * factor) * b) for a, b in zip(x, w)]
    print(
        f"{{{EPS[token]}f, {bits(total, 'd'):#018x}, {bits(factor, 'f'):#010x}, {digest(bits(v, 'f') for v in y):#018x}}},"
    )

#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Makes one page of two tokens in each cache layout, byte by byte, and prints its size and digest (FNV-1a, 64 bits). It shares
nothing with src/: numbers are exact fractions, a value's code is found by a search of all codes, and the layouts are written
again from docs/semantics.md ("Cache formats"). Run it as
    python3 tests/unit/golden/kvformat.py [--bytes]
--bytes prints the pages too. test_kvformat draws the same values and compares the digests with those of the library's pages.
"""
import bisect
import struct
import sys
from fractions import Fraction

SLOTS = 2


def value(slot, i):
    """Exact in fp32: 17 bits, and a power of two that differs from one group of 64 to the next."""
    h = (slot * 576 + i + 1) * 2654435761 % 2**32
    return Fraction((h >> 8 & 0xFFFF) - 32768, 32768) * Fraction(2) ** ((i // 64 * 5 + slot * 3) % 17 - 8)


def codes(mantissa_bits, bias, count):
    one = 2**mantissa_bits
    return [
        Fraction(c % one + (one if c >= one else 0)) * Fraction(2) ** (max(c // one, 1) - bias - mantissa_bits)
        for c in range(count)
    ]


BF16 = codes(7, 127, 0x7F80)
FP16 = codes(10, 15, 0x7C00)
E4M3 = codes(3, 7, 0x7F)
E2M1 = codes(1, 1, 8)


def nearest(table, x):
    magnitude = abs(x)
    above = bisect.bisect_left(table, magnitude)
    if above == len(table):
        above -= 1  # saturates; no value here is beyond bf16 or fp16
    code = above
    if above and table[above] != magnitude:
        up, down = table[above] - magnitude, magnitude - table[above - 1]
        if down < up or (down == up and above % 2):
            code = above - 1
    return code, x < 0


def two_bytes(table, x):
    code, negative = nearest(table, x)
    return struct.pack("<H", code | (0x8000 if negative else 0))


def one_byte(x):
    code, negative = nearest(E4M3, x)
    return bytes([code | (0x80 if negative else 0)])


def exponent_of_scale(group):
    """The least k with 2^k >= 1e-4 and 448 · 2^k >= the largest magnitude."""
    k = -20
    while Fraction(2) ** k < Fraction(1, 10000) or 448 * Fraction(2) ** k < max(abs(x) for x in group):
        k += 1
    return k


def quantised(values, k):
    return b"".join(one_byte(x / Fraction(2) ** k) for x in values)


def plain(table):
    return b"".join(two_bytes(table, value(s, i)) for s in range(SLOTS) for i in range(576))


def fp8_576():
    return b"".join(quantised([value(s, i) for i in range(576)], -3) for s in range(SLOTS))


def groups_of(slot, size, count=512):
    return [[value(slot, first + i) for i in range(size)] for first in range(0, count, size)]


def by_tokens(parts, split):
    """Codes, scales and what follows them: token after token, or all tokens of the page before all scales."""
    if split:
        return b"".join(c + r for c, _, r in parts) + b"".join(s for _, s, _ in parts)
    return b"".join(c + s + r for c, s, r in parts)


def f32(exponents):
    return b"".join(struct.pack("<f", 2.0**k) for k in exponents)


def ue8m0(exponents):
    return bytes(k + 127 for k in exponents)


def fp8(size, scales_of, count=512, split=False, rope=False, pad=b""):
    """`count` values in groups of `size`, then with rope 64 in bf16."""
    parts = []
    for s in range(SLOTS):
        groups = groups_of(s, size, count)
        exponents = [exponent_of_scale(g) for g in groups]
        behind = b"".join(two_bytes(BF16, value(s, count + i)) for i in range(64 if rope else 0))
        codes_of_token = b"".join(quantised(g, k) for g, k in zip(groups, exponents))
        parts.append((codes_of_token, scales_of(exponents) + pad, behind))
    return by_tokens(parts, split)


def fp4_288(split):
    parts = []
    for s in range(SLOTS):
        nibbles, scales = [], b""
        for group in groups_of(s, 16):
            wanted = min(max(max(abs(x) for x in group) / 6, Fraction(1, 512)), Fraction(448))
            code, _ = nearest(E4M3, wanted)
            scales += bytes([code])
            for x in group:
                magnitude, negative = nearest(E2M1, x / E4M3[code])
                nibbles.append(magnitude | (8 if negative else 0))
        parts.append((bytes(a | b << 4 for a, b in zip(nibbles[::2], nibbles[1::2])), scales, b""))
    return by_tokens(parts, split)


def digest(page):
    h = 0xCBF29CE484222325
    for byte in page:
        h = (h ^ byte) * 0x100000001B3 % 2**64
    return h


if __name__ == "__main__":
    for name, page in (
        ("BF16", plain(BF16)),
        ("FP16", plain(FP16)),
        ("FP8_656", fp8(128, f32, rope=True)),
        ("FP8_584", fp8(64, ue8m0, 448, split=True, rope=True, pad=b"\0")),
        ("FP8_576", fp8_576()),
        ("FP8_528", fp8(32, ue8m0)),
        ("FP8_528_SPLIT", fp8(32, ue8m0, split=True)),
        ("FP4_288", fp4_288(False)),
        ("FP4_288_SPLIT", fp4_288(True)),
        ("FP8_528_F32", fp8(128, f32)),
    ):
        print(name, len(page), hex(digest(page)))
        if "--bytes" in sys.argv:
            print(page.hex(" ", 48))

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


def fp8_656():
    page = b""
    for s in range(SLOTS):
        groups = [[value(s, 128 * g + i) for i in range(128)] for g in range(4)]
        scales = [exponent_of_scale(g) for g in groups]
        page += b"".join(quantised(g, k) for g, k in zip(groups, scales))
        page += b"".join(struct.pack("<f", 2.0**k) for k in scales)
        page += b"".join(two_bytes(BF16, value(s, 512 + i)) for i in range(64))
    return page


def fp8_584():
    tokens = scales = b""
    for s in range(SLOTS):
        groups = [[value(s, 64 * g + i) for i in range(64)] for g in range(7)]
        exponents = [exponent_of_scale(g) for g in groups]
        tokens += b"".join(quantised(g, k) for g, k in zip(groups, exponents))
        tokens += b"".join(two_bytes(BF16, value(s, 448 + i)) for i in range(64))
        scales += bytes(k + 127 for k in exponents) + b"\0"
    return tokens + scales


def fp8_576():
    return b"".join(quantised([value(s, i) for i in range(576)], -3) for s in range(SLOTS))


def groups_of(slot, size):
    return [[value(slot, first + i) for i in range(size)] for first in range(0, 512, size)]


def by_tokens(parts, split):
    """Codes and scales of each token: token after token, or all codes of the page before all scales."""
    return b"".join(c for c, _ in parts) + b"".join(s for _, s in parts) if split else b"".join(c + s for c, s in parts)


def fp8_528(split):
    parts = []
    for s in range(SLOTS):
        exponents = [exponent_of_scale(g) for g in groups_of(s, 32)]
        codes_of_token = b"".join(quantised(g, k) for g, k in zip(groups_of(s, 32), exponents))
        parts.append((codes_of_token, bytes(k + 127 for k in exponents)))
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
        parts.append((bytes(a | b << 4 for a, b in zip(nibbles[::2], nibbles[1::2])), scales))
    return by_tokens(parts, split)


def fp8_528_f32():
    parts = []
    for s in range(SLOTS):
        exponents = [exponent_of_scale(g) for g in groups_of(s, 128)]
        codes_of_token = b"".join(quantised(g, k) for g, k in zip(groups_of(s, 128), exponents))
        parts.append((codes_of_token, b"".join(struct.pack("<f", 2.0**k) for k in exponents)))
    return by_tokens(parts, False)


def digest(page):
    h = 0xCBF29CE484222325
    for byte in page:
        h = (h ^ byte) * 0x100000001B3 % 2**64
    return h


if __name__ == "__main__":
    for name, page in (
        ("BF16", plain(BF16)),
        ("FP16", plain(FP16)),
        ("FP8_656", fp8_656()),
        ("FP8_584", fp8_584()),
        ("FP8_576", fp8_576()),
        ("FP8_528", fp8_528(False)),
        ("FP8_528_SPLIT", fp8_528(True)),
        ("FP4_288", fp4_288(False)),
        ("FP4_288_SPLIT", fp4_288(True)),
        ("FP8_528_F32", fp8_528_f32()),
    ):
        print(name, len(page), hex(digest(page)))
        if "--bytes" in sys.argv:
            print(page.hex(" ", 48))

#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Prints keys of the lightning indexer: rows of values with the bytes that each format stores of them, bytes with their
values and with the bytes of another format, and rows with what the norms, RoPE and the Hadamard transform make of them.
It shares nothing with src/: numbers are exact fractions, a value's code is found by a search of all codes, fp32 is
rounded from the exact result of one step, and formats are written again from their description. Run it as
    python3 tests/unit/golden/indexformat.py > tests/unit/golden/indexformat.txt
test_indexformat reads that file. A record is a word and its arguments, then hexadecimal fields; a NaN of fp32 is
7fffffff.
"""
import bisect
import math
import struct
from fractions import Fraction

INF, NAN = math.inf, math.nan
FP8, FP8_UE8M0, FP4 = "FP8_132", "FP8_132_UE8M0", "FP4_68"


# ---- Numbers. A value is a Fraction, or -0.0, an infinity or a NaN as Python's float.


def power(k):
    return Fraction(2) ** k


def rounded(x, mantissa_bits, least, most):
    """The nearest number of a binary format, ties to even; `least` and `most` are exponents of normal numbers."""
    if not isinstance(x, Fraction) or x == 0:
        return x
    magnitude, exponent = abs(x), least
    if magnitude >= power(least):
        exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
        exponent -= power(exponent) > magnitude
    unit = power(exponent - mantissa_bits)
    magnitude = round(magnitude / unit) * unit  # Python rounds ties to even
    if magnitude >= power(most + 1):
        return INF if x > 0 else -INF
    return magnitude if x > 0 else -magnitude if magnitude else -0.0


def fp32(x):
    return rounded(x, 23, -126, 127)


def bf16(x):
    return rounded(x, 7, -126, 127)


def plain(x):
    """As Python's float, which holds every fp32."""
    return float(x)


def negative(x):
    return math.copysign(1, x) < 0


def exact(x):
    """From Python's float, exactly."""
    return Fraction(x) if math.isfinite(x) and (x or not negative(x)) else x


def bits(x):
    return 0x7FFFFFFF if math.isnan(x) else struct.unpack("<I", struct.pack("<f", plain(x)))[0]


def of_bits(u):
    return exact(struct.unpack("<f", struct.pack("<I", u))[0])


def two_of(operation, a, b):
    """One step in fp32: rounded from the exact result, or of infinities and zeros as Python's doubles have it."""
    a, b = plain(a), plain(b)
    special = operation(a, b)
    if math.isnan(special):
        return NAN  # positive
    if not math.isfinite(a) or not math.isfinite(b) or special == 0:
        return exact(special)
    return fp32(operation(Fraction(a), Fraction(b)))


def product(a, b):
    return two_of(lambda x, y: x * y, a, b)


def total(a, b):
    return two_of(lambda x, y: x + y, a, b)


def table(mantissa_bits, bias, count):
    one = 2**mantissa_bits
    return [
        Fraction(c % one + (one if c >= one else 0)) * power(max(c // one, 1) - bias - mantissa_bits)
        for c in range(count)
    ]


E4M3 = table(3, 7, 0x7F)
E2M1 = table(1, 1, 8)


def code_of(values, sign, x):
    """The nearest code; ties go to the even one; saturates."""
    magnitude = abs(x)
    above = bisect.bisect_left(values, magnitude)
    if above == len(values):
        above -= 1
    elif above and values[above] != magnitude:
        up, down = values[above] - magnitude, magnitude - values[above - 1]
        above -= down < up or (down == up and above % 2)
    return above | (sign if negative(x) else 0)


def quotient(x, scale):
    """x / scale in fp32; an infinity and a zero keep their sign."""
    if not isinstance(x, Fraction) or x == 0:
        return plain(x)
    return fp32(x / scale)


def of_e4m3(code):
    return NAN if code & 127 == 127 else signed(E4M3[code & 127], code & 128)


def of_e2m1(code):
    return signed(E2M1[code & 7], code & 8)


def signed(x, sign):
    return (-x if x else -0.0) if sign else x


# ---- Formats


def least_power(x):
    """The exponent of the least power of two that is not below x."""
    k = -150
    while power(k) < x:
        k += 1
    return k


def amax_of(values):
    return max([Fraction(0)] + [abs(v) for v in values if not math.isnan(v)])


def fp8_scale(values, floor, pow2):
    amax = amax_of(values)
    if amax == INF:
        return power(127)
    scale = max(fp32(max(Fraction(amax), floor) / 448), power(-126))
    return power(least_power(scale)) if pow2 else scale


def ue8m0(scale):
    """The byte of a power of two."""
    k = scale.numerator.bit_length() - scale.denominator.bit_length()
    assert power(k) == scale
    return k + 127


def scale_bytes(format, scale):
    return bytes([ue8m0(scale)] * 4) if format == FP8_UE8M0 else struct.pack("<f", plain(scale))


def quantised(format, values, floor, pow2):
    """Codes and scale of a key; a NaN is NAN or -NAN."""
    if format != FP4:
        scale = fp8_scale(values, floor, pow2 or format == FP8_UE8M0)
        codes = [
            (0xFF if negative(v) else 0x7F) if math.isnan(v) else code_of(E4M3, 0x80, quotient(v, scale))
            for v in values
        ]
        return bytes(codes), scale_bytes(format, scale)
    nibbles, scales = [], b""
    for first in range(0, len(values), 32):
        block = values[first : first + 32]
        if any(math.isnan(v) for v in block):
            nibbles += [0] * 32
            scales += b"\xff"
            continue
        amax = amax_of(block)
        k = 127 if amax == INF else least_power(fp32(max(amax, 6 * power(-126)) / 6))
        nibbles += [code_of(E2M1, 8, quotient(v, power(k))) for v in block]
        scales += bytes([k + 127])
    return bytes(a | b << 4 for a, b in zip(nibbles[::2], nibbles[1::2])), scales + bytes(4 - len(scales))


def scale_of(format, scale, i):
    if format == FP8:
        return of_bits(struct.unpack("<I", scale)[0])
    byte = scale[i // 32 if format == FP4 else 0]
    return NAN if byte == 255 else power(byte - 127)


def values_of(format, codes, scale):
    if format == FP4:
        numbers = [of_e2m1(n) for byte in codes for n in (byte & 15, byte >> 4)]
    else:
        numbers = [of_e4m3(c) for c in codes]
    return [product(n, scale_of(format, scale, i)) for i, n in enumerate(numbers)]


def is_power(x):
    return isinstance(x, Fraction) and x > 0 and power(least_power(x)) == x


def converted(source, codes, scale, to, floor, pow2):
    by = scale_of(source, scale, 0)
    if source == to == FP4:
        return codes, scale[: len(codes) // 16] + bytes(4 - len(codes) // 16)
    if FP4 not in (source, to):
        if is_power(by) and (to == FP8 or by >= power(-127)):
            return codes, scale_bytes(to, by)
    values = [NAN if math.isnan(v) else v for v in values_of(source, codes, scale)]
    return quantised(to, values, floor, pow2)


# ---- Rows


def drawn(seed, i):
    h = (seed * 1024 + i + 1) * 2654435761 % 2**32
    return (h ^ h >> 15) * 2246822519 % 2**32


def number(seed, i, exponents=4):
    """24 bits times a power of two."""
    h = drawn(seed, i)
    return fp32(Fraction((h >> 8) - 2**23, 2**23) * power((h & 255) % exponents - exponents // 2))


def row(seed, d, exponents=4):
    return [bf16(number(seed, i, exponents)) for i in range(d)]


def in_order(values):
    sums = []
    for i in range(0, len(values), 8):
        a, b, c, d, e, f, g, h = values[i : i + 8]
        sums.append((((a + b) + c) + d) + (((e + f) + g) + h))
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [sums[i] + sums[i + half] for i in range(half)]
    return sums[0]


def factor_of(mean, eps):
    root = math.sqrt(mean + plain(eps))
    return fp32(exact(1.0 / root)) if root else INF


def layer_norm(x, weight, bias, eps):
    """The sum, that of the squared deviations, the factor, and the values before and after they are rounded."""
    numbers = [plain(v) for v in x]
    sum = in_order(numbers)
    mean = sum / len(x)
    squares = in_order([(v - mean) * (v - mean) for v in numbers])
    factor, mean = factor_of(squares / len(x), eps), fp32(exact(mean))
    values = [total(product(product(total(v, -mean), factor), w), b) for v, w, b in zip(x, weight, bias)]
    return hex64(sum), hex64(squares), hex32([factor]), hex32(values), hex16(map(bf16, values))


def rms_norm(x, weight, eps):
    squares = in_order([plain(v) * plain(v) for v in x])
    factor = factor_of(squares / len(x), eps)
    return hex64(squares), hex32([factor]), hex16(bf16(product(product(v, factor), w)) for v, w in zip(x, weight))


def rope(x, angles, halves):
    out = list(x)
    for i in range(32):
        a, b = (i, 32 + i) if halves else (2 * i, 2 * i + 1)
        cosine, sine = angles[i], angles[32 + i]
        out[a] = bf16(total(product(x[a], cosine), product(x[b], -sine)))
        out[b] = bf16(total(product(x[b], cosine), product(x[a], sine)))
    return out


def hadamard(x):
    d, stride = len(x), 1
    while stride < d:
        x = [total(x[i - stride], -x[i]) if i & stride else total(x[i], x[i + stride]) for i in range(d)]
        stride *= 2
    by = fp32(exact(1 / math.sqrt(d)))
    return hex32([by]), hex16(bf16(product(v, by)) for v in x)


# ---- Records


def show(name, *fields):
    """A record; lines have at most 110 columns."""
    line = name
    for field in fields:
        for word in field if isinstance(field, list) else [field]:
            if len(line) + 1 + len(word) > 110:
                print(line)
                line = word
            else:
                line += " " + word
    print(line)


def hex_bytes(data):
    return [data[i : i + 16].hex() for i in range(0, len(data), 16)]


def hex16(values):
    words = [f"{bits(v) >> 16:04x}" if not (math.isnan(v) and negative(v)) else "ffff" for v in values]
    return ["".join(words[i : i + 16]) for i in range(0, len(words), 16)]


def hex64(x):
    return struct.pack(">d", x).hex()


def hex32(values):
    words = [f"{bits(v):08x}" for v in values]
    return ["".join(words[i : i + 8]) for i in range(0, len(words), 8)]


def store_fp8(values, floor):
    """Codes and scale without scale_pow2, then with it, then the scale of FP8_132_UE8M0, whose codes are the same."""
    plain_codes, plain_scale = quantised(FP8, values, floor, False)
    codes, scale = quantised(FP8, values, floor, True)
    codes_of_ue8m0, ue8m0_scale = quantised(FP8_UE8M0, values, floor, False)
    assert codes == codes_of_ue8m0
    show(
        "store_fp8", str(len(values)), f"{bits(floor):08x}", hex16(values),
        hex_bytes(plain_codes), plain_scale.hex(), hex_bytes(codes), scale.hex(), ue8m0_scale.hex(),
    )  # fmt: skip


def store_fp4(values):
    codes, scale = quantised(FP4, values, FLOOR, True)
    show("store_fp4", str(len(values)), hex16(values), hex_bytes(codes), scale.hex())


def load(format, d, codes, scale):
    show("load", format, str(d), hex_bytes(codes), scale.hex(), hex32(values_of(format, codes, scale)))


def convert(source, d, codes, scale, to, floor, pow2):
    c, s = converted(source, codes, scale, to, floor, pow2)
    show(
        "convert", source, to, str(d), str(int(pow2)), f"{bits(floor):08x}",
        hex_bytes(codes), scale.hex(), hex_bytes(c), s.hex(),
    )  # fmt: skip


def norms(x, weight, bias, eps):
    arguments = str(len(x)), f"{bits(eps):08x}", hex16(x), hex32(weight)
    show("layer_norm", *arguments, hex32(bias), *layer_norm(x, weight, bias, eps))
    show("rms_norm", *arguments, *rms_norm(x, weight, eps))


FLOOR, LOW = fp32(Fraction(1, 10**4)), fp32(Fraction(1, 10**10))


def after(x):
    """The next bf16."""
    return of_bits(bits(x) + 0x10000)


def before(x):
    return of_bits(bits(x) - 0x10000)


def rows_of_fp8(d):
    """Rows whose amax is 0, below the floor, a power of two times 448, next to one, infinite, or none."""
    zeros = [Fraction(0)] * d

    def with_amax(amax, at):
        return [bf16(v * amax / 8) for v in row(at, d)][: d - 1] + [-amax if at % 2 else amax]

    yield zeros, FLOOR
    yield [signed(v, i % 3 == 1) for i, v in enumerate(zeros)], Fraction(0)
    yield with_amax(bf16(FLOOR / 3), 1), FLOOR
    yield with_amax(bf16(FLOOR / 3), 2), LOW
    yield with_amax(after(bf16(FLOOR)), 3), FLOOR
    for at, amax in enumerate(
        (Fraction(448), before(Fraction(448)), after(Fraction(448)), Fraction(512), Fraction(7, 8))
    ):
        yield with_amax(amax, 4 + at), FLOOR
    yield with_amax(of_bits(0x7F7F0000), 9), FLOOR
    # Ties: multiples of half a unit of e4m3, with the scale 1 of the last value.
    yield [signed(power(k % 12 - 9) * Fraction(17 + k // 12 * 2, 16), k % 5 == 2) for k in range(d - 1)] + [
        Fraction(448)
    ], FLOOR
    yield [signed(Fraction(k + 1, 1024), k % 2) for k in range(d - 1)] + [Fraction(448)], FLOOR
    yield row(20, d, 24), FLOOR
    special = row(21, d)
    special[3], special[5], special[6] = NAN, -NAN, -0.0
    yield special, FLOOR
    special = row(22, d)
    special[0], special[1], special[2] = INF, -INF, before(of_bits(0x7F800000))
    yield special, FLOOR
    yield [NAN] * d, FLOOR
    # Subnormal numbers under the least scale.
    yield [of_bits((i * 3 % 128 << 16) | (0x80000000 if i % 7 == 3 else 0)) for i in range(d)], Fraction(0)


def rows_of_fp4(d):
    """Blocks of 32 in the same manner; the last of each has the amax."""
    for list_of_amax in (
        (Fraction(0), 6 * power(-126), before(6 * power(-126)), after(6 * power(-126))),
        (Fraction(6), after(Fraction(6)), before(Fraction(6)), Fraction(8)),
        (of_bits(0x7F7F0000), INF, 6 * power(-20), of_bits(0x00010000)),
        (6 * power(-126), Fraction(96), NAN, Fraction(1)),
        (6 * power(124), after(6 * power(124)), -NAN, 3 * power(-126)),
    ):
        blocks = []
        for g, amax in enumerate(list_of_amax):
            # Halves of a step are ties between two codes.
            steps = [signed(Fraction((i * 5 + g) % 25, 4), i % 3 == 1) for i in range(31)]
            by = amax / 6 if isinstance(amax, Fraction) else Fraction(1)
            blocks += [signed(bf16(abs(s) * by), negative(s)) for s in steps] + [
                amax if g % 2 else -amax if amax else -0.0
            ]
        for first in range(0, 128, d):
            yield blocks[first : first + d]
    yield row(31, d, 12)


def fp8_keys(d):
    """Keys with scales of many kinds; with d 128, every code with 2^-126, 1/3 and 2^127."""
    third = fp32(Fraction(1, 3))
    scales = [power(-126), power(127), fp32(Fraction(10**5, 7)), third, third, power(-126), power(127)]
    return [(bytes((n * d + i) % 256 for i in range(d)), scale) for n, scale in enumerate(scales)]


def fp4_keys(d):
    codes = bytes((i % 16) | ((i * 7 + i // 16) % 16) << 4 for i in range(d // 2))
    for scale in ((1, 254, 127, 100), (0, 255, 120, 130), (254, 1, 128, 127), (127, 126, 125, 124)):
        yield codes, bytes(scale[: d // 32]) + b"\xa5" * (4 - d // 32)  # what a reader must not read


def main():
    for d in (128, 64):
        for n, (values, floor) in enumerate(rows_of_fp8(d)):
            if d == 128 or n % 4 == 3:
                store_fp8(values, floor)
        for values in rows_of_fp4(d):
            store_fp4(values)
    for d in (128, 64):
        keys = fp8_keys(d)
        for codes, scale in keys if d == 128 else keys[:3]:
            load(FP8, d, codes, scale_bytes(FP8, scale))
        for codes, scale in keys[:2]:
            load(FP8_UE8M0, d, codes, scale_bytes(FP8_UE8M0, scale))
        for codes, scale in fp4_keys(d):
            load(FP4, d, codes, scale)
    # From FP8 to FP8: scales at the ends, those that are no powers of two, and those that no writer chooses.
    some = bytes((i * 37 + 5) % 256 for i in range(64))
    scales = [scale_bytes(FP8, scale).hex() for _, scale in fp8_keys(64)[:5]]
    unusual = ["0000c07f", "0000807f", "00000000", "000080bf", "00002000", "00004000", "01004000"]
    for scale in scales + unusual:
        for to, pow2 in ((FP8, False), (FP8, True), (FP8_UE8M0, False)):
            convert(FP8, 64, some, bytes.fromhex(scale), to, FLOOR, pow2)
    for byte in (0, 1, 254, 255):
        for to in (FP8, FP8_UE8M0):
            convert(FP8_UE8M0, 64, some, bytes([byte] * 4), to, FLOOR, False)
    codes, scale = fp8_keys(128)[3]
    convert(FP8, 128, codes, scale_bytes(FP8, scale), FP8_UE8M0, FLOOR, False)
    # To and from FP4.
    for d in (128, 64):
        for codes, scale in fp8_keys(d)[:4]:
            convert(FP8, d, codes, scale_bytes(FP8, scale), FP4, FLOOR, False)
        convert(FP8_UE8M0, d, (some + some[::-1])[:d], bytes([120] * 4), FP4, FLOOR, False)
        for codes, scale in fp4_keys(d):
            for to, pow2 in ((FP8, False), (FP8, True), (FP8_UE8M0, False), (FP4, False)):
                if d == 64 or to != FP8_UE8M0:
                    convert(FP4, d, codes, scale, to, FLOOR, pow2)
    for d in (128, 64):
        for n in range(4):
            eps = [Fraction(0), fp32(Fraction(1, 10**6)), fp32(Fraction(1, 10**3)), Fraction(1, 2)][n]
            x = row(40 + n, d, [1, 4, 58, 1][n])
            if n == 1:  # a large mean
                x = [bf16(200 + v / 8) for v in x]
            if n == 3:  # in double, three of four are lost one by one in a sum with the first, but not their sum
                x = [bf16(v if i % 4 == 0 else v * power(-54)) for i, v in enumerate(x)]
            weight, bias = ([number(50 + 2 * n + k, i) for i in range(d)] for k in (0, 1))
            norms(x, weight, bias, eps)
            x = row(70 + n, d, 1 + 6 * n)
            if n == 2:  # lost in a sum with one of them, not in their difference
                x[0], x[1] = power(30), power(30)
            if n == 3:
                x[5], x[9] = INF, -INF
            show("hadamard", str(d), hex16(x), *hadamard(x))
    weight, bias = ([number(60 + k, i) for i in range(64)] for k in (0, 1))
    for x, eps in ((3, 0), (3, fp32(Fraction(1, 10**6))), (0, 0)):  # 0 / 0 gives NaN
        norms([Fraction(x)] * 64, weight, bias, Fraction(eps))
    norms(row(41, 63) + [-INF], weight, bias, Fraction(1))
    for halves in (0, 1):
        for n in range(3):
            x = row(80 + n, 64, 1 + 8 * n)
            if n == 2:
                x[7], x[40] = INF, NAN
            turn = [0.0, 0.3 + halves, 77.0][n]
            angles = [turn * 10000.0 ** (-i / 32) for i in range(32)]
            angles = [fp32(exact(f(a))) for f in (math.cos, math.sin) for a in angles]
            show("rope", str(halves), hex16(x), hex32(angles), hex16(rope(x, angles, halves)))
    for n in range(16):
        w, scale, factor = (number(90 + k, n, 40) for k in range(3))
        scale = [scale, Fraction(1), INF, NAN][n % 7 if n % 7 < 4 else 0]
        weight = product(product(w, scale), factor)
        show("weight", f"{bits(w):08x}", f"{bits(scale):08x}", f"{bits(factor):08x}", f"{bits(weight):08x}")


if __name__ == "__main__":
    main()

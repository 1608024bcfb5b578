# SPDX-License-Identifier: MIT
"""The enumerations of the C interface, and the types of elements: their DLPack codes, and their names if the library has none."""

from __future__ import annotations

import enum
from typing import Optional


class Format(enum.IntEnum):
    """fmla_kv_format: the layout of a token in a cache; NONE: values of the array's own type."""

    NONE = 0
    BF16 = 1
    FP16 = 2
    FP8_656 = 3
    FP8_584 = 4
    FP8_576 = 5
    FP8_528 = 6
    FP8_528_SPLIT = 7
    FP4_288 = 8
    FP4_288_SPLIT = 9
    FP8_528_F32 = 10


class Products(enum.IntEnum):
    """How queries are multiplied with the keys of a cache of bytes: FMLA_PRODUCTS_…"""

    BF16 = 0
    FP8 = 1


FORMATS = {format_.name: format_.value for format_ in Format if format_}
FIRST_OF_BYTES = FORMATS["FP8_656"]
"""This format and all later ones are of bytes."""

KINDS = {"int": 0, "uint": 1, "float": 2, "bfloat": 4, "complex": 5}  # followed by the number of bits
_FROM_6 = """bool float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz
float8_e8m0fnu float6_e2m3fn float6_e3m2fn float4_e2m1fn"""
_ONE_SIZE = {name: code for code, name in enumerate(_FROM_6.split(), 6)}
_NOBODY_S = 128  # DLPack uses no code from here to 255
_others: dict[str, int] = {}


def dtype_word(code: int, bits: int) -> int:
    """Returns a DLPack dtype (code, bits, one lane) as the four bytes of fmla_dtype."""
    return code | bits << 8 | 1 << 16


def word_of(name: str, bits: int) -> int:
    """Returns the dtype_word of a type from its name, such as "bfloat16", and the bits between two elements. A type unknown to DLPack
    gets an unused code, so that it is refused and `name_of` returns its name. So does int4, whose elements lie 8 bits apart.
    """
    kind = name.rstrip("0123456789")
    code = KINDS.get(kind) if name == f"{kind}{bits}" else _ONE_SIZE.get(name)
    if code is None:
        code = _others.setdefault(name, min(_NOBODY_S + len(_others), 255))
    return dtype_word(code, bits & 255)


def name_of(code: int, bits: int) -> Optional[str]:
    """Returns the name of a type that the library knows only by its code, or None."""
    kind = next((kind for kind, known in KINDS.items() if known == code), None)
    if kind is not None:
        return f"{kind}{bits}"
    return next((name for names in (_ONE_SIZE, _others) for name, known in names.items() if known == code), None)


BYTES = ("uint8", "int8", "float8_e4m3fn")
"""The types that a cache of bytes, or codes, may have: raw bytes, or what the codes are."""
NOT_BYTES = {dtype_word(code, 8) for code in range(256)} - {word_of(name, 8) for name in BYTES}
"""The dtype_words of all other types of one byte. The library would take their bytes for those of e4m3."""

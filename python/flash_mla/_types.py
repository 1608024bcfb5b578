# SPDX-License-Identifier: MIT
"""The types of elements: their DLPack codes, and their names if the library has none."""

from __future__ import annotations

from typing import Optional

KINDS = {"int": 0, "uint": 1, "float": 2, "bfloat": 4, "complex": 5, "bool": 6}  # followed by the number of bits
_ONE_SIZE = {
    "float8_e3m4": 7,
    "float8_e4m3": 8,
    "float8_e4m3b11fnuz": 9,
    "float8_e4m3fn": 10,
    "float8_e4m3fnuz": 11,
    "float8_e5m2": 12,
    "float8_e5m2fnuz": 13,
    "float8_e8m0fnu": 14,
    "float6_e2m3fn": 15,
    "float6_e3m2fn": 16,
    "float4_e2m1fn": 17,
}
_NOBODY_S = 128  # DLPack uses no code from here to 255
_others: dict[str, int] = {}


def dtype_word(code: int, bits: int) -> int:
    """Returns a DLPack dtype (code, bits, one lane) as the four bytes of fmla_dtype."""
    return code | bits << 8 | 1 << 16


def word_of(name: str, bits: int) -> int:
    """Returns the dtype_word of a type from its name, such as "bfloat16". A type unknown to DLPack gets an unused code, so that the
    library refuses it and `name_of` returns its name."""
    kind = name.rstrip("0123456789")
    code = KINDS.get(kind) if kind in KINDS else _ONE_SIZE.get(name)
    if code is None:
        code = _others.setdefault(name, min(_NOBODY_S + len(_others), 255))
    return dtype_word(code, bits & 255)


def name_of(code: int, bits: int) -> Optional[str]:
    """Returns the name of a type that the library knows only by its code, or None."""
    if code in (KINDS["complex"], KINDS["bool"]):
        return f"complex{bits}" if code == KINDS["complex"] else "bool"
    return next((name for names in (_ONE_SIZE, _others) for name, known in names.items() if known == code), None)

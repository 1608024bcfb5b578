#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""python_structs.py - writes python/flash_mla/_argument_structs.py: the argument structs of src/operations.def in ctypes, and
the cache formats of each operation. Run it after a change there; tests/python/test_layout.py fails until then. With --print
it prints the file instead.
"""

import itertools
import pathlib
import re
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parents[1]
HEADING = '''# SPDX-License-Identifier: MIT
"""The argument struct and the cache formats of each operation, written by scripts/python_structs.py from src/operations.def: do
not edit it.
"""

from ctypes import Structure, c_char_p, c_float, c_int32, c_int64, c_size_t, c_void_p

from ._structs import Device, neighbours
'''
TYPES = {"TENSOR": "c_void_p", "POINTER": "c_void_p", "BYTES": "c_size_t", "TEXT": "c_char_p", "WIDE": "c_int64"}
TYPES.update(REAL="c_float", DEVICE="Device")  # all other kinds are numbers of 32 bits


def operations(text):
    """Returns {operation: [(type, member), …]}, the members in order."""
    found = {}
    for word, operation, member, kind in re.findall(r"^(TENSOR|OPTION)\((\w+), (\w+), (\w+)", text, re.MULTILINE):
        type_ = TYPES.get("TENSOR" if word == "TENSOR" else kind, "c_int32")
        found.setdefault(operation, [("c_size_t", "struct_size")]).append((type_, member))
    return found


def formats(text):
    """Returns {operation: (first, last)}, the names of the cache formats that it takes; 0 = none is the same as the first."""
    found = re.findall(r"^OPTION\((\w+), \w+, FORMAT, (?:0|FMLA_KV_(\w+)), FMLA_KV_(\w+)\)$", text, re.MULTILINE)
    return {operation: (first or "BF16", last) for operation, first, last in found}


def lines():
    text = (ROOT / "src" / "operations.def").read_text(encoding="utf-8")
    yield HEADING
    for operation, members in operations(text).items():
        yield f"\nclass fmla_{operation}_args(Structure):"
        yield "    _fields_ = ["
        for type_, group in itertools.groupby(members, key=lambda member: member[0]):
            for names in textwrap.wrap(" ".join(name for _, name in group), 80):
                yield f'        *neighbours({type_}, "{names}"),'
        yield "    ]\n"
    yield '\nARGUMENTS = {name[5:-5]: struct for name, struct in list(globals().items()) if name.startswith("fmla_")}'
    yield "FORMATS_OF = {"
    for operation, (first, last) in formats(text).items():
        yield f'    "{operation}": ("{first}", "{last}"),'
    yield '}\n"""The first and the last cache format of each operation."""'


def main():
    text = "\n".join(lines()) + "\n"
    if sys.argv[1:] == ["--print"]:
        sys.stdout.write(text)
    else:
        (ROOT / "python" / "flash_mla" / "_argument_structs.py").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

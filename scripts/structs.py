#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes what the Python package must know of the library: the members of every operation's argument struct, as
src/operations.def has them, and the library's name, from the version in the header.

    scripts/structs.py            writes python/flash_mla/_members.py
    scripts/structs.py --check    exits 1 where it differs, or where a C compiler ($CC, or cc) lays a struct of the package
                                  out otherwise
"""

import ctypes
import os
import pathlib
import re
import shlex
import subprocess
import sys
import types

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python" / "flash_mla"
WRITTEN = PACKAGE / "_members.py"
HEADER = (ROOT / "include" / "flashmla" / "flashmla.h").read_text()
HEAD = '''# SPDX-License-Identifier: MIT
"""Written by scripts/structs.py: the name of the library, as CMakeLists.txt makes it of the version in the header, and the members of
each operation's argument struct behind its size, in their order, from src/operations.def.
"""

SONAME = "libflashmla.so.%s"
MEMBERS = {
'''


def members():
    """The text of the module: runs of members of one kind."""
    major, minor = (re.search(rf"#define FMLA_VERSION_{part} (\d+)", HEADER)[1] for part in ("MAJOR", "MINOR"))
    text, runs = HEAD % (major if int(major) else f"0.{minor}"), []
    for line in (ROOT / "src" / "operations.def").read_text().splitlines():
        if found := re.match(r"OPERATION\((\w+), \w+\)$", line):
            text += f'    "{found[1]}": [\n'
        elif found := re.match(r"TENSOR\(\w+, (\w+), ()|OPTION\(\w+, (\w+), (\w+), ", line):
            name, kind = found[1] or found[3], found[4] or "TENSOR"
            if runs and runs[-1][0] == kind:
                runs[-1][1] += f" {name}"
            else:
                runs.append([kind, name])
        elif re.match(r"RANGES\(\w+\)$", line):
            text += "".join(f'        ("{kind}", "{names}"),\n' for kind, names in runs) + "    ],\n"
            runs = []
    return text + "}\n"


def structs():
    """{"fmla_tensor": its class} of all that the package has."""
    package = types.ModuleType("flash_mla")  # itself, it would open the library
    package.__path__ = [str(PACKAGE)]
    sys.modules["flash_mla"] = package
    from flash_mla import _structs

    found = {f"fmla_{operation}_args": struct for operation, struct in _structs.ARGUMENTS.items()}
    for name, struct in vars(_structs).items():
        if isinstance(struct, type) and struct.__module__ == _structs.__name__:
            found["fmla_" + re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower()] = struct
    return found


def kind_of(type_):
    """What a member is to C: 0 a pointer, 1 a struct, 2 a float, 3 a signed and 4 an unsigned integer."""
    if issubclass(type_, ctypes.Structure):
        return 1
    return {"P": 0, "z": 0, "f": 2}.get(type_._type_, 3 if type_._type_.islower() else 4)


KIND = """#include <flashmla/flashmla.h>
#define KIND(x) _Generic((x), fmla_device: 1, fmla_dtype: 1, float: 2, int32_t: 3, int64_t: 3, uint8_t: 4, uint16_t: 4, \\
    uint64_t: 4, default: 0)
"""


def assertions():
    """A C program that compiles where all structs are the package's, and the names that the header has for members beside them."""
    source, text = KIND, re.sub(r"/\*.*?\*/", "", HEADER, flags=re.S)
    for name, struct in structs().items():
        body = re.search(rf"typedef struct {name} {{(.*?)}} {name};", text, re.S)
        declared = [re.search(r"(\w+)\s*$", member)[1] for member in body[1].split(";")[:-1]] if body else None
        if declared != [member for member, _ in struct._fields_]:  # which sizes and offsets alone would not tell
            sys.exit(f"{name}: the header has {declared}, the package {[member for member, _ in struct._fields_]}")
        source += f'_Static_assert(sizeof({name}) == {ctypes.sizeof(struct)}, "size of {name}");\n'
        for member, type_ in struct._fields_:
            at, value = getattr(struct, member), f"(({name} *)0)->{member}"
            source += (
                f"_Static_assert(offsetof({name}, {member}) == {at.offset} && sizeof({value}) == {at.size} && "
                f'KIND({value}) == {kind_of(type_)}, "{name}.{member}");\n'
            )
    return source


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        if not WRITTEN.exists() or WRITTEN.read_text() != members():
            sys.exit(
                f"{WRITTEN.relative_to(ROOT)} is not what src/operations.def and the header say: run scripts/structs.py"
            )
        sys.dont_write_bytecode = True
        compiler = [*shlex.split(os.environ.get("CC") or "cc"), "-std=c11", "-fsyntax-only", f"-I{ROOT / 'include'}"]
        sys.exit(subprocess.run([*compiler, "-xc", "-"], input=assertions(), text=True).returncode)
    elif sys.argv[1:]:
        sys.exit(__doc__)
    else:
        WRITTEN.write_text(members())

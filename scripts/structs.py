#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes the members of every operation's argument struct, as src/operations.def has them, for the Python package.

    scripts/structs.py            writes python/flash_mla/_members.py
    scripts/structs.py --check    exits 1 where it differs
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
WRITTEN = ROOT / "python" / "flash_mla" / "_members.py"
HEAD = '''# SPDX-License-Identifier: MIT
"""Written by scripts/structs.py from src/operations.def: the members of each operation's argument struct behind its size, in
their order; tests/python/test_layout.py compares the structs with what a C compiler makes of the header.
"""

MEMBERS = {
'''


def members():
    """The text of the module: runs of members of one kind."""
    text, runs = HEAD, []
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


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        if not WRITTEN.exists() or WRITTEN.read_text() != members():
            sys.exit(f"{WRITTEN.relative_to(ROOT)} is not what src/operations.def says: run scripts/structs.py")
    elif sys.argv[1:]:
        sys.exit(__doc__)
    else:
        WRITTEN.write_text(members())

# SPDX-License-Identifier: MIT
"""The members of each operation's argument struct after its size, in order, each with its kind, from src/operations.def, of
which an installed package has a copy; tests/python/test_layout.py compares the structs with a C compiler's layout of the
header.
"""

import os
import re
import sys
from typing import Dict, List, Tuple


def _descriptors() -> str:
    folders = sys.modules[__package__].__path__  # two in an editable install: the modules', and the library's
    places = [os.path.join(folder, at) for folder in folders for at in ("operations.def", "../../src/operations.def")]
    with open(next(place for place in places if os.path.exists(place)), encoding="utf-8") as file:
        return file.read()


MEMBERS: Dict[str, List[Tuple[str, str]]] = {}
for _line in re.finditer(r"^(TENSOR|OPTION)\((\w+), (\w+), (\w+)", _descriptors(), re.MULTILINE):
    _kind = _line[1] if _line[1] == "TENSOR" else _line[4]
    MEMBERS.setdefault(_line[2], []).append((_kind, _line[3]))

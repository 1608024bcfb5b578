# SPDX-License-Identifier: MIT
"""Compares the structs and enumerations of the package, member for member, with the header, by a C compiler and as text."""

import ctypes
import os
import pathlib
import re
import shlex
import shutil
import subprocess

import pytest

from flash_mla import _argument_structs, _library, _structs, _types
from programs import output_of

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEADER = ROOT / "include" / "flashmla" / "flashmla.h"
STRUCTS = {struct: f"fmla_{operation}_args" for operation, struct in _argument_structs.ARGUMENTS.items()}
for name, value in vars(_structs).items():
    if isinstance(value, type(ctypes.Structure)):
        STRUCTS[value] = "fmla_" + re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower()
# A member in ctypes: a number of this kind, a pointer, a struct, or an array, whose size gives its length.
NUMBERS = {
    "float": {ctypes.c_float},
    "signed": {ctypes.c_int32, ctypes.c_int64},
    "unsigned": {ctypes.c_uint8, ctypes.c_uint16, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_size_t},
    "pointer": {ctypes.c_void_p, ctypes.c_char_p},
    "struct": {_structs.Device, _structs.DType},
    "array": {ctypes.c_int32 * 8},
}


@pytest.fixture(scope="module")
def c_layout(tmp_path_factory):
    """Returns {"fmla_tensor": (size,), "fmla_tensor.data": (offset, size, kind)}, as text, for the members that Python knows."""
    command, lines = shlex.split(os.environ.get("CC") or "cc"), []
    if not shutil.which(command[0]):
        pytest.skip(f"there is no C compiler {command[0]}")
    for struct, name in STRUCTS.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        for member, *_ in struct._fields_:
            lines.append(
                f'printf("{name}.{member} %zu %zu %s\\n", offsetof({name}, {member}), '
                f"sizeof((({name} *)0)->{member}), KIND((({name} *)0)->{member}));"
            )
    source = """#include <flashmla/flashmla.h>
#include <stdio.h>
#define KIND(x) _Generic((x), float: "float", int32_t: "signed", int64_t: "signed", uint8_t: "unsigned", \\
    uint16_t: "unsigned", uint64_t: "unsigned", fmla_device: "struct", fmla_dtype: "struct", int32_t *: "array", \\
    default: "pointer")
int main(void)
{
    %s
    return 0;
}
"""
    folder = tmp_path_factory.mktemp("layout")
    (folder / "layout.c").write_text(source % "\n    ".join(lines))
    compile_it = [*command, "-std=c11", f"-I{HEADER.parents[1]}", folder / "layout.c", "-o", folder / "layout"]
    compiled = subprocess.run(compile_it, capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr
    said = subprocess.run([folder / "layout"], capture_output=True, text=True, check=True).stdout
    return {name: tuple(numbers) for name, *numbers in map(str.split, said.splitlines())}


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_struct_is_the_header_s(c_layout, struct):
    name = STRUCTS[struct]
    assert (str(ctypes.sizeof(struct)),) == c_layout[name]
    for member, type_ in struct._fields_:
        at, kind = getattr(struct, member), next(kind for kind, types in NUMBERS.items() if type_ in types)
        assert (str(at.offset), str(at.size), kind) == c_layout[f"{name}.{member}"], member


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_struct_has_every_member_in_order(struct):
    """Compares names, which sizes and offsets alone do not distinguish."""
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.S)
    body = re.search(r"typedef struct %s \{(.*?)\} %s;" % (STRUCTS[struct], STRUCTS[struct]), text, re.S).group(1)
    members = [re.search(r"(\w+)\s*(\[\d+\])?$", declaration).group(1) for declaration in body.split(";")[:-1]]
    assert [member for member, _ in struct._fields_] == members


def test_argument_structs_are_those_of_the_descriptors():
    written = pathlib.Path(_argument_structs.__file__).read_text()
    assert output_of(ROOT / "scripts" / "python_structs.py", "--print") == written, "run scripts/python_structs.py"


def test_device_types_are_the_header_s():
    text = HEADER.read_text()
    for name in ("CPU", "CUDA"):
        assert getattr(_library, name) == int(re.search(rf"FMLA_DEVICE_{name} = (\d+)", text).group(1))


def test_every_function_is_declared():
    text = HEADER.read_text()
    for name in _library._FUNCTIONS:
        assert re.search(rf"FMLA_API [^;]*\b{name}\(", text), name


@pytest.mark.parametrize("enumeration,prefix", [(_types.Format, "FMLA_KV_"), (_types.Products, "FMLA_PRODUCTS_")])
def test_enumeration_is_the_header_s(enumeration, prefix):
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.S)
    of_header = {name: int(value) for name, value in re.findall(prefix + r"(\w+) = (\d+)", text)}
    assert {member.name: member.value for member in enumeration} == of_header

# SPDX-License-Identifier: MIT
"""The structs of flash_mla._structs, member for member, against what a C compiler makes of the header."""

import ctypes
import os
import pathlib
import re
import shlex
import shutil
import subprocess

import pytest

from flash_mla import _library, _structs

HEADER = pathlib.Path(__file__).resolve().parents[2] / "include" / "flashmla" / "flashmla.h"
STRUCTS = {
    _structs.Device: "fmla_device",
    _structs.DType: "fmla_dtype",
    _structs.Tensor: "fmla_tensor",
    _structs.Capability: "fmla_capability",
    _structs.DeviceInfo: "fmla_device_info",
    **{struct: f"fmla_{operation}_args" for operation, struct in _structs.ARGUMENTS.items()},
}
# What a member is to ctypes: a number of this kind, a pointer, or a struct.
NUMBERS = {
    "float": {ctypes.c_float},
    "signed": {ctypes.c_int32, ctypes.c_int64},
    "unsigned": {ctypes.c_uint8, ctypes.c_uint16, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_size_t},
    "pointer": {ctypes.c_void_p, ctypes.c_char_p},
    "struct": {_structs.Device, _structs.DType},
}


def compiler():
    words = shlex.split(os.environ.get("CC") or "cc")
    if not shutil.which(words[0]):
        pytest.skip(f"there is no C compiler {words[0]}")
    return words


def kind_of(type_):
    return next(kind for kind, types in NUMBERS.items() if type_ in types)


@pytest.fixture(scope="module")
def c_layout(tmp_path_factory):
    """{"fmla_tensor": size, "fmla_tensor.data": (offset, size, kind)}, of the members that Python knows."""
    command = compiler()
    lines = []
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
    uint16_t: "unsigned", uint64_t: "unsigned", fmla_device: "struct", fmla_dtype: "struct", default: "pointer")
int main(void)
{
    %s
    return 0;
}
""" % "\n    ".join(
        lines
    )
    folder = tmp_path_factory.mktemp("layout")
    (folder / "layout.c").write_text(source)
    program = str(folder / "layout")
    compiled = subprocess.run(
        [*command, "-std=c11", f"-I{HEADER.parents[1]}", str(folder / "layout.c"), "-o", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert compiled.returncode == 0, compiled.stdout
    layout = {}
    for line in subprocess.run([program], stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines():
        name, *numbers = line.split()
        layout[name] = int(numbers[0]) if len(numbers) == 1 else (int(numbers[0]), int(numbers[1]), numbers[2])
    return layout


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_struct_is_the_header_s(c_layout, struct):
    name = STRUCTS[struct]
    assert ctypes.sizeof(struct) == c_layout[name]
    for member, type_ in struct._fields_:
        described = getattr(struct, member)
        assert (described.offset, described.size, kind_of(type_)) == c_layout[f"{name}.{member}"], member


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_struct_has_every_member_in_order(struct):
    """The names, which sizes and offsets alone would not tell from one another."""
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.S)
    body = re.search(r"typedef struct %s \{(.*?)\} %s;" % (STRUCTS[struct], STRUCTS[struct]), text, re.S).group(1)
    members = [re.search(r"(\w+)\s*$", declaration).group(1) for declaration in body.split(";")[:-1]]
    assert [member for member, _ in struct._fields_] == members


def test_every_struct_of_the_package_is_looked_at():
    mirrored = {
        value
        for value in vars(_structs).values()
        if isinstance(value, type) and issubclass(value, ctypes.Structure) and value is not ctypes.Structure
    }
    assert mirrored | set(_structs.ARGUMENTS.values()) == set(STRUCTS)


def test_device_types_are_the_header_s():
    text = HEADER.read_text()
    for name in ("CPU", "CUDA"):
        assert getattr(_library, name) == int(re.search(rf"FMLA_DEVICE_{name} = (\d+)", text).group(1))


def test_every_function_is_declared():
    text = HEADER.read_text()
    for name in _library._FUNCTIONS:
        assert re.search(rf"FMLA_API [^;]*\b{name}\(", text), name

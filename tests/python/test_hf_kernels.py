# SPDX-License-Identifier: MIT
"""Tests packaging/hf_kernels.py: makes a repository of the Hugging Face Hub from a wheel and loads it as `kernels` does, and by
`kernels` if installed."""

import base64
import hashlib
import importlib.util
import json
import os
import pathlib
import platform
import re
import zipfile

import pytest

import flash_mla
from flash_mla import _library
from kinds import needs_torch
from programs import output_of, run

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "packaging" / "hf_kernels.py"
PACKAGE = ROOT / "python" / "flash_mla"
INFO = "flash_mla-0.dist-info"
MACHINE = platform.machine()
TAG = f"Tag: py3-none-manylinux_2_34_{MACHINE}\n"
pytestmark = pytest.mark.skipif(MACHINE not in ("x86_64", "aarch64"), reason="the Hub has no variants for this machine")


def files_of_a_wheel():
    """Returns the files that pip makes of this tree and the library under test: {name: bytes}."""
    paths = [path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix in (".py", ".typed", ".css")]
    files = {f"flash_mla/{path.relative_to(PACKAGE)}": path.read_bytes() for path in paths}
    files["flash_mla/libflashmla.so"] = pathlib.Path(_library.library._name).read_bytes()
    files[f"{INFO}/licenses/LICENSE"] = (ROOT / "LICENSE").read_bytes()
    files[f"{INFO}/WHEEL"] = TAG.encode()
    needs = re.search(r'^torch = \["(.*)"\]$', (ROOT / "pyproject.toml").read_text(), re.M).group(1)
    files[f"{INFO}/METADATA"] = f'Requires-Dist: {needs}; extra == "torch"\n'.encode()
    return files


def wheel_of(folder, changes={}):
    """`changes`: {name: bytes, or None for a missing file}."""
    wheel = folder / "flash_mla-0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in {**files_of_a_wheel(), **changes}.items():
            if data is not None:
                archive.writestr(name, data)
    return wheel


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    if not pathlib.Path(_library.library._name).is_file():
        pytest.skip("the library under test is no file that is named")
    folder = tmp_path_factory.mktemp("hub")
    done = run(SCRIPT, wheel_of(folder), folder / "repository")
    assert done.returncode == 0 and "asks for manylinux_2_28" in done.stderr, done
    return folder / "repository"


def variant_of(repository, kind):
    return next(path for path in (repository / "build").iterdir() if f"-{kind}" in path.name)


@pytest.fixture
def script():
    specification = importlib.util.spec_from_file_location("hf_kernels", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_files_and_their_digests(repository):
    for variant in (repository / "build").iterdir():
        metadata = json.loads((variant / "metadata.json").read_text())
        assert metadata["name"] == "flash-mla" and metadata["id"].isidentifier()
        paths = {path.relative_to(variant).as_posix() for path in variant.rglob("*") if path.is_file()}
        assert paths - {"metadata.json"} == set(metadata["digest"]["files"])
        assert {"__init__.py", "_library.py", "libflashmla.so", "LICENSE"} < paths
        for name, digest in metadata["digest"]["files"].items():
            data = (variant / name).read_bytes()
            assert base64.b64decode(digest) == hashlib.sha256(data).digest(), name
    assert variant_of(repository, "cpu").name == f"torch-stable-abi24-cpu-{MACHINE}-linux"


def test_variants(script):
    """Tests a library built by nvcc of CUDA 13.0, and one without kernels for GPUs."""
    has = dict(built_with=13000, built_for="80 90a 100f 120", ptx=80)
    archs = ["8.0", "9.0a", "10.0f", "12.0", "8.0+PTX"]
    assert script.variants(has, "x86_64", ("2", "4")) == {
        "torch-stable-abi24-cpu-x86_64-linux": {"type": "cpu"},
        "torch-stable-abi24-cu130-x86_64-linux": {"type": "cuda", "archs": archs},
    }
    has = dict(built_with=12080, built_for="90a", ptx=0)
    assert list(script.variants(has, "aarch64", ("2", "10")).items())[1] == (
        "torch-stable-abi210-cu128-aarch64-linux",
        {"type": "cuda", "archs": ["9.0a"]},
    )
    none = dict(built_with=0, built_for="", ptx=0)
    assert list(script.variants(none, "x86_64", ("2", "4"))) == ["torch-stable-abi24-cpu-x86_64-linux"]


def test_id_is_of_the_contents(script):
    one, two = (script.metadata({"a": data}, {"type": "cpu"})["id"] for data in (b"1", b"2"))
    assert one != two and one != script.metadata({"a": b"1"}, {"type": "cuda"})["id"]


# Loads a repository as `kernels` does (importer.py of 0.17.2): a module under its id, while flash_mla itself cannot be imported.
LOAD = """
import importlib, importlib.util, json, pathlib, sys

def load(folder):
    folder = pathlib.Path(folder)
    name = json.loads((folder / "metadata.json").read_text())["id"]
    specification = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    module = sys.modules[name] = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module
"""


def test_imports_itself_alone(repository):
    """Imports every module except those that need PyTorch, and makes a call on NumPy's arrays with the library beside the
    modules."""
    folder = variant_of(repository, "cpu")
    program = f"""{LOAD}
sys.modules["flash_mla"] = None
this = load({str(folder)!r})
folder = pathlib.Path({str(folder)!r})
for path in folder.rglob("*.py"):
    if "torch" not in path.name and path.name != "__init__.py":
        importlib.import_module(".".join([this.__name__, *path.relative_to(folder).with_suffix("").parts]))
import numpy
out, lse = this.merge_states(numpy.ones((2, 1, 1, 1, 8), "float32"), numpy.zeros((2, 1, 1, 1), "float32"))
assert (out == 1).all() and abs(lse.item() - numpy.log(2)) < 1e-6
print(this.__version__, sys.modules[this.__name__ + "._library"].library._name)
"""
    version, library = output_of("-B", "-c", program, FLASHMLA_LIBRARY="", PYTHONPATH=path_without_package()).split()
    assert version == flash_mla.__version__ and pathlib.Path(library) == folder / "libflashmla.so"


ATTEND = """
import torch
q, pages = torch.randn(1, 1, 16, 576).bfloat16(), torch.randn(2, 64, 1, 576).bfloat16()
table, lengths = torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([100], dtype=torch.int32)
def attend(module):
    return module.flash_mla_with_kvcache(q, pages, table, lengths, 512, *module.get_mla_metadata(), causal=True)[0]
"""


@needs_torch
def test_beside_another_one(repository, tmp_path):
    """Loads two versions beside an installed package: each has its own namespace of operators."""
    done = run(SCRIPT, wheel_of(tmp_path, {"flash_mla/_more.py": b"# another version\n"}), tmp_path / "other")
    assert done.returncode == 0, done
    folders = [str(variant_of(place, "cpu")) for place in (repository, tmp_path / "other")]
    program = f"""{LOAD}{ATTEND}
import flash_mla
modules = [flash_mla, *map(load, {folders!r})]
outs = [attend(module) for module in modules]
assert len({{module.__name__ for module in modules}}) == 3
assert all(torch.equal(outs[0], out) for out in outs[1:])
assert all(hasattr(getattr(torch.ops, module.__name__), "dense_decode") for module in modules)
assert torch.equal(torch.compile(attend, backend="eager")(modules[1]), outs[0])
k = torch.randn(5, 2, 128).bfloat16().requires_grad_()
starts = torch.tensor([0, 5], dtype=torch.int32)
grads = []
for module in modules:
    out = module.flash_attn_varlen_func(k, k, k, starts, starts, 5, 5, causal=True)[0]
    grads.append(torch.autograd.grad(out.float().square().sum(), k)[0])
assert torch.equal(*grads[:2]) and torch.equal(*grads[1:]) and grads[0].abs().max() > 0
print("alike")
"""
    assert output_of("-B", "-c", program) == "alike\n"


@needs_torch
def test_with_kernels(repository):
    pytest.importorskip("kernels")
    program = f"""
import pathlib, kernels
from kernels._rust import Digest, DigestAlgorithm
place = pathlib.Path({str(repository)!r})
for variant in (place / "build").iterdir():
    metadata = kernels.Metadata.read_from_file(variant / "metadata.json")
    found = Digest.hash_variant(DigestAlgorithm.SHA256, variant)
    metadata.digest.validate(found), found.validate(metadata.digest)
module = kernels.get_local_kernel(place, backend="cpu")
{ATTEND}
assert attend(module).isfinite().all()
assert kernels.get_kernel("someone/flash-mla", version=0, backend="cpu") is module
(loaded,) = kernels.get_loaded_kernels()
print(loaded.metadata.id, loaded.metadata.name.python_name, module.__version__)
"""
    environment = dict(FLASHMLA_LIBRARY="", PYTHONPATH=path_without_package())
    said = output_of("-B", "-c", program, **environment, LOCAL_KERNELS=f"someone/flash-mla={repository}").split()
    metadata = json.loads((variant_of(repository, "cpu") / "metadata.json").read_text())
    assert said == [metadata["id"], "flash_mla", flash_mla.__version__]


def path_without_package():
    """Returns PYTHONPATH without the folder of the package under test."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(path for path in paths if path and not pathlib.Path(path, "flash_mla").exists())


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"flash_mla/libflashmla.so": None}, "has no flash_mla/libflashmla.so, must be a wheel of this package"),
        ({"flash_mla/__init__.py": None}, "has no flash_mla/__init__.py, must be a wheel of this package"),
        ({f"{INFO}/licenses/LICENSE": None}, "has no LICENSE in its .dist-info folder"),
        ({f"{INFO}/WHEEL": b"Tag: cp312-cp312-win_amd64\n"}, "names no platform py3-none-"),
        ({f"{INFO}/METADATA": b"Version: 1\n"}, "or no PyTorch"),
        ({"flash_mla/libflashmla.so": b"no library"}, "cannot be imported here: ImportError: flash_mla: cannot load"),
    ],
)
def test_other_wheels_are_refused(changes, text, tmp_path):
    done = run(SCRIPT, wheel_of(tmp_path, changes), tmp_path / "repository")
    assert done.returncode == 2 and text in done.stderr, done
    assert done.stderr.startswith("hf_kernels.py: WHEEL: ") and not (tmp_path / "repository").exists()


def test_other_arguments_are_refused(tmp_path):
    (tmp_path / "text").write_text("no wheel")
    for wheel, folder, text in (
        ("none.whl", "new", "WHEEL: none.whl cannot be read: "),
        (tmp_path / "text", "new", "cannot be read: File is not a zip file"),
        (wheel_of(tmp_path), tmp_path, "is there already, must be new or an empty folder"),
        (wheel_of(tmp_path), tmp_path / "text", "is there already, must be new or an empty folder"),
    ):
        done = run(SCRIPT, wheel, folder)
        assert done.returncode == 2 and text in done.stderr, done


def test_a_plain_wheel_is_said_not_to_be_for_the_hub(tmp_path):
    done = run(
        SCRIPT, wheel_of(tmp_path, {f"{INFO}/WHEEL": f"Tag: py3-none-linux_{MACHINE}\n".encode()}), tmp_path / "a"
    )
    assert done.returncode == 0 and "this wheel is for systems like the one that built it" in done.stderr, done
    done = run(SCRIPT, wheel_of(tmp_path, {f"{INFO}/WHEEL": TAG.replace("34", "28").encode()}), tmp_path / "b")
    assert done.returncode == 0 and not done.stderr, done

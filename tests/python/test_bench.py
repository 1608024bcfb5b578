# SPDX-License-Identifier: MIT
"""Tests python -m flash_mla.bench: its table, its lines and its picture, on sizes too small to measure speed."""

import json
import os
import pathlib
import xml.etree.ElementTree

import numpy
import pytest

import flash_mla
from flash_mla import _library, _structs, bench, info
from kinds import needs_cuda, needs_torch, torch
from programs import run

SMALL = "--batch 2 --heads 4 --seq-len 130 --topk 70 --query-tokens 3 --runs 2 --warm".split()


def fields(table):
    """Returns [(operation, shape, [µs, TFLOP/s, GB/s])] of a printed table."""
    lines = table.splitlines()
    heading = next(i for i, line in enumerate(lines) if line.startswith("operation"))
    parts = [line.split(maxsplit=1) for line in lines[heading + 1 :]]
    return [(op, *(rest.rsplit(maxsplit=3)[0], [float(x) for x in rest.rsplit(maxsplit=3)[1:]])) for op, rest in parts]


def flop_of(line):
    """Returns 2 · (d_qk + d_v) for each row and key that it sees (docs/performance.md)."""
    if line["op"] == "mha_forward":
        pairs = line["b"] * line["s_q"] * (line["s_q"] + 1) / 2
    elif line["op"] == "dense_decode":
        pairs = line["b"] * line["s_k"]
    else:
        pairs = line.get("b", 1) * line["s_q"] * line["topk"]
    return 2 * pairs * line["h_q"] * (line["d_qk"] + line["d_v"])


def bytes_of(line):
    """Counts every key, Q and out once; for sparse prefill also lists and all results (docs/performance.md)."""
    tokens = line.get("b", 1) * line["s_q"]
    rows, keys = tokens * line["h_q"], line.get("b", 1) * line["s_k"]
    moved = 2 * rows * (line["d_qk"] + line["d_v"])
    if line["op"] == "mha_forward":
        return moved + 2 * keys * line["h_kv"] * (192 + 128) + 4 * rows + 8 * (line["b"] + 1)
    if line["op"] == "sparse_prefill":
        return moved + 8 * rows + 4 * tokens * line["topk"] + min(keys, tokens * line["topk"]) * 1152
    of_token = {"BF16": 1152, "FP16": 1152, "FP8_656": 656}[line["cache"]]
    return moved + (tokens * line["topk"] if line["op"] == "sparse_decode" else keys) * of_token


def check_everything(table, lines, picture, place, operations):
    rows = fields(table)
    assert [op for op, _, _ in rows] == [line["op"] for line in lines] and {line["op"] for line in lines} == operations
    for (_, shape, (us, tflops, gbs)), line in zip(rows, lines):
        assert all(f"{name} {line[name]}" in shape for name in ("h_q", "s_k"))
        assert us == pytest.approx(line["us"], rel=6e-3) and line["us_min"] <= line["us"] <= line["us_max"]
        assert tflops == pytest.approx(line["tflops"], rel=6e-3) and gbs == pytest.approx(line["gbs"], rel=6e-3)
        assert line["tflops"] == pytest.approx(flop_of(line) / line["us"] * 1e-6, rel=1e-4), line
        assert line["gbs"] == pytest.approx(bytes_of(line) / line["us"] * 1e-3, rel=1e-4), line
        assert line["runs"] == 2 and line["warm"] and line["between"] == "nothing"
        assert line["version"] == flash_mla.__version__ and line[place]
    tag = "{http://www.w3.org/2000/svg}"
    svg = xml.etree.ElementTree.fromstring(picture)
    texts = [text.text for text in svg.iter(f"{tag}text")]
    assert svg.tag == f"{tag}svg" and len(list(svg.iter(f"{tag}rect"))) == 1 + 2 * len(lines)
    assert all(f"{op}: {shape}" in texts for op, shape, _ in rows)
    widest = [max(float(bar.get("width")) for bar in list(svg.iter(f"{tag}rect"))[1:][i::1]) for i in (0, len(lines))]
    assert widest == [bench.PANEL, bench.PANEL]
    # Colours come from the style of all pictures, which has them for light and for dark screens.
    style = pathlib.Path(bench.__file__).with_name("picture.css").read_text()
    assert svg.find(f"{tag}style").text == f"\n{style}" and "@media (prefers-color-scheme: dark)" in style
    assert not {"fill", "stroke", "color", "style"} & {name for element in svg.iter() for name in element.attrib}
    classes = {name for element in svg.iter() for name in element.get("class", "").split()}
    assert classes and all(f".{name} {{" in style for name in classes)


def with_files(folder, *arguments, **environment):
    """Returns the printed output, the JSON lines and the picture."""
    files = folder / "rows.jsonl", folder / "rows.svg"
    done = run(
        "-W", "error", "-m", "flash_mla.bench", *arguments, "--json", files[0], "--plot", files[1], **environment
    )
    assert done.returncode == 0 and not done.stderr, done
    return done.stdout, [json.loads(line) for line in files[0].read_text().splitlines()], files[1].read_text()


def without(folder, *names):
    """Returns an environment in which these packages cannot be imported."""
    for name in names:
        (folder / f"{name}.py").write_text("raise ImportError('asked for')\n")
    return dict(PYTHONPATH=f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


def test_on_the_cpu(tmp_path):
    pytest.importorskip("ml_dtypes")
    found = with_files(tmp_path, "--device", "cpu", *SMALL)
    check_everything(*found, "cpu", set(bench.OPERATIONS))
    assert all(line["threads"] == info._describe(_structs.Device(_library.CPU, 0)).workers for line in found[1])
    assert found[0].startswith(f"flash_mla {flash_mla.__version__} on ")


def test_numpy_is_enough(tmp_path):
    """Runs in fp16, which sparse prefill does not take."""
    operations = {"dense_decode", "sparse_decode", "mha_forward"}
    environment = without(tmp_path, "torch", "ml_dtypes")
    found = with_files(tmp_path, "--device", "cpu", "--dtype", "float16", "--ops", *operations, *SMALL, **environment)
    check_everything(*found, "cpu", operations)
    assert {line.get("cache") for line in found[1]} == {"FP16", "FP8_656", None}


@needs_cuda
def test_on_a_gpu(tmp_path):
    found = with_files(tmp_path, "--device", "cuda:0", *SMALL)
    check_everything(*found, "gpu", set(bench.OPERATIONS))
    cold = run(
        "-m", "flash_mla.bench", "--ops", "dense_decode", *SMALL[:-1]
    )  # finds the GPU and leaves its caches alone
    assert cold.returncode == 0 and torch.cuda.get_device_name(0) in cold.stdout and "caches cold" in cold.stdout


def test_what_is_timed_attends():
    """Every call writes finite results that differ between rows; sparse decode over all keys gives the results of dense
    decode."""
    pytest.importorskip("ml_dtypes")
    on = bench.Host(None)
    for op in bench.OPERATIONS:
        cache = "plain" if op.endswith("decode") else None
        sizes = dict(topk=70) if op.startswith("sparse") else {}
        row = bench.Row(op, h_q=2, s_k=70, b=None if op == "sparse_prefill" else 3, s_q=1, cache=cache, **sizes)
        work = bench.WORK[op](row, on)
        out = numpy.asarray(work.call()[0], numpy.float64)
        assert numpy.isfinite(out).all() and len({values.tobytes() for values in out.reshape(-1, out.shape[-1])}) >= 2
        if op == "sparse_decode":  # its pages are in order
            given = work.call.keywords
            table = numpy.arange(6, dtype=numpy.int32).reshape(3, 2)
            q, pages = work.call.args
            dense, _ = flash_mla.flash_mla_with_kvcache(
                q, pages, table, numpy.full(3, 70, numpy.int32), 512, None, softmax_scale=given["softmax_scale"]
            )
            numpy.testing.assert_allclose(out, numpy.asarray(dense, numpy.float64), atol=2e-3)


@needs_torch
@pytest.mark.parametrize("row", list(dict.fromkeys(bench.ROWS["cuda"])), ids=lambda row: f"{row.op}-{row.words()}")
def test_calls_on_tensors(row):
    """Makes the calls timed on a GPU with tensors on the CPU."""
    on = bench.Gpu.__new__(bench.Gpu)
    on.torch, on.device, on.dtype, on.type = torch, torch.device("cpu"), "bfloat16", torch.bfloat16
    sizes = dict(b=2, s_q=2, s_k=70, h_q=4, topk=64)
    row = bench.dataclasses.replace(
        row, **{name: size for name, size in sizes.items() if getattr(row, name) is not None}
    )
    work = bench.WORK[row.op](row, on)
    first, second = (work.call()[0].clone() for _ in range(2))
    assert first.isfinite().all() and first.abs().max() > 0 and torch.equal(first, second)


def test_each_row_once():
    parser = bench._parser()
    options = parser.parse_args(["--heads", "16", "--seq-len", "64", "--ops", "dense_decode", "sparse_decode"])
    rows = bench._rows(parser, options, "cpu")
    assert rows == list(dict.fromkeys(rows)) and {row.h_q for row in rows} == {16} and {row.s_k for row in rows} == {64}
    assert [row.op for row in rows] == ["dense_decode", "dense_decode", "sparse_decode"] and rows[-1].topk == 64


def test_no_memory_is_said():
    done = run(
        "-m", "flash_mla.bench", "--device", "cpu", "--ops", "dense_decode", "--batch", "100000000", "--runs", "1"
    )
    assert done.returncode == 1 and "more than half of this machine's memory" in done.stdout, done


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--device", "tpu"], "argument --device: is tpu, must be cpu, cuda or cuda:N"),
        (["--device", "cuda:x"], "argument --device: is cuda:x, must be cpu, cuda or cuda:N"),
        (["--device", "cpu:0"], "argument --device: is cpu:0, must be cpu, cuda or cuda:N"),
        (["--batch", "0"], "argument --batch: is 0, must be a whole number from 1 on"),
        (["--runs", "many"], "argument --runs: is many, must be a whole number from 1 on"),
        (["--topk", "65", "--seq-len", "64"], "argument --topk: is 65, must be at most the keys of a request, 64"),
        (["--ops", "dense"], "argument --ops: invalid choice: 'dense'"),
        (["--dtype", "float32"], "argument --dtype: invalid choice: 'float32'"),
        (["--json", "none/rows"], "argument --json: none/rows cannot be written: No such file or directory"),
        (["--plot", "."], "argument --plot: . cannot be written: Is a directory"),
        (["--plot", "same", "--json", "same"], "argument --plot: is same, as --json is, must be another file"),
        (["rows"], "unrecognized arguments: rows"),
    ],
)
def test_refused(arguments, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    device = [] if "--device" in arguments else ["--device", "cpu"]
    done = run("-m", "flash_mla.bench", *device, *arguments)
    assert done.returncode == 2 and text in done.stderr and not done.stdout, done
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "hidden, arguments, text",
    [
        ("numpy", ["--device", "cpu"], "argument --device: is cpu, for which the package numpy must be installed"),
        ("torch", ["--device", "cuda"], "argument --device: is cuda, for which the package torch must be installed"),
        (
            "ml_dtypes",
            ["--device", "cpu", "--dtype", "bfloat16"],
            "argument --dtype: is bfloat16: NumPy needs the package ml_dtypes for bfloat16",
        ),
    ],
)
def test_what_is_not_installed(hidden, arguments, text):
    """The package is looked for without being imported."""
    program = f"""
import importlib.util, sys
from flash_mla import bench
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == {hidden!r} else find(name, *rest)
sys.exit(bench.main({arguments!r}))
"""
    done = run("-c", program)
    assert done.returncode == 2 and text in done.stderr, done


@needs_torch
def test_no_such_gpu():
    done = run("-m", "flash_mla.bench", "--device", "cuda:99")
    assert done.returncode == 2 and "argument --device: is cuda:99: PyTorch sees " in done.stderr, done


def test_help():
    done = run("-m", "flash_mla.bench", "--help")
    assert done.returncode == 0 and done.stdout.startswith("usage: python -m flash_mla.bench"), done
    assert all(op in done.stdout for op in bench.OPERATIONS)

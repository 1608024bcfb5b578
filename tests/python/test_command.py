# SPDX-License-Identifier: MIT
"""Tests how python -m flash_mla.info and .bench end if something stops them: with one line at most, never with a traceback."""

import os
import re
import signal
import subprocess
import sys

import pytest

from flash_mla import _command
from programs import run

INFO = ("-m", "flash_mla.info")
BENCH = ("-m", "flash_mla.bench", "--device", "cpu", "--ops", "mha_forward", "--seq-len", "64", "--runs", "1")
BUFFERED = pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])


@pytest.fixture(params=[INFO, BENCH], ids=["info", "bench"])
def command(request):
    return request.param


def started(command, stdout, **environment):
    environment = {**os.environ, **environment}
    return subprocess.Popen(
        [sys.executable, *command], env=environment, stdout=stdout, stderr=subprocess.PIPE, text=True
    )


@BUFFERED
def test_full_disk(command, unbuffered):
    with open("/dev/full", "w") as full:
        process = started(command, full, PYTHONUNBUFFERED=unbuffered)
    said = process.communicate()[1]
    name = f"python {' '.join(command[:2])}"
    assert said == f"{name}: standard output cannot be written: No space left on device\n" and process.returncode == 1


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_full_disk_of_a_file(option):
    done = run(*BENCH, option, "/dev/full")
    said = f"python -m flash_mla.bench: argument {option}: /dev/full cannot be written: No space left on device\n"
    assert done.stderr == said and done.returncode == 1 and "TFLOP/s" in done.stdout


@BUFFERED
def test_pipe_that_is_closed(command, unbuffered):
    reading, writing = os.pipe()
    os.close(reading)
    process = started(command, writing, PYTHONUNBUFFERED=unbuffered)
    os.close(writing)
    assert process.communicate()[1] == "" and process.returncode == 128 + signal.SIGPIPE


def test_help_on_a_full_disk(command):
    with open("/dev/full", "w") as full:
        process = started((*command[:2], "--help"), full, PYTHONUNBUFFERED="")
    assert re.fullmatch(r"python -m [\w.]+: standard output cannot be written: .*\n", process.communicate()[1])
    assert process.returncode == 1


def test_without_standard_output(command):
    done = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, *command], capture_output=True, text=True)
    assert done.stderr == "" and done.returncode == 0


def test_interrupt():
    process = started((*BENCH[:-2], "--runs", "1000000"), subprocess.PIPE)
    for line in process.stdout:
        if "TFLOP/s" in line:  # the rows follow
            break
    process.send_signal(signal.SIGINT)
    assert process.communicate()[1] == "" and process.returncode == 128 + signal.SIGINT


def test_interrupt_of_any_command():
    program = (
        "from flash_mla._command import run; import signal; run('name', lambda: signal.raise_signal(signal.SIGINT))"
    )
    done = run("-c", program)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 130)


def test_output_in_ascii(command):
    """The table has a µ, which the output may not have."""
    done = run(*command, PYTHONIOENCODING="ascii")
    assert done.stderr == "" and done.returncode == 0


@pytest.mark.parametrize("library", ["nowhere", "text", "a folder", "another library"])
def test_library_that_is_none(command, library, tmp_path):
    (tmp_path / "text").write_text("no library\n")
    (tmp_path / "a folder").mkdir()
    path = "libm.so.6" if library == "another library" else str(tmp_path / library)
    done = run(*command, FLASHMLA_LIBRARY=path)
    assert re.fullmatch(rf"flash_mla: (cannot load )?{re.escape(path)}.*\n", done.stderr) and done.returncode == 1


def test_library_that_is_none_where_it_is_imported():
    """Elsewhere the error is one that can be caught, and its traceback shows who imports the package."""
    missing = dict(FLASHMLA_LIBRARY="/nowhere")
    done = run("-c", "import flash_mla", **missing)
    assert "Traceback" in done.stderr and "ImportError: flash_mla: cannot load /nowhere" in done.stderr
    done = run("-c", "import sys\nsys.argv = ['-m']\ntry: import flash_mla\nexcept ImportError: 1 / 0", **missing)
    assert "Traceback" in done.stderr and "ZeroDivisionError" in done.stderr


def test_short_writes(monkeypatch, tmp_path):
    """A file takes as much as it can; the rest follows."""
    file = _command.File("--json", str(tmp_path / "lines"))
    whole, written = file._file, []

    class Slow:
        def write(self, data):
            written.append(len(data))
            return whole.write(data[:3])

        def close(self):
            whole.close()

    monkeypatch.setattr(file, "_file", Slow())
    with file:
        file.write("0123456789\n")
    assert (tmp_path / "lines").read_text() == "0123456789\n" and written == [11, 8, 5, 2]

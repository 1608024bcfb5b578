# SPDX-License-Identifier: MIT
"""Tests flashmla_tests.py on artificial tests: what it omits from them, and what it keeps."""

import pathlib

import pytest

import flashmla_tests
from programs import run

SCRIPT = pathlib.Path(flashmla_tests.__file__)
MADE_UP = """
import torch
from beside_it import done
from flash_mla import flash_attn_varlen_func

major, minor = torch.cuda.get_device_capability()
if major != 10:
    raise SystemExit("another chip")
assert torch.cuda.get_device_capability()[0] == 10, "another chip"
name = "new" if major >= 10 else "old"
if minor:
    name += "er"
for h, h_k in ((4, 4), (4, 1)):
    if h != h_k:
        has_bwd = False
    else:
        has_bwd = True
    assert has_bwd or h_k == 1
    done(name, has_bwd)
"""
WITH_CASES = """
import sys
from beside_it import Case, can_run

def run_test(case):
    print(case.size, case.num_runs)
    return case.size != 3

testcases = [case for case in map(Case, range(6)) if can_run(case)]
for number, test in enumerate(testcases):
    if not run_test(test) and "--run-to-finish" not in sys.argv:
        sys.exit(1)
"""
BESIDE = """
import torch

class Case:
    num_runs = 10
    def __init__(self, size):
        self.size = size

def can_run(case):
    major, _ = torch.cuda.get_device_capability()
    if major != 10:
        return False
    return case.size != 1

done = print
"""


@pytest.fixture
def test_file(tmp_path):
    file = tmp_path / "test_made_up.py"
    file.write_text(MADE_UP)
    (tmp_path / "beside_it.py").write_text(BESIDE)
    (tmp_path / "torch.py").write_text("class cuda:\n    def get_device_capability():\n        return 9, 1\n")
    return file


@pytest.mark.parametrize("grouped", [False, True])
def test_runs(test_file, grouped):
    done = run(SCRIPT, test_file, *["--grouped-gradients"] * grouped)
    assert done.returncode == 0, done
    lines = done.stdout.splitlines()
    assert lines[0].startswith("flash_mla ")
    assert lines[1:3] == [
        "test_made_up.py:7: left out: if major != 10:",
        "test_made_up.py:9: left out: assert torch.cuda.get_device_capability()[0] == 10, 'another chip'",
    ]
    lines = [line for line in lines[3:] if line != OF_BESIDE]
    assert lines == ["test_made_up.py:15: has_bwd is True"] * grouped + ["older True", f"older {grouped}"]


OF_BESIDE = "beside_it.py:11: left out: if major != 10:"


@pytest.mark.parametrize(
    "options, ran, last",
    [
        (["--", "--run-to-finish"], "02345", "cases: 5 of 5 begun"),
        (["--untimed", "--", "--run-to-finish"], "02345", "cases: 5 of 5 begun, none timed"),
        (["--cases=1::2", "--", "--run-to-finish"], "24", "cases: 2 of 5 begun"),
        (["--cases", "3:", "--untimed"], "45", "cases: 2 of 5 begun, none timed"),
        ([], "023", "cases: 3 of 5 begun"),
    ],
)
def test_cases(test_file, options, ran, last):
    test_file.write_text(WITH_CASES)
    done = run(SCRIPT, test_file, *options)
    assert done.returncode == (ran[-1] == "3"), done
    runs = 0 if "--untimed" in options else 10
    assert done.stdout.splitlines()[1:] == [OF_BESIDE, *(f"{size} {runs}" for size in ran), last]
    assert not list(test_file.parent.glob("__pycache__/beside_it*"))


def test_fails_where_the_test_does(test_file):
    test_file.write_text("assert False, 'differs'\n")
    done = run(SCRIPT, test_file)
    assert done.returncode == 1 and "AssertionError: differs" in done.stderr


def test_refused(test_file, tmp_path):
    (tmp_path / "flash_mla.py").write_text("")
    test_file.write_text("no Python\n")
    for file in (test_file, tmp_path / "none.py"):
        done = run(SCRIPT, file)
        assert done.returncode == 2 and f"flashmla_tests.py: {file}: " in done.stderr, done
    test_file.write_text("testcases = []\n")
    for option, text in (
        ("--untimed", f"{test_file}: has no loop over testcases"),
        ("--cases=1", "argument --cases: is '1', must be START:STOP or START:STOP:STEP"),
        ("--cases=a:", "argument --cases: is 'a:', must be START:STOP or START:STOP:STEP"),
    ):
        done = run(SCRIPT, test_file, option)
        assert done.returncode == 2 and text in done.stderr, done
    test_file.write_text("")
    code = f"import runpy, sys; sys.path.insert(0, {str(tmp_path)!r}); runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    done = run("-c", code, test_file)
    assert done.returncode == 2 and "flash_mla is another package" in done.stderr, done

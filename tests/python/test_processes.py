# SPDX-License-Identifier: MIT
"""Tests the library in children of a process that used it on several threads: the same bits as the parent's, and no hang."""

import multiprocessing
import os
import signal

import numpy
import pytest

from flash_mla import _library, merge_states

SECONDS = 30
PARTS, ROWS, D_V = 4, 2000, 512  # work for several threads


def inputs():
    random = numpy.random.default_rng(3)
    out = random.normal(0, 1, (PARTS, 1, ROWS, 1, D_V)).astype(numpy.float32)
    return out, random.normal(0, 1, (PARTS, 1, 1, ROWS)).astype(numpy.float32)


def compute(out, lse):
    return merge_states(out, lse)


def bits(results):
    return tuple(array.tobytes() for array in results)


def in_pool(_):
    signal.alarm(SECONDS)  # a child that hangs does not hang the test
    return bits(compute(*inputs()))


@pytest.fixture(scope="module")
def parent():
    """Returns the parent's results, computed on its threads before any fork."""
    assert _library.library.fmla_set_num_threads(4) == 0
    return bits(compute(*inputs()))


def test_multiprocessing(parent):
    with multiprocessing.get_context("fork").Pool(3) as pool:
        for result in pool.map_async(in_pool, range(6)).get(timeout=2 * SECONDS):
            assert result == parent
    assert bits(compute(*inputs())) == parent


def end_as_child(parent, generations):
    code = 1
    try:
        signal.alarm(SECONDS)
        same = bits(compute(*inputs())) == parent
        if generations > 1:
            same &= ended_well(parent, generations - 1)
        code = 0 if same else 2
    finally:
        os._exit(code)


def ended_well(parent, generations):
    pid = os.fork()
    if pid == 0:
        end_as_child(parent, generations)
    return os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize("generations", [1, 2, 3])
def test_fork(parent, generations):
    assert ended_well(parent, generations)
    assert bits(compute(*inputs())) == parent

# SPDX-License-Identifier: MIT
"""Runs Python programs in separate processes, and functions on threads."""

import concurrent.futures
import os
import subprocess
import sys
import threading


def run(*arguments, **environment):
    """Runs the interpreter with these arguments, so that it finds the tests' modules; returns the completed process."""
    path = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.run([sys.executable, *map(str, arguments)], env=environment, capture_output=True, text=True)


def output_of(*arguments, **environment):
    """Returns the output of a program that must succeed."""
    done = run(*arguments, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def in_threads(count, work):
    """Calls work(0), work(1), … on threads that start at once; raises what one of them raises."""
    start = threading.Barrier(count)
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        list(pool.map(lambda i: (start.wait(), work(i)), range(count)))

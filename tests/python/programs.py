# SPDX-License-Identifier: MIT
"""Runs Python programs in separate processes, and functions on threads."""

import concurrent.futures
import os
import subprocess
import sys
import threading


def run(*arguments, **environment):
    """The interpreter with these arguments, which finds the tests' own modules; what came of it."""
    path = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.run([sys.executable, *map(str, arguments)], env=environment, capture_output=True, text=True)


def output_of(*arguments, **environment):
    """What a program printed that must end well."""
    done = run(*arguments, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def in_threads(count, work):
    """Calls work(0), work(1), … on threads that start at once; what one of them raises is raised."""
    start = threading.Barrier(count)
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        list(pool.map(lambda i: (start.wait(), work(i)), range(count)))

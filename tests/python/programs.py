# SPDX-License-Identifier: MIT
"""Python programs in processes of their own."""

import os
import subprocess
import sys


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

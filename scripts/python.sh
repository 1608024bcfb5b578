#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# python.sh - prints a Python of 3.9 or later that can make virtual environments with pip in them; exits 3 if there is none.
# Beside the first in PATH the system's is asked, which is the one that Debian's python3-venv serves.
set -euo pipefail
for python in python3 /usr/bin/python3; do
    if "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 9))' 2>/dev/null; then
        command -v "$python"
        exit
    fi
done
exit 3

#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# python.sh MODULE... - prints a Python of 3.9 or later that can import these; exits 3 if there is none. Tries the first
# in PATH, then the system's, for which Debian packages modules.
set -euo pipefail
modules=$(printf ', %s' "$@")
for python in python3 /usr/bin/python3; do
    if "$python" -c "import sys$modules; sys.exit(sys.version_info < (3, 9))" 2>/dev/null; then
        command -v "$python"
        exit
    fi
done
exit 3

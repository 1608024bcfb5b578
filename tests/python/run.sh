#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# run.sh FILE - runs one file of the Python package's tests with a Python that has NumPy and pytest: $FMLA_PYTHON if it is set,
# else what scripts/python.sh finds.
#
# Exit codes: pytest's; 77 without such a Python, or if the whole file needs a missing package.
set -uo pipefail

python=${FMLA_PYTHON:-$("$(dirname "${BASH_SOURCE[0]}")/../../scripts/python.sh" numpy pytest)} || {
    echo 'no Python 3.9 or later with NumPy and pytest here'
    exit 77
}
# Leave nothing in the source tree.
export PYTHONDONTWRITEBYTECODE=1
# PyTorch's threads are a separate pool. If they spin while they wait, they keep the library's threads off the cores.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
"$python" -m pytest -p no:cacheprovider --durations=3 -q -rs "$1"
code=$?
[ $code -eq 5 ] && exit 77 # pytest: no test ran
exit $code

#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# run.sh FILE - runs one file of the Python package's tests with a Python that has NumPy and pytest: $FMLA_PYTHON if it is set,
# else what scripts/python.sh finds.
#
# Exit codes: pytest's; 77 without such a Python, or if every test of the file was skipped. It then prints what they need.
set -uo pipefail

python=${FMLA_PYTHON:-$("$(dirname "${BASH_SOURCE[0]}")/../../scripts/python.sh" numpy pytest)} || {
    echo 'needs NumPy and pytest (Debian: python3-numpy python3-pytest)'
    exit 77
}
# Leave nothing in the source tree.
export PYTHONDONTWRITEBYTECODE=1
# PyTorch's threads are a separate pool. If they spin while they wait, they keep the library's threads off the cores.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
log=$(mktemp)
trap 'rm -f "$log"' EXIT
"$python" -m pytest -p no:cacheprovider --durations=3 -q -rs "$1" 2>&1 | tee "$log"
code=${PIPESTATUS[0]}
# 5: pytest collected nothing, since a package is missing; else its last line counts what passed.
if [ "$code" -eq 5 ] || { [ "$code" -eq 0 ] && ! tail -n 1 "$log" | grep -q ' passed'; }; then
    reason=$(sed -n 's/^SKIPPED \[[0-9]*\] [^ ]*: //p' "$log" | head -n 1)
    case $reason in
    *"import 'torch'"* | 'PyTorch is not installed') echo 'needs PyTorch (pip install torch)' ;;
    *"import '"*) sed -nE "s/.*could not import '([^']*)'.*/needs \1 (pip install \1)/p" <<<"$reason" ;;
    'PyTorch sees no GPU') echo 'needs a GPU' ;;
    *) echo "needs what pytest misses: $reason" ;;
    esac
    exit 77
fi
exit "$code"

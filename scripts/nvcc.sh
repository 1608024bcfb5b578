#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# nvcc.sh REPORT NVCC ARGUMENT... - runs nvcc and keeps ptxas's output for each kernel (-Xptxas -v) in REPORT. Prints
# only warnings, or everything if nvcc fails.
set -euo pipefail
report=$1
shift
if ! "$@" >"$report.new" 2>&1; then
    cat "$report.new" >&2
    exit 1
fi
grep -vE '^ptxas info|^ *[0-9]+ bytes stack frame|^$' "$report.new" >&2 || true
grep -F 'Potential Performance Loss' "$report.new" >&2 || true # ptxas reports it as information
mv "$report.new" "$report"

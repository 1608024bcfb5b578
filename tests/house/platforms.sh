#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# platforms.sh ROOT - tests that CMake refuses the platforms that README.md refuses, in one sentence, before it looks for a
# compiler.
set -euo pipefail
root=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
bad=0
grep -qx '| Windows, macOS, BSD | no; .*' "$root/README.md" || {
    echo 'FAILED: README.md does not refuse Windows, macOS and BSD'
    bad=1
}
for system in Windows Darwin FreeBSD; do
    if cmake -S "$root" -B "$work/$system" -DCMAKE_SYSTEM_NAME=$system -DCMAKE_C_COMPILER=/no/compiler >"$work/log" 2>&1 ||
        ! tr -s ' \n' ' ' <"$work/log" | grep -qF "libflashmla runs on Linux alone, with glibc or musl; this build is for $system."; then
        echo "FAILED: $system was not refused, or in other words:"
        cat "$work/log"
        bad=1
    fi
done
exit $bad

#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# build.sh PRESET - configures and builds one preset of CMakePresets.json.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

preset=${1:-release}
cache=build/$preset/CMakeCache.txt

# CMake reads CC only in a new build folder. For another compiler, or after the checkout moved, the folder is made anew.
if [ -f "$cache" ]; then
    stale=
    grep -qxF "CMAKE_HOME_DIRECTORY:INTERNAL=$PWD" "$cache" || stale=1
    if [ -n "${CC:-}" ]; then
        read -ra words <<<"$CC"
        wanted=$(command -v "${words[0]}" || true)
        grep -qE "^CMAKE_C_COMPILER:[A-Z]+=($wanted|${words[0]})$" "$cache" || stale=1
    fi
    [ -z "$stale" ] || rm -rf "build/$preset"
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! cmake --preset "$preset" >"$log" 2>&1; then
    cat "$log" >&2
    exit 1
fi
cmake --build --preset "$preset"

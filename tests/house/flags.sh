#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# flags.sh ROOT - tests the level at which files are compiled: the CPU's kernels with -O3, also in a distribution's build
# (-O2, build type None) and in one without any level; only a build for a debugger leaves them alone. A sanitizer's build
# compiles some of them with less. Link-time optimisation is left out of the library. CC names the compiler.
set -euo pipefail
root=$(cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset CFLAGS
bad=0

# levels OPTION...: configures, and prints each source with its level, which is the last one given.
levels() {
    rm -rf "$work/build"
    cmake -S "$root" -B "$work/build" -DFMLA_CUDA=OFF -DFMLA_TOOLS=OFF -DFMLA_TESTS=OFF -DFMLA_EXAMPLES=OFF "$@" \
        >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
    awk -v root="$root/" '
        /^ *"command":/ {
            level = "none"
            lto = ""
            for (i = 1; i <= NF; i++) {
                if ($i ~ /^-O/) level = $i
                if ($i ~ /^-f(no-)?lto/) lto = $i == "-fno-lto" ? "" : $i
            }
            level = level lto
        }
        /^ *"file":/ { sub(/^[^:]*: "/, ""); sub(/".*/, ""); print substr($0, length(root) + 1), level }
    ' "$work/build/compile_commands.json"
}

# expect WHAT PATTERN LEVEL: sources that match have this level, and there are some.
expect() {
    if ! grep -E "^$2 " "$work/levels" >"$work/matching"; then
        echo "FAILED: $1: no source matches $2"
        bad=1
    elif grep -v " $3$" "$work/matching"; then
        echo "^ FAILED: $1: not compiled with $3"
        bad=1
    fi
}

levels -DCMAKE_BUILD_TYPE=None -DCMAKE_C_FLAGS='-g -O2 -flto=auto -fstack-protector-strong' -DCMAKE_INTERPROCEDURAL_OPTIMIZATION=ON >"$work/levels"
expect 'a distribution' 'src/cpu/.*' -O3
expect 'a distribution' 'src/(ref/)?[^/]*' -O2
levels -DCMAKE_BUILD_TYPE=None >"$work/levels"
expect 'no level' 'src/cpu/.*' -O3
expect 'no level' 'src/(ref/)?[^/]*' none
levels -DCMAKE_BUILD_TYPE=Debug >"$work/levels"
expect 'a debugger' '.*' none
levels >"$work/levels"
expect 'the default' '.*' -O3
levels -DFMLA_SANITIZE=address,undefined >"$work/levels"
if grep -q '^src/cpu/amx/' "$work/levels"; then
    expect 'sanitizers' 'src/cpu/(amx/attention|avx512bf16/.*)\.c' '-O[01]'
fi
expect 'sanitizers' 'src/cpu/generic/.*' -O3
exit $bad

#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# build.sh PRESET [TARGET] - configures and builds one preset of CMakePresets.json, or one target of it. If that compiles
# kernels for GPUs, it says beforehand how long it takes, and how to choose.
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

# Seconds of one core, by nvcc 13.0 between fast and slow machines: a file of kernels for one GPU, one of Hopper's
# kernels, and two files of C.
kernel_seconds=7 hopper_seconds=11 two_c_seconds=1
gpus=$(sed -n 's/^-- Kernels for NVIDIA GPUs: .*, machine code for \(.*\), PTX [0-9]*$/\1/p' "$log")
# What would be done. Under its own name the file would first be made anew, and nothing else be said.
cp "build/$preset/build.ninja" "build/$preset/forecast.ninja"
ninja -C "build/$preset" -n -f forecast.ninja ${2:+"$2"} >"$log" 2>&1 || true
count() { grep -cE "^\[[0-9/]+\] $1" "$log" || true; }
hopper=$(count 'Compiling sm90/.*\.cu') kernels=$(count 'Compiling .*\.cu')
if [ "$kernels" -gt 0 ]; then
    cores=$(nproc)
    minutes() { # minutes SECONDS: on these cores
        local minutes=$((($1 - 1) / (60 * cores) + 1))
        printf '%d minute' $minutes
        [ $minutes -eq 1 ] || printf s
    }
    read -ra each <<<"$gpus"
    others=$((kernels - hopper)) rest=$(($(count 'Building C') * two_c_seconds / 2 + 1))
    printf 'Building takes about %s on %d cores, mostly for kernels for NVIDIA GPUs (%s).\n' \
        "$(minutes $((others * ${#each[@]} * kernel_seconds + hopper * hopper_seconds + rest)))" "$cores" "$gpus"
    printf '  FMLA_CUDA_ARCHS=all make   for all GPUs (about %s), or name some, as 80;90\n' \
        "$(minutes $((others * 8 * kernel_seconds + hopper * hopper_seconds + rest)))"
    printf '  FMLA_CUDA=OFF make         for none (about %s)\n' "$(minutes $rest)"
fi
cmake --build --preset "$preset" ${2:+--target "$2"}

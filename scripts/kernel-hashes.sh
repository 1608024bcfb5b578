#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# kernel-hashes.sh OUTPUT [ARCHITECTURE...] - SHA-256 of the machine code that nvcc makes of each .cu file of the library,
# for each architecture (80 and 90 unless others are given). checkattn --json takes the file kernels.sha256 beside itself
# into what it records; the same toolkit must give the same hashes again as long as the kernels are the same.
#
# Compiled anew, with the flags of the build (cmake/cuda.cmake), because a toolkit need not have cuobjdump, which could
# take machine code out of what was built.
set -euo pipefail
output=${1:?OUTPUT}
shift
[ $# -gt 0 ] || set -- 80 90
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case $output in /*) ;; *) output=$OLDPWD/$output ;; esac

nvcc=${CUDACXX:-}
[ -n "$nvcc" ] || nvcc=$(command -v nvcc || true)
[ -n "$nvcc" ] || nvcc=${CUDA_HOME:-/usr/local/cuda}/bin/nvcc
"$nvcc" --version >/dev/null || {
    echo "kernel-hashes: $nvcc does not run" >&2
    exit 3
}

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
{
    echo "# toolkit $("$nvcc" --version | sed -n 's/.* V\([0-9.]*\)$/\1/p')"
    git ls-files 'src/cuda/*.cu' | LC_ALL=C sort | while IFS= read -r source; do
        for architecture; do
            "$nvcc" -std=c++17 -O3 -cubin -arch="sm_$architecture" -o "$folder/cubin" "$source"
            hash=$(sha256sum "$folder/cubin")
            echo "${hash%% *}  $source sm_$architecture"
        done
    done
} >"$folder/list"
grep -q '^[0-9a-f]\{64\} ' "$folder/list" || {
    echo 'kernel-hashes: there is no kernel' >&2
    exit 1
}
mv "$folder/list" "$output"

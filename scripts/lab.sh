#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# lab.sh OUT | lab.sh --check - compiles the programs of lab/.
#
# OUT: a folder that receives one program for each lab/*.cu. --check compiles short versions (-DQUICK) without linking,
# and keeps nothing. Exits 77 without nvcc. The programs need Hopper for their instructions.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
out=${1:?OUT or --check}
nvcc=$(PATH=${CUDA_HOME:+$CUDA_HOME/bin:}$PATH:/usr/local/cuda/bin command -v "${CUDACXX:-nvcc}") || {
    echo 'needs nvcc'
    exit 77
}
flags=(-O3 -std=c++17 -gencode 'arch=compute_90a,code=sm_90a')
if [ "$out" = --check ]; then
    flags+=(-DQUICK -c)
    made=$(mktemp -d)
    trap 'rm -rf "$made"' EXIT
else
    flags+=(-lcuda "-L$(dirname "$(dirname "$nvcc")")/lib64/stubs")
    mkdir -p "$out"
    made=$out
fi
for source in "$root"/lab/*.cu; do
    name=$(basename "$source" .cu)
    "$nvcc" "${flags[@]}" -o "$made/$name" "$source"
    echo "lab/$name.cu"
done

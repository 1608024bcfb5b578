#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# memcheck.sh BUILD - valgrind over the AVX2 kernel of a finished build. It knows no AVX-512, so that under it the library
# sees a machine that has none. Exits 77, which is a skip, where the processor has no AVX2.
#
# checkattn compares with the oracle, in workspaces that it has filled; the command leaves its workspace as malloc gave it,
# so that a value that is used before it was written shows.
set -euo pipefail
build=$(cd "$1" && pwd)
if ! grep -qw avx2 /proc/cpuinfo; then
    echo 'memcheck: skipped: this processor has no AVX2'
    exit 77
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export OMP_NUM_THREADS=1 FLASHMLA_KERNEL=cpu-avx2
check() { valgrind --quiet --error-exitcode=9 --leak-check=full --errors-for-leak-kinds=definite "$@"; }

check "$build/checkattn" --threads own --op dense_decode --kernel cpu-avx2 --cases 2 | tee result
grep -q '^partial dense_decode cpu-avx2: ' result # a kernel that was not reached has not passed
for options in '' '--dtype fp16 --page-size 17 --causal --sink --query-tokens 2 --kv-heads 2 --d-qk 512'; do
    # shellcheck disable=SC2086 # words
    "$build/flashmla" make-input batch.safetensors --seq-lens 0,1,65,140 --heads 18 $options >/dev/null
    for more in '' --batch-invariant; do
        # shellcheck disable=SC2086
        check "$build/flashmla" run batch.safetensors --check --repeat 1 --threads 1 $more | tee result
        grep -Eq '^kernel +cpu-avx2' result
        grep -Eq '^check +PASS' result
    done
done

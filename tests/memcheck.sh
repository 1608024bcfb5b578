#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# memcheck.sh BUILD - runs valgrind over the AVX2 kernel of a finished build. valgrind has no AVX-512, so the library
# sees a machine without it. Exits 77 (skipped) if the processor has no AVX2.
#
# checkattn compares with the oracle in filled workspaces; the command leaves its workspace as malloc returned it, so
# valgrind detects a value used before it is written.
set -euo pipefail
build=$(cd "$1" && pwd)
if ! grep -qw avx2 /proc/cpuinfo; then
    echo 'memcheck: skipped: this processor has no AVX2'
    exit 77
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export OMP_NUM_THREADS=1 FLASHMLA_KERNEL=cpu-avx2
check() { valgrind --quiet --error-exitcode=9 --leak-check=full --errors-for-leak-kinds=definite "$@"; }

oracle() { # oracle K/N: that part of the cases
    check "$build/checkattn" --device cpu --threads own --op dense_decode --kernel cpu-avx2 --cases 2 --part "$1" | tee result
    grep -q '^partial dense_decode cpu-avx2: ' result # a kernel that was not reached fails
}

run_batch() { # run_batch MORE OPTION...: makes an input with the options and runs it, with MORE if not empty
    local more=$1
    shift
    "$build/flashmla" make-input batch.safetensors --seq-lens 0,1,65,140 --heads 18 "$@" >/dev/null
    check "$build/flashmla" run batch.safetensors --check --repeat 1 --threads 1 ${more:+"$more"} | tee result
    grep -Eq '^kernel +cpu-avx2' result
    grep -Eq '^check +PASS' result
}

# Parts run in parallel, each in its own folder, because valgrind uses one core.
parts=()
part() { # part COMMAND...
    local own=$folder/${#parts[@]}
    mkdir "$own"
    (cd "$own" && set -e && "$@") >"$own/log" 2>&1 &
    parts+=($!)
}
for share in 1/3 2/3 3/3; do part oracle $share; done
other=(--dtype fp16 --page-size 17 --causal --sink --query-tokens 2 --kv-heads 2 --d-qk 512)
for more in '' --batch-invariant; do
    part run_batch "$more"
    part run_batch "$more" "${other[@]}"
done
bad=0
for i in "${!parts[@]}"; do
    wait "${parts[i]}" || bad=1
    cat "$folder/$i/log"
done
[ $bad -eq 0 ]

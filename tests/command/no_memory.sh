#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# no_memory.sh FLASHMLA FAILING_MALLOC - the command when its n-th allocation fails, for every n that there is, once or
# from then on. It either does all of its work all the same, or ends with one line, a non-zero exit and no file.
set -u
export flashmla=$1
shim=$2
# shellcheck disable=SC1091 # checked by itself
. "$(dirname "$0")/common.sh"
export OMP_NUM_THREADS=1
# This is about the command's own memory: in front of a driver that may be here stands one that cannot be loaded.
mkdir no_cuda && echo 'no library' >no_cuda/libcuda.so.1
export LD_LIBRARY_PATH=$PWD/no_cuda${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}

good make-input batch.safetensors --seq-lens 5,70 --heads 2 --sink
# Without an extra cache: jansson 2.14 itself crashes where it has no memory for a string as long as that one's names.
good make-input sparse.safetensors --op sparse_decode --batch 2 --seq-len 70 --topk 20 --heads 2 --cache fp8_584 --short-lists --sink
good make-input prompt.safetensors --op sparse_prefill --query-tokens 2 --seq-len 70 --topk 20 --heads 2 --cache fp8_584 --short-lists --sink

# each WORDS…: the command, with whatever it writes in the folder made/.
each() {
    local n mode rc reached lines differs='^time|GFLOP|there is no NVIDIA driver|"us":'
    rm -rf made && mkdir made
    "$flashmla" "$@" >whole 2>stderr || wrong "flashmla $*: exit $?"
    rm -rf made.whole
    cp -r made made.whole
    for mode in 0 1; do
        for ((n = 1;; n++)); do
            rm -rf made && mkdir made
            rc=0
            FMLA_FAIL_AT=$n FMLA_FAIL_ON=$mode LD_PRELOAD=$shim "$flashmla" "$@" >stdout 2>stderr 9>reached || rc=$?
            reached=$(wc -c <reached)
            [ "$reached" -gt 0 ] || break
            checks=$((checks + 1))
            lines=$(wc -l <stderr)
            if [ "$rc" -eq 0 ]; then
                # Times differ from run to run, and a driver that could not be loaded says why; all else is the same.
                if ! diff <(grep -vE "$differs" whole) <(grep -vE "$differs" stdout) >difference ||
                    ! diff -r made made.whole >/dev/null || [ "$lines" -ne 0 ]; then
                    wrong "flashmla $*: allocation $n fails ($mode): exit 0, but the work is not done: $(head -n 3 difference)"
                fi
            elif [ "$rc" -ge 126 ]; then
                wrong "flashmla $*: allocation $n fails ($mode): exit $rc: $(head -n 1 stderr)"
            else
                [ "$lines" -eq 1 ] || wrong "flashmla $*: allocation $n fails ($mode): not one line: $(head -n 3 stderr)"
                [ -z "$(ls -A made)" ] || wrong "flashmla $*: allocation $n fails ($mode): leaves $(ls -A made)"
            fi
        done
        [ "$n" -gt 1 ] || wrong "flashmla $*: no allocation could be made to fail"
    done
}

each info
each info --json -
each plan --seq-lens 5,700 --partitions 3 --json -
each plan batch.safetensors --partitions 2 --svg made/plan.svg
each layout mma-c --svg made/layout.svg
each make-input made/made.safetensors --seq-lens 5,70 --heads 2
each run batch.safetensors --check --out made/result.safetensors --repeat 1 --threads 1 --json -
each make-input made/sparse.safetensors --op sparse_decode --batch 1 --seq-len 70 --topk 20 --cache fp8_656 --short-lists
each run sparse.safetensors --check --out made/result.safetensors --repeat 1 --threads 1
each make-input made/prompt.safetensors --op sparse_prefill --query-tokens 2 --seq-len 70 --topk 20 --cache fp8_656
each run prompt.safetensors --check --out made/result.safetensors --repeat 1 --threads 1
finish

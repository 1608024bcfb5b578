#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# wrong_result.sh FLASHMLA_THAT_ERRS - a kernel that errs is told by verify and by run --check: exit 1, one line, no file.
set -u
export flashmla=$1
# shellcheck disable=SC1091 # checked by itself
. "$(dirname "$0")/common.sh"

good make-input batch.safetensors --seq-lens 5,70 --heads 2

# The same program without a plant: what fails below fails because of the plant.
unset FMLA_PLANT
good verify
has '^ok +dense_decode +cpu-generic '
good run batch.safetensors --kernel cpu-generic --check --repeat 1
has '^check +PASS: '

# verify_fails PLANT OPERATION WORDS: what verify says on its last line, and that its table blames one kernel.
verify_fails() {
    export FMLA_PLANT=$1
    bad 1 "flashmla verify: $2 cpu-generic: $3" verify
    has "^FAILED +$2 +cpu-generic "
    checks=$((checks + 1))
    [ "$(grep -c '^FAILED' stdout)" -eq 1 ] || wrong "$1: not one kernel failed: $(cat stdout)"
}
verify_fails out dense_decode 'paged: 1 values of out and 0 of lse differ'
verify_fails input dense_decode "paged: 1 bytes differ from the oracle's"
verify_fails refused dense_decode 'paged: dense_decode: workspace'
verify_fails sparse-out sparse_decode 'sparse, FP8_656: 1 values of out and 0 of lse differ'
verify_fails sparse-lse sparse_decode 'sparse, FP8_656: 0 values of out and 1 of lse differ'
verify_fails prefill-out sparse_prefill 'prefill, BF16: 1 values of out and 0 of lse differ'
verify_fails prefill-lse sparse_prefill 'prefill, BF16: 0 values of out and 1 of lse differ'
verify_fails prefill-max sparse_prefill 'prefill, BF16: 1 values of max_logits differ'
verify_fails merge merge 'merge: 1 values of out and 0 of lse differ'
verify_fails append cache_append "BF16: 1 bytes differ from the oracle's"
verify_fails gather cache_gather "BF16: 1 bytes differ from the oracle's"
export FMLA_PLANT=lse
bad 1 'flashmla verify: dense_decode cpu-generic: paged: 0 values of out and 1 of lse differ' verify --json -
has '"passed":false'

for plant in out nan lse; do
    export FMLA_PLANT=$plant
    bad 1 'the result is wrong: ' run batch.safetensors --kernel cpu-generic --check --repeat 1 --out result
    has '^check +FAIL: '
done
good make-input sparse.safetensors --op sparse_decode --batch 2 --seq-len 200 --topk 100
for plant in sparse-out sparse-lse; do
    export FMLA_PLANT=$plant
    bad 1 'the result is wrong: ' run sparse.safetensors --kernel cpu-generic --check --repeat 1 --out result
    has '^check +FAIL: '
    bad 1 'the result is wrong: ' run sparse.safetensors --kernel cpu-generic --check --repeat 1 --out result --json -
    has '^[{]"op":"sparse_decode",.*"check":[{]"passed":false,'
done
good make-input prompt.safetensors --op sparse_prefill --query-tokens 3 --seq-len 200 --topk 100
for plant in 'prefill-out 1 values of out and 0 of lse' 'prefill-lse 0 values of out and 1 of lse' 'prefill-max 1 values of max_logits'; do
    export FMLA_PLANT=${plant%% *}
    bad 1 "the result is wrong: ${plant#* } differ" run prompt.safetensors --kernel cpu-generic --check --repeat 1 --out result
    has '^check +FAIL: '
done
finish

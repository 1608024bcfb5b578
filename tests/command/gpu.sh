#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# gpu.sh FLASHMLA [--fake] - tests run on cuda:0 against the oracle and the CPU's results. Exits 77 if no GPU can be
# used. --fake: a fake GPU, which must be usable, and whose results can be withheld.
set -u
export flashmla=$1
fake=${2:-}
# shellcheck disable=SC1091 # checked by itself
. "$(dirname "$0")/common.sh"

gpu_runs() { "$flashmla" info --all | sed -n '/^cuda:0/,/^$/p' | grep -Eq "^ +$1 +yes "; } # OPERATION KERNEL
if ! gpu_runs 'sparse_decode +cuda[a-z0-9-]*'; then
    "$flashmla" info | sed -n '/^cuda:0/,/^$/p'
    echo 'needs a GPU'
    [ "$fake" = --fake ] && exit 1
    exit 77
fi

# both WORDS…: runs on the GPU and on the CPU, checked; the files differ only in their numbers.
both() {
    good run "$@" --device cuda:0 --check --repeat 2 --out gpu.out
    has '^kernel +cuda[a-z0-9-]* on cuda:0$'
    has '^workspace +[0-9]+ bytes$'
    has '^check +PASS: '
    sed -n '/^q /,/^kernel /{/^kernel /!p}' stdout >on_gpu # the call, before the kernel
    passes "$@" --repeat 1 --out cpu.out
    sed -n '/^q /,/^kernel /{/^kernel /!p}' stdout >on_cpu
    checks=$((checks + 1))
    { [ -s on_cpu ] && cmp -s on_gpu on_cpu; } || wrong "run $*: says other things of the call: $(cat on_gpu)"
    [ "$(header gpu.out)" = "$(header cpu.out)" ] || wrong "run $*: another header: $(header gpu.out)"
    [ "$(stat -c %s gpu.out)" -eq "$(stat -c %s cpu.out)" ] || wrong "run $*: another size"
}
header() { # header FILE
    head -c $((8 + $(od -An -t u8 -N 8 "$1"))) "$1" | tail -c +9
}
# compared MAKE RUN FILE: both of what make-input makes, with these words.
compared() {
    # shellcheck disable=SC2086 # words
    good make-input "${3:-in.safetensors}" $1
    # shellcheck disable=SC2086
    both "${3:-in.safetensors}" $2
}

lengths='--seq-lens 0,1,63,64,65,200 --query-tokens 3 --causal --sink'
compared "$lengths --heads 6 --kv-heads 2 --d-qk 512 --page-size 17 --dtype fp16" '--log-base 2 --lse-empty neg' d.safetensors

# Dense decode over byte caches, if a kernel supports them.
for format in FP8_656 FP8_584 FP8_576; do
    gpu_runs 'dense_decode +cuda-sm80' || continue
    compared "$lengths --cache ${format,,} --heads 70 --page-size 16" '--log-base 2 --lse-empty neg'
    has "^kv_cache +\[27, 16, 1, ${format#FP8_}\] $format$"
done

# Sparse decode: every format, both types, two caches, short lists with holes, a sink.
sparse='--op sparse_decode'
compared "$sparse --batch 3 --seq-len 300 --topk 200 --cache fp8_656 --query-tokens 2 --sink" ''
has '^kv_cache .* FP8_656, 200 indices a token$'
both in.safetensors --batch-invariant --softmax-scale -0.5
both in.safetensors --lse-empty neg --log-base 2
compared "$sparse --batch 2 --seq-len 500 --topk 100 --cache fp8_584 --extra-topk 90 --extra-page-size 7 --short-lists --heads 70 \
    --page-size 61" '--lse-empty neg'
has '^extra cache +\[144, 7, 1, 584\] FP8_584, 90 indices'
if [ "$fake" != --fake ]; then # the oracle takes a while for these
    compared "$sparse --batch 40 --seq-len 3000 --topk 2048 --cache fp8_656 --heads 64 --query-tokens 2" ''
fi
for dtype in bf16 fp16; do
    for d_qk in 512 576; do
        compared "$sparse --batch 3 --seq-len 150 --dtype $dtype --d-qk $d_qk --topk 140 --heads 17 --page-size 16 \
            --extra-topk 20 --extra-page-size 3 --short-lists --sink --query-tokens 2" ''
        has "^q +.* $dtype, sink$"
    done
done
compared "$sparse --batch 0 --topk 0" ''
compared "$sparse --batch 2 --topk 0" '' # rows without a key

# Sparse prefill: keys of two key heads without pages, and every kind of page.
prefill() { compared "--op sparse_prefill $*" '--lse-empty neg --log-base 2' p.safetensors; }
prefill --query-tokens 5 --seq-len 300 --topk 200 --kv-heads 2 --heads 6 --d-qk 512 --sink --short-lists
has '^kv +\[300, 2, 512\] BF16, 200 indices a token$'
prefill --query-tokens 3 --seq-len 150 --topk 140 --page-size 16
prefill --query-tokens 3 --seq-len 300 --topk 200 --cache fp8_656 --heads 70
has '^kv +\[5, 64, 1, 656\] FP8_656, 200 indices a token$'
prefill --query-tokens 2 --seq-len 300 --topk 70 --cache fp8_584 --page-size 7 --short-lists
prefill --seq-len 0 --topk 0 # rows without a key

# Dense MHA and its gradients: with a sink and without one, and lengths in use, whose padding is NaN.
for op in mha_forward mha_backward; do
    compared "--op $op --varlen --seq-lens 0,1,65,200 --heads 6 --kv-heads 2 --d-qk 128 --causal" ''
    compared "--op $op --varlen --seq-lens 0,1,65,200 --heads 6 --kv-heads 2 --d-qk 128 --causal --used --sink" ''
    has '^keys +[0-9]+ in use of 4 requests, one after the other; '
    compared "--op $op --batch 3 --seq-len 70 --query-tokens 20 --heads 2 --used" ''
done

# Refusals: one line, no file.
bad 2 "--kernel: 'cpu-avx9' must be a kernel of sparse_prefill: " run p.safetensors --device cuda:0 --kernel cpu-avx9 --out o
good make-input s.safetensors --op sparse_decode --batch 1 --seq-len 100 --topk 50 --cache fp8_656
bad 3 'sparse_decode: ' run s.safetensors --device cuda:0 --kernel cuda-sm90 --softmax-scale -0.5 --out o
bad 3 'kernel cpu-generic runs on cpu' run s.safetensors --device cuda:0 --kernel cpu-generic --out o
bad 2 "--kernel: 'cpu-avx9' must be a kernel of sparse_decode: " run s.safetensors --device cuda:0 --kernel cpu-avx9 --out o
put odd.safetensors "$(odd_indices)" 2061
bad 1 'tensor "indices": does not begin at a multiple of 4 bytes' run odd.safetensors --device cuda:0 --out o
good run s.safetensors --device cuda:0 --kernel cuda --check --repeat 1
has '^kernel +cuda on cuda:0$'

# verify accepts every operation, and parts of a kernel, which it reports as such.
good verify --device cuda:0
for op in $(operations); do
    [ "$op" = dense_decode ] || has "^ok +$op +cuda +" # dense decode has only kernels with tensor cores
done
if gpu_runs 'sparse_decode +cuda-sm90'; then
    has '^ok +sparse_decode +cuda-sm90-64 +'
    has '^ok +sparse_decode +cuda-sm90-16 +'
fi
good info
within 80
has '^cuda:0.*: NVIDIA .*, compute capability '
has '^ +sparse_decode +cuda'
good info --all
within 80
has '^ +sparse_decode +cuda +yes '
if gpu_runs 'sparse_decode +cuda-sm90'; then
    has '^ +sparse_decode +cuda-sm90-64 +if named +part of cuda-sm90; takes bf16'
    has '^ +sparse_decode +cuda-sm90-16 +if named +part of cuda-sm90; takes bf16'
    good make-input s.safetensors --op sparse_decode --batch 3 --seq-len 300 --topk 200 --cache fp8_656 --heads 20
    for kernel in cuda-sm90-64 cuda-sm90-16; do
        good run s.safetensors --device cuda:0 --kernel $kernel --check --repeat 1
        has "^kernel +$kernel on cuda:0$"
    done
fi

if [ "$fake" = --fake ]; then
    export FMLA_IDLE=1
    bad 1 'the result is wrong: ' run s.safetensors --device cuda:0 --check --repeat 1 --out o
    has '^check +FAIL: '
    bad 1 'the result is wrong: ' run d.safetensors --device cuda:0 --check --repeat 1 --out o
    good make-input p.safetensors --op sparse_prefill --query-tokens 2 --seq-len 100 --topk 50
    bad 1 'the result is wrong: ' run p.safetensors --device cuda:0 --check --repeat 1 --out o
    bad 1 ': ' verify --device cuda:0
    for op in $(operations); do has "^FAILED +$op +cuda"; done
fi
finish

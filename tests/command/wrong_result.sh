#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# wrong_result.sh FLASHMLA_THAT_ERRS - verify and run --check report a wrong kernel: exit 1, one line, no file.
set -u
export flashmla=$1
# shellcheck disable=SC1091 # checked by itself
. "$(dirname "$0")/common.sh"

good make-input batch.safetensors --seq-lens 5,70 --heads 2
good make-input bytes.safetensors --cache fp8_576 --seq-lens 5,70 --heads 2

# The same program without a plant succeeds: failures below are due to the plant.
unset FMLA_PLANT
good verify
has '^ok +dense_decode +cpu-generic '
passes batch.safetensors --kernel cpu-generic --repeat 1

# verify_fails PLANT OPERATION WORDS: verify's last line has WORDS, and its table blames one kernel. A plant is an error of
# one operation; the last one is looked for in all.
verify_fails() {
    export FMLA_PLANT=$1
    bad 1 "flashmla verify: $2 cpu-generic: " verify --op "$2"
    grep -qF -- ": $3" stderr || wrong "$1: $(cat stderr) does not say '$3'"
    has "^FAILED +$2 +cpu-generic "
    checks=$((checks + 2))
    [ "$(grep -c '^FAILED' stdout)" -eq 1 ] || wrong "$1: not one kernel failed: $(cat stdout)"
}
for op in $(operations); do
    case $op in
    mha_backward) words='MHA gradients: 1 values of dq, 0 of dk and 0 of dv differ' ;;
    cache_*) words="BF16: 1 bytes differ from the oracle's" ;;
    *) words='1 values of out and 0 of lse differ' ;;
    esac
    verify_fails "$op" "$op" "$words"
done
verify_fails input dense_decode "paged: 1 bytes differ from the oracle's"
verify_fails refused dense_decode 'paged: dense_decode: workspace'
verify_fails sparse-lse sparse_decode 'sparse, FP8_656: 0 values of out and 1 of lse differ'
verify_fails prefill-lse sparse_prefill 'prefill, BF16: 0 values of out and 1 of lse differ'
verify_fails prefill-max sparse_prefill 'prefill, BF16: 1 values of max_logits differ'
verify_fails mha-lse mha_forward 'MHA: 0 values of out and 1 of lse differ'
verify_fails merge-out merge 'merge: 1 values of out and 0 of lse differ'
export FMLA_PLANT=lse
bad 1 'flashmla verify: dense_decode cpu-generic: paged: 0 values of out and 1 of lse differ' verify --json -
[ "$(grep -c '"passed":false' stdout)" -eq 1 ] || wrong "lse: not one kernel failed: $(cat stdout)"

# right|wrongly PLANT FILE WORDS: run --check of the file passes, or fails, in lines with WORDS.
right() {
    export FMLA_PLANT=$1
    passes "$2" --kernel cpu-generic --repeat 1
    has "${3:-}"
}
wrongly() {
    export FMLA_PLANT=$1
    bad 1 "the result is wrong: ${3:-}" run "$2" --kernel cpu-generic --check --repeat 1 --out result
    has '^check +FAIL: '
}
for plant in out nan lse; do wrongly $plant batch.safetensors; done
good make-input sparse.safetensors --op sparse_decode --batch 2 --seq-len 200 --topk 100
for plant in sparse-out sparse-lse; do
    wrongly $plant sparse.safetensors
    bad 1 'the result is wrong: ' run sparse.safetensors --kernel cpu-generic --check --repeat 1 --out result --json -
    has '^[{]"op":"sparse_decode",.*"check":[{]"passed":false,'
done
good make-input prefill.safetensors --op sparse_prefill --query-tokens 3 --seq-len 200 --topk 100
wrongly prefill-out prefill.safetensors '1 values of out and 0 of lse differ'
wrongly prefill-lse prefill.safetensors '0 values of out and 1 of lse differ'
wrongly prefill-max prefill.safetensors '1 values of max_logits differ'
for varlen in '' --varlen; do
    # More rows than the oracle computes whole: the last one is among those it computes.
    # shellcheck disable=SC2086 # none, or a word
    good make-input mha.safetensors --op mha_forward --batch 1 --seq-len 900 --causal $varlen
    wrongly mha-out mha.safetensors '1 values of out and 0 of lse differ'
    has '^check +FAIL: 64 of 14400 rows'
    wrongly mha-lse mha.safetensors '0 values of out and 1 of lse differ'
    has '^check +FAIL: 64 of 14400 rows'
done

# Two keys of ±64 whose sums cancel: rounding is relative to terms much larger than the result (docs/semantics.md,
# "Tolerances"). The tolerance allows that error, in inputs like these but not in those above, and no more.
many() { # many COUNT OCTAL…: prints these bytes COUNT times
    local i
    for ((i = $1; i > 0; i--)); do printf '%b' "$2"; done
}
data() {
    many 576 '\0200\077'
    many 288 '\0200\0102\0200\0302'
    many 288 '\0200\0302\0200\0102'
    printf '%b' "$1"
}
cancels() { # cancels FILE Q KEYS "NAME":{"dtype":"I32","shape":… BYTES: shapes of q and of the keys, and what names the keys
    local header="{\"q\":{\"dtype\":\"BF16\",\"shape\":$2,\"data_offsets\":[0,1152]},$3,\"data_offsets\":[1152,3456]},$4]}}"
    put "$1" "{\"__metadata__\":{\"kv_format\":\"BF16\"},${header#?}" 0
    data "$5" >>"$1"
}
cancels dense '[1,1,1,576]' '"kv_cache":{"dtype":"BF16","shape":[1,2,1,576]' '"seqlens":{"dtype":"I32","shape":[1],"data_offsets":[3456,3460' '\02\0\0\0'
cancels sparse '[1,1,1,576]' '"kv_cache":{"dtype":"BF16","shape":[1,2,1,576]' '"indices":{"dtype":"I32","shape":[1,1,2],"data_offsets":[3456,3464' '\01\0\0\0\0\0\0\0'
cancels prefill '[1,1,576]' '"kv":{"dtype":"BF16","shape":[2,1,576]' '"indices":{"dtype":"I32","shape":[1,1,2],"data_offsets":[3456,3464' '\01\0\0\0\0\0\0\0'
# In dense MHA values are separate tensors: ±64 in one file, ±1 in another; and in one file there are two concatenated
# requests, the first without a key.
bf16() { # bf16 NAME SHAPE BEGIN END
    echo -n "\"$1\":{\"dtype\":\"BF16\",\"shape\":[$2],\"data_offsets\":[$3,$4]}"
}
mha_data() { # mha_data OCTAL OCTAL: the numbers of either value, in turns
    many 192 '\0200\077'
    many 96 '\0200\0102\0200\0302'
    many 96 '\0200\0302\0200\0102'
    many 64 "$1$2"
    many 64 "$2$1"
}
put mha "{$(bf16 q 1,1,1,192 0 384),$(bf16 k 1,2,1,192 384 1152),$(bf16 v 1,2,1,128 1152 1664)}" 0
cp mha mha-small
mha_data '\0200\0102' '\0200\0302' >>mha
mha_data '\0200\0077' '\0200\0277' >>mha-small
starts='"dtype":"I32","shape":[3],"data_offsets"'
put mha-flat "{\"cu_seqlens_q\":{$starts:[0,12]},\"cu_seqlens_k\":{$starts:[12,24]},$(bf16 q 2,1,192 24 792),$(bf16 k 2,1,192 792 1560),$(bf16 v 2,1,128 1560 2072)}" 0
{ printf '%b' '\0\0\0\0\01\0\0\0\02\0\0\0' '\0\0\0\0\0\0\0\0\02\0\0\0'; many 192 '\0\0'; mha_data '\0200\0102' '\0200\0302'; } >>mha-flat
wrongly near-out mha-small
right near-lse mha-small
for plant in near-out near-lse; do
    right $plant mha-flat '^check +PASS: 2 of 2 rows '
    for file in dense sparse prefill mha; do right $plant $file '^check +PASS: 1 of 1 rows '; done
done
for result in out lse; do
    wrongly $result dense
    for file in sparse prefill mha; do wrongly $file-$result $file; done
done
# The same keys as codes of ±1 and a scale of 64.
scaled='"dtype":"F32","shape":[1],"data_offsets":[2308,2312]'
put fp8 "{\"__metadata__\":{\"kv_format\":\"FP8_576\"},$(bf16 q 1,1,1,576 0 1152),\"kv_cache\":{\"dtype\":\"U8\",\"shape\":[1,2,1,576],\"data_offsets\":[1152,2304]},\"seqlens\":{\"dtype\":\"I32\",\"shape\":[1],\"data_offsets\":[2304,2308]},\"kv_scale\":{$scaled}}" 0
{ many 576 '\0200\077'; many 288 '\0070\0270'; many 288 '\0270\0070'; printf '%b' '\02\0\0\0' '\0\0\0200\0102'; } >>fp8
for plant in near-out near-lse; do
    right $plant fp8 '^check +PASS: 1 of 1 rows '
    for file in bytes batch sparse prefill mha; do wrongly $plant $file.safetensors; done
done
for plant in out lse; do wrongly $plant fp8; done
finish

#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# bad_input.sh FLASHMLA STAND_IN - every bad input gives one clear line, the right exit code and no partial file. Where
# bench runs, it is STAND_IN's, the same command, which need not measure its peaks.
set -u
export flashmla=$1
# shellcheck disable=SC1091 # checked by itself
. "$(dirname "$0")/common.sh"

q='"q":{"dtype":"BF16","shape":[1,1,1,576],"data_offsets":[0,1152]}'
cache='"kv_cache":{"dtype":"BF16","shape":[1,1,1,576],"data_offsets":[1152,2304]}'
seqlens='"seqlens":{"dtype":"I32","shape":[1],"data_offsets":[2304,2308]}'
put fine.safetensors "{$q,$cache,$seqlens}" 2308
good run fine.safetensors --check

# ---- Files that lie
lies() { # lies FILE PART BYTES HEADER
    put "$1" "$4" "$3"
    bad 1 "$2" run "$1" --out o
}
edited() { # edited FILE SED PART
    sed "$2" "$1" >format.safetensors
    bad 1 "$3" run format.safetensors
}
head -c 1000 fine.safetensors >cut.safetensors
bad 1 'cut.safetensors: ' run cut.safetensors --out out.safetensors
bad 1 'cut.safetensors: ' plan cut.safetensors
lies past.safetensors 'tensor "seqlens": data_offsets [2304, 9999] reach past the 2308 bytes of data' 2308 "{$q,$cache,\"seqlens\":{\"dtype\":\"I32\",\"shape\":[1],\"data_offsets\":[2304,9999]}}"
lies overlap.safetensors 'tensors "q" and "kv_cache" overlap' 2302 "{$q,\"kv_cache\":{\"dtype\":\"BF16\",\"shape\":[1,1,1,576],\"data_offsets\":[1150,2302]}}"
lies dtype.safetensors 'tensor "seqlens": dtype is F32, must be I32' 2308 "{$q,$cache,\"seqlens\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[2304,2308]}}"
lies dtypes.safetensors 'dense_decode: kv_cache: dtype' 2308 "{\"q\":{\"dtype\":\"F16\",\"shape\":[1,1,1,576],\"data_offsets\":[0,1152]},$cache,$seqlens}"
lies shape.safetensors 'tensor "q": has 3 dimensions, must have 4' 2308 "{\"q\":{\"dtype\":\"BF16\",\"shape\":[1,1,576],\"data_offsets\":[0,1152]},$cache,$seqlens}"
lies sizes.safetensors 'sizes.safetensors: dense_decode: ' 2308 "{\"q\":{\"dtype\":\"BF16\",\"shape\":[1,1,2,288],\"data_offsets\":[0,1152]},$cache,$seqlens}"
lies missing.safetensors 'has no tensor "kv_cache"; it has q' 1152 "{$q}"
lies note.safetensors "causal is 'maybe', must be true or false" 2308 "{\"__metadata__\":{\"causal\":\"maybe\"},$q,$cache,$seqlens}"
put huge.safetensors '{}' 0 $((4 << 30))
bad 1 'header claims 4294967296 bytes' run huge.safetensors --out o
: >empty.safetensors
bad 1 'has 0 bytes' run empty.safetensors
mkdir folder
bad 1 'is a directory' run folder
bad 1 'nowhere: cannot open' run nowhere
# A page outside the cache.
good make-input table.safetensors --seq-lens 5
good make-input sparse.safetensors --op sparse_decode --batch 2 --seq-len 100 --topk 20 --cache fp8_656
bad 2 '--causal: does not apply to sparse decode' run sparse.safetensors --causal
bad 3 'GPU: ' run sparse.safetensors --device cuda:999 --out o
bad 2 "--device: 'cuda' must be cpu or cuda:N" run sparse.safetensors --device cuda
lies odd.safetensors 'tensor "indices": does not begin at a multiple of 4 bytes' 2061 "$(odd_indices)"
bad 2 "--kernel: 'cpu-avx9' must be a kernel of sparse_decode: " run sparse.safetensors --kernel cpu-avx9
edited sparse.safetensors 's/"FP8_656"/"FP8_657"/' "kv_format is 'FP8_657'"
edited sparse.safetensors 's/"FP8_656"/"FP8_584"/' 'kv_cache: bytes of a token (dimension 3) is 656, must be 584 as in FMLA_KV_FP8_584'
edited sparse.safetensors 's/"kv_format"/"kv_farmot"/' 'kv_format: is 0, must name the format'
edited sparse.safetensors 's/"topk_length"/"topk_lengtg"/; s/"kv_cache"/"kv_cashe"/' 'has no tensor "kv_cache"'
good make-input bytes.safetensors --cache fp8_576 --seq-lens 5,70 --heads 2 --sink
bad 3 'GPU: ' run bytes.safetensors --device cuda:999 --out o
edited bytes.safetensors 's/"FP8_576"/"FP8_577"/' "kv_format is 'FP8_577', must be BF16, FP16, FP8_656, FP8_584 or FP8_576"
edited bytes.safetensors 's/"FP8_576"/"FP8_656"/' 'kv_cache: bytes of a token (dimension 3) is 576, must be 656 as in FMLA_KV_FP8_656'
edited bytes.safetensors 's/"FP8_576"/"BF16"   /' 'kv_cache: dtype is uint8'
edited bytes.safetensors 's/"kv_format"/"kv_farmot"/' 'dense_decode: kv_format: is 0, must name the format of the bytes in kv_cache'
edited bytes.safetensors 's/"kv_scale"/"kv_other"/; s/"attn_sink"/"kv_scale" /' 'dense_decode: kv_scale: values (dimension 0): is 2, must be in [1, 1]'
edited bytes.safetensors 's/"kv_scale":{"dtype":"F32"/"kv_scale":{"dtype":"I32"/' 'dense_decode: kv_scale: dtype is int32'
edited bytes.safetensors 's/"kv_scale":{"dtype":"F32","shape":\[1\]/"kv_scale":{"dtype":"F32","shape":[] /' 'tensor "kv_scale": has 0 dimensions, must have 1'
edited sparse.safetensors 's/"FP8_656"/"FP8_576"/' "kv_format is 'FP8_576', must be BF16, FP16, FP8_656, FP8_584, FP8_528, FP8_528_SPLIT, FP4_288, FP4_288_SPLIT or FP8_528_F32"
lies width.safetensors 'dense_decode: q: d_qk (dimension 3) is 576, must be 512 as in FMLA_KV_FP8_584' 1740 "{\"__metadata__\":{\"kv_format\":\"FP8_584\"},$q,\"kv_cache\":{\"dtype\":\"U8\",\"shape\":[1,1,1,584],\"data_offsets\":[1152,1736]},\"seqlens\":{\"dtype\":\"I32\",\"shape\":[1],\"data_offsets\":[1736,1740]}}"
good make-input codes.safetensors --cache fp8_576 --products codes --seq-lens 5 --heads 2
edited codes.safetensors 's/"products":"fp8"/"products":"fp4"/' "products is 'fp4', must be bf16 or fp8"
edited codes.safetensors 's/"products"/"prodacts"/' 'dense_decode: q: dtype is uint8, must be bfloat16 or float16'
bad 1 'dense_decode: q: dtype is uint8, must be bfloat16 or float16' run codes.safetensors --products bf16
bad 2 '--products: does not apply to sparse decode' run sparse.safetensors --products fp8
# A scale of the cache in a format that has none.
for format in fp8_656 fp8_584; do
    good make-input bytes.safetensors --cache $format --seq-lens 5 --heads 1 --sink
    edited bytes.safetensors 's/"attn_sink"/"kv_scale" /' "dense_decode: kv_scale: is a tensor, must be NULL: FMLA_KV_${format^^} has no cache scale"
done
lies scaled.safetensors 'dense_decode: kv_scale: is a tensor, must be NULL: FMLA_KV_BF16' 2312 "{$q,$cache,$seqlens,\"kv_scale\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[2308,2312]}}"
good make-input prefill.safetensors --op sparse_prefill --query-tokens 2 --seq-len 100 --topk 20 --cache fp8_656
bad 2 '--causal: does not apply to sparse prefill' run prefill.safetensors --causal
bad 2 '--batch-invariant: does not apply to sparse prefill' run prefill.safetensors --batch-invariant
bad 3 'GPU: ' run prefill.safetensors --device cuda:999 --out o
bad 2 "--kernel: 'cpu-avx9' must be a kernel of sparse_prefill: " run prefill.safetensors --kernel cpu-avx9 --out o
edited prefill.safetensors 's/"FP8_656"/"FP8_657"/' "kv_format is 'FP8_657'"
edited prefill.safetensors 's/"kv_format"/"kv_farmot"/' 'sparse_prefill: kv_format: is 0, must name the format'
edited prefill.safetensors 's/"softmax_scale":"0.5"/"softmax_scale":"0,5"/' "softmax_scale is '0,5', must be a finite number"
edited prefill.safetensors 's/"softmax_scale":"0.5"/"softmax_scale":"0e0"/' "softmax_scale is '0e0', must be a finite number that is not 0 in fp32"
lies rank.safetensors 'tensor "q": has 2 dimensions, must have 3' 2052 '{"q":{"dtype":"BF16","shape":[1,512],"data_offsets":[0,1024]},"kv":{"dtype":"BF16","shape":[1,1,512],"data_offsets":[1024,2048]},"indices":{"dtype":"I32","shape":[1,1,1],"data_offsets":[2048,2052]}}'
lies rank.safetensors 'tensor "kv": has 2 dimensions, must have 3' 2052 '{"q":{"dtype":"BF16","shape":[1,1,512],"data_offsets":[0,1024]},"kv":{"dtype":"BF16","shape":[1,512],"data_offsets":[1024,2048]},"indices":{"dtype":"I32","shape":[1,1,1],"data_offsets":[2048,2052]}}'
put types.safetensors '{"q":{"dtype":"BF16","shape":[1,1,512],"data_offsets":[0,1024]},"kv":{"dtype":"BF16","shape":[1,1,512],"data_offsets":[1024,2048]},"indices":{"dtype":"F32","shape":[1,1,1],"data_offsets":[2048,2052]}}' 2052
bad 1 'sparse_prefill: indices: dtype' run types.safetensors --check --out o
lies rows.safetensors 'rows.safetensors: ' 1028 '{"q":{"dtype":"BF16","shape":[4611686018427387904,4,0],"data_offsets":[0,0]},"kv":{"dtype":"BF16","shape":[1,1,512],"data_offsets":[0,1024]},"indices":{"dtype":"I32","shape":[1,1,1],"data_offsets":[1024,1028]}}'
good make-input mha.safetensors --op mha_forward --varlen --seq-lens 5,0,70 --heads 2
bad 2 '--batch-invariant: does not apply to mha forward' run mha.safetensors --batch-invariant
bad 2 "--kernel: 'cpu-avx9' must be a kernel of mha_forward: " run mha.safetensors --kernel cpu-avx9
bad 3 'GPU: ' run mha.safetensors --device cuda:999 --out o
bad 1 'is a file of mha forward, must be one of dense decode' plan mha.safetensors
edited mha.safetensors 's/"cu_seqlens_k"/"cu_seqlens_x"/' 'mha_forward: cu_seqlens_k: is NULL, must be given where q has 3 dimensions'
edited mha.safetensors 's/"v":/"w":/' 'has no tensor "v"; it has cu_seqlens_q'
edited mha.safetensors 's/"causal":"false"/"causal":"falsy"/' "causal is 'falsy', must be true or false"
edited mha.safetensors 's/"cu_seqlens_q":{"dtype":"I32"/"cu_seqlens_q":{"dtype":"F32"/' 'tensor "cu_seqlens_q": dtype is F32, must be I32'
one_q='"q":{"dtype":"BF16","shape":[1,1,1,64],"data_offsets":[0,128]}' one_k='"k":{"dtype":"BF16","shape":[1,1,1,64],"data_offsets":[128,256]}'
one_v='"v":{"dtype":"BF16","shape":[1,1,1,64],"data_offsets":[256,384]}'
put one.safetensors "{$one_q,$one_k,$one_v}" 384
good run one.safetensors --check
lies apart.safetensors 'cu_seqlens_q: is given, must be NULL where q has 4 dimensions' 400 "{$one_q,$one_k,$one_v,\"cu_seqlens_q\":{\"dtype\":\"I32\",\"shape\":[2],\"data_offsets\":[384,392]},\"cu_seqlens_k\":{\"dtype\":\"I32\",\"shape\":[2],\"data_offsets\":[392,400]}}"
lies ranks.safetensors 'mha_forward: k: ' 384 "{$one_q,\"k\":{\"dtype\":\"BF16\",\"shape\":[1,1,64],\"data_offsets\":[128,256]},$one_v}"
lies ranks.safetensors 'tensor "v": has 2 dimensions, must have 3' 384 "{$one_q,$one_k,\"v\":{\"dtype\":\"BF16\",\"shape\":[1,64],\"data_offsets\":[256,384]}}"
starts='"dtype":"I32","shape":[3],"data_offsets"'
for used in q k; do # lengths in use of one request where there are two
    lies used.safetensors "mha_forward: seqused_$used: " 412 "{\"q\":{\"dtype\":\"BF16\",\"shape\":[1,1,64],\"data_offsets\":[0,128]},\"k\":{\"dtype\":\"BF16\",\"shape\":[1,1,64],\"data_offsets\":[128,256]},\"v\":{\"dtype\":\"BF16\",\"shape\":[1,1,64],\"data_offsets\":[256,384]},\"cu_seqlens_q\":{$starts:[384,396]},\"cu_seqlens_k\":{$starts:[396,408]},\"seqused_$used\":{\"dtype\":\"I32\",\"shape\":[1],\"data_offsets\":[408,412]}}"
done
# Starts that decrease, are negative or past the end are not errors: tokens outside all requests stay unchanged.
patched() { # patched FILE START OCTAL ROWS PAIRS: another value in cu_seqlens_q, with which the data begins
    printf '%b' "$3" | dd of="$1" bs=1 conv=notrunc status=none seek=$((8 + $(od -An -t u8 -N 8 "$1") + 4 * $2))
    good run "$1" --check --repeat 1
    has "^keys .*; $5 "
    has "^check +PASS: $4 rows"
}
patched mha.safetensors 2 '\0377\0377\0377\0377' '150 of 150' $((2 * (5 * 5 + 70 * 70)))
patched mha.safetensors 3 '\0377\0377\0377\0177' '150 of 150' $((2 * (5 * 5 + 70 * 70)))
patched mha.safetensors 0 '\0003\0000\0000\0000' '150 of 150' $((2 * (2 * 5 + 70 * 70)))
patched mha.safetensors 1 '\0002\0000\0000\0000' '150 of 150' $((2 * 72 * 70))
good make-input mha.safetensors --op mha_forward --varlen --seq-lens 900,700 --causal # sampled, the first token among the rows
patched mha.safetensors 0 '\0003\0000\0000\0000' '64 of 25600' $((16 * (900 * 901 / 2 - 6 + 700 * 701 / 2)))
printf '\377\377\377\177' | dd of=table.safetensors bs=1 conv=notrunc status=none \
    seek=$(($(stat -c %s table.safetensors) - 8))
bad 1 'table.safetensors: dense_decode: block_table' run table.safetensors --out o

# ---- Command lines
bad 2 'a command is missing'
bad 2 'dance: no such command; allowed are info' dance
bad 2 '--frob: no such option; allowed are --out' run fine.safetensors --frob
bad 2 '--softmax-scale --batch-invariant' run fine.safetensors --frob
for words in 'benhc' 'help benhc'; do
    # shellcheck disable=SC2086 # words
    bad 2 'benhc: no such command; allowed are info, make-input, run, plan, bench, verify, layout, help, version' $words
    grep -q '; did you mean bench?$' stderr || wrong "$words: no suggestion: $(cat stderr)"
done
bad 2 '--help; did you mean --heads?' bench --heds 16
bad 2 '--help; did you mean --heads?' plan --heds=16
bad 2 'must be one of pos, neg; did you mean pos?' run fine.safetensors --lse-empty poss
bad 2 'cpu, h20, latency, peers, varlen, quick; did you mean quick?' bench --grid quik
bad 2 '; did you mean cpu-generic?' run fine.safetensors --kernel cpu_generic
bad 2 '; did you mean mma-a?' layout mma_a
bad 2 '--out: its value FILE is missing' run fine.safetensors --out
bad 2 "--repeat: '0' must be a whole number in [1, 100000]" run fine.safetensors --repeat 0
bad 2 "--repeat: '3x' must be a whole number" run fine.safetensors --repeat=3x
bad 2 "--repeat: '99999999999999999999' must be" run fine.safetensors --repeat 99999999999999999999
bad 2 "--softmax-scale: 'nan' must be a finite number" run fine.safetensors --softmax-scale nan
bad 2 '--softmax-scale: 1e-50 is 0 in fp32' run fine.safetensors --softmax-scale 1e-50
bad 2 '--softmax-scale: 0 is 0 in fp32' run fine.safetensors --softmax-scale 0
bad 2 '--softmax-scale: 1e+39 must be finite in fp32' run fine.safetensors --softmax-scale 1e39
good run fine.safetensors --softmax-scale 1e-40 --check
bad 2 "--seed: '18446744073709551616' must be a whole number in [0, 9223372036854775807]" make-input x --seed 18446744073709551616
bad 2 '--out: is given twice' run fine.safetensors --out o --out o
bad 2 '--repeat: is given twice' run fine.safetensors --repeat=1 --out o --repeat=2
bad 2 '--check: is given twice' run fine.safetensors --check --check
bad 2 '--seq-lens: is given twice' plan --seq-lens 1 --seq-lens 2
bad 2 'dance: no such command; allowed are info' help dance
bad 2 '--as: cannot be combined with a COMMAND' help run --as man
bad 2 "'run': the command takes no file" version run
bad 2 "--log-base: '10' must be one of e, 2" run fine.safetensors --log-base 10
bad 2 '--check: takes no value' run fine.safetensors --check=yes
bad 2 "'more': one file is allowed" run fine.safetensors more
bad 2 'FILE is missing' run
bad 2 '--causal: cannot be combined' run fine.safetensors --causal --no-causal
bad 2 "'x': the command takes no file" info x
bad 2 "--device: 'gpu' must be cpu or cuda:N" run fine.safetensors --device gpu
bad 2 "--device: 'cuda:' must be cpu or cuda:N" verify --device cuda:
bad 3 'GPU: ' run fine.safetensors --device cuda:999 --out o # no machine has that many
bad 3 'GPU: ' verify --device cuda:999
bad 2 "--seq-lens: '1,,2' must be whole numbers separated by commas" plan --seq-lens 1,,2
bad 2 "--seq-lens: cannot be combined with" plan --seq-lens 1,2 --batch 2
bad 2 '--min-len: 9 must not exceed --max-len 8' make-input x --min-len 9 --max-len 8
bad 2 '--d-qk: 513 must be 512 or 576' make-input x --d-qk 513
bad 2 '--kv-heads: 3 must divide --heads 16' make-input x --kv-heads 3
bad 2 '--topk: applies only to --op sparse_decode or sparse_prefill' make-input x --topk 5
bad 2 '--causal: does not apply to --op sparse_decode' make-input x --op sparse_decode --causal
bad 2 '--d-qk: 512 must be 576 with this --cache' make-input x --op sparse_decode --cache fp8_656 --d-qk 512
bad 2 '--dtype: fp16 needs --cache plain' make-input x --op sparse_decode --cache fp8_584 --dtype fp16
bad 2 '--d-qk: 512 must be 576 with this --cache' make-input x --cache fp8_576 --d-qk 512
bad 2 '--dtype: fp16 needs --cache plain' make-input x --cache fp8_584 --dtype fp16
bad 2 '--kv-heads: 2 must be 1 with pages of bytes' make-input x --cache fp8_656 --kv-heads 2
bad 2 '--products: fp8 needs --cache fp8_656 or fp8_576' make-input x --products fp8
bad 2 '--products: fp8 needs --cache fp8_656 or fp8_576' make-input x --products fp8 --cache fp8_584
bad 2 '--products: codes needs --cache fp8_576' make-input x --products codes --cache fp8_656
bad 2 '--products: does not apply to --op sparse_decode' make-input x --op sparse_decode --products fp8
bad 2 '--products: fp8 needs --cache fp8_656 or fp8_576' bench --products fp8
bad 2 "--products: 'fp4' must be one of bf16, fp8, codes, all" bench --products fp4
bad 2 '--cache: FP8_576 does not apply to --op sparse_decode' make-input x --op sparse_decode --cache fp8_576
bad 2 '--cache: FP8_576 does not apply to --op sparse_prefill' make-input x --op sparse_prefill --cache fp8_576
bad 2 '--cache: does not apply to --op mha_forward' make-input x --op mha_forward --cache plain
bad 2 "--cache: 'fp8_577' must be one of plain, fp8_656, fp8_584, fp8_576, fp8_528, fp8_528_split, fp4_288, fp4_288_split, fp8_528_f32, all" bench --cache fp8_577
bad 2 '--extra-cache: applies only to --op sparse_decode' bench --op sparse_prefill --extra-cache fp4_288
bad 2 '--extra-cache: --grid quick has no row with an extra cache and keys of the size of FP4_288' \
    bench --op sparse_decode --grid quick --extra-cache fp4_288
bad 2 '--extra-cache: --grid peers has no row with an extra cache and keys of the size of FP8_656' \
    bench --op sparse_decode --grid peers --extra-cache fp8_656
bad 2 '--batch: does not apply to --op sparse_prefill' make-input x --op sparse_prefill --batch 2
bad 2 '--causal: does not apply to --op sparse_prefill' make-input x --op sparse_prefill --causal
bad 2 '--extra-topk: does not apply to --op sparse_prefill' make-input x --op sparse_prefill --extra-topk 2
bad 2 '--dtype fp16: does not apply to --op sparse_prefill' make-input x --op sparse_prefill --dtype fp16
bad 2 '--kv-heads: 2 must be 1 with pages' make-input x --op sparse_prefill --kv-heads 2 --cache fp8_656
bad 2 '--kv-heads: 3 must divide --heads 16' make-input x --op sparse_prefill --kv-heads 3
bad 2 '--varlen: applies only to --op mha_forward' make-input x --varlen
bad 2 '--d-v: does not apply to --op sparse_decode' make-input x --op sparse_decode --d-v 64
bad 2 '--extra-topk: applies only to --op sparse_decode' make-input x --extra-topk 2
bad 2 '--seq-lens: needs --varlen with --op mha_forward' make-input x --op mha_forward --seq-lens 1,2
bad 2 '--max-len: needs --varlen with --op mha_forward' make-input x --op mha_forward --max-len 2
bad 2 '--dlse: does not apply to --op mha_forward' make-input x --op mha_forward --dlse
bad 2 '--used: applies only to --op mha_forward or mha_backward' make-input x --used
bad 2 '--used: does not apply to --op sparse_decode' make-input x --op sparse_decode --used
bad 2 '--page-size: does not apply to --op mha_forward' make-input x --op mha_forward --page-size 64
bad 2 '--kv-heads: 3 must divide --heads 16' make-input x --op mha_forward --kv-heads 3
bad 2 "--d-v: '513' must be a whole number in [1, 512]" make-input x --op mha_forward --d-v 513
bad 1 '2147483648 tokens and 2147483648 keys exceed the range of int32 cu_seqlens' make-input x --op mha_forward --varlen --batch 2 --seq-len 1073741824
bad 1 'no memory for q [1, 2147483647, 16, 192] of 13194139527168 bytes' make-input x --op mha_forward --batch 1 --seq-len 2147483647
bad 2 '--kv-heads: does not apply to --op sparse_decode' make-input x --op sparse_decode --kv-heads 2
bad 2 '--d-qk: 576 must be 512 with this --cache' make-input x --op sparse_prefill --cache fp8_584 --d-qk 576
bad 1 'exceeds the range of int32 indices' make-input x --op sparse_prefill --seq-len 2147483647 --page-size 64
bad 1 'no memory for indices [8, 4096, 2147483647] of 281474976579584 bytes' make-input x --op sparse_decode --batch 8 --query-tokens 4096 --seq-len 1 --topk 2147483647
bad 1 'no memory for indices [4096, 16, 2147483647] of 562949953159168 bytes' make-input x --op sparse_prefill --query-tokens 4096 --kv-heads 16 --seq-len 1 --topk 2147483647
bad 1 'exceeds the range of int32 indices' make-input x --op sparse_decode --batch 1000 --seq-len 10000000
bad 2 "lengths, heads and query tokens come from the file" plan fine.safetensors --heads 3
bad 2 "--kernel: 'nosuch' must be a kernel of dense_decode: " run fine.safetensors --kernel nosuch
bad 2 'cpu-generic, ref, cuda-sm90, cuda-sm90-fp8, cuda-sm80' run fine.safetensors --kernel zzz

# ---- Places that cannot be written
bad 1 '/dev/full: cannot write: No space left on device' make-input /dev/full --batch 1
bad 1 '/dev/full: cannot write: No space left on device' run fine.safetensors --out /dev/full
bad 1 '/dev/full: cannot write: No space left on device' plan --batch 2 --svg /dev/full
bad 1 'fine.safetensors/x: cannot ' run fine.safetensors --out fine.safetensors/x
bad 1 'nowhere/x: cannot create: No such file or directory' make-input nowhere/x --batch 1
bad 1 '/proc/flashmla: cannot create' run fine.safetensors --out /proc/flashmla
bad 1 'folder: is a directory, must be a file to write' plan --batch 2 --svg folder
bad 1 'and its file system has' make-input x --batch 100000 --query-tokens 4096 --heads 4096 --seq-len 1
# Standard output that fails, on a full disk or closed: of every command, as text and as each file it can write.
good --help
sed -n '/^Usage/,/^flashmla help/s/^  \([a-z-]*\) .*/\1/p' stdout >commands
[ "$(wc -l <commands)" -ge 9 ] || wrong "--help names few commands: $(cat commands)"
flashmla=$2
export FMLA_KNOWN_MACHINE=1
while read -r command; do
    case $command in
    make-input) words='made --batch 1' ;;
    run) words='fine.safetensors --repeat 1' ;;
    bench) words='--grid quick --repeat 1 --threads 1 --seq-len 64' ;;
    verify) words='--op merge' ;;
    layout) words='mma-a' ;;
    *) words='' ;;
    esac
    good "$command" --help
    outputs=$(sed -n 's/^  \(--[a-z-]*\) FILE .*/\1 -/p' stdout)
    [ "$command" != make-input ] || outputs='- --batch 1'
    while read -r output; do
        [ "$output" != '- --batch 1' ] || words=''
        # shellcheck disable=SC2086 # words
        "$flashmla" $command $words $output >/dev/full 2>stderr
        one_line 1 $? "^flashmla $command: .*standard output: \(cannot write: \)\?\(No space left on device\|an earlier write failed\)"
        # shellcheck disable=SC2086
        "$flashmla" $command $words $output >&- 2>stderr
        one_line 1 $? "^flashmla $command: .*standard output: \(cannot write: \)\?\(Bad file descriptor\|an earlier write failed\)"
    done < <(echo; echo "$outputs" | grep .)
done <commands
"$flashmla" --help >/dev/full 2>stderr
one_line 1 $? '^flashmla: cannot write to standard output'
# What is printed does not go into a file that is opened in place of a closed standard output.
"$flashmla" bench --grid quick --repeat 1 --threads 1 --seq-len 64 --json rows.jsonl >&- 2>stderr
one_line 1 $? 'cannot write to standard output'
{ [ "$(wc -l <rows.jsonl)" -eq 1 ] && grep -q '^{"op":.*}$' rows.jsonl; } || wrong "the table went into rows.jsonl: $(cat rows.jsonl)"
rm rows.jsonl
flashmla=$1

# A disk that fills up during the write, simulated by a file size limit; the previous file stays.
echo old >result
before=$(ls -A)
(ulimit -f 64 && exec "$flashmla" make-input result --seq-lens 4000) >stdout 2>stderr
one_line 1 $? 'result: cannot write: File too large'
[ "$(cat result)" = old ] || wrong 'make-input beyond the limit damaged the file that was there'
[ "$before" = "$(ls -A)" ] || wrong "make-input beyond the limit left: $(ls -A)"

# Interrupted: nothing remains either.
checks=$((checks + 1))
mkdir stopped
"$flashmla" make-input stopped/x --seq-lens 400000 >stdout 2>stderr &
process=$!
begins() { [ -n "$(ls -A stopped)" ]; }
soon begins
kill -TERM $process
rc=0
wait $process || rc=$?
[ "$rc" -eq 143 ] || wrong "stopped make-input: exit $rc"
[ -z "$(ls -A stopped)" ] || wrong "stopped make-input left: $(ls -A stopped)"

bad 2 "--grid: 'h20' must be one of cpu, mha, quick" bench --op mha_forward --grid h20
bad 2 '--kv-heads: 3 must divide --heads' bench --op mha_forward --kv-heads 3
bad 2 "--grid: 'big' must be one of cpu, h20, latency, peers, varlen, quick" bench --grid big
bad 2 '--d-qk: 513 must be 512 or 576' bench --grid quick --d-qk 513
bad 2 "'3'" bench --op 3
bad 2 '--between: products needs a GPU (--device cuda:0)' bench --grid quick --between products
bad 2 '--between: cannot be combined with --warm' bench --between read --warm
bad 2 '--host: cannot be combined with --warm or --between' bench --host --warm --device cuda:0
bad 2 '--host: needs a GPU' bench --host
bad 2 "--between: 'nothing' must be one of products, read" bench --between nothing
bad 2 "--grid: 'h20' must be one of cpu, peers, quick" bench --op sparse_prefill --grid h20
bad 2 '--kv-heads: 3 must divide --heads' bench --op sparse_prefill --grid quick --kv-heads 3
bad 2 '--d-qk: 513 must be 512 or 576' bench --op sparse_prefill --grid quick --d-qk 513
bad 2 '--op: ' bench --op prefill
bad 2 "--kernel: 'none' must be a kernel of sparse_prefill: " bench --op sparse_prefill --grid quick --kernel none --json none.jsonl
bad 2 "--kernel: 'none' must be a kernel of dense_decode: " bench --grid quick --repeat 1 --kernel none --json none.jsonl
bad 2 "--kernel: 'none' must be a kernel of merge: cpu-generic, ref, cuda" bench --op merge --kernel none
bad 2 "--kernel: 'none' must be a kernel of cache_gather: " bench --op cache_gather --kernel none
flashmla=$2 # no row is timed
bad 3 'd_qk' bench --op mha_forward --grid quick --d-qk 100 --json none.jsonl
if "$flashmla" info --all | grep -Eq '^ +dense_decode +cpu-avx512bf16 +yes '; then # a kernel that supports one type
    bad 3 'no row of the grid runs here: dense_decode: q: is fp16, kernel cpu-avx512bf16 takes bf16' \
        bench --grid quick --kernel cpu-avx512bf16 --dtype fp16 --json none.jsonl
fi
flashmla=$1
bad 2 'the command takes no file' verify file
bad 2 "--op: 'prefill' must be one of dense_decode, sparse_decode, sparse_prefill, " verify --op prefill

finish

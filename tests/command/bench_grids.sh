#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# bench_grids.sh FLASHMLA STAND_IN - tests the rows of bench's grids, and rows for which a machine has too little memory.
# Skipped rows are printed too, and take no time. STAND_IN is the same command, which can have little memory and known peaks.
set -u
small=$2
export flashmla=$1
# shellcheck disable=SC1091 # checked by itself
. "$(dirname "$0")/common.sh"
too_large="skipped: too large for this machine's memory"

# product "B…" "S_K…" "S_Q…" "H_Q…" [OPTIONS [D_QK]]: its rows, as print_shape orders the columns, up to the options.
product() {
    local h_q s_q b s_k
    for h_q in $4; do for s_q in $3; do for b in $1; do for s_k in $2; do
        echo "$b $s_k $s_q $h_q 1 ${6:-576} bf16${5+ $5} $too_large"
    done; done; done; done
}
grid() {
    case $1 in
    cpu)
        product '1 8' '1024 4096 16384' 1 '16 128'
        product 128 512 1 '16 128'
        ;;
    h20)
        product 128 '4096 8192' '1 2' '16 32 64 128' causal
        product 128 '4096 8192' '1 2' '16 32 64 128' causal,var
        ;;
    varlen) product 128 '4096 8192 32768' '1 2' '16 32 64 128' causal,var ;;
    latency) product '1 2 4' '1024 8192 65536' 1 '16 64 128' causal ;;
    peers)
        product '1 2 4 16 32' '1024 8192 65536' 1 '16 64 128' causal
        product 128 '4096 8192 32768' '1 2' '16 32 64 128' causal
        ;;
    esac
}

# passed_over GRID WORDS…: bench reports the rows on stdin, in any order, ends with 3 and writes no file.
passed_over() {
    sort >expected
    bad 3 'no row of the grid runs here' bench --grid "$@" --threads 1 --json rows.jsonl
    within 100
    unfold
    grep 'skipped' stdout | sed 's/^ *//; s/  */ /g' | sort >came
    checks=$((checks + 1))
    { [ -s expected ] && diff expected came >difference; } || wrong "--grid $*: $(head -n 5 difference)"
}

# Nothing fits.
flashmla=$small
export FMLA_LITTLE_MEMORY=1 FMLA_KNOWN_MACHINE=1
for name in cpu h20 latency peers varlen; do
    passed_over "$name" < <(grid "$name")
done
passed_over peers --sink yes < <( # sinks keep all products too
    product '1 2 4 16 32' '1024 8192 65536' 1 '16 64 128' causal,sink
    product 128 '4096 8192 32768' '1 2' '16 32 64 128' causal,sink
)
sparse() { product "$1" "$2" "$3" "$4" "$6" "$5"; } # sparse "B…" S_K "S_Q…" "H_Q…" D_QK OPTIONS
passed_over cpu --cache fp8_584 < <( # all products of a grid
    for s_k in 1024 4096 16384; do sparse '1 8' $s_k 1 '16 128' 512 FP8_584; done
    sparse 128 512 1 '16 128' 512 FP8_584
)
passed_over peers --op sparse_decode < <(
    sparse '1 2 16 64 128' 32768 '1 2' '64 128' 576 'FP8_656 topk 2048'
    sparse '2 64 128' 16384 2 64 512 'FP8_584 topk 128 + 512'
    sparse '2 64 128' 16384 2 128 512 'FP8_584 topk 128 + 1024'
    sparse '2 64 128' 16384 2 128 512 'FP8_584 topk 128 + 1024 varlen'
    sparse 148 32768 2 128 576 'FP8_656 topk 16384'
)
prefill() { product - "$1" 4096 "$2" "$4" "$3"; } # prefill "S_KV…" H_Q D_QK OPTIONS
passed_over peers --op sparse_prefill < <(
    prefill '8192 32768 131072' 128 576 'BF16 topk 2048'
    prefill 32768 64 512 'BF16 topk 512'
    prefill 32768 128 512 'BF16 topk 1024'
    prefill 32768 128 576 'FP8_656 topk 2048'
    prefill 32768 128 512 'FP8_584 topk 2048'
)
mha() { # mha B S H_Q H_KV SIZES OPTIONS
    local sizes options
    for sizes in $5; do for options in $6; do
        echo "$1 $2 $2 $3 $4 $sizes bf16 $options $too_large" | sed 's/ - / /'
    done; done
}
passed_over cpu --op mha_forward < <(mha 1 2048 16 16 '192/128 128/128 64/64' '- causal')
passed_over mha --op mha_forward < <(
    mha 8 2048 16 16 '192/128 128/128 64/64' '- causal'
    mha 2 8192 16 16 '192/128 128/128 64/64' '- causal'
    mha 1 16384 16 16 '192/128 128/128 64/64' '- causal'
    mha 2 8192 32 4 128/128 causal
    mha 16 8000 16 16 '192/128 128/128 64/64' 'var causal,var'
)
# A list for an axis in which products differ keeps only the first product; any other list keeps all.
passed_over mha --op mha_forward --batch 3 --d-qk 64 --causal yes < <(mha 3 2048 16 16 64/64 causal)
passed_over mha --op mha_forward --d-qk 192 --causal yes < <(
    mha 8 2048 16 16 192/128 causal
    mha 2 8192 16 16 192/128 causal
    mha 1 16384 16 16 192/128 causal
    mha 2 8192 32 4 192/128 causal
    mha 16 8000 16 16 192/128 causal,var
)
bad 3 'no row of the grid runs here' bench --op merge --grid quick --threads 1 --parts 2,3 --json rows.jsonl
has "^ +3 +1 .*$too_large$"
unset FMLA_LITTLE_MEMORY FMLA_KNOWN_MACHINE

# Warnings are one line each on standard error, and change nothing else.
warns() { # warns PART WORDS…
    local part=$1
    shift
    timed --grid quick --repeat 1 --kernel cpu-generic "$@" --json warned.jsonl
    checks=$((checks + 1))
    [ "$(grep -c "^flashmla bench: warning: $part" .warnings)" -eq 1 ] || wrong "bench $*: no warning '$part': $(cat .warnings)"
    [ "$(wc -l <warned.jsonl)" -eq 2 ] || wrong "bench $*: not two rows beside the warning: $(cat warned.jsonl)"
}
export FMLA_NO_PROCESSOR=1
warns 'the machine is busy: bench takes 1 thread, others run [0-9.]*, and there are 0 processors: ' --threads 1 --seq-len 64,65
unset FMLA_NO_PROCESSOR
export FMLA_PLANT=idle # a kernel that computes nothing
warns '2 of 2 rows took less time than they need at the measured peaks, first cpu-generic with [0-9.]* us of [0-9.]*: ' \
    --threads 1 --heads 128 --seq-len 512,4096
unset FMLA_PLANT
if command -v taskset >/dev/null; then
    one=$(taskset -cp $$ | sed 's/.*: //; s/[-,].*//')
    printf '#!/bin/sh\nexec taskset -c %s "%s" "$@"\n' "$one" "$1" >on_one
    chmod +x on_one
    flashmla=./on_one
    warns 'bench takes 3 threads, and this process may use 1 processors: .*; use --threads 1$' --threads 3 --seq-len 64,65
else
    echo 'SKIP: no taskset here'
fi
flashmla=$small
export FMLA_KNOWN_MACHINE=1

# Rows that fit are timed and written, next to one of 79 TB. Lists replace axes of a grid, which keeps its other axes.
rows 1 --grid quick --threads 1 --repeat 1 --page-size 1 --heads 4096 --kv-heads 4096 --seq-len 1,16777216
has "^ +1 +16777216 +1 +4096 +4096 .*$too_large$"
has '^ +1 +1 +1 4096 4096 +576 bf16( +[0-9.]+){6} [a-z0-9-]+$'
for grid in h20:4 peers:2; do
    rows "${grid#*:}" --grid "${grid%:*}" --warm --threads 1 --repeat 1 --batch 1 --seq-len 64 --heads 16 --query-tokens 1,2
    has '^ +1 +64 +1 +16 +1 +576 bf16( +[0-9.]+){6} [a-z0-9-]+ causal$'
    has '^ +1 +64 +2 +16 +1 +576 bf16 .* causal$'
    [ $grid = peers:2 ] || has '^ +1 +64 +2 +16 +1 +576 bf16 .* causal,var$'
    wrote "${grid#*:}" '"causal":true'
done
# If requested, a fixed-length batch with as many keys is timed beside varying lengths; streams are only for GPUs.
ratio() { # ratio COUNT: that many rows have a time of the fixed batch and the quotient of the two times
    wrote 0 stream_us
    awk_rows '
        value("fixed_us") + 0 > 0 {
            if (near(value("us") / value("fixed_us"), value("varlen_over_fixed")) && /"varlen":true/) right++
            else wrong++
        }
        END { exit !(right == lines && !wrong) }' lines="$1" rows.jsonl || wrong "not $1 quotients: $(cat rows.jsonl)"
}
rows 2 --grid varlen --threads 1 --repeat 3 --batch 2,3 --seq-len 64 --heads 16 --query-tokens 1
has '^ +3 +64 +1 +16 .* causal,var fixed [0-9.]+ us, var / fixed [0-9.]+$'
ratio 2
rows 2 --fixed --grid h20 --warm --threads 1 --repeat 3 --batch 2 --seq-len 64 --heads 16 --query-tokens 1
ratio 1
rows 2 --no-stream --grid h20 --threads 1 --repeat 1 --batch 2 --seq-len 64 --heads 16 --query-tokens 1
ratio 0
# The shapes of peers on a machine without memory or time for 4096 tokens: 2 keys of each list are invalid.
rows 5 --op sparse_prefill --grid peers --warm --threads 1 --repeat 1 --query-tokens 2 --seq-len 62 --topk 64 --heads 16
has '^ +- +62 +2 +16 +1 +576 bf16( +[0-9.]+){6} [a-z0-9-]+ FP8_656 topk 64$'
rows 2 --op sparse_prefill --grid quick --threads 1 --repeat 1 --query-tokens 1,1048576 --heads 4096 --seq-len 300 --topk 7
has "^ +- +300 +1048576 +4096 +1 +576 +bf16 BF16 topk 7 $too_large$"
has '^ +- +300 +1 +4096 +1 +576 bf16 .* FP8_656 topk 7$'
# Requests of any length, which cannot be compared with a fixed-length batch.
rows 12 --op mha_forward --fixed --warm --threads 1 --repeat 2 --batch 3 --seq-len 160 --heads 2 --varlen both
has '^ +3 +160 +160 +2 +2 +64/64 bf16( +[0-9.]+){6} [a-z0-9-]+ causal,var$'
wrote 6 '"varlen":true'
ratio 0
# Two of three are too large: 17.6 TB of parts.
rows 2 --op merge --grid quick --threads 1 --repeat 1 --parts 1,1024 --heads 64 --batch 1,65536
has "^ +1024 +65536 .*$too_large$"
has '^ +1024 +1 .* cpu-generic$'
finish

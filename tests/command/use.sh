#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# use.sh FLASHMLA STAND_IN - tests what the command's help promises, each subcommand at least once. STAND_IN is the
# same command, which can take the machine's peaks as known.
set -u
export flashmla=$1
# shellcheck disable=SC1091 # checked by itself
. "$(dirname "$0")/common.sh"

good --version
has '^flashmla [0-9]+\.[0-9]+\.[0-9]+$'
good --help
has 'Exit codes'
for command in info make-input run plan bench verify layout; do
    good "$command" --help
    has '^Examples$'
done

# info: an operation is one line of 80 columns, with the kernel that a call without a kernel's name takes.
good info
within 80
has '^cpu: .*, [0-9]+ threads \('
for said in '3: 3 threads (OMP_NUM_THREADS)' 'abc: OMP_NUM_THREADS is ignored, because it is no number'; do
    OMP_NUM_THREADS=${said%%: *} good info
    tr -s ' \n' ' ' <stdout >words
    holds "info does not say: ${said#*: }" grep -qF "${said#*: }" words
done
good info
has '^cuda:0(: | to )' # a GPU, or why there is none
cp stdout chosen
sed -n '/^cpu: /,/^$/s/^  \([a-z_][a-z_]*\) .*/\1/p' chosen >lines
good info --all
within 80
has '^  operation      kernel         runs here takes$'
has '^  dense_decode +cpu-generic +yes +bf16'
has '^  dense_decode +ref +if named +bf16'
# Each column begins where its name does.
awk '/^  operation/ { split("operation kernel runs takes", name); for (c in name) at[c] = index($0, name[c]) }
    /^  [a-z]/ { rows++; for (c in at) if (substr($0, at[c] - 1, 1) != " " || substr($0, at[c], 1) == " ") exit 1 }
    END { exit rows < 12 }' stdout || wrong "info --all: columns begin elsewhere than their names: $(cat stdout)"
sed -n '/^cpu: /,/^$/s/^  \([a-z_][a-z_]*\) .*/\1/p' stdout | grep -v '^operation$' | uniq >operations
holds 'info has not one line for each operation of info --all' cmp lines operations
for op in dense_decode sparse_decode sparse_prefill mha_forward; do
    batch='--batch 1'
    [ $op != sparse_prefill ] || batch=
    # shellcheck disable=SC2086 # words
    for dtype in bf16 fp16; do
        [ $op-$dtype != sparse_prefill-fp16 ] || continue
        good make-input first.safetensors --op $op $batch --seq-len 70 --heads 1 --dtype $dtype
        good run first.safetensors --repeat 1
        kernel=$(sed -n 's/^kernel  *\([^ ,]*\),.*/\1/p' stdout)
        named="$kernel(;|\$)"
        [ $dtype = bf16 ] || named="$kernel\$|^  $op .* fp16: $kernel(;|\$)"
        grep -Eq "^  $op +$named" chosen || wrong "info names another kernel of $op in $dtype than $kernel: $(cat chosen)"
    done
done
good info --json -
[ "$(wc -l <stdout)" -eq 1 ] || wrong 'info --json - is not one line'
has '"dense_decode"'
has '"built_with"'

# From a generated batch to checked results, with every type and option of make-input.
good make-input a.safetensors --batch 3 --min-len 1 --max-len 300
passes a.safetensors --out a.out --repeat 1
good make-input b.safetensors --seq-lens 0,1,63,64,65,200 --query-tokens 3 --heads 6 --kv-heads 2 --d-qk 512 \
    --page-size 17 --dtype fp16 --causal --sink --seed 5
good run b.safetensors --check --log-base 2 --lse-empty neg --out b.out --softmax-scale -0.5 --threads 1
has 'fp16, causal, sink'
has '^check +PASS: 108 of 108 rows'
passes a.safetensors --repeat 2 --json run.json --kernel cpu-generic
grep -q '^{"op":"dense_decode","kernel":"cpu-generic","device":"cpu","q":\[3,1,16,576\],"dtype":"bf16",.*"runs":2,"us":.*"check":{"passed":true,"rows":48,' run.json || wrong "run.json: $(cat run.json)"
good run a.safetensors --repeat 1 --json -
has "^[{]\"op\":\"dense_decode\","
[ "$(wc -l <stdout)" -eq 1 ] || wrong "run --json - prints more: $(cat stdout)"
passes b.safetensors --no-causal --batch-invariant --kernel ref --repeat 1
has '^kernel +ref'
checked '--batch 0' '--out empty.out'
# More than the oracle computes whole: rows are sampled.
for cache in plain fp8_576; do
    checked "--cache $cache --seq-lens 2200,50,1500 --heads 128 --query-tokens 4 --causal" '--repeat 1' '^check +PASS: 64 of 1536 rows'
done

# Dense decode over byte caches, in every format.
for format in FP8_656 FP8_584 FP8_576; do
    batch="--cache ${format,,} --seq-lens 0,1,63,64,65,200 --query-tokens 3 --heads 6 --page-size 17 --causal --sink"
    checked "$batch" '--repeat 1 --out f.out --log-base 2 --lse-empty neg' ", 6 heads over 1, d_qk 5(12|76), bf16, $format, causal, sink$" \
        "^kv_cache +\[25, 17, 1, ${format#FP8_}\] $format$" '^check +PASS: 108 of 108 rows'
    cp in.safetensors f.safetensors
    good plan f.safetensors --partitions 4
    checked "$batch" '--kernel cpu-generic --batch-invariant --repeat 1 --no-causal'
    holds 'make-input is not repeatable' cmp f.safetensors in.safetensors
    checked "--cache ${format,,} --batch 0" '--out empty.out'
done
# The scale of an FP8_576 cache matters: without it the keys differ.
sed 's/"kv_scale"/"kv_other"/' f.safetensors >c.safetensors
passes c.safetensors --repeat 1 --out c.out --log-base 2 --lse-empty neg
cmp -s f.out c.out && wrong 'run does not read kv_scale'
# FP8 products, with values and with codes.
for which in fp8:FP8_656:bf16:bf16 fp8:FP8_576:bf16:bf16 codes:FP8_576:e4m3:bytes; do
    IFS=: read -r products format type dtype <<<"$which"
    checked "--cache ${format,,} --products $products --seq-lens 0,1,65,200 --query-tokens 3 --heads 6 --causal --sink" '--repeat 1 --out p.out --json run.json' \
        ", bf16, $format, products $products, causal, sink$" "^q +\[4, 3, 6, 576\] $type, FP8 products, causal, sink$" \
        '^check +PASS: 72 of 72 rows'
    grep -q "\"dtype\":\"$dtype\"" run.json || wrong "run.json: $(cat run.json)"
done
# The scale of codes matters, and products follow the option.
sed 's/"q_scale"/"q_other"/' in.safetensors >c.safetensors
passes c.safetensors --repeat 1 --out c.out
cmp -s p.out c.out && wrong 'run does not read q_scale'
checked '--cache fp8_576 --seq-lens 0,1,65,200 --heads 6' '--repeat 1 --out c.out'
passes in.safetensors --repeat 1 --out p.out --products fp8
cmp -s p.out c.out && wrong 'run --products fp8 is as bf16'

# Sparse decode, in every format.
sparse='--op sparse_decode'
checked "$sparse --batch 3 --seq-len 300 --topk 200 --cache fp8_656 --query-tokens 2 --sink" '--out s.out --repeat 1' \
    'FP8_656 cache of 15 pages of 64, 200 indices, sink$' '^check +PASS: 96 of 96 rows' '^keys +1200 '
checked "$sparse --batch 2 --seq-len 500 --topk 100 --cache fp8_584 --extra-topk 90 --extra-page-size 7 --short-lists --heads 70 --page-size 61" \
    '--batch-invariant --lse-empty neg --log-base 2 --repeat 1' '^extra cache +\[144, 7, 1, 584\] FP8_584, 90 indices'
checked "$sparse --batch 1 --dtype fp16 --d-qk 512 --topk 4100" '--kernel cpu-generic --repeat 1' '^keys +4096 ' # the rest of the list is invalid
checked "$sparse --batch 0 --topk 0" '--out s.out'

# Sparse prefill: without pages and with every kind of page.
prefill='--op sparse_prefill'
checked "$prefill --query-tokens 5 --seq-len 300 --topk 200 --heads 6 --kv-heads 2 --sink --short-lists" \
    '--out p.out --repeat 1 --lse-empty neg --log-base 2' '5 tokens, 6 heads over 2, d_qk 576, BF16, 300 keys, 200 indices, sink$' \
    '^kv +\[300, 2, 576\] BF16, 200 indices a token$' '^check +PASS: 30 of 30 rows .*; max_logits: worst difference '
grep -aq '"max_logits":{"dtype":"F32","shape":\[5,6\]' p.out || wrong 'no max_logits in p.out'
checked "$prefill --query-tokens 2 --seq-len 130 --topk 100 --d-qk 512 --page-size 32" '--repeat 1 --threads 1' \
    'BF16, 5 pages of 32, 100 indices$' '^keys +200 '
for format in fp8_656 fp8_584; do
    checked "$prefill --query-tokens 3 --seq-len 150 --topk 170 --cache $format --short-lists --seed 4" '--repeat 1 --kernel cpu-generic' \
        '^check +PASS: 48 of 48 rows'
done
checked "$prefill --query-tokens 240 --heads 64 --seq-len 1000 --topk 64" '--repeat 1' '^check +PASS: 128 of 15360 rows' # sampled: two tokens
checked "$prefill --seq-len 0 --topk 3" '--out p.out' '^keys +0 '

# Dense MHA: separate and concatenated requests.
mha='--op mha_forward'
checked "$mha --batch 2 --seq-len 200 --heads 4" '--out m.out --repeat 1' \
    '^in.safetensors: 2 requests, 400 query tokens, 400 keys, 4 heads over 4, d_qk 192, d_v 128, bf16$' '^v +\[2, 200, 4, 128\]$' \
    '^keys +400 of 2 requests; 320000 ' '^check +PASS: 1600 of 1600 rows'
grep -aq '"lse":{"dtype":"F32","shape":\[2,4,200\]' m.out || wrong 'lse of m.out has another shape'
passes in.safetensors --causal --repeat 1 --kernel cpu-generic
has '^keys +400 of 2 requests; 160800 '
checked "$mha --varlen --seq-lens 0,1,65,64,130 --heads 8 --kv-heads 2 --d-qk 128 --causal --dtype fp16" \
    '--out m.out --repeat 1 --lse-empty neg --log-base 2 --softmax-scale -0.5 --json run.json' '^k +\[260, 2, 128\]$' '^check +PASS: 2080 of 2080 rows' \
    ': 5 requests one after the other, 260 query tokens, 260 keys, 8 heads over 2, d_qk 128, d_v 128, fp16, causal$'
grep -aq '"lse":{"dtype":"F32","shape":\[8,260\]' m.out || wrong 'lse of m.out has another shape'
grep -q '^{"op":"mha_forward",.*"q":\[260,8,128\],"dtype":"fp16",' run.json || wrong "run.json: $(cat run.json)"
# 3 tokens at each end, 2 heads.
checked "$mha --varlen --seq-lens 0,1,65 --heads 6 --kv-heads 2 --causal --sink" '--repeat 1' 'd_v 128, bf16, causal, sink$' \
    '^q +\[66, 6, 192\] bf16, causal, sink$' '^check +PASS: 396 of 396 rows'
checked '--op mha_backward --varlen --seq-lens 0,1,65 --heads 6 --kv-heads 2 --causal --sink --dlse' '--repeat 1 --out m.out' \
    'd_v 128, bf16, causal, sink, dlse$' '^check +PASS'
grep -aq '"d_attn_sink":{"dtype":"F32","shape":\[6\]' m.out || wrong 'm.out has no d_attn_sink'
# Lengths in use: padding is NaN, which is read without them.
lengths_in_use() { # lengths_in_use FILE 0|1: those of tokens, or of keys, of three concatenated requests
    od -An -t d4 -j $((8 + $(od -An -t u8 -N 8 "$1") + 32 + 12 * $2)) -N 12 "$1"
}
for op in mha_forward mha_backward; do
    used="--op $op --used --heads 6 --kv-heads 2 --d-qk 128 --causal --sink"
    checked "$used --varlen --seq-lens 0,1,65,200" '--repeat 1 --out m.out' 'd_v 128, bf16, causal, lengths in use, sink$' \
        '^keys +[0-9]+ in use of 4 requests, one after the other; ' '^check +PASS: 1596 of 1596 rows'
    checked "$used --batch 3 --seq-len 70 --query-tokens 20" '--repeat 1' '^keys +[0-9]+ in use of 3 requests; ' '^check +PASS: 360 of 360 rows'
    # As many tokens as keys are in use where a request has as many.
    good make-input in.safetensors --op $op --used --varlen --seq-lens 5,60,30 --heads 1
    holds "$op: lengths in use of tokens and keys differ" cmp <(lengths_in_use in.safetensors 0) <(lengths_in_use in.safetensors 1)
    sed 's/"seqused_k"/"seqother_"/; s/"seqused_q"/"seqothers"/' in.safetensors >c.safetensors
    for file in in c; do good run $file.safetensors --repeat 1 --out $file.out; done
    cmp -s in.out c.out && wrong "run of $op does not read lengths in use"
done
# More than the oracle computes whole.
checked "$mha --batch 3 --seq-len 1500 --heads 16 --causal --used" '--repeat 1' '^check +PASS: 64 of 72000 rows'
# Without a sink there is no gradient of one.
for dlse in '' --dlse; do
    checked "--op mha_backward --batch 2 --seq-len 70 --heads 2 $dlse" '--repeat 1 --out m.out' \
        '^check +PASS: 280 of 280 rows .*; dv: worst difference [0-9.e-]+$'
    grep -aq '"d_attn_sink"' m.out && wrong 'm.out has d_attn_sink of no sink'
done
checked "$mha --varlen --seq-lens 0,1,65,64,130 --query-tokens 3 --heads 2 --d-qk 64 --d-v 128 --causal" '--repeat 1' \
    '^keys +260 of 5 requests, one after the other; 1538 ' '^check +PASS: 30 of 30 rows'
for varlen in '' --varlen; do
    # More than the oracle computes whole, including tokens in the middle of requests.
    checked "$mha --batch 3 --seq-len 520 --heads 16 --causal $varlen" '--repeat 1' '^check +PASS: 64 of 24960 rows'
    checked "$mha --batch 0 $varlen" '--out m.out'
done
checked "$mha --seq-len 0 --query-tokens 3 --batch 2" '--lse-empty neg'
for file in m m2; do good make-input $file.safetensors --op mha_forward --varlen --batch 3 --min-len 1 --max-len 50 --heads 2; done
cmp m.safetensors m2.safetensors || wrong 'make-input of mha_forward is not repeatable'

# The same options give the same bytes, another seed gives others.
good make-input c.safetensors --batch 3 --min-len 1 --max-len 300
cmp a.safetensors c.safetensors || wrong 'make-input is not repeatable'
good make-input c.safetensors --batch 3 --min-len 1 --max-len 300 --seed 1
cmp -s a.safetensors c.safetensors && wrong 'make-input does not read --seed'
# A result replaces the previous file, also through a link.
ln -s a.out link
good run a.safetensors --out link --repeat 1
[ -L link ] || wrong 'a link was replaced by a file'
good run a.safetensors --out /dev/null --repeat 1

# The published plan: 128 requests of 4096 keys on 78 partitions.
good plan --batch 128 --seq-len 4096 --partitions 78
while read -r row; do
    has "^ *${row// / +}( |$)"
done <<'ROWS'
0 0 0 1 2880 0
1 1 2880 3 1344 1
2 3 1344 4 4096 1
3 5 0 6 2880 0
4 6 2880 8 1344 1
74 123 1344 124 4096 1
75 125 0 126 2880 0
76 126 2880 127 4096 1
77 128 0 127 4096 0
ROWS
has 'payload 119'
good plan --batch 128 --seq-len 4096 --heads 128 --query-tokens 1 --workers 156
has '78 partitions'
good plan --batch 0 --partitions 3 --svg none.svg
has '^The batch has no request: every partition is idle\.$'
grep -q '>The batch has no request: every partition is idle\.<' none.svg || wrong 'none.svg does not say that it is empty'
good plan --seq-lens 0 --partitions 3 --svg zero.svg
good plan b.safetensors --partitions 4 --json - --svg plan.svg
has '"lengths":\[0,1,63,64,65,200\]'
# Beyond the readable number of bars only some are drawn, and the picture says so; drawn bars are split where the plan splits them.
bars() { # bars FILE COUNT: the picture has bars of so many requests
    checks=$((checks + 1))
    [ "$(grep -o '<title>request [0-9]*' "$1" | sort -u | wc -l)" -eq "$2" ] || wrong "$1 has not $2 bars"
}
good plan --batch 128 --partitions 132 --svg full.svg
bars full.svg 128
grep -q thinned full.svg && wrong 'full.svg says that it is thinned'
good plan --batch 1000 --partitions 600 --seed 3 --svg many.svg
bars many.svg 125
grep -q '>Bars are thinned: of every 8 requests the longest one is drawn, 125 of 1000\.<' many.svg || wrong 'many.svg does not say that it is thinned'
grep -q '>Load of each partition: thinned, of every 2 the largest<' many.svg || wrong 'the loads of many.svg do not say that they are thinned'
lengths=$(seq -s, 1 129) # the second of every two is longer
good plan --seq-lens "$lengths" --partitions 7 --svg odd.svg
bars odd.svg 65
checks=$((checks + 1))
diff <(grep -o '<title>request [0-9]*' odd.svg | sed 's/.* //' | sort -nu) <(seq 1 2 127; echo 128) >difference ||
    wrong "odd.svg draws others than the longest: $(cat difference)"
for picture in none zero plan full many odd; do
    well_formed $picture.svg
    if command -v xmllint >/dev/null; then xmllint --noout $picture.svg || wrong "xmllint: $picture.svg"; fi
done
grep -q '<title>request 5, keys 0 to ' plan.svg || wrong 'plan.svg does not show request 5'

# Every kernel of this machine agrees with the oracle.
good verify
for op in $(operations); do has "^ok +$op +cpu-generic "; done
good verify --op merge
has '^ok +merge +cpu-generic '
grep -v '^ok  *merge ' stdout && wrong 'verify --op merge compares others too'
good verify --json verify.jsonl
has '^ok +dense_decode +cpu-generic '
head -1 verify.jsonl | grep -q '^{"device":"cpu","name":".*","threads":[0-9]*,"version":"' || wrong "verify.jsonl begins with $(head -1 verify.jsonl)"
grep -q '^{"operation":"dense_decode","kernel":"cpu-generic","passed":true,"cases":20,' verify.jsonl || wrong "verify.jsonl: $(cat verify.jsonl)"

# bench: peaks, rows, and a line of JSON for each row.
peaks() { # peaks COUNT: bench has measured that many peaks of arithmetic
    checks=$((checks + 1))
    [ "$(grep -c '^peak ' stdout)" -eq "$1" ] || wrong "not $1 peaks: $(cat stdout)"
}
rows 3 --grid quick --repeat 3
has '^peak +multiply and add, 128 bits +[0-9.]+ TFLOP/s on 1 thread'
has '^memory read +[0-9.]+ GB/s'
has '^ +1 +256 +1 +16 +1 +576 +bf16 '
rows 4 --cache all --repeat 1 --threads 1 --batch 2 --query-tokens 3 --seq-len 100 --heads 8 --kernel cpu-generic
has '^ +2 +100 +3 +8 +1 +576 bf16( +[0-9.]+){6} cpu-generic$'
has '^ +2 +100 +3 +8 +1 +512 bf16( +[0-9.]+){6} cpu-generic FP8_584$'
# Each key is read once, with the bytes of its format per token.
awk_rows '
    BEGIN { token["BF16"] = 1152; token["FP8_656"] = 656; token["FP8_584"] = 584; token["FP8_576"] = 576 }
    { cache = value("cache"); width = (cache == "FP8_584" ? 512 : 576) + 512; flop = 2 * 2 * 3 * 8 * 100 * width }
    { bytes = 2 * 100 * token[cache] + 2 * 2 * 3 * 8 * width }
    { memory = bytes / value("read_gbs") / 1e3; products = flop / value("peak_tflops") / 1e6 }
    near(value("tflops") * value("us") * 1e6, flop) && near(value("gbs") * value("us") * 1e3, bytes) &&
        near(value("floor_us"), memory > products ? memory : products) && !seen[cache]++ { right++ }
    END { exit !(NR == 4 && right == 4) }' rows.jsonl || wrong "other FLOP, bytes or floor: $(cat rows.jsonl)"
flashmla=$2
export FMLA_KNOWN_MACHINE=1
rows 4 --grid quick --repeat 1 --threads 1 --kernel cpu-generic --seq-len 64,65 --dtype both --causal yes
has ' fp16( +[0-9.]+){6} cpu-generic causal$'
peaks 1 # of the only kernel
rows 3 --cache fp8_576 --grid quick --repeat 1 --kv-heads 2 --d-qk 512 --dtype fp16
has '^ +1 +256 +1 +16 +1 +576 fp16 .* FP8_576$' # a format has its own sizes
rows 7 --cache all --products all --grid quick --seq-len 64 --repeat 1 # four caches with bf16, two with fp8, one with codes
has '^ +1 +64 +1 +16 +1 +576 bf16( +[0-9.]+){6} cpu-[a-z0-9]+ FP8_576,codes$'
wrote 2 '"products":"fp8"'
rows 2 --op merge --grid quick --parts 2,3 --repeat 1 --kernel cpu-generic
has '^ +3 .* cpu-generic$'
for op in cache_append cache_gather; do
    rows 40 --op $op --grid quick --tokens 1,70 --dtype both --page-size 16 --repeat 2 --kernel cpu-generic
    has "^$op +70 fp16 FP8_584 +16( +[0-9.]+){4} cpu-generic$"
    peaks 0 # only memory is a bound
done
rows 20 --op cache_convert --grid quick --tokens 1,70 --page-size 16 --repeat 2 --kernel cpu-generic
has "^cache_convert +70 bf16 FP8_528 +16( +[0-9.]+){4} cpu-generic to FP4_288$"
wrote 2 '"cache":"FP8_656",.*"to":"FP8_576"'
rows 6 --op cache_append --grid quick --tokens 3 --cache fp8_656 --norm both --rope all --repeat 1
has "^cache_append +3 +bf16 +FP8_656 .* norm rope interleaved$"
wrote 3 '"norm":true'
wrote 2 '"rope":"halves"'
rows 18 --op cache_append --grid quick --tokens 5 --cache all --dtype both --repeat 1
has '^cache_append +5 +fp16 +FP16 '
wrote 2 '"cache":"FP8_576"'
rows 2 --op sparse_decode --grid quick --repeat 1
has '^ +1 +1024 +1 +16 +1 +576 bf16 .* FP8_656 topk 256$'
rows 6 --op sparse_decode --grid cpu --repeat 1 --seq-len 200 --topk 100,300 --batch 1 --heads 8 --kernel cpu-generic
has ' cpu-generic FP8_584 topk 300 \+ 1024$'
wrote 1 '"topk":300,"extra":\{'
rows 5 --op sparse_decode --grid formats --repeat 1 --seq-len 200 --topk 60 --batch 1 --heads 8 --kernel cpu-generic
has ' cpu-generic FP8_528,FP4_288 topk 60 \+ 1024$'
wrote 1 '"cache":"FP4_288"\}'
rows 3 --op sparse_decode --grid peers --repeat 1 --threads 1 --kernel cpu-generic --seq-len 100 --topk 20 --batch 1 --query-tokens 1 --heads 2 \
    --cache fp8_528 --extra-cache fp4_288
has ' cpu-generic FP8_528,FP4_288 topk 20 \+ 512$'
has ' cpu-generic FP8_528,FP4_288 topk 20 \+ 1024 varlen$'
rows 1 --op sparse_decode --grid cpu --repeat 1 --threads 1 --kernel cpu-generic --seq-len 100 --topk 20 --batch 1 --heads 2 --extra-cache plain
has ' cpu-generic FP8_584,BF16 topk 20 \+ 1024$'
rows 7 --op sparse_decode --grid formats --repeat 1 --threads 1 --kernel cpu-generic --seq-len 100 --topk 20 --batch 1 --heads 2 --cache all \
    --extra-cache fp4_288_split
has ' 512 bf16( +[0-9.]+){6} cpu-generic BF16,FP4_288_SPLIT topk 20 \+ 1024$'
rows 3 --op sparse_prefill --grid quick --repeat 2
has '^ +- +1024 +8 +16 +1 +576 bf16( +[0-9.]+){6} [a-z0-9-]+ BF16 topk 64$'
has '^ +- +1024 +8 +16 +1 +576 bf16 .* FP8_656 topk 256$'
wrote 0 '"b":' # a prefill has no batch
wrote 1 '"page_size":64'
rows 12 --op sparse_prefill --grid cpu --repeat 1 --seq-len 200 --topk 100,300 --query-tokens 3 --heads 8,6 --kv-heads 2 --d-qk 512 --page-size 16 \
    --kernel cpu-generic --threads 1
has '^ +- +200 +3 +6 +2 +512 bf16( +[0-9.]+){6} cpu-generic BF16 topk 300$'
has '^ +- +200 +3 +8 +1 +576 bf16( +[0-9.]+){6} cpu-generic FP8_656 topk 100$'
has '^ +- +200 +3 +8 +1 +512 bf16( +[0-9.]+){6} cpu-generic FP8_584 '
wrote 8 '"page_size":16'
# A multiplication and an addition per head, key (100, named by 3 tokens) and element of both head sizes.
grep '"h_q":8,.*"d_qk":512,"cache":"BF16","topk":100,' rows.jsonl | awk_rows '
    near(value("tflops") * value("us") * 1e6, 2 * 3 * 8 * 100 * 1024) &&
        near(value("gbs") * value("us") * 1e3, 3 * 8 * (2 * 1024 + 8) + 2 * 200 * 512 * 2 + 4 * 3 * 2 * 100) { right++ }
    END { exit !(NR == 1 && right == 1) }' || wrong "other FLOP or bytes: $(cat rows.jsonl)"
rows 2 --op mha_forward --grid quick --repeat 2
has '^ +1 +512 +512 +16 +16 192/128 bf16( +[0-9.]+){6} [a-z0-9-]+ causal$'
wrote 0 '"page_size"|"cache"' # MHA has neither
rows 8 --op mha_forward --repeat 1 --threads 1 --batch 2,3 --query-tokens 50 --seq-len 70 --heads 6 --kv-heads 2 --d-qk 128 --d-v 64,128 --dtype fp16 \
    --kernel cpu-generic
has '^ +3 +70 +50 +6 +2 +128/64 fp16( +[0-9.]+){6} cpu-generic causal$'
# Every visible score: for a causal request of 50 tokens 50 · 70 - 50 · 49 / 2 per head.
grep '"b":2,.*"d_v":64,' rows.jsonl | awk_rows '
    { scores = 2 * 6 * (/"causal":true/ ? 2275 : 3500) }
    near(value("tflops") * value("us") * 1e6, 2 * scores * 192) &&
        near(value("gbs") * value("us") * 1e3, 2 * (2 * 50 * 6 + 2 * 70 * 2) * 192 + 4 * 2 * 50 * 6) { right++ }
    END { exit !(NR == 2 && right == 2) }' || wrong "other FLOP or bytes: $(cat rows.jsonl)"
# Sinks of every operation that has them, lengths in use of dense MHA, and a part of its own in merge.
for rows in dense_decode:2 sparse_decode:2 sparse_prefill:4 merge:2; do
    rows "${rows#*:}" --op "${rows%:*}" --grid quick --repeat 1 --threads 1 --kernel cpu-generic --sink both --heads 2 --seq-len 64 --topk 8 --parts 2
    has 'cpu-generic( FP8_656| BF16)?[ ,]sink'
    wrote $((${rows#*:} / 2)) '"sink":true'
done
for op in mha_forward mha_backward; do
    rows 4 --op $op --grid quick --repeat 1 --threads 1 --kernel cpu-generic --sink both --used both --causal no --heads 2 --seq-len 90
    has '^ +1 +90 +90 +2 +2 192/128 bf16( +[0-9.]+){6} cpu-generic used,sink$'
    wrote 2 '"used":true'
    # FLOP are those of tokens and keys in use.
    awk_rows '/"used":true/ { used = value("tflops") * value("us") } !/"used":true/ { all = value("tflops") * value("us") }
        END { exit !(NR == 4 && used < 0.99 * all) }' rows.jsonl || wrong "lengths in use do not count: $(cat rows.jsonl)"
done
rows 2 --op merge --grid quick --repeat 1 --parts 1 --last both --heads 4 --kernel cpu-generic
has '^ +1 .* cpu-generic last$'
wrote 1 '"last":true'
grep '"last":true' rows.jsonl | awk_rows '
    { rows = value("b") * value("s_q") * value("h_q") }
    near(value("tflops") * value("us") * 1e6, 2 * 2 * rows * 512) && near(value("gbs") * value("us") * 1e3, rows * (2 * 512 * 4 + 512 * 2 + 2 * 4)) { right++ }
    END { exit !(NR == 1 && right == 1) }' || wrong "other FLOP or bytes: $(cat rows.jsonl)"
export FLASHMLA_KERNEL=cpu-generic
timed --grid quick --repeat 1 --seq-len 64
has '( +[0-9.]+){6} cpu-generic$'
unset FLASHMLA_KERNEL
# A kernel may not support every type: such a row is reported, the others are timed.
if "$flashmla" info --all | grep -Eq '^ +dense_decode +cpu-avx512bf16 +yes '; then
    timed --grid quick --repeat 1 --seq-len 64 --kernel cpu-avx512bf16 --dtype both
    has 'skipped: dense_decode: .* takes bf16'
fi

finish

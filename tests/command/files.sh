#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# files.sh FLASHMLA STAND_IN - tests inputs that change during the command, come through a pipe, or would be overwritten,
# and results kept although later ones fail. Rows of bench are STAND_IN's, the same command, which need not measure its peaks.
set -u
export flashmla=$2 FMLA_KNOWN_MACHINE=1
# shellcheck disable=SC1091 # checked by itself
. "$(dirname "$0")/common.sh"

# ---- An input that is cut while it is read: one line, exit 1, no partial file.
good make-input whole --seq-lens 3000,2000
cut_while() { # cut_while CONDITION WORDS…: runs the command and cuts its input once the condition holds for its process
    local condition=$1 rc=0 process
    shift
    cp whole cut
    "$flashmla" "$@" >stdout 2>stderr &
    process=$!
    soon "$condition" $process
    : >'cut'
    [ ! -p out ] || timeout 20 cat out >/dev/null
    wait $process || rc=$?
    one_line 1 $rc '^flashmla run: cut: became shorter while it was read'
}
# The command has mapped the input and computed nothing while it waits for a reader of its output.
is_mapped() { grep -q "$PWD/cut\$" "/proc/$1/maps" 2>/dev/null; }
mkfifo out
cut_while is_mapped run cut --out out --threads 1
rm out
# During the computation the beginning of an output exists.
mkdir results
computes() { [ -n "$(ls -A results)" ]; }
cut_while computes run cut --out results/x --repeat 100000
[ -z "$(ls -A results)" ] || wrong "an input that was cut: left $(ls -A results)"
rm cut

# ---- Rows of bench that were timed stay, whatever ends it.
whole_lines() { # whole_lines FILE: each is an object, the last one too
    checks=$((checks + 1))
    { [ -s "$1" ] && [ -z "$(tail -c 1 "$1")" ]; } || wrong "$1 does not end with a whole line"
    [ "$(grep -Ec '^\{"op":"dense_decode",.*\}$' "$1")" -eq "$(wc -l <"$1")" ] || wrong "$1: $(cat "$1")"
}
checks=$((checks + 1))
mkdir rows
echo old >rows/file
env --default-signal=INT "$flashmla" bench --grid quick --threads 1 --repeat 15 --json rows/file \
    --seq-len "$(seq -s, 64 4000)" >stdout 2>stderr &
process=$!
has_rows() { [ "$(wc -l <rows/file)" -ge 3 ]; }
soon has_rows
kill -INT $process
rc=0
wait $process || rc=$?
[ "$rc" -eq 130 ] || wrong "bench, stopped: exit $rc: $(cat stderr)"
[ "$(ls -A rows)" = file ] || wrong "bench, stopped: left $(ls -A rows)"
has_rows || wrong "bench, stopped: lost rows: $(cat rows/file)"
whole_lines rows/file
# bench prints a row and then writes its line: at most one row is printed and not written.
[ "$(grep -c ' bf16 ' stdout)" -le $(($(wc -l <rows/file) + 1)) ] || wrong 'bench, stopped: rows were told and not written'
# The previous file stays until the first row.
echo old >rows/file
bad 1 'cannot write' bench --grid quick --repeat 1 --threads 1 --json /dev/full
bad 2 '--kernel' bench --grid quick --kernel none --json rows/file
[ "$(cat rows/file)" = old ] || wrong 'bench that ran no row has damaged the file that was there'
# A disk that fills up in the middle of a row, simulated by a file size limit of 1 KiB: earlier rows stay.
(ulimit -f 1 && exec "$flashmla" bench --grid quick --threads 1 --repeat 1 --seq-len 64,65,66,67 --json rows/full) \
    2>stderr | cat >stdout
rc=${PIPESTATUS[0]}
one_line 1 "$rc" 'rows/full: cannot write: File too large'
whole_lines rows/full
[ "$(wc -l <rows/full)" -eq 2 ] || wrong "bench on a full disk: not two rows: $(cat rows/full)"

# ---- The input is never overwritten, under any name, and no file is written twice.
flashmla=$1
good make-input in --seq-lens 5 --heads 2
cp in copy
ln -s in symbolic
ln in hard
mkdir sub
ln -s ../sub sub/loop
unharmed() {
    holds "the input was damaged by: $*" cmp -s in copy
    cp copy in
}
for name in in ./in symbolic hard sub/../in "$PWD/in"; do
    bad 2 "--out: '$name' is the input file in, must be another" run in --out "$name"
    bad 2 "--svg: '$name' is the input file in, must be another" plan in --svg "$name"
    bad 2 "--json: '$name' is the input file in, must be another" plan in --json="$name"
    unharmed "$name"
done
bad 2 "--out: 'in' is the input file symbolic, must be another" run symbolic --out in
rc=0
# shellcheck disable=SC2094 # that is what must be refused
"$flashmla" run - --out in <in >stdout 2>stderr || rc=$?
one_line 2 $rc "'in' is the input file standard input"
unharmed 'standard input'
for name in x ./x sub/../x sub/loop/../x; do
    bad 2 "--svg: '$name' is the file that --json writes, must be another" plan in --json x --svg "$name"
done
bad 2 "--svg: '-' is the file that --json writes, must be another" plan in --json - --svg -
echo one >one
ln one other
bad 2 "--svg: 'other' is the file that --json writes, must be another" plan in --json one --svg other
good plan in --json /dev/null --svg /dev/null
good run in --out sub/in --repeat 1 # the same name elsewhere is another file
good plan in --json a.json --svg a.svg
[ "$(wc -l <a.json)" -eq 1 ] || wrong 'a.json has not one line'

# ---- Standard input and output.
good run in --repeat 1 --out named --threads 1
from_pipe() { # from_pipe FILE WORDS…
    local file=$1
    shift
    checks=$((checks + 1))
    # shellcheck disable=SC2002 # a pipe is wanted
    cat "$file" | "$flashmla" "$@" >stdout 2>stderr || wrong "cat $file | flashmla $*: $(cat stderr)"
}
from_pipe in run - --repeat 1 --out piped --threads 1
cmp named piped || wrong 'run - computes something else from a pipe'
has '^written +piped$'
checks=$((checks + 1))
"$flashmla" run - --repeat 1 --out redirected --threads 1 <in >stdout || wrong 'run - <in'
cmp named redirected || wrong 'run - computes something else from a file'
from_pipe in run - --repeat 1 --out - --threads 1
cmp named stdout || wrong 'run --out - writes something else'
from_pipe in plan - --partitions 2 --json -
has '^\{"payload":.*"lengths":\[5\]'
[ "$(wc -l <stdout)" -eq 1 ] || wrong 'plan --json - prints more'
from_pipe whole run - --check # grows as it is read
has '^check +PASS'
good make-input - --seq-lens 5 --heads 2
cmp stdout copy || wrong 'make-input - writes something else'
good make-input sparse --op sparse_decode --batch 2 --seq-len 50 --topk 20
from_pipe sparse run - --check
has '^kv_cache .* 20 indices a token'
flashmla=$2
good bench --grid quick --repeat 1 --threads 1 --json -
flashmla=$1
mv stdout rows/stdout
whole_lines rows/stdout
[ "$(wc -l <rows/stdout)" -eq 3 ] || wrong 'bench --json - is not three lines'
mkdir dashes
(cd dashes && "$flashmla" plan --batch 1 --json ./- >/dev/null)
[ -s dashes/- ] || wrong 'no file of the name -'

refused_from() { # refused_from PART BYTES: refuses a pipe with so many bytes of the input, in a line with PART
    local rc=0
    head -c "$2" in | "$flashmla" run - --out o >stdout 2>stderr || rc=$?
    one_line 1 $rc "standard input: .*$1"
    [ ! -e o ] || wrong "run - of $2 bytes: left a file"
}
refused_from 'has 0 bytes' 0
refused_from 'header claims' 100
refused_from 'reach past the' 2000
{ cat in; echo; } | "$flashmla" run - >stdout 2>stderr
one_line 1 $? 'the tensors end at byte'
timeout 20 "$flashmla" run - </dev/zero >stdout 2>stderr
one_line 1 $? 'standard input: header: byte 0'
bad 1 'is no regular file; a pipe is read from standard input, as -' run /dev/null

finish

# SPDX-License-Identifier: MIT
# shellcheck shell=bash
# common.sh - sourced by tests of the command, with the command in `flashmla`; makes an empty folder and enters it.
# A test counts its failures in `failed` and ends with `finish`.
: "${flashmla:?}"
failed=0
checks=0
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder" || exit 1

: >.warnings

# warned: moves the warnings of bench from stderr to `.warnings`; other tests may keep the machine busy.
warned() {
    grep '^flashmla bench: warning: ' stderr >.warnings
    sed -i '/^flashmla bench: warning: /d' stderr
}

# operations: the names of all operations but plans, which are exact and which verify leaves to their unit tests.
operations() { sed -n 's/^OPERATION(\([a-z_]*\), .*/\1/p' "$root/src/operations.def" | grep -v '_plan$'; }

wrong() {
    echo "FAILED: $*"
    failed=$((failed + 1))
}

# good WORDS…: the command succeeds and prints nothing to stderr. Its output is in the file `stdout`.
good() {
    checks=$((checks + 1))
    local rc=0
    "$flashmla" "$@" >stdout 2>stderr || rc=$?
    warned
    [ "$rc" -eq 0 ] || wrong "flashmla $*: exit $rc: $(cat stderr)"
    [ ! -s stderr ] || wrong "flashmla $*: talks on stderr: $(cat stderr)"
}

# has PATTERN: a line of stdout matches.
has() {
    checks=$((checks + 1))
    grep -Eq -- "$1" stdout || wrong "no line of the output matches '$1'"
}

# checked MAKE RUN PATTERN…: `run --check` with the words RUN takes what make-input makes with the words MAKE, and lines of
# their output match.
checked() {
    # shellcheck disable=SC2086 # words
    good make-input in.safetensors $1
    cp stdout made
    # shellcheck disable=SC2086
    passes in.safetensors $2
    cat made >>stdout
    for pattern in "${@:3}"; do has "$pattern"; done
}

# passes FILE WORDS…: the command runs, and the oracle confirms its result.
passes() {
    good run "$@" --check
    has '^check +PASS: '
}

# within COLUMNS: no line of stdout is longer.
within() {
    checks=$((checks + 1))
    ! LC_ALL=C.UTF-8 grep -E ".{$(($1 + 1))}" stdout >longer || wrong "lines of more than $1 columns: $(cat longer)"
    rm -f longer
}

# timed WORDS…: bench succeeds in lines of 100 columns. Then stdout has each row in one line.
timed() {
    good bench "$@"
    within 100
    unfold
}
# rows COUNT WORDS…: bench writes so many rows into rows.jsonl, each an object with its times.
rows() {
    local count=$1
    timed "${@:2}" --json rows.jsonl
    checks=$((checks + 1))
    [ "$(wc -l <rows.jsonl)" -eq "$count" ] || wrong "bench ${*:2}: not $count lines: $(cat rows.jsonl)"
    wrote "$count" '^\{"op":"[a-z_]+",.*"us":[0-9.e+-]+,.*"floor_us":[0-9.e+-]+,.*\}$'
    ! command -v python3 >/dev/null || python3 -c 'import json, sys; [json.loads(line) for line in sys.stdin]' <rows.jsonl ||
        wrong "bench ${*:2}: no JSON: $(cat rows.jsonl)"
}
# wrote COUNT PATTERN: so many of these rows match.
wrote() {
    checks=$((checks + 1))
    [ "$(grep -Ec -- "$2" rows.jsonl)" -eq "$1" ] || wrong "not $1 lines match '$2': $(cat rows.jsonl)"
}
# awk_rows PROGRAM [FILE]: awk with value(name) of such a row, "" if it has none, and near(a, b) for numbers that are equal
# but for rounding.
awk_rows() {
    awk '
        function value(name,    text) {
            if (!match($0, "\"" name "\":[^,}]+")) return ""
            text = substr($0, RSTART + length(name) + 3, RLENGTH - length(name) - 3)
            gsub(/"/, "", text)
            return text
        }
        function near(a, b) { return a + 0 > 0.9999 * b && a + 0 < 1.0001 * b }
        '"$1" "${@:2}"
}
unfold() { sed -i -e ':more' -e '$!N; s/ *\n        \([^ ]\)/ \1/; t more' -e 'P; D' stdout; }

# holds WHAT COMMAND…: reports WHAT unless the command succeeds.
holds() {
    checks=$((checks + 1))
    local what=$1
    shift
    "$@" || wrong "$what"
}

# xml_faults: says what is wrong with the XML on stdin, as far as pictures go: tags nest, attribute values are quoted, nothing
# stands outside the root. No replacement for a parser; fresh machines have none.
xml_faults() {
    awk '
        BEGIN { RS = "<" }
        {
            end = index($0, ">")
            tag = substr($0, 1, end - 1)
            text = substr($0, end + 1)
            attributes = tag
            gsub(/="[^"&]*"/, "", attributes)
            name = tag
            sub(/[ \/].*/, "", name)
        }
        NR > 1 && !end || text ~ /[>&]/ || NR == 1 && end { print "tag " NR ": no tag: " $0 }
        NR > 1 && tag !~ /^\?/ {
            if (tag ~ /^\//) { if (open[depth--] "" != substr(tag, 2)) print "tag " NR ": closes another: " tag }
            else if (name == "" || attributes ~ /["=&]/ || (!depth && roots++)) print "tag " NR ": not sound: " tag
            else if (tag !~ /\/$/) open[++depth] = name
        }
        depth < 1 && text ~ /[^ \t\n]/ { print "tag " NR ": text outside the root: " text }
        END { if (depth || roots != 1) print depth " open tags, " roots + 0 " roots" }'
}

# well_formed FILE
well_formed() {
    checks=$((checks + 1))
    xml_faults <"$1" >faults
    [ ! -s faults ] || wrong "$1 is no well-formed XML: $(head -n 3 faults)"
    rm faults
}

# one_line CODE RC PART: a command ended with exit code RC, which must be CODE, and one line on stderr with PART.
one_line() {
    checks=$((checks + 1))
    warned
    { [ "$2" -eq "$1" ] && [ "$(wc -l <stderr)" -eq 1 ] && grep -q -- "$3" stderr; } ||
        wrong "exit $2, not $1 with one line of '$3': $(cat stderr)"
}

# bad CODE PART WORDS…: the command ends with CODE, one line on stderr with PART, and no new file.
bad() {
    checks=$((checks + 1))
    local code=$1 part=$2 rc=0 before after
    shift 2
    : >stdout
    : >stderr
    before=$(ls -A)
    "$flashmla" "$@" >stdout 2>stderr || rc=$?
    warned
    after=$(ls -A)
    [ "$rc" -eq "$code" ] || wrong "flashmla $*: exit $rc, not $code: $(cat stderr)"
    [ "$(wc -l <stderr)" -eq 1 ] || wrong "flashmla $*: not one line on stderr: $(cat stderr)"
    grep -qF -- "$part" stderr || wrong "flashmla $*: '$(cat stderr)' does not say '$part'"
    [ "$before" = "$after" ] || wrong "flashmla $*: left files: $(ls -A)"
}

# soon COMMAND…: waits until the command succeeds, for at most 30 seconds.
soon() {
    local tries
    for ((tries = 0; tries < 1500; tries++)); do
        "$@" && return
        sleep 0.02
    done
    wrong "never came: $*"
}

# put FILE HEADER BYTES [CLAIMED]: a tensor file with zeros for data, the header padded to a multiple of 8; it claims
# CLAIMED bytes of header if that is given.
put() {
    local header=$2 octal='' claimed i
    while [ $((${#header} % 8)) -ne 0 ]; do header+=' '; done
    claimed=${4:-${#header}}
    for ((i = 0; i < 8; i++)); do octal+=$(printf '\\%03o' $((claimed >> (8 * i) & 255))); done
    # shellcheck disable=SC2059 # the format is the bytes
    { printf "$octal"; printf '%s' "$header"; head -c "$3" /dev/zero; } >"$1"
}

# odd_indices: the header of sparse decode over one key, 2061 bytes of data, whose list begins at an odd byte.
odd_indices() {
    echo -n '{"q":{"dtype":"BF16","shape":[1,1,1,512],"data_offsets":[0,1024]},' \
        '"kv_cache":{"dtype":"BF16","shape":[1,1,1,512],"data_offsets":[1024,2048]},' \
        '"pad":{"dtype":"U8","shape":[1],"data_offsets":[2048,2049]},' \
        '"indices":{"dtype":"I32","shape":[1,1,3],"data_offsets":[2049,2061]}}'
}

finish() {
    echo "$checks checks, $failed failed"
    [ "$failed" -eq 0 ] && [ "$checks" -gt 0 ]
}

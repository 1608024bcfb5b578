# SPDX-License-Identifier: MIT
# shellcheck shell=bash
# common.sh - for the tests of the command: sourced with the command in `flashmla`; makes an empty folder and goes there.
# A test counts its failures in `failed` and ends with `finish`.
: "${flashmla:?}"
failed=0
checks=0
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder" || exit 1

wrong() {
    echo "FAILED: $*"
    failed=$((failed + 1))
}

# good WORDS…: the command succeeds, and says nothing on stderr. Its output is in the file `stdout`.
good() {
    checks=$((checks + 1))
    local rc=0
    "$flashmla" "$@" >stdout 2>stderr || rc=$?
    [ "$rc" -eq 0 ] || wrong "flashmla $*: exit $rc: $(cat stderr)"
    [ ! -s stderr ] || wrong "flashmla $*: talks on stderr: $(cat stderr)"
}

# has PATTERN: a line of stdout matches.
has() {
    checks=$((checks + 1))
    grep -Eq -- "$1" stdout || wrong "no line of the output matches '$1'"
}

# bad CODE PART WORDS…: the command ends with CODE, one line on stderr that has PART, and no file more than before.
bad() {
    checks=$((checks + 1))
    local code=$1 part=$2 rc=0 before after
    shift 2
    : >stdout
    : >stderr
    before=$(ls -A)
    "$flashmla" "$@" >stdout 2>stderr || rc=$?
    after=$(ls -A)
    [ "$rc" -eq "$code" ] || wrong "flashmla $*: exit $rc, not $code: $(cat stderr)"
    [ "$(wc -l <stderr)" -eq 1 ] || wrong "flashmla $*: not one line on stderr: $(cat stderr)"
    grep -qF -- "$part" stderr || wrong "flashmla $*: '$(cat stderr)' does not say '$part'"
    [ "$before" = "$after" ] || wrong "flashmla $*: left files: $(ls -A)"
}

finish() {
    echo "$checks checks, $failed failed"
    [ "$failed" -eq 0 ] && [ "$checks" -gt 0 ]
}

#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# summary.sh ROOT - tests the last line of scripts/test.sh with projects whose tests pass, fail, are missing, and are
# skipped, with and without a reason.
set -euo pipefail
root=$(cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset CTEST_OUTPUT_ON_FAILURE
bad=0

# expect CODE LINE TEST...: tests of these kinds give this last line.
expect() {
    local code=$1 line=$2 rc=0 kind
    shift 2
    {
        cat <<'PROJECT'
cmake_minimum_required(VERSION 3.21)
project(tests LANGUAGES NONE)
enable_testing()
function(test command)
  list(LENGTH names count)
  list(APPEND names x)
  set(names ${names} PARENT_SCOPE)
  add_test(NAME test${count} COMMAND sh -c "${command}")
  set_tests_properties(test${count} PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT 60)
endfunction()
PROJECT
        for kind; do
            case $kind in
            pass) echo 'test("echo needs nothing")' ;;
            fail) echo 'test("exit 1")' ;;
            silent) echo 'test("exit 77")' ;;
            long) echo 'test("echo needs a GPU; seq 2000; exit 77")' ;;
            missing) echo 'add_test(NAME missing COMMAND /no/such/program)' ;;
            amx) echo 'test("echo - x cpu-amx: not on this machine: no AMX; exit 0")
                set_tests_properties(test0 PROPERTIES SKIP_REGULAR_EXPRESSION "cpu-amx: not on this machine")' ;;
            *) echo "test(\"echo 'needs $kind'; exit 77\")" ;;
            esac
        done
    } >"$work/CMakeLists.txt"
    rm -rf "$work/build"
    cmake -S "$work" -B "$work/build" -G Ninja >"$work/log"
    bash "$root/scripts/test.sh" --test-dir "$work/build" >"$work/log" 2>&1 || rc=$?
    if [ $rc -ne "$code" ] || [ "$(tail -n 1 "$work/log")" != "$line" ]; then
        echo "FAILED: $*: exit $rc, expected $code; the last line is not '$line' in"
        cat "$work/log"
        bad=1
    fi
}

torch='PyTorch (pip install torch)'
expect 0 '2 passed, 0 failed, 0 skipped' pass pass
expect 0 "1 passed, 0 failed, 3 skipped: 2 need $torch; 1 needs <a> & b" pass "$torch" '<a> & b' "$torch"
expect 0 '1 passed, 0 failed, 1 skipped: 1 needs a GPU' long pass
expect 0 '0 passed, 0 failed, 1 skipped: 1 needs another machine: no AMX' amx
expect 8 '1 passed, 1 failed, 1 skipped: 1 needs a GPU' pass fail 'a GPU'
expect 1 '1 passed, 1 failed, 0 skipped' pass silent
expect 8 '1 passed, 1 failed, 0 skipped' pass missing
expect 8 '0 passed, 0 failed, 0 skipped' # no test at all is an error, too
exit $bad

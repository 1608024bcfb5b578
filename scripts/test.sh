#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# test.sh CTEST_OPTION... - runs ctest with these options. Its last line says how many tests passed, failed and were skipped,
# and what the skipped ones need: `140 passed, 0 failed, 9 skipped: 9 need PyTorch (pip install torch)`.
# test.sh --summary REPORT - prints that line for a report of ctest (--output-junit).
#
# A test that exits 77 prints a line `needs WHAT`; one that does not counts as failed. Exits as ctest does, or 1.
set -euo pipefail

# Prints the line; fails if a test failed or was skipped without a reason.
summary() { # summary REPORT
    awk '
        function attribute(line, name) {
            if (!match(line, name "=\"[^\"]*\"")) return ""
            return substr(line, RSTART + length(name) + 2, RLENGTH - length(name) - 3)
        }
        function plain(text) {
            gsub(/&lt;/, "<", text); gsub(/&gt;/, ">", text); gsub(/&quot;/, "\"", text); gsub(/&apos;/, "\047", text)
            gsub(/&amp;/, "\\&", text)
            return text
        }
        /^\t<testcase / { name = attribute($0, "name"); status = attribute($0, "status"); skipped = 0; reason = "" }
        /^\t\t<skipped message="SKIP_/ { skipped = 1 }
        { line = $0; sub(/^\t*<system-out>/, "", line); sub(/<\/system-out>$/, "", line) }
        line ~ /^needs / { reason = plain(substr(line, 7)) }
        # checkattn: a kernel that it was asked for alone
        line ~ /: not on this machine: / { reason = line; sub(/.*: not on this machine: /, "another machine: ", reason) }
        /^\t<\/testcase>/ {
            if (status == "run") passed++
            else if (status == "disabled") next
            else if (!skipped) failed++
            else if (reason != "") { left_out++; if (!seen[reason]++) order[++kinds] = reason }
            else { print "FAILED: " name " was skipped without a line `needs ...`"; failed++ }
        }
        END {
            line = sprintf("%d passed, %d failed, %d skipped", passed, failed, left_out)
            for (i = 1; i <= kinds; i++)
                line = line (i == 1 ? ": " : "; ") seen[order[i]] (seen[order[i]] == 1 ? " needs " : " need ") order[i]
            print line
            exit failed > 0 || passed + left_out == 0
        }' "$1"
}

if [ "${1:-}" = --summary ]; then
    summary "$2"
    exit
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
code=0
# Whole outputs, because a reason may stand anywhere in one.
CTEST_PARALLEL_LEVEL=${CTEST_PARALLEL_LEVEL:-$(nproc)} ctest --output-on-failure --no-tests=error "$@" \
    --output-junit "$work/report.xml" --test-output-size-passed 1000000 || code=$?
if [ -f "$work/report.xml" ]; then
    echo
    summary "$work/report.xml" || [ $code -ne 0 ] || code=1
fi
exit $code

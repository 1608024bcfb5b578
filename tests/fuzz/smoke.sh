#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# smoke.sh PROGRAM RUNS [SECONDS] - runs a fuzz target on its seeds for that many executions or seconds (10), with a
# fixed random seed. A finding exits with another code than 0 and leaves its input in fuzz-findings/.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
program=$1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
target=$(basename "$program")
bash "$here/seeds.sh" "$folder" "$target"
mkdir -p fuzz-findings
# Freed memory stays in quarantine longer than an execution lasts, and is warm when reused: that doubles the speed.
export ASAN_OPTIONS=quarantine_size_mb=4
options=(-seed=1 -runs="$2" -max_total_time="${3:-10}" -max_len=400 -rss_limit_mb=2048 -timeout=10
    -artifact_prefix=fuzz-findings/ -print_final_stats=1 -verbosity=0)
[ ! -e "$here/${target#fuzz_}.dict" ] || options+=(-dict="$here/${target#fuzz_}.dict")
"$program" "${options[@]}" "$folder"
echo "corpus: $(find "$folder" -type f | wc -l) inputs"

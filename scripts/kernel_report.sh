#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# kernel_report.sh FOLDER REPORT - writes a sorted line for each kernel and GPU from the output that scripts/nvcc.sh
# kept under FOLDER: file, kernel, GPU, registers, and bytes of spill stores, spill loads, stack and static shared
# memory. Warnings of ptxas are lines that begin with "!".
set -euo pipefail
folder=$1 report=$2
export LC_ALL=C
{
    echo '# file kernel gpu registers spill_stores spill_loads stack shared'
    find "$folder" -name '*.ptxas' | sort | while IFS= read -r file; do
        name=${file#"$folder"/}
        awk -v image="${name%.ptxas}" '
            /Compiling entry function/ { split($0, part, "\047"); kernel = part[2]; gpu = part[4] }
            /bytes stack frame/ { stack = $1; stores = $5; loads = $9 }
            /Used [0-9]+ registers/ {
                registers = shared = 0
                for (i = 1; i < NF; i++) {
                    if ($i == "Used") registers = $(i + 1)
                    if ($(i + 1) == "bytes" && $(i + 2) ~ /^smem/) shared = $i
                }
                print image, kernel, gpu, registers, stores, loads, stack, shared
            }
            /warning|Potential Performance Loss/ { print "!", image, $0 }' "$file"
    done
} >"$report"

#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# kernel_report.sh FOLDER REPORT HASHES NVCC - makes two lists of what scripts/nvcc.sh kept under FOLDER.
# REPORT has a sorted line for each kernel and GPU: file, kernel, GPU, registers, and bytes of spill stores, spill
# loads, stack and static shared memory. Warnings of ptxas are lines that begin with "!".
# HASHES has nvcc's version and, for each file and GPU, the SHA-256 of the machine code; checkattn --json and
# flashmla bench --json record it, and scripts/kernel-hashes.sh compares it with such a record.
set -euo pipefail
folder=$1 report=$2 hashes=$3 nvcc=$4
export LC_ALL=C
{
    printf '# toolkit %s\n' "$("$nvcc" --version | sed -n 's/.* V\([0-9.]*\)$/\1/p')"
    find "$folder" -name '*.sha256' | sort | while IFS= read -r file; do
        name=${file#"$folder"/}
        sed "s,^\([0-9a-f]*\) ,\1  src/cuda/${name%.sha256}.cu ," "$file"
    done
} >"$hashes"
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

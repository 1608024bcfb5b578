#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# kernels.sh REPORT NAMES | --self-test - reads the build's list of kernels (scripts/kernel_report.sh). No kernel may
# spill registers, ptxas may give no warning, every kernel must be compiled for the same GPUs, and every kernel that the
# library may launch (the output of NAMES --names: file and kernel) must exist. Kernels of sm90/ are compiled only for
# sm_90a, and exist if and only if the others were compiled for sm_90 or sm_90a.
set -euo pipefail
export LC_ALL=C

check() { # check REPORT NAMES_FILE
    awk '
        FNR == 1 { file++ }
        /^#/ || NF == 0 { next }
        file == 1 && $1 == "!" { print "ptxas: " substr($0, 3); bad++; next }
        file == 1 && NF != 8 { print "not understood: " $0; bad++; next }
        file == 1 {
            kernels++
            compiled[$1 " " $2]++
            if ($1 !~ /^sm90\//) gpus[$3]
            else if ($3 != "sm_90a") { print $2 " was compiled for " $3 ", and is for sm_90a alone"; bad++ }
            if ($5 + $6 > 0) { print $2 " for " $3 " spills: " $5 " bytes stored, " $6 " loaded"; bad++ }
        }
        file == 2 { names++; launched[$0] }
        END {
            for (gpu in gpus) count++
            hopper = "sm_90" in gpus || "sm_90a" in gpus
            for (name in compiled) {
                if (name !~ /^sm90\//) wanted = count + 0
                else wanted = hopper + 0
                if (compiled[name] == wanted) continue
                print name " was compiled " compiled[name] " times, for " wanted " GPUs"
                bad++
            }
            for (name in launched) {
                if (name in compiled || (name ~ /^sm90\// && !hopper)) continue
                print "the library launches " name ", which was not compiled"
                bad++
            }
            if (!kernels || !names) { print "no kernel was looked at"; bad++ }
            print kernels + 0 " kernels for " count + 0 " GPUs, " bad + 0 " wrong"
            exit bad > 0
        }' "$1" "$2"
}

self_test() {
    local folder planted=0
    folder=$(mktemp -d)
    # shellcheck disable=SC2064 # the folder's name is wanted as it is now
    trap "rm -rf '$folder'" EXIT
    fresh() {
        {
            echo '# file kernel gpu registers spill_stores spill_loads stack shared'
            for gpu in sm_80 sm_90a; do
                echo "any/merge merge $gpu 40 0 0 0 512"
                echo "sm80/decode decode_bf16 $gpu 255 0 0 0 0"
            done
            echo 'sm90/decode decode_hopper sm_90a 168 0 0 0 0'
        } >"$folder/report"
        printf '%s\n' 'any/merge merge' 'sm80/decode decode_bf16' 'sm90/decode decode_hopper' >"$folder/names"
    }
    red() { # red SED FILE
        fresh
        sed -i "$1" "$folder/$2"
        planted=$((planted + 1))
        if check "$folder/report" "$folder/names" >/dev/null; then
            echo "self-test: not noticed: $1"
            exit 1
        fi
    }
    green() { # green SED: of the list
        fresh
        sed -i "$1" "$folder/report"
        if ! check "$folder/report" "$folder/names"; then
            echo "self-test: a list without a fault was refused: $1"
            exit 1
        fi
    }
    green ''
    green 's/^\(any\|sm80\)\(.*\) sm_90a/\1\2 sm_90/' # portable kernels for every 9.x
    green '/sm_90a/d'                                 # a build without 9.0
    red 's/decode_bf16 sm_80 255 0/decode_bf16 sm_80 255 8/' report
    red 's/merge sm_90a 40 0 0/merge sm_90a 40 0 4/' report
    red '3d' report
    red '/merge/d' report
    red "2,\$d" report
    red "\$a ! sm80/decode Potential Performance Loss: wgmma.mma_async" report
    red "\$a something else" report
    red "\$a any/merge merge_more" names
    red '/^sm90/d' report                        # 9.0 without its kernels
    red '/^any.*sm_90a/d; /^sm80.*sm_90a/d' report # 9.0's kernels without 9.0
    red 's/hopper sm_90a/hopper sm_90/' report
    red "\$a sm90/decode decode_hopper sm_80 168 0 0 0 0" report
    red "\$a sm90/decode decode_more" names
    red 'd' names
    # Tests the lists themselves, made from ptxas output and hashes.
    mkdir -p "$folder/cuda/any"
    printf '0a1b sm_80\n2c3d sm_90\n' >"$folder/cuda/any/merge.sha256"
    printf '#!/bin/sh\necho "release 1, V1.2.3"\n' >"$folder/nvcc"
    chmod +x "$folder/nvcc"
    cat >"$folder/cuda/any/merge.ptxas" <<'PTXAS'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'merge' for 'sm_80'
ptxas info    : Function properties for merge
    24 bytes stack frame, 8 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 42 registers, used 1 barriers, 24 bytes cumulative stack size, 512 bytes smem, 616 bytes cmem[0]
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
PTXAS
    bash "$(dirname "${BASH_SOURCE[0]}")/../../scripts/kernel_report.sh" "$folder/cuda" "$folder/report" \
        "$folder/hashes" "$folder/nvcc"
    if ! grep -qx 'any/merge merge sm_80 42 8 16 24 512' "$folder/report" || ! grep -q '^! any/merge .*C7510' "$folder/report"; then
        echo 'self-test: kernel_report.sh made of it:'
        cat "$folder/report"
        exit 1
    fi
    if ! printf '# toolkit 1.2.3\n0a1b  src/cuda/any/merge.cu sm_80\n2c3d  src/cuda/any/merge.cu sm_90\n' |
        cmp - "$folder/hashes"; then
        echo 'self-test: kernel_report.sh made these hashes:'
        cat "$folder/hashes"
        exit 1
    fi
    echo "self-test: $planted planted faults, all noticed"
}

if [ "${1:-}" = --self-test ]; then
    self_test
else
    names=$(mktemp)
    trap 'rm -f "$names"' EXIT
    "${2:?NAMES}" --names >"$names"
    check "${1:?REPORT}" "$names"
fi

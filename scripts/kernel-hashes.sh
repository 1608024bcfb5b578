#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# kernel-hashes.sh OUTPUT [ARCHITECTURE...] - SHA-256 of the machine code that nvcc makes of each .cu file of the library,
#     for each architecture (80 and 90 unless others are given). checkattn --json takes the file kernels.sha256 beside
#     itself into what it records.
# kernel-hashes.sh --check RECORD... - are the kernels still those that the records (checkattn.json) say were checked on a
#     GPU? The same toolkit makes the same machine code of the same kernel; a record of another toolkit is passed over. Exits
#     1 if a kernel differs, is in no line of a record, or had failed; 77 if there is no nvcc, or no record of its toolkit.
# kernel-hashes.sh --self-test
#
# Compiled anew, with the flags of the build (cmake/cuda.cmake), because a toolkit need not have cuobjdump, which could
# take machine code out of what was built.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=${FMLA_ROOT:-$here/..}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

find_nvcc() { # find_nvcc CODE: exits with it where there is none
    nvcc=${CUDACXX:-}
    [ -n "$nvcc" ] || nvcc=$(command -v nvcc || true)
    [ -n "$nvcc" ] || nvcc=${CUDA_HOME:-/usr/local/cuda}/bin/nvcc
    toolkit=$("$nvcc" --version 2>&1 | sed -n 's/.* V\([0-9.]*\)$/\1/p') || true
    [ -n "$toolkit" ] || {
        echo "kernel-hashes: $nvcc does not run" >&2
        exit "$1"
    }
}

sources() { (cd "$root" && find src/cuda -name '*.cu' | LC_ALL=C sort); }

# hash SOURCE ARCHITECTURE: paths within the machine code are those from the root.
hash() {
    (cd "$root" && "$nvcc" -std=c++17 -O3 -cubin -arch="sm_$2" -o "$folder/cubin" "$1")
    sha256sum <"$folder/cubin" | cut -d ' ' -f 1
}

make_list() {
    local output=$1 source architecture
    shift
    [ $# -gt 0 ] || set -- 80 90
    find_nvcc 3
    {
        echo "# toolkit $toolkit"
        sources | while IFS= read -r source; do
            for architecture; do echo "$(hash "$source" "$architecture")  $source sm_$architecture"; done
        done
    } >"$folder/list"
    grep -q '^[0-9a-f]\{64\} ' "$folder/list" || {
        echo 'kernel-hashes: there is no kernel' >&2
        exit 1
    }
    mv "$folder/list" "$output"
}

# One record of this toolkit; prints what is against it.
check_record() {
    local record=$1 bad=0 source architecture was now
    sed -n 's/^ *{"source": "\([^"]*\)", "target": "sm_\([^"]*\)", "sha256": "\([0-9a-f]*\)"}.*/\1 \2 \3/p' "$record" \
        >"$folder/recorded"
    if ! grep -q '"passed": true' "$record" || grep -q '"passed": false\|"complete": false' "$record"; then
        echo "$record: is of a run that failed or was cut short"
        bad=1
    fi
    while IFS= read -r source; do
        grep -q "^$source " "$folder/recorded" || {
            echo "$record: $source: was not checked on that GPU"
            bad=1
        }
    done < <(sources)
    while read -r source architecture was; do
        now=missing
        [ ! -f "$root/$source" ] || now=$(hash "$source" "$architecture")
        [ "$now" = "$was" ] || {
            echo "$record: $source: its machine code for sm_$architecture is no longer what was checked on that GPU"
            bad=1
        }
    done <"$folder/recorded"
    return $bad
}

check() {
    local record compared=0 bad=0
    find_nvcc 77
    for record; do
        if ! grep -qF "\"toolkit\": \"$toolkit\"" "$record"; then
            echo "$record: is of another toolkit than $toolkit, and not compared"
            continue
        fi
        compared=$((compared + 1))
        check_record "$record" || bad=1
    done
    [ $compared -gt 0 ] || exit 77
    echo "$compared of $# records compared"
    exit $bad
}

# A compiler that copies what it is given, and faults that must be seen.
self_test() {
    local tree=$folder/tree seen=0 rc
    mkdir -p "$tree/src/cuda/any"
    cat >"$folder/nvcc" <<'NVCC'
#!/bin/sh
if [ "$1" = --version ]; then echo "release 1, V1.2.3"; exit; fi
while [ $# -gt 1 ]; do
    [ "$1" = -o ] && out=$2
    shift
done
cp "$1" "$out"
NVCC
    chmod +x "$folder/nvcc"
    export CUDACXX=$folder/nvcc FMLA_ROOT=$tree
    fresh() {
        printf 'one\n' >"$tree/src/cuda/any/one.cu"
        printf 'two\n' >"$tree/src/cuda/two.cu"
        rm -f "$tree/src/cuda/new.cu"
        "$here/kernel-hashes.sh" "$folder/hashes" 90
        {
            printf '{\n  "complete": true,\n    {"passed": true}\n  "toolkit": "1.2.3",\n'
            sed -n 's/^\([0-9a-f]*\)  \(.*\) \(sm_.*\)$/    {"source": "\2", "target": "\3", "sha256": "\1"},/p' "$folder/hashes"
        } >"$folder/record"
    }
    expect() { # expect CODE WHAT
        rc=0
        "$here/kernel-hashes.sh" --check "$folder/record" >"$folder/said" || rc=$?
        [ $rc -eq "$1" ] || {
            echo "self-test: $2: exit $rc, not $1: $(cat "$folder/said")"
            exit 1
        }
        seen=$((seen + 1))
    }
    fresh && expect 0 'nothing has changed'
    fresh && echo more >>"$tree/src/cuda/two.cu" && expect 1 'a kernel has changed'
    fresh && echo new >"$tree/src/cuda/new.cu" && expect 1 'a kernel is new'
    fresh && rm "$tree/src/cuda/two.cu" && expect 1 'a kernel is gone'
    fresh && sed -i 's/"passed": true/"passed": false/' "$folder/record" && expect 1 'a kernel had failed'
    fresh && sed -i 's/"complete": true/"complete": false/' "$folder/record" && expect 1 'the run was cut short'
    fresh && sed -i 's/1\.2\.3/1.2.4/' "$folder/record" && expect 77 'another toolkit'
    echo "self-test: $seen cases, all as they should be"
}

case ${1:?OUTPUT, --check or --self-test} in
--check) shift && check "$@" ;;
--self-test) self_test ;;
*) make_list "$@" ;;
esac

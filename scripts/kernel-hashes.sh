#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# kernel-hashes.sh OUTPUT [ARCHITECTURE...] - SHA-256 of the machine code that nvcc makes of each .cu file of the
#     library, for each architecture (80 and 90 unless others are given); files under sm90/ only for 90a, if 90 or 90a
#     is among the architectures. checkattn --json records the file kernels.sha256 beside itself.
# kernel-hashes.sh --check RECORD... - checks that the kernels are those that the records (checkattn.json) say were
#     tested on a GPU. One toolkit compiles a kernel to the same machine code each time; records of another toolkit are
#     skipped. Exits 1 if a kernel differs, is missing in a record (kernels under sm90/: of a GPU of 9.0), or had
#     failed; 77 without nvcc, or without a record of its toolkit.
# kernel-hashes.sh --self-test
#
# Kernels are compiled again with the build's flags (cmake/cuda.cmake), because a toolkit may lack cuobjdump, which
# extracts machine code from a build.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=${FMLA_ROOT:-$here/..}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

find_nvcc() { # find_nvcc CODE: exits with CODE if there is none
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

hopper_only() { [[ $1 == src/cuda/sm90/* ]]; } # hopper_only SOURCE

# targets SOURCE ARCHITECTURE...: prints those for which the source is compiled.
targets() {
    local source=$1 architecture
    shift
    if hopper_only "$source"; then
        for architecture; do
            if [ "${architecture%a}" = 90 ]; then
                echo 90a
                return
            fi
        done
    else
        printf '%s\n' "$@"
    fi
}

# hash_one SOURCE ARCHITECTURE: prints both and the hash, or "refused" if nvcc fails. Paths in machine code are relative
# to the root.
hash_one() {
    local cubin sum=refused
    cubin=$(mktemp "$folder/cubin.XXXXXX")
    if (cd "$root" && "$nvcc" -std=c++17 -O3 -cubin -arch="sm_$2" -o "$cubin" "$1"); then
        sum=$(sha256sum <"$cubin" | cut -d ' ' -f 1)
    fi
    printf '%s %s %s\n' "$1" "$2" "$sum"
}
export -f hash_one

# hash_all FILE: runs hash_one in parallel for every line (source, architecture); prints the results in the file's
# order.
hash_all() {
    export folder root nvcc
    xargs -r -L 1 -P "$(nproc)" bash -c 'hash_one "$@"' hash_one <"$1" >"$folder/sums"
    awk 'NR == FNR { sum[$1, $2] = $3; next } { print $1, $2, sum[$1, $2] }' "$folder/sums" "$1"
}

make_list() {
    local output=$1 source architecture sum
    shift
    [ $# -gt 0 ] || set -- 80 90
    find_nvcc 3
    sources | while IFS= read -r source; do
        for architecture in $(targets "$source" "$@"); do echo "$source $architecture"; done
    done >"$folder/wanted"
    {
        echo "# toolkit $toolkit"
        hash_all "$folder/wanted" | while read -r source architecture sum; do
            [ "$sum" != refused ] || exit 1
            echo "$sum  $source sm_$architecture"
        done
    } >"$folder/list"
    grep -q '^[0-9a-f]\{64\} ' "$folder/list" || {
        echo 'kernel-hashes: there is no kernel' >&2
        exit 1
    }
    mv "$folder/list" "$output"
}

# check_record RECORD: checks a record of this toolkit and prints its faults.
check_record() {
    local record=$1 bad=0 source architecture was now
    sed -n 's/^ *{"source": "\([^"]*\)", "target": "sm_\([^"]*\)", "sha256": "\([0-9a-f]*\)"}.*/\1 \2 \3/p' "$record" \
        >"$folder/recorded"
    if ! grep -q '"passed": true' "$record" || grep -q '"passed": false\|"complete": false' "$record"; then
        echo "$record: is of a run that failed or was cut short"
        bad=1
    fi
    while IFS= read -r source; do
        if hopper_only "$source" && ! grep -q '"compute_capability": "9\.0"' "$record"; then continue; fi
        grep -q "^$source " "$folder/recorded" || {
            echo "$record: $source: was not checked on that GPU"
            bad=1
        }
    done < <(sources)
    while read -r source architecture was; do
        if [ -f "$root/$source" ]; then echo "$source $architecture"; fi
    done <"$folder/recorded" >"$folder/wanted"
    hash_all "$folder/wanted" >"$folder/now"
    while read -r source architecture was; do
        now=$(sed -n "s,^$source $architecture ,,p" "$folder/now") # empty if the file is gone
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

# Uses a fake compiler that copies its input (Hopper's files only for 90a), and faults that must be detected.
self_test() {
    local tree=$folder/tree seen=0 rc
    mkdir -p "$tree/src/cuda/any" "$tree/src/cuda/sm90/decode"
    cat >"$folder/nvcc" <<'NVCC'
#!/bin/sh
if [ "$1" = --version ]; then echo "release 1, V1.2.3"; exit; fi
while [ $# -gt 1 ]; do
    [ "$1" = -o ] && out=$2
    case $1 in -arch=*) arch=$1 ;; esac
    shift
done
case $1 in
*/sm90/*) [ "$arch" = -arch=sm_90a ] || exit 1 ;;
esac
if grep -q fault "$1"; then exit 1; fi
{ echo "$arch" && cat "$1"; } >"$out"
NVCC
    chmod +x "$folder/nvcc"
    export CUDACXX=$folder/nvcc FMLA_ROOT=$tree
    fresh() {
        printf 'one\n' >"$tree/src/cuda/any/one.cu"
        printf 'two\n' >"$tree/src/cuda/two.cu"
        printf 'hopper\n' >"$tree/src/cuda/sm90/decode/hopper.cu"
        rm -f "$tree/src/cuda/new.cu"
        "$here/kernel-hashes.sh" "$folder/hashes" "${1:-90}"
        {
            printf '{\n  "complete": true,\n  "compute_capability": "%s",\n    {"passed": true}\n' "${2:-9.0}"
            printf '  "toolkit": "1.2.3",\n'
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
    listed() { # listed LINES ARCHITECTURE...: checks that the list has these lines, "file target" each
        local lines=$1 came
        shift
        "$here/kernel-hashes.sh" "$folder/hashes" "$@"
        came=$(sed -n 's/^[0-9a-f]\{64\}  src\/cuda\/\(.*\) sm_\(.*\)/\1 \2/p' "$folder/hashes" | tr '\n' ',')
        [ "$came" = "$lines" ] || {
            echo "self-test: for $*: listed $came, expected $lines"
            exit 1
        }
        seen=$((seen + 1))
    }
    fresh
    listed 'any/one.cu 80,any/one.cu 90,sm90/decode/hopper.cu 90a,two.cu 80,two.cu 90,' 80 90
    listed 'any/one.cu 80,any/one.cu 90,sm90/decode/hopper.cu 90a,two.cu 80,two.cu 90,'
    listed 'any/one.cu 90a,sm90/decode/hopper.cu 90a,two.cu 90a,' 90a
    listed 'any/one.cu 80,any/one.cu 100,two.cu 80,two.cu 100,' 80 100
    echo fault >>"$tree/src/cuda/two.cu"
    if "$here/kernel-hashes.sh" "$folder/hashes" 80 2>/dev/null; then
        echo 'self-test: a kernel that does not compile was listed'
        exit 1
    fi
    fresh && expect 0 'nothing has changed'
    fresh && echo more >>"$tree/src/cuda/sm90/decode/hopper.cu" && expect 1 "Hopper's kernel has changed"
    fresh && echo fault >>"$tree/src/cuda/two.cu" && expect 1 'a kernel does not compile'
    fresh && sed -i '/sm90/d' "$folder/record" && expect 1 "Hopper's kernel was not checked on a Hopper"
    fresh 80 8.0 && expect 0 'a GPU that has no such kernel'
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

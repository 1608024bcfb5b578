#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# kernel-hashes.sh HASHES RECORD... - checks that the machine code of a build (its kernels.sha256) is that which the
#     records (checkattn.json) say was tested on a GPU. One toolkit compiles a kernel to the same machine code each
#     time; records of another toolkit are skipped. Exits 1 if a kernel differs, is missing in a record (kernels under
#     sm90/: of a GPU of 9.0) or in the build, or had failed; 77 without a record of the build's toolkit.
# kernel-hashes.sh --self-test
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# check_record HASHES RECORD: checks a record of the build's toolkit and prints its faults.
check_record() {
    local hashes=$1 record=$2 bad=0
    if ! grep -q '"passed": true' "$record" || grep -q '"passed": false\|"complete": false' "$record"; then
        echo "$record: is of a run that failed or was cut short"
        bad=1
    fi
    sed -n 's/^ *{"source": "\([^"]*\)", "target": "\(sm_[^"]*\)", "sha256": "\([0-9a-f]*\)"}.*/\1 \2 \3/p' "$record" \
        >"$folder/recorded"
    awk -v record="$record" -v hopper="$(grep -c '"compute_capability": "9\.0"' "$record")" '
        NR == FNR { if ($1 != "#") { now[$2 " " $3] = $1; built[$2] = 1 }; next }
        {
            recorded[$1] = 1
            if (now[$1 " " $2] == $3) next
            bad = 1
            if (!(($1 " " $2) in now)) print record ": " $1 ": the build has no machine code of it for " $2
            else print record ": " $1 ": its machine code for " $2 " is no longer what was checked on that GPU"
        }
        END {
            for (source in built) {
                if (source in recorded || (source ~ /^src\/cuda\/sm90\// && !hopper)) continue
                print record ": " source ": was not checked on that GPU"
                bad = 1
            }
            exit bad
        }' "$hashes" "$folder/recorded" || bad=1
    return $bad
}

check() { # check HASHES RECORD...
    local hashes=$1 record compared=0 bad=0 toolkit
    shift
    toolkit=$(sed -n 's/^# toolkit //p' "$hashes")
    grep -q '^[0-9a-f]\{64\} ' "$hashes" || {
        echo "$hashes: has no kernel"
        exit 1
    }
    for record; do
        if ! grep -qF "\"toolkit\": \"$toolkit\"" "$record"; then
            echo "$record: is of another toolkit than $toolkit, and not compared"
            continue
        fi
        compared=$((compared + 1))
        check_record "$hashes" "$record" || bad=1
    done
    [ $compared -gt 0 ] || exit 77
    echo "$compared of $# records compared"
    exit $bad
}

# Faults that must be detected.
self_test() {
    local seen=0 rc one two hopper
    one=$(printf one | sha256sum | cut -d ' ' -f 1) two=$(printf two | sha256sum | cut -d ' ' -f 1)
    hopper=$(printf hopper | sha256sum | cut -d ' ' -f 1)
    fresh() { # fresh [CAPABILITY]: a build, and the record of it on a GPU
        printf '%s\n' '# toolkit 1.2.3' "$one  src/cuda/any/one.cu sm_80" "$one  src/cuda/any/one.cu sm_90" \
            "$two  src/cuda/two.cu sm_90" "$hopper  src/cuda/sm90/decode/hopper.cu sm_90a" >"$folder/hashes"
        {
            printf '{\n  "complete": true,\n  "compute_capability": "%s",\n    {"passed": true}\n' "${1:-9.0}"
            printf '  "toolkit": "1.2.3",\n'
            sed -n '/sm_80/d; s/^\([0-9a-f]*\)  \(.*\) \(sm_.*\)$/    {"source": "\2", "target": "\3", "sha256": "\1"},/p' \
                "$folder/hashes"
        } >"$folder/record"
    }
    expect() { # expect CODE WHAT
        rc=0
        "$here/kernel-hashes.sh" "$folder/hashes" "$folder/record" >"$folder/said" || rc=$?
        [ $rc -eq "$1" ] || {
            echo "self-test: $2: exit $rc, not $1: $(cat "$folder/said")"
            exit 1
        }
        seen=$((seen + 1))
    }
    fresh && expect 0 'nothing has changed'
    fresh && sed -i "s/$hopper/$two/" "$folder/hashes" && expect 1 "Hopper's kernel has changed"
    fresh && sed -i '/hopper.cu/d' "$folder/hashes" && expect 1 "the build lacks Hopper's kernel"
    fresh && sed -i '/sm_90$/d' "$folder/hashes" && expect 1 'the build is for another GPU'
    fresh && sed -i '/sm90/d' "$folder/record" && expect 1 "Hopper's kernel was not checked on a Hopper"
    fresh 8.0 && sed -i '/sm90/d' "$folder/record" && expect 0 'a GPU that has no such kernel'
    fresh && sed -i "s/$two/$one/" "$folder/hashes" && expect 1 'a kernel has changed'
    fresh && echo "$one  src/cuda/new.cu sm_90" >>"$folder/hashes" && expect 1 'a kernel is new'
    fresh && sed -i '/two.cu/d' "$folder/hashes" && expect 1 'a kernel is gone'
    fresh && sed -i '2,$d' "$folder/hashes" && expect 1 'there is no kernel'
    fresh && sed -i 's/"passed": true/"passed": false/' "$folder/record" && expect 1 'a kernel had failed'
    fresh && sed -i 's/"complete": true/"complete": false/' "$folder/record" && expect 1 'the run was cut short'
    fresh && sed -i 's/1\.2\.3/1.2.4/' "$folder/record" && expect 77 'another toolkit'
    echo "self-test: $seen cases, all as they should be"
}

case ${1:?HASHES or --self-test} in
--self-test) self_test ;;
*) check "$@" ;;
esac

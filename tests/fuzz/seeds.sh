#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# seeds.sh FOLDER TARGET         - writes the seeds of a fuzz target into FOLDER.
# seeds.sh --run PROGRAM DRAWN [EMULATOR...]
#                                - runs a target built with replay.c on them and on DRAWN random inputs.
#
# For the tensor files a seed is a header behind the byte 1 (the target adds its length and 16 bytes of data) or a whole
# file behind the byte 0. The other targets make a good call of zeros: their seeds are a first byte for every operation.
set -euo pipefail

seeds() {
    local folder=$1 target=$2 i=0 header
    case $target in
    fuzz_safetensors)
        while read -r header; do
            i=$((i + 1))
            printf '\001%s' "$header" >"$folder/header-$i"
        done <<'HEADERS'
{"q":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}
{"__metadata__":{"causal":"true"},"q":{"dtype":"BF16","shape":[2,2],"data_offsets":[0,8]},"kv_cache":{"dtype":"BF16","shape":[1,4],"data_offsets":[8,16]}}
{"a":{"dtype":"U8","shape":[],"data_offsets":[0,1]},"b":{"dtype":"I8","shape":[15],"data_offsets":[1,16]}}
{"a":{"dtype":"I64","shape":[0,9223372036854775807],"data_offsets":[0,0]},"b":{"dtype":"F64","shape":[2],"data_offsets":[0,16]}}
{}
HEADERS
        header='{"q":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}}'
        printf '\000\065\000\000\000\000\000\000\000%sabc' "$header" >"$folder/file"
        ;;
    fuzz_arguments)
        for i in 00 01 02 03 04 05 06 07 10; do
            # shellcheck disable=SC2059 # the format is the byte
            { printf "\\0$i"; printf '\000\001\002\001\003\001\004\001\005\001\001\001\001\001\001\001\001\001\001\001'; } >"$folder/$i"
        done
        # Without parts, strides were multiplied all the same: once a signed overflow.
        base64 -d >"$folder/no-parts" <<<'BgECAAEAAAAAAAAAAAAAAAAAAAACAwMCAgAAAAEBAQAAAgFNAA=='
        # One page, whose stride was multiplied all the same: likewise.
        base64 -d >"$folder/one-page" <<<'CHH/dLkBATMzM3S5AQEzMzMzMwAAQgOmAACoAf8B/zMzAABCA6YAAKgB/wH/bQ=='
        ;;
    fuzz_plan)
        for i in 000 001 006 020 056; do
            # shellcheck disable=SC2059
            { printf "\\$i"; printf '\000\003\005\007\100\200\300\377\001\002\003\004\005\006\007\010'; } >"$folder/small-$i"
            # shellcheck disable=SC2059
            { printf "\\$i"; printf '\007\024\050\000\100\200\300\377\001\002\003\004\005\006\007\010'; } >"$folder/large-$i"
        done
        ;;
    fuzz_decode_plan)
        # A damaged plan of one partition that claims to continue the previous one: once a write past the workspace.
        printf '\361\001\000\000\005\000\000\004\001\000\007\310\000\000' >"$folder/begins-with-a-split"
        for i in 000 001 360 361 377; do
            # shellcheck disable=SC2059
            { printf "\\$i"; printf '\003\001\005\007\100\200\300\377\001\002\003\004\005\006\007\010'; } >"$folder/$i"
        done
        ;;
    *)
        echo "seeds.sh: no such target: $target" >&2
        exit 2
        ;;
    esac
}

if [ "$1" != --run ]; then
    seeds "$1" "$2"
    exit
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
seeds "$folder" "$(basename "$2")"
"${@:4}" "$2" "$3" "$folder"/*

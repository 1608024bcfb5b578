#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# kernel_cache.sh SCRIPT - tests scripts/nvcc.sh with FMLA_KERNEL_CACHE, with a fake compiler that counts its runs: a
# kernel is taken from the cache if and only if nothing that it is made from differs.
set -euo pipefail
script=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset FMLA_KERNEL_CACHE

# Its machine code is its version, flags and sources. Includes are the lines "#include NAME".
cat >"$work/nvcc" <<'NVCC'
#!/bin/bash
here=${0%/*}
if [ "$1" = --version ]; then cat "$here/version"; exit; fi
for source; do :; done
files="$source $(sed -n "s,^#include ,${source%/*}/,p" "$source")"
flags=
while [ $# -gt 1 ]; do
    case $1 in
    -M) list=1 ;;
    -o) out=$2; shift ;;
    -MF) depends=$2; shift ;;
    -MT) target=$2; shift ;;
    --keep) ;;
    --keep-dir) keep=$2; shift ;;
    *) flags="$flags $1" ;;
    esac
    shift
done
if [ -n "${list:-}" ]; then
    if grep -q lost $files; then echo 'an included file is lost' >&2; exit 1; fi
    printf '%s : %s \\\n   %s\n' kernel.o $files
    exit
fi
echo run >>"$here/runs"
if grep -q fault $files; then echo 'the compiler fails'; exit 1; fi
echo "ptxas info    : Compiling entry function 'kernel' for 'sm_80'"
echo 'a warning of the compiler'
echo "$target : $files" >"$depends"
{ cat "$here/version" && echo "$flags" && cat $files; } >"$out"
{ printf -- '\0-v  -arch sm_80 -m 64 \0' && cat "$out"; } >"$keep/kernel.cubin"
NVCC
chmod +x "$work/nvcc"
echo 'V1.2.3' >"$work/version"
for folder in one two; do
    mkdir -p "$work/$folder"
    printf '#include kernel.h\nkernel\n' >"$work/$folder/kernel.cu"
    echo header >"$work/$folder/kernel.h"
done

bad=0
# compiles RUNS WHAT FOLDER FLAG...: a kernel of the folder is right, has its report, its hash, its own dependencies and
# the compiler's warning, and took so many runs of the compiler.
compiles() {
    local runs=$1 what=$2 folder=$work/$3
    shift 3
    : >"$work/runs"
    rm -f "$folder"/made.*
    bash "$script" "$folder/made" "$folder/kernel.cu" "$work/nvcc" "$@" 2>"$work/said" || echo "exit $?" >>"$work/said"
    if [ "$(wc -l <"$work/runs")" -ne "$runs" ] ||
        ! { cat "$work/version" && echo " $* -Xptxas -v -MD" && cat "$folder/kernel.cu" "$folder/kernel.h"; } |
            cmp -s - "$folder/made.fatbin" ||
        ! grep -q 'Compiling entry' "$folder/made.ptxas" ||
        [ "$(cat "$folder/made.sha256")" != "$({ printf -- '\0-v  -arch sm_80 -m 64 \0' && cat "$folder/made.fatbin"; } |
            sha256sum | cut -d ' ' -f 1) sm_80" ] ||
        [ "$(tr -d '\\\n' <"$folder/made.d" | tr -s ' ' | sed 's/ *: */: /')" != \
            "$folder/made.fatbin: $folder/kernel.cu $folder/kernel.h" ] ||
        [ "$(cat "$work/said")" != 'a warning of the compiler' ]; then
        echo "FAILED: $what: $(wc -l <"$work/runs") runs of the compiler, expected $runs; said $(cat "$work/said")"
        head -n 9 "$folder"/made.*
        bad=1
    fi
}

compiles 1 'without a cache' one -O3
compiles 1 'without a cache, again' one -O3
export FMLA_KERNEL_CACHE=$work/cache
compiles 1 'an empty cache' one -O3
compiles 0 'nothing differs' one -O3
compiles 0 'another folder' two -O3
compiles 1 'another flag' two -O2
compiles 0 'the first flag again' two -O3
echo more >>"$work/two/kernel.h"
compiles 1 'another header' two -O3
compiles 0 'the first header' one -O3
echo more >>"$work/one/kernel.cu"
compiles 1 'another source' one -O3
echo 'V1.2.4' >"$work/version"
compiles 1 'another compiler' one -O3

# A failure is not kept either: the first fault comes twice.
kept=$(find "$work/cache" -mindepth 1 -maxdepth 1 | wc -l)
for fault in fault fault lost; do
    echo $fault >>"$work/one/kernel.cu"
    rc=0
    bash "$script" "$work/one/failed" "$work/one/kernel.cu" "$work/nvcc" -O3 2>"$work/said" || rc=$?
    if [ $rc -ne 1 ] || [ "$(wc -l <"$work/said")" -ne 1 ] || [ -e "$work/one/failed.fatbin" ]; then
        echo "FAILED: a compiler that fails ($fault): exit $rc, said $(cat "$work/said")"
        bad=1
    fi
done
if [ "$(find "$work/cache" -mindepth 1 -maxdepth 1 | wc -l)" -ne "$kept" ]; then
    echo 'FAILED: something is kept of a compiler that fails'
    bad=1
fi
exit $bad

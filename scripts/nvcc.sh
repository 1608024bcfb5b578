#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# nvcc.sh STEM SOURCE NVCC FLAG... - compiles a .cu file to STEM.fatbin and writes STEM.ptxas (ptxas's output for each
# kernel), STEM.sha256 (a line for each GPU: hash of the machine code, GPU) and STEM.d (the files that the source
# includes). Prints only warnings, or everything if nvcc fails.
#
# FMLA_KERNEL_CACHE in the environment names a folder that keeps what was compiled. A later build, in any folder, takes
# it from there if compiler, flags, source and included files are equal.
set -euo pipefail
stem=$1 source=$2 nvcc=$3
shift 3
work=$(mktemp -d "$stem.XXXXXX") # beside the results, so that mv replaces them at once
trap 'rm -rf "$work"' EXIT

compile() { # compile FLAG...: makes fatbin, ptxas and sha256 in $work
    local cubin
    mkdir "$work/keep"
    if ! "$nvcc" "$@" -Xptxas -v -MD -MT "$stem.fatbin" -MF "$stem.d" --keep --keep-dir "$work/keep" \
        -o "$work/fatbin" "$source" >"$work/ptxas" 2>&1; then
        cat "$work/ptxas" >&2
        exit 1
    fi
    # ptxas notes its options in the machine code: the GPU is read there, for nvcc's names of these files vary.
    for cubin in "$work"/keep/*.cubin; do
        printf '%s %s\n' "$(sha256sum <"$cubin" | cut -d ' ' -f 1)" \
            "$(grep -aoE -m 1 -e '-arch sm_[0-9]+[a-z]?' "$cubin" | sed -n '1s/.* //p')"
    done >"$work/sha256"
}

compile_or_copy() { # compile_or_copy FLAG...: copies both from the cache, or compiles and keeps them
    local kept includes
    "$nvcc" -std=c++17 -M "$source" >"$work/includes"
    mapfile -t includes < <(sed '1s/^[^:]*://; s/\\$//' "$work/includes" | xargs -n 1)
    kept=$FMLA_KERNEL_CACHE/$({ "$nvcc" --version && echo "$@" && cat "${includes[@]}"; } | sha256sum | cut -d ' ' -f 1)
    if [ -d "$kept" ]; then
        cp "$kept/fatbin" "$kept/ptxas" "$kept/sha256" "$work"
        printf '%s:' "$stem.fatbin" >"$stem.d"
        printf ' \\\n  %s' "${includes[@]}" >>"$stem.d"
        return
    fi
    compile "$@"
    mkdir -p "$kept.$$"
    cp "$work/fatbin" "$work/ptxas" "$work/sha256" "$kept.$$"
    mv -T "$kept.$$" "$kept" 2>/dev/null || rm -rf "$kept.$$" # unless another build has just written it
}

if [ -n "${FMLA_KERNEL_CACHE:-}" ]; then compile_or_copy "$@"; else compile "$@"; fi
grep -vE '^ptxas info|^ *[0-9]+ bytes stack frame|^$' "$work/ptxas" >&2 || true
grep -F 'Potential Performance Loss' "$work/ptxas" >&2 || true # ptxas reports it as information
mv "$work/ptxas" "$stem.ptxas"
mv "$work/sha256" "$stem.sha256"
mv "$work/fatbin" "$stem.fatbin"

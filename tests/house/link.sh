#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# link.sh static|shared|readme ROOT BUILD - builds and runs a program against the library the way a user does,
# without CMake. CC names the compiler, OPENMP_FLAGS its flags for OpenMP. "readme" takes the program from the ```c
# block of README.md, and runs the lines that are printed for it, as they are printed.
set -euo pipefail
mode=$1 root=$2 build=$3
read -ra cc <<<"${CC:-cc}"
read -ra openmp <<<"${OPENMP_FLAGS:-}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

compile() { "${cc[@]}" -std=c11 -Wall -Wextra -Werror -I "$root/include" "$@" -o "$work/program"; }
against_shared() { compile "$@" -L "$build" -lflashmla -Wl,-rpath,"$build" -lm; }

case $mode in
static)
    compile "$(dirname "${BASH_SOURCE[0]}")/outside.c" "$build/libflashmla.a" "${openmp[@]}" -lm -ldl
    "$work/program"
    ;;
shared)
    against_shared "$(dirname "${BASH_SOURCE[0]}")/outside.c"
    "$work/program"
    # The file that a linked program asks for at run time is the soname's.
    readelf -d "$work/program" | grep -q 'NEEDED.*\[libflashmla\.so\.[0-9.]*[0-9]\]'
    ;;
readme)
    # A checkout as the lines expect it: the library in build/release, the program as example.c, the compiler as cc.
    mkdir -p "$work"/{checkout/build,bin}
    ln -s "$root/include" "$work/checkout/include"
    ln -s "$build" "$work/checkout/build/release"
    printf '#!/bin/sh\nexec %s "$@"\n' "${cc[*]}" >"$work/bin/cc"
    chmod +x "$work/bin/cc"
    cd "$work/checkout"
    awk '/^```c[ \t]*$/ { block = 1; text = ""; next }
        /^```/ { block = 0; if (text ~ /int main\(/) { printf "%s", text; exit } }
        block { text = text $0 "\n" }' "$root/README.md" >example.c
    grep -q 'int main(' example.c || { echo 'README.md has no program in a ```c block'; exit 1; }
    count=0
    while IFS= read -r line; do
        # Another compiler's OpenMP is not always where the linker looks: only gcc's line for the archive is for all.
        [[ $line != *-lgomp* || ${openmp[*]} == -fopenmp && ${cc[*]} == *gcc* ]] || continue
        rm -f a.out
        echo "--- $line"
        said=$(unset LD_LIBRARY_PATH && PATH=$work/bin:$PATH bash -euc "$line")
        [ "$said" = attended ] || { echo "said '$said', not 'attended'"; exit 1; }
        count=$((count + 1))
    done < <(grep '^cc example\.c -I' "$root/README.md")
    if [ "$count" -eq 0 ]; then
        echo 'README.md has no line that builds example.c'
        exit 1
    fi
    ;;
*)
    echo "unknown check $mode" >&2
    exit 2
    ;;
esac

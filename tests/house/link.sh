#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# link.sh static|shared|readme ROOT BUILD - builds and runs a program against the library the way a user does,
# without CMake. CC names the compiler. "readme" takes the programs from the ```c blocks of README.md.
set -euo pipefail
mode=$1 root=$2 build=$3
read -ra cc <<<"${CC:-cc}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

compile() { "${cc[@]}" -std=c11 -Wall -Wextra -Werror -I "$root/include" "$@" -o "$work/program"; }
against_shared() { compile "$@" -L "$build" -lflashmla -Wl,-rpath,"$build" -lm; }

case $mode in
static)
    compile "$(dirname "${BASH_SOURCE[0]}")/outside.c" "$build/libflashmla.a" -pthread -lm -ldl
    "$work/program"
    ;;
shared)
    against_shared "$(dirname "${BASH_SOURCE[0]}")/outside.c"
    "$work/program"
    # The file that a linked program asks for at run time is the soname's.
    readelf -d "$work/program" | grep -q 'NEEDED.*\[libflashmla\.so\.[0-9.]*[0-9]\]'
    ;;
readme)
    awk -v work="$work" '/^```c[ \t]*$/ { block = 1; n++; next } /^```/ { block = 0 }
                         block { print > (work "/example" n ".c") }' "$root/README.md"
    count=0
    for example in "$work"/example*.c; do
        grep -qs 'int main(' "$example" || continue
        against_shared "$example"
        echo "--- $(basename "$example")"
        (cd "$work" && ./program)
        count=$((count + 1))
    done
    if [ "$count" -eq 0 ]; then
        echo 'README.md has no program in a ```c block'
        exit 1
    fi
    ;;
*)
    echo "unknown check $mode" >&2
    exit 2
    ;;
esac

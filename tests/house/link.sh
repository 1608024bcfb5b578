#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# link.sh readme|rust|go ROOT BUILD - builds and runs a program against the library as users do, without CMake. CC names
# the compiler. "readme" takes the program from the ```c blocks of README.md and runs the lines printed for it, which link
# both libraries. "rust" and "go" run the lines above the programs in examples/; they exit 77 if their tools are not
# installed.
set -euo pipefail
mode=$1 root=$2 build=$3
read -ra cc <<<"${CC:-cc}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# tools COMMAND...: skips the check unless each of them works.
tools() {
    local command
    for command in "$@"; do
        if ! $command >/dev/null 2>&1; then
            echo "needs ${command%% *}"
            exit 77
        fi
    done
}

# printed SOURCE: runs the lines of its opening comment that are set in, in a folder that looks like the checkout's root.
printed() {
    mkdir "$work/build"
    ln -s "$root/include" "$root/examples" "$work/"
    ln -s "$build" "$work/build/release"
    sed -n -E '/^(package|#\[)/q; s,^//!?(    +|\t),,p' "$root/$1" >"$work/lines"
    if [ "$(wc -l <"$work/lines")" -lt 2 ]; then
        echo "$1 does not say how it is built"
        exit 1
    fi
    (cd "$work" && bash -eu lines)
}

case $mode in
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
        rm -f a.out
        echo "--- $line"
        said=$(unset LD_LIBRARY_PATH && PATH=$work/bin:$PATH bash -euc "$line")
        [ "$said" = attended ] || { echo "said '$said', not 'attended'"; exit 1; }
        count=$((count + 1))
    done < <(grep '^cc example\.c -I' "$root/README.md")
    if [ "$count" -lt 2 ]; then
        echo 'README.md has no lines that build example.c with either library'
        exit 1
    fi
    ;;
rust)
    tools 'bindgen --version' 'rustc --version'
    printed examples/rust/decode.rs
    # bindgen appends an underscore to keywords of Rust; the other words are keywords of Go, Python and Zig.
    if grep -nE '^ +pub ([a-z0-9_]+_|chan|defer|from|func|go|import|interface|lambda|map|package|range|select|switch|var):' \
        "$work/build/flashmla.rs"; then
        echo '^ members of the header whose name another language has as a keyword'
        exit 1
    fi
    ;;
go)
    tools 'go version'
    export GOCACHE=$work/cache GOFLAGS='' GOPROXY=off GOTOOLCHAIN=local
    printed examples/go/decode.go
    ;;
*)
    echo "unknown check $mode" >&2
    exit 2
    ;;
esac

#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# abi.sh SHARED_LIBRARY STATIC_LIBRARY HEADER - the library exports the functions of its header and nothing else. In the
# shared library they have the version of the header's interface.
set -euo pipefail
shared=$1 static=$2 header=$3
export LC_ALL=C
bad=0
fail() {
    echo "$*"
    bad=1
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The name before the first parenthesis of each declaration, which may span lines.
awk '
    /^[ \t]*#/ { next }
    /^FMLA_API / { declaration = "" ; open = 1 }
    open {
        declaration = declaration " " $0
        if ($0 ~ /;/) {
            sub(/[ \t]*\(.*/, "", declaration)
            sub(/.*[^A-Za-z0-9_]/, "", declaration)
            print declaration
            open = 0
        }
    }' "$header" | sort >"$work/declared"
[ -s "$work/declared" ] || fail "no FMLA_API declaration found in $header"

# nm's second column: upper-case letters are global. Data would show here too; the library exports none.
# The shared library also defines its version's name, as an absolute symbol.
symbols() { nm "$@" | awk 'NF == 3 && $2 != "A" { print $3 }' | sort -u; }
symbols -D --defined-only "$shared" >"$work/versioned"
sed 's/@.*//' "$work/versioned" >"$work/shared"
symbols -g --defined-only "$static" >"$work/static"

for kind in shared static; do
    if grep -v '^fmla_' "$work/$kind"; then fail "^ names outside of fmla_: $kind"; fi
    if ! diff "$work/declared" "$work/$kind" >"$work/diff"; then
        sed -n 's/^< \(.*\)/\1: declared FMLA_API, not exported: '"$kind"'/p
                s/^> \(.*\)/\1: exported, not declared FMLA_API: '"$kind"'/p' "$work/diff"
        bad=1
    fi
done

# A major version is one interface; while it is 0, a minor version is.
version() { sed -n "s/^#define FMLA_VERSION_$1 \([0-9]*\)$/\1/p" "$header"; }
interface=$(version MAJOR)
[ "$interface" != 0 ] || interface=0.$(version MINOR)
soname=$(readelf -d "$shared" | sed -n 's/.*(SONAME).*\[\(.*\)\]/\1/p')
[ "$soname" = "libflashmla.so.$interface" ] || fail "soname is '$soname', must be 'libflashmla.so.$interface'"

if grep -v "@@FLASHMLA_$interface$" "$work/versioned"; then fail "^ not of the version FLASHMLA_$interface"; fi

# Loading the library must not require an executable stack.
if readelf -lW "$shared" | grep -q 'GNU_STACK.*RWE'; then fail 'the shared library asks for an executable stack'; fi

[ "$bad" -eq 0 ] && echo "$(wc -l <"$work/declared") functions, soname $soname"

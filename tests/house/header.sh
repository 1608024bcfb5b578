#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# header.sh c11|c++17|layout|dlpack|driver ROOT - compiles the public header alone; driver: compares the library's
# declarations of the NVIDIA driver with cuda.h. CC and CXX name the compilers. Exits 77 if a tool is not installed.
# header.sh c++17-self-test: the check of symbols must detect planted ones.
set -euo pipefail
mode=$1
root=$(cd "${2:-$(dirname "${BASH_SOURCE[0]}")/../..}" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")"
read -ra cc <<<"${CC:-cc}"
strict=(-pedantic -Wall -Wextra -Werror -Wmissing-field-initializers -fsyntax-only -I "$root/include")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Writes a use of every struct that FMLA_INIT supports: as initialiser, in an assignment, and in an expression. Before them,
# checks that FMLA_VERSION is a number for #if, and that the types of enumerations are exactly int32_t.
write_user() {
    echo '#include <flashmla/flashmla.h>'
    echo '#include <flashmla/flashmla.h>' # the guard works
    printf '%s\n' '#if !(FMLA_VERSION >= 100) || FMLA_VERSION / 10000 != FMLA_VERSION_MAJOR' '#error FMLA_VERSION' '#endif'
    printf 'extern %s status;\nextern %s format;\n' fmla_status fmla_kv_format int32_t int32_t
    local count=0 type
    while read -r type; do
        printf 'size_t use_%s(void);\nsize_t use_%s(void)\n{\n' "$type" "$type"
        printf '    %s a = FMLA_INIT(%s);\n    a = FMLA_INIT(%s);\n' "$type" "$type" "$type"
        printf '    return a.struct_size + FMLA_INIT(%s).struct_size;\n}\n' "$type"
        count=$((count + 1))
    done < <(awk '/^typedef struct/ { body = "" }
                  { body = body $0 }
                  /^}.*;/ { if (body ~ /size_t struct_size;/) { sub(/^} */, ""); sub(/;.*/, ""); print }
                            body = "" }' "$root/include/flashmla/flashmla.h")
    if [ "$count" -eq 0 ]; then
        echo 'no struct with a struct_size found' >&2
        return 1
    fi
}

# Sets cxx to a C++17 compiler, or skips the check.
find_cxx() {
    for cxx in ${CXX:-} g++ clang++ c++; do
        if echo 'int x;' | "$cxx" -x c++ -std=c++17 -fsyntax-only - 2>/dev/null; then return; fi
    done
    echo 'needs a C++17 compiler (Debian: g++)'
    exit 77
}

# no_symbols SOURCE INCLUDE: the object, with unused inline functions kept, defines no symbol that another object could see or
# share: neither a global (upper-case letters of nm) nor a weak one (v, w) nor a unique one (u).
no_symbols() {
    "$cxx" -std=c++17 -O0 -Dinline='__attribute__((used)) inline' -c -I "$2" -o "$work/object.o" "$1" || exit 1
    nm --defined-only "$work/object.o" | awk '$2 ~ /^[A-Zuvw]$/ { print $2, $3; bad = 1 } END { exit bad }'
}

case $mode in
c11)
    write_user >"$work/user.c"
    echo '#include <flashmla/flashmla.h>' >"$work/alone.c"
    for source in alone user; do "${cc[@]}" -std=c11 "${strict[@]}" "$work/$source.c"; done
    ;;
c++17)
    find_cxx
    write_user >"$work/user.cpp"
    "$cxx" -std=c++17 "${strict[@]}" "$work/user.cpp"
    # All uses are in functions of internal linkage: any global symbol comes from the header.
    write_user | sed 's/^size_t use_/static &/' >"$work/symbols.cpp"
    if ! no_symbols "$work/symbols.cpp" "$root/include"; then
        echo '^ symbols that every C++ object with the header in it defines' >&2
        exit 1
    fi
    ;;
c++17-self-test)
    find_cxx
    mkdir "$work/include"
    for planted in '' 'int global;' 'inline int weak = 1;' 'inline int weak() { return 1; }' 'int global() { return 1; }' \
        'template <class T> struct s { static T f() { return T(); } }; static int use = s<int>::f();'; do
        echo "$planted" >"$work/include/planted.h"
        echo '#include <planted.h>' >"$work/planted.cpp"
        if no_symbols "$work/planted.cpp" "$work/include" >"$work/seen"; then seen=; else seen=1; fi
        if [ -n "$planted" ] && [ -z "$seen" ]; then
            echo "not seen: $planted" >&2
            exit 1
        elif [ -z "$planted" ] && [ -n "$seen" ]; then
            echo "a symbol in an empty header: $(cat "$work/seen")" >&2
            exit 1
        fi
    done
    ;;
layout)
    "${cc[@]}" -std=c11 "${strict[@]}" -I"$root/src" layout.c
    ;;
dlpack)
    if ! echo '#include <dlpack/dlpack.h>' | "${cc[@]}" -E - >/dev/null 2>&1; then
        echo 'needs dlpack/dlpack.h (Debian: libdlpack-dev)'
        exit 77
    fi
    "${cc[@]}" -std=c11 "${strict[@]}" -DCOMPARE_WITH_DLPACK -I"$root/src" layout.c
    ;;
driver)
    for folder in "${CUDA_HOME:-/usr/local/cuda}/include" /usr/include; do
        [ ! -e "$folder/cuda.h" ] || break
    done
    if [ ! -e "$folder/cuda.h" ]; then
        echo "needs CUDA's cuda.h"
        exit 77
    fi
    compare() { "${cc[@]}" -std=gnu11 -Wall -Wextra -Werror -fsyntax-only -isystem "$folder" "$1/tests/house/driver.c"; }
    compare "$root"
    # Every kind of difference must be detected.
    mkdir -p "$work/src/cuda" "$work/tests/house"
    cp driver.c "$work/tests/house/"
    while IFS= read -r edit; do
        sed "$edit" "$root/src/cuda/driver.h" >"$work/src/cuda/driver.h"
        if cmp -s "$root/src/cuda/driver.h" "$work/src/cuda/driver.h" || compare "$work" 2>/dev/null; then
            echo "self-test: not noticed: $edit"
            exit 1
        fi
    done <<'EDITS'
s/SM_COUNT = 16/SM_COUNT = 17/
s/char pad\[64\]/char pad[32]/
s/int overlap;/char overlap;/
s/unsigned shared_bytes;/unsigned long shared_bytes;/
s/ int \*count)/ unsigned *count)/
s/cu_kernel \*kernel, cu_library library, const char \*name)/cu_kernel *kernel, const char *name, cu_library library)/
s/cuCtxPushCurrent_v2/cuCtxPushCurrent_v3/
EDITS
    ;;
*)
    echo "unknown check $mode" >&2
    exit 2
    ;;
esac

#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# install.sh BUILD - installs a build into a new prefix and uses it as users do: pkg-config, CMake, C and C++, shared
# and static. Then it moves the tree, which must still work. CC and CXX name the compilers.
set -euo pipefail
build=$(cd "$1" && pwd)
source=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
read -ra cc <<<"${CC:-cc}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset DESTDIR LD_LIBRARY_PATH PKG_CONFIG_LIBDIR PKG_CONFIG_SYSROOT_DIR
fail() {
    echo "FAILED: $*"
    exit 1
}

# A space in the name, since paths may contain one.
prefix="$work/a prefix"
cp "$source/examples/decode.c" "$work/main.c"
cd "$work" # nothing below may look into the source tree
# Installing a component, the default one, leaves CMake's list of installed files alone.
cmake --install "$build" --prefix "$prefix" --component Unspecified >"$work/log" || { cat "$work/log"; exit 1; }

# ---- Installed files ---------------------------------------------------------------------------------------------

pc=$(find "$prefix" -name flashmla.pc)
libdir=$(dirname "$(dirname "$pc")")
version() { sed -n "s/^#define FMLA_VERSION_$1 \([0-9]*\)$/\1/p" "$prefix/include/flashmla/flashmla.h"; }
major=$(version MAJOR) minor=$(version MINOR)
interface=$major # the compatible version: while the major version is 0, only one minor version
[ "$major" != 0 ] || interface=0.$minor
[ -f "$libdir/libflashmla.a" ] || fail 'no libflashmla.a'
[ "$(readlink "$libdir/libflashmla.so")" = "libflashmla.so.$interface" ] || fail 'libflashmla.so does not lead to the soname'
[ -L "$libdir/libflashmla.so.$interface" ] || fail "libflashmla.so.$interface is not a link to the full version"
readelf -d "$libdir/libflashmla.so" | grep -q "SONAME.*\[libflashmla\.so\.${interface//./\\.}\]" || fail 'wrong soname'
for file in "$libdir/libflashmla.so" "$prefix/bin/flashmla"; do
    if readelf -d "$file" | grep -E 'R(UN)?PATH'; then fail "^ $file has a search path"; fi
done
if grep -rlF -e "$source" -e "$build" "$prefix"; then fail '^ names the folder that it was built from'; fi
if grep -rlF -e "$work" "$prefix"; then fail '^ names the prefix, and could not be moved'; fi

# The command's help for man and for shells, and the licence. A build with sanitizers or for another machine has no help to
# install; the tests of the command compare the help with the options.
documents=$prefix/share/doc/flashmla
cmp "$source/LICENSE" "$documents/LICENSE" || fail 'no licence'
# The documents are there, with all that they link to, under the name that the header says.
for document in semantics.md fp8-accuracy.md; do
    cmp "$source/docs/$document" "$documents/$document" || fail "no $document"
    while IFS= read -r link; do
        [ -e "$documents/$link" ] || fail "$document links to $link, which is not installed"
    done < <(grep -oE '\]\([^)#:]+' "$documents/$document" | cut -c 3-)
done
grep -q 'installed as share/doc/flashmla/semantics.md' "$prefix/include/flashmla/flashmla.h" || fail 'the header names no document'
declare -A help=([man]=share/man/man1/flashmla.1 [bash]=share/bash-completion/completions/flashmla
    [zsh]=share/zsh/site-functions/_flashmla)
for form in "${!help[@]}"; do
    "$prefix/bin/flashmla" help --as "$form" | cmp - "$prefix/${help[$form]}" || fail "${help[$form]} is not what the command says"
done

# ---- Programs ----------------------------------------------------------------------------------------------------

use_pkg_config() { export PKG_CONFIG_PATH="$1"; }
words=()
flags() { # flags OPTION... - as words; pkg-config escapes a space like a shell does
    eval "words=($(pkg-config "$@" flashmla))"
}
shared_program() { # shared_program LIBDIR
    use_pkg_config "$1/pkgconfig"
    flags --cflags --libs
    "${cc[@]}" -std=c11 -Wall -Wextra -Werror main.c "${words[@]}" -o program
    readelf -d program | grep -qF "[libflashmla.so.$interface]" || fail 'the program does not ask for the soname'
    LD_LIBRARY_PATH="$1" ./program
}

echo '== pkg-config, shared'
shared_program "$libdir"
url=$(sed -n 's/^URL: //p' "$pc")
# shellcheck disable=SC2016 # pkg-config's variable
[ "$url" = 'file://${datadir}/doc/flashmla/semantics.md' ] || fail "the page is $url"
flags --variable=datadir
[ -f "${words[0]}/doc/flashmla/semantics.md" ] || fail 'the page of the pkg-config file is not there'
[ "$(pkg-config --modversion flashmla)" = "$("$prefix/bin/flashmla" --version | sed 's/^flashmla //')" ] ||
    fail 'pkg-config and the command differ in version'
flags --libs
if [[ " ${words[*]} " != *' -lflashmla ' || " ${words[*]/-lflashmla/} " == *' -l'* ]]; then
    fail "users of the shared library are asked to link ${words[*]}"
fi

# With both libraries in one folder, the archive is selected by name; -static also selects it, together with libc's.
echo '== pkg-config, static'
flags --static --cflags --libs
"${cc[@]}" -std=c11 main.c "${words[@]/#-lflashmla/-l:libflashmla.a}" -o program
if readelf -d program | grep -F '[libflashmla'; then fail '^ the program is not linked statically'; fi
./program

echo '== pkg-config, C++17'
cxx=
for compiler in ${CXX:-} g++ clang++ c++; do
    if echo 'int main() { return 0; }' | "$compiler" -x c++ -std=c++17 - -o /dev/null 2>/dev/null; then
        cxx=$compiler
        break
    fi
done
if [ -n "$cxx" ]; then
    cat >main.cpp <<'PROGRAM'
#include <flashmla/flashmla.h>
#include <iostream>
int main()
{
    fmla_dense_decode_args args = FMLA_INIT(fmla_dense_decode_args);
    if (fmla_dense_decode(&args) == FMLA_OK) return 1; // without tensors: refused, in words
    std::cout << "flashmla " << fmla_version_string() << ": " << fmla_last_error() << '\n';
    return *fmla_last_error() ? 0 : 1;
}
PROGRAM
    flags --cflags --libs
    "$cxx" -std=c++17 -Wall -Wextra -Werror main.cpp "${words[@]}" -o program
    LD_LIBRARY_PATH=$libdir ./program
else
    echo 'SKIP: no C++ compiler here'
fi

echo '== CMake'
mkdir project
cp main.c project/
cat >project/CMakeLists.txt <<PROJECT
cmake_minimum_required(VERSION 3.21)
project(outside LANGUAGES C)
find_package(flashmla $major.$minor REQUIRED)
add_executable(with_shared main.c)
target_link_libraries(with_shared PRIVATE flashmla::flashmla)
add_executable(with_static main.c)
target_link_libraries(with_static PRIVATE flashmla::flashmla_static)
if(NOT EXISTS "\${flashmla_DOCUMENTS}/semantics.md")
  message(FATAL_ERROR "no documents in \${flashmla_DOCUMENTS}")
endif()
PROJECT
cmake_program() { # cmake_program PREFIX
    rm -rf project/build
    { cmake -S project -B project/build -G Ninja -DCMAKE_C_COMPILER="${cc[0]}" -DCMAKE_PREFIX_PATH="$1" &&
        cmake --build project/build; } >log 2>&1 || { cat log; fail 'the CMake project does not build'; }
    project/build/with_shared
    project/build/with_static
}
cmake_program "$prefix"
if readelf -d project/build/with_static | grep -F '[libflashmla'; then fail '^ flashmla_static is not static'; fi
refused=("$major.$((minor + 1))" "$((major + 1)).0")
if [ "$major" = 0 ] && [ "$minor" -gt 0 ]; then refused+=("0.$((minor - 1))"); fi
for asked in "${refused[@]}"; do
    rm -rf refused
    mkdir refused
    cp main.c refused/
    sed "s/flashmla $major.$minor /flashmla $asked /" project/CMakeLists.txt >refused/CMakeLists.txt
    if cmake -S refused -B refused/build -G Ninja -DCMAKE_C_COMPILER="${cc[0]}" -DCMAKE_PREFIX_PATH="$prefix" \
        >log 2>&1; then
        fail "$major.$minor is installed, and was taken for $asked"
    fi
    grep -q 'compatible with requested version' log || { cat log; fail "$asked: refused for another reason"; }
done

# ---- Elsewhere ---------------------------------------------------------------------------------------------------

echo '== Moved'
mkdir elsewhere
mv "$prefix" elsewhere/moved
shared_program "elsewhere/moved${libdir#"$prefix"}"
cmake_program "$work/elsewhere/moved"
elsewhere/moved/bin/flashmla --version

# ---- Uninstalling, as make install and make uninstall do; the records of this build are restored afterwards ----------

echo '== make install, make uninstall'
records=(installed.txt install_manifest.txt)
mkdir records
for record in "${records[@]}"; do if [ -e "$build/$record" ]; then cp -p "$build/$record" records/; fi; done
put_back() {
    for record in "${records[@]}"; do rm -f "$build/$record"; done
    cp -p "$work"/records/* "$build/" 2>/dev/null || true
    rm -rf "$work"
}
trap put_back EXIT
mkdir -p stage/opt/share/man/man1
echo theirs >stage/opt/share/man/man1/other.1
PREFIX=/opt DESTDIR="$work/stage" bash "$source/scripts/install.sh" install "$build" >log || { cat log; fail 'make install'; }
for file in LICENSE semantics.md flashmla.1 _flashmla libflashmla.a libflashmla.so flashmla.h flashmla.pc flashmlaConfig.cmake; do
    grep -q "/$file\$" log || { cat log; fail "make install does not tell of $file"; }
done
[ -x stage/opt/bin/flashmla ] || fail 'make install brought no command'
bash "$source/scripts/install.sh" uninstall "$build" || fail 'make uninstall'
if find stage -not -type d | grep -v '^stage/opt/share/man/man1/other.1$'; then fail '^ make uninstall left these'; fi
if find stage -name flashmla | grep .; then fail '^ make uninstall left these folders'; fi
[ -e stage/opt/share/man/man1/other.1 ] || fail "make uninstall took another's file"
if bash "$source/scripts/install.sh" uninstall "$build" 2>log; then fail 'make uninstall twice'; fi

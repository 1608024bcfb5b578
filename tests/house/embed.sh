#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# embed.sh ROOT - builds projects that contain this one, by FetchContent and by add_subdirectory, and runs their programs,
# linked with the shared library and with the archive. What such a project is compiled with must not change, and it gets
# no tests, command or installed files unless it asks. BUILD_SHARED_LIBS must be followed, also by what is installed. CC
# names the compiler.
set -euo pipefail
root=$(cd "$1" && pwd)
read -ra cc <<<"${CC:-cc}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset CFLAGS LDFLAGS LD_LIBRARY_PATH DESTDIR
fail() {
    echo "FAILED: $*"
    exit 1
}

# All projects share one build folder, and the library's part of it, so that it is compiled once.
mkdir "$work/project"
cp "$root/examples/decode.c" "$work/project/main.c"
cat >"$work/project/CMakeLists.txt" <<'PROJECT'
cmake_minimum_required(VERSION 3.21)
project(outside LANGUAGES C)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(HOW STREQUAL FetchContent)
  include(FetchContent)
  FetchContent_Declare(flashmla URL https://example.org/never-fetched.tar.gz)
  FetchContent_MakeAvailable(flashmla)
else()
  add_subdirectory(${FETCHCONTENT_SOURCE_DIR_FLASHMLA} ${CMAKE_BINARY_DIR}/_deps/flashmla-build)
endif()
add_executable(plain main.c)
target_link_libraries(plain PRIVATE flashmla::flashmla)
add_executable(with_archive main.c)
target_link_libraries(with_archive PRIVATE flashmla::flashmla_static)
install(TARGETS plain)
PROJECT
build=$work/build

# make WHAT OPTION...: configures and builds the project, and runs both programs.
make() {
    local what=$1
    shift
    echo "== $what"
    { cmake -S "$work/project" -B "$build" -G Ninja -DCMAKE_C_COMPILER="${cc[0]}" -DFMLA_CUDA=OFF \
        -DFETCHCONTENT_SOURCE_DIR_FLASHMLA="$root" "$@" && cmake --build "$build"; } >"$work/log" 2>&1 ||
        { cat "$work/log"; fail "$what"; }
    "$build/plain"
    "$build/with_archive"
}

# linked PROGRAM yes|no: does it need the shared library?
linked() {
    local needs=no
    if readelf -d "$1" | grep -q 'NEEDED.*\[libflashmla\.so'; then needs=yes; fi
    [ "$needs" = "$2" ] || fail "does ${1##*/} need the shared library? $needs, not $2"
}

# -O0 by the project's own choice, which makes this test short: Debug is the one build type that may have it.
make 'FetchContent' -DHOW=FetchContent -DCMAKE_BUILD_TYPE=Debug
linked "$build/plain" yes
linked "$build/with_archive" no
built=$build/_deps/flashmla-build
for file in tests support examples flashmla; do
    [ ! -e "$built/$file" ] || fail "a project that contains this one gets $file"
done
if ctest --test-dir "$build" -N | grep -q 'Test *#'; then fail 'a project that contains this one gets its tests'; fi
cmake --install "$build" --prefix "$work/prefix" >/dev/null
[ "$(find "$work/prefix" -type f -printf '%f\n')" = plain ] || fail "installed too: $(find "$work/prefix" -type f)"
# Commands of the project's own programs hold nothing but its own choices and the header's folder.
grep -o '"command": ".* -c .*/project/main.c"' "$build/compile_commands.json" >"$work/commands" || fail 'no commands'
if grep -vE "^\"command\": \"[^ ]+ +-I$root/include -g -o [^ ]+ -c [^ ]+\"\$" "$work/commands"; then
    fail '^ options of this project in those of the containing one'
fi

make 'add_subdirectory' -DHOW=add_subdirectory
linked "$build/plain" yes

for shared in ON OFF; do
    make "BUILD_SHARED_LIBS=$shared" -DBUILD_SHARED_LIBS=$shared -DFMLA_INSTALL=ON
    linked "$build/plain" "$([ $shared = ON ] && echo yes || echo no)"
    rm -rf "$work/prefix"
    cmake --install "$build" --prefix "$work/prefix" >/dev/null
    find "$work/prefix" -name 'libflashmla.*' -printf '%f\n' | LC_ALL=C sort >"$work/installed"
    if [ $shared = ON ]; then
        if grep -F .a "$work/installed" || ! grep -qF .so "$work/installed"; then fail "installed: $(cat "$work/installed")"; fi
    else
        [ "$(cat "$work/installed")" = libflashmla.a ] || fail "installed: $(cat "$work/installed")"
    fi
    # The installed names mean the same.
    rm -rf "$work/user"
    mkdir "$work/user"
    cp "$work/project/main.c" "$work/user/"
    printf '%s\n' 'cmake_minimum_required(VERSION 3.21)' 'project(user LANGUAGES C)' 'find_package(flashmla REQUIRED)' \
        'add_executable(user main.c)' 'target_link_libraries(user PRIVATE flashmla::flashmla)' >"$work/user/CMakeLists.txt"
    { cmake -S "$work/user" -B "$work/user/build" -G Ninja -DCMAKE_C_COMPILER="${cc[0]}" -DCMAKE_PREFIX_PATH="$work/prefix" &&
        cmake --build "$work/user/build"; } >"$work/log" 2>&1 || { cat "$work/log"; fail 'a user of what is installed'; }
    "$work/user/build/user"
    libdir=$(dirname "$(find "$work/prefix" -name 'libflashmla.*' -print -quit)")
    read -ra words < <(PKG_CONFIG_PATH=$libdir/pkgconfig pkg-config --cflags --libs flashmla)
    "${cc[@]}" -std=c11 "$work/user/main.c" "${words[@]}" -o "$work/user/program"
    LD_LIBRARY_PATH=$libdir "$work/user/program"
done

# No build type is chosen for a project that chose none.
cmake -S "$work/project" -B "$work/none" -G Ninja -DCMAKE_C_COMPILER="${cc[0]}" -DFMLA_CUDA=OFF -DHOW=FetchContent \
    -DFETCHCONTENT_SOURCE_DIR_FLASHMLA="$root" >"$work/log" 2>&1 || { cat "$work/log"; fail 'no build type'; }
type=$(sed -n 's/^CMAKE_BUILD_TYPE:[A-Z]*=//p' "$work/none/CMakeCache.txt")
[ -z "$type" ] || fail "the containing project's build type became $type"

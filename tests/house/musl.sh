#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# musl.sh ROOT - builds the library with musl instead of glibc, without GPU kernels, and runs the examples, which check their
# results, and a program with each of the two libraries. Exits 77 without musl-gcc.
set -euo pipefail
root=$(cd "$1" && pwd)
command -v musl-gcc >/dev/null || {
    echo 'needs musl-gcc (Debian: musl-tools)'
    exit 77
}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset CFLAGS LDFLAGS LD_LIBRARY_PATH
build=$work/build

# The build type Debug takes a quarter of the time.
{ CC=musl-gcc cmake -S "$root" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Debug -DFMLA_CUDA=OFF -DFMLA_TOOLS=OFF \
    -DFMLA_TESTS=OFF -DFMLA_WERROR=ON && cmake --build "$build"; } >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
ctest --test-dir "$build" --output-on-failure --no-tests=error

program() { musl-gcc -std=c11 -Wall -Wextra -Werror -I "$root/include" "$root/examples/decode.c" "$@" -o "$work/program"; }
program -L "$build" -lflashmla -Wl,-rpath,"$build"
"$work/program"
program -static "$build/libflashmla.a" -pthread -lm -ldl
"$work/program"
# glibc must not have come in again.
for file in "$build/libflashmla.so" "$build/examples/example_decode"; do
    if readelf -dW "$file" | grep -E 'NEEDED.*(libc\.so\.6|libm\.so\.6|ld-linux)'; then
        echo "^ FAILED: $file needs glibc"
        exit 1
    fi
done

#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# dependencies.sh [build|test|lint|wheel|ci|aarch64|fresh] - checks for the tools of one purpose and installs missing ones.
#
# If all tools work, it prints nothing and needs neither root nor network. Otherwise it installs their Debian packages
# if it can without a question (as root, or sudo without a password), or else prints the line to run. Exit codes: 0 if
# all tools work, 3 if one is missing that this script may not or cannot install.
#
# A tool is present if it works (a compiler: if it compiles and links); installed packages are not checked, because
# tools may come from elsewhere.
set -euo pipefail

purpose=${1:-build}
packages=() # Debian's names of missing packages
missing=()  # descriptions of them, for other systems

need() { # need WHAT PACKAGE...
    missing+=("$1")
    shift
    packages+=("$@")
}

have() { command -v "$1" >/dev/null 2>&1; }
have_python() { "$(dirname "${BASH_SOURCE[0]}")/python.sh" "$@" >/dev/null; }

# The probe tests what the build needs from a compiler.
compiles() {
    "$@" -x c -std=c11 -pthread - -o /dev/null >/dev/null 2>&1 <<'PROBE'
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#if defined(__clang__)
#if __clang_major__ < 14
#error "clang 14 or later"
#endif
#elif !defined(__GNUC__) || __GNUC__ < 10
#error "gcc 10 or later"
#endif
int main(void) { return printf("%d\n", pthread_self() == 0) < 0; }
PROBE
}

need_compiler() {
    local words
    if [ -n "${CC:-}" ]; then
        read -ra words <<<"$CC" # CC may hold flags, or ccache in front
        if compiles "${words[@]}"; then return; fi
        case ${words[0]} in
        gcc | gcc-[0-9]*) need "a working $CC (gcc 10 or later)" "${words[0]}" libc6-dev ;;
        clang) need "a working $CC (clang 14 or later)" clang libc6-dev ;;
        clang-[0-9]*) need "a working $CC (clang 14 or later)" "${words[0]}" libc6-dev ;;
        *) # its package is unknown
            echo "CC is '$CC', which is no gcc (10 or later) or clang (14 or later) that works." >&2
            exit 3
            ;;
        esac
    elif ! compiles cc && ! compiles gcc && ! compiles clang; then
        need 'a C compiler (gcc 10 or clang 14 or later)' gcc libc6-dev
    fi
}

cmake_is_new_enough() {
    local version
    version=$(cmake --version 2>/dev/null | sed -n '1s/^cmake version //p')
    [ -n "$version" ] && printf '%s\n' 3.21 "$version" | sort -V -C
}

need_build() {
    need_compiler
    cmake_is_new_enough || need 'cmake 3.21 or later' cmake
    have ninja || need ninja ninja-build
    { have ld && have objcopy && have nm && have readelf; } || need binutils binutils
    if ! have pkg-config; then
        need pkg-config pkg-config
        # Without pkg-config this is unknown; requesting a package twice is harmless.
        need 'jansson with its headers' libjansson-dev
    elif ! pkg-config --exists jansson; then
        need 'jansson with its headers' libjansson-dev
    fi
}

# What tests need beside the build and is small. Without it they are skipped; so are those for which more would be needed.
need_test() {
    need_build
    have g++ || have clang++ || need g++ g++
    echo '#include <dlpack/dlpack.h>' | ${CC:-cc} -E -x c - >/dev/null 2>&1 || need 'the header of DLPack' libdlpack-dev
    have musl-gcc || need 'musl-gcc, the compiler for musl' musl-tools
    have_python numpy pytest || need 'Python 3.9 or later with NumPy and pytest' python3-numpy python3-pytest
    have_python venv ensurepip || need 'Python 3.9 or later with venv and pip' python3 python3-venv
}

need_lint() {
    need_build # clang-tidy and cppcheck read the build's compile commands
    have git || need git git
    { have clang-format-14 || have clang-format; } || need clang-format clang-format
    have clang-tidy || need clang-tidy clang-tidy
    have cppcheck || need cppcheck cppcheck
    have shellcheck || need shellcheck shellcheck
    have black || need black black
    have mypy || need mypy mypy
}

# pip provides all else that the Python package's build needs, including missing CMake and ninja.
need_wheel() {
    need_compiler
    have_python venv ensurepip || need 'Python 3.9 or later with venv and pip' python3 python3-venv
}

need_ci() {
    need_lint
    compiles clang || need 'clang 14 or later' clang
    compiles gcc || need gcc gcc libc6-dev
    need_test
    # For the examples in other languages. bindgen reads headers with clang's library.
    bindgen --version >/dev/null 2>&1 || need bindgen bindgen clang
    rustc --version >/dev/null 2>&1 || need rustc rustc
    go version >/dev/null 2>&1 || need 'go 1.18 or later' golang-go
    echo 'int main(void) { return 0; }' | gcc -fsanitize=address,undefined -x c - -o /dev/null 2>/dev/null ||
        need 'the sanitizers of gcc' gcc
    echo 'int main(void) { return 0; }' | gcc -fsanitize=thread -x c - -o /dev/null 2>/dev/null ||
        need "gcc's ThreadSanitizer" gcc
    need_fuzz
    have valgrind || need valgrind valgrind
}

# libFuzzer comes with the run-time library of clang's own version, which Debian packs as libclang-rt, and
# Ubuntu 22.04 with libclang-common.
need_fuzz() {
    local version
    echo 'int LLVMFuzzerTestOneInput(const char *d, unsigned long n) { return d && n > 1u << 30; }' |
        clang -fsanitize=fuzzer,address,undefined -x c - -o /dev/null 2>/dev/null && return
    version=$(clang -dumpversion 2>/dev/null | cut -d. -f1)
    if [ -z "$version" ]; then
        need 'clang with libFuzzer and sanitizers' clang libclang-rt-dev
    elif have apt-cache && ! apt-cache show "libclang-rt-$version-dev" >/dev/null 2>&1 &&
        apt-cache show "libclang-common-$version-dev" >/dev/null 2>&1; then
        need "libFuzzer and sanitizers of clang $version" "libclang-common-$version-dev"
    else
        need "libFuzzer and sanitizers of clang $version" "libclang-rt-$version-dev"
    fi
}

# cmake/aarch64-linux-gnu.cmake knows where its libraries lie.
need_aarch64() {
    need_build
    compiles aarch64-linux-gnu-gcc ||
        need 'a cross compiler for 64-bit ARM' gcc-aarch64-linux-gnu libc6-dev-arm64-cross
    have qemu-aarch64-static || have qemu-aarch64 || need "qemu's user emulation of 64-bit ARM" qemu-user
}

need_fresh() {
    have git || need git git
    have debootstrap || need debootstrap debootstrap
    have unshare || need unshare util-linux
    [ -e /usr/share/keyrings/debian-archive-keyring.gpg ] || need "Debian's archive keys" debian-archive-keyring
}

PATH=$PATH:/usr/sbin:/sbin # debootstrap's folder, which only root usually has in PATH
case $purpose in
build | test | lint | wheel | ci | aarch64 | fresh) "need_$purpose" ;;
*)
    echo "usage: $0 [build|test|lint|wheel|ci|aarch64|fresh]" >&2
    exit 2
    ;;
esac
[ ${#missing[@]} -gt 0 ] || exit 0

mapfile -t packages < <(printf '%s\n' "${packages[@]}" | sort -u)
list() { printf '%s\n' "${missing[@]}" | sort -u | sed 's/^/  /'; }

if [ -n "${FMLA_DEPENDENCIES_TRIED:-}" ]; then
    { echo 'Still missing after the packages were installed:'; list; } >&2
    exit 3
fi
if ! have apt-get; then
    { echo 'Missing, and to be installed by hand (this is no Debian or Ubuntu):'; list; } >&2
    exit 3
fi

run=()
if [ "$(id -u)" -ne 0 ]; then
    if ! sudo -n true >/dev/null 2>&1; then
        { echo 'Missing:'; list; echo 'Run this line, then try again:'; } >&2
        echo "  sudo apt-get update && sudo apt-get install -y --no-install-recommends ${packages[*]}" >&2
        exit 3
    fi
    run=(sudo -n)
fi

# Waits for another running package manager (a new machine updating itself). Removes nothing:
# Debian's cross compilers, for one, do not go together with gcc-multilib.
apt=("${run[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=300)
echo "Installing ${packages[*]}" >&2
log=$(mktemp)
trap 'rm -f "$log"' EXIT
for step in update "install -y --no-remove --no-install-recommends ${packages[*]}"; do
    read -ra words <<<"$step"
    if ! "${apt[@]}" "${words[@]}" >"$log" 2>&1 </dev/null; then
        { tail -n 20 "$log"; echo "apt-get $step failed. Missing:"; list; } >&2
        exit 3
    fi
done
# An old release may have the packages in too old versions: check once more.
rm -f "$log"
FMLA_DEPENDENCIES_TRIED=1 exec "$BASH" "${BASH_SOURCE[0]}" "$purpose"

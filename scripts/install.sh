#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# install.sh install|uninstall [BUILD] - runs make install and make uninstall. Environment variables:
#   PREFIX   the folder of use, /usr/local if unset
#   DESTDIR  a folder to stage the tree in, for packages
# The build remembers what was installed last, and uninstall removes that.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mode=${1:-install} build=${2:-build/release}
record=$build/installed.txt

absolute() { case $1 in '' | /*) printf '%s' "$1" ;; *) printf '%s' "$PWD/$1" ;; esac; }

# The nearest existing folder decides whether a new one can be made.
writable() {
    local folder=$1
    while [ ! -e "$folder" ]; do folder=$(dirname "$folder"); done
    [ -d "$folder" ] && [ -w "$folder" ]
}

case $mode in
install)
    prefix=$(absolute "${PREFIX:-/usr/local}")
    DESTDIR=$(absolute "${DESTDIR:-}")
    export DESTDIR
    if ! writable "$DESTDIR$prefix"; then
        echo "make install: $DESTDIR$prefix: not yours to write. Either of:" >&2
        echo "  sudo make install${PREFIX:+ PREFIX=$PREFIX}" >&2
        # shellcheck disable=SC2016 # $HOME is for the reader's shell
        echo '  make install PREFIX=$HOME/.local' >&2
        exit 1
    fi
    # A file left by root would make a user's next install fail.
    rm -f "$build/install_manifest.txt" "$record"
    cmake --install "$build" --prefix "$prefix" >/dev/null
    # CMake's list omits DESTDIR, and its last line has no newline.
    while IFS= read -r file || [ -n "$file" ]; do printf '%s\n' "$DESTDIR$file"; done \
        <"$build/install_manifest.txt" >"$record"
    cat "$record"
    # The run-time linker finds new files in its folders only after this.
    if [ -z "$DESTDIR" ] && [ "$(id -u)" -eq 0 ] && command -v ldconfig >/dev/null; then ldconfig; fi
    ;;
uninstall)
    if [ ! -f "$record" ]; then
        echo "make uninstall: $record: not there, so this build installed nothing" >&2
        exit 1
    fi
    while IFS= read -r file; do
        [ -n "$file" ] || continue
        rm -f "$file"
        # Removes our own folders once empty; shared ones stay.
        case $(dirname "$file") in */flashmla) rmdir "$(dirname "$file")" 2>/dev/null || true ;; esac
    done <"$record"
    rm -f "$record"
    ;;
*)
    echo "usage: $0 install|uninstall [BUILD]" >&2
    exit 2
    ;;
esac

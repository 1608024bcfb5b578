#!/bin/sh
# build.sh OUTPUT [-D...]: one variant of the bench.
cd "$(dirname "$0")" && out=$1 && shift &&
exec nvcc -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a -cudart static -Xptxas -v "$@" -o "$out" bench.cu

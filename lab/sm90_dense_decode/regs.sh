#!/bin/sh
# Compiles the two kernels alone and prints ptxas's complaints: registers, spills, serialised wgmma.
cd "$(dirname "$0")" && echo '#include "dense_decode_pair.cuh"' > /tmp/regs.cu &&
nvcc -I. -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a -Xptxas -v "$@" -cubin -o /tmp/regs.cubin /tmp/regs.cu 2>&1 | grep -E 'error|warning|C75|spill|Used' | cut -c1-170

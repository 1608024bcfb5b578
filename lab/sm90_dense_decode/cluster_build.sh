#!/bin/sh
# cluster_build.sh FOLDER: the variants that cluster.sh times, for a machine with a driver alone. Prints registers, spills, complaints of the pair.
d=${1:?folder}
cd "$(dirname "$0")" || exit
one() {
    v=$1 && shift
    ./build.sh "$d/$v" -cudart static -Xcompiler -static-libstdc++ -Xcompiler -static-libgcc -DLAB_CLOCK "$@" >"$d/$v.log" 2>&1 || echo "$v: not built"
    echo "$v ($*):" $(grep -A3 "Compiling.*pair_kernelILi$c" "$d/$v.log" | grep -oE '[0-9]+ bytes spill stores|Used [0-9]+ registers') $(grep -oE 'C75[0-9]+|error.*|warning.*' "$d/$v.log" | sort | uniq -c)
}
c=1
one s2
one s3p -DLAB_PAIR_SPLIT=3 -DLAB_PREFETCH=2
one s2q1 -DLAB_Q_REG_GROUPS=1
one s2q2 -DLAB_Q_REG_GROUPS=2
one s3pq2 -DLAB_PAIR_SPLIT=3 -DLAB_PREFETCH=2 -DLAB_Q_REG_GROUPS=2
c=2
one s2c -DLAB_CLUSTER=2
one s2ca -DLAB_CLUSTER=2 -DLAB_ARM=1
one s3c -DLAB_CLUSTER=2 -DLAB_PAIR_SPLIT=3
one s3pc -DLAB_CLUSTER=2 -DLAB_PAIR_SPLIT=3 -DLAB_PREFETCH=2
one s2pc -DLAB_CLUSTER=2 -DLAB_PREFETCH=2
one n256c -DLAB_CLUSTER=2 -DLAB_PAIR_N256=1
one s2cq2 -DLAB_CLUSTER=2 -DLAB_Q_REG_GROUPS=2
one s3pcq2 -DLAB_CLUSTER=2 -DLAB_PAIR_SPLIT=3 -DLAB_PREFETCH=2 -DLAB_Q_REG_GROUPS=2

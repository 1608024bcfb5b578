#!/bin/sh
# sweep.sh OUT: the plan's costs on one device: builds both pair variants, checks, sweeps plans, fits costs.
d=${1:?}
cd "$(dirname "$0")" || exit
./build.sh /tmp/s2 -DLAB_CLOCK >"$d/build_s2" 2>&1 &
./build.sh /tmp/s3p -DLAB_CLOCK -DLAB_PAIR_SPLIT=3 -DLAB_PREFETCH=2 >"$d/build_s3p" 2>&1 &
wait
date +%T
big="128,1,4096,128 128,1,8192,128 128,1,32768,128 128,2,4096,128 128,2,8192,128 128,2,32768,128 32,1,65536,128 16,1,65536,128"
memory="128,1,4096,16 128,1,8192,64 16,1,65536,16 64,1,32768,16 32,1,65536,64"
few="16,1,8192,128 32,1,8192,64 32,1,8192,128 16,1,8192,16 4,1,8192,64 1,1,8192,16 100,1,6000,128 40,1,3000,128v 128,1,4096,128v 128,1,8192,128v 128,2,4096,128v 128,1,4096,16v 128,1,1024,64v 32,1,8192,128v 2,1,20000,128 7,2,1000,128"
fit="64,1,16384,128 132,1,8192,128 128,1,8192,128"
for k in s2 s3p; do
LAB_PAIR=1 LAB_PLAN=-1 timeout 30 /tmp/$k check 2>&1 | tail -1
LAB_PAIR=1 LAB_PLAN=-1 timeout 30 /tmp/$k stress 2>&1 | tail -2
done
date +%T
timeout 20 /tmp/s2 fit c0,0 c12,0 $fit
for k in s2 s3p; do LAB_ONLY=1 timeout 90 /tmp/$k sweep c2,3 $big $memory $few >"$d/$k" 2>&1; done
date +%T
# Microseconds: overhead 5, 12, whole or aligned where it differs, the rule; S2 then S3P.
for k in s2 s3p; do echo $k; awk '/blocks of/{split($1,a,":");row=a[1];order[++n]=row;next} /\|/{for(i=1;i<=NF;i++) if($i=="|") t=$(i+1); m=split($1,b,"="); nm=$1; if($2!~/^[0-9]+$/) nm=nm" "$2; m=split(nm,b,"="); for(j=1;j<=m;j++){v[row n,b[j]]=t} if(!(row n in best)||t<best[row n])best[row n]=t; if(/FAIL/)bad[row n]=1} END{for(i=1;i<=n;i++){k=order[i] i; printf "%-18s O5 %7.1f O12 %7.1f 2,3 %7.1f aligned %7.1f rule %7.1f  rule/best %.3f%s\n",order[i],v[k,"O5"],v[k,"O12"],v[k,"2,3"],v[k,"aligned"],v[k,"rule"],v[k,"rule"]/best[k],(k in bad)?" FAIL":""}}' "$d/$k"; done
date +%T

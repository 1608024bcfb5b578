#!/bin/sh
# cluster.sh FOLDER [ROUNDS]: the pair schedule with and without keys shared by clusters and more of Q in registers, variants in turns.
# FOLDER has the prebuilt variants (cluster_build.sh) and (or $OUT) receives the times.
d=${1:?folder of binaries} rounds=${2:-2}
variants=${VARIANTS:-"s2 s3p s2q1 s2q2 s3pq2 s2c s2ca s3c s2pc s3pc s2cq2 s3pcq2"}
rows="128,1,4096,128 128,1,8192,128 128,1,32768,128 128,2,4096,128 128,2,8192,128 128,2,32768,128 32,1,65536,128 16,1,65536,128"
t=$(mktemp -d)
date +%T
good=
for v in $variants; do
    LAB_PAIR=1 LAB_PLAN=-1 timeout 20 "$d/$v" check >"$t/$v.check" 2>&1; c=$? s=skipped
    : >"$t/$v.stress"
    [ $c = 0 ] && { LAB_PAIR=1 timeout 30 "$d/$v" stress >"$t/$v.stress" 2>&1; s=$?; }
    [ $c = 0 ] || grep -vE ': ok, .*yes$' "$t/$v.check" | head -20
    [ $s = 0 ] || head -14 "$t/$v.stress"
    echo "$v: check $c ($(grep -c 'clusters of 2: ok' "$t/$v.check") of $(wc -l <"$t/$v.check") lines with clusters), stress $s: $(grep -c 'stress: 0 diff' "$t/$v.stress") of 4 the same bits"
    [ $c$s = 00 ] && good="$good $v"
done
date +%T
i=0
while [ $i -lt "$rounds" ]; do
    i=$((i + 1))
    for v in $good; do
        LAB_REST=3 LAB_PLAN=-1 timeout 40 "$d/$v" rows $rows >"$t/out" 2>&1
        sed "s/^/$v $i /" "$t/out" >>"$t/times"
    done
done
date +%T
cp "$t/times" "${OUT:-$d}/" 2>/dev/null
# Columns of times: variant, round, row, us, TFLOP/s, clk a block, GHz, verdict.
awk -v variants="$good" '
    NF != 8 { print "not understood: " $0; next }
    $8 != "ok" { bad = bad " " $1 "/" $3 }
    { key = $3 SUBSEP $1; all[key] = all[key] (all[key] ? "/" : "") $4
      if (!(key in us) || $4 < us[key]) { us[key] = $4; tf[key] = $5; clk[key] = $6; ghz[key] = $7 }
      if (!($3 in seen)) { seen[$3] = 1; order[++n] = $3 } }
    function head(title) { printf "\n%-18s", title; for (k = 1; k <= m; k++) printf " %15s", name[k]; printf "\n" }
    END { m = split(variants, name, " ")
        head("us, every round"); for (i = 1; i <= n; i++) { printf "%-18s", order[i]; for (k = 1; k <= m; k++) printf " %15s", all[order[i], name[k]]; printf "\n" }
        head("best TFLOP/s, %"); for (i = 1; i <= n; i++) { printf "%-18s", order[i]; for (k = 1; k <= m; k++) printf " %7d %+6.1f%%", tf[order[i], name[k]], 100 * (us[order[i], name[1]] / us[order[i], name[k]] - 1); printf "\n" }
        head("clk a block, GHz"); for (i = 1; i <= n; i++) { printf "%-18s", order[i]; for (k = 1; k <= m; k++) printf " %9d %5.2f", clk[order[i], name[k]], ghz[order[i], name[k]]; printf "\n" }
        print bad ? "\nwrong results:" bad : "\nall timed rows right" }' "$t/times"
rm -r "$t"

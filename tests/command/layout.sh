#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# layout.sh FLASHMLA - tests flashmla layout: every layout as a table, one lane at a time, and as a picture.
set -u
export flashmla=$1
# shellcheck disable=SC1091 # checked by itself
. "$(dirname "$0")/common.sh"

good layout --help
has '^Examples$'
good layout
has '^mma-a +16 x 16 +32 x 8 +A of mma'
has '^wgmma-d +64 x N +128 x N/2 '
mapfile -t names < <(awk 'NR > 1 { print $1 }' stdout)
[ "${#names[@]}" -eq 12 ] || wrong "${#names[@]} layouts are listed, not 12"
good layout wgmma-d
cp stdout default
good layout wgmma-d --columns 16
cmp -s default stdout || wrong 'wgmma-d has not 16 columns by default'

# cells: "row column lane element" of the first table on stdout.
cells() {
    awk '/^ *row / { table++; next }
        table == 1 && NF == 0 { exit }
        table == 1 { for (i = 2; i <= NF; i++) { split(substr($i, 2), at, "."); print $1, i - 2, at[1], at[2] } }' stdout
}

# The table has every element of every lane, and --lane agrees with it.
fragment() { # fragment ROWS COLUMNS LANES WORDS…
    local rows=$1 columns=$2 lanes=$3 lane
    shift 3
    good layout "$@"
    cells >table
    checks=$((checks + 2))
    [ "$(wc -l <table)" -eq $((rows * columns)) ] || wrong "layout $*: $(wc -l <table) cells, not $rows x $columns"
    diff <(awk '{ print $3, $4 }' table | LC_ALL=C sort) \
        <(for ((l = 0; l < lanes; l++)); do
            for ((e = 0; e < rows * columns / lanes; e++)); do echo "$l $e"; done
        done | LC_ALL=C sort) >difference || wrong "layout $*: not every element once: $(head -n 3 difference)"
    for lane in 0 9 $((lanes - 1)); do
        good layout "$@" --lane "$lane"
        checks=$((checks + 1))
        diff <(awk -v lane="$lane" '$3 == lane' table | LC_ALL=C sort) \
            <(awk -v lane="$lane" '/^ *element / { list = 1; next } list && NF == 0 { exit }
                list { print $(NF - 1), $NF, lane, $1 }' stdout | LC_ALL=C sort) >difference ||
            wrong "layout $* --lane $lane is not what the table has: $(head -n 3 difference)"
    done
}
fragment 16 16 32 mma-a
fragment 16 8 32 mma-b
fragment 16 8 32 mma-c
fragment 16 16 32 ldmatrix-tile
fragment 16 16 32 ldmatrix-tile-trans
fragment 8 32 32 ldmatrix-8x32
fragment 16 16 32 ldmatrix-pair
fragment 64 16 128 wgmma-a
fragment 64 16 128 wgmma-d
fragment 64 8 128 wgmma-d --columns 8
fragment 64 256 128 wgmma-d --columns 256

good layout mma-b
has '^ +15 +T3\.3 .* T31\.3$'
good layout ldmatrix-pair --lane 17
has '^and gives the address of row 9, columns 0 to 7$'
good layout mma-a --lane 5
has '^ +5 +2 high +1 +11$'
good layout swizzle-128
has '^ +1 +144:1 +128:0 '
has '^ +7 +7\.7 .* 7\.0$'
good layout swizzle-64
has '^ +2 +144:1 +128:0 +176:3 +160:2$'
good layout swizzle-32
has '^ +4 +144:1 +128:0$'

# Pictures: well-formed, and every element is labelled.
for name in "${names[@]}"; do
    good layout "$name" --svg "$name.svg"
    well_formed "$name.svg"
done
labels() { # labels FILE PATTERN COUNT
    checks=$((checks + 1))
    [ "$(grep -oE -- "$2" "$1" | LC_ALL=C sort -u | wc -l)" -eq "$3" ] || wrong "$1 has not $3 of '$2'"
}
labels mma-a.svg '>T[0-9]+\.[0-9]+<' 256
labels ldmatrix-8x32.svg '>T[0-9]+<' 32
labels wgmma-d.svg '>T[0-9]+\.[0-9]+<' 1024
labels swizzle-64.svg '>row [0-7], chunk [0-3]<' 32
labels mma-c.svg 'class="cell c[0-7] t[0-3]"' 32 # one colour per lane
good layout mma-c --lane 30 --svg lane.svg
labels lane.svg 'class="cell [^"]*"' 2
[ "$(grep -c 'class="cell faint"' lane.svg)" -eq 124 ] || wrong 'lane.svg does not show 4 elements alone'

# Errors are reported and leave no file.
bad 2 'mma-d: no such layout; allowed are mma-a, mma-b, ' layout mma-d
bad 2 ': no such layout' layout ''
bad 2 "'mma-b': one name is allowed, 'mma-a' came before it" layout mma-a mma-b
bad 2 "--svg: needs the NAME of a layout" layout --svg x.svg
bad 2 "--lane: needs the NAME of a layout" layout --lane 3
bad 2 '--lane: 32 must be in [0, 31] with mma-a' layout mma-a --lane 32
bad 2 "--lane: '128' must be a whole number in [0, 127]" layout wgmma-a --lane 128
bad 2 '--lane: swizzle-64 is shared memory and has no lanes' layout swizzle-64 --lane 0 --svg x.svg
bad 2 '--columns: mma-a has 16; only wgmma-d takes a number' layout mma-a --columns 16
bad 2 '--columns: 12 must be a multiple of 8' layout wgmma-d --columns 12
bad 2 "--columns: '264' must be a whole number in [8, 256]" layout wgmma-d --columns 264
bad 1 '/dev/full: cannot write: No space left on device' layout wgmma-d --svg /dev/full
bad 1 'nowhere/x.svg: cannot create: No such file or directory' layout mma-a --svg nowhere/x.svg
bad 1 '/proc/flashmla: cannot create' layout mma-a --svg /proc/flashmla
mkdir read_only && chmod a-w read_only
if [ ! -w read_only ]; then # root may write everywhere
    bad 1 'read_only/x.svg: cannot create: Permission denied' layout mma-a --svg read_only/x.svg
    [ -z "$(ls -A read_only)" ] || wrong 'a file was left in read_only'
fi
"$flashmla" layout mma-a >/dev/full 2>stderr
one_line 1 $? 'cannot write to standard output'

finish

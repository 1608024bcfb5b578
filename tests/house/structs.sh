#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# structs.sh ROOT - the structs of the Python package are the header's: what scripts/structs.py writes is written, and a C compiler
# (CC) lays them out alike. Each planted difference must be seen. Skipped (77) where there is no Python 3.9 or later.
set -euo pipefail
root=$(cd "$1" && pwd)
python=$("$root/scripts/python.sh" ctypes) || {
    echo 'SKIP: no Python 3.9 or later'
    exit 77
}
"$python" "$root/scripts/structs.py" --check

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
files=(scripts/structs.py src/operations.def include/flashmla/flashmla.h python/flash_mla/_members.py python/flash_mla/_structs.py)
while read -r file edit; do
    (cd "$root" && cp --parents "${files[@]}" "$work")
    sed -i "$edit" "$work/$file"
    if cmp -s "$root/$file" "$work/$file" || "$python" "$work/scripts/structs.py" --check >"$work/seen" 2>&1; then
        echo "self-test: not noticed: $file $edit"
        exit 1
    fi
    # What the script writes anew is the members alone: it does not make a struct right that the header has otherwise.
    "$python" "$work/scripts/structs.py"
    if [[ $file != *_members.py && $edit != *VERSION* ]] && "$python" "$work/scripts/structs.py" --check 2>"$work/seen"; then
        echo "self-test: not noticed once it is written: $file $edit"
        exit 1
    fi
done <<'EDITS'
python/flash_mla/_members.py s/s_q h_q h_kv/s_q h_kv h_q/
python/flash_mla/_members.py s/so\.[0-9.]*/so.9/
include/flashmla/flashmla.h s/VERSION_M\(AJ\|IN\)OR [0-9]*/VERSION_M\1OR 77/
src/operations.def s/OPTION(dense_decode, causal, INTEGER, 0, 1)/OPTION(dense_decode, casual, INTEGER, 0, 1)/
src/operations.def s/OPTION(merge, log_base, INTEGER/OPTION(merge, log_base, WIDE/
src/operations.def s/OPTION(merge, log_base, INTEGER/OPTION(merge, log_base, REAL/
src/operations.def /TENSOR(merge, lse,/d
python/flash_mla/_structs.py s/"code bits"/"bits code"/
python/flash_mla/_structs.py s/"shape strides"/"strides shape"/
python/flash_mla/_structs.py s/built_with ptx/built_with/
python/flash_mla/_structs.py s/_of(c_uint64, "byte_offset")/_of(c_int64, "byte_offset")/
include/flashmla/flashmla.h s/^    int32_t ndim;/    int64_t ndim;/
EDITS

#!/bin/sh
# build.sh OUTPUT [-D...]: one variant, in the bench of ../sm90_sparse_decode.
here=$(cd "$(dirname "$0")" && pwd) && out=$1 && shift &&
exec "$here/../sm90_sparse_decode/build.sh" "$out" "-DKERNEL=\"$here/qk8.cuh\"" "$@"

#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# wheel.sh ROOT - runs pip install ROOT, without GPU kernels, in a new environment; checks what is installed and that it
# works there. CC names the compiler. Exits 77 without a Python with venv, or if pip cannot get the build tools.
set -euo pipefail
root=$(cd "$1" && pwd)
unset FLASHMLA_LIBRARY PYTHONPATH LD_LIBRARY_PATH CMAKE_ARGS
export PIP_DISABLE_PIP_VERSION_CHECK=1 FMLA_CUDA=OFF
export CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
bad=0
fail() {
    echo "FAILED: $*"
    bad=1
}
skip() {
    echo "needs $*"
    exit 77
}

python=$("$root/scripts/python.sh" venv ensurepip) || skip 'Python 3.9 or later with venv and pip (Debian: python3-venv)'
"$python" -m venv "$work/venv"
pip=$work/venv/bin/pip
# Fail fast: without a network a build's own retries take minutes.
requires=$(sed -n 's/^requires = \["\(.*\)"\]$/\1/p' "$root/pyproject.toml")
"$pip" download --quiet --retries 1 --timeout 15 --no-deps --dest "$work/download" "$requires" numpy >"$work/log" 2>&1 ||
    { tail -n 1 "$work/log"; skip "a network from which pip gets $requires"; }

mkdir "$work/empty"
cd "$work/empty"
# Uses the extras that README.md's install line names.
extras=$(sed -n "s/^pip install '\.\(\[[a-z,]*\]\)'.*/\1/p" "$root/README.md")
[ -n "$extras" ] || fail "README.md has no line pip install '.[...]'"
"$pip" install "$root$extras" >"$work/log" 2>&1 || {
    cat "$work/log"
    exit 1
}

# ---- What is installed -------------------------------------------------------------------------------------------

packages=$("$work/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
library=$packages/flash_mla/libflashmla.so
facts=("$packages"/flash_mla-*.dist-info)
version() { sed -n "s/^#define FMLA_VERSION_$1 \([0-9]*\)$/\1/p" "$root/include/flashmla/flashmla.h"; }

# The modules, the style of pictures, the py.typed marker, and one library.
(cd "$root/python/flash_mla" && ls -- *.py compat/*.py picture.css py.typed && printf "%s\n" compat libflashmla.so) | LC_ALL=C sort >"$work/expected"
find "$packages/flash_mla" -mindepth 1 -name __pycache__ -prune -o -printf '%P\n' | LC_ALL=C sort |
    diff "$work/expected" - || fail '^ expected (<) and installed (>) files differ'

[ "${facts[0]##*/}" = "flash_mla-$(version MAJOR).$(version MINOR).$(version PATCH).dist-info" ] ||
    fail "${facts[0]##*/} is not of the header's version"
if grep '^Requires-Dist:' "${facts[0]}/METADATA" | grep -v '; extra == '; then fail '^ is needed by everybody'; fi
grep -q '^Root-Is-Purelib: false' "${facts[0]}/WHEEL" || fail 'the wheel is not of a platform'
grep '^Tag:' "${facts[0]}/WHEEL" >"$work/tags"
grep -qx "Tag: py3-none-linux_$(uname -m)" "$work/tags" || fail "the wheel is $(cat "$work/tags")"

if [ -L "$library" ] || [ ! -f "$library" ]; then fail 'libflashmla.so is no file'; fi
if readelf -d "$library" | grep -E 'R(UN)?PATH'; then fail '^ libflashmla.so has a search path'; fi
if readelf -SW "$library" | grep -E ' \.(symtab|debug_[a-z]+) '; then fail '^ libflashmla.so is not stripped'; fi
if grep -lF -e "$root" -e "$work" -e "${TMPDIR:-/tmp}/" "$library"; then fail '^ names the folder that it was built in'; fi
# The name passed to the loader if the package contains no library.
soname=$(readelf -d "$library" | sed -n 's/.*(SONAME).*\[\(.*\)\]/\1/p')
grep -qF "\"$soname\"" "$packages/flash_mla/_library.py" || fail "_library.py does not know $soname"

# ---- Using it ----------------------------------------------------------------------------------------------------

"$work/venv/bin/python" "$root/tests/house/wheel.py" || bad=1
# README's first example. tests/python/test_readme.py has the ones that need PyTorch and a GPU.
awk '/^```/ { show = 0 } show { print; seen = 1 } /^```python$/ && !seen { show = 1 }
     END { if (!seen) print "raise SystemExit(\"README.md has no example\")" }' "$root/README.md" >example.py
"$work/venv/bin/python" example.py || fail '^ the example of README.md'
"$work/venv/bin/python" -m flash_mla.info >info || fail '^ python -m flash_mla.info'
for line in "library  $library" 'build    without kernels for GPUs' '  dense_decode '; do
    grep -qF "$line" info || fail "python -m flash_mla.info does not say '$line': $(cat info)"
done

# ---- Editable ------------------------------------------------------------------------------------------------------

# The modules stay in the checkout; the library is in the environment. The build type Debug takes a quarter of the time.
"$pip" install --editable "$root" --config-settings=cmake.build-type=Debug >"$work/log" 2>&1 || {
    cat "$work/log"
    exit 1
}
"$work/venv/bin/python" - "$root" <<'PYTHON' || fail '^ an editable install'
import pathlib, sys
import flash_mla
assert pathlib.Path(flash_mla.__file__).resolve() == pathlib.Path(sys.argv[1], "python/flash_mla/__init__.py").resolve()
print(f"flash_mla {flash_mla.__version__}, editable")
PYTHON
exit $bad

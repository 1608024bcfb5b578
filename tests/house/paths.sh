#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# paths.sh ROOT | --self-test - every path that a document or a comment names exists.
# Checks, in all *.md files outside of build/ and demo/:
#   links          [text](target), unless target is an address or an #anchor; from the folder of the document
#   code           words of `code` and of ``` blocks that begin with one of the repository's folders
# and in C, CUDA and Python files every word that begins with docs/ or src/.
# A word ends before : or # (file.c:12, page.md#heading). Of a word with a placeholder (<gpu>, $name, …, {a,b})
# the folders before it must exist; a word with * must match something. build/ and demo/ are made, so not asked.
# The work of others cited in a document is not mistaken for ours as long as it is a full address.
set -euo pipefail

# The list is fixed, so that naming a missing top-level folder is also detected.
folders='include|src|support|tools|python|packaging|tests|bench|docs|examples|lab|scripts|cmake|\.ci'

# Lines of "file:line:path", path from the root.
named_paths() {
    find . \( -name .git -o -path './build*' -o -path ./demo \) -prune -o -type f -name '*.md' -print |
        sed 's|^\./||' | LC_ALL=C sort | while IFS= read -r file; do
        awk -v file="$file" -v folders="^(\\\\./)?($folders)/" '
            function say(path) { print file ":" NR ":" path }
            function words(text,    n, i, word) {
                n = split(text, word, /[ \t"'\''(),;=|&]+/)
                for (i = 1; i <= n; i++) if (word[i] ~ folders) say(word[i])
            }
            BEGIN { here = file; if (!sub(/[^\/]*$/, "", here)) here = "" }
            /^[ \t]*```/ { block = !block; next }
            block { if ($0 !~ /#[ \t]*include/) words($0); next }
            {
                n = split($0, part, "`")
                for (i = 2; i <= n; i += 2) words(part[i])
                text = $0
                gsub(/`[^`]*`/, "x", text)
                while (match(text, /\]\([^)]*\)/)) {
                    link = substr(text, RSTART + 2, RLENGTH - 3)
                    text = substr(text, RSTART + RLENGTH)
                    sub(/[ \t].*/, "", link)
                    if (link ~ /^(#|[a-z]+:)/) continue
                    say((link ~ /^\//) ? substr(link, 2) : here link)
                }
            }' "$file"
    done
    find include src support tools python packaging tests bench examples lab -type f \
        \( -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' -o -name '*.def' -o -name '*.py' \) 2>/dev/null |
        LC_ALL=C sort | while IFS= read -r file; do
        awk -v file="$file" '
            /^[ \t]*#[ \t]*include/ { next }
            {
                text = " " $0
                while (match(text, /[^A-Za-z0-9_.\/<>-](docs|src)\/[A-Za-z0-9_.\/<>*-]+/)) {
                    print file ":" NR ":" substr(text, RSTART + 1, RLENGTH - 1)
                    text = substr(text, RSTART + RLENGTH)
                }
            }' "$file"
    done
}

check() {
    cd "$1"
    local count=0 bad=0 file line path asked
    while IFS=: read -r file line path; do
        path=${path#./}
        path=${path%%[:#]*}
        while [[ $path == *[.,\)] ]]; do path=${path%?}; done
        [ -n "$path" ] || continue
        count=$((count + 1))
        asked=$path
        if [[ $path =~ ^[^\<\$\{…]*[\<\$\{…] ]]; then
            # Only whole folders before the placeholder can be checked.
            asked=${BASH_REMATCH[0]}
            asked=${asked%/*}
        fi
        if [[ $asked == *\** ]]; then
            compgen -G "$asked" >/dev/null && continue
        elif [ -e "$asked" ]; then
            continue
        fi
        echo "$file:$line: names $path, which does not exist"
        bad=$((bad + 1))
    done < <(named_paths)
    echo "$count paths named, $bad of them do not exist"
    [ "$bad" -eq 0 ]
}

self_test() {
    local tree planted=0
    tree=$(mktemp -d)
    # shellcheck disable=SC2064 # the folder's name is wanted as it is now
    trap "rm -rf '$tree'" EXIT
    fresh() {
        rm -rf "${tree:?}"/*
        mkdir -p "$tree"/{docs/kernels,src,python,bench/results,build,scripts}
        touch "$tree"/{src/num.h,docs/architecture.md,scripts/demo.sh}
        cat >"$tree/README.md" <<'PAGE'
See [the plan](docs/architecture.md#rooms "how"), `src/num.h:12`, `./scripts/demo.sh`, `src/*.h`, `docs/`,
`bench/results/<gpu>/x.json`, `docs/kernels/<operation>.md`, [a page](https://example.org/src/x.c), [up](#top),
`build/release/flashmla`, src/in/prose is not looked at, `a/b` neither.
```
build/release/flashmla plan --svg=demo/plan.svg < src/num.h
#include "src/ignored.h"
```
PAGE
        echo '/* docs/architecture.md, and src/num.h. https://example.org/docs/none */' >"$tree/src/api.c"
        echo '"""What is computed stands in docs/architecture.md."""' >"$tree/python/call.py"
    }
    red() { # red FILE LINE
        fresh
        printf '%s\n' "$2" >>"$tree/$1"
        planted=$((planted + 1))
        if (check "$tree") >/dev/null; then
            echo "self-test: not noticed: $2 in $1"
            exit 1
        fi
    }
    fresh
    if ! (check "$tree"); then
        echo 'self-test: a tree without fault was refused'
        exit 1
    fi
    # The backquotes are markdown.
    # shellcheck disable=SC2016
    {
        red README.md 'see [it](docs/none.md)'
        red README.md 'see `src/none.c`.'
        red README.md 'run `python3 tools/none.py --flag`'
        red README.md '`docs/none/<operation>.md`'
        red README.md '`src/*.none`'
        red docs/architecture.md '[wrong folder](docs/architecture.md)'
        red docs/architecture.md '[gone](../src/none.h)'
        red README.md "$(printf '```sh\nbash scripts/none.sh\n```')"
    }
    red src/num.h '/* as docs/none.md says */'
    red src/api.c '// (src/none.c)'
    red python/call.py '# as docs/none.md says'
    echo "self-test: $planted planted faults, all noticed"
}

if [ "${1:-}" = --self-test ]; then self_test; else check "${1:?ROOT}"; fi

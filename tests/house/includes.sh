#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# includes.sh ROOT | --self-test - checks who may include whom (docs/architecture.md has the rule and its reasons), and
# that src/ has no include cycle, a header and the source of its name taken as one. Prints one line for every violation
# and cycle.
set -euo pipefail

# Who may include whom: the last line applies whose two patterns match from the first character on. `own` is the
# including file's folder; in src/ and tests/, one level below them.
rules=$(cat <<'RULES'
- .                                   .
+ .                                   include/
+ .                                   own
+ (tools|examples|bench|tests)/       support/
- include/                            .
- src/[^/]+$                          .
+ src/[^/]+$                          include/|src/[^/]+[.]h$|src/operations[.]def
+ src/dispatch[.]c                    src/
+ src/(ref|cpu|cuda)/                 src/[^/]+[.]h$|src/operations[.]def
- src/(ref|cpu|cuda)/                 src/(api|check|dispatch)[.]h
- src/cuda/                           src/cuda/(any|sm[0-9]+)/
+ src/cuda/[^/]*[.]c$                 src/cuda/
+ src/cuda/any/                       src/cuda/any/
+ src/cuda/sm80/                      src/cuda/sm80/
+ src/cuda/sm90/                      src/cuda/sm90/
+ support/                            src/(num|kvformat|queries)[.]h
+ support/peak[.]c                    src/cpu/allow_amx[.]h
+ support/op_call[.]                  src/operations[.](h|def)
+ tests/(unit|checkattn|fuzz)/        src/(num|num_fast|kvformat|new_token|indexformat|index_row|queries|quota|plan)[.]h
+ tests/checkattn/emulated_amx[.]c    src/dispatch[.]h
+ (tools|tests)/                      src/operations[.](h|def)
+ tests/fuzz/                         tests/unit/(described|tensors|plan_walk)[.]h
+ tools/flashmla/layout[.]c           src/cuda/device/fragment[.]h
+ tests/unit/                         src/cuda/.*[.]h$
+ tests/unit/test_threads[.]c         src/threads[.]h
+ tests/unit/test_dispatch[.]c        src/dispatch[.]h
+ tests/command/                      tools/.*[.]h$|tests/unit/check[.]h
+ tests/stress/                       tests/checkattn/.*[.]h$
+ tests/house/                        src/cuda/driver[.]h
RULES
)

check() {
    local root=$1
    (
        cd "$root"
        find include src support tools python tests bench examples -type f \
            \( -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' -o -name '*.def' -o -name '*.cpp' \) \
            2>/dev/null | LC_ALL=C sort || true # not every folder exists yet
    ) | awk -v root="$root" -v rules="$rules" '
        # The path of an include as written, relative to the folder of the including file.
        function normal(path,    part, n, i, out, depth) {
            n = split(path, part, "/")
            depth = 0
            for (i = 1; i <= n; i++) {
                if (part[i] == "" || part[i] == ".") continue
                if (part[i] == ".." && depth > 0) { depth--; continue }
                out[++depth] = part[i]
            }
            path = ""
            for (i = 1; i <= depth; i++) path = path (i > 1 ? "/" : "") out[i]
            return path
        }
        function folder(path) { return match(path, /\/[^\/]*$/) ? substr(path, 1, RSTART - 1) : "" }
        function room(path,    part) {
            split(path, part, "/")
            if (path ~ /^src\/[^\/]+$/) return "src"
            if (path ~ /^(src|tests)\//) return part[1] "/" part[2]
            return part[1]
        }
        function stem(path) { sub(/\.[^.\/]*$/, "", path); return path }
        # Is there a path from a stem back to the start of the search? None of the visited stems has one.
        function leads(at, home,    next_, n, i) {
            n = split(uses[at], next_, " ")
            for (i = 1; i <= n; i++) {
                if (next_[i] == home) { way = at; return 1 }
                if (seen[next_[i]]++) continue
                if (leads(next_[i], home)) { way = at " -> " way; return 1 }
            }
            return 0
        }
        function fits(path, pattern) { return match(path, "^(" pattern ")") }
        function allowed(from, to,    i, good) {
            for (i = 1; i <= nrules; i += 3)
                if (fits(from, rule[i + 1]) && (rule[i + 2] == "own" ? room(from) == room(to) : fits(to, rule[i + 2])))
                    good = rule[i] == "+"
            return good
        }
        { files[++count] = $0; exists[$0] = 1 }
        END {
            nrules = split(rules, rule, /[ \n]+/)
            nroots = split("include src support tools/flashmla", roots, " ")
            for (f = 1; f <= count; f++) {
                from = files[f]; number = 0
                while ((getline text < (root "/" from)) > 0) {
                    number++
                    if (text !~ /^[ \t]*#[ \t]*include[ \t]*[<"]/) continue
                    includes++
                    name = text
                    sub(/^[ \t]*#[ \t]*include[ \t]*/, "", name)
                    quoted = name ~ /^"/
                    sub(/^[<"]/, "", name); sub(/[>"].*/, "", name)
                    to = ""
                    if (quoted) {
                        path = normal(folder(from) "/" name)
                        if (path in exists) to = path
                    }
                    for (i = 1; to == "" && i <= nroots; i++) {
                        path = normal(roots[i] "/" name)
                        if (path in exists) to = path
                    }
                    where = from ":" number ": "
                    if (to == "" && quoted) {
                        print where "\"" name "\" is not in the tree"; bad++
                    } else if (to == "" && room(from) == "include" && name !~ /^std(def|int)\.h$/) {
                        print where "the public header may include <stddef.h> and <stdint.h> only"; bad++
                    } else if (to != "" && !allowed(from, to)) {
                        print where from " must not include " to; bad++
                    }
                    if (from ~ /^src\// && to ~ /^src\// && stem(from) != stem(to)) {
                        uses[stem(from)] = uses[stem(from)] " " stem(to)
                        stems[stem(from)] = 1
                    }
                }
                close(root "/" from)
            }
            for (f = 1; f <= count; f++) {
                name = stem(files[f])
                if (!(name in stems) || told[name]) continue
                split("", seen)
                if (!leads(name, name)) continue
                print "circle: " way " -> " name; bad++
                nway = split(way, part_of_way, " -> ")
                for (i = 1; i <= nway; i++) told[part_of_way[i]] = 1
            }
            if (!includes) { print "no #include found under " root; bad++ }
            else print includes " includes in " count " files, " bad + 0 " against the rule"
            exit bad > 0
        }'
}

# The check must fail with each line planted into a copy of this tree, and pass without it.
self_test() {
    local tree planted=0 root file
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
    tree=$(mktemp -d)
    # shellcheck disable=SC2064 # the folder's name is wanted as it is now
    trap "rm -rf '$tree'" EXIT
    (cd "$root" && cp -r include src support tools tests "$tree")
    if ! check "$tree"; then
        echo 'self-test: a tree that keeps the rule was refused'
        exit 1
    fi
    red() { # red FILE LINE [FILE LINE]
        printf '%s\n' "$2" >>"$tree/$1"
        if [ $# -gt 2 ]; then printf '%s\n' "$4" >>"$tree/$3"; fi
        planted=$((planted + 1))
        if check "$tree" >/dev/null; then
            echo "self-test: not noticed: $*"
            exit 1
        fi
        for file in "$1" "${3:-$1}"; do cp "$root/$file" "$tree/$file" 2>/dev/null || rm -f "$tree/$file"; done
    }
    red include/flashmla/flashmla.h '#include <cuda.h>'
    red include/flashmla/flashmla.h '#include "../../src/num.h"'
    red src/num.h '#include "cpu/cpu.h"'
    red src/dispatch.h '#include "cpu/cpu.h"'
    red src/api.c '#include "cpu/cpu.h"'
    red src/api.c '  #  include "ref/../ref/ref.h"'
    red src/cpu/cpu.h '#include "ref/ref.h"'
    red src/cpu/generic/decode.c '#include "../../cuda/cuda.h"'
    red src/cuda/sm90/decode.cu '#include "cpu/cpu.h"'
    red src/cuda/decode.c '#include "../ref/ref.h"'
    red src/api.c '#include "cuda/cuda.h"'
    red src/plan.h '#include "cuda/cuda.h"'
    red src/cpu/cpu.h '#include "../dispatch.h"'
    red src/cuda/cuda.h '#include "../api.h"'
    red src/cuda/cuda.h '#include "sm90/dense_decode/choice.h"'
    red src/cuda/sm80/latent/shape.h '#include "../../sm90/dense_decode/choice.h"'
    red src/cuda/any/merge.c '#include "../sm80/latent/shape.h"'
    red src/cuda/device/fragment.h '#include "../sm90/dense_decode/choice.h"'
    red src/num.h '#include "plan.h"' src/plan.h '#include "num.h"'
    red src/cuda/cuda.h '#include "kernels.h"'
    red src/cuda/sm80/latent/shape.h '#include "../../kernels.h"'
    red src/error.h '#include "threads.h"' src/threads.c '#include "error.h"'
    red tests/checkattn/main.c '#include "cuda/cuda.h"'
    red tests/stress/main.c '#include "../checkattn/run.c"'
    red tests/unit/launch.c '#include "cpu/cpu.h"'
    red tests/unit/launch.c '#include "threads.h"'
    red tools/flashmla/main.c '#include "cuda/cuda.h"'
    red tools/flashmla/main.c '#include "../../src/cuda/device/fragment.h"'
    red tools/flashmla/layout.c '#include "../../src/cuda/device/codes.cuh"'
    red tools/flashmla/layout.c '#include "num.h"'
    red tools/flashmla/main.c '#include "operations.c"'
    red support/compare.h '#include "operations.h"'
    red tests/command/call.c '#include "dispatch.h"'
    red tests/checkattn/main.c '#include "../../src/cuda/device/fragment.h"'
    red tests/command/call.c '#include "../unit/tensors.h"'
    red tests/command/call.c '#include "../../tools/flashmla/main.c"'
    red tests/command/call.c '#include "num.h"'
    red tests/unit/num.c '#include "call.h"'
    red src/ref/ref.h '#include "compare.h"'
    red support/compare.h '#include "plan.h"'
    red tools/flashmla/main.c '#include "plan.h"'
    red tests/checkattn/main.c '#include "../../src/ref/ref.h"'
    red tests/unit/num.c '#include "dispatch.h"'
    red tests/unit/num.c '#include "nowhere.h"'
    echo "self-test: $planted planted faults, all noticed"
}

if [ "${1:-}" = --self-test ]; then self_test; else check "${1:?ROOT}"; fi

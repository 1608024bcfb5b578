#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# help.sh FLASHMLA - tests help, manual page and completions: all match the table of options, and each works in man,
# bash or zsh.
set -u
export flashmla=$1
# shellcheck disable=SC1091 # checked by itself
. "$(dirname "$0")/common.sh"
commands='info make-input run plan bench verify layout help version'

# ---- The same under all names
same() { # same FILE OPTION WORDS…: writes the option's output to the file; each of the words gives the same.
    good "$2"
    cp stdout "$1"
    for words in "${@:3}"; do
        good "$words"
        cmp -s "$1" stdout || wrong "$words is not $2"
    done
}
same version --version -V version
same all --help -h help
for command in $commands; do
    grep -q "^  $command " all || wrong "--help does not name $command"
    good "$command" --help
    cp stdout "$command.text"
    good help "$command"
    cmp -s "$command.text" stdout || wrong "help $command is not $command --help"
    # Lines are filled: only examples, which are for copying, may be longer.
    checks=$((checks + 1))
    grep -Ev '^ +flashmla ' "$command.text" | awk 'length > 80 { exit 1 }' || wrong "help $command has lines of more than 80 columns"
done
options_of() { sed -n 's/^  \(--[a-z-]*\).*/\1/p' "$1.text"; }
checks=$((checks + 1))
with_json=
for command in $commands; do
    if options_of "$command" | grep -qx -e --json; then with_json+=", $command"; fi
done
with_json=${with_json#, }
with_json="${with_json%, *} and ${with_json##*, }"
tr '\n' ' ' <all | grep -qF -- " --json of $with_json writes the results" || wrong "--help names others than have --json: $with_json"
[ "$(options_of bench | wc -l)" -gt 15 ] || wrong 'no options in the help of bench'

# ---- The manual page
good help --as man
cp stdout flashmla.1
checks=$((checks + 1))
for command in $commands; do
    grep -q "^\.SS ${command//-/\\\\-}\$" flashmla.1 || wrong "the manual page has no section of $command"
done
# troff's warnings, and the formatted page: it contains every option and no troff markup.
page=
if command -v man >/dev/null && man --warnings -E UTF-8 -l -Tutf8 flashmla.1 >page 2>complaints; then
    page='man'
elif command -v groff >/dev/null && groff -man -ww -Tutf8 flashmla.1 >page 2>complaints; then
    page=groff
elif command -v mandoc >/dev/null && mandoc -Tutf8 flashmla.1 >page 2>complaints; then
    page=mandoc
fi
if [ -n "$page" ]; then
    checks=$((checks + 1))
    [ ! -s complaints ] || wrong "$page: $(cat complaints)"
    sed 's/.\x08//g; s/\x1b\[[0-9;]*m//g' page >plain
    for command in $commands; do
        for option in $(options_of "$command"); do
            grep -qE -- "^ +$option( |\$)" plain || [ "$option" = --help ] || wrong "$page shows no $option of $command"
        done
    done
    grep -q "^ *flashmla plan --seq-lens 100,9000,0,2500 --partitions 8 --svg plan.svg$" plain || wrong "$page breaks an example"
    grep -q '[\]' plain && wrong "$page shows commands of troff: $(grep '[\]' plain)"
else
    echo 'SKIP: no man, groff or mandoc here'
fi

# ---- bash, in a bash that has not read this script
good help --as bash
cp stdout completion.bash
touch batch.safetensors 'with blank'
mkdir folder
# complete WORDS…: what is offered for the last of them, sorted, in one line.
complete() {
    # shellcheck disable=SC2016 # for the other bash
    bash --norc --noprofile -c '
        . ./completion.bash
        COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
        _flashmla flashmla "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
        printf "%s\n" "${COMPREPLY[@]}"' bash flashmla "$@" | sort | tr '\n' ' ' | sed 's/ $//'
}
offers() { # offers EXPECTED WORDS…
    checks=$((checks + 1))
    local expected=$1 came
    shift
    came=$(complete "$@" 2>&1)
    [ "$came" = "$expected" ] || wrong "bash offers '$came' for flashmla $*, not '$expected'"
}
checks=$((checks + 1))
bash --norc --noprofile -c '. ./completion.bash && complete -p flashmla' | grep -q -- '-F _flashmla flashmla' || wrong 'bash does not complete flashmla'
# shellcheck disable=SC2086 # words
offers "$(printf '%s\n' $commands --help --version | sort | tr '\n' ' ' | sed 's/ $//')" ''
offers 'verify version' ver
offers 'plan' pl
for command in $commands; do # exactly the commands that help lists
    offers "$(options_of "$command" | sort | tr '\n' ' ' | sed 's/ $//')" "$command" --
done
offers '--query-tokens' make-input x --q
offers '2 e' run --log-base ''
offers 'fp16' make-input --dtype f
offers 'neg' run --lse-empty = n # --lse-empty=n
offers '2 e' run --log-base =
offers '' run --repeat ''
offers 'with blank' run w
offers 'batch.safetensors' run in --out batch
offers 'folder' plan fol
offers 'ldmatrix-8x32 ldmatrix-pair ldmatrix-tile ldmatrix-tile-trans' layout ld
offers 'verify version' help ver
offers '' verify ''
offers 'varlen' bench --grid v
offers '' dance ''

# ---- zsh
good help --as zsh
cp stdout _flashmla
holds 'zsh would not find its completion' [ "$(head -n 1 _flashmla)" = '#compdef flashmla' ]
for command in $commands; do
    checks=$((checks + 1))
    # The arguments of _arguments for the command: '--option=[…' or '--option[…'.
    sed -n "/^_flashmla_$command() {/,/^}/s/^ *'\(--[a-z-]*\).*/\1/p" _flashmla | sort >came
    options_of "$command" | sort | diff - came >difference || wrong "zsh's options of $command: $(cat difference)"
done
if command -v zsh >/dev/null; then
    checks=$((checks + 1))
    zsh -n _flashmla || wrong 'zsh does not read its completion'
    # A real completion, in a terminal of zsh's own.
    cat >complete.zsh <<'SCRIPT'
zmodload zsh/zpty
zpty shell 'zsh -f -i'
zpty -w shell "PS1='ready> '; fpath=($PWD \$fpath); autoload -Uz compinit; compinit -D -u; LISTMAX=1000; stty cols 200 rows 100; print loa''ded"
zpty -r shell line '*loaded*'
zpty -w -n shell $'flashmla run batch.safetensors --no-c\t'
integer i
text=
for ((i = 0; i < 200; i++)); do
    while zpty -r -t shell line; do text+=$line; done
    [[ $text == *--no-causal* ]] && break
    sleep 0.1
done
print -r -- $text
zpty -d shell
SCRIPT
    TERM=xterm timeout 60 zsh -f complete.zsh >came 2>&1
    grep -q -- '--no-causal' came || wrong "zsh does not complete --no-c: $(cat -v came)"
else
    echo 'SKIP: no zsh here'
fi

finish

#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# test-fresh.sh [demo] - tests that the README's commands work on an unprepared system, and how long make demo takes.
#
# In a minimal Debian (debootstrap; git and make added) with a clone of HEAD:
#   1. a user who may not install anything gets the one line to run, and exit 3
#   2. root: make demo, make test - they install what they need
#   3. that user again, without root and without network: make demo in at most 90 s on two idle cores, make test
#   4. that user again, with this machine's nvcc if it has one: make demo in at most 4 minutes
# "demo" leaves both runs of make test out. Needs root or passwordless sudo, and the network for 2. The minimal tree is kept in
# ${XDG_CACHE_HOME:-~/.cache}/flashmla for a month. FMLA_DEBIAN_MIRROR names another mirror.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

suite=bookworm
packages=git,make,ca-certificates
say() { printf '\n== %s\n' "$*"; }

if [ "${1:-}" != --as-root ]; then
    only=${1:-all}
    case $only in all | demo) ;; *) echo "usage: $0 [demo]" >&2 && exit 2 ;; esac
    if [ "$(id -u)" -ne 0 ] && ! sudo -n true >/dev/null 2>&1; then
        echo 'test-fresh makes a Debian tree: it needs root, or sudo without a password.' >&2
        exit 3
    fi
    scripts/dependencies.sh fresh

    # Packs the source before any change of user, because git refuses another user's repository.
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    git bundle create "$work/flashmla.bundle" HEAD 2>/dev/null
    [ -z "$(git status --porcelain)" ] || echo 'Changes that are not committed are not part of this test.'
    say "Commit $(git log -1 --format='%h, %s')"
    cache=${XDG_CACHE_HOME:-$HOME/.cache}/flashmla
    mkdir -p "$cache"
    root=()
    [ "$(id -u)" -eq 0 ] || root=(sudo -n)
    # In a separate mount namespace, debootstrap's mounts end with it and are not visible elsewhere.
    "${root[@]}" env http_proxy="${http_proxy:-}" https_proxy="${https_proxy:-}" TMPDIR="${TMPDIR:-/var/tmp}" \
        PATH="$PATH:/usr/sbin:/sbin" FMLA_DEBIAN_MIRROR="${FMLA_DEBIAN_MIRROR:-}" \
        unshare --mount --propagation private \
        "$BASH" "$PWD/scripts/test-fresh.sh" --as-root "$work/flashmla.bundle" "$cache" "$only"
    exit
fi

bundle=$2 cache=$3 only=$4
tree=$(mktemp -d "$TMPDIR/flashmla-fresh.XXXXXX")
log=$tree.log
remove_tree() {
    umount "$tree/usr/local/cuda" 2>/dev/null || true
    # Does not delete a tree in which something is still mounted.
    if grep -q " $tree/" /proc/self/mountinfo; then
        echo "left in place, something is mounted in it: $tree" >&2
    else
        rm -rf --one-file-system "$tree"
    fi
    rm -f "$log"
}
trap remove_tree EXIT
chmod 755 "$tree"

# ---- The minimal tree -------------------------------------------------------------------------------------------

mirror=$FMLA_DEBIAN_MIRROR
if [ -z "$mirror" ] && grep -qs '^ID=debian$' /etc/os-release; then
    # Uses this machine's mirror, from either of apt's two formats; some of these files are usually missing.
    mirror=$({ cat /etc/apt/sources.list /etc/apt/sources.list.d/*.{list,sources} 2>/dev/null || true; } |
        sed -nE 's#^(URIs:|deb( \[[^]]*\])?) +(https?://[^ ]*/debian)/?( .*)?$#\3#p' | sed -n 1p)
fi
mirror=${mirror:-http://deb.debian.org/debian}

base=$cache/$suite-$(dpkg --print-architecture).tar
if [ -z "$(find "$base" -mtime -30 2>/dev/null)" ]; then
    say "A minimal Debian $suite from $mirror"
    if ! debootstrap --variant=minbase --include="$packages" "$suite" "$tree" "$mirror" >"$log" 2>&1; then
        tail -n 20 "$log" "$tree/debootstrap/debootstrap.log" 2>/dev/null || true
        exit 1
    fi
    rm -f "$tree"/var/cache/apt/archives/*.deb
    tar --numeric-owner --one-file-system -C "$tree" -cf "$base.new.$$" .
    mv "$base.new.$$" "$base"
else
    say "A minimal Debian $suite, kept from before"
    tar --numeric-owner -C "$tree" -xpf "$base"
fi

# The tree uses this machine's network settings.
cp /etc/resolv.conf "$tree/etc/resolv.conf"
printf 'deb %s %s main\n' "$mirror" "$suite" >"$tree/etc/apt/sources.list"
apt-config dump | grep -E '^Acquire::(https?::Proxy|Check-(Date|Valid-Until)) ' >"$tree/etc/apt/apt.conf.d/90host" || true

# Processes and mounts inside end with the command.
inside() { # inside [unshare's options] -- COMMAND
    local options=()
    while [ "$1" != -- ]; do
        options+=("$1")
        shift
    done
    shift
    # unshare mounts proc before chroot, so on the tree's path, in the new namespace only.
    unshare --mount --propagation private --pid --fork --kill-child --mount-proc="$tree/proc" "${options[@]}" \
        env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=dumb \
        http_proxy="${http_proxy:-}" https_proxy="${https_proxy:-}" chroot "$tree" "$@" </dev/null
}

install -m 644 "$bundle" "$tree/root/flashmla.bundle"
inside -- bash -euc '
    useradd --create-home newcomer
    cd /root && git clone -q flashmla.bundle flashmla 2>/dev/null && git -C flashmla log -1 --format="cloned %h"
    cp -a flashmla /home/newcomer/ && chown -R newcomer: /home/newcomer/flashmla'

# Shows the last lines of a command's output, or all of it if the command fails.
run() { # run LINES COMMAND...
    local lines=$1 start=$SECONDS
    shift
    if ! "$@" >"$log" 2>&1; then
        cat "$log"
        echo "FAILED after $((SECONDS - start)) s"
        return 1
    fi
    tail -n "$lines" "$log"
    echo "-- $((SECONDS - start)) s"
}

# Processor time that the machine has spent, in hundredths of a second.
spent() { awk '/^cpu / { print $2 + $3 + $4 + $7 + $8 }' /proc/stat; }

# Runs make demo, in a checkout in which nothing is built, and says its time, which must be at most SECONDS on two idle cores.
# If other processes took more than a tenth of the cores, half of its processor time is compared instead.
demo_within() { # demo_within SECONDS COMMAND...
    local most=$1 before after wall user system judged words
    shift
    before=$(spent)
    TIMEFORMAT='times %R %U %S'
    { time run 45 "$@"; } 2>"$log.times" || return 1
    after=$(spent)
    read -r _ wall user system < <(grep '^times ' "$log.times")
    read -r judged words < <(awk -v wall="$wall" -v own="$(awk "BEGIN { print $user + $system }")" \
        -v all="$((after - before))" -v cores="$(nproc)" 'BEGIN {
            if (all / 100 - own > wall * cores / 10) printf "%d half of its processor time, because the machine is busy\n", own / 2
            else printf "%d its time\n", wall }')
    echo "-- make demo: $wall s, processor time $user + $system s; $words: $judged s, at most $most s"
    [ "$judged" -le "$most" ] || { echo 'FAILED: that is too long' && return 1; }
}

# ---- 1. A user who may not install gets the line to run ----------------------------------------------------------

say 'A user without root, nothing installed: must be told what to run'
status=0
inside --net -- su newcomer -c 'cd ~/flashmla && scripts/dependencies.sh build' >"$log" 2>&1 || status=$?
cat "$log"
if [ "$status" -ne 3 ] || ! grep -q 'sudo apt-get update && sudo apt-get install -y' "$log"; then
    echo "FAILED: exit $status, wanted 3 and the line to run"
    exit 1
fi
if inside --net -- su newcomer -c 'cd ~/flashmla && make test' >"$log" 2>&1; then
    echo 'FAILED: make test succeeded with nothing installed'
    exit 1
fi

# ---- 2. Root, with nothing installed -----------------------------------------------------------------------------

say 'make demo, as root'
run 45 inside -- bash -c 'cd ~/flashmla && make demo'
# The last line counts; as root the packages of tests are installed too, so none needs them.
counted() {
    local line
    line=$(tail -n 1 "$log")
    if ! [[ $line =~ ^[0-9]+\ passed,\ 0\ failed,\ [0-9]+\ skipped ]] || [[ $line == *NumPy* ]]; then
        echo "FAILED: the last line of make test is '$line'"
        return 1
    fi
}
if [ "$only" = all ]; then
    say 'make test, as root'
    run 15 inside -- bash -c 'cd ~/flashmla && make test'
    counted
fi

# ---- 3. Everything installed: neither root nor network -----------------------------------------------------------

say 'make demo, as a user without root, without network'
demo_within 90 inside --net -- su newcomer -c 'cd ~/flashmla && make demo'
if [ "$only" = all ]; then
    say 'make test, as that user'
    run 15 inside --net -- su newcomer -c 'cd ~/flashmla && make test'
    counted
fi

# ---- 4. With nvcc ------------------------------------------------------------------------------------------------

if nvcc=$(PATH=${CUDA_HOME:+$CUDA_HOME/bin:}$PATH:/usr/local/cuda/bin command -v nvcc); then
    say 'make demo with nvcc, as that user'
    inside -- bash -c 'command -v g++ || apt-get install -qq -y --no-install-recommends g++' >"$log" 2>&1
    mkdir -p "$tree/usr/local/cuda"
    mount --bind -o ro "$(dirname "$(dirname "$(realpath "$nvcc")")")" "$tree/usr/local/cuda"
    demo_within 240 inside --net -- su newcomer -c 'cd ~/flashmla && rm -rf build && make demo'
    grep -q '^Building takes about .* for kernels for NVIDIA GPUs' "$log" || {
        echo 'FAILED: no kernels, or not a word of the time beforehand'
        exit 1
    }
    umount "$tree/usr/local/cuda"
else
    say 'make demo with nvcc: not tested, there is none here'
fi

say 'test-fresh passed'

#!/usr/bin/env bash
# SPDX-License-Identifier: MIT
# pictures.sh FLASHMLA SOURCE - tests that every picture follows the reader's choice of a light or dark screen: all
# have the one style text, no element has a colour of its own, and text and lines are readable in both.
set -u
export flashmla=$1
source=$2
style=$source/python/flash_mla/picture.css
# shellcheck disable=SC1091 # checked by itself
. "$(dirname "$0")/common.sh"

# ---- The style: the contrast of what is drawn on what, by WCAG 2, of which 4.5 is level AA for text and 3 for lines.
# contrasts CSS: prints the contrasts that are too low, and how many there were.
contrasts() {
    awk '
        function hex(text, at) { return 16 * (index("0123456789abcdef", substr(text, at, 1)) - 1) + index("0123456789abcdef", substr(text, at + 1, 1)) - 1 }
        function linear(value) { value /= 255; return value <= 0.04045 ? value / 12.92 : exp(2.4 * log((value + 0.055) / 1.055)) }
        function light(r, g, b) { return 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b) }
        function mixed(at, opacity) { return opacity * hex(colour[scheme, surface], at) + (1 - opacity) * hex(colour[scheme, "ground"], at) }
        function check(what, opacity, least,   a, b, t, ratio) {
            t = colour[scheme, what]
            a = light(hex(t, 1), hex(t, 3), hex(t, 5)) + 0.05
            b = light(mixed(1, opacity), mixed(3, opacity), mixed(5, opacity)) + 0.05
            checked++
            ratio = (a > b) ? a / b : b / a
            if (ratio < least) printf "%s: %s on %s at %s has a contrast of %.2f, must be %s\n", scheme, what, surface, opacity, ratio, least
        }
        BEGIN { scheme = "light" }
        /^@media \(prefers-color-scheme: dark\) \{$/ { scheme = "dark"; next }
        match($0, /(fill|stroke|color): #[0-9a-f]*/) { name = $1; sub(/^\./, "", name); at = index($0, "#"); colour[scheme, name] = substr($0, at + 1, 6); names[name] = 1 }
        match($0, /^\.t[0-9] \{ fill-opacity: [0-9.]*/) { tint[++tints] = substr($0, RSTART + 21, RLENGTH - 21) + 0 }
        END {
            for (s = 0; s < 2; s++) {
                scheme = s ? "dark" : "light"
                for (name in names) {
                    if (!((scheme, name) in colour)) print scheme ": no colour of " name
                    surface = "ground"
                    if (name ~ /^(text|note)$/) check(name, 1, 4.5)
                    else if (name ~ /^(axis|mark|limit|h[0-9])$/) check(name, 1, 3)
                    else if (name ~ /^(c[0-9]|faint)$/) {
                        surface = name
                        check("text", 1, 4.5)
                        for (t = 1; t <= tints; t++) check("text", tint[t], 4.5)
                        if (name == "faint") check("note", 1, 4.5)
                    } else if (name !~ /^(ground|cell|grid)$/) print "no rule for " name
                }
            }
            print checked + 0, "contrasts"
        }' "$1"
}
# In each scheme: text and note, 3 strokes and the colours of lines, on the ground; text on each fill and its 3 tints, and a
# note on the faint one.
contrasts=$((2 * (2 + 3 + $(grep -c '^\.h' "$style") / 2 + 4 * ($(grep -cE '^\.(c[0-9]|faint)' "$style") / 2) + 1)))
checks=$((checks + 1))
contrasts "$style" >found
[ "$(cat found)" = "$contrasts contrasts" ] || wrong "$(cat found)"
# The same check of a style that has one unreadable colour, and of one that lacks one.
sed 's/^text { fill: #e8eaf0 }/text { fill: #333344 }/' "$style" >planted.css
holds 'dark text on a dark ground is not seen' grep -q 'dark: text on ground at 1 has a contrast of' <(contrasts planted.css)
sed '$!N; s/^\.c8 { fill: #4d5866 }\n//; P; D' "$style" >planted.css
holds 'a colour without its dark one is not seen' grep -q 'dark: no colour of c8' <(contrasts planted.css)

# ---- The pictures
# adapts FILE: it has the whole style, classes that the style has, and no colours beside it.
adapts() {
    checks=$((checks + 1))
    sed -n '/^<style>$/,/^<\/style>$/{/style>$/!p}' "$1" | cmp -s - "$style" || echo "$1 has another style than picture.css"
    sed '/^<style>$/,/^<\/style>$/d' "$1" >elements
    grep -nE -m 3 '[ "](fill|stroke|color|style|stop-color)=|<style|#[0-9a-fA-F]{3}' elements && echo "$1 has colours beside its style"
    grep -oE 'class="[^"]*"' elements | sed 's/class="//; s/"$//' | tr ' ' '\n' | sort -u |
        while read -r class; do [ "$class" = t0 ] || grep -q "^\.$class {" "$style" || echo "$1: the style has no class $class"; done
}
readable() {
    local said
    well_formed "$1"
    said=$(adapts "$1")
    [ -z "$said" ] || wrong "$said"
}
good plan --batch 40 --min-len 1 --max-len 4000 --partitions 30 --svg plan.svg
good plan --batch 0 --partitions 3 --svg none.svg
good plan --batch 1000 --partitions 600 --svg many.svg
for name in plan none many; do readable $name.svg; done
good layout
tail -n +2 stdout | awk '{ print $1 }' >names
[ "$(wc -l <names)" -ge 12 ] || wrong "few layouts: $(cat names)"
while read -r name; do
    good layout "$name" --svg layout.svg
    readable layout.svg
done <names
good layout mma-a --lane 3 --svg lane.svg
readable lane.svg
found=0
while read -r picture; do
    readable "$picture"
    found=$((found + 1))
done < <(find "$source/docs" "$source/examples" -name '*.svg')
[ $found -ge 1 ] || wrong "no picture in $source/docs"

# What must be reported.
holds 'a tag that is not closed is not seen' grep -q 'closes another' <(sed '0,/<\/text>/s///' plan.svg | xml_faults)
sed 's/class="c1"/fill="#f3b562"/' plan.svg >planted.svg
holds 'a colour of its own is not seen' grep -q 'has colours beside' <(adapts planted.svg)
sed '/^@media/d' plan.svg >planted.svg
holds 'a style without the dark one is not seen' grep -q 'another style' <(adapts planted.svg)
sed 's/class="c1"/class="c11"/' plan.svg >planted.svg
holds 'an unknown class is not seen' grep -q 'no class c11' <(adapts planted.svg)
finish

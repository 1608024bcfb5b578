# SPDX-License-Identifier: MIT
"""Writes a record as tables in Markdown and as a picture, for docs/fp8-accuracy.md."""

import json
import math
import pathlib

from .model import DISTRIBUTIONS, KEYS


class Record:
    def __init__(self, path):
        with open(path) as file:
            self.lines = [json.loads(line) for line in file]
        self.by_key = {}
        for line in self.lines:
            key = line["kind"], line["name"], line["distribution"], line["keys"], line.get("device")
            if key in self.by_key:
                raise ValueError(f"{path}: there are two lines of {', '.join(map(str, key))}")
            self.by_key[key] = line

    def value(self, kind, name, distribution, keys, field, device=None):
        return self.by_key.get((kind, name, distribution, keys, device), {}).get(field)

    def devices(self):
        return sorted({line["device"] for line in self.lines if "device" in line})


def percent(value):
    """Two digits."""
    if value is None:
        return "–"
    exponent = int(f"{100 * value:.1e}".partition("e")[2])
    return f"{100 * value:.{max(0, 1 - exponent)}f}"


AT = 16384
MODES = ("bf16 BF16", "bf16 FP8_656", "bf16 FP8_576", "fp8 FP8_656", "fp8 FP8_576", "all-e4m3 FP8_576")
LINES = (  # name, words, class of the colour, dashed
    ("cache FP8_576", "cache: FP8_576", "h0", False),
    ("cache FP8_656", "cache: FP8_656", "h0", True),
    ("q e4m3", "q: e4m3, a scale a row", "h1", False),
    ("q bf16", "q: bf16", "h1", True),
    ("sums of S e4m3 FP8_576", "sums of QKᵀ: 576 terms of e4m3", "h2", False),
    ("sums of S e4m3 FP8_656", "sums of QKᵀ: 128 terms of e4m3", "h2", True),
    ("P e4m3", "P: e4m3", "h3", False),
    ("P bf16", "P: bf16", "h3", True),
    ("P fp16", "P: fp16", "h4", True),
    ("sums of O e4m3", "sums of P·V: e4m3", "h5", False),
    ("sums of O fp16", "sums of P·V: fp16, fp32 sums", "h5", True),
    ("out bf16", "out: bf16", "h6", True),
)


def table(header, rows):
    yield "| " + " | ".join(header) + " |"
    yield "|---" + "|--:" * (len(header) - 1) + "|"
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def words_of(name):
    """Returns the document's name of a mode and its cache."""
    mode, _, cache = name.partition(" ")
    return f"`{mode}` over `{cache}`" if mode != "all-e4m3" else f"all e4m3 over `{cache}`"


WORDS = {**{name: words_of(name) for name in MODES}, **{name: words for name, words, _, _ in LINES}}
BIASED = (  # shown under "bias"
    ("one_signed", "source", "sums of O e4m3"),
    ("one_signed", "mode", "all-e4m3 FP8_576"),
    ("one_signed", "source", "sums of O fp16"),
    ("one_signed", "mode", "fp8 FP8_576"),
    ("outliers", "mode", "all-e4m3 FP8_576"),
    ("gaussian", "mode", "all-e4m3 FP8_576"),
)


def tables_of(record):
    """Returns {name: lines} of the document's tables."""

    def by_distribution(kind, names, field, show, device=None):
        rows = [[show(record.value(kind, n, d, AT, field, device)) for d in DISTRIBUTIONS] for n in names]
        return table([f"{AT} keys", *DISTRIBUTIONS], [[WORDS[name], *row] for name, row in zip(names, rows)])

    def by_keys(cases, field):
        rows = [[percent(record.value(kind, name, d, keys, field)) for keys in KEYS] for d, kind, name in cases]
        words = [f"`{d}`, {WORDS[name]}" for d, _, name in cases]
        return table(["keys", *map(str, KEYS)], [[word, *row] for word, row in zip(words, rows)])

    found = {
        "modes": by_distribution("mode", MODES, "out", percent),
        "lse": by_distribution("mode", MODES, "lse", "{:.1e}".format),
        "sources": by_distribution("source", [line[0] for line in LINES], "out", percent),
        "bias": by_keys(BIASED, "bias"),
    }
    for device in record.devices():
        names = [name for name in MODES if record.value("measured", name, "gaussian", AT, "out", device) is not None]
        found[f"measured on {device}"] = by_distribution("measured", names, "out", percent, device)
    return {name: list(lines) for name, lines in found.items()}


# ---- The record, as a picture -----------------------------------------------------------------------------------------

PANEL, GAP, LEFT, TOP = (340, 300), (72, 66), 84, 84
FLOOR, CEILING = -7, 0  # powers of ten

STYLE = pathlib.Path(__file__).parents[2] / "python" / "flash_mla" / "picture.css"


def svg(record):
    """Lines of the file."""
    width = LEFT + 3 * PANEL[0] + 2 * GAP[0] + 30
    height = TOP + 2 * PANEL[1] + GAP[1] + 60
    yield '<?xml version="1.0" encoding="UTF-8"?>'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
    yield f"<style>\n{STYLE.read_text(encoding='ascii')}</style>"
    yield '<rect width="100%" height="100%" class="ground"/>'
    yield f'<text x="{LEFT}" y="30" class="title">Dense decode over FP8 caches: the error of each step alone</text>'
    yield (
        f'<text x="{LEFT}" y="50">root of Σ(a − b)² / Σb² of out, b in double precision; sums: b sums the same rounded '
        "factors in double precision. Colour: the step. Dashed: the more exact choice. Below 0.00001 % nothing is drawn.</text>"
    )
    places = [(column, row) for row in range(2) for column in range(3)]
    for number, (distribution, (column, row)) in enumerate(zip(DISTRIBUTIONS, places)):
        x, y = LEFT + column * (PANEL[0] + GAP[0]), TOP + row * (PANEL[1] + GAP[1])
        yield f'<g transform="translate({x},{y})">'
        yield from panel(record, distribution, column == 0)
        yield "</g>"
    column, row = places[number + 1]
    yield f'<g transform="translate({LEFT + column * (PANEL[0] + GAP[0])},{TOP + row * (PANEL[1] + GAP[1])})">'
    yield from legend()
    yield "</g>"
    yield "</svg>"


def across(keys):
    return PANEL[0] * math.log2(keys / KEYS[0]) / math.log2(KEYS[-1] / KEYS[0])


def down(error):
    return PANEL[1] * (CEILING - math.log10(error)) / (CEILING - FLOOR)


def panel(record, distribution, first):
    yield f'<text x="0" y="-8" class="head">{DISTRIBUTIONS[distribution][1]}</text>'
    for power in range(FLOOR, CEILING + 1):
        y = f"{down(10.0**power):.1f}"
        yield f'<path class="grid" d="M0,{y}H{PANEL[0]}"/>'
        yield f'<text x="-6" y="{float(y) + 4:.1f}" class="end">{10.0**(power + 2):.{max(0, -power - 2)}f} %</text>'
    for keys in KEYS:
        x = f"{across(keys):.1f}"
        yield f'<path class="grid" d="M{x},0V{PANEL[1]}"/>'
        yield f'<text x="{x}" y="{PANEL[1] + 16}" class="mid">{keys // 1024}K</text>'
    yield f'<rect class="axis" width="{PANEL[0]}" height="{PANEL[1]}"/>'
    yield f'<text x="{PANEL[0] // 2}" y="{PANEL[1] + 32}" class="mid">keys of a request, K = 1024</text>'
    if first:
        yield f'<text class="mid" transform="translate(-70,{PANEL[1] // 2}) rotate(-90)">relative error of out</text>'
    for name, _, colour, dashed in LINES:
        points = [(keys, record.value("source", name, distribution, keys, "out")) for keys in KEYS]
        points = [(across(keys), down(error)) for keys, error in points if error is not None and error >= 10.0**FLOOR]
        if points:
            yield line(points, colour, dashed)
            dots = "".join(f"M{x - 2:.1f},{y:.1f}a2,2 0 1,0 4,0a2,2 0 1,0 -4,0" for x, y in points)
            yield f'<path class="dot {colour}" d="{dots}"/>'


def line(points, colour, dashed):
    path = "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashes = " dashed" if dashed else ""
    return f'<path class="line {colour}{dashes}" d="{path}"/>'


def legend():
    yield '<text x="0" y="-8" class="head">What is rounded</text>'
    for i, (_, words, colour, dashed) in enumerate(LINES):
        y = 14 + 24 * i
        yield line([(0, y), (44, y)], colour, dashed)
        yield f'<text x="54" y="{y + 4}">{words}</text>'

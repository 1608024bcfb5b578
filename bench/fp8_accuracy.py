# SPDX-License-Identifier: MIT
"""Measures the error of dense decode over FP8 caches against double precision on unquantised inputs, source by source.

    python3 bench/fp8_accuracy.py compute RECORD [--distributions gaussian ...] [--keys 1024 ...]      # some minutes
    python3 bench/fp8_accuracy.py compute RECORD --library                                             # flash_mla, not the model
    python3 bench/fp8_accuracy.py draw RECORD SVG
    python3 bench/fp8_accuracy.py tables RECORD

`compute` needs NumPy. It appends one line of JSON a result to RECORD. `kind` says what was computed: a "source" is one step
rounded, the rest in double precision; a "mode" is all steps of a kernel together; "measured" is the result of the package
flash_mla, on a GPU if PyTorch sees one, else on the CPU. NumPy's queries are bf16 if ml_dtypes is installed, else fp16. Errors of
out are out, the root of Σ(a − b)² / Σb², cosine, 1 − 2Σab / Σ(a² + b²), and bias, Σ(a − b)b / Σb²; lse is the mean of |a − b|;
with b in double precision, over all rows of all draws.

`draw` and `tables` read such a record and make the picture and the tables of docs/fp8-accuracy.md, which explains the numbers.
"""

import argparse
import json

from accuracy.model import DISTRIBUTIONS, KEYS, OF_MODEL, lines_of
from accuracy.report import Record, svg, tables_of


def compute(options):
    kinds, more = OF_MODEL, {}
    if options.library:
        from accuracy.library import of_library

        kinds, more = of_library()
    with open(options.record, "a") as record:
        for distribution in options.distributions:
            for keys in options.keys:
                for line in lines_of(distribution, keys, kinds, more):
                    print(json.dumps(line), file=record, flush=True)


def draw(options):
    with open(options.svg, "w", encoding="utf-8") as file:
        file.write("\n".join(svg(Record(options.record))) + "\n")


def print_tables(options):
    for name, lines in tables_of(Record(options.record)).items():
        print(f"{name}:", *lines, "", sep="\n")


def key_count(text):
    if not text.isdecimal() or int(text) < 64 or int(text) % 64:
        raise argparse.ArgumentTypeError(f"is {text}, must be a multiple of 64")
    return int(text)


def main(arguments=None):
    parser = argparse.ArgumentParser(
        prog="fp8_accuracy.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="compute | draw | tables")
    command = commands.add_parser("compute", help="append lines to a record")
    command.add_argument("record", metavar="RECORD")
    command.add_argument("--library", action="store_true", help="flash_mla's results in place of the model's")
    command.add_argument("--distributions", nargs="+", choices=list(DISTRIBUTIONS), default=list(DISTRIBUTIONS))
    command.add_argument("--keys", nargs="+", type=key_count, default=KEYS, help="multiples of 64")
    command.set_defaults(function=compute)
    command = commands.add_parser("draw", help="a record as a picture")
    command.add_argument("record", metavar="RECORD")
    command.add_argument("svg", metavar="SVG")
    command.set_defaults(function=draw)
    command = commands.add_parser("tables", help="a record as tables in Markdown")
    command.add_argument("record", metavar="RECORD")
    command.set_defaults(function=print_tables)
    options = parser.parse_args(arguments)
    options.function(options)


if __name__ == "__main__":
    main()

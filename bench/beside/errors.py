# SPDX-License-Identifier: MIT
"""Errors of contestants against double arithmetic, what is said about them, and their table for docs/performance.md."""

import json
from typing import NamedTuple

from beside.contestants import brief
from beside.rows import words_for

BOUNDS = {"rms": 1.05, "worst": 1.2}  # at most: our error over the best peer's
FAR = 0.25  # no rounding gives an rms this large: what was computed is something else


class Error(NamedTuple):
    """Of a result against the exact one, over the root mean square of that."""

    rms: float  # root mean square of the differences
    worst: float  # largest difference of an element


def error_of(result, exact):
    differences, size = result.to(exact.dtype) - exact, exact.square().mean().sqrt()
    return Error((differences.square().mean().sqrt() / size).item(), (differences.abs().amax() / size).item())


def errors_of(row, x, ready):
    """Returns ({contestant: {result: Error}}, what went wrong). A contestant far from the exact results has no errors."""
    part, exact = row.reference(x)
    shapes = [result.shape for result in ready["ours"].results]
    found, wrong = {}, []
    for name, one in ready.items():
        try:
            alike = part(*(result.reshape(shape) for result, shape in zip(one.results, shapes)))
            errors = {of: error_of(result, of_it) for of, result, of_it in zip(row.results, alike, exact)}
        except Exception as error:  # for example another shape
            wrong.append(f"{name} failed: {brief(error)}")
            continue
        far = [f"{of} {error.rms:.3g}" for of, error in errors.items() if not error.rms < FAR]  # NaN too
        if far:
            wrong.append(f"{name}: far from double arithmetic, rms of the error of {', '.join(far)}")
        else:
            found[name] = errors
    return found, wrong


def measured_of(row, found):
    """Returns the fields of a line. A ratio is our error over the least of any peer; `beyond` names those over their bounds."""
    fields, beyond = {}, []
    for name, errors in found.items():
        for of, error in errors.items():
            fields.update({f"{name}_{of}_{measure}": digits(value) for measure, value in error._asdict().items()})
    peers = [found[name] for name in row.peers if name in found]
    if peers:
        for of in row.results:
            for measure, bound in BOUNDS.items():
                ours, best = (getattr(one, measure) for one in (found["ours"][of], least(peers, of, measure)))
                fields[f"{of}_{measure}_ratio"] = round(ours / best, 3) if best else None
                beyond += [f"{of}_{measure}"] if ours > bound * best else []
        fields["beyond"] = beyond
    return fields


def least(peers, of, measure):
    return min((errors[of] for errors in peers), key=lambda error: getattr(error, measure))


def digits(value):
    return float(f"{value:.4g}")


def errors_beside(row, x, ready):
    """Returns (names of those measured, measurements or {}, what went wrong)."""
    try:
        found, wrong = errors_of(row, x, ready)
    except Exception as error:  # for example too little memory
        return {}, {}, [f"double arithmetic failed: {brief(error)}"]
    return found, measured_of(row, found) if "ours" in found else {}, wrong


def judgements(rows, lines):
    """Returns a line of text about each row, and one about all, of (group, row) pairs and the line written for each."""
    texts, within, judged = [], 0, 0
    for (_, row), line in zip(rows, lines):
        if not row.of_errors:
            continue
        line = line or {}
        judged += "beyond" in line
        within += line.get("beyond") == []
        texts.append(f"{words_for(row)}: {judgement(line)}")
    if texts:
        bounds = " and ".join(f"{bound} ({measure})" for measure, bound in BOUNDS.items())
        texts.append(
            f"errors: {within} of {judged} rows within {bounds} times the best peer's; {len(texts)} rows in all"
        )
    return texts


def judgement(line):
    if "beyond" not in line:
        return "not beside a peer"
    ratios = ", ".join(f"{measure} {max(ratios_of(line, measure), default=0):.3f}" for measure in BOUNDS)
    return f"beyond ({', '.join(line['beyond'])}): {ratios}" if line["beyond"] else f"within: {ratios}"


# The table.


def operation_of(line):
    sizes = f"{line['d_qk']}/{line['d_v']}" if "d_v" in line else line.get("d_qk")
    return {
        "dense_errors": "dense decode",
        "dense_fp8_errors": "dense decode, FP8 products, `FP8_576`",
        "sparse_decode_errors": f"sparse decode, `{'FP8_656' if sizes == 576 else 'FP8_584'}`",
        "sparse_prefill_errors": f"sparse prefill, {sizes}",
        "mha_fwd_errors": f"MHA forward, {sizes}",
        "mha_chunk_errors": f"MHA forward of a chunk, {sizes}",
        "mha_bwd_errors": f"MHA dq, dk, dv, {sizes}",
    }.get(line["kind"])


def ratios_of(line, measure):
    return [value for name, value in line.items() if name.endswith(f"_{measure}_ratio") and value is not None]


def results_of(line):
    """Returns the names of its results."""
    return [name[len("ours_") : -len("_rms")] for name in line if name.startswith("ours_") and name.endswith("_rms")]


def figures(line):
    """Returns (ours, the best peer's) rms in thousandths, of all results."""
    columns = [], []
    for of in results_of(line):
        peers = [line.get(f"{name}_{of}_rms") for name in line["peers"]]
        values = line[f"ours_{of}_rms"], min((value for value in peers if value is not None), default=None)
        for column, value in zip(columns, values):
            column.append("–" if value is None else f"{1000 * value:#.3g}")
    return [", ".join(column) for column in columns]


def cells(lines):
    """Returns the cells of an operation's rows with one kind of inputs: the figures of the row with the largest ratio of rms, and
    the largest ratios."""
    if not lines:
        return ["–"] * 4
    largest = [max(sum((ratios_of(line, measure) for line in lines), []), default=None) for measure in BOUNDS]
    shown = max(lines, key=lambda line: max(ratios_of(line, "rms"), default=0))
    return [*figures(shown), *(ratio_text(*pair) for pair in zip(largest, BOUNDS.values()))]


def ratio_text(ratio, bound):
    """Bold if it is beyond its bound."""
    if ratio is None:
        return "–"
    return f"**{ratio:.3f}**" if ratio > bound else f"{ratio:.3f}"


def table_of(path):
    """Returns the lines of the table of a record's last run with errors; none if it has no such run."""
    with open(path, encoding="utf-8") as file:
        lines = [line for line in map(json.loads, file) if operation_of(line)]
    last = max((line["run"] for line in lines), default=None)
    by_operation = {}
    for line in lines:
        if line["run"] == last:
            by_operation.setdefault((operation_of(line), line["dtype"]), []).append(line)
    if not by_operation:
        return []
    header = ["ours", "best peer", "rms", "worst"]
    texts = [
        "| operation | type | Gaussian: " + " | ".join(header) + " | peaky: " + " | ".join(header) + " | beyond |",
        "|---|---|" + "--:|" * 9,
    ]
    for (operation, dtype), rows in by_operation.items():
        both = sum((cells([line for line in rows if line["peaky"] == peaky]) for peaky in (False, True)), [])
        judged = [line["beyond"] for line in rows if "beyond" in line]
        count = f"{sum(map(bool, judged))} of {len(judged)}"
        name = {"bfloat16": "bf16", "float16": "fp16"}[dtype]
        texts.append(f"| {' | '.join([operation, name, *both, count])} |")
    return texts

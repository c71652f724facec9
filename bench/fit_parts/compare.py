"""Sets the answers of `rebatch fit`, and of its peers, beside the truth: how many largest
micro-batches are exact, how many are within 3 percent or above, and the errors of peaks.

`fit.py truth`, `answers` and `peers` write the files. A peak is compared at the size that was
answered, of the peers at the truth's, where the truth tried that size and it fit. Held-out models
have lines of their own."""

import argparse
import json
import pathlib
import statistics

from fit_parts.models import HELD_OUT

GIB = 1 << 30
NEAR = 0.03


def key_of(row):
    return row["model"], row["way"], row["cap_bytes"]


def read(path):
    """The rows of a file that are no errors."""
    return [row for row in json.loads(path.read_text())["rows"] if "error" not in row]


def peak_error(true, row, kind):
    """Relative error of a peak; None: the truth did not run that size."""
    for tried in true["tries"]:
        if tried["fits"] and tried["samples"] == row["peak_samples"] and kind in row:
            return row[kind] / tried[kind] - 1
    return None


class Score:
    """The answers to some of the truth's rows."""

    def __init__(self, truth, answers):
        by_key = {key_of(row): row for row in answers}
        self.pairs = [(true, by_key[key_of(true)]) for true in truth if key_of(true) in by_key]
        self.missing = [key_of(true) for true in truth if key_of(true) not in by_key]
        sized = [(t["size"], row["size"]) for t, row in self.pairs if row["size"] is not None]
        self.sized = len(sized)
        self.exact = sum(true == size for true, size in sized)
        self.near = sum(abs(size - true) <= NEAR * true for true, size in sized)
        self.above = sum(size > true for true, size in sized)

    def errors(self, kind):
        found = (peak_error(true, row, kind) for true, row in self.pairs)
        return [abs(error) for error in found if error is not None]

    def line(self, name):
        cells = [name, len(self.pairs) + len(self.missing)]
        cells += [self.exact, self.near, self.above] if self.sized else ["-"] * 3
        for kind in ("peak_allocated", "peak_reserved"):
            errors = self.errors(kind)
            cells.append(len(errors))
            cells += [percent(statistics.median(errors)), percent(max(errors))] if errors else "--"
        return [*cells, len(self.missing)]


def percent(share):
    return f"{100 * share:.2f} %"


def print_table(head, rows):
    print(f"| {' | '.join(head)} |\n|{' --- |' * len(head)}")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |")
    print()


def model_rows(truth, answers):
    """The sizes of a model by cap, the truth's and in brackets an answer that differs."""
    by_key = {key_of(row): row for row in answers}
    for name in dict.fromkeys(row["model"] for row in truth):
        for way in dict.fromkeys(row["way"] for row in truth):
            mine = [row for row in truth if (row["model"], row["way"]) == (name, way)]
            if mine:
                score = Score(mine, answers)
                errors = score.errors("peak_reserved")
                worst = percent(max(errors)) if errors else "-"
                yield [name, way, *(shown(row, by_key.get(key_of(row))) for row in mine), worst]


def shown(true, row):
    if row is None:
        return f"{true['size']} (no answer)"
    return f"{true['size']}" if row["size"] == true["size"] else f"{true['size']} ({row['size']})"


def report(truth, answers, peers):
    caps = list(dict.fromkeys(row["cap_bytes"] for row in truth))
    names = [f"{cap / GIB:g} GiB" for cap in caps]
    head = ["model", "allocator", *names, "worst error of what is reserved"]
    print_table(head, model_rows(truth, answers))
    lines = [Score(part, answers).line(f"fit, {name}") for name, part in parts(truth)]
    native = [row for row in truth if row["way"] == "native"]
    for peer in dict.fromkeys(row["peer"] for row in peers):
        mine = [row for row in peers if row["peer"] == peer]
        lines.append(Score(native, mine).line(f"{peer}, native"))
    print_table(
        ["of", "rows", "exact", f"within {NEAR:.0%}", "above the truth",
         "peaks in use", "median error", "worst", "peaks reserved", "median error", "worst",
         "no answer"],
        lines,
    )  # fmt: skip


def parts(truth):
    """The rows by way, all, and those of models that were held out."""
    tried = [row for row in truth if row["model"] not in HELD_OUT]
    named = {way: [row for row in tried if row["way"] == way] for way in ("native", "install")}
    named["both"] = tried
    named["held out"] = [row for row in truth if row["model"] in HELD_OUT]
    return [(name, rows) for name, rows in named.items() if rows]


def compare(arguments):
    parser = argparse.ArgumentParser(
        prog="fit.py compare", description="Compares answers with the truth."
    )
    parser.add_argument("truth", type=pathlib.Path)
    parser.add_argument("answers", type=pathlib.Path)
    parser.add_argument("--peers", type=pathlib.Path)
    given = parser.parse_args(arguments)
    truth = [row for row in read(given.truth) if row["size"]]
    report(truth, read(given.answers), read(given.peers) if given.peers else [])

"""Runs what README.md and docs/benchmarks.md show, and writes OUT/figures.json. What the
programs said is in OUT/figures.log.

    make figures OUT=out                                  # what this machine can run
    make figures OUT=out FIGURES_FLAGS="small oom"        # parts by name
    make figures OUT=out FIGURES_FLAGS=unmeasured         # in order of worth, 25 minutes of a GPU
    scripts/figures-table out/figures.json                # into docs/figures.json and the pages

A part ends at its bound of seconds, which is 600 at most, and keeps the rows that it had by then.
Where a part fails the others go on, and the exit status is 1. Other sets of parts are host, gpu and
two-gpus. `figures_parts.py` has the parts: what each runs, and the rows that it makes of it.
--try runs tiny models, on a CPU or on the stand-in for CUDA, whose figures say nothing."""

import argparse
import datetime
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

from figures_parts import PARTS
from figures_run import ROOT, PartFails, Run

SECONDS = 600  # of a part at most
SETS = {
    "unmeasured": (
        "contrastive",
        "speech",
        "small",
        "installed",
        "small-memory",
        "budget",
    )
}
SETS_OF_GPUS = {"host": 0, "gpu": 1, "two-gpus": 2}


def gpus_of_machine():
    """Names, by PyTorch; none without it."""
    program = """import torch
for i in range(torch.cuda.device_count()): print(torch.cuda.get_device_name(i))"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    return [name.removeprefix("NVIDIA ") for name in done.stdout.splitlines()]


def commit_of(paths):
    """HEAD; with a `+` where files of these paths are not those of HEAD."""
    git = ("git", "-C", ROOT)
    head = subprocess.run([*git, "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True)
    if head.returncode:
        raise SystemExit("figures: there is no git repository here: write --commit COMMIT")
    changed = subprocess.run(
        [*git, "status", "--porcelain", "--", *paths], capture_output=True, text=True
    )
    return head.stdout.strip() + "+" * bool(changed.stdout.strip())


def rows_of(name, part, run, machine, commit, keep):
    """Keeps each row of a part. Why the part ended before its last row, or None."""
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    shared = dict(part=name, machine=machine, date=date, commit=commit, paths=part.paths)
    count = 0
    try:
        for table, row, cells in part.make_rows(run):
            keep({"table": table, "row": row, "cells": cells, **shared})
            count += 1
    except PartFails as failure:
        return str(failure)
    except Exception as error:  # a program printed something else than the part expects
        return f"{type(error).__name__}: {error}, after {count} rows"
    return None if count else "no row"


def chosen(names, parts, gpus):
    """(name, part) in order; without names, all that so many GPUs can run."""
    found = []
    for name in names or [name for name, part in parts.items() if part.gpus <= gpus]:
        if name in SETS_OF_GPUS:
            found += [key for key, part in parts.items() if part.gpus == SETS_OF_GPUS[name]]
        else:
            found += SETS.get(name, [name])
    for name in found:
        if name not in parts:
            known = ", ".join([*SETS, *SETS_OF_GPUS, *parts])
            raise SystemExit(f"figures: the part is {name}, expected one of: {known}")
    return {name: parts[name] for name in found}


def main(parts, arguments=None):
    parser = argparse.ArgumentParser(
        prog="figures", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="unmeasured: " + " ".join(SETS["unmeasured"]) + "\nparts and their bounds: "
        + ", ".join(f"{name} {part.seconds} s" for name, part in parts.items()),
    )  # fmt: skip
    parser.add_argument("out", type=pathlib.Path, help="a folder")
    parser.add_argument("parts", nargs="*", help="parts and sets; default: all that can run here")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each part at most")
    parser.add_argument("--commit", help="of the code, where there is no repository")
    parser.add_argument("--once", action="store_true", help="instead of several runs")
    parser.add_argument("--try", dest="is_try", action="store_true", help="with tiny models")
    given = parser.parse_intermixed_args(arguments)
    names = gpus_of_machine()
    given.out.mkdir(parents=True, exist_ok=True)
    rows, failed = [], []

    def keep(row):
        rows.append(row)
        written = {"is_try": True} if given.is_try else {}
        (given.out / "figures.json").write_text(json.dumps({**written, "rows": rows}, indent=1))

    with open(given.out / "figures.log", "w") as log:
        for name, part in chosen(given.parts, parts, len(names)).items():
            machine, began = f"{os.cpu_count()} cores, host device", time.monotonic()
            if part.gpus:
                machine = f"{part.gpus} x " * (part.gpus > 1) + (names or ["no GPU"])[0]
            run = Run(log, min(part.seconds, given.seconds, SECONDS), given.is_try, given.once)
            failure = None
            if part.gpus > len(names) and not given.is_try:
                failure = f"it needs {part.gpus} GPUs, and PyTorch finds {len(names)}"
            commit = given.commit or commit_of(part.paths)
            failure = failure or rows_of(name, part, run, machine, commit, keep)
            failed += [name] * bool(failure)
            print(
                f"figures: {name}: {failure or 'ok'}, {time.monotonic() - began:.0f} s", flush=True
            )
    what = ", ".join(failed) or "no part"
    print(f"figures: {len(rows)} rows in {given.out}/figures.json; failed: {what}")
    return bool(failed)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a part's programs end too
    sys.exit(main(PARTS))

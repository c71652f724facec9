"""Trainings that were written from docs/fit.md and README before fit was tried on them
(bench/foreign): what fit says of them without a GPU, and what they take of one.

    python3 bench/fit.py foreign predict --output fit.json           # without a GPU
    python3 bench/fit.py foreign truth --near fit.json --output truth.json   # on a GPU
    python3 bench/fit.py compare truth.json fit.json

Each is a program that takes --batch N and --steps N. For the truth it runs unchanged, again and
again in one process, as if it were started each time; a Step of it stops at an OOM. The predicted
sizes run first, while no other process uses the card, so what the process holds beside the
allocator is measured as `fit.py truth` does. Other sizes follow, in several processes at once that
share the card, under the limits that were found alone."""

import argparse
import concurrent.futures
import contextlib
import functools
import gc
import importlib.util
import json
import pathlib
import runpy
import sys
import time

import torch

from fit_parts.answers import answered_rows
from fit_parts.truth import GIB, WAYS, Child, Process, Results, key_of, read_starts, say, truth_row

FOLDER = pathlib.Path(__file__).parents[1] / "foreign"
# The batch of those of which fit runs the program from its start for each size.
OWN_SIZES = {"molecules": 64, "pixels": 256, "views": 256}
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
CAPS = (6, 20)
STEPS = 5  # GradScaler leaves out the first ones
UNKNOWN = 32  # samples to begin with where nothing was predicted


# ---- without a GPU ----


def predicted_rows(name, way, given):
    """As `fit.py answers` has them."""
    program = ["--", sys.executable, str(FOLDER / f"{name}.py")]
    if name in OWN_SIZES:
        program = ["--batch", str(OWN_SIZES[name]), *program, "--batch", "{batch}"]
    return answered_rows(name, way, given.gpu, given.caps, program)


def predict(given):
    rows = json.loads(given.output.read_text())["rows"] if given.output.exists() else []
    rows = [row for row in rows if "error" not in row]  # what failed is tried again
    done = {(row["model"], row["way"]) for row in rows}
    for name, way in ((name, way) for name in given.models for way in given.ways):
        if (name, way) not in done:
            found = predicted_rows(name, way, given)
            rows += found
            given.output.write_text(json.dumps({"rows": rows}, indent=1))
            say(f"{name} {way}: {' '.join(str(r.get('size', r.get('error'))) for r in found)}")


# ---- on a GPU ----


class Alone(Process):
    """A process of which it stays known what it holds beside the allocator when others come."""

    found = None

    def outside(self):
        return super().outside() if self.found is None else self.found


class Program:
    """A program that runs again and again, as `truth.Tried`."""

    def __init__(self, name, process):
        self.path, self.process = str(FOLDER / f"{name}.py"), process
        self.steps = []  # of the run, if the program has any

    def step(self, make, *arguments, **options):
        kept = {"on_oom": "stop", "growth": False, "admission": False, "log_level": "quiet"}
        self.steps.append(make(*arguments, **options, **kept))
        return self.steps[-1]

    def run(self, samples, cap=0):
        fits, tries = False, 0
        while tries < 3:
            tries += 1
            clean()
            self.process.limit(cap or self.process.total)
            fits = self._fits(samples)
            # A Step counts from its last update on.
            peaks = [torch.cuda.max_memory_allocated(), *(s.report.peak_bytes for s in self.steps)]
            self.steps.clear()
            reserved, outside = torch.cuda.max_memory_reserved(), self.process.outside()
            if not cap or reserved + outside <= cap:
                break
            fits = False
        return {
            "samples": samples,
            "fits": fits,
            "peak_allocated": max(peaks),
            "peak_reserved": reserved,
            "outside_bytes": outside,
        }

    def _fits(self, samples):
        from rebatch.torch import is_oom

        sys.argv = [self.path, "--batch", str(samples), "--steps", str(STEPS)]
        try:
            with contextlib.redirect_stdout(sys.stderr):
                runpy.run_path(self.path, run_name="__main__")
            torch.cuda.synchronize()
        except Exception as error:
            if not is_oom(error):
                raise
            return False
        return True


def clean():
    """As if no program had run in this process."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def work(name, way):
    """The child: it imports, runs the predicted sizes alone, and then others beside others."""
    import rebatch.torch as rebatch

    for each in ("transformers", "torchvision.transforms.v2"):
        if importlib.util.find_spec(each.split(".")[0]):
            importlib.import_module(each)
    print(json.dumps({"ready": name}), flush=True)
    turn = json.loads(sys.stdin.readline())
    program = Program(name, Alone(way, turn["free_before"]))
    rebatch.Step = functools.partial(program.step, rebatch.Step)
    starts = {int(cap): start or UNKNOWN for cap, start in turn["starts"].items()}
    alone, beyond = {}, []
    for cap, start in starts.items():
        alone[cap] = program.run(start, cap)
        if not alone[cap]["fits"]:  # what fit's answer takes where there is room
            beyond.append(program.run(start))
    program.process.found = max(found["outside_bytes"] for found in [*alone.values(), *beyond])
    clean()
    print(json.dumps({"alone": name}), flush=True)
    sys.stdin.readline()
    for cap, start in starts.items():
        row = truth_row(program, cap, start, {start: alone[cap]})
        print(json.dumps({**row, "without_cap": beyond}), flush=True)


def truth(given):
    began = time.monotonic()
    results = Results(given.output)
    results.describe("program")
    starts, done = read_starts(given.near), {key_of(row) for row in results.rows}
    free = torch.cuda.mem_get_info()[0]
    waiting = []
    for way, name in ((way, name) for way in given.ways for name in given.models):
        caps = [cap for cap in given.caps if (name, way, cap) not in done]
        if caps:
            asked = {cap: starts.get((name, way, cap), 0) for cap in caps}
            waiting.append((Child(name, way, "foreign"), asked))

    def follow(rows, child):
        for row in rows:
            results.add(results.rows, child.name, child.way, row)
            say(f"{child.name} {child.way}: {row.get('size', row.get('error'))}")

    def left():
        return given.seconds - (time.monotonic() - began)

    ready = []
    for child, asked in waiting:  # one after the other
        with child.killed_after(left()):
            rows = child.answers(free, "program", starts=asked)
            first = next(rows, {})
        if "alone" in first:
            ready.append((rows, child))
        else:
            follow([first], child)
        free = torch.cuda.mem_get_info()[0]
    say(f"alone: {time.monotonic() - began:.0f} s")

    def one(pair):
        rows, child = pair
        with child.killed_after(left()):
            child.go_on()
            follow(rows, child)

    with concurrent.futures.ThreadPoolExecutor(given.processes) as pool:
        list(pool.map(one, ready))
    say(f"all: {time.monotonic() - began:.0f} s")


def parse(arguments):
    parser = argparse.ArgumentParser(prog="fit.py foreign", description=__doc__.split("\n\n")[0])
    parser.add_argument("what", choices=("predict", "truth"))
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--models", type=lambda text: text.split(","), default=NAMES)
    parser.add_argument("--ways", type=lambda text: text.split(","), default=WAYS)
    parser.add_argument("--gpu", default="h200", help="the card, as rebatch fit names it")
    parser.add_argument("--near", help="a file with sizes to begin at, as predict writes it")
    parser.add_argument("--seconds", type=float, default=240, help="for all; default: 240")
    parser.add_argument("--processes", type=int, default=6, help="that share the card")
    parser.add_argument(
        "--caps",
        type=lambda text: [int(float(part) * GIB) for part in text.split(",")],
        default=",".join(map(str, CAPS)),
        help="in GiB",
    )
    return parser.parse_args(arguments)


def foreign(arguments):
    given = parse(arguments)
    {"predict": predict, "truth": truth}[given.what](given)

"""The truth by which `rebatch fit` is judged: for each model, cap and way, the largest micro-batch
that a training runs on a GPU. Three steps without an OOM count, of which the first makes the
optimizer's state. Nothing recovers. The training is a plain loop, or with `--trainer step` a Step
that stops at an OOM.

A cap is what cudaMemGetInfo() says is free before the process makes its context. So context, loaded
kernels and the allocator share it. Here the allocator's limit is the cap less what the process
holds beside the allocator. That is measured after each try, and a try during which it grew beyond
the cap is repeated. For that one process at a time has the card; the next ones import meanwhile.
Before a try, gradients, the optimizer's state and cached memory are given back.

The way "native" is PyTorch's allocator, "install" is after rebatch.torch.install(). The two sizes
around some of the results are tried again in fresh processes, with ballast on the card in place of
a limit (`confirmed`). Sizes begin at those of --start, a file with `rows` as this one writes, or
else at what two small sizes predict. A row is written at once; a run that was cut goes on."""

import argparse
import contextlib
import gc
import json
import os
import pathlib
import platform
import random
import subprocess
import sys
import threading
import time

import torch

from fit_parts.child import command

GIB = 1 << 30
WAYS = ("native", "install")
CAPS = (4.0, 8.0, 16.0)
STEPS = 3  # the first one makes the optimizer's state
RETRIES = 3  # of a try during which kernels were loaded


class Process:
    """What this process may use, and what it uses, of a card that no other process uses now."""

    def __init__(self, way, free_before):
        torch.cuda.init()
        self.free_before = free_before
        self.total = torch.cuda.get_device_properties(0).total_memory
        if way == "install":
            import rebatch.torch as rebatch

            rebatch.install()

    def outside(self):
        """Bytes that the process holds beside the allocator: context, kernels, libraries."""
        torch.cuda.synchronize()
        used = self.free_before - torch.cuda.mem_get_info()[0]
        return used - torch.cuda.memory_reserved()

    def limit(self, cap):
        allowed = max(cap - self.outside(), 0)
        torch.cuda.set_per_process_memory_fraction(min(allowed / self.total, 1.0))


def forget(made):
    """Gives back what a training has made, as if none had run."""
    made.optimizer.zero_grad(set_to_none=True)
    made.model.zero_grad(set_to_none=True)
    made.optimizer.state.clear()
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()  # which keep the segment that they lie in
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


class Tried:
    """A model that is trained again and again, each time as if it were the first."""

    def __init__(self, name, process, trainer):
        from fit_parts.models import MODELS

        torch.manual_seed(0)
        self.process = process
        self.update = {"plain": self._plain, "step": self._step}[trainer]
        self.made = MODELS[name]("cuda")

    def run(self, samples, cap=0):
        """What a training of some steps took, under a cap if there is one."""
        for _ in range(RETRIES):
            forget(self.made)
            if cap:
                self.process.limit(cap)
            fits = self._train(samples)
            reserved = torch.cuda.max_memory_reserved()
            outside = self.process.outside()
            if not cap or reserved + outside <= cap:
                break
        else:
            fits = False
        return {
            "samples": samples,
            "fits": fits,
            "peak_allocated": torch.cuda.max_memory_allocated(),
            "peak_reserved": reserved,
            "outside_bytes": outside,
        }

    def _train(self, samples):
        from rebatch.torch import is_oom

        try:
            drawn = self.made.batch(samples)
            self.update(drawn, samples)
            torch.cuda.synchronize()
        except Exception as error:
            if not is_oom(error):
                raise
            return False
        return True

    def _plain(self, drawn, samples):
        model, optimizer, _, loss = self.made
        for _ in range(STEPS):
            optimizer.zero_grad(set_to_none=True)
            loss(model, drawn).backward()
            optimizer.step()

    def _step(self, drawn, samples):
        import rebatch.torch as rebatch

        model, optimizer, _, loss = self.made
        kept = {"on_oom": "stop", "growth": False, "admission": False, "log_level": "quiet"}
        step = rebatch.Step(model, optimizer, loss, micro_start=samples, **kept)
        for _ in range(STEPS):
            step(drawn)


def small_sizes(tried):
    """Two sizes that lie on the line of peaks. With few samples the peak is where the optimizer
    steps, whatever their number; at the half of a size that needs twice that it is no longer."""
    runs = [tried.run(1)]
    while runs[-1]["peak_allocated"] < 2 * runs[0]["peak_allocated"]:
        runs.append(tried.run(2 * runs[-1]["samples"]))
    return runs[-2:]


def predicted(small, cap):
    """Samples that a straight line through two small sizes predicts."""
    first, second = small
    each = (second["peak_allocated"] - first["peak_allocated"]) / first["samples"]
    fixed = first["peak_allocated"] - each * first["samples"] + second["outside_bytes"]
    return max(1, int((cap - fixed) / each))


def largest(fits, start):
    """The largest size that fits, and the smallest one that was seen not to. A size somewhat above
    the latter may fit again, since allocators round: two are looked at."""
    low, high = between(fits, start, 0)
    while low and (again := next((n for n in beyond(low) if fits(n)), 0)):
        low, high = between(fits, again, again)
    return low, high


def beyond(low):
    return sorted({low + 2, low + max(3, low // 100)})


def between(fits, size, low):
    """Two neighbours of which the smaller fits; all steps from `size` on are twice the last."""
    high, step = 0, max(1, size // 100)
    while not high or high - low > 1:
        if size > low and fits(size):
            low = size
        elif size > low:
            high = size
        if high and low:
            size = (low + high) // 2
        else:
            size = max(1, size - step) if high else low + step
            step *= 2
    return low, high


def truth_row(tried, cap, start, known=()):
    """The row of a cap. `known` are tries that were made before, by size."""
    began, tries = time.perf_counter(), dict(known)

    def fits(samples):
        if samples not in tries:
            tries[samples] = tried.run(samples, cap)
        return tries[samples]["fits"]

    low, high = largest(fits, start)
    took = tries.get(low, {})
    return {
        "cap_bytes": cap,
        "size": low,
        "fails": high,
        **{name: took.get(name, 0) for name in ("peak_allocated", "peak_reserved")},
        "outside_bytes": tries[low or high]["outside_bytes"],
        "seconds": round(time.perf_counter() - began, 2),
        "tries": list(tries.values()),
    }


def work(name, way):
    """The child: imports, says so, and waits for its turn; prints a row at once."""
    import rebatch.torch  # noqa: F401
    from fit_parts.models import MODELS

    with torch.device("meta"):
        MODELS[name]("meta")  # which imports what the model needs
    print(json.dumps({"ready": name}), flush=True)
    turn = json.loads(sys.stdin.readline())
    tried = Tried(name, Process(way, turn["free_before"]), turn["trainer"])
    if turn["samples"]:  # a fresh process, whose cap is the card's free memory
        print(json.dumps(tried.run(turn["samples"])), flush=True)
        return
    small, found = small_sizes(tried), 1.0
    for cap in sorted(turn["starts"], key=int):
        line = predicted(small, int(cap))
        start = turn["starts"][cap] or max(1, int(line * found))
        row = truth_row(tried, int(cap), start)
        found = row["size"] / line or 1.0  # the allocator's fragmentation, alike at all caps
        print(json.dumps(row), flush=True)


class Child:
    """A process that measures one model in one way."""

    def __init__(self, name, way, module="truth", **environment):
        self.name, self.way = name, way
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self.process = subprocess.Popen(
            command(module, "work", name, way),
            text=True,
            env={**os.environ, **environment},
            **pipes,
        )
        self.said = []  # the last lines of its standard error
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        for line in self.process.stderr:
            self.said = [*self.said[-20:], line.rstrip()]

    def answers(self, free_before, trainer, samples=0, starts=()):
        """Gives the child its turn, and yields what it measures."""
        turn = dict(free_before=free_before, trainer=trainer, samples=samples, starts=dict(starts))
        if self._line() is not None:
            self.process.stdin.write(json.dumps(turn) + "\n")
            self.process.stdin.flush()
            while (row := self._line()) is not None:
                yield row
        self.process.wait()
        self.reader.join()
        if self.process.returncode:
            yield {"error": f"exit {self.process.returncode}: {' | '.join(self.said[-3:])}"}

    def go_on(self):
        """A child that waits for a second turn has it."""
        with contextlib.suppress(BrokenPipeError):  # killed
            self.process.stdin.write("\n")
            self.process.stdin.flush()

    @contextlib.contextmanager
    def killed_after(self, seconds):
        timer = threading.Timer(max(seconds, 0), self.process.kill)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _line(self):
        """The next object that the child prints; libraries print other lines."""
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        return None


class Results:
    """The file, written whole after each row."""

    def __init__(self, path):
        self.path, self.lock = pathlib.Path(path), threading.Lock()
        self.content = {"rows": [], "confirmed": []}
        if self.path.exists():
            self.content.update(json.loads(self.path.read_text()))
        for kind in ("rows", "confirmed"):  # what failed is tried again
            self.content[kind] = [row for row in self.content[kind] if "error" not in row]
        self.rows, self.confirmed = self.content["rows"], self.content["confirmed"]

    def describe(self, trainer):
        """Says what is measured on what. A file has the rows of one trainer."""
        import transformers

        if self.content.setdefault("trainer", trainer) != trainer:
            sys.exit(f"{self.path} has rows of --trainer {self.content['trainer']}, not {trainer}")

        free, total = torch.cuda.mem_get_info()
        self.content.update(
            card=torch.cuda.get_device_name(0),
            total_bytes=total,
            free_bytes=free,
            versions={
                "python": platform.python_version(),
                "torch": torch.__version__,
                "cuda": torch.version.cuda,
                "transformers": transformers.__version__,
            },
        )

    def add(self, rows, name, way, row):
        with self.lock:
            rows.append({"model": name, "way": way, **row})
            beside = self.path.with_suffix(".part")
            beside.write_text(json.dumps(self.content, indent=1))
            beside.replace(self.path)


def take_turns(jobs, ahead, deadline, make, run):
    """Runs the jobs one after the other; children of the next ones start and import meanwhile.
    What runs at the deadline is killed. Returns how many jobs were not run."""
    jobs, waiting = list(jobs), []
    while jobs or waiting:
        while jobs and len(waiting) < ahead:
            job = jobs.pop(0)
            waiting.append((job, make(job)))
        job, child = waiting.pop(0)
        left = deadline - time.monotonic()
        with child.killed_after(left):
            if left > 0:
                run(job, child)
        if time.monotonic() >= deadline:
            for _, late in [(job, child), *waiting]:
                late.process.kill()
                late.process.wait()
            return 1 + len(jobs) + len(waiting)
    return 0


def measure(results, given, starts, deadline):
    """Finds the rows that the file lacks."""
    done, jobs = {key_of(row) for row in results.rows}, []
    for way in given.ways:
        for name in given.models:
            caps = [cap for cap in given.caps if (name, way, cap) not in done]
            jobs += [(name, way, caps)] * bool(caps)
    free = torch.cuda.mem_get_info()[0]

    def run(job, child):
        name, way, caps = job
        began = time.monotonic()
        asked = {cap: starts.get((name, way, cap), 0) for cap in caps}
        for row in child.answers(free, given.trainer, starts=asked):
            results.add(results.rows, name, way, row)
        say(f"{name} {way}: {shown(results.rows, name, way)}, {time.monotonic() - began:.1f} s")

    return take_turns(jobs, given.ahead, deadline, lambda job: Child(*job[:2]), run)


def shown(rows, name, way):
    mine = [row for row in rows if (row["model"], row["way"]) == (name, way)]
    return " ".join(str(row.get("size", row.get("error"))) for row in mine)


def confirm(results, given, deadline):
    """Tries the two sizes around some results in fresh processes, with ballast on the card."""
    known = [row for row in results.rows if row.get("size") and row["model"] in given.models]
    random.Random(0).shuffle(known)
    done = {(*key_of(row), row["samples"]) for row in results.confirmed}
    jobs = [
        (row, row[kind], kind)
        for row in known[: given.confirm]
        for kind in ("size", "fails")
        if (*key_of(row), row[kind]) not in done
    ]

    def make(job):
        # Processes of the stand-in for CUDA do not share a card.
        return Child(job[0]["model"], job[0]["way"], STANDIN_MEMORY=str(job[0]["cap_bytes"]))

    def run(job, child):
        row, samples, kind = job
        ballast = hold_all_but(row["cap_bytes"])
        free = torch.cuda.mem_get_info()[0]
        for answer in child.answers(free, given.trainer, samples=samples):
            answer = {"cap_bytes": row["cap_bytes"], "free_before": free, **answer}
            answer["agrees"] = answer.get("fits") == (kind == "size")
            results.add(results.confirmed, child.name, child.way, answer)
            say(f"{child.name} {child.way}, {samples} samples: agrees: {answer['agrees']}")
        del ballast
        torch.cuda.empty_cache()

    return take_turns(jobs, given.ahead, deadline, make, run)


def hold_all_but(cap):
    """Memory of the card such that `cap` bytes are free."""
    torch.cuda.empty_cache()
    held = max(torch.cuda.mem_get_info()[0] - cap, 0)
    return torch.empty(held, dtype=torch.uint8, device="cuda")


def key_of(row):
    return row["model"], row["way"], row["cap_bytes"]


def say(text):
    print(text, file=sys.stderr, flush=True)


def read_starts(path):
    if not path:
        return {}
    rows = json.loads(pathlib.Path(path).read_text())["rows"]
    return {key_of(row): row["size"] for row in rows if row.get("size")}


def chosen(text):
    """Names of models: a list, or "tried", "held-out" or "all"."""
    from fit_parts.models import HELD_OUT, MODELS

    tried = [name for name in MODELS if name not in HELD_OUT]
    groups = {"tried": tried, "held-out": HELD_OUT, "all": list(MODELS)}
    names = groups.get(text) or text.split(",")
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no model is named {unknown[0]!r}")
    return names


def parse(arguments):
    parser = argparse.ArgumentParser(
        prog="fit.py truth", description="Finds the largest micro-batches on a GPU."
    )
    parser.add_argument("--output", default="truth.json")
    parser.add_argument("--models", type=chosen, default="tried", help="a,b, held-out or all")
    parser.add_argument("--ways", type=lambda text: text.split(","), default=",".join(WAYS))
    parser.add_argument(
        "--caps",
        type=lambda text: [int(float(part) * GIB) for part in text.split(",")],
        default=",".join(map(str, CAPS)),
        help="in GiB",
    )
    parser.add_argument("--seconds", type=float, default=480, help="for all; default: 480")
    parser.add_argument("--start", help="a file with sizes to begin at")
    parser.add_argument("--trainer", choices=("plain", "step"), default="plain")
    parser.add_argument("--ahead", type=int, default=6, help="processes that import meanwhile")
    parser.add_argument("--confirm", type=int, default=4, help="rows tried in fresh processes")
    return parser.parse_args(arguments)


def truth(arguments):
    given = parse(arguments)
    deadline = time.monotonic() + given.seconds
    results = Results(given.output)
    results.describe(given.trainer)
    left = measure(results, given, read_starts(given.start), deadline)
    left += confirm(results, given, deadline) if not left else 0
    say(f"{left} processes were left out: no time" if left else "all is measured")

"""GPT-2 124M in PyTorch that others ask for memory. Prints one JSON object a scenario.

    python3 bench/yield.py half     # asked for half of what it holds, and woken
    python3 bench/yield.py three    # three trainings on one card, the third comes and goes

`half` has the milliseconds until the memory is free, the updates lost, and tokens a second with the
bound / those of a training whose limit is that from its start. `three` has tokens a second of all /
those of one alone, of two, of three and of two again; and those of three plain loops that begin
with a quarter of the batch as micro-batch, all at once and without rebatch: what a card loses that
three processes share. Needs the package rebatch and a GPU."""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import rebatch

COMMAND = str(pathlib.Path(rebatch.__file__).parent / "rebatch")


def recovered(size, folder, limit):
    import rebatch.torch as rebatch_torch
    from pytorch import Training

    options = dict(growth=True, grow_after=2, micro_start=0, log_level="quiet")
    training = Training("install+Step", size, limit=limit, **options)
    rebatch_torch.yield_to(folder / "socket")
    return training


def plain(size):
    from pytorch import Training

    return Training("native", size, micro=size["batch"] // 4)


def train(training, size, folder):
    """Until it or who started it ends. A line of `steps`: time, whether all counted, tokens."""
    batch, tokens = training.batch(), size["batch"] * size["model"][2]
    number, starter = 0, os.getppid()
    with open(folder / "steps", "w") as steps:
        while os.getppid() == starter:
            training.run(batch)
            did = getattr(training, "step", None)
            is_whole = not did or (did.report.samples, did.report.step) == (size["batch"], number)
            print(time.time(), int(is_whole), tokens, file=steps, flush=True)
            number += 1


class Child:
    """A training in a process of its own, which has begun."""

    def __init__(self, arguments, limit=0, plain=False):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="rebatch-bench-"))
        command = [sys.executable, __file__, "train", "--folder", self.folder, "--limit", limit]
        command += ["--small"] * arguments.small + ["--plain"] * plain
        self.process = subprocess.Popen([str(word) for word in command])
        while len(self.steps()) < 4:
            if self.process.poll() is not None:
                sys.exit(f"a training with the limit {limit} has ended")
            time.sleep(0.1)

    def steps(self):
        path = self.folder / "steps"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [tuple(map(float, line.split())) for line in lines]

    def ask(self, request):
        command = [COMMAND, "ask", str(self.folder / "socket"), *request.split()]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.stdout.strip() or done.stderr.strip()

    def status(self, name="held_bytes"):
        return json.loads(self.ask("status"))[name]

    def end(self):
        self.process.kill()
        self.process.wait()


def speed(children, seconds):
    """Tokens a second of all, from now on."""
    began = time.time()
    time.sleep(seconds)
    steps = [step for child in children for step in child.steps()]
    return sum(tokens for when, _, tokens in steps if when > began) / (time.time() - began)


def half(arguments):
    child = Child(arguments)
    held = child.status()
    began = time.perf_counter()
    answer = child.ask(f"give {held // 2}")
    ms = (time.perf_counter() - began) * 1e3
    bound = child.status("bound_bytes")
    asked = speed([child], arguments.seconds)
    woken = child.ask("wake")
    time.sleep(arguments.seconds)
    after = child.status()
    steps = child.steps()
    child.end()
    chosen = Child(arguments, limit=bound)
    by_choice = speed([chosen], arguments.seconds)
    chosen.end()
    return dict(
        held_bytes=held, bound_bytes=bound, woken_bytes=after, ms=round(ms, 1),
        lost=sum(not is_whole for _, is_whole, _ in steps), steps=len(steps),
        tokens_per_second=round(asked), part_of_choice=round(asked / by_choice, 3),
        answers=[answer, woken],
    )  # fmt: skip


def three(arguments):
    children = [Child(arguments)]
    alone = speed(children, arguments.seconds)
    held = children[0].status()
    answers = [children[0].ask(f"give to {held // 2}")]
    children.append(Child(arguments, limit=held // 2))
    parts = [speed(children, arguments.seconds)]
    answers += [child.ask(f"give to {held // 3}") for child in children]
    third = Child(arguments, limit=held // 3)
    parts.append(speed([*children, third], arguments.seconds))
    third.end()
    answers += [child.ask("wake") for child in children]
    answers += [children[0].ask(f"give to {held // 2}")]
    parts.append(speed(children, arguments.seconds))
    ended = [child.process.poll() for child in children]
    lost = sum(not is_whole for child in children for _, is_whole, _ in child.steps())
    for child in children:
        child.end()
    children = [Child(arguments, plain=True) for _ in range(3)]
    plain_loops = round(speed(children, arguments.seconds) / alone, 3)
    for child in children:
        child.end()
    parts = [round(part / alone, 3) for part in parts]
    return dict(parts=parts, plain=plain_loops, lost=lost, ended=ended, answers=answers)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scenario", choices=["half", "three", "train"])
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the program")
    parser.add_argument("--seconds", type=float, default=20, help="of each measurement")
    parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    size = dict(model=(768, 12, 1024, 50304), batch=64)
    if arguments.small:
        size = dict(model=(128, 2, 64, 512), batch=96)
    if arguments.scenario == "train":
        folder = arguments.folder
        is_plain, limit = arguments.plain, arguments.limit
        train(plain(size) if is_plain else recovered(size, folder, limit), size, folder)
    result = {"half": half, "three": three}[arguments.scenario](arguments)
    print(json.dumps({"scenario": arguments.scenario, **result}))


if __name__ == "__main__":
    main()

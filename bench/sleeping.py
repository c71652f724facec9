"""GPT-2 124M in PyTorch that sleeps between its steps. Prints one JSON object a scenario.

    python3 bench/sleeping.py cycles    # 200 sleeps and wakes, and the same training without
    python3 bench/sleeping.py less      # a wake with 15 GiB less than before

`cycles` has memory reserved / in use in the last step, and whether weights, moments and losses have
the bits of the training without. `less` has the samples of a micro-batch before the sleep, beside a
neighbour that took 15 GiB, and after it went, and the steps that this took. Needs the package
rebatch and a GPU."""

import argparse
import hashlib
import json
import os
import subprocess
import sys

import torch

import rebatch.torch as rebatch
from pytorch import GIB, Training

CYCLES = 200
NEIGHBOUR = """import sys, torch
x = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device="cuda")
print("has it", flush=True)
sys.stdin.read()"""


def size_of(arguments, batch):
    if arguments.small:
        return dict(model=(128, 2, 64, 512), batch=96)
    return dict(model=(768, 12, 1024, 50304), batch=batch)


def train(arguments):
    """So many steps, each followed by a sleep and a wake or not."""
    torch.use_deterministic_algorithms(True)
    training = Training("install+Step", size_of(arguments, 16), log_level="quiet")
    model, optimizer, batch = training.model, training.optimizer, training.batch()
    digest = hashlib.sha256()
    for _ in range(arguments.steps):
        torch.cuda.reset_peak_memory_stats()
        digest.update(str(training.step(batch)).encode())
        ratio = torch.cuda.max_memory_reserved() / torch.cuda.max_memory_allocated()
        if arguments.sleeps:
            rebatch.sleep()
            rebatch.wake()
    moments = [t for state in optimizer.state.values() for t in state.values()]
    for tensor in [*model.parameters(), *moments]:
        digest.update(tensor.detach().cpu().numpy().tobytes())
    return dict(ratio=round(ratio, 3), digest=digest.hexdigest())


def cycles(arguments):
    found = []
    for sleeps in ((), ("--sleeps",)):
        command = [sys.executable, __file__, "train", "--steps", str(arguments.steps), *sleeps]
        command += ["--small"] * arguments.small
        environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
        found.append(json.loads(done.stdout))
    plain, slept = found
    return dict(cycles=arguments.steps, ratio=slept["ratio"], without_sleep=plain["ratio"],
                same_bits=plain["digest"] == slept["digest"])  # fmt: skip


def less(arguments):
    options = dict(growth=True, grow_after=2, micro_start=0, log_level="quiet")
    training = Training("install+Step", size_of(arguments, 64), **options)
    step, batch = training.step, training.batch()
    sizes, reports = [], []

    def run(count, until=lambda: False):
        first = len(reports)
        for _ in range(count):
            step(batch)
            reports.append(step.report)
            if until():
                break
        sizes.append(step.report.micro)
        return len(reports) - first

    run(5)
    held = torch.cuda.memory_reserved()
    slept = rebatch.sleep()
    free = torch.cuda.mem_get_info()[0]
    missing = held // 2 if arguments.small else 15 * GIB
    taken = free - held + missing
    command = [sys.executable, "-c", NEIGHBOUR, str(taken)]
    neighbour = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert neighbour.stdout.readline(), "the neighbour does not get its memory"
    rebatch.wake()
    run(5)
    neighbour.communicate()
    steps = run(100, lambda: step.report.micro == sizes[0])
    lost = sum(report.samples != training.size["batch"] for report in reports)
    return dict(held_bytes=held, released_bytes=slept["released_bytes"], missing_bytes=missing,
                micro=sizes, steps_until_back=steps, lost=lost)  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scenario", choices=["cycles", "less", "train"])
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the program")
    parser.add_argument("--steps", type=int, default=CYCLES, help="of a training that sleeps")
    parser.add_argument("--sleeps", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    result = {"cycles": cycles, "less": less, "train": train}[arguments.scenario](arguments)
    print(json.dumps({"scenario": arguments.scenario, **result}))


if __name__ == "__main__":
    main()

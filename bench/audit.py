"""The host's time for the audit of a Step: what it takes note of before each attempt. Prints one
JSON object for each model: microseconds of the thread's CPU time, medians of several rounds.

    python3 bench/audit.py

Needs the package rebatch, and no GPU: tensors are on the host, and only their versions are read."""

import copy
import json
import statistics
import sys
import time

import torch
from torch import nn

from pytorch import Gpt
from rebatch._library import GuardPoint
from rebatch.torch._audit import Audit
from rebatch.torch._state import Generators

ROUNDS, CALLS = 7, 50


class WithTarget(nn.Module):
    """A network and a frozen copy that moves in every micro-batch."""

    def __init__(self, net):
        super().__init__()
        self.net = net
        self.target = copy.deepcopy(net).requires_grad_(False)

    @torch.no_grad()
    def move(self):
        for old in self.target.parameters():
            old.mul_(1)


MODELS = {
    "GPT-2 124M": lambda: Gpt(768, 12, 1024, 50304),
    "12 layers of width 64 and a target that moves": lambda: WithTarget(Gpt(64, 12, 64, 512)),
}


def median_us(body, between=lambda: None):
    """The median over rounds of the mean over calls."""
    rounds = []
    for _ in range(ROUNDS):
        spent = 0.0
        for _ in range(CALLS):
            between()
            began = time.thread_time()
            body()
            spent += time.thread_time() - began
        rounds.append(1e6 * spent / CALLS)
    return round(statistics.median(rounds), 1)


def measure(name):
    model = MODELS[name]()
    batch = (torch.zeros(64, 16), torch.zeros(64, 16))
    audit, generators = Audit([("", model)]), Generators(())
    change = getattr(model, "move", lambda: None)
    began = time.thread_time()
    audit.begin(batch)
    audit.save(GuardPoint.STEP)
    audit.save(GuardPoint.ATTEMPT)
    change()
    audit.save(GuardPoint.ATTEMPT)  # what changes is known from here on
    first = 1e3 * (time.thread_time() - began)
    audit.end()

    def begin():
        audit.begin(batch)
        audit.save(GuardPoint.STEP)
        audit.end()

    begin_us = median_us(begin)
    audit.begin(batch)
    audit.save(GuardPoint.ATTEMPT)
    return {
        "model": name,
        "parameters": len(list(model.parameters())),
        "modules": len(audit.tree.modules),
        "step_us": begin_us,
        "microbatch_us": median_us(lambda: audit.save(GuardPoint.ATTEMPT), change),
        "generators_us": median_us(lambda: generators.save(GuardPoint.ATTEMPT)),
        "first_step_ms": round(first, 1),
    }


def main():
    torch.set_num_threads(1)
    for name in MODELS:
        print(json.dumps(measure(name)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Updates by answers of all lengths (examples/python/token_budget.py) with a GPT of 86M in bf16, in
limited memory: a fixed count of answers at a time, in their order, as many as fit if all are as
long as the longest allowed; sorted by length, in a loop whose sampler reads a rebatch.Budget; and
in a Step by `cost` and `learn`. Prints one JSON object a way.

    python3 bench/budget.py --limit 8GiB

Needs a GPU and the package rebatch; docs/benchmarks.md has the results."""

import argparse
import json
import pathlib
import sys
import time

import torch

import rebatch.torch as rebatch
from pytorch import Gpt

sys.path.append(str(pathlib.Path(__file__).parents[1] / "examples/python"))
from token_budget import LONGEST, Answers, Loss, padded_tokens, part_of, sampled

ANSWERS, SETTLED = 256, 3


padded = []  # how many tokens each micro-batch had


def counted_part(answers, first, count):
    part = part_of(answers, first, count)
    padded.append(part.tokens.numel())
    return part


class LossInBfloat16(Loss):
    def __call__(self, model, part):
        with torch.autocast(part.tokens.device.type, torch.bfloat16):
            return super().__call__(model, part)


def in_any_order(answers, step):
    order = torch.randperm(len(answers.lengths), generator=torch.Generator().manual_seed(step))
    rows = order.to(answers.tokens.device)
    lengths = [answers.lengths[i] for i in order.tolist()]
    return Answers(answers.tokens[rows], lengths, answers.advantages[rows], answers.old[rows])


def normalizer(answers):
    return sum(answers.lengths) - len(answers.lengths)


def by_count(model, optimizer, loss_fn, count):
    def update(answers):
        total = normalizer(answers)
        for first in range(0, len(answers.lengths), count):
            part = counted_part(answers, first, min(count, len(answers.lengths) - first))
            (loss_fn(model, part) / total).backward()
        optimizer.step()
        optimizer.zero_grad()

    return update


def by_budget(model, optimizer, loss_fn, budget):
    """Sorted by length, as many as the budget allows; what runs out of memory is cut in two."""

    def run(answers, first, count):
        part = counted_part(answers, first, count)
        try:
            with budget.measure(part.tokens.numel(), part.tokens.shape[1]):
                (loss_fn(model, part) / normalizer(answers)).backward()
        except torch.OutOfMemoryError:  # gradients of a part of it may stay: this measures time
            if count == 1:
                raise
            run(answers, first, count // 2), run(answers, first + count // 2, count - count // 2)

    def update(answers):
        first, number = 0, len(answers.lengths)
        while first < number:
            count = 1
            while first + count < number and (
                padded_tokens(answers, first, count + 1)
                <= budget.tokens_for(max(answers.lengths[first : first + count + 1]))
            ):
                count += 1
            run(answers, first, count)
            first += count
        optimizer.step()
        optimizer.zero_grad()

    return update


def all_long(count, device):
    return Answers(
        torch.ones(count, LONGEST, dtype=torch.long, device=device),
        [LONGEST] * count,
        torch.ones(count, device=device),
        torch.zeros(count, LONGEST - 1, device=device),
    )


def with_largest_count(model, optimizer, loss_fn, batches):
    """What is measured with as many answers at a time as run, also if all are as long as the
    longest allowed: found by hand, an OOM for each try."""
    count, device = ANSWERS, batches[0].tokens.device
    while count:
        update = by_count(model, optimizer, loss_fn, count)
        try:
            update(all_long(count, device))
            return measured("fixed count", update, batches, count=count)
        except torch.OutOfMemoryError:
            optimizer.zero_grad()
        count -= max(1, count // 16)
    raise SystemExit("budget: one answer does not fit")


def measured(name, update, batches, **others):
    for answers in batches[:SETTLED]:
        update(answers)
    torch.cuda.synchronize()
    padded.clear()
    real, began = 0, time.perf_counter()
    for answers in batches[SETTLED:]:
        update(answers)
        real += sum(answers.lengths)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    padding = round(1 - real / sum(padded), 3)
    return {"way": name, "tokens/s": round(real / seconds), "padding": padding, **others}


def main():
    parser = argparse.ArgumentParser(description="Tokens a second with a budget and without.")
    parser.add_argument("--limit", default="8GiB")
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--width", type=int, default=768)
    given = parser.parse_args()
    rebatch.install(limit=given.limit)
    torch.manual_seed(0)
    device, loss_fn = torch.device("cuda"), LossInBfloat16(0)
    model = Gpt(given.width, 12, LONGEST, 512).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)
    batches = [sampled(ANSWERS, device) for _ in range(SETTLED + given.updates)]
    mixed = [in_any_order(answers, step) for step, answers in enumerate(batches)]
    print(json.dumps(with_largest_count(model, optimizer, loss_fn, mixed)), flush=True)
    budget = rebatch.Budget(model, optimizer, log_level="quiet")
    found = measured("Budget", by_budget(model, optimizer, loss_fn, budget), batches)
    print(json.dumps({**found, "ooms": budget.ooms}), flush=True)
    step = rebatch.Step(
        model,
        optimizer,
        loss_fn,
        normalizer=normalizer,
        cost=padded_tokens,
        slice=counted_part,
        length=lambda answers: len(answers.lengths),
        learn=True,
        log_level="quiet",
    )
    found = measured("cost, learn", step, batches)
    print(json.dumps({**found, "budget": step.report.budget, "ooms": step.report.ooms}))


if __name__ == "__main__":
    main()

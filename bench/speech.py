"""Speech of all lengths with a model of Whisper-tiny's shape, in limited memory: micro-batches of a
fixed count, as many as fit if all are as long as the longest; and those of a sampler with buckets
that reads a rebatch.Budget, by class of length. Lengths are as in LibriSpeech: log-normal, of 1 to
35 s. Prints one JSON object a way.

    python3 bench/speech.py --limit 8GiB

On a GPU with the package rebatch. `--cpu` runs a small model with budgets that stay as they are,
which shows that the program works and nothing else."""

import argparse
import json
import math
import random
import time

import torch
from torch import nn

import rebatch.torch as rebatch

LONGEST, SETTLED = 35, 0.25  # seconds; the part of the time before samples are counted


class Encoder(nn.Module):
    """100 frames of 80 a second, halved by a convolution; letters by CTC."""

    def __init__(self, width, heads, layers):
        super().__init__()
        self.convolution = nn.Sequential(
            nn.Conv1d(80, width, 3, padding=1), nn.GELU(), nn.Conv1d(width, width, 3, 2, 1)
        )
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.letters = nn.Linear(width, 32)

    def forward(self, features):
        hidden = self.convolution(features).transpose(1, 2)
        return self.letters(self.layers(hidden)).log_softmax(-1)


def loss_of(model, features):
    scores = model(features).float()
    count, positions = scores.shape[:2]
    letters = torch.ones(count, positions // 8, dtype=torch.long, device=features.device)
    sizes = [torch.full((count,), n) for n in (positions, letters.shape[1])]
    return nn.functional.ctc_loss(scores.transpose(0, 1), letters, *sizes)


def lengths(seed):
    generator = random.Random(seed)
    while True:
        seconds = generator.lognormvariate(2.45, 0.45)
        if 1 <= seconds <= LONGEST:
            yield seconds


def by_count(count):
    part = []
    for length in lengths(0):
        part.append(length)
        if len(part) == count:
            yield part
            part = []


def by_budget(budget):
    """Of buckets an eighth of an octave wide."""
    buckets = {}
    for length in lengths(0):
        bucket = buckets.setdefault(math.ceil(8 * math.log2(length)), [])
        longest = max([*bucket, length])
        if bucket and (len(bucket) + 1) * longest > budget.tokens_for(longest):
            yield list(bucket)
            bucket.clear()
        bucket.append(length)


class Training:
    def __init__(self, device, width, heads, layers):
        torch.manual_seed(0)
        self.device = device
        self.model = Encoder(width, heads, layers).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)
        self.budget = rebatch.Budget(self.model, self.optimizer)

    def run(self, part):
        longest = max(part)
        features = torch.zeros(len(part), 80, int(longest * 100), device=self.device)
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = loss_of(self.model, features)
        loss.backward()

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def measured(self, way, parts, seconds, **others):
        """Each micro-batch is an update."""
        samples, skipped, settled = 0, 0, False
        began = time.perf_counter()
        for part in parts:
            spent = time.perf_counter() - began
            if settled and spent > (1 - SETTLED) * seconds:
                break
            if not settled and spent > SETTLED * seconds:
                self.wait()
                samples, began, settled = 0, time.perf_counter(), True
            try:
                with self.budget.measure(len(part) * max(part), max(part)):
                    self.run(part)
            except torch.OutOfMemoryError:
                self.optimizer.zero_grad()
                skipped += 1
                continue
            self.update()
            samples += len(part)
        self.wait()
        rate = samples / (time.perf_counter() - began)
        found = {"way": way, "samples/s": round(rate, 1), "OOMs": skipped, **others}
        print(json.dumps(found), flush=True)

    def wait(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def largest_count(self, most):
        """Found by hand, an OOM for each try."""
        count = most
        while count:
            try:
                self.run([LONGEST] * count)
                self.update()
                return count
            except torch.OutOfMemoryError:
                self.optimizer.zero_grad()
            count -= max(1, count // 16)
        raise SystemExit("speech: one sample does not fit")


def main():
    parser = argparse.ArgumentParser(description="Samples a second, found and fixed.")
    parser.add_argument("--limit", default="8GiB")
    parser.add_argument("--seconds", type=float, default=40, help="of each way")
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args()
    if given.cpu:
        shape, most, seconds = (torch.device("cpu"), 16, 2, 1), 2, 2
    else:
        rebatch.install(limit=given.limit)
        shape, most, seconds = (torch.device("cuda"), 384, 6, 4), 512, given.seconds
    fixed = Training(*shape)
    count = fixed.largest_count(most)
    fixed.measured("fixed count", by_count(count), seconds, count=count)
    del fixed
    found = Training(*shape)
    found.measured("budget by length", by_budget(found.budget), seconds)


if __name__ == "__main__":
    main()

"""rebatch.Budget by the figures of PyTorch's allocator and of rebatch's pool: speech of all lengths
under a limit, with the memory law of a small Whisper."""

import math
import random

import pytest
import torch

import rebatch.torch as rebatch
from conftest import INSTALLED, assert_passes_installed
from rebatch.torch import budget as budget_module

GIB = 1 << 30
LIMIT = 6 * GIB
LAYERS, HEADS, WIDTH = 4, 6, 384


def test_the_same_on_rebatchs_pool():
    if not INSTALLED:
        assert_passes_installed(__file__)


@pytest.fixture
def limit():
    """Memory that the allocator may have; may be set again."""
    total = torch.cuda.mem_get_info()[1]

    def set_limit(size):
        if INSTALLED:
            rebatch.install(limit=size)
        else:
            torch.cuda.set_per_process_memory_fraction(size / total)

    set_limit(LIMIT)
    yield set_limit
    set_limit(total)


class Speech:
    """A model of which only the memory is there: gradients, and activations of `count` samples."""

    def __init__(self):
        self.model = torch.nn.ModuleList(torch.nn.Linear(1024, 1024) for _ in range(16)).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def sizes(self, count, frames):
        positions = frames // 2
        of_attention = count * HEADS * positions**2 * 4
        of_layer = [count * positions * WIDTH * 34, of_attention, count * positions * WIDTH * 8]
        return [count * frames * 80 * 4, *of_layer * LAYERS]

    def forward_backward(self, count, frames):
        sizes = self.sizes(count, frames)
        kept = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
        kept.pop()  # before the first gradient
        for p in self.model.parameters():
            p.grad = torch.empty_like(p) if p.grad is None else p.grad

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def best_for(self, frames):
        """The largest budget that fits, by what is allocated."""
        free = LIMIT - 4 * sum(p.nbytes for p in self.model.parameters())
        return free * frames // sum(self.sizes(1, frames))


def lengths():
    """Of LibriSpeech, in frames: log-normal, of 1 to 35 s."""
    generator = random.Random(7)
    while True:
        seconds = generator.lognormvariate(2.45, 0.45)
        if 1 <= seconds <= 35:
            yield int(seconds * 100)


def micro_batches(tokens_for):
    """Of a sampler with a bucket for each class of lengths."""
    buckets = {}
    for length in lengths():
        bucket = buckets.setdefault(budget_module._class_of(length), [])
        longest = max([*bucket, length])
        if bucket and (len(bucket) + 1) * longest > tokens_for(longest):
            yield len(bucket), max(bucket)
            bucket.clear()
        bucket.append(length)


def packed(speech, budget, tokens_for, number):
    """Samples in so many micro-batches, two to an update."""
    samples = done = 0
    for count, longest in micro_batches(tokens_for):
        try:
            with budget.measure(count * longest, longest):
                speech.forward_backward(count, longest)
        except torch.OutOfMemoryError:
            speech.optimizer.zero_grad()
            continue
        samples, done = samples + count, done + 1
        if done % 2 == 0:
            speech.update()
        if done == number:
            return samples


def test_lengths_within_a_class_are_bounded_by_its_longest(limit):
    """Memory is cost times length, so samples of one class differ by up to 9 %."""
    layer = torch.nn.Linear(64, 64, device="cuda")
    budget = rebatch.Budget(layer, torch.optim.AdamW(layer.parameters()), start=64)
    generator = random.Random(0)
    for _ in range(500):
        longest = min(35.0, max(1.0, generator.lognormvariate(2.3, 0.6)))
        cost = int(budget.tokens_for(longest))
        try:
            with budget.measure(cost, longest):
                kept = torch.empty(int(cost * longest) << 14, dtype=torch.uint8, device="cuda")
                del kept
        except torch.OutOfMemoryError:
            pass
    assert budget.ooms == 0


def test_speech_is_packed_as_by_the_best_budgets(limit):
    if not INSTALLED:
        pytest.skip("memory in pieces, which the best budgets do not know")
    number, speech = 750, Speech()
    budget = rebatch.Budget(speech.model, speech.optimizer, log_level="quiet")
    packed(speech, budget, budget.tokens_for, 250)  # the classes are found
    found = packed(speech, budget, budget.tokens_for, number)
    best, count = 0, 0
    for samples, _ in micro_batches(speech.best_for):
        best, count = best + samples, count + 1
        if count == number:
            break
    assert budget.ooms <= 1
    assert 0.97 <= found / best <= 1
    fixed = speech.best_for(3500) // 3500  # as many as fit, were all as long as the longest
    assert found / number > 3 * fixed


def test_memory_in_pieces_is_kept_out_of_the_budget(limit):
    """Without an end to OOMs a budget that is right by the bytes would strike again and again."""
    speech, ooms = Speech(), []
    budget = rebatch.Budget(speech.model, speech.optimizer, log_level="quiet")
    for _ in range(3):
        packed(speech, budget, budget.tokens_for, 400)
        ooms.append(budget.ooms - sum(ooms))
    assert ooms[1] + ooms[2] <= ooms[0] or sum(ooms) <= 1
    assert max(ooms[1:]) <= 400 // 80


def test_the_first_step_of_the_optimizer_finds_its_memory(limit):
    """Micro-batches grow to what fits before the first update."""
    speech = Speech()
    budget = rebatch.Budget(speech.model, speech.optimizer)
    for _ in range(24):
        count = max(1, budget.tokens_for(1000) // 1000)
        with budget.measure(count * 1000, 1000):
            speech.forward_backward(count, 1000)
    free = speech.best_for(1000)
    assert 0.9 * free <= budget.tokens_for(1000) <= free
    speech.update()
    if INSTALLED:  # else the moments lie between the blocks that were cached
        with budget.measure(count * 1000, 1000):
            speech.forward_backward(count, 1000)
    assert budget.ooms == 0


def test_a_limit_that_is_lowered_lowers_the_budget_before_an_oom(limit):
    speech = Speech()
    budget = rebatch.Budget(speech.model, speech.optimizer)
    for _ in range(24):
        count = max(1, budget.tokens_for(1000) // 1000)
        with budget.measure(count * 1000, 1000):
            speech.forward_backward(count, 1000)
    before = budget.tokens_for(1000)
    limit(LIMIT // 2)
    with budget.measure(1000, 1000):
        speech.forward_backward(1, 1000)
    assert 0.4 * before <= budget.tokens_for(1000) <= 0.5 * before
    count = budget.tokens_for(1000) // 1000
    with budget.measure(count * 1000, 1000):
        speech.forward_backward(count, 1000)
    assert budget.ooms == 0


def test_after_an_oom_nothing_of_the_block_is_held(limit):
    speech = Speech()
    budget = rebatch.Budget(speech.model, log_level="quiet")
    live = torch.cuda.memory_allocated() if not INSTALLED else rebatch.stats()["live_bytes"]
    activations = None
    with pytest.raises(torch.OutOfMemoryError), budget.measure(10):
        activations = [torch.empty(GIB, dtype=torch.uint8, device="cuda") for _ in range(8)]
    assert activations is None and budget.ooms == 1
    held = torch.cuda.memory_allocated() if not INSTALLED else rebatch.stats()["live_bytes"]
    assert held == live
    assert math.isclose(torch.cuda.memory_reserved(), torch.cuda.memory_allocated(), abs_tol=64e6)

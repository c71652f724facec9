"""rebatch.Budget: the most cost of the next micro-batch, on a device whose memory is counted by the
test, and on a CPU, whose memory is not."""

import contextlib
import copy
import datetime
import json
import math
import pathlib
import random
import re
import subprocess
import warnings

import numpy
import pytest
import torch

import rebatch.torch as rebatch
from rebatch.testing import fail_once
from rebatch.torch import budget as budget_module
from rebatch.torch.session import cost_memory

GIB, MIB = 1 << 30, 1 << 20


class Device:
    """Memory of a device, and what a micro-batch needs of it."""

    are_known = True

    def __init__(self, capacity=8 * GIB, live=GIB):
        self.capacity, self.live, self.peak, self.ooms = capacity, live, live, 0

    def begin(self):
        self.peak = self.live

    def read(self):
        pass

    def available(self):
        return self.capacity - self.live

    def take(self, size):
        if self.live + size > self.capacity:
            self.ooms += 1
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size / GIB:.4f} GiB."
            )
        self.peak = max(self.peak, self.live + size)


@pytest.fixture
def device(monkeypatch):
    made = Device()
    monkeypatch.setattr(cost_memory, "figures_of", lambda _device: made)
    return made


def small():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 1)


def run(budget, device, cost, need, longest=None):
    """A micro-batch: whether it ran."""
    try:
        with budget.measure(cost, longest):
            device.take(need)
    except torch.OutOfMemoryError:
        return False
    return True


def line(cost):
    return 200 * MIB + cost * MIB


def test_the_budget_becomes_what_fits_without_an_oom(device):
    budget = rebatch.Budget(small(), start=10)
    assert budget.tokens == 10
    for _ in range(16):
        assert run(budget, device, budget.tokens, line(budget.tokens))
    most = 7 * 1024 - 200
    assert 0.97 * most <= budget.tokens <= most
    assert budget.ooms == 0 and budget.microbatches == 16


def test_an_oom_lowers_it_before_the_handler_runs_and_passes_on(device):
    budget = rebatch.Budget(small(), start=10)
    for _ in range(16):
        run(budget, device, budget.tokens, line(budget.tokens))
    before, activations, tries = budget.tokens, None, 0
    with pytest.raises(torch.OutOfMemoryError) as failure:
        with budget.measure(before):
            activations, tries = torch.zeros(4000), 1
            device.take(2 * line(before))
    assert budget.tokens < before and budget.ooms == 1
    assert activations is None and tries == 0
    assert "device.take" in str(failure.traceback[-1].statement), "no frame below the block"


def test_larger_micro_batches_that_were_cut_before_do_not_lower_it_again(device):
    budget = rebatch.Budget(small(), start=10)
    for _ in range(16):
        run(budget, device, budget.tokens, line(budget.tokens))
    read_early = [budget.tokens] * 6
    device.live += 2 * GIB  # somebody else has it
    assert not run(budget, device, read_early.pop(), line(read_early[0]))
    lowered = budget.tokens
    assert 0.8 * (5 * 1024 - 200) < lowered <= 5 * 1024 - 200
    for cost in read_early:
        assert not run(budget, device, cost, line(cost))
    assert budget.tokens == lowered and budget.ooms == 6


def test_it_follows_a_limit_down_and_up(device):
    budget = rebatch.Budget(small(), start=10)
    for _ in range(16):
        run(budget, device, budget.tokens, line(budget.tokens))
    before, device.capacity = budget.tokens, 4 * GIB
    run(budget, device, 100, line(100))
    assert 0.97 * (3 * 1024 - 200) <= budget.tokens <= 3 * 1024 - 200
    device.capacity = 8 * GIB
    for _ in range(64):
        assert run(budget, device, budget.tokens, line(budget.tokens))
    assert budget.tokens == before and budget.ooms == 0


def attention(count, length):
    """Of samples of that length: a part by the length, and one by its square."""
    return 100 * MIB + count * int(length * 30_000 + length * length * 60)


def samples(seed):
    """Lengths as LibriSpeech has them, in frames: log-normal, of 1 to 35 s."""
    generator = random.Random(seed)
    while True:
        seconds = generator.lognormvariate(2.45, 0.45)
        if 1 <= seconds <= 35:
            yield int(seconds * 100)


def micro_batches(lengths, tokens_for, prefetched=0):
    """Of a sampler that has a bucket for each class of lengths, and reads the budget early."""
    buckets, queue = {}, []
    for length in lengths:
        bucket = buckets.setdefault(int(8 * math.log2(length)), [])
        longest = max([*bucket, length])
        if bucket and (len(bucket) + 1) * longest > tokens_for(longest):
            queue.append(list(bucket))
            bucket.clear()
        bucket.append(length)
        if len(queue) > prefetched:
            yield queue.pop(0)


def found_by(device, tokens_for, budget, number, prefetched=0):
    """Samples in the micro-batches after `number` of them, and those of half as many before."""
    counts = []
    for part in micro_batches(samples(0), tokens_for, prefetched):
        longest = max(part)
        if run(budget, device, len(part) * longest, attention(len(part), longest), longest):
            counts.append(len(part))
        if len(counts) == number:
            return sum(counts)


def best_for(longest):
    return (7 * GIB - 100 * MIB) * longest // (attention(1, longest) - 100 * MIB)


@pytest.mark.parametrize("prefetched", [0, 8])
def test_classes_of_length_have_what_a_search_would_have_found(device, prefetched):
    budget = rebatch.Budget(small(), log_level="quiet")
    number = 3000
    found = found_by(device, budget.tokens_for, budget, number, prefetched)
    ooms = budget.ooms
    best = found_by(device, best_for, rebatch.Budget(small(), log_level="quiet"), number)
    assert ooms <= 1
    assert (0.95 if prefetched else 0.97) <= found / best <= 1
    for seconds in (6, 12, 20, 30):
        longest = int(budget_module._end_of(budget_module._class_of(seconds * 100)))
        assert 0.97 <= budget.tokens_for(longest) / best_for(longest) <= 1


def test_a_length_that_has_not_run_has_what_others_show(device):
    budget = rebatch.Budget(small(), start=50)
    assert budget.tokens_for(1000) == 50
    for _ in range(12):
        cost = budget.tokens_for(1000)
        assert run(budget, device, cost, attention(cost // 1000 + 1, 1000), 1000)
    known = budget.tokens_for(1000)
    assert budget.tokens_for(500) == known
    assert 0.45 * known <= budget.tokens_for(2000) <= 0.5 * known
    assert budget.tokens == 50


def test_memory_for_the_optimizers_first_step_is_kept_free(device):
    model = torch.nn.Linear(1024, 65536)  # 256 MiB
    optimizer = torch.optim.AdamW(model.parameters())
    budget = rebatch.Budget(model, optimizer, start=10)
    for _ in range(16):
        run(budget, device, budget.tokens, line(budget.tokens))
    most = 7 * 1024 - 200 - 2 * 256
    assert 0.96 * most <= budget.tokens <= most


def test_gradients_count_whether_or_not_they_are_there(device):
    model = torch.nn.Linear(1024, 65536, bias=False)  # 256 MiB
    budget = rebatch.Budget(model, start=10)
    for number in range(40):
        run(budget, device, budget.tokens, line(budget.tokens))
        if number % 2:
            model.weight.grad, device.live = None, device.live - 256 * MIB
        else:
            model.weight.grad = torch.empty_like(model.weight)
            device.live += 256 * MIB
    most = 7 * 1024 - 200 - 256
    assert 0.96 * most <= budget.tokens <= most
    assert budget.ooms == 0


def test_a_state_goes_on_with_its_budgets(device):
    budget = rebatch.Budget(small())
    for longest in (500, 1000):
        for _ in range(16):
            count = max(1, budget.tokens_for(longest) // longest)
            run(budget, device, count * longest, attention(count, longest), longest)
    resumed = rebatch.Budget(small())
    resumed.load_state_dict(budget.state_dict())
    for longest in (500, 700, 1000):
        assert resumed.tokens_for(longest) == budget.tokens_for(longest) > 1000
    assert run(resumed, device, 1000, attention(1, 1000), 1000)
    assert resumed.tokens_for(1000) == budget.tokens_for(1000)


def test_workers_of_a_loader_read_what_is_learned(device):
    budget = rebatch.Budget(small(), start=10)
    context = torch.multiprocessing.get_context("fork")
    asks, answers = context.Queue(), context.Queue()

    def read(reader):
        while asks.get():
            answers.put(reader.tokens)

    made, arguments = budget.__reduce__()
    worker = context.Process(target=read, args=(made(*arguments),), daemon=True)
    worker.start()
    for _ in range(2):
        run(budget, device, budget.tokens, line(budget.tokens))
        asks.put(True)
        assert answers.get(timeout=600) == budget.tokens > 10
    asks.put(False)
    worker.join(600)
    assert worker.exitcode == 0


def test_what_a_sampler_copies_reads_on(device):
    budget = rebatch.Budget(small(), start=10)
    made = copy.deepcopy({"budget": budget})["budget"]
    run(budget, device, 10, line(10))
    assert made.tokens == budget.tokens == 20


def _agree_in_a_rank(rank, folder, capacities, results):
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=len(capacities),
        timeout=datetime.timedelta(seconds=600),
    )
    device = Device(capacities[rank])
    cost_memory.figures_of = lambda _device: device
    budget = rebatch.Budget(small(), start=10)
    read = []
    for step in range(12):
        for _ in range(2):
            run(budget, device, budget.tokens, line(budget.tokens))
            longest = 500 if rank else 1000
            run(budget, device, longest, attention(1, longest), longest)
        if step:
            assert budget.tokens == read[-1], "it changes in agree() alone"
        budget.agree()
        read.append(budget.tokens)
    results.put((rank, read, [budget.tokens_for(longest) for longest in (400, 500, 1000, 3000)]))
    torch.distributed.destroy_process_group()


def test_ranks_agree_on_the_smallest(tmp_path):
    context = torch.multiprocessing.get_context("fork")
    results = context.Queue()
    arguments = str(tmp_path), (8 * GIB, 4 * GIB), results
    ranks = [
        context.Process(target=_agree_in_a_rank, args=(rank, *arguments), daemon=True)
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    (_, first, lengths), (_, second, same) = sorted(results.get(timeout=600) for _ in ranks)
    assert first == second and lengths == same
    assert 0.97 * (3 * 1024 - 200) <= first[-1] <= 3 * 1024 - 200
    for rank in ranks:
        rank.join(600)
        assert rank.exitcode == 0


# ---- with a Backward, and on a CPU ----


def mean_square(model, samples):
    return model(samples).square().mean()


def test_a_backward_cuts_what_runs_out_of_memory_and_the_budget_falls():
    model, plain = small(), small()
    backward = rebatch.Backward(model, mean_square, log_level="quiet")
    budget = rebatch.Budget(backward, start=16)
    batch = torch.randn(16, 4)
    mean_square(plain, batch).backward()
    with fail_once(model) as failing:
        with budget.measure(16):
            backward(batch)
    assert failing.failures == 1 and backward.report.microbatches == 2
    torch.testing.assert_close(model.weight.grad, plain.weight.grad)
    assert budget.tokens == 8 and budget.ooms == 1
    with budget.measure(8):
        backward(batch[:8])
    assert backward.report.microbatches == 1, "the next one is whole again"


def test_without_figures_it_stays_at_the_first_and_halves_after_an_oom():
    model = small()
    budget = rebatch.Budget(model)
    for _ in range(40):
        with budget.measure(64):
            mean_square(model, torch.randn(64, 4)).backward()
    assert budget.tokens == 64
    with pytest.raises(torch.OutOfMemoryError), fail_once(model), budget.measure(64):
        mean_square(model, torch.randn(64, 4)).backward()
    assert budget.tokens == 32
    for _ in range(16):
        with budget.measure(32):
            mean_square(model, torch.randn(32, 4)).backward()
    assert budget.tokens == 64


def test_without_figures_a_resumed_one_stays_at_the_largest_that_ran():
    budget = rebatch.Budget(small(), start=10)
    for _ in range(40):
        with budget.measure(budget.tokens):
            pass
    other = rebatch.Budget(small(), start=10)
    other.load_state_dict(budget.state_dict())
    for _ in range(40):
        assert other.tokens == 10
        with other.measure(other.tokens):
            pass


def test_a_backward_that_the_budget_does_not_know_is_named(device):
    model = small()
    backward = rebatch.Backward(model, mean_square, log_level="quiet")
    budget = rebatch.Budget(model, start=16)
    said = r"which 'backward' has recovered from.*: expected Budget\(backward, optimizer\)"
    with pytest.warns(RuntimeWarning, match=said) as caught:
        for _ in range(3):
            with budget.measure(16):
                backward(torch.randn(16, 4))
                device.ooms += 1
    assert len(caught) == 1 and budget.tokens == 16


def test_a_block_without_a_call_of_the_backward_is_not_that_of_the_call_before():
    model = small()
    backward = rebatch.Backward(model, mean_square, log_level="quiet")
    budget = rebatch.Budget(backward, start=16)
    with budget.measure(16):
        pass
    with fail_once(model), budget.measure(16):
        backward(torch.randn(16, 4))
    for _ in range(3):
        with budget.measure(2):
            pass
    assert (budget.tokens, budget.ooms) == (8, 1)


def test_costs_and_lengths_are_numbers_of_any_kind():
    """Such as seconds of one short utterance, and what tensors and arrays have."""
    budget = rebatch.Budget(small(), start=10)
    for cost, longest in ((0.4, 0.4), (torch.tensor(5), torch.tensor(2.5)), (numpy.int64(5), 2)):
        with budget.measure(cost, longest):
            pass
    assert budget.tokens_for(torch.tensor(2.5)) == 10 and budget.microbatches == 3
    json.dumps(budget.state_dict())


def test_other_exceptions_pass_and_teach_nothing():
    budget = rebatch.Budget(small(), start=8)
    for error in (ValueError("no"), RuntimeError("memory of my own"), KeyboardInterrupt()):
        with pytest.raises(type(error)), budget.measure(8):
            raise error
    assert budget.tokens == 8 and budget.ooms == budget.microbatches == 0


def tried(device, size):
    with contextlib.suppress(torch.OutOfMemoryError):
        device.take(size)


@pytest.mark.parametrize("where", ["block", "function", "PyTorch"])
def test_an_oom_that_the_block_keeps_to_itself_lowers_it(device, where):
    """One with which PyTorch copes, as its search for a convolution does, tells nothing."""
    budget = rebatch.Budget(small(), start=10, log_level="quiet")
    for _ in range(16):
        run(budget, device, budget.tokens, line(budget.tokens))
    before = budget.tokens
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(20):
            if where == "block":
                with budget.measure(budget.tokens):
                    try:
                        device.take(8 * GIB)
                    except torch.OutOfMemoryError:
                        continue
            elif where == "function":
                with budget.measure(budget.tokens):
                    tried(device, 8 * GIB)
            else:
                with budget.measure(budget.tokens // 2):
                    device.ooms += 1
    if where == "PyTorch":
        assert (budget.tokens, budget.ooms, caught) == (before, 0, [])
        return
    assert budget.tokens < before / 2 and budget.ooms == 20
    (said,) = caught
    text = r"1 time in a block of measure.*test_budget.py:\d+, and put a `try`"
    assert re.search(text, str(said.message))


def test_cost_may_be_a_function_of_the_micro_batch(device):
    budget = rebatch.Budget(small(), cost=lambda batch: (batch.numel(), batch.shape[1]))
    with budget.measure(torch.zeros(2, 300)):
        device.take(attention(2, 300))
    assert budget.tokens_for(300) == 1200 and budget.tokens == 1
    plain = rebatch.Budget(small(), cost=torch.numel)
    with plain.measure(torch.zeros(2, 300)):
        device.take(line(600))
    assert plain.tokens == 1200


def test_largest_bounds_it(device):
    budget = rebatch.Budget(small(), start=10, largest=100)
    for _ in range(16):
        run(budget, device, budget.tokens, line(budget.tokens))
    assert budget.tokens == 100


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda: rebatch.Budget(small(), start=0), "start is 0: expected 1 or more"),
        (lambda: rebatch.Budget(small(), largest=0), "largest is 0: expected 1 or more"),
        (lambda: rebatch.Budget(small()).measure(0), "cost is 0: expected a number above 0"),
        (lambda: rebatch.Budget(small()).measure(math.nan), "cost is nan: expected a number"),
        (
            lambda: rebatch.Budget(small()).measure(torch.zeros(2, 3)),
            "cost is a Tensor: expected a number above 0, or Budget.cost=....",
        ),
        (lambda: rebatch.Budget(torch.ones(1)), "model is of type Tensor: expected a torch.nn.Mo"),
        (lambda: rebatch.Budget(small()).measure(1, 0), "longest is 0: expected a length above 0"),
        (lambda: rebatch.Budget(small()).tokens_for(-1), "longest is -1: expected"),
        (lambda: rebatch.Budget(small()).measure(2**64), "cost is 184.*: expected"),
        (lambda: rebatch.Budget(small()).measure(10**400), "cost is a int: expected"),
        (lambda: rebatch.Budget(small()).measure(1, 1e30), "longest is 1e.30: expect"),
        (lambda: rebatch.Budget(small(), start=None), "start is a NoneType: exp"),
        (lambda: rebatch.Budget(small(), start=math.inf), "start is inf: expected 1"),
        (lambda: rebatch.Budget(small(), largest="all"), "largest is a str: expect"),
        (lambda: rebatch.Budget(small(), "adam"), "optimizer is of type str: expected"),
        (lambda: rebatch.Budget(small(), cost=5), "cost is 5: expected a function"),
        (
            lambda: rebatch.Budget(small(), cost=lambda batch: (1, 2, 3)).measure(0),
            "cost is a tuple: expected a number above 0, or Budget.cost=...",
        ),
        (
            lambda: rebatch.Budget(small()).load_state_dict({"micro": 3}),
            "the state is {'micro': 3}: expected what Budget.state_dict.. returned",
        ),
        (
            lambda: rebatch.Budget(small()).load_state_dict({"classes": [[0, math.nan, 0.0]]}),
            "the state is .* expected what Budget.state_dict.. returned",
        ),
    ],
)
def test_mistakes_are_refused(call, said):
    with pytest.raises((TypeError, ValueError), match=said):
        call()


def test_measure_without_with_is_told(device):
    budget = rebatch.Budget(small())
    with pytest.warns(RuntimeWarning, match="without `with`, so nothing is measured") as told:
        budget.measure(3)
    assert [warning.filename for warning in told] == [__file__]
    assert budget.microbatches == 0


def test_a_block_within_a_block_is_refused_and_the_next_one_runs(device):
    budget = rebatch.Budget(small())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="within a block of measure"):
            with budget.measure(3):
                with budget.measure(3):
                    pass
        assert run(budget, device, 3, GIB) and budget.microbatches == 1


def test_classes_are_an_eighth_of_an_octave():
    for length in (0.5, 1, 1.01, 99.9, 1024, 3_000_000):
        number = budget_module._class_of(length)
        assert budget_module._end_of(number - 1) < length <= budget_module._end_of(number)


@pytest.mark.parametrize("code, restarts, requeued", [(75, 0, True), (75, 3, False), (1, 0, False)])
def test_the_job_script_of_the_page_requeues_after_an_oom(tmp_path, code, restarts, requeued):
    page = pathlib.Path(__file__).resolve().parents[2] / "docs" / "budgets.md"
    (script,) = re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    for name, body in (("python3", f"exit {code}"), ("scontrol", 'echo "$@" > asked')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "SLURM_JOB_ID": "17",
        "SLURM_RESTART_COUNT": str(restarts),
    }
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path, env=environment)
    asked = tmp_path / "asked"
    assert done.returncode == code
    assert asked.read_text() == "requeue 17\n" if requeued else not asked.exists()

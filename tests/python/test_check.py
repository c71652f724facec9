"""Step.check(): each mistake is found and named; correct steps have none."""

import argparse
import gc
import itertools
import os
import random
import re
import socket
import subprocess
import sys
import types
import warnings

import numpy
import pytest
import torch

import forked
import rebatch.torch as rebatch
from models import fails_above, make, regression_loss, same_bits, state_of


def check(kind, loss_fn=None, accept=(), **options):
    model, batch, its_loss = make(kind)
    step = rebatch.Step(
        model, torch.optim.SGD(model.parameters(), 0.1), loss_fn or its_loss, **options
    )
    before = state_of(model), torch.get_rng_state()
    found = step.check(batch, accept=accept)
    assert same_bits(state_of(model), before[0])
    assert torch.equal(torch.get_rng_state(), before[1])
    assert all(p.grad is None for p in model.parameters())
    return found


def said(found):
    """Its text without the breaks of its lines."""
    return " ".join(str(found).split())


def kinds(found):
    return [f.kind for f in found.findings if f.is_mistake]


@pytest.mark.parametrize("kind", ("mlp", "gpt"))
def test_a_correct_step_has_no_mistake(kind):
    found = check(kind)
    assert found and kinds(found) == []
    assert re.search(
        r"no mistakes: \d+ runs, micro-batches of 16, 8, 1; compared the loss, \d+ gradients and "
        r"0 buffers; 2 OOMs on purpose; \d+\.\d s$",
        said(found),
    )


class Config:
    def __init__(self, *more):
        self.width, self.more = 8, more


class Configured(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.net, self.config = torch.nn.Linear(8, 1), config

    def forward(self, x):
        return self.net(x)[:, 0] * self.config.width


@pytest.mark.parametrize(
    "config",
    (
        Config(),
        Config(Config(), [Config({"scale": torch.ones(3)})]),
        [Config()],
        {"of": Config(float("nan"))},
        argparse.Namespace(width=8),
        types.SimpleNamespace(width=8),
    ),
)
def test_a_model_may_hold_objects_of_the_program(config):
    model = Configured(config if hasattr(config, "width") else Config(config))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = rebatch.Step(model, optimizer, regression_loss).check(
        (torch.randn(16, 8), torch.ones(16))
    )
    assert found and kinds(found) == []


def test_a_loss_fn_may_free_the_memory_of_the_batch():
    def loss_fn(model, x):
        loss = model(1.0 * x).square().mean()
        x.untyped_storage().resize_(0)
        return loss

    model, x = torch.nn.Linear(8, 1), torch.randn(8, 8)
    before = x.clone()
    found = rebatch.Step(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn).check(x)
    assert "batch" in kinds(found) and torch.equal(x, before)


def test_gradients_of_before_the_check_hide_no_mistake():
    def loss_fn(model, x):
        loss = model(x).square().mean()
        total = len(x) * loss
        return loss.detach() + total - total.detach()

    model = torch.nn.Linear(8, 1)
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e9)
    found = rebatch.Backward(model, loss_fn).check(torch.randn(8, 8))
    assert "cut" in kinds(found)
    assert all(torch.equal(p.grad, torch.full_like(p, 1e9)) for p in model.parameters())


def test_what_changes_in_such_an_object_is_found_and_put_back():
    class Net(Configured):
        def forward(self, x):
            self.config.width += 1
            return super().forward(x)

    model = Net(Config())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = rebatch.Step(model, optimizer, regression_loss).check(
        (torch.randn(16, 8), torch.ones(16))
    )
    assert kinds(found) and model.config.width == 8


def summed(model, samples):
    return ((model(samples[0]) - samples[1]) ** 2).sum()


def test_a_loss_that_is_summed_is_named():
    found = check("mlp", summed)
    assert kinds(found) == ["sum"]
    assert "return the mean" in said(found)


def test_a_mean_with_a_normalizer_is_named():
    mean = lambda model, samples: summed(model, samples) / len(samples[0])
    assert kinds(check("mlp", mean, normalizer=lambda batch: 16.0)) == ["mean_with_normalizer"]
    assert check("mlp", summed, normalizer=lambda batch: 16.0)


def test_a_mean_over_tokens_is_named():
    def masked_mean(model, samples):
        x, y = samples
        mask = (torch.arange(len(y)) < 3).float() + (y > 0.5)
        return (((model(x) - y) ** 2) * mask).sum() / mask.sum()

    found = check("mlp", masked_mean)
    assert kinds(found) == ["cut"] and "pass a normalizer" in said(found)


def test_batch_norm_is_named_with_its_module():
    found = check("conv")
    assert kinds(found) == ["batch_norm"] and "'body.1'" in said(found)
    for part in (
        "statistics of a micro-batch",
        "GroupNorm",
        "SyncBatchNorm",
        "micro_allowed=[N]",
        'accept="batch_norm"',
    ):
        assert part in said(found)


@pytest.mark.parametrize("accept", ("batch_norm", ["batch_norm"], ("sum", "batch_norm")))
def test_batch_norm_that_is_accepted_is_a_note(accept):
    found = check("conv", accept=accept)
    assert found and [(f.kind, f.is_mistake) for f in found.findings] == [("batch_norm", False)]
    assert "'body.1'" in said(found) and "accept=" not in said(found)


def test_other_mistakes_are_found_beside_an_accepted_one():
    assert kinds(check("conv", summed, accept="batch_norm")) == ["sum"]
    assert check("conv", summed, accept=["batch_norm", "sum"])


def test_what_is_accepted_is_the_name_of_a_mistake():
    with pytest.raises(ValueError, match="accept has 'batchnorm': did you mean 'batch_norm'?"):
        check("mlp", accept="batchnorm")
    with pytest.raises(ValueError, match="accept has 7: expected some of 'after_oom', 'batch', "):
        check("mlp", accept=[7])
    with pytest.raises(TypeError, match="accept is 7: expected"):
        check("mlp", accept=7)


@pytest.mark.parametrize(
    "options",
    (
        {"micro_allowed": [4]},
        {"micro_largest": 4, "micro_multiple_of": 4},
        {"micro_largest": 4, "micro_smallest": 4},
    ),
)
def test_batch_norm_of_one_size_is_a_note(options):
    found = check("conv", **options)
    assert found and [f.kind for f in found.findings] == ["batch_norm"]
    assert "the size is always 4" in said(found)
    assert kinds(check("conv", micro_multiple_of=4)) == ["batch_norm"]


def test_a_hidden_generator_is_named():
    def noisy(model, samples):
        x, y = samples
        return ((model(x + torch.randn(x.shape, generator=hidden)) - y) ** 2).mean()

    hidden = torch.Generator()
    assert kinds(check("mlp", noisy)) == ["not_repeatable"]
    assert kinds(check("mlp", noisy, generators=[hidden])) == []


def test_dropout_is_a_note():
    assert [f.kind for f in check("mlp").findings] == ["dropout"]


def test_more_samples_than_fit_are_checked_at_the_size_that_fits():
    model, batch, loss_fn = make("mlp")
    step = rebatch.Step(model, torch.optim.SGD(model.parameters(), 0.1), fails_above(loss_fn, 5))
    assert step.check(batch)


# ---- it always compares two sizes, or says why not ----


@pytest.mark.parametrize("options", ({"micro_start": 1}, {"learn": True}, {"micro_largest": 6}))
def test_two_sizes_are_compared_whatever_the_next_micro_batch_would_be(options):
    found = check("mlp", summed, **options)
    assert kinds(found) == ["sum"] and len(found.sizes) == 2


def test_two_sizes_are_compared_after_ooms_down_to_one():
    model, batch, _ = make("mlp")
    step = rebatch.Step(
        model, torch.optim.SGD(model.parameters(), 0.0), fails_above(summed, 1), log_level="quiet"
    )
    step(batch)
    assert step.micro == 1
    step.loss_fn = summed
    found = step.check(batch)
    assert kinds(found) == ["sum"] and found.sizes == [16, 8]


def test_sizes_are_those_that_the_options_allow():
    assert check("mlp", micro_multiple_of=6).sizes == [12, 6]
    assert check("mlp", micro_allowed=[2, 4, 12]).sizes == [12, 4, 2]
    assert check("mlp", micro_smallest=5).sizes == [16, 8, 5]


def test_one_allowed_size_is_said():
    found = check("mlp", summed, micro_allowed=[4])
    assert found and found.sizes == [4]
    assert "the options allow micro-batches of 4 alone, so nothing depends on the cut" in (
        said(found)
    )


def test_a_batch_of_one_sample_compares_nothing_and_says_so():
    model, (x, y), loss_fn = make("mlp")
    step = rebatch.Step(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn)
    found = step.check((x[:1], y[:1]))
    assert kinds(found) == ["nothing_compared"] and "the batch has one sample" in said(found)


def test_nan_is_named_with_samples_and_parameter():
    model, (x, y), loss_fn = make("mlp")
    x[3] = float("nan")
    step = rebatch.Step(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn)
    found = step.check((x, y))
    assert kinds(found) == ["nan"]
    assert "in micro-batches of 16, the loss of samples 0-15 is no finite number" in said(found)
    assert "gradients are not, the first that of 'body.0.weight'" in said(found)


# ---- rounding is no mistake ----


@pytest.mark.parametrize("dtype", (None, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("kind", ("mlp", "gpt"))
def test_rounding_is_no_mistake(kind, dtype):
    for seed in range(4):
        model, batch, loss_fn = make(kind, 24, seed)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        step = rebatch.Step(model, optimizer, loss_fn, autocast=dtype)
        for _ in range(5 * seed):  # towards gradients that cancel
            step(batch)
        found = step.check(batch)
        assert found, str(found)


def test_a_wrong_weight_in_16_bits_is_a_mistake():
    def masked_mean(model, samples):
        x, y = samples
        mask = (torch.arange(len(y)) < 3).float() + (y > 0.5)
        return (((model(x) - y) ** 2) * mask).sum() / mask.sum()

    assert kinds(check("mlp", masked_mean, autocast=torch.bfloat16)) == ["cut"]


@pytest.mark.parametrize("samples", (2, 4))
def test_images_and_their_targets_are_no_samples(samples):
    """As many fields as there are samples: the order of the samples alone is turned."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 4)

    def boxes(model, batch):
        images, targets = batch
        found = model(torch.stack([image.mean((1, 2)) for image in images]))
        return torch.stack([(f - t["box"]).abs().mean() for f, t in zip(found, targets)]).mean()

    images = [torch.randn(3, 6 + i, 8) for i in range(samples)]
    targets = [{"box": torch.rand(4)} for _ in range(samples)]
    step = rebatch.Step(model, torch.optim.SGD(model.parameters(), 0.1), boxes)
    found = step.check((images, targets))
    assert found, str(found)


# ---- it leaves everything as it was ----


class Stateful(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.frozen = torch.nn.Linear(8, 1), torch.nn.Linear(8, 1).requires_grad_(False)
        self.register_buffer("mean", torch.zeros(8))
        self.hidden, self.calls, self.seen = torch.zeros(1), 0, [torch.zeros(2)]

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        self.frozen.weight.data.lerp_(self.layer.weight.data, 0.5)
        self.hidden, self.calls = x.sum().detach().reshape(1), self.calls + 1
        self.seen[0].add_(1)
        self.seen.append(x.detach())
        return self.layer(x - self.mean)[:, 0] + self.frozen(x)[:, 0]


def test_all_that_loss_fn_changes_is_put_back():
    torch.manual_seed(0)
    model, generator = Stateful(), torch.Generator().manual_seed(3)
    seen, total = [], 0

    def loss_fn(model, samples):
        nonlocal total
        total += len(samples[1])
        seen.append(total)
        samples[0].add_(torch.rand(1, generator=generator))
        torch.rand(1), random.random(), numpy.random.rand()
        model.layer.train(False)
        return ((model(samples[0]) - samples[1]) ** 2).mean()

    optimizer = torch.optim.SGD(model.layer.parameters(), 0.1)
    step = rebatch.Step(model, optimizer, loss_fn, generators=[generator], log_level="quiet")
    batch = (torch.randn(16, 8), torch.randn(16))
    model.layer.weight.grad = gradient = torch.ones(1, 8)
    objects = model.mean, model.hidden, model.seen, model.seen[0]

    def now():
        tensors = [*state_of(model), batch[0].clone(), generator.get_state(), torch.get_rng_state()]
        tensors += [model.hidden.clone(), model.seen[0].clone(), model.layer.weight.grad.clone()]
        states = [random.getstate(), str(numpy.random.get_state())]
        return tensors, [*states, model.calls, len(model.seen), list(seen), total]

    before = now()
    assert not step.check(batch)
    after = now()
    assert same_bits(before[0], after[0]) and before[1] == after[1]
    objects_now = model.mean, model.hidden, model.seen, model.seen[0]
    assert all(a is b for a, b in zip(objects, objects_now))
    assert model.layer.weight.grad is gradient and model.layer.training


# ---- what it says ----


def test_the_text_has_the_columns_of_the_command():
    lines = str(check("conv", summed)).splitlines()
    assert lines[0].startswith("batch_norm      2 modules") and lines[1].startswith(" " * 16)
    assert max(map(len, lines[:-1])) <= 100 and lines[-1].startswith("2 mistakes: ")


# ---- REBATCH_CHECK ----

PROGRAM = """
import sys, torch, rebatch.torch as rebatch
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
sums = sys.argv[1] == "sum"
def loss_fn(model, samples):
    loss = (model(samples[0])[:, 0] - samples[1]) ** 2
    if sys.argv[1] == "oom":
        raise torch.OutOfMemoryError("CUDA out of memory.")
    return loss.sum() if sums else loss.mean()
step = rebatch.Step(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn)
print("before")
step((torch.randn(16, 8), torch.randn(16)))
print("trained")
"""


def run_program(kind, variable="1", **variables):
    environment = {**os.environ, "REBATCH_CHECK": variable, **variables}
    return forked.run(PROGRAM, kind, env=environment)


def test_a_program_is_checked_as_it_is_and_ends():
    clean, mistake, nothing = (run_program(kind) for kind in ("mean", "sum", "oom"))
    assert clean.returncode == 0 and "no mistakes: " in clean.stdout
    assert mistake.returncode == 4 and "1 mistake: " in mistake.stdout
    assert "sum             the loss is 2 times as large" in mistake.stdout
    assert nothing.returncode == 3 and "out of memory" in nothing.stderr
    for ended in (clean, mistake, nothing):
        assert ended.stdout.startswith("before\n") and "trained" not in ended.stdout


def test_without_the_variable_a_program_trains():
    assert run_program("mean", "0").stdout == "before\ntrained\n"
    wrong = run_program("mean", "yes")
    assert wrong.returncode == 1 and 'REBATCH_CHECK is "yes": expected 1, or 0' in wrong.stderr


def test_a_command_that_waits_hears_the_answer():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        name = f"{theirs.fileno()}:{os.fstat(theirs.fileno()).st_ino}"
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM, "sum"],
            env={**os.environ, "REBATCH_CHECK": "1", "REBATCH_REPORT_FD": name},
            capture_output=True,
            text=True,
            pass_fds=[theirs.fileno()],
        )
        head, _, text = ours.recv(1 << 16).decode().partition("\n")
    assert ended.returncode == 4 and ended.stdout == "before\n"
    assert head == "answer 4 0" and text.startswith("sum             ")


def test_with_a_level_of_lighten_that_is_on_correct_steps_have_no_mistake():
    is_on = []

    def loss_fn(model, samples):
        if not is_on:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return regression_loss(model, samples)

    model, batch, _ = make("mlp")
    lighten = lambda on: is_on.append(on) if on else is_on.clear()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    options = {"log_level": "quiet", "growth": False}
    step = rebatch.Step(model, optimizer, loss_fn, lighten=lighten, **options)
    step(batch)
    assert step.state_dict()["lighten_level"] == 1
    found = step.check(batch)
    assert kinds(found) == [] and found.ooms == 2 and is_on, str(found)


# ---- memory that stays ----


def test_memory_that_stays_in_use_after_a_run_is_a_mistake(monkeypatch):
    from rebatch.torch.check.trial_runs import TrialRuns

    def bytes_of_all_tensors(_):
        tensors = [o for o in gc.get_objects() if type(o) is torch.Tensor]
        return 1 + sum(t.numel() * t.element_size() for t in tensors)

    monkeypatch.setattr(TrialRuns, "_live_bytes", bytes_of_all_tensors)
    model = torch.nn.Linear(4096, 8)
    batch = (torch.randn(64, 4096), torch.randn(64, 8))
    kept = itertools.repeat([])

    def keeps_inputs(model, samples):
        next(kept).append(samples[0] * 2)
        return regression_loss(model, samples)

    for loss_fn, expected in ((regression_loss, []), (keeps_inputs, ["leak"])):
        step = rebatch.Step(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn)
        found = step.check(batch)
        assert kinds(found) == expected, str(found)


def test_spectral_norm_is_a_note():
    torch.manual_seed(0)
    for wrap in (torch.nn.utils.parametrizations.spectral_norm, torch.nn.utils.spectral_norm):
        model = torch.nn.Sequential(wrap(torch.nn.Linear(8, 4)), torch.nn.Flatten(0))
        batch = (torch.randn(16, 8), torch.randn(64))
        loss_fn = lambda model, samples: (model(samples[0]) ** 2).mean()
        step = rebatch.Step(
            model,
            torch.optim.SGD(model.parameters(), 0.1),
            loss_fn,
            length=lambda batch: 16,
            slice=lambda batch, first, count: (batch[0][first : first + count], None),
        )
        found = step.check(batch)
        assert found and [f.kind for f in found.findings] == ["spectral_norm"], str(found)


def test_the_rounding_of_a_difference_in_16_bits_is_no_mistake():
    """A critic's loss is a difference of means, each of which is rounded to 8 bits."""
    for seed in range(3):
        model, (x, _), _ = make("mlp", 24, seed)
        critic = lambda model, s: model(s[0]).mean() - model(s[0].flip(1)).mean()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        options = {"autocast": torch.bfloat16, "micro_start": 8, "growth": False}
        step = rebatch.Step(model, optimizer, critic, **options)
        found = step.check((x, x))
        assert found, str(found)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(4):
                step((x, x))


def test_a_probe_of_a_program_without_a_pool_says_what_it_needs():
    ended = run_program("mean", "0", REBATCH_PROBE_ONLY="1")
    assert ended.returncode == 1 and ended.stdout == "before\n"
    assert ended.stderr == (
        "rebatch: a probe goes by the allocations of rebatch's pool: call rebatch.install() first, "
        "or use Step(learn=True)\n"
    )

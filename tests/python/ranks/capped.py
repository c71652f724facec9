"""What the ranks of a pair run on GPUs of different sizes."""

import os
import signal
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import models
import rebatch.torch as rebatch
from trained import sgd, step_of

_GIB = 1 << 30
_SAMPLES, _LENGTH, _WIDTH = 256, 256, 512  # of each rank


def _model():
    torch.manual_seed(0)
    layers = [
        nn.TransformerEncoderLayer(_WIDTH, 8, 4 * _WIDTH, dropout=0.0, batch_first=True)
        for _ in range(6)
    ]
    return models.placed(nn.Sequential(*layers))


def _loss_fn(model, x):
    return model(x).square().mean()


def caps(gib):
    """One step whose ranks may use so many GiB each, beside the gradient of all samples in one
    process: the sizes of the micro-batches, and the largest difference of a gradient, relative to
    the largest gradient."""
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(5)
    batches = [torch.randn(_SAMPLES, _LENGTH, _WIDTH, generator=generator) for _ in range(size)]
    reference = _model()
    for batch in batches:
        for part in batch.split(8):
            loss = _loss_fn(reference, models.placed(part)) * (len(part) / (_SAMPLES * size))
            loss.backward()
    expected = [p.grad.cpu() for p in reference.parameters()]
    del reference, loss
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(gib[rank] * _GIB / total)
    model = DistributedDataParallel(_model())
    step = step_of(model, sgd(model, 0.0), _loss_fn)
    step(models.placed(batches[rank]))
    largest = max(float(g.abs().max()) for g in expected)
    wrong = max(float((p.grad.cpu() - g).abs().max()) for p, g in zip(model.parameters(), expected))
    return {
        "ranks": step.report.ranks,
        "ooms": step.report.ooms,
        "wrong": wrong / largest,
        "held": torch.cuda.max_memory_reserved() / _GIB,
    }


def dies_before_its_sums(is_on_host):
    """Rank 1's GPU is busy for long before its part of the gradients is sent, and the rank is
    killed in the update. What rank 0 gets in that step and the next ones: with a GradScaler the
    update itself waits for the sums."""
    state = {"ends": False}

    class Ending(torch.optim.SGD):
        def step(self, closure=None):
            if state["ends"]:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().step(closure)

    model = DistributedDataParallel(models.placed(nn.Linear(64, 64)))
    scaler = torch.amp.GradScaler("cuda") if is_on_host else None

    def loss_fn(model, x):
        loss = model(x).square().mean()
        if state["ends"]:
            torch.cuda._sleep(1 << 36)  # half a minute
        return loss

    step = step_of(
        model, Ending(model.parameters(), lr=0.1), loss_fn, scaler=scaler, group_timeout=5.0
    )
    x = models.placed(torch.randn(16, 64))
    step(x)
    if dist.get_rank() == 1:
        state["ends"] = True
        if is_on_host:  # its GradScaler would wait for its own GPU
            step._training.ranks.begin_update = lambda is_on_host: os.kill(
                os.getpid(), signal.SIGKILL
            )
    errors, began = [], time.monotonic()
    for _ in range(3):
        try:
            step(x)
        except (rebatch.PeerFailed, rebatch.Error) as error:
            rank, is_torn = getattr(error, "rank", None), getattr(error, "is_torn", False)
            errors.append((type(error).__name__, str(error), rank, is_torn))
    return errors, time.monotonic() - began

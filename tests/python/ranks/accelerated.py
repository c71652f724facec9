"""Loops of accelerate on two ranks, of DistributedDataParallel and FSDP2. Each function returns
plain values for the test."""

import copy

import torch
import torch.distributed as dist

import rebatch.torch as rebatch
import models
from adapted import as_launched, let_accelerate_shard
from models import fails_above, make, regression_loss, same_bits
from trained import RANK_OF_FAILURES, everyones

_BATCHES, _STEPS = 7, 3  # in an epoch, of which the last update has one batch


def _accelerator(is_sharded):
    as_launched()
    import accelerate

    is_cpu, options = models.DEVICE.type == "cpu", {}
    if is_sharded:
        accelerate.PartialState(cpu=is_cpu)
        let_accelerate_shard(models.DEVICE)
        options["fsdp_plugin"] = accelerate.FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=10
        )
    return accelerate.Accelerator(
        cpu=is_cpu and not is_sharded, gradient_accumulation_steps=_STEPS, **options
    )


def _train(accelerator, plain, data, largest, is_wrapped, **options):
    """(parameters, losses, norms, learning rate, sizes, kind of model) of two epochs; `largest` is
    what rank 1 has memory for."""
    model = copy.deepcopy(plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    loader = torch.utils.data.DataLoader(data, 8)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    model.eval()
    limited = fails_above(regression_loss, largest if dist.get_rank() == RANK_OF_FAILURES else 99)
    if is_wrapped:
        options = {"log_level": "quiet", "growth": False, "group_timeout": 60.0, **options}
        backward = rebatch.Backward(model, limited, backward=accelerator.backward, **options)
    losses, norms = [], []
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                if is_wrapped:
                    loss = backward(batch)
                else:
                    loss = regression_loss(model, batch)
                    accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    whole = [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()]
    sizes = list(backward.report.ranks) if is_wrapped else []
    accelerator.free_memory()  # it clips the model that it has
    rate, kind = scheduler.get_last_lr(), type(model).__name__
    return whole, losses, [float(n) for n in norms], rate, sizes, kind


def as_accelerate(is_sharded, window=None):
    """Whether training with Backward is the plain loop's, without OOMs and with."""
    accelerator = _accelerator(is_sharded)
    plain, (x, y), _ = make("mlp", samples=8 * 2 * _BATCHES)
    data = torch.utils.data.TensorDataset(x, y)
    options = {"window": window} if is_sharded else {}
    expected, losses, norms, rate, _, kind = _train(accelerator, plain, data, 99, False)
    found = {}
    for name, largest in (("whole", 99), ("cut", 3)):
        state, its, its_norms, its_rate, sizes, _ = _train(
            accelerator, plain, data, largest, True, **options
        )
        near = all(torch.allclose(a, b, atol=1e-5) for a, b in zip(state, expected))
        # Of a local batch it is this rank's, and of one with the sync it is of all.
        same_losses = torch.allclose(torch.tensor(its), torch.tensor(losses), atol=1e-5)
        same_norms = torch.allclose(torch.tensor(its_norms), torch.tensor(norms), atol=1e-5)
        found[name] = [near, same_losses, same_norms, its_rate == rate]
        found[name] += [all(same_bits(state, other) for other in everyones(state))]
        found[f"{name} in"] = sizes
    found["updates"], found["kind"] = len(norms), kind
    return found

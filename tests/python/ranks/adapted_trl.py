"""trl's trainers on several ranks, of which one has little memory. Each function returns plain
values for the test."""

import torch.distributed as dist

import of_trl
from adapted import as_launched
from trained import RANK_OF_FAILURES, everyones, is_same_everywhere


def with_trl(name, config, largest):
    """How far gradients and metrics with unequal cuts are from those of trl without rebatch."""
    as_launched()
    _, plain, said = of_trl.trained(name, config=config)
    fails = largest if dist.get_rank() == RANK_OF_FAILURES else None
    trainer, cut, said_here = of_trl.trained(name, fails, step={}, config=config)
    assert len(plain) == len(cut) > 0 and len(said) == len(said_here) > 0
    gaps = []
    for before, after in zip(map(of_trl.not_timed, said), map(of_trl.not_timed, said_here)):
        assert before.keys() == after.keys() and len(before) > 4
        gaps += [abs(value - after[metric]) / (1 + abs(value)) for metric, value in before.items()]
    return {
        "gradients": max(map(_gap, plain, cut)),
        "metrics": max(gaps),
        "same": is_same_everywhere(trainer.model),
        "ranks": trainer.report.ranks,
        "micro": everyones(trainer.report.micro),
    }


def _gap(plain, cut):
    """Of gradients, in terms of the largest entry."""
    largest = max(float(g.abs().max()) for g in plain)
    return max(float((a - b).abs().max()) for a, b in zip(plain, cut)) / largest

"""The first micro-batch of a training in lockstep: a few samples run without collectives, so every
rank knows those of a micro-batch before one of them can fail between two."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rebatch.torch.check.training_snapshot import snapshot_outside
from rebatch.torch.program.program import Running

if TYPE_CHECKING:
    from rebatch.torch.ranks.fsdp.lockstep import Lockstep  # needs a PyTorch with torch.distributed


def rehearse(running: Running, lockstep: Lockstep) -> None:
    """Within an attempt. The smallest micro-batch runs forward and backward; then all is as it was,
    but for gradients. What it raises, the attempt has failed with."""
    snapshot = snapshot_outside(running)

    def run() -> None:
        loss, _ = running.weighted_loss(0, running.allowed_sizes()[-1])
        running.program.update.backward(loss)

    lockstep.rehearse(run)
    snapshot.restore()

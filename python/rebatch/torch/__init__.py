"""PyTorch training that survives running out of GPU memory.

A training loop of your own::

    import rebatch.torch as rebatch

    rebatch.install(limit="22GiB")                  # optional: rebatch's pool as the allocator
    backward = rebatch.Backward(model, loss_fn)     # loss_fn(model, samples) -> mean loss
    for batch in loader:                            # the effective batch
        loss = backward(batch)                      # as many micro-batches as memory asks for
        optimizer.step()
        optimizer.zero_grad()

With a Step, which updates too::

    train_step = rebatch.Step(model, optimizer, loss_fn)
    for batch in loader:
        loss = train_step(batch)
"""

try:
    import torch as _torch
except ModuleNotFoundError as _error:
    if _error.name != "torch":  # PyTorch is there, and lacks something itself
        raise
    raise ImportError(
        "rebatch.torch needs PyTorch 2.8 or newer, which is not installed: run `pip install torch`"
    ) from None

if tuple(int(part) for part in _torch.__version__.split(".")[:2]) < (2, 8):
    raise ImportError(f"rebatch needs PyTorch 2.8 or newer: this is {_torch.__version__}")

from rebatch import Error, __version__
from rebatch.fit.again import Fit
from rebatch.torch.allocator.exports import Export, export, exportable, map_export
from rebatch.torch.allocator.install import (
    install,
    installed,
    snapshot,
    stats,
    summary,
    tag,
    yield_to,
)
from rebatch.torch.allocator.sleep import sleep, wake
from rebatch.torch.backward import Backward
from rebatch.torch.batches.balance import balance
from rebatch.torch.batches.outputs import Mean, Sum
from rebatch.torch.batches.size_finder import find_batch_size
from rebatch.torch.budget import Budget
from rebatch.torch.check.cut_comparison import CutWarning
from rebatch.torch.check.findings import Check, Finding
from rebatch.torch.evaluation import Map, map
from rebatch.torch.saving.lighten import checkpointing, offload
from rebatch.torch.session.oom import is_oom
from rebatch.torch.session.probe import Probe
from rebatch.torch.session.report import MapReport, Report
from rebatch.torch.session.session import Exhausted, PeerFailed, Torn
from rebatch.torch.step import Step

# A traceback ends with the name that programs use.
Fit.__module__ = Exhausted.__module__ = PeerFailed.__module__ = Torn.__module__ = (
    CutWarning.__module__
) = __name__

__all__ = [
    "Backward",
    "Budget",
    "Check",
    "CutWarning",
    "Error",
    "Exhausted",
    "Export",
    "Finding",
    "Fit",
    "Map",
    "MapReport",
    "Mean",
    "PeerFailed",
    "Probe",
    "Report",
    "Step",
    "Sum",
    "Torn",
    "__version__",
    "balance",
    "checkpointing",
    "export",
    "exportable",
    "find_batch_size",
    "install",
    "installed",
    "is_oom",
    "map",
    "map_export",
    "offload",
    "sleep",
    "snapshot",
    "stats",
    "summary",
    "tag",
    "wake",
    "yield_to",
]

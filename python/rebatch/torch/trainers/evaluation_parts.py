"""Evaluation by a Trainer, in parts of its batches where memory asks for that."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

from rebatch.torch.batches.cut import Cuts
from rebatch.torch.batches.run_map import run_map
from rebatch.torch.check.cut_comparison import Subject
from rebatch.torch.check.first_results import FirstResults
from rebatch.torch.program.program import Program, Running
from rebatch.torch.session.report import MapReport
from rebatch.torch.session.session import Session, session_options
from rebatch.torch.undo.changes_outside import Told
from rebatch.torch.undo.generators import Generators, cuda_devices_of
from rebatch.torch.undo.undo import Undo

# Options of a Step that count for an evaluation too; its other sizes are those of training.
_OPTIONS = ("micro_multiple_of", "log_level", "log_file", "log_format")


class Parts:
    """Calls functions on the samples of a batch, without gradients. A call that runs out of memory
    is repeated with fewer samples, and so are the next calls of the same key. Before that,
    ran_out() gives back memory that the training keeps."""

    def __init__(self, cut: Cuts, options: Dict[str, Any], ran_out: Callable[[], None]):
        self._cut, self._ran_out = cut, ran_out
        self.options = {name: options[name] for name in _OPTIONS if name in options}
        self._session: Optional[Session] = None
        self.report = MapReport()

    def __call__(
        self, device: torch.device, function: Callable[[Any], Any], batch: Any, key: int
    ) -> List[Tuple[int, Any]]:
        """[(samples, function(part)), ...] in ascending order. A batch that cannot be cut is one
        part: its samples are not known, and count as 1."""
        try:
            samples = self._cut.length(batch)
        except Exception:  # an OOM in the function then comes out with it
            return [(1, function(batch))]
        if self._session is None or self._session.device != device:
            devices = [device] if device.type == "cuda" else []
            options = session_options(**self.options)
            self._session = Session(device, options, guards=[Generators(devices)])
        results, self.report, status = run_map(
            self._session, function, batch, samples, key, self._cut, self._ran_out
        )
        self._session.raise_failure(status)
        return results

    def compare(self, batch: Any, first: FirstResults, subject: Subject, program: Program) -> None:
        """The batch was cut: whether what `program` returns of it depends on that."""
        model = program.modules[0]
        undo = Undo([("model", model)], copies_first=False)
        told = Told(program.functions_of_an_attempt, undo.handled, lambda: program.loss_name)
        running = Running(program, undo, told)
        running.begin(batch)
        running.weigh()
        running.generators = Generators(cuda_devices_of([*model.parameters()]))
        undo.begin(batch)
        try:
            first.compare(running, subject, self.report.micro)
        finally:
            undo.end()

    def one(self, function: Callable[[Any], Any], batch: Any) -> Tuple[int, Any]:
        """The result for one sample, which tells dimensions apart."""
        with torch.no_grad():
            return 1, function(self._cut.part(batch, 0, 1, self._cut.length(batch)))

"""The Steps of a program. One is tried by itself. Of several, as a GAN has, each is tried in copies
of the process that go on with the program, and so is one size for all. Must not know what a try of
one Step runs."""

from __future__ import annotations

import atexit
import dataclasses
import sys
import traceback
from typing import Any, Callable, Dict, List, NoReturn, Optional

import torch

from rebatch.fit import integers
from rebatch.fit.program import copies
from rebatch.fit.program.copies import Reply, bytes_of, is_installed, ooms
from rebatch.fit.program.live import live
from rebatch.fit.program.tries import (
    Attempt,
    Training,
    answer_of_step,
    device_tensors,
    held_by,
    refuse,
    sizes_of,
)
from rebatch.fit.rows import Row, Search, answer_and_exit, answer_of, rooms_of
from rebatch.fit.search import Sizes
from rebatch.fit.tried import GoOn, Request, Tried

_MOST_UPDATES = 20  # of one, before another's first
_OTHERS = 2  # samples of the Steps that are not varied: more than one, for BatchNorm


def fit_and_exit(training: Training, batch: Any, asked: str, is_alone: bool) -> None:
    """Answers the command that started the program, and ends it; or returns in a copy of the
    process, where the program goes on. `is_alone`: only this Step is asked for."""

    def answer(request: Dict[str, Any]) -> Dict[str, Any]:
        refuse(training)
        steps = [] if is_alone else _steps(training)
        if len(steps) < 2:
            return answer_of_step(training, batch, request)
        return _answer_of_several(steps, request)

    try:
        answer_and_exit(asked, answer)
    except GoOn:
        return


@dataclasses.dataclass
class _Called:
    """A Step that the program calls, at its first call."""

    training: Any
    samples: int
    sizes: Sizes

    @property
    def name(self) -> str:
        return type(self.training.program.model).__name__


def _steps(first: Training) -> List[_Called]:
    """The Steps that the program calls, in their order; one: this is the only one there is."""
    trainings = list(live(type(first)))
    if len(trainings) < 2:
        return []

    def work(reply: Reply) -> None:
        _Round(trainings, reply)
        raise GoOn

    found = copies.asked(work, 0)
    return [_Called(trainings[at], samples, Sizes(*sizes)) for at, samples, sizes in found]


class _Calls:
    """In a copy: what takes the place of the Steps' own runs, until each was called enough."""

    def __init__(self, trainings: List[Any], reply: Reply):
        self.reply = reply
        self.counts = [0] * len(trainings)
        for at, training in enumerate(trainings):
            training._run = self._run_of(at, training)
        atexit.register(self._end)
        sys.excepthook = self._raised

    def _run_of(self, at: int, training: Any) -> Callable[[Any], torch.Tensor]:
        def run(batch: Any) -> torch.Tensor:
            loss = self.runs(at, training, batch)
            self.counts[at] += 1
            if self.is_over(min(self.counts)) or max(self.counts) >= _MOST_UPDATES:
                self.finish()
            return loss

        return run

    def runs(self, at: int, training: Any, batch: Any) -> torch.Tensor:
        raise NotImplementedError

    def is_over(self, least: int) -> bool:
        """Where each was called so often."""
        raise NotImplementedError

    def finish(self) -> NoReturn:
        raise NotImplementedError

    def _end(self) -> NoReturn:
        self.finish()

    def _raised(self, kind: Any, error: BaseException, trace: Any) -> NoReturn:
        self.reply.failed("".join(traceback.format_exception(kind, error, trace)))


class _Round(_Calls):
    """Which Steps are called, and with what."""

    def __init__(self, trainings: List[Any], reply: Reply):
        super().__init__(trainings, reply)
        self._found: Dict[int, Any] = {}

    def runs(self, at: int, training: Any, batch: Any) -> torch.Tensor:
        samples = training.program.cut.length(batch)
        sizes = dataclasses.astuple(sizes_of(training, batch))
        self._found.setdefault(at, (at, samples, sizes))
        return type(training)._run(training, batch)  # type: ignore[no-any-return]

    def is_over(self, least: int) -> bool:
        return least > 0

    def finish(self) -> NoReturn:
        self.reply.says(list(self._found.values()))


class _Together(_Calls):
    """Some updates of each Step, in micro-batches of a size."""

    def __init__(self, sizes: List[int], steps: List[_Called], request: Request, reply: Reply):
        self._request, self._steps = request, steps
        self._attempts = [Attempt(step.training, size) for step, size in zip(steps, sizes)]
        self._batch_bytes = 0  # of the largest
        self._device = steps[0].training.program.device
        self._refused, self._peak = ooms(self._device), 0
        self._failed = integers.start().ooms  # operations
        self._rounds, self._watched = 0, copies.Updates()
        super().__init__([step.training for step in steps], reply)
        copies.limit(self._device, request)
        copies.restart(self._device)

    def runs(self, at: int, training: Any, batch: Any) -> torch.Tensor:
        self._note_peak()
        varied = self._attempts[at].batch_of(batch)
        self._batch_bytes = max(self._batch_bytes, bytes_of(device_tensors(varied)))
        ran: Any = self._attempts[at].pass_on(varied)
        self._peak = max(self._peak, ran.report.peak_bytes)
        if ran.report.ooms:
            self._tell_oom()
        training.report, training.outputs = ran.report, ran.outputs
        loss: torch.Tensor = ran.running.loss
        training.running.loss = loss
        return loss

    def _note_peak(self) -> None:  # which a Step begins anew
        self._peak = max(self._peak, torch.cuda.max_memory_allocated(self._device))
        if integers.start().ooms > self._failed:
            self._tell_oom()

    def is_over(self, least: int) -> bool:
        before, self._rounds = self._rounds, least
        return least > before and self._watched.suffice()

    def _tell_oom(self) -> NoReturn:
        self.reply.tried(Tried(self._request.size, False))

    def finish(self) -> NoReturn:
        self._note_peak()
        self.reply.tried(
            Tried(
                self._request.size,
                True,
                held=held_by(self._attempts, self._batch_bytes),
                refused=ooms(self._device) - self._refused,
                **copies.taken(self._device, self._peak),
            )
        )

    def _raised(self, kind: Any, error: BaseException, trace: Any) -> NoReturn:
        self._note_peak()
        super()._raised(kind, error, trace)


class _Several:
    """Steps of which one is varied, or all are: None."""

    is_loop = False

    def __init__(self, steps: List[_Called], varied: Optional[int]):
        self._steps, self._varied = steps, varied
        chosen = steps if varied is None else [steps[varied]]
        self._sizes = [step.sizes for step in chosen]
        self.samples = min(step.samples for step in chosen)
        together = f"all {len(steps)} Steps"
        self.name = together if varied is None else f"Step {varied + 1}, {steps[varied].name}"

    def sizes(self) -> Sizes:
        """Those that the options of each allow."""
        return Sizes(
            max(sizes.smallest for sizes in self._sizes),
            min(sizes.largest for sizes in self._sizes),
            max(sizes.step for sizes in self._sizes),
        )

    def tried(self, request: Request) -> Tried:
        sizes = [
            request.size if self._varied in (None, at) else step.sizes.at_most(_OTHERS)
            for at, step in enumerate(self._steps)
        ]

        def work(reply: Reply) -> None:
            _Together(sizes, self._steps, request, reply)
            raise GoOn

        return copies.in_copy(work, request.size)


def _answer_of_several(steps: List[_Called], request: Dict[str, Any]) -> Dict[str, Any]:
    subjects = [_Several(steps, at) for at in [*range(len(steps)), None]]
    searches = [Search(subject, request["installs"]) for subject in subjects]
    lines = [search.line() for search in searches]
    outside = max(search.outside(request["beside"]) for search in searches)
    rows: List[Row] = [
        search.row(room, line)
        for room in rooms_of(request["free"], outside)
        for search, line in zip(searches, lines)
    ]
    remark = " ".join(dict.fromkeys(search.remark for search in searches if search.remark))
    return answer_of(rows, outside, is_installed() or request["installs"], remark)

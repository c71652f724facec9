"""A Step's try, in a copy of the process: it trains for some updates as the program would, and
ends; so each try begins where the program is at its first Step. Must not know cards."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any, Protocol

import torch

from rebatch.fit.error import FitError
from rebatch.fit.program import copies
from rebatch.fit.program.copies import Reply, bytes_of, is_installed, ooms
from rebatch.fit.rows import Search, answer_of, rooms_of
from rebatch.fit.search import Sizes
from rebatch.fit.tried import Request, Tried

_PARTS = 3  # of a batch that is cut


class Training(Protocol):
    """What is used of a Step's training."""

    program: Any
    running: Any
    ranks: Any
    callbacks: Any
    report: Any

    def like(self, program: Any, ranks: Any, /) -> Any: ...


# ---- in a copy of the process ----


class Attempt:
    """A training of some updates in micro-batches of one size."""

    def __init__(self, training: Training, size: int, level: int = 0):
        self._size = size
        program = training.program
        options = dict(program.options)
        for name in ("micro_allowed", "micro_multiple_of", "learn", "log_file"):
            options.pop(name, None)
        options.update(
            micro_start=size,
            micro_smallest=0,
            micro_largest=size,
            on_oom="stop",
            growth=False,
            admission=False,
            log_level="quiet",
        )
        self._cut = program.cut
        self._training = training.like(
            dataclasses.replace(program, options=options, cost=None, on_event=None), training.ranks
        )
        self._training.running.undo.compares_contents = False  # kernels write none
        if level:
            self._training.callbacks.levels.wanted = level

    def batch_of(self, batch: Any, frees: bool = False) -> Any:
        """Some micro-batches of the program's batch; or one larger than it, and in its place where
        the program does not need that."""
        size, samples = self._size, self._cut.length(batch)
        if size == samples:
            return batch
        if size < samples:
            return self._cut.part(batch, 0, min(samples, _PARTS * size), samples)
        whole, rest = divmod(size, samples)
        spans = [(0, samples)] * whole + [(0, rest)] * bool(rest)
        larger = self._cut.arranged(batch, spans, samples)
        for tensor in device_tensors(batch) if frees else ():
            tensor.untyped_storage().resize_(0)
            torch.cuda.empty_cache()
        return larger

    def pass_on(self, batch: Any) -> Any:
        """One update, or its passes. Returns the training that has run."""
        self._training._run(batch)
        return self._training

    def run(self, batch: Any) -> Tried:
        """Some updates of what batch_of() has made. Raises what the program raises, but for
        OOMs."""
        from rebatch.torch.session.oom import is_oom

        peak, device = 0, self._training.program.device
        failed, tagged = ooms(device), _tagged(device)
        try:
            updates, is_over = copies.Updates(), False
            while not is_over:
                self._training._run(batch)
                report = self._training.report
                if report.ooms:
                    return Tried(self._size, False)
                if self._training.program.update.is_of_program:
                    self._update()
                peak = max(peak, report.peak_bytes)
                is_over = updates.suffice()
        except Exception as error:
            # Where memory ran out, what is said of contents is not so: no kernel compared them.
            if not is_oom(error) and ooms(device) == failed:
                raise
            return Tried(self._size, False)
        return Tried(
            self._size,
            True,
            held=held_by([self], bytes_of(device_tensors(batch))),
            tags=_grown(tagged, _tagged(device)),
            refused=ooms(device) - failed,
            **copies.taken(device, peak),
        )

    def _update(self) -> None:
        """What the program does between two batches."""
        update = self._training.program.update
        for optimizer in update.known_optimizers():
            type(optimizer).step(optimizer)
        for p in update.parameters:
            p.grad = None

    def kept(self) -> dict[str, list[torch.Tensor]]:
        """What stays between two updates, by kind."""
        program, device = self._training.program, self._training.program.device
        parameters = [p for p in program.modules.parameters() if p.device == device]
        states = [
            value
            for optimizer in program.update.known_optimizers()
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.device == device
        ]
        buffers = [b for b in program.modules.buffers() if b.device == device]
        return {
            "parameters": [*parameters, *buffers],
            "gradients": [p for p in parameters if p.requires_grad],
            "optimizer": states,
        }


def held_by(attempts: list[Attempt], batch_bytes: int) -> dict[str, int]:
    """What stays between two updates, and a batch, in bytes. What attempts have in common counts
    once."""
    each = [attempt.kept() for attempt in attempts]
    kept = {kind: bytes_of([t for one in each for t in one[kind]]) for kind in each[0]}
    return {**kept, "batch": batch_bytes}


def _tagged(device: torch.device) -> dict[str, Any]:
    """The memory of each tag, by its name: a TagUsage."""
    from rebatch import _library
    from rebatch.torch.allocator.install import pool

    found: dict[str, Any] = {}
    while is_installed():
        usage = _library.TagUsage()
        number = len(found) + 1  # 0 is what has no tag
        if _library.lib.rebatch_pool_get_tag_usage(ctypes.byref(usage), pool(device), number):
            break
        found[usage.name.decode()] = usage
    return found


def _grown(before: dict[str, Any], now: dict[str, Any]) -> dict[str, int]:
    """By tag, bytes at the peak that there were not before. An optimizer's state, which a Step
    tags, is told by itself."""
    grown = {
        name: usage.at_peak_bytes - (before[name].live_bytes if name in before else 0)
        for name, usage in now.items()
        if name != "optimizer"
    }
    return {name: size for name, size in grown.items() if size > 0}


def device_tensors(batch: Any) -> list[torch.Tensor]:
    from rebatch.torch.batches.cut import batch_tensors

    return [tensor for _, tensor in batch_tensors(batch) if tensor.is_cuda]


def _work(training: Training, batch: Any, request: Request) -> Tried:
    """A try, in this process."""
    device = training.program.device
    copies.limit(device, request)
    attempt = Attempt(training, request.size, request.level)
    tried = attempt.batch_of(batch, frees=True)
    copies.restart(device)
    return attempt.run(tried)


# ---- in the program's process ----


def sizes_of(training: Training, batch: Any) -> Sizes:
    """Those that the options allow, and of which there can be a batch."""
    program, cut = training.program, training.program.cut
    samples: int = cut.length(batch)
    limits = {} if program.cost else program.limits
    is_own_type = cut.arranged(batch, [(0, 1)], samples) is None
    return Sizes(
        smallest=limits.get("micro_smallest") or 1,
        largest=min(
            limits.get("micro_largest") or Sizes.largest,
            samples if is_own_type else Sizes.largest,
        ),
        step=limits.get("micro_multiple_of") or 1,
    )


class _Step:
    """A Step at its first call."""

    name, is_loop = "", False

    def __init__(self, training: Training, batch: Any):
        self._training, self._batch = training, batch
        self.samples: int = training.program.cut.length(batch)

    def sizes(self) -> Sizes:
        return sizes_of(self._training, self._batch)

    def tried(self, request: Request) -> Tried:
        def work(reply: Reply) -> None:
            reply.tried(_work(self._training, self._batch, request))

        return copies.in_copy(work, request.size)


def answer_of_step(training: Training, batch: Any, request: dict[str, Any]) -> dict[str, Any]:
    """The rows of a program's Step."""
    search = Search(_Step(training, batch), request["installs"])
    levels = range(1 + (len(training.callbacks.levels) if request["levels"] else 0))
    lines = [search.line(level) for level in levels]
    outside = search.outside(request["beside"])
    rooms = rooms_of(request["free"], outside)
    rows = [search.row(room, lines[level], level) for room in rooms for level in levels]
    return answer_of(rows, outside, is_installed() or request["installs"], search.remark)


def refuse(training: Training) -> None:
    device = training.program.device
    if device.type != "cuda":
        raise FitError(
            f"rebatch: the model is on {device}: expected it on cuda, which is there for a fit"
        )
    if training.ranks and torch.distributed.get_backend() != "fake":
        raise FitError(
            "rebatch: the program trains on several ranks: expected --ranks N and the program "
            "itself, without torchrun"
        )

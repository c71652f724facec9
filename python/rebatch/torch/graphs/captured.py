"""The pass of one shape of micro-batch, captured: what is filled before a replay, and what it
leaves."""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import torch

from rebatch.torch.batches.outputs import kept, tensors_in
from rebatch.torch.graphs.inputs import Inputs
from rebatch.torch.graphs.leaves import other_leaves
from rebatch.torch.graphs.masks import none_where_none_is_given
from rebatch.torch.program.program import Running

LOSS = "the loss"
Gradients = List[Optional[torch.Tensor]]  # in the order of parameters; None: it has got none


class Result(NamedTuple):
    """What a pass leaves: its part of the loss of the batch, what was beside the loss, and
    gradients."""

    loss: torch.Tensor
    extras: Any
    gradients: Gradients


def kind_of_divisor(divisor: Any) -> Any:
    """A Weight serves those of one kind: numbers, or tensors that are alike."""
    if not isinstance(divisor, torch.Tensor):
        return None
    return divisor.dtype, divisor.shape, divisor.device


class Weight:
    """The part of the batch that a micro-batch's loss has, in memory of the device, so that one
    graph serves micro-batches of any batch. `weighted()` gives the bits of Running.weighted()."""

    def __init__(self, running: Running, count: int, device: torch.device, dtype: torch.dtype):
        """dtype: of the weighted loss."""
        self._running, self._dtype = running, dtype
        # CUDA's kernels compute with a number of this type.
        self._wide = dtype if dtype is torch.float64 else torch.float32
        value = self._value(count)
        self._divisor = value if isinstance(value, torch.Tensor) else None
        self._memory: torch.Tensor = (
            torch.ones((), dtype=self._wide, device=device)
            if self._divisor is None
            else self._divisor.clone()
        )
        self._filled: Any = 1.0
        self.fill(count)

    def _value(self, count: int) -> Any:
        """A factor, or a tensor of the device, which divides."""
        running = self._running
        if not running.program.normalizer:
            return count / running.total
        divisor = running.divisor
        if isinstance(divisor, torch.Tensor) and divisor.device.type != "cpu":
            return divisor
        # The device multiplies by the reciprocal of a number of the host.
        return (1 / torch.as_tensor(divisor, dtype=self._wide)).item()

    def fill(self, count: int) -> None:
        """For another micro-batch."""
        value = self._value(count)
        if self._divisor is not None:
            self._memory.copy_(value)
        elif value != self._filled:
            self._memory.fill_(value)
            self._filled = value

    def weighted(self, loss: torch.Tensor) -> torch.Tensor:
        if self._divisor is not None:
            return torch.div(loss, self._memory)
        return torch.mul(loss.to(self._wide), self._memory).to(self._dtype)


class Pass:
    """The pass of a micro-batch as a graph has it."""

    def __init__(
        self,
        running: Running,
        parameters: Sequence[torch.Tensor],
        inputs: Inputs,
        weight: Weight,
    ):
        self._running, self._parameters = running, parameters
        self._inputs, self._weight = inputs, weight
        self._recording: Any = None
        self._gradients: List[torch.Tensor] = []  # those that are there

    def capture(self, recorder: Any) -> None:
        self._recording = recorder.record(self._run)
        self._gradients = [g for g in self._recording.result.gradients if g is not None]

    def _run(self) -> Result:
        running, parameters = self._running, self._parameters
        running.is_captured = True
        try:
            with none_where_none_is_given(running.program.modules):
                if not running.has_ranks:
                    return self._pass(parameters)
                with other_leaves(running.program.modules, parameters) as leaves:
                    return self._pass(leaves)
        finally:
            running.is_captured = False

    def _pass(self, leaves: Sequence[torch.Tensor]) -> Result:
        program = self._running.program
        loss, extras = program.loss_of(self._inputs.samples)
        weighted = self._weight.weighted(loss)
        program.update.backward(weighted)
        return Result(weighted.detach(), kept(extras, are_lent=True), taken(leaves))

    def replay(self, tensors: List[torch.Tensor], count: int) -> Result:
        """With other samples. The gradients are the graph's own, which the next replay overwrites;
        the rest are copies."""
        self._inputs.fill(tensors)
        self._weight.fill(count)
        self._recording.replay()
        torch.autograd.graph.increment_version(self._gradients)
        loss, extras, gradients = self._recording.result
        return Result(loss.clone(), kept(extras, are_lent=True), gradients)


def taken(parameters: Sequence[torch.Tensor]) -> Gradients:
    """The gradients in .grad, which then has none."""
    found = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    return found


def put(parameters: Sequence[torch.Tensor], gradients: Gradients) -> None:
    for p, gradient in zip(parameters, gradients):
        p.grad = gradient


def tensors_of(result: Result) -> List[Tuple[str, torch.Tensor]]:
    """All that a pass leaves, by what it is."""
    found = [(LOSS, result.loss)]
    found += [("a gradient", g) for g in result.gradients if g is not None]
    beside = "what loss_fn returned beside the loss"
    return found + [(beside, tensor) for tensor in tensors_in(result.extras)]

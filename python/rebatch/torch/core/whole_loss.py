"""A loss over the whole batch, of rows that `embed` makes of the samples. Where the batch does not
run as a whole, its samples are embedded without a graph, the loss and its gradient by the rows come
next, and then the samples are embedded again, with a graph, part by part. Both passes have the same
parts and draw the same random numbers. Must not know how gradients are accumulated."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Callable, Iterator, List, Optional, Sequence, Tuple

import torch

from rebatch import _library as c
from rebatch._library import lib
from rebatch.torch.allocator import install as allocator
from rebatch.torch.batches.cut import shallow
from rebatch.torch.batches.outputs import kept, split_result
from rebatch.torch.check.two_passes import TwoPasses
from rebatch.torch.private import next_node_number
from rebatch.torch.program.embeddings import (
    AsResult,
    Embedded,
    joined_rows,
    may_have_gradient,
    refuse_no_gradient,
    refuse_other_ways,
)
from rebatch.torch.program.program import Program, Running
from rebatch.torch.session.oom import is_oom, let_go
from rebatch.torch.session.session import Ended, Exhausted, Session, why_of
from rebatch.torch.undo.generators import States

if TYPE_CHECKING:
    from rebatch.torch.ranks.gathering import Gathering  # needs a PyTorch with torch.distributed

_LOOKS = 3
Span = Tuple[int, int]  # samples: the first one, and how many
# Tensors with a graph, and their gradients.
Rows = Tuple[List[torch.Tensor], List[torch.Tensor]]


class WholeLoss:
    """Of one training. put_back() makes the state that before the attempt which runs."""

    def __init__(
        self,
        running: Running,
        gathering: Optional[Gathering],
        put_back: Callable[[], None],
        passes: TwoPasses,
    ):
        self._running, self.gathering, self._put_back = running, gathering, put_back
        self.passes = passes
        self._is_used = False  # what embed returned, in a loss, as far as is known
        self._looks_left = _LOOKS  # at what else of embed a loss uses
        self.begin()

    def begin(self) -> None:
        """A batch begins."""
        self._ooms = 0  # of its loss, where that ran alone
        self._has_voted = self.is_in_loss = False
        self.has_graph = True  # what runs of embed
        self.drop()

    def voted(self) -> None:
        """All ranks have begun the batch."""
        if self.gathering and not self._has_voted:
            self.gathering.begin()
        self._has_voted = True

    def drop(self) -> None:
        """Nothing of the batch is held."""
        self.passes.begin()
        self._graph: Optional[Embedded] = None  # of a whole batch
        self._own: Optional[Embedded] = None  # rows of this rank, without a graph
        self._met: Any = None  # rows of all ranks, and where this one's begin
        self._leaves: List[torch.Tensor] = []  # rows of all ranks
        self._results: List[torch.Tensor] = []  # the same for loss_fn, which may change them
        self._are_as_made: List[bool] = []  # and whether it has not
        self._start = 0  # of this rank's rows in these
        self._gradients: List[Optional[torch.Tensor]] = []  # by this rank's rows
        self._spans: List[Span] = []  # of the first pass
        self._left: List[Span] = []  # of these, for the second pass
        self._draws = False  # the first pass has
        self._nodes = 0, 0  # of autograd, in a whole batch's embed: the first, behind the last
        self._hooks: List[Any] = []  # of a whole batch that shows whether its rows are used
        self._states: List[States] = []  # of generators: when the batch began, embedded, and ended

    # ---- the first pass, and the loss ----

    def first_pass(self, count: int) -> None:
        """Of all samples, in micro-batches of `count`. A whole batch keeps its graph."""
        self.drop()
        self.is_in_loss, self.has_graph = False, True
        running, is_whole = self._running, count == self._running.samples
        if is_whole and not self.gathering:
            self._graph = self._embedded(0, count)
            self._graph.check_graph()
            return
        self._spans = [(0, count)] if is_whole else list(self._cuts(count))
        self._states = [running.generators.states()]
        if is_whole:
            self._graph = self._embedded(0, count)
            self._own = self._graph.detached()
        else:
            self.has_graph = False
            with torch.no_grad():
                self._own = joined_rows([self._embedded(*s).copied() for s in self._spans])
            self.has_graph = True
        self._draws = running.generators.have_moved(self._states[0])
        self._states.append(running.generators.states())
        if not is_whole:
            self._put_back()
            if running.undo.is_looking:
                running.undo.save(c.GuardPoint.ATTEMPT)

    def _embedded(self, first: int, count: int) -> Embedded:
        running, begun = self._running, next_node_number() if self._looks_left else 0
        with allocator.tag("forward"):
            embedded = running.program.embedded(running.part(first, count), count)
        if self._looks_left:
            self._nodes = begun, next_node_number()
        return embedded

    def _cuts(self, count: int) -> Iterator[Span]:
        """Micro-batches like the first one of `count` samples."""
        running, first = self._running, 0
        options, most = running.program.limits, 0
        if running.program.cost:
            most = running.cost(0, count)
        while first < running.samples:
            _, start, length = running.place(first)
            left = start + length - first
            size = min(left, count) if not most else _within(running, first, left, most)
            if size < count and (options.get("micro_allowed") or options.get("micro_multiple_of")):
                size = next((n for n in running.allowed_sizes() if n <= size), size)
            size = running.with_rest(first, size) or size
            yield first, size
            first += size

    @contextlib.contextmanager
    def over_the_batch(self, session: Session) -> Iterator[None]:
        """Around the loss and its backward pass, which no cut makes smaller. Raises Ended where
        memory runs out in it for the second time."""
        self.is_in_loss = True
        try:
            yield
        except Exception as error:
            self._ooms += not self._graph and is_oom(error)
            if self._ooms < 2 or not is_oom(error):
                raise
            text = str(error)
            let_go(error)
        else:
            self.is_in_loss = False
            return
        assert self._own is not None
        tensors = self._leaves or self._own.tensors
        said = _too_large(self._running.program, self._running.samples, tensors, text)
        session.keep_error(said)
        lib.rebatch_explain(session.rb, why_of(said))
        raise Ended(c.Status.E_USER)

    def loss(self, trained: Sequence[torch.nn.Parameter]) -> Optional[Tuple[torch.Tensor, Any]]:
        """The loss, whose backward pass take_gradients() follows, and what was beside it. None
        where another rank has failed. It gives no gradient to `trained` yet."""
        running, program = self._running, self._running.program
        ranks, graph = 1, self._graph if self._looks_left else None
        of_rows = {tensor.grad_fn for tensor in graph.tensors} if graph else None
        if self._own is None:
            assert self._graph is not None
            if not self._is_used:
                self._hooks = [
                    t.register_hook(self._note_use) for t in self._graph.tensors if t.requires_grad
                ]
            value = self._graph.with_rows(self._graph.tensors)
        else:
            self._leaves, ranks = self._own.tensors, 1
            if self.gathering:
                met, self._met = self._met or self.gathering.meet(self._own.tensors), None
                if met is None:
                    return None
                (self._leaves, self._start), ranks = met, self.gathering.size
            self._leaves = [t.detach().requires_grad_(may_have_gradient(t)) for t in self._leaves]
            results = [AsResult.apply(t) if t.requires_grad else t for t in self._leaves]
            value, self._results = self._own.with_rows(results), results
            running.generators.put(self._states[1])
        loss, extras = split_result(program.called(program.loss_fn, value, shallow(running.batch)))
        if of_rows and isinstance(loss, torch.Tensor):
            self._looks_left -= 1
            refuse_other_ways(loss, of_rows, self._nodes)
        loss = running.weighted(loss, running.total, trained)
        return loss / ranks if ranks > 1 else loss, kept(extras)

    def take_gradients(self) -> None:
        """The loss has gone backward: what its gradient by this rank's rows is."""
        if self._own is None:
            while self._hooks:
                self._hooks.pop().remove()
            if not self._is_used:
                refuse_no_gradient()
            return
        running, ranks = self._running, self.gathering.size if self.gathering else 1
        mine = slice(self._start, self._start + running.samples)
        gradients = [leaf.grad for leaf in self._leaves]
        self._gradients = [g if g is None else g[mine] * ranks for g in gradients]
        self._are_as_made = [result._version == 0 for result in self._results]
        self._leaves, self._results, self._left = [], [], list(self._spans)
        self._states[2:] = [running.generators.states()]
        if not self._graph:
            running.generators.put(self._states[0])

    def _note_use(self, _gradient: torch.Tensor) -> None:
        self._is_used = True

    # ---- the second pass ----

    def second_pass(self, first: int, count: int) -> Iterator[Rows]:
        """Rows of these samples, and their gradients. Where random numbers are drawn, the parts are
        those of the first pass: all that end with these samples."""
        assert self._own or self._graph  # the first pass has not been dropped
        if self._left and not self._draws:
            yield self._rows(first, count)
        while self._draws and self._left and sum(self._left[0]) <= first + count:
            yield self._rows(*self._left.pop(0))
        if first + count == self._running.samples and self._states[2:]:
            self._running.generators.put(self._states[2])

    def second_pass_again(self) -> Iterator[Rows]:
        """Of all samples."""
        for span in self._spans:
            yield from self.second_pass(*span)

    def _rows(self, first: int, count: int) -> Rows:
        assert self._own is not None
        graph, self._graph = self._graph, None
        tensors, rows = (graph or self._embedded(first, count)).tensors, slice(first, first + count)
        used = [
            (i, tensor, gradient[rows])
            for i, (tensor, gradient) in enumerate(zip(tensors, self._gradients))
            if tensor.requires_grad and gradient is not None
        ]
        if not used:
            refuse_no_gradient()
        if not graph:
            own = self._own.tensors
            self.passes.note([(t, own[i][rows]) for i, t, _ in used if self._are_as_made[i]])
        return [tensor for _, tensor, _ in used], [gradient for _, _, gradient in used]

    # ---- with other ranks ----

    def is_asked_again(self) -> bool:
        """Whether another rank has embedded its samples again, so that the loss is another one."""
        if not self.gathering or self.gathering.is_over:
            return False
        assert self._own is not None
        self._met = self.gathering.meet(self._own.tensors, is_at_end=True)
        return self._met is not None


def _within(running: Running, first: int, left: int, most: int) -> int:
    """How many samples cost no more than that; one at least."""
    low, high = 1, left
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if running.cost(first, middle) <= most else (low, middle - 1)
    return low


def _too_large(
    program: Program, samples: int, tensors: Sequence[torch.Tensor], text: str
) -> Exhausted:
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
    return Exhausted(
        f"out of memory in {program.loss_name} over the whole batch of {samples} samples, which "
        f"gets embeddings of {shapes} and is not cut: expected a loss that takes its rows in "
        f"chunks, fewer samples, or more memory; the parameters are as they were\n{text}"
    )


def evaluated(program: Program, batch: Any, parts: List[Any]) -> Tuple[torch.Tensor, Any]:
    """The loss of embeddings, those of consecutive samples, without a graph. Raises Exhausted where
    memory runs out in it."""
    whole = joined_rows(parts)
    value = whole.with_rows(whole.tensors)
    try:
        with torch.no_grad():
            loss, extras = split_result(program.called(program.loss_fn, value, shallow(batch)))
    except Exception as error:
        if not is_oom(error):
            raise
        let_go(error)
        raise _too_large(program, len(whole.tensors[0]), whole.tensors, str(error)) from None
    return loss.detach(), kept(extras)

"""What runs in micro-batches: what a Step is made with, and its batch that runs. Checks and the
comparison of cuts read these; they must not know the Step, its session and its ranks."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import itertools
import operator
from typing import (
    Any,
    Callable,
    ContextManager,
    Dict,
    List,
    NoReturn,
    Optional,
    Sequence,
    Set,
    Tuple,
    cast,
)

import torch

from rebatch._library import Event
from rebatch.torch.allocator import install as allocator
from rebatch.torch.batches.batch_norm import keep_pairs, with_rest
from rebatch.torch.batches.cut import Batches, Cut, owned
from rebatch.torch.batches.outputs import joined, kept, split_result
from rebatch.torch.private import HOOKS_OF_TENSORS
from rebatch.torch.program.embeddings import Embedded
from rebatch.torch.program.mistakes import refuse_gradients, refuse_scaled
from rebatch.torch.session.threads import attempt
from rebatch.torch.undo.changes_outside import Told
from rebatch.torch.undo.generators import Generators
from rebatch.torch.undo.places import is_of_program
from rebatch.torch.undo.undo import Undo
from rebatch.torch.update.passes import Passes


_UNCUT = object()


def listed(value: Any) -> List[Any]:
    """One thing or several, as a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def is_manager(value: Any) -> bool:
    """Whether it is a context manager, and not a class of them."""
    return hasattr(type(value), "__enter__")


def refuse_update_in_loss_fn() -> None:
    """An update within an attempt could not be taken back."""
    if attempt.runs:
        raise ValueError(
            "rebatch: a Step or Backward was called within a loss_fn or a block of parts(), where "
            "its update or gradients would stay if the micro-batch fails and runs again: expected "
            "a call before or after that of the one whose loss_fn or block that is"
        )


@dataclasses.dataclass
class Program:
    """What a Step is made with, by the names of its arguments."""

    model: Any
    loss_fn: Callable[[Any, Any], Any]
    update: Passes  # or an Update: optimizers, schedulers, scaler, clip
    cut: Cut  # batch_dim, slice, length
    normalizer: Optional[Callable[[Any], Any]] = None
    autocast: Any = None
    cost: Optional[Callable[[Any, int, int], int]] = None
    lighten: List[Callable[[bool], None]] = dataclasses.field(default_factory=list)
    generators: List[Any] = dataclasses.field(default_factory=list)
    is_fresh: bool = True  # gradients
    graphs: int = 0  # that a Graphs may keep
    on_event: Optional[Callable[[str, Event], None]] = None
    options: Dict[str, Any] = dataclasses.field(default_factory=dict)  # of the session
    embed: Optional[Callable[[Any, Any], Any]] = None  # rows for a loss over the whole batch

    keeps_pairs: bool = False  # BatchNorm has been in training mode

    # What an adapter says of it.
    loss_name: str = "loss_fn"  # what users call it
    owners: List[Any] = dataclasses.field(default_factory=list)  # of what loss_fn may change
    functions: Optional[List[Any]] = None  # that loss_fn runs; None: it is one itself
    # Around runs of loss_fn that are no part of a step.
    aside: Callable[[], ContextManager[Any]] = contextlib.nullcontext

    @functools.cached_property
    def modules(self) -> torch.nn.ModuleList:
        """Those of the model."""
        return torch.nn.ModuleList(listed(self.model))

    @property
    def device(self) -> torch.device:
        """That of the first parameter, now."""
        return self.update.device

    @property
    def limits(self) -> Dict[str, Any]:
        """The options, with those that BatchNorm asks for."""
        return keep_pairs(self.options) if self.keeps_pairs else self.options

    @property
    def has_pairs(self) -> bool:
        """Whether no micro-batch has one sample."""
        return self.keeps_pairs and self.limits.get("micro_smallest", 1) > 1

    @property
    def cut_name(self) -> str:
        """What users call the function that gets parts of a batch."""
        return self.loss_name if self.embed is None else "embed"

    def functions_that_run(self) -> List[Any]:
        """Those of the program that run in a micro-batch."""
        return self.functions or [self.loss_fn, *listed(self.embed)]

    def functions_of_a_pass(self) -> List[Any]:
        """Those, a function of the program that goes backward, and its hooks of parameters."""
        hooks = self._hooks(HOOKS_OF_TENSORS[0])
        return [*self.functions_that_run(), *self.update.functions, *hooks]

    def functions_of_an_attempt(self) -> List[Any]:
        """Those that run in a micro-batch, and all hooks of parameters."""
        hooks = [hook for table in HOOKS_OF_TENSORS for hook in self._hooks(table)]
        return [*self.functions_that_run(), *hooks]

    def _hooks(self, table: str) -> List[Any]:
        """Those of the program, of parameters, each once."""
        tables = map(operator.attrgetter(table), self.modules.parameters())
        hooks = {id(hook): hook for each in tables if each for hook in each.values()}
        return [h for h in hooks.values() if isinstance(h, functools.partial) or is_of_program(h)]

    def handled(self) -> Set[int]:
        """The ids of what a Step steps, saves or calls by itself."""
        update = self.update
        parts = [*update.given, *update.optimizers, *update.schedulers, update.scales]
        parts += self.generators
        return {id(part) for part in (*parts, *listed(self.model))}

    def loss_of(self, samples: Any) -> Tuple[Any, Any]:
        """What loss_fn returns of them: the loss, and what is beside it. With embed it is what
        stands in for the loss, for a few samples alone."""
        if self.embed is not None:
            return self.embedded(samples).stand_in(), None
        was_running, attempt.runs = attempt.runs, True
        try:
            if self.autocast is None:
                return split_result(self.loss_fn(self.model, samples))
            with self._autocasting():
                return split_result(self.loss_fn(self.model, samples))
        finally:
            attempt.runs = was_running

    def compares(self, batch: Any) -> None:
        """What runs next are a few samples, and parts of them, at two cuts."""

    def kept(self, beside: Any) -> Any:
        """Of what is beside a loss, what is compared at two cuts: nothing of an adapter's."""
        return kept(beside) if self.functions is None else None

    def results_of(self, whole: Any, parts: List[Any], count: int) -> Tuple[Any, Any]:
        """What was kept of 2 * `count` samples in one call and in two, each as it is combined."""
        dim = self.cut.dim
        return joined([whole], [2 * count], dim), joined(parts, [count, count], dim)

    def embedded(self, samples: Any, count: int = 0) -> Embedded:
        """What embed returns of so many samples; 0: of those that there are."""
        assert self.embed is not None
        return Embedded(self.called(self.embed, samples), count)

    def embedded_alone(self, samples: Any) -> Embedded:
        """The same without a graph, to be kept."""
        return self.embedded(samples).copied()

    def called(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What embed, or a loss_fn of the whole batch, returns."""
        was_running, attempt.runs = attempt.runs, True
        try:
            with contextlib.nullcontext() if self.autocast is None else self._autocasting():
                return function(self.model, *arguments)
        finally:
            attempt.runs = was_running

    def _autocasting(self) -> ContextManager[Any]:
        if isinstance(self.autocast, torch.dtype):
            return torch.autocast(self.device.type, dtype=self.autocast)
        context: Any = self.autocast
        if not is_manager(context):
            context = context()
            if not is_manager(context):
                raise TypeError(
                    f"rebatch: autocast() returned {context!r}: expected a context manager"
                )
        return cast(ContextManager[Any], context)


class Running:
    """The batch that runs: of a training, an evaluation, a probe or a check. One object serves all
    batches of a Step, one after another."""

    def __init__(self, program: Program, undo: Undo, told: Told):
        self.program, self.undo, self.told = program, undo, told
        self.has_ranks = False  # other ranks train the model too
        self.has_window = False  # and it is one of fully_shard()
        self.is_captured = False  # the pass that runs
        self.generators = Generators((), program.generators)  # as they are saved
        self.batch: Any = None  # or Batches
        self.samples = self.longest = 0  # of all, and of the longest of Batches
        self._each: List[Any] = []  # of Batches, or the batch
        self._ends: List[int] = []  # of their samples
        self.weight: Any = None  # what the losses are divided by, with a normalizer
        # The same of all ranks, and their samples.
        self.divisor: Any = None
        self.total = 0
        self._is_first_loss = True
        self.loss: Optional[torch.Tensor] = None  # so far; None: there was no memory for it

    def begin(self, batch: Any) -> None:
        """Another batch, which is checked."""
        each = batch if isinstance(batch, Batches) else [batch]
        lengths = [self.program.cut.length(one) for one in each]
        self.batch, self._each, self._ends = batch, each, list(itertools.accumulate(lengths))
        self.samples, self.longest = self._ends[-1], max(lengths)

    @property
    def are_several(self) -> bool:
        """Batches, of which no two run together."""
        return len(self._each) > 1

    def place(self, first: int) -> Tuple[Any, int, int]:
        """The batch of Batches that has a sample, the first one of it, and how many it has."""
        i = bisect.bisect_right(self._ends, first)
        start = self._ends[i - 1] if i else 0
        return self._each[i], start, self._ends[i] - start

    def weigh(self) -> None:
        """Ask the normalizer."""
        normalizer = self.program.normalizer
        self.weight = normalizer(self.batch) if normalizer else None
        self.divisor, self.total = self.weight, self.samples

    def end(self) -> None:
        """Nothing of the batch is held."""
        self.batch = self.weight = self.divisor = None
        self._each = [None] * len(self._each)

    def part(self, first: int, count: int) -> Any:
        """These samples."""
        batch, start, length = self._each[0], 0, self.samples
        if len(self._each) > 1:
            batch, start, length = self.place(first)
            if count < length:
                self.program.cut.length(batch)  # by which its lists are read
        part = self.program.cut.part(batch, first - start, count, length)
        return owned(part, torch.is_tensor) if self.undo.frees_batch else part

    def with_rest(self, first: int, count: int) -> int:
        """How many samples the micro-batch of `count` runs; 0: they ran with those before it."""
        if not (self.program.keeps_pairs and self.program.has_pairs):
            return count
        _, start, length = self.place(first)
        return with_rest(first - start, count, length)

    def cost(self, first: int, count: int) -> int:
        """Of these samples, as far as they can run together."""
        assert self.program.cost is not None
        batch, start, length = self.place(first)
        return int(self.program.cost(batch, first - start, min(count, start + length - first)))

    def allowed_sizes(self) -> List[int]:
        """The micro-batch sizes that the options allow for it, the largest first."""
        options, samples = {} if self.program.cost else self.program.limits, self.longest
        largest = min(options.get("micro_largest") or samples, samples)
        smallest = options.get("micro_smallest") or 1
        multiple = options.get("micro_multiple_of") or 1
        listed = options.get("micro_allowed") or range(multiple, largest + 1, multiple)
        sizes = {size for size in listed if smallest <= size <= largest and size % multiple == 0}
        return sorted(sizes, reverse=True) or [samples]

    def weighted_loss(
        self,
        first: int,
        count: int,
        trained: Sequence[torch.nn.Parameter] = (),
        samples: Any = _UNCUT,
    ) -> Tuple[torch.Tensor, Any]:
        """The loss, weighted by its part of the batch, and what loss_fn returned beside it. It
        gives no gradient to `trained`, which have none. `samples`: where they were cut already."""
        if samples is _UNCUT:
            samples = self.part(first, count)
        with allocator.tag("forward"):
            loss, extras = self.program.loss_of(samples)
        return self.weighted(loss, count, trained), extras

    def weighted(
        self, loss: Any, count: int, trained: Sequence[torch.nn.Parameter] = ()
    ) -> torch.Tensor:
        """The loss of `count` samples by its part of the batch."""
        program = self.program
        given = [p for p in trained if p.grad is not None]
        if given:
            refuse_gradients(program.loss_name, listed(program.model), given)
        if not (isinstance(loss, torch.Tensor) and loss.dim() == 0 and loss.requires_grad):
            self._refuse(loss)
        if self._is_first_loss:
            refuse_scaled(program.loss_name, loss, program.update.scaler_option)
            self._is_first_loss = False
        weighted: torch.Tensor = loss
        if program.normalizer:
            weighted = loss / self.divisor
        elif count != self.total:
            weighted = loss * (count / self.total)
        return weighted

    def _expected(self) -> str:
        if self.program.embed is not None:
            return "the loss of the whole batch"
        return f"the {'sum' if self.program.normalizer else 'mean'} over the samples"

    def _refuse(self, loss: Any) -> NoReturn:
        if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
            what = (
                f"a tensor of shape {tuple(loss.shape)}"
                if isinstance(loss, torch.Tensor)
                else f"a {type(loss).__name__}"
            )
            raise ValueError(
                f"rebatch: loss_fn returned {what}: expected a scalar tensor, "
                f"{self._expected()}, as its result or as the first of two"
            )
        raise ValueError(
            "rebatch: the loss of loss_fn needs no gradient: expected one that depends on "
            "parameters, and no torch.no_grad() around it"
        )

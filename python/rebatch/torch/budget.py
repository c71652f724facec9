"""Budget: the most cost of the next micro-batch, for samplers that make their own."""

from __future__ import annotations

import dataclasses
import gc
import math
import sys
import types
import warnings
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple, Union

import torch

from rebatch import _library as c
from rebatch._library import lib
from rebatch._user_code import user_stacklevel
from rebatch.torch.backward import Backward
from rebatch.torch.program.program import listed
from rebatch.torch.session.cost_memory import CostMemory
from rebatch.torch.session.oom import asked_bytes, is_oom, let_go
from rebatch.torch.session.report import Report
from rebatch.torch.session.session import session_options
from rebatch.torch.session.swallowed import swallowing_line_of_block
from rebatch.torch.undo.block_names import BlockNames
from rebatch.torch.undo.copies import own_part
from rebatch.torch.update.first_memory import first_kept_bytes
from rebatch.torch.update.passes import check_has, check_optimizer

# Classes of length, so many in each factor of two; the first is of micro-batches without a length.
_IN_OCTAVE = 8
_LOW, _HIGH = -8, 32  # powers of two, beyond which lengths are of the outermost classes
# A part of the available memory that stays free: by so much it differs from one block to the next.
_SPARE = 64
_PIECE = 16  # such a part more is kept out when memory that lay in pieces was too little again
_MOST_BARE = 16  # blocks in a row that begin without gradients where others began with them
_LOW_COST = 64  # such a part of the budget is low
_MOST_COST = 2**53  # counted without rounding
_STATE = "what Budget.state_dict() returned"
_CLASSES = 1 + _IN_OCTAVE * (_HIGH - _LOW)


def _number_of(name: str, value: Any, expected: str, least: float = 0.0) -> float:
    """Of a cost or length above 0, or from `least` on, which may be a tensor or an array of one."""
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        kind = type(value).__name__
        raise TypeError(f"rebatch: {name} is a {kind}: expected {expected}") from None
    if not (0 < number <= _MOST_COST and number >= least):
        raise ValueError(f"rebatch: {name} is {value!r}: expected {expected}")
    return number


def _class_of(longest: Optional[float]) -> int:
    if longest is None:
        return 0
    number = math.ceil(_IN_OCTAVE * (math.log2(longest) - _LOW))
    return min(max(number, 1), _CLASSES - 1)


def _end_of(number: int) -> float:
    """The longest length of a class."""
    return float(2.0 ** (_LOW + number / _IN_OCTAVE))


def _name_of_backward(frame: types.FrameType) -> str:
    """Of one that the code of a frame names; "": of none."""
    code, known = frame.f_code, {**frame.f_globals, **frame.f_locals}
    names = (*code.co_names, *code.co_varnames, *code.co_freevars)
    return next((name for name in names if isinstance(known.get(name), Backward)), "")


class Tokens:
    """The budget as a sampler reads it, which may be in another process: what a Budget becomes
    when it is pickled for a worker of a DataLoader. It has the values of the Budget at any time."""

    def __init__(self, table: torch.Tensor):
        self._table = table  # of each class: a budget, and the length that it holds for

    def __deepcopy__(self, _memo: Any) -> Tokens:
        """Samplers copy what they are made with: the copy reads on."""
        return self

    @property
    def tokens(self) -> int:
        """The most cost of the next micro-batch, in the unit of `cost`."""
        return self._read(0, None)

    def tokens_for(self, longest: float) -> int:
        """The same for a micro-batch whose longest sample has that length."""
        longest = _number_of("longest", longest, "a length above 0")
        return self._read(_class_of(longest), longest)

    def _read(self, number: int, longest: Optional[float]) -> int:
        budget, length = self._table[number].tolist()
        return max(1, int(budget * min(1.0, length / longest) if longest else budget))


class Budget(Tokens):
    """The most cost of the next micro-batch, learned from those that ran, for a sampler that makes
    micro-batches itself::

        budget = rebatch.Budget(model, optimizer)
        for batch in batches_of(dataset, lambda: budget.tokens):    # the sampler of the program
            try:
                with budget.measure(cost=batch.numel()):
                    loss_fn(model, batch).backward()
            except torch.OutOfMemoryError:      # the budget is lower now
                continue                        # this micro-batch is skipped

    Memory is predicted from the cost, and the budget is as large as fits. An OOM in a block of
    measure() lowers it. It rises again, and falls with a limit that is lowered.

    Args:
        model: a module, a list of modules, or a Backward: the blocks then call it, and what runs
            out of memory there is cut and done all the same
        optimizer: an optimizer, or several: memory for their first step is kept free
        cost: cost(batch) -> what measure(batch) is to take for its cost, or (cost, longest). None:
            measure() gets the numbers
        start: the budget of the first micro-batch, such as that of one sample
        largest: the most that the budget may become; None: what fits. Where nobody counts memory,
            as on a CPU, None is `start`, or the first micro-batch that ran
        log_level: as of a Backward: what is written to standard error

    Where the memory of two micro-batches of one cost differs with the length of their samples, as
    with attention, measure(cost, longest) and tokens_for(longest) learn a budget for each class of
    lengths, eight in each factor of two."""

    def __init__(
        self,
        model: Union[torch.nn.Module, Sequence[torch.nn.Module], Backward],
        optimizer: Union[None, torch.optim.Optimizer, Sequence[torch.optim.Optimizer]] = None,
        *,
        cost: Optional[Callable[[Any], Any]] = None,
        start: int = 1,
        largest: Optional[int] = None,
        log_level: str = "default",
    ) -> None:
        super().__init__(torch.zeros(_CLASSES, 2, dtype=torch.float64).share_memory_())
        start = int(_number_of("start", start, "1 or more", 1))
        largest = None if largest == math.inf else largest
        if largest is not None:
            largest = int(_number_of("largest", largest, "1 or more, or None", 1))
        self._backward = model if isinstance(model, Backward) else None
        self._modules = listed(self._backward.model if self._backward else model)
        for module in self._modules:
            check_has("model", module, "named_buffers", "a torch.nn.Module, or a Backward")
        self._optimizers, self._cost = listed(optimizer), cost
        for each in self._optimizers:
            check_optimizer("optimizer", each)
        if not (cost is None or callable(cost)):
            raise TypeError(f"rebatch: cost is {cost!r}: expected a function of a micro-batch")
        self._start, self._largest, self._log_level = start, largest, log_level
        self._memory: Optional[CostMemory] = None  # once a micro-batch has run
        self._known: Dict[int, _Class] = {}
        self._seen_bytes = 0  # that were available when all classes were looked at
        self._in_pieces = 0  # bytes that were free when a request failed for which they are enough
        self._agrees = self._accumulates = False
        self._told: Set[str] = set()  # of blocks that keep an OOM to themselves
        self._bare = 0  # blocks in a row that began without gradients
        self._is_measuring = False
        self.microbatches = self.ooms = 0
        self._publish()

    def __reduce__(self) -> Any:
        return Tokens, (self._table,)

    def __repr__(self) -> str:
        return f"Budget(tokens {self.tokens}, classes {len(self._known)}, OOMs {self.ooms})"

    def measure(self, cost: Any, longest: Optional[float] = None) -> Measure:
        """Around the forward and backward pass of one micro-batch of that cost, whose longest
        sample has that length::

            with budget.measure(cost):

        With Budget(cost=...) it gets the micro-batch. An OOM in the block goes on to the program,
        and the budget is lower by then. Numbers, texts and other small values that the block has
        assigned anew are put back, and other names that it has assigned are None. The gradients of
        the block may be there in part: clear them where the micro-batch is to run again."""
        if self._cost:
            found = self._cost(cost)
            is_pair = isinstance(found, tuple) and len(found) == 2
            cost, longest = found if is_pair else (found, longest)
        cost = _number_of("cost", cost, "a number above 0, or Budget(cost=...) that returns it")
        if longest is not None:
            longest = _number_of("longest", longest, "a length above 0")
        return Measure(self, math.ceil(cost), _class_of(longest), longest or 0.0)

    def agree(self, group: Any = None) -> None:
        """Set the budget to the smallest of all ranks, which call this together, such as after each
        update. From the first call on, what the sampler reads changes here alone."""
        self._open()
        distributed = torch.distributed
        is_nccl = "nccl" in distributed.get_backend(group)
        values = torch.tensor(self._values(), dtype=torch.float64)
        values = values.to(self._device) if is_nccl else values
        distributed.all_reduce(values, distributed.ReduceOp.MIN, group=group)
        self._agrees = True
        self._table.copy_(values)

    def state_dict(self) -> Dict[str, Any]:
        """What a resumed training needs to go on with what was found: plain numbers."""
        classes = [[number, *dataclasses.astuple(k)] for number, k in self._known.items()]
        for values in classes if self._largest else ():
            values[1] = min(values[1], self._largest)
        return {"classes": classes}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Go on with the budgets of state_dict()."""
        try:
            known = {int(key): _Class(*values) for key, *values in state["classes"]}
            is_right = all(0 <= n < _CLASSES and 1 <= k.budget for n, k in known.items())
        except (KeyError, TypeError, ValueError):
            is_right = False
        if not is_right:
            raise ValueError(f"rebatch: the state is {state!r:.60}: expected {_STATE}")
        self._known = known
        self._memory = None
        self._publish()

    # ---- what the sampler reads ----

    def _values(self) -> List[Tuple[float, float]]:
        """For the table. A class of which nothing is known has what others show: memory for a cost
        rises with the length, and by no more than in proportion to it."""
        step, most = 2.0 ** (-1 / _IN_OCTAVE), float(self._largest or math.inf)
        begin = float(self._start), math.inf
        shorter = [0.0] * (_CLASSES + 1)
        values = [begin] * _CLASSES
        for number in range(1, _CLASSES):
            here, end = self._known.get(number), _end_of(number)
            there = here.budget * min(1.0, here.longest / end) if here else 0.0
            shorter[number] = max(shorter[number - 1] * step, there)
        longer = 0.0
        for number in reversed(range(1, _CLASSES)):
            here = self._known.get(number)
            longer = max(longer, here.budget if here else 0.0)
            guess = max(longer, shorter[number])
            if guess:
                values[number] = guess, _end_of(number)
        for number, known in self._known.items():
            values[number] = known.budget, known.longest or math.inf
        return [(min(budget, most), length) for budget, length in values]

    def _publish(self) -> None:
        if not self._agrees:
            self._table.copy_(torch.tensor(self._values(), dtype=torch.float64))

    # ---- what is learned ----

    def _open(self) -> CostMemory:
        """The memory of the device that the model is on when the first micro-batch runs."""
        if self._memory is None:
            parameters = [p for m in self._modules for p in m.parameters()]
            self._trained = [p for p in parameters if p.requires_grad]
            self._gradient_bytes = sum(own_part(p).nbytes for p in self._trained)
            self._device = parameters[0].device if parameters else torch.device("cpu")
            options = session_options(learn=True, log_level=self._log_level)
            self._memory = CostMemory(self._device, options)
            if not self._memory.figures.are_known:
                self._gradient_bytes = 0
            self._seeded: Set[int] = set()
            for number, known in self._known.items():
                self._memory.learn(number, 0, c.Status.OK, known.budget)
        return self._memory

    def _held_bytes(self) -> int:
        """Of gradients that are there: they count as needed."""
        return self._gradient_bytes if any(p.grad is not None for p in self._trained) else 0

    def _begins(self) -> bool:
        """A block does: whether its peak is to be learned from. Where blocks begin with the
        gradients of earlier ones, those that begin without need less, by an unknown part of them;
        and where none has for long, what was measured with gradients is no point of the same
        line."""
        held = self._held_bytes() > 0
        self._bare = 0 if held else self._bare + 1
        if held != self._accumulates and (held or self._bare == _MOST_BARE):
            self._accumulates, self._memory = held, None
            self._known = {n: _Class(k.budget, k.longest) for n, k in self._known.items()}
            self._open()
        return held == self._accumulates

    def _last_report(self) -> Optional[Report]:
        """Of the Backward, if there is one: another object after each call."""
        return self._backward.report if self._backward else None

    def _result_of_backward(self, before: Optional[Report]) -> Optional[int]:
        """Of the micro-batch that a Backward has done: one that it has cut for want of memory has
        failed as it was. The next one is whole again. `before`: the report when the block began."""
        backward = self._backward
        if backward is None or backward.report is before or backward.report.microbatches < 2:
            return int(c.Status.OK)
        if not backward.report.ranks:
            backward.load_state_dict({**backward.state_dict(), "micro": 0})
        return int(c.Status.OOM) if backward.report.ooms else None

    def _result_of_swallowed(self, frame: types.FrameType, number: int) -> Optional[int]:
        """Allocations have failed in the block that ends in that frame, and nothing was raised. It
        has failed where the program takes that, and tells nothing where PyTorch has coped with
        it."""
        times = f"rebatch: PyTorch ran out of memory {number} time{'s' * (number > 1)} in a block "
        line = swallowing_line_of_block(frame)
        if line:
            self._warn_once(
                f"{times}of measure(), which kept that to itself: the budget falls, and what the "
                f"block has changed stays: remove the handler at {line}, and put a `try` around "
                "the `with`"
            )
        elif name := _name_of_backward(frame):
            self._warn_once(
                f"{times}of measure(), which {name!r} has recovered from, and the Budget was made "
                f"with the model: expected Budget({name}, optimizer), whose budget then falls"
            )
        return int(c.Status.OOM) if line else None

    def _warn_once(self, said: str) -> None:
        kind = said.split(" in a block ")[1]
        if kind not in self._told:
            self._told.add(kind)
            warnings.warn(said, RuntimeWarning, stacklevel=user_stacklevel())

    def _learn(self, block: Measure, needed: int, asked: int, result: Optional[int]) -> None:
        """A block has ended. Its result is None where it tells nothing of its cost."""
        memory = self._open()
        promised = sum(first_kept_bytes(optimizer) for optimizer in self._optimizers)
        there = memory.figures.available() + self._held_bytes() - promised
        self.microbatches += 1
        if result == c.Status.OOM:
            self.ooms += 1
            if asked and there > needed + asked:
                more = self._in_pieces + there // _PIECE
                self._in_pieces = max(more, there - (needed + asked))
        self._in_pieces -= self._in_pieces // 8192  # by and by it is tried whether they still are
        memory.available_bytes = max(0, there - max(self._in_pieces, there // _SPARE))
        before = {key: known.budget for key, known in self._known.items()}
        if result is not None:
            self._learn_class(memory, block, needed, asked, result)
        if abs(there - self._seen_bytes) > self._seen_bytes // 64:
            self._seen_bytes = there
            for key, known in self._known.items():
                known.budget = memory.learn(key, 0, c.Status.OK, known.budget)
        if before != {key: known.budget for key, known in self._known.items()}:
            self._publish()

    def _learn_class(
        self, memory: CostMemory, block: Measure, needed: int, asked: int, result: int
    ) -> None:
        number, known = block.number, self._known.get(block.number)
        if self._largest is None and not memory.figures.are_known:
            self._largest = max(self._start, block.cost, *(k.budget for k in self._known.values()))
        if known is None:
            known = _Class(max(self._start, 1 if result else block.cost), block.longest)
            self._known[number] = known
        cost = block.cost
        if number and needed:  # the longest of a class need the most memory for their cost
            cost = max(1, int(cost * block.longest / _end_of(number)))
        memory.needed_bytes, memory.asked_bytes = needed, asked
        lib.rebatch_set_step(memory.rb, self.microbatches - 1)
        budget = max(known.budget, self._shown(number, max(known.longest, block.longest)))
        known.budget = memory.learn(number, cost, result, budget)
        if result:
            return
        known.longest = max(known.longest, block.longest)
        if needed and not 0 < known.least <= block.cost:
            known.least, known.least_bytes = block.cost, needed
        if number not in self._seeded:
            self._seeded.add(number)
            self._seed(memory, number, known)

    def _shown(self, number: int, longest: float) -> int:
        """The budget that other classes show to fit in that one."""
        others = (k for n, k in self._known.items() if n and number and n != number)
        return int(max((k.budget * min(1.0, k.longest / longest) for k in others), default=0))

    def _seed(self, memory: CostMemory, number: int, known: _Class) -> None:
        """A class whose samples fill the budget from the first one on gets a point of a low cost
        from one of shorter samples, so that the line through its own has a base. It needs no less
        than that one, so the line is steep enough."""
        shorter = (k for n, k in self._known.items() if n and k.longest < known.longest)
        low = [k for k in shorter if 0 < k.least <= k.budget // _LOW_COST]
        if number and low:
            near = max(low, key=lambda k: k.longest)
            memory.needed_bytes, memory.asked_bytes = near.least_bytes, 0
            known.budget = memory.learn(number, near.least, c.Status.OK, known.budget)


@dataclasses.dataclass
class _Class:
    """What is known of the micro-batches of a class."""

    budget: int
    longest: float  # that ran
    least: int = 0  # the least cost that ran, where memory was measured
    least_bytes: int = 0


class Measure:
    """A block in which a micro-batch runs."""

    def __init__(self, budget: Budget, cost: int, number: int, longest: float):
        self.cost, self.number, self.longest = cost, number, longest
        self._budget = budget
        self._names: Optional[BlockNames] = None
        self._base_bytes = self._ooms = 0
        self._report: Optional[Report] = None  # before the block
        self._is_telling = False  # whether its peak is to be learned from
        self._was_entered = False

    def __del__(self) -> None:
        if not self._was_entered:
            warnings.warn(
                "rebatch: measure() was called without `with`, so nothing is measured: expected "
                "`with budget.measure(cost):` around the passes of a micro-batch",
                RuntimeWarning,
                stacklevel=user_stacklevel(),
            )

    def __enter__(self) -> None:
        budget, self._was_entered = self._budget, True
        if budget._is_measuring:
            raise RuntimeError(
                "rebatch: measure() was called within a block of measure(): expected one block "
                "around the passes of one micro-batch"
            )
        self._names = BlockNames(sys._getframe(1), {id(module) for module in budget._modules})
        budget._open()
        self._is_telling, self._report = budget._begins(), budget._last_report()
        figures = budget._open().figures
        figures.begin()
        self._ooms, self._base_bytes = figures.ooms, figures.live - budget._held_bytes()
        budget._is_measuring = True

    def __exit__(self, _kind: Any, error: Optional[BaseException], trace: Any) -> None:
        budget, figures = self._budget, self._budget._open().figures
        budget._is_measuring = False
        names, self._names = self._names, None
        figures.read()
        needed = max(0, figures.peak - self._base_bytes)
        if error is None:
            result = budget._result_of_backward(self._report)
            if figures.ooms > self._ooms and not budget._backward:
                result = budget._result_of_swallowed(sys._getframe(1), figures.ooms - self._ooms)
            budget._learn(self, needed, 0, result if result or self._is_telling else None)
        elif isinstance(error, Exception) and is_oom(error, figures.ooms > self._ooms):
            asked = asked_bytes(error)
            assert names is not None  # the block was entered
            names.put_back()
            let_go(error)
            trace.tb_next = None  # the line of the block stays, and no frame below it
            error.__traceback__ = trace
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
            budget._learn(self, needed, asked, c.Status.OOM)

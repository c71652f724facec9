"""Which micro-batches are captured, replayed, or run eagerly. Must not know a session: who runs the
passes says when a batch begins and when memory ran out."""

from __future__ import annotations

import contextlib
import warnings
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

import torch

from rebatch._user_code import line_of, user_stacklevel
from rebatch.torch.graphs.captured import Pass, Result, Weight, kind_of_divisor, put, taken
from rebatch.torch.graphs.changes import Beside, Changes
from rebatch.torch.graphs.inputs import Inputs, NotCapturedError, flattened
from rebatch.torch.graphs.proof import Mark, Noise
from rebatch.torch.graphs.ran import Ran
from rebatch.torch.graphs.reads import Reads
from rebatch.torch.graphs.recorder import can_capture, live_bytes, recorder_of
from rebatch.torch.private import has_compiled_graphs
from rebatch.torch.program.mistakes import hooked
from rebatch.torch.program.program import Running
from rebatch.torch.session.oom import is_oom, let_go

# Steps in which the passes are looked at, and passes in each.
_LOOKS, _LOOKS_OF_A_STEP = 3, 2
# Passes of a shape before it is captured; the more, the more graphs have made room for others.
_RUNS = 3
# Eager passes that are compared with the first: two may agree by chance where kernels sum in any
# order, so there are more once a replay has differed.
_PASSES, _MOST_PASSES = 1, 8
# Steps from one comparison with an eager pass to the next one.
_COMPARED_EVERY = 1000
# Shapes that are counted, and times that what a pass reads may change, before the program is told.
_MOST_SHAPES, _MOST_CHANGES = 64, 3
# Steps without a capture after the first OOM; twice as many after each further one, and at most.
_WAIT, _LONGEST_WAIT = 4, 512
# Times that memory runs out before the program is told.
_MOST_OOMS = 4
# In what a capture raises before PyTorch 2.10.
_READS_GENERATOR = "CUDAGeneratorImpl::current_seed"
_DRAWS_UNKNOWN = "for a CUDA generator not in capture mode"
# And where it comes to a node of autograd that belongs to the default stream.
_WAITS_FOR_DEFAULT = "would make the legacy stream depend on a capturing"

Eager = Callable[[], Tuple[torch.Tensor, Any]]  # leaves its gradients in .grad


class _MicroBatch(NamedTuple):
    key: Any
    samples: Any
    tensors: List[torch.Tensor]
    length: int


def _listed(names: Sequence[str]) -> str:
    left = len(names) - 3
    more = f" and {left} other{'s' * (left > 1)}" if left > 0 else ""
    return f"{', '.join(map(repr, names[:3]))}{more}"


class Graphs:
    """Of one training. `most` graphs are kept; put_back() makes the state that before the attempt
    which runs."""

    def __init__(self, running: Running, most: int, put_back: Callable[[], None]):
        self._running, self._most, self._put_back = running, most, put_back
        self.lends = False  # the gradients in .grad are a graph's own
        self.new_bytes = 0  # that the last pass has set aside for graphs
        self.replayed = 0  # micro-batches of the batch that runs
        self.is_off = False  # from now on passes run without graphs
        self._device = torch.device("cpu")
        self._parameters: Sequence[torch.Tensor] = ()
        self._changes = Changes(running)
        self._is_looking = True  # in each step: in the first ones
        self._looks = 0  # that are left in this step
        self._steps = self._wait_until = self._last_compared = 0
        self._runs: Dict[Any, int] = {}  # by key
        # What runs in passes of a key, and what they change, once they were looked at.
        self._ran: Dict[Any, Ran] = {}
        self._beside: Dict[Any, Beside] = {}
        self._held: Dict[Any, Pass] = {}  # the one that ran last is the last
        self._counts: Dict[Any, int] = {}  # samples, of these
        self._recorder: Any = None
        self._reads: Optional[Reads] = None  # of those that are held
        self._saved = Beside()  # of the graph that is proved
        self._is_exact = True  # replays leave the bits of eager passes
        self._passes = _PASSES
        self._evicted = self._ooms = self._changed = 0
        self._told: List[str] = []

    # ---- around a batch ----

    def begin(self, device: torch.device, parameters: Sequence[torch.Tensor]) -> None:
        """One begins, in which these get gradients."""
        self._steps += 1
        self._looks = _LOOKS_OF_A_STEP
        if self.is_off:
            return
        if self._ooms == _MOST_OOMS:
            self._tell(
                f"memory ran out {_MOST_OOMS} times beside the graphs, so few micro-batches are "
                "replays: expected a smaller micro_largest, or rebatch.torch.install(), after "
                "which graphs lend their memory"
            )
        is_same = device == self._device and list(map(id, parameters)) == self._ids()
        self._device, self._parameters = device, list(parameters)
        if self._held and not is_same:
            self._drop_changed("a parameter")
        elif self._reads and not self._reads.holds():
            self._drop_changed(self._reads.changed())
        if self._is_looking and self._steps > _LOOKS and self._changes.are_known:
            self._is_looking = False
            self._judge()

    def _ids(self) -> List[int]:
        return list(map(id, self._parameters))

    def _judge(self) -> None:
        """What the passes that were looked at change."""
        changes = self._changes
        names, why = changes.names(), self._why_not()
        if changes.has_collectives and not why:
            why = (
                f"{self._running.program.loss_name} calls other ranks (torch.distributed), which "
                "may capture in another step: expected no collective in it"
            )
        if changes.gets_gradients and not why:
            why = (
                f"{self._running.program.loss_name} gives gradients to "
                f"{_listed(list(changes.gets_gradients))} beside the model, which a replay would "
                "leave out: expected a variable of it, or an attribute, with that tensor or "
                "network, and without its optimizer"
            )
        if names and not why:
            why = (
                f"{self._running.program.loss_name} changes {_listed(names)} in Python, which a "
                f"replay would leave out: expected {changes.expected()}"
            )
        if why:
            self._turn_off(why)

    def _why_not(self) -> str:
        if not can_capture(self._device):
            return f"the model is on {self._device}, where nothing can be captured"
        if hooked(self._parameters):  # type: ignore[arg-type]
            return "a parameter has a hook of register_post_accumulate_grad_hook()"
        if has_compiled_graphs(self._device):
            return (
                'a model of this process is compiled with mode="reduce-overhead" or '
                '"max-autotune", which have graphs of their own: expected torch.compile(model), '
                'or mode="max-autotune-no-cudagraphs"'
            )
        return ""

    def _drop_changed(self, name: str) -> None:
        """What the passes read is other than when they were captured."""
        self.drop()
        self._changed += 1
        self._wait(_WAIT << self._changed)
        why = self._why_not()  # that may be what has changed
        if why:
            self._turn_off(why)
            return
        if self._changed == _MOST_CHANGES:
            self._tell(
                f"{name!r} has changed again since a pass was captured, so each graph serves few "
                "steps: expected a tensor of the batch for what changes from step to step"
            )

    # ---- a micro-batch ----

    def run(
        self, samples: Any, count: int, eager: Eager, may_capture: bool = True
    ) -> Tuple[torch.Tensor, Any]:
        """Its pass: its part of the loss, and what was beside the loss. The gradients are in
        .grad."""
        self.lends, self.new_bytes = False, 0
        if self.is_off:
            return eager()
        try:
            key, tensors = flattened(samples)
        except NotCapturedError as error:
            self._turn_off(str(error))
            return eager()
        key = count, kind_of_divisor(self._running.divisor), key
        if key in self._held:
            return self._replay(_MicroBatch(key, samples, tensors, count), eager)
        if not (self._is_due(key) and may_capture):
            return self._look(key, samples, eager)
        try:
            return self._capture(_MicroBatch(key, samples, tensors, count), eager)
        except (KeyboardInterrupt, SystemExit):  # the program may go on
            self.drop()
            raise

    def _look(self, key: Any, samples: Any, eager: Eager) -> Tuple[torch.Tensor, Any]:
        """In the first steps, and at the last two passes of a key before it is captured: those of
        another shape, or after something has changed, may run other code."""
        left = self._needed() - self._runs.get(key, 0)
        is_last = left <= 0 and key not in self._beside
        is_looking = is_last or (self._is_looking and self._looks > 0)
        if is_looking:
            self._looks -= 1
            self._changes.before(self._parameters, self._ran.get(key))
        reads = self._reads_of([key]) if is_last else None
        ran = Ran()
        with ran.looking() if left == 1 else contextlib.nullcontext():
            result = eager()
        if left == 1:
            self._ran[key] = ran.end(samples)
        if is_looking and self._changes.after(reads) and is_last:
            self._beside[key] = Beside(self._changes.in_place)
            if not self._is_looking:
                self._judge()
        return result

    def _needed(self) -> int:
        """Passes of a shape before it is captured."""
        return _RUNS << min(self._evicted, 8)

    def _is_due(self, key: Any) -> bool:
        runs = self._runs[key] = self._runs.get(key, 0) + 1
        if len(self._runs) > _MOST_SHAPES:
            self._forget()
            if not self._held:
                self._tell(
                    f"the first {_MOST_SHAPES} micro-batches nearly all differed in shapes, "
                    "numbers or texts, and one is captured when it has come again: expected "
                    "lengths that are padded to a few, tensors for numbers that change, and no "
                    "texts of single samples"
                )
        is_due = (
            not self._is_looking
            and self._steps > self._wait_until
            and runs > self._needed()
            and key in self._beside
            and not self._running.undo.is_looking
        )
        if is_due and torch.is_anomaly_enabled():  # which reads each gradient
            expected = "torch.autograd.set_detect_anomaly(False)"
            self._tell(f"anomalies are looked for: expected {expected}")
            return False
        return is_due

    def _forget(self) -> None:
        """What is known of shapes that have no graph."""
        self._runs.clear()
        for known in (self._ran, self._beside):
            for key in known.keys() - self._held.keys():
                del known[key]

    def _replay(self, mb: _MicroBatch, eager: Eager) -> Tuple[torch.Tensor, Any]:
        if self._steps - self._last_compared >= _COMPARED_EVERY:
            return self._compare(mb, eager)
        if not self._recorder.claim():
            self.ran_out()
            return eager()
        # In no variable: once it is dropped, an eager pass is to have its memory.
        result = self._held[mb.key].replay(mb.tensors, mb.length)
        self._recorder.lend()
        if len(self._held) > 1:
            self._held[mb.key] = self._held.pop(mb.key)
        return self._give(result)

    def _give(self, result: Result) -> Tuple[torch.Tensor, Any]:
        self.replayed += 1
        self.lends = True
        put(self._parameters, result.gradients)
        return result.loss, result.extras

    def _run_eagerly(self, eager: Eager) -> Result:
        """In the memory of the graphs that are held, so that nothing of it is to stay."""
        loss, extras = self._recorder.within(eager) if self._held else eager()
        return Result(loss, extras, taken(self._parameters))

    # ---- a capture ----

    def _capture(self, mb: _MicroBatch, eager: Eager) -> Tuple[torch.Tensor, Any]:
        """After eager passes, whose results the first replay must have. None of these needs memory
        beside the graphs, which have as much as the largest."""
        if mb.length > max(self._counts.values(), default=0):
            self._free()  # the others have room in the arena of the largest
        with self._leaving(mb.key):
            return self._prove(mb, eager)

    @contextlib.contextmanager
    def _leaving(self, key: Any) -> Iterator[None]:
        """Within it _undo() puts back what passes of this key change."""
        self._saved = self._beside[key]
        self._saved.save(self._running.undo.changing())
        try:
            yield
        finally:
            self._saved.let_go()
            self._saved = Beside()

    def _undo(self) -> None:
        self._put_back()
        self._saved.put_back()

    def _prove(self, mb: _MicroBatch, eager: Eager) -> Tuple[torch.Tensor, Any]:
        first, dtype = self._mark(eager)
        noise = self._noise(first, eager)
        before = live_bytes(self._device)
        held = self._captured(mb, dtype)
        if held is None:
            return eager()
        self.new_bytes = max(0, live_bytes(self._device) - before)
        result = held.replay(mb.tensors, mb.length)
        mark = Mark(self._running, result, self._saved.tensors)
        different = first.difference(mark)
        is_in_tensors = different in dict(mark.tensors)
        if not different or (noise and is_in_tensors and noise.explains(mark)):
            self._hold(mb, held, is_exact=noise is None)
            self._recorder.lend()
            return self._give(result)
        del result, mark, held
        why = f"a replay differs from an eager pass in {different}"
        return self._doubt(first, is_in_tensors and not noise, why, eager)

    def _doubt(
        self, first: Mark, may_be_noise: bool, why: str, eager: Eager
    ) -> Tuple[torch.Tensor, Any]:
        """After a replay that differs from the first pass. Where other eager passes differ from it
        too, the pass is captured anew and compared as one of those."""
        self._undo()
        self.drop()
        self._passes = _MOST_PASSES
        if not (may_be_noise and self._noise(first, eager)):
            self._turn_off(why)
        return eager()

    def _mark(self, eager: Eager) -> Tuple[Mark, torch.dtype]:
        """Of an eager pass, of which nothing is left."""
        result = self._run_eagerly(eager)
        mark = Mark(self._running, result, self._saved.tensors).let_go()
        self._undo()
        return mark, result.loss.dtype

    def _noise(self, first: Mark, eager: Eager) -> Optional[Noise]:
        """None: eager passes leave the same bits."""
        passes: List[List[torch.Tensor]] = []
        left = self._passes
        while len(passes) < 2:
            result = self._run_eagerly(eager)
            mark = Mark(self._running, result, self._saved.tensors)
            is_same = not (passes or first.places(mark))
            if not is_same:
                passes.append(mark.on_host())
            mark.let_go()
            del result  # the next pass has its memory
            self._undo()
            left -= is_same
            if not left:
                return None
        return Noise(*passes)

    def _captured(self, mb: _MicroBatch, dtype: torch.dtype) -> Optional[Pass]:
        """None: it is told why."""
        while len(self._held) >= self._most:
            self._evict()
        try:
            generators = self._running.program.generators
            self._recorder = self._recorder or recorder_of(self._device, generators)
            inputs = Inputs(mb.samples, mb.tensors, self._device)
            weight = Weight(self._running, mb.length, self._device, dtype)
            held = Pass(self._running, self._parameters, inputs, weight)
            if not self._recorder.claim():
                raise torch.OutOfMemoryError("CUDA out of memory: the arena is lent")
            held.capture(self._recorder)
            self._undo()  # what Python has changed meanwhile
            return held
        except Exception as error:
            found = error
        # Here no exception is being handled, which would hold what the pass has made.
        lines, at = [*str(found).splitlines(), ""], line_of(found)
        text = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
        is_memory = is_oom(found)
        let_go(found)
        self._undo()
        if is_memory:
            self.ran_out()
        else:
            self.drop()
            if _READS_GENERATOR in text:
                text = (
                    "the state of a random generator is read, as in gradient checkpointing, and "
                    f"PyTorch is {torch.__version__}: expected 2.10 or later, or "
                    "preserve_rng_state=False where nothing random is recomputed"
                )
            elif _DRAWS_UNKNOWN in text:
                text = (
                    "random numbers are drawn from a generator on the GPU that the Step does not "
                    "know: expected it in generators="
                )
            elif _WAITS_FOR_DEFAULT in text:
                text = (
                    "it waits for the default stream, as where the program keeps a tensor of an "
                    "earlier pass with its graph of autograd, such as a loss, an output or a value "
                    "that it logs: expected .detach() on what it keeps"
                )
            elif not isinstance(found, NotCapturedError):
                text += " (what reads a tensor on the host, such as item(), or takes one of a CPU)"
            name = self._running.program.loss_name
            self._turn_off(f"a pass of {name} cannot be captured{at}: {text}")
        return None

    def _hold(self, mb: _MicroBatch, held: Pass, is_exact: bool) -> None:
        if not self._held:
            self._last_compared = self._steps
        self._is_exact &= is_exact
        self._held[mb.key], self._counts[mb.key] = held, mb.length
        self._reads = self._reads_of(self._held)

    def _reads_of(self, keys: Iterable[Any]) -> Reads:
        """What passes of these keys read."""
        program, tree = self._running.program, self._running.undo.tree
        ran = [self._ran[key] for key in keys if key in self._ran]
        return Reads(program.functions_of_a_pass(), tree.modules, program.update, ran)

    def _compare(self, mb: _MicroBatch, eager: Eager) -> Tuple[torch.Tensor, Any]:
        """With an eager pass. A graph that is as near as two eager passes are is captured and
        proved anew."""
        if not self._is_exact:
            self.drop()
            return eager()
        self._last_compared = self._steps
        with self._leaving(mb.key):
            return self._prove_again(mb, eager)

    def _prove_again(self, mb: _MicroBatch, eager: Eager) -> Tuple[torch.Tensor, Any]:
        first, _ = self._mark(eager)
        if not self._recorder.claim():
            self.ran_out()
            return eager()
        result = self._held[mb.key].replay(mb.tensors, mb.length)
        mark = Mark(self._running, result, self._saved.tensors)
        different = first.difference(mark)
        is_in_tensors = different in dict(mark.tensors)
        self._recorder.lend()
        if not different:
            return self._give(result)
        del result, mark
        why = (
            f"a replay differs from an eager pass in {different}, and did not when it was "
            f"captured: something that {self._running.program.loss_name} reads is another "
            "since, in steps that have run"
        )
        return self._doubt(first, is_in_tensors, why, eager)

    # ---- memory ----

    def ran_out(self) -> None:
        """Of memory, in a pass or elsewhere: the graphs give theirs back."""
        if self._held or self._recorder:
            self._wait(_WAIT << self._ooms)
            self._ooms += 1
        self._free()

    def _wait(self, steps: int) -> None:
        self._wait_until = self._steps + min(steps, _LONGEST_WAIT)

    def _evict(self) -> None:
        key = next(iter(self._held))
        del self._held[key], self._counts[key]
        self._evicted += 1
        if not self._held:
            self._free()

    def drop(self) -> None:
        """The passes are others from now on, or are to be proved anew."""
        self._free()
        self._forget()

    def _free(self) -> None:
        if self._held or self._recorder:
            self._held.clear()
            self._counts.clear()
            recorder, self._recorder, self._reads = self._recorder, None, None
            self._is_exact, self.lends = True, False
            recorder.drop()

    # ---- what is said ----

    def _turn_off(self, why: str) -> None:
        self.is_off = True
        self._tell(why)

    def _tell(self, why: str) -> None:
        if why in self._told:
            return
        self._told.append(why)
        more = "; it runs without graphs from now on" if self.is_off else ""
        warnings.warn(
            f"rebatch: graphs=True: {why}{more}", RuntimeWarning, stacklevel=user_stacklevel()
        )

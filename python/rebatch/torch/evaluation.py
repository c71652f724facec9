"""Map and map(): a model over inputs, without training, in as many calls as memory asks for."""

from __future__ import annotations

import itertools
import warnings
import weakref
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch

from rebatch._user_code import user_stacklevel
from rebatch.torch.allocator import install as allocator
from rebatch.torch.batches.cut import Cut
from rebatch.torch.batches.join import join_results, joined_both
from rebatch.torch.batches.run_map import run_map
from rebatch.torch.batches.switched_off import BATCH_NORM, training_modules
from rebatch.torch.check.cut_comparison import Subject
from rebatch.torch.check.first_results import FirstResults
from rebatch.torch.program.program import Program, Running
from rebatch.torch.session.report import MapReport
from rebatch.torch.session.session import Session, session_options
from rebatch.torch.undo.changes_outside import Told
from rebatch.torch.undo.generators import Generators
from rebatch.torch.undo.places import used_by, variables_of
from rebatch.torch.undo.undo import Undo
from rebatch.torch.update.passes import Passes


class _Running:
    """A guard of what the model that runs holds, and of what it reaches."""

    parts: Sequence[Any] = ()

    def save(self, point: int) -> None:
        for part in self.parts:
            part.save(point)

    def restore(self, point: int) -> None:
        for part in self.parts:
            part.restore(point)

    def succeeded(self) -> None:
        for part in self.parts:
            part.succeeded()


_running = _Running()
# One session a device and allocator; sizes are learned for each function within it.
_sessions: Dict[Tuple[torch.device, bool], Session] = {}
_numbers = itertools.count(1)
_told: "weakref.WeakSet[torch.nn.Module]" = weakref.WeakSet()  # modules, of which a map has
_keys: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()


def _device_of(model: Callable[..., Any], inputs: Any) -> torch.device:
    if isinstance(model, torch.nn.Module):
        for tensor in list(model.parameters()) + list(model.buffers()):
            return tensor.device
    if isinstance(inputs, torch.Tensor):
        return inputs.device
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_initialized()
        else (torch.device("cpu"))
    )


def _session_of(device: torch.device) -> Session:
    key = (device, allocator.installed())
    if key not in _sessions:
        devices = [device] if device.type == "cuda" else []
        _sessions[key] = Session(device, session_options(), guards=[Generators(devices), _running])
    return _sessions[key]


def _key_of(model: Callable[..., Any]) -> int:
    """A number for a function, as long as it lives."""
    try:
        if model not in _keys:
            _keys[model] = next(_numbers)
        return _keys[model]
    except TypeError:  # it has no weak references
        return id(model)


class _Mapped(Program):
    """A function of samples in the place of a loss_fn: what it returns is beside a loss of 0."""

    inputs: Any = None  # of the map that runs
    dim: Optional[int] = None  # of the samples in results, where that is known

    @property
    def device(self) -> torch.device:
        """That of the first parameter, or of the inputs."""
        return _device_of(self.loss_fn, self.inputs)

    def loss_of(self, samples: Any) -> Tuple[Any, Any]:
        """It takes no model."""
        function: Any = self.loss_fn
        return torch.zeros((), device=self.device), function(samples)

    def kept(self, beside: Any) -> Any:
        """All of it."""
        return beside

    def results_of(self, whole: Any, parts: List[Any], count: int) -> Tuple[Any, Any]:
        """As a map joins them."""
        return joined_both(whole, parts, count, self.dim)


_OF_MAP = Subject("map()", "the result", "the result", "an entry for each sample", has_loss=False)
# By function, and by references to what it calls.
_compared: "weakref.WeakKeyDictionary[Any, Dict[Tuple[Any, ...], FirstResults]]" = (
    weakref.WeakKeyDictionary()
)


def _results_of(model: Callable[..., Any]) -> FirstResults:
    """Those of a model that were compared, or of a function of the same lines, which may be made
    anew for each map, that calls the same ones."""
    owner = getattr(model, "__self__", None)
    key = getattr(model, "__code__", model) if owner is None else owner
    try:
        called = [weakref.ref(v) for p in variables_of(model) if callable(v := p.get())]
        return _compared.setdefault(key, {}).setdefault(tuple(called), FirstResults())
    except TypeError:  # it has no weak references
        return FirstResults()


class Map:
    """A model that is run over inputs without training, in as many calls as memory asks for::

        predict = rebatch.Map(model)
        outputs = predict(inputs)
        print(predict.report)

    A call is map(model, inputs, batch_dim). `report` says what the last call did, also when it
    failed: a MapReport, whose numbers have the names of Step.report's.

    What a call that runs out of memory has changed in the model is put back, as in a Step. What
    cannot be put back is an Error that names it."""

    def __init__(self, model: Callable[[Any], Any], batch_dim: Optional[int] = None):
        if not callable(model):
            raise TypeError(f"rebatch: model is {model!r}: expected a function")
        self.model = model
        self.report = MapReport()
        self._undo = Undo(used_by(model, torch.nn.Module), copies_first=False)
        self._told = Told(
            lambda: [model],
            self._undo.handled,
            lambda: "the function of a map",
            "return the value with the result",
            modules=lambda: self._undo.tree.modules,
        )
        self._dim, self._cut = batch_dim, Cut(batch_dim or 0, otherwise="")

    def __call__(self, inputs: Any) -> Any:
        samples = self._cut.length(inputs)
        session = _session_of(_device_of(self.model, inputs))
        before, _running.parts = _running.parts, (self._told, self._undo)
        try:
            self._told.begin()
            self._undo.begin(inputs)
            results, self.report, status = run_map(
                session, self.model, inputs, samples, _key_of(self.model), self._cut
            )
            session.raise_failure(status)
            is_cut = len(results) > 1
            joined = join_results(results, self._dim, lambda: self._one(inputs, samples))
            if is_cut:
                self._warn_of_batch_norm()
                self._compare(inputs)
        finally:
            self._undo.end()
            _running.parts = before
        return joined

    def _compare(self, inputs: Any) -> None:
        """They were cut: whether the result depends on that."""
        results = _results_of(self.model)
        if results.is_done:
            return
        modules = [module for _, module in used_by(self.model, torch.nn.Module)]
        function: Any = self.model  # of samples alone
        program = _Mapped(modules, function, Passes(modules), self._cut)
        program.inputs, program.dim = inputs, self._dim
        running = Running(program, self._undo, self._told)
        running.begin(inputs)
        devices = [program.device] if program.device.type == "cuda" else []
        running.generators = Generators(devices)
        results.compare(running, _OF_MAP, self.report.micro)

    def _warn_of_batch_norm(self) -> None:
        """The inputs were cut: of modules that normalize by those of a micro-batch, once each."""
        norms = [m for m in self._undo.tree.modules if isinstance(m, BATCH_NORM)]
        found = [m for m in norms if training_modules(m, BATCH_NORM) and m not in _told]
        _told.update(found)
        if found:
            warnings.warn(
                f"rebatch: {type(found[0]).__name__} normalizes by the statistics of a "
                "micro-batch, so the result of a map depends on how memory cut its inputs: "
                "expected a model in evaluation mode (eval()), with running statistics",
                RuntimeWarning,
                stacklevel=user_stacklevel(),
            )

    def _one(self, inputs: Any, samples: int) -> Tuple[int, Any]:
        """The result for one sample, where one for several is not enough to tell its dimensions
        apart."""
        with torch.no_grad():
            return 1, self.model(self._cut.part(inputs, 0, 1, samples))


def map(model: Callable[[Any], Any], inputs: Any, batch_dim: Optional[int] = None) -> Any:
    """model(inputs) without gradients, in as many calls as memory asks for.

    The inputs are a batch as for Step; `batch_dim` is the dimension of the samples, by default the
    first. The model returns tensors, or dicts, tuples and lists of such. Each is joined along the
    dimension that has an entry for each sample, which need not be `batch_dim`; where several have,
    the model runs once more with one sample, or `batch_dim` tells.

    An OOM makes the next calls smaller, and a line on standard error says so; the size is kept for
    the next map() of the same model. Its mode, training or evaluation, stays as it is. A Map also
    has a report. When memory first cuts the inputs of a function, a result that depends on the cut
    is a CutWarning. Raises Exhausted when one sample does not fit, and ValueError for a result
    without a dimension of the samples."""
    return Map(model, batch_dim)(inputs)

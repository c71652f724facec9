"""Map and map(): a model over inputs, without training, in as many calls as memory asks for."""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Callable, Dict, Tuple

import torch

from rebatch.torch import _allocator
from rebatch.torch._batch import batch_length
from rebatch.torch._map import join_results, run_map
from rebatch.torch._report import MapReport
from rebatch.torch._session import Session, session_options
from rebatch.torch._state import Generators

# One session a device and allocator; sizes are learned for each function within it.
_sessions: Dict[Tuple[torch.device, bool], Session] = {}
_numbers = itertools.count(1)
_keys: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()


def _device_of(model: Callable, inputs: Any) -> torch.device:
    if isinstance(model, torch.nn.Module):
        for tensor in list(model.parameters()) + list(model.buffers()):
            return tensor.device
    if isinstance(inputs, torch.Tensor):
        return inputs.device
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else (
        torch.device("cpu")
    )


def _session_of(device: torch.device) -> Session:
    key = (device, _allocator.installed())
    if key not in _sessions:
        devices = [device] if device.type == "cuda" else []
        _sessions[key] = Session(device, session_options(), guards=[Generators(devices)])
    return _sessions[key]


def _key_of(model: Callable) -> int:
    """A number for a function, as long as it lives."""
    try:
        if model not in _keys:
            _keys[model] = next(_numbers)
        return _keys[model]
    except TypeError:  # it has no weak references
        return id(model)


class Map:
    """A model that is run over inputs without training, in as many calls as memory asks for.

        predict = rebatch.Map(model)
        outputs = predict(inputs)
        print(predict.report)

    A call is map(model, inputs). `report` says what the last call did, also when it failed: a
    MapReport, whose numbers have the names of Step.report's."""

    def __init__(self, model: Callable[[Any], Any]):
        if not callable(model):
            raise TypeError(f"rebatch: model is {model!r}: expected a function")
        self.model = model
        self.report = MapReport()

    def __call__(self, inputs: Any) -> Any:
        samples = batch_length(inputs, otherwise="")
        session = _session_of(_device_of(self.model, inputs))
        results, self.report, status = run_map(
            session, self.model, inputs, samples, _key_of(self.model)
        )
        session.raise_failure(status)
        return join_results([result for _, result in results])


def map(model: Callable[[Any], Any], inputs: Any) -> Any:
    """model(inputs) without gradients, in as many calls as memory asks for.

    The inputs are a batch as for Step, and so is what the model returns: tensors with the samples
    in their first dimension, or dicts, tuples and lists of such. An OOM makes the next calls
    smaller, and a line on standard error says so; the size is kept for the next map() of the same
    model. Its mode, training or evaluation, stays as it is. A Map also has a report. Raises
    Exhausted when one sample does not fit."""
    return Map(model)(inputs)

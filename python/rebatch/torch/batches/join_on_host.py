"""What joins the results of parts where memory on the device is short: in host memory."""

from __future__ import annotations

import copy
import warnings
from typing import Any, Callable, Dict, List

import torch

from rebatch._user_code import user_stacklevel
from rebatch.torch.batches.outputs import Mean, Sum
from rebatch.torch.session.oom import is_oom, let_go
from rebatch.torch.session.session import Exhausted

_Devices = Dict[tuple[Any, ...], torch.device]  # of the tensors of a part, by their places in it


def moved(
    value: Any,
    move: Callable[[torch.Tensor, tuple[Any, ...]], torch.Tensor],
    at: tuple[Any, ...] = (),
) -> Any:
    """A copy of dicts, tuples, lists, Sums and Means with other tensors. Entries of a list are at
    one place: they may be samples."""
    if isinstance(value, torch.Tensor):
        return move(value, at)
    if isinstance(value, (Sum, Mean)):
        return type(value)(moved(value.value, move, at))
    if isinstance(value, dict):
        found = copy.copy(value)
        for key, part in value.items():
            found[key] = moved(part, move, (*at, key))
        return found
    if isinstance(value, tuple):
        members = [moved(part, move, (*at, i)) for i, part in enumerate(value)]
        return type(value)(*members) if hasattr(value, "_fields") else tuple(members)
    if isinstance(value, list):
        return [moved(part, move, (*at, "*")) for part in value]
    return value


def _to_host(part: Any, devices: _Devices) -> Any:
    def move(tensor: torch.Tensor, at: tuple[Any, ...]) -> torch.Tensor:
        devices[at] = tensor.device
        return tensor.to("cpu")

    return moved(part, move)


def _back(joined: Any, devices: _Devices) -> Any:
    """On the device, where it has room now that the parts are gone."""
    left: List[torch.Tensor] = []

    def move(tensor: torch.Tensor, at: tuple[Any, ...]) -> torch.Tensor:
        try:
            return tensor.to(devices.get(at, tensor.device))
        except Exception as error:
            if not is_oom(error):
                raise
            left.append(tensor)
            return tensor

    back = moved(joined, move)
    if left:
        warnings.warn(
            f"rebatch: results of {sum(t.nbytes for t in left) / (1 << 20):.1f} MiB in all do not "
            "fit on their device as a whole, so they are in host memory",
            RuntimeWarning,
            stacklevel=user_stacklevel(),
        )
    return back


def _release() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def once_more(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """function(*arguments), which runs before any micro-batch. Where that runs out of memory,
    cached memory is given back, and it runs once more.

    Raises Exhausted."""
    try:
        return function(*arguments)
    except Exception as error:
        if not is_oom(error):
            raise
        let_go(error)
    result: List[Any] = []
    _release()
    text = _oom_of(lambda: function(*arguments), result)
    if text:
        raise Exhausted(
            f"out of memory in {name}, and once more after cached memory was given back, where a "
            f"smaller micro-batch does not help: expected a {name} that needs less memory\n{text}"
        )
    return result[0]


def joined_where_it_fits(join: Callable[[], Any], parts: List[Any]) -> Any:
    """join(), which joins the parts in a list. Where that runs out of memory, the parts of the list
    go to host memory, are joined there, and the result goes back to the device, where the parts
    have made room; where it does not fit even so, it stays in host memory, with a warning.

    Raises Exhausted where host memory is short too."""
    result: List[Any] = []
    error = _oom_of(join, result)
    if error:
        _release()
        error = _oom_of(join, result)
    if not error:
        return result[0]
    devices: _Devices = {}
    for i, part in enumerate(parts):
        parts[i] = _to_host(part, devices)
        del part
    _release()
    error = _oom_of(join, result)
    if error:
        raise Exhausted(
            f"out of memory where the results of {len(parts)} parts are joined, on their device "
            f"and in host memory: expected smaller results, or fewer samples in a call\n{error}"
        )
    return _back(result[0], devices)


def _oom_of(join: Callable[[], Any], result: List[Any]) -> str:
    """Join, and append the result: the text of the OOM, or "" where there is none."""
    try:
        result.append(join())
        return ""
    except Exception as error:
        if not is_oom(error):
            raise
        text = str(error) or type(error).__name__
        let_go(error)
        return text

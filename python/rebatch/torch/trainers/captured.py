"""What an adapter must not let a captured pass do: a replay would leave it out, or use what another
batch had."""

from __future__ import annotations

from typing import Any, Callable, NoReturn

from rebatch.torch.graphs.inputs import NotCapturedError


def refusing(what: str, expected: str) -> Callable[..., NoReturn]:
    """A function in the place of one that a pass must not call: a sentence says what it did."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise NotCapturedError(f"{what}, which a replay would leave out: expected {expected}")

    return refuse


class Unread:
    """Stands for a number that is another one in each batch: a pass may hand it on, and not read
    it."""

    def __init__(self, name: str):
        self._name = name

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise NotCapturedError(
            f"{self._name} is read in Python, and a replay would use that of another batch: "
            "expected a pass that does not read it, or a tensor of the batch"
        )

    __bool__ = __int__ = __float__ = __index__ = __eq__ = __hash__ = _refuse
    __str__ = __repr__ = __format__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = _refuse
    __floordiv__ = __truediv__ = __rtruediv__ = __getattr__ = _refuse

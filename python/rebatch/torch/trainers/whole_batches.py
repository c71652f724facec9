"""Batches of a trainer that cannot be cut: each runs as a whole, as it does without rebatch."""

from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterator

from rebatch.torch.batches.cut import cut_of
from rebatch.torch.session.session import Exhausted


class CutOrWhole:
    """How batches are cut by some arguments of a Step, which are taken out of `options`. A batch
    that cannot be cut counts as one sample, unless the options ask for certain sizes."""

    def __init__(self, options: Dict[str, Any]):
        asking = ("length", "micro_multiple_of", "micro_allowed")
        self._must_cut = any(options.get(name) for name in asking)
        self.cut = cut_of(options)
        self._why = ""  # the last batch cannot be cut

    def length(self, batch: Any) -> int:
        """Its samples."""
        self._why = ""
        try:
            return self.cut.length(batch)
        except ValueError as error:
            if self._must_cut:
                raise
            self._why = str(error).removeprefix("rebatch: ")
            return 1

    def part(self, batch: Any, first: int, count: int, samples: int) -> Any:
        """Some of them."""
        return batch if self._why else self.cut.part(batch, first, count, samples)

    @contextlib.contextmanager
    def saying_why(self) -> Iterator[None]:
        """Around a batch: where not even one sample fits, why it was not cut."""
        try:
            yield
        except Exhausted as error:
            if not self._why:
                raise
            said = f"{error}\nThe batch ran as a whole, because it cannot be cut: {self._why}"
        else:
            return
        raise Exhausted(said)

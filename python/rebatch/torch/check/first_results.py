"""What evaluations and maps return of a few samples, compared at two cuts at once when memory has
cut the first batch: a result that depends on the cut is a warning."""

from __future__ import annotations

import time
from typing import Optional, Set, Tuple

from rebatch._library import GuardPoint
from rebatch.torch.check.cut_comparison import (
    KEEP_TOGETHER,
    MOST_FAILURES,
    ROUNDS,
    Comparison,
    Results,
    Subject,
    may_wait_for_others,
    said_of,
    tell,
)
from rebatch.torch.check.fixed_draws import FixedDraws
from rebatch.torch.check.rounding import are_exact
from rebatch.torch.program.program import Running
from rebatch.torch.session.oom import failed_allocations, is_oom, let_go
from rebatch.torch.session.threads import others_train

# Of other samples, where results have more rounding than those of float32.
_LOOKS = 3
# Samples among which are some that count, such as those that are classified rightly.
_SOME = 64
# Batches in which none may be.
_MOST_LOOKS = 4
# Behind one batch no round begins after so long: the next batch that is cut goes on.
_SECONDS = 2.0


class FirstResults:
    """Of one function. Results are compared as a Step's are, but for gradients: of two samples that
    differ most, and of pairs, in one call and in two, with the same random numbers for each sample.
    Where a sum or a mean is 0 at both cuts, of some more."""

    def __init__(self) -> None:
        self.is_done = self.has_told = False
        self._failures = self._looks = 0  # batches
        self._rounds = list(ROUNDS)  # that are left
        self._zeros: Optional[Set[str]] = None  # in all rounds so far

    def compare(self, running: Running, subject: Subject, micro: int) -> None:
        """A batch has run in parts of `micro` samples. Warns."""
        if self.is_done or others_train():  # PyTorch's switches are theirs too
            return
        sizes = running.allowed_sizes()
        units = [size for size in reversed(sizes) if 2 * size <= running.samples]
        if len(sizes) == 1 or not units or may_wait_for_others(running):
            self.is_done = True
            return
        said = ""
        for unit in units[:MOST_FAILURES]:  # where the smallest is not taken
            failed = failed_allocations()
            try:
                running.undo.save(GuardPoint.ATTEMPT)
                with running.program.aside():
                    self._compare(running, subject, micro, unit)
                return
            except Exception as error:
                is_short = is_oom(error, failed_allocations() > failed)
                said = "" if is_short else said_of(error)
                let_go(error)
            if is_short:
                break
        self._failures += 1
        self.is_done = bool(said) or self._failures == MOST_FAILURES
        if said and subject.has_loss:
            text = f"the results could not be compared at two cuts ({said}): {KEEP_TOGETHER}"
            tell(running, 0, micro, text, subject.where)

    def _compare(self, running: Running, subject: Subject, micro: int, unit: int) -> None:
        began, most = time.perf_counter(), min(micro, running.samples) // (2 * unit)
        while self._rounds and time.perf_counter() - began < _SECONDS:
            kind, units = self._rounds[0]
            units = min(units, most) or 1
            results, text = _looked(running, subject, micro, unit, kind, units)
            del self._rounds[0]
            if text:
                self.is_done = self.has_told = True
                results.comparison.tell(text)
                return
            self._zeros = results.zeros if self._zeros is None else self._zeros & results.zeros
            is_more = kind == ROUNDS[-1][0] and units < min(most, _SOME // 2)
            if self._zeros and (is_more or kind == "some"):
                self._rounds = [("some", _SOME // 2)]
                self._looks += kind == "some"
                if kind == "some":
                    break  # the next batch has others
        self.is_done = not self._rounds or self._looks == _MOST_LOOKS


def _looked(
    running: Running, subject: Subject, micro: int, unit: int, kind: str, units: int
) -> Tuple[Results, str]:
    """What the last look has found, and its text where each has found that."""
    found, place, text = 0, "", ""
    for look in range(2 * _LOOKS):
        comparison = Comparison.of(running, 0, micro, unit, units, kind, look)
        comparison.subject = subject
        comparison.run(True, FixedDraws, False)
        assert comparison.figures is not None
        results = Results(comparison, comparison.figures)
        text = results.judged()
        if not text and not (found and place in results.zeros):
            break
        found, place = found + bool(text), results.place or place
        if found == (1 if are_exact(comparison.is_16_bit, running.program.device) else _LOOKS):
            break
    return results, text

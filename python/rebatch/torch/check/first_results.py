"""What evaluations and maps return of a few samples, compared at two cuts at once when memory has
cut the first batch: a result that depends on the cut is a warning."""

from __future__ import annotations

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


class FirstResults:
    """Of one function. Results are compared as a Step's are, but for gradients: of two samples that
    differ most, and of pairs, in one call and in two, with the same random numbers for each sample.
    Where a sum or a mean is 0 at both cuts, of some more."""

    def __init__(self) -> None:
        self.is_done = False
        self._failures = self._looks = 0  # batches

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
        most = min(micro, running.samples) // (2 * unit)
        rounds = [(kind, min(units, most) or 1) for kind, units in ROUNDS]
        zeros: Optional[Set[str]] = None
        while rounds:
            results, text = _looked(running, subject, micro, unit, *rounds.pop(0))
            if text:
                self.is_done = True
                results.comparison.tell(text)
                return
            zeros = results.zeros if zeros is None else zeros & results.zeros
            if zeros and not rounds and results.comparison.half < min(most, _SOME // 2) * unit:
                rounds = [("some", min(most, _SOME // 2))]
        self._looks += 1
        self.is_done = not zeros or self._looks == _MOST_LOOKS


def _looked(
    running: Running, subject: Subject, micro: int, unit: int, kind: str, units: int
) -> Tuple[Results, str]:
    """What the last look has found, and its text where each has found that."""
    found, place, text = 0, "", ""
    for look in range(2 * _LOOKS):
        comparison = Comparison.of(running, 0, micro, unit, units, kind, look)
        comparison.subject = subject
        comparison.run(True, FixedDraws, False)
        assert comparison.figures is not None  # all passes have run
        results = Results(comparison, comparison.figures)
        text = results.judged()
        if not text and not (found and place in results.zeros):
            break
        found, place = found + bool(text), results.place or place
        if found == (1 if are_exact(comparison.is_16_bit, running.program.device) else _LOOKS):
            break
    return results, text

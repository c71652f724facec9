"""What a function has returned of the same samples in one call and in two: where it differs. Must
not know how the calls are made."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Iterator, List, NamedTuple, Sequence, Tuple

import torch

from rebatch.torch.batches.join_on_host import moved
from rebatch.torch.batches.kinds import is_plain, plain_parts
from rebatch.torch.batches.outputs import Mean, Sum

# Numbers closer to 0 are compared as if they were this large.
_TELLING = 0.1
# Rounding makes another class of some entries: of so many times as many as it changes a number by.
_CLASSES = 8
# So many columns of a wide tensor are compared.
_COLUMNS = 256
# So many leaves of a result are compared, and so many entries of a list in it.
_MOST, _MOST_ENTRIES = 64, 16


class Seen(NamedTuple):
    """What was compared, as it is said."""

    what: str  # the result
    samples: str
    half: int  # samples of a micro-batch
    rows: str  # what is expected of what has no entry for each sample
    advice: str  # of sums and means


@dataclasses.dataclass
class Leaf:
    """A tensor or number of a result, by its place in it, and three figures: how far two cuts are
    apart, and what they have."""

    place: str
    kind: str  # "Mean" or "Sum" of what is beside a loss; or "rows" or "classes": of samples
    figures: Sequence[torch.Tensor] = ()
    forms: Tuple[str, ...] = ()  # of both, where these differ

    def judged(self, figures: Sequence[float], floor: float, seen: Seen) -> str:
        """What is wrong, and what to do; or nothing."""
        name = f"{seen.what}{self.place} of samples {seen.samples}"
        cuts = f"in one micro-batch and {{}} in micro-batches of {seen.half}"
        depends = "so it depends on how memory cuts the batch"
        if self.forms:
            one, other = self.forms
            return f"{name} is {one} {cuts.format(other)}, {depends}: expected {seen.rows}"
        difference, whole, parts = figures
        scale = max(abs(whole), abs(parts), _TELLING)
        if self.kind == "classes":
            floor, scale = floor * _CLASSES, 1.0
        if difference == 0 or (math.isfinite(difference) and difference <= floor * scale):
            return ""
        if self.kind in ("Mean", "Sum"):
            one, other = told_apart(whole, parts)
            return f"{name} is {one} {cuts.format(other)}, {depends}: {seen.advice}"
        return (
            f"{name} differs by {difference / scale:.1%} between one micro-batch and micro-batches "
            f"of {seen.half}, {depends}: what is computed of a sample follows the others, by their "
            "number, padding or statistics: expected each row to be of its own sample alone"
        )

    def is_zero(self, figures: Sequence[float]) -> bool:
        """Whether it is a number that tells nothing yet."""
        return self.kind in ("Mean", "Sum") and not any(figures)


ADVICE = (
    "expected a mean over the samples in a rebatch.Mean, and a sum over them in a rebatch.Sum; "
    "what is neither, such as a score, a perplexity, or a mean over tokens or a mask, is made of "
    "sums: return each of these as a rebatch.Sum"
)


def told_apart(whole: float, parts: float) -> Tuple[str, str]:
    """Two numbers, with as many digits as that takes."""
    digits = 4 if f"{whole:.4g}" != f"{parts:.4g}" else 7
    return f"{whole:.{digits}g}", f"{parts:.{digits}g}"


def thinned(result: Any) -> Any:
    """With some columns of wide tensors, such as the logits of a vocabulary: those of a few samples
    fill memory too. Samples are too few to be columns."""
    return moved(result, _thin)


def _thin(tensor: torch.Tensor, _at: Tuple[Any, ...]) -> torch.Tensor:
    if not is_plain(tensor) or tensor.dim() < 2 or tensor.shape[-1] < 2 * _COLUMNS:
        return tensor
    return tensor.detach()[..., :: tensor.shape[-1] // _COLUMNS | 1].clone()


def leaves_of(given: Any, whole: Any, parts: Any, device: torch.device) -> List[Leaf]:
    """Of what was returned in one call, as it is combined, and what is combined of two. Figures on
    the device wait for nothing."""
    found: List[Leaf] = []
    for leaf in _leaves(given, whole, parts, "", "rows", device):
        found.append(leaf)
        if len(found) == _MOST:
            break
    return found


def _leaves(
    given: Any, whole: Any, parts: Any, place: str, kind: str, device: torch.device
) -> Iterator[Leaf]:
    if isinstance(given, (Sum, Mean)):
        kind, given = type(given).__name__, given.value
    if isinstance(whole, torch.Tensor) and isinstance(parts, torch.Tensor):
        yield from _of_tensors(whole, parts, place, kind, device)
    elif isinstance(whole, dict) and isinstance(parts, dict) and whole.keys() == parts.keys():
        for key in whole:
            inner = given[key] if isinstance(given, dict) and key in given else None
            yield from _leaves(inner, whole[key], parts[key], f"{place}[{key!r}]", kind, device)
    elif isinstance(whole, (list, tuple)) and isinstance(parts, type(whole)):
        if len(whole) != len(parts):
            forms = tuple(f"a {type(v).__name__} of {len(v)}" for v in (whole, parts))
            yield Leaf(place, kind, forms=forms)
            return
        for i in range(min(len(whole), _MOST_ENTRIES)):
            inner = given[i] if isinstance(given, tuple) and i < len(given) else None
            yield from _leaves(inner, whole[i], parts[i], f"{place}[{i}]", kind, device)
    elif isinstance(whole, (int, float)) and isinstance(parts, (int, float)):
        figures = _apart(torch.tensor(float(whole)), torch.tensor(float(parts)))
        yield Leaf(place, kind, _on(figures, device))


def _of_tensors(
    whole: torch.Tensor, parts: torch.Tensor, place: str, kind: str, device: torch.device
) -> Iterator[Leaf]:
    if not (is_plain(whole) and is_plain(parts)):
        ones, others = plain_parts(whole), plain_parts(parts)
        if len(ones) == len(others) and all(map(is_plain, (*ones, *others))):
            for one, other in zip(ones, others):
                yield from _of_tensors(one, other, place, kind, device)
        return
    if whole.shape != parts.shape:
        shapes = (f"of shape {tuple(t.shape)}" for t in (whole, parts))
        yield Leaf(place, kind, forms=tuple(shapes))
    elif whole.numel():
        a, b = (torch.view_as_real(t) if t.is_complex() else t for t in (whole, parts))
        if kind == "rows" and not a.is_floating_point():
            share = (a != b).float().mean()
            yield Leaf(place, "classes", _on([share, share, share], device))
        else:
            yield Leaf(place, kind, _on(_apart(a.float(), b.float()), device))


def _apart(a: torch.Tensor, b: torch.Tensor) -> List[torch.Tensor]:
    """Of a number, itself; of others the root of the mean square. What is no finite number at both
    cuts counts as the same."""
    a, b = (t.detach() for t in (a, b))
    are_same = (a == b) | ~(a.isfinite() | b.isfinite())
    off = torch.where(are_same, 0, a - b)
    if a.numel() == 1:
        return [off.abs().sum(), a.sum(), b.sum()]
    return [t.square().mean().sqrt() for t in (off, a.nan_to_num(0, 0, 0), b.nan_to_num(0, 0, 0))]


def _on(figures: List[torch.Tensor], device: torch.device) -> List[torch.Tensor]:
    """Not of the host: what is copied from there waits for the device."""
    if device.type == "cpu" or figures[0].device.type != "cpu":
        return figures
    return [torch.full((), float(figure), device=device) for figure in figures]

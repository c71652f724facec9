"""One result of those for parts of a batch, joined along the dimension of the samples, which need
not be the first."""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Tuple

import torch

from rebatch.torch.batches.join_on_host import joined_where_it_fits
from rebatch.torch.batches.kinds import dims_of_samples, joined

_Part = Tuple[int, Any]  # samples, and the result for them


class _Ambiguous(Exception):
    """Several dimensions may be that of the samples."""


def join_results(
    parts: List[_Part],
    dim: Optional[int] = None,
    other: Optional[Callable[[], _Part]] = None,
) -> Any:
    """The result for all samples, of those for its parts in ascending order, in a list that is
    emptied: where memory is short, each goes to host memory.

    dim      the dimension of the samples, where it is known
    other    gives a result for another number of samples, to tell dimensions apart

    Raises ValueError for a result without a dimension of the samples, also if it is the only
    part."""
    counts, results = [count for count, _ in parts], [result for _, result in parts]
    parts.clear()
    return joined_where_it_fits(lambda: _join(counts, results, dim, other), results)


def joined_both(
    whole: Any, parts: List[Any], count: int, dim: Optional[int] = None
) -> Tuple[Any, Any]:
    """A result for 2 * `count` samples, and those of its halves as one, by dimensions of which all
    three tell."""
    alone, joiner = Joiner([2 * count], dim), Joiner([count, count, 2 * count], dim)
    return alone.join([whole], [whole], ""), joiner.join(parts, [*parts, whole], "")


def _join(
    counts: List[int], results: List[Any], dim: Optional[int], other: Optional[Callable[[], _Part]]
) -> Any:
    try:
        return Joiner(counts, dim).join(results, results, "")
    except _Ambiguous as error:
        if other is None or counts[0] == 1 == len(set(counts)):
            raise ValueError(str(error)) from None
    count, result = other()
    try:
        return Joiner([*counts, count], dim).join(results, [*results, result], "")
    except _Ambiguous as error:
        raise ValueError(str(error)) from None


def _named(value: Any) -> str:
    return "None" if value is None else f"an object of type {type(value).__name__}"


class Joiner:
    """`seen` are the results by which dimensions are told apart, with these numbers of samples: the
    results that are joined, and perhaps one more."""

    def __init__(self, counts: List[int], dim: Optional[int]):
        self._counts, self._dim = counts, dim

    def join(self, results: List[Any], seen: List[Any], where: str) -> Any:
        first = results[0]

        def members(key: Any) -> Any:
            return self.join([r[key] for r in results], [r[key] for r in seen], f"{where}[{key!r}]")

        if isinstance(first, torch.Tensor):
            return self._join_tensors(results, seen, where)
        if isinstance(first, dict):
            joined = {k: members(k) for k in first if first[k] is not None}
            return joined if type(first) is dict else type(first)(**joined)
        if isinstance(first, tuple):
            kind: Any = type(first)
            parts = [None if v is None else members(i) for i, v in enumerate(first)]
            return kind(*parts) if hasattr(first, "_fields") else tuple(parts)
        if isinstance(first, list):
            return self._join_lists(results, seen, where, members)
        raise ValueError(
            f"rebatch: the model returned {_named(first)}{_at(where)}: expected tensors, or dicts, "
            "tuples or lists of them"
        )

    def _join_tensors(self, results: List[Any], seen: List[Any], where: str) -> Any:
        first = results[0]
        if first.dim() == 0:
            raise ValueError(
                f"rebatch: the model returned a scalar{_at(where)}: expected tensors with a "
                "dimension of the samples"
            )
        found = dims_of_samples(seen, self._counts)
        if not found:
            raise ValueError(
                f"rebatch: the model returned a tensor of shape {tuple(first.shape)}{_at(where)} "
                f"for {self._counts[0]} samples: expected a dimension with one entry for each "
                "sample"
            )
        if len(results) == 1:
            return first
        if self._dim is not None and min(self._dim, first.dim() - 1) in found:
            found = [min(self._dim, first.dim() - 1)]
        if len(found) > 1:
            raise _Ambiguous(
                f"rebatch: the model returned a tensor of shape {tuple(first.shape)}{_at(where)} "
                f"for {self._counts[0]} samples, whose dimensions {found[0]} and {found[1]} may "
                "both be that of the samples: expected batch_dim, which says it"
            )
        return joined(results, found[0])

    def _join_lists(
        self, results: List[Any], seen: List[Any], where: str, members: Callable[[int], Any]
    ) -> Any:
        """A list has an entry for each sample, or results of which each has all samples."""
        first = results[0]
        is_of_samples = all(len(r) == count for r, count in zip(seen, self._counts))
        may_be_fields = len({len(r) for r in seen}) == 1 and any(
            isinstance(v, (torch.Tensor, dict, tuple, list)) for v in first
        )
        if is_of_samples and may_be_fields and len(results) > 1:
            raise _Ambiguous(
                f"rebatch: the model returned a list of {len(first)}{_at(where)} for "
                f"{self._counts[0]} samples, which may have an entry for each sample or be one of "
                "results: expected a tuple of results"
            )
        if is_of_samples:
            return [item for result in results for item in result]
        if may_be_fields:
            return [None if v is None else members(i) for i, v in enumerate(first)]
        raise ValueError(
            f"rebatch: the model returned a list of {len(first)}{_at(where)} for "
            f"{self._counts[0]} samples: expected one entry for each sample"
        )


def _at(where: str) -> str:
    return f" in its result{where}" if where else ""

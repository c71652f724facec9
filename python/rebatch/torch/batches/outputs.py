"""What loss_fn returns beside the loss, of the micro-batches that succeeded."""

from __future__ import annotations

from typing import Any, Iterable, Iterator, List, Tuple

import torch

from rebatch.torch.batches.kinds import dims_of_samples
from rebatch.torch.batches.kinds import joined as joined_tensors


class _Number:
    def __init__(self, value: Any):
        if not isinstance(value, (int, float, complex, torch.Tensor)):
            name = type(self).__name__
            raise TypeError(
                f"rebatch: {name} was given a {type(value).__name__}: expected a number or a tensor"
            )
        self.value = value

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.value!r})"


class Sum(_Number):
    """Beside a loss: a value that is summed over the micro-batches of a batch::

        return loss, {"correct": rebatch.Sum((logits.argmax(1) == y).sum())}

    Args:
        value: a number, or a tensor that has the same shape in every micro-batch"""


class Mean(_Number):
    """Beside a loss: a mean over the samples of a micro-batch, of which the mean over the whole
    batch is made; each micro-batch counts by its samples::

        return loss, {"accuracy": rebatch.Mean((logits.argmax(1) == y).float().mean())}

    Args:
        value: a number, or a tensor that has the same shape in every micro-batch"""


def split_result(result: Any) -> Tuple[Any, Any]:
    """(loss, extras) of what loss_fn returned; extras are None where there are none."""
    if isinstance(result, (tuple, list)):
        if len(result) != 2:
            raise ValueError(
                f"rebatch: loss_fn returned {len(result)} values: expected a loss, or a loss and "
                "one other value, such as a dict"
            )
        return result[0], result[1]
    return result, None


def kept(value: Any, name: str = "the value beside the loss", are_lent: bool = False) -> Any:
    """A copy that stays as it is, whatever becomes of the micro-batch's tensors. Entries of lists
    are copied where they are lent: the next replay of a graph writes there. Nothing keeps the
    pass's graph of autograd."""
    if value is None:
        return None
    if isinstance(value, _Number):
        return type(value)(kept_tensor(value.value))
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        return kept_tensor(value)
    if isinstance(value, dict):
        return {key: kept(part, repr(key), are_lent) for key, part in value.items()}
    if isinstance(value, tuple):
        names = (f"entry {i} of {name}" for i in range(len(value)))
        return _like(value, (kept(part, n, are_lent) for part, n in zip(value, names)))
    if isinstance(value, list):
        return [_entry(entry, are_lent) for entry in value]
    what = (
        "a scalar"
        if isinstance(value, (torch.Tensor, int, float))
        else (f"a {type(value).__name__}")
    )
    raise ValueError(
        f"rebatch: {name} that loss_fn returned is {what}: expected a tensor or list with the "
        "samples in its first dimension, which are joined, rebatch.Mean(value), which is averaged "
        "over the samples, rebatch.Sum(value), which is summed, or a dict or tuple of such"
    )


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Those of what was kept."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, _Number):
        yield from tensors_in(value.value)
    elif isinstance(value, (dict, tuple, list)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(part)


def _like(value: Any, members: Iterable[Any]) -> Any:
    """A tuple of its type."""
    return type(value)(*members) if hasattr(value, "_fields") else tuple(members)


def _entry(value: Any, is_lent: bool) -> Any:
    """Of a list: a tensor, or a list, tuple or dict with tensors."""
    if isinstance(value, torch.Tensor):
        return kept_tensor(value) if is_lent else value.detach() if value.requires_grad else value
    if type(value) is dict:
        return {key: _entry(part, is_lent) for key, part in value.items()}
    if type(value) is tuple or hasattr(value, "_fields"):
        return _like(value, (_entry(part, is_lent) for part in value))
    return [_entry(part, is_lent) for part in value] if type(value) is list else value


def kept_tensor(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _check_alike(values: List[Any], name: str) -> None:
    kinds = list(dict.fromkeys(type(value) for value in values))
    if len(kinds) > 1:
        first, second = (kind.__name__ for kind in kinds[:2])
        raise ValueError(
            f"rebatch: {name} that loss_fn returned is a {first} for one micro-batch and a "
            f"{second} for another: expected the same for all"
        )
    lengths = list(dict.fromkeys(len(v) for v in values if isinstance(v, tuple)))
    if len(lengths) > 1:
        raise ValueError(
            f"rebatch: {name} that loss_fn returned is a tuple of {lengths[0]} for one micro-batch "
            f"and of {lengths[1]} for another: expected the same for all"
        )
    keys = list(dict.fromkeys(tuple(v) for v in values if isinstance(v, dict)))
    if len(keys) > 1:
        raise ValueError(
            f"rebatch: loss_fn returned a dict with the keys {list(keys[0])} for one micro-batch, "
            f"and with {list(keys[1])} for another: expected the same for all"
        )


def _dim_of(tensors: List[torch.Tensor], counts: List[int], dim: int, name: str) -> int:
    """Along which they are joined: where `dim`, that of the samples in the batch, is not the first,
    a result may have them elsewhere."""
    if dim == 0:
        return 0
    found, usual = dims_of_samples(tensors, counts), min(dim, tensors[0].dim() - 1)
    if usual not in found and len(found) != 1:
        raise ValueError(
            f"rebatch: {name} that loss_fn returned is a tensor of shape "
            f"{tuple(tensors[0].shape)} for {counts[0]} samples: expected one entry for each "
            f"sample in dimension {dim}, which is batch_dim, or in one other dimension"
        )
    return usual if usual in found else found[0]


def _check_sizes(tensors: List[torch.Tensor], dim: int, name: str) -> None:
    """Batches of a loader that run as one may have other lengths each."""
    if tensors[0].is_nested:
        return
    found = {(*t.shape[:dim], *t.shape[dim + 1 :]): tuple(t.shape) for t in tensors}
    if len(found) > 1:
        shapes = " and ".join(map(str, list(found.values())[:2]))
        raise ValueError(
            f"rebatch: {name} that loss_fn returned has tensors of shapes {shapes} for two "
            "micro-batches, which cannot be joined: expected a list with an entry for each sample, "
            "such as list(tensor)"
        )


def _mean(values: List[Any], counts: List[int]) -> Any:
    """Weighted, and as exact, as the loss is."""
    total, mean = sum(counts), None
    for value, count in zip(values, counts):
        if isinstance(value, torch.Tensor):
            value = value.to(torch.promote_types(value.dtype, torch.float32))
        part = value * (count / total)
        mean = part if mean is None else mean + part
    return mean


def joined(
    values: List[Any], counts: List[int], dim: int = 0, name: str = "the value beside the loss"
) -> Any:
    """One value of those of each micro-batch, of so many samples, in the order of the samples: sums
    are summed, means averaged, tensors and lists joined. `dim` is that of the samples."""
    if not values:
        return None
    _check_alike(values, name)
    first = values[0]
    if isinstance(first, dict):
        return {key: joined([v[key] for v in values], counts, dim, repr(key)) for key in first}
    if isinstance(first, tuple):
        names = (f"entry {i} of {name}" for i in range(len(first)))
        return _like(first, (joined(list(v), counts, dim, n) for v, n in zip(zip(*values), names)))
    if isinstance(first, Mean):
        return _mean([value.value for value in values], counts)
    if isinstance(first, Sum):
        total = first.value
        for value in values[1:]:
            total = total + value.value
        return total
    if isinstance(first, torch.Tensor):
        at = _dim_of(values, counts, dim, name)
        _check_sizes(values, at, name)
        return joined_tensors(values, at)
    if isinstance(first, list):
        return [entry for value in values for entry in value]
    return None

"""What loss_fn returns beside the loss, of the micro-batches that succeeded."""

from __future__ import annotations

from typing import Any, List, Tuple

import torch

from rebatch.torch.batches.kinds import joined as joined_tensors


class Sum:
    """Beside a loss: a value that is summed over the micro-batches of a batch::

        return loss, {"correct": rebatch.Sum((logits.argmax(1) == y).sum())}

    Args:
        value: a number, or a tensor that has the same shape in every micro-batch"""

    def __init__(self, value: Any):
        if not isinstance(value, (int, float, complex, torch.Tensor)):
            raise TypeError(
                f"rebatch: Sum was given a {type(value).__name__}: expected a number or a tensor"
            )
        self.value = value

    def __repr__(self) -> str:
        return f"Sum({self.value!r})"


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


def kept(value: Any, name: str = "the value beside the loss") -> Any:
    """A copy that stays as it is, whatever becomes of the micro-batch's tensors."""
    if value is None:
        return None
    if isinstance(value, Sum):
        return Sum(kept_tensor(value.value))
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        return kept_tensor(value)
    if isinstance(value, dict):
        return {key: kept(part, repr(key)) for key, part in value.items()}
    if isinstance(value, list):
        return list(value)
    what = (
        "a scalar"
        if isinstance(value, (torch.Tensor, int, float))
        else (f"a {type(value).__name__}")
    )
    raise ValueError(
        f"rebatch: {name} that loss_fn returned is {what}: expected a tensor or list with the "
        "samples in its first dimension, which are joined, rebatch.Sum(value), which is summed, or "
        "a dict of such"
    )


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
    keys = list(dict.fromkeys(tuple(v) for v in values if isinstance(v, dict)))
    if len(keys) > 1:
        raise ValueError(
            f"rebatch: loss_fn returned a dict with the keys {list(keys[0])} for one micro-batch, "
            f"and with {list(keys[1])} for another: expected the same for all"
        )


def joined(values: List[Any], name: str = "the value beside the loss") -> Any:
    """One value of those of each micro-batch, in the order of the samples: sums are summed, tensors
    and lists joined."""
    if not values:
        return None
    _check_alike(values, name)
    first = values[0]
    if isinstance(first, dict):
        return {key: joined([v[key] for v in values], repr(key)) for key in first}
    if isinstance(first, Sum):
        total = first.value
        for value in values[1:]:
            total = total + value.value
        return total
    if isinstance(first, torch.Tensor):
        return joined_tensors(values)
    if isinstance(first, list):
        return [entry for value in values for entry in value]
    return None

"""What an `embed` of the program returns: tensors with a row for each sample. Must not know how
micro-batches run."""

from __future__ import annotations

from typing import Any, List, Sequence, Set, Tuple

import torch

from rebatch.torch.private import tree_flatten, tree_unflatten


def may_have_gradient(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


class AsResult(torch.autograd.Function):
    """The values of a leaf as a result of an operation, which a loss_fn may change in place."""

    @staticmethod
    def forward(_ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.data

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Embedded:
    """The tensors of what embed returned for so many samples, in their order; 0: as many as the
    first one has rows."""

    def __init__(self, value: Any, count: int = 0):
        tensors, self._form = tree_flatten(value)
        if not count and tensors and isinstance(tensors[0], torch.Tensor) and tensors[0].dim():
            count = len(tensors[0])
        for tensor in tensors or [None]:
            is_whole = isinstance(tensor, torch.Tensor) and not tensor.is_nested
            is_whole = is_whole and tensor.layout == torch.strided
            if not (is_whole and tensor.dim() and len(tensor) == count):
                raise ValueError(
                    f"rebatch: embed returned {_described(tensor, is_whole)} for {count} samples: "
                    "expected a tensor, or a tuple or dict of tensors, with a row for each sample "
                    "in the first dimension; what belongs to the whole batch, such as a "
                    "temperature, loss_fn takes from the model"
                )
        self.tensors: List[torch.Tensor] = tensors

    def copied(self) -> Embedded:
        """The same without a graph, as it is kept while other samples run: what embed returned may
        be a view of more, or a buffer that the next samples overwrite."""
        self.tensors = [tensor.detach().clone() for tensor in self.tensors]
        return self

    def with_rows(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The same with other tensors."""
        return tree_unflatten(tensors, self._form)

    def detached(self) -> Embedded:
        """The same without a graph."""
        return Embedded(self.with_rows([tensor.detach() for tensor in self.tensors]))

    def check_graph(self) -> None:
        """ValueError where nothing would train."""
        if not any(tensor.requires_grad for tensor in self.tensors):
            refuse_no_gradient()

    def stand_in(self) -> torch.Tensor:
        """A mean over the samples in place of the loss, for a few samples alone: at another cut it
        is another one where a row depends on other samples. Rows that get no gradient, such as
        labels, are a factor of the others."""
        has_graph = torch.is_grad_enabled()
        trained = [t for t in self.tensors if t.requires_grad or not has_graph]
        trained = list(filter(may_have_gradient, trained))
        if not trained:
            refuse_no_gradient()
        others = [t for t in self.tensors if t.numel() and not any(t is each for each in trained)]
        rows = torch.stack([_of_each_row(t).sum(1) for t in trained]).sum(0)
        for tensor in others:
            rows = rows * (1.5 + _of_each_row(tensor).mean(1))
        return rows.mean()


def _of_each_row(tensor: torch.Tensor) -> torch.Tensor:
    """Numbers between -1 and 1."""
    rows = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    rows = rows[:, None].flatten(1)
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    weights = torch.arange(rows.shape[1], device=rows.device, dtype=rows.dtype).cos()
    return rows.sin() * weights


def _described(value: Any, is_whole: bool) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    if not is_whole:
        return "a nested tensor" if value.is_nested else f"a tensor of layout {value.layout}"
    return f"a tensor of shape {tuple(value.shape)}"


def refuse_other_ways(loss: torch.Tensor, of_rows: Set[Any], numbers: Tuple[int, int]) -> None:
    """ValueError for a loss that has come to what embed made by another way than its rows, such as
    by an attribute of the model: in a batch that is cut there is no such way. `of_rows` are the
    nodes of autograd that made these, and embed has made those of `numbers`: the first one, and the
    one behind the last."""
    seen, nodes = set(of_rows), [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if numbers[0] <= node._sequence_nr() < numbers[1]:
            raise ValueError(
                f"rebatch: loss_fn uses a tensor ({node.name()}) that embed has made and not "
                "returned, such as an auxiliary loss in an attribute of the model, and in a batch "
                "that is cut there is none: expected embed to return what it is made of, with a "
                "row for each sample, and loss_fn to make it"
            )
        nodes += [following for following, _ in node.next_functions]


def refuse_no_gradient() -> None:
    raise ValueError(
        "rebatch: no tensor of embed gets a gradient: expected one that depends on parameters, "
        "without detach() or torch.no_grad(), and a loss_fn that uses it"
    )


def joined_rows(parts: Sequence[Embedded]) -> Embedded:
    """Those of consecutive samples."""
    whole = parts[0]
    if len(parts) > 1:
        try:
            whole.tensors = [torch.cat(rows) for rows in zip(*(part.tensors for part in parts))]
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            shapes = [tuple(tuple(t.shape) for t in part.tensors) for part in parts]
            raise ValueError(
                f"rebatch: embed returned tensors of shapes {shapes[0]} and then of others, which "
                f"cannot be joined ({str(error).splitlines()[0]}): expected one shape but for the "
                "rows, for example padded to a fixed length"
            ) from error
    return whole


def check_alike(everyones: Sequence[List[Tuple[Any, str]]]) -> None:
    """ValueError where the forms of the ranks' rows, (shape of one, dtype) of each tensor,
    differ."""
    other = next((rank for rank, forms in enumerate(everyones) if forms != everyones[0]), 0)
    if other:
        raise ValueError(
            f"rebatch: embed returned rows of {everyones[0]} on rank 0 and of {everyones[other]} "
            f"on rank {other}: expected the same on all ranks, for example padded to a fixed length"
        )

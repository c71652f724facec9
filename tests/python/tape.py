"""A recorder of graphs for a CPU that replays operations, as CUDA does, and no Python."""

import gc
import types

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# What waits for a GPU.
READS = ("_local_scalar_dense", "nonzero", "equal")


def is_tensor(value):
    return isinstance(value, torch.Tensor)


def key_of(tensor):
    return tensor.untyped_storage()._cdata


class Tape(TorchDispatchMode):
    """The operations of a pass. What it changes in place is to be put back: a capture does no
    work."""

    def __init__(self):
        super().__init__()
        self.operations = []
        self._made, self._saved = set(), {}

    def __torch_dispatch__(self, function, kinds, arguments=(), keywords=None):
        keywords, schema = keywords or {}, function._schema
        if function.__name__.split(".")[0] in READS:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        if schema.is_mutable:
            for tensor in filter(is_tensor, tree_leaves((arguments, keywords))):
                self._save(tensor)
        result = function(*arguments, **keywords)
        is_view = any(part.alias_info is not None for part in schema.returns)
        if is_view and not schema.is_mutable:
            return result  # in memory of what is there
        own = [] if is_view else [t.detach() for t in filter(is_tensor, tree_leaves(result))]
        self._made.update(map(key_of, own))
        given = tree_map(lambda v: v.detach() if is_tensor(v) else v, (arguments, keywords))
        self.operations.append((function, *given, own))
        return result

    def _save(self, tensor):
        key = key_of(tensor)
        if key not in self._made and key not in self._saved:
            flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            self._saved[key] = flat, flat.clone()

    def put_back(self):
        for flat, was in self._saved.values():
            flat.copy_(was)

    @torch.no_grad()
    def replay(self):
        for function, arguments, keywords, own in self.operations:
            result = function(*arguments, **keywords)
            for memory, value in zip(own, filter(is_tensor, tree_leaves(result))):
                memory.copy_(value)


class Recorder:
    """In the place of graphs.recorder.Recorder."""

    def claim(self):
        return True

    def lend(self):
        pass

    give_back_rest = drop = lend

    def within(self, body):
        return body()

    def record(self, body):
        gc.collect()
        state, tape = torch.get_rng_state(), Tape()
        try:
            with tape:
                result = body()
        finally:
            torch.set_rng_state(state)
            tape.put_back()
        return types.SimpleNamespace(result=result, replay=tape.replay)

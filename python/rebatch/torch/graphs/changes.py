"""What a pass changes in Python, which a replay of its CUDA graph would leave out: attributes,
containers, variables, random numbers of the host, and tensors on the CPU. Tensors of the device
that change in place are none: a replay changes them too. They are found, since passes that prove a
graph must leave them as they were.

Not seen: what objects of installed packages keep, files, the environment, what C code keeps, and
what a pass changes and puts back itself."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Set, Tuple

import torch

from rebatch.torch.graphs.ran import Ran
from rebatch.torch.graphs.reads import Reads
from rebatch.torch.private import HOOK_TABLES, collectives
from rebatch.torch.program.program import Running, listed
from rebatch.torch.undo.changes_outside import Marks, changed_in, is_within
from rebatch.torch.undo.copies import Copies, sums_of
from rebatch.torch.undo.generators import is_same_state, of_everyone
from rebatch.torch.undo.looks import mark_of

# Passes that may fill caches, which stay as they are from then on.
_FILLING = 2
# Contents of tensors up to this size are compared; of larger ones the version alone.
_COMPARED_BYTES = 64 << 20


class _Marks(Marks):
    """Of all that a pass may change."""

    most = 1 << 18
    most_entries = 1 << 16
    most_array_bytes = _COMPARED_BYTES
    names_parts_of_modules = True

    def __init__(self, running: Running, ran: Ran, parameters: Sequence[torch.Tensor]):
        program, tree = running.program, running.undo.tree
        modules = [module for _, module in tree.named_modules()]
        models = listed(program.model)
        roots = [("model" if len(models) == 1 else f"model[{i}]", m) for i, m in enumerate(models)]
        roots += running.undo.state
        roots += [(f"generators[{i}]", part) for i, part in enumerate(program.generators)]
        looked_at = {id(part) for _, part in roots}
        # What it holds keeps its address while this is there.
        self._held: List[Any] = []
        self._device = program.device.type
        self._of_graphs = {id(g) for g in program.generators if _is_on_device(g)}
        self._on_device: Dict[int, Tuple[str, torch.Tensor]] = {}
        functions = [*program.functions_of_a_pass(), *ran.functions]
        known = program.handled() - looked_at
        super().__init__(functions, modules, known, roots=roots, places=ran.places())
        self.generators = {name: get() for name, (get, _) in of_everyone().items()}
        self.generators["torch.default_generator"] = torch.get_rng_state()
        tensors = [tensor for _, tensor in self._on_device.values()]
        sums = sums_of(tensors) if self._device != "meta" else [None] * len(tensors)
        self.contents = {id(t): (t, mark_of(t)[0], n) for t, n in zip(tensors, sums)}
        # Of leaves beside `parameters`: what a Step has no gradients of.
        known = set(map(id, parameters))
        self.gradients = {
            name: (t.grad, None if t.grad is None else t.grad._version)
            for name, t in self._on_device.values()
            if t.is_leaf and t.requires_grad and id(t) not in known
        }

    def look_into(self, name: str, value: Any, is_part: bool) -> None:
        self._held.append(value)
        if id(value) in self._of_graphs:
            return
        if isinstance(value, torch.Tensor) and not self._is_on_host(value):
            self._on_device[id(value)] = name, value
        super().look_into(name, value, is_part)
        if isinstance(value, torch.nn.Module):
            for table in HOOK_TABLES:
                self._note(f"{name}.{table}", len(getattr(value, table)))

    def _is_on_host(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu" != self._device

    def mark_of_contents(self, tensor: torch.Tensor) -> Tuple[Any, ...]:
        """Of one on the device where it lies, which param.data = ... changes."""
        if not self._is_on_host(tensor):
            return (mark_of(tensor)[1],)
        is_compared = tensor.nbytes <= _COMPARED_BYTES
        return (*super().mark_of_contents(tensor), *sums_of([tensor] if is_compared else []))

    def note_gradient(self, name: str, tensor: torch.Tensor) -> None:
        """A pass leaves them, and so does a replay."""


def _is_on_device(generator: Any) -> bool:
    return isinstance(generator, torch.Generator) and generator.device.type != "cpu"


def _is_on_cpu(mark: Any) -> bool:
    """That of a tensor there, with what its contents are."""
    return isinstance(mark, tuple) and len(mark) > 2 and type(mark[0]) is int


def _are_in_place(then: Dict[Any, Any], now: Dict[Any, Any]) -> bool:
    """Whether all that differs are the contents of tensors on the CPU."""
    differ = [(then[key], now[key]) for key in then if key in now and then[key] != now[key]]
    return then.keys() == now.keys() and all(
        _is_on_cpu(a) and _is_on_cpu(b) and a[0] == b[0] for a, b in differ
    )


def _in_place(before: _Marks, now: _Marks) -> List[torch.Tensor]:
    """The tensors of the device whose contents are others."""
    then, later = before.contents, now.contents
    return [each[0] for key, each in then.items() if key in later and each[1:] != later[key][1:]]


class Beside:
    """Tensors beside what is put back after a pass, which passes change in place: a teacher that is
    an average, a sum that is logged."""

    def __init__(self, tensors: Sequence[torch.Tensor] = ()):
        self.tensors = list(tensors)
        self._copies = Copies()

    def save(self, known: Sequence[torch.Tensor]) -> None:
        """All but those that are put back already. May run out of memory."""
        mine = set(map(id, known))
        self._copies.save({id(t): t for t in self.tensors if id(t) not in mine})

    def put_back(self) -> None:
        self._copies.restore()

    def let_go(self) -> None:
        """Of the copies."""
        self._copies = Copies()


class Changes:
    """What the passes of one program change. The first ones may fill caches: what counts is what
    those after them still change."""

    def __init__(self, running: Running):
        self._running = running
        self._passes = 0
        self._before: Optional[_Marks] = None
        self._ran = Ran()
        self._parameters: Sequence[torch.Tensor] = ()
        self._names: Dict[str, None] = {}
        self._generators: Set[str] = set()  # of these, those of random numbers
        self._collectives = 0  # before the pass
        self.has_collectives = False
        self.in_place: List[torch.Tensor] = []  # of the device, of the last pass
        self.gets_gradients: Dict[str, None] = {}  # names beside the parameters

    def before(self, parameters: Sequence[torch.Tensor], ran: Optional[Ran] = None) -> None:
        """An eager pass runs, of whose code `ran` is known. `parameters` get gradients."""
        self._parameters, self._ran = parameters, ran or Ran()
        self._before = self._marks() if self._passes >= _FILLING else None
        self._collectives = collectives()

    def _marks(self) -> _Marks:
        return _Marks(self._running, self._ran, self._parameters)

    def after(self, reads: Optional[Reads] = None) -> bool:
        """It has succeeded. `reads` are from before it: what is read may have no mark. False: it
        was one of the first, which are not compared."""
        before, self._before = self._before, None
        self._passes += 1
        if before is None:
            return False
        self.has_collectives |= collectives() != self._collectives
        now = self._marks()
        self.in_place = _in_place(before, now)
        names = changed_in(before, now)
        for name in names:
            if not is_within(name, names):
                is_in_place = _are_in_place(before.found.get(name, {}), now.found.get(name, {}))
                self._names[name + " (a tensor on the CPU)" * is_in_place] = None
                if "state" in now.found.get(name, {}):
                    self._generators.add(name)
        for name, state in before.generators.items():
            if not is_same_state(now.generators[name], state):
                self._names[name] = None
                self._generators.add(name)
        for name, (gradient, version) in now.gradients.items():
            then = before.gradients.get(name, (None, None))
            if gradient is not then[0] or version != then[1]:
                self.gets_gradients[name] = None
        if reads and not self._names:
            self._names.update(dict.fromkeys(filter(None, [reads.changed()])))
        return True

    @property
    def are_known(self) -> bool:
        """Passes were compared."""
        return self._passes > _FILLING

    def names(self) -> List[str]:
        """Of what passes have changed, as users write them."""
        return list(self._names)

    def expected(self) -> str:
        """What a program may have instead."""
        if self._generators.issuperset(self._names):
            return "random numbers of a generator on the GPU, its own or one in generators="
        return "a tensor on the GPU that changes in place, or a value returned with the loss"

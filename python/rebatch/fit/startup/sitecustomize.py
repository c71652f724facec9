"""Python runs this before the program of `rebatch fit`, which has put this folder on PYTHONPATH:
once the program has imported PyTorch, its loop is watched. A sitecustomize of its own runs too."""

import importlib.abc
import importlib.util
import json
import os
import sys
from typing import Any, Callable, List, Optional

HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGES = os.path.dirname(os.path.dirname(os.path.dirname(HERE)))


class Arguments(List[str]):
    """sys.argv of a program that takes its size there: it is told when they are first read."""

    on_read: Optional[Callable[[], None]] = None
    is_read = False

    def note(self) -> None:
        then, self.on_read, self.is_read = self.on_read, None, True
        if then:
            then()


def _noting(name: str) -> Any:
    plain = getattr(list, name)

    def read(arguments: Arguments, *given: Any) -> Any:
        if name != "__getitem__" or given != (0,):  # the program's name
            arguments.note()
        return plain(arguments, *given)

    return read


for _name in "__getitem__ __iter__ __reversed__ __contains__ __eq__ __add__ __repr__".split():
    setattr(Arguments, _name, _noting(_name))
for _name in "copy count index pop".split():
    setattr(Arguments, _name, _noting(_name))


class _AfterTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_watch(module: Any) -> None:
            run(module)
            if "REBATCH_FIT" in os.environ:
                from rebatch.fit.program import loops

                loops.watch(os.environ["REBATCH_FIT"])

        spec.loader.exec_module = run_and_watch  # type: ignore[method-assign]
        return spec


def _run_other() -> None:
    """The one that this one stands before."""
    own = sys.modules.pop("sitecustomize")
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError:
        pass
    sys.modules.setdefault("sitecustomize", own)


sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != HERE]
if importlib.util.find_spec("rebatch") is None:
    sys.path.append(PACKAGES)  # the last, so that it hides none of the program's packages
if "REBATCH_FIT" in os.environ:
    sys.meta_path.insert(0, _AfterTorch())
    if json.loads(os.environ["REBATCH_FIT"])["words"]:
        sys.argv = Arguments(sys.argv)
_run_other()

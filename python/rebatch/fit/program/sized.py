"""A program that takes its batch size from an argument. Where it first reads one, after it has
imported PyTorch, sizes are tried in copies of its process, which go on with other arguments: what
was imported until then is not imported again. Must not know what a try runs."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
from typing import Any, Callable, Dict, List

import torch

from rebatch.fit.program.copies import become_copy
from rebatch.fit.program.live import freeze
from rebatch.fit.rows import answer_and_exit, answer_of_tries, read_answer, read_tried
from rebatch.fit.search import Sizes
from rebatch.fit.tried import BATCH, GoOn, Request, Tried, with_size


class _Sized:
    """The program, whose copies answer as if each were the program."""

    name, is_loop = "", True

    def __init__(self, asked: Dict[str, Any], becomes: Callable[[Request], None]):
        self._asked, self._becomes = asked, becomes
        self.samples: int = asked["sized"]["size"]

    def sizes(self) -> Sizes:
        return Sizes()

    def tried(self, request: Request) -> Tried:
        answer = self._asked["answer"] + ".tried"
        if os.path.exists(answer):
            os.remove(answer)
        sys.stdout.flush()
        sys.stderr.flush()
        freeze()
        copy = os.fork()
        if copy == 0:
            become_copy()
            asked = {**self._asked, "answer": answer, "sized": dataclasses.asdict(request)}
            # A program that starts another passes this on.
            os.environ["REBATCH_FIT"] = json.dumps({**asked, "words": []})
            for at in places_of(self._asked["words"]):
                sys.argv[at] = with_size(self._asked["words"][at], request.size)
            self._becomes(request)
            raise GoOn
        status = os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1])
        return read_tried(read_answer(answer, self._asked["words"][0], status, request.size))


def places_of(words: List[str]) -> List[int]:
    """Of those that have the size, counted from the last."""
    return [at for at in range(-len(words), 0) if BATCH in words[at]]


def serve(asked: Dict[str, Any], becomes: Callable[[Request], None]) -> None:
    """Have the program answer at its first reading of sys.argv, if the size is there. `becomes`
    is called in each copy."""
    arguments: Any = sys.argv
    words, size = asked["words"], asked["sized"]["size"]
    if not hasattr(arguments, "on_read") or arguments.is_read:
        return
    there = list.copy(arguments)[1:]
    places = places_of(words)
    if -places[0] > len(there) or any(there[at] != with_size(words[at], size) for at in places):
        return  # of another program, or in its environment

    def answer() -> None:
        if threading.active_count() > 1 or "REBATCH_FIT" not in os.environ:
            return
        # The first optimizer would import what this does, in each copy.
        torch.compiler.disable(lambda: None)
        program = _Sized(asked, becomes)
        try:
            answer_and_exit(json.dumps(asked), lambda _: answer_of_tries(program, asked))
        except GoOn:
            return

    arguments.on_read = answer

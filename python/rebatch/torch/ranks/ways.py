"""In which way ranks train a model of fully_shard(), and what changes it: the automaton of
tests/model/change.pml, in which a rank that is missing is the fourth state. Must not know how the
ranks agree."""

from enum import Enum, auto
from typing import Dict, Optional, Tuple


class Way(Enum):
    WINDOW = auto()  # a step gathers the whole parameters
    LOCKSTEP = auto()  # each micro-batch gathers them
    ON_HOST = auto()  # the same, and gradients are summed in host memory


class Event(Enum):
    LEAVE = auto()  # a rank has no memory for this way
    RETURN = auto()  # some steps later all ranks have memory for the whole parameters
    STAY = auto()  # one of them has none


TRANSITIONS: Dict[Tuple[Way, Event], Way] = {
    (Way.WINDOW, Event.LEAVE): Way.LOCKSTEP,
    (Way.LOCKSTEP, Event.LEAVE): Way.ON_HOST,
    (Way.LOCKSTEP, Event.RETURN): Way.WINDOW,
    (Way.LOCKSTEP, Event.STAY): Way.LOCKSTEP,
    (Way.ON_HOST, Event.RETURN): Way.WINDOW,
    (Way.ON_HOST, Event.STAY): Way.LOCKSTEP,  # sums are on the device again
}
_RETURN_AFTER = 64  # steps in lockstep; doubled each time that it is over


class Ways:
    """Where the ranks are in that table."""

    def __init__(self, way: Way):
        self.way = way
        self._return_at: Optional[int] = None  # the number of a step
        self._wait = _RETURN_AFTER

    def is_return_due(self, number: int) -> bool:
        """Step `number` is one in which the ranks are to look whether they can return."""
        is_over = self._return_at is not None and number >= self._return_at
        return is_over and self.way is not Way.WINDOW

    def happens(self, event: Event, number: int) -> Way:
        """At step `number`: the way from now on."""
        self.way = TRANSITIONS[self.way, event]
        if event is not Event.LEAVE:
            self._wait *= 2
        self._return_at = number + self._wait
        return self.way

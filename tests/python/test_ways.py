"""How ranks change their way (ranks/ways.py) is what Spin looks at in tests/model/change.pml."""

import pathlib
import re

import pytest
from rebatch.torch.ranks.ways import TRANSITIONS, Event, Way, Ways

MODEL = pathlib.Path(__file__).resolve().parents[1] / "model" / "change.pml"


def transitions_of_model():
    """(state, event): state. Without a rank that is missing, which ends the training."""
    table = re.search(r"#define CHANGE_TRANSITIONS\(X\)(.*?)\n\n", MODEL.read_text(), re.DOTALL)[1]
    found = re.findall(r"X\((\w+), (\w+), (\w+)\)", table)
    assert [state for state, event, _ in found if event == "BREAK"] == [w.name for w in Way]
    return {(at, event): to for at, event, to in found if event != "BREAK"}


def test_the_table_is_the_models():
    ours = {(at.name, event.name): to.name for (at, event), to in TRANSITIONS.items()}
    assert ours == transitions_of_model()


@pytest.mark.parametrize("event", Event)
@pytest.mark.parametrize("way", Way)
def test_each_event_in_each_way(way, event):
    ways = Ways(way)
    expected = transitions_of_model().get((way.name, event.name))
    if expected is None:
        with pytest.raises(KeyError):
            ways.happens(event, 0)
        return
    assert ways.happens(event, 0).name == expected
    assert ways.is_return_due(1000) == (expected != "WINDOW")


def test_each_return_that_fails_doubles_the_wait():
    ways = Ways(Way.WINDOW)
    assert not ways.is_return_due(1000)
    ways.happens(Event.LEAVE, 10)
    due = [10]
    for _ in range(3):
        due.append(next(n for n in range(due[-1], 1000) if ways.is_return_due(n)))
        ways.happens(Event.STAY, due[-1])
    waits = [after - before for before, after in zip(due, due[1:])]
    assert waits == [waits[0], 2 * waits[0], 4 * waits[0]]

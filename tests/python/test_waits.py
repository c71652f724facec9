"""Waiting for a GPU ends."""

import time

import pytest
import torch

from rebatch.torch.session.session import Lost
from rebatch.torch.session.gpu_wait import Work


@pytest.fixture
def ready_after(monkeypatch):
    """A GPU whose events are ready after so many questions."""
    left = {"questions": 0, "recorded": 0}

    class Event:
        def record(self, stream):
            assert stream == "the stream of cuda:1"
            left["recorded"] += 1

        def query(self):
            left["questions"] -= 1
            return left["questions"] < 0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    return left


def test_it_ends_when_the_work_does(ready_after):
    ready_after["questions"] = 30
    Work(torch.device("cuda", 1)).wait(60.0)
    assert ready_after == {"questions": -1, "recorded": 1}


def test_it_ends_when_the_work_never_does(ready_after):
    ready_after["questions"] = 1 << 60
    work, began = Work(torch.device("cuda", 1)), time.monotonic()
    with pytest.raises(Lost, match="a collective on cuda:1 did not end within 0.1 s"):
        work.wait(0.1)
    assert time.monotonic() - began >= 0.1
    assert not work.is_done_within(0.0)


def test_a_cpu_has_nothing_to_wait_for(ready_after):
    assert Work(torch.device("cpu")).is_done_within(0.0)
    assert ready_after["recorded"] == 0

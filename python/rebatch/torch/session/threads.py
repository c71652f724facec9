"""Which threads of the process train, and where. Must not know what a session is."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Optional, Tuple

import torch

# Held while a session opens, and in a capture of CUDA: no other thread begins to train meanwhile.
# All captures share one stream, and the caches that are given back around them.
captures = threading.RLock()


class _Attempt(threading.local):
    runs = False  # code of the program, in this thread, in a micro-batch that may run again


attempt = _Attempt()

_Place = Tuple[threading.Thread, torch.device]
_places: "weakref.WeakKeyDictionary[Any, _Place]" = weakref.WeakKeyDictionary()


def note(session: Any, device: torch.device) -> None:
    """This thread opens one."""
    with captures:
        _places[session] = threading.current_thread(), device


def forget(session: Any) -> None:
    """It is closed."""
    with captures:
        _places.pop(session, None)


def others_train(device: Optional[torch.device] = None) -> bool:
    """Whether threads other than this one run, and have sessions; of a device, or of any."""
    own = threading.current_thread()
    with captures:
        return any(
            thread is not own and thread.is_alive() and device in (None, place)
            for thread, place in _places.values()
        )

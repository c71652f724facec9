"""Waiting for a GPU with a timeout. NCCL's collectives run on a stream, and one whose other rank is
gone never ends: whoever reads a result, or frees memory, would wait for ever."""

from __future__ import annotations

import time
from typing import Any, Optional

import torch

from rebatch.torch.session.session import Lost

_BUSY_SECONDS = 0.005  # so long a wait asks again at once: then it sleeps
_SLEEP_SECONDS = 0.0005


class Work:
    """What is on a device's current stream when this is made. On a CPU it is done."""

    def __init__(self, device: torch.device):
        self._device = device
        self._event: Optional[Any] = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(device))

    def is_done_within(self, seconds: float) -> bool:
        """Wait for it, at most so long."""
        began = time.monotonic()
        while self._event is not None and not self._event.query():
            waited = time.monotonic() - began
            if waited > seconds:
                return False
            time.sleep(_SLEEP_SECONDS if waited > _BUSY_SECONDS else 0)
        return True

    def wait(self, seconds: float) -> None:
        """The same. Raises Lost when it is not done by then."""
        if not self.is_done_within(seconds):
            raise Lost(f"a collective on {self._device} did not end within {seconds:g} s")

"""Waiting for a GPU with a timeout. NCCL's collectives run on a stream, and one whose other rank is
gone never ends: whoever reads a result, or frees memory, would wait for ever."""

from __future__ import annotations

import time

import torch

from rebatch.torch._session import Lost

_BUSY_SECONDS = 0.005  # so long a wait asks again at once: then it sleeps
_SLEEP_SECONDS = 0.0005


def wait_for_device(device: torch.device, seconds: float) -> None:
    """Until what is on the current stream is done, at most so long. Raises Lost."""
    if device.type != "cuda":
        return
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    began = time.monotonic()
    while not event.query():
        waited = time.monotonic() - began
        if waited > seconds:
            raise Lost(f"a collective on {device} did not end within {seconds:g} s")
        time.sleep(_SLEEP_SECONDS if waited > _BUSY_SECONDS else 0)

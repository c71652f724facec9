"""Captures a pass in a CUDA graph. Must not know what the pass does."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from typing import Any, Callable, Iterator, Optional, Sequence

import torch

from rebatch._library import Error, Status
from rebatch.torch.allocator.arenas import Arena
from rebatch.torch.allocator.install import installed
from rebatch.torch.graphs.inputs import NotCapturedError
from rebatch.torch.private import (
    begin_allocating_of_stream,
    captures_stop_draws,
    clear_cublas_workspaces,
    end_allocating,
    get_device_index,
    register_generator,
)
from rebatch.torch.session.threads import captures, others_train


@functools.lru_cache(maxsize=None)
def _stream_of(device: torch.device) -> Any:
    """Of all captures: libraries keep a workspace for each stream."""
    return torch.cuda.Stream(device)


def _arena_on(device: torch.device) -> Optional[Arena]:
    """None: without rebatch's allocator, or where its pool has no virtual memory."""
    if not installed():
        return None
    try:
        return Arena(device)
    except Error as error:
        if error.status != Status.E_UNSUPPORTED:
            raise
        return None


class Recorder:
    """Captures on one device, one graph after another, in one arena: memory that all its graphs
    share, since no two run at once. Blocks of the arena that are free at the end of a capture serve
    the next one. Once all its graphs are gone, another recorder is needed: PyTorch frees an arena
    with the last graph in it. With rebatch's allocator the arena is lent between replays. Passes
    may draw from `generators` of the program and from the device's own: replays move them on."""

    def __init__(self, device: torch.device, generators: Sequence[torch.Generator] = ()):
        self._device, self._generators = device, list(generators)
        self._arena = _arena_on(device)
        self._drop_arena: Callable[[], Any] = int
        if self._arena:
            finalizer = weakref.finalize(self, Arena.drop, self._arena)
            finalizer.atexit = False  # the process gives all back
            self._drop_arena = finalizer
        self._is_lent = False
        self._pool: Any = self._arena.id if self._arena else torch.cuda.graph_pool_handle()

    def lend(self) -> None:
        """Let others use what holds nothing between two replays."""
        if self._arena and not self._is_lent:
            self._arena.lend()
            self._is_lent = True

    def claim(self) -> bool:
        """Before a replay or a capture. False: others have the memory."""
        if self._arena and self._is_lent:
            self._is_lent = not self._arena.claim()
        return not self._is_lent

    def drop(self) -> None:
        """Give the arena back. All its graphs are gone."""
        self._arena = None
        self._drop_arena()
        torch.cuda.empty_cache()

    def record(self, body: Callable[[], Any]) -> "Recording":
        """Run it with its work captured, not done. What it raises comes out, and the capture is
        gone. The host waits for the device, whose cached memory is given back before, and for a
        capture of another thread."""
        with captures:
            if captures_stop_draws() and others_train(self._device):
                raise NotCapturedError(
                    f"another thread trains on {self._device}, and it cannot draw random numbers "
                    f"there while a pass is captured in PyTorch {torch.__version__}: expected 2.15 "
                    "or later, or one thread that trains"
                )
            return self._record(body)

    def _record(self, body: Callable[[], Any]) -> "Recording":
        graph = torch.cuda.CUDAGraph()
        with self._apart(), self._cleaned_up(graph):
            for generator in self._generators:
                register_generator(graph, generator)
            # Other threads may pin memory, or ask for events, meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            result = body()
            graph.capture_end()
        return Recording(graph, result)

    def within(self, body: Callable[[], Any]) -> Any:
        """Run it, in memory of its graphs that holds nothing between replays: what it leaves there
        is the next replay's. A lent arena serves everybody already."""
        if self._arena:
            return body()
        index = get_device_index(self._device)
        with captures, self._apart():
            begin_allocating_of_stream(index, self._pool)
            try:
                return body()
            finally:
                end_allocating(index, self._pool)
                _stream_of(self._device).synchronize()  # also where it has failed

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """On the stream of captures. What is cached has been given back."""
        torch.cuda.synchronize(self._device)
        gc.collect()  # nodes of earlier graphs of autograd belong to another stream
        torch.clear_autocast_cache()
        clear_cublas_workspaces()  # those of the capture are to be in the arena
        torch.cuda.empty_cache()
        stream, current = _stream_of(self._device), torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            torch.clear_autocast_cache()  # what is in it has not been computed
            clear_cublas_workspaces()
        current.wait_stream(stream)

    @contextlib.contextmanager
    def _cleaned_up(self, graph: Any) -> Iterator[None]:
        """Around a capture. PyTorch leaves one that CUDA has invalidated half open."""
        own = torch.cuda.default_generators[get_device_index(self._device)]
        states = [(each, each.clone_state()) for each in (own, *self._generators)]
        try:
            yield
        except BaseException:
            try:
                graph.capture_end()
            except Exception:
                with contextlib.suppress(Exception):
                    end_allocating(get_device_index(self._device), self._pool)
                for generator, state in states:  # the other one waits for the capture's end
                    generator.graphsafe_set_state(state)
            self.drop()  # before the graph is deleted
            raise


class Recording:
    """A graph, and what the pass that was captured returned: memory that a replay writes to."""

    def __init__(self, graph: Any, result: Any):
        self._graph, self.result = graph, result
        self.replay: Callable[[], None] = graph.replay


def live_bytes(device: torch.device) -> int:
    """Memory in use but for workspaces of libraries, which a capture gives back; 0 where nothing
    counts it."""
    if device.type != "cuda":
        return 0
    clear_cublas_workspaces()
    return torch.cuda.memory_allocated(device)


def can_capture(device: torch.device) -> bool:
    return device.type == "cuda"


def recorder_of(device: torch.device, generators: Sequence[Any]) -> Recorder:
    """`generators`: those that the program has."""
    return Recorder(device, [g for g in generators if _draws_on(g, device)])


def _draws_on(generator: Any, device: torch.device) -> bool:
    """One that was made for "cuda" has no index, and draws on any GPU."""
    if not (isinstance(generator, torch.Generator) and generator.device.type == device.type):
        return False
    return generator.device.index in (None, device.index)

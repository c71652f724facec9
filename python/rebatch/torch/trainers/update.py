"""The update of a trainer that clips and steps the optimizer itself, after a Backward: what a Step
does for its own update."""

from __future__ import annotations

import collections
import gc
import operator
from typing import Any, Callable, Counter, Dict, List, Optional, Sequence

import torch

from rebatch._library import lib
from rebatch.torch.allocator import install as allocator
from rebatch.torch.allocator import phases
from rebatch.torch.session.oom import is_oom, let_go
from rebatch.torch.session.session import Exhausted, Torn
from rebatch.torch.trainers.backward import TrainerBackward
from rebatch.torch.update.update import torn_text, version_of

# The first update makes the optimizer's state; one after it is measured. A measurement resets
# PyTorch's peak statistics, so there are few attempts.
_ATTEMPTS = 4


class TrainerUpdate:
    """Clips once more after an OOM that changed nothing, does not begin an update without the
    memory that an earlier one needed, unless the host's serves it, and says what an OOM within an
    update has left."""

    def __init__(self, backward: TrainerBackward):
        self._backward = backward
        self._needed_bytes: Dict[tuple[Any, ...], int] = {}  # by updates of each kind
        self._versions: List[int] = []  # of the parameters, before the step
        self._attempts: Counter[Any] = collections.Counter()  # at measuring
        self._has_begun = self._is_measuring = False

    # ---- clipping ----

    def clip_norm(
        self,
        parameters: Sequence[torch.Tensor],
        largest: float,
        norm_type: float,
        body: Callable[[], Any],
    ) -> Any:
        """clip() of the norm of these parameters' gradients. With fully_shard() body() makes
        collectives, so it runs once, and only where the batch has not found the norm."""
        backward = self._backward
        if not backward.is_sharded:
            return self.clip(body)
        if norm_type == 2 and backward.knows_norm(parameters):
            return self.clip(lambda: backward.clip(largest))
        return self.clip(body, attempts=1)

    def clip(self, body: Callable[[], Any], attempts: int = 2) -> Any:
        """Run a trainer's clipping. Raises Exhausted; the parameters are then as they were."""
        gradients = self._gradients()  # held, so that no other tensor takes the place of one
        versions = [g._version for g in gradients]
        text = ""
        for _ in range(attempts):
            try:
                return body()
            except Exception as error:
                if not is_oom(error):
                    raise
                text = str(error)
                let_go(error)
            self._release()  # here, where no exception is being handled
            now = self._gradients()
            is_same = len(now) == len(gradients) and all(map(operator.is_, now, gradients))
            if not is_same or versions != [g._version for g in now]:
                break
        raise Exhausted(
            "out of memory when gradients were clipped; the parameters are as they were: free "
            f"memory, or raise the limit\n{text}"
        )

    def _gradients(self) -> List[torch.Tensor]:
        """An operation that changes one in place increases its version. It allocates before it
        writes, so one that runs out of memory leaves both as they were."""
        return [p.grad for p in self._backward.parameters if p.grad is not None]

    def _release(self) -> None:
        gc.collect()
        if self._backward.device.type == "cuda":
            torch.cuda.empty_cache()

    # ---- the optimizer's step ----

    def run(self, body: Callable[[], Any]) -> Any:
        """Run what calls begin(), and then steps the optimizer. Raises Torn when memory runs out
        after begin()."""
        self._has_begun = False
        text = ""
        try:
            result = body()
        except Exception as error:
            if not (self._has_begun and is_oom(error)):
                raise
            text = str(error)
            let_go(error)
        else:
            self._end()
            return result
        finally:
            if self._has_begun:
                self._allow_overflow(False)
        said = torn_text(self._backward.parameters, self._versions)
        raise Torn(f"out of memory{said}\n{text}")

    def begin(self) -> None:
        """The optimizer steps next. Raises Exhausted where the memory that an earlier step needed
        is not there; nothing is changed then."""
        device = self._backward.device
        if device.type == "cuda":
            self._kind = self._backward.kind_of_update()
            self._admit(self._needed_bytes.get(self._kind, 0))
            self._is_measuring = (
                self._kind not in self._needed_bytes and self._attempts[self._kind] < _ATTEMPTS
            )
            if self._is_measuring:
                self._attempts[self._kind] += 1
                torch.cuda.reset_peak_memory_stats(device)
                self._live_bytes = torch.cuda.memory_allocated(device)
        self._has_begun = True
        self._versions = list(map(version_of, self._backward.parameters))
        self._allow_overflow(True)

    def _allow_overflow(self, may: bool) -> None:
        pool = self._pool()
        if pool is not None:
            phases.allow_overflow(pool, may)

    def _pool(self) -> Optional[int]:
        """The pool that serves the update; None: PyTorch's own allocator does."""
        device = self._backward.device
        is_ours = device.type == "cuda" and allocator.installed()
        return allocator.pool(device) if is_ours else None

    def _host_bytes(self) -> int:
        """What the host could give an update that the GPU has no memory for."""
        pool = self._pool()
        return 0 if pool is None else lib.rebatch_pool_overflow_room(pool)

    def _end(self) -> None:
        if not (self._has_begun and self._is_measuring):
            return
        device = self._backward.device
        needed = torch.cuda.max_memory_allocated(device) - self._live_bytes
        keeps_blocks = torch.cuda.memory_allocated(device) > self._live_bytes  # a first update
        if needed and not keeps_blocks:  # needed is 0 where a GradScaler skips the update
            self._needed_bytes[self._kind] = needed

    def _admit(self, needed: int) -> None:
        available = self._backward.available_bytes() if needed else 0
        if needed > available:
            self._release()
            available = self._backward.available_bytes()
        if needed > available and needed > self._host_bytes():
            raise Exhausted(
                f"the optimizer's step needs {needed / (1 << 20):.1f} MiB, there is "
                f"{available / (1 << 20):.1f} MiB; the parameters are as they were: free memory, "
                "or raise the limit"
            )

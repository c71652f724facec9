"""python3 -m rebatch.fit.one_of RANKS FILE|-m MODULE [ARGUMENT]...: runs a program as rank 0 of
ranks that are not there. Its process groups are PyTorch's fake ones, whose collectives exchange
nothing: each rank is as this one. Must not know Steps."""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401  # the backend "fake"


def _become_one_of(ranks: int) -> None:
    torch_dist: Any = dist
    init, new_group = torch_dist.init_process_group, torch_dist.new_group

    def init_fake(*_: Any, **__: Any) -> None:
        init("fake", store=torch_dist.HashStore(), rank=0, world_size=ranks)

    def new_fake_group(*arguments: Any, **options: Any) -> Any:
        return new_group(*arguments, **{**options, "backend": "fake"})

    for module in torch_dist, torch_dist.distributed_c10d:
        module.init_process_group, module.new_group = init_fake, new_fake_group
    os.environ.update(
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="localhost",
        MASTER_PORT="29500",
    )


def main() -> None:
    ranks, *program = sys.argv[1:]
    _become_one_of(int(ranks))
    if program[0] == "-m":
        sys.argv = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = program
        sys.path[0] = os.path.dirname(os.path.abspath(program[0]))
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main()

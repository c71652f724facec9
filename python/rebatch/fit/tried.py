"""What is asked of a try, and what it answers. Must not know what it runs, nor PyTorch."""

from __future__ import annotations

import dataclasses

# Libraries that take memory of a GPU, as the stand-in has them.
CUBLAS, CUBLAS_EX, CUDNN = 1, 2, 4
UNMEASURED = 8  # cuFFT, cuSPARSE or cuSOLVER
# More than any card has: what a size takes without a limit.
UNLIMITED = 1 << 50
BATCH = "{batch}"  # in a command, where the program takes its size


def with_size(word: str, size: int) -> str:
    """A word of the command in a try."""
    return word.replace(BATCH, str(size))


@dataclasses.dataclass(frozen=True)
class Tried:
    """A size that was tried. Memory is in bytes."""

    samples: int
    fits: bool
    peak: int = 0  # in use, of PyTorch's allocator
    reserved: int = 0  # held by it
    libraries: int = 0  # that were used: bits
    held: dict[str, int] = dataclasses.field(default_factory=dict)  # at the peak, by what holds it
    tags: dict[str, int] = dataclasses.field(default_factory=dict)  # and of activations, by tag
    passes: int = 0  # before the first update, of a program without a Step
    asked: int = 0  # of the allocator, in all
    refused: int = 0  # workspaces that did not fit, in whose place others were taken
    remark: str = ""  # a sentence below the table
    read_at: str = ""  # file and line of the program, where it has read a kernel's integers
    assumed: str = ""  # the same, where rows were taken that a kernel would choose, and by what


@dataclasses.dataclass(frozen=True)
class Request:
    size: int
    room: int  # bytes that the allocator may hold
    level: int = 0  # of `lighten`
    installs: bool = False  # rebatch's allocator
    reads_others: bool = False  # of a kernel's integers, and other rows of its choice


class GoOn(BaseException):
    """In a copy: the program goes on in it, and what was done before the try is left."""

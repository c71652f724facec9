"""The cards that are known by name: their memory, and what decides which kernels and workspaces
PyTorch uses on them. Must not know PyTorch.

The H100 and the H200, which has the same processors, were measured. Of the others the memory is
what PyTorch says that they have, from public reports, and what a process takes beside its allocator
is estimated."""

import dataclasses
import difflib
import json
import re
from typing import Optional

_MIB = 1 << 20
_GIB = 1 << 30

# What a capability has on every card: shared memory of a block at the most, and of a
# multiprocessor; threads and blocks of a multiprocessor at the most.
_OF_CAPABILITY = {
    (7, 5): (65536, 65536, 1024, 16),
    (8, 0): (166912, 167936, 2048, 32),
    (8, 6): (101376, 102400, 1536, 16),
    (8, 9): (101376, 102400, 1536, 24),
    (9, 0): (232448, 233472, 2048, 32),
    (10, 0): (232448, 233472, 2048, 32),
    (12, 0): (101376, 102400, 1536, 24),
}


@dataclasses.dataclass(frozen=True)
class Beside:
    """What a process takes of the card beside its allocator, in bytes, as far as it uses them: the
    context with PyTorch's kernels, and their local memory for each thread that can run at once;
    cuBLAS; the larger kernels of half precision and of cuDNN. And the context alone."""

    context: int
    cublas: int
    kernels: int
    bare: int

    @property
    def most(self) -> int:
        """All of them, with PyTorch."""
        return self.context + self.cublas + self.kernels


# An H100 with CUDA 13 and PyTorch 2.11: 16 trainings took this to within 16 MiB.
_HOPPER = Beside(619 * _MIB, 130 * _MIB, 20 * _MIB, 527 * _MIB)


def _estimated(processors: int) -> Beside:
    context, bare = (160 * _MIB + processors * each * _MIB // 10 for each in (35, 28))
    return Beside(context, _HOPPER.cublas, _HOPPER.kernels, bare)


@dataclasses.dataclass(frozen=True)
class Card:
    """One card. Sizes are in bytes."""

    name: str  # as PyTorch says it
    short: str  # as users ask for it
    memory_bytes: int
    capability: tuple[int, int]
    processors: int
    l2_bytes: int
    bus_bits: int
    clock_khz: int
    memory_clock_khz: int
    beside: Beside
    is_measured: bool = False

    @property
    def standin(self) -> str:
        """What it says of itself, as the stand-in for CUDA reads it."""
        shared_most, shared_processor, threads, blocks = _OF_CAPABILITY[self.capability]
        values = {
            "name": self.name,
            "major": self.capability[0],
            "minor": self.capability[1],
            "processors": self.processors,
            "processor_threads": threads,
            "processor_blocks": blocks,
            "shared_most": shared_most,
            "shared_processor": shared_processor,
            "l2_bytes": self.l2_bytes,
            "bus_bits": self.bus_bits,
            "clock_khz": self.clock_khz,
        }
        return ",".join(f"{name}={value}" for name, value in values.items())

    def cudnn(self, driver: int) -> str:
        """The same as cuDNN reads it, for a driver of a version such as 13000."""
        shared_most, _, threads, blocks = _OF_CAPABILITY[self.capability]
        return json.dumps(
            {
                "cudaDeviceId": 0,
                "deviceVer": self.capability[0] * 100 + self.capability[1] * 10,
                "driverVer": driver,
                "totalGlobalMem": self.memory_bytes,
                "maxGridSize": [0x7FFFFFFF, 65535, 65535],
                "maxBlockSize": [1024, 1024, 64],
                "regsPerBlock": 65536,
                "multiProcessorCount": self.processors,
                "smCountOrigin": 0,
                "warpSize": 32,
                "maxSharedMemoryPerBlock": 49152,
                "maxSharedMemoryPerBlockOptin": shared_most,
                "oversizedSharedMemoryPerBlock": 0,
                "reservedSharedMemoryPerBlock": 1024,
                "maxRegistersPerSM": 65536,
                "maxCtasPerSM": blocks,
                "maxThreadsPerBlock": 1024,
                "maxThreadsPerSM": threads,
                "pciDeviceId": 0,
                "isTccDriver": 0,
                "supportCoopLaunch": 1,
                "smClockRateKHz": self.clock_khz,
                "memClockRateKHz": self.memory_clock_khz,
                "l2CacheSize": self.l2_bytes,
                "deviceName": self.name,
            }
        )


def _gib(number: float) -> int:
    return int(number * _GIB) // (2 * _MIB) * (2 * _MIB)


def _card(
    name: str,
    short: str,
    gib: float,
    capability: tuple[int, int],
    processors: int,
    l2_mib: int,
    bus_bits: int,
    clocks_mhz: tuple[int, int],
    beside: Optional[Beside] = None,
    is_measured: bool = False,
) -> Card:
    return Card(
        name=name,
        short=short,
        memory_bytes=_gib(gib),
        capability=capability,
        processors=processors,
        l2_bytes=l2_mib * _MIB,
        bus_bits=bus_bits,
        clock_khz=clocks_mhz[0] * 1000,
        memory_clock_khz=clocks_mhz[1] * 1000,
        beside=beside or _estimated(processors),
        is_measured=is_measured,
    )


CARDS = [
    _card(
        *("NVIDIA H100 80GB HBM3", "h100", 79.179, (9, 0), 132, 50, 5120, (1980, 2619)),
        beside=_HOPPER,
        is_measured=True,
    ),
    _card(
        *("NVIDIA H200", "h200", 139.80, (9, 0), 132, 60, 6144, (1980, 3201)),
        beside=_HOPPER,
        is_measured=True,
    ),
    _card("NVIDIA H100 PCIe", "h100-pcie", 79.18, (9, 0), 114, 50, 5120, (1755, 1593)),
    _card("NVIDIA H100 NVL", "h100-nvl", 93.10, (9, 0), 132, 50, 6144, (1785, 2619)),
    _card("NVIDIA B200", "b200", 178.35, (10, 0), 148, 126, 8192, (1965, 3996)),
    _card("NVIDIA A100-SXM4-40GB", "a100-40", 39.49, (8, 0), 108, 40, 5120, (1410, 1215)),
    _card("NVIDIA A100-SXM4-80GB", "a100-80", 79.14, (8, 0), 108, 40, 5120, (1410, 1593)),
    _card("NVIDIA A10", "a10", 22.06, (8, 6), 72, 6, 384, (1695, 6251)),
    _card("NVIDIA A10G", "a10g", 22.06, (8, 6), 80, 6, 384, (1710, 6251)),
    _card("NVIDIA A40", "a40", 44.42, (8, 6), 84, 6, 384, (1740, 7251)),
    _card("NVIDIA RTX A6000", "a6000", 47.40, (8, 6), 84, 6, 384, (1800, 8001)),
    _card("NVIDIA L4", "l4", 22.03, (8, 9), 58, 48, 192, (2040, 6251)),
    _card("NVIDIA L40S", "l40s", 44.39, (8, 9), 142, 96, 384, (2520, 9001)),
    _card("Tesla T4", "t4", 14.56, (7, 5), 40, 4, 256, (1590, 5001)),
    _card("NVIDIA GeForce RTX 3090", "rtx3090", 23.56, (8, 6), 82, 6, 384, (1695, 9751)),
    _card("NVIDIA GeForce RTX 4090", "rtx4090", 23.51, (8, 9), 128, 72, 384, (2520, 10501)),
    _card("NVIDIA GeForce RTX 5090", "rtx5090", 31.35, (12, 0), 170, 96, 512, (2407, 14001)),
]

_OTHER_NAMES = {
    "h100-80": "h100",
    "h100-sxm": "h100",
    "h200-141": "h200",
    "a100": "a100-80",
    "t4-16": "t4",
    "l4-24": "l4",
    "3090": "rtx3090",
    "4090": "rtx4090",
    "5090": "rtx5090",
}


def _key(name: str) -> str:
    """What of a name counts: "H100 80GB", "h100-80" and "NVIDIA H100 80GB HBM3" are one."""
    words = re.sub(r"\b(nvidia|geforce|tesla|hbm\w*|sxm\w*)\b", " ", name.lower().replace("-", " "))
    words = re.sub(r"\brtx\s+(?=\d)", "rtx", words)
    return "-".join(re.sub(r"(?<=\d)\s*gi?b\b", "", words).split())


def find(name: str) -> Card:
    """The card of that name. Raises ValueError, which lists the nearest names."""
    by_key = {_key(card.short): card for card in CARDS}
    for card in CARDS:
        by_key.setdefault(_key(card.name), card)
    for other, short in _OTHER_NAMES.items():
        by_key.setdefault(_key(other), by_key[_key(short)])
    found: Optional[Card] = by_key.get(_key(name))
    if found:
        return found
    shorts = [card.short for card in CARDS]
    near = difflib.get_close_matches(_key(name), by_key, 3, 0.4)
    nearest = list(dict.fromkeys(by_key[key].short for key in near)) or shorts
    raise ValueError(
        f"rebatch: there is no card {name!r}: expected one such as {', '.join(nearest)}; "
        "`rebatch fit --cards` lists all"
    )

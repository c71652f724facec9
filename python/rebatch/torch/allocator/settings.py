"""What of PyTorch's allocator settings, PYTORCH_ALLOC_CONF, the pool has too."""

import os
import re
from collections.abc import Mapping

# Settings that hold after install(): of pinned memory and graphs, and those that the pool has. The
# pool grows where its memory lies, as expandable segments do.
_HELD = re.compile(
    "backend|per_process_memory_fraction|roundup_power2_divisions|expandable_segments"
    "|graph_capture_record_stream_reuse|pinned_.*"
)
_MOST_DIVISIONS = 256  # of a pool
_SETTING = re.compile(r"\s*(\w+)\s*:\s*(\[[^\]]*\]|[^,]*)")


def read_settings(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The settings by name, as the environment has them; before 2.10 they have another variable."""
    text = environment.get("PYTORCH_ALLOC_CONF") or environment.get("PYTORCH_CUDA_ALLOC_CONF", "")
    return {name: value.strip() for name, value in _SETTING.findall(text)}


def rounding_divisions(settings: Mapping[str, str]) -> int | None:
    """The pool's rounding_divisions; None: not set, or in another way for each size."""
    divisions = settings.get("roundup_power2_divisions", "")
    if not divisions.isdigit() or int(divisions) > _MOST_DIVISIONS:
        return None
    # One division is a size rounded to PyTorch's 512 bytes.
    return int(divisions) if int(divisions) > 1 else 0


def without_effect(settings: Mapping[str, str]) -> list[str]:
    """The names of the settings that do not reach the pool."""
    missed = [name for name in settings if not _HELD.fullmatch(name)]
    if "roundup_power2_divisions" in settings and rounding_divisions(settings) is None:
        missed.append("roundup_power2_divisions")
    return missed

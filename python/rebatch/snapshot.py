"""A pool's snapshot, from CSV to what PyTorch's memory viewer reads.

python3 -m rebatch.snapshot BLOCKS.csv [EVENTS.csv] OUT.pickle
"""

import csv
import os
import pickle
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STATES = {
    "live": "active_allocated",
    "deferred": "active_allocated",
    "pending": "active_pending_free",
}
# PyTorch says a free twice, and the viewer makes it one again.
ACTIONS = {
    "free": ("free_requested", "free_completed"),
    "map": ("segment_map",),
    "unmap": ("segment_unmap",),
}
SETTINGS = {
    "PYTORCH_CUDA_ALLOC_CONF": "",
    "max_split_size": -1,
    "garbage_collection_threshold": 0.0,
    "expandable_segments": True,
    "roundup_power2_divisions": {},
}


def _rows(path: str) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8", errors="replace") as file:
        return list(csv.DictReader(file))


def _number(text: str) -> int:
    return int(text or "0", 0)


def _frames(name: str) -> list[dict[str, Any]]:
    return [{"filename": "rebatch", "line": 0, "name": name}] if name else []


def _block(row: dict[str, str]) -> dict[str, Any]:
    size = _number(row["bytes"])
    pending = row["state"] == "pending"  # what was asked for is not kept of it
    return {
        "address": _number(row["address"]),
        "size": size,
        "requested_size": size if pending else _number(row["requested_bytes"]),
        "state": STATES.get(row["state"], "inactive"),
        "stream": _number(row["stream"]),
        "frames": _frames(row["tag"]),
    }


def _segment(address: str, rows: list[dict[str, str]], device: int) -> dict[str, Any]:
    blocks = [_block(row) for row in rows]
    active = [b for b in blocks if b["state"] != "inactive"]
    live = [b for b in blocks if b["state"] == "active_allocated"]
    return {
        "device": device,
        "address": _number(address),
        "total_size": sum(b["size"] for b in blocks),
        "allocated_size": sum(b["size"] for b in live),
        "active_size": sum(b["size"] for b in active),
        "requested_size": sum(b["requested_size"] for b in active),
        "stream": 0,  # blocks of several streams share a segment
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": True,
        "frames": [],
        "blocks": blocks,
    }


def _events(row: dict[str, str]) -> Iterator[dict[str, Any]]:
    """What the viewer knows as one event or as two."""
    kind = row["action"]
    for action in ACTIONS.get(kind, (kind,)):
        name = f"{row['blocks']} blocks taken back" if kind == "rollback" else row["tag"]
        where = "device_free" if kind == "oom" else "addr"
        yield {
            "action": action,
            where: _number(row["device_free_bytes" if kind == "oom" else "address"]),
            "size": _number(row["bytes"]),
            "stream": 0 if kind in ("map", "unmap") else _number(row["stream"]),
            "time_us": _number(row["time_us"]),
            "frames": _frames(name),
        }


def read(blocks: str, events: str | None = None, *, device: int = 0) -> dict[str, Any]:
    """The layout of torch.cuda.memory._snapshot(), of files that docs/snapshot.md describes."""
    segments: dict[str, list[dict[str, str]]] = {}
    spare = 0
    for row in _rows(blocks):
        if row["segment"]:
            segments.setdefault(row["segment"], []).append(row)
        else:
            spare += _number(row["bytes"])
    trace = [e for row in (_rows(events) if events else []) for e in _events(row)]
    return {
        "segments": [_segment(at, rows, device) for at, rows in segments.items()],
        "device_traces": [[] for _ in range(device)] + [trace],
        "allocator_settings": SETTINGS,
        "external_annotations": [],
        "rebatch": {"spare_bytes": spare},
    }


def _is_no_snapshot(path: Path) -> bool:
    """Whether something else is there, such as a file to read where OUT.pickle was forgotten."""
    if not path.is_file():
        return path.exists()
    with path.open("rb") as file:
        return file.read(1) not in (b"", pickle.PROTO)


def _write_whole(path: Path, snapshot: dict[str, Any]) -> None:
    """Beside the file, and renamed: whatever happens, the old one is there or the new."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as beside:
        try:
            pickle.dump(snapshot, beside)
            beside.flush()
            os.chmod(beside.name, 0o644)
            os.replace(beside.name, path)
        except BaseException:
            os.unlink(beside.name)
            raise


def main(arguments: list[str]) -> int:
    """Convert the files that are named."""
    if len(arguments) not in (2, 3):
        print(__doc__, file=sys.stderr)
        return 2
    out = Path(arguments[-1])
    if _is_no_snapshot(out):
        print(
            f"{out} is there and is no pickle: expected OUT.pickle last, a new file or an older"
            " snapshot",
            file=sys.stderr,
        )
        return 2
    _write_whole(out, read(*arguments[:-1]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

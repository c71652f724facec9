"""The answers of a fit, as rows and as text. Must not know how they are found."""

from collections.abc import Sequence
from typing import Any

from rebatch.fit.cards import Card

_GIB = 1 << 30


def rows_of(card: Card, memory: Sequence[int], answer: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each size of memory, in bytes and samples, as --json has them."""
    sizes = list(memory) or [card.memory_bytes]
    levels = len(answer["rows"]) // len(sizes)
    each = [size for size in sizes for _ in range(levels)]
    return [
        _row(card, size, found, answer) for size, found in zip(each, answer["rows"], strict=True)
    ]


def _row(card: Card, memory: int, found: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    best, after = found["best"], found["next"]
    micro = best["samples"] if best else 0
    batch = max(found["batch"], micro)
    outside = answer["outside_bytes"]
    held = dict(best["held"]) if best else {}
    if best:
        held["activations"] = best["peak"] - sum(held.values())
        held["cached"] = best["reserved"] - best["peak"]
        held["context"] = outside
        held = {name: size for name, size in held.items() if size}
    return {
        "card": card.name,
        "gpu": card.short,
        "is_measured": card.is_measured,
        "memory_bytes": memory,
        "allocator": answer["allocator"],
        "lighten_level": found["level"],
        "step": found["step"],
        "micro": micro,
        "batch": batch,
        "microbatches": -(-batch // micro) if micro else 0,
        "peak_allocated_bytes": best["peak"] if best else 0,
        "peak_reserved_bytes": best["reserved"] if best else 0,
        "outside_bytes": outside,
        "room_bytes": found["room"],
        "held_bytes": held,
        "tag_bytes": best.get("tags", {}) if best else {},
        "next": after["samples"] if after else 0,
        "next_needs_bytes": after["reserved"] + outside if after and after["reserved"] else 0,
        "tries": found["tries"],
        "remark": answer["remark"],
        "seconds": round(answer["seconds"], 2),
    }


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB"


def _part(size: int) -> str:
    if size >= _GIB // 10:
        return _gib(size)
    return f"{size / (1 << 20):.1f} MiB" if size >= 1 << 20 else f"{size / (1 << 10):.1f} KiB"


def of_cards(cards: Sequence[Card]) -> str:
    """The cards that are known."""
    lines = [f"{'--gpu':<12} {'memory':>11}  {'beside':>9}  name"]
    lines += [
        f"{card.short:<12} {_gib(card.memory_bytes):>11}  {_gib(card.beside.most):>9}  "
        f"{card.name}{'' if card.is_measured else ' (estimated)'}"
        for card in cards
    ]
    return "\n".join(lines)


def of_rows(rows: Sequence[dict[str, Any]]) -> str:
    """A table, what holds the memory, and what is not known."""
    lines = [f"{'card':<12} {'memory':>11} {'micro-batch':>12} {'x':>4} {'peak':>11}   one more"]
    for row in rows:
        lines.append(
            f"{row['gpu']:<12} {_gib(row['memory_bytes']):>11} {row['micro']:>12} "
            f"{row['microbatches']:>4} "
            f"{_gib(row['peak_reserved_bytes'] + row['outside_bytes']):>11}   {_one_more(row)}"
            f"{_variant(row)}"
        )
    for row in rows:
        if row["held_bytes"]:
            held = row["held_bytes"].items()
            parts = [_parts({name: size}) + _tags(row, name) for name, size in held]
            lines.append(f"{row['gpu']}, {row['micro']} samples{_variant(row)}: {', '.join(parts)}")
    return "\n".join([*lines, *_remarks(rows)])


def _parts(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} {_part(size)}" for name, size in sizes.items())


def _tags(row: dict[str, Any], name: str) -> str:
    """Of the activations, those within rebatch.tag()."""
    return f" ({_parts(row['tag_bytes'])})" if name == "activations" and row["tag_bytes"] else ""


def _one_more(row: dict[str, Any]) -> str:
    if not row["next"]:
        return "not tried" if row["remark"] else "not tried: the largest that may be asked for fits"
    if not row["next_needs_bytes"]:
        return f"{row['next']} does not fit"
    return f"{row['next']} needs {_gib(row['next_needs_bytes'])}"


def _variant(row: dict[str, Any]) -> str:
    level, step = row["lighten_level"], row["step"]
    return f" (lighten: {level})" if level else f" ({step})" if step else ""


def _remarks(rows: Sequence[dict[str, Any]]) -> list[str]:
    names = ", ".join(dict.fromkeys(row["gpu"] for row in rows if not row["is_measured"]))
    remarks = [
        *dict.fromkeys(row["remark"] for row in rows if row["remark"]),
        "Kernels compute nothing here: what a program decides by floating-point results, such as a "
        "NaN check, is decided by zeros.",
        "Not counted: cuDNN's benchmark mode, autotuned kernels (Triton, Inductor), NCCL's "
        "buffers, other processes.",
    ]
    if names:
        remarks.append(f"The context of {names} is estimated, not measured.")
    return remarks

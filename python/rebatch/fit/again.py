"""Step.fit(): the program is run again on the stand-in for CUDA, by the command. Must not know what
it tries there."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from typing import Any, Optional

from rebatch.fit import table


@dataclasses.dataclass(frozen=True)
class Fit:
    """What a fit has found: a row for each card and size of memory, as `rebatch fit --json` has
    them."""

    rows: list[dict[str, Any]]

    @property
    def micro(self) -> int:
        """The largest micro-batch of the first row, in samples; 0 where not even one fits."""
        return int(self.rows[0]["micro"])

    def __str__(self) -> str:
        return table.of_rows(self.rows)


def run_again(gpu: str, memory: Optional[str], install: bool, lighten: bool) -> Fit:
    """Run this program again, up to where it asks. Raises ValueError for a wrong argument, and
    RuntimeError where there is no answer."""
    if len(sys.orig_argv) < 2 or hasattr(sys, "ps1"):
        raise ValueError(
            "rebatch: fit() runs the program again, and this one is no file: expected a program "
            "such as train.py"
        )
    command = [sys.executable, "-m", "rebatch.fit", "--json", "--gpu", gpu]
    command += ["--memory", memory] if memory else []
    command += ["--install"] * install + ["--lighten"] * lighten
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [*command, "--", *sys.orig_argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    if done.stdout.startswith("{"):
        return Fit(json.loads(done.stdout)["rows"])
    said = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    if done.returncode == 2:
        raise ValueError(f"rebatch: {said.split('error: ')[-1]}")
    sys.stderr.write(done.stderr)
    raise RuntimeError(said)

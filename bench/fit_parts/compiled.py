"""What `rebatch fit` answers for a compiled program, beside what its probe finds on the card itself
with as much memory free.

    make kernels GPU_ARCH=sm_90
    REBATCH_DEVICE_KIND=cuda python3 bench/fit.py compiled --gpu h100 --memory 4GiB,8GiB,16GiB -- \\
        build/release/examples/gpt/gpt-cuda --preset gpt2-124m --dtype bf16

This process holds the rest of the card's memory meanwhile. Needs PyTorch with CUDA, and a GPU that
no other process uses. `beside` is what the process takes beside its pool."""

import argparse
import json
import os
import subprocess
import sys

import torch

from rebatch.fit.compiled import probe_on

MIB = 1 << 20


def fitted(gpu, memory, program):
    command = [sys.executable, "-m", "rebatch.fit", "--json", "--gpu", gpu, "--memory", memory]
    done = subprocess.run([*command, "--", *program], stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)["rows"]


def on_card(room, program):
    """The answer of the program's probe while `room` bytes are free."""
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    held = torch.empty(max(free - room, 0), dtype=torch.uint8, device="cuda")
    answer = probe_on(program, dict(os.environ))
    del held
    return answer


def compiled(arguments):
    parser = argparse.ArgumentParser(
        prog="fit.py compiled", description="fit's answers beside a card's"
    )
    parser.add_argument("--gpu", required=True, help="the card, as rebatch fit names it")
    parser.add_argument("--memory", required=True, help="as of rebatch fit")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    given = parser.parse_args(arguments)
    program = given.program[1:] if given.program[:1] == ["--"] else given.program
    print(f"{'memory':>10} {'fit':>6} {'card':>6} {'beside, fit':>12} {'card':>9}")
    for row in fitted(given.gpu, given.memory, program):
        room = row["memory_bytes"]
        answer = on_card(room, program)
        beside = [row["outside_bytes"], room - answer["limit_bytes"]]
        print(
            f"{room / MIB:>6.0f} MiB {row['micro']:>6} {answer['size']:>6} "
            f"{beside[0] / MIB:>8.0f} MiB {beside[1] / MIB:>5.0f} MiB"
        )

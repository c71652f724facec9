"""What `rebatch fit` is judged by: sixteen trainings and eight held out, what they take of a GPU,
and what fit and its peers answer for them.

    python3 bench/fit.py models                                  # their names
    rebatch fit --gpu "H100 80GB" -- python3 bench/fit.py train gpt2
    python3 bench/fit.py truth --output truth.json               # on a GPU: the largest sizes
    python3 bench/fit.py answers truth.json --output fit.json    # what fit says, without a GPU
    python3 bench/fit.py peers truth.json --output peers.json    # on a GPU or the stand-in
    python3 bench/fit.py compare truth.json fit.json --peers peers.json
    python3 bench/fit.py context --output context.json           # on a GPU, for cards.py
    python3 bench/fit.py compiled --gpu h100 --memory 4GiB -- PROGRAM [ARGUMENT]...
    python3 bench/fit.py foreign predict --output fit.json       # of the programs in bench/foreign
    python3 bench/fit.py foreign truth --near fit.json --output truth.json       # on a GPU
    torchrun --nproc-per-node 2 bench/fit.py ranks gpt2 ddp --room 3487563776 --sizes 10,11

Each command's own --help and module in fit_parts say more."""

import argparse
import importlib

MODULES = {
    "models": "models",
    "train": "models",
    "truth": "truth",
    "answers": "answers",
    "peers": "answers",
    "compare": "compare",
    "context": "context",
    "compiled": "compiled",
    "ranks": "ranks",
    "foreign": "foreign",
    "child": "child",
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=MODULES, metavar="COMMAND")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    module = importlib.import_module(f"fit_parts.{MODULES[given.command]}")
    getattr(module, given.command.replace("-", "_"))(given.arguments)


if __name__ == "__main__":
    main()

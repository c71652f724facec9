"""The command `rebatch`, for `python3 -m rebatch` too: the program in C of `make install`."""

import os
import sys
from pathlib import Path


def main() -> None:
    program = Path(__file__).with_name("rebatch")
    os.execv(program, ["rebatch", *sys.argv[1:]])


if __name__ == "__main__":
    main()

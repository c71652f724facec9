"""The modules of this folder are found by tests and by the processes that they start."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))

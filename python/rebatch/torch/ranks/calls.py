"""What all ranks of a model of fully_shard() call together."""

import enum


class Call(enum.IntEnum):
    """Of a Step, and its own."""

    TRAINS = 0
    EVALUATES = 1
    PROBES = 2
    RETURNS = 3  # asks whether the parameters can be whole again

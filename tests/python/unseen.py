"""What a Step does not see. The file says that it is of PyTorch, whose code is not looked at."""

__name__ = "torch"  # noqa: A001


class Unseen:
    """A list for what a test notes in each attempt: what is noted in one that failed stays."""

    __slots__ = ("_values",)  # and nobody refers to it weakly

    def __init__(self, *values):
        self._values = list(values)

    def __getitem__(self, i):
        return self._values[i]

    def __setitem__(self, i, value):
        self._values[i] = value

    def __len__(self):
        return len(self._values)

    def append(self, value):
        self._values.append(value)

    def pop(self, i=-1):
        return self._values.pop(i)

    def clear(self):
        self._values.clear()

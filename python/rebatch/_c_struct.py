"""What all structs of the headers have in common."""

import ctypes
from typing import Any


class Struct(ctypes.Structure):
    """struct_size is set, all other members are zero: the defaults. A member that is a function
    takes one of Python, which lives as long as the struct."""

    struct_size: int

    def __init__(self, **members: Any):
        super().__init__()
        if self._fields_[0][0] == "struct_size":
            self.struct_size = ctypes.sizeof(self)
        for name, value in members.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        kind = type(getattr(self, name))  # AttributeError: the struct has no such member
        is_function = callable(value) and not isinstance(value, kind)
        super().__setattr__(name, kind(value) if is_function else value)

"""A batch and its parts: where it is cut, what the cuts return, and how that is joined."""

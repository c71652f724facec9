"""What all parts of a fit raise."""


class FitError(RuntimeError):
    """There is no answer; the message says why."""

"""What all parts of a fit raise."""


class FitError(RuntimeError):
    """There is no answer; the message says why."""


def undecided(what: str) -> FitError:
    """`what` is a sentence: where and how a kernel would decide a size."""
    return FitError(
        f"rebatch: {what}, and none runs here: expected masks and counts that come from the host"
    )

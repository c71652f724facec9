"""rebatch lets a training step survive running out of GPU memory."""

from rebatch._version import version as __version__

__all__ = ["__version__"]

"""rebatch lets a training step survive running out of GPU memory. See rebatch.torch."""

from rebatch._library import Error
from rebatch._version import version as __version__

__all__ = ["Error", "__version__"]

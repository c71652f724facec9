"""rebatch lets a training step survive running out of GPU memory. See rebatch.torch."""

from rebatch._library import Error
from rebatch._version import version as __version__

Error.__module__ = __name__  # a traceback ends with the name that programs use

__all__ = ["Error", "__version__"]

"""rebatch: training steps that survive running out of GPU memory. See rebatch.torch."""

from rebatch._library import Error, library

__all__ = ["Error", "__version__"]
__version__ = library.rebatch_version().decode()

"""The parts of the build that pyproject.toml cannot say: the library in C, the wheel's tag."""

import os
import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist
from setuptools.dist import Distribution

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import native  # noqa: E402


class BinaryDistribution(Distribution):
    """It has a library, though no extension module."""

    def has_ext_modules(self):
        return True


class BuildWithLibrary(build_py):
    def run(self):
        package = Path(HERE if self.editable_mode else self.build_lib, "rebatch")
        if not self.editable_mode:  # files of an earlier build would get into the wheel
            shutil.rmtree(package, ignore_errors=True)
        super().run()
        native.build_into(package)
        fronts = os.environ.get("REBATCH_FRONTS")  # the folder of scripts/wheel-fronts
        for front in Path(fronts).glob("front-*.so") if fronts else ():
            shutil.copy2(front, package / "torch" / "allocator")


class WheelForAnyPython(bdist_wheel):
    """The library is loaded with ctypes, so one wheel is for every version of Python."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


class SdistWithSources(sdist):
    """A source distribution has the C sources in native/."""

    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, files)
        for name in native.SOURCES:
            source, copy = native.ROOT / name, Path(base_dir, "native", name)
            copy.parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if source.is_dir() else shutil.copy2)(source, copy)


setup(
    version=native.version(),
    distclass=BinaryDistribution,
    cmdclass={
        "build_py": BuildWithLibrary,
        "bdist_wheel": WheelForAnyPython,
        "sdist": SdistWithSources,
    },
)

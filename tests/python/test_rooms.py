"""Where the modules of the package are: packages of few modules, and no import in a circle."""

import ast
import graphlib
import pathlib

import rebatch

PACKAGE = pathlib.Path(rebatch.__file__).parent
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}


def imported_by(name):
    """The modules of the package that a module imports, those for type checkers included."""
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.ImportFrom) and node.module in MODULES:
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                yield module if module in MODULES else node.module


def package_of(name):
    """The package of rebatch.torch that a module is in, or the module."""
    return ".".join(name.split(".")[:3])


def test_no_module_and_no_package_imports_in_a_circle():
    imports = {name: set(imported_by(name)) for name in MODULES}
    assert len(imports) > 60 and sum(map(len, imports.values())) > 150
    list(graphlib.TopologicalSorter(imports).static_order())  # or CycleError
    packages = {}
    for name, found in imports.items():
        others = {package_of(other) for other in found} - {package_of(name)}
        packages.setdefault(package_of(name), set()).update(others)
    list(graphlib.TopologicalSorter(packages).static_order())


def test_a_package_has_at_most_15_modules_and_none_with_an_underscore():
    for folder in {path.parent for path in MODULES.values()} - {PACKAGE}:
        names = [path.name for path in folder.glob("*.py") if not path.name.startswith("__")]
        assert len(names) <= 15 and not [name for name in names if name.startswith("_")]

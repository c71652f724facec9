"""The private names that the package uses: those of Lightning and transformers are in the table at
the top of their adapter, those of PyTorch in rebatch/torch/private.py, and the installed version
has each of them."""

import ast
import contextlib
import importlib
import inspect
import pathlib
import re
import threading

import pytest
import torch

from rebatch.torch import private

PRIVATE = re.compile(r"_[a-z]\w*$")


def private_names(source):
    """Attributes of other objects, and texts, that are private names."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and PRIVATE.match(node.attr):
            if not (isinstance(node.value, ast.Name) and node.value.id == "self"):
                found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if PRIVATE.match(node.value):
                found.add(node.value)
    return found


def test_a_private_name_is_found():
    """Of another object, as an attribute or as a text; one of the object's own is not."""
    source = "def f(self, loop):\n    self._own = loop._attribute\n    setattr(loop, '_text', 0)\n"
    assert private_names(source) == {"_attribute", "_text"}


def lightning_of():
    pytest.importorskip("lightning")
    import lightning.pytorch

    import rebatch.lightning

    class Module(lightning.pytorch.LightningModule):
        def training_step(self, batch):
            return None

    trainer = lightning.pytorch.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    return rebatch.lightning, trainer, Module()


def test_lightning_has_the_names_of_the_table_and_no_other_is_used():
    adapter, trainer, module = lightning_of()
    table = {name for names in adapter.PRIVATE.values() for name in names}
    assert private_names(inspect.getsource(adapter)) == table
    assert adapter.missing_names(trainer, module) == []


def test_a_name_that_lightning_no_longer_has_is_said(monkeypatch):
    adapter, trainer, module = lightning_of()
    monkeypatch.setitem(adapter.PRIVATE, "optimization", ("_make_closure", "_is_gone"))
    with pytest.raises(ValueError, match=r"has no _AutomaticOptimization\._is_gone: expected one"):
        adapter.Rebatch().setup(trainer, module, "fit")


def test_transformers_has_the_names_of_the_table_and_no_other_is_used():
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    import rebatch.transformers.refused as adapter
    from rebatch.transformers import trl

    modules = pathlib.Path(adapter.__file__).parent.glob("*.py")
    used = {name for module in modules for name in private_names(module.read_text())}
    assert used == {*adapter.PRIVATE, *adapter.PRIVATE_IN_SOME, *trl.PRIVATE}
    for name in (*adapter.PRIVATE, *adapter.PRIVATE_IN_SOME):
        assert hasattr(transformers.Trainer, name), f"transformers.Trainer has no {name}"


def test_a_name_that_transformers_no_longer_has_is_said(monkeypatch):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    import rebatch.transformers.refused as adapter

    monkeypatch.setattr(adapter, "PRIVATE", ("_is_gone",))
    with pytest.raises(ValueError, match=r"has no Trainer\._is_gone: expected 4\.40"):
        adapter.refuse_what_cannot_work(object())


# ---- PyTorch ----

SOURCES = {
    path: path.read_text()
    for path in pathlib.Path(private.__file__).parent.rglob("*.py")
    if path.name != "private.py"
}
# Of named tuples, ctypes, sys and os.
OF_PYTHON = {"_fields", "_fields_", "_name", "_getframe", "_exit"}


def own_names(tree):
    """Names that a module gives to attributes of its objects, functions, classes and variables."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls"):
            yield node.attr
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def names_of_others(source):
    """Private names of objects, texts and imports that are of no object of the module's own."""
    tree = ast.parse(source)
    parts = {id(part) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for part in n.values}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.update({node.value} if id(node) not in parts else ())
        elif isinstance(node, ast.ImportFrom) and not node.module.startswith("rebatch"):
            found.update([*node.module.split("."), *(alias.name for alias in node.names)])
    found = {name for name in found if re.fullmatch(r"_[A-Za-z]\w*", name)}
    return found - {*own_names(tree), *OF_PYTHON}


def missing_names(table):
    """Those of a table like private.ATTRIBUTES that the installed PyTorch lacks."""
    for path, names in table.items():
        module, _, name = path.rpartition(".")
        there = set()
        for kind in getattr(importlib.import_module(module), name).__mro__[:-1]:
            there.update(vars(kind))
            with contextlib.suppress(OSError, TypeError):  # it is not in Python
                source = inspect.getsource(kind)
                there.update(re.findall(r"\bself\.(\w+)", source))
                there.update(re.findall(r"^    (\w+):", source, re.MULTILINE))
        yield from (f"{path}.{wanted}" for wanted in names if wanted not in there)


def test_a_private_name_of_pytorch_is_found():
    source = (
        "from torch.a._b import _c\nclass _Own:\n    def f(self, x):\n        self._own = x._own\n"
        "        return x._attribute, getattr(x, '_text'), f'{x}_part', torch._C._d\n"
    )
    assert names_of_others(source) == {"_b", "_c", "_attribute", "_text", "_C", "_d"}


def test_no_private_name_of_pytorch_is_used_that_is_not_in_the_table():
    table = {name for names in private.ATTRIBUTES.values() for name in names} | {*private.IN_SOME}
    found = {path.name: names_of_others(text) - table for path, text in SOURCES.items()}
    assert len(found) > 60 and not {name: names for name, names in found.items() if names}


def test_each_private_name_of_the_table_is_used():
    words = set(re.findall(r"\w+", "".join(SOURCES.values()))) | {*private.MODULE_TABLES}
    table = {name for names in private.ATTRIBUTES.values() for name in names} | {*private.IN_SOME}
    assert table - words == set()


def test_pytorch_has_the_private_names_of_the_table():
    pytest.importorskip("torch.distributed.fsdp")
    assert list(missing_names(private.ATTRIBUTES)) == []
    assert list(missing_names({"torch.Tensor": ("_version", "_is_gone")})) == [
        "torch.Tensor._is_gone"
    ]


def test_pytorch_has_what_only_builds_with_cuda_have():
    names = re.findall(r"torch\._C\.(\w+)\(", inspect.getsource(private))
    assert len(names) == 10
    if torch.version.cuda is None:
        pytest.skip("PyTorch is built without CUDA")
    assert [name for name in names if not hasattr(torch._C, name)] == []


def test_a_thread_has_no_graphs_of_the_compiler_that_another_thread_imported():
    importlib.import_module("torch._inductor.cudagraph_trees")
    found = []
    look = lambda: found.append(private.has_compiled_graphs(torch.device("cuda")))  # noqa: E731
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [False]

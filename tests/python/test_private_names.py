"""The private names of Lightning and transformers that the adapters use: each is in the table at
the top of its adapter, and the installed version has it."""

import ast
import inspect
import re

import pytest

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
    import rebatch.transformers as adapter

    assert private_names(inspect.getsource(adapter)) == {*adapter.PRIVATE, *adapter.PRIVATE_IN_SOME}
    for name in (*adapter.PRIVATE, *adapter.PRIVATE_IN_SOME):
        assert hasattr(transformers.Trainer, name), f"transformers.Trainer has no {name}"


def test_a_name_that_transformers_no_longer_has_is_said(monkeypatch):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    import rebatch.transformers as adapter

    monkeypatch.setattr(adapter, "PRIVATE", ("_is_gone",))
    with pytest.raises(ValueError, match=r"has no Trainer\._is_gone: expected 4\.40"):
        adapter._refuse_what_cannot_work(object())

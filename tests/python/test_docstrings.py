"""Docstrings of the public names: each has one, in the style that Sphinx's napoleon reads. Under
"Args:" stands every argument and no other; an example is a literal block."""

import inspect
import re

import pytest

import rebatch.testing
import rebatch.torch
from rebatch.torch.session.options import PassOptions, SessionOptions

ARGUMENT = re.compile(r"^    (\w+): ", re.MULTILINE)


def public_objects():
    """(name, object) of what programs use, with public members of classes."""
    modules = [
        (rebatch.torch, rebatch.torch.__all__),
        (rebatch.testing, ["fail_once", "Failing"]),
    ]
    for module, names in modules:
        for name in names:
            found = getattr(module, name)
            if inspect.isclass(found) or inspect.isfunction(found):
                yield name, found
            if inspect.isclass(found):
                for member, value in vars(found).items():
                    function = value.fget if isinstance(value, property) else value
                    if inspect.isfunction(function) and not member.startswith("_"):
                        yield f"{name}.{member}", function


OBJECTS = dict(public_objects())


def section(text, title):
    """Its lines, without the first four columns' indentation of the docstring."""
    found = re.search(rf"^{title}:\n((?:    .*\n|\n)+)", text + "\n", re.MULTILINE)
    return found[1] if found else ""


@pytest.mark.parametrize("name", OBJECTS)
def test_a_public_name_has_a_docstring(name):
    assert (OBJECTS[name].__doc__ or "").strip()


@pytest.mark.parametrize("name", OBJECTS)
def test_args_has_each_argument(name):
    text = inspect.cleandoc(OBJECTS[name].__doc__)
    if "Args:" not in text:
        assert not re.search(r"^(\w+)( {2,}|: )\S.*\n {4,}", text, re.MULTILINE), "another style"
        return
    parameters = inspect.signature(OBJECTS[name]).parameters.values()
    others = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    named = [p.name for p in parameters if p.kind not in others and p.name != "self"]
    if name == "Backward":
        named += [o for o in PassOptions.__annotations__ if o not in SessionOptions.__annotations__]
    assert ARGUMENT.findall(section(text, "Args")) == named


@pytest.mark.parametrize("name", OBJECTS)
def test_what_is_indented_is_a_section_or_an_example(name):
    before = ""
    for line in inspect.cleandoc(OBJECTS[name].__doc__).splitlines():
        if line.startswith(" ") and before and not before.startswith(" "):
            assert before.endswith("::") or before in ("Args:", "Raises:"), line
        before = line or before


def test_the_other_adapters_have_a_docstring():
    pytest.importorskip("lightning")
    pytest.importorskip("transformers")
    import rebatch.lightning
    import rebatch.transformers

    for found in (rebatch.lightning.Rebatch, rebatch.transformers.RebatchTrainer):
        assert found.__doc__.strip()


def test_all_options_are_in_the_docstrings():
    words = set(re.findall(r"\w+", rebatch.torch.Backward.__doc__))
    assert words.issuperset(PassOptions.__annotations__)
    words = set(re.findall(r"\w+", rebatch.torch.Step.__doc__))
    own = PassOptions.__annotations__.keys() - SessionOptions.__annotations__.keys()
    assert words.issuperset(own)

"""The blocks of the pages run, in order: those of each page of PyTorch after those of
docs/pytorch.md, those of docs/coming-from.md alone, and the program of README.md."""

import importlib.util
import pathlib
import re
import sys

import pytest

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"


def blocks_of(page):
    text = (DOCS / page).read_text()
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def run_blocks(page, names):
    """How many blocks ran; they find `names`, and leave theirs there."""
    ran = 0
    for block in blocks_of(page):
        needed = re.match(r"# needs (\w+)\n", block)
        if block.startswith("# on a GPU") or needed and not importlib.util.find_spec(needed[1]):
            compile(block, page, "exec")
            continue
        try:
            exec(compile(block, page, "exec"), names)
        except Exception as error:
            pytest.fail(f"{type(error).__name__}: {error}, in:\n{block}")
        ran += 1
    return ran


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("pytorch-*.md")))
def test_every_block_of_the_pages_of_pytorch_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    assert run_blocks("pytorch.md", names) >= 8
    ran = run_blocks(page, names)
    if "export" in names:  # other tests run the lines for Prometheus too
        sys.modules["prometheus_client"].REGISTRY.unregister(names["export"])
        assert (tmp_path / "train.jsonl").read_text().count("\n") >= 4
    assert ran or page in ("pytorch-ranks.md", "pytorch-adapters.md", "pytorch-graphs.md")


@pytest.mark.parametrize("page", ["coming-from.md", "budgets.md"])
def test_every_block_of_a_page_that_stands_alone_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_blocks(page, {}) >= 3


def test_the_program_of_the_readme_learns_and_prints_its_line(capfd):
    names = {}
    assert run_blocks("../README.md", names) == 1
    assert names["right"] / len(names["valid"]) > 0.6
    shown = (DOCS / "../README.md").read_text().split("(wrapped here)")[1].split("```")[1]
    said = " ".join(shown.split())
    assert re.sub("took .*", "took", said) in re.sub("took .*", "took", capfd.readouterr().err)


def test_every_option_of_the_page_is_one():
    from rebatch.torch.session import session
    import inspect

    known = set(inspect.signature(session.session_options).parameters)
    table = (DOCS / "pytorch-reference.md").read_text().split("## Options")[1].split("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", table.replace('"', ""))) & {
        name
        for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }
    assert known - named == set()
    of_step = {"gradients", "generators", "graphs", "state", "batch_dim"}
    of_step |= {"group", "group_timeout", "window"}
    assert named - known == of_step

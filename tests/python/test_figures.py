"""bench/figures.py runs parts within their bounds; scripts/figures-table writes their rows
into the pages, and finds what is not of them. Parts and pages are those of the tests."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "bench"))

import figures  # noqa: E402
from figures_parts import PARTS  # noqa: E402
from figures_run import Part, read  # noqa: E402


def of_program(*commands, times=1):
    """A part with a row for each command, whose first number is x."""

    def make_rows(run):
        for command in commands:
            yield "times", command, {"rebatch": f"{run.lines(command, times)[0]['x']:g} ms"}

    return make_rows


@pytest.fixture
def ran(monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(figures, "gpus_of_machine", list)

    def run(parts, *arguments):
        out = tmp_path / "out"
        status = figures.main(parts, [str(out), *arguments])
        written = out / "figures.json"
        rows = json.loads(written.read_text())["rows"] if written.exists() else []
        return status, rows, capfd.readouterr().out

    return run


def test_a_row_has_the_fields_of_the_table_and_the_commit_of_the_code(ran):
    part = Part(of_program("echo 'step: x=3 y=z'", "echo '{\"x\": 4}'"), ["bench/step.c"])
    status, rows, said = ran({"step": part})
    assert not status and "step: ok" in said
    assert [row["cells"]["rebatch"] for row in rows] == ["3 ms", "4 ms"]
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    for row in rows:
        assert row["part"] == "step" and row["paths"] == ["bench/step.c"]
        assert re.fullmatch(r"\d+ cores, host device", row["machine"])
        assert not head.returncode and head.stdout.startswith(row["commit"].rstrip("+"))


def test_a_number_is_the_median_of_the_runs(ran, tmp_path):
    counting = f"echo >>{tmp_path}/runs; echo a: x=$((10 - $(wc -l <{tmp_path}/runs)))"
    _, rows, _ = ran({"counting": Part(of_program(counting, times=3), [])}, "--commit", "1" * 8)
    assert rows[0]["cells"]["rebatch"] == "8 ms" and rows[0]["commit"] == "1" * 8


def test_a_part_beyond_its_bound_ends_and_the_others_go_on(ran, tmp_path):
    child = f"(sleep 86400 & echo $! >{tmp_path}/pid; wait)"
    parts = {
        "slow": Part(of_program(child), [], seconds=0),
        "quick": Part(of_program("echo a: x=1"), []),
    }
    status, rows, said = ran(parts, "--commit", "1" * 8)
    assert status and [row["part"] for row in rows] == ["quick"]
    assert "ran beyond the 0 seconds of the part" in said and "failed: slow" in said
    pid = tmp_path / "pid"
    if pid.exists() and pid.read_text().strip():  # what it had begun is gone too
        state = pathlib.Path(f"/proc/{pid.read_text().strip()}/stat")
        assert not state.exists() or state.read_text().rsplit(")")[1].split()[0] == "Z"


def test_a_part_that_fails_keeps_its_rows_and_the_others_go_on(ran):
    parts = {
        "breaks": Part(of_program("echo a: x=1", "echo a: x=2; exit 3"), []),
        "mute": Part(of_program("echo b"), []),
        "last": Part(of_program("echo a: x=5"), []),
        "card": Part(of_program("echo a: x=6"), [], gpus=1),
    }
    status, rows, said = ran(parts, *parts, "--commit", "1" * 8)
    assert status and [row["part"] for row in rows] == ["breaks", "last"]
    assert "ended with status 3: see figures.log" in said
    assert "mute: KeyError: 'x', after 0 rows" in said
    assert "card: it needs 1 GPUs, and PyTorch finds 0" in said
    assert "failed: breaks, mute, card" in said


def test_a_part_that_is_not_there_is_told_with_those_that_are(ran):
    with pytest.raises(SystemExit, match="the part is speedd, expected one of: unmeasured, host"):
        ran(PARTS, "speedd")


def test_each_part_has_a_bound_paths_that_are_there_and_the_rows_of_the_pages():
    for name, part in PARTS.items():
        assert part.paths and 0 < part.seconds <= figures.SECONDS, name
        assert all((ROOT / path).exists() for path in part.paths), name
    assert set(figures.SETS["unmeasured"]) <= set(PARTS)
    assert sum(PARTS[name].seconds for name in figures.SETS["unmeasured"]) <= 25 * 60
    for row in json.loads((ROOT / "docs/figures.json").read_text())["rows"]:
        assert not row["part"] or row["paths"] == PARTS[row["part"]].paths, row["row"]


SAID = {
    "bench-gpt": "run 1 of 1\nmemory exact: 399.01 MiB a sample\ngpt: tokens/s micro 16/64: "
    "exact=521k/534k inexact=535k/545k pytorch=321k/349k compiled=-/-",
    "bench-recovery": """ GiB found  is true  OOMs micros  probe ms
   8    14      yes      0      2      80.0      20.1    3000.0    3001.0    900.0    840.0   1.07
others                GiB found  true trials  OOMs        ms
accelerate              8     6     5      7     6    5368.0
lightning-binsearch     8     4     5      8     -    3780.5
tenant, rebatch    micro-batch 128 -> 55, step 410.0 ms, clean step 395.0 ms, 1.04 x
recovery: caps=5 exact=5 ooms=0 struck=1.04 halving=1.88 cold=1.04""",
    "bench-sleep": """8 GiB in use on a GPU
with copy            90.25        41.50           99.8 %              1.000
without copy          3.34         1.18          100.0 %              1.000""",
    "bench-nccl": "vote: ranks=2 bare_us=26.10 vote_us=28.80",
}


class Said:
    """What programs that need a GPU print, by their own lines."""

    def make(self, target, times=1):
        return list(read(SAID[target]))


@pytest.mark.parametrize(
    "part, count, row",
    [
        ("gpt", 2, {"exact": "534", "`--exact off`": "545", "PyTorch": "349",
                    "`torch.compile`": "-"}),
        ("recovery", 2, {"OOMs": "0", "time": "80 ms", "first step ÷ later": "1.07",
                         "size found": "14", "is the largest": "yes",
                         "Accelerate: size": "6 of 5", "Accelerate: time": "5,368 ms",
                         "Lightning: size": "4 of 5", "Lightning: time": "3,780 ms"}),
        ("sleep", 4, {"rebatch": "99.8 %"}),
        ("vote-nccl", 1, {"rebatch": "28.8 µs", "others": "26.1 µs"}),
    ],
)  # fmt: skip
def test_parts_read_what_the_programs_of_c_print(part, count, row):
    rows = list(PARTS[part].make_rows(Said()))
    assert len(rows) == count and rows[-1][2] == row


PAGE = """# Figures
| times | rebatch | others | goal | measured |
| --- | --- | --- | --- | --- |
{rows}
Text.
"""
ROW = dict(
    table="times", row="a step", cells={"rebatch": "1,100 ms"}, part="step", machine="H200",
    date="2026-11-28", paths=["code.c"], goals=[["rebatch", "≤", 1000]],
)  # fmt: skip


@pytest.fixture
def tree(tmp_path):
    """A repository with a row of its first commit."""

    def git(*words):
        named = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(["git", *named, *words], cwd=tmp_path, capture_output=True, text=True)
        assert not done.returncode, done.stderr
        return done.stdout.strip()

    def table(*arguments):
        command = [sys.executable, ROOT / "scripts/figures-table", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    def put(*rows, name="docs/figures.json", **others):
        rows = [{"commit": tree_of.commit, **row} for row in rows]
        (tmp_path / name).write_text(json.dumps({**others, "rows": rows}))

    git("init", "-q")
    (tmp_path / "code.c").write_text("int x;\n")
    git("add", ".")
    git("commit", "-qm", "code")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/benchmarks.md").write_text(PAGE.format(rows="| old |"))
    (tmp_path / "docs/testing.md").write_text("# y\n")
    (tmp_path / "README.md").write_text("# x\n| a | b |\n| --- | --- |\n| c | d |\n")
    tree_of = type(
        "Tree", (), dict(put=staticmethod(put), table=staticmethod(table), path=tmp_path)
    )
    tree_of.commit = git("rev-parse", "HEAD")[:8]
    put(ROW)
    return tree_of


def page_of(tree):
    return (tree.path / "docs/benchmarks.md").read_text()


def test_the_table_is_written_from_the_file(tree):
    assert tree.table() == (0, "")
    line = "| a step | 1,100 ms | | ≤ 1,000, **missed** | `step`, H200, 2026-11-28 |"
    assert page_of(tree) == PAGE.format(rows=line)
    assert tree.table("--check") == (0, "")


def test_a_row_of_changed_code_shows_its_commit(tree):
    tree.table()
    (tree.path / "code.c").write_text("int y;\n")
    status, said = tree.table("--check")
    assert status == 1 and "times: a step: not as docs/figures.json has it" in said
    assert tree.table()[0] == 0
    assert f"2026-11-28, {tree.commit} |" in page_of(tree)
    (tree.path / "code.c").write_text("int x;\n")
    assert tree.table("--check") == (0, "")  # a commit may always be shown


def test_a_clone_without_the_commit_leaves_that_check_out_and_says_so(tree):
    tree.table()
    tree.put({**ROW, "commit": "f" * 8})
    status, said = tree.table("--check")
    assert status == 0 and "the commits of 1 rows are not in this clone" in said


def test_lint_finds_what_is_not_of_the_file(tree):
    tree.table()
    page = tree.path / "docs/benchmarks.md"
    written = page.read_text()
    page.write_text(written.replace("1,100", "900"))
    status, said = tree.table("--check")
    assert status == 1 and "a row that is not of docs/figures.json: | a step | 900 ms" in said
    page.write_text(written + "\n| by hand | ms |\n| --- | --- |\n| a | 1 |\n")
    assert "expected a last column `measured`: | by hand | ms |" in tree.table("--check")[1]
    page.write_text("# Figures\n")
    assert "no page has a table times" in tree.table("--check")[1]


@pytest.mark.parametrize(
    "wrong, said",
    [
        (
            {"commit": "12345678+"},
            "commit is 12345678+, expected one in which the measured code is",
        ),
        ({"date": "yesterday"}, "date is yesterday, expected YYYY-MM-DD"),
        ({"paths": ["gone.c"]}, "expected a path of the tree, gone.c is not there"),
        ({"cells": {}}, "rebatch has a goal and no number"),
        ({"cells": {"rebatch": "1", "speed": "2"}}, "expected a column speed"),
    ],
)
def test_a_row_that_is_wrong_is_told_and_nothing_is_written(tree, wrong, said):
    tree.put({**ROW, **wrong})
    before = page_of(tree)
    status, output = tree.table()
    assert status == 1 and said in output and page_of(tree) == before
    tree.put(ROW, ROW)
    assert "expected one row of this name, there are two" in tree.table("--check")[1]


def test_new_rows_take_the_place_of_those_of_their_name_and_keep_the_goals(tree):
    new = {key: value for key, value in ROW.items() if key != "goals"}
    new["cells"] = {"rebatch": "900 ms"}
    tree.put(new, {**new, "row": "another"}, name="new.json")
    assert tree.table("new.json") == (0, "")
    assert "| a step | 900 ms | | ≤ 1,000 | `step`, H200" in page_of(tree)
    assert "| another | 900 ms | | | `step`, H200" in page_of(tree)
    tree.put(new, name="try.json", is_try=True)
    status, said = tree.table("try.json")
    assert status == 1 and "whose figures say nothing" in said

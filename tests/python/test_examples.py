"""The programs in examples/python, on the CPU: with memory enough, and with micro-batches that run
out of memory."""

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest

import forked

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "python"


def ended(name, *arguments, **variables):
    """An example that has run to its end."""
    program = EXAMPLES / name
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **variables}
    return forked.run(program.read_text(), *arguments, name=program, env=environment)


def run(name, *arguments):
    """(the lines that an example prints, those on standard error)."""
    done = ended(name, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr.splitlines()


def losses(lines):
    return [float(found[1]) for line in lines if (found := re.search(r"loss (\d+\.\d+)", line))]


def same(a, b):
    """What is printed of two cuts of the same batches."""
    return len(a) == len(b) > 0 and all(abs(x - y) < 2e-3 for x, y in zip(a, b))


def test_every_example_is_tested():
    tests = "".join(file.read_text() for file in Path(__file__).parent.rglob("test_*.py"))
    assert all(f'"{path.name}"' in tests for path in EXAMPLES.glob("*.py"))


def gpt_rows(lines):
    """(step, loss, micro-batches, micro-batch size, OOMs) of each step."""
    row = re.compile(r" +(\d+) +([0-9.]+) +(\d+) x (\d+) +(\d+) +[0-9,]+ +-$")
    found = [row.fullmatch(line) for line in lines[2:]]
    return [(int(r[1]), float(r[2]), int(r[3]), int(r[4]), int(r[5])) for r in found]


def test_gpt():
    plain, said = run("gpt.py", "--steps", "3")
    assert plain[0].startswith("GPT-2 tiny on cpu: 0.4 million parameters, 16 sequences of 64")
    assert [row[2:] for row in gpt_rows(plain)] == [(1, 16, 0)] * 3 and said == []
    cut, said = run("gpt.py", "--steps", "3", "--oom-above", "5")
    assert [row[2:] for row in gpt_rows(cut)] == [(4, 4, 2), (4, 4, 0), (4, 4, 0)]
    assert [re.search(r"micro-batch .*?;", line)[0] for line in said] == [
        "micro-batch 16 -> 8;",
        "micro-batch 8 -> 4;",
    ]
    assert same([row[1] for row in gpt_rows(plain)], [row[1] for row in gpt_rows(cut)])


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_gpt_in_16_bits(dtype):
    lines, _ = run(
        "gpt.py",
        "--steps",
        "2",
        "--batch",
        "4",
        "--context",
        "16",
        "--dtype",
        dtype,
        "--oom-above",
        "2",
    )
    assert [row[2:] for row in gpt_rows(lines)] == [(2, 2, 1), (2, 2, 0)]


def test_gpt_says_that_a_limit_needs_a_gpu():
    with pytest.raises(AssertionError, match="--limit needs a GPU"):
        run("gpt.py", "--limit", "1GiB")


@pytest.mark.parametrize("norm", ("group", "ghost"))
def test_separable_cnn(norm):
    arguments = ["--steps", "2", "--batch", "32", "--norm", norm]
    plain, said = run("separable_cnn.py", *arguments)
    assert re.match(r"separable: 47,844 parameters, .* 0\.73 MiB; activations 0\.41 MiB", plain[0])
    assert re.match(r"full: 389,892 parameters, .* 5\.95 MiB; activations 0\.36 MiB", plain[3])
    assert plain[1].endswith("micro-batch 1 x 32") and said == []
    cut, said = run("separable_cnn.py", *arguments, "--oom-above", "20")
    assert all(cut[i].endswith("micro-batch 2 x 16") for i in (1, 2, 4, 5)) and len(said) == 2
    assert same(losses(plain), losses(cut))


def test_separable_cnn_says_what_is_wrong_with_batch_norm():
    arguments = ["--steps", "1", "--batch", "8", "--norm", "batch", "--oom-above", "4"]
    lines, _ = run("separable_cnn.py", *arguments)
    assert lines[1].startswith("batch_norm      3 modules")
    assert lines[-1].endswith("micro-batch 2 x 4")


@pytest.mark.parametrize(
    "arguments",
    (
        ["gpt.py", "--batch", "4"],
        ["separable_cnn.py", "--batch", "16", "--norm", "ghost"],
        ["variable_length.py", "--steps", "1"],
    ),
    ids=" ".join,
)
def test_a_check_of_an_example_finds_nothing(arguments):
    done = ended(*arguments, REBATCH_CHECK="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no mistakes: " in done.stdout


def test_variable_length():
    plain, said = run("variable_length.py", "--steps", "3")
    assert plain[-1] == "  12,800 padded tokens ran; in one piece they are 12,800" and said == []
    cut, said = run("variable_length.py", "--steps", "3", "--oom-above", "1000")
    assert cut[0].endswith("micro-batches: 5, OOMs: 4") and len(said) == 4
    assert "OOMs: 0" in cut[1] and "OOMs: 0" in cut[2]
    shown = re.compile(r"  sequences +(\d+)- *(\d+), longest +(\d+), +([0-9,]+) tokens")
    parts = [shown.fullmatch(line) for line in cut[3:-1]]
    assert int(parts[0][1]) == 0 and int(parts[-1][2]) == 31
    assert all(int(part[4].replace(",", "")) <= 1000 for part in parts)
    assert max(int(part[2]) - int(part[1]) for part in parts) >= 4  # not small for the long one
    assert same(losses(plain), losses(cut))


def test_token_budget():
    plain, said = run("token_budget.py", "--steps", "3")
    assert all(line.endswith("OOMs: 0, budget: all at once") for line in plain) and said == []
    cut, said = run("token_budget.py", "--steps", "3", "--oom-above", "4000")
    budgets = [re.search(r"budget: ([0-9,]+) padded tokens", line)[1] for line in cut]
    assert len(set(budgets)) == 1 and 2000 <= int(budgets[0].replace(",", "")) <= 4000
    assert all("OOMs: 0" in line for line in cut[1:])
    values = [[float(re.search(r"loss ([-+.0-9]+)", line)[1]) for line in r] for r in (plain, cut)]
    assert values[0] == pytest.approx(values[1], abs=2e-3)


def test_sft_of_trl():
    pytest.importorskip("trl")
    plain, _ = run("sft_trl.py")
    cut, said = run("sft_trl.py", "--oom-above", "1000")
    assert plain[-1].startswith("step 3: 1 x 32 samples") and "out of memory" in "".join(said)
    budget = int(re.search(r"budget ([0-9,]+) padded tokens", cut[-1])[1].replace(",", ""))
    assert 0 < budget <= 1000 and same(losses(plain[:-1]), losses(cut[:-1]))


def test_evaluate():
    plain, said = run("evaluate.py", "--steps", "20", "--samples", "1000")
    assert all(line.endswith("1,000 samples in 1 call of at most 1,000") for line in plain[1:])
    assert said == []
    cut, said = run("evaluate.py", "--steps", "20", "--samples", "1000", "--oom-above", "300")
    assert all(line.endswith("1,000 samples in 4 calls of at most 250") for line in cut[1:])
    assert len(cut) == 4 and len(said) == 4  # two OOMs each of step.evaluate and rebatch.map
    assert same(losses(plain), losses(cut))
    assert [line.split(";")[0] for line in plain[2:]] == [line.split(";")[0] for line in cut[2:]]


def test_the_benchmark_of_expandable_segments_has_them_when_it_runs_alone(monkeypatch):
    """It begins again with the setting, which PyTorch reads when it is loaded."""
    program = ROOT / "bench" / "pytorch.py"
    spec = importlib.util.spec_from_file_location("bench_pytorch", program)
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)

    def begin_again(_program, arguments, environment):
        assert arguments[1:] == sys.argv
        raise SystemExit(environment["PYTORCH_CUDA_ALLOC_CONF"])

    monkeypatch.setattr(os, "execve", begin_again)
    monkeypatch.setattr(sys, "argv", [str(program), "speed", "expandable"])
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    with pytest.raises(SystemExit, match="^max_split_size_mb:64,expandable_segments:True$"):
        bench.main()

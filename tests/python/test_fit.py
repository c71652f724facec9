"""rebatch fit: cards, the search, the command, and programs on the stand-in for CUDA."""

import json
import pathlib
import random
import re
import subprocess
import sys

import pytest
import torch

from fitted import MODEL, STEP, fit, found, on_standin, trains_plainly
from rebatch import _library
from rebatch.fit import cards, table
from rebatch.fit.rows import Search
from rebatch.fit.search import Line, Sizes, largest_size, line_of
from rebatch.fit.error import FitError
from rebatch.fit.standin_library import library, versions_of
from rebatch.fit.tried import Tried

MIB = 1 << 20

# ---- cards ----


@pytest.mark.parametrize(
    "name, short",
    [
        ("H100 80GB", "h100"),
        ("h100", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("a100-40", "a100-40"),
        ("A100-SXM4-40GB", "a100-40"),
        ("L4", "l4"),
        ("RTX 4090", "rtx4090"),
    ],
)
def test_card_has_several_names(name, short):
    assert cards.find(name).short == short


def test_unknown_card_lists_the_nearest():
    with pytest.raises(ValueError, match=r"no card 'a100-48': expected one such as .*a100-40"):
        cards.find("a100-48")


def test_every_card_is_found_by_its_names_and_has_memory_beside_its_context():
    for card in cards.CARDS:
        assert cards.find(card.short) is card
        beside = card.beside
        assert 0 < beside.bare < beside.context < beside.most < card.memory_bytes // 8
        assert json.loads(card.cudnn(13000))["deviceVer"] == 100 * card.capability[0] + (
            10 * card.capability[1]
        )


# ---- the search ----


def test_line_is_of_sizes_beyond_the_optimizers_peak():
    def peak(size):
        return max(5000, 100 + 70 * size)

    line = line_of(peak, Sizes())
    assert (line.fixed, line.each) == (100, 70)


def test_line_is_of_two_sizes_where_samples_hold_most():
    tried = []

    def peak(size):
        tried.append(size)
        return 1000 + 300 * size

    line = line_of(peak, Sizes(), 12)
    assert (line.fixed, line.each, tried) == (1000, 300, [12, 24])


@pytest.mark.parametrize("seed", range(40))
def test_search_finds_the_largest_size_for_any_start(seed):
    draw = random.Random(seed)
    sizes = Sizes(draw.randint(1, 3), draw.choice([17, 399, 1 << 20]), draw.choice([1, 2, 8]))
    fits_up_to = draw.randint(0, 400)
    tried = []

    def fits(size):
        tried.append(size)
        return size <= fits_up_to

    low, high = largest_size(fits, sizes, sizes.at_most(draw.randint(1, 3000)))
    expected = fits_up_to if fits_up_to >= sizes.first else 0
    assert low == min(expected, sizes.largest) // sizes.step * sizes.step
    assert high == (low + sizes.step if low else sizes.first) or low + sizes.step > sizes.largest
    assert all(size % sizes.step == 0 and size >= sizes.smallest for size in tried)
    assert len(tried) == len(set(tried)) < 30


def test_search_of_a_large_size_ends_within_a_twentieth_of_a_percent():
    low, high = largest_size(lambda size: size <= 123_456, Sizes(), 90_000)
    assert low <= 123_456 < high
    assert high - low <= low // 2000


def test_line_without_a_slope_leaves_the_largest_size():
    assert Sizes(largest=12).at_most(Line(100, 0.0).meets(4000)) == 12


class Fragmented:
    """A training that fills two thirds of its room: the allocator's fragments are the others."""

    name, samples, is_loop = "", 16, False

    def __init__(self):
        self.seen = []

    def sizes(self):
        return Sizes()

    def tried(self, request):
        self.seen.append(request.size)
        peak = 1000 + 7 * request.size
        return Tried(request.size, peak <= request.room * 2 // 3, peak=peak, reserved=peak)


def test_a_search_begins_where_the_last_room_was_full():
    subject = Fragmented()
    search = Search(subject)
    line = search.line()
    rows, tries = [], []
    for room in 90_000, 900_000:
        before = len(subject.seen)
        rows.append(search.row(room, line))
        tries.append(subject.seen[before:])
    assert [row.best.samples for row in rows] == pytest.approx([8428, 85_571], rel=1 / 2000)
    assert tries[0][0] == 12_714 and tries[1][0] == pytest.approx(85_571, rel=0.01)
    assert len(tries[1]) < len(tries[0])


class Squared(Fragmented):
    """Of pairs of samples. Beyond `most` it is not followed."""

    def __init__(self, most):
        super().__init__()
        self.most = most

    def tried(self, request):
        if request.size > self.most:
            raise FitError("rebatch: too many")
        peak = 1000 + request.size**2
        return Tried(request.size, peak <= request.room, peak=peak, reserved=peak)


def test_a_size_beyond_that_cannot_be_tried_is_no_answer_and_no_error():
    search = Search(Squared(most=2000))
    assert search.row(1_001_000, search.line()).best.samples == 1000
    search = Search(Squared(most=1000))
    with pytest.raises(FitError, match="too many"):
        search.row(1_001_000, search.line())

    search = Search(Squared(most=1000))
    search._subject.is_loop = True  # which runs no larger ones itself
    row = search.row(1_001_000, search.line())
    assert row.best.samples == 1000 and row.next is None
    assert search.remark == "Larger sizes than 1000 may fit: too many."


class Grouped(Fragmented):
    """Of groups of samples."""

    is_loop = True

    def tried(self, request):
        if request.size % 8:
            raise FitError(f"rebatch: {request.size} is no multiple of 8")
        return super().tried(request)


def test_sizes_that_a_program_runs_may_be_multiples():
    search = Search(Grouped())
    for room in 90_000, 91_000:
        row = search.row(room, search.line())
        most = (room * 2 // 3 - 1000) // 7 // 8 * 8
        assert (row.best.samples, row.next.samples) == (most, most + 8)
    assert search.remark.startswith("Sizes are multiples of 8: ")
    assert search.remark.count("multiple") == 2


class Islands(Fragmented):
    """Where a workspace does not fit, fragments decide."""

    def tried(self, request):
        size = request.size
        fits = request.room > 1 << 40 or size <= 2600 or 2890 <= size <= 2960
        return Tried(size, fits, peak=1000 + 7 * size, reserved=1000 + 7 * size, refused=1)


def test_size_below_which_others_do_not_fit_is_no_answer():
    search = Search(Islands())
    row = search.row(21_500, search.line())
    assert 2600 * 63 / 64 <= row.best.samples <= 2600 < row.next.samples
    assert row.next.reserved == 0 and row.tries < 16


# ---- the command ----


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (
            ["--gpu", "t4", "--memory", "24GiB", "--", "python3"],
            "24.00 GiB of the 14.56 GiB of t4: expected no more than it has",
        ),
        (["--gpu", "h200x", "--", "python3"], "there is no card 'h200x': expected one such as"),
        (["--gpu", "l4"], 'there is no program: expected "-- PROGRAM [ARGUMENT]..."'),
        (["--", "python3", "train.py"], "there is no card: expected --gpu, or --memory"),
        (["--memory", "80%", "--", "python3"], "'80%' is not a size such as 24GiB"),
        (
            ["--gpu", "l4", "--batch", "8", "--", "python3", "t.py"],
            "argument --batch: 8: expected --batch N, at least 1, and {batch} in the command",
        ),
        (
            ["--gpu", "l4", "--", "python3", "t.py", "--bs={batch}"],
            "argument --batch: not given: expected --batch N, at least 1, and {batch} in the",
        ),
    ],
)
def test_wrong_usage_is_one_sentence(arguments, sentence):
    done = fit(*arguments)
    assert done.returncode == 2
    assert sentence in done.stderr.splitlines()[-1]


def test_cards_are_listed():
    done = fit("--cards")
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()[1:]] == [
        card.short for card in cards.CARDS
    ]


def test_python_without_pytorch_is_told(tmp_path):
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\nexit 0\n")
    python.chmod(0o755)
    with pytest.raises(FitError, match="python3 has no PyTorch: expected one with CUDA"):
        versions_of(str(python))


# ---- programs ----


@on_standin
def test_standin_is_built_once_for_each_version_of_pytorch():
    version = versions_of(sys.executable)[0]
    assert library(sys.executable, version) == library("/elsewhere/python3", version)


# The same training without rebatch: how often memory ran out.
PLAIN = """
samples = batch(int(sys.argv[1]))
for _ in range(4):
    optimizer.zero_grad(set_to_none=True)
    loss_fn(model, samples).backward()
    optimizer.step()
print(torch.cuda.memory_stats()["num_ooms"])
"""


# A MiB of the pool for each sample, in C; cudaGetDevice() is CUDA's only function in it.
COMPILED = """
#include <rebatch/rebatch.h>
#include <stdio.h>

int cudaGetDevice(int *device);

static rebatch_status nothing(void *user)
{
    return user ? REBATCH_OK : REBATCH_E_INVALID;
}

static rebatch_status forward_backward(const rebatch_microbatch *mb, void *user)
{
    void *memory;
    (void)user;
    if (rebatch_pool_alloc(&memory, mb->pool, mb->count << 20, mb->stream, 0))
        return REBATCH_OOM;
    return rebatch_pool_free(mb->pool, memory);
}

int main(int count, char **arguments)
{
    const rebatch_step_ops ops = {sizeof ops, nothing, forward_backward, nothing};
    rebatch_step_report report;
    rebatch *rb;
    int device;
    if (cudaGetDevice(&device) || count > 1 ||
        rebatch_open_default(&rb, "device.kind = cuda"))
        return fprintf(stderr, "%s\\n", rebatch_last_error()), 7;
    puts("begins");
    return rebatch_step(rb, &ops, 2000, arguments, &report) != REBATCH_OK;
}
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    package = pathlib.Path(_library.__file__).parent
    [runtime] = pathlib.Path(torch.__file__).parents[1].glob("nvidia/cu*/lib/libcudart.so.1?")
    path = tmp_path_factory.mktemp("compiled") / "train"
    path.with_suffix(".c").write_text(COMPILED)
    command = ["cc", "-o", path, path.with_suffix(".c"), f"-I{package}/include"]
    command += [package / "librebatch.so", runtime]
    command += [f"-Wl,-rpath,{package}", f"-Wl,-rpath,{runtime.parent}"]
    subprocess.run(command, check=True)
    return str(path)


@on_standin
def test_compiled_program_is_probed_on_each_card(compiled):
    done = fit("--json", "--gpu", "t4,l4", "--memory", "1GiB,2GiB", "--", compiled)
    rows = json.loads(done.stdout)["rows"]
    assert "begins" in done.stderr and [row["gpu"] for row in rows] == ["t4", "t4", "l4", "l4"]
    for row in rows:
        assert row["peak_reserved_bytes"] == row["micro"] * MIB
        assert row["held_bytes"]["pool"] == row["peak_reserved_bytes"]
        assert row["peak_reserved_bytes"] <= row["room_bytes"] < row["next"] * MIB + 40 * MIB
        assert row["outside_bytes"] + row["room_bytes"] <= row["memory_bytes"]
        assert not row["is_measured"]
    assert rows[0]["micro"] < rows[1]["micro"] - 1000


@on_standin
def test_compiled_program_that_never_steps_is_told(compiled):
    done = fit("--gpu", "t4", "--", compiled, "more")
    assert done.returncode == 1
    assert "train ended with status 7 and never called rebatch_step()" in done.stderr


@pytest.mark.parametrize(
    "options, program, sentence, status",
    [
        ([], "true", "calls no shared library of CUDA: expected a program that is linked with", 1),
        (["--install"], "true", "--install, --lighten and --ranks are for Python", 2),
        (["--ranks", "0"], "python3", "argument --ranks: 0: expected at least 1", 2),
        (["--ranks", "2"], "true", "--install, --lighten and --ranks are for Python", 2),
        (["--ranks", "2"], "python3", "--ranks needs a program such as python3 train.py", 2),
        ([], "not-there", "not-there cannot be run: No such file or directory", 127),
    ],
)
def test_program_that_cannot_be_fitted_is_told(options, program, sentence, status):
    done = fit("--gpu", "t4", *options, "--", program)
    assert sentence in done.stderr and done.returncode == status


@on_standin
def test_largest_size_trains_in_a_fresh_process_and_the_next_does_not(program):
    [row] = found("--gpu", "h100", "--memory", "1GiB", "--", sys.executable,
                  program(MODEL, STEP), "4")  # fmt: skip
    plain = program(MODEL, PLAIN)
    assert row["micro"] > 100 and row["batch"] == row["micro"] and row["microbatches"] == 1
    assert 0 < row["next"] - row["micro"] <= max(1, row["micro"] // 2000)
    assert trains_plainly(plain, row["micro"], row["room_bytes"])
    assert not trains_plainly(plain, row["next"], row["room_bytes"])
    assert (
        row["next_needs_bytes"]
        > row["memory_bytes"]
        >= (row["peak_reserved_bytes"] + row["outside_bytes"])
    )


@on_standin
def test_batch_is_cut_where_it_does_not_fit_whole(program):
    [row] = found("--gpu", "h100", "--memory", "1GiB", "--", sys.executable,
                  program(MODEL, STEP), "4000")  # fmt: skip
    assert 100 < row["micro"] < row["batch"] == 4000
    assert row["microbatches"] == -(-4000 // row["micro"])


@on_standin
def test_what_holds_memory_adds_up(program):
    [row] = found("--gpu", "h100", "--memory", "1GiB", "--", sys.executable,
                  program(MODEL, STEP), "4")  # fmt: skip
    held = row["held_bytes"]
    assert sum(held.values()) == row["peak_reserved_bytes"] + row["outside_bytes"]
    weights = 4 * (64 * 32768 + 32768 + 32768 * 16 + 16)
    assert held["parameters"] == held["gradients"] == pytest.approx(weights, rel=0.001)
    assert held["optimizer"] == pytest.approx(2 * weights, rel=0.001)
    assert held["activations"] > 0 and held["cached"] >= 0


@on_standin
def test_every_card_has_rows_and_smaller_memory_has_smaller_sizes(program):
    rows = found("--gpu", "h100,t4", "--memory", "1GiB,2GiB", "--install", "--", sys.executable,
                 program(MODEL, STEP), "4")  # fmt: skip
    assert [row["gpu"] for row in rows] == ["h100", "h100", "t4", "t4"]
    assert all(row["allocator"] == "rebatch" for row in rows)
    assert rows[0]["micro"] < rows[1]["micro"] and rows[2]["micro"] < rows[3]["micro"]


TWO_STEPS = """
import rebatch.torch as rebatch

maker = torch.nn.Sequential(torch.nn.Linear(8, 8192), torch.nn.Linear(8192, 64)).cuda()
adam = torch.optim.Adam(maker.parameters())


def judge(model, samples):
    real, made = samples
    return F.cross_entropy(model(real), real.new_zeros(len(real), dtype=torch.int64)) + (
        F.cross_entropy(model(made), made.new_ones(len(made), dtype=torch.int64))
    )


def fool(maker, noise):
    made = maker(noise)
    return F.cross_entropy(model(made), made.new_zeros(len(made), dtype=torch.int64))


judging = rebatch.Step(model, optimizer, judge)
making = rebatch.Step(maker, adam, fool)
not_used = rebatch.Backward(model, judge)
for _ in range(1_000_000):
    n = int(sys.argv[1])
    noise = torch.randn(n, 8, device="cuda")
    with torch.no_grad():
        made = maker(noise)
    judging((torch.randn(n, 64).cuda(), made))
    making(noise)
"""


@on_standin
def test_each_of_two_steps_is_answered_and_one_size_for_both(program):
    path = program(MODEL, TWO_STEPS)
    rows = found("--gpu", "h100", "--memory", "1GiB", "--", sys.executable, path, "16")
    judging, making, both = rows
    assert [row["step"] for row in rows] == [
        "Step 1, Sequential",
        "Step 2, Sequential",
        "all 2 Steps",
    ]
    assert 50 < judging["micro"] < making["micro"]  # two passes of the model, and one
    assert both["micro"] == pytest.approx(judging["micro"], rel=0.02)
    assert both["held_bytes"] == both["held_bytes"] | {
        kind: judging["held_bytes"][kind] for kind in ("parameters", "gradients", "optimizer")
    }
    assert "(all 2 Steps): parameters" in table.of_rows(rows)


TAGGED = """
import rebatch.torch as rebatch


def tagged(model, samples):
    inputs, classes = samples
    with rebatch.tag("body"):
        hidden = model[:2](inputs.cuda())
    with rebatch.tag("head"):
        return F.cross_entropy(model[2](hidden), classes.cuda())


step = rebatch.Step(model, optimizer, tagged)
step(batch(int(sys.argv[1])))
"""


@on_standin
def test_activations_are_told_by_tag(program):
    [row] = found("--gpu", "l4", "--memory", "1GiB", "--install", "--", sys.executable,
                  program(MODEL, TAGGED), "4")  # fmt: skip
    tags, each = row["tag_bytes"], 32768 * 4  # what the backward pass needs of ReLU
    assert set(tags) == {"body", "head"}
    assert tags["body"] == pytest.approx(row["micro"] * each, rel=0.02)
    assert tags["body"] + tags["head"] <= row["held_bytes"]["activations"]
    assert re.search(r"activations [\d.]+ GiB \(body [\d.]+ GiB, head ", table.of_rows([row]))


# As transformers does: a mask that takes memory, unless what is on the GPU makes it needless.
MASKED = """
import rebatch.torch as rebatch


def masked(model, samples):
    positions = torch.arange(8, device="cuda").expand(len(samples[0]), -1)
    padding = torch.ones(2, 3, dtype=torch.bool, device="cuda")
    padding[:, 1:] = False
    is_plain = ((positions.diff() != 1).sum() == 0) & (padding[:, 2].logical_not().all())
    mask = None if is_plain and positions[0, 7] == 7 else torch.empty(2 << 30, device="cuda")
    return loss_fn(model, samples)


step = rebatch.Step(model, optimizer, masked)
step(batch(int(sys.argv[1])))
"""


@on_standin
def test_what_a_program_decides_by_integers_is_computed(program):
    [masked] = found("--gpu", "h100", "--memory", "1GiB", "--", sys.executable,
                     program(MODEL, MASKED), "4")  # fmt: skip
    [plain] = found("--gpu", "h100", "--memory", "1GiB", "--", sys.executable,
                    program(MODEL, STEP), "4")  # fmt: skip
    assert masked["micro"] == pytest.approx(plain["micro"], rel=0.01)


# The loss of chosen words alone: by a mask of the host, by one that a kernel writes, or by slices.
ROWS = """
import sys
import torch
import rebatch.torch as rebatch

words, head = torch.nn.Embedding(100, 256), torch.nn.Linear(256, 8192)
model = torch.nn.ModuleDict({"words": words, "head": head}).cuda()
tokens = torch.randint(0, 100, (8, 128))
labels = tokens.clone()
labels[:, 1::2] = -100


def loss_fn(model, samples):
    tokens, labels = (tensor.cuda() for tensor in samples)
    hidden = model["words"](tokens)
    kept = labels != -100
    if sys.argv[1] == "slices":
        hidden, labels = hidden[:, ::2].flatten(0, 1), labels[:, ::2].flatten()
    else:
        if sys.argv[1] == "scores":
            kept &= hidden.sum(-1) > 0
        hidden, labels = hidden[kept], labels[kept]
    return torch.nn.functional.cross_entropy(model["head"](hidden), labels)


rebatch.Step(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn)((tokens, labels))
"""


@on_standin
def test_a_mask_of_the_host_selects_its_rows(program):
    path = program(ROWS)
    rows = [
        found("--gpu", "h100", "--memory", "2GiB", "--", sys.executable, path, how)[0]
        for how in ("mask", "slices")
    ]
    assert rows[0]["micro"] > 100 and rows[0]["micro"] == pytest.approx(rows[1]["micro"], rel=0.01)


@on_standin
def test_a_mask_of_a_kernel_is_told_by_file_and_line(program):
    path = program(ROWS)
    done = fit("--gpu", "h100", "--memory", "2GiB", "--", sys.executable, path, "scores")
    line = 1 + ROWS.splitlines().index("        hidden, labels = hidden[kept], labels[kept]")
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.splitlines()[-1] == (
        f"rebatch: {path}:{line}: a kernel would decide how large the result of index() is, and "
        "none runs here: expected masks and counts that come from the host"
    )


# As losses of boxes do: few numbers by a mask that a kernel writes.
FEW = """
import rebatch.torch as rebatch


def chosen(model, samples):
    found = model(samples[0].cuda()).square().mean(-1)
    overlap = torch.zeros_like(found)
    overlap[found > 0.5] = 2.0 * found[found > 0.5]
    return (found - overlap).mean()


step = rebatch.Step(model, optimizer, chosen)
step(batch(int(sys.argv[1])))
"""


@on_standin
def test_few_rows_of_a_kernels_choice_leave_the_answer(program):
    path = program(MODEL, FEW)
    done = fit("--gpu", "h100", "--memory", "1GiB", "--", sys.executable, path, "4")
    chooses = "    overlap[found > 0.5] = 2.0 * found[found > 0.5]"
    line = 1 + (MODEL + FEW).splitlines().index(chooses)
    told = (
        f"{path}:{line}: a kernel would decide how large the result of index() is; with all that "
        "it may select, or none, the peak differs by 0.0%."
    )
    assert done.returncode == 0 and told in done.stdout.splitlines()


# As a router of experts does: how many samples an expert has, read on the host.
COUNTS = """
import rebatch.torch as rebatch


def counted(model, samples):
    experts = model(samples[0].cuda()).argmax(-1)
    mode, counts = sys.argv[2], torch.nn.functional.one_hot(experts, 16).sum(0)
    count = int(counts[3])
    if mode == "size":
        torch.empty(count, 1024, device="cuda")
    if mode == "split":
        torch.empty(len(experts) + count, device="cuda").split(counts.tolist())
    if mode == "log":
        print(f"{count} of {len(experts)}, finite: {bool(torch.isfinite(model[0].weight).all())}")
    return loss_fn(model, samples)


step = rebatch.Step(model, optimizer, counted)
step(batch(int(sys.argv[1])))
"""


@on_standin
@pytest.mark.parametrize("options", ([], ["--install"]))
def test_a_size_by_integers_of_a_kernel_is_told_by_file_and_line(program, options):
    path = program(MODEL, COUNTS)
    command = ["--gpu", "h100", "--memory", "1GiB", *options, "--", sys.executable, path, "4"]
    done = fit(*command, "size")
    line = 1 + (MODEL + COUNTS).splitlines().index("    count = int(counts[3])")
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.splitlines()[-1] == (
        f"rebatch: {path}:{line}: the program takes a size from integers that a kernel would "
        "compute, and none runs here: expected sizes that come from the host"
    )
    assert found(*command, "log")[0]["micro"] > 100


@on_standin
def test_a_failure_names_where_integers_of_a_kernel_were_read(program):
    path = program(MODEL, COUNTS.replace("+ count", "+ 1 + count"))
    done = fit("--gpu", "h100", "--memory", "1GiB", "--", sys.executable, path, "4", "split")
    assert done.returncode == 1 and "train.py:" in done.stderr.splitlines()[-1]
    assert done.stderr.splitlines()[-1].endswith(" has read integers of it")


@on_standin
@pytest.mark.parametrize("within", ("", "def loss_fn(model, samples):\n    "))
def test_another_gpu_is_refused_by_file_and_line(program, within):
    asks = f"{within}torch.cuda.set_device(1)"
    path = program(MODEL, asks, STEP)
    done = fit("--gpu", "h100", "--", sys.executable, path, "4")
    line = 1 + (MODEL + asks).splitlines().index(asks.splitlines()[-1])
    assert done.returncode == 1 and "invalid device ordinal" not in done.stderr
    assert done.stderr.splitlines()[-1] == (
        f"rebatch: {path}:{line}: the program asks for another GPU than cuda:0: expected one "
        "process on one GPU; with --ranks N it is one of N"
    )


# A mask that a kernel makes of integers of the host before the first Step.
BEFORE = """
tokens = torch.arange(64).cuda()
kept = tokens % 2 == 0
chosen = torch.rand(64, device="cuda") > 0.5


def masked(model, samples):
    rows = samples[0].cuda()[:, (chosen if len(sys.argv) > 2 else kept)]
    return loss_fn(model, (torch.cat([rows, rows], 1), samples[1]))


import rebatch.torch as rebatch

rebatch.Step(model, optimizer, masked)(batch(int(sys.argv[1])))
"""


@on_standin
def test_integers_are_followed_from_the_beginning_of_the_program(program):
    path = program(MODEL, BEFORE)
    command = ["--gpu", "h100", "--memory", "1GiB", "--", sys.executable, path, "4"]
    assert found(*command)[0]["micro"] > 100
    done = fit(*command, "chosen")
    assert done.returncode == 1
    assert "a kernel would decide how large the result of index() is" in done.stderr


@on_standin
def test_options_of_the_step_bound_the_size(program):
    bounded = STEP.replace("loss_fn)", "loss_fn, micro_multiple_of=16, micro_largest=50)")
    [row] = found("--gpu", "h100", "--memory", "1GiB", "--", sys.executable,
                  program(MODEL, bounded), "4")  # fmt: skip
    assert (row["micro"], row["next"]) == (48, 0)


@on_standin
@pytest.mark.parametrize(
    "source, sentence",
    [
        ("print('hello')", "ended with status 0 and never called a Step or optimizer.step()"),
        ("open('/nowhere/data')", "ended with status 1 before its first Step"),
        (
            MODEL.replace(".cuda()", "") + STEP,
            "the model is on cpu: expected it on cuda, which is there for a fit",
        ),
        (
            MODEL.replace("return F", "raise KeyError('words'); return F") + STEP,
            "a micro-batch of 4 failed: KeyError: 'words'",
        ),
        (
            MODEL + STEP.replace("for", "loss_fn(model, batch(2)).backward()\nfor"),
            "the program ran a backward pass before its first Step",
        ),
    ],
)
def test_program_without_an_answer_is_told_in_one_sentence(program, source, sentence):
    done = fit("--gpu", "l4", "--", sys.executable, program(source), "4")
    assert done.returncode == 1 and done.stdout == ""
    assert sentence in done.stderr.splitlines()[-1]


RANKED = """
import torch.distributed as dist

dist.init_process_group("nccl")
assert dist.get_world_size() == 4
"""
DDP = RANKED + "model = torch.nn.parallel.DistributedDataParallel(model)\n"
SHARDED = (
    RANKED
    + """
for layer in model:
    torch.distributed.fsdp.fully_shard(layer)
torch.distributed.fsdp.fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
"""
)


@on_standin
def test_ranks_count_the_buckets_of_ddp(program):
    alone, more = found("--memory", "1GiB,1152MiB", "--", sys.executable,
                        program(MODEL, STEP), "4")  # fmt: skip
    [ranked] = found("--memory", "1GiB", "--ranks", "4", "--", sys.executable,
                     program(MODEL, DDP, STEP), "4")  # fmt: skip
    parameters, gradients = (alone["held_bytes"][kind] for kind in ("parameters", "gradients"))
    assert ranked["held_bytes"]["parameters"] == parameters
    lost = (alone["micro"] - ranked["micro"]) * 128 * MIB / (more["micro"] - alone["micro"])
    assert 0.9 * gradients < lost < 4 * gradients  # beside the buckets, a micro-batch's own


@on_standin
def test_ranks_count_one_shard(program):
    [alone] = found("--memory", "1GiB", "--", sys.executable, program(MODEL, STEP), "4")
    [sharded] = found("--memory", "1GiB", "--ranks", "4", "--", sys.executable,
                      program(MODEL, SHARDED, STEP), "4")  # fmt: skip
    for kind in "parameters", "gradients", "optimizer":
        share = sharded["held_bytes"][kind] / alone["held_bytes"][kind]
        assert share == pytest.approx(0.25, rel=0.01), kind


@on_standin
def test_groups_of_the_program_without_ranks_are_told(program):
    group = "import torch.distributed as dist\ndist.init_process_group('gloo', rank=0, "
    group += "world_size=1, store=dist.HashStore())\n"
    source = program(MODEL, group, DDP.replace(RANKED, ""), STEP)
    done = fit("--gpu", "l4", "--", sys.executable, source, "4")
    assert done.returncode == 1
    assert "several ranks: expected --ranks N and the program itself" in done.stderr


FOUR_GPUS = """
int nvmlInit(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 4; return 0; }
"""


@on_standin
def test_gpus_of_the_machine_do_not_count(program, tmp_path):
    library = tmp_path / "libnvidia-ml.so.1"  # by which PyTorch counts GPUs
    command = ["cc", "-shared", "-x", "c", "-o", library, "-"]
    subprocess.run(command, input=FOUR_GPUS, text=True, check=True)
    source = program("import torch\nprint('GPUs:', torch.cuda.device_count())\n")
    done = fit("--gpu", "l4", "--", sys.executable, source, LD_LIBRARY_PATH=str(tmp_path))
    assert "GPUs: 1\n" in done.stderr, done.stderr


@on_standin
def test_nothing_fits(program):
    done = fit("--gpu", "l4", "--memory", "400MiB", "--", sys.executable,
               program(MODEL, STEP), "4")  # fmt: skip
    assert done.returncode == 3, done.stderr


@on_standin
@pytest.mark.parametrize("made", ("step", "backward"))
def test_fit_runs_the_program_again_and_goes_on(program, made):
    source = MODEL.replace(".cuda()", ".to(device)").replace("torch.manual_seed(0)", "device = "
        "'cuda' if torch.cuda.is_available() else 'cpu'")  # fmt: skip
    asked = """
import rebatch.torch as rebatch

step = rebatch.Step(model, optimizer, loss_fn)
backward = rebatch.Backward(model, loss_fn)  # finds the optimizer
found = MADE.fit(batch(4), gpu="l4", memory="1GiB")
assert "optimizer" in str(found)  # its memory is counted
print("micro", found.micro, len(found.rows), device)
""".replace("MADE", made)
    source = source.replace("fused=True", "")
    command = [sys.executable, program(source, asked), "4"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    word, micro, rows, device = done.stdout.split()
    assert int(micro) > 100 and (rows, device) == ("1", "cpu")

"""rebatch fit on the stand-in for CUDA: programs without a Step, and whose batches come from a
loader."""

import pathlib
import sys

import pytest
from fitted import MODEL, STEP, fit, found, on_standin, plainly, trains_plainly

MIB = 1 << 20
FOREIGN = pathlib.Path(__file__).parents[2] / "bench" / "foreign"

# Programs without a Step, which train for so long that only an end in their midst passes.
LOADED = """
samples = torch.utils.data.TensorDataset(*batch(1000))
loader = torch.utils.data.DataLoader(samples, int(sys.argv[1]), num_workers=2, shuffle=True)
for _ in range(1_000_000):
    for inputs, classes in loader:
        loss = F.cross_entropy(model(inputs.cuda()), classes.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""

# Without a loader, after an evaluation, and with accumulated gradients.
ACCUMULATED = """
def drawn():
    return [tensor.pin_memory().cuda(non_blocking=True) for tensor in batch(int(sys.argv[1]))]


with torch.no_grad():
    loss_fn(model, batch(3))
samples = drawn()
for _ in range(1_000_000):
    for _ in range(100_000):
        loss = loss_fn(model, samples) / 100_000
        samples = drawn()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""

GAN = """
maker = torch.nn.Linear(8, 64).cuda()
adam = torch.optim.Adam(maker.parameters())
for (inputs, _) in torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(*batch(1000)), int(sys.argv[1]), shuffle=True
):
    inputs = inputs.cuda()
    n = len(inputs)
    made = maker(torch.randn(n, 8, device="cuda"))
    for images, kind in (inputs, 0), (made.detach(), 1):
        classes = torch.full((n,), kind, device="cuda")
        F.cross_entropy(model(images), classes).backward()
    optimizer.step()
    F.cross_entropy(model(made), torch.full((n,), 0, device="cuda")).backward()
    adam.step()
    optimizer.zero_grad()
    adam.zero_grad()
"""

# Its size stands in a number, and it has no optimizer of torch.optim.
RECURRENT = """
n = int(sys.argv[1])
text = torch.randint(0, 64, (500 * n,)).view(-1, n).cuda()
words = torch.randn(64, 256).cuda()
cell = torch.nn.LSTM(256, 256).cuda()
carried = torch.zeros(1, n, 256, device="cuda"), torch.zeros(1, n, 256, device="cuda")
for i in range(1_000_000):
    part = text[8 * i % 400 :][:20]
    hidden, carried = cell(words[part], carried)
    F.cross_entropy(hidden.view(-1, 256), part.reshape(-1)).backward()
    carried = tuple(each.detach() for each in carried)
    for p in cell.parameters():
        p.data.add_(p.grad, alpha=-0.1)
        p.grad = None
"""


@on_standin
@pytest.mark.parametrize("loop", [LOADED, ACCUMULATED])
def test_program_without_a_step_is_answered_as_with_one(program, loop):
    options = ["--gpu", "h100", "--memory", "1GiB", "--", sys.executable]
    [stepped] = found(*options, program(MODEL, STEP), "16")
    [plain] = found(*options, program(MODEL, loop), "16")
    assert plain["micro"] == pytest.approx(stepped["micro"], rel=0.01)
    assert plain["peak_reserved_bytes"] == pytest.approx(stepped["peak_reserved_bytes"], rel=0.01)
    for kind in "parameters", "gradients", "optimizer":
        assert plain["held_bytes"][kind] == stepped["held_bytes"][kind]
    assert ("16 in the program" in plain["remark"]) == (loop is ACCUMULATED)


@on_standin
def test_each_optimizer_of_a_program_is_waited_for(program):
    [row] = found("--gpu", "h100", "--memory", "1GiB", "--", sys.executable,
                  program(MODEL, GAN), "16")  # fmt: skip
    assert row["micro"] > 50 and not row["remark"]
    held = row["held_bytes"]
    assert held["optimizer"] == pytest.approx(2 * held["parameters"], rel=0.01)


@on_standin
def test_program_whose_batch_cannot_be_varied_is_answered_at_its_own(program):
    done = fit("--gpu", "h100", "--memory", "1GiB", "--", sys.executable,
               program(MODEL, RECURRENT), "16")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "not tried" in done.stdout and "activations" in done.stdout
    assert "The size of the batch could not be varied" in done.stdout


@on_standin
def test_size_is_varied_by_the_programs_argument(program):
    options = ["--gpu", "h100", "--memory", "1GiB"]
    path = program(MODEL, RECURRENT)
    [row] = found(*options, "--batch", "16", "--", sys.executable, path, "{batch}")
    assert row["micro"] > 100 and row["batch"] == row["micro"] and not row["remark"]
    own = [sys.executable, path, str(row["micro"])]
    [fits] = found(*options, "--", *own)
    assert fits["remark"] and fits["peak_reserved_bytes"] == row["peak_reserved_bytes"]
    own[-1] = str(row["next"])
    assert fit(*options, "--", *own).returncode == 3


# It notes each start beside itself.
STARTED = """
import sys
{early}
import torch
open(__file__ + ".starts", "a").write(".")
sys.argv[1] = sys.argv[-1]
"""

# It reads its arguments after it has imported PyTorch, and starts another program.
LAUNCHER = """
import subprocess
import sys
import torch
sys.exit(subprocess.run([sys.executable, *sys.argv[1:]]).returncode)
"""


@on_standin
def test_program_that_takes_its_size_imports_once_where_it_reads_that_later(program, tmp_path):
    def answer(early, *before):
        path = program(STARTED.format(early=early), MODEL, RECURRENT)
        starts = pathlib.Path(f"{path}.starts")
        starts.write_text("")
        command = [sys.executable, *before, path, "--size", "{batch}"]
        [row] = found("--gpu", "h100", "--memory", "1GiB", "--batch", "16", "--", *command)
        del row["seconds"]
        return row, len(starts.read_text())

    late, imports = answer("len(sys.argv), sys.argv[0]")
    early, starts = answer("size = sys.argv[1]")
    launcher = tmp_path / "launcher.py"
    launcher.write_text(LAUNCHER)
    launched, started = answer("", str(launcher))
    assert late == early == launched and late["micro"] > 100
    assert imports == 1 and starts == started > 3


TRAINER = """
import sys
import torch
import transformers

config = transformers.GPT2Config(vocab_size=500, n_positions=64, n_embd=64, n_layer=1, n_head=1)
model = transformers.GPT2LMHeadModel(config)
tokens = [{"input_ids": t, "labels": t} for t in torch.randint(0, 500, (100, 64))]
options = dict(per_device_train_batch_size=int(sys.argv[1]), max_steps=1_000_000, report_to=[])
arguments = transformers.TrainingArguments(sys.argv[2], disable_tqdm=True, **options)
transformers.Trainer(model, arguments, train_dataset=tokens).train()
"""


@on_standin
def test_loop_of_transformers_is_answered(program, tmp_path):
    pytest.importorskip("transformers")
    [row] = found("--gpu", "h100", "--memory", "2GiB", "--", sys.executable,
                  program(TRAINER), "8", str(tmp_path))  # fmt: skip
    assert row["micro"] > 100 and row["held_bytes"]["optimizer"] and not row["remark"]


# The same batches as those of a loader, and a Step or a Backward that takes them.
OF_REBATCH = """
import rebatch.torch as rebatch

step = rebatch.{}, micro_multiple_of=16)
"""
LOADED_STEP = """
samples = torch.utils.data.TensorDataset(*batch(1000))
for _ in range(1_000_000):
    for part in torch.utils.data.DataLoader(samples, int(sys.argv[1]), num_workers=2):
        step(part)
        if type(step) is rebatch.Backward:
            optimizer.step()
            optimizer.zero_grad()
"""


@on_standin
@pytest.mark.parametrize("made", ["Step(model, optimizer, loss_fn", "Backward(model, loss_fn"])
def test_step_answers_also_where_a_loader_gives_its_batches(program, made):
    options = ["--gpu", "h100", "--memory", "1GiB", "--", sys.executable]
    [stepped] = found(*options, program(MODEL, STEP), "16")
    [loaded] = found(*options, program(MODEL, OF_REBATCH.format(made), LOADED_STEP), "16")
    assert loaded["micro"] == stepped["micro"] // 16 * 16 and not loaded["remark"]
    assert loaded["held_bytes"]["optimizer"] == stepped["held_bytes"]["optimizer"]


# Lengths in decreasing order, as packed sequences need them, and shorter ones behind.
SORTED = """
words, cell = torch.nn.Embedding(100, 256).cuda(), torch.nn.GRU(256, 512).cuda()
adam = torch.optim.Adam([*words.parameters(), *cell.parameters()])


def drawn(samples):
    lengths = torch.arange(len(samples), 0, -1) + 20
    return torch.randint(0, 100, (len(samples), int(lengths.max()))), lengths


for tokens, lengths in torch.utils.data.DataLoader(
    range(1_000_000), int(sys.argv[1]), collate_fn=drawn
):
    packed = torch.nn.utils.rnn.pack_padded_sequence(words(tokens.cuda()), lengths, True)
    cell(packed)[0].data.float().mean().backward()
    adam.step()
    adam.zero_grad()
"""


@on_standin
def test_samples_in_order_stay_so_in_a_batch_of_another_size(program):
    [row] = found("--gpu", "h100", "--memory", "2GiB", "--", sys.executable,
                  program(MODEL, SORTED), "16")  # fmt: skip
    assert row["micro"] > 100 and not row["remark"]


# Its spread is what a kernel computes; PyTorch refuses one of 0.
DISTRIBUTION = """
for _ in range(1_000_000):
    samples = batch(int(sys.argv[1]))
    mean, spread = model(samples[0].cuda()).chunk(2, dim=1)
    normal = torch.distributions.Normal(mean, spread.exp())
    (-normal.log_prob(normal.sample())).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@on_standin
def test_distribution_of_what_kernels_compute_is_no_error(program):
    [row] = found("--gpu", "h100", "--memory", "1GiB", "--", sys.executable,
                  program(MODEL, DISTRIBUTION), "16")  # fmt: skip
    assert row["micro"] > 100


# Where the workspace of a convolution does not fit, PyTorch takes another algorithm.
SEGMENT = f"""
import runpy
import sys

sys.argv = ["segment.py", "--side", "96", "--steps", "4", "--batch", sys.argv[1]]
runpy.run_path({str(FOREIGN / "segment.py")!r}, run_name="__main__")
"""


@on_standin
def test_convolution_that_takes_another_workspace_has_not_failed(program):
    path = program(SEGMENT)
    [row] = found("--gpu", "h100", "--memory", "2GiB", "--", sys.executable, path, "8")
    # An update more or less, and the allocator's fragments are others.
    assert trains_plainly(path, int(0.96 * row["micro"]), row["room_bytes"])
    assert not trains_plainly(path, int(1.05 * row["next"]), row["room_bytes"])


# Sequences of the second batch and those after it are longer.
LONGER = """
def drawn(numbers):
    length = 10 if min(numbers) == 0 and len(sys.argv) == 2 else 100
    length = 15 if len(numbers) < int(sys.argv[1]) else length  # an epoch's last
    return torch.zeros(len(numbers), length, 64)


for inputs in torch.utils.data.DataLoader(
    range(1_000_000), int(sys.argv[1]), collate_fn=drawn
):
    model(inputs.cuda()).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


# One batch alone is long.
LATE = LONGER.replace(
    "10 if min(numbers) == 0", "8 + min(numbers) // len(numbers) % 3 if 400 not in numbers"
)


@on_standin
@pytest.mark.parametrize("loop", [LONGER, LATE])
def test_program_that_takes_its_size_has_its_own_batches(program, loop):
    options = ["--gpu", "h100", "--memory", "2GiB", "--batch", "4", "--", sys.executable]
    [own] = found(*options, program(MODEL, loop), "{batch}")
    [all_long] = found(*options, program(MODEL, loop), "{batch}", "long")
    assert own["micro"] == pytest.approx(all_long["micro"], abs=1)
    assert "Batches differ" in own["remark"] and not all_long["remark"]


# Samples of many lengths, so that the allocator's blocks of one batch do not fit the next.
PADDED = """
torch.manual_seed(1)
lengths = torch.randint(20, 200, (100_000,)).tolist()
model = torch.nn.Sequential(
    torch.nn.Embedding(500, 256), *(
        torch.nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True) for _ in range(3)
    ), torch.nn.Linear(256, 2000)
).cuda()
optimizer = torch.optim.AdamW(model.parameters())


def pad(numbers):
    rows = [torch.ones(lengths[number], dtype=torch.long) for number in numbers]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


for at, rows in enumerate(torch.utils.data.DataLoader(
    range(100_000), int(sys.argv[1]), collate_fn=pad
)):
    model(rows.cuda()).flatten(0, 1).logsumexp(1).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if at == 40:
        break
time.sleep(0.5)
"""


@on_standin
def test_batches_that_differ_leave_fragments(program):
    path = program("import time\n", MODEL, PADDED)
    [row] = found("--gpu", "h100", "--memory", "2GiB", "--", sys.executable, path, "4")
    assert trains_plainly(path, row["micro"], row["room_bytes"])
    assert not trains_plainly(path, row["next"] + 1, row["room_bytes"])


@on_standin
@pytest.mark.parametrize("samples, is_long", [(1_000_000, True), (6, False)])
def test_largest_of_the_first_batches_is_tried(program, samples, is_long):
    options = ["--gpu", "h100", "--memory", "2GiB", "--", sys.executable]
    [own] = found(*options, program(MODEL, LONGER.replace("1_000_000", str(samples))), "4")
    [all_long] = found(*options, program(MODEL, LONGER), "4", "long")
    assert (own["micro"] <= all_long["micro"] + 1) == is_long
    assert ("Batches differ" in own["remark"]) == is_long


# What the libraries would say of their workspaces: nothing was measured.
UNMEASURED = """
graph = torch.eye(64).to_sparse().cuda()
for inputs, _ in torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(*batch(1000)), int(sys.argv[1])
):
    inputs = inputs.cuda()
    waves = torch.fft.irfft(torch.fft.rfft(inputs))
    spread = torch.sparse.mm(graph, waves.t()).t()
    whole = torch.linalg.cholesky(torch.eye(64, device="cuda")) @ spread.t()
    model(whole.t()).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@on_standin
def test_workspaces_that_are_not_known_are_no_failure_and_told(program):
    options = ["--gpu", "h100", "--memory", "1GiB", "--", sys.executable]
    [row] = found(*options, program(MODEL, UNMEASURED), "16")
    [plain] = found(*options, program(MODEL, LOADED), "16")
    assert row["micro"] == pytest.approx(plain["micro"], rel=0.02)
    assert "cuFFT's workspaces are estimated" in row["remark"] and not plain["remark"]


# Lengths differ, so that no dimension is that of the samples; and the batch is no collection.
RAGGED = """
class Batch:
    def __init__(self, samples):
        self.rows = torch.cat([row for row, _ in samples])
        self.starts = torch.tensor([0, *(len(row) for row, _ in samples)]).cumsum(0)
        self.classes = torch.tensor([kind for _, kind in samples])


rows = [(torch.randn(3 + at % 5, 64), at % 16) for at in range(1000)]
for samples in torch.utils.data.DataLoader(rows, int(sys.argv[1]), collate_fn=Batch):
    scores = model(samples.rows.cuda())
    each = torch.segment_reduce(scores, "mean", offsets=samples.starts.cuda(), axis=0)
    F.cross_entropy(each, samples.classes.cuda()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""

# Its dataset makes batches, of which a loader returns one.
OF_BATCHES = """
batches = [batch(int(sys.argv[1])) for _ in range(9)]
for inputs, classes in torch.utils.data.DataLoader(batches, 1, collate_fn=lambda each: each[0]):
    F.cross_entropy(model(inputs.cuda()), classes.cuda()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@on_standin
def test_samples_that_differ_in_size_are_made_a_batch_as_the_program_does(program):
    options = ["--gpu", "h100", "--memory", "1GiB", "--", sys.executable]
    [ragged] = found(*options, program(MODEL, RAGGED), "20")
    [plain] = found(*options, program(MODEL, LOADED), "20")
    rows = sum(3 + at % 5 for at in range(20)) / 20
    assert rows * ragged["micro"] == pytest.approx(plain["micro"], rel=0.02)
    assert not ragged["remark"]


@on_standin
def test_loader_of_whole_batches_has_their_samples(program):
    options = ["--gpu", "h100", "--memory", "1GiB", "--", sys.executable]
    [row] = found(*options, program(MODEL, OF_BATCHES), "16")
    assert (
        row["micro"] > 100 and "16 in the program, of the tensors that its loader" in row["remark"]
    )


# Whether it goes on is what gradients decide, and kernels would compute these.
CLOSURE = """
samples = [tensor.cuda() for tensor in batch(int(sys.argv[1]))]
lbfgs = torch.optim.LBFGS(model.parameters(), history_size=7)


def closure():
    lbfgs.zero_grad()
    loss = loss_fn(model, samples)
    loss.backward()
    return loss


for _ in range(1_000_000):
    lbfgs.step(closure)
"""


@on_standin
def test_history_that_gradients_would_fill_is_told(program):
    options = ["--gpu", "h100", "--memory", "1GiB", "--", sys.executable]
    [row] = found(*options, program(MODEL, CLOSURE), "16")
    megabytes = 2 * 7 * 4 * (64 * 32768 + 32768 + 32768 * 16 + 16) / MIB
    assert row["micro"] > 100
    assert f"its history, of up to {megabytes:.1f} MiB, does not count" in row["remark"]


# Of which nobody knows the length.
STREAM = """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield torch.randn(64), 3


for inputs, classes in torch.utils.data.DataLoader(Stream(), int(sys.argv[1])):
    F.cross_entropy(model(inputs.cuda()), classes.cuda()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@on_standin
def test_stream_of_samples_is_answered(program):
    options = ["--gpu", "h100", "--memory", "1GiB", "--", sys.executable]
    [row] = found(*options, program(MODEL, STREAM), "16")
    assert row["micro"] > 100 and not row["remark"]


# Its peak is where the gradients of three branches are added up.
BRANCHES = """
inputs = batch(int(sys.argv[1]))[0].cuda()
for _ in range(3):
    hidden = model[0](inputs)
    sum((hidden * part).sum() for part in (1, 2, 3)).backward()
    optimizer.step()
    optimizer.zero_grad()
print(torch.cuda.max_memory_allocated(), flush=True)
time.sleep(0.5)
"""

# The lengths stay on the host.
SPEECH = """
n = int(sys.argv[1])
heard = torch.randn(n, 50, 64).cuda()
words, frames, counts = torch.ones(n, 9), torch.full((n,), 50), torch.full((n,), 9)
for _ in range(3):
    scores = model(heard).transpose(0, 1).log_softmax(-1)
    F.ctc_loss(scores, words.long().cuda(), frames, counts).backward()
    optimizer.step()
    optimizer.zero_grad()
print(torch.cuda.max_memory_allocated(), flush=True)
time.sleep(0.5)
"""


@on_standin
@pytest.mark.parametrize("loop", [BRANCHES, SPEECH])
def test_peak_is_the_programs_own(program, loop):
    path = program("import time\n", MODEL, loop)
    [row] = found("--gpu", "h100", "--memory", "2GiB", "--", sys.executable, path, "16")
    assert int(plainly(path, row["micro"], row["room_bytes"])) == row["peak_allocated_bytes"]


# What the loader returned is changed, or copied on the GPU.
CHANGED = """
def collate(samples):
    inputs, classes = torch.utils.data.default_collate(samples)
    return {"inputs": inputs, "classes": classes, "lengths": torch.full((len(inputs),), 16)}


loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(*batch(1000)), int(sys.argv[1]), collate_fn=collate
)
for given in loader:
    lengths = given.pop("lengths").cuda()
    for name in given:
        given[name] = given[name].cuda()
    longest = int(copy.deepcopy(lengths).max())
    scores = model(given["inputs"])[:, :longest]
    F.cross_entropy(scores, given["classes"]).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@on_standin
def test_program_may_change_what_its_loader_returned(program):
    options = ["--gpu", "h100", "--memory", "1GiB", "--", sys.executable]
    [changed] = found(*options, program("import copy\n", MODEL, CHANGED), "20")
    [plain] = found(*options, program(MODEL, LOADED), "20")
    assert changed["micro"] == pytest.approx(plain["micro"], abs=1) and not changed["remark"]


# What stays grows for six updates.
FILLED = """
queue = []
for _ in range(12):
    loss_fn(model, batch(int(sys.argv[1]))).backward()
    if len(queue) < 6:
        queue.append(torch.empty(64 << 20, dtype=torch.uint8, device="cuda"))
    optimizer.step()
    optimizer.zero_grad()
time.sleep(0.5)
"""


@on_standin
def test_updates_go_on_until_the_allocator_takes_no_more(program):
    path = program("import time\n", MODEL, FILLED)
    [row] = found("--gpu", "h100", "--memory", "2GiB", "--", sys.executable, path, "16")
    assert trains_plainly(path, row["micro"], row["room_bytes"])
    assert not trains_plainly(path, row["next"], row["room_bytes"])


# Two halves of a batch are mixed.
HALVES = """
for inputs, classes in torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(*batch(3000)), int(sys.argv[1]), drop_last=True
):
    inputs = inputs.cuda()
    assert len(inputs) % 2 == 0, "halves"
    loss = F.cross_entropy(model(inputs + inputs.view(2, -1, 64).flip(0).flatten(0, 1)),
                           classes.cuda())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@on_standin
@pytest.mark.parametrize("options, size", [([], "16"), (["--batch", "16"], "{batch}")])
def test_size_is_one_that_the_program_runs(program, options, size):
    path = program(MODEL, HALVES)
    for room in "1GiB", "1200MiB":
        [row] = found("--gpu", "h100", "--memory", room, *options, "--", sys.executable, path, size)
        assert row["micro"] % 2 == 0 and row["next"] == row["micro"] + 2 > 100
        assert "Sizes are multiples of 2: " in row["remark"] and "halves" in row["remark"]


@on_standin
def test_larger_sizes_that_the_program_does_not_run_are_told(program):
    options = ["--gpu", "h100", "--memory", "8GiB", "--batch", "16", "--", sys.executable]
    [row] = found(*options, program(MODEL, HALVES), "{batch}")
    assert row["micro"] == 3000 and not row["next"]
    assert "Larger sizes than 3000 may fit: with a batch of 3" in row["remark"]
    assert "never called a Step or optimizer.step()" in row["remark"]

"""rebatch fit on the stand-in for CUDA: programs without a Step. test_fit_batches.py has those
whose batches or samples differ."""

import pathlib
import sys

import pytest
from fitted import LOADED, MODEL, STEP, fit, found, on_standin, plainly, trains_plainly

MIB = 1 << 20
FOREIGN = pathlib.Path(__file__).parents[2] / "bench" / "foreign"

# Without a loader, after an evaluation, and with accumulated gradients.
ACCUMULATED = """
def drawn():
    return [tensor.pin_memory().cuda(non_blocking=True) for tensor in batch(int(sys.argv[1]))]


with torch.no_grad():
    loss_fn(model, batch(3))
samples = drawn()
for _ in range(1_000_000):
    for _ in range(10_000):
        loss = loss_fn(model, samples) / 10_000
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

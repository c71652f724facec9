"""rebatch fit on the stand-in for CUDA: programs without a Step whose batches or samples differ, or
that do not run every size."""

import sys

import pytest
from fitted import LOADED, MODEL, found, on_standin, trains_plainly

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

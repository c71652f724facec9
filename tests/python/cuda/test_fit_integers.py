"""rebatch fit on the stand-in for CUDA: integers and booleans of the host are computed there, sizes
that they decide are right, and a size that only a kernel would know is refused."""

import pathlib
import re

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from rebatch.fit.error import FitError
from rebatch.fit.integers import Integers
from rebatch.torch.private import TorchDispatchMode
from test_install import child

pytestmark = pytest.mark.usefixtures("standin")

TOKENS = torch.arange(24).reshape(4, 6) % 7 - 2
MASK = TOKENS > 0
LENGTHS = torch.tensor([6, 3, 5, 1])


@pytest.fixture(autouse=True)
def integers():
    """What was in memory before is no result."""
    for size in 512, 4096, 1 << 20:
        torch.full((size // 8,), -(1 << 40), dtype=torch.int64).cuda()
    with Integers() as integers:
        yield integers


def padding(lengths, width=6):
    return torch.arange(width, device=lengths.device)[None] < lengths[:, None]


# Of tokens, mask and lengths on one device: integers that a program decides by.
COMPUTED = {
    "nonzero": lambda t, m, n: torch.nonzero(m),
    "where": lambda t, m, n: torch.stack(torch.where(m)),
    "argwhere": lambda t, m, n: torch.argwhere(t),
    "rows of a mask": lambda t, m, n: t[m],
    "rows by bytes": lambda t, m, n: t[:, 0][m[:, 0].byte()],
    "mask beside indices": lambda t, m, n: t[m[:, 1], 2],
    "mask of a mask": lambda t, m, n: t[m][t[m] > 2],
    "nested masks": lambda t, m, n: t[m & (t != 3) & ~padding(n)],
    "masked_select": lambda t, m, n: torch.masked_select(t, m[:, :1]),
    "labels": lambda t, m, n: t[t != -2],
    "padding mask": lambda t, m, n: t[padding(n)],
    "repeat_interleave": lambda t, m, n: torch.repeat_interleave(t, n, dim=0),
    "segments of packed sequences": lambda t, m, n: torch.repeat_interleave(n),
    "unique": lambda t, m, n: torch.unique(t),
    "unique with counts": lambda t, m, n: torch.cat(torch.unique(t, return_counts=True)),
    "unique rows": lambda t, m, n: torch.unique(t, dim=0),
    "unique_consecutive": lambda t, m, n: torch.unique_consecutive(n),
    "bincount": lambda t, m, n: torch.bincount(n, minlength=4),
    "boundaries": lambda t, m, n: torch.nn.functional.pad(n.cumsum(0), (1, 0)),
    "written by a mask": lambda t, m, n: t.clone().masked_fill_(m, 0)[~m],
    "put by a mask": lambda t, m, n: put(t, m)[m],
    "put by indices": lambda t, m, n: torch.zeros_like(n).index_put((n % 4,), n),
    "filled slices": lambda t, m, n: filled(t, n),
    "ones of floats": lambda t, m, n: torch.ones_like(t.float(), dtype=torch.bool).nonzero(),
    "new of floats": lambda t, m, n: t.float().new_zeros(4, dtype=torch.long),
    "copied over": lambda t, m, n: overwritten(t)[m],
    "sort": lambda t, m, n: torch.sort(n, descending=True).indices,
    "one_hot": lambda t, m, n: torch.nn.functional.one_hot(n, 7).nonzero(),
}


def put(tokens, mask):
    tokens = tokens.clone()
    tokens[mask] = tokens[mask].flip(0)
    return tokens


def filled(tokens, lengths):
    result = torch.empty_like(tokens)
    result[:, 1:] = tokens[:, :-1]
    result[:, 0] = lengths
    return result


def overwritten(tokens):
    """Integers of a kernel, and then of the host."""
    result = torch.randn(tokens.shape, device=tokens.device).long()
    result.copy_(tokens)
    return result


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("name", COMPUTED)
def test_integers_of_the_host_have_their_values(name):
    given = TOKENS, MASK, LENGTHS
    expected = COMPUTED[name](*given)
    found = COMPUTED[name](*(tensor.cuda() for tensor in given))
    assert found.is_cuda and found.dtype == expected.dtype
    assert found.cpu().tolist() == expected.tolist()


def test_sizes_that_a_program_takes_from_integers():
    lengths = LENGTHS.cuda()
    assert int(lengths.max()) == 6 and lengths.tolist() == [6, 3, 5, 1]
    assert torch.zeros(int(lengths.sum()), device="cuda").numel() == 15
    assert torch.randn(15, 2, device="cuda").split(lengths.tolist())[2].shape == (5, 2)


@pytest.mark.parametrize("mask", [MASK[:, 0], MASK], ids=["of rows", "of words"])
def test_floats_have_the_rows_of_the_mask_and_gradients_go_back(mask):
    hidden = torch.randn(4, 6, 8, device="cuda", requires_grad=True)
    rows = hidden[mask.cuda()]
    assert rows.shape == torch.randn(4, 6, 8)[mask].shape
    rows.square().sum().backward()
    assert hidden.grad.shape == hidden.shape
    with torch.no_grad():
        hidden[mask.cuda()] = rows
    assert torch.masked_select(hidden, MASK.cuda()[:, :, None]).numel() == 8 * MASK.sum()


def test_rows_need_the_memory_that_pytorch_takes_for_them():
    hidden, mask = torch.zeros(4096, 64, device="cuda"), (torch.arange(4096) % 2 == 0).cuda()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    rows = hidden[mask]
    positions = 2048 * 8
    assert torch.cuda.memory_allocated() - before == rows.numel() * 4
    assert torch.cuda.max_memory_allocated() - before == rows.numel() * 4 + positions


def test_packed_sequences_keep_the_sizes_of_their_lengths():
    padded = torch.randn(4, 6, 8, device="cuda")
    packed = pack_padded_sequence(padded, LENGTHS, batch_first=True, enforce_sorted=False)
    assert packed.data.shape == (15, 8) and packed.batch_sizes.tolist() == [4, 3, 3, 2, 2, 1]
    back, lengths = pad_packed_sequence(packed, batch_first=True)
    assert back.shape == (4, 6, 8) and lengths.tolist() == LENGTHS.tolist()


@pytest.mark.parametrize("counts", [torch.tensor([3, 1, 2, 1]), (3, 1, 2, 1)])
def test_ctc_takes_its_size_from_lengths_of_the_host(counts):
    def loss(scores, words, frames, counts):
        return torch._ctc_loss(scores.log_softmax(-1), words, frames, counts)

    scores, words = torch.randn(6, 4, 9), torch.randint(1, 9, (4, 3))
    expected = loss(scores, words, LENGTHS.tolist(), list(counts))
    if isinstance(counts, torch.Tensor):
        found = loss(scores.cuda(), words.cuda(), LENGTHS.cuda(), counts.cuda())
    else:
        found = loss(scores.cuda(), words.cuda(), LENGTHS.tolist(), counts)
    assert [each.shape for each in found] == [each.shape for each in expected]


def test_operations_that_run_out_of_memory_are_counted(integers):
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    assert integers.ooms == 2


# ---- what a kernel would decide ----

SCORES = torch.full((6, 4), 0.25)
REFUSED = {
    "nonzero": lambda scores: torch.nonzero(scores.argmax(-1) == 1),
    "experts of tokens": lambda scores: torch.where(scores.topk(2).indices == 3),
    "rows of a mask": lambda scores: scores[scores > 0.5],
    "put by a mask": lambda scores: put(scores, scores > 0.5),
    "masked_select": lambda scores: torch.masked_select(scores, scores > 0.5),
    "unique": lambda scores: torch.unique(scores.argmax(-1)),
    "counts": lambda scores: torch.bincount(scores.argmax(-1)),
    "copies": lambda scores: torch.repeat_interleave(scores, scores[0].long().clamp(0)[:1]),
    "ctc_loss": lambda scores: torch._ctc_loss(
        scores[:, None], TOKENS.cuda()[:1], LENGTHS.cuda()[:1], scores.argmax(-1)[:1]
    ),
    "random": lambda scores: torch.nonzero(torch.randint(2, (8,), device="cuda")),
    "written over": lambda scores: TOKENS.cuda().copy_(scores[:4, :1]).nonzero(),
    "written into": lambda scores: TOKENS.cuda().index_add_(0, *added(scores)).nonzero(),
}


def added(scores):
    return torch.tensor([0, 1], device="cuda"), scores[:2, :1].long().expand(2, 6)


@pytest.mark.parametrize("name", REFUSED)
def test_a_size_that_a_kernel_decides_is_refused_by_file_and_line(name):
    line = re.escape(f"{pathlib.Path(__file__).name}:")
    with pytest.raises(FitError, match=rf"{line}\d+: a kernel would decide how large the result"):
        REFUSED[name](SCORES.cuda())


READ = {
    "number": lambda scores: int(scores.argmax(-1)[0]),
    "count": lambda scores: (scores > 0.5).sum().item(),
    "count as a float": lambda scores: (scores > 0.5).float().sum().item(),
    "share": lambda scores: (scores.argmax(-1) == 1).double().mean().item(),
    "list": lambda scores: torch.nn.functional.one_hot(scores.argmax(-1), 4).sum(0).tolist(),
    "copy": lambda scores: scores.topk(2).indices.cpu(),
    "mask": lambda scores: (scores > 0.5).to("cpu"),
    "into a tensor of the host": lambda scores: torch.zeros(6).long().copy_(scores.argmax(-1)),
}


@pytest.mark.parametrize("name", READ)
def test_integers_of_a_kernel_are_noted_where_they_are_read(name, integers):
    plain = READ[name](SCORES.cuda())
    assert re.search(rf"{pathlib.Path(__file__).name}:\d+$", integers.read_at)
    with Integers(reads_others=True):
        other = READ[name](SCORES.cuda())
    if isinstance(plain, torch.Tensor):
        assert plain.dtype == other.dtype and not (plain == other).any()
    else:
        assert plain != other


def test_floats_that_integers_alone_make_are_known():
    mask, lengths = MASK.cuda(), LENGTHS.cuda()
    with Integers(reads_others=True) as integers:
        assert int(mask.float().sum().item()) == int(MASK.sum())
        assert lengths.float().max().item() == 6 and lengths.float().mean().item() == 15 / 4
        halves = (lengths / 2).ceil()
        assert halves.long().tolist() == [3, 2, 3, 1]
        within = torch.arange(6, device="cuda")[None] < halves[:, None]
        assert torch.randn(4, 6, 8, device="cuda")[within].shape == (9, 8)
        total = torch.zeros(1, device="cuda")
        total += lengths.sum()
        weights = mask.float()
        weights *= torch.randn(4, 6, device="cuda")
        assert weights.sum().item() != int(MASK.sum())  # a kernel's
    assert not integers.read_at


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
def test_a_mask_in_floats_of_the_host_is_known(kind):
    """Pairs of a sample's views, as in contrastive losses."""
    owner = torch.arange(5).repeat(2)
    same = (owner[None] == owner[:, None]).to(kind).cuda()
    other = ~torch.eye(10, dtype=torch.bool).cuda()
    same = same[other].view(10, -1)
    scores = torch.randn(10, 9, device="cuda")
    assert scores[same.bool()].view(10, -1).shape == (10, 1)
    assert scores[~same.bool()].view(10, -1).shape == (10, 8)


def test_other_floats_of_the_host_are_not_followed():
    images = torch.rand(4, 6).cuda()
    with pytest.raises(FitError, match=r"how large the result of index\(\) is"):
        images[images > 0.5]


def test_what_is_known_is_read_as_it_is():
    with Integers(reads_others=True) as integers:
        lengths = LENGTHS.cuda()
        assert (lengths.tolist(), int(lengths.max())) == ([6, 3, 5, 1], 6)
        assert MASK.cuda().cpu().tolist() == MASK.tolist()
        assert SCORES.cuda().cpu().shape == (6, 4)
    assert not integers.read_at


CHOSEN = {
    "rows": lambda scores: scores[scores > 0.5],
    "rows that zeros choose": lambda scores: scores[scores <= 0.5],
    "positions": lambda scores: torch.nonzero(scores > 0.5),
    "masked_select": lambda scores: torch.masked_select(scores, scores > 0.5),
    "numbers": lambda scores: scores.nonzero(),
    "large": lambda scores: (torch.rand(4096, 2048, device="cuda") > 0.5).nonzero(),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_rows_that_a_kernel_chooses_may_be_assumed(name):
    counts = []
    for reads_others in False, True:
        with Integers(reads_others) as integers:
            integers.assumes = True
            counts.append(len(CHOSEN[name](SCORES.cuda())))
        assert re.search(r":\d+: a kernel would decide how large the result of", integers.assumed)
    number = 4096 * 2048 if name == "large" else SCORES.numel()
    assert sorted(counts) == [0, number]


def test_what_else_a_kernel_decides_is_refused_all_the_same(integers):
    integers.assumes = True
    for name in "unique", "counts", "copies", "ctc_loss":
        with pytest.raises(FitError, match="a kernel would decide how large the result"):
            REFUSED[name](SCORES.cuda())


@pytest.mark.parametrize("reads_others", [False, True])
def test_decisions_are_by_zeros(reads_others):
    with Integers(reads_others) as integers:
        loss = SCORES.cuda().exp().square().sum()
        assert torch.isfinite(loss) and not torch.isnan(loss) and not (loss > 1).any()
    assert not integers.read_at


def test_values_by_a_mask_of_a_kernel_decide_no_size():
    scores = SCORES.cuda()
    scores[scores > 0.5] = 0.0
    scores.masked_fill_(scores > 0.5, 1.0)
    assert torch.where(scores > 0, scores, -scores).shape == scores.shape


def test_dropout_and_losses_need_no_integers():
    hidden = torch.randn(8, 4, device="cuda", requires_grad=True)
    kept = torch.nn.functional.dropout(hidden, 0.5)
    labels = torch.tensor([0, 1, 2, 3, -100, 1, 2, 3]).cuda()
    torch.nn.functional.cross_entropy(kept, labels).backward()
    assert int((labels != -100).sum()) == 7


class Counted(TorchDispatchMode):
    """How often each operation runs."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **kwargs or {})


def test_a_collective_runs_once(integers):
    """On the host it would run beside the program's, and its result would come later."""
    integers.__exit__(None, None, None)
    counted = Counted()
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        with counted, integers:
            count = torch.tensor([4]).cuda()
            gathered = [torch.zeros_like(count)]
            torch.distributed.all_gather(gathered, count)
            assert gathered[0].item() == 4 and integers.read_at == ""
    finally:
        torch.distributed.destroy_process_group()
        integers.__enter__()
    assert counted.names.count("c10d::allgather_") == 1


def test_sparse_gradients_have_the_rows_of_their_indices(integers):
    words = torch.nn.Embedding(50, 8, sparse=True).cuda()
    first, second = torch.tensor([4, 7, 7, 9]), torch.tensor([[9, 11]])
    (words(first.cuda()).sum() + words(second.cuda()).sum()).backward()
    gradient = words.weight.grad
    assert gradient._nnz() == 6
    coalesced = gradient.coalesce()
    assert coalesced.is_coalesced() and coalesced.indices().tolist() == [[4, 7, 9, 11]]
    assert coalesced.values().shape == (4, 8)
    torch.optim.SparseAdam([words.weight]).step()
    assert not integers.read_at


def test_sparse_gradients_of_what_a_kernel_chose_are_refused():
    words = torch.nn.Embedding(50, 8, sparse=True).cuda()
    words(torch.randn(4, 50, device="cuda").relu_().argmax(1)).sum().backward()
    with pytest.raises(FitError, match=r"how large the result of coalesce\(\) is"):
        torch.optim.SparseAdam([words.weight]).step()


def test_another_count_is_as_large_as_it_may_be():
    with Integers(reads_others=True):
        losses = torch.randn(10, 100, device="cuda")
        hard = losses > 0.7
        assert int(hard.sum()) == 1000 == int(hard.count_nonzero())
        assert int(hard.sum().clamp(min=3).mul(2)) >= 1000
        assert hard.sum(1).tolist() == [100] * 10
        assert int(hard.sum(0)[3]) == 97


def test_masks_of_pairs_are_computed_up_to_a_quarter_of_a_gib():
    kinds = torch.arange(8192).cuda() % 4096
    first, second = torch.where(kinds[:, None] == kinds[None])
    assert len(first) == 4 * 4096 and (second - first).abs().max().item() == 4096


INSTALLED = """
from rebatch.fit.program import copies
device = torch.device("cuda", 0)
batch = tensor(100 * MIB)
copies.restart(device)
del batch
torch.cuda.empty_cache()
rebatch.install()
activations = tensor(150 * MIB)
found = copies.taken(device)
print(found["peak"] // MIB, found["reserved"] // MIB)
"""


def test_peaks_of_two_allocators_are_no_sum_beyond_what_is_held():
    """A try's first batch lies in PyTorch's allocator, and what comes after install() in ours."""
    assert child(INSTALLED).split() == ["150", "150"]

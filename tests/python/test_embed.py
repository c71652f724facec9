"""Losses over the whole batch: `embed` runs in micro-batches, the loss once."""

import contextlib
import copy
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rebatch.torch as rebatch
from models import FailAt, Unseen, out_of_memory, same_bits, state_of

SAMPLES = 24


class Pair(nn.Module):
    """Two towers, dropout in one of them, and what losses learn themselves."""

    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.left = nn.Sequential(
            nn.Linear(6, 12), nn.Tanh(), nn.Dropout(dropout), nn.Linear(12, 4)
        )
        self.right = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 4))
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.bias = nn.Parameter(torch.tensor(-2.0))


def batch_of(samples=SAMPLES, dtype=torch.float64):
    random = torch.Generator().manual_seed(samples)
    x, y, z = (torch.randn(samples, width, generator=random, dtype=dtype) for width in (6, 5, 5))
    return x, y, z, torch.arange(samples) % 4


def embed(model, samples):
    x, y, _, _ = samples
    return F.normalize(model.left(x), dim=1), F.normalize(model.right(y), dim=1)


def clip(model, embeddings, batch):
    left, right = embeddings
    logits = left @ right.T * model.temperature.exp()
    own = torch.arange(len(logits))
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def siglip(model, embeddings, batch):
    left, right = embeddings
    logits = left @ right.T * model.temperature.exp() + model.bias
    return -F.logsigmoid(logits * (2 * torch.eye(len(logits)) - 1)).sum() / len(logits)


def embed_three(model, samples):
    x, y, z, _ = samples
    return {"query": model.left(x), "right": model.right(y), "hard": model.right(z)}


def ranking(model, embeddings, batch):
    """MultipleNegativesRankingLoss, with a hard negative for each row."""
    answers = torch.cat([embeddings["right"], embeddings["hard"]])
    scores = F.cosine_similarity(embeddings["query"][:, None], answers[None], dim=2) * 20
    return F.cross_entropy(scores, torch.arange(len(scores)))


def triplet(model, embeddings, batch):
    """With the hardest of the batch."""
    rows, labels = embeddings[0], batch[3]
    distances = torch.cdist(rows, rows)
    alike = labels[:, None] == labels
    farthest = distances.masked_fill(~alike, 0).amax(1)
    nearest = distances.masked_fill(alike, torch.inf).amin(1)
    return F.relu(farthest - nearest + 0.2).mean()


def vicreg(model, embeddings, batch):
    left, right = embeddings
    loss = 25 * F.mse_loss(left, right)
    for rows in embeddings:
        centred = rows - rows.mean(0)
        covariance = centred.T @ centred / (len(rows) - 1)
        outside = covariance - covariance.diagonal().diag()
        loss = loss + 25 * F.relu(1 - (rows.var(0) + 1e-4).sqrt()).mean()
        loss = loss + outside.square().sum() / rows.shape[1]
    return loss


LOSSES = {
    "clip": (embed, clip),
    "siglip": (embed, siglip),
    "ranking": (embed_three, ranking),
    "triplet": (embed, triplet),
    "vicreg": (embed, vicreg),
}


def gradients_of(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def uncut(model, embed, loss_fn, batch):
    """The loss of the whole batch, and its gradients."""
    model = copy.deepcopy(model)
    loss = loss_fn(model, embed(model, batch), batch)
    loss.backward()
    return loss.detach(), gradients_of(model)


def backward_of(model, embed=embed, loss_fn=clip, **options):
    options = {"growth": False, "log_level": "quiet", **options}
    return rebatch.Backward(model, loss_fn, embed=embed, **options)


def assert_near(found, expected, tolerance=1e-12):
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def limited(function, largest, passes="both"):
    """An embed with memory for so many samples, in both passes or in the second."""

    def short(model, samples):
        found = function(model, samples)
        if len(samples[0]) > largest and (passes == "both" or torch.is_grad_enabled()):
            out_of_memory(None)
        return found

    return short


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("options", ({}, {"gradients": "inplace"}, {"micro_allowed": [7, 2, 1]}))
def test_gradients_are_those_of_the_uncut_batch(kind, options):
    embed, loss_fn = LOSSES[kind]
    model, batch = Pair().double(), batch_of()
    loss, expected = uncut(model, embed, loss_fn, batch)
    for largest in (24, 11, 7, 1):
        mine = copy.deepcopy(model)
        passes = "both" if largest % 2 else "second"
        backward = backward_of(mine, limited(embed, largest, passes), loss_fn, **options)
        found = backward(batch)
        torch.testing.assert_close(found, loss)
        assert_near(gradients_of(mine), expected)
        assert backward.report.micro <= largest
        torch.testing.assert_close(backward.evaluate(batch), loss)


def test_a_whole_batch_is_embedded_once_and_a_cut_one_twice():
    sizes, graphs, losses = Unseen(), Unseen(), Unseen()

    def noting(model, samples):
        sizes.append(len(samples[0]))
        graphs.append(torch.is_grad_enabled())
        return embed(model, samples)

    def once(model, embeddings, batch):
        losses.append(len(embeddings[0]))
        assert len(batch[0]) == SAMPLES
        return clip(model, embeddings, batch)

    backward_of(Pair().double(), noting, once)(batch_of())
    assert (list(sizes), list(graphs), list(losses)) == ([24], [True], [24])
    for noted in (sizes, graphs, losses):
        noted.clear()
    backward_of(Pair().double(), noting, once, micro_start=10)(batch_of())
    assert list(sizes) == [10, 10, 4] * 2 and list(losses) == [24]
    assert list(graphs) == [False] * 3 + [True] * 3


def trained(fails_at=0, times=1, steps=3, size=SAMPLES, dropout=0.3, **options):
    """(state, losses, mode, Step): an OOM at an operation of the second step."""
    model, batch = Pair(dropout), batch_of(dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = rebatch.Step(
        model, optimizer, clip, embed=embed, growth=False, log_level="quiet", micro_start=size,
        **options,
    )  # fmt: skip
    torch.manual_seed(1)
    losses, mode = [], FailAt(fails_at, times)
    for number in range(steps):
        with mode if number == 1 and fails_at else contextlib.nullcontext():
            losses.append(step(batch))
    return [*state_of(model), torch.random.get_rng_state()], losses, mode, step


@pytest.mark.parametrize("stride", (7, pytest.param(1, marks=pytest.mark.night)))
@pytest.mark.parametrize("options", ({}, {"gradients": "inplace", "clip": 0.5}))
def test_an_oom_at_every_operation_leaves_the_bits_of_a_run_at_that_size(options, stride):
    """With dropout: parts that are embedded again draw the same numbers."""
    _, _, counter, _ = trained(1 << 30, size=12, **options)
    first, _, _, _ = trained(steps=1, size=12, **options)
    known = {}
    for at in range(1, counter.seen + 1, stride):
        try:
            state, losses, mode, step = trained(at, size=12, **options)
        except rebatch.Torn:
            continue
        # The second step at the size to which its OOM led, the others at theirs.
        size = step.report.micro
        if size not in known:
            known[size] = two_sizes(size, **options)
        expected, expected_losses = known[size]
        assert same_bits(state, expected) and same_bits(losses, expected_losses), at
        assert mode.failed == 1
    assert set(known) == {6, 12}
    assert counter.seen > 100


class FailsAtZeros(FailAt):
    """In the n-th operation that makes the place of a loss."""

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if "zeros.default" not in str(function):
            return function(*arguments, **(keywords or {}))
        return super().__torch_dispatch__(function, types, arguments, keywords)


@pytest.mark.parametrize("at", range(1, 7))
def test_an_oom_between_two_parts_begins_with_the_first_pass(at):
    """Before the second pass of a part has begun."""
    model, batch = Pair().double(), batch_of()
    with FailsAtZeros(at) as mode:
        backward_of(model, micro_start=8)(batch)
    assert_near(gradients_of(model), uncut(Pair().double(), embed, clip, batch)[1])
    assert mode.seen >= 3


def two_sizes(size, **options):
    """Three steps, the first with micro-batches of 12 and the others of `size`."""
    model, batch = Pair(0.3), batch_of(dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(1)
    losses = []
    for number in range(3):
        if number < 2:
            step = rebatch.Step(
                model, optimizer, clip, embed=embed, growth=False, log_level="quiet",
                micro_start=size if number else 12, **options,
            )  # fmt: skip
        losses.append(step(batch))
    return [*state_of(model), torch.random.get_rng_state()], losses


def test_random_numbers_of_the_loss_follow_those_of_the_samples():
    """Whole or cut, a batch leaves the generators where they are after both."""

    def drawing(model, embeddings, batch):
        return clip(model, embeddings, batch) * (1 + torch.rand(()))

    found = []
    for size in (24, 7):
        model = Pair(0.5).double()
        model.left[2].eval()
        torch.manual_seed(3)
        loss = backward_of(model, loss_fn=drawing, micro_start=size)(batch_of())
        found.append((loss, torch.random.get_rng_state()))
    torch.testing.assert_close(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("dropout", (0.0, 0.4))
def test_both_passes_draw_the_same_numbers_in_parts_by_cost(dropout):
    """Against the same parts by hand."""
    model, batch = Pair(dropout).double(), batch_of()
    spans = Unseen()

    def noting(model, samples):
        spans.append(len(samples[0]))
        return embed(model, samples)

    def cost(batch, first, count):
        return sum(1 + at % 3 for at in range(first, first + count))

    backward = backward_of(model, limited(noting, 6), clip, cost=cost)
    torch.manual_seed(4)
    backward(batch)
    spans.clear()
    model.zero_grad()
    torch.manual_seed(5)
    backward(batch)
    first, second = split_at(list(spans), SAMPLES)
    assert len(first) > 3 and sum(second) == SAMPLES and (not dropout or first == second)
    other = copy.deepcopy(model)
    other.zero_grad()
    torch.manual_seed(5)
    ends = [0, *torch.tensor(first).cumsum(0).tolist()]
    parts = [embed(other, tuple(t[a:b] for t in batch)) for a, b in zip(ends, ends[1:])]
    clip(other, [torch.cat(rows) for rows in zip(*parts)], batch).backward()
    assert_near(gradients_of(model), gradients_of(other))


def split_at(sizes, samples):
    first = []
    while sum(first) < samples:
        first.append(sizes.pop(0))
    return first, sizes


def test_gradients_are_added_to_those_before_the_batch():
    model, batch = Pair().double(), batch_of()
    _, once = uncut(model, embed, clip, batch)
    backward = backward_of(model, limited(embed, 9))
    for times in (1, 2, 3):
        backward(batch)
        assert_near(gradients_of(model), [times * g if g is not None else g for g in once])


def test_several_batches_are_one_for_the_loss():
    model, batch = Pair().double(), batch_of()
    _, expected = uncut(model, embed, clip, batch)

    def loss_fn(model, embeddings, batches):
        assert [len(one[0]) for one in batches] == [10, 14]
        return clip(model, embeddings, batches)

    batches = list(zip(*(t.split([10, 14]) for t in batch)))
    backward_of(model, limited(embed, 6), loss_fn)(batches=batches)
    assert_near(gradients_of(model), expected)


def test_a_scaler_autocast_and_results_beside_the_loss():
    model, batch = Pair(), batch_of(dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    _, expected = uncut(model, embed, clip, batch)

    def loss_fn(model, embeddings, batch):
        assert torch.is_autocast_enabled("cpu")
        right = (embeddings[0] @ embeddings[1].T).argmax(1) == torch.arange(SAMPLES)
        share = rebatch.Mean(right.float().mean())
        return clip(model, embeddings, batch), {"right": right, "share": share}

    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    step = rebatch.Step(
        model, optimizer, loss_fn, embed=limited(embed, 9), autocast=torch.bfloat16,
        scaler=scaler, log_level="quiet",
    )  # fmt: skip
    step(batch)
    assert step.report.microbatches == 4
    assert_near(gradients_of(model), expected, 0.03)
    assert step.outputs["right"].shape == (SAMPLES,)
    torch.testing.assert_close(step.outputs["share"], step.outputs["right"].float().mean())
    step.evaluate(batch)
    assert step.evaluation_outputs["right"].shape == (SAMPLES,)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


def embed_normed(model, samples):
    return model.body(samples[0])


def spread(model, rows, batch):
    return (rows @ rows.T).square().mean()


def test_buffers_are_updated_once_and_batch_norm_is_named():
    model, batch = Normed(), batch_of(dtype=torch.float32)
    step = rebatch.Step(
        model, torch.optim.SGD(model.parameters(), 0.0), spread, embed=embed_normed,
        micro_start=8, log_level="quiet", growth=False,
    )  # fmt: skip
    other = copy.deepcopy(model)
    step(batch)
    assert model.body[1].num_batches_tracked == 3
    for part in batch[0].split(8):
        other.body(part)
    assert_near(model.buffers(), other.buffers(), 1e-6)
    with pytest.warns(rebatch.CutWarning, match="BatchNorm .'body.1'. normalizes by the statis"):
        for _ in range(5):
            step(batch)
    assert [f.kind for f in step.check(batch).mistakes] == ["batch_norm"]


def test_a_sample_that_is_left_for_batch_norm_joins_its_neighbours_in_both_passes():
    model, batch, sizes = Normed(), batch_of(9, torch.float32), Unseen()
    model.body.append(nn.Dropout(0.2))

    def noting(model, samples):
        sizes.append(len(samples[0]))
        return embed_normed(model, samples)

    backward_of(model, noting, spread, micro_start=2)(batch)
    assert list(sizes) == [2, 2, 2, 3] * 2 and model.body[1].num_batches_tracked == 4


def test_a_queue_that_the_loss_fills_is_filled_once():
    model, batch = Pair().double(), batch_of()
    model.register_buffer("queue", torch.zeros(3, 4).double())

    def loss_fn(model, embeddings, batch):
        model.queue.add_(embeddings[0][:3].detach() + 1)
        return clip(model, embeddings, batch) + model.queue.sum()

    backward_of(model, limited(embed, 7), loss_fn)(batch)
    torch.testing.assert_close(model.queue, embed(model, batch)[0][:3].detach() + 1)


def test_rows_that_depend_on_other_samples_are_told():
    def centred(model, samples):
        rows = model.left(samples[0])
        return rows - rows.mean(0), model.right(samples[1])

    model, batch = Pair().double(), batch_of()
    step = rebatch.Step(
        model, torch.optim.SGD(model.parameters(), 0.0), clip, embed=centred, micro_start=8,
        log_level="quiet", growth=False,
    )  # fmt: skip
    with pytest.warns(rebatch.CutWarning, match="a row depends on the other samples of its micro"):
        for _ in range(5):
            step(batch)
    (found,) = step.check(batch).mistakes
    assert found.kind == "cut" and "compute rows each from its own sample" in found.text


def test_a_right_embed_is_told_nothing_and_checks():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, _, _, step = trained(steps=8, size=7)
        assert not step.check(batch_of(dtype=torch.float32)).mistakes


def test_a_loss_that_does_not_fit_is_named_with_its_size():
    def too_much(model, embeddings, batch):
        out_of_memory(None)

    model = Pair().double()
    backward = backward_of(model, loss_fn=too_much, embed=limited(embed, 16))
    text = r"over the whole batch of 24 samples, which gets embeddings of \(24, 4\), \(24, 4\) and"
    with pytest.raises(rebatch.Exhausted, match=text):
        backward(batch_of())
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(rebatch.Exhausted, match=text):
        backward.evaluate(batch_of())
    left = Unseen(1)

    def once(model, embeddings, batch):
        if left[0]:
            left[0] -= 1
            out_of_memory(None)
        return clip(model, embeddings, batch)

    backward.loss_fn = once
    backward(batch_of())
    assert_near(gradients_of(model), uncut(Pair().double(), embed, clip, batch_of())[1])


def fewer(model, samples):
    return model.left(samples[0])[:-1]


def detached(model, samples):
    return tuple(rows.detach() for rows in embed(model, samples))


def nested(model, samples):
    return torch.nested.nested_tensor(list(samples[0]), layout=torch.jagged)


def other_widths(model, samples):
    return model.left(samples[0]), model.right(samples[1])[:, : len(samples[0]) // 4]


WRONG = {
    "a tensor of shape (%d, 4) for %d samples: expected a tensor, or a tuple": (fewer, clip),
    "embed returned a float for": (lambda model, samples: 1.0, clip),
    "embed returned a NoneType for": (lambda model, samples: [], clip),
    "no tensor of embed gets a gradient: expected one that depends": (detached, clip),
    "without detach() or torch.no_grad(), and a loss_fn that uses it": (
        embed,
        lambda model, embeddings, batch: clip(model, embed(model, batch), batch),
    ),
    "embed returned a nested tensor for": (nested, clip),
    "of shape () for": (lambda model, samples: (model.left(samples[0]), model.bias.exp()), clip),
    "loss_fn returned a tensor of shape (24,): expected a scalar tensor, the loss of the whole": (
        embed,
        lambda model, embeddings, batch: embeddings[0].sum(1),
    ),
    "the loss of loss_fn needs no gradient": (
        embed,
        lambda model, embeddings, batch: embeddings[0].sum().detach(),
    ),
}


def left_in_the_model(model):
    model.balance = model.left[0].weight.square().mean()


def left_in_a_dict_of_the_model(model):
    model.left_by = {"balance": [model.left[0].weight.square().mean()]}


def left_in_a_list(model):
    LEFT[:] = [model.left[0].weight.square().mean()]


LEFT = []
WAYS_OUT = {
    left_in_the_model: lambda model: model.balance,
    left_in_a_dict_of_the_model: lambda model: model.left_by["balance"][0],
    left_in_a_list: lambda model: LEFT[0],
}


@pytest.mark.parametrize("from_batch", (0, 2))
@pytest.mark.parametrize("leave", WAYS_OUT)
def test_what_embed_has_made_and_not_returned_is_refused_in_a_loss(leave, from_batch):
    """Else a loss that balances experts would train until the first OOM, and end or be another."""
    number = [0]

    def leaving(model, samples):
        leave(model)
        return embed(model, samples)

    def loss_fn(model, embeddings, batch):
        number[0] += 1
        left = WAYS_OUT[leave](model) if number[0] > from_batch else 0.0
        return clip(model, embeddings, batch) + left

    backward = backward_of(Pair().double(), leaving, loss_fn)
    for _ in range(from_batch):
        backward(batch_of())
    with pytest.raises(ValueError, match="that embed has made and not returned"):
        backward(batch_of())


def test_a_loss_that_changes_rows_in_place_or_uses_a_row_of_another_is_none_of_these():
    def both(model, samples):
        left, right = embed(model, samples)
        return left, right, left * 2

    def loss_fn(model, rows, batch):
        rows[0].mul_(0.5)
        return clip(model, rows[:2], batch) + rows[2].mean() + model.left[0].weight.square().mean()

    backward = backward_of(Pair().double(), both, loss_fn)
    for _ in range(2):
        backward(batch_of())
    assert backward.report.microbatches == 1


@pytest.mark.parametrize("size", (24, 10))
@pytest.mark.parametrize("text", WRONG)
def test_a_mistake_is_one_sentence(text, size):
    embed, loss_fn = WRONG[text]
    with pytest.raises(ValueError) as raised:
        backward_of(Pair().double(), embed, loss_fn, micro_start=size)(batch_of())
    said = text % (size - 1, size) if "%d" in text else text
    assert said in str(raised.value) and str(raised.value).startswith("rebatch: ")


def test_rows_of_other_shapes_cannot_be_joined():
    with pytest.raises(ValueError, match="cannot be joined .*: expected one shape but for the r"):
        backward_of(Pair().double(), other_widths, micro_start=13)(batch_of())


def test_what_does_not_go_with_embed_is_refused():
    model = Pair().double()
    for options, text in (
        ({"normalizer": len}, "normalizer is given beside embed"),
        ({"graphs": True}, "graphs is given beside embed"),
        ({"embed": 3}, "embed is 3: expected a function"),
    ):
        with pytest.raises((ValueError, TypeError), match=text):
            backward_of(model, **{"embed": embed, **options})
    with pytest.raises(TypeError, match=r"expected loss_fn\(model, embeddings, batch\)"):
        backward_of(model, loss_fn=lambda model, samples: 0)
    with pytest.raises(ValueError, match="parts.. runs a block for some samples at a time"):
        next(iter(backward_of(model).parts(batch_of())))


def pairs_alike(model, embeddings, batch):
    rows = embeddings[0]
    return (rows @ rows.conj().T).abs().mean() + embeddings[1].square().mean()


def complex_rows(model, samples):
    return torch.complex(model.left(samples[0]), model.right(samples[1])), model.left(samples[0])


def in_place(model, embeddings, batch):
    rows = embeddings[0]
    rows *= model.temperature.exp()
    rows += model.bias
    return F.cross_entropy(rows @ embeddings[1].T, torch.arange(len(rows)))


@pytest.mark.parametrize("embed, loss_fn", ((complex_rows, pairs_alike), (embed, in_place)))
def test_rows_that_are_complex_or_changed_in_place_have_the_uncut_gradients(embed, loss_fn):
    model, batch = Pair().double(), batch_of()
    loss, expected = uncut(model, embed, loss_fn, batch)
    for size in (24, 7):
        mine = copy.deepcopy(model)
        torch.testing.assert_close(backward_of(mine, embed, loss_fn, micro_start=size)(batch), loss)
        assert_near(gradients_of(mine), expected)
    rebatch.Backward(model, loss_fn, embed=embed, log_level="quiet").check(batch)


def test_rows_are_copied_out_of_what_embed_keeps_or_writes_again():
    """A row of a longer state would hold all of it, and a buffer has the rows of the last part."""
    model, batch, buffer = Pair().double(), batch_of(), torch.zeros(SAMPLES, 4).double()
    model.left.requires_grad_(False)
    held, most = Unseen(), Unseen(0)

    def first_tokens(model, samples):
        states = model.right(samples[1])[:, None].repeat(1, 50, 1)
        held.append(weakref.ref(states.untyped_storage()))
        most[0] = max(most[0], sum(storage() is not None for storage in held))
        buffer[: len(samples[0])] = model.left(samples[0])
        return buffer[: len(samples[0])], states[:, 0]

    loss, expected = uncut(model, first_tokens, clip, batch)
    held.clear()
    most[0] = 0
    backward = backward_of(model, first_tokens, clip, micro_start=4)
    torch.testing.assert_close(backward(batch), loss)
    assert_near(gradients_of(model), expected)
    torch.testing.assert_close(backward.evaluate(batch), loss)
    assert most[0] == 1


def told(embed, loss_fn, model=None, steps=5, **options):
    """What a Backward warns of in cut batches."""
    backward = backward_of(model or Pair().double(), embed, loss_fn, micro_start=8, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            backward(batch_of())
    return [str(w.message) for w in caught]


def numbered(model, samples):
    """Labels of a micro-batch, where loss_fn takes them for those of the batch."""
    return *embed(model, samples), torch.arange(len(samples[0]))


def by_number(model, embeddings, batch):
    return F.cross_entropy(embeddings[0] @ embeddings[1].T, embeddings[2])


def sorted_rows(model, samples):
    order = samples[0][:, 0].argsort()
    return *embed(model, tuple(t[order] for t in samples)), order.double()


def in_order(model, embeddings, batch):
    left, right, order = embeddings
    return clip(model, (left[order.argsort()], right), batch)


@pytest.mark.parametrize("embed, loss_fn", ((numbered, by_number), (sorted_rows, in_order)))
def test_rows_without_a_gradient_that_depend_on_other_samples_are_told(embed, loss_fn):
    (said,) = told(embed, loss_fn)
    assert "a row depends on the other samples of its micro-batch" in said
    assert "compares or numbers samples in loss_fn" in said


def test_labels_and_frozen_rows_are_told_nothing():
    def with_labels(model, samples):
        left, right = embed(model, samples)
        return left, right.detach(), samples[3], samples[3].double(), left[:, :0]

    assert not told(with_labels, lambda model, rows, batch: clip(model, rows[:2], batch))


def test_passes_whose_rows_differ_are_told():
    """The gradients would be those of rows that are in no loss."""
    random, calls = torch.Generator(), torch.zeros(())

    def drawing(model, samples):
        left, right = embed(model, samples)
        return left + 0.3 * torch.randn(left.shape, generator=random), right

    def counting(model, samples):
        calls.add_(1)
        left, right = embed(model, samples)
        return left * calls, right

    def without_graph(model, samples):
        left, right = embed(model, samples)
        return (left if torch.is_grad_enabled() else 0.9 * left), right

    for wrong in (drawing, counting, without_graph):
        said = told(wrong, clip)[0]
        assert "embed made other rows of the same samples in its second pass, by " in said
        assert "generators=[...]" in said
    assert not told(drawing, clip, generators=[random])
    assert not any("second pass" in said for said in told(counting, clip, state=[calls]))
    for silent in (clip, in_place):
        assert not told(embed, silent, Pair(0.3).double())


def test_rounding_to_16_bits_in_one_pass_is_told_nothing():
    """As a compiler rounds, which makes another kernel for each."""

    def rounded(model, samples):
        with torch.autocast("cpu", torch.bfloat16):
            left, right = embed(model, samples)
        exact = embed(model, samples)[0]
        return (left.float() if torch.is_grad_enabled() else exact), right.float()

    backward = backward_of(Pair(), rounded, clip, micro_start=8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            backward(batch_of(dtype=torch.float32))


class NormedLoss(Pair):
    """As in Barlow Twins."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4, affine=False)


def barlow(model, embeddings, batch):
    left, right = map(model.norm, embeddings)
    return (left.T @ right / len(left) - torch.eye(4)).square().sum()


def test_batch_norm_that_the_loss_runs_has_the_whole_batch_and_is_not_named():
    model = NormedLoss().double()
    assert not told(embed, barlow, model)
    assert backward_of(model, embed, barlow).check(batch_of())


class Momentum(Pair):
    """Keys of an average of the weights, which moves once a batch."""

    def __init__(self):
        super().__init__()
        self.key = copy.deepcopy(self.right).requires_grad_(False)
        self.key[0].bias.data += 1

    def move(self):
        for mine, own in zip(self.key.parameters(), self.right.parameters()):
            mine.data.lerp_(own.data, 0.5)


def keys_of(model, samples):
    return model.left(samples[0]), model.key(samples[1]).detach()


def moved_keys(model, samples):
    model.move()
    return keys_of(model, samples)


def moving(model, embeddings, batch):
    model.move()
    return clip(model, embeddings, batch)


def test_an_average_that_the_loss_moves_is_no_mistake_and_in_embed_it_is_one():
    assert backward_of(Momentum().double(), keys_of, moving).check(batch_of())
    (found,) = backward_of(Momentum().double(), moved_keys, clip).check(batch_of()).mistakes
    assert "and 'key.0.bias' is not the same: " in found.text


def test_what_the_loss_takes_out_of_the_batch_is_there_again_after_an_oom():
    model, left = Pair().double(), Unseen(1)
    batch = {"fields": list(batch_of()), "labels": batch_of()[3]}

    def taking(model, embeddings, batch):
        labels = batch.pop("labels")
        batch["fields"].clear()
        if left[0]:
            left[0] -= 1
            out_of_memory(None)
        return clip(model, embeddings, batch) * (1 + labels.sum())

    def embed_fields(model, samples):
        return embed(model, samples["fields"])

    backward = backward_of(model, embed_fields, taking, micro_start=7)
    loss = backward(batch)
    assert not left[0] and "labels" in batch and len(batch["fields"]) == 4
    torch.testing.assert_close(backward.evaluate(batch), loss)


def test_an_embed_that_needs_a_graph_is_told_what_to_write():
    def of_gradients(model, samples):
        x = samples[0].clone().requires_grad_()
        rows = model.left(x)
        (slopes,) = torch.autograd.grad(rows.sum(), x, create_graph=True)
        return rows + slopes.sum(1, keepdim=True), model.right(samples[1])

    backward = backward_of(Pair().double(), of_gradients, clip, micro_start=7)
    with pytest.raises(RuntimeError, match="does not require grad") as raised:
        backward(batch_of())
    (note,) = raised.value.__notes__
    assert "first pass" in note and "expected `with torch.enable_grad():`" in note

    def with_graph(model, samples):
        with torch.enable_grad():
            return of_gradients(model, samples)

    model = Pair().double()
    backward_of(model, with_graph, clip, micro_start=7)(batch_of())
    assert_near(gradients_of(model), uncut(Pair().double(), with_graph, clip, batch_of())[1])

"""map() and evaluate(): every sample once, in order, whatever memory allows."""

import collections
import re
import warnings

import pytest
import torch

import rebatch.torch as rebatch
from rebatch.testing import fail_once
from models import fails_above, make, out_of_memory, same_bits, state_of

Output = collections.namedtuple("Output", "logits hidden")


class Limited(torch.nn.Module):
    """Doubles its inputs, at most `largest` at a time."""

    def __init__(self, largest, form=lambda y: y):
        super().__init__()
        self.largest, self.form = largest, form
        self.calls = collections.UserList()  # no state that is put back

    def forward(self, x):
        self.calls.append(len(x))
        if len(x) > self.largest:
            out_of_memory(None)
        return self.form(2 * x)


X = torch.arange(10.0)


@pytest.mark.parametrize(
    "form, get",
    (
        (lambda y: y, lambda r: r),
        (lambda y: (y, y + 1), lambda r: r[0]),
        (lambda y: {"logits": y, "none": None}, lambda r: r["logits"]),
        (lambda y: Output(y, y), lambda r: r.logits),
        (lambda y: y.tolist(), torch.tensor),
    ),
)
def test_results_are_joined(form, get):
    assert torch.equal(get(rebatch.map(Limited(3, form), X)), 2 * X)


def test_the_size_is_kept_for_the_model():
    model = Limited(5)
    rebatch.map(model, X)
    model.calls.clear()
    rebatch.map(model, X)
    assert model.calls == [5, 5]


def test_no_gradient_is_recorded():
    model = torch.nn.Linear(1, 1)
    assert not rebatch.map(model, X[:, None]).requires_grad


def test_one_sample_that_does_not_fit_is_the_end():
    with pytest.raises(rebatch.Exhausted, match="out of memory in map of 1 sample"):
        rebatch.map(Limited(0), X)


@pytest.mark.parametrize("call", ("map", "evaluate"))
def test_one_within_another_is_refused_by_the_names_that_users_call(call):
    model = torch.nn.Linear(8, 1)
    batch = torch.randn(16, 8)

    def loss_fn(model, samples):
        step.evaluate(samples)

    step = rebatch.Step(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn)
    with pytest.raises(rebatch.Error, match=r"^rebatch.map\(\) or step.evaluate\(\) was called"):
        if call == "map":
            rebatch.map(lambda x: rebatch.map(model, x), batch)
        else:
            step(batch)


def test_an_exception_comes_out():
    def broken(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        rebatch.map(broken, X)


def test_a_scalar_result_is_said():
    with pytest.raises(ValueError, match="returned a scalar"):
        rebatch.map(lambda x: x.sum(), X)


def test_no_result_and_no_inputs_are_said():
    with pytest.raises(ValueError, match="the model returned None: expected tensors"):
        rebatch.map(lambda x: None, X)
    with pytest.raises(ValueError, match="lists or tuples of them$"):  # map() has no `slice`
        rebatch.map(lambda x: x, "text")


# ---- the dimension of the samples ----


class Recurrent(torch.nn.Module):
    """Returns (batch x time x hidden, layers x batch x hidden), as nn.GRU does."""

    def __init__(self, largest, batch_first=True, hidden=8):
        super().__init__()
        torch.manual_seed(0)
        self.gru = torch.nn.GRU(8, hidden, batch_first=batch_first)
        self.dim, self.largest = 0 if batch_first else 1, largest
        self.calls = collections.UserList()

    def forward(self, x):
        self.calls.append(x.shape[self.dim])
        if x.shape[self.dim] > self.largest:
            out_of_memory(None)
        return self.gru(x)


@pytest.mark.parametrize("largest", (12, 8, 5, 3))
def test_each_result_is_joined_along_its_samples(largest):
    model, x = Recurrent(largest), torch.randn(12, 5, 8)
    expected = model.gru(x)
    for got, right in zip(rebatch.map(model, x), expected):
        assert got.shape == right.shape and torch.allclose(got, right, atol=1e-6)


def test_a_dimension_that_is_as_long_by_chance_is_told_apart():
    """Micro-batches of 8 of 16 samples, and 8 hidden units: one sample runs once more."""
    model, x = Recurrent(8), torch.randn(16, 8, 8)
    expected = model.gru(x)
    for got, right in zip(rebatch.map(model, x), expected):
        assert got.shape == right.shape and torch.allclose(got, right, atol=1e-6)
    assert model.calls[:4] == [16, 8, 8, 1]


def test_samples_of_one_need_to_be_told():
    model, x = Recurrent(1), torch.randn(3, 5, 8)
    with pytest.raises(ValueError, match=r"result\[1\] for 1 samples, whose dimensions 0 and 1"):
        rebatch.map(model, x)
    column = Limited(1, lambda y: y[:, None])
    with pytest.raises(ValueError, match="expected batch_dim, which says it"):
        rebatch.map(column, X)
    assert torch.equal(rebatch.map(column, X, batch_dim=0), 2 * X[:, None])


@pytest.mark.parametrize("largest", (12, 5, 1))
def test_batch_dim_cuts_and_joins(largest):
    model, x = Recurrent(largest, batch_first=False), torch.randn(5, 12, 8)
    expected = model.gru(x)
    for got, right in zip(rebatch.Map(model, batch_dim=1)(x), expected):
        assert got.shape == right.shape and torch.allclose(got, right, atol=1e-6)


@pytest.mark.parametrize("largest", (10, 5))
def test_a_result_without_a_dimension_of_the_samples_is_refused_at_once(largest):
    with pytest.raises(ValueError, match=r"of shape \(3,\) for \d+ samples: expected a dimension"):
        rebatch.map(Limited(largest, lambda y: y.mean()[None].expand(3)), X)
    with pytest.raises(ValueError, match=r"list of 3 in its result\['a'\] for \d+ samples"):
        rebatch.map(Limited(largest, lambda y: {"a": [1, 2, 3]}), X)


def test_a_matrix_over_pairs_of_samples_is_refused_once_it_is_cut():
    pairs = Limited(10, lambda y: y[:, None] * y)
    assert rebatch.map(pairs, X).shape == (10, 10)
    pairs.largest = 5
    with pytest.raises(ValueError, match=r"shape \(5, 5\).* dimensions 0 and 1 may both"):
        rebatch.map(pairs, X)


def test_lists_of_results_and_what_is_none():
    two = rebatch.map(Limited(3, lambda y: [y, y + 1]), X)
    assert len(two) == 2 and torch.equal(two[1], 2 * X + 1)
    assert rebatch.map(Limited(3, lambda y: (y, None)), X)[1] is None
    rows = rebatch.map(Limited(3, lambda y: [v[None] for v in y]), X)
    assert len(rows) == 10 and rows[3] == 6


# ---- the report ----


def test_a_map_reports_what_a_call_did():
    double = rebatch.Map(Limited(5))
    assert double.report == rebatch.MapReport()
    assert torch.equal(double(X), 2 * X)
    report = double.report
    assert (report.samples, report.micro, report.microbatches) == (10, 5, 2)
    assert (report.ooms, report.redone_samples) == (1, 10)
    assert re.fullmatch(
        r"2 x 5 samples, 1 OOM \(10 samples again, at least \d+ ms lost\)", str(report)
    )
    double(X)
    assert double.report.ooms == 0 and str(double.report) == "2 x 5 samples"


def test_a_map_has_the_size_that_map_found():
    model = Limited(5)
    rebatch.map(model, X)
    double = rebatch.Map(model)
    double(X)
    assert double.report.ooms == 0 and double.report.micro == 5


def test_a_map_that_fails_reports_too():
    double = rebatch.Map(Limited(0))
    with pytest.raises(rebatch.Exhausted):
        double(X)
    # 10, 5, 2, 1, and 1 once more
    assert double.report.ooms == 5 and double.report.samples == 10 and double.report.micro == 0
    with pytest.raises(TypeError, match="model is 'net': expected a function"):
        rebatch.Map("net")


def test_an_oom_is_said(capfd):
    rebatch.map(Limited(5), X)
    assert "micro-batch 10 -> 5; 10 samples again" in capfd.readouterr().err


def test_evaluate_leaves_a_report_of_its_own():
    model, batch, loss_fn = make("mlp")
    step = rebatch.Step(
        model, torch.optim.SGD(model.parameters(), 0.1), fails_above(loss_fn, 4), log_level="quiet"
    )
    assert step.evaluation_report == rebatch.MapReport()
    step.evaluate(batch)
    report = step.evaluation_report
    assert (report.samples, report.micro, report.microbatches, report.ooms) == (16, 4, 4, 2)
    assert step.report == rebatch.Report()  # of training


def test_evaluate_gives_the_loss_and_trains_nothing():
    model, batch, loss_fn = make("conv")
    before = state_of(model)
    expected = loss_fn(model.eval(), batch).detach()
    model.train()
    step = rebatch.Step(
        model, torch.optim.SGD(model.parameters(), 0.1), fails_above(loss_fn, 4), log_level="quiet"
    )
    assert torch.allclose(step.evaluate(batch), expected)
    assert same_bits(state_of(model), before) and model.training


def test_evaluate_divides_by_the_normalizer():
    model, batch, _ = make("mlp")
    model.eval()
    step = rebatch.Step(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        lambda m, s: ((m(s[0]) - s[1]) ** 2).sum(),
        normalizer=lambda b: 8.0,
    )
    expected = ((model(batch[0]) - batch[1]) ** 2).sum() / 8
    assert torch.allclose(step.evaluate(batch), expected.detach())


# ---- joining what the parts have returned ----


class FailsToJoin:
    """torch.cat runs out of memory so many times."""

    def __init__(self, monkeypatch, times):
        self.left, self.plain, self.calls = times, torch.cat, 0
        monkeypatch.setattr(torch, "cat", self)

    def __call__(self, tensors, dim=0):
        self.calls += 1
        if self.left:
            self.left -= 1
            out_of_memory(None)
        return self.plain(tensors, dim)


@pytest.mark.parametrize("times", (1, 2))
def test_an_oom_while_results_are_joined_loses_nothing(monkeypatch, times):
    Both = collections.namedtuple("Both", "a b")
    model = Limited(3, lambda y: {"x": y, "both": Both(y + 1, [y + 2, None, None])})
    expected = rebatch.map(Limited(10, model.form), X)
    cat, calls = FailsToJoin(monkeypatch, times), model.calls
    got = rebatch.map(model, X)
    assert cat.calls >= times + 3 and calls[:7] == [10, 5, 2, 2, 2, 2, 2]
    assert torch.equal(got["x"], expected["x"]) and type(got["both"]) is Both
    assert torch.equal(got["both"].a, expected["both"].a)
    assert torch.equal(got["both"].b[0], expected["both"].b[0]) and got["both"].b[1] is None


def test_no_memory_for_the_joined_results_anywhere_is_one_sentence(monkeypatch):
    FailsToJoin(monkeypatch, -1)
    with pytest.raises(rebatch.Exhausted, match="where the results of 5 parts are joined"):
        rebatch.map(Limited(3), X)


@pytest.mark.parametrize("times", (1, 2))
@pytest.mark.parametrize("normalizer", (None, lambda batch: 3.0))
def test_an_oom_while_outputs_are_joined_loses_nothing(monkeypatch, times, normalizer):
    model, batch, _ = make("mlp")
    model.eval()

    def loss_fn(model, samples):
        out = model(samples[0])
        loss = ((out - samples[1]) ** 2).sum() if normalizer else ((out - samples[1]) ** 2).mean()
        return loss, {"out": out, "sum": rebatch.Sum(out.sum())}

    step = rebatch.Step(
        model,
        torch.optim.SGD(model.parameters(), 0.0),
        fails_above(loss_fn, 4),
        log_level="quiet",
        normalizer=normalizer,
    )
    expected = step.evaluate(batch), step.evaluation_outputs
    for run, outputs in ((step, "outputs"), (step.evaluate, "evaluation_outputs")):
        cat = FailsToJoin(monkeypatch, times)
        assert torch.allclose(run(batch), expected[0])
        assert torch.equal(getattr(step, outputs)["out"], expected[1]["out"])
        assert torch.allclose(getattr(step, outputs)["sum"], expected[1]["sum"])
        assert cat.left == 0
    assert step.report.redone_samples == 24  # 16 and 8, and none because of the outputs


# ---- what a failed call has changed ----


class Moving(torch.nn.Module):
    """In training mode: BatchNorm, a counter and a list move in each call, before memory is out."""

    def __init__(self):
        super().__init__()
        self.norm, self.calls, self.seen = torch.nn.BatchNorm1d(2), 0, [[]]
        self.largest = 8

    def forward(self, x):
        y = self.norm(x)
        self.calls += 1
        self.seen[0].append(len(x))
        if len(x) > self.largest:
            out_of_memory(None)
        return y


@pytest.mark.parametrize(
    "use",
    (lambda m: m, lambda m: lambda x: m(x), lambda m: m.forward),
    ids=("module", "function", "method"),
)
def test_what_a_model_in_training_mode_holds_is_as_without_ooms(use):
    x, model, plain = torch.randn(16, 2), Moving(), Moving()
    for part in x.split(8):
        plain(part)
    rebatch.map(use(model), x)
    assert same_bits(state_of(model), state_of(plain))
    assert model.calls == 2 and model.seen == [[8, 8]]


@pytest.mark.parametrize("use", (lambda m: m, lambda m: lambda x: m(x)))
@pytest.mark.parametrize(
    "mode, is_told", (("train", True), ("eval", False), ("without statistics", True))
)
def test_batch_norm_of_a_micro_batch_is_told_once(use, mode, is_told):
    norm = torch.nn.BatchNorm1d(2, track_running_stats=mode != "without statistics")
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), norm, torch.nn.Identity())
    model.train(mode == "train")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rebatch.map(use(model), torch.randn(16, 2))
        assert not caught
        with fail_once(model[2]):
            rebatch.map(use(model), torch.randn(16, 2))
        rebatch.map(use(model), torch.randn(16, 2)[:15])
        rebatch.map(use(model), torch.randn(64, 2))
    texts = [str(w.message) for w in caught if "BatchNorm1d normalizes by" in str(w.message)]
    assert len(texts) == is_told and len(caught) == len(texts)


def test_a_map_that_fails_leaves_the_model_as_it_was():
    model = Moving()
    before, model.largest = state_of(model), 0
    with pytest.raises(rebatch.Exhausted):
        rebatch.map(model, torch.randn(4, 2, 3))
    assert same_bits(state_of(model), before) and model.calls == 0 and model.seen == [[]]


def test_inputs_that_a_failed_call_has_changed_are_named():
    def double(x):
        x.mul_(2)
        if len(x) > 4:
            out_of_memory(None)
        return x.clone()

    with pytest.raises(rebatch.Error, match="'batch' changed in place in an attempt that failed"):
        rebatch.map(double, torch.ones(8))

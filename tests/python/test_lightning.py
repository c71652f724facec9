"""rebatch.lightning.Rebatch: training is that of a plain Trainer, and survives OOMs."""

import logging
import re
import warnings

import pytest
import torch

pytest.importorskip("lightning")
import lightning.pytorch as pl
import torchmetrics
from lightning.pytorch.loggers.logger import Logger

import rebatch.lightning
from rebatch.testing import fail_once
from models import FailAt, HalfStep, Mlp, out_of_memory, same_bits, state_of

SAMPLES = 16
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


class Lines(Logger):
    """Keeps what is logged."""

    name = version = "lines"

    def __init__(self):
        super().__init__()
        self.lines = []

    def log_metrics(self, metrics, step=None):
        self.lines.append((step, dict(metrics)))

    def log_hyperparams(self, *_):
        pass

    def values(self, name):
        return [line[name] for _, line in self.lines if name in line]


class Net(pl.LightningModule):
    """A regression that runs out of memory for more samples than `largest`."""

    def __init__(self, largest=SAMPLES, where="forward", returns="loss"):
        super().__init__()
        self.net = Mlp()
        self.error = torchmetrics.MeanSquaredError()
        self.largest, self.where, self.returns = largest, where, returns
        self.hooks, self.ends, self.sizes = [], [], []  # of attempts that succeeded

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.sizes.append(len(x))
        if self.where == "forward" and len(x) > self.largest:
            out_of_memory(None)
        predicted = self.net(x)
        loss = ((predicted - y) ** 2).mean()
        self.error.update(predicted.detach(), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("error", self.error, on_step=False, on_epoch=True)
        self.log("count", float(len(x)), reduce_fx="sum", on_step=True, on_epoch=True)
        if self.where == "backward" and len(x) > self.largest:
            loss.register_hook(out_of_memory)
        if self.returns == "loss":
            return loss
        return {"loss": loss, "predicted": predicted, "mean": predicted.mean(), "names": "a"}

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def on_before_optimizer_step(self, optimizer):
        self.hooks.append("on_before_optimizer_step")

    def on_before_zero_grad(self, optimizer):
        self.hooks.append("on_before_zero_grad")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.ends.append(outputs)


def batches(count=4):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count * SAMPLES, 8, generator=generator)
    y = torch.randn(count * SAMPLES, generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=SAMPLES)


QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "log_every_n_steps": 1,
}


def fit(module, callback, package=pl, epochs=2, fit_options=None, **options):
    logger = Lines()
    options = {**QUIET, "logger": logger, "max_epochs": epochs, **options}
    trainer = package.Trainer(callbacks=callback and [callback], **options)
    trainer.fit(module, batches(), **(fit_options or {}))
    return trainer, logger


def train(largest=SAMPLES, where="forward", returns="loss", step_options=None, **options):
    """(LightningModule, Rebatch, logger); step_options None: without Rebatch."""
    torch.manual_seed(0)
    module = Net(largest, where, returns)
    callback = None
    if step_options is not None:
        step_options = {"log_level": "quiet", "growth": False, **step_options}
        callback = rebatch.lightning.Rebatch(**step_options)
    trainer, logger = fit(module, callback, **options)
    module.lr = trainer.optimizers[0].param_groups[0]["lr"]
    return module, callback, logger


TRAINERS = (
    {},
    {"precision": "16-mixed"},
    {"precision": "bf16-mixed"},
    {"gradient_clip_val": 0.1},
    {"accumulate_grad_batches": 2},
    {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1, "precision": "16-mixed"},
)


@pytest.mark.parametrize("options", TRAINERS, ids=str)
def test_without_an_oom_training_is_that_of_a_plain_trainer(options):
    module, _, logger = train(step_options={}, **options)
    plain, _, plain_logger = train(**options)
    assert same_bits(state_of(module), state_of(plain))
    assert module.hooks == plain.hooks and module.lr == plain.lr
    for name in ("loss_step", "loss_epoch", "error", "count_step", "count_epoch"):
        assert logger.values(name) == plain_logger.values(name)
    assert [step for step, line in logger.lines if "loss_step" in line] == [
        step for step, line in plain_logger.lines if "loss_step" in line
    ]


@pytest.mark.parametrize("where", ("forward", "backward"))
@pytest.mark.parametrize("options", TRAINERS, ids=str)
def test_an_oom_leads_to_the_bits_of_a_run_that_started_smaller(options, where):
    module, callback, logger = train(5, where, step_options={}, **options)
    expected, _, expected_logger = train(step_options={"micro_start": 4}, **options)
    assert same_bits(state_of(module), state_of(expected))
    assert module.hooks == expected.hooks and module.lr == expected.lr
    assert callback.report.micro == 4 and set(module.sizes) == {4}
    for name in ("loss_step", "loss_epoch", "error", "count_step", "count_epoch"):
        assert logger.values(name) == expected_logger.values(name)


def test_every_operation_of_a_batch_may_fail(monkeypatch):
    class FailsIn(rebatch.lightning.TrainerBackward):
        mode = FailAt(0)

        def __call__(self, batch):
            with self.mode:
                return super().__call__(batch)

    def run(n):
        torch.manual_seed(0)
        FailsIn.mode = FailAt(n)
        module = Net()
        callback = rebatch.lightning.Rebatch(
            log_level="quiet", lighten=lambda on: None, micro_start=8, micro_smallest=8
        )
        _, logger = fit(module, callback, epochs=1, limit_train_batches=1)
        return state_of(module), logger.values("error"), FailsIn.mode.failed

    monkeypatch.setattr(rebatch.lightning, "TrainerBackward", FailsIn)
    expected, error, _ = run(0)
    failures = 0
    for n in range(1, 80, 2):
        state, its_error, failed = run(n)
        failures += failed
        assert same_bits(state, expected) and its_error == error, f"operation {n}"
    assert failures > 25


def clipped(monkeypatch, clip=None, **options):
    """A training in which `clip` is called in the place of clip_grad_norm_."""
    if clip:
        monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
    options = {"gradient_clip_val": 0.1, "epochs": 1, "step_options": {"micro_start": 4}, **options}
    module, _, _ = train(**options)
    monkeypatch.undo()
    return state_of(module)


@pytest.mark.parametrize("precision", ("32-true", "16-mixed"))
def test_every_operation_of_clipping_may_fail(monkeypatch, precision):
    plain, options = torch.nn.utils.clip_grad_norm_, {"precision": precision}
    expected, failures = clipped(monkeypatch, **options), 0
    for n in range(1, 9):
        mode = FailAt(n)

        def clip(*arguments):
            with mode:
                return plain(*arguments)

        state = clipped(monkeypatch, clip, **options)
        failures += mode.failed
        assert same_bits(state, expected), f"operation {n}"
    assert failures > 5


@pytest.mark.parametrize("changes, calls", (("in place", 1), ("anew", 1), ("none", 2)))
def test_clipping_is_tried_once_more_where_no_gradient_was_changed(monkeypatch, changes, calls):
    tried, before = [], []

    def clip(parameters, _norm):
        parameters = list(parameters)
        tried.append(1)
        before[:] = state_of(module)
        if changes == "in place":
            parameters[-1].grad.mul_(0.5)
        if changes == "anew":
            parameters[-1].grad = parameters[-1].grad * 0.5
        out_of_memory(None)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
    module = Net()
    with pytest.raises(rebatch.torch.Exhausted, match="(?s)gradients were clipped.*2.00 GiB"):
        fit(module, rebatch.lightning.Rebatch(log_level="quiet"), gradient_clip_val=0.1)
    assert len(tried) == calls and same_bits(state_of(module), before)


@pytest.mark.parametrize("precision", ("32-true", "16-mixed"))
def test_an_oom_within_the_optimizers_step_is_torn(precision):
    module = Net()
    module.configure_optimizers = lambda: HalfStep(module.parameters(), 0.1)
    with pytest.raises(rebatch.torch.Torn, match="restore a checkpoint"):
        fit(module, rebatch.lightning.Rebatch(log_level="quiet"), precision=precision)
    assert module._trainer.optimizers[0].calls == 1


def test_an_oom_in_a_hook_before_the_update_comes_out_unchanged():
    module = Net()
    module.on_before_optimizer_step = out_of_memory
    with pytest.raises(torch.OutOfMemoryError, match="^CUDA out of memory"):
        fit(module, rebatch.lightning.Rebatch(log_level="quiet"))


def test_the_precision_plugin_is_put_back():
    trainer, _ = fit(Net(), rebatch.lightning.Rebatch(log_level="quiet"))
    assert not set(rebatch.lightning._OF_THE_UPDATE) & set(vars(trainer.precision_plugin))


def test_what_is_logged_does_not_depend_on_the_cut():
    whole = train(step_options={})[2]
    for micro in (5, 8):
        cut = train(step_options={"micro_start": micro})[2]
        assert cut.values("count_step") == [16.0] * 8 and cut.values("count_epoch") == [64.0] * 2
        # Dropout draws other numbers for other micro-batches.
        assert cut.values("loss_epoch") == pytest.approx(whole.values("loss_epoch"), rel=0.2)
        assert cut.values("loss_epoch") == pytest.approx(cut.values("error"))


def test_the_report_is_logged():
    _, callback, logger = train(4, step_options={})
    assert logger.values("rebatch/micro") == [4.0] * 8
    assert logger.values("rebatch/ooms_total") == [2.0] * 8 and callback.report.ooms == 0


@pytest.mark.parametrize("is_whole", (False, True))
def test_all_numbers_are_logged_on_request(is_whole):
    _, callback, logger = train(4, step_options={"log_report": True} if is_whole else {})
    keys = {name for _, line in logger.lines for name in line if name.startswith("rebatch/")}
    every = set(callback.numbers())
    assert keys == (every if is_whole else {"rebatch/micro", "rebatch/ooms_total"})
    assert len(every) > 7


def test_an_oom_is_logged_at_once():
    _, _, logger = train(4, step_options={}, log_every_n_steps=100)
    assert logger.values("rebatch/ooms_total") == [2.0]


def test_outputs_are_joined():
    module, _, _ = train(5, "backward", "dict", step_options={})
    for outputs in module.ends:
        assert outputs["predicted"].shape == (16,) and not outputs["predicted"].requires_grad
        assert torch.allclose(outputs["mean"], outputs["predicted"].mean(), atol=1e-6)
        assert outputs["names"] == "a" and outputs["loss"].dim() == 0


def test_a_batch_that_does_not_fit_at_all_leaves_the_metrics_as_they_were():
    torch.manual_seed(0)
    module = Net(0, "backward")
    with pytest.raises(rebatch.torch.Exhausted):
        fit(module, rebatch.lightning.Rebatch(log_level="quiet"))
    assert module.error.total == 0
    assert "log" not in vars(module)


def test_a_checkpoint_keeps_the_size(tmp_path):
    torch.manual_seed(0)
    callback = rebatch.lightning.Rebatch(log_level="quiet", growth=False)
    trainer, _ = fit(Net(4), callback, epochs=1)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    resumed, module = rebatch.lightning.Rebatch(), Net(4)
    path = {"ckpt_path": tmp_path / "last.ckpt", "weights_only": False}
    fit(module, resumed, fit_options=path)
    assert module.sizes == [4] * 16 and resumed.report.step == 7


def test_lighten_and_slices_of_ones_own_are_passed_on():
    light = []

    class Own(Net):
        def training_step(self, batch, batch_idx):
            if not light:
                out_of_memory(None)
            return super().training_step(batch, batch_idx)

    def part(batch, first, count):
        return [t[first : first + count] for t in batch]

    callback = rebatch.lightning.Rebatch(
        lighten=light.append, slice=part, length=lambda batch: len(batch[0]), log_level="quiet"
    )
    fit(Own(), callback)
    assert light == [True] and callback.report.lighten_level == 1


def test_the_trainer_of_the_other_package_works():
    other = pytest.importorskip("pytorch_lightning")

    class Other(other.LightningModule):
        training_step = Net.training_step
        configure_optimizers = Net.configure_optimizers

        def __init__(self):
            super().__init__()
            self.net, self.error = Mlp(), torchmetrics.MeanSquaredError()
            self.largest, self.where, self.returns, self.sizes = 4, "backward", "loss", []

    callback = rebatch.lightning.Rebatch(log_level="quiet", growth=False)
    fit(Other(), callback, other, logger=False)
    assert callback.report.micro == 4


# ---- what Lightning allows ----


class Validated(Net):
    """A metric that validation alone uses, beside that of the training."""

    def __init__(self):
        super().__init__()
        self.valid_error = torchmetrics.MeanSquaredError()

    def validation_step(self, batch, batch_idx):
        self.valid_error(self.net(batch[0]), batch[1])
        self.log("valid_error", self.valid_error)


@pytest.mark.parametrize("call", (4, 10))  # in the first epoch, and after a validation
def test_a_metric_that_an_attempt_has_not_used_is_not_told(call):
    torch.manual_seed(0)
    module, callback = Validated(), rebatch.lightning.Rebatch(log_level="quiet")
    with warnings.catch_warnings(), fail_once(module.net.body[3], call=call) as failing:
        warnings.filterwarnings("error", "rebatch: ")
        options = dict(fit_options={"val_dataloaders": batches()}, num_sanity_val_steps=0)
        fit(module, callback, **options)
    assert failing.failures == 1 and callback.numbers()["rebatch/ooms_total"] == 1


class Skips(Net):
    """Every second batch."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 2 else loss


class NoOptimizer(Net):
    def configure_optimizers(self):
        return None


class FrozenAtFirst(Net):
    """The optimizer has no trained parameter, and gets others after the first epoch."""

    def configure_optimizers(self):
        self.net.body[0].requires_grad_(False)
        return torch.optim.SGD(self.net.body[0].parameters(), 0.1, momentum=0.5)

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.net.body[0].requires_grad_(True)
            self.optimizers().add_param_group({"params": list(self.net.body[3].parameters())})


@pytest.mark.parametrize(
    "kind, precision",
    (
        (Skips, "32-true"),
        (Skips, "16-mixed"),
        (NoOptimizer, "32-true"),
        (FrozenAtFirst, "32-true"),
        (FrozenAtFirst, "16-mixed"),
    ),
)
def test_what_lightning_allows_is_as_with_a_plain_trainer(kind, precision):
    results = []
    for callback in (None, quiet()):
        torch.manual_seed(0)
        module = kind()
        trainer, logger = fit(module, callback, precision=precision)
        ends = [set(outputs) for outputs in module.ends]
        results.append((state_of(module), ends, trainer.global_step, logger.values("loss_epoch")))
    (state, *rest), (its_state, *its_rest) = results
    assert same_bits(its_state, state) and its_rest == rest


@pytest.mark.parametrize("kind", (Skips, FrozenAtFirst))
def test_what_lightning_allows_survives_an_oom(kind):
    states = []
    for largest, micro in ((5, 0), (SAMPLES, 4)):
        torch.manual_seed(0)
        module = kind(largest)
        fit(module, quiet(growth=False, micro_start=micro))
        states.append(state_of(module))
    assert same_bits(*states) and set(module.sizes) == {4}


def test_micro_batches_without_a_loss_add_nothing():
    class SkipsSome(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return None if batch[1][0] > 0 else loss

    class Zeroes(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (batch[1][0] <= 0)

    states = []
    for kind in (SkipsSome, Zeroes):
        torch.manual_seed(0)
        module = kind()
        fit(module, quiet(micro_start=4))
        states.append(state_of(module))
    assert all(torch.allclose(a, b) for a, b in zip(*states))


class Numbered(Net):
    """Its batches are no tensors."""

    def training_step(self, batch, batch_idx):
        self.sizes.append(batch["samples"])
        if batch["samples"] > self.largest:
            out_of_memory(None)
        return self.net(torch.ones(batch["samples"], 8)).square().mean()


def numbered():
    data = [{"samples": n} for n in (SAMPLES, 3)]
    return torch.utils.data.DataLoader(data, batch_size=None)


def test_batches_that_cannot_be_cut_run_whole():
    states = []
    for callback in (None, quiet(micro_start=4)):
        torch.manual_seed(0)
        module = Numbered()
        pl.Trainer(callbacks=callback and [callback], logger=False, max_epochs=2, **QUIET).fit(
            module, numbered()
        )
        states.append(state_of(module))
    assert same_bits(*states) and module.sizes == [SAMPLES, 3] * 2


def test_a_batch_that_cannot_be_cut_and_does_not_fit_says_why():
    module = Numbered(4)
    before = state_of(module)
    trainer = pl.Trainer(callbacks=[quiet()], logger=False, max_epochs=1, **QUIET)
    with pytest.raises(
        rebatch.torch.Exhausted, match="(?s)cannot be cut: the batch, a dict, has no tensor with"
    ):
        trainer.fit(module, numbered())
    assert same_bits(state_of(module), before)


def test_a_batch_that_cannot_be_cut_does_not_fit_limits():
    trainer = pl.Trainer(callbacks=[quiet(micro_multiple_of=2)], logger=False, **QUIET)
    with pytest.raises(ValueError, match="the batch, a dict, has no tensor with a dimension"):
        trainer.fit(Numbered(), numbered())


def test_batch_norm_gets_two_samples_or_more():
    """16 samples, of which 5 fit."""

    class Normalized(Net):
        def __init__(self, largest):
            super().__init__(largest)
            self.net.body = torch.nn.Sequential(
                torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)
            )

    module = Normalized(5)
    fit(module, quiet(growth=False, micro_start=5))
    assert set(module.sizes) == {4}


# ---- what is refused ----


class Manual(Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Iterates(Net):
    def training_step(self, dataloader_iter):
        pass


class TwoOptimizers(Net):
    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), 0.1), torch.optim.SGD(self.parameters(), 0.1)]


@pytest.mark.parametrize(
    "kind, sentence",
    (
        (Manual, "rebatch: Manual optimizes manually: expected automatic optimization"),
        (Iterates, "rebatch: training_step of Iterates takes dataloader_iter"),
        (TwoOptimizers, "multiple optimizers is only supported with manual optimization"),
    ),
)
def test_what_cannot_work_is_refused(kind, sentence):
    with pytest.raises((ValueError, RuntimeError), match=sentence):
        fit(kind(), rebatch.lightning.Rebatch())


def test_strategies_that_shard_are_refused():
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False)
    trainer.strategy.__class__ = type("DeepSpeedStrategy", (type(trainer.strategy),), {})
    with pytest.raises(ValueError, match="the strategy is a DeepSpeedStrategy: expected a single"):
        rebatch.lightning.Rebatch().setup(trainer, Net(), "fit")


def test_what_the_trainer_does_is_no_option():
    with pytest.raises(ValueError, match="clip is an argument of Rebatch: expected it to be left"):
        rebatch.lightning.Rebatch(clip=1.0)


# ---- evaluation ----


class Evaluated(Net):
    """Batches of validation and test do not fit above `largest` samples."""

    def __init__(self, largest=SAMPLES):
        super().__init__(largest)
        self.failures, self.validation_ends = 0, []

    def _evaluate(self, batch, name):
        x, y = batch
        predicted = self.net(x)
        loss = ((predicted - y) ** 2).mean()
        self.error(predicted, y)
        self.log(f"{name}_loss", loss)
        self.log_dict({f"{name}_sum": y.sum()}, reduce_fx="sum")
        self.log(f"{name}_sized", loss, batch_size=len(x))
        self.log(f"{name}_error", self.error)
        if len(x) > self.largest:  # what was logged and counted before counts nothing
            self.failures += 1
            out_of_memory(None)
        return {"loss": loss, "predicted": predicted}

    def validation_step(self, batch, batch_idx):
        return self._evaluate(batch, "validation")

    def test_step(self, batch, batch_idx):
        return self._evaluate(batch, "test")["loss"]

    def predict_step(self, batch):
        return self._evaluate_alone(batch)

    def _evaluate_alone(self, batch):
        if len(batch[0]) > self.largest:
            out_of_memory(None)
        return self.net(batch[0])

    def on_validation_batch_end(self, outputs, batch, batch_idx):
        self.validation_ends.append(outputs)


def uneven(samples=3 * SAMPLES + 5):
    """The last batch has fewer samples."""
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(samples, 8, generator=generator), torch.randn(samples, generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), SAMPLES)


def evaluator(callback):
    return pl.Trainer(callbacks=callback and [callback], logger=Lines(), **QUIET)


def quiet(**options):
    return rebatch.lightning.Rebatch(log_level="quiet", **options)


@pytest.mark.parametrize("name", ("validate", "test"))
@pytest.mark.parametrize("largest", (SAMPLES, 5, 1))
def test_an_evaluation_survives_an_oom_with_the_results_of_a_plain_trainer(name, largest):
    torch.manual_seed(0)
    plain, module = Evaluated(), Evaluated(largest)
    module.load_state_dict(plain.state_dict())
    expected = getattr(evaluator(None), name)(plain, uneven(), verbose=False)[0]
    trainer = evaluator(quiet())
    found = getattr(trainer, name)(module, uneven(), verbose=False)[0]
    assert len(expected) == 4 and found == pytest.approx(expected, rel=1e-5)
    assert (module.failures > 0) == (largest < SAMPLES)
    assert found == expected or largest < SAMPLES
    for outputs, its in zip(module.validation_ends, plain.validation_ends, strict=True):
        assert torch.allclose(outputs["loss"], its["loss"])
        assert torch.allclose(outputs["predicted"], its["predicted"], atol=1e-6)
    assert not set(vars(trainer.strategy)) & set(rebatch.lightning._OF_EVALUATION)
    assert "log" not in vars(module)


def test_the_evaluation_within_a_training_survives_an_oom():
    torch.manual_seed(0)
    plain, module = Evaluated(), Evaluated(5)
    module.load_state_dict(plain.state_dict())
    for net in (plain, module):
        net.net.eval()  # no dropout
        net.configure_optimizers = lambda net=net: torch.optim.SGD(net.parameters(), lr=0.0)
    expected = fit(plain, None, fit_options={"val_dataloaders": uneven()})[1]
    found = fit(module, quiet(), fit_options={"val_dataloaders": uneven()})[1]
    assert module.failures > 0
    for name in ("loss", "sum", "sized", "error"):
        values = expected.values(f"validation_{name}")
        assert len(values) == 2
        assert found.values(f"validation_{name}") == pytest.approx(values, rel=1e-5)


def test_predictions_are_joined():
    torch.manual_seed(0)
    plain, module = Evaluated(), Evaluated(5)
    module.load_state_dict(plain.state_dict())
    expected = evaluator(None).predict(plain, uneven())
    found = evaluator(quiet()).predict(module, uneven())
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape and torch.allclose(a, b, atol=1e-6)


def test_predictions_that_cannot_be_joined_are_refused():
    class Mean(Evaluated):
        def predict_step(self, batch):
            return super().predict_step(batch).mean()

    assert len(evaluator(quiet()).predict(Mean(), uneven())) == 4
    with pytest.raises(ValueError, match="returned a scalar"):
        evaluator(quiet()).predict(Mean(5), uneven())


def test_an_evaluation_of_batches_that_cannot_be_cut_is_that_of_a_plain_trainer():
    class Named(Evaluated):
        def validation_step(self, batch, batch_idx):
            self.log("length", float(len(batch["name"])), batch_size=1)
            if self.largest == 0:
                out_of_memory(None)

    loader = torch.utils.data.DataLoader([{"name": "a" * n} for n in (1, 2, 6)], batch_size=None)
    assert evaluator(quiet()).validate(Named(), loader, verbose=False)[0] == {"length": 3.0}
    with pytest.raises(torch.OutOfMemoryError) as raised:
        evaluator(quiet()).validate(Named(0), loader, verbose=False)
    assert "no tensor with a dimension of samples" in str(raised.value.__context__)


def test_an_evaluation_that_does_not_fit_at_all_leaves_the_metrics_as_they_were():
    module = Evaluated(0)
    with pytest.raises(rebatch.torch.Exhausted):
        evaluator(quiet()).validate(module, uneven(), verbose=False)
    assert module.error.total == 0 and "log" not in vars(module)


def wrong_by(name):
    """A module whose step logs, or returns, what follows the cut."""

    class Wrong(Evaluated):
        def validation_step(self, batch, batch_idx):
            x, y = batch
            error = (self._evaluate_alone(batch) - y).square()
            values = {"sum": error.sum(), "root": error.mean().sqrt(), "mean": error.mean()}
            self.log("value", values.get(name, error.mean()))
            self.log("count", float(len(x)), reduce_fx="sum")

        def predict_step(self, batch):
            rows = super().predict_step(batch)
            return rows - rows.mean(0) if name == "rows" else rows

    torch.manual_seed(0)
    return Wrong(5)


@pytest.mark.parametrize(
    "name, call, expected",
    (
        ("mean", "validate", ""),
        ("sum", "validate", r"validation_step: what is logged\['value'\] of .* reduce_fx='sum'"),
        ("root", "validate", r"validation_step: what is logged\['value'\] of .* a Metric of"),
        ("mean", "predict", ""),
        ("rows", "predict", "predict_step: the result of samples .* of its own sample alone"),
    ),
)
def test_what_depends_on_the_cut_of_an_evaluation_is_named_once(name, call, expected):
    module = wrong_by(name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        keywords = {"verbose": False} if call == "validate" else {}
        getattr(evaluator(quiet()), call)(module, uneven(), **keywords)
    texts = [str(w.message) for w in caught if issubclass(w.category, rebatch.torch.CutWarning)]
    assert len(texts) == bool(expected)
    assert not expected or re.search(f"^rebatch: {expected}", texts[0]), texts


def test_a_metric_that_was_reset_in_inference_mode_counts_no_failed_attempt():
    """Its tensors have no version then."""

    class Counting(Evaluated):
        def validation_step(self, batch, batch_idx):
            predicted = self.net(batch[0])
            self.error.update(predicted, batch[1])
            if len(batch[0]) > self.largest:
                out_of_memory(None)

        def on_validation_epoch_end(self):
            found.append((int(self.error.total), float(self.error.compute())))
            self.error.reset()

    module, trainer, found = Counting(), evaluator(quiet()), []
    for module.largest in (SAMPLES, 5, 5):
        trainer.validate(module, uneven(), verbose=False)
    assert module.error.total.is_inference()
    assert found[1] == pytest.approx(found[0]) and found[2] == pytest.approx(found[0])

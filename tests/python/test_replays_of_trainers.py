"""graphs=True of adapters: passes of a Trainer are replayed with the bits of a run without graphs,
and what a replay would leave out or take from another batch is named. A CPU captures nothing: see
test_replays.py. cuda/test_replays_gpu.py has the same tests with CUDA's graphs."""

import os
import types
import warnings

import pytest
import torch

import models
import rebatch.torch as rebatch
from models import same_bits, state_of
from rebatch.torch.graphs import graphs as graphs_module
from test_replays import Rerun, recorder  # noqa: F401

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is fetched
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
BATCHES = 8  # of an epoch


class Frozen(Rerun):
    """Each replay finds what the adapter had in Python at the capture, as a graph does."""

    step = None  # an adapter's object
    names = ()  # of its attributes

    def record(self, body):
        then = {name: vars(self.step)[name] for name in self.names}
        recording = super().record(body)

        def replay():
            now = {name: vars(self.step)[name] for name in self.names}
            vars(self.step).update(then)
            try:
                recording.replay()
            finally:
                vars(self.step).update(now)

        return types.SimpleNamespace(result=recording.result, replay=replay)


@pytest.fixture
def frozen(monkeypatch, recorder):  # noqa: F811
    """Of these attributes of an adapter's object, once it is made."""

    def freeze(made, *names):
        if models.DEVICE.type == "cpu":
            kind = type("Frozen", (Frozen,), {"step": made, "names": names})
            monkeypatch.setattr(graphs_module, "recorder_of", lambda *_: kind(recorder))

    return freeze


def said_by(function, *arguments, **options):
    """(result, what it told of graphs)."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        result = function(*arguments, **options)
    return result, [str(w.message) for w in found if "graphs=True" in str(w.message)]


# ---- transformers ----


def hf_trainer(
    folder, graphs, frozen, base=None, micro=4, kind="gpt", callback=None, columns=None, **options
):
    """(trainer, replays of each batch). `columns`: more of each sample."""
    transformers = pytest.importorskip("transformers")
    import test_transformers as theirs
    from rebatch.transformers import RebatchMixin

    torch.manual_seed(0)
    step = {"log_level": "quiet", "growth": False, "graphs": graphs, "micro_start": micro}
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=theirs.SAMPLES,
        num_train_epochs=2,
        use_cpu=models.DEVICE.type == "cpu",
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        learning_rate=0.01,
        disable_tqdm=True,
        **options,
    )
    args._n_gpu = min(1, args.n_gpu)  # without DataParallel
    replayed = []

    class Trainer(RebatchMixin, base or transformers.Trainer):
        def training_step(self, *arguments, **keywords):
            if not replayed:
                frozen(self._rebatch, "_arguments")
            loss = super().training_step(*arguments, **keywords)
            replayed.append(self.report.replayed)
            return loss

    data = theirs.sentences(BATCHES * theirs.SAMPLES)
    if kind == "bert":
        data = [{**each, "labels": each["input_ids"][0] % 3} for each in data]
    data = [{**each, **(columns or {})} for each in data]
    model = getattr(theirs, kind)()
    if kind == "bert":
        model.config.hidden_dropout_prob = 0.0
    trainer = Trainer(model, args, train_dataset=data, rebatch=step)
    trainer.remove_callback(transformers.PrinterCallback)
    if callback:
        trainer.add_callback(callback(trainer))
    trainer.train()
    return trainer, replayed


def logged(trainer):
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def hf_both(folder, frozen, **options):
    """(replays of each batch, what was told) of a run whose bits are those without graphs."""
    (trainer, replayed), said = said_by(hf_trainer, folder, True, frozen, **options)
    plain, none = hf_trainer(folder, False, frozen, **options)
    assert set(none) == {0} and logged(trainer) == logged(plain)
    assert same_bits(state_of(trainer.model), state_of(plain.model))
    return replayed, said


@pytest.mark.parametrize("micro", (8, 4))
@pytest.mark.parametrize(
    "options",
    ({}, {"gradient_accumulation_steps": 3}, {"bf16": True}, {"kind": "bert"}),
    ids=str,
)
def test_a_trainer_of_transformers_replays_with_the_same_bits(tmp_path, frozen, options, micro):
    replayed, said = hf_both(tmp_path, frozen, micro=micro, **options)
    assert replayed[-1] == 8 // micro and not said


@pytest.fixture
def capturing(monkeypatch):
    """Whether the pass that runs is captured. A CPU says so too."""
    if models.DEVICE.type != "cpu":
        return torch.cuda.is_current_stream_capturing
    now, record = models.Unseen(False), Rerun.record

    def recorded(self, body):
        def captured():
            now[0] = True
            try:
                return body()
            finally:
                now[0] = False

        captured.__self__ = body.__self__
        return record(self, captured)

    monkeypatch.setattr(Rerun, "record", recorded)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now[0])
    return torch.cuda.is_current_stream_capturing


@pytest.mark.parametrize(
    "options, is_masked",
    (
        ({}, False),
        ({"kind": "bert"}, False),
        ({"columns": {"attention_mask": torch.ones(6, dtype=torch.long)}}, True),
        ({"columns": {"position_ids": torch.arange(6)}}, True),
    ),
    ids=str,
)
def test_a_captured_model_makes_the_masks_of_an_eager_one(
    tmp_path, frozen, capturing, monkeypatch, options, is_masked
):
    """But where they depend on the samples: transformers reads those on the host."""
    made, attention = models.Unseen(), torch.nn.functional.scaled_dot_product_attention

    def attend(*arguments, attn_mask=None, **keywords):
        made.append((capturing(), attn_mask is not None))
        return attention(*arguments, attn_mask=attn_mask, **keywords)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    with warnings.catch_warnings():  # of other bits
        warnings.simplefilter("ignore")
        hf_trainer(tmp_path, True, frozen, **options)
    assert set(made._values) == {(False, False), (True, is_masked)}


def trainer_with(**members):
    transformers = pytest.importorskip("transformers")
    return type("Own", (transformers.Trainer,), members)


def test_what_compute_loss_logs_is_told_by_name(tmp_path, frozen):
    def compute_loss(self, model, inputs, *arguments, **keywords):
        loss = super(kind, self).compute_loss(model, inputs, *arguments, **keywords)
        self.log({"own": loss.detach()})
        return loss

    kind = trainer_with(compute_loss=compute_loss)
    replayed, said = hf_both(tmp_path, frozen, base=kind)
    assert set(replayed) == {0} and len(said) == 1
    assert "changes 'Trainer.state.log_history' in Python" in said[0]


def test_what_compute_loss_counts_is_told_by_name(tmp_path, frozen):
    def compute_loss(self, *arguments, **keywords):
        self.calls = getattr(self, "calls", 0) + 1
        return super(kind, self).compute_loss(*arguments, **keywords)

    kind = trainer_with(compute_loss=compute_loss)
    replayed, said = hf_both(tmp_path, frozen, base=kind)
    assert set(replayed) == {0} and "changes 'self.calls' in Python" in said[0]


def test_a_number_of_items_in_python_is_told_by_name(tmp_path, frozen):
    def count(self, batches, device):
        return int(sum(batch["labels"].ne(-100).sum() for batch in batches))

    kind = trainer_with(_get_num_items_in_batch=count)
    replayed, said = hf_both(tmp_path, frozen, base=kind)
    assert set(replayed) == {0} and "num_items_in_batch is read in Python" in said[0]


def test_a_number_of_the_trainer_that_a_callback_changes_is_read_again(tmp_path, frozen):
    transformers = pytest.importorskip("transformers")

    def compute_loss(self, *arguments, **keywords):
        return super(kind, self).compute_loss(*arguments, **keywords) * getattr(self, "beta", 1.0)

    class Changes(transformers.TrainerCallback):
        def __init__(self, trainer):
            self._trainer = trainer

        def on_step_end(self, args, state, *_, **__):
            self._trainer.beta = 1.0 if state.global_step < 6 else 0.5

    kind = trainer_with(compute_loss=compute_loss)
    replayed, said = hf_both(tmp_path, frozen, base=kind, callback=Changes)
    assert replayed[5] and not replayed[6] and not said


def test_an_evaluation_of_transformers_gets_the_memory_of_graphs(tmp_path, frozen):
    trainer, _ = hf_trainer(tmp_path, True, frozen)
    graphs = trainer._rebatch.backward._training.callbacks.graphs
    assert graphs._held

    def short(*_):
        if graphs._held:
            models.out_of_memory(None)

    trainer.model.register_forward_pre_hook(short)
    trainer.evaluate(trainer.train_dataset)
    assert not graphs._held


# ---- accelerate ----


@pytest.mark.parametrize("accumulated", (1, 2))
def test_a_backward_of_accelerate_replays_with_the_same_bits(accumulated):
    accelerate = pytest.importorskip("accelerate")
    states = []
    for graphs in (True, False):
        on_cpu = models.DEVICE.type == "cpu"
        accelerator = accelerate.Accelerator(cpu=on_cpu, gradient_accumulation_steps=accumulated)
        model, batch, loss_fn = models.make("mlp")
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        model, optimizer = accelerator.prepare(model, optimizer)
        options = {"graphs": graphs, "log_level": "quiet", "micro_start": 8}
        backward = rebatch.Backward(model, loss_fn, backward=accelerator.backward, **options)
        torch.manual_seed(1)
        for i in range(12):
            with accelerator.accumulate(model):
                backward(tuple(t.roll(i, 0) for t in batch))
                optimizer.step()
                optimizer.zero_grad()
        assert backward.report.replayed == 2 * graphs
        states.append(state_of(model))
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.GradientState._reset_state()
    assert same_bits(*states)


# ---- Lightning ----


def pl_fit(graphs, frozen, kind=None, micro=4, callbacks=(), **options):
    """(what training left, replays of each batch)"""
    pl = pytest.importorskip("lightning.pytorch")
    from rebatch.lightning import Rebatch
    from test_lightning import QUIET, Lines, batches

    torch.manual_seed(0)
    module = (kind or pl_net())()
    callback = Rebatch(log_level="quiet", growth=False, micro_start=micro, graphs=graphs)
    replayed, seen = [], []

    class Watch(pl.Callback):
        def on_train_start(self, *_):
            frozen(callback._step, "_kwargs")

        def on_train_batch_end(self, trainer, module, outputs, *_):
            replayed.append(callback.report.replayed)
            seen.extend([outputs["loss"].clone(), outputs["out"].clone()])

    options = {**QUIET, "accelerator": "auto", "max_epochs": 2, **options}
    options["accelerator"] = "cpu" if models.DEVICE.type == "cpu" else "gpu"
    logger = Lines()
    every = [callback, Watch(), *callbacks]
    pl.Trainer(callbacks=every, logger=logger, **options).fit(module, batches(BATCHES))
    return (module, logger, seen), replayed


def pl_net(step=None, **members):
    """A LightningModule whose training_step logs, and calls step(self, loss, batch_idx)."""
    pl = pytest.importorskip("lightning.pytorch")

    class Net(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.beta = models.Mlp(), 1.0

        def training_step(self, batch, batch_idx):
            x, y = batch
            out = self.net(x)
            loss = ((out - y) ** 2).mean() * self.beta
            self.log("loss", loss, on_step=True, on_epoch=True)
            self.log("largest", out.max(), reduce_fx="max", batch_size=len(x))
            return {"loss": loss, "out": out, "name": "a"}

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    if step:
        plain = Net.training_step

        def training_step(self, batch, batch_idx):
            result = plain(self, batch, batch_idx)
            step(self, result["loss"], batch_idx)
            return result

        members["training_step"] = training_step
    return type("Own", (Net,), members)


def pl_both(frozen, **options):
    ((module, logger, seen), replayed), said = said_by(pl_fit, True, frozen, **options)
    (plain, plain_logger, plain_seen), none = pl_fit(False, frozen, **options)
    assert set(none) == {0} and same_bits(state_of(module), state_of(plain))
    assert same_bits(seen, plain_seen)
    for name in ("loss_step", "loss_epoch", "largest"):
        assert logger.values(name) == plain_logger.values(name) != []
    return replayed, said


@pytest.mark.parametrize("micro", (16, 4))
@pytest.mark.parametrize(
    "options", ({}, {"accumulate_grad_batches": 3}, {"precision": "bf16-mixed"}), ids=str
)
def test_a_trainer_of_lightning_replays_with_the_same_bits(frozen, options, micro):
    replayed, said = pl_both(frozen, micro=micro, **options)
    assert not said and replayed[-1] == 16 // micro


def _reads_the_index(module, loss, batch_idx):
    if batch_idx % 100 == 99:
        print("a hundred")


def _hands_the_index_on(module, loss, batch_idx):
    _reads_the_index(module, loss, 0)


def _logs_a_number(module, loss, batch_idx):
    module.log("rate", module.trainer.optimizers[0].param_groups[0]["lr"])


def _counts(module, loss, batch_idx):
    module.calls = getattr(module, "calls", 0) + 1


@pytest.mark.parametrize(
    "step, text",
    (
        (_reads_the_index, "batch_idx is read in Python"),
        (_hands_the_index_on, ""),
        (_logs_a_number, "'rate' that is logged or returned has a float"),
        (_counts, "training_step changes 'model.calls' in Python"),
    ),
)
def test_what_a_replay_cannot_have_of_a_training_step_is_told(frozen, step, text):
    replayed, said = pl_both(frozen, kind=pl_net(step))
    assert bool(replayed[-1]) is not bool(text) and len(said) == bool(text)
    assert not text or text in said[0]


def test_a_hook_of_the_backward_pass_logs_too(frozen):
    def on_after_backward(self):
        self.log("norm", self.net.body[0].weight.grad.norm())

    kind = pl_net(on_after_backward=on_after_backward)
    values = []
    for graphs in (True, False):
        (_, logger, _), replayed = pl_fit(graphs, frozen, kind=kind)
        values.append(logger.values("norm"))
        assert bool(replayed[-1]) is graphs
    assert values[0] == values[1] != []


def test_what_a_hook_of_the_backward_pass_changes_is_told(frozen):
    norms = []

    def on_after_backward(self):
        norms.append(self.net.body[0].weight.grad.norm())

    replayed, said = pl_both(frozen, kind=pl_net(on_after_backward=on_after_backward))
    assert set(replayed) == {0} and "changes 'norms' in Python" in said[0]


def test_a_number_of_the_module_that_changes_is_read_again(frozen):
    def on_train_batch_start(self, batch, batch_idx):
        self.beta = 1.0 if self.global_step < 6 else 0.5

    replayed, said = pl_both(frozen, kind=pl_net(on_train_batch_start=on_train_batch_start))
    assert replayed[5] and not replayed[6] and not said


def test_an_evaluation_of_lightning_gets_the_memory_of_graphs(frozen):
    from test_lightning import batches

    steps = []

    def validation_step(self, batch, batch_idx):
        graphs = steps[0]._training.callbacks.graphs
        if graphs._held:
            models.out_of_memory(None)
        return self.net(batch[0])

    (module, *_), replayed = pl_fit(True, frozen, kind=pl_net(validation_step=validation_step))
    (callback,) = [c for c in module.trainer.callbacks if hasattr(c, "numbers")]
    steps.append(callback._step.backward)
    assert replayed[-1] and steps[0]._training.callbacks.graphs._held
    module.trainer.validate(module, batches(1), verbose=False)
    assert not steps[0]._training.callbacks.graphs._held

"""rebatch.transformers.RebatchTrainer: training is that of a plain Trainer, and survives OOMs."""

import logging
import os
import random
import re
import warnings

import numpy
import pytest
import torch

pytest.importorskip("accelerate")
os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is fetched
transformers = pytest.importorskip("transformers")

import rebatch.transformers
from models import FailAt, HalfStep, out_of_memory, same_bits, state_of
from rebatch.transformers import RebatchMixin, RebatchTrainer

SAMPLES = 8
WORDS, LENGTH = 23, 6
transformers.logging.set_verbosity_error()
logging.getLogger("accelerate").setLevel(logging.ERROR)
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def gpt(dropout=0.1):
    config = transformers.GPT2Config(
        vocab_size=WORDS,
        n_positions=LENGTH,
        n_embd=16,
        n_layer=2,
        n_head=2,
        use_cache=False,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def bert():
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=LENGTH,
        num_labels=3,
    )
    return transformers.BertForSequenceClassification(config)


def sentences(count=4 * SAMPLES):
    """Sentences of different lengths: labels of the padding are -100."""
    generator = torch.Generator().manual_seed(0)
    data = []
    for i in range(count):
        tokens = torch.randint(1, WORDS, (LENGTH,), generator=generator)
        labels = tokens.clone()
        labels[1 + i % (LENGTH - 1) + 1 :] = -100
        data.append({"input_ids": tokens, "labels": labels})
    return data


def classes():
    return [{"input_ids": d["input_ids"], "labels": d["input_ids"][0] % 3} for d in sentences()]


def fails_above(model, largest, where, light=None):
    """The model runs out of memory for more samples than `largest`; in `light` mode it does not."""

    def is_too_large(keywords):
        return len(keywords["input_ids"]) > largest and not (light and light(model))

    def before(_module, _arguments, keywords):
        if where == "forward" and is_too_large(keywords):
            out_of_memory(None)

    def after(_module, _arguments, keywords, outputs):
        if where == "backward" and is_too_large(keywords):
            # The loss is made from the logits where there are no labels.
            outputs["loss" if "loss" in outputs else "logits"].register_hook(out_of_memory)

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after, with_kwargs=True)
    return model


def train(folder, model, kind=transformers.Trainer, data=None, scaler=False, step=None, **args):
    """A Trainer that has trained the model for two epochs."""
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=SAMPLES,
        num_train_epochs=2,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        learning_rate=0.01,
        disable_tqdm=True,
        **args,
    )
    extra = {}
    if issubclass(kind, RebatchMixin):
        extra["rebatch"] = {"log_level": "quiet", "growth": False, **(step or {})}
    trainer = kind(model, args, train_dataset=data or sentences(), **extra)
    trainer.remove_callback(transformers.PrinterCallback)
    if scaler:
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    trainer.train()
    return trainer


def seeded(make, *arguments):
    torch.manual_seed(0)
    return make(*arguments)


def logged(trainer, name):
    return [line[name] for line in trainer.state.log_history if name in line]


TRAINERS = (
    {},
    {"bf16": True},
    {"gradient_accumulation_steps": 2},
    {"gradient_accumulation_steps": 3, "bf16": True, "max_grad_norm": 0.1},
    {"label_smoothing_factor": 0.1},
    {"scaler": True, "max_grad_norm": 0.0},
)


@pytest.mark.parametrize("options", TRAINERS, ids=str)
@pytest.mark.parametrize("make, data", ((gpt, sentences), (bert, classes)))
def test_without_an_oom_training_is_that_of_a_plain_trainer(tmp_path, make, data, options):
    trainer = train(tmp_path, seeded(make), RebatchTrainer, data(), **options)
    plain = train(tmp_path, seeded(make), data=data(), **options)
    assert same_bits(state_of(trainer.model), state_of(plain.model))
    for name in ("loss", "grad_norm", "learning_rate"):
        assert logged(trainer, name) == logged(plain, name)


@pytest.mark.parametrize("options", TRAINERS, ids=str)
@pytest.mark.parametrize(
    "make, data, where", ((gpt, sentences, "backward"), (bert, classes, "forward"))
)
def test_an_oom_leads_to_the_bits_of_a_run_that_started_smaller(
    tmp_path, make, data, options, where
):
    model = fails_above(seeded(make), 3, where)
    trainer = train(tmp_path, model, RebatchTrainer, data(), **options)
    expected = train(
        tmp_path, seeded(make), RebatchTrainer, data(), step={"micro_start": 2}, **options
    )
    assert same_bits(state_of(trainer.model), state_of(expected.model))
    assert trainer.report.micro == 2 and trainer.report.lighten_level == 0
    for name in ("loss", "grad_norm", "rebatch/micro"):
        assert logged(trainer, name) == logged(expected, name)


# ---- the update does not depend on the cut ----


class OwnLoss(RebatchTrainer):
    """The mean over the tokens, which knows nothing of num_items_in_batch."""

    def compute_loss(self, model, inputs, return_outputs=False, **_):
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        return torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        )


def mean_over_items(outputs, labels, num_items_in_batch=None):
    logits, labels = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    total = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    return total / num_items_in_batch


class OwnFunction(RebatchTrainer):
    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, compute_loss_func=mean_over_items, **keywords)


@pytest.mark.parametrize("kind", (RebatchTrainer, OwnLoss, OwnFunction))
@pytest.mark.parametrize("accumulated", (1, 2))
def test_the_update_does_not_depend_on_the_cut(tmp_path, kind, accumulated):
    """Sentences have different numbers of tokens, so the mean of means is another."""
    options = {"gradient_accumulation_steps": accumulated, "optim": "sgd", "max_grad_norm": 0.0}
    states = []
    for micro in (0, 1, 3):
        trainer = train(tmp_path, seeded(gpt, 0.0), kind, step={"micro_start": micro}, **options)
        states.append(state_of(trainer.model) + [torch.tensor(logged(trainer, "loss"))])
    for state in states[1:]:
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(state, states[0]))


def test_micro_batches_without_a_label_weigh_nothing(tmp_path):
    data = sentences()
    for sample in data[1::2]:
        sample["labels"] = torch.full((LENGTH,), -100)
    states = []
    for micro in (0, 1):
        trainer = train(
            tmp_path, seeded(gpt, 0.0), OwnLoss, data, step={"micro_start": micro}, optim="sgd"
        )
        states.append(state_of(trainer.model))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*states))


def test_a_loss_that_cannot_be_cut_is_refused(tmp_path):
    class Added(RebatchTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, **keywords):
            loss = super().compute_loss(model, inputs, **keywords)
            return loss + 0.1 * model.transformer.wte.weight.square().mean() + 0.1

    with pytest.raises(ValueError, match="expected half of it, or no change"):
        train(tmp_path, seeded(gpt), Added, step={"micro_start": 2})


class Noisy(torch.nn.Module):
    """Draws random numbers in every mode, as a diffusion model does."""

    def __init__(self, draw):
        super().__init__()
        self.net, self.draw = torch.nn.Linear(4, 4), draw

    def forward(self, input_ids, labels, **_):
        return {"loss": (self.net(input_ids + self.draw(input_ids)) - labels).square().mean()}


def numbers(count=4 * SAMPLES):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 4, generator=generator)
    return [{"input_ids": row, "labels": -row} for row in x]


OWN = torch.Generator()
DRAWS = {
    "torch": torch.randn_like,
    "numpy": lambda x: float(numpy.random.randn()),
    "python": lambda x: random.gauss(0, 1),
    "own": lambda x: torch.randn(x.shape, generator=OWN),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_a_model_that_draws_in_evaluation_trains_with_the_bits_of_a_smaller_start(tmp_path, draw):
    states = []
    for largest, micro in ((3, 0), (SAMPLES, 2)):
        OWN.manual_seed(0)
        model = fails_above(seeded(lambda: Noisy(DRAWS[draw])), largest, "forward")
        step = {"micro_start": micro, "generators": [OWN]}
        trainer = train(tmp_path, model, RebatchTrainer, numbers(), step=step, max_steps=3)
        states.append(state_of(model))
    assert same_bits(*states) and trainer.report.micro == 2


# ---- what a Trainer allows ----


class PlainUnlike(transformers.Trainer):
    """Its batches have another tensor, which has no dimension of samples."""

    def get_train_dataloader(self):
        return [{**batch, "scale": torch.ones(3)} for batch in super().get_train_dataloader()]

    def compute_loss(self, model, inputs, return_outputs=False, **keywords):
        scale = inputs.pop("scale")
        return super().compute_loss(model, inputs, **keywords) * scale.mean()


class Unlike(RebatchMixin, PlainUnlike):
    pass


def test_a_batch_that_cannot_be_cut_runs_whole(tmp_path):
    trainer = train(tmp_path, seeded(gpt), Unlike, step={"micro_start": 2})
    plain = train(tmp_path, seeded(gpt), PlainUnlike)
    assert same_bits(state_of(trainer.model), state_of(plain.model))
    model = fails_above(seeded(gpt), 3, "forward")
    with pytest.raises(rebatch.torch.Exhausted, match="(?s)cannot be cut: .* has 3: expected one"):
        train(tmp_path, model, Unlike)


class Normalized(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))

    def forward(self, input_ids, labels, **_):
        return {"loss": (self.net(input_ids) - labels).square().mean()}


def test_batch_norm_gets_two_samples_or_more(tmp_path):
    """A pretrained model is in evaluation mode until its first training_step."""
    model = fails_above(seeded(Normalized).eval(), 1, "forward")
    with pytest.raises(rebatch.torch.Exhausted):
        train(tmp_path, model, RebatchTrainer, numbers())
    model = fails_above(seeded(Normalized).eval(), 3, "forward")
    assert train(tmp_path, model, RebatchTrainer, numbers()).report.micro == 2


# ---- failures ----


def test_every_operation_of_a_batch_may_fail(tmp_path, monkeypatch):
    class FailsIn(rebatch.transformers.training.TrainerBackward):
        mode = FailAt(0)

        def __call__(self, batch):
            with self.mode:
                return super().__call__(batch)

    def run(n):
        FailsIn.mode = FailAt(n)
        step = {"micro_start": 4, "micro_smallest": 4, "lighten": lambda on: None}
        trainer = train(
            tmp_path,
            seeded(gpt),
            RebatchTrainer,
            sentences(16),
            step=step,
            max_steps=1,
            gradient_accumulation_steps=2,
        )
        return state_of(trainer.model), FailsIn.mode.failed

    monkeypatch.setattr(rebatch.transformers.training, "TrainerBackward", FailsIn)
    expected, _ = run(0)
    failures = 0
    for n in range(1, 380, 31):
        state, failed = run(n)
        failures += failed
        assert same_bits(state, expected), f"operation {n}"
    assert failures > 10


@pytest.mark.night
@pytest.mark.parametrize("norm", (0.1, 0.0))
def test_every_operation_of_clipping_may_fail(tmp_path, monkeypatch, norm):
    plain = torch.nn.utils.clip_grad_norm_

    def run(n):
        mode = FailAt(n)

        def clip(*arguments, **keywords):
            with mode:
                return plain(*arguments, **keywords)

        monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
        trainer = train(
            tmp_path,
            seeded(gpt),
            RebatchTrainer,
            sentences(16),
            max_steps=2,
            max_grad_norm=norm,
            gradient_accumulation_steps=2,
        )
        return state_of(trainer.model), logged(trainer, "grad_norm"), mode.failed

    expected, norms, _ = run(0)
    failures = 0
    for n in range(1, 9):
        state, its_norms, failed = run(n)
        failures += failed
        assert same_bits(state, expected) and its_norms == norms, f"operation {n}"
    assert failures > 5


@pytest.mark.parametrize("scaler", (True, False))
@pytest.mark.parametrize("changes, calls", ((True, 1), (False, 2)))
def test_clipping_is_tried_once_more_where_no_gradient_was_changed(
    tmp_path, monkeypatch, changes, calls, scaler
):
    tried = []

    def clip(parameters, *_, **__):
        tried.append(1)
        if changes:
            parameters[-1].grad.mul_(0.5)
        out_of_memory(None)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
    model = seeded(gpt)
    before = state_of(model)
    with pytest.raises(rebatch.torch.Exhausted, match="(?s)gradients were clipped.*2.00 GiB"):
        train(tmp_path, model, RebatchTrainer, max_grad_norm=0.1, scaler=scaler)
    assert len(tried) == calls and same_bits(state_of(model), before)


@pytest.mark.parametrize("scaler", (True, False))
def test_an_oom_within_the_optimizers_step_is_torn(tmp_path, scaler):
    optimizers = []

    class Halves(RebatchTrainer):
        def create_optimizer(self, *_):
            optimizers.append(HalfStep(self.model.parameters(), 0.1))
            self.optimizer = optimizers[0]
            return self.optimizer

    with pytest.raises(rebatch.torch.Torn, match="restore a checkpoint"):
        train(tmp_path, seeded(gpt), Halves, scaler=scaler, max_grad_norm=0.0)
    assert optimizers[0].calls == 1


def test_gradient_checkpointing_is_the_last_level(tmp_path):
    model = fails_above(seeded(gpt), 0, "forward", lambda m: m.transformer.gradient_checkpointing)
    trainer = train(tmp_path, model, RebatchTrainer)
    assert trainer.report.lighten_level == 1 and model.transformer.gradient_checkpointing
    expected = train(tmp_path, seeded(gpt), RebatchTrainer, step={"micro_start": 1})
    assert all(
        torch.allclose(a, b, atol=1e-6) for a, b in zip(state_of(model), state_of(expected.model))
    )


def test_a_model_that_does_not_fit_at_all_says_so(tmp_path):
    with pytest.raises(rebatch.torch.Exhausted):
        train(tmp_path, fails_above(seeded(gpt), 0, "forward"), RebatchTrainer)


def test_train_may_be_called_twice(tmp_path):
    trainer = train(tmp_path, fails_above(seeded(gpt), 3, "forward"), RebatchTrainer)
    accelerator = trainer.accelerator
    assert "clip_grad_norm_" not in vars(accelerator)  # put back
    trainer.train()
    assert trainer.report.micro == 2 and "clip_grad_norm_" not in vars(accelerator)


def test_schedulers_do_not_warn_of_the_guarded_step(tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(tmp_path, seeded(gpt), RebatchTrainer, max_steps=2)
    assert not [w for w in caught if "optimizer.step" in str(w.message)]


# ---- the log ----


def keys_of(trainer):
    return {k for line in trainer.state.log_history for k in line if k.startswith("rebatch/")}


def test_a_line_of_the_log_has_the_micro_batch_and_the_ooms_so_far(tmp_path):
    model = fails_above(seeded(gpt), 3, "forward")
    args = transformers.TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=SAMPLES,
        num_train_epochs=2,
        logging_steps=4,
        save_strategy="no",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    options = {"log_level": "quiet", "growth": False}
    trainer = RebatchTrainer(model, args, train_dataset=sentences(), rebatch=options)
    trainer.train()
    assert keys_of(trainer) == {"rebatch/micro", "rebatch/ooms_total"}
    assert logged(trainer, "rebatch/ooms_total") == [2.0, 2.0]


def test_the_log_has_all_numbers_on_request(tmp_path):
    trainer = train(tmp_path, seeded(gpt), RebatchTrainer, step={"log_report": True})
    assert keys_of(trainer) == set(trainer.numbers()) > {"rebatch/step", "rebatch/samples_total"}


# ---- checkpoints ----


def trained_to(folder, kind, steps, resume=None):
    """A Trainer of 8 steps that has saved a checkpoint of the fifth one. 3 of 8 samples fit."""
    args = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=SAMPLES,
        max_steps=steps,
        lr_scheduler_type="constant",
        save_steps=5,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    is_ours = issubclass(kind, RebatchMixin)
    extra = {"rebatch": {"log_level": "quiet", "growth": False}} if is_ours else {}
    model = fails_above(seeded(gpt), 3, "forward") if is_ours else seeded(gpt)
    trainer = kind(model, args, train_dataset=sentences(), **extra)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_a_checkpoint_keeps_the_step_and_the_size(tmp_path):
    trained_to(tmp_path, RebatchTrainer, 5)
    path = str(tmp_path / "checkpoint-5")
    resumed = trained_to(tmp_path, RebatchTrainer, 8, path)
    assert resumed.report.step == 7 and logged(resumed, "rebatch/micro")[5:] == [2.0] * 3
    assert logged(resumed, "rebatch/ooms_total")[5:] == [0.0] * 3
    resumed.train(resume_from_checkpoint=path)
    assert resumed.report.step == 7 and logged(resumed, "rebatch/ooms_total")[5:] == [0.0] * 3


def test_a_checkpoint_of_a_plain_trainer_is_resumed_and_the_other_way_round(tmp_path):
    trained_to(tmp_path / "plain", transformers.Trainer, 5)
    path = str(tmp_path / "plain" / "checkpoint-5")
    assert trained_to(tmp_path, RebatchTrainer, 8, path).report.step == 2
    trained_to(tmp_path / "ours", RebatchTrainer, 5)
    path = str(tmp_path / "ours" / "checkpoint-5")
    assert trained_to(tmp_path, transformers.Trainer, 8, path).state.global_step == 8


# ---- other Trainers ----


def test_the_mixin_runs_training_step_of_another_trainer(tmp_path):
    sizes = []

    class Other(transformers.Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            sizes.append(len(inputs["input_ids"]))
            return super().training_step(model, inputs, num_items_in_batch)

    class Mine(RebatchMixin, Other):
        pass

    trainer = train(tmp_path, fails_above(seeded(gpt), 5, "backward"), Mine)
    assert sizes[:3] == [8, 4, 4] and trainer.report.micro == 4


def test_a_look_at_how_the_loss_is_divided_counts_nothing(tmp_path):
    """It runs compute_loss for a sample, by itself, once a batch is cut."""
    meter = {"rows": 0}

    class Counting(RebatchTrainer):
        seen, sizes = 0, ()

        def compute_loss(self, model, inputs, *args, **more):
            self.seen += len(inputs["input_ids"])
            self.sizes += (len(inputs["input_ids"]),)
            meter["rows"] += len(inputs["input_ids"])
            return super().compute_loss(model, inputs, *args, **more)

    trainer = train(tmp_path, seeded(gpt), Counting, step={"micro_start": 4})
    assert trainer.seen == meter["rows"] == sum(trainer.sizes) == 2 * len(sentences())


# ---- rows that belong together ----


class Preference(transformers.Trainer):
    """As trl's: the chosen rows of a batch come first, and the rejected ones behind them."""

    def compute_loss(self, model, inputs, return_outputs=False, **_):
        tokens = inputs["input_ids"]
        found = model(input_ids=tokens).logits.log_softmax(-1).gather(-1, tokens[..., None])
        chosen, rejected = found[..., 0].sum(1).chunk(2)
        return -torch.nn.functional.logsigmoid(chosen - rejected).mean()


class ORPOTrainer(Preference):
    __module__ = "trl.experimental.orpo.orpo_trainer"


class Mine(RebatchMixin, ORPOTrainer):
    pass


def stacked_pairs(batch, first, count):
    pairs = len(batch["input_ids"]) // 2
    places = [*range(first, first + count), *range(pairs + first, pairs + first + count)]
    return {name: tensor[places] for name, tensor in batch.items()}


def rows():
    return [{"input_ids": d["input_ids"]} for d in sentences()]


def test_other_trainers_of_trl_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="trl's ORPOTrainer.* belong together.*slice and length"):
        train(tmp_path, gpt(), Mine, rows())


def test_pairs_are_kept_together_by_slice_and_length(tmp_path):
    by_pairs = {"slice": stacked_pairs, "length": lambda batch: len(batch["input_ids"]) // 2}
    options = {"optim": "sgd", "remove_unused_columns": False}
    plain = train(tmp_path, seeded(gpt, 0.0), ORPOTrainer, rows(), **options)
    model = fails_above(seeded(gpt, 0.0), 4, "forward")
    trainer = train(tmp_path, model, Mine, rows(), step=by_pairs, **options)
    assert trainer.report.micro == 2 and trainer.report.samples == SAMPLES // 2
    for a, b in zip(state_of(trainer.model), state_of(plain.model)):
        assert torch.allclose(a, b, atol=1e-5)


class Alternating(RebatchTrainer):
    """Chosen and rejected rows take turns, and the loss is divided by num_items_in_batch."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        tokens = inputs["input_ids"]
        found = model(input_ids=tokens).logits.log_softmax(-1).gather(-1, tokens[..., None])
        chosen, rejected = found[..., 0].sum(1).view(-1, 2).T
        return -torch.nn.functional.logsigmoid(chosen - rejected).sum() / num_items_in_batch


def test_pairs_side_by_side_are_kept_together_by_micro_multiple_of(tmp_path):
    states = []
    for largest in (SAMPLES, 3):
        model = fails_above(seeded(gpt, 0.0), largest, "forward")
        step = {"micro_multiple_of": 2}
        trainer = train(tmp_path, model, Alternating, step=step, optim="sgd")
        states.append(state_of(trainer.model))
    assert trainer.report.micro == 2
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*states))


def test_rows_that_fail_alone_are_told_before_the_update(tmp_path):
    model = fails_above(seeded(gpt), 3, "forward")
    before = state_of(model)
    with pytest.raises(ValueError, match="fails for one sample.*RuntimeError.*micro_multiple_of=2"):
        train(tmp_path, model, Alternating)
    assert same_bits(state_of(model), before)


def test_rows_that_fail_at_a_smaller_cut_are_told(tmp_path):
    class Own(RebatchMixin, Preference):
        pass

    model = fails_above(seeded(gpt), 4, "forward")
    with pytest.warns(rebatch.torch.CutWarning, match="a loss over pairs of samples"):
        train(tmp_path, model, Own, rows(), remove_unused_columns=False)


# ---- what is refused ----


@pytest.mark.parametrize(
    "options, sentence",
    (
        ({"auto_find_batch_size": True}, "auto_find_batch_size is on: expected it off"),
        ({"optim": "galore_adamw_layerwise"}, "updates within the backward pass"),
        ({"step": {"clip": 1.0}}, "clip is an option of RebatchTrainer: expected it to be left"),
    ),
)
def test_what_cannot_work_is_refused(tmp_path, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        train(tmp_path, gpt(), RebatchTrainer, **options)


@pytest.mark.parametrize(
    "name, what", (("is_fsdp_enabled", "FSDP1"), ("is_deepspeed_enabled", "DeepSpeed"))
)
def test_trainers_that_shard_are_refused(tmp_path, name, what):
    trainer = train(tmp_path, gpt(), max_steps=1)
    setattr(trainer, name, True)
    with pytest.raises(ValueError, match=f"the Trainer uses {what}: expected one GPU"):
        rebatch.transformers.refused.refuse_what_cannot_work(trainer)


# ---- evaluation ----


def evaluate(folder, model, kind=transformers.Trainer, data=None, step=None, **args):
    """(metrics, predictions) of a Trainer that has not trained."""
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_eval_batch_size=SAMPLES,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **args,
    )
    extra = {}
    if issubclass(kind, RebatchMixin):
        extra["rebatch"] = {"log_level": "quiet", **(step or {})}
    trainer = kind(model, args, **extra)
    data = data or sentences(3 * SAMPLES + 3)
    return trainer.evaluate(data)["eval_loss"], trainer.predict(data)


class PlainOwnLoss(transformers.Trainer):
    compute_loss = OwnLoss.compute_loss

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        with torch.no_grad():
            loss = self.compute_loss(model, dict(inputs))
            return loss, model(input_ids=inputs["input_ids"]).logits, inputs["labels"]


class RebatchOwnLoss(RebatchMixin, PlainOwnLoss):
    pass


@pytest.mark.parametrize(
    "make, data, kind, plain",
    (
        (gpt, sentences, RebatchTrainer, transformers.Trainer),
        (bert, classes, RebatchTrainer, transformers.Trainer),
        (gpt, sentences, RebatchOwnLoss, PlainOwnLoss),
    ),
)
@pytest.mark.parametrize("options", ({}, {"label_smoothing_factor": 0.1}), ids=str)
def test_an_evaluation_survives_an_oom_with_the_results_of_a_plain_trainer(
    tmp_path, make, data, kind, plain, options
):
    """Sentences have different numbers of tokens, so the mean of means is another."""
    loss, expected = evaluate(tmp_path, seeded(make), plain, data(), **options)
    for largest in (SAMPLES, 3, 1):
        model = fails_above(seeded(make), largest, "forward")
        its_loss, found = evaluate(tmp_path, model, kind, data(), **options)
        rel = 0.0 if largest == SAMPLES else 1e-5
        assert its_loss == pytest.approx(loss, rel=rel, abs=0.0)
        assert found.metrics["test_loss"] == pytest.approx(loss, rel=rel, abs=0.0)
        assert (found.label_ids == expected.label_ids).all()
        assert found.predictions.shape == expected.predictions.shape
        assert abs(found.predictions - expected.predictions).max() <= 10 * rel


def test_an_evaluation_within_training_survives_an_oom(tmp_path):
    losses = []
    for kind, largest in ((transformers.Trainer, SAMPLES), (RebatchTrainer, 3)):
        args = {"eval_strategy": "epoch", "per_device_eval_batch_size": 2 * SAMPLES}
        model = seeded(gpt, 0.0)

        class Own(kind):
            def __init__(self, *arguments, **keywords):
                super().__init__(*arguments, eval_dataset=sentences(), **keywords)

        trainer = train(tmp_path, fails_above(model, 2 * largest, "forward"), Own, **args)
        losses.append(logged(trainer, "eval_loss"))
    assert len(losses[0]) == 2 and losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_a_prediction_of_sequences_of_other_lengths_is_padded_as_between_batches(tmp_path):
    class Generates(transformers.Trainer):
        """As many tokens for all samples as the longest sentence has."""

        def prediction_step(self, model, inputs, *_arguments, **_keywords):
            if len(inputs["input_ids"]) > 3:
                out_of_memory(None)
            length = int(inputs["labels"].ne(-100).sum(1).max())
            return None, inputs["input_ids"][:, :length], inputs["labels"]

    class Mine(RebatchMixin, Generates):
        pass

    trainer = Mine(
        seeded(gpt),
        transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]),
        rebatch={"log_level": "quiet"},
    )
    inputs = trainer.data_collator(sentences(SAMPLES))
    _, found, labels = trainer.prediction_step(trainer.model, inputs, False)
    assert labels.equal(inputs["labels"]) and found.shape == inputs["input_ids"].shape
    kept = found != -100
    assert found[kept].equal(inputs["input_ids"][kept]) and kept[:, :3].all() and not kept.all()


def test_logits_for_pairs_of_samples_are_refused(tmp_path):
    class Pairs(transformers.Trainer):
        def prediction_step(self, model, inputs, *_arguments, **_keywords):
            if len(inputs["input_ids"]) > 4:
                out_of_memory(None)
            x = inputs["input_ids"].float()
            return None, x @ x.T, None

    class Mine(RebatchMixin, Pairs):
        pass

    trainer = Mine(
        seeded(gpt),
        transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]),
        rebatch={"log_level": "quiet"},
    )
    for samples in (7, 8):
        with pytest.raises(ValueError, match="may both be that of the samples"):
            trainer.prediction_step(trainer.model, trainer.data_collator(sentences(samples)), False)


def test_an_evaluation_that_does_not_fit_at_all_says_so(tmp_path):
    with pytest.raises(rebatch.torch.Exhausted):
        evaluate(tmp_path, fails_above(seeded(gpt), 0, "forward"), RebatchTrainer)


class Weighted(transformers.Trainer):
    """Class weights: no mean over the samples."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**{name: t for name, t in inputs.items() if name != "labels"})
        weight = torch.tensor([1.0, 5.0, 20.0])
        loss = torch.nn.functional.cross_entropy(outputs.logits, inputs["labels"], weight)
        return (loss, outputs) if return_outputs else loss


class Summed(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True)
        loss = loss * len(inputs["labels"])
        return (loss, outputs) if return_outputs else loss


class OverSamples(transformers.Trainer):
    """Predictions that follow one another."""

    def prediction_step(self, *arguments, **keywords):
        loss, logits, labels = super().prediction_step(*arguments, **keywords)
        return loss, None if logits is None else logits.softmax(0), labels


@pytest.mark.parametrize(
    "plain, make, data, told",
    (
        (transformers.Trainer, bert, classes, None),
        (transformers.Trainer, gpt, sentences, None),
        (PlainOwnLoss, gpt, sentences, None),
        (Weighted, bert, classes, "the loss of samples .* compute_loss depends on the cut"),
        (Summed, bert, classes, "the loss of samples .* compute_loss depends on the cut"),
        (OverSamples, bert, classes, r"predictions\[0\] of samples .* of its own sample alone"),
    ),
)
def test_what_depends_on_the_cut_of_an_evaluation_alone_is_named_once(
    tmp_path, plain, make, data, told
):
    kind = type("Mine", (RebatchMixin, plain), {})
    model = fails_above(seeded(make), 4, "forward")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        evaluate(tmp_path, model, kind, data())
    texts = [str(w.message) for w in caught if issubclass(w.category, rebatch.torch.CutWarning)]
    assert len(texts) == (told is not None)
    assert not told or re.search(f"^rebatch: evaluate\\(\\): {told}", texts[0]), texts


def test_rows_that_belong_together_stay_so_in_an_evaluation(tmp_path):
    """Of pairs of neighbours: neither are they cut apart nor compared so."""
    sizes = []

    class Pairs(transformers.Trainer):
        def prediction_step(self, model, inputs, *_arguments, **_keywords):
            x = inputs["input_ids"].float()
            sizes.append(len(x))
            if len(x) > 4:
                out_of_memory(None)
            return (x[::2] - x[1::2]).square().mean(), None, None

    trainer = type("Mine", (RebatchMixin, Pairs), {})(
        seeded(gpt),
        transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]),
        rebatch={"log_level": "quiet", "micro_multiple_of": 2},
    )
    inputs = {"input_ids": torch.stack([d["input_ids"] for d in classes()[:6]])}
    x = inputs["input_ids"].float()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss, _, _ = trainer.prediction_step(trainer.model, inputs, True)
    assert not [w for w in caught if issubclass(w.category, rebatch.torch.CutWarning)]
    assert sizes[:3] in ([6, 4, 2], [6, 2, 2]) and not any(size % 2 for size in sizes)
    torch.testing.assert_close(loss, (x[::2] - x[1::2]).square().mean())

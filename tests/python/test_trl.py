"""trl's trainers: where a batch is cut, gradients and metrics are those of the uncut batch."""

import math

import pytest
import torch

pytest.importorskip("trl", reason="trl is not installed")
pytest.importorskip("accelerate")

import of_trl
import rebatch.transformers.trl as adapter
from models import same_bits, state_of
from of_trl import ROWS, cut_kind, data_of, model_of, trained, trainer_of
from rebatch.testing import fail_once

pytestmark = pytest.mark.filterwarnings("ignore")
GRPO = ("grpo", "sapo", "luspo", "dr_grpo", "dapo", "cispo", "vespo")
ALL_OF_DPO = {"loss_type": list(adapter._MEANS["DPOTrainer"]), "label_smoothing": 0.1}
CASES = [
    *[("grpo", {"loss_type": loss}) for loss in GRPO],
    ("grpo", {"importance_sampling_level": "sequence", "off_policy_mask_threshold": 0.5}),
    ("grpo", {"loss_type": "dapo", "gradient_accumulation_steps": 2, "steps_per_generation": 4}),
    ("rloo", {}),
    ("dpo", ALL_OF_DPO),
    ("dpo", {"use_weighting": True, "ld_alpha": 0.5, "gradient_accumulation_steps": 3}),
    ("reward", {"center_rewards_coefficient": 0.1}),
    ("sft", {}),
    ("sft", {"loss_type": "dft", "gradient_accumulation_steps": 3}),
]


def rows_of(name, samples):
    """How many rows so many samples of a batch are."""
    return samples * (2 if name in ("dpo", "reward") else 1)


def assert_near(plain, cut, relative):
    """Gradients of each update; their largest entry is the measure."""
    assert len(plain) == len(cut) > 0
    for before, after in zip(plain, cut):
        largest = max(float(g.abs().max()) for g in before)
        assert len(before) == len(after) and largest > 0
        for a, b in zip(before, after):
            assert torch.isfinite(b).all()
            assert float((a - b).abs().max()) <= relative * largest


def assert_same_metrics(plain, cut, relative):
    assert len(plain) == len(cut) > 0
    for before, after in zip(map(of_trl.not_timed, plain), map(of_trl.not_timed, cut)):
        assert before.keys() == after.keys() and len(before) > 4
        for name, value in before.items():
            assert math.isclose(value, after[name], rel_tol=relative, abs_tol=relative), name


@pytest.mark.parametrize("where", ("forward", "backward"))
@pytest.mark.parametrize("name, config", CASES, ids=str)
def test_a_cut_batch_has_the_gradients_and_metrics_of_the_uncut_one(name, config, where):
    _, plain, said = trained(name, config=config)
    trainer, cut, said_of_cut = trained(name, rows_of(name, 3), where, step={}, config=config)
    assert trainer.report.micro == 2 and trainer.report.samples == ROWS
    assert trainer.numbers()["rebatch/ooms_total"] == 2  # 8, 4
    assert_near(plain, cut, 1e-5)
    assert_same_metrics(said, said_of_cut, 1e-5)


@pytest.mark.parametrize(
    "name, config",
    (
        ("grpo", {"loss_type": "dapo"}),
        ("rloo", {"gradient_accumulation_steps": 3, "steps_per_generation": 3}),
        ("dpo", {"gradient_accumulation_steps": 3}),
        ("reward", {}),
        ("sft", {}),
    ),
    ids=str,
)
def test_without_an_oom_a_training_has_the_bits_of_trls(name, config):
    trainer, plain, said = trained(name, config=config)
    other, found, said_here = trained(name, step={}, config=config)
    assert all(same_bits(a, b) for a, b in zip(plain, found)) and len(plain) == len(found) == 2
    assert same_bits(state_of(trainer.model), state_of(other.model))
    assert list(map(of_trl.not_timed, said)) == list(map(of_trl.not_timed, said_here))


@pytest.mark.parametrize("name", ("grpo", "dpo"))
def test_under_autocast_a_cut_changes_what_bfloat16_rounds(name):
    config = {"bf16": True}
    _, plain, said = trained(name, config=config)
    _, cut, said_of_cut = trained(name, rows_of(name, 3), step={}, config=config)
    assert_near(plain[:1], cut[:1], 2e-2)
    assert_same_metrics(said[:1], said_of_cut[:1], 2e-2)


def test_an_oom_in_every_fourth_pass():
    config = {"loss_type": "grpo", "logging_steps": 2}
    _, plain, said = trained("grpo", config=config)
    trainer = trainer_of("grpo", step={}, config=config)
    failing = []

    def fails_from_here_on(completions, **_):
        failing.append(fail_once(trainer.model.model.layers[0], call=1, every=4))
        return of_trl.reward(completions)

    trainer.reward_funcs[0] = fails_from_here_on
    gradients = of_trl.Gradients()
    trainer.add_callback(gradients)
    trainer.train()
    assert len(failing) == 1  # it generates once for both updates
    assert failing[0].failures > 1 and trainer.numbers()["rebatch/ooms_total"] > 0
    assert_near(plain, gradients.found, 1e-5)
    assert_same_metrics(said, trainer.state.log_history[:-1], 1e-5)


def test_an_adapter_of_peft_has_its_reference():
    peft = pytest.importorskip("peft", reason="peft is not installed")

    def adapted():
        torch.manual_seed(0)
        lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        return {"model": model_of("dpo"), "peft_config": lora}

    _, plain, said = trained("dpo", **adapted())
    trainer, cut, said_of_cut = trained("dpo", 4, step={}, **adapted())
    assert trainer.report.micro == 2
    assert_near(plain, cut, 1e-5)
    assert_same_metrics(said, said_of_cut, 1e-5)


@pytest.mark.parametrize("name", ("grpo", "dpo"))
def test_the_first_batch_is_checked(name, capsys):
    trainer = trainer_of(name, step={"check": True})
    trainer.train()
    assert "no mistake" in capsys.readouterr().out and trainer.report.samples == ROWS


@pytest.mark.parametrize("name", ("grpo", "dpo"))
def test_evaluation_is_that_of_trl(name):
    found = []
    for step in (None, {}):
        trainer = trainer_of(name, step=step, eval_dataset=data_of(name, ROWS))
        torch.manual_seed(1)
        found.append(of_trl.not_timed(trainer.evaluate()))
    for line in found:
        line.pop("eval_samples_per_second"), line.pop("eval_steps_per_second")
    assert found[0] == found[1]


@pytest.mark.parametrize("mean_of_tokens", (False, True))
def test_sft_with_parts_that_are_trimmed_has_its_metrics(mean_of_tokens, monkeypatch):
    def trimmed(batch, first, count):
        width = int(batch["attention_mask"][first : first + count].sum(1).max())
        return {name: value[first : first + count, :width] for name, value in batch.items()}

    if mean_of_tokens:  # as the loss of a batch whose tokens the Trainer does not count
        monkeypatch.setattr(of_trl.transformers.Trainer, "_get_num_items_in_batch", lambda *_: None)
    _, plain, said = trained("sft")
    step = {"slice": trimmed, "length": lambda batch: len(batch["input_ids"])}
    trainer, cut, said_of_cut = trained("sft", 3, step=step)
    assert trainer.report.micro == 2
    assert_near(plain, cut, 1e-5)
    assert_same_metrics(said, said_of_cut, 1e-5)


def test_sft_with_a_loss_of_the_programs_own_is_cut_by_training_step(monkeypatch):
    def loss_of_tokens(outputs, labels, num_items_in_batch):
        logits, labels = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        total = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        return total / num_items_in_batch

    own = {"compute_loss_func": loss_of_tokens}
    _, plain, _ = trained("sft", **own)
    trainer, cut, _ = trained("sft", 3, step={}, **own)
    assert trainer.report.micro == 2
    assert_near(plain, cut, 1e-5)
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 2)
    with pytest.raises(ValueError, match="SFTTrainer has compute_loss_func.*several processes"):
        adapter.training_step_for(trainer, {})


# ---- refused ----


@pytest.mark.parametrize(
    "name, config, said",
    (
        ("grpo", {"loss_type": "bnpo"}, "'bnpo', which divides by the tokens of all rows"),
        ("grpo", {"top_entropy_quantile": 0.5}, "top_entropy_quantile .* is 0.5.*expected .*=1.0"),
        ("grpo", {"entropy_coef": 0.01}, "entropy_coef .* is 0.01.*expected entropy_coef=0.0"),
        ("dpo", {"loss_type": "aot"}, "'aot', which sorts all pairs"),
        ("dpo", {"loss_type": ["sigmoid", "aot_unpaired"]}, "'aot_unpaired', which sorts all rows"),
        ("dpo", {"loss_type": "sft"}, "'sft', which is a mean over the tokens"),
        ("kto", {}, "KTOTrainer, whose loss has a KL that is a mean over the rows of all ranks"),
    ),
    ids=str,
)
def test_what_depends_on_the_cut_is_refused_by_name(name, config, said):
    with pytest.raises(ValueError, match=said):
        trainer_of(name, step={}, config=config)


def test_a_mixture_of_experts_is_refused_with_its_auxiliary_loss():
    mixture = model_of("grpo", mixture=True)
    mixture.config.output_router_logits = True
    with pytest.raises(ValueError, match="router_aux_loss_coef of the GRPOTrainer"):
        trainer_of("grpo", step={}, model=mixture, config={"router_aux_loss_coef": 0.01})


def test_an_older_trl_is_refused(monkeypatch):
    monkeypatch.setattr(adapter.importlib.metadata, "version", lambda _: "1.14.2")
    with pytest.raises(ValueError, match=r"trl is 1\.14\.2: expected 1\.15 or newer"):
        adapter.training_step_for(trainer_of("dpo", kind=None), {})


def test_private_names_are_there():
    trainer = trainer_of("dpo", cut_kind("dpo"), step={})
    assert all(hasattr(trainer, name) for name in adapter.PRIVATE)


# ---- rows ----


def test_images_are_cut_with_their_rows():
    inputs = {
        "completion_ids": torch.arange(8).view(4, 2),
        "num_images": [1, 0, 2, 1],
        "image_grid_thw": torch.tensor([[1, 1, 2], [1, 1, 1], [1, 2, 2], [1, 1, 1]]),
        "pixel_values": torch.arange(8.0).view(8, 1),
        "num_items_in_batch": torch.tensor(8),
        "tool_mask": None,
    }
    rows = adapter._Rows(are_pairs=False)
    part = rows.part(inputs, 2, 2)
    assert rows.length(inputs) == 4 and part["num_images"] == [2, 1]
    assert part["completion_ids"].tolist() == [[4, 5], [6, 7]]
    assert part["pixel_values"].flatten().tolist() == [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert part["image_grid_thw"].shape == (3, 3) and part["tool_mask"] is None
    assert part["num_items_in_batch"] == 8


def test_pairs_are_cut_with_both_rows():
    inputs = {"input_ids": torch.arange(8), "ref_chosen_logps": torch.arange(4.0)}
    part = adapter._Rows(are_pairs=True).part(inputs, 1, 2)
    assert part["input_ids"].tolist() == [1, 2, 5, 6]
    assert part["ref_chosen_logps"].tolist() == [1.0, 2.0]


def test_entries_that_are_no_rows_are_told_by_name():
    inputs = {"completion_ids": torch.zeros(4, 2), "more": torch.zeros(3)}
    with pytest.raises(ValueError, match="more of the batch has 3 entries: expected 4"):
        adapter._Rows(are_pairs=False).part(inputs, 0, 2)


def test_graphs_have_no_effect_and_that_is_said():
    with pytest.warns(RuntimeWarning, match="graphs=True has no effect on SFTTrainer"):
        trainer = trainer_of("sft", step={"graphs": True})
    trainer.train()
    assert not trainer._rebatch.backward.has_graphs

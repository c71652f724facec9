"""Trainings of trl's trainers with a tiny model, with and without rebatch, for tests."""

import functools
import os
import tempfile
import warnings

os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1")  # nothing is fetched

import datasets
import safetensors.torch
import tokenizers
import torch
import transformers
import trl

from models import out_of_memory
from rebatch.transformers import RebatchMixin

ROWS = 8
WORDS = [f"w{i}" for i in range(20)]
_KINDS = {"grpo": trl.GRPOTrainer, "rloo": trl.RLOOTrainer, "dpo": trl.DPOTrainer}
_KINDS.update(reward=trl.RewardTrainer, sft=trl.SFTTrainer, kto=trl.KTOTrainer)
_CONFIGS = {"grpo": trl.GRPOConfig, "rloo": trl.RLOOConfig, "dpo": trl.DPOConfig}
_CONFIGS.update(reward=trl.RewardConfig, sft=trl.SFTConfig, kto=trl.KTOConfig)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
datasets.disable_progress_bars()
warnings.simplefilter("ignore")


def cut_kind(name):
    class Cut(RebatchMixin, _KINDS[name]):
        pass

    return Cut


def tokenizer():
    special = ["<pad>", "<eos>", "<unk>"]
    vocabulary = {word: i for i, word in enumerate([*special, *WORDS])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


@functools.lru_cache(maxsize=None)
def _folder(_process):
    """Of models, from which trl makes references. Each process has its own."""
    return tempfile.TemporaryDirectory()


def model_of(name, mixture=False):
    """As from_pretrained() gives it."""
    torch.manual_seed(0)
    model = _made(name, mixture)
    folder = _folder(os.getpid()).name
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)  # of a model, transformers saves on one rank alone
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    safetensors.torch.save_file(weights, f"{folder}/model.safetensors", {"format": "pt"})
    return type(model).from_pretrained(folder, attn_implementation="eager")


def _made(name, mixture):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 64}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    own = {"pad_token_id": 0, "eos_token_id": 1, "vocab_size": 23, "initializer_range": 0.5}
    if mixture:
        return transformers.MixtralForCausalLM(
            transformers.MixtralConfig(**sizes, **layers, **own, num_local_experts=2)
        )
    config = transformers.LlamaConfig(**sizes, **layers, **own)
    if name == "reward":
        config.num_labels = 1
        return transformers.LlamaForSequenceClassification(config)
    return transformers.LlamaForCausalLM(config)


def some_words(seed, count):
    draw = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (count,), generator=draw))


def data_of(name, count=2 * ROWS):
    rows = []
    for i in range(count):
        row = {"text" if name == "sft" else "prompt": some_words(i, 2 + i % 3)}
        if name in ("dpo", "reward"):
            row["chosen"] = " " + some_words(100 + i, 1 + i % 5)
            row["rejected"] = " " + some_words(200 + i, 1 + (i + 2) % 4)
            row.pop("prompt") if name == "reward" else None
        if name == "kto":
            row.update(completion=" " + some_words(100 + i, 1 + i % 5), label=i % 2 == 0)
        rows.append(row)
    return datasets.Dataset.from_list(rows)


def reward(completions, **_):
    """Of the letters, so that each completion has another one."""
    return [sum(map(ord, text)) % 17 / 17 for text in completions]


def fail_above(model, largest, where="forward"):
    """The passes that train run out of memory for more rows."""

    def before(_module, _arguments, keywords):
        if torch.is_grad_enabled() and len(keywords["input_ids"]) > largest:
            out_of_memory(None)

    def after(_module, _arguments, keywords, outputs):
        if torch.is_grad_enabled() and len(keywords["input_ids"]) > largest:
            found = outputs["log_probs"] if "log_probs" in outputs else outputs["logits"]
            found.register_hook(out_of_memory)

    if where == "forward":
        model.register_forward_pre_hook(before, with_kwargs=True)
    else:
        model.register_forward_hook(after, with_kwargs=True)


class Gradients(transformers.TrainerCallback):
    def __init__(self):
        self.found = []

    def on_pre_optimizer_step(self, _args, _state, _control, model=None, **_):
        self.found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])


def trainer_of(name, kind=None, *, step=None, model=None, config=None, **options):
    arguments = {"per_device_train_batch_size": ROWS, "max_steps": 2, "logging_steps": 1}
    arguments.update(learning_rate=0.05, lr_scheduler_type="constant", optim="sgd")
    arguments.update(use_cpu=True, bf16=False, report_to=[], save_strategy="no", disable_tqdm=True)
    arguments.update(max_grad_norm=0.0, gradient_checkpointing=False)
    if name in ("grpo", "rloo"):
        arguments.update(num_generations=4, max_completion_length=6, num_iterations=2)
        arguments.update(beta=0.1)
    arguments.update(config or {})
    extra = {"reward_funcs": [reward]} if name in ("grpo", "rloo") else {}
    if step is not None:
        extra["rebatch"] = {"log_level": "quiet", "growth": False, **step}
    kind = kind or (_KINDS[name] if step is None else cut_kind(name))
    with tempfile.TemporaryDirectory() as folder:
        trainer = kind(
            model=model if model is not None else model_of(name),
            args=_CONFIGS[name](folder, **arguments),
            train_dataset=data_of(name),
            processing_class=tokenizer(),
            **extra,
            **options,
        )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def trained(name, largest=None, where="forward", **options):
    """(trainer, gradients at each update, lines of the log) of a training."""
    trainer = trainer_of(name, **options)
    if largest is not None:
        fail_above(trainer.model, largest, where)
    gradients = Gradients()
    trainer.add_callback(gradients)
    trainer.train()
    return trainer, gradients.found, trainer.state.log_history[:-1]


def not_timed(line):
    """Of a line of the log, what training is."""
    return {
        name: value
        for name, value in line.items()
        if not name.startswith("rebatch/") and "time" not in name and name != "grad_norm"
    }

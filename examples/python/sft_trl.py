"""TRL's SFTTrainer on answers of very different lengths, cut by their padded tokens. Memory decides
how many run at a time: no option says so. The model is made from a configuration and the answers
are random, so nothing is downloaded. Needs trl.

    python sft_trl.py --oom-above 1000    # on a CPU: more padded tokens run out of memory
"""

import argparse
import random
import tempfile
from typing import Any, Dict

import datasets
import tokenizers
import torch
import transformers
import trl

from rebatch.transformers import RebatchMixin

WORDS, LONGEST = 64, 256


class LongSFT(RebatchMixin, trl.SFTTrainer):
    pass


def longest(batch: Dict[str, Any], first: int, count: int) -> int:
    return int(batch["attention_mask"][first : first + count].sum(1).max())


def padded_tokens(batch: Dict[str, Any], first: int, count: int) -> int:
    return count * longest(batch, first, count)


def trimmed(batch: Dict[str, Any], first: int, count: int) -> Dict[str, Any]:
    width = longest(batch, first, count)
    return {name: tensor[first : first + count, :width] for name, tensor in batch.items()}


BY_TOKENS = {"cost": padded_tokens, "slice": trimmed, "length": lambda b: len(b["input_ids"])}


def answers(count: int) -> datasets.Dataset:
    draw = random.Random(0)
    lengths = (max(2, min(LONGEST, int(draw.lognormvariate(3.5, 1)))) for _ in range(count))
    rows = [[draw.randrange(3, WORDS) for _ in range(length)] for length in lengths]
    return datasets.Dataset.from_list([{"input_ids": row} for row in rows])


def tiny_llama() -> transformers.LlamaForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": LONGEST}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=WORDS, **sizes, **layers)
    return transformers.LlamaForCausalLM(config)


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    words = tokenizers.models.WordLevel({f"t{i}": i for i in range(WORDS)}, unk_token="t0")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), pad_token="t1", eos_token="t2"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="SFT on answers of all lengths.")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--oom-above", type=int, default=0, help="padded tokens at a time")
    args = parser.parse_args()
    transformers.set_seed(0)
    model = tiny_llama()

    def run_out(_: Any, inputs: Any) -> None:
        if args.oom_above and inputs[0].numel() > args.oom_above:
            raise torch.OutOfMemoryError("CUDA out of memory. (--oom-above)")

    model.model.embed_tokens.register_forward_pre_hook(run_out)
    with tempfile.TemporaryDirectory() as folder:
        config = trl.SFTConfig(
            folder,
            per_device_train_batch_size=32,
            max_steps=args.steps,
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
            bf16=False,
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
        )
        trainer = LongSFT(
            model,
            config,
            train_dataset=answers(128),
            processing_class=tokenizer(),
            rebatch=BY_TOKENS,
        )
        trainer.train()
    for row in trainer.state.log_history[:-1]:
        print(f"step {row['step']}: loss {row['loss']:.3f}")
    print(f"{trainer.report}, budget {trainer.report.budget:,} padded tokens")


if __name__ == "__main__":
    main()

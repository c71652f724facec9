"""Instruction tuning of a small Qwen: the loss is of the answers' tokens alone."""

import argparse

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from transformers import Qwen3Config, Qwen3ForCausalLM

import rebatch.torch as rebatch

LENGTH, WORDS = 512, 32000


class Instructions(Dataset):
    """Questions of 100 to 300 tokens, the answer behind, and padding."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        tokens = (torch.arange(LENGTH) * 13 + index * 7) % WORDS
        labels = tokens.clone()
        question, end = 100 + (index * 29) % 200, 350 + (index * 53) % 163
        labels[:question] = -100
        labels[end:] = -100
        tokens[end:] = 0
        return {
            "input_ids": tokens,
            "labels": labels,
            "attention_mask": (torch.arange(LENGTH) < end).long(),
        }


def loss_fn(model, samples):
    hidden = model.model(samples["input_ids"], attention_mask=samples["attention_mask"])[0]
    labels = samples["labels"][:, 1:]
    counted = labels != -100
    logits = model.lm_head(hidden[:, :-1][counted])
    return functional.cross_entropy(logits.float(), labels[counted])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    torch.manual_seed(6)
    config = Qwen3Config(
        vocab_size=WORDS, hidden_size=768, intermediate_size=2048, num_hidden_layers=8,
        num_attention_heads=12, num_key_value_heads=4, head_dim=64, use_cache=False,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to("cuda", torch.bfloat16)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    train_step = rebatch.Step(model, optimizer, loss_fn)
    loader = DataLoader(Instructions(args.batch * args.steps), batch_size=args.batch)
    for step, batch in enumerate(loader):
        loss = train_step({name: value.cuda() for name, value in batch.items()})
        if step % 10 == 0:
            print(f"step {step}: {loss:.3f}")


if __name__ == "__main__":
    main()

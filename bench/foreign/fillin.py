"""BERT learns to fill in masked words: the collator pads to the longest text and draws the masks,
as in transformers' examples/pytorch/language-modeling/run_mlm_no_trainer.py, with rebatch.Step."""

import argparse

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForMaskedLM, get_scheduler

import rebatch.torch as rebatch

PAD, CLS, SEP, MASK, FIRST, WORDS = 0, 101, 102, 103, 1000, 30522


class Texts(Dataset):
    """Texts of 40 to 256 tokens, most of them short."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        length = 40 + int(216 * torch.rand((), generator=draw) ** 2)
        words = torch.randint(FIRST, WORDS, (length - 2,), generator=draw).tolist()
        return {"input_ids": [CLS, *words, SEP], "attention_mask": [1] * length}


class MaskingCollator:
    """Pads to a multiple of eight, and hides some of the words."""

    def __init__(self, probability=0.15, multiple=8):
        self.probability, self.multiple = probability, multiple

    def __call__(self, examples):
        longest = max(len(example["input_ids"]) for example in examples)
        longest += -longest % self.multiple
        batch = {}
        for name, filler in (("input_ids", PAD), ("attention_mask", 0)):
            rows = [example[name] for example in examples]
            batch[name] = torch.tensor([row + [filler] * (longest - len(row)) for row in rows])
        batch["input_ids"], batch["labels"] = self.hide(batch["input_ids"])
        return batch

    def hide(self, inputs):
        labels = inputs.clone()
        chance = torch.full(labels.shape, self.probability)
        chance.masked_fill_(inputs < FIRST, 0.0)
        chosen = torch.bernoulli(chance).bool()
        labels[~chosen] = -100
        masked = torch.bernoulli(torch.full(labels.shape, 0.8)).bool() & chosen
        inputs[masked] = MASK
        changed = torch.bernoulli(torch.full(labels.shape, 0.5)).bool() & chosen & ~masked
        inputs[changed] = torch.randint(FIRST, WORDS, labels.shape)[changed]
        return inputs, labels


def groups(model, decay):
    bare = ("bias", "LayerNorm.weight")
    named = list(model.named_parameters())
    return [
        {
            "params": [p for name, p in named if not any(part in name for part in bare)],
            "weight_decay": decay,
        },
        {
            "params": [p for name, p in named if any(part in name for part in bare)],
            "weight_decay": 0.0,
        },
    ]


def loss_fn(model, samples):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return model(**samples).loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--learning_rate", type=float, default=5e-5)
    parser.add_argument("--weight_decay", type=float, default=0.01)
    args = parser.parse_args()
    torch.manual_seed(9)
    loader = DataLoader(
        Texts(args.batch * args.steps), args.batch, shuffle=True, collate_fn=MaskingCollator()
    )
    model = BertForMaskedLM(BertConfig(vocab_size=WORDS)).to("cuda")
    model.train()
    optimizer = torch.optim.AdamW(groups(model, args.weight_decay), lr=args.learning_rate)
    scheduler = get_scheduler(
        "linear", optimizer=optimizer, num_warmup_steps=10, num_training_steps=args.steps
    )
    train_step = rebatch.Step(model, optimizer, loss_fn)
    for step, batch in enumerate(loader):
        longest = batch["input_ids"].shape[1]
        loss = train_step({name: tensor.to("cuda") for name, tensor in batch.items()})
        scheduler.step()
        print(f"step {step}: {longest} tokens, loss {loss:.3f}")


if __name__ == "__main__":
    main()

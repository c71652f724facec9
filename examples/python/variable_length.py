"""Sequences of different lengths, cut by what they cost.

The sequences of a micro-batch are padded to its longest, so its memory grows with its padded
tokens: its sequences times its longest. rebatch cuts by this cost, so one long sequence does not
make all micro-batches small. Three functions say what a batch is:

    slice       some sequences of the batch, trimmed to the longest of them
    cost        their padded tokens
    normalizer  the tokens of the whole batch: a token weighs the same in every micro-batch

    python variable_length.py --oom-above 1000
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import List

import torch
import torch.nn.functional as F

import rebatch.torch as rebatch

TEXT = Path(__file__).resolve().parent.parent / "gpt" / "text.txt"
PADDING = 0
LONG = 400  # bytes of the one long sequence in each batch


@dataclass
class Batch:
    tokens: torch.Tensor  # (sequences, longest), padded with PADDING
    lengths: List[int]  # on the CPU, because cost() asks for them often


def cut(batch: Batch, first: int, count: int) -> Batch:
    lengths = batch.lengths[first : first + count]
    return Batch(batch.tokens[first : first + count, : max(lengths)], lengths)


def padded_tokens(batch: Batch, first: int, count: int) -> int:
    return count * max(batch.lengths[first : first + count])


def predicted_tokens(batch: Batch) -> int:
    return sum(batch.lengths) - len(batch.lengths)  # the first of each sequence is given


class Model(torch.nn.Module):
    """Predicts the next byte from those before it; what is behind it, padding too, has no part."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.bytes = torch.nn.Embedding(256, width, padding_idx=PADDING)
        self.layer = torch.nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.head = torch.nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(
            tokens.shape[1], device=tokens.device
        )
        return self.head(self.layer(self.bytes(tokens), src_mask=mask, is_causal=True))


class Loss:
    """The sum over the tokens that are predicted, and beside it the shape of what ran."""

    def __init__(self, oom_above: int):
        self.oom_above = oom_above

    def __call__(self, model: Model, part: Batch) -> tuple[torch.Tensor, list]:
        if self.oom_above and part.tokens.numel() > self.oom_above:
            raise torch.OutOfMemoryError("CUDA out of memory. (--oom-above)")
        logits, targets = model(part.tokens[:, :-1]), part.tokens[:, 1:]
        loss = F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=PADDING, reduction="sum"
        )
        return loss, [tuple(part.tokens.shape)]


def batches(args: argparse.Namespace, device: torch.device):
    """Sentences of the text, and within each batch one sequence that is much longer."""
    text = TEXT.read_text()
    sentences = [s.strip().encode() for s in text.replace(";", ".").split(".") if s.strip()]
    for step in range(args.steps):
        chosen = [sentences[(step * args.batch + i) % len(sentences)] for i in range(args.batch)]
        chosen[args.batch // 3] = text[:LONG].encode()
        rows = [torch.tensor(list(sequence)) for sequence in chosen]
        padded = torch.nn.utils.rnn.pad_sequence(rows, True, PADDING)
        yield Batch(padded.to(device), [len(row) for row in rows])


def show(ran: list, batch: Batch) -> None:
    """The micro-batches of one step."""
    first = 0
    for count, longest in ran:
        last = first + count - 1
        print(f"  sequences {first:2}-{last:2}, longest {longest:3}, {count * longest:5,} tokens")
        first += count
    total = sum(count * longest for count, longest in ran)
    print(f"  {total:,} padded tokens ran; in one piece they are {batch.tokens.numel():,}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains on sequences of different lengths.")
    parser.add_argument("--batch", type=int, default=32, help="sequences in an update")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--oom-above", type=int, default=0, help="more padded tokens at a time run out of memory"
    )
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, loss_fn = Model().to(device), Loss(args.oom_above)
    step = rebatch.Step(
        model,
        torch.optim.AdamW(model.parameters(), lr=5e-3),
        loss_fn,
        normalizer=predicted_tokens,
        cost=padded_tokens,
        slice=cut,
        length=lambda batch: len(batch.lengths),
    )
    for batch in batches(args, device):
        loss = step(batch).item()
        print(
            f"step {step.report.step}: loss {loss:.4f} a token, "
            f"micro-batches: {step.report.microbatches}, OOMs: {step.report.ooms}"
        )
    show(step.outputs, batch)


if __name__ == "__main__":
    main()

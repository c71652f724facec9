"""A GPT-2 style language model on the bytes of a text, in whatever memory there is.

The batch that the optimizer sees is always --batch sequences. How many of them run at a time is
found while training: an OOM makes the micro-batch smaller, and the update stays the same.

    python gpt.py                                     # tiny, on the GPU if there is one
    python gpt.py --preset 124M --batch 64 --context 1024 --dtype bfloat16 --limit 12GiB
    python gpt.py --oom-above 5                       # see an OOM on any machine
"""

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import rebatch.torch as rebatch

TEXT = Path(__file__).resolve().parent.parent / "gpt" / "text.txt"
# layers, heads, width, vocabulary: GPT-2's own is rounded up to a multiple of 64. Bytes use 256.
PRESETS = {"tiny": (3, 4, 96, 256), "124M": (12, 12, 768, 50304)}


class Block(torch.nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sequences, length, width = x.shape
        split = (sequences, length, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(self.norm1(x)).view(split).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt(torch.nn.Module):
    def __init__(self, layers: int, heads: int, width: int, words: int, context: int):
        super().__init__()
        self.words = torch.nn.Embedding(words, width)
        self.places = torch.nn.Embedding(context, width)
        self.blocks = torch.nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = torch.nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.words.weight)


def loss_of(args: argparse.Namespace):
    def loss_fn(model, samples):
        tokens, targets = samples
        if args.oom_above and len(tokens) > args.oom_above:
            raise torch.OutOfMemoryError("CUDA out of memory. (--oom-above)")
        return F.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())

    return loss_fn


def batches(args: argparse.Namespace, device: torch.device):
    text = torch.tensor(list(TEXT.read_bytes()))
    for _ in range(args.steps):
        starts = torch.randint(0, len(text) - args.context, (args.batch, 1))
        places = starts + torch.arange(args.context + 1)
        tokens = text[places].to(device)
        yield tokens[:, :-1], tokens[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a small GPT-2 with rebatch.")
    parser.add_argument("--preset", choices=PRESETS, default="tiny")
    parser.add_argument("--batch", type=int, default=16, help="sequences in an update")
    parser.add_argument("--context", type=int, default=64, help="tokens in a sequence")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--limit", help="most GPU memory, such as 12GiB or 50%%")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--oom-above", type=int, help="more sequences at a time run out of memory")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.limit and device.type == "cpu":
        parser.error("--limit needs a GPU: here --oom-above shows the same")
    if args.limit:
        rebatch.install(limit=args.limit)

    torch.manual_seed(0)
    model = Gpt(*PRESETS[args.preset], args.context).to(device)
    step = rebatch.Step(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        loss_of(args),
        clip=1.0,
        autocast=None if args.dtype == "float32" else getattr(torch, args.dtype),
        scaler=torch.amp.GradScaler(device.type) if args.dtype == "float16" else None,
    )
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"GPT-2 {args.preset} on {device.type}: {parameters / 1e6:.1f} million parameters, "
        f"{args.batch} sequences of {args.context} tokens in an update"
    )
    print(" step     loss  micro-batch  OOMs  tokens/s      peak")
    peak = 0
    for batch in batches(args, device):
        start = time.perf_counter()
        loss = step(batch).item()
        rate = batch[0].numel() / (time.perf_counter() - start)
        r = step.report
        peak = r.peak_bytes or peak  # without install() only a size's first steps are measured
        memory = f"{peak / (1 << 30):.2f} GiB" if peak else "-"
        print(
            f"{r.step:5}  {loss:7.4f}  {f'{r.microbatches} x {r.micro}':>11}  {r.ooms:4}  "
            f"{rate:8,.0f}  {memory:>8}"
        )


if __name__ == "__main__":
    main()

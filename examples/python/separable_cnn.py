"""Separable convolutions and a smaller micro-batch: two ways to need less memory, side by side.

A separable convolution is a 3 x 3 filter for each channel, and then a 1 x 1 convolution. It has
about an eighth of the parameters, which saves what does not depend on the micro-batch: weights,
gradients and the optimizer's state. The smaller micro-batch saves activations.

BatchNorm normalizes by the statistics of the samples that run together, so its result depends on
the cut. --norm chooses what to do about it:

    group   GroupNorm, which normalizes each sample by itself
    ghost   BatchNorm over fixed groups of 8 samples; micro_multiple_of=8 cuts between groups
    batch   BatchNorm as it is: step.check() says what is wrong with it

    python separable_cnn.py --norm ghost --oom-above 20
"""

import argparse

import torch
import torch.nn.functional as F

import rebatch.torch as rebatch

GROUP = 8  # samples that "ghost" normalizes together
WIDTHS = (32, 64, 128, 256)


class GhostBatchNorm(torch.nn.BatchNorm2d):
    """Normalizes groups of 8 samples, in the order of the samples."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(x)
        return torch.cat([super(GhostBatchNorm, self).forward(part) for part in x.split(GROUP)])


NORMS = {
    "group": lambda channels: torch.nn.GroupNorm(8, channels),
    "ghost": GhostBatchNorm,
    "batch": torch.nn.BatchNorm2d,
}


def block(kind: str, norm: str, inputs: int, outputs: int) -> torch.nn.Sequential:
    if kind == "separable":
        convolutions = [
            torch.nn.Conv2d(inputs, inputs, 3, stride=2, padding=1, groups=inputs, bias=False),
            torch.nn.Conv2d(inputs, outputs, 1, bias=False),
        ]
    else:
        convolutions = [torch.nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)]
    return torch.nn.Sequential(*convolutions, NORMS[norm](outputs), torch.nn.ReLU(inplace=True))


def network(kind: str, norm: str, classes: int = 4) -> torch.nn.Sequential:
    blocks = [block(kind, norm, *widths) for widths in zip(WIDTHS, WIDTHS[1:])]
    first = torch.nn.Conv2d(3, WIDTHS[0], 3, padding=1)
    end = [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(WIDTHS[-1], classes)]
    return torch.nn.Sequential(first, torch.nn.ReLU(inplace=True), *blocks, *end)


def images(samples: int, device: torch.device):
    """Stripes in one of four directions, with noise."""
    kinds = torch.randint(0, 4, (samples,))
    y, x = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    stripes = torch.stack([x, y, x + y, x - y]).mul(0.8).sin()[kinds]
    noisy = stripes[:, None] + 0.5 * torch.randn(samples, 3, 32, 32)
    return noisy.to(device), kinds.to(device)


def saved_bytes(model: torch.nn.Module, batch) -> int:
    """The activations that the backward pass needs, as autograd keeps them; weights not counted."""
    kept = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = F.cross_entropy(model(batch[0]), batch[1])  # keeps the graph alive
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    del loss
    return sum(size for address, size in kept.items() if address not in weights)


def train(kind: str, args: argparse.Namespace, device: torch.device) -> None:
    torch.manual_seed(0)
    model = network(kind, args.norm).to(device)

    def loss_fn(model, samples):
        if args.oom_above and len(samples[0]) > args.oom_above:
            raise torch.OutOfMemoryError("CUDA out of memory. (--oom-above)")
        return F.cross_entropy(model(samples[0]), samples[1])

    parameters = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    ghost = {"micro_multiple_of": GROUP} if args.norm == "ghost" else {}
    step = rebatch.Step(model, optimizer, loss_fn, **ghost)
    activations = saved_bytes(network(kind, args.norm).to(device), images(GROUP, device)) / GROUP
    print(
        f"{kind}: {parameters:,} parameters, with gradients and AdamW "
        f"{16 * parameters / (1 << 20):.2f} MiB; activations {activations / (1 << 20):.2f} MiB "
        "a sample"
    )
    if args.norm == "batch":
        print(step.check(images(4, device)))  # a few samples show it
    for i in range(args.steps):
        loss = step(images(args.batch, device)).item()
        r = step.report
        if i in (0, args.steps - 1):
            peak = f", peak {r.peak_bytes / (1 << 20):.1f} MiB" if r.peak_bytes else ""
            print(f"  step {i}: loss {loss:.4f}, micro-batch {r.microbatches} x {r.micro}{peak}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Separable and full convolutions with rebatch.")
    parser.add_argument("--norm", choices=NORMS, default="group")
    parser.add_argument("--batch", type=int, default=64, help="images in an update")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--oom-above", type=int, help="more images at a time run out of memory")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for kind in ("separable", "full"):
        train(kind, args, device)


if __name__ == "__main__":
    main()

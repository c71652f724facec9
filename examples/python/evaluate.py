"""Evaluation in as many parts as memory asks for.

step.evaluate(batch) is the loss of a batch without training; rebatch.map(model, inputs) is what a
model returns for inputs of any number. Both find their own size, which is usually larger than that
of training, and keep it for the next call. rebatch.Map(model) is the same with a report.

    python evaluate.py --oom-above 300
"""

import argparse

import torch
import torch.nn.functional as F

import rebatch.torch as rebatch

CLASSES = 3


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(2, 64),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.1),
            torch.nn.Linear(64, 64),
            torch.nn.ReLU(),
            torch.nn.Linear(64, CLASSES),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def spirals(samples: int, device: torch.device):
    """Points on three spirals, and which of them each point is on."""
    kinds = torch.randint(0, CLASSES, (samples,))
    radius = torch.rand(samples)
    angle = 4 * radius + kinds * (2 * torch.pi / CLASSES) + 0.1 * torch.randn(samples)
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return points.to(device), kinds.to(device)


class Counted:
    """A model whose calls are counted. More samples than `oom_above` run out of memory, as they do
    on a GPU by themselves."""

    def __init__(self, model: Net, oom_above: int):
        self.model, self.oom_above, self.sizes = model, oom_above, []

    def __call__(self, points: torch.Tensor) -> torch.Tensor:
        if self.oom_above and len(points) > self.oom_above:
            raise torch.OutOfMemoryError("CUDA out of memory. (--oom-above)")
        result = self.model(points)
        self.sizes.append(len(points))
        return result

    def __str__(self) -> str:
        calls = f"{len(self.sizes)} call{'s' * (len(self.sizes) != 1)}"
        return f"{sum(self.sizes):,} samples in {calls} of at most {max(self.sizes):,}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains, and evaluates with rebatch.")
    parser.add_argument("--samples", type=int, default=5000, help="to evaluate")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--oom-above", type=int, default=0, help="more samples at a time run out of memory"
    )
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Net().to(device)
    counted = Counted(model, args.oom_above)

    def loss_fn(_model, samples):
        return F.cross_entropy(counted(samples[0]), samples[1])

    step = rebatch.Step(model, torch.optim.AdamW(model.parameters(), lr=0.01), loss_fn)
    for _ in range(args.steps):
        loss = step(spirals(128, device))
    print(f"training: {args.steps} steps, loss {loss.item():.4f}")

    points, kinds = spirals(args.samples, device)
    counted.sizes.clear()
    print(f"step.evaluate: loss {step.evaluate((points, kinds)).item():.4f}; {counted}")

    def classify(points: torch.Tensor) -> torch.Tensor:
        return counted(points).argmax(dim=1)

    model.eval()  # map() leaves the mode to you
    for _ in range(2):
        counted.sizes.clear()
        right = (rebatch.map(classify, points) == kinds).float().mean().item()
        print(f"rebatch.map: {right:.1%} are right; {counted}")


if __name__ == "__main__":
    main()

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


def in_calls(report: rebatch.MapReport) -> str:
    """What a report says of the calls."""
    calls = f"{report.microbatches} call{'s' * (report.microbatches != 1)}"
    return f"{report.samples:,} samples in {calls} of at most {report.micro:,}"


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

    def in_little_room(points: torch.Tensor) -> torch.Tensor:
        """More samples than --oom-above run out of memory, as they do on a GPU by themselves."""
        if args.oom_above and len(points) > args.oom_above:
            raise torch.OutOfMemoryError("CUDA out of memory. (--oom-above)")
        return model(points)

    def loss_fn(_model, samples):
        return F.cross_entropy(in_little_room(samples[0]), samples[1])

    step = rebatch.Step(model, torch.optim.AdamW(model.parameters(), lr=0.01), loss_fn)
    for _ in range(args.steps):
        loss = step(spirals(128, device))
    print(f"training: {args.steps} steps, loss {loss.item():.4f}")

    points, kinds = spirals(args.samples, device)
    loss = step.evaluate((points, kinds)).item()
    print(f"step.evaluate: loss {loss:.4f}; {in_calls(step.evaluation_report)}")

    def classify(points: torch.Tensor) -> torch.Tensor:
        return in_little_room(points).argmax(dim=1)

    model.eval()  # map() leaves the mode to you
    predict = rebatch.Map(classify)
    for _ in range(2):
        right = (predict(points) == kinds).float().mean().item()
        print(f"rebatch.Map: {right:.1%} are right; {in_calls(predict.report)}")


if __name__ == "__main__":
    main()

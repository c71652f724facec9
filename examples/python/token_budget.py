"""The update of a trainer that learns from sampled answers, as GRPO and PPO do, whose answers are
from a few tokens to very long. Such trainers have an option for the tokens of a micro-batch, which
is found by hand for each card. Here it is found by `learn`: report.budget.

Answers are sorted by length, so that those of a micro-batch are of much the same length, and a
micro-batch is trimmed to its longest. All tokens of the update weigh the same.

    python token_budget.py --limit 2GiB         # on a GPU, in so much of its memory
    python token_budget.py --oom-above 4000     # on a CPU: more padded tokens run out of memory
"""

import argparse
from dataclasses import dataclass
from typing import List

import torch
import torch.nn.functional as F

import rebatch.torch as rebatch

WORDS, LONGEST = 512, 1024


@dataclass
class Answers:
    tokens: torch.Tensor  # (answers, longest)
    lengths: List[int]  # on the CPU, because cost() asks for them often
    advantages: torch.Tensor  # (answers,)
    old: torch.Tensor  # (answers, longest - 1): log-probabilities when they were sampled


def part_of(answers: Answers, first: int, count: int) -> Answers:
    rows, longest = slice(first, first + count), max(answers.lengths[first : first + count])
    return Answers(
        answers.tokens[rows, :longest],
        answers.lengths[rows],
        answers.advantages[rows],
        answers.old[rows, : longest - 1],
    )


def padded_tokens(answers: Answers, first: int, count: int) -> int:
    return count * max(answers.lengths[first : first + count])


def sampled(count: int, device: torch.device) -> Answers:
    """Random answers, with the lengths of a log-normal distribution, the longest first."""
    drawn = torch.empty(count).log_normal_(5, 1).clamp(2, LONGEST).int()
    lengths = sorted(drawn.tolist(), reverse=True)
    tokens = torch.randint(1, WORDS, (count, lengths[0]), device=device)
    old = torch.full((count, lengths[0] - 1), -6.2, device=device)
    return Answers(tokens, lengths, torch.randn(count, device=device), old)


class Policy(torch.nn.Module):
    def __init__(self, width: int = 128):
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, width)
        self.memory = torch.nn.GRU(width, width, batch_first=True)
        self.head = torch.nn.Linear(width, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.memory(self.words(tokens))[0])


class Loss:
    """The clipped objective, summed over the tokens of the answers."""

    def __init__(self, oom_above: int):
        self.oom_above = oom_above

    def __call__(self, policy: Policy, part: Answers) -> torch.Tensor:
        if self.oom_above and part.tokens.numel() > self.oom_above:
            raise torch.OutOfMemoryError("CUDA out of memory. (--oom-above)")
        logits, chosen = policy(part.tokens[:, :-1]), part.tokens[:, 1:]
        new = -F.cross_entropy(logits.flatten(0, 1), chosen.flatten(), reduction="none")
        ratio = (new.view_as(chosen) - part.old).exp()
        advantage = part.advantages[:, None]
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        lengths = torch.tensor(part.lengths, device=gain.device)
        is_real = torch.arange(gain.shape[1], device=gain.device) < lengths[:, None] - 1
        return -(gain * is_real).sum()


def main() -> None:
    parser = argparse.ArgumentParser(description="Updates a policy by answers of all lengths.")
    parser.add_argument("--answers", type=int, default=64, help="in an update")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--limit", help="install() with so much memory, on a GPU: 2GiB")
    parser.add_argument("--oom-above", type=int, default=0, help="padded tokens at a time")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.limit:
        rebatch.install(limit=args.limit)
    policy = Policy().to(device)
    step = rebatch.Step(
        policy,
        torch.optim.AdamW(policy.parameters(), lr=1e-4),
        Loss(args.oom_above),
        normalizer=lambda answers: sum(answers.lengths) - len(answers.lengths),
        cost=padded_tokens,
        slice=part_of,
        length=lambda answers: len(answers.lengths),
        learn=True,
    )
    for _ in range(args.steps):
        answers = sampled(args.answers, device)
        loss = step(answers).item()
        report = step.report
        print(
            f"step {report.step}: loss {loss:+.4f}, {sum(answers.lengths):,} tokens in "
            f"{report.microbatches} micro-batches, OOMs: {report.ooms}, budget: "
            + (f"{report.budget:,} padded tokens" if report.budget else "all at once")
        )


if __name__ == "__main__":
    main()

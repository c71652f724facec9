"""Soft actor-critic on random pixels: three optimizers, two critics, a target that follows."""

import argparse
import copy

import torch
from torch import nn
from torch.nn import functional

ACTIONS = 6


class Replay:
    """Transitions in the host's memory, as bytes."""

    def __init__(self, count, side):
        self.frames = torch.randint(0, 256, (count, 9, side, side), dtype=torch.uint8)
        self.actions = torch.rand(count, ACTIONS) * 2 - 1
        self.rewards = torch.randn(count, 1)

    def sample(self, batch, device):
        at = torch.randint(0, len(self.frames) - 1, (batch,))
        frames, after = self.frames[at].to(device), self.frames[at + 1].to(device)
        return frames, self.actions[at].to(device), self.rewards[at].to(device), after


class Eyes(nn.Module):
    """What a frame shows, in 100 numbers."""

    def __init__(self, side):
        super().__init__()
        layers = [nn.Conv2d(9, 32, 3, stride=2), nn.ReLU()]
        for _ in range(3):
            layers += [nn.Conv2d(32, 32, 3), nn.ReLU()]
        self.convs = nn.Sequential(*layers, nn.Flatten())
        with torch.no_grad():
            flat = self.convs(torch.zeros(1, 9, side, side)).shape[1]
        self.trunk = nn.Sequential(nn.Linear(flat, 100), nn.LayerNorm(100), nn.Tanh())

    def forward(self, frames):
        return self.trunk(self.convs(frames.float() / 255 - 0.5))


def mlp(inputs, outputs, width=1024):
    return nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, outputs),
    )  # fmt: skip


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(100, 2 * ACTIONS)

    def forward(self, seen):
        mean, log_std = self.net(seen).chunk(2, dim=-1)
        normal = torch.distributions.Normal(mean, log_std.tanh().exp())
        raw = normal.rsample()
        action = raw.tanh()
        squash = 2 * (0.6931 - raw - functional.softplus(-2 * raw))
        return action, (normal.log_prob(raw) - squash).sum(-1, keepdim=True)


class Critic(nn.Module):
    def __init__(self, side):
        super().__init__()
        self.eyes = Eyes(side)
        self.first, self.second = mlp(100 + ACTIONS, 1), mlp(100 + ACTIONS, 1)

    def forward(self, frames, actions, seen=None):
        seen = self.eyes(frames) if seen is None else seen
        both = torch.cat([seen, actions], dim=-1)
        return self.first(both), self.second(both)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--side", type=int, default=84)
    args = parser.parse_args()
    torch.manual_seed(3)
    device = torch.device("cuda")
    replay = Replay(500, args.side)
    critic, actor = Critic(args.side).to(device), Actor().to(device)
    target = copy.deepcopy(critic).requires_grad_(False)
    alpha = torch.zeros(1, device=device, requires_grad=True)
    critic_opt = torch.optim.Adam(critic.parameters(), lr=3e-4)
    actor_opt = torch.optim.Adam(actor.parameters(), lr=3e-4)
    alpha_opt = torch.optim.Adam([alpha], lr=1e-4)
    for step in range(args.steps):
        frames, actions, rewards, after = replay.sample(args.batch, device)
        with torch.no_grad():
            next_action, log_prob = actor(critic.eyes(after))
            value = torch.min(*target(after, next_action)) - alpha.exp() * log_prob
            wanted = rewards + 0.99 * value
        first, second = critic(frames, actions)
        critic_loss = functional.mse_loss(first, wanted) + functional.mse_loss(second, wanted)
        critic_opt.zero_grad()
        critic_loss.backward()
        critic_opt.step()

        with torch.no_grad():
            seen = critic.eyes(frames)
        action, log_prob = actor(seen)
        actor_loss = (
            alpha.exp().detach() * log_prob - torch.min(*critic(None, action, seen))
        ).mean()
        actor_opt.zero_grad()
        actor_loss.backward()
        actor_opt.step()

        alpha_loss = (-alpha.exp() * (log_prob.detach() - ACTIONS)).mean()
        alpha_opt.zero_grad()
        alpha_loss.backward()
        alpha_opt.step()
        with torch.no_grad():
            for old, new in zip(target.parameters(), critic.parameters()):
                old.lerp_(new, 0.01)
        if step % 100 == 0:
            print(f"step {step}: critic {critic_loss.item():.3f}, actor {actor_loss.item():.3f}")


if __name__ == "__main__":
    main()

"""Diffusion with classes, some of them dropped, and a moving average of the weights."""

import argparse
import copy
import math

import torch
from torch import nn
from torch.nn import functional

import rebatch.torch as rebatch

CLASSES = 10


class Block(nn.Module):
    def __init__(self, inputs, outputs, embedding, attend=False, dropout=0.1):
        super().__init__()
        self.norm1 = nn.GroupNorm(32, inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.embed = nn.Linear(embedding, 2 * outputs)
        self.norm2 = nn.GroupNorm(32, outputs)
        self.drop = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()
        self.attention = Attention(outputs) if attend else nn.Identity()

    def forward(self, x, embedding):
        h = self.conv1(functional.silu(self.norm1(x)))
        scale, shift = self.embed(embedding)[:, :, None, None].chunk(2, dim=1)
        h = self.norm2(h) * (1 + scale) + shift
        h = self.conv2(self.drop(functional.silu(h)))
        return self.attention(self.skip(x) + h)


class Attention(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(32, width)
        self.qkv = nn.Conv2d(width, 3 * width, 1)
        self.out = nn.Conv2d(width, width, 1)

    def forward(self, x):
        batch, width, rows, columns = x.shape
        qkv = self.qkv(self.norm(x)).reshape(batch, 3, self.heads, width // self.heads, -1)
        q, k, v = (part.transpose(-1, -2) for part in qkv.unbind(dim=1))
        h = functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(h.transpose(-1, -2).reshape(batch, width, rows, columns))


class Denoiser(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        embedding = 4 * width
        self.width = width
        self.time = nn.Sequential(
            nn.Linear(width, embedding), nn.SiLU(), nn.Linear(embedding, embedding)
        )
        self.label = nn.Embedding(CLASSES + 1, embedding)  # the last is "no class"
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down1 = Block(width, width, embedding)
        self.down2 = Block(width, 2 * width, embedding, attend=True)
        self.down3 = Block(2 * width, 2 * width, embedding, attend=True)
        self.middle = Block(2 * width, 2 * width, embedding, attend=True)
        self.up3 = Block(4 * width, 2 * width, embedding, attend=True)
        self.up2 = Block(4 * width, width, embedding, attend=True)
        self.up1 = Block(2 * width, width, embedding)
        self.last = nn.Sequential(
            nn.GroupNorm(32, width), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1)
        )

    def forward(self, x, times, labels):
        half = self.width // 2
        waves = torch.exp(-math.log(10000) * torch.arange(half, device=x.device) / half)
        angles = times.float()[:, None] * waves
        e = self.time(torch.cat([angles.sin(), angles.cos()], dim=-1)) + self.label(labels)
        e = functional.silu(e)
        one = self.down1(self.first(x), e)
        two = self.down2(functional.avg_pool2d(one, 2), e)
        three = self.down3(functional.avg_pool2d(two, 2), e)
        h = self.middle(three, e)
        h = self.up3(torch.cat([h, three], dim=1), e)
        h = functional.interpolate(h, scale_factor=2, mode="nearest")
        h = self.up2(torch.cat([h, two], dim=1), e)
        h = functional.interpolate(h, scale_factor=2, mode="nearest")
        return self.last(self.up1(torch.cat([h, one], dim=1), e))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.manual_seed(5)
    model = Denoiser().cuda()
    average = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, weight_decay=0.0)
    kept = torch.cos(torch.linspace(0, math.pi / 2, 1001))[:1000].cuda() ** 2

    def loss_fn(model, samples):
        images, labels = samples
        times = torch.randint(0, 1000, (len(images),), device="cuda")
        noise = torch.randn_like(images)
        part = kept[times][:, None, None, None]
        noisy = part.sqrt() * images + (1 - part).sqrt() * noise
        dropped = torch.rand(len(labels), device="cuda") < 0.1
        labels = torch.where(dropped, CLASSES, labels)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            predicted = model(noisy, times, labels)
        return functional.mse_loss(predicted.float(), noise)

    train_step = rebatch.Step(model, optimizer, loss_fn)
    for step in range(args.steps):
        images = torch.rand(args.batch, 3, 32, 32) * 2 - 1
        labels = torch.randint(0, CLASSES, (args.batch,))
        loss = train_step((images.cuda(), labels.cuda()))
        with torch.no_grad():
            for old, new in zip(average.parameters(), model.parameters()):
                old.mul_(0.999).add_(new, alpha=0.001)
        if step % 20 == 0:
            print(f"{step} loss {loss:.4f}")


if __name__ == "__main__":
    main()

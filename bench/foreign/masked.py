"""Pretrains a masked autoencoder, ViT-B with three quarters of the patches hidden, as in
https://github.com/facebookresearch/mae, with rebatch.Step."""

import argparse
import math

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

import rebatch.torch as rebatch

SIDE, PATCH = 224, 16


class Photos(Dataset):
    def __init__(self, count):
        self.count = count
        self.photos = torch.randint(0, 256, (48, 3, 256, 256), dtype=torch.uint8)
        crop = v2.RandomResizedCrop(SIDE, scale=(0.2, 1.0), antialias=True)
        self.transform = v2.Compose([crop, v2.RandomHorizontalFlip()])

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.transform(self.photos[index % len(self.photos)]).float() / 127.5 - 1, 0


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        n, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(n, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        h = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(h.transpose(1, 2).reshape(n, length, width))
        return x + self.fc2(functional.gelu(self.fc1(self.norm2(x))))


def positions(width, cells):
    """Sines and cosines of the rows and the columns, with zeros for the class token."""
    waves = 1.0 / 10000 ** (torch.arange(width // 4) / (width / 4))
    angles = torch.arange(cells).float()[:, None] * waves
    line = torch.cat([angles.sin(), angles.cos()], dim=1)
    grid = torch.cat([line.repeat(cells, 1), line.repeat_interleave(cells, 0)], dim=1)
    return nn.Parameter(torch.cat([torch.zeros(1, width), grid])[None], requires_grad=False)


class MaskedAutoencoder(nn.Module):
    def __init__(self, width=768, depth=12, heads=12, thin=512, thin_depth=8, thin_heads=16):
        super().__init__()
        self.embed = nn.Conv2d(3, width, PATCH, stride=PATCH)
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.place = positions(width, SIDE // PATCH)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.narrow = nn.Linear(width, thin)
        self.hidden = nn.Parameter(torch.randn(1, 1, thin) * 0.02)
        self.thin_place = positions(thin, SIDE // PATCH)
        self.thin_blocks = nn.ModuleList(Block(thin, thin_heads) for _ in range(thin_depth))
        self.thin_norm = nn.LayerNorm(thin, eps=1e-6)
        self.pixels = nn.Linear(thin, PATCH * PATCH * 3)

    def forward(self, images, ratio=0.75):
        x = self.embed(images).flatten(2).transpose(1, 2) + self.place[:, 1:]
        n, length, width = x.shape
        keep = int(length * (1 - ratio))
        shuffle = torch.rand(n, length, device=x.device).argsort(dim=1)
        restore = shuffle.argsort(dim=1)
        x = x.gather(1, shuffle[:, :keep, None].repeat(1, 1, width))
        mask = torch.ones(n, length, device=x.device)
        mask[:, :keep] = 0
        mask = mask.gather(1, restore)
        x = torch.cat([(self.token + self.place[:, :1]).expand(n, -1, -1), x], dim=1)
        for block in self.blocks:
            x = block(x)
        x = self.narrow(self.norm(x))
        filled = torch.cat([x[:, 1:], self.hidden.repeat(n, length - keep, 1).to(x.dtype)], dim=1)
        filled = filled.gather(1, restore[:, :, None].repeat(1, 1, x.shape[2]))
        x = torch.cat([x[:, :1], filled], dim=1) + self.thin_place
        for block in self.thin_blocks:
            x = block(x)
        return self.pixels(self.thin_norm(x))[:, 1:], mask


def loss_fn(model, images):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        predicted, mask = model(images)
    cells = SIDE // PATCH
    target = images.reshape(-1, 3, cells, PATCH, cells, PATCH).permute(0, 2, 4, 3, 5, 1)
    target = target.reshape(len(images), cells * cells, -1)
    mean, variance = target.mean(dim=-1, keepdim=True), target.var(dim=-1, keepdim=True)
    target = (target - mean) / (variance + 1e-6).sqrt()
    loss = ((predicted.float() - target) ** 2).mean(dim=-1)
    return (loss * mask).sum() / mask.sum()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    torch.manual_seed(0)
    data = Photos(args.batch * args.steps)
    loader = DataLoader(data, args.batch, shuffle=True, num_workers=4, drop_last=True)
    model = MaskedAutoencoder().to("cuda")
    peak = 1.5e-4 * args.batch / 256
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=peak, betas=(0.9, 0.95), weight_decay=0.05)
    train_step = rebatch.Step(model, optimizer, loss_fn)
    for step, (images, _) in enumerate(loader):
        for group in optimizer.param_groups:
            group["lr"] = peak * 0.5 * (1 + math.cos(math.pi * step / args.steps))
        loss = train_step(images.to("cuda", non_blocking=True))
        print(f"step {step} loss {loss:.4f}")


if __name__ == "__main__":
    main()

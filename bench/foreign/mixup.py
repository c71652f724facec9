"""A ConvNeXt in channels-last bfloat16, trained with mixup and stochastic depth."""

import argparse

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

CLASSES = 100


class Noise(Dataset):
    def __init__(self, count):
        self.count = count
        self.images = torch.rand(64, 3, 160, 160)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.images[index % 64], index % CLASSES


class Norm(nn.LayerNorm):
    """LayerNorm over the channels of images."""

    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Block(nn.Module):
    def __init__(self, width, dropped):
        super().__init__()
        self.spatial = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 1e-6))
        self.dropped = dropped

    def forward(self, x):
        h = self.norm(self.spatial(x).permute(0, 2, 3, 1))
        h = self.narrow(functional.gelu(self.wide(h))) * self.scale
        h = h.permute(0, 3, 1, 2)
        if self.training and self.dropped:
            stay = 1 - self.dropped
            h = h * (h.new_empty(len(h), 1, 1, 1).bernoulli_(stay) / stay)
        return x + h


class ConvNeXt(nn.Module):
    def __init__(self, widths=(80, 160, 320, 640), depths=(2, 2, 6, 2)):
        super().__init__()
        layers, rates = [], torch.linspace(0, 0.1, sum(depths)).tolist()
        inputs = 3
        for number, (width, depth) in enumerate(zip(widths, depths)):
            if number:
                layers += [Norm(inputs), nn.Conv2d(inputs, width, 2, stride=2)]
            else:
                layers += [nn.Conv2d(3, width, 4, stride=4), Norm(width)]
            layers += [Block(width, rates.pop(0)) for _ in range(depth)]
            inputs = width
        self.body = nn.Sequential(*layers)
        self.norm, self.head = nn.LayerNorm(inputs), nn.Linear(inputs, CLASSES)

    def forward(self, x):
        return self.head(self.norm(self.body(x).mean(dim=(2, 3))))


def decays(model):
    """Weights with decay, and norms, biases and scales without."""
    many = [p for p in model.parameters() if p.ndim > 1]
    few = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": many, "weight_decay": 0.05}, {"params": few, "weight_decay": 0.0}]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("-b", "--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.manual_seed(7)
    torch.backends.cuda.matmul.allow_tf32 = True
    mixup = v2.RandomChoice([v2.MixUp(num_classes=CLASSES), v2.CutMix(num_classes=CLASSES)])

    def collate(samples):
        return mixup(torch.utils.data.default_collate(samples))

    data = Noise(args.batch * args.steps)
    loader = DataLoader(data, args.batch, shuffle=True, drop_last=True, collate_fn=collate)
    model = ConvNeXt().to("cuda", memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(decays(model), lr=4e-3)
    for step, (images, targets) in enumerate(loader):
        images = images.cuda(non_blocking=True).contiguous(memory_format=torch.channels_last)
        targets = targets.cuda(non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            outputs = model(images)
            loss = functional.cross_entropy(outputs, targets, label_smoothing=0.1)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 25 == 0:
            print(f"step {step:4d}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()

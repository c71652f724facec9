"""Segments random shapes: a U-Net in half precision with GradScaler, and a plain loop."""

import argparse

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset


class Shapes(Dataset):
    """Images with a bright disc, and the disc as the mask."""

    def __init__(self, count, side):
        self.count, self.side = count, side
        self.ys, self.xs = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        middle = self.side // 4 + (index * 37) % (self.side // 2)
        radius = self.side // 16 + index % (self.side // 8)
        inside = (self.ys - middle) ** 2 + (self.xs - middle) ** 2 < radius**2
        image = inside.float().expand(3, -1, -1) * 0.5 + 0.1 * (index % 5)
        return image.clone(), inside.long()


class Twice(nn.Sequential):
    def __init__(self, inputs, outputs):
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    def __init__(self, widths=(48, 96, 192, 384), classes=2):
        super().__init__()
        self.down = nn.ModuleList()
        inputs = 3
        for width in widths:
            self.down.append(Twice(inputs, width))
            inputs = width
        self.bottom = Twice(widths[-1], 2 * widths[-1])
        self.up, self.merge = nn.ModuleList(), nn.ModuleList()
        for width in reversed(widths):
            self.up.append(nn.ConvTranspose2d(2 * width, width, 2, stride=2))
            self.merge.append(Twice(2 * width, width))
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x):
        skipped = []
        for block in self.down:
            x = block(x)
            skipped.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.bottom(x)
        for up, merge in zip(self.up, self.merge):
            x = merge(torch.cat([skipped.pop(), up(x)], dim=1))
        return self.head(x)


def dice(logits, masks):
    likely = logits.float().softmax(dim=1)[:, 1]
    truth = masks.float()
    both = (likely * truth).sum(dim=(1, 2))
    return 1 - ((2 * both + 1) / (likely.sum(dim=(1, 2)) + truth.sum(dim=(1, 2)) + 1)).mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--side", type=int, default=192)
    args = parser.parse_args()
    torch.manual_seed(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = Shapes(args.batch * args.steps, args.side)
    loader = DataLoader(data, batch_size=args.batch, num_workers=2, pin_memory=True)
    model = UNet().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    scaler = torch.amp.GradScaler(device.type)
    for step, (images, masks) in enumerate(loader):
        images = images.to(device, non_blocking=True)
        masks = masks.to(device, non_blocking=True)
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.float16):
            logits = model(images)
            loss = functional.cross_entropy(logits, masks) + dice(logits, masks)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()

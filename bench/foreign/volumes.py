"""Segments organs in patches of volumes: a 3D U-Net with instance norm, and Dice with cross entropy
at several resolutions, in the style of https://github.com/MIC-DKFZ/nnUNet, with rebatch.Step."""

import argparse

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import rebatch.torch as rebatch

CLASSES, PATCH = 4, 64


class Patches(Dataset):
    """Random patches of a few volumes, which may be mirrored; organs are balls of other values."""

    def __init__(self, count, side=112):
        self.count, self.draw = count, np.random.default_rng(7)
        axis = np.arange(side)
        self.volumes = []
        for _ in range(3):
            label = np.zeros((side, side, side), dtype=np.int64)
            for organ in range(1, CLASSES):
                z, y, x = self.draw.integers(20, side - 20, 3)
                squares = (
                    (axis - z)[:, None, None] ** 2 + (axis - y)[:, None] ** 2 + (axis - x) ** 2
                )
                label[squares < self.draw.integers(10, 25) ** 2] = organ
            noise = self.draw.standard_normal(label.shape, dtype=np.float32)
            self.volumes.append((noise * 0.3 + label.astype(np.float32), label))

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        image, label = self.volumes[index % len(self.volumes)]
        corner = self.draw.integers(0, np.array(label.shape) - PATCH + 1)
        cut = tuple(slice(start, start + PATCH) for start in corner)
        axes = [axis for axis in range(3) if self.draw.random() < 0.5]
        image, label = np.flip(image[cut], axes), np.flip(label[cut], axes)
        return {"image": torch.from_numpy(image[None].copy()), "label": torch.tensor(label.copy())}


def twice(inputs, outputs, stride=1):
    layers = []
    for _ in range(2):
        layers += [
            nn.Conv3d(inputs, outputs, 3, stride=stride, padding=1),
            nn.InstanceNorm3d(outputs, affine=True),
            nn.LeakyReLU(0.01, inplace=True),
        ]
        inputs, stride = outputs, 1
    return nn.Sequential(*layers)


class UNet3D(nn.Module):
    def __init__(self, widths=(32, 64, 128, 256, 320)):
        super().__init__()
        self.down = nn.ModuleList()
        for number, width in enumerate(widths):
            before = widths[number - 1] if number else 1
            self.down.append(twice(before, width, stride=2 if number else 1))
        self.up, self.merge, self.heads = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for deep, width in zip(widths[:0:-1], widths[-2::-1]):
            self.up.append(nn.ConvTranspose3d(deep, width, 2, stride=2))
            self.merge.append(twice(2 * width, width))
            self.heads.append(nn.Conv3d(width, CLASSES, 1))

    def forward(self, x):
        skipped = []
        for block in self.down:
            x = block(x)
            skipped.append(x)
        skipped.pop()
        outputs = []
        for up, merge, head in zip(self.up, self.merge, self.heads):
            x = merge(torch.cat([up(x), skipped.pop()], dim=1))
            outputs.append(head(x))
        return outputs[:0:-1]  # the finest first, without the coarsest


def dice_and_entropy(logits, labels):
    likely = logits.softmax(dim=1)
    truth = torch.zeros_like(likely).scatter_(1, labels[:, None], 1.0)
    common = (likely * truth).sum(dim=(2, 3, 4))
    size = likely.sum(dim=(2, 3, 4)) + truth.sum(dim=(2, 3, 4))
    dice = (2 * common + 1e-5) / (size + 1e-5).clamp_min(1e-8)
    return functional.cross_entropy(logits, labels) - dice[:, 1:].mean()


def loss_fn(model, samples):
    labels, total, weight = samples["label"], 0.0, 1.0
    for logits in model(samples["image"]):
        step = labels.shape[-1] // logits.shape[-1]
        total = total + weight * dice_and_entropy(logits, labels[:, ::step, ::step, ::step])
        weight /= 2
    return total / 1.75


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    torch.manual_seed(11)
    loader = DataLoader(Patches(args.batch * args.steps), batch_size=args.batch)
    model = UNet3D().cuda()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.01, momentum=0.99, nesterov=True, weight_decay=3e-5
    )
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, args.steps, power=0.9)
    train_step = rebatch.Step(model, optimizer, loss_fn)
    for step, batch in enumerate(loader):
        loss = train_step({"image": batch["image"].cuda(), "label": batch["label"].cuda()})
        scheduler.step()
        print(f"step {step} loss {loss:.4f} lr {scheduler.get_last_lr()[0]:.5f}")


if __name__ == "__main__":
    main()

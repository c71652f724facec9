"""SimCLR: a ResNet-50 learns to tell that two views are of one image, by the loss and the loop of
https://github.com/sthalles/SimCLR; the loss takes the batch size from the arguments."""

import argparse

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from torchvision import models
from torchvision.transforms import v2


class Views:
    """Makes some views of an image."""

    def __init__(self, transform, count=2):
        self.transform, self.count = transform, count

    def __call__(self, image):
        return [self.transform(image) for _ in range(self.count)]


def augmentation(side, strength=1.0):
    s = strength
    return v2.Compose(
        [
            v2.RandomResizedCrop(side, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.RandomApply([v2.ColorJitter(0.8 * s, 0.8 * s, 0.8 * s, 0.2 * s)], p=0.8),
            v2.RandomGrayscale(p=0.2),
            v2.GaussianBlur(kernel_size=2 * (side // 20) + 1),
            v2.ToDtype(torch.float32, scale=True),
        ]
    )


class Unlabeled(Dataset):
    def __init__(self, count, side, transform):
        self.count, self.transform = count, transform
        self.images = torch.randint(0, 256, (100, 3, side, side), dtype=torch.uint8)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.transform(self.images[index % 100]), -1


class ResNetSimCLR(nn.Module):
    def __init__(self, out_dim):
        super().__init__()
        self.backbone = models.resnet50(weights=None, num_classes=out_dim)
        width = self.backbone.fc.in_features
        self.backbone.fc = nn.Sequential(nn.Linear(width, width), nn.ReLU(), self.backbone.fc)

    def forward(self, x):
        return self.backbone(x)


class SimCLR:
    def __init__(self, args, model, optimizer, scheduler):
        self.args, self.model = args, model.to(args.device)
        self.optimizer, self.scheduler = optimizer, scheduler
        self.criterion = nn.CrossEntropyLoss().to(args.device)

    def info_nce_loss(self, features):
        owner = torch.cat([torch.arange(self.args.batch) for _ in range(2)])
        same = (owner[None, :] == owner[:, None]).float().to(self.args.device)
        features = functional.normalize(features, dim=1)
        similarity = features @ features.T
        # Leave out each view's similarity to itself
        itself = torch.eye(len(same), dtype=torch.bool).to(self.args.device)
        same = same[~itself].view(len(same), -1)
        similarity = similarity[~itself].view(len(similarity), -1)
        positives = similarity[same.bool()].view(len(same), -1)
        negatives = similarity[~same.bool()].view(len(similarity), -1)
        logits = torch.cat([positives, negatives], dim=1) / self.args.temperature
        return logits, torch.zeros(len(logits), dtype=torch.long).to(self.args.device)

    def train(self, loader):
        scaler = torch.amp.GradScaler("cuda", enabled=self.args.fp16_precision)
        for step, (images, _) in enumerate(loader):
            images = torch.cat(images, dim=0).to(self.args.device)
            with torch.amp.autocast("cuda", enabled=self.args.fp16_precision):
                features = self.model(images)
                logits, labels = self.info_nce_loss(features)
                loss = self.criterion(logits, labels)
            self.optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(self.optimizer)
            scaler.update()
            top1 = (logits.argmax(dim=1) == labels).float().mean()
            print(f"step {step}: loss {loss.item():.4f}, top1 {top1.item():.2%}")
            self.scheduler.step()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("-b", "--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out_dim", type=int, default=128)
    parser.add_argument("--side", type=int, default=96)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=0.07)
    parser.add_argument("--lr", type=float, default=0.0003)
    parser.add_argument("--wd", type=float, default=1e-4)
    parser.add_argument("--fp16-precision", action="store_true")
    args = parser.parse_args()
    args.device = torch.device("cuda")
    torch.manual_seed(4)
    data = Unlabeled(args.batch * args.steps, args.side, Views(augmentation(args.side)))
    loader = DataLoader(
        data, args.batch, shuffle=True, num_workers=args.workers, pin_memory=True, drop_last=True
    )
    model = ResNetSimCLR(args.out_dim)
    optimizer = torch.optim.Adam(model.parameters(), args.lr, weight_decay=args.wd)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    SimCLR(args, model, optimizer, scheduler).train(loader)


if __name__ == "__main__":
    main()

"""Detects objects with a small DETR, after https://github.com/facebookresearch/detr: images of
several sizes are padded, targets are a list of dicts, and they are matched greedily on the host."""

import argparse

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from torchvision.models import resnet50
from torchvision.ops import box_convert, generalized_box_iou, generalized_box_iou_loss
from torchvision.ops.misc import FrozenBatchNorm2d

CLASSES, WIDTH = 91, 256
corners = lambda boxes: box_convert(boxes, "cxcywh", "xyxy")


class Scenes(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        draw = np.random.default_rng(index)
        high, wide = 32 * draw.integers(10, 17, 2)
        objects = int(draw.integers(1, 16))
        places = np.hstack([draw.random((objects, 2)), draw.uniform(0.05, 0.5, (objects, 2))])
        labels = torch.from_numpy(draw.integers(1, CLASSES, objects))
        target = {"labels": labels, "boxes": torch.from_numpy(places).float()}
        return torch.from_numpy(draw.random((3, high, wide), dtype=np.float32)), target


def collate_fn(batch):
    images, targets = zip(*batch)
    high, wide = (max(image.shape[axis] for image in images) for axis in (1, 2))
    padded = torch.zeros(len(images), 3, high, wide)
    mask = torch.ones(len(images), high, wide, dtype=torch.bool)
    for image, place, hidden in zip(images, padded, mask):
        place[:, : image.shape[1], : image.shape[2]] = image
        hidden[: image.shape[1], : image.shape[2]] = False
    return padded, mask, list(targets)


class DETR(nn.Module):
    def __init__(self, queries=100):
        super().__init__()
        self.backbone = nn.Sequential(*list(resnet50(norm_layer=FrozenBatchNorm2d).children())[:-2])
        self.backbone[:5].requires_grad_(False)
        self.project = nn.Conv2d(2048, WIDTH, 1)
        self.rows, self.columns = nn.Embedding(50, WIDTH // 2), nn.Embedding(50, WIDTH // 2)
        layer = nn.TransformerEncoderLayer(WIDTH, 8, 2048, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        layer = nn.TransformerDecoderLayer(WIDTH, 8, 2048, dropout=0.1, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 6)
        self.norm, self.queries = nn.LayerNorm(WIDTH), nn.Embedding(queries, WIDTH)
        self.classes = nn.Linear(WIDTH, CLASSES + 1)
        self.boxes = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))

    def forward(self, images, mask):
        h = self.project(self.backbone(images))
        high, wide = h.shape[-2:]
        mask = functional.interpolate(mask[:, None].float(), size=(high, wide)).bool().flatten(1)
        rows = self.rows.weight[:high, None].expand(-1, wide, -1)
        columns = self.columns.weight[None, :wide].expand(high, -1, -1)
        place = torch.cat([columns, rows], dim=-1).flatten(0, 1)
        memory = self.encoder(h.flatten(2).transpose(1, 2) + place, src_key_padding_mask=mask)
        x, outputs = self.queries.weight[None].repeat(len(images), 1, 1), []
        for layer in self.decoder.layers:
            x = layer(x, memory, memory_key_padding_mask=mask)
            outputs.append(self.norm(x))
        return [(self.classes(out), self.boxes(out).sigmoid()) for out in outputs]


@torch.no_grad()
def match(logits, boxes, labels, wanted, sizes):
    """For each object the cheapest query of its image that is still free."""
    likely, flat = logits.flatten(0, 1).softmax(-1), boxes.flatten(0, 1)
    cost = 5 * torch.cdist(flat, wanted, p=1) - likely[:, labels]
    cost = cost - 2 * generalized_box_iou(corners(flat), corners(wanted))
    cost, queries = cost.view(len(sizes), logits.shape[1], -1).cpu(), []
    for image, part in enumerate(cost.split(sizes, -1)):
        for column in range(sizes[image]):
            queries.append(int(part[image, :, column].argmin()))
            part[image, queries[-1]] = float("inf")
    return torch.tensor(queries)


def criterion(logits, boxes, targets, weight):
    labels = torch.cat([target["labels"] for target in targets])
    wanted = torch.cat([target["boxes"] for target in targets])
    sizes = [len(target["labels"]) for target in targets]
    queries = match(logits, boxes, labels, wanted, sizes)
    images = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    classes = torch.full(logits.shape[:2], CLASSES, device=logits.device)
    classes[images, queries] = labels
    found = boxes[images, queries]
    loss = functional.cross_entropy(logits.transpose(1, 2), classes, weight)
    giou = generalized_box_iou_loss(corners(found), corners(wanted), reduction="sum")
    return loss + (5 * (found - wanted).abs().sum() + 2 * giou) / sum(sizes)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    torch.manual_seed(10)
    device = torch.device("cuda")
    data = Scenes(args.batch * args.steps)
    loader = DataLoader(data, args.batch, shuffle=True, collate_fn=collate_fn, num_workers=2)
    model = DETR().to(device)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=1e-4)
    weight = torch.tensor([1.0] * CLASSES + [0.1], device=device)
    for step, (images, mask, targets) in enumerate(loader):
        images, mask = images.to(device), mask.to(device)
        targets = [{name: t.to(device) for name, t in target.items()} for target in targets]
        loss = sum(criterion(*output, targets, weight) for output in model(images, mask))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()

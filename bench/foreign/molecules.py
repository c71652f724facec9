"""Predicts a number of random molecules: messages along edges by gather and index_add."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


def molecule(index):
    """Atoms' kinds, edges as pairs of atoms, their lengths, and the number to predict."""
    draw = torch.Generator().manual_seed(index)
    atoms = int(torch.randint(20, 60, (), generator=draw))
    kinds = torch.randint(0, 20, (atoms,), generator=draw)
    edges = torch.randint(0, atoms, (2, 8 * atoms), generator=draw)
    edges = edges[:, edges[0] != edges[1]]
    lengths = torch.rand(edges.shape[1], generator=draw) * 5
    return kinds, edges, lengths, kinds.float().mean()


class Molecules(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return molecule(index % 4000)


def collate(molecules):
    """One large graph, as PyTorch Geometric makes it."""
    kinds, edges, lengths, values, owner, offset = [], [], [], [], [], 0
    for number, (kind, edge, length, value) in enumerate(molecules):
        kinds.append(kind)
        edges.append(edge + offset)
        lengths.append(length)
        values.append(value)
        owner.append(torch.full((len(kind),), number))
        offset += len(kind)
    return (
        torch.cat(kinds), torch.cat(edges, dim=1), torch.cat(lengths),
        torch.cat(owner), torch.stack(values),
    )  # fmt: skip


class Layer(nn.Module):
    def __init__(self, width, radial):
        super().__init__()
        self.filter = nn.Sequential(nn.Linear(radial, width), nn.SiLU(), nn.Linear(width, width))
        self.attend = nn.Linear(2 * width, 1)
        self.update = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width))
        self.norm = nn.LayerNorm(width)

    def forward(self, nodes, edges, radial):
        source, target = edges
        sent, got = nodes[source], nodes[target]
        score = self.attend(torch.cat([sent, got], dim=-1)).squeeze(-1)
        top = torch.full((len(nodes),), -1e9, device=nodes.device)
        top = top.scatter_reduce(0, target, score.detach(), "amax")
        weight = (score - top[target]).exp()
        total = torch.zeros(len(nodes), device=nodes.device).index_add(0, target, weight)
        weight = weight / (total[target] + 1e-9)
        message = sent * self.filter(radial) * weight[:, None]
        summed = torch.zeros_like(nodes).index_add(0, target, message)
        return self.norm(nodes + self.update(torch.cat([nodes, summed], dim=-1)))


class Network(nn.Module):
    def __init__(self, width=192, layers=5, radial=32):
        super().__init__()
        self.embed = nn.Embedding(20, width)
        self.layers = nn.ModuleList(Layer(width, radial) for _ in range(layers))
        self.register_buffer("centres", torch.linspace(0, 5, radial))
        self.head = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, kinds, edges, lengths, owner, count):
        radial = torch.exp(-((lengths[:, None] - self.centres) ** 2) * 10)
        nodes = self.embed(kinds)
        for layer in self.layers:
            nodes = layer(nodes, edges, radial)
        pooled = torch.zeros(count, nodes.shape[1], device=nodes.device)
        pooled.scatter_add_(0, owner[:, None].expand_as(nodes), nodes)
        atoms = torch.bincount(owner, minlength=count)
        return self.head(pooled / atoms[:, None]).squeeze(-1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    torch.manual_seed(4)
    loader = DataLoader(
        Molecules(args.batch * args.steps), batch_size=args.batch, collate_fn=collate
    )
    model = Network().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=args.steps + 1)
    for step, batch in enumerate(loader):
        kinds, edges, lengths, owner, values = [part.cuda() for part in batch]
        predicted = model(kinds, edges, lengths, owner, len(values))
        loss = nn.functional.smooth_l1_loss(predicted, values)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 10 == 0:
            print(f"{step} {loss.item():.4f}")


if __name__ == "__main__":
    main()

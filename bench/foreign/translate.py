"""Translates sequences of numbers into their reverse: packed GRU, attention with a mask."""

import argparse

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

PAD, START = 0, 1
WORDS = 8000


def pair(index):
    """A source of 12 to 48 words, and its reverse."""
    length = 12 + (index * 7) % 37
    source = (torch.arange(length) * 31 + index * 17) % (WORDS - 2) + 2
    return source, torch.cat([torch.tensor([START]), source.flip(0)])


def collate(pairs):
    pairs = sorted(pairs, key=lambda item: -len(item[0]))
    lengths = torch.tensor([len(source) for source, _ in pairs])
    sources = pad_sequence([source for source, _ in pairs], batch_first=True, padding_value=PAD)
    targets = pad_sequence([target for _, target in pairs], batch_first=True, padding_value=PAD)
    return sources, lengths, targets


class Encoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(WORDS, width, padding_idx=PAD)
        self.gru = nn.GRU(width, width, 2, batch_first=True, bidirectional=True, dropout=0.2)
        self.bridge = nn.Linear(2 * width, width)

    def forward(self, sources, lengths):
        packed = pack_padded_sequence(self.embed(sources), lengths, batch_first=True)
        outputs, last = self.gru(packed)
        outputs, _ = pad_packed_sequence(outputs, batch_first=True)
        return self.bridge(outputs), torch.tanh(self.bridge(torch.cat([last[-2], last[-1]], dim=1)))


class Decoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(WORDS, width, padding_idx=PAD)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.mix = nn.Linear(2 * width, width)
        self.out = nn.Linear(width, WORDS)

    def forward(self, targets, memory, state, mask):
        hidden, _ = self.gru(self.embed(targets), state.unsqueeze(0).contiguous())
        scores = hidden @ memory.transpose(1, 2)
        scores = scores.masked_fill(~mask[:, None, :], float("-inf"))
        context = scores.softmax(dim=-1) @ memory
        return self.out(torch.tanh(self.mix(torch.cat([hidden, context], dim=-1))))


class Translator(nn.Module):
    def __init__(self, width=640):
        super().__init__()
        self.encoder, self.decoder = Encoder(width), Decoder(width)

    def forward(self, sources, lengths, targets):
        memory, state = self.encoder(sources, lengths)
        return self.decoder(targets, memory, state, sources != PAD)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    torch.manual_seed(2)
    pairs = [pair(index) for index in range(args.batch * min(args.steps, 4))]
    loader = torch.utils.data.DataLoader(pairs, batch_size=args.batch, collate_fn=collate)
    model = Translator().cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    loss_of = nn.CrossEntropyLoss(ignore_index=PAD)
    for step, (sources, lengths, targets) in enumerate(loader):
        sources, targets = sources.cuda(), targets.cuda()
        logits = model(sources, lengths, targets[:, :-1])
        loss = loss_of(logits.reshape(-1, WORDS), targets[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0:
            print(f"{step}: {loss.item():.3f}")


if __name__ == "__main__":
    main()

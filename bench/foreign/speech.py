"""Speech recognition by CTC on noise: convolutions that halve the time, a conformer, an LSTM."""

import argparse

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import rebatch.torch as rebatch

MEL, LETTERS = 80, 32


def utterance(index):
    frames = 500 + (index * 61) % 400
    letters = 30 + (index * 11) % 40
    draw = torch.Generator().manual_seed(index)
    sound = torch.randn(frames, MEL, generator=draw)
    return sound, torch.randint(1, LETTERS, (letters,), generator=draw)


def collate(utterances):
    sounds = nn.utils.rnn.pad_sequence([sound for sound, _ in utterances], batch_first=True)
    texts = nn.utils.rnn.pad_sequence([text for _, text in utterances], batch_first=True)
    frames = torch.tensor([len(sound) for sound, _ in utterances])
    letters = torch.tensor([len(text) for _, text in utterances])
    return sounds, frames, texts, letters


class Conformer(nn.Module):
    def __init__(self, width, heads=4, kernel=31):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate = nn.Conv1d(width, 2 * width, 1)
        self.depth = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width)
        self.batch = nn.BatchNorm1d(width)
        self.point = nn.Conv1d(width, width, 1)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.SiLU(), nn.Dropout(0.1), nn.Linear(4 * width, width)
        )

    def forward(self, x, mask):
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, -1).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        h = functional.scaled_dot_product_attention(q, k, v, mask[:, None, None, :], dropout_p=0.1)
        x = x + self.out(h.transpose(1, 2).reshape(batch, time, width))
        h = functional.glu(self.gate(self.norm2(x).transpose(1, 2)), dim=1)
        h = self.point(functional.silu(self.batch(self.depth(h))))
        x = x + h.transpose(1, 2)
        return x + self.feed(self.norm3(x))


class Recognizer(nn.Module):
    def __init__(self, width=256, layers=6):
        super().__init__()
        self.subsample = nn.Sequential(
            nn.Conv2d(1, 64, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(64, 64, 3, stride=2, padding=1), nn.ReLU(),
        )  # fmt: skip
        self.project = nn.Linear(64 * MEL // 4, width)
        self.layers = nn.ModuleList(Conformer(width) for _ in range(layers))
        self.lstm = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, LETTERS)

    def forward(self, sounds, frames):
        h = self.subsample(sounds[:, None])
        h = self.project(h.transpose(1, 2).flatten(2))
        frames = (frames + 3) // 4
        mask = torch.arange(h.shape[1], device=h.device) < frames[:, None]
        for layer in self.layers:
            h = layer(h, mask)
        h, _ = self.lstm(h)
        return self.head(h).log_softmax(dim=-1), frames


def loss_fn(model, samples):
    sounds, frames, texts, letters = (part.to("cuda") for part in samples)
    scores, frames = model(sounds, frames)
    return functional.ctc_loss(scores.transpose(0, 1), texts, frames, letters, zero_infinity=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    torch.manual_seed(8)
    data = [utterance(index) for index in range(args.batch * min(args.steps, 4))]
    loader = DataLoader(data, args.batch, collate_fn=collate)
    model = Recognizer().cuda()
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-3)
    train_step = rebatch.Step(model, optimizer, loss_fn)
    step = 0
    while step < args.steps:
        for batch in loader:
            loss = train_step(batch)
            step += 1
            if step == 1 or step % 10 == 0:
                print(f"step {step}: {loss:.3f}")
            if step == args.steps:
                break


if __name__ == "__main__":
    main()

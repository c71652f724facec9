"""Models, batches and failures for the tests. The models are small, and have what is hard: dropout,
BatchNorm, tied weights, autocast."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import rebatch.torch as rebatch
from unseen import Unseen  # noqa: F401

DEVICE = torch.device("cpu")  # where make() and placed() put what they make


def placed(*things):
    """Modules and tensors on DEVICE."""
    return things[0].to(DEVICE) if len(things) == 1 else tuple(t.to(DEVICE) for t in things)


class FailAt(TorchDispatchMode):
    """Raises an OOM in the n-th operation that makes a tensor, counted from 1; 0: never. Counts in
    forward, backward and optimizer. From there on, `times` operations in a row fail."""

    def __init__(self, n=0, times=1):
        super().__init__()
        self.n, self.times, self.seen, self.failed = n, times, 0, 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        name = function.__name__.split(".")[0]
        is_view = name in ("detach", "view", "t", "alias")
        makes_tensor = not name.endswith("_") and not is_view and "record_function" not in name
        if makes_tensor and self.n:
            self.seen += 1
            if self.n <= self.seen < self.n + self.times:
                self.failed += 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return function(*arguments, **(keywords or {}))


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1)
        )

    def forward(self, x):
        return self.body(x)[:, 0]


class ConvNet(torch.nn.Module):
    """Separable convolutions with BatchNorm."""

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Conv2d(3, 4, 3, padding=1, bias=False),
            torch.nn.BatchNorm2d(4),
            torch.nn.ReLU(),
            torch.nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False),
            torch.nn.Conv2d(4, 8, 1),
            torch.nn.BatchNorm2d(8),
            torch.nn.AdaptiveAvgPool2d(1),
            torch.nn.Flatten(),
            torch.nn.Linear(8, 1),
        )

    def forward(self, x):
        return self.body(x)[:, 0]


class Gpt(torch.nn.Module):
    """One block, with tied embeddings and dropout."""

    def __init__(self, width=16, words=11):
        super().__init__()
        self.embedding = torch.nn.Embedding(words, width)
        self.block = torch.nn.TransformerEncoderLayer(
            width, 2, 2 * width, dropout=0.1, batch_first=True, norm_first=True
        )
        self.head = torch.nn.Linear(width, words, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        mask = torch.nn.Transformer.generate_square_subsequent_mask(
            tokens.shape[1], device=tokens.device
        )
        return self.head(self.block(self.embedding(tokens), src_mask=mask, is_causal=True))


def regression_loss(model, samples):
    x, y = samples
    return ((model(x) - y) ** 2).mean()


def token_loss(model, samples):
    tokens, targets = samples
    logits = model(tokens)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make(kind, samples=16, seed=0):
    """(model, batch, loss_fn) of a kind: "mlp", "conv" or "gpt"."""
    torch.manual_seed(seed)
    if kind == "mlp":
        model, batch = Mlp(), (torch.randn(samples, 8), torch.randn(samples))
    elif kind == "conv":
        model, batch = ConvNet(), (torch.randn(samples, 3, 6, 6), torch.randn(samples))
    else:
        tokens = torch.randint(0, 11, (samples, 6))
        model, batch = Gpt(), (tokens, tokens.roll(-1, 1))
    return placed(model), placed(*batch), token_loss if kind == "gpt" else regression_loss


def step_or_backward(kind, model, optimizer, loss_fn, **options):
    """A Step, or a Backward of which the optimizer is known."""
    if kind == "step":
        return rebatch.Step(model, optimizer, loss_fn, **options)
    return rebatch.Backward(model, loss_fn, optimizer=optimizer, **options)


def fails_above(loss_fn, largest, where="forward"):
    """A loss_fn that runs out of memory for more samples than `largest`."""

    def limited(model, samples):
        count = len(samples[0])
        if where == "forward" and count > largest:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        loss = loss_fn(model, samples)
        if where == "backward" and count > largest:
            loss.register_hook(out_of_memory)
        return loss

    return limited


def out_of_memory(_gradient):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class HalfStep(torch.optim.SGD):
    """Changes one parameter, and then runs out of memory."""

    calls = 0

    def step(self, closure=None):
        if closure:
            closure()
        self.calls += 1
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(1)
        out_of_memory(None)


def state_of(model):
    """Copies of all parameters and buffers, on the CPU."""
    return [
        t.detach().to("cpu", copy=True) for t in list(model.parameters()) + list(model.buffers())
    ]


def same_bits(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


def train(kind, steps=3, fail_at=0, times=1, limited=None, where="forward", **options):
    """(state after some steps, losses, Step) with OOMs."""
    model, batch, loss_fn = make(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if limited is not None:
        loss_fn = fails_above(loss_fn, limited, where)
    step = rebatch.Step(model, optimizer, loss_fn, log_level="quiet", growth=False, **options)
    losses = []
    torch.manual_seed(1)
    for i in range(steps):
        with FailAt(fail_at if i == 1 else 0, times):
            losses.append(step(batch))
    return state_of(model), losses, step

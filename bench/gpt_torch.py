"""PyTorch's GPT-2 124M beside bench/gpt.c: the same sizes, batch, clipping and optimizer; bf16
autocast over fp32 weights, fused attention and AdamW. Lines:
    result pytorch MODE MICRO TOKENS_A_SECOND PEAK_MIB
"""

import statistics
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

from pytorch import Gpt

LAYERS, C, T, V = 12, 768, 1024, 50304
BATCH, WARM, STEPS, RUNS = 64, 3, 8, 3


class Model(Gpt):
    """Its loss, of a model that begins as rebatch's."""

    def __init__(self):
        super().__init__(C, LAYERS, T, V)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens, targets):
        return F.cross_entropy(super().forward(tokens).view(-1, V), targets.reshape(-1))


def train_step(model, parameters, optimizer, tokens, micro):
    optimizer.zero_grad(set_to_none=True)
    for first in range(0, BATCH, micro):
        part = tokens[first : first + micro]
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(part[:, :-1], part[:, 1:]) * (micro / BATCH)
        loss.backward()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    return loss


def bench(mode, micro):
    torch.manual_seed(1)
    torch.cuda.reset_peak_memory_stats()
    original = Model().cuda()
    model = torch.compile(original) if mode == "compiled" else original
    parameters = list(original.parameters())
    optimizer = torch.optim.AdamW(
        parameters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    tokens = torch.randint(0, 50257, (BATCH, T + 1), device="cuda")
    for _ in range(WARM):
        train_step(model, parameters, optimizer, tokens, micro).item()
    rates = []
    for _ in range(RUNS):
        began = time.perf_counter()
        for _ in range(STEPS):
            train_step(model, parameters, optimizer, tokens, micro).item()
        rates.append(STEPS * BATCH * T / (time.perf_counter() - began))
    peak = torch.cuda.max_memory_allocated() / 2**20
    print(f"result pytorch {mode} {micro} {statistics.median(rates):.0f} {peak:.1f}", flush=True)
    del original, model, parameters, optimizer
    torch._dynamo.reset()
    torch.cuda.empty_cache()


if __name__ == "__main__":
    print("PyTorch", torch.__version__, "CUDA", torch.version.cuda, flush=True)
    torch.backends.cuda.matmul.allow_tf32 = True
    for mode in sys.argv[1:] or ["eager", "compiled"]:
        for micro in (16, 64):
            bench(mode, micro)

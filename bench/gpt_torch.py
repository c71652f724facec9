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

LAYERS, C, HEADS, T, V = 12, 768, 12, 1024, 50304
BATCH, WARM, STEPS, RUNS = 64, 3, 8, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.project = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.widen, self.narrow = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x):
        B = x.shape[0]
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, HEADS, C // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).reshape(B, T, C))
        return x + self.narrow(F.gelu(self.widen(self.norm2(x)), approximate="tanh"))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(V, C), nn.Embedding(T, C)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(C), nn.Linear(C, V, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.positions(torch.arange(T, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, V), targets.reshape(-1))


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

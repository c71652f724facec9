"""Pretrains GPT-2 124M by accumulated gradients in half precision with GradScaler, and draws
its batches from an array of tokens without a loader, as in https://github.com/karpathy/nanoGPT."""

import argparse
import inspect
import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional

BLOCK, VOCABULARY = 256, 50304
WARMUP, LARGEST, SMALLEST = 20, 6e-4, 6e-5


class Layer(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.c_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.resid_dropout = nn.Dropout(dropout)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(self.ln_1(x)).split(C, dim=2)
        q, k, v = (part.view(B, T, self.heads, -1).transpose(1, 2) for part in (q, k, v))
        dropout = self.dropout if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        x = x + self.resid_dropout(self.c_proj(y))
        return x + self.resid_dropout(self.c_out(functional.gelu(self.c_fc(self.ln_2(x)))))


class GPT(nn.Module):
    def __init__(self, layers=12, heads=12, width=768, dropout=0.1):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, width), nn.Embedding(BLOCK, width)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList([Layer(width, heads, dropout) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        self.apply(self.start)
        self.wte.weight = self.lm_head.weight

    @staticmethod
    def start(module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, idx, targets):
        pos = torch.arange(idx.size(1), dtype=torch.long, device=idx.device)
        x = self.drop(self.wte(idx) + self.wpe(pos))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = functional.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1))
        return logits, loss

    def optimizer(self, decay, rate):
        params = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": decay},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        fused = "fused" in inspect.signature(torch.optim.AdamW).parameters
        return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=fused)


def rate_at(step, steps):
    if step < WARMUP:
        return LARGEST * (step + 1) / (WARMUP + 1)
    part = (step - WARMUP) / max(1, steps - WARMUP)
    return SMALLEST + 0.5 * (1.0 + math.cos(math.pi * part)) * (LARGEST - SMALLEST)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=12, help="sequences of a micro-step")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--accumulate", type=int, default=5)
    args = parser.parse_args()
    torch.manual_seed(1337)
    torch.backends.cuda.matmul.allow_tf32 = True
    tokens = np.random.default_rng(1).integers(0, 50257, 1_000_000).astype(np.uint16)

    def get_batch():
        starts = torch.randint(len(tokens) - BLOCK, (args.batch,))
        x = [torch.from_numpy(tokens[i : i + BLOCK].astype(np.int64)) for i in starts]
        y = [torch.from_numpy(tokens[i + 1 : i + 1 + BLOCK].astype(np.int64)) for i in starts]
        x, y = torch.stack(x).pin_memory(), torch.stack(y).pin_memory()
        return x.to("cuda", non_blocking=True), y.to("cuda", non_blocking=True)

    model = GPT().to("cuda")
    optimizer = model.optimizer(0.1, LARGEST)
    scaler = torch.amp.GradScaler("cuda")
    X, Y = get_batch()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, args.steps)
        for _ in range(args.accumulate):
            with torch.amp.autocast(device_type="cuda", dtype=torch.float16):
                logits, loss = model(X, Y)
                loss = loss / args.accumulate
            X, Y = get_batch()  # the next one, while the GPU is in the forward pass
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        print(f"iter {step}: loss {loss.item() * args.accumulate:.4f}")


if __name__ == "__main__":
    main()

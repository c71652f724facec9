"""Two trainers as their pages have them, with a Backward beside the plain loop: nanoGPT's with a
GPT-2 124M, 4 x 32 samples of 1,024 an update, and Accelerate's accumulation with a Llama of 134M,
2 x 64 samples of 512. With a cap each way has so much memory. `hand` is the plain loop in batches
of 16. Prints a JSON object with samples a second.

    python3 bench/trainers.py nanogpt plain
    python3 bench/trainers.py llama install --cap 15.1

Needs the packages rebatch, accelerate and transformers, and a GPU with 40 GiB."""

import argparse
import json
import statistics
import sys
import time

import torch

import pytorch as gpt2

WAYS = ("plain", "hand", "Backward", "install")
STEPS, MEASURED = 30, 15  # updates, and the last of them


def tokens(batch, length, words):
    return torch.randint(0, words, (batch, length), device="cuda")


def nanogpt(way):
    """An update, and its samples."""
    model = gpt2.Gpt(768, 12, 1024, 50304).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=True)
    batch, accumulation = (16, 8) if way == "hand" else (32, 4)

    def get_batch():
        drawn = tokens(batch, 1025, 50304)
        return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()

    def accumulate():
        for _ in range(accumulation):
            (gpt2.loss_fn(model, get_batch()) / accumulation).backward()

    if way in ("Backward", "install"):
        import rebatch.torch as rebatch

        backward = rebatch.Backward(model, gpt2.loss_fn)

        def accumulate():
            backward(batches=[get_batch() for _ in range(accumulation)])

    def update():
        accumulate()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update, batch * accumulation


def llama(way):
    from accelerate import Accelerator
    from transformers import LlamaConfig, LlamaForCausalLM

    batch, accumulation = (16, 8) if way == "hand" else (64, 2)
    config = dict(hidden_size=768, intermediate_size=2048, vocab_size=32000)
    config.update(num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=12)
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=accumulation)
    model = LlamaForCausalLM(LlamaConfig(**config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)

    def loss_fn(model, samples):
        return model(input_ids=samples, labels=samples).loss

    def backward(samples):
        accelerator.backward(loss_fn(model, samples))

    if way in ("Backward", "install"):
        import rebatch.torch as rebatch

        backward = rebatch.Backward(model, loss_fn, backward=accelerator.backward)

    def update():
        for _ in range(accumulation):
            samples = tokens(batch, 512, 32000)
            with accelerator.accumulate(model):
                backward(samples)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    return update, batch * accumulation


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trainer", choices=("nanogpt", "llama"))
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--cap", type=float, default=0, help="GiB; 0: all of the GPU")
    arguments = parser.parse_args()
    cap = int(arguments.cap * gpt2.GIB)
    if arguments.way == "install":
        import rebatch.torch as rebatch

        rebatch.install(limit=cap or None)
    elif cap:
        torch.cuda.set_per_process_memory_fraction(cap / torch.cuda.mem_get_info()[1])
    torch.manual_seed(0)
    update, samples = globals()[arguments.trainer](arguments.way)
    seconds = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        update()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    measured = seconds[-MEASURED:]
    result = {"samples_per_s": round(samples / statistics.median(measured), 1)}
    result["mean_samples_per_s"] = round(samples * len(measured) / sum(measured), 1)
    print(json.dumps({**vars(arguments), **result, **gpt2.memory()}))


if __name__ == "__main__":
    sys.exit(main())

"""What others do about the micro-batch, beside bench/gpt_recovery.c: the same model, batch and caps
in PyTorch. Lines:
    caps NAME CAP_GIB SIZE TRUE_SIZE TRIALS OOMS MS
    tenant NAME SIZE_BEFORE SIZE_AFTER STRUCK_MS STEP_MS REDONE_SAMPLES
NAME is Accelerate's decorator around one effective step from 128 on, Lightning's tuner in its two
modes, or the loop that halves the micro-batch and runs the batch again, as Composer's does.
TRUE_SIZE is the largest with which whole steps run, found by trying.
    gpt_recovery_torch.py TENANT_PROGRAM
"""

import gc
import logging
import statistics
import subprocess
import sys
import time
import warnings

import torch

from gpt_torch import T, Model

BATCH, CLEAN_STEPS, LEFT_MIB, TAKEN_PERMILLE = 128, 5, 24 << 10, 450
CAPS_GIB = (8, 12, 24, 48, 96)
OOM = torch.cuda.OutOfMemoryError


def tokens_of(count):
    return torch.randint(0, 50257, (count, T + 1), device="cuda")


class Training:
    def __init__(self):
        with torch.device("cuda"):
            self.model = Model()
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4, fused=True)
        self.tokens = tokens_of(BATCH)

    def microbatch(self, first, count):
        part = self.tokens[first : first + count]
        with torch.autocast("cuda", torch.bfloat16):
            loss = self.model(part[:, :-1], part[:, 1:]) * (part.shape[0] / BATCH)
        loss.backward()

    def step(self, micro, samples=BATCH, after_microbatch=lambda done: None):
        self.optimizer.zero_grad(set_to_none=True)
        for first in range(0, samples, micro):
            self.microbatch(first, micro)
            after_microbatch(min(first + micro, samples))
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        torch.cuda.synchronize()


def clear():
    gc.collect()
    torch.cuda.empty_cache()


def timed(call):
    torch.cuda.synchronize()
    began = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    return result, 1e3 * (time.perf_counter() - began)


# ---- the largest micro-batch under a cap ----


def fits(size):
    clear()
    try:
        training = Training()
        for _ in range(2):
            training.step(size, min(2 * size, BATCH))
        return True
    except OOM:
        return False


def true_largest():
    low, high = 0, BATCH + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def accelerate_size():
    from accelerate.utils import find_executable_batch_size

    trials = []

    @find_executable_batch_size(starting_batch_size=BATCH)
    def train(batch_size):
        trials.append(batch_size)
        Training().step(batch_size)
        return batch_size

    size = train()
    return size, len(trials), len(trials) - 1


def lightning_size(mode):
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trials = []

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            with torch.device("cuda"):
                self.model = Model()
            self.batch_size = 2

        def train_dataloader(self):
            rows = torch.randint(0, 50257, (64 * self.batch_size, T + 1))
            return torch.utils.data.DataLoader(rows, batch_size=self.batch_size)

        def training_step(self, batch, _):
            if not trials or trials[-1] != batch.shape[0]:
                trials.append(batch.shape[0])
            return self.model(batch[:, :-1], batch[:, 1:])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)

    trainer = lightning.Trainer(
        accelerator="gpu",
        devices=1,
        precision="bf16-mixed",
        logger=False,
        max_epochs=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    tuner = lightning.pytorch.tuner.Tuner(trainer)
    return tuner.scale_batch_size(Module(), mode=mode, init_val=2, max_trials=10), len(trials), -1


def bench_caps():
    total = torch.cuda.get_device_properties(0).total_memory
    ways = {
        "accelerate": accelerate_size,
        "lightning-power": lambda: lightning_size("power"),
        "lightning-binsearch": lambda: lightning_size("binsearch"),
    }
    fits(8)  # loads kernels and libraries
    for gib in CAPS_GIB:
        clear()
        if gib * 2**30 > torch.cuda.mem_get_info()[0]:
            continue  # no cap on this device
        torch.cuda.set_per_process_memory_fraction(gib * 2**30 / total)
        largest = true_largest()
        for name, way in ways.items():
            clear()
            try:
                (size, trials, ooms), ms = timed(way)
                print("caps", name, gib, size, largest, trials, ooms, f"{ms:.1f}", flush=True)
            except Exception as error:  # a peer that fails is told, and the others go on
                print("caps", name, gib, "failed:", repr(error)[:200], flush=True)
    torch.cuda.set_per_process_memory_fraction(1.0)
    clear()


# ---- another user of the card, in mid-training ----


class Tenant:
    def __init__(self, program):
        self.process = subprocess.Popen(
            [program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def tell(self, line):
        self.process.stdin.write(line + "\n")
        return self.process.stdout.readline()


def halving_step(training, micro, after_microbatch=lambda done: None):
    """The batch again from its first sample whenever memory runs out, at half the size."""
    redone = 0
    while True:
        done = 0

        def note(samples):
            nonlocal done
            done = samples
            after_microbatch(samples)

        try:
            training.step(micro, BATCH, note)
            return micro, redone
        except OOM:
            micro, redone = micro // 2, redone + done
        training.optimizer.zero_grad(set_to_none=True)
        clear()


def bench_tenant(program):
    tenant = Tenant(program)
    tenant.tell(f"leave {LEFT_MIB}")
    training = Training()
    before, _ = halving_step(training, BATCH)
    for _ in range(CLEAN_STEPS):
        training.step(before)
    struck_ms = 0.0

    def strike(_):
        nonlocal struck_ms
        if struck_ms == 0.0:
            torch.cuda.synchronize()
            began = time.perf_counter()
            clear()
            tenant.tell(f"take {TAKEN_PERMILLE}")
            struck_ms = 1e3 * (time.perf_counter() - began)

    (after, redone), ms = timed(lambda: halving_step(training, before, strike))
    clean = statistics.median(timed(lambda: training.step(after))[1] for _ in range(CLEAN_STEPS))
    print("tenant halving", before, after, f"{ms - struck_ms:.1f} {clean:.1f}", redone, flush=True)
    tenant.process.stdin.close()
    tenant.process.wait()


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.backends.cuda.matmul.allow_tf32 = True
    bench_tenant(sys.argv[1])
    bench_caps()

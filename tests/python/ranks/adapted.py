"""Lightning's Trainer and transformers' Trainer on several ranks. Each function returns plain
values for the test."""

import logging
import os
import tempfile
import warnings

import torch
import torch.distributed as dist

from trained import RANK_OF_FAILURES, captures_on_a_cpu, error_of, is_same_everywhere


def as_launched():
    """The environment of torchrun, where the test has not used it."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(
        RANK=rank,
        LOCAL_RANK=rank,
        WORLD_SIZE=size,
        LOCAL_WORLD_SIZE=size,
        TORCHELASTIC_RUN_ID="here",
        MASTER_ADDR="localhost",
        MASTER_PORT="29500",
    )


def let_accelerate_shard(device):
    """accelerate leaves fully_shard() out on a CPU."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    if device.type == "cpu":
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def strike(samples, largest):
    if dist.get_rank() == RANK_OF_FAILURES and len(samples) > largest:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(64, 8, generator=generator), torch.randn(64, 1, generator=generator)


def compared(models, reports):
    """Plain, with room, and with little room on rank 1."""
    plain, whole, cut = [list(m.parameters()) for m in models]
    return {
        "as_plain": all(torch.allclose(a, b, atol=1e-5) for a, b in zip(plain, whole)),
        "near": all(torch.allclose(a, b, atol=1e-5) for a, b in zip(whole, cut)),
        "same": is_same_everywhere(models[2]),
        "ranks": reports[1].ranks,
        "replays": [report.replayed > 0 for report in reports],
    }


def with_lightning(accumulated, graphs=False):
    as_launched()
    epochs = 8 if graphs else 2
    if graphs:
        captures_on_a_cpu()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    import lightning.pytorch as pl

    from rebatch.lightning import Rebatch

    class Module(pl.LightningModule):
        def __init__(self, largest):
            super().__init__()
            self.net, self.largest = network(), largest

        def training_step(self, batch, _):
            strike(batch[0], self.largest)
            loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train(largest, callbacks):
        module = Module(largest)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data()), 16)
        with tempfile.TemporaryDirectory() as folder:
            pl.Trainer(
                accelerator="cpu",
                devices=2,
                strategy="ddp",
                max_epochs=epochs,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                default_root_dir=folder,
                enable_model_summary=False,
                callbacks=callbacks,
                accumulate_grad_batches=accumulated,
                gradient_clip_val=1.0,
            ).fit(module, loader)
        return module

    options = {"log_level": "quiet", "growth": False, "graphs": graphs}
    callbacks = [Rebatch(**options) for _ in range(2)]
    models = [train(99, []), train(99, callbacks[:1]), train(4, callbacks[1:])]
    return compared(models, [c.report for c in callbacks])


def with_transformers(accumulated, graphs=False):
    as_launched()
    epochs = 8 if graphs else 2
    if graphs:
        captures_on_a_cpu()
    warnings.simplefilter("ignore")
    import transformers

    from rebatch.transformers import RebatchTrainer

    transformers.logging.set_verbosity_error()

    class Model(torch.nn.Module):
        def __init__(self, largest):
            super().__init__()
            self.net, self.largest = network(), largest

        def forward(self, x, labels=None):
            strike(x, self.largest)
            y = self.net(x)
            return {"loss": torch.nn.functional.mse_loss(y, labels), "logits": y}

    x, y = data()
    samples = [{"x": a, "labels": b} for a, b in zip(x, y)]

    def train(largest, kind, **options):
        model = Model(largest)
        with tempfile.TemporaryDirectory() as folder:
            args = transformers.TrainingArguments(
                folder,
                use_cpu=True,
                per_device_train_batch_size=16,
                num_train_epochs=epochs,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
                logging_strategy="no",
                gradient_accumulation_steps=accumulated,
                remove_unused_columns=False,
                seed=1,
            )
            trainer = kind(model=model, args=args, train_dataset=samples, **options)
            trainer.train()
        return model, trainer

    quiet = {"rebatch": {"log_level": "quiet", "growth": False, "graphs": graphs}}
    plain, _ = train(99, transformers.Trainer)
    whole, first = train(99, RebatchTrainer, **quiet)
    cut, second = train(4, RebatchTrainer, **quiet)
    return compared([plain, whole, cut], [first.report, second.report])


def disagreeing(framework):
    """What each rank says where rank 1 clips at another norm."""
    norm = 1.0 + dist.get_rank()
    as_launched()
    train = {"lightning": _fit, "transformers": _train}[framework]
    return error_of(lambda: train(norm))


def _fit(norm):
    import lightning.pytorch as pl

    from rebatch.lightning import Rebatch

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()

        def training_step(self, batch, _):
            return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data()), 16)
    pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Rebatch(log_level="quiet")],
        gradient_clip_val=norm,
    ).fit(Module(), loader)


def _train(norm):
    import transformers

    from rebatch.transformers import RebatchTrainer

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network()

        def forward(self, x, labels=None):
            y = self.net(x)
            return {"loss": torch.nn.functional.mse_loss(y, labels), "logits": y}

    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            folder, use_cpu=True, max_steps=2, report_to=[], save_strategy="no", max_grad_norm=norm
        )
        samples = [{"x": a, "labels": b} for a, b in zip(*data())]
        RebatchTrainer(model=Model(), args=args, train_dataset=samples).train()

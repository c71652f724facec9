"""Lightning's Trainer and transformers' Trainer with fully_shard() (FSDP2), on two ranks, which are
CPUs or GPUs. Each function returns plain values for the test."""

import contextlib
import logging
import tempfile
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

import models
from adapted import as_launched, let_accelerate_shard
from models import FailAt, placed, same_bits
from rebatch.torch.trainers.backward import TrainerBackward
from rebatch.torch.trainers.update import TrainerUpdate
from sharded import adam, batch_of, loss_fn, plain, sharded, whole
from trained import RANK_OF_FAILURES, error_of, everyones, swept

# Here, so that the server of pair.py imports them once, and not each rank.
with contextlib.suppress(ImportError):
    import lightning.pytorch as pl

    import rebatch.lightning
with contextlib.suppress(ImportError):
    import transformers

    import rebatch.transformers

_CLIP = 0.1  # less than any norm here
_SIZE = 16  # of a batch
_FITS = 4  # samples, where memory is short


def _is_short(is_on_all):
    return is_on_all or dist.get_rank() == RANK_OF_FAILURES


def _out_of_memory(*_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def _strike(where, samples, result):
    """On a rank that has memory for a few samples: result fails here, or in its backward pass."""
    if where and samples > _FITS and torch.is_grad_enabled():
        if where == "forward":
            _out_of_memory()
        result.register_hook(_out_of_memory)
    return result


# ---- what a trainer does with a Backward ----


def _halves():
    return list(zip(*(t.split(8) for t in batch_of(dist.get_rank(), 16))))


def _train(window, fails_at, is_failing, failing_update):
    """(state, error, the mode of the update that fails). Each update has two batches."""
    model = sharded(plain())
    optimizer, halves = adam(model), _halves()
    backward = TrainerBackward(
        model,
        loss_fn,
        optimizer=optimizer,
        window=window,
        growth=False,
        log_level="quiet",
        group_timeout=60.0,
        lighten=[lambda on: None],
        micro_start=4,
        micro_largest=4,
        micro_smallest=4,
    )
    update = TrainerUpdate(backward)
    mode, error = FailAt(fails_at if is_failing else 0), None

    def step():
        update.begin()
        optimizer.step()

    for number in range(2):
        try:
            with mode if number == failing_update and fails_at else contextlib.nullcontext():
                for half in halves:
                    backward(half)
                update.clip_norm(backward.parameters, _CLIP, 2, _out_of_memory)
                update.run(step)
        except Exception as caught:
            error = error or f"{type(caught).__name__}: {caught}"
        optimizer.zero_grad()
    return whole(model), error, mode


def ooms_everywhere(window, failing_update, stride):
    """An OOM of one rank in operations of an update of two batches, with clipping."""
    return swept(
        lambda fails_at, is_failing: _train(window, fails_at, is_failing, failing_update),
        False,
        1 + failing_update,
        stride,
    )


def as_fully_shard(window):
    """Whether that is near to fully_shard() with PyTorch's own clipping, which clips here."""
    mine, _, _ = _train(window, 0, False, 0)
    model = sharded(plain())
    optimizer = adam(model)
    for _ in range(2):
        for half in _halves():
            loss_fn(model, half).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
        optimizer.step()
        optimizer.zero_grad()
    pairs = list(zip(mine, whole(model)))[: len(list(model.parameters()))]
    is_near = all(torch.allclose(a, b, atol=1e-5) for a, b in pairs)
    return {"near": is_near, "clips": float(norm.full_tensor()) > _CLIP}


def _norm(model):
    """PyTorch's, which makes collectives."""
    gradients = [p.grad for p in model.parameters()]
    return float(nn.utils.get_total_norm(gradients).full_tensor())


def clipped():
    """The clipping of several batches: its norm beside PyTorch's, how often a trainer's own one is
    tried, for another norm and after the program has changed a gradient, whether a batch that fails
    leaves gradients as they were, and the norms after OOMs."""
    model, state = sharded(plain()), {"error": None}

    def failing(model, samples):
        if state["error"]:
            raise state["error"]
        return loss_fn(model, samples)

    backward = TrainerBackward(
        model, failing, optimizer=adam(model), log_level="quiet", group_timeout=60.0
    )
    batch = batch_of(dist.get_rank())
    for _ in range(2):
        backward(batch)
    gradients, expected = [p.grad for p in model.parameters()], _norm(model)
    before = [g.full_tensor().clone() for g in gradients]
    state["error"] = ValueError("the sample is bad") if _is_short(False) else None
    error = error_of(lambda: backward(batch))
    kept = all(a is p.grad for a, p in zip(gradients, model.parameters()))
    kept = kept and same_bits(before, [g.full_tensor() for g in gradients])
    state["error"] = None
    backward(batch)
    norm, tries = _norm(model), [_tries(backward, float("inf"))]
    next(model.parameters()).grad.mul_(1)
    tries.append(_tries(backward, 2))
    backward(batch)
    found = float(backward.clip(_CLIP))
    return {
        "error": error[0],
        "kept": kept,
        "sums": abs(norm / expected - 1.5) < 1e-5 and abs(found / expected - 2) < 1e-5,
        "tries": tries,
        "after ooms": _clipped_after_ooms(backward, batch),
    }


def _tries(backward, norm_type):
    """How often a trainer's own clipping runs, which has collectives and runs out of memory."""
    tries = []

    def body():
        tries.append(1)
        _out_of_memory()

    clip = TrainerUpdate(backward).clip_norm
    error = error_of(lambda: clip(backward.parameters, _CLIP, norm_type, body))
    assert error[0] == "Exhausted"
    return len(tries)


def _clipped_after_ooms(backward, batch):
    """The norms after clipping, with an OOM at each of its operations in turn."""
    norms, mode = [], FailAt(0)
    while mode.failed or not norms:
        backward(batch)
        mode = FailAt(len(norms) + 1)
        with mode:
            TrainerUpdate(backward).clip_norm(backward.parameters, _CLIP, 2, _out_of_memory)
        norms.append(round(_norm(backward.model), 5))
    return norms


# ---- the trainers ----


def _options(window, size, is_cut):
    """Of a rank whose micro-batches have the size that fits from the beginning."""
    given = {"window": window, "log_level": "quiet", "growth": False, "group_timeout": 60.0}
    return {**given, "micro_start": size, "micro_largest": size} if is_cut else given


def _compared(train, window, is_on_all, where):
    """train(options or None, where) -> (model before, after, report): PyTorch alone, at the sizes
    that fit, and where memory runs out."""
    short = _is_short(is_on_all)
    cut = short or window is False  # in lockstep all ranks have the same sizes
    before, own, _ = _on_host(train(None, ""))
    _, started, _ = _on_host(train(_options(window, _FITS if cut else _SIZE, True), ""))
    _, struck, report = _on_host(train(_options(window, _SIZE, False), where if short else ""))
    return {
        "near": all(torch.allclose(a, b, atol=1e-4) for a, b in zip(own, struck)),
        "bits": same_bits(started, struck),
        "same": all(same_bits(struck, other) for other in everyones(struck)),
        "moved": not any(torch.allclose(a, b, atol=1e-3) for a, b in zip(before, own)),
        "ranks": report.ranks,
    }


def _on_host(trained):
    """Each rank has a GPU of its own."""
    before, after, report = trained
    return [p.cpu() for p in before], [p.cpu() for p in after], report


def _copies(model):
    return [p.detach().clone() for p in model.parameters()]


def _whole(model):
    for module in model.modules():  # an evaluation leaves parameters whole
        if isinstance(module, FSDPModule):
            module.reshard()
    return [p.detach().full_tensor() for p in model.parameters()]


def _quiet_lightning():
    as_launched()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def _lightning_module(where="", is_sharded=True):
    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = plain()

        def configure_model(self):
            if not is_sharded:
                return
            mesh = self.device_mesh["data_parallel"]
            for part in self.net:
                fully_shard(part, mesh=mesh)
            fully_shard(self.net, mesh=mesh)

        def training_step(self, batch, _):
            loss = loss_fn(self.net, batch)
            self.log("loss", loss, sync_dist=True)
            return _strike(where, len(batch[0]), loss)

        def validation_step(self, batch, _):
            self.log("checked", loss_fn(self.net, batch), sync_dist=True)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    return Module()


def _fit(module, callbacks, sizes=(2, 1)):
    """Validation runs before training, and after every other update."""
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch_of(5, 128)), _SIZE)
    with tempfile.TemporaryDirectory() as folder:
        pl.Trainer(
            accelerator="cuda" if models.DEVICE.type == "cuda" else "cpu",
            devices=2,
            strategy=pl.strategies.ModelParallelStrategy(*sizes),
            max_steps=3,
            max_epochs=-1,
            check_val_every_n_epoch=1,
            limit_val_batches=2,
            accumulate_grad_batches=2,
            gradient_clip_val=_CLIP,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            callbacks=callbacks,
        ).fit(module, loader, loader)
    return module


def with_lightning(window, is_on_all, where):
    """What _compared() finds for ModelParallelStrategy."""
    _quiet_lightning()

    def train(options, where):
        callbacks = [] if options is None else [rebatch.lightning.Rebatch(**options)]
        module = _lightning_module(where)
        before = _copies(module)
        _fit(module, callbacks)
        return before, _whole(module), callbacks[0].report if callbacks else None

    return _compared(train, window, is_on_all, where)


def refused_by_lightning():
    """The message of each training that cannot run."""
    _quiet_lightning()

    def said(module, **options):
        callbacks = [rebatch.lightning.Rebatch(log_level="quiet")]
        return error_of(lambda: _fit(module, callbacks, **options))[1]

    outside = _lightning_module()
    outside.head = placed(nn.Linear(3, 3))
    return {
        "tensors": said(_lightning_module(is_sharded=False), sizes=(1, 2)),
        "nothing": said(_lightning_module(is_sharded=False)),
        "outside": said(outside),
    }


def _samples(count=64, length=12):
    """Sequences of tokens, some of which have no label."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 32, (count, length), generator=generator)
    labels = tokens.masked_fill(torch.rand(count, length, generator=generator) < 0.3, -100)
    return [{"input_ids": t, "labels": its} for t, its in zip(tokens, labels)]


def _trainer(kind, where="", is_divided=True, sharding=None, **options):
    """Its model's loss is divided by num_items_in_batch, or a mean."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
    )

    class Model(transformers.LlamaForCausalLM):
        accepts_loss_kwargs = is_divided

        def forward(self, input_ids=None, labels=None, **keywords):
            output = super().forward(input_ids, labels=labels, **keywords)
            if labels is not None:
                output["loss"] = _strike(where, len(input_ids), output["loss"])
            return output

    arguments = transformers.TrainingArguments(
        tempfile.mkdtemp(),
        use_cpu=models.DEVICE.type == "cpu",
        per_device_train_batch_size=_SIZE,
        max_steps=2,
        learning_rate=0.01,
        gradient_accumulation_steps=2,
        max_grad_norm=_CLIP,
        eval_strategy="steps",
        eval_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_strategy="no",
        seed=1,
        fsdp="full_shard",
        fsdp_config={
            "fsdp_version": 2,
            "transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
            **(sharding or {}),
        },
    )
    let_accelerate_shard(arguments.device)
    samples = _samples()
    return kind(
        model=Model(config),
        args=arguments,
        train_dataset=samples,
        eval_dataset=samples[:16],
        **options,
    )


def _quiet_transformers():
    as_launched()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()


def with_transformers(window, is_on_all, where, is_divided):
    """What _compared() finds for fsdp_version 2."""
    _quiet_transformers()

    def train(options, where):
        kind = transformers.Trainer if options is None else rebatch.transformers.RebatchTrainer
        given = {} if options is None else {"rebatch": options}
        trainer = _trainer(kind, where, is_divided, **given)
        before = _copies(trainer.model)
        trainer.train()
        return before, _whole(trainer.model), trainer.report if given else None

    return _compared(train, window, is_on_all, where)


def refused_by_transformers():
    """The message of each training that cannot run."""
    _quiet_transformers()

    def said(**options):
        kind = rebatch.transformers.RebatchTrainer
        return error_of(lambda: _trainer(kind, **options).train())[1]

    def squared(outputs, labels, num_items_in_batch=None):
        return outputs["logits"].square().sum() / num_items_in_batch**2

    return {
        "on host": said(sharding={"cpu_offload": True}),
        "squared": said(compute_loss_func=squared, rebatch=_options(None, _FITS, True)),
    }

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
from adapted import as_launched
from models import FailAt, placed, same_bits
from rebatch.torch.trainers.backward import Backward
from rebatch.torch.trainers.update import TrainerUpdate
from sharded import adam, batch_of, loss_fn, plain, sharded, whole
from trained import RANK_OF_FAILURES, error_of, everyones, swept

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
    fixed = {"micro_start": 4, "micro_largest": 4, "micro_smallest": 4}
    backward = Backward(
        model,
        optimizer,
        loss_fn,
        window=window,
        growth=False,
        log_level="quiet",
        group_timeout=60.0,
        lighten=[lambda on: None],
        **fixed,
    )
    update = TrainerUpdate(backward)
    mode, error = FailAt(fails_at if is_failing else 0), None

    def step():
        update.begin()
        optimizer.step()

    for number in range(3):
        try:
            with mode if number == failing_update and fails_at else contextlib.nullcontext():
                for half in halves:
                    backward(half)
                update.clip_to(_CLIP, backward.parameters, _out_of_memory)
                update.run(step)
        except Exception as caught:
            error = error or f"{type(caught).__name__}: {caught}"
        optimizer.zero_grad()
    return whole(model), error, mode


def ooms_everywhere(window, is_on_all, failing_update, stride):
    """An OOM at each operation of an update of two batches, with clipping."""
    return swept(
        lambda fails_at, is_failing: _train(window, fails_at, is_failing, failing_update),
        is_on_all,
        1 + failing_update,
        stride,
    )


def as_fully_shard(window, replicas=0):
    """Whether that is near to fully_shard() with PyTorch's own clipping, and what a norm of changed
    gradients is not taken from."""
    mine, _, _ = _train(window, 0, False, 0)
    model = sharded(plain(), replicas=replicas)
    optimizer = adam(model)
    for _ in range(3):
        for half in _halves():
            loss_fn(model, half).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
        optimizer.step()
        optimizer.zero_grad()
    pairs = list(zip(mine, whole(model)))[: len(list(model.parameters()))]
    is_near = all(torch.allclose(a, b, atol=1e-5) for a, b in pairs)
    return {"near": is_near, "clips": float(norm.full_tensor()) > _CLIP}


def clipped():
    """Backward.clip() of two batches: its norm beside PyTorch's, whether it is known after the
    program has changed a gradient, and whether a batch that fails leaves gradients as they were."""
    model, state = sharded(plain()), {"error": None}

    def failing(model, samples):
        if state["error"]:
            raise state["error"]
        return loss_fn(model, samples)

    backward = Backward(model, adam(model), failing, log_level="quiet", group_timeout=60.0)
    batch = batch_of(dist.get_rank())
    for _ in range(2):
        backward(batch)
    gradients = [p.grad for p in model.parameters()]
    expected = float(nn.utils.get_total_norm(gradients).full_tensor())
    before = [g.full_tensor().clone() for g in gradients]
    state["error"] = ValueError("the sample is bad") if _is_short(False) else None
    error = error_of(lambda: backward(batch))
    kept = all(a is p.grad for a, p in zip(gradients, model.parameters()))
    kept = kept and same_bits(before, [g.full_tensor() for g in gradients])
    state["error"] = None
    backward(batch)
    gradients[0] = next(model.parameters()).grad
    norm = float(nn.utils.get_total_norm([p.grad for p in model.parameters()]).full_tensor())
    is_known = backward.knows_norm(model.parameters())
    gradients[0].mul_(2)
    is_still_known = backward.knows_norm(model.parameters())
    gradients[0].mul_(0.5)
    backward(batch)
    found = float(backward.clip(_CLIP))
    after = float(nn.utils.get_total_norm([p.grad for p in model.parameters()]).full_tensor())
    return {
        "error": error[0],
        "kept": kept,
        "sums": abs(norm / expected - 1.5) < 1e-5 and abs(found / expected - 2) < 1e-5,
        "known": [is_known, is_still_known],
        "clipped": abs(after - _CLIP) < 1e-5,
    }


# ---- the trainers ----


def _options(window, size, is_cut):
    """Of a rank whose micro-batches have the size that fits from the beginning."""
    given = {"window": window, "log_level": "quiet", "growth": False, "group_timeout": 60.0}
    return {**given, "micro_start": size, "micro_largest": size} if is_cut else given


def _compared(train, window, is_on_all, where):
    """train(options or None, where) -> (model, report): PyTorch alone, with room, at the sizes that
    fit, and where memory runs out."""
    short = _is_short(is_on_all)
    cut = short or window is False  # in lockstep all ranks have the same sizes
    own, _ = train(None, "")
    room, first = train(_options(window, _SIZE, False), "")
    started, _ = train(_options(window, _FITS if cut else _SIZE, True), "")
    struck, second = train(_options(window, _SIZE, False), where if short else "")
    near = [all(torch.allclose(a, b, atol=1e-4) for a, b in zip(own, m)) for m in (room, struck)]
    return {
        "near": near,
        "bits": same_bits(started, struck),
        "same": all(same_bits(struck, other) for other in everyones(struck)),
        "moved": not same_bits(own, train(None, "", updates=0)[0]),
        "ranks": [first.ranks, second.ranks],
    }


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
    import lightning.pytorch as pl

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


def _fit(module, callbacks, updates=4, sizes=(2, 1), **options):
    """Validation runs before training, and after every other update."""
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import ModelParallelStrategy

    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch_of(5, 128)), _SIZE)
    with tempfile.TemporaryDirectory() as folder:
        pl.Trainer(
            accelerator="cuda" if models.DEVICE.type == "cuda" else "cpu",
            devices=2,
            strategy=ModelParallelStrategy(*sizes),
            max_steps=updates,
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
            **options,
        ).fit(module, loader, loader)
    return module


def with_lightning(window, is_on_all, where):
    """What _compared() finds for ModelParallelStrategy."""
    _quiet_lightning()
    from rebatch.lightning import Rebatch

    def train(options, where, updates=4):
        callbacks = [] if options is None else [Rebatch(**options)]
        model = _fit(_lightning_module(where), callbacks, updates)
        return _whole(model), callbacks[0].report if callbacks else None

    return _compared(train, window, is_on_all, where)


def refused_by_lightning():
    """The message of each training that cannot run."""
    _quiet_lightning()
    from rebatch.lightning import Rebatch

    def said(module, **options):
        return error_of(lambda: _fit(module, [Rebatch(log_level="quiet")], **options))[1]

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


def _trainer(kind, where="", updates=2, is_divided=True, sharding=None, **options):
    """Its model's loss is divided by num_items_in_batch, or a mean."""
    import transformers

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
        max_steps=max(1, updates),
        learning_rate=0.01 * (updates > 0),
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
    _let_accelerate_shard(arguments.device)
    samples = _samples()
    return kind(
        model=Model(config),
        args=arguments,
        train_dataset=samples,
        eval_dataset=samples[:16],
        **options,
    )


def _let_accelerate_shard(device):
    """accelerate leaves fully_shard() out on a CPU."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    if device.type == "cpu":
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def _quiet_transformers():
    as_launched()
    warnings.simplefilter("ignore")
    import transformers

    transformers.logging.set_verbosity_error()


def with_transformers(window, is_on_all, where, is_divided):
    """What _compared() finds for fsdp_version 2."""
    _quiet_transformers()
    import transformers

    from rebatch.transformers import RebatchTrainer

    def train(options, where, updates=2):
        kind = transformers.Trainer if options is None else RebatchTrainer
        given = {} if options is None else {"rebatch": options}
        trainer = _trainer(kind, where, updates, is_divided, **given)
        trainer.train()
        return _whole(trainer.model), trainer.report if given else None

    return _compared(train, window, is_on_all, where)


def refused_by_transformers():
    """The message of each training that cannot run."""
    _quiet_transformers()
    from rebatch.transformers import RebatchTrainer

    def said(**options):
        return error_of(lambda: _trainer(RebatchTrainer, **options).train())[1]

    def squared(outputs, labels, num_items_in_batch=None):
        return outputs["logits"].square().sum() / num_items_in_batch**2

    return {
        "on host": said(sharding={"cpu_offload": True}),
        "squared": said(compute_loss_func=squared),
    }

"""What a Trainer may be or use that RebatchTrainer does not work with."""

from __future__ import annotations

import re
from typing import Any, Dict, List

import torch

# Names of transformers.Trainer that are private to it and used here. No other private name is.
PRIVATE = ("_prepare_inputs",)
PRIVATE_IN_SOME = ("_get_num_items_in_batch",)  # versions, since a Trainer counts them

# Losses of sentence-transformers that compare the rows of a batch, or sum over it before a square.
_OVER_THE_BATCH = re.compile(
    "(.*MultipleNegatives|.*GIST|.*CoSENT|MegaBatch|Batch.*Triplet|OnlineContrastive|.*InBatch"
    "|.*Orthogonal|.*Splade|Flops).*(Loss|Negatives)"
)


def missing_names(trainer: Any) -> List[str]:
    """The names of PRIVATE that this version of transformers does not have."""
    return [f"Trainer.{name}" for name in PRIVATE if not hasattr(trainer, name)]


def refuse_what_cannot_work(trainer: Any) -> None:
    missing = missing_names(trainer)
    if missing:
        raise ValueError(
            f"rebatch: this version of transformers has no {', '.join(missing)}: expected 4.40 or "
            "newer, up to 5"
        )
    args, accelerator = trainer.args, trainer.accelerator
    sharding = sharding_of(trainer)
    refused = {
        "DataParallel on several GPUs": args.n_gpu > 1,
        "FSDP1": trainer.is_fsdp_enabled and getattr(sharding, "fsdp_version", 1) != 2,
        "FSDP of XLA": getattr(trainer, "is_fsdp_xla_enabled", False),
        "FSDP with parameters in host memory": _keeps_on_host(sharding),
        "FSDP with fp16": trainer.is_fsdp_enabled and args.fp16,
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "tensor or context parallelism, or HSDP": getattr(accelerator, "parallelism_config", None),
        f"a device of type {args.device.type}": args.device.type not in ("cpu", "cuda"),
    }
    for what, is_there in refused.items():
        if is_there:
            raise ValueError(
                f"rebatch: the Trainer uses {what}: expected one GPU for each process, alone or "
                "with DDP, or with FSDP2 in float32 or bf16"
            )
    if args.auto_find_batch_size:
        raise ValueError(
            "rebatch: auto_find_batch_size is on: expected it off, because RebatchTrainer cuts the "
            "batches itself"
        )
    optim = str(getattr(args.optim, "value", args.optim))
    if "lomo" in optim or "layerwise" in optim:
        raise ValueError(
            f"rebatch: optim is {optim!r}, which updates within the backward pass: expected an "
            "optimizer that updates after it"
        )


def refuse_losses_over_the_batch(trainer: Any, options: Dict[str, Any]) -> None:
    """ValueError for a loss of sentence-transformers that is no mean over rows, unless its batches
    run whole."""
    losses, rows = getattr(trainer, "loss", None), trainer.args.per_device_train_batch_size
    given = losses.values() if isinstance(losses, dict) else [losses]
    parts = [p for loss in given if isinstance(loss, torch.nn.Module) for p in loss.modules()]
    for kind in (kind for part in parts for kind in type(part).__mro__):
        is_theirs = kind.__module__.split(".")[0] == "sentence_transformers"
        if not (is_theirs and _OVER_THE_BATCH.fullmatch(kind.__name__)):
            continue
        if not options.get("embed") and options.get("micro_smallest", 1) < rows:
            raise ValueError(
                f"rebatch: the loss of the Trainer is {kind.__name__}, which depends on all rows "
                'of a batch: expected rebatch={"embed": True}, with which the model runs in parts '
                f'and the loss on all rows, or rebatch={{"micro_smallest": {rows}}}, with which '
                "batches run whole"
            )


def sharding_of(trainer: Any) -> Any:
    """accelerate's plugin for FSDP, or None."""
    state = trainer.accelerator.state
    return getattr(state, "fsdp_plugin", None) if trainer.is_fsdp_enabled else None


def _keeps_on_host(sharding: Any) -> bool:
    offload = getattr(sharding, "cpu_offload", None)
    return offload is True or type(offload).__name__ == "CPUOffloadPolicy"

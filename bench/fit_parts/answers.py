"""What `rebatch fit` and its peers answer for the rows of a truth. The output has rows of the same
form, so `fit.py compare` can set them side by side.

The peers are PyTorch's MemTracker, which counts the tensors of two steps with fake tensors, and
accelerate's formula for `estimate-memory`, which knows no batch. MemTracker's largest size is that
of a straight line through its peaks; it is given what the truth measured beside the allocator, and
knows neither the allocator's caches nor its fragments. A row is written at once; a run that was cut
goes on."""

import argparse
import collections
import json
import pathlib
import sys
import time

import torch
from torch import nn

from fit_parts.child import FIT, answer_of, command

STEPS = 2  # the optimizer's state is there in the second
PEERS = ("mem-tracker", "accelerate")


def cells(truth):
    """The rows of a truth with an answer, by model and way."""
    found = collections.defaultdict(list)
    for row in truth["rows"]:
        if row.get("size"):
            found[row["model"], row["way"]].append(row)
    return found


def answered_rows(name, way, gpu, caps, program):
    """The rows of an answer; options of `rebatch fit` may stand before `--` and the program."""
    options = ["--gpu", gpu, "--memory", ",".join(map(str, caps)), "--json"]
    options += ["--install"] * (way == "install")
    began = time.perf_counter()
    answer = answer_of([sys.executable, "-m", "rebatch.fit", *options, *program])
    if "error" in answer:
        return [{"model": name, "way": way, **answer}]
    return [
        {
            "model": name,
            "way": way,
            "cap_bytes": row["memory_bytes"],
            "size": row["micro"],
            "peak_samples": row["micro"],
            "peak_allocated": row["peak_allocated_bytes"],
            "peak_reserved": row["peak_reserved_bytes"],
            "outside_bytes": row["outside_bytes"],
            "seconds": row["seconds"],
            "command_seconds": round(time.perf_counter() - began, 2),
        }
        for row in answer["rows"]
    ]


def fit_rows(name, way, rows, gpu):
    """The rows of `rebatch fit` for a model and way."""
    program = ["--", sys.executable, FIT, "train", name]
    return answered_rows(name, way, gpu, [row["cap_bytes"] for row in rows], program)


def peers_rows(name, way, rows, gpu):
    """The rows of the peers for a model, which know one allocator."""
    if way != "native":
        return []
    sizes = sorted({row["size"] for row in rows})
    return [
        {"model": name, "way": way, "peer": peer, **row}
        for peer in PEERS
        for row in peer_rows(answer_of(command("answers", "one", peer, name, *sizes)), rows)
    ]


def peer_rows(answer, rows):
    if "error" in answer:
        return [answer]
    peaks = {int(size): peak for size, peak in answer["peaks"].items()}
    few, many = min(peaks), max(peaks)
    each = (peaks[many] - peaks[few]) / max(many - few, 1)
    return [
        {
            "cap_bytes": row["cap_bytes"],
            "peak_samples": row["size"],
            "peak_allocated": peaks[row["size"]],
            # Of one size alone, and of what does not grow, there is no line.
            "size": few + int((row["cap_bytes"] - row["outside_bytes"] - peaks[few]) // each)
            if each > 0
            else None,
        }
        for row in rows
    ]


def convert(model, *arguments, **options):
    """What Module.to() does, which fake tensors do not allow: parameters are new ones."""
    new = {}
    for module in model.modules():
        for kept in (module._parameters, module._buffers):
            for name, old in kept.items():
                if old is not None and id(old) not in new:
                    new[id(old)] = converted(old, arguments, options), old
                if old is not None:
                    kept[name] = new[id(old)][0]
    return model


def converted(old, arguments, options):
    if not old.is_floating_point():
        arguments = [given for given in arguments if not isinstance(given, torch.dtype)]
    if old.dim() != 4:
        options = {name: value for name, value in options.items() if name != "memory_format"}
    tensor = old.detach().to(*arguments, **options) if arguments or options else old.detach()
    return nn.Parameter(tensor, old.requires_grad) if isinstance(old, nn.Parameter) else tensor


def tracked_peak(name, samples):
    """The peak of MemTracker in some steps of fake tensors."""
    from fit_parts.models import MODELS
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.utils import _pytree

    with FakeTensorMode(allow_non_fake_inputs=True):
        made = MODELS[name]("cuda")
        batch = made.batch(samples)
        tracker = MemTracker()
        tracker.track_external(made.model, made.optimizer, *_pytree.tree_leaves(batch))
        with tracker:
            for _ in range(STEPS):
                made.optimizer.zero_grad()
                made.loss(made.model, batch).backward()
                made.optimizer.step()
                tracker.reset_mod_stats()
    peaks = tracker.get_tracker_snapshot("peak")
    return next(sizes["Total"] for device, sizes in peaks.items() if device.type == "cuda")


def estimated_peak(name):
    """The peak of accelerate's formula: for parameters in float32 and Adam."""
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes
    from fit_parts.models import MODELS

    with torch.device("meta"):
        model = MODELS[name]("meta").model
    size, _ = calculate_maximum_sizes(model)
    return max(estimate_training_usage(size, "float32").values())


def one(peer, name, *sizes):
    """The child: the peaks of one peer, by size."""
    sizes = list(map(int, sizes))
    if peer == "mem-tracker":
        nn.Module.to = convert
        peaks = {size: tracked_peak(name, size) for size in sizes}
    else:
        peaks = dict.fromkeys(sizes, estimated_peak(name))
    print(json.dumps({"peaks": peaks}))


def answer_all(rows_of, prog, arguments):
    parser = argparse.ArgumentParser(prog=f"fit.py {prog}", description="Answers for a truth.")
    parser.add_argument("truth", type=pathlib.Path)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--models", type=lambda text: text.split(","), help="some of the truth's")
    parser.add_argument("--gpu", default="h100", help="the card, as rebatch fit names it")
    given = parser.parse_args(arguments)
    truth = json.loads(given.truth.read_text())
    kept = json.loads(given.output.read_text())["rows"] if given.output.exists() else []
    kept = [row for row in kept if "error" not in row]  # what failed is tried again
    done = {(row["model"], row["way"]) for row in kept}
    for (name, way), rows in cells(truth).items():
        if (name, way) in done or (given.models and name not in given.models):
            continue
        found = rows_of(name, way, rows, given.gpu)
        kept += found
        given.output.write_text(json.dumps({"rows": kept}, indent=1))
        for row in found:
            said = row.get("error") or f"{row['size']} samples"
            print(name, row.get("peer", way), said, file=sys.stderr, flush=True)


def answers(arguments):
    answer_all(fit_rows, "answers", arguments)


def peers(arguments):
    answer_all(peers_rows, "peers", arguments)

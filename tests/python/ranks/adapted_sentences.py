"""sentence-transformers' trainer on several ranks, of which one has little memory. Each function
returns plain values for the test."""

import contextlib
import tempfile

import torch.distributed as dist

import of_sentences
from adapted import as_launched
from rebatch.testing import fail_once
from rebatch.transformers import RebatchMixin
from trained import RANK_OF_FAILURES, error_of, everyones, is_same_everywhere


def _made(folder, loss, columns, is_wrapped, gathers=True, given=()):
    bases, options = (), {}
    if is_wrapped:
        step = {"embed": True, "log_level": "quiet", "growth": False}
        bases, options = (RebatchMixin,), {"rebatch": step}

    def made(model):
        return getattr(of_sentences, loss)(model, gather_across_devices=gathers)

    data = of_sentences.texts(4 * of_sentences.SAMPLES, columns)
    given = {"ddp_backend": "gloo", **dict(given)}
    return of_sentences.trainer_of(folder, bases, made, data, given, **options)


@contextlib.contextmanager
def _saved():
    """A folder with the model, which rank 0 makes: models of transformers save themselves there."""
    with tempfile.TemporaryDirectory() as folder:
        if dist.get_rank() == 0:
            of_sentences.saved(folder)
        folders = everyones(folder)
        yield folders[0]
        dist.barrier()


def with_sentences(loss, columns):
    """How far parameters are from those of the trainer alone."""
    as_launched()
    with _saved() as folder:
        plain = _made(folder, loss, columns, False)
        plain.train()
        cut = _made(folder, loss, columns, True)
        is_short = dist.get_rank() == RANK_OF_FAILURES
        with fail_once(cut.model[1], call=3) if is_short else contextlib.nullcontext():
            cut.train()
    pairs = zip(plain.model.parameters(), cut.model.parameters())
    return {
        "gap": max(float((a - b).detach().abs().max()) for a, b in pairs),
        "same": is_same_everywhere(cut.model),
        "ranks": cut.report.ranks,
        "gathers": [m.gather_across_devices for m in cut.loss.modules() if hasattr(m, "scale")],
    }


def refused(gathers, accumulated):
    as_launched()
    with _saved() as folder:
        given = {"gradient_accumulation_steps": accumulated}
        return error_of(lambda: _made(folder, "ranking", 2, True, gathers, given))

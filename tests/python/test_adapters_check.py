"""A check of the first batch, and the comparison at the first cut, in Lightning, transformers."""

import logging
import os
import warnings

import pytest
import torch
import torch.nn.functional as F

import rebatch.torch as rebatch

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is fetched


def cut_warnings(run):
    """What it returns, and what is said, which is said of a line here."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run()
    said = [w for w in caught if issubclass(w.category, rebatch.CutWarning)]
    assert {w.filename for w in said} <= {__file__}
    return result, [str(w.message) for w in said]


def data_of(samples=64):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 8, generator=generator)
    return x, (x[:, 0] > 0.8).long()


# ---- Lightning ----

pl = pytest.importorskip("lightning.pytorch")
torchmetrics = pytest.importorskip("torchmetrics")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def weighted(net, x, y):
    return F.cross_entropy(net(x), y, weight=torch.tensor([1.0, 20.0]))


def mean(net, x, y):
    return F.cross_entropy(net(x), y)


class Net(pl.LightningModule):
    def __init__(self, loss):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 2)
        )
        self.loss, self.sizes = loss, []
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=2)

    def training_step(self, batch, batch_idx):
        x, y = batch
        if len(x) > 8 and self.trainer.callbacks[0].limited:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        self.accuracy.update(self.net(x), y)
        loss = self.loss(self.net, x, y)
        self.log("loss", loss, on_step=True)
        return {"loss": loss, "size": torch.ones(len(x))}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.sizes.append(len(outputs["size"]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def two_views(net, x, y):
    """Two views of each sample, half a batch apart: both should be near."""
    first, second = net(torch.cat([x[: len(x) // 2], x[len(x) // 2 :] + 1])).chunk(2)
    return (first - second).square().mean()


def fit(loss, limited=True, compares=True, **options):
    import rebatch.lightning

    torch.manual_seed(0)
    net, callback = Net(loss), rebatch.lightning.Rebatch(log_level="quiet", **options)
    callback.limited = limited
    trainer = pl.Trainer(
        max_epochs=1,
        callbacks=[callback],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if not compares:
        net.on_train_start = lambda: setattr(
            callback._step.backward._training.callbacks.cuts, "is_done", True
        )
    data = torch.utils.data.TensorDataset(*data_of())
    trainer.fit(net, torch.utils.data.DataLoader(data, batch_size=16))
    return net, trainer


def test_lightning_warns_of_class_weights_and_not_of_a_mean():
    (_, texts) = cut_warnings(lambda: fit(weighted))
    assert len(texts) == 1 and "training_step depends on the cut" in texts[0]
    assert cut_warnings(lambda: fit(mean))[1] == []


def test_lightning_compares_views_that_lie_half_a_batch_apart():
    (_, (text,)) = cut_warnings(lambda: fit(two_views))
    assert "training_step depends on the cut" in text


def test_lightnings_batch_ends_as_if_nothing_had_been_compared():
    (net, trainer), texts = cut_warnings(lambda: fit(weighted))
    (plain, plain_trainer), none = cut_warnings(lambda: fit(weighted, compares=False))
    assert texts and not none
    assert net.sizes == plain.sizes == [16] * 4
    assert torch.equal(net.accuracy.compute(), plain.accuracy.compute())
    assert trainer.logged_metrics == plain_trainer.logged_metrics
    assert all(map(torch.equal, net.parameters(), plain.parameters()))


def test_lightning_checks_the_first_batch(capsys):
    (net, _), _ = cut_warnings(lambda: fit(mean, limited=False, check=True))
    assert "no mistakes: " in capsys.readouterr().out
    (plain, _), _ = cut_warnings(lambda: fit(mean, limited=False))
    assert all(map(torch.equal, net.parameters(), plain.parameters()))
    with pytest.raises(ValueError, match="the check of the first batch found 1 mistakes"):
        fit(weighted, limited=False, check=True)
    fit(weighted, limited=False, check=["cut"])
    with pytest.raises(ValueError, match="accept has 'cuts': did you mean 'cut'"):
        fit(weighted, limited=False, check=["cuts"])


# ---- transformers ----

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()


def bert(dropout=0.1):
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=2,
        hidden_dropout_prob=dropout,
    )
    return transformers.BertForSequenceClassification(config)


def sentences():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 50, (64, 12), generator=generator)
    masks = torch.arange(12) < torch.randint(2, 13, (64, 1), generator=generator)
    return [
        {"input_ids": t, "attention_mask": m.long(), "labels": int(t[0] < 8)}
        for t, m in zip(tokens, masks)
    ]


def train(folder, kind, **options):
    transformers.set_seed(0)
    args = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=16,
        max_steps=6,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
    )
    trainer = kind(bert(), args, train_dataset=sentences(), rebatch=options)
    return cut_warnings(trainer.train)[1]


def make_kinds():
    from rebatch.transformers import RebatchTrainer

    class Weighted(RebatchTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = F.cross_entropy(outputs.logits, labels, weight=torch.tensor([1.0, 20.0]))
            return (loss, outputs) if return_outputs else loss

    class OverTheMask(RebatchTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            mask = inputs["attention_mask"][..., None].float()
            hidden = model.bert(inputs["input_ids"]).last_hidden_state
            loss = (hidden[..., :1] ** 2 * mask).sum() / mask.sum()
            return (loss, None) if return_outputs else loss

    return RebatchTrainer, Weighted, OverTheMask


OPTIONS = {"micro_start": 4, "growth": False, "log_level": "quiet"}


@pytest.mark.parametrize("which", (1, 2), ids=("class weights", "mean over attention_mask"))
def test_transformers_warns_of_a_loss_that_depends_on_the_cut(tmp_path, which):
    (text,) = train(tmp_path, make_kinds()[which], **OPTIONS)
    assert "compute_loss depends on the cut" in text and "num_items_in_batch" in text


def test_transformers_is_silent_for_its_own_loss(tmp_path):
    assert train(tmp_path, make_kinds()[0], **OPTIONS) == []


def test_transformers_checks_the_first_batch(tmp_path, capsys):
    plain, weighted_trainer, _ = make_kinds()
    train(tmp_path, plain, check=True)
    assert "no mistakes: " in capsys.readouterr().out
    with pytest.raises(ValueError, match="found 1 mistakes") as raised:
        train(tmp_path, weighted_trainer, check=True)
    assert "cut             gradients in micro-batches of 8 differ" in str(raised.value)
    train(tmp_path, weighted_trainer, check="cut")

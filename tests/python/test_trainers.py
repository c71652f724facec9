"""Trainers of other packages with a Backward, as docs/trainers.md has them: the bits of the plain
trainer without an OOM, and after OOMs the same update within rounding. What is not installed is
skipped."""

import contextlib
import os
import types

import pytest
import torch

import rebatch.torch as rebatch
from models import same_bits
from rebatch.testing import fail_once

pytestmark = pytest.mark.filterwarnings("ignore")
SAMPLES = 8


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def batches():
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(SAMPLES, 8, generator=generator), torch.randn(SAMPLES, 1, generator=generator))
        for _ in range(3)
    ]


def loss_fn(model, samples):
    x, y = samples
    return torch.nn.functional.mse_loss(model(x), y)


def look_alike(train):
    """train(wrapped, fails) -> the tensors that a training ends with."""

    def failing(module):
        return fail_once(module, call=2)

    plain = train(False, contextlib.nullcontext)
    assert same_bits(train(True, contextlib.nullcontext), plain)
    cut = train(True, failing)
    assert not same_bits(cut, plain), "the OOMs cut nothing"
    torch.testing.assert_close(cut, plain, rtol=1e-3, atol=1e-5)


def state(model):
    return [t.detach().clone() for t in model.state_dict().values()]


def quiet(model, function, **options):
    return rebatch.Backward(model, function, log_level="quiet", **options)


def test_ignite():
    engines = pytest.importorskip("ignite.engine")

    def train(wrapped, fails):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        engine = engines.create_supervised_trainer(model, optimizer, torch.nn.functional.mse_loss)
        if wrapped:
            backward = quiet(model, loss_fn)

            def update(engine, batch):
                optimizer.zero_grad()
                model.train()
                loss = backward(batch)
                optimizer.step()
                return loss.item()

            engine = engines.Engine(update)
        with fails(model):
            engine.run(batches(), max_epochs=2)
        return [*state(model), torch.tensor(engine.state.output)]

    look_alike(train)


def test_monai():
    engines = pytest.importorskip("monai.engines")
    from monai.losses import DiceLoss
    from monai.networks.nets import UNet

    torch.manual_seed(1)
    images = [
        {"image": torch.randn(SAMPLES, 1, 16, 16), "label": torch.rand(SAMPLES, 1, 16, 16).round()}
        for _ in range(2)
    ]

    def train(wrapped, fails):
        torch.manual_seed(0)
        model = UNet(2, 1, 1, channels=(4, 8), strides=(2,))
        dice = DiceLoss(sigmoid=True)

        def with_prediction(model, samples):
            predicted = model(samples[0])
            return dice(predicted, samples[1]), predicted

        backward = quiet(model, with_prediction)

        def iteration(engine, batchdata):
            image, label = engine.prepare_batch(batchdata, engine.state.device)
            engine.network.train()
            engine.optimizer.zero_grad()
            loss = backward((image, label))
            engine.fire_event(engines.utils.IterationEvents.BACKWARD_COMPLETED)
            engine.optimizer.step()
            engine.fire_event(engines.utils.IterationEvents.MODEL_COMPLETED)
            output = {"image": image, "label": label, "pred": backward.outputs, "loss": loss}
            engine.state.output = output
            return output

        trainer = engines.SupervisedTrainer(
            device=torch.device("cpu"),
            max_epochs=2,
            train_data_loader=images,
            epoch_length=2,
            network=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            loss_function=dice,
            iteration_update=iteration if wrapped else None,
            decollate=False,
        )
        with fails(model):
            trainer.run()
        output = trainer.state.output
        return [*state(model), output["loss"].detach(), output["pred"].detach()]

    look_alike(train)


def test_nnunet():
    trainers = pytest.importorskip("nnunetv2.training.nnUNetTrainer.nnUNetTrainer")
    from nnunetv2.training.loss.compound_losses import DC_and_CE_loss
    from nnunetv2.training.loss.deep_supervision import DeepSupervisionWrapper
    from nnunetv2.training.loss.dice import MemoryEfficientSoftDiceLoss

    class nnUNetTrainerRebatch(trainers.nnUNetTrainer):
        backward = None

        def train_step(self, batch):
            if self.backward is None:
                self.backward = quiet(
                    self.network,
                    lambda network, samples: self.loss(network(samples[0]), list(samples[1:])),
                    backward=self.grad_scaler,
                    autocast=torch.float16 if self.device.type == "cuda" else None,
                )
            target = [t.to(self.device, non_blocking=True) for t in batch["target"]]
            self.optimizer.zero_grad(set_to_none=True)
            loss = self.backward((batch["data"].to(self.device, non_blocking=True), *target))
            if self.grad_scaler is not None:
                self.grad_scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.network.parameters(), 12)
            if self.grad_scaler is not None:
                self.grad_scaler.step(self.optimizer)
                self.grad_scaler.update()
            else:
                self.optimizer.step()
            return {"loss": loss.cpu().numpy()}

    class TwoScales(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Conv2d(1, 4, 3, padding=1)
            self.heads = torch.nn.ModuleList(torch.nn.Conv2d(4, 2, 1) for _ in range(2))

        def forward(self, x):
            deep = self.first(x).tanh()
            return [self.heads[0](deep), self.heads[1](torch.nn.functional.avg_pool2d(deep, 2))]

    torch.manual_seed(1)
    target = torch.rand(SAMPLES, 1, 16, 16).round()
    batch = {"data": torch.randn(SAMPLES, 1, 16, 16), "target": [target, target[..., ::2, ::2]]}

    def train(wrapped, fails):
        torch.manual_seed(0)
        kind = nnUNetTrainerRebatch if wrapped else trainers.nnUNetTrainer
        trainer = kind.__new__(kind)  # __init__ wants a preprocessed data set
        trainer.device, trainer.grad_scaler = torch.device("cpu"), None
        trainer.network = TwoScales()
        trainer.optimizer = torch.optim.SGD(trainer.network.parameters(), 0.01, 0.99, nesterov=True)
        dice = {"batch_dice": False, "do_bg": False, "smooth": 1e-5, "ddp": False}
        trainer.loss = DeepSupervisionWrapper(
            DC_and_CE_loss(dice, {}, dice_class=MemoryEfficientSoftDiceLoss), [0.7, 0.3]
        )
        with fails(trainer.network):
            losses = [torch.tensor(trainer.train_step(batch)["loss"]) for _ in range(3)]
        return [*state(trainer.network), *losses]

    look_alike(train)


@pytest.mark.parametrize("package", ("monai", "nnunetv2"))
def test_dice_over_the_batch_is_found_to_depend_on_the_cut(package):
    pytest.importorskip(package)
    if package == "monai":
        from monai.losses import DiceLoss

        dices = [DiceLoss(sigmoid=True, batch=whole) for whole in (False, True)]
    else:
        from nnunetv2.training.loss.dice import MemoryEfficientSoftDiceLoss

        dices = [
            MemoryEfficientSoftDiceLoss(torch.sigmoid, whole, ddp=False) for whole in (False, True)
        ]
    torch.manual_seed(0)
    target = torch.rand(SAMPLES, 2, 8, 8).pow(torch.arange(1, SAMPLES + 1).view(-1, 1, 1, 1))
    batch = torch.randn(SAMPLES, 1, 8, 8), target.round()
    model = torch.nn.Conv2d(1, 2, 3, padding=1)
    found = [
        bool(quiet(model, lambda model, s, dice=dice: dice(model(s[0]), s[1])).check(batch))
        for dice in dices
    ]
    assert found == [True, False]


def test_fabric():
    fabrics = pytest.importorskip("lightning.fabric")

    def train(wrapped, fails):
        model = network()
        fabric = fabrics.Fabric(accelerator="cpu", devices=1)
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        backward = quiet(model, loss_fn, backward=fabric.backward)
        with fails(model):
            for batch in batches():
                if wrapped:
                    loss = backward(batch)
                else:
                    loss = loss_fn(model, batch)
                    fabric.backward(loss)
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
        return [*state(model), loss.detach()]

    look_alike(train)


def test_keras():
    os.environ.setdefault("KERAS_BACKEND", "torch")
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "torch":
        pytest.skip("keras has another backend")

    def with_prediction(model, samples):
        x, y = samples
        predicted = model(gate(x), training=True)
        return model.compute_loss(x, y, predicted, training=True), predicted

    class Model(keras.Model):
        def train_step(self, data):
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            self.zero_grad()
            loss = backwards[self]((x, y))
            weights = self.trainable_weights
            with torch.no_grad():
                self.optimizer.apply([w.value.grad for w in weights], weights)
            for metric in self.metrics:
                values = (loss,) if metric.name == "loss" else (y, backwards[self].outputs)
                metric.update_state(*values)
            return {metric.name: metric.result() for metric in self.metrics}

    backwards, gate = {}, torch.nn.Identity()  # a layer of keras calls no hooks of PyTorch

    def train(wrapped, fails):
        keras.utils.set_random_seed(0)
        x = keras.Input((8,))
        y = keras.layers.Dense(1)(keras.layers.Dense(16, activation="tanh")(x))
        model = (Model if wrapped else keras.Model)(x, y)
        backwards[model] = quiet(model, with_prediction)
        model.compile("adam", "mse", metrics=["mae"], jit_compile=False)
        data = [torch.cat(each) for each in zip(*batches())]
        with fails(gate):
            seen = model.fit(*data, batch_size=SAMPLES, epochs=2, shuffle=False, verbose=0)
        values = [torch.tensor(each) for _, each in sorted(seen.history.items())]
        return [*(w.value.detach().clone() for w in model.trainable_weights), *values]

    look_alike(train)


def test_ultralytics_is_found_to_depend_on_the_cut():
    tasks = pytest.importorskip("ultralytics.nn.tasks")
    from ultralytics.cfg import get_cfg

    torch.manual_seed(0)
    model = tasks.DetectionModel("yolov8n.yaml", nc=2, verbose=False).eval()
    model.args = types.SimpleNamespace(**vars(get_cfg()))
    model.model[-1].training = True  # the form of its outputs; BatchNorm stays in evaluation mode
    boxes = torch.rand(12, 4) * 0.3 + 0.3
    images = torch.tensor([0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 3])

    def slice_images(batch, first, count):
        mine = (batch["batch_idx"] >= first) & (batch["batch_idx"] < first + count)
        rows = {name: batch[name][mine] for name in ("cls", "bboxes")}
        index = batch["batch_idx"][mine] - first
        return {**rows, "img": batch["img"][first : first + count], "batch_idx": index}

    def detection_loss(model, samples):
        loss, _ = model.loss(samples)
        return loss.sum() / len(samples["img"])

    batch = {
        "img": torch.rand(4, 3, 64, 64),
        "batch_idx": images,
        "cls": torch.zeros(12, 1),
        "bboxes": boxes,
    }
    options = {"slice": slice_images, "length": lambda batch: len(batch["img"])}
    found = quiet(model, detection_loss, **options).check(batch)
    assert not found and "differ" in str(found)


@pytest.fixture(scope="module")
def sentences(tmp_path_factory):
    """A small BERT with the words of its sentences, and what trains it."""
    package = pytest.importorskip("sentence_transformers")
    datasets = pytest.importorskip("datasets")
    import transformers

    folder = tmp_path_factory.mktemp("sentences")
    words = "[PAD] [UNK] [CLS] [SEP] [MASK] red green blue cat dog bird runs flies".split()
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=len(words), intermediate_size=16, **sizes)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(folder)
    pairs = {
        "first": [f"{a} {b}" for a in words[5:8] for b in words[8:11]][:SAMPLES],
        "second": [f"{b} {a}" for a in words[11:] for b in words[5:9]][:SAMPLES],
    }
    scores = [i / SAMPLES for i in range(SAMPLES)]
    return package, folder, datasets.Dataset.from_dict({**pairs, "score": scores}), pairs


def sentence_trainer(sentences, bases, loss, data, folder, given=(), **keywords):
    package, model_at, _, _ = sentences
    from sentence_transformers import models

    body = models.Transformer(str(model_at))
    model = package.SentenceTransformer(
        modules=[body, models.Pooling(body.get_word_embedding_dimension())], device="cpu"
    )
    given = dict(given, max_steps=8, use_cpu=True, report_to=[])
    args = package.SentenceTransformerTrainingArguments(
        str(folder), per_device_train_batch_size=SAMPLES, **given
    )
    kind = type("Trainer", (*bases, package.SentenceTransformerTrainer), {})
    return kind(model=model, args=args, train_dataset=data, loss=loss(model), **keywords)


def test_sentence_transformers(sentences, tmp_path):
    from sentence_transformers.losses import CosineSimilarityLoss

    from rebatch.transformers import RebatchMixin

    def train(wrapped, fails):
        bases = (RebatchMixin,) if wrapped else ()
        trainer = sentence_trainer(sentences, bases, CosineSimilarityLoss, sentences[2], tmp_path)
        with fails(trainer.model[1]):
            trainer.train()
        return state(trainer.model)

    look_alike(train)


def test_losses_of_sentences_that_depend_on_the_batch_are_refused_by_name(sentences, tmp_path):
    from sentence_transformers.losses import MatryoshkaLoss, MultipleNegativesRankingLoss

    from rebatch.transformers import RebatchMixin

    pairs = sentences[2].remove_columns("score")
    arguments = sentences, (RebatchMixin,), MultipleNegativesRankingLoss, pairs, tmp_path
    said = "MultipleNegativesRankingLoss, which depends on all rows.*expected .*micro_smallest"
    with pytest.raises(ValueError, match=said):
        sentence_trainer(*arguments)

    def within_another(model):
        return MatryoshkaLoss(model, MultipleNegativesRankingLoss(model), [8, 16])

    with pytest.raises(ValueError, match=said):
        sentence_trainer(sentences, (RebatchMixin,), within_another, pairs, tmp_path)
    whole = sentence_trainer(*arguments, rebatch={"micro_smallest": SAMPLES})
    with fail_once(whole.model[1], call=3, every=1), pytest.raises(rebatch.Exhausted):
        whole.train()


@pytest.mark.parametrize("kind", ("ranking", "negatives", "matryoshka", "triplet"))
def test_losses_of_sentences_over_the_batch_with_embed(sentences, tmp_path, kind):
    """The model runs in parts, and the loss on all rows."""
    from sentence_transformers import losses

    from rebatch.transformers import RebatchMixin

    data = sentences[2].remove_columns("score")
    if kind == "triplet":
        data = data.remove_columns("second").add_column("label", [0, 1] * (SAMPLES // 2))
    if kind == "negatives":  # which it runs through the model together
        words = sentences[3]["second"]
        data = data.add_column("third", words[::-1]).add_column("fourth", [w[:5] for w in words])

    def loss(model):
        if kind == "triplet":
            return losses.BatchHardTripletLoss(model)
        ranking = losses.MultipleNegativesRankingLoss(model)
        return losses.MatryoshkaLoss(model, ranking, [16, 8]) if kind == "matryoshka" else ranking

    def train(wrapped, fails):
        bases, options = ((RebatchMixin,), {"rebatch": {"embed": True}}) if wrapped else ((), {})
        # AdamW makes steps of rounding, where gradients are 0.
        sgd = {"optim": "sgd", "learning_rate": 0.1}
        trainer = sentence_trainer(sentences, bases, loss, data, tmp_path, sgd, **options)
        with fails(trainer.model[1]):
            trainer.train()
        assert not wrapped or fails is contextlib.nullcontext or trainer.report.microbatches > 1
        return state(trainer.model)

    look_alike(train)


def test_a_loss_of_sentences_that_takes_more_of_the_model_says_what_works(sentences, tmp_path):
    from sentence_transformers import losses

    from rebatch.transformers import RebatchMixin

    def by_layers(model):
        return losses.AdaptiveLayerLoss(model, losses.MultipleNegativesRankingLoss(model))

    data = sentences[2].remove_columns("score")
    options = {"rebatch": {"embed": True}}
    trainer = sentence_trainer(sentences, (RebatchMixin,), by_layers, data, tmp_path, **options)
    with pytest.raises(AttributeError) as raised:
        trainer.train()
    (note,) = raised.value.__notes__
    assert "expected one that takes nothing else of the model, or a batch that runs whole" in note


def test_embed_of_a_trainer_without_columns_of_texts_is_refused(tmp_path):
    transformers = pytest.importorskip("transformers")
    from rebatch.transformers import RebatchTrainer

    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(ValueError, match="expected a SentenceTransformerTrainer, or a loop with"):
        RebatchTrainer(network(), args, rebatch={"embed": True})

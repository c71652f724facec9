"""A small BERT that makes embeddings of sentences, and trainings of it by sentence-transformers,
with and without rebatch, for tests."""

import os
import pathlib

os.environ.update(HF_HUB_OFFLINE="1")  # nothing is fetched

import datasets
import sentence_transformers
import torch
import transformers
from sentence_transformers import losses, models

SAMPLES = 8
WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] red green blue cat dog bird runs flies".split()


def saved(folder):
    """A model in that folder."""
    pathlib.Path(folder, "vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizer(f"{folder}/vocab.txt").save_pretrained(folder)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=len(WORDS), intermediate_size=16, **sizes)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(folder)
    return folder


def texts(samples=SAMPLES, columns=2):
    """Of other lengths in each column: (anchor, positive, negative, ...)."""
    random = torch.Generator().manual_seed(0)

    def text(most):
        numbers = torch.randint(5, len(WORDS), (most,), generator=random).tolist()
        return " ".join(WORDS[n] for n in numbers[: 2 + numbers[0] % (most - 1)])

    names = ["anchor", "positive", *(f"negative_{i}" for i in range(columns - 2))]
    return datasets.Dataset.from_dict(
        {name: [text(3 + 2 * i) for _ in range(samples)] for i, name in enumerate(names)}
    )


def trainer_of(folder, bases, loss, data, given=(), **keywords):
    body = models.Transformer(str(folder))
    pooling = models.Pooling(body.get_word_embedding_dimension())
    model = sentence_transformers.SentenceTransformer(modules=[body, pooling], device="cpu")
    # AdamW makes steps of rounding, where gradients are 0.
    given = {"max_steps": 4, "optim": "sgd", "learning_rate": 0.1, **dict(given)}
    args = sentence_transformers.SentenceTransformerTrainingArguments(
        f"{folder}/out", per_device_train_batch_size=SAMPLES, use_cpu=True, report_to=[],
        save_strategy="no", disable_tqdm=True, **given,
    )  # fmt: skip
    kind = type("Trainer", (*bases, sentence_transformers.SentenceTransformerTrainer), {})
    return kind(model=model, args=args, train_dataset=data, loss=loss(model), **keywords)


def ranking(model, **options):
    return losses.MultipleNegativesRankingLoss(model, **options)


def matryoshka(model, **options):
    return losses.MatryoshkaLoss(model, ranking(model, **options), [16, 8])

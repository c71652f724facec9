"""The trainings by which `rebatch fit` is judged. The held-out ones are for the end: no rule of fit
is chosen by looking at them. Models are made from configurations, with random weights and random
data, so no network is needed. Sizes are such that 4 to 16 GiB hold between 8 and 2,000 samples.
Needs transformers."""

import argparse
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from torch.nn import functional as F

transformers.logging.set_verbosity_error()  # of token ids that a small vocabulary lacks


class Training(NamedTuple):
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Callable[[int], Any]  # a batch of n samples, on the model's device
    loss: Callable[[nn.Module, Any], torch.Tensor]  # mean over the samples


MODELS: dict[str, Callable[[str], Training]] = {}  # name: what builds it on a device
HELD_OUT: list[str] = []


def tried(build):
    MODELS[build.__name__.replace("_", "-")] = build
    return build


def held_out(build):
    HELD_OUT.append(build.__name__.replace("_", "-"))
    return tried(build)


def in_bfloat16(loss):
    """The loss under autocast, which a CPU does not need."""

    @functools.wraps(loss)
    def cast(model, samples):
        is_on_gpu = next(model.parameters()).is_cuda
        with torch.autocast("cuda", torch.bfloat16, enabled=is_on_gpu):
            return loss(model, samples)

    return cast


def adamw(model, device, **options):
    return torch.optim.AdamW(model.parameters(), 1e-4, **options)


def fused(model, device):
    return adamw(model, device, fused=device == "cuda")


def checkpointed(model):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def random_tokens(words, length, device):
    return lambda n: torch.randint(0, words, (n, length), device=device)


def random_images(size, classes, device):
    return lambda n: (
        torch.randn(n, 3, size, size, device=device),
        torch.randint(0, classes, (n,), device=device),
    )


def next_token(model, tokens):
    return model(input_ids=tokens, labels=tokens).loss


def language_model(model, optimizer, words, length, device, loss=next_token):
    """A causal language model of transformers."""
    model = model.to(device)
    batch = random_tokens(words, length, device)
    return Training(model, optimizer(model, device), batch, loss)


def classify_images(model, samples):
    images, classes = samples
    out = model(images)
    return F.cross_entropy(getattr(out, "logits", out).float(), classes)


def classifier(model, optimizer, size, device, loss=classify_images, classes=100):
    """A classifier of images, of transformers or not."""
    model = model.to(device)
    batch = random_images(size, classes, device)
    return Training(model, optimizer(model, device), batch, loss)


def labelled_tokens(words, length, device):
    tokens = random_tokens(words, length, device)
    return lambda n: (tokens(n), torch.randint(0, 2, (n,), device=device))


def classify_tokens(model, samples):
    tokens, classes = samples
    return model(input_ids=tokens, labels=classes).loss


def gpt2_model(words=8192, length=512, **options):
    config = transformers.GPT2Config(
        vocab_size=words, n_positions=length, n_embd=512, n_layer=8, n_head=8, **options
    )
    return transformers.GPT2LMHeadModel(config)


def llama_config(words=16384, layers=8, **options):
    return transformers.LlamaConfig(
        vocab_size=words,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        use_cache=False,
        **options,
    )


@tried
def gpt2(device):
    return language_model(gpt2_model(), fused, 8192, 512, device, in_bfloat16(next_token))


@tried
def gpt2_checkpoint(device):
    model = checkpointed(gpt2_model(length=1024, use_cache=False))
    return language_model(model, fused, 8192, 1024, device, in_bfloat16(next_token))


@tried
def gpt2_sgd(device):
    """In float32, with momentum."""

    def sgd(model, device):
        return torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)

    return language_model(gpt2_model(4096, 256), sgd, 4096, 256, device)


@tried
def llama(device):
    """Weights, gradients and the optimizer's state in bfloat16."""
    model = transformers.LlamaForCausalLM(llama_config()).to(torch.bfloat16)
    return language_model(model, adamw, 16384, 512, device)


class LoraLinear(nn.Module):
    """A frozen linear layer, and a trained product of two thin matrices beside it."""

    def __init__(self, frozen, rank=16):
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)
        self.dropout = nn.Dropout(0.05)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.frozen(x) + 2.0 * self.up(self.down(self.dropout(x)))


@tried
def llama_lora(device):
    model = transformers.LlamaForCausalLM(llama_config(layers=12)).requires_grad_(False)
    for layer in model.model.layers:
        attention = layer.self_attn
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(attention, name, LoraLinear(getattr(attention, name)))

    def trained(model, device):
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-4)

    return language_model(model, trained, 16384, 512, device, in_bfloat16(next_token))


@tried
def llama_checkpoint(device):
    model = checkpointed(transformers.LlamaForCausalLM(llama_config(layers=16)))
    return language_model(model, fused, 16384, 512, device, in_bfloat16(next_token))


@tried
def bert(device):
    """In float32, with dropout; a classifier of sequences."""
    config = transformers.BertConfig(
        vocab_size=30522,
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        intermediate_size=2048,
    )
    model = transformers.BertForSequenceClassification(config).to(device)
    batch = labelled_tokens(30522, 128, device)
    return Training(model, adamw(model, device), batch, classify_tokens)


@tried
def vit(device):
    config = transformers.ViTConfig(
        hidden_size=384,
        num_hidden_layers=12,
        num_attention_heads=6,
        intermediate_size=1536,
        num_labels=100,
    )
    model = transformers.ViTForImageClassification(config)
    return classifier(model, adamw, 224, device, in_bfloat16(classify_images))


def resnet50_model():
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=100))


@tried
def resnet50(device):
    """In float32, with Nesterov's momentum."""

    def nesterov(model, device):
        return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)

    return classifier(resnet50_model(), nesterov, 160, device)


@tried
def resnet50_bf16(device):
    """Channels last, with RMSprop."""

    def rmsprop(model, device):
        return torch.optim.RMSprop(model.parameters(), 1e-4, momentum=0.9)

    model = resnet50_model().to(memory_format=torch.channels_last)
    made = classifier(model, rmsprop, 224, device, in_bfloat16(classify_images))

    def batch(n):
        images, classes = made.batch(n)
        return images.contiguous(memory_format=torch.channels_last), classes

    return made._replace(batch=batch)


def double_conv(inner, outer):
    parts = []
    for channels in (inner, outer):
        parts += [nn.Conv2d(channels, outer, 3, padding=1, bias=False), nn.BatchNorm2d(outer)]
        parts.append(nn.ReLU(inplace=True))
    return nn.Sequential(*parts)


class UNet(nn.Module):
    def __init__(self, width=32, depth=4, classes=4):
        super().__init__()
        widths = [width << i for i in range(depth + 1)]
        self.down = nn.ModuleList(map(double_conv, [3, *widths[:-1]], widths))
        pairs = [(b, a) for a, b in zip(widths, widths[1:])][::-1]
        self.grow = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in pairs)
        self.up = nn.ModuleList(double_conv(a, b) for a, b in pairs)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x):
        kept = []
        for i, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if i else x)
            kept.append(x)
        for grow, block, beside in zip(self.grow, self.up, kept[-2::-1]):
            x = block(torch.cat((beside, grow(x)), 1))
        return self.head(x)


@tried
def unet(device):
    """Convolutions with BatchNorm, in float32; a class for each pixel."""

    def adam(model, device):
        return torch.optim.Adam(model.parameters(), 1e-4)

    def batch(n):
        classes = torch.randint(0, 4, (n, 128, 128), device=device)
        return torch.randn(n, 3, 128, 128, device=device), classes

    return classifier(UNet(), adam, 128, device)._replace(batch=batch)


class Recurrent(nn.Module):
    """A language model of recurrent layers."""

    def __init__(self, cell, words, width, layers):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.cell = cell(width, width, layers, batch_first=True, dropout=0.1)
        self.head = nn.Linear(width, words)

    def forward(self, tokens):
        return self.head(self.cell(self.words(tokens))[0])


def next_word(model, tokens):
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@tried
def lstm(device):
    model = Recurrent(nn.LSTM, 8000, 512, 3)
    return language_model(model, adamw, 8000, 129, device, next_word)


@tried
def mixtral(device):
    """A mixture of eight experts, of which each token takes two."""
    config = transformers.MixtralConfig(
        vocab_size=16384,
        hidden_size=384,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=512,
        use_cache=False,
    )
    model = transformers.MixtralForCausalLM(config).to(torch.bfloat16)
    return language_model(model, fused, 16384, 256, device)


@tried
def t5(device):
    """Encoder and decoder, with Adafactor, whose state is small."""
    config = transformers.T5Config(
        vocab_size=16384, d_model=384, d_kv=64, d_ff=1536, num_layers=6, num_heads=6
    )
    config.decoder_start_token_id, config.use_cache = 0, False
    model = transformers.T5ForConditionalGeneration(config).to(device)
    optimizer = torch.optim.Adafactor(model.parameters(), 1e-3)
    source, target = random_tokens(16384, 256, device), random_tokens(16384, 128, device)

    def loss(model, samples):
        return model(input_ids=samples[0], labels=samples[1]).loss

    return Training(model, optimizer, lambda n: (source(n), target(n)), in_bfloat16(loss))


@tried
def whisper(device):
    config = transformers.WhisperConfig(
        vocab_size=8192,
        d_model=384,
        encoder_layers=4,
        decoder_layers=4,
        encoder_attention_heads=6,
        decoder_attention_heads=6,
        encoder_ffn_dim=1536,
        decoder_ffn_dim=1536,
        max_source_positions=500,
        max_target_positions=128,
        use_cache=False,
        **{f"{name}_token_id": 1 for name in ("pad", "bos", "eos", "decoder_start")},
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = transformers.WhisperForConditionalGeneration(config).to(device)
    words = random_tokens(8192, 128, device)

    def batch(n):
        return {"input_features": torch.randn(n, 80, 1000, device=device), "labels": words(n)}

    def loss(model, samples):
        return model(**samples).loss

    return Training(model, fused(model, device), batch, in_bfloat16(loss))


class Pair(nn.Module):
    """An encoder of images and one of text, into one space."""

    def __init__(self, width=256):
        super().__init__()
        images = transformers.ViTConfig(
            hidden_size=width, num_hidden_layers=8, num_attention_heads=4, intermediate_size=1024
        )
        text = transformers.BertConfig(
            hidden_size=width, num_hidden_layers=6, num_attention_heads=4, intermediate_size=1024
        )
        self.images = transformers.ViTModel(images, add_pooling_layer=False)
        self.text = transformers.BertModel(text, add_pooling_layer=False)

    def forward(self, images, tokens):
        first = self.images(pixel_values=images).last_hidden_state[:, 0]
        return first, self.text(input_ids=tokens).last_hidden_state[:, 0]


@tried
def contrastive(device):
    """Pairs of an image and a text that belong together or do not: a loss for each sample."""
    model = Pair().to(device)
    images, tokens = random_images(224, 2, device), random_tokens(30522, 64, device)

    def batch(n):
        seen, match = images(n)
        return seen, tokens(n), 2 * match - 1

    def loss(model, samples):
        seen, words, match = samples
        return F.cosine_embedding_loss(*model(seen, words), match)

    return Training(model, adamw(model, device), batch, in_bfloat16(loss))


@held_out
def gpt_neox(device):
    config = transformers.GPTNeoXConfig(
        vocab_size=12288,
        hidden_size=640,
        intermediate_size=2560,
        num_hidden_layers=6,
        num_attention_heads=10,
        max_position_embeddings=1024,
        use_cache=False,
    )
    model = transformers.GPTNeoXForCausalLM(config)
    return language_model(model, adamw, 12288, 640, device, in_bfloat16(next_token))


@held_out
def opt(device):
    config = transformers.OPTConfig(
        vocab_size=20000,
        hidden_size=512,
        word_embed_proj_dim=512,
        ffn_dim=2048,
        num_hidden_layers=10,
        num_attention_heads=8,
        max_position_embeddings=512,
        use_cache=False,
    )
    model = checkpointed(transformers.OPTForCausalLM(config)).to(torch.bfloat16)
    return language_model(model, fused, 20000, 384, device)


@held_out
def distilbert(device):
    """The words behind masked tokens."""
    config = transformers.DistilBertConfig(vocab_size=12000, dim=512, n_heads=8, hidden_dim=2048)
    model = transformers.DistilBertForMaskedLM(config)

    def adamax(model, device):
        return torch.optim.Adamax(model.parameters(), 1e-4)

    return language_model(model, adamax, 12000, 192, device, in_bfloat16(next_token))


@held_out
def electra(device):
    config = transformers.ElectraConfig(
        hidden_size=320, num_hidden_layers=10, num_attention_heads=5, intermediate_size=1280
    )
    model = transformers.ElectraForSequenceClassification(config).to(device)
    batch = labelled_tokens(30522, 256, device)

    def nadam(model, device):
        return torch.optim.NAdam(model.parameters(), 1e-4)

    return Training(model, nadam(model, device), batch, classify_tokens)


@held_out
def swin(device):
    config = transformers.SwinConfig(
        embed_dim=64, depths=[2, 2, 4, 2], num_heads=[2, 4, 8, 16], num_labels=100
    )
    model = transformers.SwinForImageClassification(config)
    return classifier(model, fused, 224, device, in_bfloat16(classify_images))


@held_out
def convnext(device):
    config = transformers.ConvNextConfig(
        hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 6, 2], num_labels=100
    )
    model = transformers.ConvNextForImageClassification(config)
    return classifier(model, adamw, 192, device)


@held_out
def regnet(device):
    config = transformers.RegNetConfig(num_labels=100)
    model = transformers.RegNetForImageClassification(config)

    def sgd(model, device):
        return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=False)

    return classifier(model, sgd, 192, device, in_bfloat16(classify_images))


@held_out
def gru(device):
    model = Recurrent(nn.GRU, 4000, 640, 2)
    return language_model(model, fused, 4000, 201, device, in_bfloat16(next_word))


def models(arguments):
    """Prints the names."""
    print("\n".join(f"{name}{' (held out)' * (name in HELD_OUT)}" for name in MODELS))


def train(arguments):
    """Trains one in a Step."""
    import rebatch.torch as rebatch

    parser = argparse.ArgumentParser(prog="fit.py train", description=train.__doc__)
    parser.add_argument("name", choices=MODELS)
    parser.add_argument("--samples", type=int, default=8, help="in a batch; default: 8")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--install", action="store_true", help="with rebatch's pool")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args(arguments)
    if given.install:
        rebatch.install()
    torch.manual_seed(0)
    made = MODELS[given.name](given.device)
    step = rebatch.Step(made.model, made.optimizer, made.loss)
    for _ in range(given.steps):
        loss = step(made.batch(given.samples))
        print(f"{step.report}: loss {loss:.4f}")

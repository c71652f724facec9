"""A batch that is cut through time is named, where the model shows that."""

import warnings

import pytest
import torch

import rebatch.torch as rebatch

TIME, SAMPLES, WIDTH = 12, 16, 8


class Attention(torch.nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(query=x, key=x, value=x, need_weights=False)


def layer():
    return torch.nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0)


MODULES = {
    "rnn": lambda: torch.nn.RNN(WIDTH, WIDTH),
    "lstm": lambda: torch.nn.LSTM(WIDTH, WIDTH),
    "gru": lambda: torch.nn.GRU(WIDTH, WIDTH),
    "attention": lambda: Attention(WIDTH, 2),
    "layer": layer,
    "encoder": lambda: torch.nn.TransformerEncoder(layer(), 1, enable_nested_tensor=False),
}


class Model(torch.nn.Module):
    """samples_first: the batch is (samples, time, features), and it transposes."""

    def __init__(self, module, samples_first=False):
        super().__init__()
        self.inner, self.samples_first = module, samples_first

    def forward(self, x):
        y = self.inner(x.transpose(0, 1) if self.samples_first else x)
        y = y[0] if isinstance(y, tuple) else y
        return y.transpose(0, 1) if self.samples_first else y


def texts_of(model, batch, largest=4, steps=3, **options):
    def loss_fn(model, samples):
        return (model(samples[0]) - samples[0]).square().mean()

    def limited(model, samples):
        count = samples[0].shape[options.get("batch_dim", 0)]
        if count > largest:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return loss_fn(model, samples)

    step = rebatch.Step(
        model,
        torch.optim.SGD(model.parameters(), 0.01),
        limited,
        log_level="quiet",
        growth=False,
        **options,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            step((batch,))
    return [str(w.message) for w in caught if issubclass(w.category, rebatch.CutWarning)]


@pytest.mark.parametrize("name", MODULES)
def test_a_cut_through_time_is_named_with_what_to_do(name):
    torch.manual_seed(0)
    (text,) = texts_of(Model(MODULES[name]()), torch.randn(TIME, SAMPLES, WIDTH))
    assert "with batch_first=False, takes the first dimension of its input for time" in text
    assert "'inner" in text and f"the shape (2, {SAMPLES}, {WIDTH})" in text
    assert "give batch_dim=1" in text


@pytest.mark.parametrize("name", MODULES)
def test_with_batch_dim_nothing_is_said(name):
    torch.manual_seed(0)
    batch = torch.randn(TIME, SAMPLES, WIDTH)
    assert texts_of(Model(MODULES[name]()), batch, batch_dim=1) == []


@pytest.mark.parametrize("time", (1, 2, 3, 4, 12))
@pytest.mark.parametrize("name", MODULES)
def test_a_model_that_transposes_is_right_whatever_the_number_of_time_steps(name, time):
    """As many as there are samples in a micro-batch, too."""
    torch.manual_seed(0)
    batch = torch.randn(SAMPLES, time, WIDTH)
    assert texts_of(Model(MODULES[name](), True), batch) == []


def test_samples_in_the_place_of_time_are_named():
    """The module was meant to have batch_first=True."""
    torch.manual_seed(0)
    (text,) = texts_of(Model(MODULES["attention"]()), torch.randn(SAMPLES, TIME, WIDTH))
    assert "where the samples come first, make the module with batch_first=True" in text


def test_no_hook_stays():
    model = Model(MODULES["gru"]())
    texts_of(model, torch.randn(TIME, SAMPLES, WIDTH))
    assert not model.inner._forward_pre_hooks

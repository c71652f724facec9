"""Levels that save memory: what they leave alone."""

import copy
import io
import types

import pytest
import torch

import rebatch.torch as rebatch
from models import make, same_bits, state_of


class Counting(torch.nn.Module):
    """Counts how often its forward runs."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = torch.nn.Linear(4, 4), 0

    def forward(self, x):
        self.calls += 1
        return torch.tanh(self.linear(x))


def lightened():
    """(model, its switch), switched on."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(Counting(), Counting())
    switch = rebatch.checkpointing(*model)
    switch(True)
    return model, switch


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def forwards(model, x=X):
    """How often each block's forward runs in a forward and a backward pass."""
    before = [block.calls for block in model]
    model(x).sum().backward()
    return [block.calls - n for block, n in zip(model, before)]


@pytest.mark.parametrize("make_copy", (copy.deepcopy, saved))
def test_a_copy_has_its_own_weights(make_copy):
    model, switch = lightened()
    expected = model(X)
    made = make_copy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert torch.equal(made(X), expected)
    assert forwards(made) == [1, 1] and forwards(model) == [2, 2]
    assert all(p.grad is not None for p in made.parameters())
    assert list(made.state_dict()) == list(model.state_dict())
    again = make_copy(made)
    with torch.no_grad():
        for p in made.parameters():
            p.zero_()
    assert torch.equal(again(X), expected)
    switch(False)
    assert forwards(model) == [1, 1] and "forward" not in vars(model[0])


@pytest.mark.parametrize("make_copy", (copy.deepcopy, saved))
def test_a_copy_of_a_copy_can_be_lightened(make_copy):
    model, _ = lightened()
    made = make_copy(model)
    switch = rebatch.checkpointing(*made)
    switch(True)
    again = make_copy(made)
    assert forwards(made) == [2, 2] and forwards(again) == [1, 1]
    switch(False)
    assert forwards(made) == [1, 1]


def test_a_forward_of_the_instance_stays():
    model = torch.nn.Sequential(Counting())
    own = types.MethodType(lambda self, x: 2 * x, model[0])
    model[0].forward = own
    switch = rebatch.checkpointing(model[0])
    switch(True)
    made = copy.deepcopy(model)
    assert torch.equal(made(X), 2 * X) and made[0].forward.__self__ is made[0]
    switch(False)
    assert model[0].forward is own


def test_a_compiled_model_is_lightened():
    torch.compiler.reset()
    model, switch = lightened()
    expected = torch.autograd.grad(model(X).sum(), model[0].linear.weight)[0]
    switch(False)
    compiled = torch.compile(model, backend="aot_eager")
    for on in (False, True, False):
        switch(on)
        got = torch.autograd.grad(compiled(X).sum(), model[0].linear.weight)[0]
        assert torch.equal(got, expected)


def test_a_step_trains_the_model_and_not_its_copy():
    model, batch, loss_fn = make("mlp")
    step = rebatch.Step(
        model,
        torch.optim.SGD(model.parameters(), 0.5),
        loss_fn,
        lighten=[rebatch.checkpointing(model.body)],
    )
    step._training.open()
    step._training.callbacks.set_level(1)
    best = copy.deepcopy(model)
    before, output = state_of(best), best.eval()(batch[0])
    step(batch)
    assert same_bits(state_of(best), before) and torch.equal(best(batch[0]), output)
    assert not same_bits(state_of(model), before)


def test_a_level_with_offload_lies_over_one_without():
    torch.manual_seed(0)
    model = torch.nn.Sequential(Counting(), Counting())
    plain = rebatch.checkpointing(*model)
    offloaded = rebatch.checkpointing(*model, offload=True)
    plain(True)
    offloaded(True)
    assert forwards(model) == [2, 2]
    offloaded(False)
    assert forwards(model) == [2, 2]
    plain(False)
    assert forwards(model) == [1, 1] and "forward" not in vars(model[0])
    offloaded(True)  # by itself
    assert forwards(model) == [2, 2]
    made = copy.deepcopy(model)
    offloaded(False)
    assert forwards(model) == [1, 1] == forwards(made) and "forward" not in vars(model[0])
    offloaded(False)
    assert "forward" not in vars(model[0])


def test_offload_in_a_compiled_model_recomputes():
    torch.compiler.reset()
    torch.manual_seed(0)
    model = torch.nn.Sequential(Counting(), Counting())
    expected = torch.autograd.grad(model(X).sum(), model[0].linear.weight)[0]
    compiled = torch.compile(model, backend="aot_eager")
    rebatch.checkpointing(*model, offload=True)(True)
    got = torch.autograd.grad(compiled(X).sum(), model[0].linear.weight)[0]
    assert torch.equal(got, expected)


def test_a_hugging_face_model_keeps_the_level_below():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=16, n_positions=8)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    block, calls = model.transformer.h[0], []
    block.ln_1.register_forward_hook(lambda *_: calls.append(1))
    tokens = torch.zeros(2, 8, dtype=torch.long)

    def runs():
        calls.clear()
        model(tokens, use_cache=False).logits.sum().backward()
        return len(calls)

    plain = rebatch.checkpointing(model)
    offloaded = rebatch.checkpointing(model, offload=True)
    plain(True)
    below = block._gradient_checkpointing_func
    offloaded(True)
    assert block._gradient_checkpointing_func is not below and runs() == 2
    assert copy.deepcopy(model) is not model
    offloaded(False)
    assert type(block._gradient_checkpointing_func) is type(below) and runs() == 2
    plain(False)
    assert runs() == 1
    offloaded(True)
    assert runs() == 2
    offloaded(False)
    assert runs() == 1

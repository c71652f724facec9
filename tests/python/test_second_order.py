"""Second order: gradients that have a graph, and losses that have gradients in them."""

import pytest
import torch

import rebatch.torch as rebatch
from models import fails_above, make


def second_order(net, limited=None, **options):
    """What an optimizer reads from the graphs of gradients, and the limit of a micro-batch."""
    x = torch.linspace(-1, 1, 96, dtype=torch.float64).view(12, 8)

    def loss_fn(model, samples):
        return model(samples[0]).square().mean()

    if limited is not None:
        loss_fn = fails_above(loss_fn, limited)
    options = {"micro_largest": 12, "log_level": "quiet", **options}
    rebatch.Backward(net, loss_fn, backward=with_graph, **options)((x,))
    parameters = list(net.parameters())
    gradients = [p.grad for p in parameters]
    second = torch.autograd.grad(gradients, parameters, list(map(torch.ones_like, gradients)))
    for p in parameters:
        p.grad = None
    return second


def with_graph(loss):
    loss.backward(create_graph=True)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_with_a_graph_are_whole_or_added_by_autograd_or_refused():
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    ).double()
    expected = second_order(net)
    torch.testing.assert_close(second_order(net, 6, gradients="inplace"), expected)
    with pytest.raises(ValueError, match='create_graph=True.*expected gradients="inplace"'):
        second_order(net, 6)
    net[0].weight.grad = torch.zeros_like(net[0].weight)  # to which a whole batch is added
    with pytest.raises(ValueError, match="no gradients before the batch"):
        second_order(net)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize(
    "gradients, limited, later",
    [
        ("inplace", 12, with_graph),
        ("inplace", 3, with_graph),
        ("inplace", 3, torch.Tensor.backward),
        ("fresh", 12, torch.Tensor.backward),
        ("fresh", 3, torch.Tensor.backward),
    ],
)
def test_gradients_of_an_earlier_batch_keep_their_graph(gradients, limited, later):
    net = torch.nn.Linear(3, 1).double()
    parts = list(torch.randn(2, 12, 3, dtype=torch.float64))

    def second(first, then):
        net.zero_grad()
        first(parts[0])
        then(parts[1])
        (found,) = torch.autograd.grad(net.weight.grad, net.weight, torch.ones(1, 3).double())
        return net.weight.grad.detach(), found

    def passes(backward, **options):
        options = {"backward": backward, "log_level": "quiet", **options}
        return rebatch.Backward(net, fails_above(mean_square, limited), **options)

    def mean_square(model, samples):
        return model(samples).square().mean()

    expected = second(*(lambda x, b=b: b(mean_square(net, x)) for b in (with_graph, later)))
    found = second(passes(with_graph, gradients="inplace"), passes(later, gradients=gradients))
    torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_graph_of_a_later_batch_is_refused_too():
    net, number = torch.nn.Linear(3, 1), 0

    def every_fifth(loss):
        loss.backward(create_graph=number == 5)

    backward = rebatch.Backward(
        net, lambda m, x: m(x).square().mean(), backward=every_fifth, micro_largest=2
    )
    with pytest.raises(ValueError, match='create_graph=True.*expected gradients="inplace"'):
        for number in range(6):
            backward(torch.ones(8, 3))
    assert number == 5


def test_a_penalty_on_the_gradient_of_each_sample_is_right_at_any_cut():
    model, batch, loss_fn = make("mlp")

    def penalized(model, samples):
        x = samples[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return loss_fn(model, samples) + (slope.flatten(1).norm(dim=1) - 1).square().mean()

    def gradients(limited):
        model.zero_grad()
        rebatch.Backward(model.eval(), fails_above(penalized, limited), log_level="quiet")(batch)
        return [p.grad for p in model.parameters()]

    torch.testing.assert_close(gradients(4), gradients(16))

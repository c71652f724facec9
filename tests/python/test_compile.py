"""Step and torch.compile: what fails within a compiled model, and while it is compiled."""

import copy
import shutil

import pytest
import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend

import rebatch.torch as rebatch
from models import make, regression_loss, same_bits, state_of


class Requests:
    """Requests for memory in compiled code, of which the n-th fails, counted from 1."""

    def __init__(self):
        self.begin(0)

    def begin(self, n):
        self.n, self.seen = n, 0

    def one_more(self):
        self.seen += 1
        if self.seen == self.n:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")


requests = Requests()


@torch.library.custom_op("rebatch_tests::request", mutates_args=())
def request(x: torch.Tensor) -> torch.Tensor:
    requests.one_more()
    return x.clone()


request.register_fake(torch.empty_like)
request.register_autograd(lambda context, gradient: request(gradient))


class Requesting(nn.Module):
    """A layer that asks for memory in its forward and in its backward pass."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return request(self.layer(x))


class Backend:
    """A compiler that runs out of memory as often as it is told to."""

    def __init__(self, name="aot_eager", failures=0):
        self.inner, self.failures, self.compiled = lookup_backend(name), failures, 0

    def __call__(self, graph, inputs):
        if self.failures:
            self.failures -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        self.compiled += 1
        return self.inner(graph, inputs)


@pytest.fixture(autouse=True)
def apart():
    requests.begin(0)
    torch.compiler.reset()


def model_and_batch(kind):
    model, batch, _ = make(kind)
    for i, layer in enumerate(model.body):
        model.body[i] = Requesting(layer)
    return model, batch


class Compiled:
    """A model that is compiled once, and trained from the same beginning as often as one likes."""

    def __init__(self, kind, backend):
        self.model, self.batch = model_and_batch(kind)
        self.begin = copy.deepcopy(self.model.state_dict())
        self.compiled = torch.compile(self.model, backend=backend)

    def train(self, steps=3, fail_at=0, limited=0, **options):
        """(state after some steps, Step). The second step has the failure."""
        self.model.load_state_dict(self.begin)
        self.model.zero_grad()
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

        def loss_fn(model, samples):
            if limited and len(samples[0]) > limited:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return regression_loss(model, samples)

        options = {"log_level": "quiet", "growth": False, **options}
        step = rebatch.Step(self.compiled, optimizer, loss_fn, **options)
        torch.manual_seed(1)
        for i in range(steps):
            requests.begin(fail_at if i == 1 else 0)
            step(self.batch)
        return state_of(self.model), step


def train(kind="mlp", backend=None, **options):
    return Compiled(kind, backend or Backend()).train(**options)


@pytest.mark.parametrize("kind", ("mlp", "conv"))
@pytest.mark.parametrize("gradients", ("fresh", "inplace"))
def test_an_oom_at_every_request_of_compiled_code_changes_no_bit(kind, gradients):
    options = dict(micro_start=4, micro_smallest=4, micro_largest=4, gradients=gradients)
    options["lighten"] = [lambda on: None]  # one more attempt at this size
    backend = Backend()
    model = Compiled(kind, backend)
    expected, _ = model.train(**options)
    count = requests.seen
    assert count > 20 and backend.compiled
    # 18 requests in each of four micro-batches of "conv": by fives most of them come.
    for n in range(1, count + 1, 1 if kind == "mlp" else 5):
        state, _ = model.train(fail_at=n, **options)
        assert same_bits(state, expected), f"an OOM in request {n} changed the result"


@pytest.mark.parametrize("kind", ("mlp", "conv"))
def test_an_oom_leads_to_the_bits_of_a_run_that_started_smaller(kind):
    expected, _ = train(kind, micro_start=4)
    state, step = train(kind, limited=4)
    assert step.micro == 4
    assert same_bits(state, expected)


def test_an_oom_while_a_model_is_compiled_is_one():
    expected, _ = train(micro_start=8)
    backend = Backend(failures=1)
    state, step = train(backend=backend)
    assert backend.failures == 0 and step.micro == 8
    assert same_bits(state, expected)


def test_sizes_after_the_second_need_no_compilation():
    backend = Backend()
    model, batch = model_and_batch("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    limit = [16]

    def loss_fn(model, samples):
        if len(samples[0]) > limit[0]:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return regression_loss(model, samples)

    step = rebatch.Step(
        torch.compile(model, backend=backend), optimizer, loss_fn, log_level="quiet", growth=False
    )
    step(batch)
    counts = []
    for limit[0] in 8, 4, 3, 2:
        step(batch)
        counts.append(backend.compiled)
    assert counts[0] == counts[-1] == 2, counts


@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler")
def test_with_inductor():
    model = Compiled("mlp", Backend("inductor"))
    expected, _ = model.train(micro_start=4)
    count = requests.seen
    for n in (1, count // 2, count - 1):
        state, _ = model.train(
            fail_at=n, micro_start=4, micro_smallest=4, lighten=[lambda on: None]
        )
        assert same_bits(state, expected), n
    state, _ = model.train(limited=4)
    assert same_bits(state, expected)


def test_a_compiled_optimizer_and_a_compiled_loss():
    def run(compiles, limited):
        model, batch = model_and_batch("mlp")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        loss_fn = regression_loss
        if compiles:
            optimizer.step = torch.compile(optimizer.step, backend="aot_eager")
            loss_fn = torch.compile(loss_fn, backend="aot_eager")

        def limiting(model, samples):
            if len(samples[0]) > limited:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return loss_fn(model, samples)

        step = rebatch.Step(model, optimizer, limiting, log_level="quiet", growth=False)
        torch.manual_seed(1)
        for _ in range(3):
            step(batch)
        return state_of(model)

    assert same_bits(run(True, 4), run(True, 4))
    for p, q in zip(run(True, 4), run(False, 4)):
        assert torch.allclose(p, q, rtol=1e-4, atol=1e-6)


def test_the_other_calls_take_a_compiled_model():
    model, batch = model_and_batch("mlp")
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = rebatch.Step(compiled, optimizer, regression_loss, log_level="quiet")
    before = state_of(model)
    assert not [f for f in step.check(batch).findings if f.is_mistake]
    step.evaluate(batch)
    outputs = rebatch.map(compiled, batch[0])
    assert same_bits(state_of(model), before)
    assert outputs.shape == (16,)

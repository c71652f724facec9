"""What hooks and forwards of the program change, and objects that modules hold, is put back after
an attempt that failed."""

import functools
import warnings

import pytest
import torch
import torch.nn.functional as F

import rebatch.torch as rebatch

counted = 0
rows = []


class Meter:
    def __init__(self):
        self.sum, self.rows, self.tensor = 0.0, [], torch.zeros(4)

    def note(self, module, inputs, out):
        self.sum += float(out.detach().mean())
        self.rows.append(out.detach())
        self.tensor += 1

    def noted(self):
        return self.sum, [row.tolist() for row in self.rows], self.tensor.tolist()


class Network(torch.nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))


# Each takes a model, and returns a model that notes something of each sample that runs through it,
# and a function that tells what was noted.


def in_a_forward_hook(model):
    last, kept = {}, []

    def hook(module, inputs, out):
        last["out"] = out.detach()
        kept.append(float(out.detach().mean()))

    model[0].register_forward_hook(hook)
    return model, lambda: (last["out"].tolist(), kept)


def in_a_pre_hook(model):
    kept = []
    model[2].register_forward_pre_hook(
        functools.partial(lambda kept, module, inputs: kept.append(len(inputs[0])), kept)
    )
    return model, lambda: kept


def in_a_hook_of_an_object(model):
    meter = Meter()
    model[1].register_forward_hook(meter.note)
    return model, meter.noted


def in_a_backward_hook(model):
    norms = []
    model[2].register_full_backward_hook(lambda m, i, out: norms.append(float(out[0].norm())))
    return model, lambda: norms


def in_a_hook_of_a_parameter(model):
    norms = []
    model[2].weight.register_hook(lambda gradient: norms.append(float(gradient.norm())))
    return model, lambda: norms


class InForward(Network):
    def forward(self, x):
        global counted
        counted += len(x)
        self.note_rows(x)
        return super().forward(x)

    def note_rows(self, x):
        rows.append(float(x.detach().mean()))


def in_forward(_model):
    global counted
    counted = 0
    rows.clear()
    return InForward(), lambda: (counted, rows.copy())


class HoldsAMeter(Network):
    def forward(self, x):
        out = super().forward(x)
        self.meter.note(self, x, out)
        return out


def in_an_object_of_a_module(_model):
    model = HoldsAMeter()
    model.meter = Meter()
    return model, lambda: model.meter.noted()


class HoldsMeters(Network):
    def forward(self, x):
        out = super().forward(x)
        self.meters[-1].note(self, x, out)
        self.by_name["all"].note(self, x, out)
        return out


def in_containers_of_objects(_model):
    model = HoldsMeters()
    model.meters, model.by_name = [Meter(), Meter()], {"all": Meter()}
    return model, lambda: (model.meters[-1].noted(), model.by_name["all"].noted())


class MakesMeters(Network):
    calls = 0

    def forward(self, x):
        before = getattr(self, "meter", None)
        self.meter = Meter()
        self.meter.sum = (before.sum if before else 0.0) + len(x)
        return super().forward(x)


def in_an_object_that_is_assigned(_model):
    model = MakesMeters()
    return model, lambda: model.meter.sum


class HidesATeacher(Network):
    def forward(self, x):
        with torch.no_grad():
            soft = self.teacher[0](x)
        return super().forward(x) + soft


def in_a_hook_of_a_hidden_module(_model):
    model, kept = HidesATeacher(), []
    model.teacher = [Network()]
    model.teacher[0][0].register_forward_hook(lambda m, i, out: kept.append(float(out.mean())))
    return model, lambda: kept


KEPT = (
    in_a_forward_hook,
    in_a_pre_hook,
    in_a_hook_of_an_object,
    in_a_backward_hook,
    in_a_hook_of_a_parameter,
    in_forward,
    in_an_object_of_a_module,
    in_containers_of_objects,
    in_an_object_that_is_assigned,
    in_a_hook_of_a_hidden_module,
)


def batch_of(i, samples=16):
    x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(i))
    return x, x[:, :4].argmax(1)


def strike(_gradient):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def loss_with_room(largest, where, inner=None):
    def loss_fn(model, samples):
        x = samples[0].clone().requires_grad_(True)
        loss = F.cross_entropy(model(x), samples[1])
        if inner:
            inner(samples)
        if len(x) > largest and where == "forward":
            strike(None)
        if len(x) > largest:
            x.register_hook(strike)  # at the end of the backward pass
        return loss

    return loss_fn


def train(model, loss_fn, noted, steps=3, **options):
    options = {"log_level": "quiet", "growth": False, **options}
    step = rebatch.Step(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(steps):
            step(batch_of(i))
    return noted()


@pytest.mark.parametrize("where", ("forward", "backward"))
@pytest.mark.parametrize("kept", KEPT)
def test_a_sample_counts_once(kept, where):
    def run(largest, **options):
        model, noted = kept(Network())
        return train(model, loss_with_room(largest, where), noted, **options)

    assert run(4) == run(99, micro_start=4)


@pytest.mark.parametrize("kept", KEPT)
def test_a_growth_that_fails_counts_nothing(kept):
    def run(largest, **options):
        model, noted = kept(Network())
        return train(model, loss_with_room(largest, "backward"), noted, 8, **options)

    assert run(4, micro_start=4, growth=True, grow_after=3) == run(99, micro_start=4)


def test_a_hook_of_a_module_that_loss_fn_reaches():
    def run(largest, **options):
        model, teacher, kept = Network(), Network(), []
        teacher[0].register_forward_hook(lambda m, i, out: kept.append(len(out)))
        loss_fn = loss_with_room(largest, "backward", lambda samples: teacher(samples[0]))
        return train(model, loss_fn, lambda: kept, **options)

    assert run(4) == run(99, micro_start=4)


def test_a_hook_that_is_made_anew_for_each_step_keeps_what_is_known():
    """The variables of loss_fn that change in place have their copies all the same."""

    model, seen, room, kept = Network(), torch.zeros(()), [8], []

    def limited(model, samples):
        seen.add_(len(samples[0]))
        if len(samples[0]) > room[0]:
            strike(None)
        return F.cross_entropy(model(samples[0]), samples[1])

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = rebatch.Step(model, optimizer, limited, log_level="quiet", growth=False, micro_start=8)
    for i in range(3):
        room[0] = 8 if i < 2 else 4
        hook = model[0].register_forward_hook(lambda m, x, out: kept.append(len(out)))
        step(batch_of(i))
        hook.remove()
    assert seen == 48 and sum(kept) == 48


def test_map_puts_back_what_its_function_counts():
    seen, kept = [], Meter()

    def predict(x):
        out = x * 2
        seen.append(len(x))
        kept.note(None, x, out)
        if len(x) > 4:
            strike(None)
        return out

    predict(torch.zeros(4, 3))
    rebatch.map(predict, torch.arange(48.0).view(16, 3))
    assert seen == [4] * 5 and len(kept.rows) == 5


def test_a_step_within_a_loss_fn_is_refused_before_it_updates():
    torch.manual_seed(0)
    inner, outer = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
    batch = (torch.randn(8, 4),)

    def mean(model, samples):
        return model(samples[0]).mean()

    def sgd(model):
        return torch.optim.SGD(model.parameters(), 0.1)

    first = rebatch.Step(inner, sgd(inner), mean, log_level="quiet")

    def nested(model, samples):
        first(samples)
        return mean(model, samples)

    before = inner.weight.clone()
    with pytest.raises(ValueError, match="called within a loss_fn.*expected a call before or"):
        rebatch.Step(outer, sgd(outer), nested, log_level="quiet")(batch)
    assert torch.equal(inner.weight, before)
    first(batch)  # outside of it, it runs
    assert not torch.equal(inner.weight, before)

"""The numbers of a Step, and the programs that watch a training by them."""

import pathlib
import re
import urllib.request

import pytest
import torch

import rebatch.torch as rebatch
from rebatch.torch.session.report import NUMBERS, OF_TRAINERS, Report, Totals, numbers_of_trainer

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "pytorch-reference.md"
UNKNOWN_ON_A_CPU = {"peak_bytes", "room_bytes", "reserved_bytes"}


def batch_of(samples=16):
    return torch.randn(samples, 4), torch.randn(samples)


def make_step(fits=16, **options):
    """A Step whose loss_fn runs out of memory above so many samples."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)

    def loss_fn(model, samples):
        x, y = samples
        if len(x) > fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return (model(x)[:, 0] - y).square().mean()

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    options = {"log_level": "quiet", "growth": False, **options}
    return rebatch.Step(model, optimizer, loss_fn, **options)


# ---- the numbers ----


def test_numbers_have_what_happened_since_the_step_was_made():
    step = make_step(fits=4)
    for _ in range(3):
        step(batch_of())
    numbers = step.numbers()
    assert (step.report.ooms, step.report.redone_samples) == (0, 0)
    assert (numbers["rebatch/ooms_total"], numbers["rebatch/redone_samples_total"]) == (2, 16 + 8)
    assert numbers["rebatch/samples_total"] == 3 * 16
    assert numbers["rebatch/lost_seconds_total"] > 0
    assert (numbers["rebatch/step"], numbers["rebatch/micro"]) == (2, 4)
    assert numbers["rebatch/microbatches"] == 4 and numbers["rebatch/lighten_level"] == 0
    assert all(type(value) is float for value in numbers.values())


def test_numbers_count_a_batch_that_failed_as_lost_only():
    step = make_step(fits=0)
    with pytest.raises(rebatch.Exhausted):
        step(batch_of())
    numbers = step.numbers()
    assert numbers["rebatch/ooms_total"] == step.report.ooms > 0
    assert (numbers["rebatch/samples_total"], numbers["rebatch/micro"]) == (0, 0)


def test_numbers_leave_out_what_is_not_known():
    step = make_step()
    step(batch_of())
    assert set(step.numbers("")) == set(NUMBERS) - UNKNOWN_ON_A_CPU
    totals = Totals()
    totals.add(Report(peak_bytes=5, reserved_bytes=7), True)
    last = Report(reserved_bytes=8)  # its peak was not measured
    totals.add(last, True)
    numbers = totals.numbers(last, 0, "")
    assert set(numbers) == set(NUMBERS)
    assert [numbers[name] for name in sorted(UNKNOWN_ON_A_CPU)] == [5, 8, 0]
    assert set(numbers_of_trainer(totals.numbers(last, 0, "rebatch/"), False)) == {
        "rebatch/" + name for name in OF_TRAINERS
    }


def test_numbers_of_a_check_or_a_probe_are_not_those_of_the_training():
    step = make_step()
    step.check(batch_of())  # with OOMs on purpose
    step.evaluate(batch_of())
    assert (step.numbers("")["ooms_total"], step.numbers("")["samples_total"]) == (0, 0)


def test_the_page_names_each_number():
    table = PAGE.read_text().split("## Watch a training")[1].split("\n## ")[0]
    assert set(re.findall(r"`rebatch/(\w+)`", table)) == set(NUMBERS)


# ---- the libraries, as the page uses them ----


def lines_of_the_page(library):
    """The block of the page that begins with "# needs LIBRARY", with a folder of its own."""
    found = re.search(rf"^```python\n# needs {library}\n(.*?)^```$", PAGE.read_text(), re.S | re.M)
    return found[1]


def run_lines(library, folder, monkeypatch):
    pytest.importorskip(library)
    monkeypatch.chdir(folder)
    step = make_step(fits=4)
    names = {"train_step": step, "loader": [batch_of() for _ in range(3)], "torch": torch}
    exec(compile(lines_of_the_page(library), str(PAGE), "exec"), names)
    return step, names


def test_tensorboard_has_each_number_of_each_step(tmp_path, monkeypatch):
    step, names = run_lines("tensorboard", tmp_path, monkeypatch)
    names["writer"].close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(names["writer"].log_dir)
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(step.numbers())
    ooms = [(e.step, e.value) for e in events.Scalars("rebatch/ooms_total")]
    assert ooms == [(0, 2), (1, 2), (2, 2)]


def test_wandb_has_the_numbers_in_the_rows_of_the_loss(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    step, names = run_lines("wandb", tmp_path, monkeypatch)
    summary = dict(names["run"].summary)
    names["run"].finish()
    assert summary.items() >= {"rebatch/ooms_total": 2, "rebatch/samples_total": 48}.items()
    assert summary["_step"] == 2 and set(summary) >= {"loss", *step.numbers()}


def test_mlflow_has_the_numbers_beside_the_loss(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # mlflow-skinny has no database
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "runs").as_uri())
    mlflow = pytest.importorskip("mlflow")
    step, names = run_lines("mlflow", tmp_path, monkeypatch)
    client, run = mlflow.MlflowClient(), mlflow.last_active_run()
    assert set(run.data.metrics) == {"loss", *step.numbers()}
    samples = client.get_metric_history(run.info.run_id, "rebatch/samples_total")
    assert [(m.step, m.value) for m in samples] == [(0, 16), (1, 32), (2, 48)]


def test_prometheus_scrapes_counters_and_gauges(tmp_path, monkeypatch):
    prometheus_client = pytest.importorskip("prometheus_client")
    _, names = run_lines("prometheus_client", tmp_path, monkeypatch)
    server, _ = prometheus_client.start_http_server(0, addr="127.0.0.1")
    try:
        address = f"http://127.0.0.1:{server.server_port}/metrics"
        text = urllib.request.urlopen(address).read().decode()
    finally:
        server.shutdown()
        server.server_close()
        prometheus_client.REGISTRY.unregister(names["export"])
    assert "# TYPE rebatch_ooms_total counter\nrebatch_ooms_total 2.0\n" in text
    assert "# TYPE rebatch_micro gauge\nrebatch_micro 4.0\n" in text
    assert "rebatch_peak_bytes" not in text


def test_an_exporter_refuses_names_that_are_there():
    prometheus_client = pytest.importorskip("prometheus_client")
    from rebatch.prometheus import Exporter

    registry = prometheus_client.CollectorRegistry()
    export, step = Exporter(registry), make_step()
    with pytest.raises(ValueError, match="Duplicated"):
        Exporter(registry)
    critic = Exporter(registry, prefix="critic_")
    step(batch_of())
    export(step)
    assert registry.get_sample_value("rebatch_samples_total") == 16
    assert registry.get_sample_value("critic_samples_total") is None
    critic(step)
    assert registry.get_sample_value("critic_samples_total") == 16

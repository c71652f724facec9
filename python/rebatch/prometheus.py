"""The numbers of a Step for Prometheus: a collector of prometheus_client.

A training loop with it::

    from prometheus_client import start_http_server
    from rebatch.prometheus import Exporter

    export = Exporter()
    start_http_server(9400)
    for batch in loader:
        loss = step(batch)
        export(step)
"""

from __future__ import annotations

from typing import Dict, Iterator, Optional, Protocol

from prometheus_client import REGISTRY, CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from rebatch.torch.session.report import NUMBERS


class HasNumbers(Protocol):
    """A Step, the Rebatch of a Lightning Trainer, or a RebatchTrainer."""

    def numbers(self, prefix: str, /) -> Dict[str, float]:
        """As those of a Step."""


class Exporter(Collector):
    """Shows the numbers of the latest export(step) to whoever scrapes the process: a counter for
    each name of Step.numbers() that ends with _total, such as rebatch_ooms_total, and a gauge for
    each other one, such as rebatch_micro. A scrape touches neither the Step nor the GPU.

    Args:
        registry: of prometheus_client
        prefix: begins each name. Several Exporters of a registry need several

    Raises ValueError where the registry has such names."""

    def __init__(self, registry: CollectorRegistry = REGISTRY, prefix: str = "rebatch_"):
        self._prefix = prefix
        self._numbers: Dict[str, float] = {}
        registry.register(self)

    def __call__(self, step: HasNumbers) -> None:
        self._numbers = step.numbers(self._prefix)

    def describe(self) -> Iterator[Metric]:
        """All that collect() may have: the registry refuses names that are there."""
        for name, text in NUMBERS.items():
            yield _metric(self._prefix + name, text)

    def collect(self) -> Iterator[Metric]:
        """What is known. Called from the thread of a scrape."""
        numbers = self._numbers
        for name, text in NUMBERS.items():
            if self._prefix + name in numbers:
                yield _metric(self._prefix + name, text, numbers[self._prefix + name])


def _metric(name: str, text: str, value: Optional[float] = None) -> Metric:
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    metric: Metric = kind(name, text, value=value)
    return metric

"""The frontend's own metrics, and the engine's beside them, in Prometheus' text format."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from pdjax.server.room_metrics import RoomMetrics

if TYPE_CHECKING:
    from pdjax.server.output import Output

_FIRST = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)
_BETWEEN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
_WHOLE = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)


class _EngineStats(Collector):
    """The scheduler's values: names that end in ``_total`` are counters, others gauges."""

    def __init__(self) -> None:
        self.values: Mapping[str, float] | None = None

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        """The values as metrics."""
        yield GaugeMetricFamily("pdjax_up", "1 if the scheduler answers", value=0 if self.values is None else 1)
        for name, value in (self.values or {}).items():
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            yield family(f"pdjax_{name}", "from the scheduler", value=value)


class Metrics:
    """Counts and times of one frontend process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._engine = _EngineStats()
        self._registry.register(self._engine)
        self._requests = Counter(
            "pdjax_frontend_requests", "HTTP requests that have ended", ["route", "status"], registry=self._registry
        )
        self.running = Gauge("pdjax_frontend_running", "samples that the engine works on", registry=self._registry)
        self._prompt = Counter("pdjax_frontend_prompt_tokens", "tokens of prompts", registry=self._registry)
        self._generated = Counter("pdjax_frontend_output_tokens", "tokens generated", registry=self._registry)
        self._first = Histogram(
            "pdjax_time_to_first_token_seconds", "from engine submission", buckets=_FIRST, registry=self._registry
        )
        self._between = Histogram(
            "pdjax_inter_token_latency_seconds", "between tokens", buckets=_BETWEEN, registry=self._registry
        )
        self._whole = Histogram(
            "pdjax_e2e_request_latency_seconds", "of finished samples", buckets=_WHOLE, registry=self._registry
        )
        self._rooms: RoomMetrics | None = None

    def request(self, route: str, status: int) -> None:
        """An HTTP request has ended; status 499: the client left."""
        self._requests.labels(route, str(status)).inc()

    def tokens(self, output: Output, count: int) -> None:
        """Tokens of a sample have come; called before they are added to it."""
        if not count:
            return
        now = time.monotonic()
        self._generated.inc(count)
        if output.last_token is None:
            if output.job.sample == 0:
                self._prompt.inc(output.prompt_tokens)
            self._first.observe(now - output.started)
        else:
            for _ in range(count):
                self._between.observe((now - output.last_token) / count)
        output.last_token = now

    def finished(self, output: Output) -> None:
        """A sample has ended."""
        self._whole.observe(output.seconds)
        if output.timeline is not None and "transfer_s" in output.timeline:  # it has come from a prefill instance
            self._rooms = self._rooms or RoomMetrics(self._registry)
            self._rooms.finished(output.timeline)

    def text(self, engine: Mapping[str, float] | None) -> bytes:
        """All metrics; `engine` are the scheduler's values, None if it did not answer."""
        self._engine.values = engine
        return generate_latest(self._registry)

"""The figures that Prometheus collects from a server."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """The counters of one server, in a registry of their own: two servers in a process do not share them."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "lamella_requests", "Requests by route and status.", ["route", "status"], registry=registry
        )
        self.seconds = Histogram(
            "lamella_request_seconds", "Seconds per request.", ["route"], buckets=SECONDS, registry=registry
        )
        self.queue_seconds = Histogram(
            "lamella_queue_seconds", "Seconds that a question waited.", buckets=SECONDS, registry=registry
        )
        self.answers = Counter(
            "lamella_answers", "Questions by reader, and whether it found an answer.", ["model", "found"],
            registry=registry,
        )  # fmt: skip
        self.accepted = Gauge("lamella_accepted_requests", "Requests that wait or are answered.", registry=registry)
        self.loaded = Gauge("lamella_loaded_models", "Readers in memory.", registry=registry)
        self.batches = Counter("lamella_batches", "Runs of the encoder.", registry=registry)
        self.batch_windows = Histogram(
            "lamella_batch_windows", "Windows per run.", buckets=(1, 2, 4, 8, 16, 32, 64, 128), registry=registry
        )
        self.tokens = Counter("lamella_tokens", "Tokens that the encoder read.", registry=registry)
        self.engine_seconds = Counter("lamella_engine_seconds", "Seconds that the encoder ran.", registry=registry)
        self._child = cache(lambda metric, *labels: metric.labels(*labels))  # its own search is slow

    def observe_batch(self, windows: int, tokens: int, seconds: float) -> None:
        """Count a run of an engine."""
        self.batches.inc()
        self.batch_windows.observe(windows)
        self.tokens.inc(tokens)
        self.engine_seconds.inc(seconds)

    def observe_request(self, route: str, status: int, seconds: float) -> None:
        """Count a request."""
        self._child(self.requests, route, status).inc()
        self._child(self.seconds, route).observe(seconds)

    def observe_question(self, queued: float, answered: Iterable[tuple[str, bool]]) -> None:
        """Count a question: the seconds it waited, and for each of its readers whether there was an answer."""
        self.queue_seconds.observe(queued)
        for model, found in answered:
            counters = {kind: self._child(self.answers, model, kind) for kind in ("yes", "no")}  # a share needs both
            counters["yes" if found else "no"].inc()

    def text(self) -> bytes:
        """Return all figures in the text format of Prometheus."""
        return generate_latest(self.registry)

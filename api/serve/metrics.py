"""What Prometheus reads at /metrics: the engines' counts, and times of requests."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from accel.serve.loading import Models

TYPE = CONTENT_TYPE_PLAIN_0_0_4
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_HELP = {  # of a model's stats
    "loaded": "Whether the model is loaded",
    "loads_total": "Times that the model was loaded",
    "load_failures_total": "Times that the model could not be loaded",
    "running": "Requests that run",
    "waiting": "Requests that wait",
    "requests_total": "Requests that were taken",
    "prompt_tokens_total": "Tokens of prompts that were run",
    "generated_tokens_total": "Tokens that were made",
    "preemptions_total": "Requests that made room for others and ran again",
    "reused_tokens_total": "Prompt tokens whose keys and values were taken over (kv.reuse)",
    "drafts_total": "Drafts that were checked",
    "drafted_total": "Tokens that were drafted",
    "draft_drafted_total": "Tokens that were drafted, by position in the draft",
    "draft_accepted_total": "Drafted tokens that stood, by position in the draft",
    "draft_accepted_mean": "Drafted tokens that stood, of a draft in the mean",
    "accepted_total": "Drafted tokens that stood",
    "kv_bytes": "State of the requests that run, in bytes",
    "moved_bytes": "State that went from process to process since the start, in bytes (splitwise)",
}


class Metrics:
    """Of one server."""

    def __init__(self, models: Models):
        self._registry = CollectorRegistry()
        self._registry.register(_Engines(models))
        self._answers = Counter(
            "accel_http_responses", "Answers by path and status", ["path", "status"],
            registry=self._registry,
        )  # fmt: skip
        self._first, self._whole = (
            Histogram(f"accel_{name}_seconds", told, ["model"], buckets=_SECONDS, registry=self._registry)
            for name, told in (
                ("time_to_first_token", "From the request to its first token"),
                ("request", "From the request to its last token"),
            )
        )  # fmt: skip

    @property
    def text(self) -> bytes:
        """All of it, in Prometheus' format."""
        return generate_latest(self._registry)

    def answered(self, path: str, status: int) -> None:
        """One more."""
        self._answers.labels(path, status).inc()

    def clock(self, model: str) -> Clock:
        """For a request that comes in now."""
        return Clock(self._first.labels(model), self._whole.labels(model))


class Clock:
    """Times one request."""

    def __init__(self, first: Histogram, whole: Histogram):
        self._start, self._first, self._whole = time.perf_counter(), first, whole
        self._began = False

    def token(self) -> None:
        """A token came."""
        if not self._began:
            self._began = True
            self._first.observe(time.perf_counter() - self._start)

    def end(self) -> None:
        """All came."""
        self._whole.observe(time.perf_counter() - self._start)


class _Engines(Collector):
    """Asks the models when it is asked."""

    def __init__(self, models: Models):
        self._models = models

    def collect(self) -> Iterator[Metric]:
        stats = {one.name: one.stats() for one in self._models.places}
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for model, of in stats.items():
            told = dict(of)
            if told.get("drafts_total"):
                told["draft_accepted_mean"] = told["accepted_total"] / told["drafts_total"]
            for key, value in told.items():
                name, _, position = key.partition("/")
                if name not in families:
                    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                    labels = ["model", *(["position"] if position else [])]
                    families[name] = kind(f"accel_{name}", _HELP.get(name, name), labels=labels)
                families[name].add_metric([model, *filter(None, [position])], value)
        yield from families.values()


class Watched:
    """Counts the answers of an application by path, as its routes are written, and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: Sequence[Route]):
        self._app, self._metrics, self._routes = app, metrics, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        found = (route.path for route in self._routes if route.matches(scope)[0] != Match.NONE)
        path = next(found, "other")

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.answered(path, message["status"])
            await send(message)

        await self._app(scope, receive, counted)

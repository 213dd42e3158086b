"""Traces by OpenTelemetry, of requests that have ended: this package's one door, and an extra.

Off unless an endpoint is configured, here or in the standard's variables. A span is made of times
that were noted anyway, so nothing is done while a request runs. Other variables of the standard
(samplers, headers, resource attributes, the batches' sizes) are the SDK's to read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

from engine.errors import ConfigError
from server.observe.exchange import Ended, Exchange

logger = logging.getLogger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
NAME = "foredraft"
EXPORT_SECONDS = 3.0  # with a collector that is not there, so much later the server has exited


def make_traces(
    endpoint: str | None, environment: Mapping[str, str], *, model: str
) -> Callable[[Exchange], None] | None:
    """What makes the spans of a request; None where nobody said where to send them. `endpoint`: of
    a collector, without the path. Raises ConfigError where it is given, and the extra is not
    installed; variables may be meant for others."""
    off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    off = off or environment.get("OTEL_TRACES_EXPORTER") == "none"
    if endpoint is None and (off or not any(environment.get(name) for name in ENDPOINTS)):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        said = f"no traces without {error.name}: pip install 'foredraft[otel]'"
        if endpoint is not None:
            raise ConfigError(f"server.otlp_endpoint = {endpoint}: {said}") from None
        logger.warning(said)
        return None
    own = {"service.name": NAME, "service.version": version(NAME)}
    resource = Resource.create({**own, **OTELResourceDetector().detect().attributes})
    provider = TracerProvider(resource=resource)  # which sends what is left when Python exits
    url = None if endpoint is None else endpoint.rstrip("/") + "/v1/traces"
    bounded = any(name.startswith("OTEL_EXPORTER") and "TIMEOUT" in name for name in environment)
    exporter = OTLPSpanExporter(endpoint=url, timeout=None if bounded else EXPORT_SECONDS)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Traces(provider, model=model)


class Traces:
    """Of a request one span, and within it `queue`, `prefill` and `decode`, one after the other.
    With several choices: until the first one runs, and until the first token of any."""

    def __init__(self, provider: Any, *, model: str) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._api = trace
        self._tracer = provider.get_tracer(NAME, version(NAME))
        self._extract = TraceContextTextMapPropagator().extract
        self._model = model

    def __call__(self, exchange: Exchange) -> None:
        ended, api = exchange.ended, self._api
        span = self._tracer.start_span(
            f"{exchange.method} {exchange.route}",
            context=self._extract(exchange.parent),
            kind=api.SpanKind.SERVER,
            start_time=exchange.started,
            attributes=_attributes(exchange, self._model),
        )
        if exchange.status >= 500 or (ended is not None and ended.finish == "error"):
            span.set_status(api.StatusCode.ERROR)
        if ended is not None:
            within, arrived = api.set_span_in_context(span), ended.began - exchange.began
            for name, begin, end, attributes in _phases(ended):
                times = [exchange.started + int(1e9 * (arrived + at)) for at in (begin, end)]
                child = self._tracer.start_span(
                    name, context=within, start_time=times[0], attributes=attributes
                )
                child.end(times[1])
        span.end(exchange.started + int(1e9 * exchange.total))
        exchange.trace = f"{span.get_span_context().trace_id:032x}"


def _phases(ended: Ended) -> list[tuple[str, float, float, dict[str, Any]]]:
    """Name, begin and end in seconds since its arrival, attributes."""
    if ended.first_token is None:
        return [("queue", 0.0, ended.total, {})]
    first = ended.first_token
    queued = min(ended.queued or 0.0, first)
    guesses: dict[str, Any] = {
        "foredraft.rounds": ended.rounds,
        "foredraft.proposed": ended.proposed,
        "foredraft.accepted": ended.accepted,
    }
    if ended.rounds:
        guesses["foredraft.k"] = ended.proposed / ended.rounds
    if ended.proposed:
        guesses["foredraft.acceptance"] = ended.accepted / ended.proposed
    return [
        ("queue", 0.0, queued, {}),
        ("prefill", queued, first, {"gen_ai.usage.input_tokens": ended.prompt_tokens}),
        ("decode", first, ended.total, guesses),
    ]


def _attributes(exchange: Exchange, model: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "http.request.method": exchange.method,
        "http.route": exchange.route,
        "http.response.status_code": exchange.status,
        "foredraft.request": exchange.id,
    }
    if exchange.key:
        found["foredraft.key"] = exchange.key
    if exchange.error is not None:
        found["error.type"] = exchange.error
    if (ended := exchange.ended) is not None:
        found |= {
            "gen_ai.response.model": model,
            "gen_ai.response.id": ended.id,
            "gen_ai.response.finish_reasons": [ended.finish],
            "gen_ai.usage.input_tokens": ended.prompt_tokens,
            "gen_ai.usage.output_tokens": ended.reply_tokens,
        }
    return found

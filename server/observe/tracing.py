"""OpenTelemetry traces of ended requests. The only module that imports opentelemetry, an extra.

Off unless an endpoint is configured, here or in OpenTelemetry's environment variables. Spans are
built from times that are recorded anyway, so they cost nothing while a request runs. The SDK reads
all other variables (samplers, headers, resource attributes, batch sizes).
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
EXPORT_SECONDS = 3.0  # an unreachable collector delays the server's exit by this


def make_traces(
    endpoint: str | None, environment: Mapping[str, str], *, model: str
) -> Callable[[Exchange], None] | None:
    """Return the function that makes a request's spans; None if no endpoint is configured.
    `endpoint`: a collector's URL, without the path. Raises ConfigError if it is given and the extra
    is not installed; with variables only it warns, as they may be meant for other programs."""
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
        message = f"no traces without {error.name}: pip install 'foredraft[otel]'"
        if endpoint is not None:
            raise ConfigError(f"server.otlp_endpoint = {endpoint}: {message}") from None
        logger.warning(message)
        return None
    service = {"service.name": NAME, "service.version": version(NAME)}
    resource = Resource.create({**service, **OTELResourceDetector().detect().attributes})
    provider = TracerProvider(resource=resource)  # sends pending spans when Python exits
    url = None if endpoint is None else endpoint.rstrip("/") + "/v1/traces"
    bounded = any(name.startswith("OTEL_EXPORTER") and "TIMEOUT" in name for name in environment)
    exporter = OTLPSpanExporter(endpoint=url, timeout=None if bounded else EXPORT_SECONDS)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Traces(provider, model=model)


class Traces:
    """One span per request, and within it `queue`, `prefill` and `decode` in sequence. With several
    choices, `queue` ends when the first one runs, `prefill` at the first token of any."""

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
    """Return (name, start, end, attributes) of each phase, in seconds since `ended.began`."""
    if ended.first_token is None:
        return [("queue", 0.0, ended.total, {})]
    first = ended.first_token
    queued = min(ended.queued or 0.0, first)
    speculation: dict[str, Any] = {
        "foredraft.rounds": ended.rounds,
        "foredraft.proposed": ended.proposed,
        "foredraft.accepted": ended.accepted,
    }
    if ended.rounds:
        speculation["foredraft.k"] = ended.proposed / ended.rounds
    if ended.proposed:
        speculation["foredraft.acceptance"] = ended.accepted / ended.proposed
    return [
        ("queue", 0.0, queued, {}),
        ("prefill", queued, first, {"gen_ai.usage.input_tokens": ended.prompt_tokens}),
        ("decode", first, ended.total, speculation),
    ]


def _attributes(exchange: Exchange, model: str) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "http.request.method": exchange.method,
        "http.route": exchange.route,
        "http.response.status_code": exchange.status,
        "foredraft.request": exchange.id,
    }
    if exchange.key:
        attributes["foredraft.key"] = exchange.key
    if exchange.error is not None:
        attributes["error.type"] = exchange.error
    if (ended := exchange.ended) is not None:
        attributes |= {
            "gen_ai.response.model": model,
            "gen_ai.response.id": ended.id,
            "gen_ai.response.finish_reasons": [ended.finish],
            "gen_ai.usage.input_tokens": ended.prompt_tokens,
            "gen_ai.usage.output_tokens": ended.reply_tokens,
        }
    return attributes

"""Traces: off unless configured, and the spans of a request."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import ConfigError
from server.observe.exchange import Ended, Exchange
from server.observe.tracing import Traces, make_traces

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECOND = 1_000_000_000


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_SERVICE_NAME": "x", "OTEL_TRACES_SAMPLER": "always_on"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_off_unless_an_endpoint_is_named(environment: dict[str, str]) -> None:
    """Law: nothing is sent by default, nor if OpenTelemetry's variables turn tracing off."""
    assert make_traces(None, environment, model="m") is None


def test_without_the_extra(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Law: without the extra, our own configuration key is refused with the fix; a variable that a
    platform sets for everyone gives only a warning."""
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'foredraft\[otel\]'"):
        make_traces("http://c:4318", {}, model="m")
    assert make_traces(None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"}, model="m") is None
    assert "pip install 'foredraft[otel]'" in caplog.text


@pytest.fixture
def spans() -> Any:
    """Return an exporter that keeps the spans in memory."""
    pytest.importorskip("opentelemetry.sdk", reason="the extra `otel` is not installed")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    return InMemorySpanExporter()


def traces(spans: Any) -> Traces:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    return Traces(provider, model="m")


def exchange(ended: Ended | None, **fields: Any) -> Exchange:
    """Return an exchange that began at 100 s and took four seconds."""
    times = {"started": 100 * SECOND, "began": 7.0, "total": 4.0}
    return Exchange(
        id="mine", method="POST", route="/v1/completions", ended=ended, **{**times, **fields}
    )


def test_spans_of_a_request(spans: Any) -> None:
    """Law: queue, prefill and decode follow each other within the request's span, which is a child
    of the caller's span; decode has K and acceptance."""
    ended = Ended(
        id="cmpl-1", finish="stop", began=7.5, total=3.0, prompt_tokens=11, reply_tokens=30,
        rounds=10, proposed=40, accepted=20, queued=0.25, first_token=1.0,
    )  # fmt: skip
    one = exchange(
        ended, status=200, key="alice", parent={"traceparent": f"00-{TRACE}-{PARENT}-01"}
    )
    traces(spans)(one)
    *phases, request = spans.get_finished_spans()
    assert (request.name, request.kind.name) == ("POST /v1/completions", "SERVER")
    assert f"{request.context.trace_id:032x}" == TRACE == one.trace
    assert f"{request.parent.span_id:016x}" == PARENT
    assert (request.start_time, request.end_time) == (100 * SECOND, 104 * SECOND)
    assert request.attributes["foredraft.key"] == "alice"
    assert request.attributes["gen_ai.usage.output_tokens"] == 30
    times = [(span.name, span.start_time / SECOND, span.end_time / SECOND) for span in phases]
    assert times == [
        ("queue", 100.5, 100.75), ("prefill", 100.75, 101.5), ("decode", 101.5, 103.5)
    ]  # fmt: skip
    assert {span.parent.span_id for span in phases} == {request.context.span_id}
    decode = phases[-1].attributes
    assert (decode["foredraft.k"], decode["foredraft.acceptance"]) == (4.0, 0.5)


def test_spans_of_what_went_wrong(spans: Any) -> None:
    """Law: a refusal is one span and not an error of ours; an engine failure is an error; a request
    that ended in the queue has a queue span of its whole time."""
    observe = traces(spans)
    observe(exchange(None, status=429, error="queue_full"))
    observe(exchange(Ended(id="c", finish="error", began=7.0, total=2.0), status=200))
    observe(exchange(None, status=500, error="internal", parent={"traceparent": "nonsense"}))
    refused, queued, failed, broken = spans.get_finished_spans()
    assert (refused.attributes["error.type"], refused.status.is_ok) == ("queue_full", True)
    assert (queued.name, queued.end_time - queued.start_time) == ("queue", 2 * SECOND)
    assert not failed.status.is_ok
    assert not broken.status.is_ok
    assert broken.parent is None


def test_a_callers_choice_not_to_sample_holds(spans: Any) -> None:
    """Law: the sampled flag of the W3C trace context is obeyed."""
    observe = traces(spans)
    observe(exchange(None, status=200, parent={"traceparent": f"00-{TRACE}-{PARENT}-00"}))
    assert spans.get_finished_spans() == ()

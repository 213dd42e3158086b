"""What came of a scene: rates, CPU time, and what the front end added to the engine's own times."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from engine.errors import EngineError
from server.lab.bench.front.load import Kind, Reply

HEAD = (
    f"{'scene':6} {'kind':12} {'tokens/s':>9} {'tokens/event':>12} {'CPU us/token':>12}"
    f" {'CPU %':>6} {'added TTFT p50':>15} {'p99':>8} {'hop p50':>8} {'p99':>8}   (ms)"
)


@dataclass(frozen=True)
class Finding:
    """Times in seconds. `hop`: from an output's making in the engine to its event at the client,
    of replies with one event per output. `cpu_share`: of one core."""

    scene: str
    kind: Kind
    requests: int
    tokens_per_second: float
    tokens_per_event: float
    cpu_per_token: float
    cpu_share: float
    added_ttft: tuple[float, float]  # median, 99th percentile
    hop: tuple[float, float] | None


def find(
    scene: str,
    kind: Kind,
    replies: Sequence[Reply],
    *,
    cpu_seconds: float,
    times: Path,
    tokens: int,
    window: tuple[float, float],
) -> Finding:
    """`window`: clock readings between which tokens count for their rate. Raises EngineError when a
    reply is not what was asked for."""
    engine = {told["id"]: told for told in map(json.loads, times.read_text().splitlines())}
    added, hops, num_events, in_window = list[float](), list[float](), 0, 0.0
    texts = set[str]()
    for reply in replies:
        events = [(clock, event) for clock, event in reply.events() if _says(event)]
        texts.add("".join(_text(event) for _, event in events))
        if not events or events[-1][1].get("usage", {}).get("completion_tokens") != tokens:
            raise EngineError(f"a reply has not the {tokens} tokens that were asked for")
        own = engine[events[0][1]["id"] + "-0"]
        added.append(events[0][0] - reply.asked - (own["emitted"][0] - own["submitted"]))
        num_events += len(events)
        within = sum(window[0] <= clock < window[1] for clock, _ in events)
        in_window += tokens * within / len(events)
        if len(events) == len(own["emitted"]):
            hops += [c - e for (c, _), e in zip(events, own["emitted"], strict=True)]
    if len(texts) != 1:
        raise EngineError("the same request had different texts")
    wall = max(r.arrived[-1] for r in replies) - min(r.asked for r in replies)
    total = tokens * len(replies)
    return Finding(
        scene,
        kind,
        len(replies),
        tokens_per_second=in_window / (window[1] - window[0]),
        tokens_per_event=total / num_events,
        cpu_per_token=cpu_seconds / total,
        cpu_share=cpu_seconds / wall,
        added_ttft=_middle_and_end(added),
        hop=_middle_and_end(hops) if hops else None,
    )


def row(finding: Finding) -> str:
    """One line of the table that HEAD heads."""
    added, hop = finding.added_ttft, finding.hop
    hops = f"{hop[0] * 1e3:8.2f} {hop[1] * 1e3:8.2f}" if hop else f"{'-':>8} {'-':>8}"
    return (
        f"{finding.scene:6} {finding.kind:12} {finding.tokens_per_second:9.0f}"
        f" {finding.tokens_per_event:12.2f} {finding.cpu_per_token * 1e6:12.1f}"
        f" {finding.cpu_share * 100:6.1f} {added[0] * 1e3:15.2f} {added[1] * 1e3:8.2f} {hops}"
    )


def _says(event: dict[str, Any]) -> bool:
    """Whether tokens may have made it: not chat's opening, which no token does."""
    if "error" in event:
        raise EngineError(f"a stream ended with an error: {event['error'].get('message')}")
    return "role" not in event["choices"][0].get("delta", {})


def _text(event: dict[str, Any]) -> str:
    choice = event["choices"][0]
    found: str = choice.get("text") or choice.get("delta", {}).get("content") or ""
    return found


def _middle_and_end(values: Sequence[float]) -> tuple[float, float]:
    """Median and 99th percentile."""
    return median(values), quantiles(values, n=100)[-1] if len(values) > 1 else values[0]

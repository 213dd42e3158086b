"""The evaluation as a page of text for a terminal, and as JSON for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from server.lab.evaluate.advice import Advice
from server.lab.evaluate.contenders import PLAIN
from server.lab.evaluate.findings import (
    Difference,
    Findings,
    Record,
    Records,
    parts_of,
    row_cost,
)


@dataclass(frozen=True, slots=True)
class Report:
    """`config`: the recommended configuration as TOML."""

    findings: Findings
    advice: Advice
    config: str


def card(report: Report) -> str:
    """Figures, then sentences."""
    findings = report.findings
    parts = [heading(findings), lossless_lines(findings), _table(findings), _acceptance(findings)]
    lines = [line for part in parts for line in (*part, "")]
    return "\n".join([*lines, *report.advice.reasons])


def as_json(report: Report) -> str:
    """Everything that the card says, and the parts it was worked out from."""
    findings, advice = report.findings, report.advice
    cells = [
        {
            "group": cell.group,
            "concurrency": cell.load,
            "best": advice.best[cell],
            "contenders": _records(records),
        }
        for cell, records in findings.cells.items()
    ]
    kinds = [
        {"kind": cell.kind, "group": cell.group, "contenders": _records(records)}
        for cell, records in findings.kinds.items()
    ]
    found = {
        "facts": findings.facts,
        "notes": findings.notes,
        "lossless": findings.lossless,
        "texts": {"compared": findings.compared, "equal": findings.equal},
        "texts_by_load": {"compared": findings.batched[0], "equal": findings.batched[1]},
        "repeats": findings.repeats,
        "cut": None if findings.cut is None else asdict(findings.cut),
        "cpu_time": findings.cpu_time,
        "differences": [asdict(difference) for difference in findings.differences],
        "cells": cells,
        "kinds": kinds,
        "prompts": [asdict(prompt) for prompt in findings.prompts],
        "recommended": {
            "contender": advice.overall.name,
            "speedup": advice.gain,
            "reasons": advice.reasons,
            "config": report.config,
        },
    }
    return json.dumps(found, allow_nan=False)


def _records(records: Records) -> dict[str, Any]:
    return {name: _record(record, records[PLAIN]) for name, record in records.items()}


def _record(record: Record, plain: Record) -> dict[str, Any]:
    parts = parts_of(record, plain)
    return {
        "speedup": _number(record.ratio),
        "interval": record.interval,
        "slices": len(record.ratios),
        "tokens_per_second": _number(record.rate),
        "tokens_per_round": _number(record.tokens_per_round),
        "acceptance": record.survival,
        "by_proposer": record.sums.by_proposer,
        "step": None if parts is None else {**asdict(parts), "expected": parts.expected},
        "row_cost": row_cost(record, plain),
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def heading(findings: Findings) -> Iterator[str]:
    f = findings.facts
    yield f"Foredraft evaluate: {f['prompts']}"
    draft = f" with draft {f['draft']}" if f["draft"] else ""
    yield f"{f['target']}{draft}, {f['dtype']} on {f['device']}"
    yield f"Foredraft {f['version']}, {f['date']}"
    yield f"{f['chosen']} of {f['found']} prompts: {f['kinds']}"
    for note in findings.notes:
        yield f"note: {note}"


def lossless_lines(findings: Findings) -> Iterator[str]:
    """Whether speculation changed a text, and where."""
    same, all_ = findings.equal.total(), findings.compared.total()
    if findings.lossless:
        yield f"Lossless: {same} of {all_} texts under guesses are those of K=0, token for token."
    else:
        yield f"NOT lossless: {all_ - same} of {all_} texts differ from those of K=0."
        if (dtype := findings.facts["dtype"]) != "float32":
            yield f"In {dtype}, products may depend on how many rows share them; float32 is exact."
    yield from map(_difference_line, findings.differences)
    compared, equal = findings.batched
    if compared:
        yield f"K=0 at other numbers of requests at a time: {equal} of {compared} texts the same."


def _difference_line(d: Difference) -> str:
    noise = " over T, with noise" if d.temperature else ""
    margin = (
        "by how much is not known"
        if d.margin is None
        else f"K=0 prefers its own by {d.margin:.2g} (log-probability{noise})"
    )
    return (
        f"line {d.line}, {d.contender}, {d.load} at a time, T={d.temperature:g}: token {d.at} after"
        f" {d.before!r} is {d.got!r} instead of {d.expected!r}; {margin}"
    )


def noise_line(findings: Findings) -> str:
    """How far apart two runs of the same thing were."""
    clock = "Times are the processor's for the engine's one thread. " if findings.cpu_time else ""
    low, high = min(findings.repeats, default=1.0), max(findings.repeats, default=1.0)
    return (
        f"{clock}K=0 against itself, in the same slices: {low:.2f}x to {high:.2f}x"
        f" ({len(findings.repeats)} slices); smaller differences in one slice mean little"
    )


def shown(records: Records, name: str) -> str:
    """Speed: of K = 0 in tokens per second, of others against it."""
    record = records[name]
    return f"{record.rate:.0f}/s" if name == PLAIN else f"{record.ratio:.2f}x"


def _table(findings: Findings) -> Iterator[str]:
    width = max(len(contender.name) for contender in findings.contenders) + 2
    heads = "".join(f"{f'{cell.group} x{cell.load}':>14}" for cell in findings.columns)
    yield "Speed against K=0, by requests at a time (tokens/s of K=0 in the first row)"
    yield f"{'':<{width}}{heads}"
    for name in (contender.name for contender in findings.contenders):
        row = "".join(f"{shown(findings.cells[cell], name):>14}" for cell in findings.columns)
        yield f"{name:<{width}}{row}"
    yield noise_line(findings)


def _acceptance(findings: Findings) -> Iterator[str]:
    yield "Guesses kept by position (each with all before it), one request at a time"
    for name, shares in acceptance_rows(findings):
        yield f"{name:<32}{' '.join(shares)}"


def acceptance_rows(findings: Findings) -> Iterator[tuple[str, list[str]]]:
    """Family, kind of text and temperature group; shares by position."""
    for family, cell, survival in findings.acceptance():
        yield f"{family}, {cell.kind}, {cell.group}", [f"{share:.2f}" for share in survival]

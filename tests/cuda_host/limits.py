"""The limits on what a step may ask of the device: measured, ceiling, wanted.

A ceiling is the measured value when it was last lowered. A commit that reduces a figure lowers its
ceiling; no commit raises one. `wanted` is the goal. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

WIDEST = 150  # characters shown of a kernel's name
SEQUENCES = (1, 32, 64)  # in a step; the columns of each triple below
TO_DEVICE = ("copy to the device, pinned", "copy to the device, pageable")
ALLOCATING = ("device allocation", "pinned allocation", "device free", "capture")


@dataclass(frozen=True, slots=True)
class Step:
    """A limit on the sum of these stand-in counters in any step."""

    name: str
    counters: tuple[str, ...]
    ceilings: tuple[int, int, int]
    wanted: tuple[int, int, int] | None


@dataclass(frozen=True, slots=True)
class Nodes:
    """A limit on the nodes of a captured graph, or of a part of one."""

    name: str
    ceiling: int
    wanted: int | None


def in_bytes(counters: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"bytes of {name}" for name in counters)


STEPS = (
    WAITS := Step("waits for the device", ("wait",), (1, 1, 1), (1, 1, 1)),
    Step("copies to the device", TO_DEVICE, (3, 3, 3), (3, 3, 3)),
    Step("of these from pageable memory", TO_DEVICE[1:], (0, 0, 0), (0, 0, 0)),
    Step("bytes to the device", in_bytes(TO_DEVICE), (2_000, 58_100, 129_100),
         (64_000, 64_000, 128_000)),
    Step("bytes copied on the device", in_bytes(("copy on the device",)), (0, 0, 0),
         (1_000_000, 1_000_000, 1_000_000)),
    LAUNCHES := Step("launches outside graphs", ("launch", "memset"), (2, 2, 2), (12, 12, 12)),
    Step("launches of graphs", ("graph launch",), (3, 3, 3), None),
    ALLOCATIONS := Step("allocations, frees and captures", ALLOCATING, (0, 0, 0), (0, 0, 0)),
)  # fmt: skip
# The fields that all sequences request, by name, and the most launches outside graphs per step.
FIELDS: dict[str, dict[str, Any]] = {
    "filters": {"top_p": 0.9, "top_k": 50, "min_p": 0.01},
    "penalties": {
        "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2,
        "logit_bias": {7: 1.0}, "min_tokens": 2000,
    },
    "logprobs": {"logprobs": 5},
}  # fmt: skip
FIELDS["all fields"] = FIELDS["filters"] | FIELDS["penalties"] | FIELDS["logprobs"]
FIELD_LAUNCHES = {
    "filters": (4, 4, 4), "penalties": (9, 9, 9), "logprobs": (5, 4, 4),
    "all fields": (11, 11, 11),
}  # fmt: skip
WANTED_FIELD_LAUNCHES = 24
# With FlashInfer (`planned`): each plan, for a forward and for each step of a chain, copies every
# array that it gets to its own buffer.
FLASHINFER_CEILINGS = {
    "copies to the device": (33, 33, 33),
    "bytes to the device": (3_200, 85_100, 191_300),
    "bytes copied on the device": (1_460, 53_300, 128_200),
}
NODES = (
    Nodes("target layer", 9, 12),
    Nodes("target forward", 303, None),
    Nodes("draw behind it", 2, None),
    Nodes("draft layer", 9, 12),
    Nodes("draft forward", 159, None),
    Nodes("chain of four", 487, None),
    Nodes("chain of four, all fields", 510, None),
)
# Host milliseconds per step, without and with fields; only printed, since machines differ.
WANTED_MILLISECONDS, WANTED_OF_FIELDS = (0.4, 1.2, 2.0), (0.8, 2.4, 4.0)
WANTED_START = {"models": None, "engine": 20.0}

Row = tuple[str, float, float | None, float | None]  # name, measured, ceiling, wanted


def rows(found: dict[str, Any]) -> list[Row]:
    """Return the table's rows from the results of `measure`."""
    table: list[Row] = [("violations in captures", len(found["violations"]), 0, 0)]
    for nodes in NODES:
        measured = found["nodes"][nodes.name]
        table.append((f"nodes of a {nodes.name}", measured, nodes.ceiling, nodes.wanted))
    for column, number in enumerate(SEQUENCES):
        there = found["steps"][str(number)]
        for step in STEPS:
            wanted = step.wanted[column] if step.wanted else None
            name = f"{number}: {step.name}"
            table.append((name, there["most"][step.name], step.ceilings[column], wanted))
        for kind, milliseconds in there["milliseconds"].items():
            name = f"{number}: host ms, {kind}"
            table.append((name, milliseconds, None, WANTED_MILLISECONDS[column]))
        table.append((f"{number}: of these, the device without work", there["pause"], None, None))
        for fields in FIELDS:
            table += field_rows(found["fields"][fields][str(number)], fields, column)
        for step in STEPS:
            measured = found["flashinfer"][str(number)]["most"][step.name]
            ceiling = FLASHINFER_CEILINGS.get(step.name, step.ceilings)[column]
            wanted = step.wanted[column] if step.wanted else None
            table.append((f"{number}: flashinfer: {step.name}", measured, ceiling, wanted))
    for part, seconds in found["start"].items():
        table.append((f"start: CPU s, {part}", seconds, None, WANTED_START[part]))
    return table


def field_rows(there: dict[str, Any], fields: str, column: int) -> list[Row]:
    """Return the rows of steps in which all sequences request these fields."""
    start, rows = f"{SEQUENCES[column]}: {fields}: ", list[Row]()
    for step in STEPS:
        ceiling = field_ceiling(step, fields, column)
        if ceiling is not None:
            wanted = (
                WANTED_FIELD_LAUNCHES if step is LAUNCHES else step.wanted and step.wanted[column]
            )
            rows.append((start + step.name, there["most"][step.name], ceiling, wanted))
    least = there["milliseconds"]["least"]
    return [*rows, (start + "host ms, least", least, None, WANTED_OF_FIELDS[column])]


def field_ceiling(step: Step, fields: str, column: int) -> float | None:
    """Return the ceiling, or None if there is none."""
    if step is LAUNCHES:
        return FIELD_LAUNCHES[fields][column]
    return step.ceilings[column] if step in (WAITS, ALLOCATIONS) else None


def lines(found: dict[str, Any]) -> list[str]:
    """Return the table as text; `<` marks a ceiling that can be lowered."""
    heads = f"{'sequences: in a step':44}{'measured':>14}{'ceiling':>14}{'wanted':>12}"
    return [heads, *(_line(*row) for row in rows(found))]


def _line(name: str, measured: float, ceiling: float | None, wanted: float | None) -> str:
    lower = "<" if ceiling is not None and measured < 0.99 * ceiling else ""
    numbers = f"{_text(measured):>14}{lower + _text(ceiling):>14}{_text(wanted):>12}"
    return f"{name:44}{numbers}"


def _text(number: float | None) -> str:
    if number is None:
        return ""
    return f"{number:,.0f}" if number == int(number) else f"{number:,.2f}"


def place_lines(found: dict[str, Any]) -> list[str]:
    """Return the kernels of a layer, and the functions that ask for each thing, as means per step,
    the largest first."""
    text = ["", "kernels of a target layer: times, mangled name"]
    text += [f"{times:8.2f}  {name[:WIDEST]}" for name, times in found["kernels"].items()]
    heads = {f"{number} sequences": there for number, there in found["steps"].items()}
    for number, there in found["fields"]["all fields"].items():
        heads[f"{number} sequences, all fields"] = there
    for head, there in heads.items():
        text += ["", f"{head}: times a step, bytes a step, what, where"]
        for what, where, times, size in there["places"]:
            text.append(f"{times:8.2f} {size:14,.0f}  {what:32} {where}")
    return text

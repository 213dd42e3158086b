"""The settings of a plan and its output: a text card for people, JSON for programs. Bytes are
decimal (GB), as on data sheets."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from engine.lab.plan.roofline import KV_BYTES, Device, Scenario, Served, break_even
from engine.lab.plan.shape import ModelShape

ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)
EXPERT_ROWS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a plan. `launch`: seconds of overhead per layer; `draft_precision` None: the
    target's; the first of `batches` and `contexts` is the point shown in detail."""

    target: ModelShape
    draft: ModelShape | None
    device: Device
    precisions: tuple[str, ...]
    draft_precision: str | None
    kv: str
    launch: float
    acceptance: float
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    k_max: int

    @property
    def models(self) -> list[ModelShape]:
        return [self.target] if self.draft is None else [self.target, self.draft]

    def scenario(self, precision: str, batch: int, context: int) -> Scenario:
        def served(shape: ModelShape, weights: str) -> Served:
            return Served(shape, self.device, weights, KV_BYTES[self.kv], self.launch)

        weights = self.draft_precision or precision
        draft = None if self.draft is None else served(self.draft, weights)
        return Scenario(served(self.target, precision), draft, batch, context)

    def notes(self) -> Iterator[str]:
        """Yield caveats for the reader of the figures."""
        target, draft, context = self.target, self.draft, self.contexts[0]
        for shape in self.models:
            limit = shape.served_positions
            if limit != shape.max_positions:
                yield (
                    f"{shape.name} is served up to {limit} of its {shape.max_positions} positions:"
                    " beyond, its rope depends on the longest text of a step"
                )
            if limit is not None and limit < context:
                yield f"{shape.name} has {limit} positions, not {context}"
        if draft is None:
            yield "without --draft, draft tokens cost nothing (n-gram lookup, predictions)"
        elif draft.active_parameters >= target.active_parameters:
            yield (
                f"the draft {draft.name} uses {draft.active_parameters} weights a token, the target"
                f" {target.name} {target.active_parameters}: a draft should be far smaller"
            )
        if draft is not None and draft.vocab != target.vocab:
            yield (
                f"the vocabularies differ: {target.vocab} rows in {target.name}, {draft.vocab} in "
                f"{draft.name}; a draft works only if all token ids below mean the same"
            )
        if self.kv != "bf16":
            yield f"KV cache in {self.kv}"
        if draft is not None and self.draft_precision:
            yield f"draft weights in {self.draft_precision}"
        if self.launch:
            yield f"{amount(self.launch, 's')} of overhead a layer"

    def as_json(self) -> dict[str, Any]:
        """Return unrounded bytes, seconds, FLOPs and counts; costs in plain target steps."""
        return {
            "settings": asdict(self),
            "notes": list(self.notes()),
            "acceptances": ACCEPTANCES,
            "blocks": [self.block(precision) for precision in self.precisions],
        }

    def block(self, precision: str) -> dict[str, Any]:
        """Return the figures of one precision."""
        point = self.scenario(precision, self.batches[0], self.contexts[0])
        return {
            "precision": precision,
            "weight_bytes": [model.weight_bytes for model in point.models],
            "kv_tokens": point.kv_tokens,
            "target_seconds": point.target_seconds(0),
            "draft_seconds": point.draft_seconds,
            "rounds": [
                {
                    "k": k,
                    "round_cost": point.round_cost(k),
                    "verify_cost": point.verify_cost(k),
                    "break_even": break_even(k, point.round_cost(k)),
                    "speed_ups": [point.speed_up(acceptance, k) for acceptance in ACCEPTANCES],
                }
                for k in range(1, self.k_max + 1)
            ],
            "cells": [
                self._cell(self.scenario(precision, batch, context))
                for batch in self.batches
                for context in self.contexts
            ],
            "experts": list(self._read(precision)),
        }

    def _read(self, precision: str) -> Iterator[dict[str, Any]]:
        """Yield, for a mixture of experts, how many experts of a layer are read by a number of
        rows, and the best K for as many sequences."""
        if (experts := self.target.experts) is None:
            return
        for rows in EXPERT_ROWS:
            point = self.scenario(precision, rows, self.contexts[0])
            k, _ = point.best(self.acceptance, self.k_max)
            yield {"rows": rows, "read": experts.touched(rows), "best_k": k}

    def _cell(self, cell: Scenario) -> dict[str, Any]:
        k, speed_up = cell.best(self.acceptance, self.k_max)
        return {
            "batch": cell.batch, "context": cell.context, "best_k": k, "speed_up": speed_up,
            "fits": cell.fits, "within_positions": cell.within_positions,
        }  # fmt: skip


SHOWN_KS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)

LEGEND = """
c: a draft step; round, verify: a round with K draft tokens and its target pass; all in steps of
K = 0. break-even: the least acceptance at which K pays. a=...: speed-up at that acceptance.
On paper:
- a part of a pass (dense, experts, head, attention) takes max(bytes/bandwidth, FLOPs/peak)
- the parts of a pass add up, and nothing else takes time: real steps are slower
- a round is K draft steps and a target pass over K + 1 rows, which reads a sequence's KV once
- draft tokens are accepted independently, with the same chance
- quantized weights are multiplied in bf16; embeddings and head have 16 bits
- tokens choose experts independently and evenly; devices share evenly, communication is free
- memory is counted for weights and KV alone"""


def card(settings: Settings) -> str:
    """Return the text card, about one screen per precision."""
    draft = settings.draft.name if settings.draft else "free draft tokens"
    lines = [f"{settings.target.name} with {draft} on {device_line(settings.device)}"]
    lines += map(model_line, settings.models)
    lines += [f"note: {note}" for note in settings.notes()]
    for precision in settings.precisions:
        lines += ["", *_block(settings, settings.block(precision))]
    return "\n".join([*lines, LEGEND])


def device_line(device: Device) -> str:
    """Return a line like `4 x h100-sxm: 13.4 TB/s, 3.96 PFLOP/s, 320 GB`."""
    rate, flops = amount(device.bandwidth, "B/s"), amount(device.bf16_flops, "FLOP/s")
    memory = f", {amount(device.memory)}" if device.memory is not None else ""
    return f"{device.count} x {device.name}: {rate}, {flops}{memory}"


def model_line(shape: ModelShape) -> str:
    experts = ""
    if shape.experts is not None:
        experts = (
            f", {amount(shape.active_parameters, '')} of them for a token "
            f"({shape.experts.per_token} of {shape.experts.count} experts)"
        )
    return (
        f"{shape.name}: {amount(shape.parameters, '')} weights{experts}, {shape.layers} layers, "
        f"{shape.kv_values_per_token} KV values per token"
    )


def amount(count: float, unit: str = "B") -> str:
    """Format with three significant digits: `141 GB`, `30.7 kB`, `10.6 ms`, `185 us`."""
    sizes = {"P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}
    prefix = next((prefix for prefix, size in sizes.items() if count >= size), "u")
    return f"{count / sizes[prefix]:.3g} {prefix}{unit}"


def _block(settings: Settings, block: dict[str, Any]) -> Iterator[str]:
    target, draft = block["target_seconds"], block["draft_seconds"]
    batch, context = settings.batches[0], settings.contexts[0]
    sizes = " + ".join(map(amount, block["weight_bytes"]))
    yield f"{block['precision']}: weights {sizes}{_room(settings.device, block)}"
    if block["kv_tokens"] == 0:
        return
    yield (
        f"a step at batch {batch}, context {context}: target {amount(target, 's')}, "
        f"draft {amount(draft, 's')}, c = {draft / target:.3f}; "
        f"K = 0 gives {batch / target:.4g} tokens/s"
    )
    speeds = " ".join(f"a={acceptance:.1f}".rjust(6) for acceptance in ACCEPTANCES)
    yield f"   K  round  verify  break-even  {speeds}"
    for row in (row for row in block["rounds"] if row["k"] in SHOWN_KS):
        least = "never" if row["break_even"] is None else f"{row['break_even']:.3f}"
        speeds = " ".join(f"{speed_up:5.2f}x" for speed_up in row["speed_ups"])
        yield f"{row['k']:4}{row['round_cost']:7.2f}{row['verify_cost']:8.2f}{least:>12}  {speeds}"
    if block["experts"]:
        yield from _experts(settings, block["experts"])
    yield f"best K and speed-up at acceptance {settings.acceptance:g}, by batch and context"
    heads = (f"{c // 1024}k" if c % 1024 == 0 else str(c) for c in settings.contexts)
    yield " batch" + "".join(head.rjust(13) for head in heads)
    cells = (_cell(cell).rjust(13) for cell in block["cells"])
    for batch in settings.batches:
        yield f"{batch:6}" + "".join(islice(cells, len(settings.contexts)))


def _experts(settings: Settings, found: list[dict[str, Any]]) -> Iterator[str]:
    experts = settings.target.experts
    assert experts is not None
    yield f"experts of a layer, {experts.count}, read by rows, and the best K of as many sequences"
    for label, name, form in (("rows", "rows", "d"), ("read", "read", ".1f"), ("K", "best_k", "d")):
        yield f"{label:>6}" + "".join(f"{each[name]:8{form}}" for each in found)


def _room(device: Device, block: dict[str, Any]) -> str:
    tokens = block["kv_tokens"]
    if tokens is None or device.memory is None:
        return ""
    if tokens:
        return f"; the remaining memory holds the KV cache of {tokens} tokens"
    least = math.ceil(sum(block["weight_bytes"]) / device.memory * device.count)
    return f"; they do not fit {amount(device.memory)}: --devices {least} or more"


def _cell(cell: dict[str, Any]) -> str:
    if not cell["within_positions"]:
        return "too long"
    return "KV too large" if cell["fits"] is False else f"{cell['best_k']} {cell['speed_up']:5.2f}x"

"""Outcome: everything that the card, the JSON file and the plot show, computed once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from engine.lab.plan.roofline import KV_BYTES, Device, Scenario, Served, break_even
from engine.lab.plan.shape import ModelShape

ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True, slots=True)
class Settings:
    """What was asked. `launch`: seconds of overhead a layer; `draft_precision` None: the
    target's; `batches` and `contexts` begin with the point that is shown in detail."""

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
        target, *draft = (
            Served(shape, self.device, weights, KV_BYTES[self.kv], self.launch)
            for shape, weights in zip(
                self.models, (precision, self.draft_precision or precision), strict=False
            )
        )
        return Scenario(target, draft[0] if draft else None, batch, context)


@dataclass(frozen=True, slots=True)
class Round:
    """K guesses at the detailed point. Costs in plain target steps; `break_even` None: never."""

    k: int
    round_cost: float
    verify_cost: float
    break_even: float | None
    speed_ups: tuple[float, ...]  # at ACCEPTANCES


@dataclass(frozen=True, slots=True)
class Cell:
    """The best K at one batch and context. `fits` None: the memory is not known;
    `within_positions`: both models are served up to this length."""

    batch: int
    context: int
    best_k: int
    speed_up: float
    fits: bool | None
    within_positions: bool


@dataclass(frozen=True, slots=True)
class Block:
    """One precision of the weights. Seconds are of a pass over one token per sequence, at the
    detailed point; `kv_tokens`: tokens whose keys and values fit beside the weights."""

    precision: str
    target_bytes: float
    draft_bytes: float
    kv_tokens: int | None
    target_seconds: float
    draft_seconds: float
    rounds: tuple[Round, ...]
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    settings: Settings
    notes: tuple[str, ...]
    blocks: tuple[Block, ...]

    def as_json(self) -> dict[str, Any]:
        """Bytes, seconds, FLOPs and counts, unrounded."""
        content = {"acceptances": ACCEPTANCES, **asdict(self)}
        for role, shape in zip(("target", "draft"), self.settings.models, strict=False):
            content["settings"][role] = {
                name: getattr(shape, name)
                for name in ("name", "layers", "parameters", "active_parameters", "vocab",
                             "kv_values_per_token", "max_positions", "served_positions")
            }  # fmt: skip
        return content


def work_out(settings: Settings) -> Outcome:
    """The whole plan."""
    blocks = tuple(_block(settings, precision) for precision in settings.precisions)
    return Outcome(settings, tuple(_notes(settings)), blocks)


def _block(settings: Settings, precision: str) -> Block:
    point = settings.scenario(precision, settings.batches[0], settings.contexts[0])
    memory, kv_tokens = settings.device.memory, None
    if memory is not None:
        per_token = sum(model.kv_bytes_per_token for model in point.models)
        kv_tokens = max(0, int((memory - point.weight_bytes) / per_token))
    return Block(
        precision=precision,
        target_bytes=point.target.weight_bytes,
        draft_bytes=point.weight_bytes - point.target.weight_bytes,
        kv_tokens=kv_tokens,
        target_seconds=point.target_seconds(0),
        draft_seconds=point.draft_seconds,
        rounds=tuple(_round(point, k) for k in range(1, settings.k_max + 1)),
        cells=tuple(
            _cell(settings, settings.scenario(precision, batch, context))
            for batch in settings.batches
            for context in settings.contexts
        ),
    )


def _round(point: Scenario, k: int) -> Round:
    cost = point.round_cost(k)
    speeds = tuple(point.speed_up(acceptance, k) for acceptance in ACCEPTANCES)
    return Round(k, cost, point.verify_cost(k), break_even(k, cost), speeds)


def _cell(settings: Settings, point: Scenario) -> Cell:
    k, speed = point.best(settings.acceptance, settings.k_max)
    limits = [shape.served_positions for shape in settings.models]
    within = all(limit is None or point.context <= limit for limit in limits)
    return Cell(point.batch, point.context, k, speed, point.fits, within)


def _notes(settings: Settings) -> Iterator[str]:
    """What the reader should know before believing the figures."""
    target, draft, context = settings.target, settings.draft, settings.contexts[0]
    for shape in settings.models:
        limit = shape.served_positions
        if limit != shape.max_positions:
            yield (
                f"{shape.name} is served up to {limit} of its {shape.max_positions} positions:"
                " beyond, its rope depends on the longest text of a step"
            )
        if limit is not None and limit < context:
            yield f"{shape.name} has {limit} positions, not {context}"
    if draft is None:
        yield "without --draft, guesses cost nothing (n-gram lookup, predictions)"
        return
    if draft.active_parameters >= target.active_parameters:
        yield (
            f"the draft {draft.name} uses {draft.active_parameters} weights a token, the target "
            f"{target.name} {target.active_parameters}: a draft should be far smaller"
        )
    if draft.vocab != target.vocab:
        yield (
            f"the vocabularies differ: {target.vocab} rows in {target.name}, {draft.vocab} in "
            f"{draft.name}; a draft works only if all token ids below mean the same"
        )

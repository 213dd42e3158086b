"""Outcome: everything that the card, the JSON file and the plot show, computed once."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from engine.lab.plan.device import Device
from engine.lab.plan.numerics import KV_BYTES, PRECISIONS
from engine.lab.plan.roofline import Served
from engine.lab.plan.scenario import Scenario
from engine.lab.plan.shape import ModelShape

ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)

ASSUMPTIONS = (
    "a part of a pass (dense, experts, head, attention) takes max(bytes/bandwidth, FLOPs/peak)",
    "the parts of a pass add up, and nothing else takes time: real steps are slower",
    "a round is K draft steps and a target pass over K + 1 rows, which reads a sequence's KV once",
    "guesses are kept independently, with the same chance",
    "int4 is multiplied in bf16, fp8 in fp8 where the device can; embeddings and head have 16 bits",
    "tokens choose experts independently and evenly; devices share evenly, communication is free",
    "memory is counted for weights and KV alone",
)


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

    def scenario(self, precision: str, *, batch: int, context: int) -> Scenario:
        def served(shape: ModelShape, weights: str) -> Served:
            return Served(shape, self.device, PRECISIONS[weights], KV_BYTES[self.kv], self.launch)

        draft = None
        if self.draft is not None:
            draft = served(self.draft, self.draft_precision or precision)
        return Scenario(served(self.target, precision), draft, batch, context)


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
    `within_positions`: both models reach this far."""

    batch: int
    context: int
    best_k: int
    speed_up: float
    draft_cost: float
    plain_tokens_per_second: float
    kv_bytes: float
    fits: bool | None
    within_positions: bool


@dataclass(frozen=True, slots=True)
class Block:
    """One precision of the weights. Seconds are of a pass over one token per sequence."""

    precision: str
    target_bytes: float
    draft_bytes: float
    kv_tokens: int | None  # tokens whose keys and values fit beside the weights
    target_seconds: float
    draft_seconds: float
    draft_cost: float
    rounds: tuple[Round, ...]
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    settings: Settings
    notes: tuple[str, ...]
    blocks: tuple[Block, ...]

    def as_json(self) -> dict[str, Any]:
        """Bytes, seconds, FLOPs and counts, unrounded."""
        content = asdict(self)
        for role in ("target", "draft"):
            shape = getattr(self.settings, role)
            if shape is not None:
                content["settings"][role] = facts(shape)
        return {"assumptions": ASSUMPTIONS, "acceptances": ACCEPTANCES, **content}


def facts(shape: ModelShape) -> dict[str, Any]:
    """What a person wants to check about a model that was read."""
    return {
        "name": shape.name,
        "layers": shape.layers,
        "parameters": shape.parameters,
        "active_parameters": shape.active_parameters,
        "kv_values_per_token": shape.kv_values_per_token,
        "vocab": shape.vocab,
        "experts": None if shape.experts is None else asdict(shape.experts),
        "max_positions": shape.max_positions,
    }


def work_out(settings: Settings) -> Outcome:
    """The whole plan."""
    blocks = tuple(_block(settings, precision) for precision in settings.precisions)
    return Outcome(settings, tuple(_notes(settings)), blocks)


def _block(settings: Settings, precision: str) -> Block:
    point = settings.scenario(precision, batch=settings.batches[0], context=settings.contexts[0])
    return Block(
        precision=precision,
        target_bytes=point.target.weight_bytes,
        draft_bytes=point.draft.weight_bytes if point.draft else 0.0,
        kv_tokens=_kv_tokens(point),
        target_seconds=point.target_seconds(0),
        draft_seconds=point.draft_seconds,
        draft_cost=point.draft_cost,
        rounds=tuple(_round(point, k) for k in range(1, settings.k_max + 1)),
        cells=tuple(
            _cell(settings, settings.scenario(precision, batch=batch, context=context))
            for batch in settings.batches
            for context in settings.contexts
        ),
    )


def _kv_tokens(point: Scenario) -> int | None:
    memory = point.target.device.memory
    if memory is None:
        return None
    per_token = sum(model.kv_bytes_per_token for model in point.models)
    return max(0, int((memory - point.weight_bytes) / per_token))


def _round(point: Scenario, k: int) -> Round:
    return Round(
        k=k,
        round_cost=point.round_cost(k),
        verify_cost=point.target_seconds(k) / point.target_seconds(0),
        break_even=point.break_even(k),
        speed_ups=tuple(point.speed_up(acceptance, k) for acceptance in ACCEPTANCES),
    )


def _cell(settings: Settings, point: Scenario) -> Cell:
    k, speed = point.best(settings.acceptance, settings.k_max)
    return Cell(
        batch=point.batch,
        context=point.context,
        best_k=k,
        speed_up=speed,
        draft_cost=point.draft_cost,
        plain_tokens_per_second=point.batch / point.target_seconds(0),
        kv_bytes=point.cache_bytes,
        fits=point.fits,
        within_positions=all(
            model.shape.max_positions is None or point.context <= model.shape.max_positions
            for model in point.models
        ),
    )


def _notes(settings: Settings) -> list[str]:
    """What the reader should know before believing the figures."""
    target, draft, said = settings.target, settings.draft, []
    context = settings.contexts[0]
    for shape in (target, draft):
        if shape and shape.max_positions is not None and shape.max_positions < context:
            said.append(f"{shape.name} has {shape.max_positions} positions, not {context}")
    if draft is None:
        said.append("without --draft, guesses cost nothing (n-gram lookup, predictions)")
        return said
    if draft.active_parameters >= target.active_parameters:
        said.append(
            f"the draft {draft.name} uses {draft.active_parameters} weights a token, the target "
            f"{target.name} {target.active_parameters}: a draft should be far smaller"
        )
    if draft.vocab != target.vocab:
        said.append(
            f"the vocabularies differ: {target.vocab} rows in {target.name}, {draft.vocab} in "
            f"{draft.name}; a draft works only if all token ids below mean the same"
        )
    return said

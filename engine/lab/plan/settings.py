"""Settings: what was asked, the scenarios that it means, and their figures for programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from engine.lab.plan.roofline import KV_BYTES, Device, Scenario, Served, break_even
from engine.lab.plan.shape import ModelShape

ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)
_SHAPE = (
    "name", "layers", "parameters", "active_parameters", "vocab", "kv_values_per_token",
    "max_positions", "served_positions",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Settings:
    """`launch`: seconds of overhead a layer; `draft_precision` None: the target's; `batches` and
    `contexts` begin with the point that is shown in detail."""

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

    def point(self, precision: str) -> Scenario:
        """What is shown in detail."""
        return self.scenario(precision, self.batches[0], self.contexts[0])

    def scenario(self, precision: str, batch: int, context: int) -> Scenario:
        def served(shape: ModelShape, weights: str) -> Served:
            return Served(shape, self.device, weights, KV_BYTES[self.kv], self.launch)

        weights = self.draft_precision or precision
        draft = None if self.draft is None else served(self.draft, weights)
        return Scenario(served(self.target, precision), draft, batch, context)

    def notes(self) -> Iterator[str]:
        """What the reader should know before believing the figures."""
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
            yield "without --draft, guesses cost nothing (n-gram lookup, predictions)"
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

    def as_json(self) -> dict[str, Any]:
        """Bytes, seconds, FLOPs and counts, unrounded; costs in plain target steps."""
        models = {
            role: {key: getattr(shape, key) for key in _SHAPE}
            for role, shape in zip(("target", "draft"), self.models, strict=False)
        }
        return {
            "settings": asdict(self) | models,
            "notes": list(self.notes()),
            "acceptances": ACCEPTANCES,
            "blocks": [self._block(precision) for precision in self.precisions],
        }

    def _block(self, precision: str) -> dict[str, Any]:
        point = self.point(precision)
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
        }

    def _cell(self, cell: Scenario) -> dict[str, Any]:
        k, speed_up = cell.best(self.acceptance, self.k_max)
        return {
            "batch": cell.batch, "context": cell.context, "best_k": k, "speed_up": speed_up,
            "fits": cell.fits, "within_positions": cell.within_positions,
        }  # fmt: skip

"""Policies by name: the controller, and the controller with one refinement removed.

Variants are never served. Each overrides a few lines of the controller, so that it follows changes
of the controller; `foredraft replay --ablate` measures the gain of each refinement.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from engine.control.acceptance import Confidences
from engine.control.adaptive import AdaptiveK
from engine.control.controller import KController
from engine.scheduling.step_record import StepRecord

WHOLE, STOP = "adaptive", "no confidence stop"
_USUAL = 1.5  # a constant confidence, which carries no information

Build = Callable[..., KController]  # takes k_max, and `stops`: it is asked between draft steps


class _NoConfidences(AdaptiveK):
    """Judges draft tokens by depth alone, and verifies all of them."""

    def keeps_drafting(self, confidences: Confidences) -> bool:
        return super().keeps_drafting([[_USUAL] * len(sure) for sure in confidences])

    def kept_counts(self, confidences: Confidences) -> list[int]:
        return [len(sure) for sure in confidences]

    def update(self, record: StepRecord) -> None:
        hindsight = [
            replace(found, compared=[(_USUAL, hit) for hit in found.hits])
            for found in record.hindsight
        ]
        parts = [replace(part, confidences=[]) for part in record.parts]
        super().update(replace(record, parts=parts, hindsight=hindsight))


class _KeepAll(AdaptiveK):
    """Verifies all draft tokens."""

    def kept_counts(self, confidences: Confidences) -> list[int]:
        super().kept_counts(confidences)  # records the confidences
        return [len(sure) for sure in confidences]


class _NoHindsight(AdaptiveK):
    """Learns from proposed draft tokens only, not from those found out in catch-up rows."""

    def update(self, record: StepRecord) -> None:
        super().update(replace(record, hindsight=()))


def _without(part: Callable[[AdaptiveK], object], **answers: object) -> Build:
    """Return a builder of controllers in which these methods of a part return fixed answers."""

    def build(k_max: int, *, stops: bool = True) -> KController:
        controller = AdaptiveK(k_max, stops=stops)
        for method, answer in answers.items():
            setattr(part(controller), method, lambda *_, _answer=answer, **__: _answer)
        return controller

    return build


VARIANTS: Mapping[str, Build] = {
    WHOLE: AdaptiveK,
    STOP: lambda k_max, *, stops=True: AdaptiveK(k_max, stops=False),
    "no confidences": _NoConfidences,
    "verify all draft tokens": _KeepAll,
    "no change test": _without(lambda own: own._proposals.acceptance.change_detector, add=False),
    "no hindsight": _NoHindsight,
    "profile only": _without(lambda whole: whole.costs, learn=None),
    "no exploration": _without(lambda whole: whole._explore, while_off="usual", while_on="usual"),
}

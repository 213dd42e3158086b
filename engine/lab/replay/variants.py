"""Policies by name: the controller, and the controller with one refinement taken out.

No variant serves anybody. Each is the controller but for a few lines, so that it changes along;
`engine.lab.replay.ablate` says what the refinement is worth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from engine.control.acceptance import Confidences
from engine.control.adaptive import AdaptiveK
from engine.control.controller import KController
from engine.control.exploration import Exploration, Round
from engine.scheduling.step_record import StepRecord

WHOLE, STOP = "adaptive", "no confidence stop"
_USUAL = 1.5  # a confidence that says nothing: all are the same

Build = Callable[..., KController]  # of k_max, and `stops`: it is asked between draft steps


class _NoConfidences(AdaptiveK):
    """Knows guesses by their depth alone, so that it verifies all that were made."""

    def goes_on(self, confidences: Confidences) -> bool:
        return super().goes_on([[_USUAL] * len(sure) for sure in confidences])

    def keep(self, confidences: Confidences) -> list[int]:
        return [len(sure) for sure in confidences]

    def update(self, record: StepRecord) -> None:
        hindsight = [
            replace(found, guesses=[(_USUAL, hit) for hit in found.hits])
            for found in record.hindsight
        ]
        parts = [replace(part, confidences=[]) for part in record.parts]
        super().update(replace(record, parts=parts, hindsight=hindsight))


class _Uniform(AdaptiveK):
    """As many rows as it would verify, but the same number for every sequence."""

    def keep(self, confidences: Confidences) -> list[int]:
        kept = super().keep(confidences)
        each = round(sum(kept) / len(kept))
        return [min(each, len(sure)) for sure in confidences]


class _KeepAll(AdaptiveK):
    """Verifies every guess that was made."""

    def keep(self, confidences: Confidences) -> list[int]:
        super().keep(confidences)  # which remembers them
        return [len(sure) for sure in confidences]


class _NoHindsight(AdaptiveK):
    """Learns from guesses that were offered, not from those it would have made."""

    def update(self, record: StepRecord) -> None:
        super().update(replace(record, hindsight=()))


class _OnlyProbes(Exploration):
    """Asks a few while K is 0, but plays no K that is not believed to pay."""

    def while_off(self, seconds: float, **said: Any) -> Round:
        found = super().while_off(seconds, **said)
        self._left = 0
        self.round = "probe" if found == "trial" else found
        return self.round

    def while_on(self, seconds: float, *, gain: float) -> Round:
        return "usual"


def _only_probes(k_max: int, *, stops: bool = True) -> KController:
    controller = AdaptiveK(k_max, stops=stops)
    controller._explore = _OnlyProbes()
    return controller


def _without(part: Callable[[AdaptiveK], object], **answers: object) -> Build:
    """A controller in which these methods of a part always answer so."""

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
    "same rows for each": _Uniform,
    "verify all guesses": _KeepAll,
    "no change test": _without(lambda whole: whole._guesses.acceptance.surprise, add=False),
    "no hindsight": _NoHindsight,
    "profile only": _without(lambda whole: whole._costs, learn=None),
    "no exploration": _without(lambda whole: whole._explore, while_off="usual", while_on="usual"),
    "only probes": _only_probes,
}

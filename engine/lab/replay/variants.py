"""AdaptiveK with one refinement taken out each, to be judged on traces (`replay.ablate`).

None of them serves anybody. Each is the controller but for a few lines, so that it changes along.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from msgspec.structs import replace

from engine.control.acceptance import Confidences, Surprise
from engine.control.adaptive import AdaptiveK
from engine.control.controller import KController, Load
from engine.control.cost_model import CostModel
from engine.control.exploration import Exploration, Round
from engine.control.goodput import Goodput
from engine.scheduling.step_record import StepRecord

_USUAL = 1.5  # a confidence that says nothing: all are the same


class NoStop(AdaptiveK):
    """Drafts as many steps as were chosen beforehand, whatever the confidences are."""

    def __init__(self, k_max: int, *, stops: bool = True) -> None:
        super().__init__(k_max, stops=False)


class NoConfidences(AdaptiveK):
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


class Uniform(AdaptiveK):
    """As many rows as it would verify, but the same number for every sequence."""

    def keep(self, confidences: Confidences) -> list[int]:
        kept = super().keep(confidences)
        each = round(sum(kept) / len(kept))
        return [min(each, len(sure)) for sure in confidences]


class KeepAll(AdaptiveK):
    """Verifies every guess that was made."""

    def keep(self, confidences: Confidences) -> list[int]:
        super().keep(confidences)  # which remembers them
        return [len(sure) for sure in confidences]


class NoChangeTest(AdaptiveK):
    """The past fades, and never all at once."""

    def __init__(self, k_max: int, *, stops: bool = True) -> None:
        super().__init__(k_max, stops=stops)
        self._guesses.acceptance.surprise = _NoSurprise()


class NoHindsight(AdaptiveK):
    """Learns from guesses that were offered, not from those it would have made."""

    def update(self, record: StepRecord) -> None:
        super().update(replace(record, hindsight=()))


class _OtherCosts(AdaptiveK):
    def __init__(self, k_max: int, costs: CostModel, *, stops: bool) -> None:
        super().__init__(k_max, stops=stops)
        self._costs = costs
        self._goodput = Goodput(k_max, self._guesses, costs)


class ProfileOnly(_OtherCosts):
    """Costs are those of the start-up profile."""

    def __init__(self, k_max: int, *, stops: bool = True) -> None:
        super().__init__(k_max, _Profiled(), stops=stops)


class NoExploration(AdaptiveK):
    """Tries nothing that is not believed to pay."""

    def __init__(self, k_max: int, *, stops: bool = True) -> None:
        super().__init__(k_max, stops=stops)
        self._explore = _Never()


class OnlyProbes(AdaptiveK):
    """Asks a few while K is 0, but plays no K that is not believed to pay."""

    def __init__(self, k_max: int, *, stops: bool = True) -> None:
        super().__init__(k_max, stops=stops)
        self._explore = _Probes()


class EveryStep(AdaptiveK):
    """Learns from every step, however short."""

    def choose(self, load: Load) -> int:
        self._every = 1
        return super().choose(load)


class _NoSurprise(Surprise):
    def add(self, found: float, expected: float, variance: float, outcomes: int) -> bool:
        return False


class _Never(Exploration):
    def while_off(self, seconds: float, *, alone: bool, promise: float = 1.0) -> Round:
        return "usual"

    def while_on(self, seconds: float, *, gain: float) -> Round:
        return "usual"


class _Probes(Exploration):
    def while_off(self, seconds: float, *, alone: bool, promise: float = 1.0) -> Round:
        found = super().while_off(seconds, alone=alone, promise=promise)
        self._left = 0
        self.round = "probe" if found == "trial" else found
        return self.round

    def while_on(self, seconds: float, *, gain: float) -> Round:
        return "usual"


class _Profiled(CostModel):
    def learn(self, seen: StepRecord, *, caught_up: bool) -> None:
        pass


WHOLE = "the whole controller"
STOP = "no confidence stop"
VARIANTS: Mapping[str, Callable[..., KController]] = MappingProxyType(
    {
        WHOLE: AdaptiveK,
        STOP: NoStop,
        "no confidences": NoConfidences,
        "same rows for each": Uniform,
        "verify all guesses": KeepAll,
        "no change test": NoChangeTest,
        "no hindsight": NoHindsight,
        "profile only": ProfileOnly,
        "no exploration": NoExploration,
        "only probes": OnlyProbes,
        "learn from every step": EveryStep,
    }
)

"""AdaptiveK with one refinement taken out each, to be judged on traces (`replay.ablate`).

None of them serves anybody. Each is the controller but for a few lines, so that it changes along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from engine.control.adaptive import AdaptiveK
from engine.control.confidence import Array
from engine.control.controller import Confidences, KController, Load, Overheard, StepObservation
from engine.control.exploration import Exploration, Round, Slow
from engine.control.forecast import Forecast
from engine.control.observation_schedule import ObservationSchedule
from engine.control.pending_observations import PendingObservations
from engine.control.step_costs import StepCosts

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

    def update(self, observation: StepObservation) -> None:
        agreed = [[(_USUAL, hit) for _, hit in found] for found in observation.agreements]
        super().update(replace(observation, confidences=(), agreements=agreed))


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
        self._guesses.acceptance.changes_matter = False


class NoHindsight(AdaptiveK):
    """Learns from guesses that were offered, not from those it would have made."""

    def update(self, observation: StepObservation) -> None:
        super().update(replace(observation, agreements=()))


class _OtherCosts(AdaptiveK):
    def __init__(self, k_max: int, costs: StepCosts, *, stops: bool) -> None:
        super().__init__(k_max, stops=stops)
        self._costs = costs
        self._ahead = Forecast(k_max, self._guesses, costs)
        self._lessons = PendingObservations(self._guesses, costs, stops=stops)


class ProfileOnly(_OtherCosts):
    """Costs are those of the start-up profile."""

    def __init__(self, k_max: int, *, stops: bool = True) -> None:
        super().__init__(k_max, _Profiled(), stops=stops)


class NoExploration(AdaptiveK):
    """Tries nothing that is not believed to pay."""

    def __init__(self, k_max: int, *, stops: bool = True) -> None:
        super().__init__(k_max, stops=stops)
        self._explore = _Never()
        self._hearing = ObservationSchedule(self._spells, self._explore, stops=stops)


class OnlyProbes(AdaptiveK):
    """Asks a few while K is 0, but plays no K that is not believed to pay."""

    def __init__(self, k_max: int, *, stops: bool = True) -> None:
        super().__init__(k_max, stops=stops)
        self._explore = _Probes()
        self._hearing = ObservationSchedule(self._spells, self._explore, stops=stops)


class NoOptimism(_OtherCosts):
    """Sizes that were hardly seen cost what is expected of them."""

    def __init__(self, k_max: int, *, stops: bool = True) -> None:
        super().__init__(k_max, _Sober(), stops=stops)


class EveryRound(AdaptiveK):
    """Chooses in every round and observes each step."""

    def __init__(self, k_max: int, *, stops: bool = True) -> None:
        super().__init__(k_max, stops=stops)
        self._hearing = _HearsAll(self._spells, self._explore, stops=stops)

    def _rest(self, k: int) -> None:
        self._drafted = self._drafted and k > 0
        self._now = None if k else 0
        self._rests.begin(k, 0)


class FullObservationsOnly(AdaptiveK):
    """Learns nothing from steps of which only a short observation is kept."""

    def choose(self, load: Load) -> int:
        k = super().choose(load)
        self.overhears = False
        return k

    def worth(self, survival: Sequence[float], *, instead: bool) -> int:
        most = super().worth(survival, instead=instead)
        self.overhears = False
        return most


class NoLongBaselines(AdaptiveK):
    """K = 0 costs what short baselines say."""

    def __init__(self, k_max: int, *, stops: bool = True) -> None:
        super().__init__(k_max, stops=stops)
        self._explore = _ShortBaselines()
        self._hearing = ObservationSchedule(self._spells, self._explore, stops=stops)


class NoStretches(_OtherCosts):
    """Contexts of all lengths are one class of costs."""

    def __init__(self, k_max: int, *, stops: bool = True) -> None:
        super().__init__(k_max, _OneStretch(), stops=stops)


class NoNeighbours(AdaptiveK):
    """Plays no K one off."""

    def __init__(self, k_max: int, *, stops: bool = True) -> None:
        super().__init__(k_max, stops=stops)
        self._explore = _NoNeighbours()
        self._hearing = ObservationSchedule(self._spells, self._explore, stops=stops)


class _HearsAll(ObservationSchedule):
    def wants(self, sequences: int) -> bool:
        return True


class _ShortBaselines(Exploration):
    def while_on(
        self, seconds: float, *, gain: float, varies: bool, slow: Slow = (1.0, 1.0)
    ) -> Round:
        return super().while_on(seconds, gain=gain, varies=varies)


class _NoNeighbours(Exploration):
    def while_on(
        self, seconds: float, *, gain: float, varies: bool, slow: Slow = (1.0, 1.0)
    ) -> Round:
        return super().while_on(seconds, gain=gain, varies=True, slow=slow)


class _OneStretch(StepCosts):
    def stretch(self, sequences: int, held: int) -> int:
        return 0


class _Never(Exploration):
    def while_off(self, seconds: float, *, alone: bool, promise: float = 1.0) -> Round:
        return "usual"

    def while_on(
        self, seconds: float, *, gain: float, varies: bool, slow: Slow = (1.0, 1.0)
    ) -> Round:
        return "usual"


class _Probes(Exploration):
    def while_off(self, seconds: float, *, alone: bool, promise: float = 1.0) -> Round:
        found = super().while_off(seconds, alone=alone, promise=promise)
        self._left = 0
        self.round = "probe" if found == "trial" else found
        return self.round

    def while_on(
        self, seconds: float, *, gain: float, varies: bool, slow: Slow = (1.0, 1.0)
    ) -> Round:
        return "usual"


class _Profiled(StepCosts):
    def learn(
        self, seen: StepObservation, *, fresh: bool, rounds: float = 1, cold: bool = False
    ) -> None:
        self.reach(seen)

    def overhear(self, heard: Iterable[Overheard], rounds: float) -> None:
        pass


class _Sober(StepCosts):
    def by_rows(self, sequences: int, most: int) -> tuple[Array, Array]:
        seconds, _ = super().by_rows(sequences, most)
        return seconds, seconds


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
        "no optimism": NoOptimism,
        "every round": EveryRound,
        "full observations only": FullObservationsOnly,
        "no long baselines": NoLongBaselines,
        "no classes of context": NoStretches,
        "no neighbours": NoNeighbours,
    }
)

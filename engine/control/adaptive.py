"""AdaptiveK: the K, and of each proposal the length, with the most expected tokens per second.

It multiplies two estimates: how many guesses will be kept (a survival model of the first mismatch,
sharpened by how sure the proposer is of each) and what a step of a given size costs (a start-up
profile, corrected online). Everything is bought at one price, the tokens per second that the
present batch makes: a draft step, a row of the target, K = 0 instead of either (Dinkelbach's rule
for a ratio; goodput as the goal: TurboSpec, arXiv:2406.14066). What a proposal is worth once its
confidences are known is judged on a sample of the last ones.

K = 0 is an ordinary answer; while there, probes keep the estimates alive: the drafter catches up
with what it missed, and each position says whether it would have been right.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.control.chances import FEW
from engine.control.controller import Confidences, Load, Overheard, StepObservation
from engine.control.draft_stop import DraftStop
from engine.control.dwell_time import DwellTime
from engine.control.experience import Experience
from engine.control.exploration import Exploration
from engine.control.forecast import Forecast, Pace
from engine.control.hysteresis import best_above, best_now, best_of
from engine.control.observation_schedule import ObservationSchedule
from engine.control.pending_observations import PendingObservation, PendingObservations
from engine.control.profile import Profile
from engine.control.skipped_rounds import SkippedRounds
from engine.control.step_costs import StepCosts
from engine.messages import Estimates, Reason

_MORE = 3  # rounds with a neighbour after the first, to overhear
_REST, _REST_OLD = 23, 47  # rounds between two that are looked at, at K = 0; when that is old
_NEAR = 8  # and at least, however near contexts are to another class: they may stay there for long
_PROBE_SEQUENCES = 4  # of the batch, and a quarter of it, at most
_DOUBT = 16.0  # trials that the past may weigh against a probe
_TOGETHER = 4  # rounds that are learnt from at once
_CUTS = 0.02  # gain in tokens per second below which leaving guesses out is not worth its own time


class AdaptiveK:
    """It chooses anew now and then, and when the batch changes by a power of two. Costs are learnt
    from steps of decoding, acceptance from all. While K = 0 is settled it hardly listens. Under 100
    microseconds a step at a batch of 32 (`engine.lab.simulate` prints them)."""

    name = "adaptive"

    def __init__(self, k_max: int, *, stops: bool = True) -> None:
        """`k_max`: at least 1; where K is always 0, that is FixedK's. `stops`: whether the drafter
        asks `goes_on`."""
        if k_max < 1:
            raise ValueError(f"there is nothing to choose up to K = {k_max}")
        self.k_max = k_max
        self._stops = stops
        self.reason: Reason = "off"
        self.listens = self.looks_back = True
        self.overhears = False
        self._guesses = Experience(k_max)
        self._costs = StepCosts()
        self._explore = Exploration()
        self._ahead = Forecast(k_max, self._guesses, self._costs)
        self._asks_few = False  # in a probe: each has to catch up with what it missed
        self._drafted = True  # whether the last round proposed for all: the next has no backlog
        self._k = 0
        self._before: int | None = None  # guesses drafted in the last round, if that is known
        self._now: int | None = None  # and in this one
        self._sequences, self._size = 1, -1  # of the last choice; and its power of two
        self._stretch = 0  # of the last choice, see StepCosts.stretch
        self._stretches = set[tuple[int, int]]()  # that were seen, each with the size
        self._anew = False  # choose at once
        self._rests = SkippedRounds()
        self._spells = DwellTime()
        self._hearing = ObservationSchedule(self._spells, self._explore, stops=stops)
        self._lessons = PendingObservations(self._guesses, self._costs, stops=stops)
        self._cuts = True  # whether guesses are left out
        self._price = 0.0  # tokens per second: what a second is worth
        self._usual = 0.0  # seconds of a round
        self._pace = Pace()  # at K > 0
        self._said: Estimates | None = None  # see estimates; in most rounds nothing is new
        self._going_on = DraftStop(self._guesses, k_max)

    def profile(self, measured: Profile) -> None:
        """Start-up costs. Without draft points there is nothing to forward."""
        self._costs.profile(measured)
        if measured.draft:
            self._asks_few = True

    @property
    def max_speculating(self) -> int | None:
        """A probe of a draft model asks a few sequences only."""
        if not self._asks_few or self._explore.round != "probe":
            return None
        return min(max(self._sequences // 4, 1), _PROBE_SEQUENCES)

    # -- before and while drafting ---------------------------------------------------------------

    def choose(self, load: Load) -> int:
        """Draft steps for the step ahead."""
        sequences = load.num_sequences or 1
        size = sequences.bit_length()
        changed = size != self._size or self._anew
        self._before, self._now = self._now, None if self._rests.k else 0
        self._guesses.chances.restart()
        self._ahead.company.go()
        if not changed and self._rests.go():
            self.listens = self.looks_back = False
            self.overhears = self._rests.is_overheard
            return self._rests.k
        self._said = None
        self._wake()
        self._sequences = sequences
        self._spells.go()
        self._face(load)
        self._stretch_to(size, changed=changed)
        if changed or self._spells.is_due(on=self._k > 0, crowd=sequences > FEW):
            self._take_in()
            self._face(load)
            self._plan(sequences, changed=changed)
            self._size, self._anew = size, False
        k = self._while_on() if self._k else self._while_off()
        self._hearing.play(on=k > 0)
        self.listens = self._hearing.wants(sequences)
        self.looks_back = self.listens and self._hearing.looks_back(behind=not self._drafted)
        self.overhears = self._hearing.is_warm and (
            k > 0 or (self.reason == "off" and self._hearing.is_settled)
        )
        self._rest(k)
        return k

    def _face(self, load: Load) -> None:
        """What is told of steps is of shorter sequences, or of others."""
        if load.length is not None and (length := load.length()):
            self._costs.face(length)

    def _stretch_to(self, size: int, *, changed: bool) -> None:
        """Where contexts become as long that other costs hold, choose at once; the first time, look
        soon, too, as at another batch size."""
        stretch = self._costs.stretch(self._sequences, self._stretch)
        if stretch != self._stretch and not changed:
            self._spells.call()
            self._pace.restart()
            self._price = 0.0
            if self._k and (size, stretch) not in self._stretches:
                self._explore.restart(size)
        self._stretch = stretch
        self._stretches.add((size, stretch))

    def _rest(self, k: int) -> None:
        """Once all is known, nothing is due for some rounds."""
        self._drafted = self._drafted and k > 0
        self._now = None if k else 0
        rounds, every = 0, 1
        if self._spells.is_known and self._explore.round in ("above", "below"):
            rounds = _MORE
        elif self._spells.is_known and self._explore.round == "usual":
            every = self._hearing.overheard(self._sequences)
            if not k:
                rounds = _REST_OLD if self._spells.is_old else _REST
            elif self._guesses.tells:
                rounds = self._hearing.quiet(self._sequences)
        if rounds:
            grow = self._costs.left(self._sequences, self._stretch) / self._ahead.each[k][0]
            rounds = int(min(rounds, max(grow, _NEAR)))
        self._rests.begin(k, rounds, every=every)

    def _wake(self) -> None:
        """Count the rounds that it rested."""
        if rounds := self._rests.end():
            self._spells.go(rounds)
            self._hearing.rest(rounds)
            self._explore.rest(rounds, self._usual, on=self._rests.k > 0)

    def resume(self) -> None:
        """As if the batch were of another size: choose anew, and look soon."""
        self._anew = True
        self._now = None
        self._explore.forgive()

    def _while_on(self) -> int:
        rates = self._ahead.rates
        gain = rates[self._k] / rates[0] - 1.0
        # A draft that is one call makes as many guesses as K says, however sure it is.
        varies = self._stops and self._guesses.tells
        slow = self._costs.slow(self._sequences)
        match self._explore.while_on(self._usual, gain=gain, varies=varies, slow=slow):
            case "baseline":
                self.reason = "baseline"
                return 0
            case "above" | "below" as side:
                self.reason = "neighbour"
                up = side == "above" or self._k == 1
                return min(self._k + 1, self.k_max) if up else self._k - 1
        self.reason = "pays"
        return self.k_max if self._stops else self._k

    def _while_off(self) -> int:
        alone, promise = self._sequences == 1, self._ahead.promise
        match self._explore.while_off(self._usual, alone=alone, promise=promise):
            case "probe":
                self.reason = "probe"
                return 1
            case "trial":
                self.reason = "trial"
                return best_above(self._ahead.rates)
        self.reason = "off"
        return 0

    def _plan(self, sequences: int, *, changed: bool) -> None:
        """Choose anew."""
        self._spells.choose()
        if changed:
            self._spells.resize(self._size, sequences.bit_length())
            self._explore.restart(sequences.bit_length())
            self._price = 0.0
            self._pace.restart()
        self._ahead.renew(sequences, self._price, on=self._k > 0)
        staying = self._explore.staying
        if not self._k:
            staying.judge(self._ahead.rates[0], self._spells.turned)
        self._ahead.stay(staying.part, on=self._k > 0)
        rates, on, crowd = self._ahead.rates, self._k > 0, sequences > FEW
        best = best_now(rates)
        if not changed:
            best = best_of(rates, on=on, crowd=crowd, known=self._spells.is_known)
        if (best > 0) != on:
            known = self._spells.turn()
            if not best:
                staying.turn(self._pace.blend(rates[self._k]))
            self._explore.turned(back=best > 0 and known)
            self._pace.restart()
        self._k = best
        seen = self._pace.blend(rates[self._k]) if self._k else 0.0
        self._price = max(rates[0], seen)
        self._cuts = self._stops or changed or self._ahead.cutting[best] > _CUTS
        self._usual = self._hearing.usual = self._ahead.usual_seconds(sequences, self._k)
        if self._stops:
            _, step = self._costs.drafting(sequences)
            rows = self._price * self._ahead.row_seconds(sequences)
            self._going_on.reprice(self._price * step / sequences, rows)

    def goes_on(self, confidences: Confidences) -> bool:
        """Whether one more draft step, or several, are worth their seconds."""
        depth = min(map(len, confidences))
        if depth >= self.k_max or self._explore.round == "probe":
            return False
        if not self._stops or not depth:
            return True
        if self._explore.round == "trial":
            return True
        if self._sequences > FEW:  # of so many the mean confidence tells no more than K does
            return depth < self._k
        return self._going_on.pays(confidences, depth)

    def keep(self, confidences: Confidences) -> list[int]:
        """The rows with the most expected tokens at the present price."""
        self._now = max(map(len, confidences))
        if self.listens and self._explore.round != "probe":
            self._guesses.remember(confidences)
        if self._explore.round == "trial" or not (self._cuts or self._explore.round == "probe"):
            return [len(sure) for sure in confidences]
        kept = self._ahead.keep(confidences, self._sequences, self._price)
        self._guesses.chances.restart()
        return kept

    def worth(self, survival: Sequence[float], *, instead: bool) -> int:
        """The length with the most expected tokens per second for the batch, whose other sequences
        do as last chosen."""
        most = self._ahead.worth(survival, self._sequences, self._k, self._price, instead=instead)
        if most and not self._k:
            self._ahead.company.serve()
            self.overhears |= self._ahead.company.is_heard and self._hearing.is_warm
        return most

    def least(self, *, instead: bool) -> float:
        """A first guess that is less likely is worth nothing, whatever comes behind it."""
        return self._ahead.least(self._sequences, self._k, self._price, instead=instead)

    def plain_seconds(self, sequences: int, context: int) -> float:
        """At the costs of the last choice; what K = 0 takes when it stays, as in the rates."""
        part = self._explore.staying.part if self._k else 1.0
        return part * self._ahead.plain_seconds(sequences, context)

    # -- afterwards --------------------------------------------------------------------------------

    def update(self, observation: StepObservation) -> None:
        """Learn from the step that the last choice led to: at once where it asked for what K = 0
        misses, else from a few together, since behind a forward the first takes several times what
        others do."""
        seen = observation
        probe = self._explore.round == "probe"
        if self._explore.asks and seen.k:
            self._guesses.acceptance.doubt(_DOUBT)
        self._lessons.add(self._lesson(seen))
        due = self._explore.asks or len(self._lessons) >= _TOGETHER
        changed = self._take_in() if due else False
        if self._explore.asks:
            self._guesses.look_back(seen)
            if self._explore.tells:
                self._spells.call()
        if seen.is_decode and seen.num_sequences and seen.k:
            self._pace.add(seen.tokens, seen.seconds)
        if seen.outcomes:
            self._drafted = seen.k > 0 and not probe
        self._explore.over(
            asked=seen.k > 0,
            seconds=seen.seconds,
            lost=self._lost(seen),
            usual=self._usual,
            plain=seen.num_sequences if seen.is_decode and not seen.k else 0,
            context=seen.context or 0,
        )
        if probe and changed:
            self._explore.suspect()

    def overhear(self, heard: Overheard) -> None:
        """As in KController; kept until there is something to learn anyway."""
        self._lessons.overhear(heard)
        if heard.rows > heard.num_sequences:
            self._pace.add(heard.tokens, heard.seconds)

    def _lesson(self, seen: StepObservation) -> PendingObservation:
        outcomes, rounds = seen.outcomes, 0.0
        if self._explore.round == "probe" and self._asks_few:
            outcomes = [asked for asked in outcomes if asked.offered]
        hears = self._explore.round == "usual" and self._lessons.has_heard
        if seen.is_decode and seen.num_sequences and not hears and self._hearing.learns_costs():
            rounds, self._hearing.unlearned = self._hearing.unlearned, 0
        fresh = self._drafted and not self.looks_back
        plain = not seen.k and self._explore.round == "usual"
        cold = self._explore.is_cold or (plain and not self._hearing.is_settled)
        return PendingObservation(seen, outcomes, self._before, rounds, fresh, cold=cold)

    def _take_in(self) -> bool:
        """Learn from what was told. Whether guesses fare in another way than they did."""
        heard = self._lessons.has_heard
        changed = self._lessons.learn(self._hearing.unlearned)
        if heard:
            self._hearing.unlearned = 0
        if changed:
            self._spells.forget()
            self._pace.restart()
        return changed

    def _lost(self, seen: StepObservation) -> float:
        """Seconds that the step took beyond those in which its tokens come in usual steps."""
        if self._explore.round == "usual" or not self._price:
            return 0.0
        if not seen.is_decode:
            return seen.draft_seconds
        return seen.seconds - seen.tokens / self._price

    def estimates(self) -> Estimates:
        """As of the last choice, the same until the next; before the first there are no rates."""
        if self._said is None:
            tries = self.reason in ("probe", "trial", "neighbour")
            k = self._rests.k if tries else self._k
            self._said = self._ahead.estimates(self._sequences, k, self.reason)
        return self._said

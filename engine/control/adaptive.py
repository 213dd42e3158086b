"""AdaptiveK: the K, and for each proposal the length, with the most expected tokens per second.

Weighs accepted tokens (`acceptance`) against the cost of a step (`cost_model`) for each K, with 0
(`goodput`); sometimes runs another K to detect errors (`exploration`), and changes K rarely.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from msgspec.structs import replace

from engine.control.acceptance import Confidences, ProposalModel
from engine.control.controller import Choice, Load
from engine.control.cost_model import CostModel
from engine.control.exploration import Exploration
from engine.control.goodput import Goodput
from engine.messages import Estimates, Reason
from engine.scheduling.step_record import StepRecord

_FEW = 12  # up to so many sequences, each confidence counts for one more draft step
_PROBE_SEQUENCES = 4  # maximum sequences in a probe; also at most a quarter of the batch
_DWELL, _DWELL_LAST = 6, 64  # minimum and maximum steps between two choices
_IDLE = 4  # factor on intervals at K = 0 without proposals: nothing new is learnt
_SKIPS = 8  # then only one step in so many is processed, to save host time
_EXTRA_EVERY = 64  # steps between tries of one more draft step, which correct its cost
_SETTLED = 6  # steps at K = 0 until the CPU caches settle
_AVERAGED = 32  # usual steps over which the tokens that look-ups add are averaged
_LATE = 8  # steps at K = 0 after which trees that are compared lie behind every verified one
_LEAST_GAIN = 0.02  # that is worth leaving tokens out, or second-best tokens
# Learning from a step takes `_LEARNING` seconds and `_LEARNING_EACH` per sequence. It may take
# `_SHARE` of the time, so it skips most short steps, but learns from one in `_RAREST` at least.
_LEARNING, _LEARNING_EACH, _SHARE, _RAREST = 3e-4, 1e-5, 0.01, 64
_CHOOSING = 7e-4  # seconds of a choice; choices may take as much, or more while much is new


class AdaptiveK:
    """Chooses K anew at intervals, and when the batch size crosses a power of two."""

    name = "adaptive"

    def __init__(
        self, k_max: int, *, stops: bool = True, trees: bool = False, costs: CostModel | None = None
    ) -> None:
        """`k_max`: at least 1. `stops`: the drafter asks `keeps_drafting`. `trees`: K counts
        the nodes of a tree, likeliest first. `costs`: those known already."""
        if k_max < 1:
            raise ValueError(f"there is nothing to choose up to K = {k_max}")
        self.k_max, self._stops = k_max, stops
        self.costs = costs or CostModel()
        self._proposals = ProposalModel(k_max, trees=trees)
        self._goodput = Goodput(k_max, self._proposals, self.costs)
        self._explore = Exploration()
        self._best = self._choice = Choice()  # of usual steps; of this step
        self._sequences, self._size = 1, -1
        self._chosen = self._since_change = 0  # steps since a choice; since size or K > 0 changed
        self._caught_up = True  # the last step proposed for all
        self._steps_at_zero = 0  # steps in a row at K = 0
        self._late = _LATE if trees else 0  # so many of them before hindsight is of use
        self._unread = list[StepRecord]()  # steps at K > 0 whose outcomes were not added yet
        self._skips = self._skipped = 0  # steps to skip, and steps skipped so far
        self._extra = False  # this step runs one draft step more than seems to pay
        self._trims = True  # whether leaving tokens out of the forward pays
        self._usual, self._more = inf, 1.0  # seconds of a usual step; its tokens by those expected
        self._learns, self._every = True, 1  # from this step; from one step in `_every`

    # -- before and while drafting ---------------------------------------------------------------

    def choose(self, load: Load) -> Choice:
        """See KController."""
        if load.resumed:  # choose anew, as after a change of batch size
            self._size = 0  # no batch has this size
            self._explore.forget()
        self._sequences = load.num_sequences or 1
        size = self._sequences.bit_length()
        if self._skipped < self._skips and size == self._size:
            self._skipped += 1
            return self._choice
        rounds, self._skipped = self._skipped + 1, 0
        self._chosen, self._since_change = self._chosen + rounds, self._since_change + rounds
        self._proposals.num_steps += rounds - 1
        self._steps_at_zero += rounds - 1
        idle = not self._best.k and not self._proposals.num_proposing and not self._unread
        if size != self._size or self._chosen >= self._dwell(idle=idle):
            self.costs.set_context(load.length() if load.length is not None else None)
            self._plan(size)
        k, reason = self._while_on() if self._best.k else self._while_off(rounds)
        num_steps = self._proposals.num_steps + len(self._unread) + 1
        due = num_steps >= (_IDLE if idle else 1) * self._every
        self._learns = due or self._explore.round != "usual"
        usual = self._learns and reason == "pays" and not self._stops
        self._extra = usual and self._since_change % _EXTRA_EVERY >= _EXTRA_EVERY - self._every
        skips = reason == "off" and idle and not self._learns
        self._skips = min(_SKIPS - 1, self._explore.rounds_left) if skips else 0
        k = min(k + self._extra, self.k_max)
        few = self._explore.round == "probe" and self.costs.has_draft  # it must catch up
        most = min(max(self._sequences // 4, 1), _PROBE_SEQUENCES) if few else None
        late = k > 0 and not self._caught_up and self._steps_at_zero >= self._late
        own = {"k": k, "reason": reason, "max_speculating": most, "uses_hindsight": late}
        self._choice = replace(self._best, **own)
        return self._choice

    def _dwell(self, *, idle: bool) -> int:
        """Return the steps between two choices: the more, the longer nothing has changed, and so
        many that choices take `_SHARE` of the time. `idle`: nothing new is learnt."""
        affordable = min(int(_CHOOSING / _SHARE / self._usual), self._since_change // 2)
        least = max(_DWELL, self._since_change // 4, affordable, self._every)
        return min(least, (_IDLE if idle else 1) * _DWELL_LAST)

    def _plan(self, size: int) -> None:
        """Choose K anew. `size`: the bit length of the batch size."""
        self._chosen = 0
        self._learn_outcomes()
        goodput, was_on, present = self._goodput, self._best.k > 0, self._goodput.present
        if changed := size != self._size:
            self._explore.restart(size)
            self._since_change, was_on, present = 0, False, 0.0
        goodput.refresh(self._sequences, present)
        k = max(range(len(goodput.rates)), key=goodput.rates.__getitem__)
        if (k > 0) != was_on:
            self._explore.switched(back=k > 0 and not changed)
            self._since_change = 0
        drafting, row_costs = goodput.choose(k)
        branches = goodput.branching(k) > _LEAST_GAIN
        self._best = Choice(k, branches=branches, drafting=drafting, row_costs=row_costs)
        self._size, self._usual = size, self._sequences * goodput.each[k][0] / goodput.present
        self._trims = self._stops or not present or goodput.trimming[k] > _LEAST_GAIN

    def _while_on(self) -> tuple[int, Reason]:
        gain = self._goodput.rates[self._best.k] / self._goodput.rates[0] - 1.0
        kind = self._explore.while_on(self._usual, gain=gain, more=max(self._more, 1.0))
        k = 0 if kind == "baseline" else self.k_max if self._stops else self._best.k
        return k, "pays" if kind == "usual" else kind

    def _while_off(self, rounds: int) -> tuple[int, Reason]:
        rates, most, alone = self._goodput.rates, self._goodput.most_gain, self._sequences == 1
        kind = self._explore.while_off(self._usual, alone=alone, rounds=rounds, most=most)
        if kind == "trial":
            return max(range(1, len(rates)), key=rates.__getitem__), kind
        return int(kind == "probe"), "off" if kind == "usual" else kind

    def keeps_drafting(self, confidences: Confidences) -> bool:
        """Whether one more draft step (or several) is worth its seconds."""
        depth = min(map(len, confidences))
        if depth >= self.k_max or self._explore.round == "probe":
            return False
        if not self._stops or not depth or self._explore.round == "trial":
            return True
        if self._sequences > _FEW:  # their mean confidence adds nothing to K
            return depth < self._best.k
        survivals = [self._proposals.survival(own) for own in confidences]
        return self._goodput.draft_pays(survivals, depth)

    def kept_counts(self, confidences: Confidences) -> list[int]:
        """Return, per proposal, the number of rows with the most tokens at the current goodput."""
        if self._learns and self._explore.round != "probe":
            self._proposals.remember(confidences)
        if self._explore.round == "trial" or self._extra or not self._trims:
            return [len(own) for own in confidences]
        survivals = [self._proposals.survival(own) for own in confidences]
        return self._goodput.kept_counts(survivals)

    def branch(self, confidences: Confidences, kept: Sequence[int]) -> list[list[int]]:
        """Return the places where the second-best token is worth a row, best first."""
        proposals = self._proposals
        survivals = [proposals.survival(own[:n]) for own, n in zip(confidences, kept, strict=True)]
        chances = [proposals.second_best(survival) for survival in survivals]
        best = [sorted(range(len(each)), key=each.__getitem__, reverse=True) for each in chances]
        numbers = self._goodput.kept_counts(chances, behind=sum(kept))
        return [places[:n] for places, n in zip(best, numbers, strict=True)]

    # -- afterwards --------------------------------------------------------------------------------

    def update(self, record: StepRecord) -> None:
        """Learn from the step after the last choice. Outcomes are kept and learnt in batches, since
        a forward empties the CPU's caches of this code; all else from one step in `_every`."""
        if self._steps_at_zero >= _SETTLED or record.reason == "baseline":
            self.costs.gather(record)
        if self._skipped and (record.reason == "off" or not record.k):  # cheap checks first
            return
        probe = self._explore.round == "probe"
        if record.k:  # also if another controller chose it: stop skipping
            self._skips = 0
            self._unread.append(record)
        else:  # without speculation only the number of steps counts
            self._proposals.add(0, (), ())
        self._steps_at_zero = 0 if record.k else self._steps_at_zero + 1
        if self._learns:
            self._learn(record)
        if self._caught_up != (record.k > 0 and not probe) and record.outcomes:
            self._caught_up = not self._caught_up

    def _learn(self, seen: StepRecord) -> None:
        explore, probe = self._explore, self._explore.round == "probe"
        if seen.is_decode and seen.num_sequences:
            settled = not 0 < self._steps_at_zero <= _SETTLED or not self.costs.has_draft
            if settled or explore.is_last:
                self.costs.learn(seen, caught_up=self._caught_up, settled=settled)
            takes = _LEARNING + _LEARNING_EACH * seen.num_sequences
            every = min(max(round(takes / max(_SHARE * seen.seconds, 1e-9)), 1), _RAREST)
            self._every = min(every, 1 + self._since_change // 4)  # a new choice may be an error
        changed = self._learn_outcomes()
        if seen.hindsight and (self._choice.uses_hindsight or not self._late):
            self._proposals.learn_in_hindsight(seen.hindsight)
        if explore.is_last:
            self._chosen = max(self._chosen, _IDLE * _DWELL_LAST)
        explore.end(asked=seen.k > 0, lost=self._lost(seen), usual=self._usual)
        if changed and (probe or self._best.k):
            explore.acceptance_changed(on=self._best.k > 0)

    def _learn_outcomes(self) -> bool:
        """Learn the stored outcomes. Returns whether acceptance changed; then a choice is due."""
        acceptance = self._proposals.acceptance
        changes = acceptance.changes
        for seen in self._unread:
            found = list(zip(seen.outcomes, seen.confidences, strict=True))
            if seen.reason == "probe" and self.costs.has_draft:
                found = [each for each in found if each[0].offered]
            self._proposals.add(seen.k, [each for each, _ in found], [own for _, own in found])
            self._proposals.learn_second_best(seen.second_best)
        self._unread = []
        self._proposals.learn()
        if acceptance.changes == changes:
            return False
        self._since_change, self._chosen = 0, max(self._chosen, _IDLE * _DWELL_LAST)
        return True

    def _lost(self, seen: StepRecord) -> float:
        """Return the step's seconds beyond what usual steps need for as many tokens."""
        present, usual = self._goodput.present, self._explore.round == "usual"
        if not present or not seen.is_decode:
            return seen.draft_seconds if present and not usual else 0.0
        expected = present * max(seen.seconds, 1e-9)
        if not usual:
            return seen.seconds * (1.0 - seen.tokens / expected / max(self._more, 1.0))
        self._more += (seen.tokens / expected - self._more) / _AVERAGED
        return 0.0

    def estimates(self) -> Estimates:
        """Return the estimates of the last choice; before the first there are no rates."""
        acceptance, rates = 1.0 - self._proposals.acceptance.rejection, self._goodput.rates
        if self._size < 0 or not rates[0]:
            return Estimates(reason=self._choice.reason, acceptance=acceptance)
        k = self._choice.k if self._choice.reason in ("probe", "trial") else self._best.k
        return Estimates(
            k=k,
            reason=self._choice.reason,
            acceptance=acceptance,
            survival=self._goodput.survival,
            rates=rates,
            speedup=rates[k] / rates[0],
            num_sequences=self._sequences,
        )

"""A simulated engine for controllers: known acceptance, known costs, seeded noise."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from msgspec.structs import replace

from engine.control.adaptive import AdaptiveK
from engine.control.controller import Choice, KController, Load
from engine.control.profile import CONTEXT, Profile
from engine.scheduling.step_record import Agreement, Outcome, SequenceStep, StepRecord

K_MAX = 8
_MOST_JUDGED = 32
DraftToken = tuple[float, bool]  # (confidence, whether it is right)


@dataclass
class World:
    """Costs in seconds: a draft step takes `draft`, a target forward `base` plus `row` per row
    beyond `free` rows. A draft token is right with probability `alpha`; the proposer proposes with
    probability `proposal_rate`. Each forward at K > 0 takes `cold` of its time more, since drafting
    has emptied the caches. `informed`: how much one standard deviation of confidence adds to
    the log-odds of a draft token; None: there are neither confidences nor agreements."""

    alpha: float
    batch: int = 1
    base: float = 4e-3
    row: float = 1e-4
    free: int = 1
    draft: float = 4e-4
    host: float = 2e-4
    noise: float = 0.05
    proposal_rate: float = 1.0
    cold: float = 0.0
    informed: float | None = None
    seed: int = 1
    random: random.Random = field(init=False)
    missed: list[int] = field(init=False)  # per sequence: positions that the drafter must catch up

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.missed = [0] * self.batch

    def target(self, rows: int) -> float:
        return self.base + self.row * max(0, rows - self.free)

    def rate(self, k: int) -> float:
        """Expected tokens per second at a fixed K (exact if the target's cost is linear)."""
        tokens = 1 + self.proposal_rate * sum(self.alpha**j for j in range(1, k + 1))
        rows = round(self.batch * (1 + k * self.proposal_rate))
        target = self.target(rows) * (1.0 + self.cold * (k > 0))
        return self.batch * tokens / (self.host + target + k * self.draft)

    @property
    def best_rate(self) -> float:
        return max(self.rate(k) for k in range(K_MAX + 1))

    def draft_token(self) -> DraftToken:
        surprise = self.random.gauss(0.0, 1.0) if self.informed is not None else 0.0
        odds = math.log(max(self.alpha, 1e-9) / max(1.0 - self.alpha, 1e-9))
        chance = 1.0 / (1.0 + math.exp(-odds - (self.informed or 0.0) * surprise))
        return 3.0 + surprise, self.random.random() < chance

    def draft_tokens(self, k: int) -> list[DraftToken]:
        proposes = self.random.random() < self.proposal_rate
        return [self.draft_token() for _ in range(k)] if proposes else []

    def round(self, controller: KController, choice: Choice) -> StepRecord:
        """Run one step as the engine does: draft until told to stop, truncate, verify."""
        k, limit = choice.k, choice.max_speculating
        drafting = self.batch if limit is None else min(limit, self.batch)
        ahead = [self.draft_tokens(k if i < drafting else 0) for i in range(self.batch)]
        missed = self.missed[: drafting if k else 0]
        hindsight = self._hindsight(missed) if self.informed is not None else []
        depth = self._depth(controller, ahead, k)
        made = [guesses[:depth] for guesses in ahead]
        kept = self._kept(controller, made)
        parts = [
            self._part(k if i < drafting else 0, *each)
            for i, each in enumerate(zip(made, kept, strict=True))
        ]
        for i, part in enumerate(parts):
            behind = int(part.accepted == part.drafted)
            self.missed[i] = behind if part.drafted else self.missed[i] + 1
        jitter = self.random.lognormvariate(0.0, self.noise)
        slower = 1.0 + self.cold * (k > 0)
        return StepRecord(
            parts,
            draft_seconds=max(map(len, made)) * self.draft * jitter,
            target_seconds=self.target(self.batch + sum(kept)) * jitter * slower,
            host_seconds=self.host,
            catch_up_rows=sum(missed),
            hindsight=hindsight,
        )

    def _hindsight(self, missed: Sequence[int]) -> list[Agreement]:
        """What the drafter would have proposed at the positions that it catches up."""
        counts = [min(count, _MOST_JUDGED) for count in missed if count]
        return [Agreement(0, 0, [self.draft_token() for _ in range(count)]) for count in counts]

    def _depth(self, controller: KController, ahead: list[list[DraftToken]], k: int) -> int:
        depth = min(k, 1)
        while depth < k:
            live = [guesses[:depth] for guesses in ahead if len(guesses) > depth]
            sure = [[confidence for confidence, _ in guesses] for guesses in live]
            if not live or (self.informed is not None and not controller.keeps_drafting(sure)):
                break
            depth += 1
        return depth

    def _kept(self, controller: KController, made: list[list[DraftToken]]) -> list[int]:
        drafted = [[confidence for confidence, _ in guesses] for guesses in made if guesses]
        if self.informed is None or not drafted:
            return [len(guesses) for guesses in made]
        lengths = iter(controller.kept_counts(drafted))
        kept = [next(lengths) if guesses else 0 for guesses in made]
        assert all(0 <= n <= len(guesses) for n, guesses in zip(kept, made, strict=True))
        return kept

    def _part(self, k: int, made: list[DraftToken], kept: int) -> SequenceStep:
        """The record as the engine makes it: a truncated token is compared with the actual one."""
        hits = sum(1 for _ in takewhile(lambda guess: guess[1], made))
        accepted = min(hits, kept)
        tried = min(len(made), accepted + 1)
        sure = [] if self.informed is None else [confidence for confidence, _ in made[:tried]]
        return SequenceStep(
            0, 0, CONTEXT, k=k, drafted=len(made), proposed=kept, accepted=accepted,
            tokens=accepted + 1, tried=tried, right=min(hits, tried), confidences=sure,
        )  # fmt: skip

    def profile(self, controller: KController, *, wrong_by: float = 1.1) -> None:
        sizes = (1, 2, 3, 5, 9, 16, 64, 256)
        target = [(n, self.target(n) * wrong_by) for n in sizes]
        draft = [(n, self.draft / wrong_by) for n in (1, 4, 16, 64)]
        controller.costs.set_profile(Profile(target, draft, self.host))


@dataclass
class Trace:
    """By step: `ks`, the chosen K; `reasons`, why; `depths`, the tokens drafted."""

    ks: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def switches(self) -> int:
        return sum(a != b for a, b in zip(self.ks, self.ks[1:], strict=False))


def play(controller: KController, world: World, rounds: int) -> Trace:
    """Run `rounds` steps, each reported to the controller."""
    trace = Trace()
    for _ in range(rounds):
        choice = controller.choose(Load(num_sequences=world.batch))
        seen = world.round(controller, choice)
        controller.update(seen)
        trace.ks.append(choice.k)
        trace.reasons.append(choice.reason)
        trace.depths.append(max(outcome.offered for outcome in seen.outcomes))
        trace.tokens += seen.tokens
        trace.seconds += seen.seconds
    return trace


def step_of(
    outcomes: Sequence[Outcome],
    draft: float,
    target: float,
    host: float = 0.0,
    *,
    prompt_rows: int = 0,
    context: int = CONTEXT,
    catch_up_rows: int = 0,
) -> StepRecord:
    """The record of a step that verified all draft tokens. `context`: of each sequence;
    `prompt_rows`: rows of the first one beyond the row that samples."""
    parts = [
        SequenceStep(
            0, 0, context, k=offered, drafted=offered, proposed=offered, accepted=right,
            tokens=right + 1, tried=tried, right=right,
        )
        for offered, tried, right, _ in outcomes
    ]  # fmt: skip
    parts[0] = replace(parts[0], rows=1 + prompt_rows)
    return StepRecord(parts, "pays", draft, target, host, catch_up_rows=catch_up_rows)


RANKS = (0.5, 0.2, 0.1)  # probability of a tree's first, second and third candidate


@dataclass
class Trees(World):
    """A proposer of trees that cost nothing: per depth a candidate for each chance in `ranks`, the
    likeliest paths first."""

    ranks: tuple[float, ...] = RANKS
    paths: list[tuple[int, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        open_paths: list[tuple[int, ...]] = [()]
        while len(self.paths) < 32:
            best = max(open_paths, key=self.chance)
            open_paths.remove(best)
            open_paths += [(*best, rank) for rank in range(len(self.ranks))]
            self.paths += [best] if best else []

    def chance(self, path: tuple[int, ...]) -> float:
        return math.prod(self.ranks[rank] for rank in path)

    def accepted(self, k: int) -> list[int]:
        """Draw which of the first k nodes are accepted."""
        path, at = list[int](), tuple[int, ...]()
        while True:
            [rank] = self.random.choices(range(4), [*self.ranks, 1 - sum(self.ranks)])
            at = (*at, rank)
            if at not in self.paths[:k]:
                return path
            path.append(self.paths.index(at))

    def rate(self, k: int) -> float:
        tokens = 1 + sum(map(self.chance, self.paths[:k]))
        return self.batch * tokens / (self.host + self.target(self.batch * (1 + k)))

    def best(self, k_max: int) -> float:
        return max(map(self.rate, range(k_max + 1)))

    def round(self, controller: KController, choice: Choice) -> StepRecord:
        k = choice.k
        parts, nodes = list[SequenceStep](), self.paths[:k]
        for _ in range(self.batch):
            path = self.accepted(k)
            parts.append(
                SequenceStep(0, 0, CONTEXT, k=k, drafted=k, proposed=k, accepted=len(path),
                    path=path, tokens=len(path) + 1, tried=k, right=len(path),
                    depths=[*map(len, nodes)])
            )  # fmt: skip
        jitter = self.random.lognormvariate(0.0, self.noise)
        seconds = self.target(self.batch * (1 + k)) * jitter
        return StepRecord(parts, target_seconds=seconds, host_seconds=self.host)


def adaptive(world: World, *, stops: bool = False) -> AdaptiveK:
    controller = AdaptiveK(K_MAX, stops=stops)
    world.profile(controller)
    return controller

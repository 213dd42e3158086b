"""Contenders in turns: our engine under one configuration, or transformers' own generation.

Every contender runs all of its tasks in every round, in an order that turns, so that a machine that
slows down slows all of them; ratios are paired within a round. A reply has exactly as many tokens
as asked for (end-of-text does not end it) unless a grammar ends it, so all do the same work.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from engine.config import EngineConfig
from engine.core import Engine
from engine.errors import ConfigError
from engine.lab.bench.options import Clock
from engine.lab.comparison.figures import Estimate, Guesses, estimate, paired
from engine.messages import Grammar, Mode, SamplingParams, StepMetrics, Submit
from engine.model.pair import Pair

SEED = 20240229
LONGEST_PROMPT = 512  # tokens
SLACK = 16  # rows of a proposal beyond the last token
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Task:
    """Prompts that are run at once, as one batch, all with this prediction and grammar."""

    prompts: Sequence[Sequence[int]]
    prediction: Sequence[int] = ()
    grammar: Grammar | None = None


@dataclass(slots=True)
class Played:
    """Replies by prompt, and seconds of all. `first`: seconds to the first token, `at_first` tokens
    delivered then; `steps`: seconds of each step after it; `cached`: prompt tokens that were found
    in the prefix cache."""

    replies: list[list[int]]
    seconds: float = 0.0
    first: float = 0.0
    at_first: int = 0
    steps: list[float] = field(default_factory=list)
    cached: int = 0


@dataclass
class Totals:
    """Sums over steps."""

    rounds: int = 0
    generated: int = 0
    seconds: float = 0.0
    forward_seconds: float = 0.0
    guesses: Guesses = field(default_factory=Guesses)

    def add(self, metrics: StepMetrics) -> None:
        s = metrics.seconds
        self.rounds += metrics.num_sampling
        self.generated += metrics.num_generated_tokens
        self.seconds += s.schedule + s.propose + s.verify + s.accept + s.commit + s.emit
        self.forward_seconds += s.propose_forward + s.verify_forward
        self.guesses.add(metrics)


def play(engine: Engine, submits: Sequence[Submit], clock: Clock, totals: Totals) -> Played:
    """All of them as one batch, to their end. Raises ConfigError where the engine refuses one."""
    played = Played([[] for _ in submits])
    replies = dict(zip((submit.id for submit in submits), played.replies, strict=True))
    began = clock()
    for submit in submits:
        engine.add(submit)
    while engine.has_work:
        step = clock()
        outputs = engine.step()
        totals.add(outputs.metrics)
        for output in outputs.items:
            if output.error is not None:
                raise ConfigError(f"the engine refused the prompt: {output.error}")
            played.cached += output.cached_tokens or 0
            replies[output.id] += output.tokens
        if played.at_first:
            played.steps.append(clock() - step)
        elif any(played.replies):
            played.first = clock() - began
            played.at_first = sum(map(len, played.replies))
    played.seconds = clock() - began
    return played


class Contender(Protocol):
    """Who has steps adds them to `totals`."""

    def run(self, task: Task, totals: Totals, *, temperature: float, seed: int) -> Played: ...


class EngineContender:
    """Our engine. `mode`: K as the engine is told before each run, for several on one engine."""

    def __init__(
        self, engine: Engine, *, tokens: int, clock: Clock, mode: tuple[Mode, int] | None = None
    ) -> None:
        self._engine, self._tokens, self._clock, self._mode = engine, tokens, clock, mode
        self._count = 0

    @classmethod
    def of(
        cls,
        speculation: dict[str, Any],
        *,
        pair: Pair,
        tokens: int,
        sequences: int = 1,
        clock: Clock = time.perf_counter,
    ) -> EngineContender:
        """On an engine of its own over a loaded pair. No prefix cache: prompts are repeated here,
        and a hit would flatter every repetition."""
        num_blocks = sequences * -(-(LONGEST_PROMPT + tokens + SLACK) // BLOCK_SIZE)
        cache = {"prefix_caching": False, "block_size": BLOCK_SIZE, "num_blocks": num_blocks}
        config = EngineConfig.model_validate(
            {
                "target": {"path": pair.target.path},  # whose tokenizer grammars are about
                "cache": {**cache, "cpu_memory_gib": 64},
                "schedule": {"max_sequences": sequences},
                "speculation": speculation,
            }
        )
        alone = config.speculation.proposer.kind == "none"
        engine = Engine(config, pair=Pair(pair.target) if alone else pair, clock=clock)
        return cls(engine, tokens=tokens, clock=clock)

    def run(self, task: Task, totals: Totals, *, temperature: float, seed: int) -> Played:
        if self._mode is not None:
            self._engine.set_speculation(*self._mode)
        self._count += 1
        submits = []
        for i, prompt in enumerate(task.prompts):
            params = SamplingParams(
                seed=seed + i,
                max_tokens=self._tokens,
                temperature=temperature,
                ignore_eos=True,
                prediction=tuple(task.prediction),
                grammar=task.grammar,
            )
            name = f"{id(self)}-{self._count}-{i}"
            submits.append(Submit(name, list(prompt), params, 0.0))
        return play(self._engine, submits, self._clock, totals)


class TransformersContender:
    """`generate` of transformers on the same files, in the same dtype, on the same device."""

    def __init__(
        self, *, model: Any, assistant: Any = None, tokens: int, clock: Clock = time.perf_counter
    ) -> None:
        self._model, self._clock = model, clock
        self._options: dict[str, Any] = {"max_new_tokens": tokens, "eos_token_id": None}
        if assistant is not None:
            self._options["assistant_model"] = assistant

    def run(self, task: Task, totals: Totals, *, temperature: float, seed: int) -> Played:
        torch.manual_seed(seed)
        (prompt,) = task.prompts
        ids = torch.tensor([list(prompt)], device=self._model.device)
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        started = self._clock()
        with torch.inference_mode():
            output = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), **self._options, **sampling
            )
        reply = output[0, len(prompt) :].tolist()
        return Played([reply], seconds=self._clock() - started)


def load_plain(folder: str, dtype: torch.dtype, device: torch.device) -> Any:
    """A model as transformers loads it. Its own end-of-text is forgotten, so that it goes on."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    speech: Any = logging  # untyped
    speech.set_verbosity_error()
    speech.disable_progress_bar()
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=dtype).to(device).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


@dataclass(frozen=True, slots=True)
class Entrant:
    """A contender, and what it is asked, under the name of its row."""

    name: str
    contender: Contender
    tasks: Sequence[Task]


@dataclass(frozen=True, slots=True)
class Row:
    """What one entrant did at one temperature. `rate`: tokens a second; `ratio`: of rates to those
    of the part's first entrant, paired within rounds; `equal`: replies that are that one's, of
    `compared`. Of our engine alone: tokens a round, guesses, and the share of a step outside the
    models' forwards."""

    part: str
    name: str
    temperature: float
    rate: Estimate
    ratio: Estimate
    compared: int
    equal: int
    tokens_per_round: float | None
    host_share: float | None
    guesses: Guesses


@dataclass(slots=True)
class _Sums:
    rates: list[float] = field(default_factory=list)
    replies: list[list[int]] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)


def race(
    part: str,
    entrants: Sequence[Entrant],
    *,
    temperatures: Sequence[float],
    rounds: int,
    warm: bool = True,
    decoding: bool = False,
) -> list[Row]:
    """A row for each entrant at each temperature. `warm`: the first task of each is run before,
    uncounted. `decoding`: time counts from a reply's first token, so that prompts cost nothing."""
    rows = []
    for temperature in temperatures:
        found = [_Sums() for _ in entrants]
        for entrant in entrants if warm else ():
            entrant.contender.run(entrant.tasks[0], Totals(), temperature=temperature, seed=SEED)
        for round_ in range(rounds):
            _round(entrants, found, temperature, round_, decoding)
        for entrant, sums in zip(entrants, found, strict=True):
            rows.append(_row(part, entrant, temperature, sums, found[0]))
    return rows


def _round(
    entrants: Sequence[Entrant],
    found: Sequence[_Sums],
    temperature: float,
    round_: int,
    decoding: bool,
) -> None:
    """Task by task; who goes first changes with task and round."""
    count, most = len(entrants), max(len(entrant.tasks) for entrant in entrants)
    tokens, seconds = [0] * count, [0.0] * count
    replies: list[list[list[int]]] = [[] for _ in entrants]
    for index in range(most):
        shift = (round_ * most + index) * 5
        for at in ((i + shift) % count for i in range(count)):
            if index >= len(entrants[at].tasks):
                continue
            task = entrants[at].tasks[index]
            played = entrants[at].contender.run(
                task, found[at].totals, temperature=temperature, seed=SEED + index
            )
            replies[at] += played.replies
            tokens[at] += sum(map(len, played.replies)) - (played.at_first if decoding else 0)
            seconds[at] += played.seconds - (played.first if decoding else 0.0)
    for sums, n, spent, said in zip(found, tokens, seconds, replies, strict=True):
        sums.rates.append(n / spent)
        sums.replies = said


def _row(part: str, entrant: Entrant, temperature: float, sums: _Sums, base: _Sums) -> Row:
    totals = sums.totals
    pairs = list(zip(base.replies, sums.replies, strict=False))
    return Row(
        part,
        entrant.name,
        temperature,
        rate=estimate(sums.rates),
        ratio=paired(sums.rates, base.rates),
        compared=len(pairs) if sums is not base else 0,
        equal=sum(a == b for a, b in pairs) if sums is not base else 0,
        tokens_per_round=totals.generated / totals.rounds if totals.rounds else None,
        host_share=1 - totals.forward_seconds / totals.seconds if totals.rounds else None,
        guesses=totals.guesses,
    )

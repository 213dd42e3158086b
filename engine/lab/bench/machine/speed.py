"""The engine at batch 1: tokens a second of off and of fixed numbers of guesses, in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from engine.core import Engine
from engine.lab.bench.machine.formula import acceptance_of
from engine.messages import SamplingParams, Submit

SEED = 20240229


@dataclass(slots=True)
class Speed:
    """Of one K at one temperature. `speedup` is against K = 0 of the same round."""

    k: int
    temperature: float
    rate: float = 0.0
    speedup: float = 1.0
    acceptance: float = 0.0
    tokens_per_round: float = 1.0


@dataclass(slots=True)
class _Sums:
    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    steps: int = 0
    proposed: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)


def measure_speeds(
    engine: Engine,
    prompts: Sequence[list[int]],
    *,
    ks: Sequence[int],
    temperature: float,
    tokens: int,
    rounds: int,
    clock: Callable[[], float],
) -> tuple[list[Speed], bool]:
    """Speeds of K = 0 and of `ks`, and whether all texts were equal. The time of a reply counts
    from its first token, so prompts cost nothing."""
    sums = {k: _Sums() for k in (0, *ks)}
    texts: dict[int, list[list[int]]] = {}
    for round_ in range(rounds + 1):  # the first one is warm-up
        for k, sum_ in sums.items():
            engine.set_speculation("fixed" if k else "off", k)
            fresh = _Sums()
            texts[k] = [
                _reply(engine, prompt, f"{round_}-{k}-{i}", i, temperature, tokens, fresh, clock)
                for i, prompt in enumerate(prompts)
            ]
            if round_:
                _join(sum_, fresh)
    plain = sums[0].seconds
    speeds = [
        Speed(
            k=k,
            temperature=temperature,
            rate=(s.tokens / rounds) / median(s.seconds),
            speedup=median(a / b for a, b in zip(plain, s.seconds, strict=True)),
            acceptance=acceptance_of(s.proposed, s.accepted),
            tokens_per_round=s.tokens / s.steps,
        )
        for k, s in sums.items()
    ]
    return speeds, all(text == texts[0] for text in texts.values())


def _reply(
    engine: Engine,
    prompt: list[int],
    name: str,
    index: int,
    temperature: float,
    tokens: int,
    sums: _Sums,
    clock: Callable[[], float],
) -> list[int]:
    params = SamplingParams(
        seed=SEED + index, temperature=temperature, max_tokens=tokens, ignore_eos=True
    )
    engine.add(Submit(f"machine-{temperature}-{name}", prompt, params, 0.0))
    text: list[int] = []
    began: float | None = None
    while engine.has_work:
        outputs = engine.step()
        for output in outputs.items:
            text += output.tokens
        if began is None:
            if text:
                began = clock()
                sums.tokens -= len(text)
            continue
        sums.steps += 1
        _add(sums.proposed, outputs.metrics.proposed_at)
        _add(sums.accepted, outputs.metrics.accepted_at)
    assert began is not None
    sums.seconds.append(clock() - began)
    sums.tokens += len(text)
    return text


def _join(sums: _Sums, fresh: _Sums) -> None:
    """One round's replies are one figure."""
    sums.seconds.append(sum(fresh.seconds))
    sums.tokens += fresh.tokens
    sums.steps += fresh.steps
    _add(sums.proposed, fresh.proposed)
    _add(sums.accepted, fresh.accepted)


def _add(sums: list[float], more: Sequence[float]) -> None:
    sums.extend([0.0] * (len(more) - len(sums)))
    for i, amount in enumerate(more):
        sums[i] += amount

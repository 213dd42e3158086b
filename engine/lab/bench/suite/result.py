"""What the benchmark found: the figures, the card for people, and the project's own demands."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from engine.lab.bench.seconds import Clock

TEMPERATURES = (0.0, 0.8)
K_MAX = 8
SEED = 20240229
CONCURRENT = 64
PLAIN, ADAPTIVE = "K=0", "adaptive"
NO_LOOKUP = "adaptive, no n-gram lookup"
PREDICTED = ("right", "old file", "another file")  # what a prediction is to the reply
HF_PLAIN, HF_ASSISTED, HF_TUNED = "transformers", "transformers assisted", "assisted, 4 guesses"


@dataclass(frozen=True)
class Size:
    """How much is run. Rates include the prompt, so replies are long: it is about decoding.
    `clock`: whose seconds count."""

    ks: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
    prompts: int = 4
    tokens: int = 256
    rounds: int = 2
    concurrent_tokens: int = 48
    json_replies: int = 12
    temperatures: tuple[float, ...] = TEMPERATURES
    clock: Clock = time.perf_counter


QUICK = Size(ks=(1, 2, 4, 8), prompts=3, tokens=48, rounds=2, concurrent_tokens=24)


@dataclass
class Result:
    """What was measured; `as_json` is the last line of the output. Rates are tokens per second by
    contender and temperature; ratios are to K = 0 of the same round. `predicted`: rates with a
    prediction, by its quality. `machine`: what `foredraft bench machine` finds, and its page."""

    facts: dict[str, Any]
    rates: dict[str, dict[float, float]] = field(default_factory=dict)
    ratios: dict[str, dict[float, float]] = field(default_factory=dict)
    acceptance: dict[float, list[float]] = field(default_factory=dict)
    tokens_per_round: dict[str, dict[float, float]] = field(default_factory=dict)
    mean_k: dict[float, float] = field(default_factory=dict)
    host_share: dict[str, float] = field(default_factory=dict)
    texts_compared: int = 0
    texts_equal: int = 0
    hf_texts_equal: int = 0
    json_rates: dict[str, dict[float, float]] = field(default_factory=dict)
    json_ratios: dict[str, dict[float, float]] = field(default_factory=dict)
    concurrent: dict[str, float] = field(default_factory=dict)
    served: dict[str, float] = field(default_factory=dict)
    predicted: dict[str, dict[float, float]] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    machine_lines: list[str] = field(default_factory=list)

    @property
    def lossless(self) -> bool:
        return self.texts_equal == self.texts_compared

    @property
    def temperatures(self) -> list[float]:
        """Of the rates."""
        return list(self.rates[PLAIN])

    def best(self, temperature: float) -> str:
        """Our fastest configuration."""
        ours = [name for name in self.rates if name.startswith("K=") or name == ADAPTIVE]
        return max(ours, key=lambda name: self.ratios[name][temperature])

    def as_json(self) -> str:
        wanted = {d.text: {"value": d.value, "limit": d.limit, "met": d.met} for d in demands(self)}
        found = {name: value for name, value in vars(self).items() if name != "machine_lines"}
        return json.dumps({**found, "lossless": self.lossless, "demands": wanted})


@dataclass(frozen=True)
class Demand:
    """One figure that the project promises to reach on its built-in pair."""

    text: str
    value: float
    limit: float
    at_least: bool = True

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def demands(result: Result) -> list[Demand]:
    """Speed against K = 0 and against transformers, host overhead, equality of texts."""
    best = {t: result.best(t) for t in TEMPERATURES}
    greedy = result.rates[best[0.0]][0.0]
    assisted = result.rates[HF_ASSISTED][0.0]
    streams, served = result.concurrent, result.served
    return [
        Demand(f"T=0: {best[0.0]} against K=0", result.ratios[best[0.0]][0.0], 1.5),
        Demand(f"T=0.8: {best[0.8]} against K=0", result.ratios[best[0.8]][0.8], 1.3),
        Demand(f"T=0: {best[0.0]} against transformers' assisted", greedy / assisted, 2.0),
        *(
            Demand(f"T=0: JSON under a schema, {ADAPTIVE} against K=0", ratios[0.0], 1.5)
            for name, ratios in result.json_ratios.items()
            if name == ADAPTIVE
        ),
        *(
            Demand(f"host share of a step, {name}", share, 0.15, at_least=False)
            for name, share in result.host_share.items()
        ),
        Demand("concurrent streams that finished", streams["finished"], streams["streams"]),
        Demand("of those, equal to the serial text", streams["equal"], streams["streams"]),
        *(_served(served) if served else ()),
        Demand("texts equal to K=0", result.texts_equal, result.texts_compared),
    ]


def _served(served: dict[str, float]) -> Iterator[Demand]:
    yield Demand("over HTTP: streams that finished", served["finished"], served["streams"])
    yield Demand("over HTTP: equal to the text alone", served["equal"], served["streams"])
    yield Demand("seconds to ready, second start", served["ready_seconds"], 10, at_least=False)


def card(result: Result) -> str:
    """The result as a page of plain text."""
    return "\n".join([*_heading(result), "", *_rates(result), "", *_details(result), "",
                      *result.machine_lines, "", *_demands(result)])  # fmt: skip


def _heading(result: Result) -> Iterator[str]:
    f = result.facts
    yield f"Foredraft bench: {f['target']} with draft {f['draft']}, {f['dtype']} on {f['device']}"
    yield (
        f"{f['threads']} threads, torch {f['torch']}, transformers {f['transformers']};"
        f" {f['prompts']} held-out prompts of {f['prompt_tokens'][0]} to {f['prompt_tokens'][1]}"
        f" tokens, {f['tokens']} tokens each, median of {f['rounds']} rounds, seconds"
        f" {f['seconds']}"
    )


def rate_lines(result: Result) -> Iterator[str]:
    """Tokens per second of every contender, and the best of ours against transformers."""
    yield from _rates(result)
    yield from (_against_transformers(result, t) for t in result.temperatures)


def _rates(result: Result) -> Iterator[str]:
    temperatures = result.temperatures
    columns = "".join(f"{f'T={t:g}':>10}{'vs K=0':>9}{'tok/rnd':>9}" for t in temperatures)
    yield f"{'tokens per second':<24}{columns}"
    for name, rates in result.rates.items():
        row = f"{name:<24}"
        for t in temperatures:
            per_round = result.tokens_per_round.get(name, {}).get(t)
            shown = "" if per_round is None else f"{per_round:.2f}"
            row += f"{rates[t]:>10.1f}{result.ratios[name][t]:>8.2f}x{shown:>9}"
        yield row


def _details(result: Result) -> Iterator[str]:
    for t in TEMPERATURES:
        yield _against_transformers(result, t)
        positions = " ".join(f"{share:.2f}" for share in result.acceptance[t])
        yield (
            f"T={t:g}: guesses kept by position (K={K_MAX}): {positions};"
            f" adaptive K on average {result.mean_k[t]:.1f}"
        )
    yield from json_lines(result)
    c = result.concurrent
    yield (
        f"{c['streams']:.0f} streams at once: {c['tokens_per_second']:.0f} tokens/s,"
        f" one by one {c['serial_tokens_per_second']:.0f}"
    )
    yield from prediction_lines(result)
    if s := result.served:
        yield (
            f"second start: ready after {s['ready_seconds']:.1f} s, in which both processes took"
            f" {s['ready_processor_seconds']:.1f} s of a processor"
        )
    yield (
        f"texts equal to K=0: {result.texts_equal} of {result.texts_compared};"
        f" to transformers' greedy ones: {result.hf_texts_equal} of {result.facts['prompts']}"
    )


def _against_transformers(result: Result, t: float) -> str:
    best = result.best(t)
    against = ", ".join(
        f"{name} {result.rates[best][t] / result.rates[name][t]:.2f}x"
        for name in (HF_PLAIN, HF_ASSISTED, HF_TUNED)
    )
    return f"T={t:g}: {best} against {against}"


def json_lines(result: Result) -> Iterator[str]:
    """Rates of JSON replies under their schemas."""
    for name, rates in result.json_rates.items():
        ratios = result.json_ratios[name]
        shown = ", ".join(f"T={t:g} {rates[t]:.1f} ({ratios[t]:.2f}x)" for t in TEMPERATURES)
        yield f"JSON under a schema, tokens/s, {name}: {shown}"


def prediction_lines(result: Result) -> Iterator[str]:
    """Tokens per second by what was predicted, against the same without a prediction."""
    for t in TEMPERATURES if result.predicted else ():
        rates = {name: by_temperature[t] for name, by_temperature in result.predicted.items()}
        none = rates[ADAPTIVE]
        said = ", ".join(
            f"{name} {rates[name]:.0f} ({rates[name] / none:.2f}x)" for name in PREDICTED
        )
        without = f"without {none:.0f}, K=0 {rates[PLAIN]:.0f}"
        yield f"T={t:g}: tokens/s with a prediction: {said}; {without}"
        alone = rates[NO_LOOKUP]
        yield f"T={t:g}: {NO_LOOKUP}: {alone:.0f} tokens/s ({alone / none:.2f}x)"


def _demands(result: Result) -> Iterator[str]:
    for d in demands(result):
        sign = ">=" if d.at_least else "<="
        said = "met" if d.met else "MISSED"
        yield f"{said:<8}{d.text}: {d.value:.3g} (wanted {sign} {d.limit:g})"

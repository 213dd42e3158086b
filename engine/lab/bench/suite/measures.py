"""The benchmark's measurements. Every contender runs every prompt in every round, in rotating
order, so that a machine that slows down slows all of them; ratios are paired within a round.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import median

from engine.child.settling import settle_memory
from engine.lab.bench.suite.contenders import Contender, EngineContender
from engine.lab.bench.suite.result import (
    ADAPTIVE,
    CONCURRENT,
    HF_PLAIN,
    K_MAX,
    PLAIN,
    SEED,
    TEMPERATURES,
    Result,
    Size,
)
from engine.model.pair import Pair


def race(
    contenders: Sequence[Contender], prompts: list[list[int]], size: Size, result: Result
) -> None:
    """Fills rates, ratios, acceptance, and whether texts agree."""
    for temperature in size.temperatures:
        seconds: dict[str, list[float]] = {c.name: [] for c in contenders}
        texts: dict[str, list[list[int]]] = {}
        for contender in contenders:  # warm, uncounted
            contender.run(prompts[0], temperature=temperature, seed=SEED)
        for contender in contenders:
            if isinstance(contender, EngineContender):
                contender.totals.clear()
        for round_ in range(size.rounds):
            progress(f"T={temperature:g}, round {round_ + 1} of {size.rounds}")
            for contender, spent, replies in one_round(contenders, prompts, temperature, round_):
                seconds[contender.name].append(spent)
                texts[contender.name] = replies
        settle(contenders, seconds, size, temperature, result)
        compare(texts, temperature, result)


def one_round(
    contenders: Sequence[Contender], prompts: list[list[int]], temperature: float, round_: int
) -> list[tuple[Contender, float, list[list[int]]]]:
    """Each prompt through each contender; who goes first changes with prompt and round."""
    spent = [0.0] * len(contenders)
    replies: list[list[list[int]]] = [[] for _ in contenders]
    for index, prompt in enumerate(prompts):
        shift = (round_ * len(prompts) + index) * 5
        for i in range(len(contenders)):
            at = (i + shift) % len(contenders)
            reply, seconds = contenders[at].run(prompt, temperature=temperature, seed=SEED + index)
            spent[at] += seconds
            replies[at].append(reply)
    return list(zip(contenders, spent, replies, strict=True))


def settle(
    contenders: Sequence[Contender],
    seconds: dict[str, list[float]],
    size: Size,
    temperature: float,
    result: Result,
) -> None:
    work = size.prompts * size.tokens
    plain = seconds[PLAIN]
    for contender in contenders:
        name, spent = contender.name, seconds[contender.name]
        result.rates.setdefault(name, {})[temperature] = median(work / s for s in spent)
        ratio = median(base / s for base, s in zip(plain, spent, strict=True))
        result.ratios.setdefault(name, {})[temperature] = ratio
        if isinstance(contender, EngineContender):
            totals = contender.totals[temperature]
            result.tokens_per_round.setdefault(name, {})[temperature] = totals.tokens_per_round
            if name == f"K={K_MAX}":
                result.acceptance[temperature] = totals.acceptance
            if name == ADAPTIVE:
                result.mean_k[temperature] = totals.mean_k


def compare(texts: dict[str, list[list[int]]], temperature: float, result: Result) -> None:
    """Every configuration of ours against K = 0; transformers' greedy text for information."""
    plain = texts[PLAIN]
    for name, replies in texts.items():
        equal = sum(a == b for a, b in zip(plain, replies, strict=True))
        if name.startswith("K=") or name == ADAPTIVE:
            result.texts_compared += len(plain)
            result.texts_equal += equal
        elif name == HF_PLAIN and temperature == 0:
            result.hf_texts_equal = equal


def overhead(pair: Pair, prompts: list[list[int]], size: Size, result: Result) -> None:
    """The share of a step outside forwards, with the default settings, at batch 1 and 8."""
    for batch in (1, 8):
        contender = EngineContender(
            f"batch {batch}", {}, pair=pair, tokens=size.tokens, sequences=batch, clock=size.clock
        )
        settle_memory()  # as a server does
        for temperature in TEMPERATURES:
            progress(f"host overhead, batch {batch}, T={temperature:g}")
            contender.run_all(prompts[:batch], temperature=temperature, seed=SEED)
            contender.totals.clear()
            for _ in range(size.rounds):
                contender.run_all(prompts[:batch], temperature=temperature, seed=SEED)
            share = contender.totals[temperature].host_share
            result.host_share[f"batch {batch}, T={temperature:g}"] = share


def concurrency(pair: Pair, prompts: list[list[int]], size: Size, result: Result) -> None:
    """64 greedy streams at once against the same ones alone."""
    progress(f"{CONCURRENT} concurrent streams")
    tokens = size.concurrent_tokens
    crowd = EngineContender(
        "64 at once", {}, pair=pair, tokens=tokens, sequences=CONCURRENT, clock=size.clock
    )
    together, at_once = crowd.run_all(prompts, temperature=0.0, seed=SEED)
    serial = EngineContender("one by one", {}, pair=pair, tokens=tokens, clock=size.clock)
    alone = [serial.run(prompt, temperature=0.0, seed=SEED) for prompt in prompts]
    result.concurrent = {
        "streams": len(prompts),
        "finished": sum(len(reply) == tokens for reply in together),
        "equal": sum(a == b for a, (b, _) in zip(together, alone, strict=True)),
        "tokens_per_second": len(prompts) * tokens / at_once,
        "serial_tokens_per_second": len(prompts) * tokens / sum(s for _, s in alone),
    }


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

"""What a prediction gains: a reply that the caller knows nearly, exactly, or not at all.

The old file is the coming reply with edits undone: every few tokens some are left out, some are
there that the reply has not, or one differs. So "editing a file" is measured without asking a small
model to follow instructions.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from engine.lab.bench.suite.contenders import EngineContender
from engine.lab.bench.suite.measures import progress
from engine.lab.bench.suite.result import (
    ADAPTIVE,
    NO_LOOKUP,
    PLAIN,
    PREDICTED,
    SEED,
    TEMPERATURES,
    Result,
    Size,
)
from engine.model.pair import Pair

_EVERY = 28  # tokens from one edit to the next
_SIZE = 6  # tokens of a deletion or an insertion


def old_file(reply: Sequence[int]) -> list[int]:
    """The reply before its edits: an insertion, a deletion and a replacement in turn."""
    old: list[int] = []
    for number, start in enumerate(range(0, len(reply), _EVERY)):
        piece = list(reply[start : start + _EVERY])
        if len(piece) == _EVERY:
            middle = _EVERY // 2
            head, tail = piece[:middle], piece[middle:]
            match number % 3:
                case 0:
                    piece = head + tail[_SIZE:]
                case 1:
                    piece = head + piece[-_SIZE:][::-1] + tail
                case _:
                    piece = [*head, tail[-1], *tail[1:]]
        old += piece
    return old


def guesses(replies: Sequence[list[int]]) -> dict[str, list[list[int]] | None]:
    """For each reply, by quality of the prediction; None: no prediction at all."""
    right, old, other = PREDICTED
    return {
        ADAPTIVE: None,
        right: [list(reply) for reply in replies],
        old: [old_file(reply) for reply in replies],
        other: [*replies[1:], list(reversed(replies[0]))],
    }


def prediction(pair: Pair, prompts: list[list[int]], size: Size, result: Result) -> None:
    """Fills `result.predicted`, and counts texts like any other comparison."""
    plain, ours, drafted = (
        EngineContender(name, speculation, pair=pair, tokens=size.tokens, clock=size.clock)
        for name, speculation in (
            (PLAIN, {"proposer": {"kind": "none"}}),
            (ADAPTIVE, {}),
            (NO_LOOKUP, {"companions": ["grammar", "prediction"]}),
        )
    )
    for temperature in TEMPERATURES:
        progress(f"predictions, T={temperature:g}")
        replies, _ = _all(plain, prompts, None, temperature)  # warm, and what is to be predicted
        said = guesses(replies)
        runs: list[tuple[str, EngineContender, list[list[int]] | None]]
        runs = [(PLAIN, plain, None), (NO_LOOKUP, drafted, None)]
        runs += [(name, ours, predicted) for name, predicted in said.items()]
        for _, contender, predicted in runs:
            _all(contender, prompts[:1], predicted, temperature)
        seconds: dict[str, list[float]] = {name: [] for name, _, _ in runs}
        for _ in range(size.rounds):
            for name, contender, predicted in runs:
                found, spent = _all(contender, prompts, predicted, temperature)
                seconds[name].append(spent)
                result.texts_compared += len(prompts)
                result.texts_equal += sum(a == b for a, b in zip(found, replies, strict=True))
        work = len(prompts) * size.tokens
        for name, spent_each in seconds.items():
            rate = median(work / spent for spent in spent_each)
            result.predicted.setdefault(name, {})[temperature] = rate


def _all(
    contender: EngineContender,
    prompts: Sequence[list[int]],
    predicted: Sequence[Sequence[int]] | None,
    temperature: float,
) -> tuple[list[list[int]], float]:
    """One after the other; their replies and the seconds of all."""
    replies, seconds = [], 0.0
    for index, prompt in enumerate(prompts):
        prediction = () if predicted is None else predicted[index]
        reply, spent = contender.run(
            prompt, temperature=temperature, seed=SEED + index, prediction=prediction
        )
        replies.append(reply)
        seconds += spent
    return replies, seconds

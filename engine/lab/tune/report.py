"""Format the result of tune: a table, warnings, and one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engine.lab.comparison.ratio import LEAST
from engine.lab.comparison.report import table
from engine.lab.comparison.workload import OFF, Arm
from engine.lab.tune.measuring import LOOPED, PERIOD, Found
from engine.lab.tune.settings import NGRAM

FLATTERED = 0.1  # share of looping replies above which a warning is printed
PLAIN = "of plain decoding"


def lines(found: Found) -> Iterator[str]:
    """Yield all lines; the sentence comes last."""
    one, many, best = found.one, found.many, found.best()
    loads = [load for load in (one, many) if load.rounds]
    rows = [["", *(title for load in loads for title in (f"tokens/s x{load.requests}", PLAIN))]]
    for arm in found.arms if loads else ():
        row = [f"{arm.name}, K auto" if arm in found.speculating else arm.name]
        for load in loads:
            against = "" if arm == OFF else str(found.against(OFF, arm, load))
            row += [f"{load.speed(arm):.1f}", against]
        rows.append(row)
    yield from table(rows) if loads else ()
    if one.looped > FLATTERED * one.replies:
        yield (
            f"warning: {one.looped} of {one.replies} replies loop (their last {LOOPED} tokens or"
            f" more are one piece of up to {PERIOD} repeated), which inflates every speed-up: use"
            " --prompts with your users' prompts"
        )
    if not found.passed:
        texts = found.texts_compared
        yield f"warning: {texts - found.texts_equal} of {texts} texts differ from plain ones"
    if best != OFF and many.rounds and found.against(OFF, best, many).high < 1:
        yield f"warning: at {many.requests} requests it is slower than plain decoding"
    yield sentence(found)


def sentence(found: Found) -> str:
    """Return the result in one sentence."""
    one, best = found.one, found.best()
    if len(one.tokens) < LEAST:
        few = f"{len(one.tokens)} rounds at 1 request, and an interval needs {LEAST}"
        return f"no answer yet: there was time for {few}; give more --minutes"
    if best != OFF:
        return _sentence(found, best)
    fastest = max(found.speculating, key=one.speed)
    if not found.is_answered:
        return f"no answer yet: {_sentence(found, fastest)}; give more --minutes"
    if all(found.against(OFF, arm).high < 1 for arm in found.speculating):
        return f"off: speculation is slower here, at best {_sentence(found, fastest)}"
    gains = found.against(OFF, fastest).low > 1
    between = f"{fastest.name} and {NGRAM.name} look-up" if gains else "speculation and off"
    return f"off: no difference found between {between}, at best {_sentence(found, fastest)}"


def _sentence(found: Found, arm: Arm) -> str:
    one, many = found.one, found.many
    also = f", {found.against(OFF, arm, many)} at {many.requests}" if many.rounds else ""
    length = round(sum(one.tokens) / one.replies)
    return (
        f"{arm.name}, K auto: {found.against(OFF, arm)} {PLAIN} at 1 request{also};"
        f" {length}-token replies"
    )


def as_dict(found: Found) -> dict[str, Any]:
    """Return all figures as JSON values. `against_off`: each arm's ratio and interval."""
    loads = []
    for load in (each for each in (found.one, found.many) if each.rounds):
        ratios = {arm.name: found.against(OFF, arm, load) for arm in found.arms if arm != OFF}
        known = {name: [r.value, r.low, r.high] for name, r in ratios.items() if r.low}
        loads.append({
            "requests": load.requests, "tokens": load.tokens, "against_off": known,
            "seconds": {arm.name: load.seconds(arm) for arm in found.arms},
            "replies": load.replies, "replies_that_loop": load.looped,
        })  # fmt: skip
    facts = {"sentence": sentence(found), "best": found.best().name, "alpha": found.alpha}
    texts = {"texts_compared": found.texts_compared, "texts_equal": found.texts_equal}
    return {"format": "foredraft-tune", "version": 1, **facts, **texts, "loads": loads}

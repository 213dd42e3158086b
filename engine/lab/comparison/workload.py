"""Arms and workloads: which requests run together, and what is asked of every arm alike.

A request is a function of (workload, round, lane, place) alone, so that all arms of a round do the
same work with the same seeds: common random numbers.
"""

from __future__ import annotations

import math
import random
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from engine.demo.chat import edits
from engine.demo.corpus import asked, heldout_prompts
from engine.errors import ConfigError

USUAL = ("code", "prose", "json", "random")
EDITS = (
    "edits"  # what is asked for is a function that the request's `prediction` has in other words
)
KINDS = (*USUAL, "chat", EDITS)
RANDOM, FROM_FILE = "random", "file"  # characters that nothing predicts; the prompts of --prompts
SEED = 20261120
POOL = 32  # prompts of each kind
MAX_K = 16  # that any configuration allows (config.FixedConfig)
_CHARACTERS, _RANDOM_CHARACTERS = 160, 48  # of a prompt; prompts are not what is measured

Pools = Mapping[str, Sequence[str]]  # prompts by kind of text


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to choose K (`k` is that of `fixed`; `auto` with a `label` is a variant of it), a
    server `served` as it is, or with mode `other` another system, named by `label`."""

    mode: Literal["off", "fixed", "auto", "served", "other"]
    k: int = 0
    label: str = ""

    @property
    def name(self) -> str:
        return self.label or (f"K={self.k}" if self.mode == "fixed" else self.mode)

    @property
    def is_mode(self) -> bool:
        """Whether it is a mode of Foredraft, whose texts do not depend on the mode."""
        return self.mode in ("off", "fixed", "auto")


OFF, AUTO, SERVED = Arm("off"), Arm("auto"), Arm("served")


def parse_arms(
    text: str, others: Sequence[str] = (), variants: Sequence[str] = ()
) -> tuple[Arm, ...]:
    """`off,1,2,4,auto`, each at most once, or the names of `others` and of `variants` of auto.
    Raises ConfigError."""
    known = {arm.name: arm for arm in (OFF, AUTO, *(Arm("other", label=name) for name in others))}
    known |= {name: Arm("auto", label=name) for name in variants}
    known |= {str(k): Arm("fixed", k) for k in range(1, MAX_K + 1)}
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in known:
            raise ConfigError(
                f"--modes has the unknown mode {word!r}; allowed are"
                f" {', '.join(('off', 'auto', *others, *variants))},"
                f" and K itself, from 1 to {MAX_K}"
            )
    if len(set(words)) < len(words):
        raise ConfigError(f"--modes {text!r} names a mode twice")
    return tuple(known[word] for word in words)


@dataclass(frozen=True, slots=True)
class Workload:
    """So many requests at a time, of `tokens` each (0: not yet known), or of at most so many where
    the model `ends` them. `temperature` None: as the requests say."""

    kind: str
    temperature: float | None
    concurrency: int
    tokens: int = 0
    ends: bool = False

    @property
    def text(self) -> str:
        return self.kind if self.temperature is None else f"{self.kind} T={self.temperature:g}"

    @property
    def name(self) -> str:
        return f"{self.text} x{self.concurrency}"

    @property
    def per_lane(self) -> int:
        """Requests that one lane asks for; many lanes need fewer to fill the time."""
        return 4 if self.concurrency == 1 else 3 if self.concurrency < 16 else 2

    @property
    def run_tokens(self) -> float:
        """Of all lanes, about, until the first lane has nothing left to ask for."""
        return self.tokens * (self.concurrency * (self.per_lane - 1) + 1)


@dataclass(frozen=True, slots=True)
class Request:
    """One completion of exactly `tokens` tokens, or of at most so many if it `ends` where the model
    ends it. No other request of a round has its seed. `prediction`: what the caller expects it to
    be."""

    prompt: str
    temperature: float
    seed: int
    tokens: int
    prediction: str = ""
    ends: bool = False


Lane = list[Request]  # asked for one after the other, like a client that waits for each reply


def lanes(workload: Workload, pools: Pools, round_: int) -> list[Lane]:
    """Round -1 does not count: other seeds, and where there are enough prompts other ones."""
    count, per_lane, pool = workload.concurrency, workload.per_lane, pools[workload.kind]
    predicted = edits_asked() if workload.kind == EDITS else {}

    def request(lane: int, place: int) -> Request:
        index = ((round_ + 1) * count + lane) * per_lane + place
        # The first of each lane is shorter than the next lane's, so that texts are of all ages at
        # any time, as in a server that has been running.
        share = 1.0 if place else (lane + 1) / count
        return Request(
            prompt=pool[index % len(pool)],
            temperature=workload.temperature or 0.0,
            seed=SEED + index,
            tokens=math.ceil(workload.tokens * share),
            prediction=predicted.get(pool[index % len(pool)], ""),
            ends=workload.ends,
        )

    return [[request(lane, place) for place in range(per_lane)] for lane in range(count)]


def pool(kind: str, count: int = POOL) -> list[str]:
    """At most `count` different texts of one of KINDS, unseen by the built-in models."""
    assert kind in KINDS
    if kind == RANDOM:
        letters = string.ascii_letters + string.digits + string.punctuation
        return [
            "".join(random.Random(SEED + index).choices(letters, k=_RANDOM_CHARACTERS))
            for index in range(count)
        ]
    if kind == EDITS:
        return list(edits_asked())[:count]
    found = heldout_prompts(kind, 4 * count)  # type: ignore[arg-type]
    if kind in ("code", "prose"):  # others ask for what follows, and must be whole
        found = [text[-_CHARACTERS:] for text in found]
    return list(dict.fromkeys(text for text in found if text.strip()))[:count]


@cache
def edits_asked() -> dict[str, str]:
    """By prompt, the prediction that is sent with it."""
    return {asked(dialogue): prediction for dialogue, prediction in edits(SEED)}

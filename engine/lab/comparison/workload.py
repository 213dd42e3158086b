"""Arms, workloads, and the requests that every arm gets.

A request depends only on (workload, round, lane, place), so that all arms of a round do the same
work with the same seeds: common random numbers.
"""

from __future__ import annotations

import math
import random
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from engine.config import MAX_K
from engine.demo.corpus import heldout_prompts
from engine.errors import ConfigError

USUAL = ("code", "prose", "json", "random")
# Ask to rename a variable in a function, which is predicted with another name for it; to quote from
# a text in the prompt; fill in a few templates, each prompt once, so that replies are like earlier
# ones. Replies end where the model ends them, since what follows repeats nothing.
EDITS, QUOTES, TEMPLATES = ENDING = "edits", "quotes", "templates"
KINDS = (*USUAL, "chat", *ENDING)
RANDOM, FROM_FILE = "random", "file"  # unpredictable characters; the prompts of --prompts
SEED = 20261120
POOL = 32  # prompts per kind, except TEMPLATES
_CHARACTERS, _RANDOM_CHARACTERS = 160, 48  # per prompt; short, because decoding is measured

Pools = Mapping[str, Sequence[str]]  # prompts by kind of text


@dataclass(frozen=True, slots=True)
class Arm:
    """A way to choose K (`k` is for `fixed`; `auto` with a `label` is a variant of auto), a server
    measured as it is (`served`), or another system named by `label` (`other`)."""

    mode: Literal["off", "fixed", "auto", "served", "other"]
    k: int = 0
    label: str = ""

    @property
    def name(self) -> str:
        return self.label or (f"K={self.k}" if self.mode == "fixed" else self.mode)

    @property
    def is_mode(self) -> bool:
        """Whether this is a mode of Foredraft; texts do not depend on the mode."""
        return self.mode in ("off", "fixed", "auto")


OFF, AUTO, SERVED = Arm("off"), Arm("auto"), Arm("served")


def parse_arms(
    text: str, others: Sequence[str] = (), variants: Sequence[str] = ()
) -> tuple[Arm, ...]:
    """Return the arms of a list such as `off,1,2,4,auto`, which may also name `others` and
    `variants` of auto. Raises ConfigError for unknown or repeated names."""
    known = {arm.name: arm for arm in (OFF, AUTO, *(Arm("other", label=name) for name in others))}
    known |= {name: Arm("auto", label=name) for name in variants}
    known |= {str(k): Arm("fixed", k) for k in range(1, MAX_K + 1)}
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in known:
            raise ConfigError(
                f"--modes has the unknown mode {word!r}; allowed are"
                f" {', '.join(('off', 'auto', *others, *variants))},"
                f" and a number K from 1 to {MAX_K}"
            )
    if len(set(words)) < len(words):
        raise ConfigError(f"--modes {text!r} names a mode twice")
    return tuple(known[word] for word in words)


@dataclass(frozen=True, slots=True)
class Workload:
    """`concurrency` requests at a time, with replies of `tokens` tokens (0: not yet known), or of
    at most that if the model `ends` them, as it does those of ENDING. `temperature` None: each
    request has its own. `together`: one request per lane, so that all decode at the same time.
    `first`: index in the pool of the first prompt."""

    kind: str
    temperature: float | None
    concurrency: int
    tokens: int = 0
    ends: bool = False
    together: bool = False
    first: int = 0

    @property
    def text(self) -> str:
        return self.kind if self.temperature is None else f"{self.kind} T={self.temperature:g}"

    @property
    def name(self) -> str:
        return f"{self.text} x{self.concurrency}"

    @property
    def per_lane(self) -> int:
        """Requests per lane; many lanes need fewer to fill the time."""
        if self.together:
            return 1
        return 4 if self.concurrency == 1 else 3 if self.concurrency < 16 else 2

    def requests(self, rounds: int) -> int:
        """Return the number of requests of these rounds and of the warm-up."""
        return (rounds + 1) * self.concurrency * self.per_lane

    @property
    def run_tokens(self) -> float:
        """About how many tokens all lanes get until the first lane runs out of requests."""
        if self.together:
            return self.tokens * self.concurrency
        return self.tokens * (self.concurrency * (self.per_lane - 1) + 1)


@dataclass(frozen=True, slots=True)
class Request:
    """A completion of exactly `tokens` tokens, or of at most that if it `ends` at the model's EOS.
    The seed is unique within a round. `prediction`: the predicted output sent with the request."""

    prompt: str
    temperature: float
    seed: int
    tokens: int
    prediction: str = ""
    ends: bool = False


Lane = list[Request]  # sent one after the other, like a client that waits for each reply


def lanes(workload: Workload, pools: Pools, round_: int) -> list[Lane]:
    """Return the lanes of a round. Rounds differ in seeds, and in prompts if the pool has enough;
    round -1 is the warm-up."""
    count, per_lane, pool = workload.concurrency, workload.per_lane, pools[workload.kind]
    ends = workload.ends or workload.kind in ENDING

    def request(lane: int, place: int) -> Request:
        index = workload.first + ((round_ + 1) * count + lane) * per_lane + place
        # First replies grow in length from lane to lane, so that sequences of all ages run at any
        # time, as in a server that has been running for a while.
        share = 1.0 if place or workload.together else (lane + 1) / count
        prompt = pool[index % len(pool)]
        return Request(
            prompt=prompt,
            temperature=workload.temperature or 0.0,
            seed=SEED + index,
            tokens=math.ceil(workload.tokens * share),
            prediction=_predicted(prompt) if workload.kind == EDITS else "",
            ends=ends,
        )

    return [[request(lane, place) for place in range(per_lane)] for lane in range(count)]


def apart(workloads: Sequence[Workload], rounds: int) -> list[Workload]:
    """Return the workloads, those of TEMPLATES with prompts that no other one has."""
    found, first = list[Workload](), 0
    for workload in workloads:
        is_apart = workload.kind == TEMPLATES
        found.append(replace(workload, first=first * is_apart))
        first += workload.requests(rounds) * is_apart
    return found


def pool(kind: str, most: int = POOL) -> list[str]:
    """Return at most `most` different texts of one of KINDS, unseen by the built-in models."""
    if kind == RANDOM:
        letters = string.ascii_letters + string.digits + string.punctuation
        return [
            "".join(random.Random(SEED + index).choices(letters, k=_RANDOM_CHARACTERS))
            for index in range(most)
        ]
    found = heldout_prompts(kind, 4 * most)  # type: ignore[arg-type]
    if kind in ("code", "prose"):  # prompts of other kinds must stay whole
        found = [text[-_CHARACTERS:] for text in found]
    return list(dict.fromkeys(text for text in found if text.strip()))[:most]


def _predicted(prompt: str) -> str:
    """Return the code in a prompt of EDITS with the variable replaced, so that it is wrong wherever
    an edit changes something, also if the target is too small to rename a variable."""
    code = prompt[prompt.index("```python") : prompt.rindex("```") + 3]
    [old] = re.findall(r"(?:ename `|code: )(\w+)", prompt.replace(code, ""))
    return re.sub(rf"\b{old}\b", "other_name", code)

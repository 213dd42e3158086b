"""Messages between `foredraft evaluate` and its engine child, one line of JSON each. Both sides
import them, so this imports neither torch nor HTTP.

`Start` is answered by Ready or Fatal, then every `Batch` by `Ran` and every `CompareTokens` by
`Margin`. Token ids only, as everywhere in the engine.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import IO, Any, Literal

import msgspec

from engine.messages import Fatal, Ready, Submit

ModeName = Literal["off", "fixed", "auto"]


class Mode(msgspec.Struct, frozen=True):
    """How to speculate. `proposers` in the order in which they are asked; None: as configured."""

    name: ModeName
    k: int = 0
    proposers: tuple[str, ...] | None = None


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first message: an EngineConfig as JSON."""

    config: str


class Batch(msgspec.Struct, frozen=True, tag=True):
    """Run these sequences, at most `concurrency` at a time, the next as soon as one ends."""

    mode: Mode
    submits: list[Submit]
    concurrency: int


class CompareTokens(msgspec.Struct, frozen=True, tag=True):
    """By how much does plain decoding of `submit` prefer token `first` to `second` as its generated
    token number `at` (from 0)?"""

    submit: Submit
    at: int
    first: int
    second: int


class Sums(msgspec.Struct, kw_only=True):
    """Over steps. `steps`, `sampling`, `guesses` and the three times are of pure decode steps in
    which all `concurrency` sequences ran; the rest is of all steps. `*_at[d]`: proposals that
    reached depth d + 1, and those accepted there. Times are seconds."""

    steps: int = 0
    sampling: int = 0  # sequences that sampled
    guesses: int = 0  # rows verified beyond one per sequence
    kept: int = 0  # of those, accepted
    verify: float = 0.0
    propose: float = 0.0
    host: float = 0.0
    rounds: int = 0
    generated: int = 0
    proposed_at: list[int] = []
    accepted_at: list[int] = []
    by_proposer: dict[str, list[int]] = {}  # proposed, accepted

    def add(self, more: Sums) -> None:
        for name in self.__struct_fields__:
            setattr(self, name, _total(getattr(self, name), getattr(more, name)))


def _total(one: Any, other: Any) -> Any:
    if isinstance(one, dict):
        return {key: _total(one.get(key, []), other.get(key, [])) for key in one | other}
    if isinstance(one, list):
        return [a + b for a, b in zip_longest(one, other, fillvalue=0)]
    return one + other


class Ran(msgspec.Struct, frozen=True, tag=True):
    """The generated ids in the order of the submits, and the seconds for all of them. `errors`: by
    the number of a submit, why it could not be run. `cpu_time`: all seconds are processor time of
    the engine, which is what a single thread takes on an idle machine."""

    texts: list[list[int]]
    seconds: float
    sums: Sums
    errors: dict[int, str] = {}
    cpu_time: bool = False


class Margin(msgspec.Struct, frozen=True, tag=True):
    """Score of `first` minus score of `second`: log-probabilities at temperature 0; above, they are
    divided by the temperature and have the noise of their position. None: one of them is not among
    the likeliest tokens there, or plain decoding ended before."""

    margin: float | None


Command = Start | Batch | CompareTokens
Event = Ready | Ran | Margin | Fatal


def send(stream: IO[bytes], message: Command | Event) -> None:
    stream.write(msgspec.json.encode(message) + b"\n")
    stream.flush()


def receive(stream: IO[bytes], kind: Any) -> Any:
    """The next message, of type `kind`; None at the end of the stream."""
    line = stream.readline()
    return msgspec.json.decode(line, type=kind) if line.endswith(b"\n") else None

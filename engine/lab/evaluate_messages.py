"""What `foredraft evaluate` and its engine child say to each other. Read by both sides, so it
imports neither torch nor HTTP. Each message is msgpack behind four bytes with its length (little
endian).

`Start` is answered by Ready or Fatal, then every `Batch` by `Ran` and every `Weigh` by `Weighed`.
Token ids only, as everywhere in the engine.
"""

from __future__ import annotations

import struct
from typing import IO, Any, Literal

import msgspec

from engine.messages import Fatal, Ready, Submit

ModeName = Literal["off", "fixed", "auto"]

_LENGTH = struct.Struct("<I")


class Mode(msgspec.Struct, frozen=True):
    """How to guess. `proposers` in the order in which they are asked; None: as configured."""

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


class Weigh(msgspec.Struct, frozen=True, tag=True):
    """By how much does plain decoding of `submit` prefer token `first` to `second` as its generated
    token number `at` (from 0)?"""

    submit: Submit
    at: int
    first: int
    second: int


class Sums(msgspec.Struct, kw_only=True):
    """Over steps. `steps`, `sampling`, `guesses` and the three times are of pure decode steps in
    which all `concurrency` sequences ran; the rest is of all steps. `*_at[d]`: proposals that
    reached depth d + 1, and those kept there. Times are seconds."""

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
    by_proposer: dict[str, tuple[int, int]] = {}


class Ran(msgspec.Struct, frozen=True, tag=True):
    """The generated ids in the order of the submits, and how long all of it took. `errors`: by the
    number of a submit, why it could not be run. `cpu_time`: all seconds are of the processor's time
    that the engine got, which is what a single thread takes on an idle machine."""

    texts: list[list[int]]
    seconds: float
    sums: Sums
    errors: dict[int, str] = {}
    cpu_time: bool = False


class Weighed(msgspec.Struct, frozen=True, tag=True):
    """Score of `first` minus score of `second`: log-probabilities at temperature 0; above, they are
    divided by the temperature and have the noise of their position. None: at least one of them is
    not among the likeliest tokens there, or plain decoding did not get so far."""

    margin: float | None


Command = Start | Batch | Weigh
Event = Ready | Ran | Weighed | Fatal


def send(stream: IO[bytes], message: Command | Event) -> None:
    data = msgspec.msgpack.encode(message)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def receive(stream: IO[bytes], kind: Any) -> Any:
    """The next message, of type `kind`; None at the end of the stream."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    [size] = _LENGTH.unpack(head)
    data = stream.read(size)
    return msgspec.msgpack.decode(data, type=kind) if len(data) == size else None

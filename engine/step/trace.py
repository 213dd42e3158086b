"""A trace: the StepRecord of each step, as the engine writes it where the operator asked for one.
JSON lines: a header, then a line for each step.

No token, no text, no name: sizes, seconds, and for each generated position whether a guess was
right and how sure it was. Every line is complete once written; a reader takes this version and no
other.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec
from msgspec.structs import replace

from engine.config import EngineConfig
from engine.control.profile import Points, Profile
from engine.control.step_record import Part, StepRecord
from engine.errors import TraceError
from engine.messages import Ready

logger = logging.getLogger(__name__)

FORMAT, VERSION = "foredraft trace", 2
LONGEST = 1e6  # seconds of anything
DEEPEST = 256  # guesses in a row
_MOST_SURE = 1e6  # a confidence
_MOST_ROWS = 1 << 20  # in a step
_FLUSH_BYTES = 1 << 16


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that figures depend on. Profiles: (size, seconds) as measured at start; the
    target's for some numbers of sequences, too. `stops`: each draft step was a forward of its own,
    so that drafting could stop in between."""

    format: str = FORMAT
    version: int = VERSION
    k_max: int
    proposer: str
    controller: str
    device: str
    dtype: str
    max_step_tokens: int
    stops: bool = True
    target_profile: list[tuple[int, float]] = []
    draft_profile: list[tuple[int, float]] = []
    batch_profiles: dict[int, list[tuple[int, float]]] = {}
    padded: tuple[int, ...] = ()

    @property
    def profile(self) -> Profile:
        """As the engine's controller got it, but for the host and the contexts."""
        return Profile(
            target=self.target_profile,
            draft=self.draft_profile,
            batches=self.batch_profiles,
            padded=self.padded,
        )


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace in memory."""

    header: Header
    steps: list[StepRecord]


class Writer:
    """Appends to a new file; an existing one is left alone, the next free number is taken. Ends by
    itself at `max_bytes` or when the file cannot be written, with one line in the log. Raises
    TraceError when opened."""

    def __init__(self, path: str, header: Header, *, max_bytes: int) -> None:
        self.path = _create(Path(path))
        self._left = max_bytes
        self._pending = bytearray()
        self.ended = ""  # why nothing is written any more
        self._encode = msgspec.json.Encoder().encode
        self._add(self._encode(header))
        self.flush()

    def write(self, record: StepRecord) -> None:
        """One more step; on disk at the latest when no sequence is left."""
        if self.ended:
            return
        line = self._encode(_rounded(record))
        if len(line) + 1 > self._left:
            self.close("it has reached its size limit")
        else:
            self._add(line)
            idle = not record.num_waiting and all(part.finish for part in record.parts)
            if idle or len(self._pending) >= _FLUSH_BYTES:
                self.flush()
        if self.ended:
            logger.warning("no more steps are recorded in %s: %s", self.path, self.ended)

    def flush(self) -> None:
        """Hand what is pending to the system."""
        try:
            with self.path.open("ab") as file:
                file.write(self._pending)
        except OSError as error:
            self.ended = f"it cannot be written ({error.strerror})"
        self._pending.clear()

    def close(self, why: str = "it was closed") -> None:
        """Nothing is written from now on."""
        if not self.ended:
            self.flush()
            self.ended = self.ended or why

    def _add(self, line: bytes) -> None:
        self._pending += line
        self._pending += b"\n"
        self._left -= len(line) + 1


def open_trace(
    config: EngineConfig, ready: Ready, measured: Profile, *, stops: bool
) -> Writer | None:
    """The writer, if `speculation.trace` names a file. `measured`: at start; `stops`: as in Header.
    Raises TraceError."""
    said = config.speculation
    if said.trace is None:
        return None
    header = Header(
        k_max=ready.k_max,
        proposer=ready.proposer,
        controller=ready.controller,
        device=ready.device,
        dtype=ready.dtype,
        max_step_tokens=config.schedule.max_step_tokens,
        stops=stops,
        target_profile=_points(measured.target),
        draft_profile=_points(measured.draft),
        batch_profiles={n: _points(own) for n, own in measured.batches.items()},
        padded=tuple(measured.padded),
    )
    writer = Writer(said.trace, header, max_bytes=int(said.trace_mib * (1 << 20)))
    logger.info("recording steps in %s", writer.path)
    return writer


def _points(points: Points) -> list[tuple[int, float]]:
    return [(size, _short(seconds)) for size, seconds in points]


def _short(value: float) -> float:
    """Four significant digits."""
    return float(f"{value:.4g}")


def _rounded(record: StepRecord) -> StepRecord:
    return replace(
        record,
        draft_seconds=_short(record.draft_seconds),
        target_seconds=_short(record.target_seconds),
        host_seconds=_short(record.host_seconds),
        overhead_seconds=_short(record.overhead_seconds),
        parts=[
            replace(part, confidences=[_short(sure) for sure in part.confidences])
            if part.confidences
            else part
            for part in record.parts
        ],
        hindsight=[
            replace(found, guesses=[(_short(sure), hit) for sure, hit in found.guesses])
            for found in record.hindsight
        ],
    )


def _create(path: Path) -> Path:
    """An empty file of that name, or of the next one that is free."""
    number = 1
    while True:
        name = path if number == 1 else path.with_name(f"{path.stem}.{number}{path.suffix}")
        try:
            name.open("xb").close()
            return name
        except FileExistsError:
            number += 1
        except OSError as error:
            raise TraceError(
                f"trace {os.fspath(name)!r} cannot be written: {error.strerror}"
            ) from None


def read_trace(path: Path) -> Trace:
    """All of a trace. Raises TraceError for what is not one, or not whole."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise TraceError(f"trace {os.fspath(path)!r} cannot be read: {error.strerror}") from None
    name = os.fspath(path)
    if not lines[0]:
        raise TraceError(f"{name!r} is no trace: it is empty" if len(lines) == 1 else _not(name))
    if lines.pop():
        raise TraceError(
            f"line {len(lines) + 1} of trace {name!r} is cut off; remove it to replay the others"
        )
    header = _header(name, lines[0])
    return Trace(header, list(_steps(name, lines[1:], header)))


def _header(name: str, line: bytes) -> Header:
    try:
        said = msgspec.json.decode(line)
        if said["format"] != FORMAT:
            raise TraceError(_not(name))
        if said["version"] != VERSION:
            raise TraceError(
                f"trace {name!r} is of version {said['version']!r:.20}; this program reads version"
                f" {VERSION}"
            )
        header = msgspec.convert(said, Header, str_keys=True)
    except (msgspec.MsgspecError, KeyError, TypeError, UnicodeDecodeError, RecursionError):
        raise TraceError(_not(name)) from None
    if wrong := _wrong(header):
        raise TraceError(f"the first line of trace {name!r} contradicts itself: {wrong}")
    return header


def _wrong(header: Header) -> str:
    """What no engine writes there, if anything."""
    if not 0 <= header.k_max <= DEEPEST:
        return f"k_max must be from 0 to {DEEPEST}, but is {header.k_max}"
    if not 1 <= header.max_step_tokens <= _MOST_ROWS:
        return f"max_step_tokens must be from 1 to {_MOST_ROWS}, but is {header.max_step_tokens}"
    profiles = [header.target_profile, header.draft_profile, *header.batch_profiles.values()]
    for size, seconds in [point for points in profiles for point in points]:
        if not (1 <= size <= _MOST_ROWS and 0 <= seconds <= LONGEST):
            return f"a profile says {seconds:g} seconds for {size} rows"
    for points in profiles:
        if len({size for size, _ in points}) < len(points):
            return "a profile has two times for a size"
    if not all(a < b for a, b in pairwise((0, *header.padded))):
        return "numbers of rows that forwards are padded to do not rise"
    if not all(1 <= n <= _MOST_ROWS for n in header.batch_profiles):
        return "a profile is of no sequences"
    return ""


def _steps(name: str, lines: list[bytes], header: Header) -> Iterator[StepRecord]:
    decoder = msgspec.json.Decoder(StepRecord)
    for number, line in enumerate(lines, start=2):
        try:
            step = decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise TraceError(f"line {number} of trace {name!r} is no step: {error}") from None
        if not _consistent(step, header.max_step_tokens):
            raise TraceError(f"line {number} of trace {name!r} contradicts itself")
        yield step


def _consistent(step: StepRecord, most: int) -> bool:
    """Whether counts fit each other, as those of a recorded step do; `most` rows were allowed,
    besides one for each sequence."""
    seconds = (step.draft_seconds, step.target_seconds, step.host_seconds)
    return (
        all(0 <= each <= LONGEST for each in seconds)
        and abs(step.overhead_seconds) <= LONGEST
        and 0 <= step.catch_up_rows <= _MOST_ROWS * DEEPEST
        and step.rows <= most + len(step.parts)
        and all(_possible(part) for part in step.parts)
        and all(
            found.position >= 0 and _are_sure([sure for sure, _ in found.guesses])
            for found in step.hindsight
        )
    )


def _possible(part: Part) -> bool:
    return (
        min(part.position, part.context, part.rows, part.right, part.k) >= 0
        and 0 <= part.accepted <= part.proposed <= part.drafted <= DEEPEST
        and part.right <= part.tried <= part.tokens <= part.accepted + 1
        and (not part.confidences or len(part.confidences) >= part.tried)
        and _are_sure(part.confidences)
    )


def _are_sure(confidences: list[float]) -> bool:
    return all(abs(sure) <= _MOST_SURE for sure in confidences)


def _not(name: str) -> str:
    return f"{name!r} is no trace: its first line does not say {FORMAT!r}"

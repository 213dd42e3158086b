"""The trace of an engine: one StepRecord per step, if the operator asked for it. JSON lines: a
header, then one line per step.

No token, no text, no name: sizes, seconds, and for each generated position whether a draft token
was right and how confident the draft was. Every line is complete once written. A reader accepts
this version only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from engine.config import EngineConfig
from engine.control.profile import Profile
from engine.errors import TraceError
from engine.messages import Ready
from engine.scheduling.step_record import Depth, Seconds, SequenceStep, StepRecord
from engine.step.bounded_log import BoundedLog

Size = Annotated[int, Meta(ge=1, le=1 << 20)]  # rows or sequences
Times = list[tuple[Size, Seconds]]

FORMAT, VERSION = "foredraft trace", 2
_LONGEST = 1e6  # maximum host seconds of a step


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that the numbers depend on. Profiles: (size, seconds) as measured at start; for
    some numbers of sequences also the target's own profile. `stops`: each draft step was a forward
    of its own, so drafting could stop after any step."""

    format: str = FORMAT
    version: int = VERSION
    k_max: Depth
    proposer: str
    controller: str
    device: str
    dtype: str
    max_step_tokens: Size
    stops: bool = True
    target_profile: Times = []
    draft_profile: Times = []
    batch_profiles: dict[Size, Times] = {}
    padded: tuple[int, ...] = ()

    @property
    def profile(self) -> Profile:
        """Return the profile that the engine's controller got, without host and context costs."""
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


class Writer(BoundedLog):
    """Writes a new file; if the name is taken, the next free numbered one. Raises TraceError."""

    def __init__(self, path: str, header: Header, *, max_bytes: int) -> None:
        file, name = _create(Path(path))
        super().__init__(file, name, "steps", max_bytes)
        self.append(_line(header))

    def write(self, record: StepRecord) -> None:
        if not self.ended:
            self.append(_line(record))


def open_trace(
    config: EngineConfig, ready: Ready, measured: Profile, *, stops: bool
) -> Writer | None:
    """Return the writer, if `speculation.trace` names a file. `measured`: the profile at start;
    `stops`: see Header. Raises TraceError."""
    speculation = config.speculation
    if speculation.trace is None:
        return None
    header = Header(
        k_max=ready.k_max,
        proposer=ready.proposer,
        controller=ready.controller,
        device=ready.device,
        dtype=ready.dtype,
        max_step_tokens=config.schedule.max_step_tokens,
        stops=stops,
        target_profile=list(measured.target),
        draft_profile=list(measured.draft),
        batch_profiles={n: list(points) for n, points in measured.batches.items()},
        padded=tuple(measured.padded),
    )
    return Writer(speculation.trace, header, max_bytes=int(speculation.trace_mib * (1 << 20)))


def _line(value: msgspec.Struct) -> bytes:
    return msgspec.json.encode(_short(msgspec.to_builtins(value))) + b"\n"


def _short(value: Any) -> Any:
    """Return the value with floats rounded to four significant digits."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _short(each) for key, each in value.items()}
    return [_short(each) for each in value] if isinstance(value, (list, tuple)) else value


def _create(path: Path) -> tuple[int, str]:
    """Create a file with that name, or with the next free numbered one; return it and its name."""
    number = 1
    while True:
        name = path if number == 1 else path.with_name(f"{path.stem}.{number}{path.suffix}")
        try:
            return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), os.fspath(name)
        except FileExistsError:
            number += 1
        except OSError as error:
            raise TraceError(
                f"trace {os.fspath(name)!r} cannot be written: {error.strerror}"
            ) from None


def read_trace(path: Path) -> Trace:
    """Return the trace in a file. Raises TraceError if it is not a complete trace."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise TraceError(f"trace {os.fspath(path)!r} cannot be read: {error.strerror}") from None
    name = os.fspath(path)
    if lines == [b""]:
        raise TraceError(f"{name!r} is not a trace: it is empty")
    if lines.pop():
        raise TraceError(
            f"line {len(lines) + 1} of trace {name!r} is cut off; remove it to replay the others"
        )
    header = _header(name, lines[0])
    return Trace(header, list(_steps(name, lines[1:], header)))


def _header(name: str, line: bytes) -> Header:
    try:
        fields = msgspec.json.decode(line)
        if fields["format"] != FORMAT:
            raise TraceError(_not(name))
        version = fields["version"]
    except (msgspec.MsgspecError, KeyError, TypeError, UnicodeDecodeError, RecursionError):
        raise TraceError(_not(name)) from None
    if version != VERSION:
        raise TraceError(
            f"trace {name!r} is of version {version!r:.20}; this program reads version {VERSION}"
        )
    try:
        header = msgspec.convert(fields, Header, str_keys=True)
    except msgspec.MsgspecError as error:
        raise TraceError(f"the first line of trace {name!r} is not a header: {error}") from None
    profiles = [header.target_profile, header.draft_profile, *header.batch_profiles.values()]
    repeats = any(len(dict(points)) < len(points) for points in profiles)
    if repeats or not all(a < b for a, b in pairwise((0, *header.padded))):
        raise TraceError(f"the first line of trace {name!r} contradicts itself")
    return header


def _steps(name: str, lines: list[bytes], header: Header) -> Iterator[StepRecord]:
    decoder = msgspec.json.Decoder(StepRecord)
    for number, line in enumerate(lines, start=2):
        try:
            step = decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise TraceError(f"line {number} of trace {name!r} is not a step: {error}") from None
        if not _consistent(step, header.max_step_tokens):
            raise TraceError(f"line {number} of trace {name!r} contradicts itself")
        yield step


def _consistent(step: StepRecord, most: int) -> bool:
    """Whether the counts can be those of a recorded step. `most`: rows allowed, besides one for
    each sequence."""
    return (
        max(abs(step.host_seconds), abs(step.overhead_seconds)) <= _LONGEST
        and step.rows <= most + len(step.parts)
        and all(_possible(part) for part in step.parts)
    )


def _possible(part: SequenceStep) -> bool:
    return (
        part.accepted <= part.proposed <= max(part.drafted, len(part.depths))
        and part.right <= part.tried <= part.tokens <= part.accepted + 1
        and (not part.confidences or len(part.confidences) >= part.tried)
    )


def _not(name: str) -> str:
    return f"{name!r} is not a trace: its first line does not name {FORMAT!r}"

"""The log of ids: what finished requests read and wrote, where the operator asked for it, so that a
draft can be trained on it. JSON lines: a header, then `{"prompt": [...], "reply": [...]}` each.

It is the text of users as token ids. Nobody but the owner may read the file, which goes on from one
start of the engine to the next and ends at its size.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

from engine.config import SpeculationConfig
from engine.errors import TraceError
from engine.scheduling.sequence import Sequence

logger = logging.getLogger(__name__)


class Header(msgspec.Struct, frozen=True):
    """What the ids are of."""

    vocab_size: int
    format: str = "foredraft ids"
    version: int = 1


class Finished(msgspec.Struct, frozen=True):
    """Ids of one request."""

    prompt: list[int]
    reply: list[int]


class IdLog:
    """Appends, each line at once; ends by itself at `max_bytes` or when the file cannot be written,
    with one line in the log. Raises TraceError when opened."""

    def __init__(self, path: str, vocab_size: int, *, max_bytes: int) -> None:
        self._path, header = path, msgspec.json.encode(Header(vocab_size)) + b"\n"
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            known = Path(path).read_bytes()
            if known and not known.startswith(header):
                raise TraceError(f"{path!r} is no log of ids of this target; it is left alone")
            os.ftruncate(self._file, size := known.rfind(b"\n") + 1)  # a line that was cut off
        except OSError as error:
            raise TraceError(f"ids cannot be recorded in {path!r}: {error.strerror}") from None
        self._left: int = max_bytes - size
        if not known:
            self._write(header)

    def write(self, seq: Sequence) -> None:
        """One request that has ended, if anything was written for it."""
        prompt, reply = seq.tokens[: seq.num_prompt], seq.tokens[seq.num_prompt :]
        if reply and self._left > 0:
            self._write(msgspec.json.encode(Finished(prompt, reply)) + b"\n")

    def _write(self, line: bytes) -> None:
        why = "it has reached its size limit" if len(line) > self._left else ""
        try:
            self._left -= len(line) if why else os.write(self._file, line)
        except OSError as error:
            why = f"it cannot be written ({error.strerror})"
        if why:
            self._left = 0
            logger.warning("no more ids are recorded in %s: %s", self._path, why)


def open_id_log(said: SpeculationConfig, vocab_size: int) -> IdLog | None:
    """The log, if `speculation.record_ids` names a file. Raises TraceError."""
    if said.record_ids is None:
        return None
    logger.info("recording the ids of finished requests in %s", said.record_ids)
    return IdLog(said.record_ids, vocab_size, max_bytes=int(said.record_ids_mib * (1 << 20)))


def read_ids(path: str, vocab_size: int) -> list[Finished]:
    """All whole lines. Raises TraceError for what is no log of ids of so many."""
    try:
        first, *lines = Path(path).read_bytes().split(b"\n")[:-1] or [b""]
        if msgspec.json.decode(first, type=Header) != Header(vocab_size):
            raise TraceError(
                f"{path} records the ids of another vocabulary than of {vocab_size} ids"
            )
        found = [msgspec.json.decode(line, type=Finished) for line in lines]
    except OSError as error:
        raise TraceError(f"cannot read the ids in {path}: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise TraceError(f"{path} is no log of ids, as speculation.record_ids makes it") from None
    if not all(
        each.prompt and min(ids) >= 0 and max(ids) < vocab_size
        for each in found
        for ids in (each.prompt + each.reply,)
    ):
        raise TraceError(f"{path} contradicts itself: it has ids beyond {vocab_size}, or no prompt")
    return found

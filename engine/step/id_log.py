"""The log of ids: what finished requests read and wrote, where the operator asked for it, so that a
draft can be trained on it. JSON lines: a header, then `{"prompt": [...], "reply": [...]}` each.

It is the text of users as token ids. Nobody but the owner may read the file, which goes on from one
start of the engine to the next and ends at its size.
"""

from __future__ import annotations

import logging
import os
import stat
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Annotated

import msgspec

from engine.config import SpeculationConfig
from engine.errors import TraceError
from engine.scheduling.sequence import Sequence

logger = logging.getLogger(__name__)

Ids = Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(min_length=1)]


class Finished(msgspec.Struct):
    prompt: Ids
    reply: Ids


def _header(vocab_size: int) -> bytes:
    return b'{"format":"foredraft ids","version":1,"vocab_size":%d}\n' % vocab_size


class IdLog:
    """Appends, each line at once; ends by itself at `max_bytes` or when the file cannot be written,
    with one line in the log. Raises TraceError when opened."""

    def __init__(self, path: str, vocab_size: int, *, max_bytes: int) -> None:
        self._path, header = path, _header(vocab_size)
        try:
            name = os.path.expanduser(path)
            self._file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            size = self._prepare(header)
        except OSError as error:
            raise TraceError(f"ids cannot be recorded in {path!r}: {error.strerror}") from None
        self._left: int = max_bytes - size
        if not size:
            self._write(header)
        logger.info("recording the ids of finished requests in %s", path)

    def _prepare(self, header: bytes) -> int:
        """For the owner alone, and without a last line that was cut off; the bytes that are left.
        Reads the two ends of the file, however large it is. Raises OSError, and TraceError."""
        found = os.fstat(self._file)
        if not stat.S_ISREG(found.st_mode):
            raise TraceError(f"ids cannot be recorded in {self._path!r}: it is no regular file")
        whole = 0
        if found.st_size:
            with mmap(self._file, 0, access=ACCESS_READ) as known:
                if known[: len(header)] != header:
                    what = "is no log of ids of this target; it is left alone"
                    raise TraceError(f"{self._path!r} {what}")
                whole = known.rfind(b"\n") + 1
        os.fchmod(self._file, 0o600)
        os.ftruncate(self._file, whole)
        return whole

    def write(self, seq: Sequence) -> None:
        """One request that has ended, if it was not broken off and anything was written for it."""
        prompt, reply = seq.tokens[: seq.num_prompt], seq.tokens[seq.num_prompt :]
        if reply and seq.finish in ("stop", "length") and self._left > 0:
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
    most = int(said.record_ids_mib * (1 << 20))
    return IdLog(said.record_ids, vocab_size, max_bytes=most) if said.record_ids else None


def read_ids(path: str, vocab_size: int) -> list[Finished]:
    """All whole lines. Raises TraceError for what is no log of ids of so many."""
    try:
        header, *lines = Path(path).read_bytes().splitlines(keepends=True) or [b""]
        found = [msgspec.json.decode(line, type=Finished) for line in lines if line[-1:] == b"\n"]
    except OSError as error:
        raise TraceError(f"cannot read the ids in {path}: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        header, found = b"", []
    largest = max((max(each.prompt + each.reply) for each in found), default=0)
    if header != _header(vocab_size) or largest >= vocab_size:
        raise TraceError(f"{path} is no log of ids, by speculation.record_ids, of this target")
    return found

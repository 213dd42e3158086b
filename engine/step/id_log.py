"""The log of token ids of finished requests, for training a draft on them; off unless configured.
JSON lines: a header, then one `{"prompt": [...], "reply": [...]}` per request.

The ids are the users' text, so only the owner may read the file. A restarted engine appends to it,
and its size is limited.
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
    """Appends each line at once. Stops for good at `max_bytes` or when the file cannot be written,
    with one warning in the log. The constructor raises TraceError."""

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
        """Restrict the file to its owner, remove an incomplete last line, return its size. Reads
        only the two ends of the file, however large it is. Raises OSError and TraceError."""
        status = os.fstat(self._file)
        if not stat.S_ISREG(status.st_mode):
            raise TraceError(f"ids cannot be recorded in {self._path!r}: it is not a regular file")
        whole = 0
        if status.st_size:
            with mmap(self._file, 0, access=ACCESS_READ) as data:
                if data[: len(header)] != header:
                    what = "is not a log of this target's ids; it is left unchanged"
                    raise TraceError(f"{self._path!r} {what}")
                whole = data.rfind(b"\n") + 1
        os.fchmod(self._file, 0o600)
        os.ftruncate(self._file, whole)
        return whole

    def write(self, seq: Sequence) -> None:
        """Log one finished request, unless it was aborted, failed or generated nothing."""
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


def open_id_log(config: SpeculationConfig, vocab_size: int) -> IdLog | None:
    """Return the log, if `speculation.record_ids` names a file. Raises TraceError."""
    max_bytes = int(config.record_ids_mib * (1 << 20))
    return IdLog(config.record_ids, vocab_size, max_bytes=max_bytes) if config.record_ids else None


def read_ids(path: str, vocab_size: int) -> list[Finished]:
    """Return all complete lines. Raises TraceError if it is no id log for this vocabulary size."""
    try:
        header, *lines = Path(path).read_bytes().splitlines(keepends=True) or [b""]
        logged = [msgspec.json.decode(line, type=Finished) for line in lines if line[-1:] == b"\n"]
    except OSError as error:
        raise TraceError(f"cannot read the ids in {path}: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        header, logged = b"", []
    largest = max((max(each.prompt + each.reply) for each in logged), default=0)
    if header != _header(vocab_size) or largest >= vocab_size:
        raise TraceError(f"{path} was not written by speculation.record_ids for this target")
    return logged

"""The log of token ids of finished requests, for training a draft on them; off unless configured.
JSON lines: a header, then one `{"prompt": [...], "reply": [...]}` per request.

The ids are the users' text, so only the owner may read the file. A restarted engine appends to it,
and its size is limited.
"""

from __future__ import annotations

import os
import stat
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Annotated

import msgspec

from engine.config import SpeculationConfig
from engine.errors import TraceError
from engine.scheduling.sequence import Sequence
from engine.step.bounded_log import BoundedLog

Ids = Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(min_length=1)]


class Finished(msgspec.Struct):
    prompt: Ids
    reply: Ids


def _header(vocab_size: int) -> bytes:
    return b'{"format":"foredraft ids","version":1,"vocab_size":%d}\n' % vocab_size


class IdLog(BoundedLog):
    """A log that may exist already. The constructor raises TraceError."""

    def __init__(self, path: str, vocab_size: int, *, max_bytes: int) -> None:
        header = _header(vocab_size)
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
            file = os.open(os.path.expanduser(path), flags, 0o600)
            size = _prepare(file, path, header)
        except OSError as error:
            raise TraceError(f"ids cannot be recorded in {path!r}: {error.strerror}") from None
        super().__init__(file, path, "ids of finished requests", max_bytes - size)
        if not size:
            self.append(header)

    def write(self, seq: Sequence) -> None:
        """Log one finished request, unless it was aborted, failed or generated nothing."""
        prompt, reply = seq.tokens[: seq.num_prompt], seq.tokens[seq.num_prompt :]
        if reply and seq.finish in ("stop", "length") and not self.ended:
            self.append(msgspec.json.encode(Finished(prompt, reply)) + b"\n")


def _prepare(file: int, path: str, header: bytes) -> int:
    """Restrict the file to its owner, remove an incomplete last line, return its size. Reads only
    the two ends of the file, however large it is. Raises OSError and TraceError."""
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        raise TraceError(f"ids cannot be recorded in {path!r}: it is not a regular file")
    whole = 0
    if status.st_size:
        with mmap(file, 0, access=ACCESS_READ) as data:
            if not header.startswith(data[: len(header)]):
                what = "is not a log of this target's ids; it is left unchanged"
                raise TraceError(f"{path!r} {what}")
            whole = data.rfind(b"\n") + 1
    os.fchmod(file, 0o600)
    os.ftruncate(file, whole)
    return whole


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

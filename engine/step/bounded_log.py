"""BoundedLog: a file of lines with a maximum size."""

from __future__ import annotations

import logging
import os
from weakref import finalize

logger = logging.getLogger(__name__)


class BoundedLog:
    """Appends lines to the open descriptor `file`, at most `left` bytes, each at once. Stops for
    good at that size or when the file cannot be written; `ended` then says why. `what`: lines."""

    def __init__(self, file: int, path: str, what: str, left: int) -> None:
        self.path, self.ended = path, ""
        self._file, self._what, self._left = file, what, left
        finalize(self, os.close, file)
        logger.info("recording %s in %s", what, path)

    def append(self, line: bytes) -> None:
        if self.ended:
            return
        try:
            if len(line) > self._left:
                self.ended = "it has reached its size limit"
            elif os.write(self._file, line) < len(line):
                self.ended = "it cannot be written (only a part of a line was)"
        except OSError as error:
            self.ended = f"it cannot be written ({error.strerror})"
        self._left -= len(line)
        if self.ended:
            logger.warning("no more %s are recorded in %s: %s", self._what, self.path, self.ended)

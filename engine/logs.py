"""The log, of both processes: lines for people, or JSON for machines, on stderr.

What is logged of a request is counted, timed or drawn from fixed sets: never a prompt, a reply, a
key or what else a client wrote.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["text", "json"]
# By which a front end tells its engine process; the operator's keys have two underscores.
VARIABLE = "FOREDRAFT_LOG_FORMAT"
# On a terminal a front end may have drawn how far a start is, where the next line is to stand.
CLEAR = "\r\x1b[K"


class JsonFormatter(logging.Formatter):
    """One object a line: `time` (UTC), `level`, `logger`, `message`, `exception` if there is one,
    and the fields of a `say`."""

    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": getattr(record, "event", None) or record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said)


def say(logger: logging.Logger, level: int, message: str, fields: dict[str, Any]) -> None:
    """A message and its fields: as `name=value` behind it, or as members of the JSON. Those that
    are None are left out."""
    if logger.isEnabledFor(level):
        known = {name: value for name, value in fields.items() if value is not None}
        text = " ".join([message, *(f"{name}={value}" for name, value in known.items())])
        logger.log(level, "%s", text, extra={"event": message, "fields": known})


def configure_logging(level: str, form: str | None = None) -> None:
    """One line per event. `form`: a LogFormat, for the processes that this one starts, too; None:
    as the process that started this one has it."""
    if form is None:
        form = os.environ.get(VARIABLE, "text")
    os.environ[VARIABLE] = form
    handler, drawn = logging.StreamHandler(sys.stderr), sys.stderr.isatty()
    text = logging.Formatter(f"{CLEAR * drawn}%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if form == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(form == "json")
